"""How right the planner is: memory and times that it predicts, against compiled steps on this machine.

uv run python benchmarks/planner.py [memory] [long] [rank] [large] [--steps 8] [--measured rows.csv]
    [--kind h100]

memory: 8 ways to run each of two decoders, the compiler's figure beside the prediction. long: likewise of
long sequences over the mesh axis context. rank: 24 ways to run a small decoder on 8 simulated devices,
processor time of a step beside two predictions: by three rates that are measured first, and by constants
that are fitted to six other ways; with --measured FILE from the rows of a file, without running a step, if
it is there. large: seconds to plan 1,024 devices.
Figures: docs/benchmarks/planner.md.
"""

import argparse
import csv
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from shardtrain import next_token_loss
from shardtrain.cli.calibrate import measured_host, usable_cores
from shardtrain.functional.nnx_model import as_model
from shardtrain.functional.remat import with_remat
from shardtrain.islands.malloc import tune_malloc
from shardtrain.models.decoder import DecoderConfig
from shardtrain.plan.calibration import fitted
from shardtrain.plan.compile import GPU_TARGETS, compile_step, described_devices, figures
from shardtrain.plan.machine import Link, Machine, Rates, simulated_machine
from shardtrain.plan.predict import predictions
from shardtrain.plan.prediction import Choice
from shardtrain.plan.search import search
from shardtrain.plan.space import Space, mesh_text
from shardtrain.plan.subject import Subject
from shardtrain.plan.trace import Target
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.initial_state import init_state
from shardtrain.train_step.placement import make_placement
from shardtrain.train_step.step import make_step

A100_NODES = Machine(
    rates=Rates(
        flops_per_second=156e12, memory_bytes_per_second=1.6e12, kernel_seconds=5e-6, memory_bytes=80e9
    ),
    devices_per_node=8,
    device_link=Link(bytes_per_second=300e9, latency_seconds=5e-6),
    node_link=Link(bytes_per_second=100e9, latency_seconds=1e-5),
)
"""Nodes of 8 A100, at half of their peak."""

MODELS = {
    "many activations": (
        DecoderConfig(vocab=256, seq=128, embed=128, num_layers=4, num_heads=8, mlp=512),
        16,
    ),
    "many parameters": (
        DecoderConfig(vocab=2048, seq=128, embed=512, num_layers=4, num_heads=8, mlp=2048),
        16,
    ),
}
POINTS: Sequence[tuple[dict[str, int], int, str, int, bool]] = (
    ({"data": 8}, 1, "weights", 3, False),
    ({"data": 4}, 2, "dots", 3, False),
    ({"fsdp": 8}, 1, "full", 3, False),
    ({"fsdp": 8}, 2, "weights", 1, False),
    ({"tensor": 8}, 1, "none", 3, False),
    ({"tensor": 4}, 1, "weights", 3, True),
    ({"data": 2, "fsdp": 2, "tensor": 2}, 2, "outputs", 3, False),
    ({"pipeline": 2, "data": 2, "tensor": 2}, 4, "weights", 3, False),
)
RANKED: Sequence[tuple[dict[str, int], int, str, int, bool]] = (
    *POINTS,
    ({"data": 8}, 2, "none", 3, False),
    ({"data": 8}, 2, "full", 3, False),
    ({"fsdp": 8}, 1, "weights", 3, False),
    ({"fsdp": 4, "tensor": 2}, 2, "weights", 3, False),
    ({"data": 4, "tensor": 2}, 1, "none", 3, False),
    ({"data": 2, "tensor": 4}, 2, "dots", 3, False),
    ({"data": 2, "tensor": 4}, 1, "none", 3, True),
    ({"tensor": 8}, 2, "full", 3, False),
    ({"pipeline": 4}, 4, "weights", 3, False),
    ({"pipeline": 4}, 16, "weights", 3, False),
    ({"pipeline": 4, "data": 2}, 8, "none", 3, False),
    ({"pipeline": 2, "fsdp": 4}, 2, "weights", 3, False),
    ({"pipeline": 2, "tensor": 4}, 8, "full", 3, False),
    ({"data": 1}, 1, "none", 3, False),
    ({"data": 2}, 8, "weights", 3, False),
    ({"fsdp": 2, "tensor": 2}, 4, "dots", 1, False),
)
PROBES: Sequence[tuple[dict[str, int], int, str, int, bool]] = (
    ({"data": 4}, 1, "none", 3, False),
    ({"fsdp": 8}, 2, "none", 3, False),
    ({"data": 2, "pipeline": 4}, 2, "weights", 3, False),
    ({"tensor": 2}, 2, "none", 3, False),
    ({"pipeline": 2}, 4, "none", 3, False),
    ({"data": 1}, 4, "full", 3, False),
)
"""Six ways that are not ranked, to which constants are fitted."""


