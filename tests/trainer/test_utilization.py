"""MFU in the metrics of a run: what is counted of a model, what it is divided by, and where there is none."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quiet_training import InMemory, train_quietly
from tiny_language_model import TinyConfig

from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.decoder_flops import flops_per_token
from shardtrain.plan.devices import Device
from shardtrain.plan.trace import trace
from shardtrain.sharding.layout import Layout
from shardtrain.trainer import usage
from shardtrain.trainer.config import Run
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.usage import compute_row_seconds_at_peak, count_row_flops

GPT = DecoderConfig(vocab=64, seq=16, embed=32, num_layers=2, num_heads=4)
FLASH = replace(GPT, attention="cudnn")
LLAMA = replace(
    GPT,
    num_kv_heads=2,
    mlp=80,
    positions="rotary",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
    tied=False,
)
CPU = Device(
    kind="cpu",
    source="imagined datasheet",
    matrix_flops_per_second=1e9,
    memory_bytes=1 << 30,
    memory_bytes_per_second=1e9,
)


ROWS = [{"tokens": np.arange(first, first + 9, dtype=np.int32)} for first in range(64)]


def run_of(model, **options):
    return Run(model=model, data=InMemory(ROWS, ROWS), batch=16, **options)


def flops_of(config, **options):
    rows = {"tokens": np.zeros((2, config.seq + 1), np.int32), "weights": np.ones(2, np.float32)}
    return count_row_flops(run_of(config, **options), rows)


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_flops_of_decoders_are_those_of_the_formula(config):
    flops = flops_of(config)
    assert flops == pytest.approx(config.seq * flops_per_token(config), rel=0.02)
    assert flops_of(config, strategy=Strategy(remat="full")) == flops


def test_flash_attention_counts_as_attention_that_writes_its_scores():
    assert flops_of(FLASH) == flops_of(GPT)


def test_gradients_of_frozen_parameters_do_not_count():
    num_frozen = GPT.num_layers * 2 * GPT.sizes["embed"] * GPT.sizes["mlp"]
    assert flops_of(GPT) - flops_of(GPT, freeze=("blocks/mlp/*",)) == 2 * GPT.seq * num_frozen


def test_the_gradient_of_a_strided_convolution_has_twice_its_flops():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 8, 8, 3), (3, 3, 3, 16))]

    def convolved(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=numbers).sum()

    def flops(function, num_results):
        program = trace(function, shapes, [None] * 2, [None] * num_results, [False] * num_results)
        return sum(kernel.flops for kernel in program.kernels)

    forward = flops(convolved, 1)
    assert forward == 2 * 4 * 4 * 4 * 16 * 3 * 3 * 3
    assert flops(jax.value_and_grad(convolved, argnums=(0, 1)), 3) == 3 * forward


def test_the_peak_is_that_of_all_devices_of_all_islands(monkeypatch):
    monkeypatch.setattr(usage, "count_row_flops", lambda run, batch: 2.5e9)
    notes = []
    devices = [("NVIDIA H100 80GB HBM3", 4), ("NVIDIA L4", 2), ("NVIDIA H100 80GB HBM3", 4)]
    seconds = compute_row_seconds_at_peak(run_of(GPT), {}, devices, notes.append)
    assert seconds == pytest.approx(2.5e9 / (8 * 989.5e12 + 2 * 121e12))
    assert notes == [
        "MFU: 2.50G flops a row over the peak in dense bfloat16 of 8 x NVIDIA H100 80GB HBM3, 989.5"
        " teraflops/s each (NVIDIA H100 Tensor Core GPU datasheet) and 2 x NVIDIA L4, 121 teraflops/s each"
        " (NVIDIA L4 Tensor Core GPU datasheet)"
    ]


@pytest.mark.parametrize("kind", ["cpu", "Tesla V100-SXM2-16GB"])
def test_without_the_peak_of_one_kind_nothing_is_counted(kind, monkeypatch):
    monkeypatch.setattr(usage, "count_row_flops", None)
    notes = []
    assert compute_row_seconds_at_peak(run_of(GPT), {}, [("NVIDIA L4", 2), (kind, 1)], notes.append) == 0
    tokens = run_of(GPT, batch_unit="tokens")
    assert compute_row_seconds_at_peak(tokens, {}, [("NVIDIA L4", 2)], notes.append) == 0
    assert not notes


def test_a_model_that_cannot_be_traced_for_a_device_of_no_kind_has_no_mfu():
    def loss(apply, batch):
        raise RuntimeError("no such device")

    notes = []
    rows = {"tokens": np.zeros((2, 9), np.int32)}
    assert (
        compute_row_seconds_at_peak(run_of(TinyConfig(), loss=loss), rows, [("NVIDIA L4", 2)], notes.append)
        == 0
    )
    assert notes == ["no MFU: the flops of the model cannot be counted: RuntimeError: no such device"]


def test_a_run_writes_its_mfu(tmp_path, monkeypatch):
    monkeypatch.setattr(usage, "find_device", lambda kind: CPU)
    model = TinyConfig(num_layers=2)
    run = run_of(
        model,
        strategy=Strategy(layout=Layout(mesh={"data": 2, "fsdp": 4}), accumulate=2),
        batch_growth="2:2",
        steps=4,
        log_every=1,
        evaluate_every=3,
        run_dir=tmp_path,
    )
    _, shown, lines = train_quietly(run)
    # 2 N for the forward pass, twice that for the gradients
    num_weights = model.embed * (2 * model.num_layers * model.mlp + model.vocab)
    seconds = 6 * num_weights * model.seq * 16 / (8 * 1e9)
    assert "mfu" not in lines[0]
    # the rates leave the first step out; from the third on a step has two batches
    for line, batches in zip(lines[1:], (1, 3 / 2, 5 / 3), strict=True):
        assert line["mfu"] == pytest.approx(seconds * batches * line["updates_per_second"])
        assert 8 * line["tokens_per_second_per_device"] == pytest.approx(line["tokens_per_second"])
    assert "flops a row over the peak in dense bfloat16 of 8 x cpu, 0.001 teraflops/s each (imagined" in shown
    assert f"tokens/s  MFU {lines[-1]['mfu']:.1%}  left 0s" in shown
