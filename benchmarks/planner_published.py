"""The planner against published tables: does it rank the ways to train a GPT as their measurements do?

uv run python benchmarks/planner_published.py [oneflow] [bigscience] [megatron]

Every row of a table is a model, a way to run it and a measured speed. The planner predicts each row's step
from shapes alone, on the machine that the source names, with rates of data sheets. Nothing is fitted to a
table: further columns take the rate of matrix products, and the link between nodes, from one named row each,
which is then not judged. Shown are the rank correlation (Spearman) of flops a second of a device, and the
regret: how much slower the way that the planner picks in a group ran than the group's best. Figures:
docs/benchmarks/planner_published.md.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import optax
from published_tables import SOURCES, TERA, Row, Source, flops

from shardtrain import next_token_loss
from shardtrain.functional.nnx_model import as_model
from shardtrain.functional.remat import with_remat
from shardtrain.models.decoder import DecoderConfig
from shardtrain.plan.machine import Machine, machine_of
from shardtrain.plan.predict import predictions
from shardtrain.plan.prediction import Choice
from shardtrain.plan.space import mesh_text
from shardtrain.plan.subject import Subject
from shardtrain.sharding.layout import Layout


@cache
def subject_of(embed: int, layers: int, heads: int, batch: int, vocab: int, seq: int = 2048) -> Subject:
    """A model with Adam, in 16 bits, and its batch."""
    config = DecoderConfig(
        vocab=vocab,
        seq=seq,
        embed=embed,
        num_layers=layers,
        num_heads=heads,
        dtype="bfloat16",
        attention="xla",
    )
    return Subject(
        model=lambda remat: as_model(with_remat(config, remat)),
        loss=next_token_loss,
        optimizer=optax.adamw(1e-4),
        batch={
            "tokens": jax.ShapeDtypeStruct((batch, seq + 1), np.int32),
            "weights": jax.ShapeDtypeStruct((batch,), np.float32),
        },
    )


def predicted_seconds(source: Source, machine: Machine) -> list[float]:
    """Seconds of a step of each row; nan where a run here would be refused."""
    found = []
    for row in source.rows:
        subject = subject_of(row.embed, row.layers, row.heads, row.batch, source.vocab)
        mesh = {axis: size for axis, size in row.mesh.items() if size > 1} or {"data": 1}
        # all sources compute each forward twice; a pipeline here does so by itself, whatever remat says
        remat = "none" if "pipeline" in mesh else "full"
        choice = Choice(layout=Layout(mesh=mesh, zero=row.zero), accumulate=row.accumulate, remat=remat)
        try:
            (prediction,) = predictions(subject, machine, row.devices, [choice])
        except ValueError:
            found.append(math.nan)
        else:
            found.append(prediction.seconds.total)
    return found


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; ties have the mean of their ranks."""

    def ranks(values: Sequence[float]) -> np.ndarray:
        array = np.asarray(values)
        return np.array([np.mean(np.flatnonzero(np.sort(array) == each)) for each in array])

    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def regrets(rows: Sequence[Row], measured: Sequence[float], predicted: Sequence[float]) -> dict[str, float]:
    """Group -> measured seconds of the way that is predicted to be the fastest, over the best, less 1."""
    found = {}
    for group in dict.fromkeys(row.group for row in rows if row.group):
        members = [i for i, row in enumerate(rows) if row.group == group and predicted[i] == predicted[i]]
        if len(members) > 1:
            picked = min(members, key=lambda i: predicted[i])
            found[group] = measured[picked] / min(measured[i] for i in members) - 1
    return found