def subject_of(config: DecoderConfig, rows: int) -> Subject:
    """A decoder with AdamW and a batch of so many rows."""
    return Subject(
        model=lambda remat: as_model(with_remat(config, remat)),
        loss=next_token_loss,
        optimizer=optax.adamw(1e-3),
        batch={
            "tokens": jax.ShapeDtypeStruct((rows, config.seq + 1), np.int32),
            "weights": jax.ShapeDtypeStruct((rows,), np.float32),
        },
    )


def choice_of(mesh: dict[str, int], accumulate: int, remat: str, zero: int, sequence: bool) -> Choice:
    """One of the ways above."""
    return Choice(
        layout=Layout(mesh=mesh, zero=zero, sequence_sharded=sequence), accumulate=accumulate, remat=remat
    )


def placed(subject: Subject, choice: Choice, kind: str = "cpu") -> Any:
    """The placement of a choice on simulated or absent devices."""
    num_devices = math.prod(choice.layout.mesh.values())
    stages = subject.stages(choice.layout.mesh.get("pipeline", 1), choice.virtual_stages)
    mesh = make_mesh(choice.layout, described_devices(kind, num_devices))
    return make_placement(
        subject.model_of(choice.remat), subject.optimizer, choice.layout, mesh, stages=stages
    )


def memory(kind: str) -> None:
    """Print predicted over compiled bytes of a device."""
    machine = Machine(rates=Rates(flops_per_second=1e11, copies_stacked=kind == "cpu"))
    within = []
    for name, (config, rows) in MODELS.items():
        subject = subject_of(config, rows)
        if kind in GPU_TARGETS:
            subject = replace(subject, target=Target(GPU_TARGETS[kind][0]))
        for point in POINTS:
            choice = choice_of(*point)
            sizes = axis_sizes(choice.layout.mesh, math.prod(choice.layout.mesh.values()))
            compiled = compile_step(
                subject.model_of(choice.remat),
                subject.loss,
                subject.optimizer,
                placed(subject, choice, kind),
                subject.batch,
                microbatches=choice.accumulate,
            )
            found = figures(compiled, sizes)
            real = found.device_bytes
            (predicted,) = predictions(subject, machine, math.prod(sizes.values()), [choice])
            ratio = predicted.memory.total / real
            within.append(abs(ratio - 1) <= 0.1)
            print(
                f"| {name} | {mesh_text(choice.layout)} | {choice.accumulate} | {choice.remat} |"
                f" {real / 1e6:.1f} | {predicted.memory.total / 1e6:.1f} | {ratio:.3f} |",
                flush=True,
            )
    print(f"within 10 %: {sum(within)} of {len(within)}")


class Measured(NamedTuple):
    """What was measured: rates of the host, and processor seconds of a step.

    Args:
      host: all of it as one device.
      cores: of it.
      judged, probes: (ways, rounds).
    """

    host: Machine
    cores: int
    judged: np.ndarray
    probes: np.ndarray


LONG: Sequence[tuple[int, int, int, dict[str, int], Any, str]] = (
    *(
        (1, seq, 1, {"context": num}, kind, "full")
        for seq, num, kind in (
            (16384, 2, "ring"),
            (16384, 4, "ring"),
            (16384, 8, "ring"),
            (8192, 8, "ring"),
            (16384, 4, "all-gather"),
            (8192, 4, "all-gather"),
            (8192, 4, "all-to-all"),
        )
    ),
    *(
        (num_layers, 4096, 4, mesh, kind, "none")
        for num_layers in (1, 4)
        for mesh, kind in (
            ({"context": 4}, "ring"),
            ({"data": 2, "context": 2}, "ring"),
            ({"context": 4}, "all-gather"),
        )
    ),
    (4, 8192, 1, {"context": 8}, "ring", "full"),
    (4, 8192, 1, {"context": 4}, "all-gather", "full"),
    (4, 8192, 2, {"data": 2, "context": 4}, "ring", "weights"),
)
"""Blocks, positions, rows, mesh, attention and remat."""


