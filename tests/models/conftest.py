"""Models as pure functions over plain dicts, by nnx alone: no test of a model needs the trainer."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardtrain.functional.run_trace import give_ops


@dataclass(frozen=True, kw_only=True)
class Pure:
    """Parameters, the dims of each, and (params, *inputs) -> outputs."""

    params: dict[str, Any]
    dims: dict[str, Any]
    apply: Callable[..., Any]


@functools.cache
def _pure(config):
    graph, state, rest = nnx.split(nnx.eval_shape(lambda: config(nnx.Rngs(0))), nnx.Param, ...)
    flat = nnx.to_flat_state(state)
    rng = np.random.default_rng(1)

    def apply(params, *inputs):
        filled = [
            (path, v.replace(functools.reduce(lambda tree, key: tree[key], path, params))) for path, v in flat
        ]
        return give_ops(nnx.merge(graph, nnx.from_flat_state(filled), rest))(*inputs)

    def draw(path, shape):
        """Far from the symmetric initial values: biases are not 0, scales not 1, logits spread."""
        return rng.normal(path[-1] == "scale", 0.25, shape).astype(np.float32)

    return Pure(
        params=nested((path, draw(path, v.shape)) for path, v in flat),
        dims=nested((path, v.get_metadata()["out_sharding"]) for path, v in flat),
        apply=apply,
    )


def nested(items):
    tree = {}
    for (*parents, name), leaf in items:
        functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[name] = leaf
    return tree


@pytest.fixture(scope="session")
def pure():
    """Config -> Pure, made once each; nothing is compiled."""
    return _pure


def _seeded(config, params, seed, deterministic=False):
    module: Any = nnx.view(nnx.eval_shape(lambda: config(nnx.Rngs(0))), deterministic=deterministic)
    graph, state, rngs = nnx.split(module, nnx.Param, ...)
    nnx.replace_by_pure_dict(state, params)
    counts = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nnx.filter_state(rngs, nnx.RngCount))
    keys = jax.tree.map(lambda _: jax.random.key(seed), nnx.filter_state(rngs, nnx.RngKey))
    return nnx.merge(graph, state, counts, keys)


@pytest.fixture(scope="session")
def seeded():
    """(config, params, seed, deterministic=False) -> the model, its dropout freshly seeded."""
    return _seeded


@pytest.fixture(scope="session")
def quick_jit():
    """`jax.jit` that spends half the time on compiling; the programs of these tests run once or twice."""
    return functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
