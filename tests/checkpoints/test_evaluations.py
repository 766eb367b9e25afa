"""Which saved step is the best by its held-out values, and that it is kept."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shardtrain.checkpoints import paths
from shardtrain.checkpoints.checkpointer import Checkpoints
from shardtrain.checkpoints.evaluations import (
    EVALUATIONS,
    BestStep,
    Evaluations,
    find_best_saved,
    find_best_step,
    read_evaluations,
)
from shardtrain.checkpoints.manifest import write_manifest
from shardtrain.checkpoints.manifest_entries import WHOLE, Manifest, WriterPart
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.checkpoints.retention import Mirror, delete_old
from shardtrain.cli.checkpoint import main
from shardtrain.trainer.resume import find_checkpoint

POLICY = CheckpointPolicy(keep=1, best="heldout/loss")
LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: 1.0, 50: math.nan}


def write(folder: Path, step: int, part: WriterPart = WHOLE) -> None:
    path = paths.step_folder(folder, step, part)
    path.mkdir(parents=True)
    (path / "data").write_text(f"{step}{part}")
    write_manifest(path, Manifest(step=step, orbax_version="", files={}, leaves={}, extra={}, part=part))


def written(folder: Path) -> dict[int, float]:
    found = read_evaluations(folder)
    assert found is not None
    return {step: values["heldout/loss"] for step, values in found.values.items() if values}


def steps(folder: Path) -> list[int]:
    return list(paths.find_finished_steps(folder))


def record(folder: Path, policy: CheckpointPolicy = POLICY, losses: dict[int, float] = LOSSES) -> Evaluations:
    found = Evaluations(folder, policy, pytest.fail)
    for step, loss in losses.items():
        found.add(step, {"heldout/loss": loss, "heldout/accuracy": 1 / loss}, losses)
    return found


def test_the_best_of_the_saved_steps_is_known_after_a_restart(tmp_path):
    for policy, best in ((POLICY, 20), (CheckpointPolicy(best="heldout/loss", best_is="highest"), 10)):
        first = record(tmp_path, policy)
        again = Evaluations(tmp_path, policy, pytest.fail)
        for found in (first, again):
            # of equal ones the first
            assert found.best(LOSSES) == best
            assert found.best([50]) is None
    # another metric of the same evaluations
    other = Evaluations(tmp_path, CheckpointPolicy(best="heldout/accuracy", best_is="highest"), pytest.fail)
    assert other.best(LOSSES) == 20


def test_an_evaluation_is_the_best_where_it_is_better_than_those_of_all_saved_steps(tmp_path):
    found = Evaluations(tmp_path, POLICY, pytest.fail)
    assert found.is_best({"heldout/loss": 9.0})
    found = record(tmp_path)
    assert not found.is_best({"heldout/loss": 1.0})
    assert found.is_best({"heldout/loss": 0.9})
    assert not found.is_best({"heldout/loss": math.nan})
    assert not found.is_best({"heldout/loss": -math.inf})
    assert not found.is_best({})
    highest = Evaluations(tmp_path, CheckpointPolicy(best="heldout/loss", best_is="highest"), pytest.fail)
    assert highest.is_best({"heldout/loss": 3.1})


def test_the_best_recorded_step_is_one_that_is_saved_or_was_evaluated_since(tmp_path):
    found = record(tmp_path)
    for loss, best in ((1.0, 20), (0.9, 60), (math.nan, 20), (-math.inf, 20)):
        found.add(60, {"heldout/loss": loss}, LOSSES)
        assert found.best_recorded() == best
    # those that were not saved, or are no more
    found.add(60, {"heldout/loss": 2.5}, [10, 30, 50])
    assert found.best_recorded() == 30
    found.add(60, {"heldout/loss": 2.5}, [10, 50])
    assert found.best_recorded() == 60
    assert Evaluations(tmp_path / "none", POLICY, pytest.fail).best_recorded() is None


def test_a_writer_that_slept_writes_nothing_once_another_has_taken_over(tmp_path):
    looks: list[Any] = []
    first, second = (Checkpoints(tmp_path, POLICY, report=pytest.fail) for _ in range(2))
    first.set_writer("a", lambda: looks.pop(0)() if looks else True)
    second.set_writer("b", lambda: is_chief)
    is_chief = False
    first.evaluated(10, {"heldout/loss": 2.0})
    for step, loss in ((10, 2.0), (20, 1.0)):
        second.evaluated(step, {"heldout/loss": loss})
    assert written(tmp_path) == {10: 2.0}

    def sleep() -> bool:
        nonlocal is_chief
        is_chief = True
        second.revoke(lambda names: names)
        return True

    # it sleeps after its last look
    looks += [lambda: True, sleep]
    first.evaluated(20, {"heldout/loss": 9.0})
    assert written(tmp_path) == {10: 2.0, 20: 1.0}
    assert second.best_evaluated() == 20
    # or before it
    looks += [lambda: True, lambda: False]
    first.evaluated(20, {"heldout/loss": 9.0})
    assert written(tmp_path) == {10: 2.0, 20: 1.0}
    assert [path.name for path in tmp_path.iterdir()] == [EVALUATIONS]


def test_one_that_goes_back_to_an_earlier_checkpoint_forgets_values_once_it_has_taken_over(tmp_path):
    record(tmp_path)
    write(tmp_path, 10)
    is_chief = False
    found = Checkpoints(tmp_path, POLICY, report=pytest.fail)
    found.set_writer("a", lambda: is_chief)
    assert found.discover().step == 10
    assert written(tmp_path).keys() > {10, 20}
    is_chief = True
    found.revoke(lambda names: names)
    assert found.discover().step == 10
    assert written(tmp_path) == {10: 3.0}
    # values that it read before another one went back are of a past that was left
    other = Checkpoints(tmp_path, POLICY, report=pytest.fail)
    found.evaluated(10, {"heldout/loss": 4.0})
    other.set_writer("b", lambda: True)
    other.revoke(lambda names: names)
    assert written(tmp_path) == {10: 4.0}


def test_what_comes_after_the_step_from_which_a_run_continues_is_forgotten(tmp_path):
    found = record(tmp_path)
    found.drop_after(10)
    assert found.best(LOSSES) == 10
    assert Evaluations(tmp_path, POLICY, pytest.fail).best(LOSSES) == 10
    # steps that were deleted go too
    found.add(20, {"heldout/loss": 4.0}, [20])
    body = json.loads((tmp_path / EVALUATIONS).read_text())
    assert body == {"metric": "heldout/loss", "best_is": "lowest", "steps": {"20": {"heldout/loss": 4.0}}}


@pytest.mark.parametrize("count", [1, 2])
def test_the_best_step_is_kept_beside_the_newest(count, tmp_path):
    best = record(tmp_path).best
    parts = [WriterPart(index, count) for index in range(count)]
    for step in LOSSES:
        for part in parts:
            write(tmp_path, step, part)
    for part in parts:
        assert delete_old(tmp_path, POLICY, part, newest=50, best=best) == []
    assert steps(tmp_path) == [20, 50]
    # a broken step is not the best
    for part in parts:
        delete_old(tmp_path, POLICY, part, newest=50, broken=[20], best=best)
    assert steps(tmp_path) == [50]


def test_a_run_folder_behind_a_fast_disk_keeps_it_too(tmp_path):
    fast, shared = tmp_path / "fast", tmp_path / "shared"
    mirror = Mirror(fast, shared, POLICY, WHOLE, record(tmp_path).best)
    for step in LOSSES:
        write(fast, step)
        mirror.copy(step)
        assert mirror._collect() == []
    assert mirror.close() == []
    assert steps(shared) == [20, 50]


def test_a_file_that_cannot_be_trusted_or_written_is_reported_and_ends_no_run(tmp_path):
    path = tmp_path / EVALUATIONS
    for text in ("{", "[]", '{"metric": 3, "best_is": "lowest", "steps": {}}', '{"metric": "a"}'):
        path.write_text(text)
        with pytest.raises(
            ValueError, match=r"evaluations.json is damaged \(.*; it must have metric, best_is"
        ):
            read_evaluations(tmp_path)
        with pytest.raises(ValueError, match="Delete it: then no step is the best until"):
            find_best_step(tmp_path, [1])
        assert find_best_saved(tmp_path, [1]) is None
        warnings: list[str] = []
        Evaluations(tmp_path, POLICY, warnings.append)
        assert "the best checkpoint so far is not known" in warnings[0]
    path.unlink()
    path.mkdir()
    warnings = []
    found = Evaluations(tmp_path / "none", POLICY, pytest.fail)
    found._folder, found._report = tmp_path, warnings.append
    found.add(1, {"heldout/loss": 1.0}, [1])
    assert "cannot be written" in warnings[0]
    assert found.best([1]) == 1


def test_without_a_metric_nothing_is_written(tmp_path):
    record(tmp_path, CheckpointPolicy())
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_shows_names_and_keeps_it(tmp_path, capsys):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    record(folder)
    for step in LOSSES:
        write(folder, step)
    assert main(["ls", str(tmp_path)]) == 0
    marked = [
        line.split()[0] for line in capsys.readouterr().out.splitlines() if "; best heldout/loss 1" in line
    ]
    assert marked == ["20"]
    assert main(["show", f"{tmp_path}@best"]) == 0
    assert capsys.readouterr().out.startswith("step 20,")
    assert find_checkpoint(tmp_path, "best").step == 20
    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0
    assert capsys.readouterr().out.endswith("kept: 20, 50\n")
    assert steps(folder) == [20, 50]
    assert find_best_saved(folder, [20, 50]) == BestStep(20, "heldout/loss", 1.0)
    (folder / EVALUATIONS).write_text("{")
    with pytest.raises(ValueError, match=r"evaluations.json is damaged"):
        main(["prune", str(tmp_path), "--keep", "1"])
    assert steps(folder) == [20, 50]
    (folder / EVALUATIONS).unlink()
    with pytest.raises(ValueError, match="has no best step: a run records it with"):
        main(["show", f"{tmp_path}@best"])
    with pytest.raises(ValueError, match="has no best step"):
        find_checkpoint(tmp_path, "best")


def test_a_policy_that_cannot_be_meant_is_refused():
    with pytest.raises(ValueError) as error:
        CheckpointPolicy(best="loss", best_is="smallest")  # type: ignore[arg-type]
    assert str(error.value).splitlines()[1:] == [
        "  - best_is is 'smallest'; allowed: lowest, highest",
        "  - best is loss; use None, or a held-out metric as it is logged: heldout/loss, heldout/NAME,"
        " heldout/SET/NAME",
    ]
