"""Options of how replicas are synchronised: when, what they combine, and how the result is applied.

Next: `replicas.py`, which runs a combiner on a mesh; `train_step/drift.py`, the arithmetic.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import optax

from shardtrain.combine import Combiner, make_combiner
from shardtrain.combine.sync_trigger import ALWAYS, SyncTrigger, make_sync_trigger
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import near, refuse


@dataclass(frozen=True, kw_only=True)
class Outer:
    """The outer optimizer: SGD whose gradient is the negative combined delta.

    The defaults add the combined delta to the parameters.

    Args:
      learning_rate: learning rate of the outer optimizer, which applies the combined delta.
      momentum: factor of the accumulated earlier deltas; 0 keeps none.
      nesterov: whether to use Nesterov momentum, as DiLoCo does.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    learning_rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if not self.learning_rate > 0:
            problems.append(f"learning_rate is {self.learning_rate}; use a number above 0, such as 0.7")
        if not 0 <= self.momentum < 1:
            problems.append(f"momentum is {self.momentum}; use 0 or more and less than 1, such as 0.9")
        if self.nesterov and self.momentum == 0:
            problems.append("nesterov is True, but momentum is 0; give a momentum, such as 0.9")
        refuse("this outer optimizer cannot be used", problems)


class Round(NamedTuple):
    """What replicas do in some steps with what they changed.

    Args:
      fragment: the number of the part of the parameters that is combined.
      combiner: combines the changes of all replicas. If its value is not common, each replica keeps its own
        in place of its changes, and the common parameters stay.
    """

    fragment: int
    combiner: Combiner


