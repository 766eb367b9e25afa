"""Freeze parameters: they get no gradient, optimizer state or weight decay, and keep their bits.

Next: `optim/optimizer.py`, an optimizer without them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import jax

from shardtrain.errors.messages import near, refuse
from shardtrain.functional.model import Model, Tree, map_parameters, path_text
from shardtrain.sharding.array_dims import is_dims

ADAPTERS = ("*/lora_a", "*/lora_b")
"""Patterns of the parameters of low-rank adapters (LoRA), see `models/layers.py`."""


def freeze_parameters(model: Model, patterns: Sequence[str] | None) -> Model:
    """Return the model with some parameters frozen.

    Args:
      model: the model.
      patterns: patterns (fnmatch, on the whole path; * matches / too) of the parameters to freeze. A pattern
        that begins with "!" excludes what it matches. None freezes all but the adapters (`ADAPTERS`) if the
        model has any, else nothing.

    Raises:
      ValueError: lists every pattern that matches nothing; or nothing is frozen, or left to train.

    >>> from shardtrain.functional.nnx_model import convert_model
    >>> from shardtrain.models.mlp import MlpConfig
    >>> mlp = convert_model(MlpConfig(features=4, mlp=8, num_layers=2, classes=3))
    >>> sorted(freeze_parameters(mlp, ["blocks/*", "!*/kernel", "!*/scale"]).frozen)[:2]
    ['blocks/0/down/bias', 'blocks/0/norm/bias']
    """
    if patterns is not None and not patterns:
        return model
    paths = parameter_paths(model)
    if patterns is None:
        if not any(_is_matched(path, ADAPTERS) for path in paths):
            return model
        patterns = ("*", *(f"!{pattern}" for pattern in ADAPTERS))
    idle = [p for p in patterns if not any(fnmatchcase(path, p.removeprefix("!")) for path in paths)]
    if all(p.startswith("!") for p in patterns):
        raise ValueError(
            f"freeze is {tuple(patterns)}, which excludes parameters and freezes none; name what to freeze"
            f" too, as in '*' {patterns[0]!r}"
        )
    problems = [f"no parameter matches {near(p.removeprefix('!'), paths)}" for p in idle]
    refuse("freeze does not fit the model's parameters", problems)
    kept = tuple(p[1:] for p in patterns if p.startswith("!"))
    chosen = tuple(p for p in patterns if not p.startswith("!"))
    frozen = frozenset(path for path in paths if _is_matched(path, chosen) and not _is_matched(path, kept))
    if len(frozen) == len(paths):
        raise ValueError(
            f"freeze is {tuple(patterns)}, which matches all {len(paths)} parameters, so nothing is trained;"
            " exclude some by a pattern with ! before it, as in '*' '!head/*'"
        )
    if not frozen:
        return model
    stopped = map_parameters(model, lambda path, x: jax.lax.stop_gradient(x) if path in frozen else x)
    return replace(stopped, frozen=frozen)


def parameter_paths(model: Model) -> list[str]:
    """Return the paths of all parameters of a model, in order."""
    return [path_text(path) for path, _ in jax.tree.leaves_with_path(model.dims, is_leaf=is_dims)]


def _is_matched(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def drop_paths(tree: Mapping[str, Any], paths: Collection[str], parent: str = "") -> Tree:
    """Return a nested dict without the leaves at some paths, and without dicts that become empty.

    >>> drop_paths({"a": {"b": 1, "c": 2}, "d": {"e": 3}}, {"a/c", "d/e"})
    {'a': {'b': 1}}
    """
    found: Tree = {}
    for name, node in tree.items():
        path = f"{parent}{name}"
        if isinstance(node, Mapping):
            if kept := drop_paths(node, paths, f"{path}/"):
                found[name] = kept
        elif path not in paths:
            found[name] = node
    return found


def merge_trees(part: Mapping[str, Any], whole: Mapping[str, Any]) -> Tree:
    """Return `whole` with its leaves replaced by those of `part`, where `part` has them.

    >>> merge_trees({"a": {"b": 1}}, {"a": {"b": 0, "c": 2}, "d": 3})
    {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    return {
        name: merge_trees(part.get(name, {}), node) if isinstance(node, Mapping) else part.get(name, node)
        for name, node in whole.items()
    }


def select_like(whole: Mapping[str, Any], part: Mapping[str, Any]) -> Tree:
    """Return the leaves of the nested dict `whole` at the paths of `part`.

    >>> select_like({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 0}})
    {'a': {'c': 2}}
    """
    return {
        name: select_like(whole[name], node) if isinstance(node, Mapping) else whole[name]
        for name, node in part.items()
    }
