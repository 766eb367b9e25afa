"""Collectives of compiled programs against theory: kinds, axes, counts and bytes, by value."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardtrain import axes
from shardtrain.plan.hlo.collectives import Collective, collectives, sum_by_axis

FLOAT_BYTES = 4


def make_mesh(**sizes):
    shape = tuple(sizes.get(axis, 1) for axis in axes.AXES)
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, axes.AXES, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def compiled_text(function, mesh, arguments, out_specs=None):
    """The program of `function` over `arguments`, each (shape, PartitionSpec) or a list of these."""
    is_argument = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
    structs = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf[0], jnp.float32, sharding=NamedSharding(mesh, leaf[1])),
        arguments,
        is_leaf=is_argument,
    )
    out = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs) if out_specs is not None else None
    with jax.set_mesh(mesh):
        return jax.jit(function, out_shardings=out).lower(*structs).compile().as_text() or ""


def read(function, mesh, arguments, out_specs=None):
    return collectives(compiled_text(function, mesh, arguments, out_specs), dict(mesh.shape))


def read_shard(function, mesh, shape, spec=None, out_spec=None):
    """The collectives of a per-device body, `shape` being what one device holds."""
    spec = P(axes.AXES) if spec is None else spec
    out_spec = spec if out_spec is None else out_spec
    body = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=out_spec, check_vma=False)
    return read(body, mesh, [((shape[0] * mesh.size, *shape[1:]), spec)])


def only(found) -> Collective:
    assert len(found) == 1, found
    return found[0]


SHIFT = [(i, (i + 1) % 4) for i in range(4)]
ROWS_BYTES = 8 * 16 * FLOAT_BYTES
PRIMITIVES = {
    "all-reduce": (lambda x: lax.psum(x, "fsdp"), ROWS_BYTES, 2 * 3 / 4),
    "all-gather": (
        lambda x: lax.all_gather(x, "fsdp", tiled=True).reshape(4, 8, 16).sum(0),
        4 * ROWS_BYTES,
        3 / 4,
    ),
    "reduce-scatter": (
        lambda x: jnp.tile(lax.psum_scatter(x, "fsdp", tiled=True), (4, 1)),
        ROWS_BYTES,
        3 / 4,
    ),
    "all-to-all": (lambda x: lax.all_to_all(x, "fsdp", 0, 1, tiled=True).reshape(8, 16), ROWS_BYTES, 3 / 4),
    "collective-permute": (lambda x: lax.ppermute(x, "fsdp", SHIFT), ROWS_BYTES, 1),
}


@pytest.mark.parametrize("trip_counts", [(), (3, 5)], ids=["once", "nested"])
@pytest.mark.parametrize("kind", PRIMITIVES)
def test_a_primitive_counts_once_per_iteration(kind, trip_counts):
    primitive, payload_bytes, share = PRIMITIVES[kind]

    def looped(function, length):
        return lambda x: lax.scan(lambda x, _: (jnp.sin(function(x)), None), x, length=length)[0]

    body = primitive
    for length in reversed(trip_counts):
        body = looped(body, length)
    found = read_shard(body, make_mesh(data=2, fsdp=4), (8, 16))
    assert {(c.kind, c.axes, c.group_size) for c in found} == {(kind, ("fsdp",), 4)}
    count = math.prod(trip_counts)
    assert [(c.count, c.payload_bytes) for c in found] == [(count, payload_bytes)]
    assert found[0].wire_bytes_per_device == count * share * payload_bytes
    assert tuple(loop.trip_count for loop in found[0].loops) == trip_counts
    assert found[0].in_loop == bool(trip_counts)


THREE = ("data", "fsdp", "tensor")


@pytest.mark.parametrize("joined", [THREE[:1], THREE[1:], THREE[::2], THREE])
def test_groups_over_any_axes(joined):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    found = only(read_shard(lambda x: lax.psum(x, joined), mesh, (8, 16)))
    assert (found.axes, found.group_size) == (joined, 2 ** len(joined))


def test_axes_of_size_1_never_appear():
    mesh = make_mesh(data=8)
    found = only(read_shard(lambda x: lax.psum(x, ("pipeline", "data", "tensor")), mesh, (8, 16)))
    assert found.axes == ("data",)
    assert read_shard(lambda x: lax.psum(x, ("pipeline", "tensor")), mesh, (8, 16)) == ()


def test_a_permutation_across_two_axes_names_both():
    ring = [(i, (i + 1) % 4) for i in range(4)]
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    found = only(read_shard(lambda x: lax.ppermute(x, ("data", "fsdp"), ring), mesh, (8, 16)))
    assert (found.axes, found.group_size) == (("data", "fsdp"), 4)


def test_of_a_permutation_only_the_sources_send():
    chain = [(0, 1), (1, 2), (2, 3)]
    found = only(read_shard(lambda x: lax.ppermute(x, "fsdp", chain), make_mesh(data=2, fsdp=4), (8, 16)))
    assert found.wire_bytes_per_device == 3 / 4 * ROWS_BYTES


class TestSlicedAllReduce:
    """An all-reduce is a reduce-scatter only if the slices follow the devices that reduced."""

    @pytest.mark.parametrize(
        ("reduced", "sliced_by"), [("data", "data"), ("data", "fsdp"), ("fsdp", "data"), ("fsdp", "fsdp")]
    )
    def test_slices_must_follow_the_reduced_axis(self, reduced, sliced_by):
        sizes = {"data": 3, "fsdp": 2}
        size = sizes[reduced]

        def body_shard(x):
            start = lax.axis_index(sliced_by) * 4
            return lax.dynamic_slice_in_dim(lax.psum(x, reduced), start, 4)

        found = only(read_shard(body_shard, make_mesh(**sizes), (4 * size, 16)))
        expected = "reduce-scatter" if reduced == sliced_by else "all-reduce"
        assert (found.kind, found.axes) == (expected, (reduced,))

    def test_the_same_slice_on_every_device_is_no_scatter(self):
        found = only(read_shard(lambda x: lax.psum(x, "data")[:4], make_mesh(data=2, fsdp=4), (8, 16)))
        assert found.kind == "all-reduce"

    def test_slices_that_overlap_are_no_scatter(self):
        def body_shard(x):
            return lax.dynamic_slice_in_dim(lax.psum(x, "data"), lax.axis_index("data") * 4, 5)

        assert only(read_shard(body_shard, make_mesh(data=2, fsdp=4), (12, 16))).kind == "all-reduce"

    @pytest.mark.parametrize(
        ("between", "kind"),
        [
            ("bitcast(%sum)", "reduce-scatter"),
            ("convert(%sum)", "reduce-scatter"),
            ("transpose(%sum), dimensions={0}", "reduce-scatter"),
            ("fusion(%sum), kind=kLoop, calls=%inner", "reduce-scatter"),
            ("call(%sum), to_apply=%inner", "reduce-scatter"),
            ("multiply(%sum, %sum)", "all-reduce"),
            ("conditional(%id, %sum, %sum), branch_computations={%inner, %inner}", "all-reduce"),
        ],
    )
    def test_operations_allowed_before_the_slice(self, between, kind):
        inner = """%inner (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  ROOT %same = f32[8] copy(%x)
}"""
        entry = f"""
  %p = f32[8] parameter(0)
  %id = u32[] partition-id()
  %sum = f32[8] all-reduce(%p), replica_groups={{}}, to_apply=%add
  %between = f32[8] {between}
  ROOT %mine = f32[1] dynamic-slice(%between, %id), dynamic_slice_sizes={{1}}"""
        assert only(read_snippet(entry, inner)).kind == kind

    def test_a_second_unsliced_use_is_no_scatter(self):
        def body_shard(x):
            total = lax.psum(x, "data")
            part = lax.dynamic_slice_in_dim(total, lax.axis_index("data") * 4, 4)
            return jnp.concatenate([part, jnp.sin(total)])

        found = only(read_shard(body_shard, make_mesh(data=2, fsdp=4), (8, 16)))
        assert found.kind == "all-reduce"

    def test_a_slice_by_the_loop_counter_is_no_scatter(self):
        def body_shard(x):
            def add(i, sums):
                return sums + lax.dynamic_slice_in_dim(lax.psum(x * sums[0, 0], "data"), i * 4, 4)

            return lax.fori_loop(0, 2, add, x[:4])

        found = read_shard(body_shard, make_mesh(data=2, fsdp=4), (8, 16))
        assert {c.kind for c in found} == {"all-reduce"}

    def test_a_combined_all_reduce_is_decided_per_operand(self):
        found = read_snippet(
            """
  %a = f32[8,16] parameter(0)
  %b = f32[24] parameter(1)
  %id = u32[] partition-id()
  %zero = u32[] constant(0)
  %both = (f32[8,16], f32[24]) all-reduce(%a, %b), replica_groups=[1,8]<=[8], to_apply=%add
  %sum_a = f32[8,16] get-tuple-element(%both), index=0
  %sum_b = f32[24] get-tuple-element(%both), index=1
  %mine = f32[1,16] dynamic-slice(%sum_a, %id, %zero), dynamic_slice_sizes={1,16}
  ROOT %out = (f32[1,16], f32[24]) tuple(%mine, %sum_b)"""
        )
        assert [(c.kind, c.payload_bytes) for c in found] == [("reduce-scatter", 512), ("all-reduce", 96)]

    def test_more_devices_than_xla_prints(self):
        text = snippet(
            """
  %a = f32[16,4] parameter(0)
  %id = u32[] partition-id()
  %zero = s32[] constant(0)
  %positions = s32[16] constant({...})
  %own = s32[1] dynamic-slice(%positions, %id), dynamic_slice_sizes={1}
  %start = s32[] bitcast(%own)
  %sum = f32[16,4] all-reduce(%a), replica_groups=[1,16]<=[16], to_apply=%add
  ROOT %mine = f32[1,4] dynamic-slice(%sum, %start, %zero), dynamic_slice_sizes={1,4}""",
            num_devices=16,
        )
        assert only(collectives(text, {"fsdp": 16})).kind == "reduce-scatter"


class TestTripCounts:
    """Loops whose rounds XLA did not note, and loops without a fixed number of rounds."""

    @pytest.mark.parametrize("reverse", [False, True])
    def test_inferred_if_xla_does_not_print_it(self, reverse):
        def body_shard(x):
            def inner(x, scale):
                return jnp.sin(lax.psum(x * scale, "data")), None

            def outer(x, _):
                return lax.scan(inner, x, jnp.arange(5.0), reverse=reverse)[0], None

            return lax.scan(outer, x, length=3)[0]

        mesh = make_mesh(data=8)
        body = jax.shard_map(
            body_shard, mesh=mesh, in_specs=P(axes.AXES), out_specs=P(axes.AXES), check_vma=False
        )
        text = compiled_text(body, mesh, [((64, 16), P(axes.AXES))])
        without, num_removed = re.subn(r'"known_trip_count":\{[^}]*\}', '"x":0', text)
        assert num_removed == 2
        assert only(collectives(without, dict(mesh.shape))).count == 15
        assert collectives(without, dict(mesh.shape)) == collectives(text, dict(mesh.shape))

    @pytest.mark.parametrize(
        ("start", "limit", "step", "direction", "rounds"),
        [
            (0, 7, 1, "LT", 7),
            (0, 7, 2, "LT", 4),
            (2, 7, 1, "LE", 6),
            (7, 0, -2, "GT", 4),
            (7, 0, -1, "GE", 8),
            (1, 7, 3, "NE", 2),
            (7, 0, 1, "LT", 0),
        ],
    )
    @pytest.mark.parametrize("is_mirrored", [False, True])
    def test_every_comparison_in_either_order(self, start, limit, step, direction, rounds, is_mirrored):
        mirrored = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}[direction]
        sides = f"%limit, %i), direction={mirrored}" if is_mirrored else f"%i, %limit), direction={direction}"
        text = loop_snippet(start, limit, step, sides)
        if is_mirrored:
            text = text.replace("add(%i, %step)", "add(%step, %i)")
        assert only(collectives(text, MESH)).count == rounds

    def test_an_unknown_trip_count_is_an_error(self):
        def body_shard(x):
            return lax.while_loop(lambda x: x.sum() < 10, lambda x: lax.psum(x, "data"), x)

        with pytest.raises(
            ValueError, match=r"loop while\S* \(.*while\) contains all-reduce over data"
        ) as error:
            read_shard(body_shard, make_mesh(data=8), (8, 16))
        assert "use lax.scan" in str(error.value)

    def test_an_unknown_trip_count_without_a_collective_is_allowed(self):
        def body_shard(x):
            return lax.psum(lax.while_loop(lambda x: x.sum() < 10, lambda x: x * 2, x), "data")

        assert only(read_shard(body_shard, make_mesh(data=8), (8, 16))).count == 1

    def test_a_collective_in_the_condition_runs_once_more(self):
        found = only(collectives(loop_snippet(0, 7, 1, "%i, %limit), direction=LT", in_body=False), MESH))
        assert found.count == 8


def test_the_most_expensive_branch_counts_for_each_kind():
    def body_shard(x):
        def cheap(x):
            return lax.ppermute(x, "data", SHIFT)

        def dear(x):
            return lax.ppermute(lax.ppermute(x, "data", SHIFT) + 1, "data", SHIFT) + lax.psum(x, "tensor")

        return lax.cond(x[0, 0] > 0, cheap, dear, x)

    found = read_shard(body_shard, make_mesh(data=4, tensor=2), (8, 16))
    assert sum_by_axis(found) == {
        ("collective-permute", ("data",)): (2, 2 * ROWS_BYTES),
        ("all-reduce", ("tensor",)): (1, ROWS_BYTES),
    }


def test_the_result_of_a_branch_counts_as_unsliced():
    branch = """%branch (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  ROOT %sum = f32[8] all-reduce(%x), replica_groups={}, to_apply=%add
}"""
    entry = """
  %p = f32[8] parameter(0)
  %id = u32[] partition-id()
  %which = pred[] parameter(1)
  %one = f32[8] conditional(%which, %p, %p), true_computation=%branch, false_computation=%branch
  ROOT %mine = f32[1] dynamic-slice(%one, %id), dynamic_slice_sizes={1}"""
    found = only(read_snippet(entry, branch))
    assert (found.kind, found.count) == ("all-reduce", 1)


MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def snippet(entry, *computations, num_devices=8):
    """A program in HLO's own words."""
    add = "%add (x: f32[], y: f32[]) -> f32[] {\n  ROOT %sum = f32[] parameter(0)\n}"
    main = "ENTRY %main (p: f32[]) -> f32[] {\n" + entry.strip("\n") + "\n}"
    return "\n\n".join([f"HloModule m, num_partitions={num_devices}", add, *computations, main])


