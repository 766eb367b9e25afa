"""Hosts that are network namespaces, an island each over real TCP; then one host's link is cut."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from shardtrain.errors.exit_codes import TEMPORARY_FAILURE
from shardtrain.report.sinks.json_lines import read_jsonl

GONE_SECONDS = 300  # ends what would hang for ever


@pytest.fixture
def hosts(folder):
    spec = importlib.util.spec_from_file_location("network", Path(__file__).with_name("network.py"))
    assert spec is not None
    assert spec.loader is not None
    network = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(network)
    with network.Hosts(2, folder) as hosts:
        if hosts.forbidden:
            pytest.skip(f"this kernel lets nobody make network namespaces here: {hosts.forbidden}")
        yield hosts


def of_this_test(folder):
    """Processes of the run, by what their folder is."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            # a checkout may be in a folder of that name, and this process runs in it
            is_of_run = any(re.match(rb"shardtrain(\.|$)", word) for word in words) or b"hydra" in words[0]
            if os.readlink(path / "cwd") == str(folder) and is_of_run:
                found.append(b" ".join(words).decode())
        except OSError:
            pass
    return found


@pytest.mark.full
def test_a_host_that_is_cut_off_is_named_on_both_sides(hosts, folder, started, until):
    words = [sys.executable, "-m", "shardtrain", "launch", "--hosts", ",".join(hosts.names), "--logs", "logs"]
    words += ["--", "train", "tiny.py", "--cpu-devices", "1", "--watch.silence-seconds", "8"]
    environment = {
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(hosts.remote),
        # they share one machine's memory, which hosts do not
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "eth0",
    }
    process = started(hosts.command(0, words), **environment)
    metrics = Path("run/metrics.jsonl")
    until(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 3, process)
    assert len(of_this_test(folder)) > 2
    hosts.turn(1, "down")
    assert process.wait(GONE_SECONDS) == TEMPORARY_FAILURE
    until(lambda: not of_this_test(folder), seconds=GONE_SECONDS)
    assert [line["step"] for line in read_jsonl(metrics)][:3] == [1, 2, 3]
    for mine, other in ((0, 1), (1, 0)):
        text = (
            rf"shardtrain watchdog: island {other} \(host n{other}\) has sent no heartbeat for \d+ s: it is"
            rf" stopped, host n{other} is down, or the network between it and host n{mine} is cut\n"
        )
        assert re.search(text, Path(f"logs/rank-{mine}.log").read_text())
    assert "=== the run hung: island 0 on n0 noticed it" in Path("err").read_text()
