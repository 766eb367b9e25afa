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
from dataclasses import dataclass, replace
from functools import cache

import jax
import numpy as np
import optax

from shardtrain import next_token_loss
from shardtrain.functional.nnx_model import as_model
from shardtrain.functional.remat import with_remat
from shardtrain.islands.cluster_device import ClusterDevice
from shardtrain.models.decoder import DecoderConfig
from shardtrain.plan.machine import Machine, machine_of
from shardtrain.plan.prediction import Choice
from shardtrain.plan.search import predictions
from shardtrain.plan.space import mesh_text
from shardtrain.plan.subject import Subject
from shardtrain.sharding.layout import Layout

TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table.

    Args:
      name: of the row in its table.
      embed: hidden features.
      layers: blocks.
      heads: of attention.
      batch: sequences of a step.
      microbatch: sequences of a microbatch on one replica.
      mesh: the way it ran.
      seconds: measured, of a step; 0: `teraflops` is given.
      teraflops: measured, of a device, by the flops of `flops`.
      zero: ZeRO stage of the axis fsdp.
      group: rows of one group are ways to do the same work on the same devices.
    """

    name: str
    embed: int
    layers: int
    heads: int
    batch: int
    microbatch: int
    mesh: dict[str, int]
    seconds: float = 0.0
    teraflops: float = 0.0
    zero: int = 3
    group: str = ""

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.mesh.values())

    @property
    def accumulate(self) -> int:
        """Number of microbatches."""
        replicas = self.mesh.get("data", 1) * self.mesh.get("fsdp", 1)
        return self.batch // (replicas * self.microbatch)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A table and its machine.

    Args:
      title: of the source.
      machine: what it names, by data sheets.
      device: the device and its links.
      vocab: of all models.
      rows: the table.
      probe: the row that calibrates the rate of matrix products.
      link_probe: the row that then calibrates the link between nodes; "": none does.
    """

    title: str
    machine: str
    device: ClusterDevice
    vocab: int
    rows: tuple[Row, ...]
    probe: str
    link_probe: str = ""


def flops(row: Row, vocab: int, seq: int = 2048) -> float:
    """Flops of a step with recomputation: Narayanan et al. 2021, equation 3."""
    h, b = row.embed, row.batch
    return 96 * b * seq * row.layers * h**2 * (1 + seq / (6 * h) + vocab / (16 * row.layers * h))


def _oneflow(name: str, data: int, tensor: int, pipeline: int, batch: int, *rest: float | int | str) -> Row:
    embed, layers, microbatch, per_second, group = rest
    assert isinstance(embed, int)
    assert isinstance(layers, int)
    assert isinstance(microbatch, int)
    heads = {1536: 16, 2304: 24, 3072: 32, 768: 12}[embed]
    mesh = {"pipeline": pipeline, "data": data, "tensor": tensor}
    return Row(
        name=name,
        embed=embed,
        layers=layers,
        heads=heads,
        batch=batch,
        microbatch=microbatch,
        mesh=mesh,
        seconds=batch / float(per_second),
        group=str(group),
    )


