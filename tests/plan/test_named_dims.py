"""Dims and operations of single equations of a traced program."""

import jax
import jax.numpy as jnp
import pytest

from shardtrain.plan.named_dims import find_names

ROWS, INTO, OUT, GROUPS = 8, 4, 3, 2


def products(function, *arguments):
    """The ragged products in a traced function: what they give, with the names that go in."""
    names = {
        (ROWS, INTO): ("batch", "embed"),
        (ROWS, OUT): ("batch", "mlp"),
        (GROUPS, INTO, OUT): (None, "embed", "mlp"),
    }
    for equation in jax.make_jaxpr(function)(*arguments).eqns:
        if equation.primitive.name == "ragged_dot_general":
            shapes = [atom.aval.shape for atom in equation.invars]  # type: ignore[union-attr]
            dims = [names.get(shape, (None,) * len(shape)) for shape in shapes]
            yield find_names(equation, dims)


@pytest.mark.parametrize("in_one_group", [True, False])
def test_each_of_the_three_ragged_products_has_the_flops_of_one_kernel(in_one_group):
    counts = jnp.array([ROWS, 0] if in_one_group else [3, 5])
    loss = lambda x, kernel: jax.lax.ragged_dot(x, kernel, counts).sum()  # noqa: E731
    found = list(products(jax.grad(loss, (0, 1)), jnp.ones((ROWS, INTO)), jnp.ones((GROUPS, INTO, OUT))))
    assert [each.flops for each in found] == [2 * ROWS * INTO * OUT] * 3
    # the product; the gradient of the kernel; that of the rows
    assert [each.outputs for each in found] == [
        (("batch", "mlp"),),
        ((None, "embed", "mlp"),),
        (("batch", "embed"),),
    ]
    assert [each.summed for each in found] == [("embed",), ("batch",), ("mlp",)]