def long_memory(kind: str) -> None:
    """Print predicted over compiled bytes of a device that has a part of long sequences."""
    machine = Machine(rates=Rates(flops_per_second=1e11, copies_stacked=kind == "cpu"))
    for num_layers, seq, rows, mesh, attention, remat in LONG:
        config = DecoderConfig(vocab=256, seq=seq, embed=256, num_layers=num_layers, num_heads=4, mlp=256)
        subject = subject_of(config, rows)
        if kind in GPU_TARGETS:
            subject = replace(subject, target=Target(GPU_TARGETS[kind][0]))
        choice = Choice(layout=Layout(mesh=mesh, context_attention=attention), remat=remat)
        compiled = compile_step(
            subject.model_of(remat),
            subject.loss,
            subject.optimizer,
            placed(subject, choice, kind),
            subject.batch,
        )
        real = figures(compiled, axis_sizes(mesh, math.prod(mesh.values()))).device_bytes
        (predicted,) = predictions(subject, machine, math.prod(mesh.values()), [choice])
        total = predicted.memory.total
        axes = ",".join(f"{axis}={size}" for axis, size in mesh.items())
        print(
            f"| {num_layers} | {seq} x {rows} | --mesh {axes} --context-attention {attention} | {remat} |"
            f" {real / 1e6:.0f} | {total / 1e6:.0f} |"
            f" {total / real:.2f} |",
            flush=True,
        )


def measured_rows(path: Path | None, steps: int) -> Measured:
    """Return the rows of a CSV file; if it is not there, measure them and write it."""
    if path is not None and path.exists():
        values: dict[tuple[str, str], list[float]] = {}
        with path.open() as file:
            for row in csv.DictReader(file):
                values.setdefault((row["kind"], row["way"]), []).append(float(row["value"]))
        host = {way: value for (kind, way), (value, *_) in values.items() if kind == "host"}
        cores = int(host["cores"])
        link = Link(bytes_per_second=host["link"], latency_seconds=host["latency"])

        def rows_of(kind: str, points: Sequence[Any]) -> np.ndarray:
            ways = [(kind, way_text(choice_of(*point))) for point in points]
            if missing := [way for way in ways if way not in values]:
                raise ValueError(f"{path} has no rows of {' '.join(missing[0])}; measure them, to a new file")
            return np.array([values[way] for way in ways])

        rates = Rates(
            flops_per_second=host["flops_per_second"],
            memory_bytes_per_second=host["memory_bytes_per_second"],
            kernel_seconds=host["kernel_seconds"],
        )
        machine = Machine(rates=rates, device_link=link)
        return Measured(machine, cores, rows_of("judged", RANKED), rows_of("probe", PROBES))
    subject = subject_of(*MODELS["many activations"])
    host = measured_host("float32")
    choices = [choice_of(*point) for point in (*RANKED, *PROBES)]
    seconds = processor_seconds(subject, choices, steps)
    if path is not None:
        kinds = ["judged"] * len(RANKED) + ["probe"] * len(PROBES)
        figures_of_host = {
            "cores": usable_cores(),
            "flops_per_second": host.rates.flops_per_second,
            "memory_bytes_per_second": host.rates.memory_bytes_per_second,
            "kernel_seconds": host.rates.kernel_seconds,
            "link": host.device_link.bytes_per_second,
            "latency": host.device_link.latency_seconds,
        }
        with path.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("kind", "way", "value"))
            writer.writerows(("host", name, value) for name, value in figures_of_host.items())
            writer.writerows(
                (kind, way_text(choice), f"{value:.6f}")
                for kind, choice, found in zip(kinds, choices, seconds, strict=True)
                for value in found
            )
    return Measured(host, usable_cores(), seconds[: len(RANKED)], seconds[len(RANKED) :])


def way_text(choice: Choice) -> str:
    """Name a way in a table."""
    return f"{mesh_text(choice.layout)} | {choice.accumulate} | {choice.remat}"


def order_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return Spearman's rank correlation of values of which no two are equal."""
    return float(np.corrcoef(one.argsort().argsort(), other.argsort().argsort())[0, 1])


def work_seconds(subject: Subject, host: Machine, choices: Sequence[Choice], cores: int) -> np.ndarray:
    """Return the predicted processor seconds of a step: the simulated devices keep all cores busy."""
    found = []
    for choice in choices:
        num_devices = math.prod(choice.layout.mesh.values())
        device = simulated_machine(host, num_devices, cores)
        (predicted,) = predictions(subject, device, num_devices, [choice])
        found.append(cores * predicted.seconds.total)
    return np.array(found)


