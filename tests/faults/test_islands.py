"""Two islands: killed as a whole, asked to stop, given other things than each other, without their data."""

import contextlib
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from repeatable_metrics import metrics_of

from shardtrain.checkpoints.manifest_entries import Leaf
from shardtrain.checkpoints.reader import find_readers

TRAIN = ["train", "tiny.py", "--cpu-devices", "1"]
# each island has an optimizer of its own, and saves a part of each step
DELTAS = ["--combine", "adasum", "--combine-on", "deltas", "--local-steps", "2"]
DELTAS += ["--optimizer.learning-rate.name", "constant", "--checkpoints.keep", "1", "--steps"]
SEED, GONE_SECONDS = 7, 300


def below(pid):
    """A process and all that it started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def ranks(pid):
    found = [each for each in below(pid) if b"python" in Path(f"/proc/{each}/cmdline").read_bytes()[:200]]
    return [each for each in found if b"mpiexec" not in Path(f"/proc/{each}/cmdline").read_bytes()]


def kill(process):
    """Kill a run as a whole; its ranks are children of another process, and are gone when this returns."""
    table = [line.split() for line in Path("out").read_text().splitlines()]
    told = [int(row[3]) for row in table if len(row) > 3 and row[0] == row[1] and row[3].isdigit()]
    assert len(told) == 2
    for pid in [*told, *below(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + GONE_SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in told):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def newest(folder="run"):
    """The newest step of which all parts are there."""
    return max((reader.step for reader in find_readers(Path(folder, "checkpoints"))), default=0)


def pieces(folder):
    """The arrays of the newest step, of each island."""
    reader = find_readers(Path(folder, "checkpoints"))[-1]
    assert reader.problems() == []
    assert reader.num_parts == 2
    return reader.step, {
        (path, piece.leaf.origin.replica): reader.start(
            path, Leaf(shape=piece.leaf.shape, dtype=piece.leaf.dtype, origin=piece.leaf.origin)
        ).result()
        for path, found in reader.stored_arrays.items()
        for piece in found
    }


@pytest.mark.full
def test_killed_as_a_whole_and_asked_to_stop_it_is_as_if_it_never_was(
    folder, mpirun, started, until, pytestconfig
):
    moments = random.Random(SEED)
    step = 0
    for _ in range(2 if pytestconfig.getoption("--full") else 1):
        process = started([*mpirun(2), *TRAIN, *DELTAS, "1000000"])
        until(lambda least=step + 4: newest() >= least, process)
        time.sleep(0.3 * moments.random())
        kill(process)
        if step:
            assert f"resumed from step {step} in " in Path("out").read_text()
        step = newest()
        assert step >= 4

    process = started([*mpirun(2), *TRAIN, *DELTAS, "1000000"])
    until(lambda: newest() >= step + 2, process)
    time.sleep(0.3 * moments.random())
    os.kill(ranks(process.pid)[1], signal.SIGTERM)
    assert process.wait(GONE_SECONDS) == 128 + signal.SIGTERM
    said = Path("out").read_text()
    assert f"resumed from step {step} in " in said
    stopped = re.search(r"stopped by SIGTERM after step (\d+), which is saved", said)
    assert stopped, said
    assert int(stopped[1]) == newest()

    last = str(newest() + 4)
    assert started([*mpirun(2), *TRAIN, *DELTAS, last]).wait(900) == 0, Path("err").read_text()
    assert f"resumed from step {stopped[1]} in " in Path("out").read_text()
    whole = started([*mpirun(2), *TRAIN, *DELTAS, last, "--run-dir", "whole"])
    assert whole.wait(900) == 0, Path("err").read_text()
    (reached, killed), (_, expected) = pieces("run"), pieces("whole")
    assert reached == int(last)
    assert killed.keys() == expected.keys()
    assert {replica for _, replica in expected} == {None, 0, 1}
    for key, array in expected.items():
        np.testing.assert_array_equal(killed[key], array, err_msg=str(key))
    assert metrics_of(Path("run")) == metrics_of(Path("whole"))
    assert [line["step"] for line in metrics_of(Path("run"))] == list(range(1, int(last) + 1))


def test_a_rank_with_another_version_seed_option_and_model_is_named(folder, mpirun, started):
    other = folder / "other"
    for name in ("optax", "flax"):
        (other / f"{name}-0.0.1.dist-info").mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1\n"
        (other / f"{name}-0.0.1.dist-info/METADATA").write_text(text)
    (folder / "theirs.py").write_text(
        (folder / "tiny.py").read_text().replace("TinyConfig()", "TinyConfig(embed=24)")
    )
    # a Python of its own: one that has imported everything would not see the other versions
    mpiexec, program = mpirun(1)[0], [sys.executable, "-m", "shardtrain"]
    paths = os.pathsep.join([str(other), os.environ["PYTHONPATH"]])
    first = ["-n", "1", *program, *TRAIN]
    second = ["-n", "1", "-env", "PYTHONPATH", paths, *program, "train", "theirs.py"]
    second += ["--cpu-devices", "1", "--seed", "5", "--optimizer.learning-rate.peak", "0.5"]
    process = started([mpiexec, *first, ":", *second])
    assert process.wait(900) == 2
    err = Path("err").read_text()
    assert "islands do not agree, so nothing was started:\n" in err
    on = r"on island 0 \(host \S+\); {} on island 1 \(host \S+\)\n"
    for fact in (
        r"optax: \S+ " + on.format(r"0\.0\.1"),
        r"flax: \S+ " + on.format(r"0\.0\.1"),
        "seed: 0 " + on.format("5"),
        r"optimizer.learning_rate.peak: \S+ " + on.format(r"0\.5"),
        "model.embed: 8 " + on.format("24"),
    ):
        assert re.search(rf"\n  {fact}", err), (fact, err)
    assert "-> install the same versions on every host, from one lock file\n" in err
    assert "-> start every island with the same run file and the same options\n" in err
    assert not Path("run/checkpoints").exists()


@pytest.mark.full
def test_data_that_is_cut_off_ends_all_ranks(folder, mpirun, started, until):
    process = started([*mpirun(2), *TRAIN])
    until(lambda: newest() >= 2, process)
    (file,) = Path("run").glob("text-*.npy")
    with file.open("r+b") as tokens:
        tokens.truncate(1000)
    assert process.wait(GONE_SECONDS) == 1
    assert f"{folder}/{file} was cut off while it was read" in Path("err").read_text()
