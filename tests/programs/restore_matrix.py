"""Saves on some layouts, and restores on them what others saved; prints what differs, by pair.

Args: "full" for every layout, or else one of each kind; a folder to save in, where it is still empty; and the
folders whose checkpoints are restored. Whoever saves leaves there what its state is, bit by bit in the
model's order, and the losses of its next steps.
"""

import dataclasses
import io
import json
import math
import sys
import zlib
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from tiny_language_model import TinyConfig

import shardtrain as st
from shardtrain.functional.model import path_text
from shardtrain.trainer import setup as setup_module
from shardtrain.trainer.config import describe
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.prepared_run import PreparedRun
from shardtrain.trainer.resume import StartPoint, find_start_point
from shardtrain.trainer.row_shares import RowShares
from shardtrain.trainer.run_checkpoints import RunCheckpoints
from shardtrain.trainer.setup import RunSetup
from shardtrain.trainer.sources import make_batches

FULL = sys.argv[1] == "full"
FOLDER, *SOURCES = map(Path, sys.argv[2:])
ISLANDS = st.join()
STEPS, MORE = 2, 2
SEQ, BATCH = 8, 12


class Numbers:
    """A source of 60 samples: an epoch of five batches, which the next 100 samples go beyond."""

    fingerprint = "numbers"

    def train(self, folder: Path) -> "Numbers":
        return self

    def heldout(self, folder: Path) -> None:
        return None

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = np.random.default_rng(int(index)).integers(0, 32, SEQ + 1)
        return {"tokens": row.astype(np.int32), "number": np.int32(index)}


RUN = st.Run(
    model=TinyConfig(vocab=32, num_layers=4, dropout=0.1),
    data=Numbers(),
    optimizer=optax.adam(1e-2),
    batch=BATCH,
    steps=100,
    seed=3,
    checkpoints=st.CheckpointPolicy(keep=9),
)


def mesh(**sizes: int) -> st.Strategy:
    return st.Strategy(layout=st.Layout(mesh=sizes), accumulate=2 if "pipeline" in sizes else 1)


def uneven(stages: str, **sizes: int) -> st.Strategy:
    return dataclasses.replace(mesh(**sizes), accumulate=3, pipeline=st.Pipeline(stages=stages))


def across(**options: Any) -> st.Strategy:
    return st.Strategy(layout=st.Layout(mesh={"data": -1}), across=st.Across(**options))


LAYOUTS: dict[int, dict[str, st.Strategy]] = {
    1: {
        "data=2,fsdp=2,tensor=2": mesh(data=2, fsdp=2, tensor=2),
        "pipeline=3 (1,2,1)": uneven("1,2,1", pipeline=3),
    },
    2: {
        "2 islands, unequal": across(shares=(1.0, 2.0)),
        "2 stages": dataclasses.replace(
            across(axis="pipeline"), accumulate=3, pipeline=st.Pipeline(stages="3,1")
        ),
    },
}
if FULL:
    three = st.Pipeline(stages="1,1,2")
    LAYOUTS[3] = {
        "3 stages": dataclasses.replace(across(axis="pipeline"), accumulate=2, pipeline=three),
        "3 islands, unequal": across(shares=(1.0, 3.0, 2.0)),
    }
    LAYOUTS[1] |= {
        "1 device": mesh(data=1),
        "data=2": mesh(data=2),
        "fsdp=4": mesh(fsdp=4),
        "pipeline=2,data=2": mesh(pipeline=2, data=2),
    }


