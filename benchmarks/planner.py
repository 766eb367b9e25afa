"""How right the planner is: memory, bytes and times that it predicts, against compiled and measured steps.

uv run python benchmarks/planner.py [memory] [long] [traffic] [gpu] [rank] [--steps 8]
    [--measured rows.csv] [--kind h100]

memory: 8 ways to run each of two decoders, the compiler's figure beside the prediction. long: likewise of
long sequences over the mesh axis context. traffic: likewise the bytes that a device sends in a step of GPT-2
medium. gpu: steps that one H200 ran (`gpu.py`), beside their predictions; nothing runs. rank: 24 ways to run
a small decoder on 8 simulated devices, processor time of a step beside its prediction by three measured
rates, from the rows of a file; with --steps these are measured again first.

Figures: docs/benchmarks/planner.md and traffic.md.
"""

import csv
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
import tyro
from gpu import CASES, LLAMA_1B, LLAMA_8B_SLICE, ROOMY
from paired import markdown
from stepper import random_tokens, token_shapes

import shardtrain as st
from shardtrain.cli.calibrate import count_cores, measure_host
from shardtrain.functional.nnx_model import convert_model
from shardtrain.functional.remat import apply_remat
from shardtrain.islands.cluster_device import ClusterDevice
from shardtrain.islands.malloc import tune_malloc
from shardtrain.models.decoder import DecoderConfig
from shardtrain.plan.compile import GPU_TARGETS, compile_step, describe_devices, figures
from shardtrain.plan.machine import Link, Machine, Rates, make_machine, make_simulated_machine
from shardtrain.plan.predict import predict, predict_choices, steps, sum_sent_by_axes
from shardtrain.plan.prediction import Choice, Prediction
from shardtrain.plan.space import mesh_text
from shardtrain.plan.subject import Subject
from shardtrain.plan.trace import Target

SMALL = DecoderConfig(vocab=256, seq=128, embed=128, num_layers=4, num_heads=8, mlp=512)
MODELS = {"many activations": SMALL, "many parameters": replace(SMALL, vocab=2048, embed=512, mlp=2048)}
ROWS = 16
POINTS = """
data=8 1 weights
data=4 2 dots
fsdp=8 1 full
fsdp=8 2 weights zero1
tensor=8 1 none
tensor=4 1 weights sequence
data=2,fsdp=2,tensor=2 2 outputs
pipeline=2,data=2,tensor=2 4 weights
"""
"""Ways to run a decoder: mesh, microbatches, remat, and what differs else."""

LONG = """
1 16384 1 context=2 1 full ring
1 16384 1 context=4 1 full ring
1 16384 1 context=8 1 full ring
1 8192 1 context=8 1 full ring
1 16384 1 context=4 1 full all-gather
1 8192 1 context=4 1 full all-gather
1 8192 1 context=4 1 full all-to-all
1 4096 4 context=4 1 none ring
1 4096 4 data=2,context=2 1 none ring
1 4096 4 context=4 1 none all-gather
4 4096 4 context=4 1 none ring
4 4096 4 data=2,context=2 1 none ring
4 4096 4 context=4 1 none all-gather
4 8192 1 context=8 1 full ring
4 8192 1 context=4 1 full all-gather
4 8192 2 data=2,context=4 1 weights ring
"""
"""Blocks, positions and rows of a decoder, and a way to run it."""

GPT2_MEDIUM = DecoderConfig(vocab=50304, seq=1024, embed=1024, num_layers=24, num_heads=16)
SENT = """
data=8 1 weights
data=8 4 weights
fsdp=8 1 weights
fsdp=8 4 weights
fsdp=8 4 weights zero2
tensor=8 1 weights
tensor=8 1 weights sequence
tensor=8 1 weights sequence matmul
data=2,fsdp=2,tensor=2 4 weights
"""
"""Ways to run 64 rows of it."""

H200 = "NVIDIA H200"


class MeasuredStep(NamedTuple):
    """A step that was measured on one H200.

    Args:
      name: of the model, and what it recomputes.
      config: the model.
      rows: of the batch.
      ms: of a step; None: only its memory was measured.
      memory_gib: the most memory in use; None: it was not measured.
    """

    name: str
    config: DecoderConfig
    rows: int
    ms: float | None = None
    memory_gib: float | None = None


