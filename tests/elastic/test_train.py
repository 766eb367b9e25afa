"""`train --elastic`: islands come and go at any moment, and losses are those of one device."""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import optax
import pytest
from quiet_training import InMemory, random_tokens
from tiny_language_model import TinyConfig

import shardtrain as st
from shardtrain import Optimizer, Run, Schedule, Strategy, Text
from shardtrain.checkpoints.evaluations import EVALUATIONS, find_best_saved
from shardtrain.checkpoints.paths import find_finished_steps
from shardtrain.checkpoints.reader import find_readers
from shardtrain.checks.first_batch import make_loss_facts
from shardtrain.cli import main
from shardtrain.combine.synchronisation import Synchronisation, preset
from shardtrain.data import Batches, Position
from shardtrain.elastic.epoch import Epoch, Peer, found_epoch
from shardtrain.elastic.epoch_files import list_epochs, read_newest
from shardtrain.elastic.group import CALL, DONE, Group
from shardtrain.elastic.history import read_history
from shardtrain.elastic.ledger import list_ledger
from shardtrain.elastic.messages import to_json
from shardtrain.elastic.options import Elastic
from shardtrain.elastic.run_files import RunFiles
from shardtrain.functional.loss import next_token_loss
from shardtrain.islands.options import Across
from shardtrain.optim.scaling import Scaling
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.elastic_stages import ElasticStages
from shardtrain.train_step.placement import init_state
from shardtrain.train_step.step import make_step
from shardtrain.trainer.elastic_run import ElasticRun, IslandEnded, Standing
from shardtrain.trainer.island_run import prepare_elastic
from shardtrain.trainer.loop import _Loop
from shardtrain.trainer.recovery import Recovery
from shardtrain.trainer.setup import make_microbatch, make_setup
from shardtrain.trainer.sources import make_batches, open_sources

MEMBERS = Elastic(islands="1..4", batch="members")

PROGRAM = str(Path(__file__).parents[1] / "programs" / "elastic_run.py")

ROOT = Path(__file__).parents[2]


class Islands:
    """Processes of `train` in one run folder."""

    def __init__(self, words, folder):
        self.words, self.folder, self.run = words, folder, folder / "run"
        self.pace(1000)
        self.environment = {**os.environ, "SHARDTRAIN_ADDRESS": "127.0.0.1", "PACE": str(folder / "pace")}
        self.processes = []

    def pace(self, step):
        """Let steps be slow from this one on."""
        (self.folder / "new").write_text(str(step))
        (self.folder / "new").rename(self.folder / "pace")

    def start(self, *options, elastic="1..4", **environment):
        words = [*self.words, "-m", "shardtrain", "train", PROGRAM, "--run-dir", str(self.run), *options]
        words += ["--elastic", elastic] if elastic else []
        words += [] if "--cpu-devices" in options else ["--cpu-devices", "1"]
        return self.begin(words, **environment)

    def launch(self, warm_shardtrain, *options, launch=("--islands", "1")):
        """Start islands of two processes each."""
        logs = ("--logs", self.folder / f"logs-{len(self.processes)}")
        words = [*warm_shardtrain, "launch", *launch, "--processes-per-island", "2", *logs, "--", "train"]
        run = [PROGRAM, "--run-dir", self.run, "--cpu-devices", "1", *options]
        return self.begin([*map(str, words), *map(str, run)])

    def begin(self, words, **environment):
        with (self.folder / f"output-{len(self.processes)}").open("w") as output:
            given = {**self.environment, **environment}
            self.processes.append(subprocess.Popen(words, stdout=output, stderr=output, env=given))
        return self.processes[-1]

    def find_ranks(self, process):
        """Return the process ids of the ranks of a launch, from the table that its first one prints."""
        rows = [line.split() for line in self.output(process).splitlines()]
        return [int(row[3]) for row in rows if len(row) > 3 and row[0].isdigit() and row[3].isdigit()]

    def output(self, process):
        return (self.folder / f"output-{self.processes.index(process)}").read_text()

    def epochs(self):
        return list_epochs(RunFiles(self.run / "elastic")) if (self.run / "elastic").exists() else []

    def lines(self):
        return read_jsonl(self.run / "metrics.jsonl") if (self.run / "metrics.jsonl").exists() else []

    def wait_for(self, condition, seconds=120):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, [self.output(each) for each in self.processes]
            time.sleep(0.02)

    def wait_for_step(self, step):
        self.wait_for(lambda: len(self.lines()) >= step)

    def wait_for_why(self, words, number=1):
        """Wait until so many epochs say these words."""
        self.wait_for(lambda: sum(words in epoch.why for epoch in self.epochs()) == number)

    def find(self, index):
        """Return the process of a member, by age, and its name."""
        name = self.epochs()[-1].names[index]
        pid = int(name.split("-")[-2])
        return pid, name

    def end(self):
        for each in self.processes:
            each.kill()
            each.wait()


