"""A job array of elastic islands under a stand-in for Slurm, which kills, preempts and requeues whole tasks.

    python tests/elastic/slurm_array.py --minutes 10 --islands 3 RUN_FOLDER train run.py --elastic 1..4 ...

At the end each task has ended with 0, the ledger of the run folder has each slot of each step once, and its
metrics have each step once, with the loss of the same command on one device. With `--processes 2 ...
--across pipeline` each island is a pipeline of two stages.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from shardtrain.elastic.epoch_files import list_epochs
from shardtrain.elastic.ledger import list_ledger
from shardtrain.elastic.run_files import RunFiles
from shardtrain.launch.job import Job
from shardtrain.launch.slurm import Slurm, write_array_script

# srun starts the words after its options as the only rank, or as several by mpiexec; scontrol asks the
# stand-in to start a task again
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
[ "$RANKS" -gt 1 ] && exec "$MPIEXEC" -n "$RANKS" "$@"
export SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_LOCALID=0
exec "$@"
"""
SCONTROL = '#!/bin/bash\n[ "$1" = requeue ] && mkdir "$REQUEUED/$2"\n'
JOB_ID = 77


@dataclass
class Task:
    """A task of the array: its script, while it runs, and when it is started again."""

    number: int
    script: subprocess.Popen | None = None
    due_seconds: float | None = 0.0
    starts: int = 0
    code: int | None = None

    @property
    def name(self):
        return f"{JOB_ID}_{self.number}"


