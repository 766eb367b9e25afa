"""Compare a checkpoint with the state and options of the run that reads it. No jax.

Only options, paths, shapes and dtypes are compared, without reading arrays. Next: `restore.py`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from shardtrain.checkpoints.manifest_entries import Leaf
from shardtrain.checkpoints.reader import CheckpointReader
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import refuse

OPTIMIZER = "opt_state/"


@dataclass(frozen=True, kw_only=True)
class Allow:
    """The allowed differences between a checkpoint and the run that reads it.

    Args:
      missing: patterns of arrays (`params/head/*`) that the checkpoint may lack, or have in another shape;
        the run initialises them. If it initialises an array of an optimizer's state, it also initialises all
        other arrays of that state that match the patterns, such as its count of updates.
      unused: patterns (fnmatch) of arrays of the checkpoint that are ignored if the run does not have them.
      changed: patterns of options, such as `model.dropout`, whose values may differ from those in the
        checkpoint. Layout, batch, steps, optimizer, data, and how often a run logs, evaluates and saves may
        always differ.

    Raises:
      ValueError: lists every value of a wrong type.
    """

    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        refuse("this cannot be allowed", wrong_types(self))


def check_state(
    reader: CheckpointReader, saved: Mapping[str, Leaf], wanted: Mapping[str, Leaf], allow: Allow
) -> None:
    """Refuse a checkpoint that differs from the wanted state in other than allowed ways.

    Args:
      reader: the reader of the checkpoint.
      saved: path -> array.
      wanted: path -> array.
      allow: the allowed differences.

    Raises:
      ValueError: all arrays that differ.
    """
    folder = next(iter(reader.folders.values()), f"step {reader.step}")
    refuse(
        f"{folder} holds another state than this run has; use the model and optimizer that it was saved with,"
        " or another run folder, or allow differences: --allow.missing 'params/head/*' for arrays that the"
        " checkpoint lacks or has in another shape, --allow.unused for arrays that only the checkpoint has",
        find_mismatches(saved, wanted, allow.missing, allow.unused),
    )


def find_mismatches(
    saved: Mapping[str, Leaf],
    wanted: Mapping[str, Leaf],
    missing: Sequence[str] = (),
    unused: Sequence[str] = (),
) -> list[str]:
    """List every array in which two states differ, by path; their split into parts may differ.

    Args:
        saved: path -> array.
        wanted: path -> array.
        missing: patterns of paths (`params/head/*`) that need not be saved, or may have another shape.
        unused: patterns of paths that may be saved and not wanted.

    Examples:
        >>> w = Leaf(shape=(2,), dtype="float32")
        >>> saved = {"a": w, "b": w, "d": w}
        >>> wanted = {"b": Leaf(shape=(3,), dtype="float32"), "c": w, "d": w}
        >>> find_mismatches(saved, wanted)
        ['a: saved float32 (2,), not asked for', 'b: saved float32 (2,), asked for float32 (3,)', \
'c: asked for float32 (2,), not saved']
        >>> find_mismatches(saved, wanted, missing=["b", "c"], unused=["a*"])
        []
    """

    def difference(path: str) -> str:
        if path not in wanted:
            return "" if matches(path, unused) else f"{path}: saved {saved[path]}, not asked for"
        if path not in saved:
            return "" if matches(path, missing) else f"{path}: asked for {wanted[path]}, not saved"
        if str(saved[path]) == str(wanted[path]) or matches(path, missing):
            return ""
        return f"{path}: saved {saved[path]}, asked for {wanted[path]}"

    return [text for path in {**saved, **wanted} if (text := difference(path))]


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a path matches any shell pattern.

    >>> matches("params/head/kernel", ["params/head/*"]), matches("params/head/kernel", ["head"])
    (True, False)
    """
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def widen_optimizer_state(saved: Mapping[str, Leaf], wanted: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Describe saved optimizer state of 16 bits as float32 if the run has float32.

    This loses nothing; earlier versions saved the state of bfloat16 parameters in 16 bits.

    >>> leaf = Leaf(shape=(2,), dtype="bfloat16")
    >>> wanted = Leaf(shape=(2,), dtype="float32")
    >>> saved = dict.fromkeys(["opt_state/mu", "params/w"], leaf)
    >>> [x.dtype for x in widen_optimizer_state(saved, {"opt_state/mu": wanted}).values()]
    ['float32', 'bfloat16']
    """

    def is_widened(path: str) -> bool:
        asked = path in wanted and path.startswith(OPTIMIZER) and wanted[path].dtype == "float32"
        return asked and saved[path].dtype in ("bfloat16", "float16")

    return {path: replace(x, dtype="float32") if is_widened(path) else x for path, x in saved.items()}


def find_arrays_to_initialize(
    differing: Sequence[str], wanted: Iterable[str], missing: Sequence[str]
) -> set[str]:
    """Return the arrays to initialize because other arrays of the same optimizer state are initialized.

    A saved count of updates would not match moments that begin at 0.

    Args:
      differing: paths of arrays that are initialized.
      wanted: paths of all arrays.
      missing: patterns of arrays that need not be saved; no others are initialized.

    >>> state = ["opt_state/0/count", "opt_state/0/mu/a", "opt_state/0/mu/b", "opt_state/1/count"]
    >>> sorted(find_arrays_to_initialize(["opt_state/0/mu/a"], state, ["opt_state/*"]))
    ['opt_state/0/count', 'opt_state/0/mu/a', 'opt_state/0/mu/b']
    >>> sorted(find_arrays_to_initialize(["opt_state/0/mu/a"], state, ["opt_state/*/a"]))
    ['opt_state/0/mu/a']
    """
    listed = list(wanted)
    counts = [path for path in listed if path.startswith(OPTIMIZER) and path.endswith("/count")]
    # the longest first: a state may contain another one
    states = sorted((path.removesuffix("count") for path in counts), key=len, reverse=True)

    def state_of(path: str) -> str | None:
        return next((state for state in states if path.startswith(state)), None)

    # an optimizer state that is initialized in part is initialized as a whole, where that is allowed
    initialized = {state_of(path) for path in differing} - {None}
    return {path for path in listed if state_of(path) in initialized and matches(path, missing)}


def compare_descriptions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line for each option in which two descriptions differ.

    Functions and classes of shardtrain compare equal if only their module has changed between versions.

    >>> compare_descriptions({"batch": 32, "seed": 0}, {"batch": 64, "seed": 0})
    ['batch: 32 -> 64']
    >>> compare_descriptions({"loss": "shardtrain.loss:mean"}, {"loss": "shardtrain.functional.loss:mean"})
    []
    """
    missing = "(not there)"
    return [
        f"{name}: {old.get(name, missing)!r} -> {new.get(name, missing)!r}"
        for name in [*old, *(n for n in new if n not in old)]
        if _remove_module(old.get(name, missing)) != _remove_module(new.get(name, missing))
    ]


def _remove_module(value: Any) -> Any:
    return re.sub(r"(?<![\w.])shardtrain(\.\w+)+:", "shardtrain:", value) if isinstance(value, str) else value