@pytest.fixture
def islands(warm_python, tmp_path):
    made = Islands(warm_python, tmp_path)
    yield made
    made.end()


@pytest.fixture(scope="module")
def alone(warm_python, tmp_path_factory):
    """The metrics of the same run as a single process."""
    islands = Islands(warm_python, tmp_path_factory.mktemp("alone"))
    assert islands.start(elastic="").wait(100) == 0
    return islands.lines()


def check_lines(found, alone):
    assert [line["step"] for line in found] == [line["step"] for line in alone]
    for mine, one in zip(found, alone, strict=True):
        for name in {"train/loss", "heldout/loss", "grad_norm", "learning_rate"} & one.keys():
            np.testing.assert_allclose(mine[name], one[name], rtol=2e-5)


def check_checkpoints(islands):
    """Each tenth step is saved, but for those in which the chief went; each new chief saves at once."""
    steps = [reader.step for reader in find_readers(islands.run / "checkpoints")]
    assert len(set(range(10, 121, 10)) - set(steps)) <= 2
    assert steps[-1] == 120
    assert all(later - step <= 15 for step, later in pairwise(steps))


def test_the_losses_of_one_device_through_kills_joins_and_leaves(islands, alone):
    islands.pace(12)
    islands.start()
    islands.start("--mesh", "data=2", "--cpu-devices", "2")
    islands.wait_for_why("joined")
    islands.wait_for_step(9)
    os.kill(islands.find(0)[0], signal.SIGKILL)
    third = islands.start()
    islands.wait_for_why("joined", 2)
    islands.wait_for_step(len(islands.lines()) + 5)
    os.kill(islands.find(0)[0], signal.SIGTERM)
    islands.pace(1000)
    codes = [each.wait(60) for each in islands.processes]
    assert sorted(codes) == [-9, 0, 143]
    check_lines(islands.lines(), alone)
    whys = [epoch.why for epoch in islands.epochs()]
    assert [sum(word in why for why in whys) for word in ("founded", "joined", "lost", "left")] == [
        1,
        2,
        1,
        1,
    ]
    check_checkpoints(islands)
    assert "step 120/120" in islands.output(third)
    assert (islands.run / "run.txt").exists()


def test_local_steps_of_a_lost_island_are_done_again(islands, warm_python, tmp_path):
    """With an outer optimizer, on islands of 1 and 2 devices; a replay from the ledger is bitwise equal."""
    options = ["--synchronisation", "diloco", "--local-steps", "5", "--elastic.slots", "4"]
    (tmp_path / "one").mkdir()
    one = Islands(warm_python, tmp_path / "one")
    assert one.start(*options, elastic="1..1").wait(100) == 0
    islands.pace(12)
    islands.start(*options, elastic="2..4")
    islands.start(*options, elastic="2..4")
    islands.wait_for_step(9)
    os.kill(islands.find(0)[0], signal.SIGKILL)
    # the other one waits for this one
    islands.start(*options, "--mesh", "data=2", "--cpu-devices", "2", elastic="2..4")
    islands.wait_for_why("joined")
    islands.pace(1000)
    assert sorted(each.wait(60) for each in islands.processes) == [-9, 0, 0]
    check_lines(islands.lines(), one.lines())
    assert [line["step"] for line in one.lines() if "train/loss" in line] == list(range(5, 121, 5))
    assert any("lost" in epoch.why for epoch in islands.epochs())
    assert {epoch.step % 5 for epoch in islands.epochs()} == {0}
    for run, start in (islands.run, "0"), (one.run, "40"):
        replay = [*warm_python, "-m", "shardtrain", "replay", str(run), "--from", start, "--to", "120"]
        found = subprocess.run(replay, env=islands.environment, capture_output=True, text=True, check=True)
        assert "bitwise" in found.stdout


