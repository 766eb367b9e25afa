"""Start a decoder with experts from a dense decoder: copy its feed-forward into each expert (upcycling).

`shardtrain.trainer.pretrained` reads the dense model through this module; routers are initialised at random.

References:
  Komatsuzaki et al. 2022, Sparse Upcycling, arXiv 2212.05055, section 2.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from shardtrain.axes import MLP
from shardtrain.errors.messages import refuse
from shardtrain.models.experts_options import Experts
from shardtrain.models.huggingface.families import ParameterReader

DENSE = {f"blocks/mlp/{which}/kernel": f"blocks/mlp/{which}" for which in ("up", "gate", "down")}
"""Path of a linear map of the feed-forward -> path of the same map of all experts."""

ROUTER = "blocks/mlp/router"


def upcycle(config: Any, parameters: Mapping[str, Any]) -> dict[str, ParameterReader]:
    """Return the parameters of a decoder with experts, except its router, as copies of a dense decoder's.

    If the weights of a token's experts add up to 1, its outputs are those of the dense model.

    Args:
      config: the configuration of the model with experts.
      parameters: path -> parameter of the dense model, blocks stacked, with `shape` and `read`; nothing is
        read here.

    Raises:
      ValueError: lists why the parameters cannot be copied.
    """
    options: Experts | None = getattr(config, "experts", None)
    refuse("a model with experts from a dense one", _find_problems(config, options, parameters))
    assert options is not None
    found = {path: each for path, each in parameters.items() if path not in DENSE}
    for path, of_experts in DENSE.items():
        if path in parameters:
            found[of_experts] = _repeat(parameters[path], options.num)
    return found


def _repeat(dense: Any, num: int) -> ParameterReader:
    """Repeat a parameter for all experts: (layers, in, out) becomes (layers, experts, in, out)."""
    layers, *rest = dense.shape
    shape = (layers, num, *rest)

    def read() -> np.ndarray:
        # a view: nothing is copied before devices get their shards
        return np.broadcast_to(np.asarray(dense.read())[:, None], shape)

    if dense.read_one is None:
        return ParameterReader(shape, read)
    return ParameterReader(shape, read, (layers, num), partial(_read_block, dense.read_one, num))


def _read_block(read_one: Any, num: int, number: int) -> np.ndarray:
    return read_one(number // num)


def _find_problems(config: Any, options: Experts | None, parameters: Mapping[str, Any]) -> list[str]:
    if options is None:
        return ["experts is None; give the experts, such as --model.experts num=8,top=2"]
    if ROUTER in parameters or "blocks/mlp/up/kernel" not in parameters:
        return ["that model is no dense decoder, whose feed-forward could be copied; start without upcycle"]
    found = []
    if options.shared:
        found.append(
            f"shared is {options.shared}; a shared feed-forward would be added to experts that already"
            " compute the dense one's output: leave it out"
        )
    if biases := [path for path in parameters if path.startswith("blocks/mlp/") and path.endswith("/bias")]:
        found.append(f"experts have no biases, and the dense feed-forward has {', '.join(biases)}")
    size, wanted = parameters["blocks/mlp/up/kernel"].shape[-1], config.sizes[MLP]
    if size != wanted:
        found.append(f"mlp is {wanted}; a copy of the dense feed-forward has {size}. Use mlp={size}.")
    return found
