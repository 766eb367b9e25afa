"""Shared parts of the convolutional networks: options, a convolution over named dims, norms, a base model.

Images are (batch, height, width, channels). The input of a convolution has the dim channels_in, which is
replicated; its output has channels_out, which may be sharded: norms and activations work on shards.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import BATCH, CHANNELS_IN, CHANNELS_OUT, HEIGHT, LAYERS, VOCAB, WIDTH
from shardtrain.errors.options import CheckedOptions
from shardtrain.models import checks
from shardtrain.models.layers import Linear, cast_and_constrain, normal, parameter

ImageNorms = Literal["group", "batch"]

ENTERING = (BATCH, HEIGHT, WIDTH, CHANNELS_IN)
WRITTEN = (BATCH, HEIGHT, WIDTH, CHANNELS_OUT)
EPS = 1e-5
MOMENTUM = 0.9
"""Weight of the old value in a running statistic."""


@dataclass(frozen=True, kw_only=True)
class ImageOptions(CheckedOptions):
    """Options of all convolutional networks.

    Args:
      filters: number of channels of the first convolution.
      height: rows of an image.
      width: columns of an image.
      colours: channels of an image.
      classes: number of classes, the dim vocab.
      norm: "group" gives the same results however a batch is split. "batch" does not, as its statistics are
        of one microbatch of one replica; its running statistics are model state.
      num_groups: number of channel groups of a group norm. With num_groups=filters each group is one channel,
        and its mean cancels the bias of the convolution.
      remat: whether the backward pass recomputes each block from its input.
      dtype: compute dtype; parameters, norms and logits are float32.

    Raises:
      ValueError: listing every option that is out of range or does not fit another.
    """

    filters: int
    height: int = 32
    width: int = 32
    colours: int = 3
    classes: int = 10
    norm: ImageNorms = "group"
    num_groups: int = 4
    remat: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def list_problems(self) -> list[str]:
        """List the options that are out of range or do not fit another."""
        found = checks.numbers(self)
        if self.norm == "group" and self.filters > 0 and self.num_groups > 0:
            found += checks.multiple("filters", self.filters, "num_groups", self.num_groups)
        return found


class Convolution(nnx.Module):
    """A convolution with a square window, padded so that a stride of 1 keeps the size.

    With a larger stride the padding is as small as possible, an odd zero at the end ("SAME"); `both_sides`
    pads half a window on each side, as PyTorch's models do.

    Initial values are those of He et al. 2015, https://arxiv.org/abs/1502.01852, section 2.2. `of_image` is
    for the convolution that reads the image, as no mesh axis divides its few colours: the kernel has the
      shape
    (height, width x colours, channels_out).
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        window: int,
        *,
        stride: int = 1,
        of_image: bool = False,
        bias: bool = True,
        both_sides: bool = False,
        dtype: str,
        rngs: nnx.Rngs,
    ):
        self.stride, self.dtype = stride, dtype
        self.padding = ((window // 2, window // 2),) * 2 if both_sides else "SAME"
        sizes = {HEIGHT: window, WIDTH: window, CHANNELS_IN: channels_in, CHANNELS_OUT: channels_out}
        self.dims = (HEIGHT, WIDTH, CHANNELS_IN, CHANNELS_OUT)
        self.shape = tuple(sizes[dim] for dim in self.dims)
        if of_image:
            self.dims, sizes[WIDTH] = (HEIGHT, WIDTH, CHANNELS_OUT), window * channels_in
        std = (2 / (window * window * channels_in)) ** 0.5
        self.kernel = normal(self.dims, sizes=sizes, std=std, rngs=rngs)
        self.bias = parameter(jnp.zeros(channels_out), (CHANNELS_OUT,)) if bias else None

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        kernel = cast_and_constrain(self.kernel, self.dims, self.dtype).reshape(self.shape)
        y_BHWC = jax.lax.conv_general_dilated(
            with_logical_constraint(x_BHWC, ENTERING),
            kernel,
            (self.stride, self.stride),
            self.padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        if self.bias is not None:
            y_BHWC += cast_and_constrain(self.bias, (CHANNELS_OUT,), self.dtype)
        return with_logical_constraint(y_BHWC, WRITTEN)


class ChannelNorm(nnx.Module):
    """Group or batch norm with a scale and a bias for each channel, computed in float32.

    Args:
      kind: "group" computes statistics of each image over its pixels and the channels of a group, so that no
        image depends on another. "batch" computes them over the images of one microbatch of one replica, and
        keeps running averages as state, which evaluation uses.
      num_groups: number of groups of a "group" norm; it divides `channels`.

    References:
      Wu and He 2018, Group normalization, https://arxiv.org/abs/1803.08494; Ioffe and Szegedy 2015, Batch
      normalization, https://arxiv.org/abs/1502.03167.
    """

    def __init__(self, kind: ImageNorms, channels: int, *, num_groups: int, dtype: str):
        self.kind, self.num_groups, self.dtype = kind, num_groups, dtype
        self.scale = parameter(jnp.ones(channels), (CHANNELS_OUT,))
        self.bias = parameter(jnp.zeros(channels), (CHANNELS_OUT,))
        if kind == "batch":
            self.mean = nnx.BatchStat(jnp.zeros(channels))
            self.variance = nnx.BatchStat(jnp.ones(channels))
        self.use_running_average = False

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Let `nnx.view(model, use_running_average=True)` switch to evaluation.

        Args:
          use_running_average: whether batch norm reads its running statistics instead of the batch's.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        x_BHWC = x_BHWC.astype(jnp.float32)
        y_BHWC = self._norm_groups(x_BHWC) if self.kind == "group" else self._norm_batch(x_BHWC)
        y_BHWC = y_BHWC * cast_and_constrain(self.scale, (CHANNELS_OUT,), "float32")
        return (y_BHWC + cast_and_constrain(self.bias, (CHANNELS_OUT,), "float32")).astype(self.dtype)

    def _norm_groups(self, x_BHWC: jax.Array) -> jax.Array:
        x = x_BHWC.reshape(*x_BHWC.shape[:3], self.num_groups, -1)
        x = x - jnp.mean(x, axis=(1, 2, 4), keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=(1, 2, 4), keepdims=True) + EPS)
        return x.reshape(x_BHWC.shape)

    def _norm_batch(self, x_BHWC: jax.Array) -> jax.Array:
        if self.use_running_average:
            return (x_BHWC - self.mean[...]) * jax.lax.rsqrt(self.variance[...] + EPS)
        mean_C = jnp.mean(x_BHWC, axis=(0, 1, 2))
        variance_C = jnp.mean(jnp.square(x_BHWC - mean_C), axis=(0, 1, 2))
        for running, new_C in ((self.mean, mean_C), (self.variance, variance_C)):
            # an index would look for the sharding of a traced array, which takes long in a large program
            running.set_value(MOMENTUM * running[...] + (1 - MOMENTUM) * jax.lax.stop_gradient(new_C))
        return (x_BHWC - mean_C) * jax.lax.rsqrt(variance_C + EPS)


def make_channel_norm(config: ImageOptions, channels: int) -> ChannelNorm:
    """Make the norm over channels of a configuration."""
    return ChannelNorm(config.norm, channels, num_groups=config.num_groups, dtype=config.dtype)


class Stack(nnx.Module):
    """Equal blocks that are stored as one: each array has a first dim layers, with a row for each block.

    `run_blocks` applies them. A network of many blocks then has few arrays, and programs that update, save
    and send arrays stay small.

    Args:
      make: makes a block from the key of its parameters; called once, under vmap.
      keys: keys of the blocks, (blocks,).
    """

    def __init__(self, make: Callable[[jax.Array], nnx.Module], keys: jax.Array):
        self.number = keys.shape[0]
        self.block = nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: LAYERS})(keys)