@dataclass(frozen=True, kw_only=True)
class Synchronisation:
    """How the replicas of a run are synchronised.

    A subclass may have other `rounds`, at other steps (`is_sent`, and `is_due` for overlap); meshes, islands
    and stages follow them.

    Replicas are the islands if there are several (each the mean or sum over its own devices), else the
    indices of the mesh's data axis.

    Args:
      by: the combiner, by name, such as "mean", "adasum", "int8+adasum" (see `combine.make_combiner`), or
        any `combine.Combiner`.
      on: what is combined: "gradients", or "deltas", the parameter changes that each replica's own optimizer
        computes (Horovod's Adasum, local SGD). With deltas each replica has its own optimizer state.
      every: number of local steps of a replica before what it changed (its delta) is combined; more than 1
        needs on="deltas" (--combine-on deltas).
      inside: how an island reduces the gradients of its own devices before it sends them to other islands:
        to their mean, or to their sum, which is the mean times the number of its replicas.
      outer: the optimizer that applies a combined delta: options of SGD, or in Python any optax
        transformation.
      fragments: number of parts of the parameters that are combined in turn, each once in `every` steps, so
        that less is sent at a time (streaming DiLoCo); each layer of each array is assigned separately, so
        that fragments have similar sizes.
      overlap: number of steps that replicas continue while deltas are sent; the result is then added to the
        parameters that they have reached. At most `every`.
      when: when replicas synchronise: "always" after each `every` steps, or then only if a trigger asks for
        it, such as "drift:0.01": if a replica drifted from the common parameters by more than 1 % of their
        norm. Replicas always synchronise after the last step of a run.
      distance: number of waves, of `every` steps each, that an island may be ahead of the slowest one: it
        pushes what it changed in a wave, and continues from everything pushed so far (wave-synchronous
        parallelism, HetPipe). None merges all replicas together. It applies to islands; the replicas of a
        mesh always merge together.
      synchronous_steps: number of steps at the start of a run in which replicas average their gradients in
        every step; local steps begin after them (post-local SGD, Lin et al. 2018).

    Short form: the name of a preset, such as "diloco" (see `PRESETS`), or a value of `by`.

    Raises:
      ValueError: lists every value of a wrong type, and combinations that are not possible.
    """

    by: str | Combiner = "mean"
    on: Literal["gradients", "deltas"] = "gradients"
    every: int = 1
    inside: Literal["mean", "sum"] = "mean"
    outer: Outer | optax.GradientTransformation = Outer()
    fragments: int = 1
    overlap: int = 0
    when: str = ALWAYS
    distance: int | None = None
    synchronous_steps: int = 0

    @staticmethod
    def short(value: Any) -> "Synchronisation | dict[str, Any] | None":
        """Return a preset, or the fields that a short form sets; None if the value is not a short form."""
        if isinstance(value, str) and value in PRESETS:
            return PRESETS[value]
        return {"by": value} if isinstance(value, str | Combiner) else None

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        problems += [
            f"{name} is {number}; use 1 or more"
            for name, number in (("every (--local-steps)", self.every), ("fragments", self.fragments))
            if number < 1
        ]
        if self.fragments > self.every >= 1:
            problems.append(
                f"fragments is {self.fragments}, one combined at a time, and every is {self.every};"
                f" use {self.every} fragments or fewer"
            )
        if not 0 <= self.overlap <= self.every:
            problems.append(
                f"overlap is {self.overlap} steps, and every (--local-steps) is {self.every}; use 0 to"
                f" {self.every}, as deltas must have arrived when the next ones are sent"
            )
        problems += [
            f"{name} is {value!r}, but gradients are combined in every step; use deltas (--combine-on deltas)"
            for name, value, plain in (
                ("every (--local-steps)", max(self.every, 1), 1),
                ("outer", self.outer, Outer()),
                ("overlap", self.overlap, 0),
                ("when", self.when, ALWAYS),
                ("distance (--clock-distance)", self.distance, None),
                ("synchronous_steps", self.synchronous_steps, 0),
            )
            if value != plain and self.on == "gradients"
        ]
        if self.synchronous_steps < 0:
            problems.append(f"synchronous_steps is {self.synchronous_steps}; use 0 or more")
        problems += self._wave_problems()
        if self.inside == "sum" and self.on == "deltas":
            problems.append("inside is 'sum', but deltas are of an island's own mean gradient; use mean")
        refuse("replicas cannot be synchronised like this", problems)
        if isinstance(self.by, str):
            make_combiner(self.by)
        make_sync_trigger(self.when)
        numbers = [each.fragment for each in self.rounds]
        if self.overlap and len(set(numbers)) < len(numbers):
            raise ValueError(
                f"overlap is {self.overlap}, and rounds combine the same part of the parameters"
                f" ({', '.join(map(str, numbers))}), of which one merge can be under way; use overlap 0"
            )

    def _wave_problems(self) -> list[str]:
        """Return the options that do not work with waves, whose updates are added as they arrive."""
        if self.distance is None:
            return []
        problems = []
        if self.distance < 0:
            problems.append(f"distance is {self.distance} waves; use 0 or more, or None for no waves")
        plain = {
            "by": "mean",
            "outer": Outer(),
            "fragments": 1,
            "overlap": 0,
            "when": ALWAYS,
            "synchronous_steps": 0,
        }
        if type(self).rounds is not Synchronisation.rounds:
            problems.append(
                f"{type(self).__name__} has rounds of its own, and updates of waves (--clock-distance) are"
                " added whole, as they come; use distance None"
            )
        problems += [
            f"{name} is {getattr(self, name)!r}, and updates of waves (--clock-distance) are added whole, as"
            f" they come; use {value!r}"
            for name, value in plain.items()
            if getattr(self, name) != value
        ]
        return problems

    @property
    def simplified(self) -> "Synchronisation":
        """The default synchronisation if this is equivalent: waves of one step, with no island ahead."""
        is_plain = type(self) is Synchronisation and self.distance == 0 and self.every == 1
        return Synchronisation() if is_plain else self

    @property
    def combiner(self) -> Combiner:
        """The combiner itself."""
        return make_combiner(self.by) if isinstance(self.by, str) else self.by

    @property
    def rounds(self) -> tuple[Round, ...]:
        """What replicas combine, in this order; the last one makes the parameters common."""
        return tuple(Round(number, self.combiner) for number in range(self.fragments))

    @property
    def is_mean(self) -> bool:
        """Whether this is ordinary data parallelism with the mean gradient over all examples."""
        return self.by == "mean" and self.on == "gradients"

    @property
    def on_deltas(self) -> bool:
        """Whether each replica has an optimizer of its own."""
        return self.on == "deltas"

    @property
    def outer_optimizer(self) -> optax.GradientTransformation | None:
        """The outer optimizer as an optax transformation; None if combined deltas are only added."""
        if not isinstance(self.outer, Outer):
            return self.outer
        if self.outer == Outer():
            return None
        return optax.sgd(self.outer.learning_rate, self.outer.momentum or None, self.outer.nesterov)

    @property
    def trigger(self) -> SyncTrigger | None:
        """The trigger of `when`; None means always."""
        return make_sync_trigger(self.when)

    @property
    def keeps_drift(self) -> bool:
        """Whether replicas may have different parameters between steps."""
        sometimes = self.when != ALWAYS or self.synchronous_steps > 0
        return self.every > 1 or self.overlap > 0 or sometimes or self.distance is not None

    def is_synchronous(self, step: Any) -> Any:
        """Return whether replicas average their gradients in a step, counted from 1; works inside jit."""
        return step <= self.synchronous_steps

    def is_sent(self, number: int, step: Any, last_step: int = -1) -> Any:
        """Return whether replicas may send the deltas of a round at the end of a step.

        Args:
          number: the number of the round; by default that of a fragment.
          step: counted from 1; also an array inside jit.
          last_step: the last step of the run, which sends everything.

        >>> is_sent = Synchronisation(on="deltas", every=4, fragments=2).is_sent
        >>> [[f for f in (0, 1) if is_sent(f, step)] for step in range(1, 9)]
        [[], [0], [], [1], [], [0], [], [1]]
        """
        return self._is_now(number, step, last_step, 0)

    def is_due(self, number: int, step: Any, last_step: int = -1) -> Any:
        """Return whether the sent deltas of a round are combined at the end of a step, see `is_sent`."""
        if not self.overlap:
            return self.is_sent(number, step, last_step)
        return self._is_now(number, step, last_step, self.overlap)

    def _is_now(self, number: int, step: Any, last_step: int, delay: int) -> Any:
        # fragments are distributed evenly over `every` steps, and the last one ends them
        phase = (number + 1) * self.every // self.fragments + delay
        is_now = ((step - phase) % self.every == 0) | (step == last_step)
        return is_now & (step > self.synchronous_steps)


