"""Replace the exchange of mixtures of experts, while they are traced, by calls that move tokens.

A plan gives it to models among their operations (`models/ops`); a run exchanges tokens by
`functional/expert_exchange.py`. The products of experts are traced. Next: `device_calls.py`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.spmd import with_logical_constraint
from jax import lax

from shardtrain import axes
from shardtrain.plan.device_calls import MoveCall, bind_call, bind_linear_call
from shardtrain.plan.hlo.collectives import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from shardtrain.plan.program import ARRIVED, ARRIVED_TOKENS, EXPERT_SLOTS, Dims

HERE: Dims = (axes.BATCH, axes.SEQ, axes.EMBED)
LOCAL = MoveCall()


class TracedExperts:
    """The exchange of mixtures of experts that are traced; it is called as `exchange_tokens`.

    Args:
      num: number of devices of the axis expert.
      context: number of devices of the axis context, each with a part of the positions.
    """

    def __init__(self, num: int, context: int = 1) -> None:
        self.num, self.context = num, context

    def __call__(self, experts: Any, x: jax.Array, choice: Any, kernels: tuple[Any, Any]) -> jax.Array:
        """Return the weighted sum of the outputs of each token's experts, float32."""
        compute = self._gather if experts.is_dropless else self._exchange
        return with_logical_constraint(compute(experts, x, choice, kernels), HERE)

    def _exchange(self, experts: Any, x: jax.Array, choice: Any, kernels: Any) -> jax.Array:
        """Send slots to the devices of their experts, and back; for experts with a capacity."""
        # slots for the positions of a device
        here = x.shape[1] // self.context
        slots = experts.slots(choice._replace(experts_BTK=choice.experts_BTK[:, :here]))
        at, features = slots.of_choice_NK, x.shape[-1]
        arrived = EXPERT_SLOTS, axes.EMBED
        before = (axes.BATCH, axes.EMBED) if self.num > 1 else arrived
        buffer = (slots.num, features), x.dtype
        filled = bind_linear_call(LOCAL, LOCAL, [x, at], HERE, (*buffer, before))
        if self.num > 1:
            there = MoveCall(kind=ALL_TO_ALL, axis=axes.EXPERT)
            filled = bind_linear_call(there, there, [filled], before, (*buffer, arrived))
        out = experts.outputs(_Slots(kernels, None), filled, kernels)
        if self.num > 1:
            out = bind_linear_call(there, there, [out], arrived, (*buffer, before))
        return _combine(out, choice.weights_BTK, at, before, HERE, x.shape)

    def _gather(self, experts: Any, x: jax.Array, choice: Any, kernels: Any) -> jax.Array:
        """Gather tokens, and scatter the sums of each device; for experts that take all tokens."""
        numbers, weights, gathered = choice.experts_BTK, choice.weights_BTK, HERE
        if self.num > 1:
            gathered = (ARRIVED, *HERE[1:])
            x, numbers, weights = (
                _gather(each, (*gathered[:2], name))
                for each, name in ((x, axes.EMBED), (numbers, None), (weights, None))
            )
        num_experts, top = len(kernels[0]), numbers.shape[-1]
        # a token chooses at most all experts of a device
        most = min(top, num_experts // self.num) * x.shape[0] * x.shape[1]
        at, counts = bind_call(
            LOCAL,
            [numbers],
            [
                ((x.shape[0] * x.shape[1], top), jnp.int32, (gathered[0], None)),
                ((num_experts,), jnp.int32, (axes.EXPERTS,)),
            ],
        )
        rows: Dims = (ARRIVED_TOKENS, axes.EMBED)
        filled = bind_linear_call(LOCAL, LOCAL, [x, at], gathered, ((most, x.shape[-1]), x.dtype, rows))
        out = experts.outputs(_Slots(kernels, counts), filled, kernels)
        total = _combine(out, weights, at, rows, gathered, x.shape, completes=self.num == 1)
        if self.num == 1:
            return total
        back = MoveCall(kind=REDUCE_SCATTER, axis=axes.EXPERT, completes=True)
        result = x.shape, x.dtype, HERE
        there = MoveCall(kind=ALL_GATHER, axis=axes.EXPERT)
        return bind_linear_call(back, there, [total.astype(x.dtype)], gathered, result).astype(jnp.float32)


@dataclass(frozen=True)
class _Slots:
    """The products of experts with the tokens in their slots; see `models.experts_products.Slots`.

    Args:
      kernels: kernels of all experts, with named dims.
      counts: tokens of each expert, for sorted rows. None means that all experts have the same number.
    """

    kernels: tuple[jax.Array, jax.Array]
    counts: jax.Array | None

    def product(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        up = self.kernels[0]
        is_up = up.shape[2] > 1 and kernel.size == up.size
        if self.counts is None:
            # the dim of both kernels is separate, as the hidden features are sharded
            kernel = up if is_up else kernel
            y = jnp.einsum("ESD,ED...->ES...", x.reshape(len(kernel), -1, x.shape[-1]), kernel)
            return y.reshape(-1, *y.shape[2:])
        y = lax.ragged_dot(x, kernel, self.counts)
        if not is_up:
            return y
        return with_logical_constraint(y.reshape(len(y), up.shape[2], -1), (ARRIVED_TOKENS, None, axes.MLP))


def _gather(x: jax.Array, named: Dims) -> jax.Array:
    """Gather the tokens of all devices of the axis expert; its gradient is reduced and scattered."""
    there, back = (MoveCall(kind=kind, axis=axes.EXPERT) for kind in (ALL_GATHER, REDUCE_SCATTER))
    result = x.shape, x.dtype, named
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return bind_call(there, [x], [result])[0]
    return bind_linear_call(there, back, [x], (axes.BATCH, *named[1:]), result)


def _combine(
    out: jax.Array,
    weights: jax.Array,
    at: jax.Array,
    of_out: Dims,
    named: Dims,
    shape: tuple[int, ...],
    *,
    completes: bool = True,
) -> jax.Array:
    """Return the weighted sum of each token's slots, float32.

    Args:
      out: (slots, D).
      weights: (B, T, choices).
      at: slots of each token.
      of_out: dim names of `out`.
      named: dim names of the result.
      shape: shape of the result.
      completes: see `MoveCall`.
    """

    @jax.custom_vjp
    def combined(out: Any, weights: Any, at: Any) -> Any:
        call = LOCAL._replace(completes=completes)
        return bind_call(call, [out, weights, at], [(shape, jnp.float32, named)])[0]

    def forward(out: Any, weights: Any, at: Any) -> Any:
        return combined(out, weights, at), (out, weights, at)

    def backward(kept: Any, cotangent: Any) -> Any:
        out, weights, at = kept
        results = [
            (out.shape, out.dtype, of_out),
            (weights.shape, weights.dtype, (*named[:2], None)),
        ]
        return *bind_call(LOCAL._replace(linear=False), [cotangent, out, weights, at], results), None

    combined.defvjp(forward, backward)
    return combined(out, weights, at)
