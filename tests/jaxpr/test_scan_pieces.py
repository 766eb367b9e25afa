"""Programs evaluated in pieces, and cut, compute what they computed whole."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardtrain.jaxpr.cost import estimate_ready_costs, parts_by_cost
from shardtrain.jaxpr.cut import cut_program
from shardtrain.jaxpr.forward import evaluate
from shardtrain.jaxpr.scan_pieces import Pieces, PiecewiseProgram

WEIGHTS, X = jnp.linspace(-1, 1, 5 * 4 * 4).reshape(5, 4, 4), jnp.linspace(0, 1, 64).reshape(16, 4)


def gradients(weights, x):
    """The stacked gradients of five layers after equations of every kind behind a scan, and their order."""

    def loss(weights):
        last, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
        return (last**2).sum()

    total, grads = jax.value_and_grad(loss)(weights)
    grads = 2 * grads[None]
    by_column = jnp.transpose(grads.reshape(1, 1, 5, 4, 4).sum(1), (2, 0, 1, 3))
    return {"rows": jnp.squeeze(by_column, 1), "sorted": jnp.sort(grads, 1), "loss": total}


def test_pieces_stay_apart_until_an_equation_needs_all_rows():
    traced, shapes = jax.make_jaxpr(gradients, return_shape=True)(WEIGHTS, X)
    found = jax.tree.unflatten(jax.tree.structure(shapes), PiecewiseProgram(3).run(traced, [WEIGHTS, X]))
    expected = gradients(WEIGHTS, X)
    rows = found["rows"]
    assert isinstance(rows, Pieces)
    assert (rows.dim, rows.bounds) == (1, [(0, 1), (1, 3), (3, 5)])
    # sorted along the layers: of all rows
    assert not isinstance(found["sorted"], Pieces)
    for name, got in {**found, "rows": rows.whole}.items():
        np.testing.assert_allclose(got, expected[name], 1e-6, 1e-7, err_msg=name)


def test_each_program_computes_what_earlier_ones_did_not():
    structure = jax.tree.structure(jax.eval_shape(gradients, WEIGHTS, X))
    inner = jax.make_jaxpr(gradients)(WEIGHTS, X)

    def run(*inputs):
        found = jax.tree.unflatten(structure, PiecewiseProgram(3).run(inner, inputs))
        return [found["loss"], *found["rows"].arrays]

    traced = jax.make_jaxpr(run)(WEIGHTS, X)
    start, *costs = estimate_ready_costs(traced)
    part_of = parts_by_cost(costs, start, 3)
    assert part_of == [2, 1, 0]  # the last layers first
    parts = cut_program(traced, [0, *part_of], 3)
    # no scan of the forward or backward pass is in two of them
    num_scans = [sum(e.primitive.name == "scan" for e in part.closed.jaxpr.eqns) for part in parts]
    assert num_scans == [2, 1, 1]
    inputs, values, outputs = [WEIGHTS, X], {}, {}
    for part in parts:
        given = [*(inputs[n] for n in part.reads), *(values[v] for v in part.received)]
        found = evaluate(part.closed, given)
        outputs |= dict(zip(part.returns, found, strict=False))
        values |= dict(zip(part.sent, found[len(part.returns) :], strict=True))
    got = jnp.concatenate([outputs[n] for n in (1, 2, 3)], 1)
    np.testing.assert_allclose(got, gradients(WEIGHTS, X)["rows"], 1e-6, 1e-7)
