"""Options of a mixture of experts.

`experts.py` has the layer, `experts_routing.py` the choice of experts and its losses.
"""

import math
from dataclasses import dataclass
from typing import Literal

from shardtrain.errors.field_types import too_small
from shardtrain.errors.options import CompactOptions


@dataclass(frozen=True, kw_only=True)
class Experts(CompactOptions):
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
        scores as weights, as does a single expert (top=1).
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

    >>> str(Experts(num=8, shared=1, normalised="all"))
    'num=8,shared=1,normalised=all'
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
    def is_normalised(self) -> bool:
        """Whether the weights of a token's experts add up to 1; a single one would not train its router."""
        return self.normalised == "chosen" and self.top > 1

    @property
    def over_replicas(self) -> bool:
        """Whether training sums over all replicas of a microbatch."""
        return self.bias > 0 or (self.balance > 0 and self.over == "batch")

    def list_problems(self) -> list[str]:
        """List the values that are out of range, or else the first one that does not fit another."""
        above = {"capacity": self.capacity, "scale": self.scale}
        return [
            *too_small(self, num=1, top=1, shared=0, balance=0, bias=0, z=0, groups=1, top_groups=1),
            *(
                f"{name} is {x}; use a number above 0"
                for name, x in above.items()
                if x is not None and x <= 0
            ),
        ] or self._find_conflicts()

    def _find_conflicts(self) -> list[str]:
        if self.top > self.num:
            return [f"top is {self.top}, and there are {self.num} experts: use top={self.num} or less"]
        if self.shared_gate != "none" and not self.shared:
            return [
                "shared_gate is sigmoid, and there is no shared feed-forward: add shared=1, or leave it out"
            ]
        if rest := self.num % self.groups:
            return [
                f"groups is {self.groups}, and {self.num} experts are not split evenly: {self.num} %"
                f" {self.groups} = {rest}. Use num={self.num - rest} or {self.num - rest + self.groups}"
            ]
        if self.top_groups > self.groups:
            return [f"top_groups is {self.top_groups} of {self.groups}: use top_groups={self.groups} or less"]
        if self.top > (most := self.top_groups * (self.num // self.groups)):
            return [f"top is {self.top}, and the best groups have {most} experts: use top={most} or less"]
        return []
