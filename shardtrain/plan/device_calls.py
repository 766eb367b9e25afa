"""Calls in a traced program that stand for per-device code of a run: attention, and moves of arrays.

A trace has no devices, so it does not enter such code: a call names the dims and shapes of its results, and
computes its costs. Next: `traced_attention.py` and `traced_experts.py`, which make calls.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive

from shardtrain import axes
from shardtrain.models.attention.blockwise import count_block
from shardtrain.models.attention.score_blocks import find_visible_blocks, num_key_blocks, window_reach
from shardtrain.plan.hlo.collectives import ALL_GATHER, PERMUTE
from shardtrain.plan.prediction import SentCollective
from shardtrain.plan.program import CallCost, CallSizes, DeviceCall, Dims, Program

NAME = "device_call"
"""Name of the primitive of such a call in a jaxpr."""

Result = tuple[tuple[int, ...], Any, Dims]
"""Shape, dtype and dim names of a result."""

_PRIMITIVE = Primitive(NAME)
_PRIMITIVE.multiple_results = True


@_PRIMITIVE.def_abstract_eval
def _results(*_: Any, call: DeviceCall, results: Sequence[Result]) -> list[Any]:
    return [ShapedArray(shape, np.dtype(dtype)) for shape, dtype, _ in results]


def bind_call(call: DeviceCall, inputs: Sequence[jax.Array], results: Sequence[Result]) -> list[jax.Array]:
    """Add a call to a traced computation, and return its results.

    Args:
      call: the costs of the call.
      inputs: its inputs.
      results: shapes, dtypes and dim names of its results.
    """
    return _PRIMITIVE.bind(*inputs, call=call, results=tuple(results))


def bind_linear_call(
    there: DeviceCall, back: DeviceCall, inputs: Sequence[jax.Array], named: Dims, result: Result
) -> jax.Array:
    """Add a call that is linear in its first input, with another call as its gradient; return its result.

    Args:
      there: costs of the call.
      back: costs of its gradient.
      inputs: inputs of both; only the first one has a gradient.
      named: dim names of the first input.
      result: shape, dtype and dim names of the result.
    """
    first, *others = inputs

    @jax.custom_vjp
    def forward(x: jax.Array, others: Any) -> jax.Array:
        return bind_call(there, (x, *others), [result])[0]

    def kept(x: jax.Array, others: Any) -> Any:
        return forward(x, others), others

    def backward(others: Any, cotangent: jax.Array) -> Any:
        (found,) = bind_call(back, (cotangent, *others), [(first.shape, first.dtype, named)])
        return found, None

    forward.defvjp(kept, backward)
    return forward(first, others)


class MoveCall(NamedTuple):
    """A call that moves its first input, and computes only sums.

    Args:
      kind: the collective, as in `plan.hlo.collectives`; "" for none.
      axis: the mesh axis that it runs over.
      linear: whether partial sums may be its first input and then be its result.
      completes: whether it completes such sums.
    """

    kind: str = ""
    axis: str = ""
    linear: bool = True
    completes: bool = False

    def cost(self, sizes: CallSizes) -> CallCost:
        """Return the costs of one call; see `DeviceCall`."""
        zeros = np.zeros(np.shape(sizes.reads[0]))
        # the payload of an all-gather is the gathered array, of any other collective the input
        payload = sizes.writes[0] if self.kind == ALL_GATHER else sizes.reads[0]
        sent = (SentCollective(self.kind, (self.axis,), payload, 1.0),) if self.kind else ()  # pyright: ignore
        return CallCost(flops=zeros, moved_bytes=zeros, temporary_bytes=zeros, sent=sent)


PRODUCTS, COUNTED = (2, 5), (2, 4)
"""Products of queries and keys, forward and backward: in the kernel, whose backward recomputes the scores
(Dao et al. 2022, https://arxiv.org/abs/2205.14135, algorithms 1 and 4), and in the model's flops."""

FLOAT = 4
"""Bytes of an element of scores, of their sums, and of gradients that are sent or added up."""


class FlashCall(NamedTuple):
    """Flash attention of one device, forward or backward.

    It reads queries, keys and values, and writes the context and the sums of its softmax. Backward, it also
    reads these two and a cotangent, and writes three gradients.

    Args:
      queries, keys: positions of the whole sequences.
      head_dim: features of a head.
      item_bytes: bytes of an element of queries and keys.
      causal: whether queries see only keys up to their own position; the kernel skips all other blocks.
      window: largest number of keys that a query sees in causal attention. None means any number.
      softmax_features: see `devices.ReachedRates`.
      backward: whether it is the gradient.
    """

    queries: int
    keys: int
    head_dim: int
    item_bytes: int
    causal: bool
    window: int | None
    softmax_features: float
    backward: bool = False

    linear = completes = False

    def cost(self, sizes: CallSizes) -> CallCost:
        """Return the costs of one call; see `DeviceCall`.

        Its flops count all scores, as MFU does; its time counts only the scores that are computed.
        """
        elements = sizes.reads[0] / self.item_bytes
        # flops of one product of all queries and keys
        whole = 2 * elements * self.keys
        slower = 1 + self.softmax_features / self.head_dim
        gradient = self.backward * FLOAT * elements
        return CallCost(
            flops=COUNTED[self.backward] * whole,
            moved_bytes=2 * gradient,
            temporary_bytes=gradient,
            sent=(),
            timed_flops=PRODUCTS[self.backward] * whole * self.compute_seen_part() * slower,
        )

    def compute_seen_part(self) -> float:
        """Return the part of all pairs of queries and keys that is computed.

        >>> FlashCall(4, 4, 64, 2, causal=True, window=None, softmax_features=0).compute_seen_part()
        0.625
        """
        if not self.causal:
            return 1.0
        most = min(self.keys, self.window or self.keys)
        growing = min(most, self.queries)
        return (growing * (growing + 1) / 2 + (self.queries - growing) * most) / (self.queries * self.keys)


def counts_flash(program: Program) -> bool:
    """Return whether a program, or a loop in it, has flash attention."""
    return any(
        isinstance(kernel.call, FlashCall) or (kernel.body is not None and counts_flash(kernel.body))
        for kernel in program.kernels
    )


PASSES = (4, 10)
"""Number of times that scores are written to memory or read from it. Forward, scores and weights are written
and read; backward, also the gradients of both, and three products read a result of one of them."""

ARRAYS = {True: 2, False: 5}
"""`CallSizes.fuses` -> number of arrays like the scores of a block of keys that a compiled loop has at once:
weights and gradients on H100; scores, masked scores, weights and both gradients on CPU."""


class BlocksCall(NamedTuple):
    """Attention of one device in blocks of queries and keys (`blockwise.py`), forward or backward.

    Args:
      queries, keys, head_dim, item_bytes, causal, window, backward: see `FlashCall`.
    """

    queries: int
    keys: int
    head_dim: int
    item_bytes: int
    causal: bool
    window: int | None
    backward: bool = False

    linear = completes = False

    def cost(self, sizes: CallSizes) -> CallCost:
        """Return the costs of one call; see `DeviceCall`. Its flops count all scores, as MFU does."""
        elements = sizes.reads[0] / self.item_bytes
        # bytes of queries and of keys and values in float32
        q_float, kv_float = FLOAT * elements, FLOAT * (sizes.reads[1] + sizes.reads[2]) / self.item_bytes
        whole, scores = 2 * elements * self.keys, q_float / self.head_dim * self.keys
        part = count_visible_part(self.queries, self.keys, self.causal, self.window)
        block = scores * count_block(self.queries) / self.queries * count_block(self.keys) / self.keys
        return CallCost(
            flops=COUNTED[self.backward] * whole,
            moved_bytes=PASSES[self.backward] * part * scores,
            temporary_bytes=(2 + self.backward) * q_float + kv_float + ARRAYS[sizes.fuses] * block,
            sent=(),
            timed_flops=PRODUCTS[self.backward] * part * whole,
        )


def count_visible_part(queries: int, keys: int, causal: bool, window: int | None) -> float:
    """Return the part of the blocks of scores that attention in blocks computes.

    >>> count_visible_part(1024, 1024, True, None), count_visible_part(1024, 1024, True, 256)
    (0.625, 0.4375)
    """
    size, of_keys = count_block(queries), count_block(keys)
    starts, num = range(0, queries, size), -(-keys // of_keys)
    seen = [
        find_visible_blocks(start if causal else None, size, num * of_keys, of_keys, window)
        for start in starts
    ]
    return sum(end - first for first, end in seen) / (len(starts) * num)


def compute_moved_part(num: int) -> float:
    """Return the part of the positions that a causal ring moves to balance its devices.

    Each device exchanges one of its two halves with another device; with an odd number, one keeps both.

    >>> compute_moved_part(3), compute_moved_part(4)
    (0.3333333333333333, 0.5)
    """
    return num // 2 / num


class AttentionCall(NamedTuple):
    """Attention of a device's queries to the keys of all, forward or backward, by ring or all-gather.

    It reads queries, keys and values; backward also its output, the sums of its softmax, and a cotangent.

    Args:
      kind: "ring" or "all-gather".
      queries, keys: positions of the whole sequences.
      head_dim: features of a head.
      item_bytes: bytes of an element of queries and keys.
      causal: whether queries see only keys up to their own position.
      window: largest number of keys that a query sees. None means any number, or unknown.
      backward: whether it is the gradient.
      keys_are_here: whether the same program computes the forward, so that compilers do not send the keys and
        values a second time.
    """

    kind: str
    queries: int
    keys: int
    head_dim: int
    item_bytes: int
    causal: bool
    window: int | None = None
    backward: bool = False
    keys_are_here: bool = False

    linear = completes = False

    def merge(self, earlier: Iterable[DeviceCall | None]) -> "AttentionCall":
        """Return the call in a program where these calls come first and read the same arrays."""
        forward = self._replace(backward=False, keys_are_here=False)
        return self._replace(keys_are_here=self.backward and forward in earlier)

    def cost(self, sizes: CallSizes) -> CallCost:
        """Return the costs of one call; see `DeviceCall`."""
        nums, stages = (
            np.broadcast_to(sizes.axis_sizes(axis), np.shape(sizes.reads[0]))
            for axis in (axes.CONTEXT, axes.PIPELINE)
        )
        found = np.zeros((5, len(nums)))
        for num, in_pairs in product(np.unique(nums), (False, True)):
            here = (nums == num) & ((stages > 1) == in_pairs)
            for row, figures in zip(found, self._count(int(num), in_pairs, sizes, here), strict=True):
                row[here] = figures
        flops, moved, temporary, num_bytes, messages = found
        # an exchange between two devices takes the time of a permute
        sent = SentCollective(PERMUTE, (axes.CONTEXT,), num_bytes, messages)  # pyright: ignore
        return CallCost(flops=flops, moved_bytes=moved, temporary_bytes=temporary, sent=(sent,))

    def _count(self, num: int, in_pairs: bool, sizes: CallSizes, here: Any) -> tuple[Any, ...]:
        """Return flops, moved bytes, temporary bytes, sent bytes and messages, for some of the shardings.

        Args:
          num: number of devices of context.
          in_pairs: whether the devices of a ring exchange in pairs, as in stages of a pipeline.
          sizes: the arrays.
          here: which shardings have these devices.
        """
        queries, keys = self.queries // num, self.keys
        q, kv = sizes.reads[0][here], (sizes.reads[1] + sizes.reads[2])[here]
        q_float, kv_float = (x * FLOAT / self.item_bytes for x in (q, kv))
        # bytes of the scores of all of a device's queries to one key
        of_key = q_float / self.head_dim
        if self.kind == "all-gather":
            # of a causal sequence the last device computes nearly all blocks
            steps, of_four, part, moved, num_blocks = num, 0, 1.0, 0.0, -(-keys // count_block(keys))
            at_once = keys * of_key * count_block(queries) / queries
            visiting, travelling, gradients = num * kv, kv, num * kv_float
            reach = None
        else:
            reach = window_reach(num, queries, self.window) if self.causal and self.window else None
            steps = num if reach is None else 1 + (reach + 1) // 2
            # of blocks of (queries / 2)² scores, as a part of all
            of_four = 2 * num + 1 if reach is None else 2 * (reach + 1)
            part = of_four / (4 * num) if self.causal else 1.0
            moved = compute_moved_part(num) * (2 * q + kv) * (self.causal and reach is None)
            at_once = keys // num * of_key / (4 if self.causal else 1)
            num_blocks = num_key_blocks(keys // num // (1 + self.causal))
            # a send waits only for the send before it, so keys of all steps may arrive before their use;
            # gradients are sent in float32
            visiting, travelling, gradients = steps * kv, kv_float, 3 * kv_float
        products, back = (5, 1) if self.backward else (2, 0)
        arrays, results = ARRAYS[sizes.fuses], 0.0
        if self.kind == "ring":
            pairs = of_four if self.causal else steps
            if num_blocks == 1:
                # without loops, the scores of all steps are alive at once
                arrays = (2 + back) * pairs
            else:
                # compilers add up the gradients of the queries of all loops at the end
                results = back * pairs * q_float / (1 + self.causal)
        # outside of loops, the recomputed forward and the backward share their scores
        products -= self.keys_are_here and num_blocks == 1
        scores = part * keys * of_key
        temporary = (
            q_float * (2 + back) + visiting + gradients * back + at_once / num_blocks * arrays + results
        )
        # a neighbour of a contiguous ring is reached in two exchanges
        hops = (steps - 1) * (2 if in_pairs and num > 2 and reach is not None else 1)
        sent = hops * (kv * (not self.keys_are_here) + travelling * back) + moved
        sends = 2 * hops
        messages = (sends + 2 * bool(np.any(moved))) * (1 + back) - sends * self.keys_are_here
        return (
            products * 2 * part * keys * q_float / FLOAT,
            scores * PASSES[back],
            temporary,
            sent,
            messages,
        )