# Oneflow-Inc/DLPerf, "DLPerf GPT Benchmark Test Report", sequences a second of Megatron-LM; microbatches and
# heads from OneFlow/LanguageModeling/GPT/README.md there; activations are recomputed
ONEFLOW = Source(
    title="OneFlow DLPerf 2021, Megatron-LM column",
    machine="4 nodes of 8 V100-SXM2-16GB (NVLink 2.0, 150 GB/s in a direction), InfiniBand EDR 12.5 GB/s",
    device=ClusterDevice(
        name="Tesla V100-SXM2-16GB", per_node=8, link_gb_per_second=150, node_link_gb_per_second=12.5
    ),
    vocab=51200,
    probe="DP_1x1x1_2_1536x16",
    link_probe="DP_16x1x1_32_1536x16",
    rows=(
        _oneflow("DP_1x1x1_2_1536x16", 1, 1, 1, 2, 1536, 16, 2, 4.31, ""),
        _oneflow("DP_8x1x1_16_1536x16", 8, 1, 1, 16, 1536, 16, 2, 33.27, "0.5B, 8 GPUs"),
        _oneflow("DP_16x1x1_32_1536x16", 16, 1, 1, 32, 1536, 16, 2, 48.16, ""),
        _oneflow("DP_32x1x1_64_1536x16", 32, 1, 1, 64, 1536, 16, 2, 93.63, ""),
        _oneflow("MP_1x1x1_8_768x12", 1, 1, 1, 8, 768, 12, 8, 13.09, ""),
        _oneflow("MP_1x16x1_16_3072x16", 1, 16, 1, 16, 3072, 16, 16, 2.85, ""),
        _oneflow("MP_1x32x1_16_3072x32", 1, 32, 1, 16, 3072, 32, 16, 1.23, ""),
        _oneflow("2D_1x8x1_16_1536x16", 1, 8, 1, 16, 1536, 16, 16, 24.07, "0.5B, 8 GPUs"),
        _oneflow("2D_2x4x1_16_1536x16", 2, 4, 1, 16, 1536, 16, 8, 27.75, "0.5B, 8 GPUs"),
        _oneflow("2D_4x2x1_16_1536x16", 4, 2, 1, 16, 1536, 16, 4, 26.95, "0.5B, 8 GPUs"),
        _oneflow("2D_2x8x1_16_2304x24", 2, 8, 1, 16, 2304, 24, 8, 12.18, ""),
        _oneflow("2D_4x8x1_32_2304x24", 4, 8, 1, 32, 2304, 24, 8, 21.21, ""),
        _oneflow("DP_PP_8x1x4_512_1536x16", 8, 1, 4, 512, 1536, 16, 2, 104.63, ""),
        _oneflow("MP_PP_1x8x4_512_2304x24", 1, 8, 4, 512, 2304, 24, 16, 23.10, "1.5B, 32 GPUs"),
        _oneflow("2D_PP_2x4x4_512_2304x24", 2, 4, 4, 512, 2304, 24, 8, 33.40, "1.5B, 32 GPUs"),
        _oneflow("2D_PP_2x8x2_512_2304x24", 2, 8, 2, 512, 2304, 24, 8, 31.45, "1.5B, 32 GPUs"),
    ),
)


def _bigscience(
    embed: int, layers: int, data: int, pipeline: int, microbatch: int, seconds: float, group: str
) -> Row:
    return Row(
        name=f"{embed}x{layers} DP={data} TP=8 PP={pipeline} MBS={microbatch}",
        embed=embed,
        layers=layers,
        heads=64,
        batch=2048,
        microbatch=microbatch,
        mesh={"pipeline": pipeline, "fsdp": data, "tensor": 8},
        seconds=seconds,
        zero=1,
        group=group,
    )


# bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md, "48 node contenders" and "tile and
# wave quantization"; Megatron-DeepSpeed with ZeRO 1, activations are recomputed, a vocabulary of 250k words
BIGSCIENCE = Source(
    title="BigScience 176B, 2022",
    machine="48 (187B: 40) nodes of 8 A100-SXM4-80GB (NVLink 3.0, 300 GB/s), 4 Omni-Path links of 12.5 GB/s",
    device=ClusterDevice(
        name="NVIDIA A100-SXM4-80GB", per_node=8, link_gb_per_second=300, node_link_gb_per_second=50
    ),
    vocab=250880,
    probe="13824x80 DP=4 TP=8 PP=10 MBS=1",
    rows=(
        _bigscience(14336, 72, 4, 12, 1, 143.31, "181B"),
        _bigscience(14336, 72, 4, 12, 2, 134.02, "181B"),
        _bigscience(14336, 72, 4, 12, 4, 123.69, "181B"),
        _bigscience(14336, 72, 4, 12, 8, 129.26, "181B"),
        _bigscience(14336, 72, 8, 6, 1, 139.82, "181B"),
        _bigscience(14336, 72, 8, 6, 2, 131.02, "181B"),
        _bigscience(14336, 72, 8, 6, 4, 121.48, "181B"),
        _bigscience(13824, 84, 4, 12, 2, 143.89, "196B"),
        _bigscience(13824, 84, 4, 12, 4, 133.12, "196B"),
        _bigscience(13824, 84, 8, 6, 2, 141.41, "196B"),
        _bigscience(13824, 84, 8, 6, 4, 130.31, "196B"),
        _bigscience(13824, 80, 4, 10, 1, 160.29, "187B"),
        _bigscience(13824, 80, 4, 10, 2, 151.07, "187B"),
        _bigscience(13824, 80, 4, 10, 4, 147.43, "187B"),
        _bigscience(13824, 80, 4, 10, 8, 152.51, "187B"),
    ),
)


