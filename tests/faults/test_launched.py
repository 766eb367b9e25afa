"""One launch of two islands on this machine: who can connect, a library that keeps Python's lock, its end."""

import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from live_processes import parent

from shardtrain.report.sinks.json_lines import read_jsonl

LISTENS = "0A"
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")

LOCKED = """
import ctypes, time


def hold():
    metrics = HERE / "run/metrics.jsonl"
    while not (metrics.is_file() and metrics.read_text().count("\\n") >= 3):
        time.sleep(0.05)
    (HERE / "hurt").touch()
    ctypes.PyDLL(None).sleep(7)
    (HERE / "let go").touch()


if RANK == 1:
    threading.Thread(target=hold, daemon=True).start()
"""


def listening(pid):
    """The addresses on which a process listens, of sockets that it made itself."""
    texts = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for text in texts for line in text.splitlines()[1:]]
    # mpiexec's own port is inherited by all that it starts
    own = sockets(pid) - sockets(parent(pid))
    return [row[1].split(":")[0] for row in rows if row[3] == LISTENS and row[9] in own]


def sockets(pid):
    names = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            names.append(str(link.readlink()))
    return {match[1] for name in names if (match := re.fullmatch(r"socket:\[(\d+)\]", name))}


@pytest.mark.full
def test_two_islands_of_two_processes(folder, started, until, warm_shardtrain):
    (folder / "tiny.py").write_text((folder / "tiny.py").read_text() + LOCKED)
    words = [*warm_shardtrain, "launch", "--islands", "2", "--processes-per-island", "2"]
    words += ["--logs", "logs", "--", "train", "tiny.py", "--cpu-devices", "1", "--mesh", "data=-1"]
    process = started([*words, "--watch.silence-seconds", "3"])
    until(lambda: Path("let go").exists(), process)

    # the rank that kept the lock for longer than the others may be silent is no lost one
    steps = len(read_jsonl("run/metrics.jsonl"))
    until(lambda: len(read_jsonl("run/metrics.jsonl")) > steps + 2, process)

    # each rank listens, for jax, gloo and MPI, and none to another machine
    table = [line.split() for line in Path("out").read_text().splitlines()]
    ranks = [int(row[3]) for row in table if len(row) > 3 and re.fullmatch(r"[01]\.[01]", row[1])]
    assert len(ranks) == 4
    addresses = [listening(pid) for pid in ranks]
    assert all(addresses)
    assert {each for found in addresses for each in found} <= set(LOOPBACK)

    # memory with a name would stay behind if the ranks were killed now
    for pid in ranks:
        mapped = re.findall(r"/dev/shm/mpich_shm_.*", Path(f"/proc/{pid}/maps").read_text())
        assert mapped
        assert all(name.endswith(" (deleted)") for name in mapped)

    process.send_signal(signal.SIGTERM)
    assert process.wait(900) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM: islands 0.0, 0.1, 1.0, 1.1\n" in Path("err").read_text()
