"""Published methods to partition layers, by name, which a search is compared with. No jax."""

from collections.abc import Mapping
from functools import partial

from shardtrain.plan.layers.assignment import Chooser, Layers, choose_best, choose_least
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
    find_speed_ratio,
    list_splits,
)


def data_parallel(layers: Layers, sides: Sides, level: int = 0) -> tuple[Split, ...]:
    """Split every layer by the batch, in proportion to speed; see `Chooser`."""
    ways = [TYPE_I if layer.has_weights else ROWS for layer in layers]
    return _use_allowed(layers, sides, ways, find_speed_ratio(sides))


def one_weird_trick(layers: Layers, sides: Sides, level: int = 0) -> tuple[Split, ...]:
    """Split convolutions by the batch and matrix products by features, in halves (Krizhevsky 2014).

    Matrix products are split by input features, as AccPar's authors count it.
    """
    ways = [TYPE_II if layer.kind == PRODUCT else TYPE_I if layer.has_weights else ROWS for layer in layers]
    return _use_allowed(layers, sides, ways, 0.5)


def hypar(layers: Layers, sides: Sides, level: int = 0) -> tuple[Split, ...]:
    """Split by types I and II, in halves, with the least communication (Song et al. 2019, HyPar)."""
    choices = [
        tuple(dict.fromkeys(Split(split.way, 0.5) for split in list_splits(layer, sides, (TYPE_I, TYPE_II))))
        for layer in layers
    ]
    return choose_least(layers, sides, choices)


def find_tensor_type(layer: Layer, dims: frozenset[str]) -> str:
    """Return the type by which rules that shard some dims over one mesh axis split a layer.

    A layer with such a dim is split by its input features, or else by its output features. All devices
    compute any other layer, and residual sums. Products of activations are split by heads.
    """
    if not layer.has_weights:
        return WHOLE if layer.kind == JOIN else FEATURES
    by_output = TYPE_III if dims & set(layer.dims_out) else WHOLE
    return TYPE_II if dims & set(layer.dims_in) else by_output


def mesh_levels(data_levels: int, dims: frozenset[str]) -> Chooser:
    """Return the method of Megatron: a mesh with data outermost and tensor inside, without a pipeline.

    Args:
      data_levels: number of levels, from the top, that are split by the batch; all others are split by dims.
      dims: names of the dims that the axis tensor shards.
    """

    def choose(layers: Layers, sides: Sides, level: int) -> tuple[Split, ...]:
        if level < data_levels:
            return data_parallel(layers, sides, level)
        ways = [find_tensor_type(layer, dims) for layer in layers]
        return _use_allowed(layers, sides, ways, find_speed_ratio(sides))

    return choose


def _use_allowed(layers: Layers, sides: Sides, ways: list[str], ratio: float) -> tuple[Split, ...]:
    """Return the splits of these types; both groups compute a layer whose sizes do not allow its type."""
    allowed = [{split.way for split in list_splits(layer, sides)} for layer in layers]
    return tuple(
        Split(way if way in of_layer else WHOLE, ratio) for way, of_layer in zip(ways, allowed, strict=True)
    )


COPIES = "accpar with copies"
"""The method in which both groups may compute all of a layer."""

BASELINES: Mapping[str, Chooser] = {
    "data parallel": data_parallel,
    "one weird trick": one_weird_trick,
    "hypar": hypar,
    "accpar": choose_best,
    COPIES: partial(choose_best, ways=(*WEIGHTED, WHOLE)),
}
"""Name -> method."""
