"""The sweep: sizes, what is measured on real ranks and in which order, its table, and what is refused."""

import json
import re

import pytest

from shardtrain import cli
from shardtrain.doctor.sweep import evaluate, num_rounds
from shardtrain.doctor.sweep_sizes import LARGEST_BYTES, sizes
from shardtrain.doctor.sweep_table import sweep_text

PROGRAM = """
import sys
from shardtrain import cli
raise SystemExit(cli.main(["doctor", "--sweep", *sys.argv[1:]]))
"""
OPERATIONS = ["broadcast", "reduce", "all-reduce", "all-gather", "exchange", "send/receive"]

WRONG = """
from shardtrain.doctor.sweep import measure
from shardtrain.doctor.sweep_sides import Sides
from shardtrain.islands.bridge import world
comm = world()
# wrong on one rank, and by one side
right = Sides(8, lambda: True, lambda: comm.rank != 1, lambda found: found)
try:
    measure(comm, "all-reduce", 8, right)
except RuntimeError as error:
    print(error)
"""


def measurement(operation="all-reduce", num_bytes=4096, mpi=1e-5, bridge: float | None = 4e-5):
    ratio = None if bridge is None else bridge / mpi
    return {
        "operation": operation, "asked_bytes": num_bytes, "bytes": num_bytes, "rounds": 30,
        "mpi_seconds": mpi, "bridge_seconds": bridge, "ratio": ratio,
    }  # fmt: skip


@pytest.mark.full
def test_every_operation_is_measured_at_every_size_on_three_ranks(mpiexec):
    data, *others = mpiexec(3, PROGRAM, "--json", "--largest-bytes", "5000")
    assert others == ["", ""]
    data = json.loads(data)
    assert data["verdict"] == "ok"
    found = [one for facts in data["facts"]["sweep"].values() for one in facts["measurements"]]
    assert [(one["operation"], one["asked_bytes"]) for one in found] == [
        (operation, num_bytes) for operation in OPERATIONS for num_bytes in (1024, 4096, 5000)
    ]
    for one in found:
        # three ranks with equal parts of float32 in an all-gather: at most 8 bytes are left out
        left_out = one["asked_bytes"] - one["bytes"]
        assert 0 <= left_out <= 8 if one["operation"] == "all-gather" else left_out == 0
        assert one["mpi_seconds"] > 0
        assert one["rounds"] >= 7
        assert (one["bridge_seconds"] is None) == (one["ratio"] is None) == (one["operation"] == "reduce")
    assert [row["what"] for row in data["rows"]] == OPERATIONS


def test_a_wrong_result_on_one_rank_is_known_to_all(mpiexec):
    assert mpiexec(2, WRONG) == ["all-reduce of 8 bytes: wrong values by bridge\n"] * 2


def test_sizes_grow_by_four_up_to_the_largest():
    assert sizes(1024) == [1024]
    assert sizes(LARGEST_BYTES) == [1024 * 4**power for power in range(9)]


def test_rounds_fit_into_the_time_within_limits():
    assert [num_rounds(seconds) for seconds in (1e-6, 0.05, 10.0)] == [30, 10, 7]


def test_the_table_has_every_measurement_and_says_what_the_bridge_does_not_have():
    text = sweep_text([measurement("reduce", 2**20, 1e-3, None), measurement()], 2, 1)
    lines = text.splitlines()
    assert lines[0] == "2 ranks on 1 host"
    assert lines[1].split("  ")[1] == "operation"
    assert lines[3].split() == ["reduce", "1.0", "MiB", "1000.0", "1.05", "-", "-", "-", "30"]
    assert lines[4].split() == ["all-reduce", "4.0", "KiB", "10.0", "0.41", "40.0", "0.102", "4.00", "30"]
    assert "reduce: the bridge has none, because every island needs the sum" in text


def test_a_row_of_each_operation_has_the_smallest_and_the_largest_array(told, by_what):
    measurements = [measurement(), measurement(num_bytes=2**20, mpi=1e-3, bridge=2e-3)]
    row = by_what(evaluate(told([{"measurements": measurements}, {"measurements": []}], "aa")))["all-reduce"]
    assert row.finding == (
        "4.0 KiB by MPI in 10.0 us (409.6 MB/s), by the bridge in 40.0 us (4.00 times);"
        " 1.0 MiB by MPI in 1.0 ms (1.0 GB/s), by the bridge in 2.0 ms (2.00 times)"
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--sweep"], "this is a single process; start it on 2 or more: shardtrain launch --islands 2"),
        (["--sweep", "--only", "links"], "--sweep is given with --only links; it runs no checks"),
        (["--sweep", "--quick"], "--sweep is given with --quick; it runs no checks"),
        (["--sweep", "--largest-bytes", "1000"], "--largest-bytes is 1000; use 1024 to 1073741824"),
        (["--sweep", "--largest-bytes", str(2**31)], "--largest-bytes is 2147483648; use 1024 to 1073741824"),
        (["--largest-bytes", "4096"], "--largest-bytes is 4096 without --sweep; add --sweep"),
    ],
)
def test_what_cannot_be_swept_is_refused(words, text, capsys):
    try:
        code = cli.main(["doctor", *words])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert text in re.sub(r"[\s│]+", " ", capsys.readouterr().err)
