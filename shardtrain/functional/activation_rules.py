"""Apply a layout's rules to Flax's sharding constraints while a model is traced; refuse names without a rule.

Flax itself silently replicates dims without a rule and drops conflicting axes (docs/decisions/0003, 0012).
Next: `train_step/gradients.py`, which traces models under these rules.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
from flax.core import Scope
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import AbstractMesh, Mesh

from shardtrain.axes import CONTEXT, TENSOR
from shardtrain.errors.messages import near, problems_error
from shardtrain.errors.user_code import UserCodeFailed
from shardtrain.functional import per_device as _installed  # noqa: F401
from shardtrain.functional.collective_matmul import CollectiveMatmul
from shardtrain.functional.context_attention import ContextAttention
from shardtrain.functional.expert_exchange import exchange_tokens
from shardtrain.functional.run_trace import TRACE, RunTrace
from shardtrain.sharding.axis_sizes import is_one_device
from shardtrain.sharding.placement_problems import format_rules, format_ways
from shardtrain.sharding.rules import Rules, find_repeated


class _NameRecorder:
    """A dim name that equals no other, and records the names that it is compared with."""

    def __init__(self) -> None:
        self.names: list[Any] = []

    def __eq__(self, name: object) -> bool:
        self.names.append(name)
        return False

    __hash__ = object.__hash__


class _StrictRules(tuple):
    """(dim, axes) rules for Flax that record what it would silently drop; Flax requires a tuple.

    For each constraint Flax iterates over the rules, and compares the name of each with the dims of the
    array. The first rule is a `_NameRecorder`, which so learns the dims; then follow rules for exactly
    these dims.
    """

    problems: dict[str, None]
    """Messages about the constraints of the traced function, as keys, in order."""
    unruled: dict[str, None]
    """Dim names without a rule, as keys."""
    is_one_device: bool
    unnamed: str

    def __iter__(self) -> Iterator[tuple[Any, tuple[str, ...] | None]]:
        rules: Rules = dict(super().__iter__())
        recorder = _NameRecorder()
        yield recorder, None
        # Flax has now compared the recorder with every dim of the array
        dims = [name for name in recorder.names if isinstance(name, str)]
        if not self.is_one_device:
            self._check(rules, tuple(recorder.names), dims)
        # each axis goes to the first dim that asks for it, so that Flax accepts what has been recorded
        taken: set[str] = set()
        for dim in dims:
            free = tuple(axis for axis in rules.get(dim, ()) if axis not in taken)
            taken.update(free)
            yield dim, free or None

    def _check(self, rules: Rules, names: tuple[Any, ...], dims: list[str]) -> None:
        unruled = [dim for dim in dims if dim not in rules] if self.unnamed == "refuse" else []
        problems = [f"no rule for dim {near(dim, rules)}" for dim in unruled]
        used = find_repeated(axis for dim in dims for axis in rules.get(dim, ()))
        problems += [f"axis {axis!r} shards {n} dims of one array" for axis, n in used]
        self.unruled.update(dict.fromkeys(unruled))
        self.problems.update(dict.fromkeys(f"{names} ({_line()}): {text}" for text in problems))


def _line() -> str:
    """Return the file and line of the model that has the constraint being traced."""
    frame = inspect.currentframe()
    while frame is not None and _is_machinery(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return "?" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_machinery(module: str) -> bool:
    """Return whether a frame of this module belongs to jax, Flax or this file, not to the model."""
    return module == __name__ or module.split(".")[0] in ("flax", "jax")


_RULES_IN_USE: Any = jax.make_user_context(default_value=None)
"""Part of the key of jax's trace caches; without it a block traced under one layout is reused under
another."""


_NOTE: ContextVar[Callable[[str], None] | None] = ContextVar("note", default=None)


@contextmanager
def noting(note: Callable[[str], None]) -> Iterator[None]:
    """Within this context, models traced under `activation_rules` log the attention that they compute.

    Args:
      note: receives each line once.
    """
    seen: set[str] = set()

    def once(text: str) -> None:
        if text not in seen:
            seen.add(text)
            note(text)

    with _set(_NOTE, once):
        yield


@contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def activation_rules(
    rules: Rules,
    mesh: Mesh | AbstractMesh,
    unnamed: str = "refuse",
    context_attention: str = "ring",
    collective_matmul: bool = False,
    *,
    any_mesh: bool = False,
    **ops: Any,
) -> Iterator[None]:
    """Within this context, `nn.with_logical_constraint` follows these rules strictly.

    Models that are called here compute with the operations of a run (`run_trace.py`).

    Args:
      rules: dim -> axes for activations.
      mesh: a mesh with these axes. On one device every constraint is accepted.
      unnamed: "refuse" dims without a rule, or "replicate" them.
      context_attention: how attention is computed where sequences are sharded, see `ContextAttention`.
      collective_matmul: whether products are computed while a sharded sequence is exchanged, see
        `CollectiveMatmul`.
      any_mesh: whether the trace is for meshes that are not chosen yet, though this one has one device.
      ops: fields of `Ops` in place of those of a run, hashable; None replaces nothing.

    Raises:
      ValueError: (at exit) lists every constraint with a dim without a rule or an axis used twice in one
        array.
    """
    pairs = tuple(rules.items())
    strict = _StrictRules(pairs)
    strict.problems, strict.unruled, strict.unnamed = {}, {}, unnamed
    strict.is_one_device = is_one_device(mesh.shape)
    of_run = {
        "attention": ContextAttention(context_attention) if mesh.shape.get(CONTEXT, 1) > 1 else None,
        "experts": None if strict.is_one_device else exchange_tokens,
        "matmul": CollectiveMatmul() if collective_matmul and mesh.shape.get(TENSOR, 1) > 1 else None,
        **{name: value for name, value in ops.items() if value is not None},
    }
    facts: dict[str, Any] = {"unnamed": unnamed, "is_one_device": strict.is_one_device, "any_mesh": any_mesh}
    trace = RunTrace(ops=of_run, note=_NOTE.get(), **facts)
    # a block that was traced before is traced again if a log is asked for
    key = (pairs, *facts.values(), *of_run.values(), trace.note)
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        nn.logical_axis_rules(strict),
        _RULES_IN_USE(key),
        _set(TRACE, trace),
    ):
        try:
            yield
        except (ValueError, UserCodeFailed) as error:
            # the loss calls the model, and its exceptions are wrapped as those of user code
            found = str(error.__cause__ if isinstance(error, UserCodeFailed) else error)
            if any(text in found for text in _OVER_REPLICAS):
                raise ValueError(own_constraint_text(found)) from error
            raise
    if strict.problems:
        # jax caches these traces, and would not check their constraints again
        jax.clear_caches()
        raise ValueError(constraints_text(list(strict.problems), list(strict.unruled)))


def constraints_text(problems: list[str], unruled: list[str]) -> str:
    """Format the error for constraints that do not fit the rules, with rules that would."""
    text = str(problems_error("constraints on activations cannot be followed", problems))
    if not unruled:
        return text
    rules = format_rules("activations", dict.fromkeys(unruled, ()))
    return text + format_ways([f"rules for them, as {rules}"])


_OVER_REPLICAS = (
    "cannot appear in with_sharding_constraint spec",
    "passed to with_sharding_constraint can only refer to Auto axes",
)
"""jax's messages about a constraint over a replica axis: with replicas as a vmap, and as a manual axis."""


def own_constraint_text(found: str) -> str:
    """Format the error for jax.lax.with_sharding_constraint over a replica axis."""
    return (
        "the model constrains an activation to a mesh axis over which each index has a batch of its own"
        f" ({found}); name the dims instead, as nn.with_logical_constraint(x, ('batch', None, 'embed')),"
        " where names of mesh axes are understood too"
    )


NO_MESH = AbstractMesh((), ())


def _outside_the_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Scope.param` to see no mesh while a model is traced under our rules.

    Flax evaluates initialisers in `apply` too, to compare shapes, and that of DenseGeneral unboxes a kernel
    before it is reshaped: with a mesh set, its names would be applied to the wrong dims.
    """

    @wraps(original)
    def param(*arguments: Any, **options: Any) -> Any:
        if not isinstance(get_logical_axis_rules(), _StrictRules):
            return original(*arguments, **options)
        with jax.sharding.use_abstract_mesh(NO_MESH):
            return original(*arguments, **options)

    return param


Scope.param = _outside_the_mesh(Scope.param)