def run_blocks(blocks: Sequence[nnx.Module], x: jax.Array, *, remat: bool, scan: bool) -> jax.Array:
    """Apply blocks to an array, in order.

    Args:
      blocks: modules that map an array to an array, and stacks of such modules; their running statistics are
        updated.
      x: the input of the first block.
      remat: whether the backward pass recomputes each block from its input.
      scan: whether neighbouring blocks that differ only in their values become one loop of the compiled
        program.

    Returns:
      The output of the last block.
    """
    for _, alike in itertools.groupby(blocks, _kind if scan else id):
        alike = list(alike)
        in_stacks = isinstance(alike[0], Stack)
        modules = [block.block if isinstance(block, Stack) else block for block in alike]
        graph, *_ = nnx.split(modules[0], nnx.BatchStat, ...)
        states = [nnx.split(module, nnx.BatchStat, ...)[1:] for module in modules]

        # made anew at each call: jax keeps traces by function, whatever rules they were made under
        def call(x: jax.Array, states: Any, graph: Any = graph) -> tuple[jax.Array, Any]:
            block = nnx.merge(graph, *states)
            return block(x), nnx.state(block, nnx.BatchStat)

        looped = scan and (in_stacks or len(alike) > 1)
        call = jax.checkpoint(call, prevent_cse=not looped) if remat else call
        if not (in_stacks or looped):
            x, running = call(x, states[0])
            nnx.update(modules[0], running)
            continue
        join = jnp.concatenate if in_stacks else jnp.stack
        rows = jax.tree.map(lambda *leaves, join=join: join(leaves), *states)
        x, running = jax.lax.scan(call, x, rows) if looped else _unroll(call, x, rows)
        begin = 0
        for block, module in zip(alike, modules, strict=True):
            at = slice(begin, begin + block.number) if isinstance(block, Stack) else begin
            nnx.update(module, jax.tree.map(lambda leaf, at=at: leaf[at], running))
            begin += block.number if isinstance(block, Stack) else 1
    return x


