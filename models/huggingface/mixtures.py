"""Mixtures of experts in files of Hugging Face: where their arrays stand, and their entries of config.json.

`llama.py` has all other arrays of these models, `relatives.py` their families.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardtrain.axes import EMBED, MLP
from shardtrain.models.experts_options import Experts, experts_text, read_experts
from shardtrain.models.huggingface.place import Place, option_problems

OF_TRAINING = ("capacity", "balance", "over", "z")
"""What a mixture has for training alone, and no file says."""


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Names of the arrays of a mixture in a layer.

    Args:
      block: of the mixture.
      maps: map of an expert -> its name.
      shared: of the shared feed-forward.
      shared_gate: of its gate.
    """

    block: str = "mlp"
    maps: Mapping[str, str] = field(default_factory=lambda: {w: f"{w}_proj" for w in ("up", "gate", "down")})
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"


def expert_places(names: ExpertNames, config: Any, layer: str) -> Iterator[Place]:
    """List the places of a mixture; in files each expert has arrays of its own, whose matrices are (out, in).

    Args:
      names: of the family.
      config: a `DecoderConfig`; places without experts are none.
      layer: beginning of the names in a layer.
    """
    options = read_experts(config.experts)
    if options is None:
        return
    block, path = f"{layer}{names.block}", "blocks/mlp"
    yield Place(
        path=f"{path}/router", name=f"{block}.gate.weight", dims=(EMBED, options.num), transposed=True
    )
    for which, name in names.maps.items():
        dims = (MLP, EMBED) if which == "down" else (EMBED, MLP)
        each = f"{block}.experts.{{}}.{name}.weight"
        yield Place(path=f"{path}/{which}", name=each, dims=dims, transposed=True, num_experts=options.num)
    wide = options.shared * config.sizes[MLP]
    for which in ("up", "gate", "down") if wide else ():
        yield Place(
            path=f"{path}/shared/{which}/kernel", name=f"{block}.{names.shared}.{which}_proj.weight",
            dims=(wide, EMBED) if which == "down" else (EMBED, wide), num_in=1, transposed=True,
        )  # fmt: skip
    if options.shared_gate != "none":
        name = f"{block}.{names.shared_gate}.weight"
        yield Place(path=f"{path}/shared_gate", name=name, dims=(EMBED,), num_ones=1)


def foreign_experts(config: Any, family: str, chosen: tuple[str, ...]) -> list[str]:
    """List the options of a mixture that a family does not have.

    Args:
      config: a `DecoderConfig`.
      family: its name.
      chosen: keys of `experts` that it lets one choose, beside those of training.
    """
    options = read_experts(config.experts)
    if options is None:
        return [f"experts is ''; {family} has a mixture in each block"]
    defaults = Experts(num=options.num, top=options.top)
    free = {"num", "top", *OF_TRAINING, *chosen}
    fixed = {name: (value,) for name, value in vars(defaults).items() if name not in free}
    return [f"experts: {problem}" for problem in option_problems(options, fixed, family)]


def experts_option(keys: Mapping[str, Any]) -> str:
    """Return the option `experts` with these keys and values."""
    return experts_text(Experts(**keys))


def sums_to_one(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the key that says what the weights of a token's experts add up to."""
    return {"normalised": "chosen" if config["norm_topk_prob"] else "all"}


def expert_problems(num: int, top: int, normalised: str = "chosen") -> list[str]:
    """List what a mixture cannot be.

    >>> expert_problems(2, 4)
    ['num_experts_per_tok is 4, and there are 2 experts']
    """
    if top > num:
        return [f"num_experts_per_tok is {top}, and there are {num} experts"]
    if top == 1 and normalised == "chosen":
        return ["num_experts_per_tok is 1, and weights that add up to 1 train no router"]
    return []