class Array:
    """A job array whose tasks run on this host.

    Args:
      script: text of the batch script.
      folder: an empty folder for the stand-ins, and what scripts print.
      logs: folder of the logs of all tasks, as in the script.
    """

    def __init__(self, script, folder, logs):
        self.folder, self.logs = folder, logs
        (folder / "requeued").mkdir(parents=True)
        self.script = folder / "script"
        self.script.write_text(script)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        last = re.search(r"^#SBATCH --array=0-(\d+)$", script, re.MULTILINE)
        assert last is not None
        (ranks,) = re.findall(r"^#SBATCH --ntasks-per-node=(\d+)$", script, re.MULTILINE)
        self.mpi = {"RANKS": ranks, "MPIEXEC": str(Path(sys.executable).with_name("mpiexec"))}
        self.tasks = [Task(number) for number in range(int(last[1]) + 1)]
        self.counts = Counter()

    def start(self, task):
        own = {"SLURM_ARRAY_JOB_ID": str(JOB_ID), "SLURM_ARRAY_TASK_ID": str(task.number)}
        own |= self.mpi | {
            "REQUEUED": str(self.folder / "requeued"),
            "PATH": f"{self.folder}:{os.environ['PATH']}",
        }
        with (self.folder / f"output-{task.number}").open("a") as output:
            task.script = subprocess.Popen(
                ["bash", self.script], env=os.environ | own, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        task.starts, task.due_seconds, task.code = task.starts + 1, None, None

    def look(self, pause_seconds=0.0):
        """Start what is due; take the ends of tasks, and what they asked of the scheduler."""
        for task in self.tasks:
            if task.due_seconds is not None and time.monotonic() >= task.due_seconds:
                self.start(task)
            if task.script is None or (code := task.script.poll()) is None:
                continue
            task.script, task.code = None, code
            asked = self.folder / "requeued" / task.name
            if asked.exists():
                asked.rmdir()
                self.requeue(task, pause_seconds, "requeued itself")

    def requeue(self, task, pause_seconds, why):
        self.counts[why] += 1
        task.due_seconds = time.monotonic() + pause_seconds

    def lose_node(self, task, pause_seconds):
        """Kill all processes of a task, as with its node; Slurm requeues it."""
        os.killpg(task.script.pid, signal.SIGKILL)  # the guard of the rank ends the rank
        task.script.wait()
        task.script = None
        self.requeue(task, pause_seconds, "lost its node")

    def signal_step(self, task):
        """Send SIGUSR1 to the ranks, as --signal does before the time limit; return whether all run."""
        records = [json.loads(path.read_text()) for path in (self.logs / task.name).glob("rank-*.json")]
        if not records or any(each["code"] is not None for each in records):
            return False
        try:
            for each in records:
                os.kill(each["pid"], signal.SIGUSR1)
        except ProcessLookupError:  # it has just ended
            return False
        self.counts["time limit"] += 1
        return True

    @property
    def is_over(self):
        return all(task.script is None and task.due_seconds is None for task in self.tasks)

    def run_chaos(self, seed, seconds, most_pause_seconds=2.0):
        """Lose nodes and reach time limits at random for some time, and wait for the end."""
        rng, end = random.Random(seed), time.monotonic() + seconds
        next_seconds = 0.0
        while not self.is_over:
            self.look(rng.uniform(0, most_pause_seconds))
            running = [task for task in self.tasks if task.script is not None]
            now = time.monotonic()
            # a run that is done is left alone
            done = any(task.code == 0 for task in self.tasks)
            if next_seconds < now < end and running and not done:
                next_seconds = now + rng.uniform(0.5, most_pause_seconds)
                task = rng.choice(running)
                if rng.random() < 0.5 or not self.signal_step(task):
                    self.lose_node(task, rng.uniform(0, most_pause_seconds))
            time.sleep(0.05)

    def kill(self):
        for task in self.tasks:
            if task.script is not None:
                os.killpg(task.script.pid, signal.SIGKILL)
                task.script.wait()

    def list_logs(self):
        return [path.read_text() for path in sorted(self.logs.glob("*/rank-0.log"))]


def check_ledger(elastic, steps):
    """Check that each slot of each step is there once; return the epochs."""
    epochs = list_epochs(RunFiles(elastic))
    lines = list_ledger(epochs, steps)
    assert [line.step for line in lines] == list(range(steps))
    for line in lines:
        assert sorted(slot for slots in line.slots.values() for slot in slots) == list(
            range(epochs[0].num_slots)
        )
    return epochs


def train_on_one_device(arguments, folder):
    """Return step -> loss of the same run by itself."""
    words = [*arguments, "--run-dir", str(folder), "--cpu-devices", "1"]
    for option in ("--elastic", "--across", "--accumulate", "--mesh"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    subprocess.run([sys.executable, "-m", "shardtrain", *words], check=True, stdout=subprocess.DEVNULL)
    return read_losses(folder)


def read_losses(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    steps = Counter(step for step, _ in losses)
    assert max(steps.values()) == 1, f"steps {[each for each, n in steps.items() if n > 1]} twice"
    return dict(losses)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--islands", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="train RUN ...")
    asked = parser.parse_args()
    folder = asked.run_folder.absolute().with_name(f"{asked.run_folder.name}-slurm")
    arguments = (*asked.arguments, "--run-dir", str(asked.run_folder.absolute()))
    job = Job(
        arguments=arguments,
        islands=asked.islands,
        processes_per_island=asked.processes,
        logs=folder / "logs",
        interface="lo",
    )
    array = Array(write_array_script(job, Slurm(), os.environ), folder, job.logs)
    try:
        array.run_chaos(asked.seed, 60 * asked.minutes, most_pause_seconds=20.0)
    finally:
        array.kill()
    codes = [task.code for task in array.tasks]
    assert codes == [0] * asked.islands, f"tasks ended with {codes}; see {folder}"
    losses = read_losses(asked.run_folder)
    epochs = check_ledger(asked.run_folder / "elastic", max(losses))
    expected = train_on_one_device(asked.arguments, folder / "alone")
    assert losses.keys() == expected.keys()
    off = max(abs(loss / expected[step] - 1) for step, loss in losses.items())
    # rounding of sums in another order grows over some thousand steps
    assert off <= 5e-5, off
    repeated, starts = sum(each.repeats for each in epochs), sum(task.starts for task in array.tasks)
    sys.stdout.write(
        f"{max(losses)} steps, each once, in {len(epochs)} epochs; {repeated} repeated; {starts} starts:"
        f" {dict(array.counts)}; losses within {off:.1e} of one device\n"
    )


if __name__ == "__main__":
    main()