def _unroll(call: Callable[..., Any], x: jax.Array, rows: Any) -> tuple[jax.Array, Any]:
    """Apply blocks as `jax.lax.scan` does, without a loop in the program."""
    found = []
    for i in range(jax.tree.leaves(rows)[0].shape[0]):
        x, running = call(x, jax.tree.map(lambda leaf, i=i: leaf[i], rows))
        found.append(running)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)


def _kind(block: nnx.Module) -> tuple[Any, ...]:
    """Return a key that is equal for blocks that differ only in the values of their parameters."""
    graph, state = nnx.split(block)
    return graph, *((path, x.shape, x.dtype) for path, x in nnx.to_flat_state(state))


def check_images(shape: tuple[int, ...], expected: tuple[int, int, int]) -> None:
    """Check that images are (batch, height, width, colours) of the model.

    Raises:
      ValueError: they are not; with the sizes to build the model with.

    >>> check_images((2, 8, 8), (8, 8, 1))
    Traceback (most recent call last):
    ValueError: images of shape (8, 8) were given to a model of (8, 8, 1). Give four dims, the last of size 1.
    """
    if shape[1:] == expected:
        return
    named = zip(("height", "width", "colours"), shape[1:], strict=False)
    change = f"Give four dims, the last of size {expected[2]}."
    if len(shape) == 4:
        change = f"Build it with {', '.join(f'{name}={size}' for name, size in named)}."
    raise ValueError(f"images of shape {shape[1:]} were given to a model of {expected}. {change}")


class ImageModel(nnx.Module):
    """A model from images to logits: a call composes `first`, `run` on `blocks`, and `last`."""

    config: Any
    blocks: Any

    def __call__(self, images: jax.Array) -> jax.Array:
        """Score each image against the classes.

        Args:
          images: float (batch, height, width, colours).

        Returns:
          Logits (batch, classes), float32.

        Raises:
          ValueError: if the images are of another size than the model's.
        """
        return self.last(self.run(self.blocks, self.first(images), self.block_keys()))

    def read_images(self, images: jax.Array) -> jax.Array:
        """Check the size of images, and cast them to the compute dtype."""
        check_images(images.shape, (self.config.height, self.config.width, self.config.colours))
        return images.astype(self.config.dtype)

    def first(self, images: jax.Array) -> jax.Array:
        """Return the input of the first block."""
        raise NotImplementedError

    def block_keys(self) -> None:
        """Return None, as no block draws random numbers."""
        return

    def run(self, blocks: Any, x_BHWC: jax.Array, keys: None = None) -> jax.Array:
        """Apply blocks to images, in order: all, or those of a pipeline stage."""
        scan = getattr(self.config, "scan", False)
        return run_blocks(blocks, x_BHWC, remat=self.config.remat, scan=scan)

    def last(self, x_BHWC: jax.Array) -> jax.Array:
        """Return the logits, from the output of the last block."""
        raise NotImplementedError

    def make_head(self, channels: int, std: float, rngs: nnx.Rngs) -> Linear:
        """Make the linear map from channels to classes."""
        sizes = {CHANNELS_IN: channels, VOCAB: self.config.classes}
        return Linear(
            (CHANNELS_IN,), (VOCAB,), sizes=sizes, std=std, bias=True, dtype=self.config.dtype, rngs=rngs
        )

    def score(self, head: Linear, x_BC: jax.Array) -> jax.Array:
        """Return the float32 logits of an image's channels."""
        logits_BV = head(with_logical_constraint(x_BC, (BATCH, CHANNELS_IN)))
        return with_logical_constraint(logits_BV.astype(jnp.float32), (BATCH, VOCAB))
