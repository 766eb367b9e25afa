"""Make Flax's own sharding constraints follow a layout, strictly, while a model is traced.

Flax replicates what has no rule and drops what does not fit, silently; see docs/decisions/0003 and 0012.
Next: `train_step/gradients.py`, which traces models under these rules.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
from flax.core import Scope
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import AbstractMesh, Mesh

from shardtrain.errors.messages import near, problems_error
from shardtrain.errors.user_code import UserCodeFailed
from shardtrain.sharding.axis_sizes import is_one_device
from shardtrain.sharding.placement_problems import rules_text, ways_text
from shardtrain.sharding.rules import Rules, repeated


class _Ask:
    """A dim name that is equal to none, and remembers the names that it was compared with."""

    def __init__(self) -> None:
        self.names: list[Any] = []

    def __eq__(self, name: object) -> bool:
        self.names.append(name)
        return False

    __hash__ = object.__hash__


class _StrictRules(tuple):
    """(dim, axes) rules that note what Flax would pass over; a tuple, for Flax insists on one.

    Flax looks for each rule's name among the dims of the array in turn: the first, an `_Ask`, sees them
    all. So each array is given rules for its own dims, and what is wrong with them is kept.
    """

    problems: dict[str, None]
    unknown: dict[str, None]
    one_device: bool
    unnamed: str

    def __iter__(self) -> Iterator[tuple[Any, tuple[str, ...] | None]]:
        rules: Rules = dict(super().__iter__())
        ask = _Ask()
        yield ask, None
        dims = [name for name in ask.names if isinstance(name, str)]
        if not self.one_device:
            self._note(rules, tuple(ask.names), dims)
        taken: set[str] = set()
        for dim in dims:
            free = tuple(axis for axis in rules.get(dim, ()) if axis not in taken)
            taken.update(free)
            yield dim, free or None

    def _note(self, rules: Rules, names: tuple[Any, ...], dims: list[str]) -> None:
        unknown = [dim for dim in dims if dim not in rules] if self.unnamed == "refuse" else []
        problems = [f"no rule for dim {near(dim, rules)}" for dim in unknown]
        used = repeated(axis for dim in dims for axis in rules.get(dim, ()))
        problems += [f"axis {axis!r} shards {n} dims of one array" for axis, n in used]
        self.unknown.update(dict.fromkeys(unknown))
        self.problems.update(dict.fromkeys(f"{names} ({_line()}): {problem}" for problem in problems))


def _line() -> str:
    """Where the model asks for a constraint."""
    frame = inspect.currentframe()
    while frame is not None and _is_machinery(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return "?" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_machinery(module: str) -> bool:
    return module == __name__ or module.split(".")[0] in ("flax", "jax")


_RULES_IN_USE: Any = jax.make_user_context(default_value=None)
"""Part of the key of jax's trace caches: without it a block traced under one layout is used in another."""


@contextmanager
def activation_rules(rules: Rules, mesh: Mesh | AbstractMesh, unnamed: str = "refuse") -> Iterator[None]:
    """While a function is traced under this, its `nn.with_logical_constraint` follow these rules.

    Args:
      rules: dim -> axes for activations.
      mesh: the mesh that has these axes. On one device anything goes.
      unnamed: "refuse" dims without a rule, or "replicate" them.

    Raises:
      ValueError: (at the end) every constraint with a dim without a rule, or an axis used twice in one array.
    """
    pairs = tuple(rules.items())
    strict = _StrictRules(pairs)
    strict.problems, strict.unknown, strict.unnamed = {}, {}, unnamed
    strict.one_device = is_one_device(mesh.shape)
    key = (pairs, unnamed, strict.one_device)
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        nn.logical_axis_rules(strict),
        _RULES_IN_USE(key),
    ):
        try:
            yield
        except (ValueError, UserCodeFailed) as error:
            # the model is called by the loss, whose exceptions are told as the user's
            found = str(error.__cause__ if isinstance(error, UserCodeFailed) else error)
            if "cannot appear in with_sharding_constraint spec" in found:
                raise ValueError(own_constraint_text(found)) from error
            raise
    if strict.problems:
        # jax keeps traces in which these constraints would not be asked about again
        jax.clear_caches()
        raise ValueError(constraints_text(list(strict.problems), list(strict.unknown)))


def constraints_text(problems: list[str], unknown: list[str]) -> str:
    """The error for constraints that cannot be followed, with rules that would do."""
    text = str(problems_error("constraints on activations cannot be followed", problems))
    if not unknown:
        return text
    rules = rules_text("activations", dict.fromkeys(unknown, ()))
    return text + ways_text([f"rules for them, as {rules}"])


def own_constraint_text(found: str) -> str:
    """The error for jax.lax.with_sharding_constraint over an axis whose indices are replicas."""
    return (
        "the model constrains an activation to a mesh axis over which each index has a batch of its own"
        f" ({found}); name the dims instead, as nn.with_logical_constraint(x, ('batch', None, 'embed')),"
        " where names of mesh axes are understood too"
    )


NO_MESH = AbstractMesh((), ())


def _outside_the_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Scope.param` that sees no mesh while a model is traced under our rules.

    To compare shapes, Flax evaluates initialisers in `apply` too, and those of DenseGeneral unbox a kernel
    that is still flat: with a mesh set, its names would be applied to the wrong dims.
    """

    @wraps(original)
    def param(*arguments: Any, **options: Any) -> Any:
        if not isinstance(get_logical_axis_rules(), _StrictRules):
            return original(*arguments, **options)
        with jax.sharding.use_abstract_mesh(NO_MESH):
            return original(*arguments, **options)

    return param


Scope.param = _outside_the_mesh(Scope.param)
