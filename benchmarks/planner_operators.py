"""What ways to shard operators send and compute: as predicted, and as counted in compiled programs.

uv run python benchmarks/planner_operators.py [MODEL ...] [--kind h100 | v5e:2x4]

Six small models on two nodes of four devices, of simulated CPU or of GPUs and TPUs that need not be there:
data parallel, megatron (tensor in a node), the best layout and the best shardings of operators. A row has MB
that a device sends in a step, and its MFLOP, predicted : counted; then MB over each set of axes.

Figures: docs/benchmarks/planner.md.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import tyro
from planner import count_compiled
from stepper import token_shapes

import shardtrain as st
from shardtrain import axes
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.encoder_decoder import EncoderDecoderConfig
from shardtrain.models.experts_options import Experts
from shardtrain.models.linen_decoder import LinenDecoder
from shardtrain.models.resnet import ResNetConfig
from shardtrain.models.vgg import VggConfig
from shardtrain.plan.machine import Link, Machine, Rates
from shardtrain.plan.operators.search import plan_operators
from shardtrain.plan.predict import predict, steps, sum_sent_by_axes
from shardtrain.plan.prediction import Choice
from shardtrain.plan.search import RankedChoice, search
from shardtrain.plan.space import Space, mesh_text
from shardtrain.plan.subject import Subject
from shardtrain.trainer.config import make_model
from shardtrain.trainer.planned import make_operator_choice

NODES = Machine(
    rates=Rates(flops_per_second=1e14, memory_bytes_per_second=1e12, kernel_seconds=1e-6, memory_bytes=1e10),
    devices_per_node=4,
    device_link=Link(bytes_per_second=3e10),
    node_link=Link(bytes_per_second=1e10),
)
"""Two nodes of four devices, on which ways are searched."""

NUM_DEVICES = 8
RULED = {"data parallel": {"data": 8}, "megatron": {"data": 2, "tensor": 4}}
"""Name of a way -> mesh of a layout by rules."""

Way = tuple[str, st.Layout, Mapping[tuple[str, ...], float], float]
"""Name, layout, mesh axes -> bytes that a device sends, and flops of its products and convolutions."""


def shape(*dims: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def list_models() -> dict[str, tuple[Any, Any, dict[str, jax.ShapeDtypeStruct]]]:
    """Return name -> a model, its loss and a batch."""
    decoder = DecoderConfig(vocab=512, seq=32, embed=256, num_layers=2, num_heads=8, mlp=1024)
    both = EncoderDecoderConfig(
        vocab=512, seq=32, embed=256, num_encoder_layers=2, num_decoder_layers=2, num_heads=8, mlp=1024
    )
    linen = st.from_linen(LinenDecoder(replace(decoder, vocab=256, embed=128, mlp=512)), shape(1, 32))
    tokens, weights = token_shapes(8, 32), shape(16, dtype=np.float32)
    images = {"image": shape(16, 32, 32, 3, dtype=np.float32), "label": shape(16), "weights": weights}
    pairs = {"source": shape(8, 32), "source_mask": shape(8, 32)}
    pairs |= {"target": tokens["tokens"], "weights": tokens["weights"]}
    return {
        "decoder": (decoder, st.next_token_loss, tokens),
        "mixture of experts": (replace(decoder, mlp=256, experts=Experts(num=4)), st.next_token_loss, tokens),
        "ResNet-11": (ResNetConfig(depth=11, filters=16), st.classification_loss, images),
        "VGG-16": (VggConfig(depth=16, filters=16, hidden=1024), st.classification_loss, images),
        "encoder-decoder": (both, st.translation_loss, pairs),
        "linen decoder": (linen, st.next_token_loss, tokens),
    }


def predict_ways(run: st.Run, subject: Subject) -> Iterator[Way]:
    """Yield layouts and the best shardings of operators, as the planner predicts them."""
    # ten classes are not split over four devices
    rules = {axes.VOCAB: ()} if "image" in subject.batch else {}
    ways: dict[str, st.Layout | RankedChoice] = {
        name: st.Layout(mesh=mesh, parameters=rules, activations=rules) for name, mesh in RULED.items()
    }
    space = Space(layout=st.Layout(mesh={"pipeline": 1}), accumulates=(1,), remats=(None,))
    best = search(subject, NODES, NUM_DEVICES, space, most=1).ranked[0]
    ways["best layout"] = best.choice.layout
    plan = plan_operators(subject, NODES, NUM_DEVICES, space=space, best=best)
    if plan.best is not None:
        ways["operators"] = make_operator_choice(run, subject.batch, plan.best)
    for name, way in ways.items():
        layout, change = (way, None) if isinstance(way, st.Layout) else (way.choice.layout, way.change)
        # XLA for CPU adds up the two gradients of a table separately
        (step,) = steps(subject, NODES, NUM_DEVICES, [Choice(layout=replace(layout, operators={}))])
        sent, flops = sum_sent_by_axes(step, simulated=True), predict(step, NODES).flops
        if change is not None:
            sent, flops = change.predict_sent(sent), flops + change.flops
        yield name, layout, sent, flops


def compare(name: str, kind: str) -> None:
    """Print predicted and counted figures of all ways to run a model."""
    model, loss, batch = list_models()[name]
    # derivatives of recomputed blocks gather what they read again
    remat = None if isinstance(model, ResNetConfig | VggConfig) else "none"
    given: dict[str, Any] = {"loss": loss, "optimizer": optax.adamw(1e-3)}
    strategy, rows = st.Strategy(remat=remat), batch["weights"].shape[0]
    run = st.Run(model=model, data=st.Text(seq=32), batch=rows, strategy=strategy, **given)
    subject = Subject(model=lambda _: make_model(run), batch=batch, **given)
    for way, layout, predicted, flops in predict_ways(run, subject):
        found = count_compiled(subject, Choice(layout=layout), kind)
        sent = Counter[tuple[str, ...]]()
        for each in found.collectives:
            sent.update({each.axes: each.wire_bytes_per_device})  # type: ignore[dict-item]
        totals = f"{pair(sum(predicted.values()), sent.total())} | {pair(flops, found.flops)}"
        both = dict.fromkeys((*predicted, *sent))
        of_axes = ", ".join(f"{'+'.join(over)} {pair(predicted.get(over, 0), sent[over])}" for over in both)
        print(f"| {name} | {way} | {mesh_text(layout)} | {totals} | {of_axes} |", flush=True)


def pair(predicted: float, counted: float) -> str:
    return f"{predicted / 1e6:.3f} : {counted / 1e6:.3f}"


def main(models: tyro.conf.Positional[tuple[str, ...]] = (), kind: str = "cpu") -> None:
    """Compare the models that are named, or all.

    Args:
      kind: cpu, h100, a100, or a topology of 8 TPUs: v5e:2x4.
    """
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    for name in models or list_models():
        compare(name, kind)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
