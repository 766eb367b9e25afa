"""Combiners of the replicas' gradients or deltas, and codecs that compress what is sent.

A new one is a file here and an entry of `COMBINERS` or `CODECS`; tests/combine/test_contract.py checks every
entry. Next: `combiner.py` (the contract), `mean.py` (the shortest), `group.py`.
"""

import inspect
from collections.abc import Callable
from typing import Any

from shardtrain.combine.adasum import adasum
from shardtrain.combine.codec import Encoding, Feedback, gathered
from shardtrain.combine.combiner import Codec, Combined, Combiner, chain
from shardtrain.combine.group import Group, MeshGroup
from shardtrain.combine.int8 import int8
from shardtrain.combine.mean import mean, sum
from shardtrain.combine.narrow import bfloat16, float16
from shardtrain.combine.power_sgd import power_sgd
from shardtrain.combine.scale import scale
from shardtrain.combine.top_k import top_k
from shardtrain.errors.messages import near, refuse

__all__ = [
    "CODECS",
    "COMBINERS",
    "Codec",
    "Combined",
    "Combiner",
    "Encoding",
    "Feedback",
    "Group",
    "MeshGroup",
    "adasum",
    "bfloat16",
    "chain",
    "float16",
    "gathered",
    "int8",
    "make_combiner",
    "mean",
    "power_sgd",
    "scale",
    "sum",
    "top_k",
]

COMBINERS: dict[str, Callable[..., Combiner]] = {
    "mean": mean,
    "sum": sum,
    "adasum": adasum,
}
"""Name -> function that makes the combiner; its argument, if it has one, is written after a colon."""

CODECS: dict[str, Callable[..., Codec]] = {
    "bfloat16": bfloat16,
    "float16": float16,
    "int8": int8,
    "top_k": top_k,
    "power_sgd": power_sgd,
    "scale": scale,
}
"""Name -> function that makes the codec, with an argument like a combiner's."""


def make_combiner(text: str) -> Combiner:
    """Make a combiner by name, with codecs before it.

    Args:
      text: names joined by "+", the combiner last; each may have an argument after ":". Examples: "mean",
        "adasum:whole", "int8+adasum", "top_k:0.01+mean".

    Raises:
      ValueError: lists every name and argument that does not fit.

    >>> make_combiner("int8+adasum:whole").across_leaves
    True
    """
    problems: list[str] = []
    links = []
    *codecs, combiner = text.split("+")
    for word, table, kind in [*((w, CODECS, "codec") for w in codecs), (combiner, COMBINERS, "combiner")]:
        name, colon, argument = (part.strip() for part in word.partition(":"))
        if name not in table:
            other = COMBINERS if table is CODECS else CODECS
            hint_on_order = (
                "; a combiner must be last" if table is CODECS else "; a codec needs a combiner after it"
            )
            hint = f"{name!r}{hint_on_order}, such as 'int8+mean'" if name in other else near(name, table)
            problems.append(f"{kind} {hint}")
            continue
        if name != "scale" and [each.partition(":")[0].strip() for each in codecs].count(name) > 1:
            problems.append(
                f"codec {name!r} is given twice, and sends no less the second time; write it once"
            )
            break
        parameters = list(inspect.signature(table[name]).parameters)
        if colon and not parameters:
            problems.append(f"{kind} {word.strip()!r}: {name} takes no argument; write {name!r}")
            continue
        try:
            links.append(table[name](_value(argument)) if colon else table[name]())
        except ValueError as error:
            problems.append(f"{kind} {word.strip()!r}: {error}")
    refuse(f"combiner {text!r} cannot be made", problems)
    return chain(*links)


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