def read_snippet(entry, *computations):
    return collectives(snippet(entry, *computations), MESH)


def loop_snippet(start, limit, step, test_sides, in_body=True):
    body_op, condition_op = ("all-reduce", "copy") if in_body else ("copy", "all-reduce")
    carried = "(s32[], f32[8])"
    body = f"""%body (p: {carried}) -> {carried} {{
  %p = {carried} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  %y = f32[8] {body_op}(%x), replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %out = {carried} tuple(%next, %y)
}}"""
    condition = f"""%condition (p: {carried}) -> pred[] {{
  %p = {carried} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %y = f32[8] {condition_op}(%x), replica_groups=[4,2]<=[8], to_apply=%add
  %limit = s32[] constant({limit})
  ROOT %more = pred[] compare({test_sides}
}}"""
    entry = f"""
  %x = f32[8] parameter(0)
  %start = s32[] constant({start})
  %init = {carried} tuple(%start, %x)
  ROOT %loop = {carried} while(%init), condition=%condition, body=%body"""
    return snippet(entry, body, condition)


@pytest.mark.parametrize(
    ("groups", "joined"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", ("data", "fsdp")),
        ("replica_groups={}", ("data", "fsdp", "tensor")),
        ("replica_groups=[4,2]<=[8]", ("tensor",)),
        ("replica_groups=[4,2]<=[4,2]T(1,0)", ("fsdp",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",)),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",)),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ("data", "tensor")),
        ("replica_groups=mesh['a'=8] {'a'}", ("data", "fsdp", "tensor")),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ("data",)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ("fsdp", "tensor")),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", ("fsdp",)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(2)2}", ("data", "tensor")),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}", ("fsdp",)),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}", ("tensor",)),
    ],
)
def test_spellings_of_replica_groups(groups, joined):
    found = only(
        read_snippet(
            f"  %p = f32[8] parameter(0)\n  ROOT %r = f32[8] all-reduce(%p), {groups}, to_apply=%add"
        )
    )
    assert (found.axes, found.group_size) == (joined, 8 if groups.endswith("={}") else found.group_size)


