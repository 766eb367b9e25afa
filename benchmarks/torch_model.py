"""nanoGPT's model and loop in torch, beside which `torch_parity.py` measures."""

import math
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from loops import B1, B2, CLIP, DECAY, PEAK, SCHEDULE_STEPS
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from shardtrain.models.decoder import DecoderConfig


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
      config: of a decoder without biases, with learned positions and "gelu_erf".
      params: the initial parameters, see `Gpt.load`.
      rows: int (rows, seq + 1), in the order of training.
      batch: rows of a step.
    """

    def __init__(
        self, config: DecoderConfig, params: Mapping[str, Any], rows: np.ndarray, batch: int
    ) -> None:
        self.model = Gpt(config)
        self.model.load(params)
        weights = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [w for w in weights if w.dim() >= 2], "weight_decay": DECAY},
                {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
            ],
            lr=PEAK,
            betas=(B1, B2),
        )
        self.rows, self.batch, self.done = torch.tensor(rows.astype(np.int64)), batch, 0

    def loop(self, ticks: list[float], steps: int) -> list[float]:
        """Some steps, and their losses."""
        losses = []
        for _ in range(steps):
            ticks.append(perf_counter())
            first = self.done * self.batch % len(self.rows)
            tokens = self.rows[first : first + self.batch]
            cosine = (1 + math.cos(math.pi * self.done / SCHEDULE_STEPS)) / 2
            for group in self.optimizer.param_groups:
                group["lr"] = PEAK * (0.1 + 0.9 * cosine)
            logits = self.model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            losses.append(loss.item())
            self.done += 1
        return losses