def test_stages_of_a_lost_pipeline_are_done_again(islands, alone, warm_shardtrain):
    """Each island is a pipeline of two processes; one that loses a stage is lost as a whole."""
    every = ["--recovery.fingerprint-every", "2"]
    options = ["--across", "pipeline", "--accumulate", "10", *every, "--elastic", "1..3"]
    islands.pace(12)
    first = islands.launch(warm_shardtrain, *options)
    islands.wait_for_step(1)
    islands.launch(warm_shardtrain, *options)
    islands.wait_for_why("joined")
    islands.wait_for_step(9)
    os.kill(islands.find_ranks(first)[1], signal.SIGKILL)
    islands.wait_for_why("lost")
    # an island of one process has other sums
    other = islands.start(*every, elastic="1..3")
    assert other.wait(60) == 2
    assert "strategy.across.axis: pipeline on the run" in islands.output(other)
    last = islands.launch(warm_shardtrain, *options)
    islands.wait_for_why("joined", 2)
    islands.wait_for_step(len(islands.lines()) + 3)
    islands.processes[1].send_signal(signal.SIGTERM)
    islands.wait_for_why("left")
    islands.pace(1000)
    codes = [each.wait(60) for each in islands.processes]
    assert codes == [137, 143, 2, 0]
    check_lines(islands.lines(), alone)
    readers = find_readers(islands.run / "checkpoints")
    assert not any(reader.problems() for reader in readers)
    assert {reader.num_parts for reader in readers} == {2}
    assert readers[-1].step == 120
    assert "step 120/120" in islands.output(last)


def test_islands_whose_mesh_has_several_processes(islands, alone, warm_shardtrain, warm_python):
    """They take part beside islands of one process, with any kind of exchange; all continue from either."""
    islands.pace(12)
    options = ["--recovery.fingerprint-every", "2"]
    first = islands.launch(warm_shardtrain, "--mesh", "fsdp=2", "--elastic", "1..4", *options)
    islands.wait_for_step(1)
    islands.start(*options)
    islands.wait_for_why("joined")
    islands.wait_for_step(9)
    os.kill(islands.find_ranks(first)[1], signal.SIGKILL)
    islands.wait_for_why("lost")
    again = islands.launch(warm_shardtrain, "--mesh", "tensor=2", "--elastic", "1..4", *options)
    islands.wait_for_why("joined", 2)
    islands.wait_for_step(len(islands.lines()) + 2)
    # the island of two processes is the next chief
    os.kill(islands.find(0)[0], signal.SIGKILL)
    islands.pace(1000)
    lost, *codes = [each.wait(100) for each in islands.processes]
    # the one that is killed ends the launch, or the other one, which cannot compute without it
    assert lost in (137, 75)
    assert codes == [-9, 0]
    check_lines(islands.lines(), alone)
    assert "step 120/120" in islands.output(again)
    # both of its processes compute it
    assert islands.output(again).count("sampled ") == 1
    assert find_readers(islands.run / "checkpoints")[-1].step == 120


def test_an_island_that_waits_for_others_hears_a_signal_to_any_of_its_processes(islands, warm_shardtrain):
    options = ["--across", "pipeline", "--accumulate", "10", "--elastic", "2..3"]
    first, other = (islands.launch(warm_shardtrain, *options) for _ in range(2))
    islands.wait_for_step(3)
    other.kill()
    islands.wait_for_why("lost")
    second = json.loads((islands.folder / "logs-0/rank-1.json").read_text())
    os.kill(second["pid"], signal.SIGTERM)
    assert first.wait(60) == 143
    assert "Abort" not in islands.output(first)
    assert "1 island; lost" in islands.output(first)
    assert "; waits for 1 more" in islands.output(first)


def test_a_run_that_the_time_limit_of_its_last_island_ends_is_not_done(islands):
    islands.pace(2)
    first = islands.start("--time-limit", "00:00:09", "--time-margin", "1")
    assert first.wait(60) == 75
    assert "stopped by the time limit after step" in islands.output(first)


def test_a_run_whose_last_islands_are_asked_to_leave_is_not_done(islands):
    """Neither code is 0, after which `launch` would start no island again."""
    islands.pace(2)
    islands.start()
    islands.wait_for_step(1)
    islands.start()
    islands.wait_for_why("joined")
    for process in islands.processes:
        assert main(["leave", str(islands.run), islands.find(0)[1]]) == 0
        assert process.wait(60) == 143


def train_by_ledger(epochs, folder):
    """Return (loss, learning rate, number of batches before it) of each step, as one device computes it.

    The batch of a step is as many batches as its epoch says, and its rate times the root of their number.
    """
    run = Run(
        model=TinyConfig(vocab=32, num_layers=2, dropout=0.1),
        data=InMemory(random_tokens()),
        optimizer=Optimizer(learning_rate=Schedule(peak=1e-2)),
        batch=10,
        steps=120,
    )
    source, _ = open_sources(run, folder)
    batches = make_batches(run, source)
    mesh, steps, state, found = make_mesh(run.strategy.layout, jax.devices()[:1]), {}, None, []
    position, number = Position(epoch=0, index=0), 0
    for line in list_ledger(epochs, 120):
        size = len(epochs[line.epoch - 1].find_batches(line.step))
        scaled = replace(run, optimizer=Optimizer(learning_rate=Schedule(peak=1e-2 * size**0.5)))
        if size not in steps:
            setup = make_setup(scaled, microbatch=make_microbatch(run, source), mesh=mesh)
            parts = setup.model, run.loss, setup.optimizer, setup.placement, setup.learning_rate
            steps[size] = make_step(*parts)
            state = state or init_state(setup.model, setup.optimizer, setup.placement, run.seed)
        rows = []
        for _ in range(size):
            rows.append(batches.load(position))
            position = batches.advance(position)
        whole = {name: np.concatenate([part[name] for part in rows]) for name in rows[0]}
        state, metrics = steps[size](state, st.place(whole, mesh, run.strategy.layout.batch_axes))
        found.append((float(metrics["loss_sum"] / metrics["count"]), float(metrics["learning_rate"]), number))
        number += size
    return found, position