def test_group_sizes_of_part_of_an_axis():
    groups = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"
    text = snippet(f"  %p = f32[8] parameter(0)\n  ROOT %r = f32[8] all-reduce(%p), {groups}")
    found = only(collectives(text, {"data": 2, "tensor": 4}))
    assert (found.axes, found.group_size, found.wire_bytes_per_device) == (("tensor",), 2, 32)


def test_an_unknown_spelling_is_an_error():
    with pytest.raises(ValueError, match=r"collective r has replica groups .* unknown way: 'ring\(8\)"):
        read_snippet("  %p = f32[8] parameter(0)\n  ROOT %r = f32[8] all-reduce(%p), replica_groups=ring(8)")


OTHER_BACKENDS = {
    "all-gather-start": (
        "(f32[4], f32[8]) all-gather-start(%p), replica_groups=[4,2]<=[8], dimensions={0}",
        ("all-gather", 32, 16),
    ),
    "all-reduce-start": (
        "f32[4] all-reduce-start(%p), replica_groups=[4,2]<=[8], to_apply=%add",
        ("all-reduce", 16, 16),
    ),
    "reduce-scatter": (
        "f32[2] reduce-scatter(%p), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add",
        ("reduce-scatter", 16, 8),
    ),
    "reduce-scatter-start": (
        "((f32[4]), f32[2]) reduce-scatter-start(%p), replica_groups=[4,2]<=[8], to_apply=%add",
        ("reduce-scatter", 16, 8),
    ),
    "collective-permute-start": (
        "(f32[4], f32[4], u32[], u32[]) collective-permute-start(%p), "
        "source_target_pairs={{0,1},{1,0},{2,2},{3,3}}",
        ("collective-permute", 16, 16 * 2 / 8),
    ),
    "collective-permute in place": (
        "f32[4] collective-permute(%p, %p, %i, %i), source_target_pairs={{0,1},{1,0}}, slice_sizes={{3}}",
        ("collective-permute", 12, 12 * 2 / 8),
    ),
    "collective-broadcast": (
        "f32[4] collective-broadcast(%p), replica_groups={{0,1},{2,3}}",
        ("collective-broadcast", 16, 8),
    ),
    "ragged-all-to-all": (
        "f32[4] ragged-all-to-all(%p, %out, %i, %i, %i, %i), replica_groups={{0,1},{2,3}}",
        ("ragged-all-to-all", 16, 8),
    ),
    "async-start": ("((f32[4]), f32[8]) async-start(%p), calls=%wrapped", ("all-gather", 32, 16)),
    "fusion": ("f32[8] fusion(%p), kind=kCustom, calls=%wrapped", ("all-gather", 32, 16)),
    "call": ("f32[8] call(%p), to_apply=%wrapped", ("all-gather", 32, 16)),
}
WRAPPED = """%wrapped (w: f32[4]) -> f32[8] {
  %w = f32[4]{0:T(128)} parameter(0)
  ROOT %g = f32[8]{0:T(128)} all-gather(%w), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}
}"""


