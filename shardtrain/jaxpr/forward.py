"""Follow values of any kind through a traced program: arrays, marks, names, variables of another program.

Next: `cut.py`, which cuts programs; `dims.py`, which follows the dims of arrays through one operation.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any, TypeVar

from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from shardtrain.jaxpr.equations import CALLS, CUSTOM_JVP, REMATS, find_call, find_runs, scan_counts

T = TypeVar("T")


def forward(
    program: Any,
    inputs: Iterable[T],
    rule: Callable[..., Iterable[T]],
    constant: Callable[..., T],
    *alike: Any,
) -> list[T]:
    """Follow values through the equations of a program, and return the values of its outputs.

    An equation that contains a program is an equation like any other: its rule may call `forward` again.

    Args:
      program: a jaxpr, closed or not.
      inputs: the value of each input.
      rule: (equation, values of its inputs) -> values of its outputs.
      constant: a literal or a variable of a constant -> its value.
      alike: programs of the same operations for other shapes, whose equations and constants are passed to
        the rule and to `constant` too.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda x, y: x * y + 1)(1.0, 2.0)
    >>> forward(program, "xy", lambda e, given: [f"{e.primitive}({', '.join(given)})"], lambda c: str(c.val))
    ['add(mul(x, y), 1.0)']
    """
    jaxpr, *others = (getattr(each, "jaxpr", each) for each in (program, *alike))
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    for variable, *rest in zip(jaxpr.constvars, *(each.constvars for each in others), strict=True):
        known[variable] = constant(variable, *rest)

    def read(atom: Any) -> T:
        return constant(atom, *[atom] * len(others)) if isinstance(atom, Literal) else known[atom]

    for equation, *rest in zip(jaxpr.eqns, *(each.eqns for each in others), strict=True):
        found = rule(equation, list(map(read, equation.invars)), *rest)
        known.update(zip(equation.outvars, found, strict=True))
    return list(map(read, jaxpr.outvars))


def bind(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Compute the outputs of an equation."""
    primitive = equation.primitive
    with equation.ctx.manager:
        found = primitive.bind(*values, **primitive.get_bind_params(equation.params))
    return found if primitive.multiple_results else [found]


def evaluate(
    closed: ClosedJaxpr,
    inputs: Iterable[Any],
    compute: Callable[[Any, list[Any]], Sequence[Any]] | None = None,
) -> list[Any]:
    """Compute the outputs of a program.

    Args:
      closed: the program.
      inputs: its inputs.
      compute: (equation, its inputs) -> its outputs; None applies each operation, see `bind`.
    """
    if compute is None:
        return list(jaxpr_as_fun(closed)(*inputs))
    consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    return forward(closed, inputs, compute, lambda v: v.val if isinstance(v, Literal) else consts[v])