def test_a_batch_for_each_member(islands, warm_python, tmp_path):
    """Losses are those of one device with so many batches, through a join, a kill, and the death of all."""
    options = ["--elastic.batch", "members", "--scaling.rate", "sqrt"]
    islands.pace(12)
    islands.start(*options)
    islands.start(*options)
    islands.wait_for_why("joined")
    islands.wait_for_step(len(islands.lines()) + 3)
    islands.start(*options)
    islands.wait_for_why("joined", 2)
    # its sums have another size
    other = islands.start(*options[:2])
    assert other.wait(60) == 2
    assert "scaling.rate: sqrt on the run" in islands.output(other)
    islands.wait_for_step(len(islands.lines()) + 3)
    os.kill(islands.find(0)[0], signal.SIGKILL)
    islands.wait_for_why("lost")
    islands.wait_for_step(len(islands.lines()) + 3)
    islands.end()
    islands.pace(1000)
    last = islands.start(*options)
    assert last.wait(60) == 0
    epochs = islands.epochs()
    assert sum(epoch.founded for epoch in epochs) == 2
    assert {len(epoch.find_batches(epoch.step)) for epoch in epochs} == {1, 2, 3}
    expected, end = train_by_ledger(epochs, tmp_path)
    lines = islands.lines()
    assert [line["step"] for line in lines] == list(range(1, 121))
    for line, (loss, rate, _) in zip(lines, expected, strict=True):
        np.testing.assert_allclose([line["train/loss"], line["learning_rate"]], [loss, rate], rtol=2e-5)
    readers = find_readers(islands.run / "checkpoints")
    assert readers[-1].extra["position"] == dict(end)
    replay = [*warm_python, "-m", "shardtrain", "replay", str(islands.run), "--from", "0", "--to", "120"]
    found = subprocess.run(replay, env=islands.environment, capture_output=True, text=True, check=True)
    assert "bitwise" in found.stdout
    # a run without islands that come and go continues in the data where they were
    assert islands.start("--steps", "121", elastic="").wait(60) == 0
    assert islands.start(*options, "--steps", "122").wait(60) == 0
    batches = Batches(source=random_tokens(), batch=10)
    saved = {reader.step: reader.extra["position"] for reader in find_readers(islands.run / "checkpoints")}
    assert [saved[121], saved[122]] == [dict(batches.advance(end, number)) for number in (1, 2)]


def test_the_loop_of_the_example_trains(warm_python, tmp_path):
    """Half of its steps, on one device as on a laptop."""
    text = (
        (ROOT / "examples" / "elastic_loop.py")
        .read_text()
        .replace("STEPS, SLOTS, SEED = 200", "STEPS, SLOTS, SEED = 100")
    )
    (tmp_path / "loop.py").write_text(text)
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    words = [*warm_python, str(tmp_path / "loop.py"), str(tmp_path / "run")]
    done = subprocess.run(
        words, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, check=True
    )
    found = done.stdout.splitlines()
    losses = [float(line.split()[-1]) for line in found if line.startswith("step ")]
    assert len(losses) == 10
    assert losses[-1] < 0.8 * losses[0]
    assert found[-1] == "stopped"