@pytest.mark.parametrize("form", OTHER_BACKENDS)
def test_syntax_of_other_backends(form):
    instruction, expected = OTHER_BACKENDS[form]
    entry = f"""
  %p = f32[4] parameter(0)
  %out = f32[64] parameter(1)
  %i = s32[2] parameter(2)
  %started = {instruction}
  ROOT %finished = f32[8] {form.split()[0].removesuffix("-start")}-done(%started)"""
    found = only(read_snippet(entry, WRAPPED))
    assert (found.kind, found.payload_bytes, found.wire_bytes_per_device) == expected
    assert found.axes == ("tensor",)


def test_a_start_whose_done_is_sliced_is_a_reduce_scatter():
    found = read_snippet(
        """
  %p = bf16[16] parameter(0)
  %id = u32[] partition-id()
  %started = bf16[16] all-reduce-start(%p), replica_groups=[1,8]<=[8], to_apply=%add
  %sum = bf16[16] all-reduce-done(%started)
  %two = u32[] constant(2)
  %own = u32[] multiply(%id, %two)
  ROOT %mine = bf16[2] dynamic-slice(%sum, %own), dynamic_slice_sizes={2}"""
    )
    assert [(c.kind, c.dtype, c.payload_bytes) for c in found] == [("reduce-scatter", "bf16", 32)]


