"""Three published tables of GPT trainings: each row a model, a way to run it and its measured speed.

Next: `planner_published.py`, which compares the planner with them.
"""

import math
from dataclasses import dataclass

from shardtrain.islands.cluster_device import ClusterDevice

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
