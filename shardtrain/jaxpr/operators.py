"""Name the operators of a traced loss, and let devices compute parts of each by a sharding of its own.

An operator is a matrix product, a convolution or a lookup in a parameter. A mesh axis splits at most one of
its dims. Its backward pass, which jax derives, is split alike. Next: `dims.py`, the dims of operators.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from posixpath import commonpath
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import AxisType, PartitionSpec

from shardtrain.errors.messages import near, refuse
from shardtrain.jaxpr.dims import OPAQUE, Moves, find_moves, find_reshaped, find_summed
from shardtrain.jaxpr.equations import CALLS, REMATS, find_call, scan_counts, split_operands
from shardtrain.jaxpr.forward import bind, forward
from shardtrain.jaxpr.scan_pieces import run_steps
from shardtrain.sharding.single_arrays import Shards, find_axes, find_shard_problems, is_operator

CONVOLUTION, LOOKUP = "conv_general_dilated", "gather"
KINDS = (CONVOLUTION, LOOKUP, "dot_general")
"""Primitives of operators."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator of a traced loss.

    Args:
      name: path of its parameter, or of the module from which its operands come, then its primitive, and a
        number if several have this name.
      dims: size of each dim that may be split: "0", "1" of its result, "sum0" of what it sums over.
      operands: the names of the dims of each operand; "" for a dim that is not split.
      weight: the number of the operand that is a parameter; None without one.
      path: of this parameter, or of the module.
      num_blocks: steps of the scan that it is in; 0 outside of scans.
    """

    name: str
    dims: Mapping[str, int]
    operands: tuple[tuple[str, ...], ...]
    weight: int | None
    path: str
    num_blocks: int


@dataclass(frozen=True)
class _Value:
    """A value of the program.

    Args:
      array: the array.
      path: of the parameter, or of the module that computed it.
      is_weight: whether it depends on parameters and constants only.
      maker: name of the newest operator whose result it is, up to elementwise operations.
      shards: axis -> the dim that it splits, as in the maker's result; None if the maker has no shards.
      rows: the dim of the rows of the batch; None if it has none.
    """

    array: Any
    path: str | None = None
    is_weight: bool = False
    maker: str = ""
    shards: Mapping[str, int] | None = None
    rows: int | None = None

    def shift(self, by: int, **changes: Any) -> "_Value":
        """Return the value of a step for that of a whole scan (by -1), or the other way round (by 1)."""
        shards, rows = self.shards, self.rows
        if shards is not None:
            shards = {axis: dim + by for axis, dim in shards.items() if dim + by >= 0}
        rows = None if rows is None or rows + by < 0 else rows + by
        return replace(self, shards=shards, rows=rows, **changes)


def split_key(key: str) -> tuple[str, range | None]:
    """Split a key of a table into the name of an operator and the blocks of a scan.

    >>> split_key("blocks/up/kernel:dot_general[2-5]"), split_key("head/kernel:dot_general")
    (('blocks/up/kernel:dot_general', range(2, 6)), ('head/kernel:dot_general', None))
    """
    found = re.fullmatch(r"(.*)\[(\d+)(?:-(\d+))?\]", key)
    return (key, None) if found is None else (found[1], range(int(found[2]), int(found[3] or found[2]) + 1))


@dataclass(kw_only=True)
class OperatorPass:
    """Computes programs with the shardings of a table, and lists their operators.

    Args:
      table: key -> shards. A key is the name of an operator, or, as in "NAME[2-5]", of some steps of a scan;
        or the path of a parameter, whose own constraints the model leaves out.
      sizes: axis -> size.
      rows: the axes over which the layout splits the rows of the batch.
      scoped: whether each equation is in a named scope of the newest operator that it depends on.
      operators: name -> operator.
      problems: of the table, one sentence each.
    """

    table: Mapping[str, Shards] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    scoped: bool = False
    operators: dict[str, Operator] = field(default_factory=dict)
    problems: dict[str, None] = field(default_factory=dict)
    _named: dict[tuple[int, ...], str] = field(default_factory=dict)
    _paths: frozenset[str] = frozenset()
    _outer: tuple[int, ...] = ()
    _num_blocks: int = 0
    _block: int | None = None

    def run(
        self, closed: ClosedJaxpr, inputs: Sequence[Any], paths: Sequence[str], batch: range = range(0)
    ) -> list[Any]:
        """Return the outputs of a program.

        Args:
          closed: the program.
          inputs: its inputs, of which the first are parameters.
          paths: paths of these parameters.
          batch: the numbers of the inputs that are the batch.
        """
        self._paths = frozenset(paths)
        for found in (self.operators, self.problems, self._named):
            found.clear()
        values = [_Value(x, path, True) for x, path in zip(inputs, paths, strict=False)]
        values += [
            _Value(inputs[number], rows=0 if number in batch else None)
            for number in range(len(paths), len(inputs))
        ]
        return [value.array for value in self._evaluate(closed, values)]

    def check(self) -> None:
        """Refuse keys that name no operator, and shards that do not fit their operator.

        Raises:
          ValueError: lists them.
        """
        for key in filter(is_operator, self.table):
            name, blocks = split_key(key)
            if name not in self.operators:
                self.problems[f"there is no operator {near(name, self.operators)}"] = None
            elif blocks and blocks.stop > (number := self.operators[name].num_blocks):
                text = f"{key} has blocks up to {blocks.stop - 1}, and a scan computes {number}"
                self.problems[f"{text}; use 0 to {number - 1}" if number else f"{text}; leave them out"] = (
                    None
                )
        refuse("the operators of the layout do not fit the model", list(self.problems))

    def _evaluate(self, closed: ClosedJaxpr, values: Sequence[_Value]) -> list[_Value]:
        consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

        def constant(v: Any) -> _Value:
            return _Value(v.val if isinstance(v, Literal) else consts[v], is_weight=True)

        return forward(closed, values, self._compute, constant)

    def _compute(self, equation: Any, values: list[_Value]) -> Sequence[_Value]:
        name = equation.primitive.name
        if (called := find_call(equation, (*CALLS, *REMATS, "scan"))) is not None:
            before, self._outer = self._outer, (*self._outer, id(equation))
            found = self._compute_call(equation, called, values)
            self._outer = before
            return found
        path = _join([value.path for value in values if value.path is not None])
        is_weight = all(value.is_weight for value in values)
        is_kind = _find_plain(equation).primitive.name in KINDS and not is_weight
        if is_kind and (operator := self._find_operator(equation, values, path or "")):
            inside = operator.path.rpartition("/")[0] if operator.path in self._paths else operator.path
            shards = self._find_shards(operator.name)
            own = {axis: int(dim) for axis, dim in (shards or {}).items() if dim.isdigit()}
            if shards is None:
                values = [self._leave(value) for value in values]
            made = _Value(self._shard(equation, values, operator), inside, maker=operator.name)
            rows = _follow_rows(_find_plain(equation), values)
            return [replace(made, shards=None if shards is None else own, rows=rows)]
        maker = max((value.maker for value in values), key=self._number, default="")
        if name == "sharding_constraint" and (path in self.table or self._find_shards(maker) is not None):
            return values
        arrays = [value.array for value in values]
        known = (n for n, v in enumerate(values) if maker and v.maker == maker and v.shards is not None)
        newest = next((n for n in known if self._keeps(equation, n, values[n].shards or {})), None)
        if newest is None:
            with self._scope(maker):
                made = bind(equation, arrays)
            found = [_Value(x, path, is_weight, maker) for x in made]
            return [replace(v, rows=_follow_rows(equation, values, n)) for n, v in enumerate(found)]
        # operands and results have the dims of the newest
        shards = values[newest].shards or {}
        ours = _move(shards, _find_moves(equation, newest))
        with self._scope(maker):
            for number, x in enumerate(arrays):
                back = {to: dim for dim, to in _find_moves(equation, number).items()}
                if number != newest and getattr(x, "ndim", 0):
                    arrays[number] = _constrain(x, _move(ours, back))
            made = bind(equation, arrays)
        found = []
        for number, x in enumerate(made):
            ours = _move(shards, _find_moves(equation, newest, number))
            rows = _follow_rows(equation, values, number)
            found.append(_Value(_constrain(x, ours), path, is_weight, maker, ours, rows))
        return found

    def _leave(self, value: _Value) -> _Value:
        """Return a value as operators and loops without shards get and give it: with the rows of the layout.

        The compiler would keep what it has; its loops are wrong for some ways to split rows (docs/xla).
        """
        if value.shards is None or value.rows is None:
            return value
        size = math.prod(self.sizes[axis] for axis in self.rows)
        dims: list[Any] = [PartitionSpec.UNCONSTRAINED] * value.array.ndim
        dims[value.rows] = self.rows if value.array.shape[value.rows] % size == 0 else None
        found = lax.with_sharding_constraint(value.array, PartitionSpec(*dims))
        return replace(value, array=found, shards=None)

    def _keeps(self, equation: Any, number: int, shards: Mapping[str, int]) -> bool:
        """Return whether the dims that axes split can be followed through an equation."""
        if equation.primitive.name != "reshape":
            return equation.primitive.name not in OPAQUE
        moves, parts = _find_moves(equation, number), Counter[int]()
        for axis, dim in shards.items():
            parts[dim] = max(parts[dim], 1) * self.sizes[axis]
        shape = equation.outvars[0].aval.shape
        return all(dim in moves and shape[moves[dim]] % size == 0 for dim, size in parts.items())

    def _compute_call(self, equation: Any, called: ClosedJaxpr, values: list[_Value]) -> Sequence[_Value]:
        if equation.primitive.name in CALLS:
            return self._evaluate(called, values)
        if equation.primitive.name != "scan":
            traced, found = self._trace(called, values)
            new = equation.replace(params={**equation.params, "jaxpr": traced.jaxpr})
            made = bind(new, [value.array for value in values])
            return [replace(v, array=x) for v, x in zip(found, made, strict=True)]
        before, (self._block, self._num_blocks) = (
            (self._block, self._num_blocks),
            (0, equation.params["length"]),
        )
        num_consts, num_carried = scan_counts(equation)
        num_whole = num_consts + num_carried
        # later blocks read what the block before made
        _, found = self._trace(called, _split_steps(values, num_whole))
        has_rows_of_layout = bool(self.table) and not self._list_blocks()
        if has_rows_of_layout:
            values = [self._leave(value) for value in values]
        for number, made in enumerate(found[:num_carried], num_consts):
            values[number] = replace(
                values[number],
                maker=made.maker or values[number].maker,
                shards=values[number].shards if has_rows_of_layout else made.shards,
                rows=made.rows,
            )
        consts, carry, rows = split_operands(equation, [value.array for value in values])
        stacks: list[list[Any]] = []
        for start, end in self._find_segments(reverse=equation.params["reverse"]):
            self._block = start
            steps, found = self._trace(called, _split_steps(values, num_whole))
            new = equation.replace(params={**equation.params, "jaxpr": steps})
            part = [x[start:end] for x in rows] if end - start < self._num_blocks else rows
            carry, stack = run_steps(new, consts, carry, part, end - start)
            stacks.append(stack)
        self._block, self._num_blocks = before
        ordered = stacks[:: -1 if equation.params["reverse"] else 1]
        pieces = map(list, zip(*ordered, strict=True))
        stacked = [jnp.concatenate(each) if len(each) > 1 else each[0] for each in pieces]
        whole = [replace(v, array=x) for v, x in zip(found, carry, strict=False)]
        whole += [v.shift(1, array=x) for v, x in zip(found[num_carried:], stacked, strict=True)]
        # what reads the results must not change the sharding inside of the loop
        if has_rows_of_layout:
            whole = [self._leave(replace(v, shards=v.shards or {})) for v in whole]
        return whole

    def _list_blocks(self) -> list[range | None]:
        """Return the blocks of each key of the table for an operator of a scan; None for all of them."""
        depth = len(self._outer)
        inside = {name for key, name in self._named.items() if key[:depth] == self._outer}
        return [blocks for key in self.table for name, blocks in [split_key(key)] if name in inside]

    def _find_segments(self, *, reverse: bool) -> list[tuple[int, int]]:
        """Return the first block, and the one after the last, of runs of equally sharded blocks of a scan."""
        ranges = [blocks for blocks in self._list_blocks() if blocks]
        ends = {0, self._num_blocks, *(end for each in ranges for end in (each.start, each.stop))}
        found = list(pairwise(sorted(end for end in ends if end <= self._num_blocks)))
        return found[:: -1 if reverse else 1]

    def _trace(self, called: ClosedJaxpr, values: Sequence[_Value]) -> tuple[ClosedJaxpr, list[_Value]]:
        """Trace a program with constraints; return it, and values that describe its outputs."""
        found: list[_Value] = []

        def run(*arrays: Any) -> list[Any]:
            given = [replace(v, array=x) for v, x in zip(values, arrays, strict=True)]
            found[:] = self._evaluate(called, given)
            return [value.array for value in found]

        return jax.make_jaxpr(run)(*called.in_avals), found

    def _find_operator(self, equation: Any, values: Sequence[_Value], path: str) -> Operator | None:
        """Return the operator of an equation; None if it is none."""
        plain, shapes = _find_plain(equation), [v.aval.shape for v in equation.invars]
        kind, params = plain.primitive.name, plain.params
        both = range(2)
        weight = next((i for i in both if values[i].is_weight and values[i].path is not None), None)
        moves, summed = [dict(find_moves(plain, i)) for i in both], find_summed(plain)
        if kind == LOOKUP:
            # each device would look up only some of the entries
            summed = []
            if weight != 0 or any(params["slice_sizes"][dim] != shapes[0][dim] for dim in moves[0]):
                return None
        elif kind == CONVOLUTION:
            # neighbours in space need each other, and XLA splits groups wrongly (docs/xla)
            left, right, out = params["dimension_numbers"]
            moves = [{left[0]: out[0]}, {right[0]: out[1]}]
            if params["feature_group_count"] * params["batch_group_count"] > 1:
                moves[1], summed = {}, []
        shape = equation.outvars[0].aval.shape
        dims = {str(to): shape[to] for to in sorted({to for move in moves for to in move.values()})}
        named = [{dim: str(to) for dim, to in move.items()} for move in moves]
        for number, each in enumerate(summed):
            for i, dim in each.items():
                named[i][dim] = f"sum{number}"
                dims[f"sum{number}"] = shapes[i][dim]
        key = (*self._outer, id(equation))
        path = path if weight is None else values[weight].path or ""
        if key not in self._named:
            base = f"{path}:{kind}"
            number = sum(name.startswith(f"{base}:") or name == base for name in self.operators) + 1
            self._named[key] = base if number == 1 else f"{base}:{number}"
        found = Operator(
            name=self._named[key],
            dims=dims,
            operands=tuple(tuple(named[i].get(dim, "") for dim in range(len(shapes[i]))) for i in both),
            weight=weight,
            path=path,
            num_blocks=self._num_blocks,
        )
        self.operators[found.name] = found
        return found

    def _find_shards(self, name: str) -> Shards | None:
        """Return the shards of an operator in this block; None if the table has none."""
        ranges = (
            shards
            for key, shards in self.table.items()
            for own, blocks in [split_key(key)]
            if blocks is not None and own == name and self._block in blocks
        )
        return next(ranges, self.table.get(name))

    def _shard(self, equation: Any, values: Sequence[_Value], operator: Operator) -> jax.Array:
        """Compute an operator with the shards of the table, if they fit."""
        shards, arrays = self._find_shards(operator.name), [value.array for value in values]
        problems = (
            [] if shards is None else find_shard_problems(operator.name, operator.dims, shards, self.sizes)
        )
        self.problems.update(dict.fromkeys(problems))
        with self._scope(operator.name):
            if shards is None or problems:
                (found,) = bind(equation, arrays)
                return found
            return _compute_parts(_find_plain(equation), arrays, operator, shards)

    def _number(self, name: str) -> int:
        """Return the place of an operator in the program."""
        return list(self.operators).index(name) if name else -1

    def _scope(self, name: str) -> AbstractContextManager[Any]:
        return jax.named_scope(f"<{name}>") if self.scoped and name else nullcontext()


def _split_steps(values: Sequence[_Value], num_whole: int) -> list[_Value]:
    """Return the values of a step of a scan, which reads a part of each but the first."""
    return [value if number < num_whole else value.shift(-1) for number, value in enumerate(values)]


def find_scope(equation: Any) -> str:
    """Return the operator in whose scope an equation was traced, also if jax derived it; "" for none."""
    found = re.findall(r"<(.*?)>", str(equation.source_info.name_stack))
    return found[-1] if found else ""


def _find_plain(equation: Any) -> Any:
    """Return the convolution that a run maps over devices (functional/per_device.py); else the equation."""
    if equation.primitive.name != "shard_map":
        return equation
    inner = [each for each in equation.params["jaxpr"].eqns if each.primitive.name == CONVOLUTION]
    if len(inner) != 1 or len(equation.invars) != 2:
        return equation
    # a device has some of the groups, so its parameters do not say whether there are several
    of_left, of_right, _ = inner[0].params["dimension_numbers"]
    left, right = (v.aval.shape for v in equation.invars)
    is_whole = left[of_left[1]] == right[of_right[1]]
    return equation.replace(primitive=inner[0].primitive, params=inner[0].params) if is_whole else equation


def _compute_parts(equation: Any, arrays: Sequence[Any], operator: Operator, shards: Shards) -> jax.Array:
    """Compute an operator part by part: each device has its own shards, and partial sums are added up.

    The compiler's partitioner, which is wrong for some operators, sees only changes of sharding.
    """
    mesh, ndim = jax.sharding.get_abstract_mesh(), equation.outvars[0].aval.ndim
    auto = {
        axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto
    }
    summed = tuple(axis for axis, dim in shards.items() if dim.startswith("sum"))

    def compute(*parts: jax.Array) -> jax.Array:
        params = dict(equation.params)
        # of the mesh outside, whose axes are manual here
        if "out_sharding" in params:
            params["out_sharding"] = None
        if equation.primitive.name == LOOKUP:
            shape, gone = parts[0].shape, params["dimension_numbers"].collapsed_slice_dims
            params["slice_sizes"] = tuple(1 if dim in gone else size for dim, size in enumerate(shape))
        # all vary over the same axes: so the gradient of what several devices have is summed
        missing = [tuple(set(shards) - jax.typeof(x).manual_axis_type.varying) for x in parts]
        parts = tuple(lax.pcast(x, m, to="varying") if m else x for x, m in zip(parts, missing, strict=True))
        found = equation.primitive.bind(*parts, **params)
        return lax.psum(found, summed) if summed else found

    specs = [
        PartitionSpec(*(find_axes(dim, shards) or None for dim in dims))
        for dims in (*operator.operands, [str(number) for number in range(ndim)])
    ]
    mapped = jax.shard_map(compute, in_specs=tuple(specs[:-1]), out_specs=specs[-1], axis_names=auto)
    # so the derivative keeps what was sent, and does not send it again
    return mapped(*map(lax.with_sharding_constraint, arrays, specs[:-1]))


def _find_moves(equation: Any, number: int, output: int = 0) -> Moves:
    """Return where the dims of an input are in an output; a reshape keeps the first of those it joins."""
    if equation.primitive.name != "reshape":
        return find_moves(equation, number, output)
    if equation.params["dimensions"] is not None:
        return {}  # it permutes dims first
    shapes = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return {before[0]: after[0] for before, after in find_reshaped(*shapes)}


def _follow_rows(equation: Any, values: Sequence[_Value], output: int = 0) -> int | None:
    """Return the dim of the rows of the batch in an output."""
    known = [(number, value.rows) for number, value in enumerate(values) if value.rows is not None]
    moved = (_find_moves(equation, number, output).get(rows) for number, rows in known)
    return next((dim for dim in moved if dim is not None), None)


def _move(shards: Mapping[str, int], moves: Mapping[int, int]) -> dict[str, int]:
    return {axis: moves[dim] for axis, dim in shards.items() if dim in moves}


def _constrain(array: jax.Array, shards: Mapping[str, int]) -> jax.Array:
    splits = [tuple(axis for axis, dim in shards.items() if dim == number) for number in range(array.ndim)]
    return lax.with_sharding_constraint(array, PartitionSpec(*(over or None for over in splits)))


def _join(paths: Sequence[str]) -> str | None:
    """Return the module that contains all of these; None without any."""
    return commonpath(paths) if paths else None


def run_operators(
    function: Callable[..., Any], each: OperatorPass, batch: int | None = None
) -> Callable[..., Any]:
    """Return a function (parameters, ...) that is computed by a pass.

    Args:
      function: the loss, of a tree of parameters and any other arguments.
      each: the pass, which then lists the operators.
      batch: the number of the argument that is the batch.
    """

    def compute(params: Any, *rest: Any) -> Any:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(params, *rest)
        leaves = jax.tree.leaves_with_path(params)
        paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
        inputs = jax.tree.leaves((params, *rest))
        ends = list(accumulate(len(jax.tree.leaves(x)) for x in (params, *rest)))
        rows = range(0) if batch is None else range(ends[batch - 1], ends[batch])
        found = each.run(traced, inputs, paths, rows)
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return compute


def shard_operators(
    function: Callable[..., Any],
    table: Mapping[str, Shards],
    sizes: Mapping[str, int],
    rows: tuple[str, ...] = (),
    *,
    batch: int | None = None,
    strict: bool = True,
) -> Callable[..., Any]:
    """Return a function that computes the operators of a table with their shardings.

    Args:
      function, table, sizes, rows, batch: see `run_operators` and `OperatorPass`.
      strict: whether to refuse a table that does not fit, when the function is traced.
    """
    each = OperatorPass(table=table, sizes=sizes, rows=rows)
    sharded = run_operators(function, each, batch)

    def compute(*arguments: Any) -> Any:
        found = sharded(*arguments)
        if strict:
            each.check()
        return found

    return compute if table else function
