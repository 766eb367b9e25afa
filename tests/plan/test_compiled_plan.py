"""A compiled step beside its prediction: flops of HLO, what is flagged, what cannot be compiled for."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from shardtrain import cli
from shardtrain.plan import compile as ahead_of_time
from shardtrain.plan.compile import Figures, describe_devices
from shardtrain.plan.hlo.collectives import ALL_GATHER, Collective
from shardtrain.plan.hlo.flops import matrix_flops
from shardtrain.report.plan_compiled import flag_parameters
from shardtrain.sharding.specs import Row
from tests.cli.test_inspect import TINY_RUN


def flops_of(function, *shapes):
    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return matrix_flops(jax.jit(function).lower(*inputs).compile().as_text() or "")


def test_flops_of_loops_count_every_trip():
    def blocks(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    assert flops_of(blocks, (8, 16), (6, 16, 16)) == 6 * 2 * 8 * 16 * 16
    assert flops_of(lambda x: x + 1, (8, 16)) == 0


def test_flops_of_a_convolution():
    def image(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    # of 8 positions, 3 outputs each, the first and the last have one product with padding
    assert flops_of(image, (4, 8, 8, 3), (3, 3, 3, 16)) == 2 * 4 * (3 * 8 - 2) ** 2 * 3 * 16


def test_a_batched_product_that_a_tpu_runs_as_a_convolution_has_the_flops_of_the_product():
    """An instruction of a program for v6e: the 24 batches are a window of which one element is real."""
    text = """HloModule jit_f

ENTRY %main (a: bf16[24,64,32], b: bf16[24,32,64]) -> f32[24,64,64] {
  %a = bf16[24,64,32]{2,1,0} parameter(0)
  %b = bf16[24,32,64]{2,1,0} parameter(1)
  ROOT %c = f32[24,64,64]{2,1,0} convolution(%a, %b), WINDOW
}
"""
    text = text.replace("WINDOW", "window={size=24 stride=23 lhs_dilate=24}, dim_labels=0bf_0io->0bf")
    assert matrix_flops(text) == 2 * 24 * 64 * 64 * 32


@pytest.mark.parametrize(
    ("kind", "operands", "result"),
    [
        ("Forward", ("f32[4,8,8,3]", "f32[16,3,3,3]"), "f32[4,8,8,16]"),
        ("BackwardInput", ("f32[4,8,8,16]", "f32[16,3,3,3]"), "f32[4,8,8,3]"),
        ("BackwardFilter", ("f32[4,8,8,3]", "f32[4,8,8,16]"), "f32[16,3,3,3]"),
    ],
)
def test_a_convolution_by_cudnn_and_its_derivatives_have_the_same_flops(kind, operands, result):
    text = f"""HloModule jit_f

ENTRY %main (a: {operands[0]}, b: {operands[1]}) -> ({result}, u8[0]) {{
  %a = {operands[0]} parameter(0)
  %b = {operands[1]} parameter(1)
  ROOT %conv = ({result}, u8[0]) custom-call(%a, %b), window={{size=3x3 pad=1_1x1_1}},
"""
    text = text.rstrip("\n") + f' dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{kind}"\n}}\n'
    assert matrix_flops(text) == 2 * 4 * (3 * 8 - 2) ** 2 * 3 * 16


def row(path, shape, spec, copies):
    num_bytes = 4
    for size in shape:
        num_bytes *= size
    return Row(
        path=path,
        shape=shape,
        dtype="float32",
        dims=("layers", "embed", "mlp") if len(shape) == 3 else ("vocab", "embed"),
        spec=spec,
        num_bytes=num_bytes,
        device_bytes=num_bytes * copies // 4,
        copies=copies,
    )


def test_whole_and_gathered_parameters_are_flagged():
    rows = [
        row("blocks/up", (2, 8, 32), PartitionSpec(None, "fsdp", "tensor"), 1),
        row("embedding", (64, 8), PartitionSpec(), 4),
    ]
    gather = Collective(
        kind=ALL_GATHER,
        axes=("tensor",),
        group_size=2,
        count=4,
        payload_bytes=8 * 32 * 4,
        wire_bytes_per_device=1.0,
        dtype="f32",
        loops=(),
        source="",
    )
    found = Figures(argument_bytes=0, output_bytes=0, alias_bytes=0, temp_bytes=0, collectives=(gather,))
    assert list(flag_parameters(rows, found, zero=3, num_devices=4)) == [
        "embedding (2.0 KiB) is whole on every device; give a rule for one of its dims",
        "blocks/up is split over tensor, and 4 all-gathers of arrays of its size run over that axis; see"
        " whether a constraint of the model contradicts its rules",
    ]
    nothing = Figures(argument_bytes=0, output_bytes=0, alias_bytes=0, temp_bytes=0, collectives=())
    # ZeRO-1 has whole parameters, and data parallelism alone too
    assert list(flag_parameters(rows, nothing, zero=1, num_devices=4)) == []
    assert list(flag_parameters(rows[1:], nothing, zero=3, num_devices=4)) == []


def test_a_plan_is_compiled_beside_its_prediction(capsys, monkeypatch, tmp_path):
    (tmp_path / "tiny.py").write_text(TINY_RUN)
    monkeypatch.setenv("COLUMNS", "1000")
    machine = ["--devices", "2", "--device", "NVIDIA L4", "--link", "10", "--most", "1"]

    def planned(*words):
        code = cli.main(["plan", str(tmp_path / "tiny.py"), *machine, *words])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    code, text = planned("--fixed", "fsdp=2", "--compile", "cpu")
    assert code == 0
    (flops,) = [line for line in text.splitlines() if "flops of a device" in line]
    assert flops.split()[-1] == "1.000"
    assert "sent over fsdp" in text
    code, text = planned("--compile", "l4")
    assert code == 2
    assert "devices of kind 'l4' (known: cpu, h100, a100) cannot be compiled for" in text
    monkeypatch.setattr(ahead_of_time, "find_spec", lambda name: None)
    code, text = planned("--compile", "v5e:1x2")
    assert code == 2
    assert "needs the module libtpu, which is not installed; install the extra" in text


def test_a_topology_has_as_many_devices_as_the_mesh(monkeypatch):
    monkeypatch.setattr(ahead_of_time, "find_spec", lambda name: object())

    class Four:
        devices = tuple(range(4))

    monkeypatch.setattr(ahead_of_time.topologies, "get_topology_desc", lambda **options: Four())
    assert len(describe_devices("v5e:2x2", 4)) == 4
    with pytest.raises(
        ValueError, match="the topology 'v5e:2x2' has 4 devices, and the mesh 8; use a topology"
    ):
        describe_devices("v5e:2x2", 8)