def test_a_tpu_collective_continued_in_other_fusions_counts_once():
    entry = """
  %p = f32[4] parameter(0)
  %start = f32[8] fusion(%p), kind=kCustom, calls=%wrapped
  %middle = f32[8] fusion(%p), kind=kOutput, calls=%wrapped.again
  ROOT %done = f32[8] fusion(%p), kind=kCustom, calls=%wrapped.again"""
    again = WRAPPED.replace("%wrapped", "%wrapped.again")
    assert only(read_snippet(entry, WRAPPED, again)).count == 1


def test_a_tpu_fusion_that_reduces_and_slices_is_a_reduce_scatter():
    fused = """%all-reduce-scatter (w: f32[8,4]) -> f32[1,4] {
  %w = f32[8,4]{1,0:T(8,128)} parameter(0)
  %all = f32[8,4]{1,0:T(8,128)} all-reduce(%w), channel_id=2, replica_groups={}, to_apply=%add
  %id = u32[] partition-id()
  %zero = u32[] constant(0)
  ROOT %mine = f32[1,4]{1,0:T(8,128)} dynamic-slice(%all, %id, %zero), dynamic_slice_sizes={1,4}
}"""
    entry = """
  %p = f32[8,4] parameter(0)
  ROOT %f = f32[1,4] fusion(%p), kind=kCustom, calls=%all-reduce-scatter"""
    found = only(read_snippet(entry, fused))
    assert (found.kind, found.payload_bytes, found.wire_bytes_per_device) == ("reduce-scatter", 128, 112)