def test_chiefs_that_stop_between_their_last_look_and_the_write_write_nothing(islands, alone):
    """The first one before a checkpoint gets its name, the second before a line of metrics."""
    islands.pace(8)
    for _ in range(3):
        islands.start()
    islands.wait_for(lambda: islands.epochs() and len(islands.epochs()[-1].names) == 3)
    chiefs, steps = [], []
    for place in ("name", "line"):
        chiefs.append(islands.find(0))
        (islands.folder / f"stop-{place}").touch()
        islands.wait_for_why(f"lost {chiefs[-1][1]}")
        steps.append(int((islands.folder / "stopped").read_text()))
    # the last chief has taken over
    islands.wait_for_step(steps[1] + 5)
    islands.wait_for(lambda: find_readers(islands.run / "checkpoints")[-1].step >= steps[1])
    before = {path: path.stat().st_mtime_ns for path in (islands.run / "checkpoints").iterdir()}
    for pid, _ in chiefs:
        os.kill(pid, signal.SIGCONT)
    islands.wait_for(lambda: [each.poll() for each in islands.processes].count(75) == 2)
    after = {path: path.stat().st_mtime_ns for path in (islands.run / "checkpoints").iterdir()}
    assert before.items() <= after.items()
    assert not [path for path in after for _, name in chiefs if name in path.name]
    islands.pace(1000)
    assert sorted(each.wait(60) for each in islands.processes) == [0, 75, 75]
    outputs = "".join(map(islands.output, islands.processes))
    assert all(f"{name}: excluded after step" in outputs for _, name in chiefs)
    check_lines(islands.lines(), alone)
    check_checkpoints(islands)
    readers = find_readers(islands.run / "checkpoints")
    assert not any(reader.problems() for reader in readers)
    saved = {reader.step: reader.extra["elastic"]["epoch"] for reader in readers}
    (lost,) = [epoch for epoch in islands.epochs() if f"lost {chiefs[0][1]}" in epoch.why]
    assert saved.get(steps[0], lost.number) >= lost.number


def find_kept(islands):
    """Return the saved steps, and the best of them."""
    steps = list(find_finished_steps(islands.run / "checkpoints"))
    best = find_best_saved(islands.run / "checkpoints", steps)
    return steps, best and best.step


def test_the_best_checkpoint_stays_through_the_loss_of_chiefs(islands):
    """The first one is killed later; the second stops in the best evaluation, before it writes anything."""
    heldout, evaluations = islands.folder / "heldout", islands.run / "checkpoints" / EVALUATIONS
    heldout.write_text('{"10": 1.0}')
    policy = ["--checkpoints.best", "heldout/loss", "--checkpoints.keep", "1"]
    islands.pace(12)
    for _ in range(3):
        islands.start(*policy, "--checkpoints.every-steps", "1000", "--evaluate-every", "10")
    islands.wait_for(lambda: islands.epochs() and len(islands.epochs()[-1].names) == 3)
    islands.wait_for_step(21)
    assert find_kept(islands) == ([10], 10)
    os.kill(islands.find(0)[0], signal.SIGKILL)
    islands.wait_for_why("lost")
    # the new chief saves at once, and keeps what is not the newest
    islands.wait_for(lambda: len(find_kept(islands)[0]) == 2)
    assert find_kept(islands)[1] == 10
    islands.wait_for(lambda: len(islands.lines()) % 10 in (1, 2, 3))
    best = len(islands.lines()) // 10 * 10 + 10
    heldout.write_text(f'{{"10": 1.0, "{best}": 0.5}}')
    (islands.folder / "stop-values").touch()
    pid, name = islands.find(0)
    islands.wait_for_why(f"lost {name}")
    islands.wait_for(lambda: find_kept(islands) == ([best], best))
    islands.wait_for_step(best + 11)
    os.kill(pid, signal.SIGCONT)
    islands.wait_for(lambda: 75 in [each.poll() for each in islands.processes])
    assert {str(best), str(best + 10)} <= json.loads(evaluations.read_text())["steps"].keys()
    islands.pace(1000)
    assert sorted(each.wait(60) for each in islands.processes) == [-9, 0, 75]
    assert find_kept(islands) == ([best, 120], best)
    assert [line["step"] for line in islands.lines()] == list(range(1, 121))


def test_others_are_refused_and_too_few_save_and_wait_for_a_later_start(islands, alone):
    islands.pace(7)
    islands.start(elastic="2..4")
    islands.start(elastic="2..4")
    islands.wait_for_step(3)
    others = [
        (islands.start("--seed", "1"), "seed: 0 on the run"),
        (islands.start(elastic=""), "another process is training in"),
    ]
    for other, message in others:
        assert other.wait(60) == 2
        assert message in islands.output(other)
    assert len({name for epoch in islands.epochs() for name in epoch.names}) == 2
    os.kill(islands.find(0)[0], signal.SIGKILL)
    islands.wait_for(lambda: find_readers(islands.run / "checkpoints"))
    step = find_readers(islands.run / "checkpoints")[-1].step
    for each in islands.processes:
        each.kill()
        each.wait()
    # all are gone: nobody waits long for them
    islands.pace(1000)
    again = islands.start()
    assert again.wait(60) == 0
    assert sum(epoch.founded for epoch in islands.epochs()) == 2
    assert f"resumed from step {step}" in islands.output(again)
    check_lines(islands.lines(), alone)
    # a plain run continues it, which is no work of islands
    assert islands.start("--steps", "122", elastic="").wait(60) == 0
    assert [line["step"] for line in islands.lines()] == list(range(1, 123))
    history = read_history(islands.run)
    assert history.plain == {len(history.epochs): 120}