def judge(measured: Measured) -> dict[str, tuple[float, float]]:
    """Print predicted times beside processor times of a step, and how well their orders agree.

    Predicted by three rates that are measured first, and by constants fitted to `PROBES` alone.

    Returns:
      Name of the prediction -> (rank correlation, seconds of the pick over those of the best).
    """
    judged, probes = ([choice_of(*point) for point in points] for points in (RANKED, PROBES))
    least, of_probes = measured.judged.min(1), measured.probes.min(1)
    subject, cores = subject_of(*MODELS["many activations"]), measured.cores

    def of_probes_by(host: Machine) -> list[float]:
        return work_seconds(subject, host, probes, cores).tolist()

    fit = fitted(measured.host, of_probes_by, of_probes.tolist())
    by_rates, by_fit = (work_seconds(subject, host, judged, cores) for host in (measured.host, fit.machine))
    for choice, *times in zip(judged, by_rates, by_fit, least, strict=True):
        print(f"| {way_text(choice)} | {' | '.join(f'{1e3 * each:.0f}' for each in times)} |")
    print(f"fitted: {fit.machine.rates}, {fit.machine.device_link}")
    found = {}
    for name, predicted in (("rates", by_rates), ("fitted to probes", by_fit)):
        order = order_correlation(predicted, least)
        found[name] = order, float(least[predicted.argmin()] / least.min())
        print(f"{name}: rank correlation {order:.3f}, the pick takes {found[name][1]:.3f} of the best")
    halves = (measured.judged[:, start::2].min(1) for start in (0, 1))
    print(f"rounds with odd and even numbers: rank correlation {order_correlation(*halves):.3f}")
    return found


def processor_seconds(subject: Subject, choices: Sequence[Choice], rounds: int) -> np.ndarray:
    """Processor seconds of a step of all devices, for each choice in each of several rounds (C, rounds)."""
    running: list[list[Any]] = []
    rng = np.random.default_rng(0)
    for choice in choices:
        placement, model = placed(subject, choice), subject.model_of(choice.remat)
        step = make_step(model, subject.loss, subject.optimizer, placement)
        state, batch = init_state(model, subject.optimizer, placement), {}
        for name, like in subject.batch.items():
            shape = (choice.accumulate, like.shape[0] // choice.accumulate, *like.shape[1:])
            values = rng.integers(0, 255, shape) if name == "tokens" else np.ones(shape)
            batch[name] = jax.device_put(values.astype(like.dtype), placement.batch)
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        running.append([step, state, batch])
    times: list[list[float]] = [[] for _ in running]
    for _ in range(rounds + 1):
        for each, found in zip(running, times, strict=True):
            began = time.process_time()
            each[1], metrics = each[0](each[1], each[2])
            jax.block_until_ready(metrics)
            found.append(time.process_time() - began)
    # the first round is warmer for some than for others
    return np.array(times)[:, 1:]


def large() -> None:
    """Print how long a plan of 1,024 devices takes."""
    config = DecoderConfig(vocab=50304, seq=1024, embed=4096, num_layers=32, num_heads=32, mlp=16384)
    began, began_processor = time.perf_counter(), time.process_time()
    plan = search(subject_of(config, 2048), A100_NODES, 1024, Space(), most=3)
    print(
        f"{plan.num_choices} ways, {len(plan.refused)} layouts refused: {time.perf_counter() - began:.1f} s,"
        f" of a processor {time.process_time() - began_processor:.1f} s"
    )
    for each in plan.ranked:
        print(mesh_text(each.choice.layout), each.choice.accumulate, each.choice.remat)


def main() -> None:
    """Run the parts that are named, or all."""
    # before devices start: freed memory is kept, as in launched islands; else page faults are a third
    tune_malloc()
    jax.config.update("jax_num_cpu_devices", 8)
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["memory", "rank", "large"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--measured",
        type=Path,
        help="CSV file with the measured steps of rank: written if it is not there, else read instead",
    )
    parser.add_argument("--kind", default="cpu", help="of memory and long: cpu, h100 or a100")
    options = parser.parse_args()
    parts = {
        "memory": lambda: memory(options.kind),
        "long": lambda: long_memory(options.kind),
        "rank": lambda: judge(measured_rows(options.measured, options.steps)),
        "large": large,
    }
    for part in options.parts:
        parts[part]()


if __name__ == "__main__":
    main()
