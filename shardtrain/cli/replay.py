"""`shardtrain replay RUN --from STEP --to STEP`: compute steps anew whose islands came and went.

Next: `elastic/replay.py`, which computes the steps.
"""

import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console

from shardtrain.checkpoints.differences import compare_descriptions
from shardtrain.checkpoints.flatten import describe_restorable
from shardtrain.checkpoints.origins import make_find_origins
from shardtrain.checkpoints.paths import CHECKPOINTS
from shardtrain.checkpoints.reader import CheckpointReader, find_readers
from shardtrain.checkpoints.restore import restore_arrays
from shardtrain.cli.arguments import parse_words
from shardtrain.cli.compilation import cache_programs, set_xla_flags
from shardtrain.cli.run_options import parse_run
from shardtrain.cli.train import TrainOptions
from shardtrain.data import Batches
from shardtrain.elastic.command_file import read_command
from shardtrain.elastic.epoch import Epoch
from shardtrain.elastic.history import ELASTIC, History, read_history
from shardtrain.elastic.ledger import find_steps, is_valid_checkpoint, list_ledger
from shardtrain.elastic.replay import hash_arrays, list_differences, replay_steps
from shardtrain.errors.exit_codes import DONE, FAILED
from shardtrain.errors.messages import refuse
from shardtrain.functional.loss_guard import guard_loss
from shardtrain.functional.model import group_by_path, path_text
from shardtrain.islands.options import Across
from shardtrain.report.elastic_run import count_committed
from shardtrain.report.sinks.json_lines import METRICS, read_jsonl
from shardtrain.report.tables import mesh_line
from shardtrain.sharding.mesh import make_mesh
from shardtrain.system import terminal
from shardtrain.train_step.elastic_exchange import add_outer_state
from shardtrain.train_step.elastic_program import ElasticProgram
from shardtrain.train_step.placement import init_state, restorable_state
from shardtrain.train_step.state import State
from shardtrain.trainer.config import Run, describe
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.elastic_run import make_program
from shardtrain.trainer.island_run import make_island_run
from shardtrain.trainer.pretrained import add_base
from shardtrain.trainer.resume import find_parameters
from shardtrain.trainer.setup import RunSetup, make_microbatch, make_setup
from shardtrain.trainer.sources import make_batches, open_sources

MOST_SHOWN = 10
"""Largest number of arrays that are listed."""

