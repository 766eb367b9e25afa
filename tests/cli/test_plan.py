"""`shardtrain plan` and `calibrate`: from a machine to a strategy file that `train` and `inspect` take."""

import json
from pathlib import Path

import pytest

from shardtrain import cli
from shardtrain.islands.cluster import read_cluster
from shardtrain.plan.advice.bottleneck import PARTS
from shardtrain.trainer.strategy import read_strategy
from tests.cli.test_inspect import TINY, TINY_RUN

GPT = str(Path(__file__).parents[2] / "examples/gpt_text.py")
CLUSTER = """
link_gb_per_second = 100.0
[[islands]]
kind = "big"
devices = 2
device = { teraflops = 0.06, memory_gb_per_second = 60, memory_gb = 8, price_per_hour = 2.0 }
[[islands]]
kind = "small"
devices = 1
device = { teraflops = 0.02, memory_gb_per_second = 20, memory_gb = 8, price_per_hour = 1.0 }
"""


OLD = """
[[islands]]
kind = "old"
count = 2
devices = 1
device = { teraflops = 0.0001, memory_gb_per_second = 0.1, memory_gb = 8, price_per_hour = 1.0 }
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "tiny_plan.py"
    path.write_text(TINY_RUN)
    return str(path)


@pytest.fixture
def planned(capsys, monkeypatch, tiny):
    monkeypatch.setenv("COLUMNS", "1000")

    def run(*words, code=0, model=(tiny,)):
        assert cli.main(["plan", *model, *words]) == code
        printed = capsys.readouterr()
        return printed.out + printed.err

    return run


def test_a_cluster_becomes_a_strategy_that_a_run_takes(planned, tiny, tmp_path, capsys):
    cluster, strategy = tmp_path / "cluster.toml", tmp_path / "strategy.toml"
    # the islands of the last kind are too slow to help
    cluster.write_text(CLUSTER + OLD)
    more = ["--remat", "none", "--frontier", str(tmp_path / "frontier.png")]
    text = planned("--cluster", str(cluster), "--output", str(strategy), "--explain", "--most", "2", *more)
    assert "big: 2 devices" in text
    assert "small: 1 device" in text
    assert "step as replicas: " in text
    assert "tokens/s; rows of islands" in text
    assert "for 1e6 examples" in text
    assert "for 1e9 tokens" in text
    assert "tokens for a price of 1" in text
    assert "left out: 2 x old\n" in text
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == ["frontier_big.png", "frontier_small.png"]
    assert "the schedule simulated with these times" in text
    found = read_strategy(strategy)
    assert isinstance(found.across.shares, tuple)
    assert sum(found.across.shares) == 16
    assert found.across.shares[0] > found.across.shares[1]
    assert set(found.islands) == {"0", "1"}
    assert list(found.predicted) == list(PARTS)
    assert found.predicted["compute_seconds"] > 0 < found.predicted["islands_seconds"]
    assert found.select_island(1, "cpu").layout.mesh == {"data": 1}
    words = ["--strategy", str(strategy), "--island", "0"]
    assert cli.main(["inspect", tiny, *words]) == 0
    assert "2 devices" in capsys.readouterr().out
    # the islands that are used, as they are launched
    used = tmp_path / "strategy_cluster.toml"
    assert f"cluster: {used}, with islands in this order: big, small\n" in text
    assert [each.kind for each in read_cluster(used).islands] == ["big", "small"]
    run = ["train", tiny, "--strategy", str(strategy)]
    assert cli.main(["launch", "--cluster", str(used), "--dry-run", "--", *run]) == 0
    assert "-n 2" in capsys.readouterr().out
    assert cli.main(["inspect", tiny, "--cluster", str(used), *words]) == 0
    # a strategy of one's own is traced on all islands, also those that the plan leaves out
    (mine := tmp_path / "mine.toml").write_text("[across]\nshares = [1, 1, 1, 1]\n[layout.mesh]\ndata = -1\n")
    trace = ["--strategy", str(mine), "--trace", str(tmp_path / "step.json")]
    assert "old: nothing overlaps: " in planned("--cluster", str(cluster), *trace, *more[:2])
    # the plan of these islands is the same, and only its own files are replaced
    again = planned("--cluster", str(used), "--output", str(strategy), *more[:2], code=0)
    assert "left out" not in again
    cluster.rename(tmp_path / "mine_cluster.toml")
    refused = planned("--cluster", str(used), "--output", str(tmp_path / "mine.toml"), code=2)
    assert "mine_cluster.toml would be written, and that exists and is not from shardtrain plan" in refused
    (tmp_path / "folder_cluster.toml").mkdir()
    refused = planned("--cluster", str(used), "--output", str(tmp_path / "folder.toml"), code=2)
    assert "folder_cluster.toml would be written, and that exists and is not from shardtrain plan" in refused


def test_what_does_not_fit_is_said(planned, tmp_path):
    cluster, strategy = tmp_path / "cluster.toml", tmp_path / "strategy.toml"
    cluster.write_text(
        '[[islands]]\nkind = "a"\ndevices = 2\ndevice = { teraflops = 1.0, memory_gb = 0.0001 }\n'
    )
    text = planned("--cluster", str(cluster), "--output", str(strategy), "--remat", "none", code=1)
    assert "nothing fits: the smallest needs" in text
    assert "too large" in text
    assert f"strategy: {strategy} is not written, as nothing fits\n" in text
    assert not strategy.exists()


SLOW_LINK = """
link_gb_per_second = 0.01
[[islands]]
kind = "big"
devices = 1
device = { teraflops = 0.06, memory_gb_per_second = 60, memory_gb = 0.0024, price_per_hour = 0.0 }
[[islands]]
kind = "small"
devices = 1
device = { teraflops = 0.05, memory_gb_per_second = 50, memory_gb = 0.0024, price_per_hour = 1.0 }
"""


def test_a_pipeline_over_islands_is_written(planned, tmp_path):
    cluster, strategy = tmp_path / "cluster.toml", tmp_path / "strategy.toml"
    cluster.write_text(SLOW_LINK)
    words = ("--model.num-layers", "4", "--model.mlp", "512", "--remat", "none", "--most", "1")
    text = planned("--cluster", str(cluster), "--output", str(strategy), *words)
    rows = [line.split("  ") for line in text.splitlines()]
    rows = {cells[1]: [each.strip() for each in cells[2:] if each.strip()] for cells in rows if cells[1:]}
    # the first island has a price of 0
    assert rows["big"][3] == "free"
    assert rows["+ small"][0] == "1 pipeline"
    assert "step as replicas: " in text
    found = read_strategy(strategy)
    assert (found.across.axis, found.pipeline.stages, found.islands) == ("pipeline", "2,2", {})
    islands = read_cluster(tmp_path / "strategy_cluster.toml").islands
    assert rows["1 pipeline"][:2] == [" > ".join(each.kind for each in islands), found.pipeline.stages]


@pytest.mark.parametrize(
    ("words", "own", "message"),
    [
        (("--accumulate-dtype", "bfloat16"), "", "accumulate_dtype is 'bfloat16', and a pipeline adds up"),
        (
            ("--fixed", "tensor=1,fsdp=2"),
            "",
            "--fixed has fsdp=2, and devices of a stage split only examples",
        ),
        (
            ("--synchronisation", "diloco"),
            "",
            "only a mean of gradients in every step, and waves, are planned",
        ),
        ((), 'strategy = { compute_dtype = "float32" }', "kind small has a strategy of its own, and stages"),
    ],
)
def test_a_pipeline_over_islands_is_not_planned_where_a_run_refuses_it(
    planned, tmp_path, words, own, message
):
    cluster, strategy = tmp_path / "cluster.toml", tmp_path / "strategy.toml"
    cluster.write_text(CLUSTER.replace("devices = 1", "devices = 2") + own)
    more = ("--remat", "none", "--most", "1")
    text = planned("--cluster", str(cluster), "--output", str(strategy), *words, *more)
    assert f"a stage on each island: {message}" in text
    assert read_strategy(strategy).across.axis == "data"


@pytest.mark.full
def test_a_known_device_needs_no_file(planned):
    words = ("--devices", "4", "--device", "NVIDIA L4", "--fixed", "tensor=2")
    text = planned(*words, "--most", "3", "--advise", model=(GPT, *TINY))
    # each recomputation on the mesh of the best way, with less memory from one to the next
    advice = text[text.index("devices: efficiency") :]
    rows = [line.split() for line in advice.splitlines() if line.split()[:1] in (["none"], ["full"])]
    assert [row[0] for row in rows] == ["none", "full"]
    assert (rows[0][3], rows[1][3]) == ("MiB", "KiB")
    assert "80% allows" in advice
    assert "4 devices" in text
    rows = [line for line in text.splitlines() if "--mesh" in line and line.strip()[0].isdigit()]
    assert len(rows) == 3
    assert all("tensor=2" in row for row in rows)


def test_a_step_is_written_as_a_trace(planned, tmp_path):
    machine = ["--devices", "2", "--device", "NVIDIA L4", "--link", "1", "--remat", "none"]
    trace, strategy = tmp_path / "step.json", tmp_path / "strategy.toml"
    text = planned(*machine, "--trace", str(trace))
    seconds = text.partition("step: ")[2].partition(",")[0]
    assert f"devices: nothing overlaps: {seconds}, " in text
    assert "devices: sums of gradients overlap: " in text
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "devices: nothing overlaps",
        "devices: sums of gradients overlap",
    }
    # a strategy of one's own, beside the one that is best
    strategy.write_text("[layout.mesh]\npipeline = 2\n")
    planned(*machine, "--strategy", str(strategy), "--trace", str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows == {"stage 0: compute", "stage 1: compute", "link between stages"} | {
        f"stage {stage}: link inside nodes" for stage in range(2)
    }
    strategy.write_text('[pipeline]\nstages = "flops"\n')
    assert "stages is 'flops', and a step is predicted for equal stages" in planned(
        *machine, "--strategy", str(strategy), "--trace", str(trace), code=2
    )
    three = ["--devices", "3", "--device", "NVIDIA L4", "--remat", "none", "--trace", str(trace)]
    assert "trace: not written, as nothing runs" in planned(*three, code=1)
    strategy.write_text("[layout.mesh]\ntensor = 3\n")
    assert "cannot be split over axes ['tensor'] of total size 3" in planned(
        *three, "--strategy", str(strategy), code=2
    )
    assert "which exists and is not a trace; give another name" in planned(
        *machine, "--trace", str(strategy), code=2
    )


def test_operators_are_sharded_one_by_one(planned, tmp_path):
    machine = ["--devices", "2", "--device", "NVIDIA L4", "--link", "1"]
    file = tmp_path / "strategy.toml"
    words = ["--remat", "none", "--batch", "2", "--operators", "--output", str(file)]
    text = planned(*machine, *words)
    assert "operators: searched from --mesh " in text
    found = read_strategy(file).layout.operators
    assert found
    # the first row of the table is what is written
    assert f" and {len(found)} operators" in text.splitlines()[3]
    assert "less time than the best layout; a device sends" in text


def test_a_search_of_operators_that_fails_leaves_the_plan(planned, tmp_path, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise RuntimeError("a model that cannot be traced so")

    monkeypatch.setattr("shardtrain.cli.plan.plan_operators", fail)
    file = tmp_path / "strategy.toml"
    words = ["--devices", "2", "--device", "NVIDIA L4", "--link", "1", "--operators", "--output", str(file)]
    with pytest.raises(RuntimeError, match="cannot be traced"):
        planned(*words)
    assert "devices: 2 devices;" in capsys.readouterr().out
    assert read_strategy(file).layout.operators == {}


def test_an_analysis_that_cannot_be_done_leaves_the_plan(planned, tmp_path):
    strategy = tmp_path / "strategy.toml"
    machine = ["--devices", "1", "--device", "NVIDIA L4", "--remat", "none"]
    text = planned(*machine, "--operators", "--output", str(strategy))
    assert "operators: one device has no operators to shard; give 2 devices or more" in text
    assert read_strategy(strategy).layout.mesh == {"data": 1}


@pytest.mark.full
def test_a_trace_has_the_shares_of_its_strategy(planned, tmp_path):
    cluster, strategy = tmp_path / "cluster.toml", tmp_path / "strategy.toml"
    cluster.write_text(CLUSTER.replace("devices = 2", "devices = 1"))

    def seconds(shares):
        strategy.write_text(f"[across]\nshares = {shares}\n[layout.mesh]\ndata = 1\n")
        words = ["--cluster", str(cluster), "--strategy", str(strategy), "--remat", "none"]
        text = planned(*words, "--trace", str(tmp_path / "step.json"), code=0 if len(shares) == 2 else 2)
        lines = [line for line in text.splitlines() if ": nothing overlaps: " in line]
        return text, {line.split(":")[0]: line.split(": ")[2].split(",")[0] for line in lines}

    (_, few), (_, many) = seconds([1, 15]), seconds([15, 1])
    units = {"ms": 1e-3, "s": 1.0}
    took = [float(x.split()[0]) * units[x.split()[1]] for x in (few["big"], many["big"])]
    assert took[1] > 1.5 * took[0]
    assert set(seconds([1, 0])[1]) == {"big"}
    assert "shares of the strategy has 3 weights, and the cluster has 2 islands" in seconds([1, 1, 1])[0]


def test_a_file_that_is_no_strategy_is_not_replaced(planned, tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("do not lose me")
    machine = ["--devices", "1", "--device", "NVIDIA L4"]
    text = planned(*machine, "--output", str(mine), code=2)
    assert "which exists and is not a strategy file; give another name" in text
    assert mine.read_text() == "do not lose me"
    assert "there is no folder" in planned(*machine, "--output", str(tmp_path / "no" / "a.toml"), code=2)
    again = str(tmp_path / "strategy.toml")
    for _ in range(2):
        assert "strategy: " in planned(*machine, "--output", again)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing describes the machine; give --cluster FILE, or --devices 64"),
        (["--devices", "0", "--device", "NVIDIA L4"], "--devices is 0; use 1 or more"),
        (
            ["--devices", "1000000007", "--device", "NVIDIA L4"],
            "a plan of 1000000007 devices was asked for; use 1 to 16777216",
        ),
        (
            ["--devices", "8", "--device", "NVIDIA L4", "--link", "10", "--per-node", "3"],
            "8 devices, 3 per node, are on 3 nodes, and what a node sends to others is not given; give"
            " --node-link, in GB/s, such as --node-link 25 (in a cluster file node_link_gb_per_second = 25)",
        ),
        (["--devices", "2", "--device", "L44"], "or give its teraflops"),
        (["--devices", "2", "--device", "NVIDIA L4", "--most", "0"], "--most is 0; use 1 or more"),
        (
            ["--cluster", "meshes/two_speeds.toml", "--operators"],
            "--operators is for devices of one island, and the cluster has 2; give a file with one of them",
        ),
        (
            ["--devices", "2", "--device", "NVIDIA L4", "--batch-unit", "tokens", "--batch", "512"],
            "batch is 512 tokens, and a plan is for batches of equal rows; give --batch-unit examples",
        ),
        (["--cluster", "nowhere.toml"], "there is no cluster file nowhere.toml to read"),
        (
            ["--log_every", "2", "--checkpoints.no-trained-only", "--sinks=jsonl"],
            "--checkpoints.trained-only, --log-every, --sinks cannot change what `shardtrain plan` shows;",
        ),
    ],
)
def test_wrong_input_is_refused(planned, words, message):
    assert message in planned(*words, code=2)


def test_this_machine_is_measured(capsys, tmp_path):
    assert cli.main(["calibrate"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "cluster.toml"
    path.write_text('[[islands]]\nkind = "here"\ndevices = 1\n' + text)
    (kind,) = read_cluster(path).islands
    assert kind.device is not None
    assert (kind.device.teraflops or 0) > 1e-4
    assert (kind.device.memory_gb_per_second or 0) > 0.01
    assert cli.main(["calibrate", "--dtype", "int8"]) == 2
    assert "--dtype is int8; use float32 or bfloat16" in capsys.readouterr().err
