"""Two kinds of islands in one heterogeneous job of a real Slurm: ended by its time limit, requeued, resumed.

uv run python benchmarks/slurm_hetjob.py [--folder runs/slurm_hetjob] [--steps 700] [--minutes 12]

Starts a Slurm of four virtual nodes on this machine (as root; Debian: apt-get install slurm-wlm munge), with
a munge of its own, submits `launch slurm --cluster FILE` and waits for its end. Two nodes have one GPU, two
have two: files stand for them. No figure of speed; what happened is in docs/benchmarks/slurm_hetjob.md. Exit
code 0 if the run was requeued, resumed and ended with its last step.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
PORT = 26810
NODES = {"old0": (1, 2), "old1": (1, 2), "new0": (2, 4), "new1": (2, 4)}
"""Virtual node -> its GPUs and cores, both pretended."""

CONFIGURATION = """
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=10
GresTypes=gpu
{nodes}
PartitionName=old Nodes=old[0-1] Default=YES MaxTime=INFINITE
PartitionName=new Nodes=new[0-1] MaxTime=INFINITE
"""

CLUSTER = """# Islands 0 and 1 have a process each on a node; island 2 has four on two nodes.
[[islands]]
kind = "old"
count = 2
devices = 1
launch.slurm = { partition = "old", mem = 1000 }
strategy = { accumulate = 2 }

[[islands]]
kind = "new"
nodes = 2
processes = 4
devices = 4
launch.slurm = { partition = "new", mem = 1000 }
"""

RUN = '''"""A tiny language model, whose steps are slowed so that the run is longer than its time limit."""

import time

from shardtrain import Hook, Optimizer, Run, Text
from shardtrain.models.decoder import DecoderConfig


def run() -> Run:
    data = Text(seq=16)
    return Run(
        model=DecoderConfig(vocab=data.vocab, seq=16, embed=16, num_layers=1, num_heads=2, mlp=32),
        data=data,
        optimizer=Optimizer(learning_rate=1e-3),
        batch=16,
        hooks=[Hook(on_step=lambda step: time.sleep(0.15))],
    )
'''


def missing() -> str | None:
    """Return why there can be no Slurm here; None if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found: install Slurm (Debian: apt-get install slurm-wlm munge)"
    return "slurmd starts jobs of users as root alone: run this as root" if os.geteuid() else None


def write_configuration(folder: Path) -> Path:
    """Write the files of a cluster of virtual nodes; return the path of slurm.conf."""
    for name in ("state", "spool", "munge", "gpus"):
        (folder / name).mkdir(parents=True)
    # munge looks at the rights of its folder
    (folder / "munge").chmod(0o755)
    (folder / "munge/key").write_bytes(os.urandom(128))
    (folder / "munge/key").chmod(0o600)
    host, lines, gpus = socket.gethostname(), [], []
    for number, (name, (num_gpus, cores)) in enumerate(NODES.items()):
        lines.append(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={PORT + 1 + number} CPUs={cores}"
            f" RealMemory=4000 Gres=gpu:{num_gpus}"
        )
        files = [folder / f"gpus/{name}-{gpu}" for gpu in range(num_gpus)]
        for file in files:
            file.touch()
        gpus += [f"NodeName={name} Name=gpu File={file}" for file in files]
    (folder / "gres.conf").write_text("\n".join(gpus) + "\n")
    path = folder / "slurm.conf"
    path.write_text(CONFIGURATION.format(folder=folder, host=host, port=PORT, nodes="\n".join(lines)))
    return path


@contextmanager
def virtual_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run a Slurm; give the environment in which its commands find it."""
    configuration = write_configuration(folder)
    environ = {**os.environ, "SLURM_CONF": str(configuration)}
    munge = ["--key-file", "key", "--socket", "socket", "--pid-file", "pid", "--log-file", "log"]
    munge = [str(folder / "munge" / word) if number % 2 else word for number, word in enumerate(munge)]
    seed = f"--seed-file={folder}/munge/seed"
    commands = [["munged", "--foreground", *munge, seed], ["slurmctld", "-D"]]
    commands += [["slurmd", "-D", "-N", name] for name in NODES]
    started: list[subprocess.Popen] = []
    try:
        with (folder / "daemons.log").open("w") as log:
            for command in commands:
                started.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
                time.sleep(1.5 if command[0] != "slurmd" else 0.2)
        wait_for("idle nodes", lambda: output(environ, "sinfo", "-h", "-o", "%D %T").count("idle") > 0, 60)
        yield environ
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(30)


def output(environ: dict[str, str], *words: str) -> str:
    """Return what a command prints."""
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout


def wait_for(what: str, found, seconds: float) -> None:
    """Wait until something is there.

    Raises:
      TimeoutError: it did not come.
    """
    until = time.monotonic() + seconds
    while not found():
        if time.monotonic() > until:
            raise TimeoutError(f"no {what} after {seconds:.0f} s")
        time.sleep(1)


def main() -> int:
    """Submit the job, wait for it, and report what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/slurm_hetjob"))
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--minutes", type=float, default=12)
    options = parser.parse_args()
    if problem := missing():
        print(f"slurm_hetjob: {problem}", file=sys.stderr)
        return 2
    folder = options.folder.resolve()
    if folder.exists():
        print(f"slurm_hetjob: {folder} is there already; give another --folder", file=sys.stderr)
        return 2
    folder.mkdir(parents=True)
    (folder / "cluster.toml").write_text(CLUSTER)
    (folder / "run.py").write_text(RUN)
    launch = [
        *(sys.executable, "-m", "shardtrain", "launch", "slurm", "--cluster", "cluster.toml"),
        *("--cpus-per-island", "1,1,4", "--time", "00:04:00", "--signal-seconds", "60", "--logs", "logs"),
        *("--", "train", "run.py", "--cpu-devices", "1", "--mesh", "data=-1", "--run-dir", "run"),
        *("--steps", str(options.steps), "--log-every", "20"),
    ]
    with virtual_cluster(folder / "slurm") as environ:
        environ["PYTHONPATH"] = str(ROOT)
        print(output(environ, "sinfo", "-N", "-o", "%N %P %c %G"))
        subprocess.run(launch, env=environ, cwd=folder, check=True)
        try:
            wait_for(
                "end of the job", lambda: not output(environ, "squeue", "-h").strip(), options.minutes * 60
            )
        except TimeoutError:
            # else its ranks would go on after the daemons have ended
            output(environ, "scancel", "1")
            wait_for("end of its ranks", lambda: not output(environ, "squeue", "-h").strip(), 60)
            raise
        job = output(environ, "scontrol", "show", "job")
    shown = [
        line
        for line in job.splitlines()
        if any(w in line for w in ("HetJob", "JobState", "Restarts", "NodeList=n", "NodeList=o"))
    ]
    print("\n".join(shown))
    print((folder / "logs/shardtrain-1.log").read_text())
    return report(folder, options.steps)


def report(folder: Path, steps: int) -> int:
    """Print what the run left; return 0 if it was started again and went on to its end."""
    starts = len((folder / "run/environment.jsonl").read_text().splitlines())
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    found = [line["step"] for line in lines if "train/loss" in line or "loss" in line]
    if not found:
        print(f"{starts} starts, and no step: the signal before the time limit came too early")
        return 1
    twice = len(found) - len(set(found))
    print(f"{starts} starts; steps with metrics: {found[0]} to {found[-1]}, {twice} twice")
    return 0 if starts > 1 and found[-1] == steps and len(found) == len(set(found)) else 1


if __name__ == "__main__":
    sys.exit(main())