CPU = "cpu"


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Compute steps of an elastic run anew, in one process, and compare the last one bitwise.

    The command of the run is read from its folder, and its run file is executed.

    Args:
      run: the folder of the run.
      first: the step to begin with, which has a checkpoint; or 0.
      last: the last step. If it has no checkpoint, the hash of its parameters is printed.
    """

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    first: Annotated[int, tyro.conf.arg(name="from")]
    last: Annotated[int, tyro.conf.arg(name="to")]


def main(arguments: Sequence[str]) -> int:
    """Replay steps; return 0 if they are equal or not saved, 1 if arrays differ."""
    from shardtrain.cli import set_cpu_devices

    options = parse_words(ReplayOptions, list(arguments), prog="shardtrain replay")
    folder = options.run.resolve()
    history = read_history(folder)
    command = read_command(folder / ELASTIC)
    words = list(command.arguments)
    set_cpu_devices(words)
    num_devices = max(math.prod(history.find_mesh(name).values()) for name in [*history.members, ""])
    if all(facts.get("device") == CPU for facts in history.members.values()):
        # islands with fewer devices use the first of them
        set_cpu_devices(["--cpu-devices", str(num_devices)])
    flags_text = set_xla_flags(words)
    if not Path(command.folder).is_dir():
        raise ValueError(
            f"the run was started in {command.folder}, which is not there; its run file and data are looked"
            f" for from there. Change folder in {folder / ELASTIC / 'command.json'}"
        )
    os.chdir(command.folder)
    run, _ = parse_run("train", words, TrainOptions)

    if jax.device_count() < num_devices:
        raise ValueError(f"an island had {num_devices} devices, and there are {jax.device_count()} here")
    with cache_programs(flags_text):
        found = _replay(run, folder, history, options.first, options.last)
    is_saved, digest, differences, warnings = found
    terminal.out(f"step {options.last}: parameters have the SHA-256 {digest}\n")
    where = f"the checkpoint of step {options.last}"
    if not is_saved:
        terminal.out(f"there is no checkpoint of step {options.last} to compare with\n")
        return DONE
    if not differences:
        terminal.out(f"all arrays are those of {where}, bitwise\n")
        return DONE
    shown = "".join(f"  {text}\n" for text in differences[:MOST_SHOWN])
    reasons = "".join(f"  perhaps because of: {text}\n" for text in warnings)
    terminal.out(f"{len(differences)} arrays differ from {where}:\n{shown}{reasons}")
    return FAILED


Sizes = tuple[tuple[str, int], ...]
"""A mesh: axis and size of each axis, slowest first."""

NOT_COMPARED = ("run_dir", "strategy.layout.mesh", "strategy.accumulate", "strategy.across.", "elastic.")
"""Options that change no numbers of a replay."""


def _replay(
    run: Run, folder: Path, history: History, first: int, last: int
) -> tuple[bool, str, list[str], list[str]]:
    """Compute steps of a run anew, and compare the last with its checkpoint.

    Args:
      run: the run, of the command that trained it.
      folder: its folder.
      history: its history.
      first: a step with a checkpoint, or 0.
      last: a later step.

    Returns:
      Whether the last step is saved, the SHA-256 of its parameters, the arrays that differ from its
      checkpoint in a bit, and why arrays may differ.

    Raises:
      ValueError: a checkpoint is missing or of a past that was left behind, members are not described, or the
        run has not come to the last step.
    """
    readers = {reader.step: reader for reader in find_readers(folder / CHECKPOINTS)}
    if first not in (0, *readers):
        raise ValueError(f"step {first} has no checkpoint in {folder}; give one of {sorted(readers)}, or 0")
    epochs = select_past(history.epochs, readers, first, last)
    lines = list_ledger(epochs, last, first, history.plain)
    done = {step for steps in find_steps(epochs, last, history.plain) for step in steps}
    if plain := sorted(set(range(first, last)) - done):
        raise ValueError(
            f"steps {plain[0]} to {plain[-1] + 1} were trained without --elastic, and islands have no part in"
            " them; give steps before or after"
        )
    metrics = read_jsonl(folder / METRICS) if (folder / METRICS).is_file() else []
    if last > (most := max([count_committed(history, metrics), *readers])):
        raise ValueError(
            f"--from {first} --to {last} was asked for, and the run has steps 0 to {most}; give steps of"
            " these"
        )
    names = {name for line in lines for name in line.groups}
    unknown = sorted(name for name in names if not history.find_mesh(name))
    refuse(f"{folder / ELASTIC} does not describe the meshes of these members", unknown)
    meshes = {name: tuple(history.find_mesh(name).items()) for name in sorted(names)}
    different = list(dict.fromkeys(meshes.values()))
    texts = "; ".join(mesh_line(dict(sizes)) for sizes in different)
    terminal.err(f"steps {first} to {last}, by {len(names)} islands, on {texts}\n")
    programs = _make_programs(run, folder, different, epochs[0].num_slots, readers.get(first))
    state = programs[replay_steps(programs, meshes, epochs, first, last)].state
    saved, differences = readers.get(last), list[str]()
    if saved is not None:
        own = {path: x for path, x in group_by_path(state).items() if path in saved.stored_arrays}
        differences = [f"{path}: the run has none" for path in saved.stored_arrays if path not in own]
        differences += list_differences(own, {path: saved.read(path) for path in own})
    extra = next((readers[step].extra for step in (last, first) if step in readers), {})
    reasons = _find_reasons(run, extra, history, names, len(different))
    return saved is not None, hash_arrays(state.params), differences, reasons


def select_past(
    epochs: Sequence[Epoch], readers: Mapping[int, CheckpointReader], first: int, last: int
) -> Sequence[Epoch]:
    """Return the epochs of the past in which a step was done, which may have been left behind since.

    Args:
      epochs: all epochs of the run.
      readers: step -> reader of its checkpoint.
      first: a step before.
      last: the step.

    Raises:
      ValueError: the first step is of another past.
    """

    def number(step: int) -> int | None:
        found = readers[step].extra.get(ELASTIC) if step in readers else None
        value = found.get("epoch") if isinstance(found, Mapping) else None
        return value if type(value) is int and 1 <= value <= len(epochs) else None

    past = epochs[: number(last)]
    least = min(epoch.step for epoch in past)
    if not least <= first <= last:
        raise ValueError(
            f"--from {first} --to {last} was asked for, and islands came and went from step {least} on; give"
            " steps in this order from there"
        )
    begun = number(first)
    if begun is not None and (begun > len(past) or not is_valid_checkpoint(past, first, begun)):
        raise ValueError(
            f"the checkpoint of step {first} is of epoch {begun}, and the run came to step {last} another"
            " way, from an earlier checkpoint after all islands had died; give an earlier step to begin with"
        )
    return past


def _make_programs(
    run: Run, folder: Path, meshes: Iterable[Sizes], num_slots: int, reader: CheckpointReader | None
) -> dict[Sizes, ElasticProgram]:
    """Return the program of each mesh, with the state of a checkpoint or that before the first step."""
    # stages too are computed in this process
    run = replace(run, strategy=replace(run.strategy, accumulate=1, across=Across()))
    with RunConsole(Console(file=io.StringIO()), None) as output:
        run = make_island_run(run, Coordination(), output)
    run = replace(run, loss=guard_loss(run.loss))
    source, _ = open_sources(run, folder)
    batches = make_batches(run, source)
    assert isinstance(batches, Batches)
    microbatch = make_microbatch(run, source)
    programs = {}
    for sizes in meshes:
        layout = replace(run.strategy.layout, mesh=dict(sizes))
        mesh = make_mesh(layout, jax.devices()[: math.prod(layout.mesh.values())])
        own = replace(run, strategy=replace(run.strategy, layout=layout))
        setup = make_setup(own, microbatch=microbatch, mesh=mesh)
        programs[sizes] = make_program(run, setup, batches, num_slots, _make_state(own, setup, reader))
    return programs


def _make_state(run: Run, setup: RunSetup, reader: CheckpointReader | None) -> State:
    start = run.start_from
    if reader is None:
        if start.checkpoint is not None:
            raise ValueError(
                f"the run starts from {start.checkpoint}; replay it from a checkpoint of its own"
            )
        return init_state(setup.model, setup.optimizer, setup.placement, run.seed)
    base = None if start.checkpoint is None else find_parameters(start.checkpoint, start.step)
    reader = add_base(reader, base, "replay the command that had it")
    wanted = add_outer_state(restorable_state(setup.placement), run.strategy.synchronisation, setup.placement)
    origins = make_find_origins(setup.placement)(wanted)
    arrays = restore_arrays(reader, describe_restorable(wanted), origins)
    return jax.tree.map_with_path(lambda path, _: arrays[path_text(path)], wanted)


def _find_reasons(
    run: Run, extra: Mapping[str, Any], history: History, names: Iterable[str], num_meshes: int
) -> list[str]:
    """Return why arrays may differ: other options or devices, and several meshes."""
    saved, now = extra.get("run") or {}, describe(run)
    common = {name: saved[name] for name in now if name in saved and not name.startswith(NOT_COMPARED)}
    found = compare_descriptions(common, {name: now[name] for name in common})
    own = jax.devices()[0].device_kind
    kinds = {str(history.members[name].get("device", own)) for name in names}
    found += [f"it was computed on {kind}, and is replayed on {own}" for kind in sorted(kinds - {own})]
    if any(history.find_count(name, "stages") > 1 for name in names):
        found.append("stages of several processes, replayed in one")
    if num_meshes > 1:
        found.append("islands of different meshes, whose states may differ in last bits")
    return found
