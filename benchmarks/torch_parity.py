"""This project beside torch on a CPU: nanoGPT's character-level configuration, in one process, paired.

The toolkit's loop and a hand-written one (`loops.py`), and nanoGPT's model and loop in torch, start from the
same parameters and see the same batches. torch is no dependency of this project: `uv run --with torch`.
Figures: docs/benchmarks/torch.md.
"""

import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import jax
import loops
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import tyro
from paired import markdown, ratios, time_rounds
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from shardtrain.models.decoder import DecoderConfig
from shardtrain.system.xla_flags import apply_preset
from shardtrain.trainer.metric_log import STEPS_LATE

NANOGPT = DecoderConfig(
    vocab=65, seq=64, embed=128, num_layers=4, num_heads=4, bias=False, activation="gelu_erf"
)
BATCH, BATCHES_IN_EPOCH, STEPS, COMPARED = 12, 256, 25, 20
"""Rows of a step, batches of the data, steps of a block, and first steps whose losses are compared."""
DEVICES = 2
"""CPU devices of this process, as of `shardtrain train --cpu-devices`."""
TORCH = "torch"
HAND, ONE, ALL = "hand-written jax, unrolled", "shardtrain, one device", f"shardtrain, {DEVICES} devices"


class Block(nn.Module):
    """Norm, causal attention, norm, feed-forward; no biases."""

    def __init__(self, embed: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(embed, bias=False)
        self.qkv = nn.Linear(embed, 3 * embed, bias=False)
        self.o = nn.Linear(embed, embed, bias=False)
        self.mlp_norm = nn.LayerNorm(embed, bias=False)
        self.up = nn.Linear(embed, 4 * embed, bias=False)
        self.down = nn.Linear(4 * embed, embed, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, D = x_BTD.shape
        qkv = self.qkv(self.attention_norm(x_BTD)).split(D, dim=2)
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in qkv)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.o(y.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.down(functional.gelu(self.up(self.mlp_norm(x_BTD))))


class Gpt(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocab); the head is the embedding."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.embed)
        self.positions = nn.Embedding(config.seq, config.embed)
        self.blocks = nn.ModuleList(Block(config.embed, config.num_heads) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.embed, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embedding(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1]))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return functional.linear(self.final_norm(x_BTD), self.embedding.weight)

    def load(self, params: Mapping[str, Any]) -> None:
        """Copy the parameters of this project's decoder, a nested dict, of the same configuration."""
        blocks = params["blocks"]
        found = {
            "embedding.weight": params["embedding"],
            "positions.weight": params["positions"],
            "final_norm.weight": params["final_norm"]["scale"],
        }
        for i in range(len(self.blocks)):
            attention = {name: np.asarray(x["kernel"][i]) for name, x in blocks["attention"].items()}
            qkv = [attention[name].reshape(len(attention[name]), -1) for name in ("q", "k", "v")]
            found |= {
                f"blocks.{i}.qkv.weight": np.concatenate(qkv, 1).T,
                f"blocks.{i}.o.weight": attention["o"].reshape(-1, attention["o"].shape[-1]).T,
                f"blocks.{i}.up.weight": np.asarray(blocks["mlp"]["up"]["kernel"][i]).T,
                f"blocks.{i}.down.weight": np.asarray(blocks["mlp"]["down"]["kernel"][i]).T,
                f"blocks.{i}.attention_norm.weight": blocks["attention_norm"]["scale"][i],
                f"blocks.{i}.mlp_norm.weight": blocks["mlp_norm"]["scale"][i],
            }
        self.load_state_dict({name: torch.tensor(np.array(x)) for name, x in found.items()})


class TorchLoop:
    """nanoGPT's training loop: AdamW with clipping and a cosine schedule.

    Args:
      params: the initial parameters, see `Gpt.load`.
      rows: int (rows, seq + 1), in the order of training.
    """

    def __init__(self, params: Mapping[str, Any], rows: np.ndarray) -> None:
        self.model = Gpt(NANOGPT)
        self.model.load(params)
        self.rows, self.done = torch.tensor(rows.astype(np.int64)), 0
        weights = list(self.model.parameters())
        kernels, gains = ([w for w in weights if (w.dim() >= 2) == decays] for decays in (True, False))
        groups = [{"params": kernels, "weight_decay": loops.DECAY}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(loops.B1, loops.B2))

    def loop(self, ticks: list[float], steps: int) -> list[float]:
        """Some steps, and their losses."""
        losses = []
        for _ in range(steps):
            ticks.append(perf_counter())
            first = self.done * BATCH % len(self.rows)
            tokens = self.rows[first : first + BATCH]
            cosine = (1 + math.cos(math.pi * self.done / loops.SCHEDULE_STEPS)) / 2
            for group in self.optimizer.param_groups:
                group["lr"] = loops.PEAK * (0.1 + 0.9 * cosine)
            logits = self.model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), loops.CLIP)
            self.optimizer.step()
            losses.append(loss.item())
            self.done += 1
        return losses


def main(rounds: int = 20) -> None:
    """Print a row for each loop."""
    os.environ["XLA_FLAGS"] = apply_preset("auto", os.environ, metadata.version("jaxlib")).xla_flags
    jax.config.update("jax_num_cpu_devices", DEVICES)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = loops.write_source(folder, NANOGPT, BATCH, BATCHES_IN_EPOCH)
        hand = loops.HandWritten(replace(NANOGPT, scan=False), source, BATCH)
        toolkits = {}
        for name, num in {ONE: 1, ALL: DEVICES}.items():
            (own := folder / str(num)).mkdir()
            toolkits[name] = stack.enter_context(closing(loops.Toolkit(NANOGPT, source, BATCH, own, num)))
        beside = TorchLoop(toolkits[ONE].step.state.params, hand.tokens)
        losses = {TORCH: beside.loop([], COMPARED), HAND: hand.loop([], COMPARED)}
        losses |= {name: toolkit.first_losses(COMPARED) for name, toolkit in toolkits.items()}
        sides = {
            TORCH: partial(beside.loop, steps=STEPS),
            HAND: partial(hand.loop, steps=STEPS),
            **{n: partial(t.loop, steps=STEPS, log_every=10) for n, t in toolkits.items()},
        }
        blocks = time_rounds(sides, rounds, STEPS_LATE, 0)
    print(
        f"nanoGPT, {BATCH} x {NANOGPT.seq} tokens a step, float32; {rounds} rounds of {STEPS} steps;"
        f" {os.cpu_count()} cores; jax {jax.__version__}, torch {metadata.version('torch')}"
    )
    rows = []
    for name, found in blocks.items():
        milliseconds = 1e3 * median(block.step_seconds for block in found)
        spread = ratios("step_seconds", blocks[TORCH], found)
        difference = loops.largest_difference(losses[TORCH], losses[name])
        rows.append((name, f"{milliseconds:.2f}", spread, f"{difference:.1e}"))
    print(markdown(["loop", "ms a step", "tokens/s over torch's (95 %)", "losses differ by"], rows))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
