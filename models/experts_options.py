"""A mixture of experts as the text of an option: how many, how tokens choose them, how they are balanced.

`experts.py` has the layer, `experts_routing.py` the choice and its losses.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from shardtrain.models import checks


@dataclass(frozen=True, kw_only=True)
class Experts:
    """How many experts there are, how tokens choose them, and how they are balanced.

    Args:
      num: number of experts in each block.
      top: experts that a token chooses.
      capacity: tokens that an expert takes of a sequence, over their mean: ceil(capacity * top * seq / num);
        what is above is dropped, and passes the layer by its residual connection. None: nothing is dropped.
      shared: a feed-forward of so many times the hidden features that every token passes, beside the experts.
      scores: "softmax" over all experts, or a "sigmoid" of each.
      normalised: "chosen": the weights of a token's experts add up to 1. "all": they are its scores, as
        always with one expert.
      scale: a factor of these weights.
      balance: weight of the load-balancing loss, which is 1 in each block where all experts are equally
        loaded (Fedus et al. 2021, Switch Transformers, equation 4).
      over: what that loss balances: the tokens of each "sequence" (DeepSeek-V3, 2024, section 2.1.2), the
        same in any layout; or those of a microbatch over all replicas, "batch".
      bias: what is added to, or taken from, the bias of an expert in each microbatch in which it has too few
        or too many tokens. The bias is added to scores for the choice alone; it is a part of the model's
        state, not a parameter (Wang et al. 2024, Auxiliary-Loss-Free Load Balancing, section 3).
      z: weight of the router's z-loss, the mean square of logsumexp of a token's logits in each block (Zoph
        et al. 2022, ST-MoE, equation 5).
      shared_gate: "sigmoid": the output of the shared feed-forward is multiplied by the sigmoid of a linear
        map of the token (Qwen2-MoE). "none": by nothing.
      groups: the experts are in so many groups of neighbours, and a token chooses from its best groups alone
        (DeepSeek-V3, 2024, arXiv 2412.19437, section 2.1.2). A group is as good as its best expert, with
        scores=sigmoid as its two best together, biases among them.
      top_groups: number of these groups.
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
        """Return the most tokens that an expert takes of a sequence of so many.

        >>> Experts(num=8, top=2, capacity=1.25).room(64)
        20
        """
        if self.capacity is None:
            return num_tokens
        # the small number keeps products such as 1.1 * 10 from being rounded up once too often
        return min(num_tokens, math.ceil(self.capacity * self.top * num_tokens / self.num - 1e-9))

    @property
    def over_replicas(self) -> bool:
        """Whether training needs sums over all replicas of a microbatch."""
        return self.bias > 0 or (self.balance > 0 and self.over == "batch")


CHOICES = {f.name: get_args(f.type) for f in fields(Experts) if get_origin(f.type) is Literal}
"""The keys whose value is a word, with the words."""


def read_experts(text: str) -> Experts | None:
    """Read a mixture of experts from the text of an option; None if it is empty.

    Raises:
      ValueError: lists every key and value that is not one.

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
    values = {name: _value(name, value, problems) for name, value in given.items() if name in known}
    if "num" in values:
        problems += _relations(values)
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
    """Return the text of an option for a mixture, with the keys whose values are not the default ones.

    >>> experts_text(Experts(num=8, shared=1, normalised="all"))
    'num=8,top=2,shared=1,normalised=all'
    """
    values = [(f, getattr(options, f.name)) for f in fields(Experts)]
    return ",".join(f"{f.name}={x}" for f, x in values if f.name in ("num", "top") or x != f.default)


def _value(name: str, text: str, problems: list[str]) -> Any:
    """Return a value, and add to the problems if it is none."""
    if name in CHOICES:
        if text not in CHOICES[name]:
            problems.append(f"{name} is {text!r}; allowed are {', '.join(CHOICES[name])}")
        return text
    if name in ("num", "top", "shared", "groups", "top_groups"):
        least = 0 if name == "shared" else 1
        if not (text.isascii() and text.isdecimal() and int(text) >= least):
            problems.append(f"{name} is {text!r}, and it is a whole number of {least} or more")
            return least
        return int(text)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    above_zero = name in ("capacity", "scale")
    if not 0 <= number < math.inf or (above_zero and number == 0):
        problems.append(
            f"{name} is {text!r}, and it is a number {'above 0' if above_zero else 'of 0 or more'}"
        )
    return number


def _relations(values: Mapping[str, Any]) -> list[str]:
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