def inline(
    closed: ClosedJaxpr,
    choose: Callable[[Any], ClosedJaxpr | None] = lambda e: find_call(e, (*CALLS, *REMATS, CUSTOM_JVP)),
) -> ClosedJaxpr:
    """Return a program in which the equations of called programs stand in place of the calls.

    Args:
      closed: the program; its inputs stay the same variables.
      choose: an equation of the new program -> the program that it calls; None if it stays.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda x: jax.jit(lambda x: 2 * x)(x) + 1)(1.0)
    >>> [equation.primitive.name for equation in inline(program).eqns]
    ['mul', 'add']
    """
    equations, consts = list[Any](), dict[Any, Any]()

    def run(closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        consts.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        return forward(closed, inputs, place, lambda atom: atom)

    def place(equation: Any, inputs: list[Any]) -> Sequence[Any]:
        outputs = [Var(v.aval) for v in equation.outvars]
        new = equation.replace(invars=inputs, outvars=outputs)
        called = choose(new)
        if called is not None:
            return run(called, inputs)
        equations.append(new)
        return outputs

    outputs = run(closed, closed.jaxpr.invars)
    jaxpr = closed.jaxpr.replace(constvars=list(consts), outvars=outputs, eqns=equations)
    return ClosedJaxpr(jaxpr, list(consts.values()))


def prune(closed: ClosedJaxpr, is_needed: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
    """Return the program of some of its outputs, and whether it reads each of the inputs.

    Args:
      closed: the program.
      is_needed: whether each output is needed.
    """
    jaxpr, is_used = partial_eval.dce_jaxpr(closed.jaxpr, is_needed)
    return ClosedJaxpr(jaxpr, closed.consts), is_used


def find_read(closed: ClosedJaxpr, by_outputs: bool = True) -> list[bool]:
    """Return whether any equation, or also an output, reads each input of a program."""
    read = {id(v) for equation in closed.eqns for v in equation.invars}
    if by_outputs:
        read |= {id(v) for v in closed.jaxpr.outvars}
    return [id(v) in read for v in closed.jaxpr.invars]


def dependencies(program: Any, inputs: Sequence[int]) -> list[int]:
    """Return the groups of inputs that each output depends on, as bits, through loops and branches.

    Args:
      program: a jaxpr, closed or not.
      inputs: the groups of each of its inputs, as bits.

    >>> import jax
    >>> dependencies(jax.make_jaxpr(lambda a, b: (a * 2, a + b))(1.0, 2.0), [0b01, 0b10])
    [1, 3]
    """
    return forward(program, inputs, _equation_dependencies, lambda _: 0)


def _equation_dependencies(equation: Any, inputs: list[int]) -> list[int]:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _loop_dependencies(params["jaxpr"], inputs, *scan_counts(equation))
    if name == "while":
        of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
        number = len(inputs) - of_condition - of_body
        found = _loop_dependencies(params["body_jaxpr"], inputs[of_condition:], of_body, number)
        (stops,) = dependencies(params["cond_jaxpr"], [*inputs[:of_condition], *found])
        return [each | stops for each in found]
    runs = [dependencies(*run) for run in find_runs(equation, inputs)]
    if not runs:
        return [reduce(or_, inputs, 0)] * len(equation.outvars)
    return [reduce(or_, each, inputs[0] if name == "cond" else 0) for each in zip(*runs, strict=True)]


def _loop_dependencies(body: Any, inputs: list[int], consts: int, carried: int) -> list[int]:
    """Follow the body of a loop until its carried arrays depend on nothing more."""
    given = list(inputs)
    while True:
        found = dependencies(body, given)
        grown = [old | new for old, new in zip(given[consts : consts + carried], found, strict=False)]
        if grown == given[consts : consts + carried]:
            return [*grown, *found[carried:]]
        given[consts : consts + carried] = grown


def find_constrained_specs(program: Any) -> list[PartitionSpec | None]:
    """Return the spec to which a program constrains each of its outputs; None without a constraint.

    Args:
      program: a jaxpr, closed or not.

    >>> from functools import partial
    >>> import jax
    >>> with jax.set_mesh(jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))):
    ...     of_seq = partial(jax.lax.with_sharding_constraint, shardings=PartitionSpec(None, "context"))
    ...     program = jax.make_jaxpr(lambda x: (jax.jit(of_seq)(x), x))(jax.numpy.ones((2, 4)))
    >>> [spec and tuple(spec) for spec in find_constrained_specs(program)]
    [(None, 'context'), None]
    """
    jaxpr = getattr(program, "jaxpr", program)
    return forward(program, [None] * len(jaxpr.invars), _find_specs, lambda _: None)


def _find_specs(equation: Any, given: list[PartitionSpec | None]) -> list[PartitionSpec | None]:
    name = equation.primitive.name
    if name == "sharding_constraint":
        return [equation.params["sharding"].spec]
    if name == "optimization_barrier":
        return given
    # a loop returns what its last trip returns, as long as the output is not stacked
    inner = find_call(equation, ("scan", *CALLS, *REMATS, CUSTOM_JVP))
    if inner is None:
        return [None] * len(equation.outvars)
    outputs = zip(find_constrained_specs(inner), inner.jaxpr.outvars, equation.outvars, strict=True)
    return [spec if v.aval.shape == output.aval.shape else None for spec, v, output in outputs]