def test_a_loss_that_is_not_finite_is_explained_by_the_rows_of_all_batches_of_its_step(tmp_path):
    samples = random_tokens(40)
    batches = Batches(source=samples, batch=4, shuffle=False)
    nothing: Any = None
    run = Run(model=TinyConfig(vocab=32), data=Text(), batch=4, elastic=replace(MEMBERS, slots=2))
    elastic: Any = ElasticRun(run, tmp_path, nothing, batches, nothing, Group())
    names = [Peer(name=name, address="") for name in "ab"]
    two = Epoch(
        number=2,
        step=3,
        members=tuple(names),
        slots=((0, 1), (2, 3)),
        why="joined b",
        member_slots=2,
        first_batch=3,
    )
    for epoch in (found_epoch(1, names[0], 0, 2, first_batch=0), two, found_epoch(3, names[0], 6, 2)):
        content = json.dumps(to_json(epoch)).encode()
        RunFiles(tmp_path / "elastic").propose(epoch.number, content)

    def find_numbers(step):
        firsts = [batch["tokens"][0].tolist() for batch in elastic.load_batches(step)]
        return [[each["tokens"].tolist() for each in samples].index(first) // 4 for first in firsts]

    assert [find_numbers(step) for step in (3, 4, 5, 7)] == [[2], [3, 4], [5, 6], [6]]
    samples[4 * 6 + 1]["tokens"][3] = 99
    first = batches.load(Position(epoch=0, index=0))
    model = make_setup(run, microbatch=first).whole_model
    expected = make_loss_facts(model, next_token_loss, first, 32)
    loop: Any = SimpleNamespace(prepared=SimpleNamespace(elastic=elastic, expected=expected))
    text = _Loop._explain(loop, 5)
    assert text.startswith("batch 2 of 2: 'tokens' has 99 in row 1 at 3; the model has classes 0 to 31")
    assert _Loop._explain(loop, 7) == text.removeprefix("batch 2 of 2: ")
    assert _Loop._explain(loop, 4) == ""


def test_a_new_chief_takes_over_before_it_writes_and_saves_the_best_step_only_if_it_is_not_there(tmp_path):
    nothing: Any = None
    run = Run(model=TinyConfig(vocab=32), data=Text(), batch=4, elastic=replace(MEMBERS, slots=2))
    elastic: Any = ElasticRun(run, tmp_path, nothing, nothing, nothing, Group())
    founded = found_epoch(1, Peer(name="a", address=""), 0, 2)
    RunFiles(tmp_path / "elastic").propose(1, json.dumps(to_json(founded)).encode())
    member = SimpleNamespace(is_chief=True, number=1, epoch=None, me=SimpleNamespace(name="a"))
    elastic._island = SimpleNamespace(outcome="", member=member)
    steps, saved = [elastic._done], []
    own = SimpleNamespace(revoke=lambda select: saved.append(elastic.may_write()), steps=lambda: steps)
    elastic._checkpoints = SimpleNamespace(checkpoints=own)
    elastic.save_if_best = lambda: saved.append("best")
    assert elastic.is_chief()
    assert not elastic.may_write()
    elastic.revoke(1)
    assert saved == [True]
    steps.clear()
    elastic.revoke(1)
    assert saved == [True, True, "best"]


class Second:
    """The channel of the second of two processes, whose first one tells `told`."""

    rank, size, signal = 1, 2, 0

    def __init__(self, told: Standing) -> None:
        self.told = told

    def all_gather(self, name: str, value: Any) -> list[Any]:
        answers = {CALL: [DONE, [[False, list(self.told)]]], "asked to leave": self.signal}
        return [answers.get(name), value]

    def send(self, array: Any, to: int) -> None:
        raise AssertionError(to)

    def receive(self, shape: Any, dtype: Any, source: int) -> Any:
        raise AssertionError(source)


def test_a_process_saves_for_the_newest_chief_alone_and_asks_to_leave_for_its_island(tmp_path):
    nothing: Any = None
    run = Run(model=TinyConfig(vocab=32), data=Text(), batch=4, elastic=replace(MEMBERS, slots=2))
    second = Second(Standing("a", 1, True, "", 0))
    elastic: Any = ElasticRun(run, tmp_path, nothing, nothing, nothing, Group(second))
    elastic._show, elastic._program = lambda: None, SimpleNamespace(state="state", metrics={})
    own = SimpleNamespace(revoke=lambda select: None, steps=lambda: [elastic._done])
    elastic._checkpoints, saved = SimpleNamespace(checkpoints=own), []
    elastic.save_if_best = lambda: saved.append("best")
    a, b = (Peer(name=name, address="") for name in "ab")
    files = RunFiles(tmp_path / "elastic")
    files.propose(1, json.dumps(to_json(found_epoch(1, a, 0, 2))).encode())
    elastic.step("state", {})
    second.signal = signal.SIGTERM
    elastic._gather_signals()
    assert elastic.find_asked() == signal.SIGTERM
    assert elastic.is_chief()
    assert not elastic.may_save()
    elastic._take_over(second.told)
    # the part of the other process is not there
    assert saved == ["best"]
    assert elastic.may_save()
    assert not elastic.may_write()
    # the island slept, and does not know that another one is the chief
    files.propose(2, json.dumps(to_json(found_epoch(2, b, 1, 2))).encode())
    assert not elastic.may_save()


def test_islands_of_several_processes_compare_the_parameters_of_all_of_them(tmp_path):
    nothing: Any = None
    recovery = Recovery(fingerprint_every=10)
    run = Run(model=TinyConfig(vocab=32), data=Text(), elastic=replace(MEMBERS, slots=2), recovery=recovery)
    others = [1]
    channel = SimpleNamespace(rank=0, size=2, all_gather=lambda name, value: [value, others])
    elastic: Any = ElasticRun(run, tmp_path, nothing, nothing, nothing, Group(cast("Any", channel)))
    elastic._program = SimpleNamespace(state=SimpleNamespace(params={"a": np.ones(3)}))
    elastic._island = SimpleNamespace(member=SimpleNamespace(names=("a", "b")))
    files = RunFiles(tmp_path / "elastic")
    files.describe_member("a", {"mesh": {"data": 1}, "processes": 2})
    files.describe_member("b", {"mesh": {"data": 1}, "processes": 2})
    found = elastic._find_digest(10)
    others = [2]
    assert found != elastic._find_digest(10) != ""
    assert elastic._find_digest(11) == ""
    elastic._island.member.names = ("a", "c")
    files.describe_member("c", {"mesh": {"data": 1}, "processes": 1})
    assert elastic._find_digest(10) == ""


def test_stages_send_losses_as_they_are():
    stages: Any = object.__new__(ElasticStages)
    stages._codec, stages._state = "int8", "state"
    stages._rows = SimpleNamespace(iterate=lambda *_: [(0, 0, iter(["rows"]))])
    sums = {"grads": {"a": np.ones(3)}, "losses": {"loss_sum": 1.0}}
    stages._stage = SimpleNamespace(sum_gradients=lambda *_: sums)
    assert stages.compute(0, [0]) is sums
    assert stages.codecs == {"grads": {"a": "int8"}, "losses": {"loss_sum": ""}}


def test_an_island_takes_the_slots_of_its_run(tmp_path):
    run = Run(model=TinyConfig(vocab=32, seq=8), data=Text(), batch=12, elastic=Elastic(islands="1..2"))
    by = replace(run, strategy=Strategy(synchronisation=Synchronisation(by="adasum")))
    stages = replace(run, strategy=Strategy(across=Across(axis="pipeline"), accumulate=7))
    for each, slots in ((run, 4), (by, 2)):
        assert prepare_elastic(each).elastic.slots == slots
        assert prepare_elastic(each, 3).elastic.slots == 3
    found = prepare_elastic(stages, num_islands=2)
    assert (found.elastic.slots, found.strategy.accumulate) == (2, 8)
    assert read_newest(tmp_path / "elastic") is None
    assert not (tmp_path / "elastic").exists()
    epoch = found_epoch(1, Peer(name="a", address=""), 0, 3)
    RunFiles(tmp_path / "elastic").propose(1, json.dumps(to_json(epoch)).encode())
    assert read_newest(tmp_path / "elastic") == epoch
    for other, text in (
        ({"elastic": Elastic(islands="2..4")}, "3 islands (here 4)"),
        ({"strategy": Strategy(accumulate=6)}, "3 microbatches (here 6)"),
        ({"batch": 2}, "at least 3 rows in a batch (here 2)"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            prepare_elastic(replace(run, **other), 3)


def test_a_founder_passes_over_a_checkpoint_that_another_island_deletes(tmp_path, monkeypatch):
    nothing: Any = None
    run = Run(model=TinyConfig(vocab=32), data=Text(), elastic=replace(MEMBERS, slots=2))
    elastic: Any = ElasticRun(run, tmp_path, nothing, nothing, nothing, Group())
    checkpoints = SimpleNamespace(discover=lambda gather: SimpleNamespace(step=9))
    elastic._checkpoints = SimpleNamespace(checkpoints=checkpoints)
    for part in range(2):
        (tmp_path / f"checkpoints/step_00000007.part-{part}-of-2").mkdir(parents=True)
    assert elastic.find() == 9

    def vanish(folder):
        raise FileNotFoundError(folder)

    # of an epoch that there never was
    gone = SimpleNamespace(missing=(), step=8, extra={"elastic": {"epoch": 5}}, folders={0: tmp_path})
    monkeypatch.setattr("shardtrain.trainer.elastic_run.visible_readers", lambda folder: [gone])
    monkeypatch.setattr("shardtrain.trainer.elastic_run.delete", vanish)
    assert elastic.find() == 9


def test_an_error_of_a_compiler_is_no_lost_process(tmp_path):
    nothing: Any = None
    run = Run(model=TinyConfig(vocab=32), data=Text(), elastic=replace(MEMBERS, slots=2))
    elastic: Any = ElasticRun(
        run, tmp_path, nothing, nothing, nothing, Group(Second(Standing("a", 1, True, "", 0)))
    )

    def fail(text):
        raise jax.errors.JaxRuntimeError(text)

    elastic._group.run = lambda work: fail("Gloo all-reduce failed: Connection closed by peer")
    with pytest.raises(IslandEnded, match="a process of this island is lost: JaxRuntimeError: Gloo"):
        elastic.finish()
    elastic._group.run = lambda work: fail("RESOURCE_EXHAUSTED: out of memory")
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE"):
        elastic.finish()


def test_an_island_that_is_not_over_ends_by_its_error():
    """It would wait for a step that nobody computes."""
    loop: Any = object.__new__(_Loop)
    loop.done, loop.last_step = 0, 1

    def fail():
        raise IslandEnded("a process of this island is lost")

    loop._step = fail
    loop.prepared = SimpleNamespace(elastic=SimpleNamespace(outcome="stopped"))
    loop.train()
    loop.prepared.elastic.outcome = ""
    with pytest.raises(IslandEnded, match="a process"):
        loop.train()


def test_the_slots_of_all_members_can_be_sent():
    assert Elastic(islands="1..4", batch="members", slots=1024).slots == 1024
    with pytest.raises(ValueError, match="use 1 to 1024"):
        Elastic(islands="1..4", batch="members", slots=1025)
    with pytest.raises(ValueError, match="use 4 to 4096"):
        Elastic(islands="1..4", slots=4097)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_growth": "5:2"}, "--batch-growth 5:2 (use a schedule of the learning rate)"),
        (
            {"strategy": Strategy(synchronisation=Synchronisation(by="top_k:0.1+mean"))},
            "whose state is known to one island only",
        ),
        ({"strategy": Strategy(synchronisation=preset("local-sgd")), "steps": 50}, "use 48"),
        ({"elastic": Elastic(islands="1..20")}, "a batch of 10 rows is too small for 20 slots"),
        (
            {"strategy": Strategy(across=Across(axis="pipeline"), synchronisation=preset("diloco"))},
            "local steps with --across pipeline",
        ),
        (
            {"scaling": Scaling(rate="sqrt")},
            "--scaling.rate sqrt, which follows the members; use --elastic.batch",
        ),
        (
            {"elastic": MEMBERS, "strategy": Strategy(synchronisation=preset("local-sgd"))},
            "--elastic.batch members with local steps",
        ),
        (
            {
                "elastic": MEMBERS,
                "strategy": Strategy(synchronisation=Synchronisation(by="bfloat16+adasum")),
                "scaling": Scaling(rate="linear"),
            },
            "--scaling.rate linear with --combine adasum",
        ),
        (
            {"elastic": MEMBERS, "scaling": Scaling(rate="linear"), "optimizer": optax.sgd(0.1)},
            "an optimizer in Python",
        ),
        (
            {"elastic": MEMBERS, "scaling": Scaling(rate="linear"), "optimizer": Optimizer(ema=0.9)},
            "with optimizer.ema",
        ),
        ({"elastic": MEMBERS, "scaling": Scaling(rate="linear", batch=True)}, "--scaling.batch, --scaling"),
    ],
)
def test_what_cannot_come_and_go_is_refused(options, message):
    run = Run(model=TinyConfig(vocab=32, seq=8), data=Text(), batch=10, elastic=Elastic(islands="1..4"))
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare_elastic(replace(run, **options))
    with pytest.raises(ValueError, match="2 islands of MPI were started together; start each island alone"):
        prepare_elastic(run, num_islands=2)