STEPS = (
    MeasuredStep("GPT-2 124M", CASES["gpt2-124m"].config, 32, 61.0, 16.9),
    MeasuredStep("Llama 1.2B, remat weights", replace(LLAMA_1B, remat="weights"), 8, 248),
    MeasuredStep("Llama 1.2B, remat outputs", LLAMA_1B, 8, 295),
    MeasuredStep("Llama 1.2B, remat weights, all logits", replace(LLAMA_1B, **ROOMY), 8, memory_gib=42.7),
    MeasuredStep("4 of 32 blocks of a Llama 8B, remat outputs", LLAMA_8B_SLICE, 1, 172),
)
"""The figures of docs/benchmarks/gpu.md."""


def read_way(text: str) -> Choice:
    """Return a way to run a step from a line above."""
    mesh, accumulate, remat, *rest = text.split()
    attention = next((word for word in rest if word.startswith(("ring", "all-"))), "ring")
    layout = st.Layout(
        mesh={axis: int(size) for axis, size in (each.split("=") for each in mesh.split(","))},
        zero=1 if "zero1" in rest else 2 if "zero2" in rest else 3,
        sequence_sharded="sequence" in rest,
        collective_matmul="matmul" in rest,
        context_attention=attention,  # type: ignore[arg-type]
    )
    return Choice(layout=layout, accumulate=int(accumulate), remat=remat)  # type: ignore[arg-type]


def read_ways(text: str) -> list[Choice]:
    """Return the ways of all lines."""
    return [read_way(line) for line in text.split("\n") if line]


def make_subject(config: DecoderConfig, rows: int = ROWS, kind: str = "cpu") -> Subject:
    """Return a decoder with AdamW and a batch of so many rows, for a kind of device."""
    target = {"target": Target(GPU_TARGETS[kind][0])} if kind in GPU_TARGETS else {}
    return Subject(
        model=lambda remat: convert_model(apply_remat(config, remat)),
        loss=st.next_token_loss,
        optimizer=optax.adamw(1e-3),
        batch=token_shapes(rows, config.seq),
        **target,  # type: ignore[arg-type]
    )


def place_state(subject: Subject, choice: Choice, kind: str = "cpu") -> Any:
    """Return the placement of a choice on simulated or absent devices."""
    num_devices = math.prod(choice.layout.mesh.values())
    stages = subject.stages(choice.layout.mesh.get("pipeline", 1), choice.virtual_stages)
    mesh = st.make_mesh(choice.layout, describe_devices(kind, num_devices))
    model = subject.find_model(choice.remat)
    return st.make_placement(model, subject.optimizer, choice.layout, mesh, stages=stages)


def count_compiled(subject: Subject, choice: Choice, kind: str) -> Any:
    """Return the compiler's figures of a step on simulated or absent devices."""
    placement, model = place_state(subject, choice, kind), subject.find_model(choice.remat)
    arguments = (model, subject.loss, subject.optimizer, placement, subject.batch)
    return figures(compile_step(*arguments, microbatches=choice.accumulate), dict(placement.mesh.shape))


def compare(
    cases: Sequence[tuple[str, Subject, Choice]], kind: str, what: Literal["memory", "sent"] = "memory"
) -> list[float]:
    """Print compiled and predicted megabytes of a device, memory or sent in a step; return the ratios."""
    machine = Machine(rates=Rates(flops_per_second=1e11, copies_stacked=kind == "cpu"))
    ratios = []
    for name, subject, choice in cases:
        found = count_compiled(subject, choice, kind)
        (step,) = steps(subject, machine, math.prod(choice.layout.mesh.values()), [choice])
        if what == "memory":
            real, predicted = found.device_bytes, predict(step, machine).memory.total
        else:
            real = sum(each.wire_bytes_per_device for each in found.collectives)
            predicted = sum(sum_sent_by_axes(step, simulated=kind == "cpu").values())
        ratios.append(predicted / real)
        way = f"{mesh_text(choice.layout)} | {choice.accumulate} | {choice.remat}"
        print(f"| {name} | {way} | {real / 1e6:.1f} | {predicted / 1e6:.1f} | {ratios[-1]:.3f} |", flush=True)
    print(f"within 10 %: {sum(abs(ratio - 1) <= 0.1 for ratio in ratios)} of {len(ratios)}")
    return ratios