@dataclasses.dataclass
class Laid:
    """A layout at work: what it takes to start and to step."""

    run: st.Run
    setup: RunSetup
    coordination: Coordination
    loader: Any
    prepared: PreparedRun | None
    step: Any
    notes: list[str]

    def start(self, folder: Path) -> tuple[RunCheckpoints, StartPoint]:
        run = dataclasses.replace(self.run, run_dir=folder)
        model, optimizer, placement = self.setup.model, self.setup.optimizer, self.setup.placement
        description = {**describe(run), "data.fingerprint": "numbers"}
        if self.prepared is not None:
            init, wanted = self.prepared.init, self.prepared.wanted
        else:
            init = lambda: st.init_state(model, optimizer, placement, run.seed)  # noqa: E731
            wanted = st.restorable_state(placement)
        prepared: Any = SimpleNamespace(
            run=run,
            folder=folder,
            coordination=self.coordination,
            setup=self.setup,
            island_step=self.prepared and self.prepared.island_step,
            init=init,
            wanted=wanted,
            description=description,
        )
        checkpoints = RunCheckpoints(prepared, self.notes.append)
        return checkpoints, find_start_point(prepared, checkpoints)

    def go(self, state: Any, position: Any, steps: int) -> tuple[Any, Any, list[float]]:
        """The state and position after some steps, and their losses."""
        losses = []
        loaded = self.loader.batches.iterate(position)
        for _, (batch, after) in zip(range(steps), loaded, strict=False):
            batch.pop("number")
            state, metrics = self.step(state, self.loader.place(batch))
            position = after
            found = jax.device_get((metrics["loss_sum"], metrics["count"]))
            losses.append(float(found[0] / found[1]))
        loaded.close()
        return state, position, losses

    def ahead(self, position: Any) -> list[int]:
        """The numbers of the next 100 samples."""
        rows = dataclasses.replace(self.loader.batches, rows=None)
        loaded = rows.iterate(position)
        numbers = [int(n) for _, (batch, _) in zip(range(9), loaded, strict=False) for n in batch["number"]]
        loaded.close()
        return numbers[:100]

    def bits(self, state: Any) -> dict[str, int]:
        """A checksum of each array of parameters and optimizer, block by block, by the model's numbers."""
        stage_model, stages = self.setup.stage_model, self.setup.placement.stages
        rows = range(RUN.model.num_layers)
        rows = stage_model.block_numbers if stage_model else stages.stored_blocks if stages else rows
        found = {}
        for path, x in jax.tree.leaves_with_path({"params": state.params, "opt_state": state.opt_state}):
            name, array = path_text(path), np.asarray(x)
            if "blocks/" not in name:
                found[name] = zlib.crc32(array.tobytes())
                continue
            found |= {
                f"{name}[{block}]": zlib.crc32(array[row].tobytes())
                for row, block in enumerate(rows)
                if block >= 0
            }
        gathered = self.coordination.all_gather("bits", found)
        return {name: each for of_rank in gathered for name, each in of_rank.items()}


def lay(strategy: st.Strategy, stack: ExitStack) -> Laid:
    run = dataclasses.replace(RUN, strategy=strategy)
    if ISLANDS is None:
        number = math.prod(strategy.layout.mesh.values())
        setup_module.make_mesh = lambda layout: st.make_mesh(layout, jax.devices()[:number])  # type: ignore[assignment]
        batch = setup_module.make_microbatch(run, RUN.data)
        batch.pop("number")
        setup = setup_module.make_setup(run, microbatch=batch)
        coordination = Coordination()
        shares = RowShares(coordination, [run.batch], run, setup.mesh, run.strategy.accumulate)
        loader = shares.loader(make_batches(run, RUN.data))
        step = st.make_step(setup.model, run.loss, setup.optimizer, setup.placement)
        return Laid(run, setup, coordination, loader, None, step, [])
    output = RunConsole(Console(file=io.StringIO()), ISLANDS)
    prepared = PreparedRun(run, FOLDER, ISLANDS, output, stack)
    step = prepared.island_step
    return Laid(run, prepared.setup, prepared.coordination, prepared.feed.loader, prepared, step, [])


def save(name: str, laid: Laid) -> None:
    checkpoints, start = laid.start(FOLDER / name)
    state, position, _ = laid.go(start.state, start.position, STEPS)
    run = {**describe(laid.run), "data.fingerprint": "numbers"}
    with checkpoints:
        checkpoints.save(STEPS, state, {"run": run, "position": position})
        checkpoints.wait()
    laid.coordination.gather_after_work("saved")
    bits = laid.bits(state)
    _, _, losses = laid.go(state, position, MORE)
    expected = {"bits": bits, "losses": losses, "ahead": laid.ahead(position)}
    if ISLANDS is None or ISLANDS.is_first:
        (FOLDER / name / "expected.json").write_text(json.dumps(expected))
    laid.coordination.gather_after_work("written")


def restored(source: Path, name: str, laid: Laid) -> list[str]:
    """What is not as it was saved."""
    expected = json.loads((source / "expected.json").read_text())
    checkpoints, start = laid.start(source)
    with checkpoints:
        problems = [] if start.step == STEPS else [f"step {start.step}"]
    bits = laid.bits(start.state)
    problems += [
        path for path in {**bits, **expected["bits"]} if bits.get(path) != expected["bits"].get(path)
    ]
    if laid.ahead(start.position) != expected["ahead"]:
        problems.append("the next samples")
    _, _, losses = laid.go(start.state, start.position, MORE)
    same = source == FOLDER / name
    if (
        losses != expected["losses"]
        if same
        else not np.allclose(losses, expected["losses"], rtol=1e-5, atol=0)
    ):
        problems.append(f"losses {losses}, expected {expected['losses']}")
    return problems


with ExitStack() as stack:
    num_islands = 1 if ISLANDS is None else ISLANDS.placement.num_islands
    layouts = {name: lay(strategy, stack) for name, strategy in LAYOUTS[num_islands].items()}
    if not any(FOLDER.iterdir()):
        for name, laid in layouts.items():
            save(name, laid)
    sources = sorted(
        path for folder in SOURCES for path in folder.iterdir() if (path / "checkpoints").exists()
    )
    found = {
        f"{source.name} -> {name}": restored(source, name, laid)
        for name, laid in layouts.items()
        for source in sources
    }
    sys.stdout.write(json.dumps(found))