def _megatron(name: str, embed: int, layers: int, heads: int, *rest: int, group: str = "") -> Row:
    tensor, pipeline, devices, batch, microbatch, teraflops = rest
    replicas = devices // (tensor * pipeline)
    # ZeRO-3 where nothing else is split
    axis = "fsdp" if name.startswith("ZeRO-3") else "data"
    return Row(
        name=f"{name}, {devices} GPUs",
        embed=embed,
        layers=layers,
        heads=heads,
        batch=batch,
        microbatch=microbatch,
        mesh={"pipeline": pipeline, axis: replicas, "tensor": tensor},
        teraflops=teraflops,
        group=group,
    )


_175B, _530B = (12288, 96, 96), (20480, 105, 128)

# Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, tables 1 (microbatches of 1 are assumed where the
# table does not say) and 2; activations are recomputed
MEGATRON = Source(
    title="Megatron-LM 2021, tables 1 and 2",
    machine="nodes of 8 A100-SXM4-80GB (NVLink 3.0, 300 GB/s), 8 InfiniBand HDR links of 25 GB/s",
    device=ClusterDevice(
        name="NVIDIA A100-SXM4-80GB", per_node=8, link_gb_per_second=300, node_link_gb_per_second=200
    ),
    vocab=51200,
    probe="1.7B, 32 GPUs",
    link_probe="ZeRO-3 175B, 384 GPUs",
    rows=(
        _megatron("1.7B", 2304, 24, 24, 1, 1, 32, 512, 1, 137),
        _megatron("3.6B", 3072, 30, 32, 2, 1, 64, 512, 1, 138),
        _megatron("7.5B", 4096, 36, 32, 4, 1, 128, 512, 1, 142),
        _megatron("18.4B", 6144, 40, 48, 8, 1, 256, 1024, 1, 135),
        _megatron("39.1B", 8192, 48, 64, 8, 2, 512, 1536, 1, 138),
        _megatron("76.1B", 10240, 60, 80, 8, 4, 1024, 1792, 1, 140),
        _megatron("145.6B", 12288, 80, 96, 8, 8, 1536, 2304, 1, 148),
        _megatron("310.1B", 16384, 96, 128, 8, 16, 1920, 2160, 1, 155),
        _megatron("529.6B", 20480, 105, 128, 8, 35, 2520, 2520, 1, 163),
        _megatron("1008B", 25600, 128, 160, 8, 64, 3072, 3072, 1, 163),
        _megatron("ZeRO-3 175B", *_175B, 1, 1, 384, 1536, 4, 144, group="175B, 384 GPUs"),
        _megatron("ZeRO-3 175B", *_175B, 1, 1, 768, 1536, 2, 88, group="175B, 768 GPUs"),
        _megatron("ZeRO-3 175B", *_175B, 1, 1, 1536, 1536, 1, 44, group="175B, 1536 GPUs"),
        _megatron("ZeRO-3 530B", *_530B, 1, 1, 640, 2560, 4, 138),
        _megatron("ZeRO-3 530B", *_530B, 1, 1, 1120, 2240, 2, 98, group="530B, 1120 GPUs"),
        _megatron("ZeRO-3 530B", *_530B, 1, 1, 2240, 2240, 1, 48, group="530B, 2240 GPUs"),
        _megatron("PTD-P 175B", *_175B, 8, 12, 384, 1536, 1, 153, group="175B, 384 GPUs"),
        _megatron("PTD-P 175B", *_175B, 8, 12, 768, 1536, 1, 149, group="175B, 768 GPUs"),
        _megatron("PTD-P 175B", *_175B, 8, 12, 1536, 1536, 1, 141, group="175B, 1536 GPUs"),
        _megatron("PTD-P 530B", *_530B, 8, 35, 560, 2240, 1, 171),
        _megatron("PTD-P 530B", *_530B, 8, 35, 1120, 2240, 1, 167, group="530B, 1120 GPUs"),
        _megatron("PTD-P 530B", *_530B, 8, 35, 2240, 2240, 1, 159, group="530B, 2240 GPUs"),
    ),
)

SOURCES = {"oneflow": ONEFLOW, "bigscience": BIGSCIENCE, "megatron": MEGATRON}


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