def compare_small(kind: str) -> None:
    subjects = {name: make_subject(config, kind=kind) for name, config in MODELS.items()}
    compare([(k, v, choice) for k, v in subjects.items() for choice in read_ways(POINTS)], kind)


def compare_long(kind: str) -> None:
    cases = []
    for line in LONG.split("\n")[1:-1]:
        layers, seq, rows, way = line.split(maxsplit=3)
        config = replace(SMALL, seq=int(seq), embed=256, num_layers=int(layers), num_heads=4, mlp=256)
        cases.append((f"{layers} x {seq} x {rows}", make_subject(config, int(rows), kind), read_way(way)))
    compare(cases, kind)


def compare_sent(kind: str) -> None:
    configs = {"float32, tied": GPT2_MEDIUM}
    if kind != "cpu":
        # XLA for CPU turns bfloat16 into float32 before it sends it
        configs["bfloat16, untied"] = replace(GPT2_MEDIUM, dtype="bfloat16", tied=False)
    for name, config in configs.items():
        subject = make_subject(config, 64, kind)
        compare([(name, subject, choice) for choice in read_ways(SENT)], kind, "sent")


def predict_measured(step: MeasuredStep) -> Prediction:
    """Return what the planner predicts for a step on one H200."""
    subject = make_subject(step.config, step.rows)
    optimizer, _ = st.make_optimizer(st.Optimizer(), 1000, convert_model(step.config).dims)
    subject = replace(subject, optimizer=optimizer, target=Target(H200, one_device=True))
    machine = make_machine(ClusterDevice(name=H200), 1, in_float32=False)
    (found,) = predict_choices(subject, machine, 1, [Choice(layout=st.Layout())])
    return found


def compare_measured() -> None:
    """Print measured milliseconds and GiB of steps, the predicted ones, and predicted over measured."""
    rows = []
    for step in STEPS:
        found = predict_measured(step)
        pairs = (step.ms, 1e3 * found.seconds.total), (step.memory_gib, found.memory.total / 2**30)
        figures = [(real or "", f"{x:.1f}", f"{x / real:.2f}" if real else "") for real, x in pairs]
        rows.append((step.name, f"{step.rows} x {step.config.seq}", *figures[0], *figures[1]))
    header = [f"{what}{unit}" for unit in (" ms", " GiB") for what in ("measured", "predicted", "ratio of")]
    print(markdown(["one H200", "rows x tokens", *header], rows))


class Measured(NamedTuple):
    """What was measured: rates of the host, and processor seconds of a step.

    Args:
      host: all of it as one device.
      cores: of it.
      ways: their lines, see `read_way`.
      seconds: (ways, rounds).
    """

    host: Machine
    cores: int
    ways: list[str]
    seconds: np.ndarray


MEASURED = Path(__file__).parents[1] / "docs" / "benchmarks" / "planner_measured.csv"
RATES = ("flops_per_second", "memory_bytes_per_second", "kernel_seconds")


def read_measured(path: Path) -> Measured:
    """Read measured rows."""
    with path.open() as file:
        rows = {name: [float(value) for value in values] for name, *values in csv.reader(file)}
    cores, link, latency, *rates = (rows.pop(name)[0] for name in ("cores", "link", "latency", *RATES))
    machine = Machine(
        rates=Rates(**dict(zip(RATES, rates, strict=True))),  # type: ignore[arg-type]
        device_link=Link(bytes_per_second=link, latency_seconds=latency),
    )
    return Measured(machine, int(cores), list(rows), np.array(list(rows.values())))


