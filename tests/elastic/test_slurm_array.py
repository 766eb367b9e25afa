"""The tasks of a job array are islands of one run, whatever happens to them; Slurm is a stand-in."""

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))
from elastic_island import train_alone
from slurm_array import Array, check_ledger

from shardtrain.launch.job import Job
from shardtrain.launch.slurm import Slurm, write_array_script

ISLAND = str(TESTS / "programs" / "elastic_island.py")


@pytest.fixture
def make_array(tmp_path, monkeypatch, warm_python):
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent))
    made = []

    def make(program, *arguments, islands=3, **options):
        job = Job(
            arguments=(program, *arguments), islands=islands, program=tuple(warm_python),
            logs=tmp_path / "logs", interface="lo",
        )  # fmt: skip
        script = write_array_script(job, Slurm(**options), os.environ)
        made.append(Array(script, tmp_path / "slurm", job.logs))
        return made[-1]

    yield make
    for each in made:
        each.kill()


def test_a_run_ends_though_its_tasks_are_killed_and_requeued(make_array, tmp_path):
    steps = 300
    array = make_array(ISLAND, str(tmp_path), str(steps), "0.005")
    array.run_chaos(seed=3, seconds=6)
    done = [text for text in array.list_logs() if f"outcome stopped {steps} {train_alone(steps)}\n" in text]
    # each step was computed from each slot once: the parameters are those of one process
    assert done, array.list_logs()
    assert array.counts["lost its node"] + array.counts["time limit"], array.counts
    assert array.tasks[0].code == 0
    check_ledger(tmp_path / "elastic", steps)


ENDS = """
import os, sys
from pathlib import Path
task = os.environ["SLURM_ARRAY_TASK_ID"]
starts = len(list(Path(sys.argv[1]).glob(f"start-{task}-*")))
Path(sys.argv[1], f"start-{task}-{starts}").touch()
print(os.environ["SHARDTRAIN_ADDRESS"])
sys.exit([0, 75, 3][int(task)] if starts < 2 else 0)
"""


@pytest.mark.parametrize(("requeue", "starts"), [(True, [1, 3, 1]), (False, [1, 1, 1])])
def test_a_task_is_requeued_by_itself_where_that_helps(requeue, starts, make_array, tmp_path):
    (tmp_path / "ends.py").write_text(ENDS)
    array = make_array(str(tmp_path / "ends.py"), str(tmp_path), requeue=requeue)
    array.run_chaos(seed=0, seconds=0)
    assert [task.starts for task in array.tasks] == starts
    assert [task.code for task in array.tasks] == [0, 0 if requeue else 75, 3]
    # a task that starts again continues its log
    assert sorted(text.split() for text in array.list_logs()) == sorted(["127.0.0.1"] * n for n in starts)
