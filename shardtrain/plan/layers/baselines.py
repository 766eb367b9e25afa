"""Ways to partition layers that others use, by name: what a search is compared with. No jax."""

from collections.abc import Mapping
from functools import partial

from shardtrain.plan.layers.assignment import Chooser, Layers, exact, least
from shardtrain.plan.layers.layer_graph import JOIN, PRODUCT, Layer
from shardtrain.plan.layers.partition import (
    FEATURES,
    ROWS,
    TYPE_I,
    TYPE_II,
    TYPE_III,
    WEIGHTED,
    WHOLE,
    Sides,
    Split,
    splits,
)


def find_speed_part(sides: Sides) -> float:
    """Return the first group's part of the flops per second."""
    first, second = (side.flops_per_second for side in sides)
    return first / (first + second)


def data_parallel(layers: Layers, sides: Sides, level: int = 0) -> tuple[Split, ...]:
    """Every layer by the batch, in proportion to speed; see `Chooser`."""
    ways = [TYPE_I if layer.has_weights else ROWS for layer in layers]
    return _fitting(layers, sides, ways, find_speed_part(sides))


def one_weird_trick(layers: Layers, sides: Sides, level: int = 0) -> tuple[Split, ...]:
    """Convolutions by the batch, matrix products by features (Krizhevsky 2014); in halves, as published.

    Matrix products are split by input features, as AccPar's authors count it.
    """
    ways = [TYPE_II if layer.kind == PRODUCT else TYPE_I if layer.has_weights else ROWS for layer in layers]
    return _fitting(layers, sides, ways, 0.5)


def hypar(layers: Layers, sides: Sides, level: int = 0) -> tuple[Split, ...]:
    """Types I and II alone, in halves, with the least communication (Song et al. 2019, HyPar).

    The time to compute is left out, as both halves have as much.
    """
    choices = [
        tuple(dict.fromkeys(Split(split.way, 0.5) for split in splits(layer, sides, (TYPE_I, TYPE_II))))
        for layer in layers
    ]
    return least(layers, sides, choices)


def split_by_dims(layers: Layers, sides: Sides, level: int = 0, *, dims: frozenset[str]) -> tuple[Split, ...]:
    """The types that rules for dims give, if one mesh axis shards these: what a tensor axis runs.

    Args:
      layers, sides, level: as `Chooser`.
      dims: the names of the dims.
    """
    return _fitting(layers, sides, [tensor_way(layer, dims) for layer in layers], find_speed_part(sides))


def tensor_way(layer: Layer, dims: frozenset[str]) -> str:
    """Return how rules for dims partition a layer over one mesh axis.

    By input features if these have such a dim, else by output features if those have one; else it is computed
    by all devices, as are residual sums. Products of activations are split by heads.
    """
    if not layer.has_weights:
        return WHOLE if layer.kind == JOIN else FEATURES
    by_output = TYPE_III if dims & set(layer.dims_out) else WHOLE
    return TYPE_II if dims & set(layer.dims_in) else by_output


def mesh_levels(data_levels: int, dims: frozenset[str]) -> Chooser:
    """Return the ways of a mesh with data outermost and tensor inside: Megatron's, without a pipeline.

    Args:
      data_levels: how many levels, from the top, are split by the batch; the others by dims.
      dims: that the axis tensor shards.
    """

    def choose(layers: Layers, sides: Sides, level: int) -> tuple[Split, ...]:
        if level < data_levels:
            return data_parallel(layers, sides, level)
        return split_by_dims(layers, sides, level, dims=dims)

    return choose


def _fitting(layers: Layers, sides: Sides, ways: list[str], ratio: float) -> tuple[Split, ...]:
    """Return these ways; where the sizes of a layer do not allow its own, both groups compute all of it."""
    allowed = [{split.way for split in splits(layer, sides)} for layer in layers]
    return tuple(
        Split(way if way in of_layer else WHOLE, ratio) for way, of_layer in zip(ways, allowed, strict=True)
    )


BASELINES: Mapping[str, Chooser] = {
    "data parallel": data_parallel,
    "one weird trick": one_weird_trick,
    "hypar": hypar,
    "accpar": exact,
    "accpar with copies": partial(exact, ways=(*WEIGHTED, WHOLE)),
}
"""Name -> how layers are partitioned; with copies, both groups may compute all of a layer."""