def write_measured(measured: Measured, path: Path) -> None:
    """Write the rows that `read_measured` reads."""
    rates, link = measured.host.rates, measured.host.device_link
    rows = [["cores", measured.cores], *([name, getattr(rates, name)] for name in RATES)]
    rows += [["link", link.bytes_per_second], ["latency", link.latency_seconds]]
    rows += [[way, *each.round(6)] for way, each in zip(measured.ways, measured.seconds, strict=True)]
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def correlate_orders(one: np.ndarray, other: np.ndarray) -> float:
    """Return Spearman's rank correlation of values of which no two are equal."""
    return float(np.corrcoef(one.argsort().argsort(), other.argsort().argsort())[0, 1])


def predict_seconds(measured: Measured) -> np.ndarray:
    """Return the predicted processor seconds of a step: the simulated devices keep all cores busy."""
    found, subject, cores = [], make_subject(SMALL), measured.cores
    for choice in map(read_way, measured.ways):
        num_devices = math.prod(choice.layout.mesh.values())
        device = make_simulated_machine(measured.host, num_devices, cores)
        (predicted,) = predict_choices(subject, device, num_devices, [choice])
        found.append(cores * predicted.seconds.total)
    return np.array(found)


def judge(path: Path, steps: int) -> None:
    """Print predicted times beside processor times of a step, and how well their orders agree."""
    measured = read_measured(path)
    if steps:
        host, ways = measure_host("float32"), measured.ways
        seconds = time_steps(make_subject(SMALL), [*map(read_way, ways)], steps)
        measured = Measured(host, count_cores(), ways, seconds)
        write_measured(measured, path)
    predicted, least = predict_seconds(measured), measured.seconds.min(1)
    for way, *each in zip(measured.ways, predicted, least, strict=True):
        print(f"| {way} | {' | '.join(f'{1e3 * x:.0f}' for x in each)} |")
    order, pick = correlate_orders(predicted, least), least[predicted.argmin()] / least.min()
    print(f"rank correlation {order:.3f}, the pick takes {pick:.3f} of the best")
    halves = (measured.seconds[:, start::2].min(1) for start in (0, 1))
    print(f"rounds with odd and even numbers: rank correlation {correlate_orders(*halves):.3f}")


def time_steps(subject: Subject, choices: Sequence[Choice], rounds: int) -> np.ndarray:
    """Return processor seconds of a step of all devices, for each choice in each round (C, rounds)."""
    running: list[list[Any]] = []
    for choice in choices:
        placement, model = place_state(subject, choice), subject.find_model(choice.remat)
        step = st.make_step(model, subject.loss, subject.optimizer, placement)
        state, batch = st.init_state(model, subject.optimizer, placement), {}
        for name, x in random_tokens(SMALL.vocab, ROWS, SMALL.seq).items():
            microbatches = x.reshape(choice.accumulate, -1, *x.shape[1:])
            batch[name] = jax.device_put(microbatches, placement.batch)
        running.append([step, state, batch])
    times = np.zeros((len(running), rounds + 2))
    for number in range(rounds + 2):
        for each, found in zip(running, times, strict=True):
            began = time.process_time()
            each[1], metrics = each[0](each[1], each[2])
            jax.block_until_ready(metrics)
            found[number] = time.process_time() - began
    # the first round compiles, the second is warmer for some than for others
    return times[:, 2:]


def main(
    parts: tyro.conf.Positional[tuple[str, ...]] = ("memory", "rank"),
    steps: int = 0,
    measured: Path = MEASURED,
    kind: str = "cpu",
) -> None:
    """Run the parts that are named.

    Args:
      steps: rounds of rank; 0 reads the rows of `measured`, which are written anew otherwise.
      measured: CSV file of the ways and steps of rank.
      kind: of memory, long and traffic: cpu, h100 or a100.
    """
    # before devices start: freed memory is kept, as in launched islands; else page faults are a third
    tune_malloc()
    jax.config.update("jax_num_cpu_devices", 8)
    run = {
        "memory": partial(compare_small, kind),
        "long": partial(compare_long, kind),
        "traffic": partial(compare_sent, kind),
        "gpu": compare_measured,
        "rank": partial(judge, measured, steps),
    }
    for part in parts:
        run[part]()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
