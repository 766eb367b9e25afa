"""Options of a mixture of experts, and how they are read from the text of the option `experts`.

`experts.py` has the layer, `experts_routing.py` the choice of experts and its losses.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from shardtrain.models import checks


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Number of experts, how tokens choose them, and how their loads are balanced.

    Args:
      num: number of experts in each block.
      top: number of experts that each token chooses.
      capacity: the largest number of tokens of a sequence that an expert takes, relative to the mean:
        ceil(capacity * top * seq / num). More tokens are dropped: only the residual connection carries them
        past the layer. None means that no token is dropped.
      shared: adds a feed-forward that every token passes, with `shared` times the hidden features of an
        expert.
      scores: "softmax" computes scores over all experts, "sigmoid" for each expert alone.
      normalised: "chosen" scales the weights of a token's experts so that they add up to 1; "all" takes the
        scores as weights, as always with top=1.
      scale: factor of these weights.
      balance: weight of the load-balancing loss, which is 1 in a block if all experts have equal loads (Fedus
        et al. 2021, Switch Transformers, equation 4).
      over: the tokens over which that loss balances: each "sequence" (DeepSeek-V3, 2024, section 2.1.2), the
        same in any layout; or a "batch", a microbatch of all replicas.
      bias: step of the bias of each expert: after a microbatch the bias rises if the expert had too few
        tokens, and falls if it had too many. The bias is added to the scores only for the choice; it is model
        state, not a parameter (Wang et al. 2024, Auxiliary-Loss-Free Load Balancing, section 3).
      z: weight of the router's z-loss, the mean square of logsumexp of a token's logits in each block (Zoph
        et al. 2022, ST-MoE, equation 5).
      shared_gate: "sigmoid" multiplies the output of the shared feed-forward by the sigmoid of a linear map
        of the token (Qwen2-MoE); "none" does not.
      groups: number of groups of neighbouring experts; a token chooses only from its best groups
        (DeepSeek-V3, 2024, arXiv 2412.19437, section 2.1.2). The score of a group is that of its best expert,
        or with scores=sigmoid the sum of its two best, biases included.
      top_groups: number of groups that a token chooses from.
    """

    num: int
    top: int = 2
    capacity: float | None = None
    shared: int = 0
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalised: Literal["chosen", "all"] = "chosen"
    scale: float = 1.0
    balance: float = 0.01
    over: Literal["sequence", "batch"] = "sequence"
    bias: float = 0.0
    z: float = 0.0
    shared_gate: Literal["none", "sigmoid"] = "none"
    groups: int = 1
    top_groups: int = 1

    def room(self, num_tokens: int) -> int:
        """Return the largest number of tokens that an expert takes of a sequence of `num_tokens`.

        >>> Experts(num=8, top=2, capacity=1.25).room(64)
        20
        """
        if self.capacity is None:
            return num_tokens
        # the small number keeps products such as 1.1 * 10 from being rounded up once too often
        return min(num_tokens, math.ceil(self.capacity * self.top * num_tokens / self.num - 1e-9))

    @property
    def over_replicas(self) -> bool:
        """Whether training sums over all replicas of a microbatch."""
        return self.bias > 0 or (self.balance > 0 and self.over == "batch")


CHOICES = {f.name: get_args(f.type) for f in fields(Experts) if get_origin(f.type) is Literal}
"""Key with words as values -> the words."""


def read_experts(text: str) -> Experts | None:
    """Read the text of the option `experts`; return None if it is empty.

    Raises:
      ValueError: lists every unknown key and wrong value.

    >>> read_experts("num=8,top=2,capacity=1.25").capacity
    1.25
    >>> read_experts("") is None
    True
    >>> read_experts("num=2,top=3,score=max")
    Traceback (most recent call last):
    ValueError: experts is 'num=2,top=3,score=max': no key 'score'; top is 3, and there are 2 experts: use\
 top=2 or less; write num=8, or num=8,top=2 and of capacity, shared, scores, normalised, scale, balance,\
 over, bias, z, shared_gate, groups, top_groups
    """
    if not text:
        return None
    known = [field.name for field in fields(Experts)]
    given, problems = checks.read_pairs(text, known, ["num"])
    values = {name: _read_value(name, value, problems) for name, value in given.items() if name in known}
    if "num" in values:
        problems += _find_conflicts(values)
    if problems:
        raise ValueError(
            f"experts is {text!r}: {'; '.join(problems)}; write num=8, or num=8,top=2 and of"
            f" {', '.join(known[2:])}"
        )
    # one expert with the weight 1 would not train its router
    if values.get("top") == 1:
        values = {"normalised": "all", **values}
    return Experts(**values)


def experts_text(options: Experts) -> str:
    """Return the text of the option `experts`, with the keys that differ from their defaults.

    >>> experts_text(Experts(num=8, shared=1, normalised="all"))
    'num=8,top=2,shared=1,normalised=all'
    """
    values = [(f, getattr(options, f.name)) for f in fields(Experts)]
    return ",".join(f"{f.name}={x}" for f, x in values if f.name in ("num", "top") or x != f.default)


def _read_value(name: str, text: str, problems: list[str]) -> Any:
    if name in CHOICES:
        if text not in CHOICES[name]:
            problems.append(f"{name} is {text!r}; allowed are {', '.join(CHOICES[name])}")
        return text
    if name in ("num", "top", "shared", "groups", "top_groups"):
        return checks.read_number(name, text, problems, least=0 if name == "shared" else 1)
    return checks.read_number(name, text, problems, above=name in ("capacity", "scale"))


def _find_conflicts(values: Mapping[str, Any]) -> list[str]:
    found = Experts(**values)
    if found.top > found.num:
        return [f"top is {found.top}, and there are {found.num} experts: use top={found.num} or less"]
    if found.shared_gate != "none" and not found.shared:
        return ["shared_gate is sigmoid, and there is no shared feed-forward: add shared=1, or leave it out"]
    if found.num % found.groups:
        rest = found.num % found.groups
        return [
            f"groups is {found.groups}, and {found.num} experts are not split evenly: {found.num} %"
            f" {found.groups} = {rest}. Use num={found.num - rest} or {found.num - rest + found.groups}"
        ]
    if found.top_groups > found.groups:
        return [f"top_groups is {found.top_groups} of {found.groups}: use top_groups={found.groups} or less"]
    if found.top > (most := found.top_groups * (found.num // found.groups)):
        return [f"top is {found.top}, and the best groups have {most} experts: use top={most} or less"]
    if found.top == 1 and values.get("normalised") == "chosen":
        return ["normalised=chosen gives one expert the weight 1, so its router is not trained: use all"]
    return []