_DILOCO = Outer(learning_rate=0.7, momentum=0.9, nesterov=True)

PRESETS = {
    "every-step": Synchronisation(),
    "local-sgd": Synchronisation(on="deltas", every=16),
    "diloco": Synchronisation(on="deltas", every=30, outer=_DILOCO),
    "streaming-diloco": Synchronisation(on="deltas", every=30, outer=_DILOCO, fragments=5),
    "adasum-deltas": Synchronisation(by="adasum", on="deltas"),
    "hierarchical": Synchronisation(on="deltas", every=4),
    "wsp": Synchronisation(on="deltas", every=4, distance=4),
}
"""Name -> a way to synchronise. "every-step": the mean gradient in each step. "local-sgd": replicas take 16
steps alone, then their changes are averaged (Stich 2019). "diloco": 30 steps alone, and Nesterov momentum
over the averages (Douillard et al. 2023, which takes 500). "streaming-diloco": the same in 4 parts, one at a
time (Douillard et al. 2025, without its overlap). "adasum-deltas": Horovod's Adasum, in each step.
"hierarchical": for several islands: devices average in every step, islands synchronise every 4. "wsp":
islands push their changes every 4 steps, and may be 4 such waves ahead (Park et al. 2020, HetPipe)."""


def preset(name: str) -> Synchronisation:
    """Return a preset by its name.

    Raises:
      ValueError: there is none of this name.
    """
    if name not in PRESETS:
        raise ValueError(f"synchronisation is {name!r}; {near(name, list(PRESETS))}")
    return PRESETS[name]