def test_combined_dtypes_are_separated():
    found = read_snippet(
        """
  %a = bf16[16] parameter(0)
  %b = pred[16] parameter(1)
  %c = s4[16] parameter(2)
  ROOT %r = (bf16[32], pred[32], s4[32]) all-gather(%a, %b, %c), replica_groups=[4,2]<=[8], dimensions={0}"""
    )
    assert [(c.dtype, c.payload_bytes) for c in found] == [("bf16", 64), ("pred", 32), ("s4", 16)]


def test_transfers_between_slices_are_refused():
    send = 'send(%p, %t), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_megascale_id="1"}'
    with pytest.raises(ValueError, match="instruction s sends data by a transfer of its own"):
        read_snippet(
            "  %p = f32[8] parameter(0)\n  %t = token[] after-all()\n"
            f"  ROOT %s = (f32[8], u32[], token[]) {send}"
        )


def test_axis_sizes_must_multiply_to_the_devices_of_the_program():
    text = snippet("  ROOT %p = f32[8] parameter(0)")
    with pytest.raises(ValueError, match=r"axis sizes data=2 make 2 devices, .* was compiled for 8\."):
        collectives(text, {"data": 2, "tensor": 1})


def test_text_that_is_not_hlo_is_an_error():
    with pytest.raises(ValueError, match=r"no entry computation .* starts with 'module @jit_f'.*as_text\(\)"):
        collectives("module @jit_f", MESH)
