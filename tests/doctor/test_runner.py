"""Checks that fail, hang or cannot be evaluated become rows; a rank that does not come is named."""

import dataclasses
import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from shardtrain.cli.doctor import NAMES, json_text
from shardtrain.doctor.check import RankContext, Row, SingleProcess
from shardtrain.doctor.runner import CHECKS, Check, doctor_table, run_checks
from shardtrain.islands.rank_environment import find_rank_environment

ALONE = RankContext(
    environment=find_rank_environment({}), hosts=("a",), control=SingleProcess("a"), comm=None, environ={},
    run_dir=Path("runs"), quick=True, given_cores=(),
)  # fmt: skip


def check(collect, evaluate=lambda told: [Row("facts", str(dict(told[0])), check="x")], limit=200.0):
    return Check(collect=collect, evaluate=evaluate, limit_seconds=limit, if_it_hangs="wake it up")


def examined(**checks):
    return run_checks(checks, [ALONE] * (1 + len(checks)))


def test_the_help_names_every_check():
    assert tuple(CHECKS) == NAMES


def test_facts_are_what_json_has_of_them_and_every_check_is_timed():
    found = examined(one=check(lambda here: {"pair": (1, 2)}), two=check(lambda here: {}))
    assert [row.finding for row in found.rows] == ["{'pair': [1, 2]}", "{}"]
    assert found.seconds.keys() == {"one", "two"}
    assert (found.status, found.hung, found.present) == ("ok", False, (0,))
    assert found.facts["one"] == {"a": {"pair": [1, 2]}}


def test_a_check_that_fails_is_a_row_and_the_others_are_made():
    def fail(here):
        raise OSError("no such device")

    found = examined(bad=check(fail), good=check(lambda here: {}))
    assert [(row.check, row.status) for row in found.rows] == [("bad", "warning"), ("x", "ok")]
    assert found.rows[0].finding == "OSError: no such device"
    assert not found.hung


def test_a_check_that_hangs_is_wrong_and_says_what_to_do():
    found = examined(bad=check(lambda here: time.sleep(30) or {}, limit=0.1), good=check(lambda here: {}))
    assert (found.status, found.hung) == ("wrong", True)
    assert (found.rows[0].finding, found.rows[0].fix) == ("it did not end within 0 s", "wake it up")
    assert found.rows[1].check == "x"


def test_facts_that_are_not_understood_are_a_row():
    found = examined(bad=check(lambda here: {}, evaluate=lambda told: told[0]["missing"]))
    assert found.rows[0].finding == "the facts were not understood: KeyError: 'missing'"
    assert found.status == "warning"


def test_the_table_and_the_data_say_the_same():
    rows = [
        Row("own", "[bold]a", check="names"),
        Row("connect", "no", "wrong", "open them", check="ports"),
    ]
    found = dataclasses.replace(examined(), rows=tuple(rows), seconds={"names": 1.0, "ports": 0.25})
    console = Console(file=io.StringIO(), width=140)
    console.print(doctor_table(found.rows, found.seconds))
    text = str(console.file.getvalue())  # type: ignore[attr-defined]
    lines = [line.split() for line in text.splitlines() if line.strip()]
    assert lines[0] == ["check", "finding", "status", "what", "to", "do"]
    assert ["names:", "own", "[bold]a", "ok"] in lines
    assert ["ports:", "connect", "no", "wrong", "open", "them"] in lines
    assert lines[-2:] == [["1", "wrong,", "1", "ok"], ["took", "1.2", "s:", "names", "1.0,", "ports", "0.2"]]
    data = json.loads(json_text(found, ALONE))
    assert data["verdict"] == "wrong"
    assert [row["do"] for row in data["rows"]] == ["", "open them"]
    assert data["ranks"] == [{"name": "a", "host": "a"}]


PROGRAM = """
import dataclasses, os, sys, time
from pathlib import Path
from shardtrain.doctor.check import RankContext, SingleProcess
from shardtrain.doctor.runner import Check, run_checks
from shardtrain.doctor.start import connect_ranks
from shardtrain.islands.rank_environment import find_rank_environment
environment = find_rank_environment(os.environ)
alone = RankContext(environment=environment, hosts=(environment.host,), control=SingleProcess("me"),
                    environ=os.environ, run_dir=Path("runs"), quick=False, given_cores=())
heres = connect_ranks(alone, 3, 30.0)

def collect(here):
    if here.rank == 1 and here.quick:
        raise ValueError("only here")
    return {"all": here.control.all_gather("x", here.rank * 10)}

def late(here):
    return {}

def evaluate(told):
    assert all(one == {"all": [0, 10, 20]} for one in told), told
    return []

def never(told):
    return []

one = Check(collect=collect, evaluate=evaluate, limit_seconds=200.0, if_it_hangs="")
two = dataclasses.replace(one, collect=late, evaluate=never, limit_seconds=0.5)
examined = run_checks({"one": one}, heres[:2])
assert examined.rows == () and examined.present == (0, 1, 2), examined
if environment.rank == 1:
    found = None
else:
    found = run_checks({"two": two, "three": one}, [heres[0], heres[2], heres[2]], slack_seconds=9.5)
    assert found.hung and found.present == (0, 2), found
    print(found.rows[-1].finding)
"""


@pytest.mark.full
def test_a_rank_that_does_not_come_is_named_by_the_others(mpiexec):
    outputs = mpiexec(3, PROGRAM)
    for rank in (0, 2):
        assert "island 1 (host " in outputs[rank]
        assert "did not reach 'two' within 10 s; not checked: three" in outputs[rank]
