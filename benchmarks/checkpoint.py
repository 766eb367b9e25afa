"""What checkpoints cost: the stall of a save in steps, and time and peak memory of a restore.

Beside both stands plain Orbax used by hand (`StandardCheckpointer`), in turn. Each restore is a process of
its own (`checkpoint_child.py`). Figures: docs/benchmarks/checkpoint.md.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro
from paired import Spread, spread

from shardtrain.checkpoints.checkpointer import Checkpoints
from shardtrain.checkpoints.origins import state_to_save
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.data import place
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import as_model
from shardtrain.models.decoder import DecoderConfig
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.initial_state import init_state
from shardtrain.train_step.placement import make_placement
from shardtrain.train_step.step import make_step

CHILD = Path(__file__).with_name("checkpoint_child.py")
NOTHING = "nothing"
CASES = {  # devices that saved, rows cut, devices that restore, a third
    "1 device": (1, False, 1, False),
    "1 device -> fsdp 8": (1, False, 8, False),
    "fsdp 8 -> 1 device": (8, False, 1, False),
    "blocks of two stages -> in order": (1, True, 1, False),
    "a third of the blocks": (1, False, 1, True),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      part: stall or restore, or both.
      embed: features of the model.
      num_layers: blocks; restores want a number that 6 divides.
      vocab: tokens.
      rows: rows of a step's batch.
      seq: tokens of a row.
      steps: steps of a block, from the save on.
      rounds: how often each side is run.
      folder: where to save; by default the folder of temporary files.
      fast: a folder in memory, for the fast tier.
      json: where to write all figures too.
    """

    part: Literal["stall", "restore", "both"] = "both"
    embed: int = 512
    num_layers: int = 6
    vocab: int = 8192
    rows: int = 4
    seq: int = 128
    steps: int = 8
    rounds: int = 5
    folder: Path | None = None
    fast: Path = Path("/dev/shm")
    json: Path | None = None

    def __post_init__(self) -> None:
        least = {"rounds": 2, "steps": 2}
        wrong = [
            f"{k} is {getattr(self, k)}; use {n} or more" for k, n in least.items() if getattr(self, k) < n
        ]
        if self.num_layers % 6:
            wrong.append(f"num_layers is {self.num_layers}; use 6 or 12")
        if wrong:
            raise ValueError(f"this cannot be measured: {'; '.join(wrong)}")


class Steps(NamedTuple):
    """Seconds of each step of a block, of the call that saves, and of the processors in all."""

    seconds: list[float]
    blocked: float
    cpu_seconds: float


