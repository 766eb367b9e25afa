"""The contract of following programs: values, dependences and parts, through all operations with programs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from shardtrain.jaxpr.cut import cut_program
from shardtrain.jaxpr.equations import list_equations
from shardtrain.jaxpr.forward import bind, dependencies, evaluate, find_read, inline, prune

A, B, C = jnp.linspace(0.1, 1, 6), jnp.linspace(-1, 1, 6), jnp.linspace(2, 3, 6)
TABLE = np.arange(6.0, dtype=np.float32)


@jax.custom_jvp
def custom(x):
    return jnp.sin(x)


custom.defjvps(lambda dx, _, x: dx * jnp.cos(x))


@jax.custom_vjp
def custom_pair(x, y):
    return x * 2, y + 1


custom_pair.defvjp(lambda x, y: (custom_pair(x, y), None), lambda _, d: d)


def scanned(a, b, c):
    """The second carried array depends on the first after one step, and on `a` after two."""

    def step(carry, row):
        first, second = carry
        return (first * 0.5 + a.sum(), first + second), row * 3

    (first, second), rows = lax.scan(step, (b[0], b[1]), c)
    return first, second, rows


def looped(a, b, c):
    return lax.while_loop(lambda s: s[0].sum() < 9, lambda s: (s[0] + 1, s[1] * 2, s[2]), (a, b, c))


def mapped(a, b, c):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")
    return jax.shard_map(lambda x, y: (x + 1, y * 2), mesh=mesh, in_specs=spec, out_specs=spec)(a, b)


PROGRAMS = {
    "constants": (lambda a, b, c: (a + TABLE, b * 2), [1, 2]),
    "calls": (lambda a, b, c: jax.jit(lambda x, y: (y, x * jax.jit(jnp.tanh)(x)))(a, b), [2, 1]),
    "remat": (lambda a, b, c: jax.checkpoint(lambda x, y: (x * y, y))(a, b), [3, 2]),
    "custom_jvp": (lambda a, b, c: (custom(a), custom(b + c)), [1, 6]),
    "custom_vjp": (lambda a, b, c: custom_pair(a, c), [1, 4]),
    "cond": (lambda a, b, c: lax.cond(a[0] > 0, lambda x, y: (x, y), lambda x, y: (x * 2, -y), b, c), [3, 5]),
    "switch": (lambda a, b, c: lax.switch(1, [jnp.sin, lambda x: x * 2, lambda x: x], a), [1]),
    "scan": (scanned, [3, 3, 4]),
    "while": (looped, [1, 3, 4]),
    "shard_map": (mapped, [1, 2]),
}
"""Name -> (function of three arrays, the groups of inputs that each of its outputs depends on)."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_followed(name):
    function, groups = PROGRAMS[name]
    expected = jax.tree.leaves(function(A, B, C))
    program = jax.make_jaxpr(function)(A, B, C)
    same = partial(np.testing.assert_allclose, rtol=1e-6)
    # each way of running it gives what the function gives
    flat = inline(program)
    for outputs in (
        evaluate(program, (A, B, C)),
        evaluate(program, (A, B, C), bind),
        evaluate(flat, (A, B, C)),
    ):
        jax.tree.map(same, outputs, expected)
    left = {equation.primitive.name for equation in flat.eqns}
    assert not left & {"jit", "pjit", "closed_call", "remat2", "checkpoint", "custom_jvp_call"}
    assert dependencies(program, [1, 2, 4]) == dependencies(flat, [1, 2, 4]) == groups
    for number, read in enumerate(groups):
        # pruned to one output, it reads at most what that depends on
        pruned, is_used = prune(program, [n == number for n in range(len(groups))])
        (output,) = evaluate(pruned, [x for x, used in zip((A, B, C), is_used, strict=True) if used])
        same(output, expected[number])
        if name not in ("custom_vjp", "while"):  # of which jax keeps all inputs
            assert not sum(used << n for n, used in enumerate(is_used)) & ~read
    # in two parts, one after the other
    first, *more = cut_program(flat, [min(n, 1) for n in range(len(groups))], 2)
    found = evaluate(first.closed, [(A, B, C)[n] for n in first.reads])
    values = dict(zip(first.sent, found[len(first.returns) :], strict=True))
    for part in more:
        given = [*((A, B, C)[n] for n in part.reads), *(values[v] for v in part.received)]
        found = [*found[: len(first.returns)], *evaluate(part.closed, given)]
    jax.tree.map(same, found, expected)


def test_inputs_are_read_by_operations_or_also_returned():
    program = jax.make_jaxpr(lambda a, b, c: (a, b * 2))(A, B, C)
    assert find_read(program) == [True, True, False]
    assert find_read(program, by_outputs=False) == [False, True, False]


def test_equations_are_listed_with_their_constants_and_lines():
    (outer, inner, *_) = list_equations(jax.make_jaxpr(jax.jit(lambda x: x * 3.0 + TABLE))(A))
    assert outer.equation.primitive.name in ("jit", "pjit")
    assert (inner.equation.primitive.name, float(inner.constants[0]), inner.outer) == (
        "mul",
        3,
        (outer.equation,),
    )
    assert inner.line.startswith(f"{__file__}:")
