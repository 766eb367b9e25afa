"""Multiply activations with a kernel so that XLA for CPUs computes its gradient by a fast library.

The transpose of jax's own product computes the gradient of the kernel as (g^T x)^T, which XLA turns into a
product that its library does not support. Here a custom transposition rule computes x^T g. Unlike with
`jax.custom_vjp`, models keep forward-mode derivatives. Next: `cpus.py`, which uses it.
"""

from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


@jax.custom_jvp
def kernel_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply activations (..., in) with a kernel (in, out); in `shard_map` only with check_vma=False."""
    return _product(x, kernel)


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


def _derivative(primals: Any, tangents: Any) -> tuple[jax.Array, Any]:
    (x, kernel), (dx, dkernel) = primals, tangents
    # a frozen kernel or a batch has no tangent, and nothing is computed for it
    terms = [] if isinstance(dx, SymbolicZero) else [_product(dx, kernel)]
    terms += [] if isinstance(dkernel, SymbolicZero) else [_TANGENT.bind(x, dkernel)]
    y = _product(x, kernel)
    return y, sum(terms[1:], terms[0]) if terms else SymbolicZero(jax.typeof(y).to_tangent_aval())


kernel_product.defjvp(_derivative, symbolic_zeros=True)

_TANGENT = Primitive("product_with_tangent")
"""The same product, with the tangent of a kernel. Programs of gradients contain only its transpose."""


def _gradient_of_activations(g: jax.Array, x: Any, kernel: jax.Array) -> jax.Array:
    return lax.dot_general(g, kernel, (((g.ndim - 1,), (1,)), ((), ())))


def _gradient_of_kernel(g: jax.Array, x: jax.Array, kernel: Any) -> jax.Array:
    rows = tuple(range(x.ndim - 1))
    return lax.dot_general(x, g, ((rows, rows), ((), ())))


def _batch(arguments: Any, dims: Any) -> tuple[jax.Array, int]:
    return jax.vmap(_product, dims)(*arguments), 0


_TANGENT.def_impl(_product)
_TANGENT.def_abstract_eval(lambda x, kernel: jax.typeof(jax.eval_shape(_product, x, kernel)))
ad.defbilinear(_TANGENT, _gradient_of_activations, _gradient_of_kernel)
batching.primitive_batchers[_TANGENT] = _batch
mlir.register_lowering(_TANGENT, mlir.lower_fun(_product, multiple_results=False))