class Training:
    """A decoder with Adam, step after step, and one save in a block of them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        config = DecoderConfig(
            vocab=options.vocab,
            seq=options.seq,
            embed=options.embed,
            num_layers=options.num_layers,
            num_heads=max(1, options.embed // 64),
        )
        model, layout = as_model(config), Layout()
        mesh, optimizer = make_mesh(layout, jax.devices()[:1]), optax.adam(1e-4)
        placement = make_placement(model, optimizer, layout, mesh)
        self.state = init_state(model, optimizer, placement, seed=0)
        self.step = make_step(model, next_token_loss, optimizer, placement)
        tokens = np.random.default_rng(0).integers(0, config.vocab, (options.rows, options.seq + 1), np.int32)
        self.batch = place(
            {"tokens": tokens, "weights": np.ones(options.rows, np.float32)}, mesh, layout.batch_axes
        )
        self.num_bytes = sum(x.nbytes for x in jax.tree.leaves(state_to_save(self.state)))

    def block(self, save: Callable[[Any], None]) -> Steps:
        """Some steps, the first with the save before it."""
        seconds = []
        cpu_start = time.process_time()
        begun = start = time.perf_counter()
        save(state_to_save(self.state))
        blocked = time.perf_counter() - begun
        for _ in range(self.options.steps):
            self.state, metrics = self.step(self.state, self.batch)
            jax.block_until_ready((self.state, metrics))
            now = time.perf_counter()
            seconds.append(now - start)
            start = now
        return Steps(seconds, blocked, time.process_time() - cpu_start)


def stalls(options: Options, folder: Path) -> tuple[dict[str, dict[str, Spread]], float, int]:
    """Side -> what a save adds (time, call, processor), in steps; seconds of a step; bytes that are saved."""
    training = Training(options)
    training.block(lambda state: None)
    generator = random.Random(0)
    found: dict[str, list[Steps]] = {}
    sides = [NOTHING, "toolkit", "toolkit, fast tier", "Orbax by hand"]
    for number in range(options.rounds + 1):
        blocks = {
            side: _saving(training, side, folder, options) for side in generator.sample(sides, len(sides))
        }
        if number:  # the first warms up
            for side in sides:
                found.setdefault(side, []).append(blocks[side])
    # without a save: its steps are what the other sides' of its round would have been
    steps = [median(block.seconds) for block in found[NOTHING]]
    cpu_steps = [block.cpu_seconds / options.steps for block in found[NOTHING]]
    ratios = {
        side: {
            "stall": spread(
                [sum(each.seconds) / step - options.steps for each, step in zip(rounds, steps, strict=True)]
            ),
            "blocked": spread([each.blocked / step for each, step in zip(rounds, steps, strict=True)]),
            "cpu": spread(
                [
                    each.cpu_seconds / step - options.steps
                    for each, step in zip(rounds, cpu_steps, strict=True)
                ]
            ),
        }
        for side, rounds in found.items()
    }
    return ratios, median(steps), training.num_bytes


def _saving(training: Training, side: str, folder: Path, options: Options) -> Steps:
    run = folder / "run"
    try:
        if side == NOTHING:
            return training.block(lambda state: None)
        if side == "Orbax by hand":
            with ocp.StandardCheckpointer() as checkpointer:
                return training.block(lambda state: checkpointer.save(run, state))
        with tempfile.TemporaryDirectory(dir=options.fast) as fast:
            policy = CheckpointPolicy(fast=Path(fast) if "fast" in side else None)
            with Checkpoints(run, policy) as checkpoints:
                return training.block(lambda state: checkpoints.save(1, state, {}))
    finally:
        shutil.rmtree(run, ignore_errors=True)


def restores(options: Options, folder: Path) -> list[dict[str, Any]]:
    """Every case in every way, in turn."""
    rows = []
    for case, (saved, cut, devices, third) in CASES.items():
        told = {
            "folder": str(folder / f"saved by {saved}{' cut' * cut}"),
            "embed": options.embed,
            "layers": options.num_layers,
            "vocab": options.vocab,
            "rows": cut,
            "third": third,
        }
        if not Path(told["folder"]).exists():
            _child({**told, "how": "save", "devices": saved})
        ways = ["toolkit", "verified", *(["orbax"] if not cut and not third else [])]
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way in random.Random(len(rows)).sample(ways, len(ways)):
                found[way].append(json.loads(_child({**told, "how": way, "devices": devices})))
        beside = "orbax" if "orbax" in found else "toolkit"
        for way, runs in found.items():
            ratio = [
                run["seconds"] / other["seconds"] for run, other in zip(runs, found[beside], strict=True)
            ]
            rows.append(
                {
                    "case": case,
                    "way": way,
                    "beside": beside,
                    "array_bytes": runs[0]["array_bytes"],
                    "seconds": median(run["seconds"] for run in runs),
                    "ratio": spread(ratio),
                    "peak": max(run["peak"] for run in runs),
                    "read": median(run["read"] for run in runs),
                }
            )
    return rows


def _child(told: dict[str, Any]) -> str:
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={told['devices']}",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(CHILD), json.dumps(told)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{told} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def stall_report(ratios: dict[str, dict[str, Spread]], step_seconds: float, num_bytes: int) -> str:
    """The stalls as text."""
    lines = [
        f"a step takes {step_seconds:.2f} s; {num_bytes / 1e6:,.0f} MB are saved",
        "",
        "| save | stall, steps | quartiles | save() alone, steps | processor time, steps | quartiles |",
        "|---|--:|---|--:|--:|---|",
    ]
    return "\n".join(
        lines
        + [
            f"| {side} | {each['stall'].median:.2f} | {each['stall'].low:.2f} - {each['stall'].high:.2f} |"
            f" {each['blocked'].median:.2f} | {each['cpu'].median:.2f} |"
            f" {each['cpu'].low:.2f} - {each['cpu'].high:.2f} |"
            for side, each in ratios.items()
        ]
    )


def restore_report(rows: list[dict[str, Any]]) -> str:
    """The restores as text."""
    lines = [
        "| restore | way | MB | seconds | over | ratio | quartiles | peak / bytes | read / bytes |",
        "|---|---|--:|--:|---|--:|---|--:|--:|",
    ]
    return "\n".join(
        lines
        + [
            f"| {row['case']} | {row['way']} | {row['array_bytes'] / 1e6:,.0f} | {row['seconds']:.2f} |"
            f" {row['beside']} | {row['ratio'].median:.2f} |"
            f" {row['ratio'].low:.2f} - {row['ratio'].high:.2f} | {row['peak']:.2f} | {row['read']:.2f} |"
            for row in rows
        ]
    )


def main(options: Options) -> None:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        if options.part != "restore":
            ratios, step_seconds, num_bytes = stalls(options, Path(name))
            print(stall_report(ratios, step_seconds, num_bytes), flush=True)
            figures |= {"stalls": ratios, "step_seconds": step_seconds, "saved_bytes": num_bytes}
        if options.part != "stall":
            rows = restores(options, Path(name))
            print(restore_report(rows))
            figures["restores"] = rows
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1, default=vars) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