def fitted(source: Source, machine: Machine, name: str, scaled: str) -> tuple[Machine, float]:
    """The machine whose rate, or link between nodes, lets one row take as long as it did; and its factor.

    The factor is at most that of the data sheet's peak.
    """
    row = next(row for row in source.rows if row.name == name)
    seconds = row.seconds or flops(row, source.vocab) / row.devices / TERA / row.teraflops
    low, high = 0.01, 1.0
    for _ in range(20):
        middle = math.sqrt(low * high)
        slow = predicted_seconds(replace(source, rows=(row,)), with_factor(machine, middle, scaled))[0]
        low, high = (middle, high) if slow > seconds else (low, middle)
    return with_factor(machine, high, scaled), high


def with_factor(machine: Machine, factor: float, scaled: str) -> Machine:
    """The machine that reaches this part of the data sheet's peak: of "rate" or "link"."""
    if scaled == "rate":
        peak = machine.peak_flops_per_second or machine.rates.flops_per_second
        return replace(machine, rates=replace(machine.rates, flops_per_second=factor * peak))
    link = machine.node_link
    return replace(machine, node_link=replace(link, bytes_per_second=factor * link.bytes_per_second))


def compare(source: Source) -> None:
    """Print a table and its figures."""
    rows = source.rows
    work = [flops(row, source.vocab) / row.devices / TERA for row in rows]
    measured = [row.seconds or each / row.teraflops for row, each in zip(rows, work, strict=True)]
    machine = machine_of(source.device, max(row.devices for row in rows), in_float32=False)
    columns = {"data sheets": predicted_seconds(source, machine)}
    machine, rate = fitted(source, machine, source.probe, "rate")
    columns[f"rate {rate:.2f} of the peak"] = predicted_seconds(source, machine)
    if source.link_probe:
        machine, link = fitted(source, machine, source.link_probe, "link")
        columns[f"and link {link:.2f}"] = predicted_seconds(source, machine)
    probes = f"{source.probe}; {source.link_probe or 'none'}"
    print(f"\n## {source.title}\n\n{source.machine}. Probe rows: {probes}.\n")
    print(f"| row | layout | microbatches | measured s | {' | '.join(columns)} | measured TFLOP/s |")
    print("| --- " * (5 + len(columns)) + "|")
    for i, row in enumerate(rows):
        mesh = {axis: size for axis, size in row.mesh.items() if size > 1} or {"data": 1}
        predicted = " | ".join(
            "refused" if math.isnan(each[i]) else f"{each[i]:.4g}" for each in columns.values()
        )
        print(
            f"| {row.name} | {mesh_text(Layout(mesh=mesh, zero=row.zero))} | {row.accumulate} |"
            f" {measured[i]:.4g} | {predicted} | {work[i] / measured[i]:.1f} |"
        )
    print("\n| constants | rank correlation of TFLOP/s | of seconds | predicted / measured | regret |")
    print("| --- | --- | --- | --- | --- |")
    for name, predicted in columns.items():
        print(f"| {name} | {figures(source, work, measured, predicted)} |", flush=True)


def figures(
    source: Source, work: Sequence[float], measured: Sequence[float], predicted: Sequence[float]
) -> str:
    """The figures of all rows but the probes and those that are refused, as cells."""
    probes = source.probe, source.link_probe
    judged = [
        i for i, row in enumerate(source.rows) if row.name not in probes and not math.isnan(predicted[i])
    ]
    speeds, real = ([work[i] / each[i] for i in judged] for each in (predicted, measured))
    of_seconds = spearman([predicted[i] for i in judged], [measured[i] for i in judged])
    ratios = sorted(predicted[i] / measured[i] for i in judged)
    found = regrets(source.rows, measured, predicted)
    return (
        f"{spearman(speeds, real):.2f} | {of_seconds:.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f}, median"
        f" {ratios[len(ratios) // 2]:.2f} |"
        f" {', '.join(f'{group} {value:.1%}' for group, value in found.items())}"
    )


def main() -> None:
    """Compare the sources that are named, by default all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sources", nargs="*", help=f"of {', '.join(SOURCES)}; by default all")
    for name in parser.parse_args().sources or SOURCES:
        compare(SOURCES[name])


if __name__ == "__main__":
    main()
