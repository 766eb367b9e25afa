"""Compute convolutions that are products as products, where each replica has its own operands.

So are those with a window of one pixel, and the gradients of such kernels. Under vmap jax makes grouped
convolutions of them, and XLA's partitioner then mixes the rows of different devices (seen with jax 0.10.2, on
CPUs). `activation_rules.py` uses this while models are traced.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching


@contextmanager
def products_for_convolutions() -> Iterator[None]:
    """Within this, vmap makes products of convolutions of two batched operands that are products.

    These have a window of one pixel, or one as large as the image, and neither padding nor dilation. What is
    computed stays the same; all others are left to jax.
    """
    tables: Any = (batching.fancy_primitive_batchers, batching.primitive_batchers)
    table = next(each for each in tables if jax.lax.conv_general_dilated_p in each)
    given = table[jax.lax.conv_general_dilated_p]
    table[jax.lax.conv_general_dilated_p] = _rule(given)
    try:
        yield
    finally:
        table[jax.lax.conv_general_dilated_p] = given


def _rule(given: Callable[..., Any]) -> Callable[..., Any]:
    """Return jax's batching rule with an exception for products."""

    def rule(*arguments: Any, **options: Any) -> tuple[jax.Array, int]:
        operands, dims = arguments[-2:]
        if None in dims:
            return given(*arguments, **options)
        # (replicas, batch, features, pixels...) and (replicas, features out, features in, window...)
        specs = options["dimension_numbers"]
        lhs, rhs = (
            jnp.moveaxis(x, dim, 0).transpose(0, *(1 + i for i in spec))
            for x, dim, spec in zip(operands, dims, specs, strict=False)
        )
        if not _is_product(lhs.shape[3:], rhs.shape[3:], options):
            return given(*arguments, **options)
        out_spec = specs[2]
        y = _product(lhs, rhs, options)
        return y.transpose(0, *(1 + out_spec.index(i) for i in range(len(out_spec)))), 0

    return rule


def _is_product(pixels: tuple[int, ...], window: tuple[int, ...], options: dict[str, Any]) -> bool:
    whole = pixels == window
    one_pixel = math.prod(window) == 1 and all(by == 1 for by in options["window_strides"])
    return (
        (whole or one_pixel)
        and options["batch_group_count"] == 1
        and all(low == high == 0 for low, high in options["padding"])
        and all(by == 1 for by in (*options["lhs_dilation"], *options["rhs_dilation"]))
        and not any(getattr(options.get("out_sharding"), "spec", ()))
    )


def _product(lhs: jax.Array, rhs: jax.Array, options: dict[str, Any]) -> jax.Array:
    """Return (replicas, batch, features out, pixels...)."""
    groups, pixels, window = options["feature_group_count"], lhs.shape[3:], rhs.shape[3:]
    lhs = lhs.reshape(*lhs.shape[:2], groups, -1, math.prod(pixels))
    rhs = rhs.reshape(rhs.shape[0], groups, -1, rhs.shape[2], math.prod(window))
    form = "rbgfs,rgofs->rbgo" if pixels == window else "rbgfs,rgofw->rbgos"
    y = jnp.einsum(
        form,
        lhs,
        rhs,
        precision=options["precision"],
        preferred_element_type=options["preferred_element_type"],
    )
    left = [1] * len(pixels) if pixels == window else pixels
    return y.reshape(*lhs.shape[:2], -1, *left)
