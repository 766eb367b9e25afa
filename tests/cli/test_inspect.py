"""`shardtrain inspect` and schedules: the timeline stands behind the table, drawn for what was asked."""

import re
from functools import partial
from pathlib import Path

import pytest

from shardtrain import cli
from shardtrain.pipeline.schedule import gpipe, interleaved, make_table, write_table
from shardtrain.report.timeline import timeline_text

SIZES = {
    "model.num-layers": "2",
    "model.embed": "16",
    "model.num-heads": "2",
    "model.seq": "16",
    "data.seq": "16",
}
TINY = [word for name, size in SIZES.items() for word in (f"--{name}", size)]
TINY_RUN = """
from pathlib import Path
from shardtrain import Run, Text
from tiny_language_model import TinyConfig

def run():
    data = Text(paths=(Path(__file__),), seq=16)
    return Run(model=TinyConfig(num_layers=2, embed=16, mlp=64, seq=16), data=data, batch=16, steps=1)
"""
"""A run file of a model that is traced in a fifth of the time of a decoder."""
GPT = str(Path(__file__).parents[2] / "examples/gpt_text.py")


@pytest.fixture
def inspected(capsys, monkeypatch, tmp_path):
    (tmp_path / "tiny.py").write_text(TINY_RUN)

    def run(*words, columns=1000, run_file=tmp_path / "tiny.py"):
        monkeypatch.setenv("COLUMNS", str(columns))
        code = cli.main(["inspect", str(run_file), *words])
        printed = capsys.readouterr()
        refused = printed.err and not printed.err.startswith("programs: ")
        assert code == (2 if refused else 0)
        return printed.out + (printed.err if refused else "")

    return run


def test_unused_parameters_are_listed_if_asked_for(inspected):
    assert "every parameter can change the loss" in inspected("--unused")
    assert "can change" not in inspected()


def test_an_island_is_shown_with_its_sections(inspected, tmp_path):
    path = tmp_path / "strategy.toml"
    path.write_text("[islands.1-2]\nlayout.mesh = { fsdp = 2 }\n[islands.'*V100*']\naccumulate = 2\n")
    words = ("--strategy", str(path), "--mesh", "data=2")
    whole = inspected(*words)
    assert (
        "sections of islands ('1-2', '*V100*') are not applied; --island NUMBER applies those of one" in whole
    )
    assert inspected(*words, "--island", "0") == whole.partition("\n")[2]
    assert "fsdp" in inspected(*words, "--island", "2")
    assert "--island is -1; islands are numbered from 0" in inspected(*words, "--island", "-1")


def test_islands_that_make_no_whole_pipelines_are_refused(inspected):
    words = ("--across", "pipeline", "--partitions", "2", "--accumulate", "2")
    refused = inspected(*words, "--islands", "3")
    assert "partitions is 2, and there are 3 islands, which do not make whole pipelines" in refused
    assert "of each of 3 pipelines send together" in inspected(*words, "--shares", "4,4,4")
    refused = inspected(*words, "--shares", "4,4,4", "--islands", "4")
    assert "--islands is 4, and the shares are for 6 islands; give --islands 6" in refused


def sent_bytes(text):
    """The bytes of the line on what replicas send, and what it says before and behind them."""
    (line,) = [line for line in text.splitlines() if " send" in line and "KiB a" in line]
    found = re.fullmatch(r"(.*?) ([\d.]+) KiB( a .*)", line)
    assert found
    who, number, rest = found.groups()
    return 1024 * float(number), who, rest


@pytest.mark.full
def test_what_replicas_send_is_counted_by_their_combiner(inspected):
    inspected = partial(inspected, run_file=GPT)
    words = ("--synchronisation", "local-sgd", "--sync-when", "drift:0.1")
    text = inspected(*TINY, *words, "--islands", "3", "--combine", "int8+mean")
    num_parameters = int(text.partition("parameters: ")[2].partition(", ")[0].replace(",", ""))
    # a byte of each parameter, to two others; a rule may skip merges
    found, who, rest = sent_bytes(text)
    assert who == "each of 3 islands sends"
    assert 2 * num_parameters < found < 2.2 * num_parameters
    assert rest.startswith(" a merge at most, and at most ")
    assert rest.endswith(" a step on average: a merge is skipped where no replica has moved so far")
    # what is sent after each program, as the start of a run says
    text = inspected(*TINY, "--shares", "2,1", "--reduce-dtype", "bfloat16", "--gradient-parts", "2")
    found, *words = sent_bytes(text)
    assert words == ["each of 2 islands sends", " a step"]
    assert found == pytest.approx(2 * num_parameters, rel=0.01)
    parts = text.partition("gradients: 2 programs, the last layers first; after each is sent: ")[2]
    in_parts = [1024 * float(size.removesuffix(" KiB")) for size in parts.strip().split(", ")]
    assert len(in_parts) == 2
    assert sum(in_parts) == pytest.approx(2 * num_parameters, rel=0.01)
    # in a mesh each device sends to the replicas of its shards, instead of the sums of the table
    text = inspected(*TINY, "--mesh", "data=4", "--combine", "top_k:0.01+mean")
    found, *words = sent_bytes(text)
    assert words == ["each device sends to the others of 4 replicas over data", " a step"]
    assert found == pytest.approx(3 * 0.01 * 8 * num_parameters, rel=0.2)
    assert "all-reduce" not in text
    text = inspected(
        *TINY, "--across", "pipeline", "--partitions", "2", "--islands", "6", "--accumulate", "2"
    )
    assert sent_bytes(text)[1] == "the stages of each of 3 pipelines send together"
    assert "--islands is 1; one island sends nothing, use 2 or more" in inspected("--islands", "1")


@pytest.mark.full
def test_stages_of_islands_are_cut_by_time(inspected):
    words = ("--mesh", "data=1", "--across", "pipeline", "--stages", "time", "--accumulate", "4")
    text = inspected(*words, "--stage-speeds", "3,1", "--link-speed", "1", "--model.num-layers", "6")
    assert "stages cut by time, by the speeds that were given" in text
    rows = [line.split()[:3] for line in text.splitlines() if line.strip()[:2] in ("0 ", "1 ")]
    assert [row[::2] for row in rows] == [["0", "1"], ["1", "0.333"]]
    assert int(rows[0][1]) > 3
    assert "nothing says for how many stages; give --pipeline-stages" in inspected(*words)
    # two pipelines, each in its own way
    text = inspected(*words, "--stage-speeds", "3,1;1,3", "--model.num-layers", "6")
    assert text.count("stages cut by time") == 2
    rows = [line.split()[:2] for line in text.splitlines() if line.strip()[:2] in ("0 ", "1 ")]
    assert int(rows[0][1]) > int(rows[2][1])
    # the numbers of stages are in the second part
    text = inspected(*words, "--stage-speeds", "auto;3,1", "--model.num-layers", "6")
    assert text.count("stages cut by time") == 2
    # one cut is forced: each stage as the slower of its islands
    one = (*words, "--model.num-layers", "6", "--combine", "adasum")
    text = inspected(*one, "--stage-speeds", "4,1;2,4")
    assert "all pipelines have one cut, for the slowest of each stage: combine is 'adasum'" in text
    rows = [line.split()[:3] for line in text.splitlines() if line.strip()[:2] in ("0 ", "1 ")]
    assert [row[::2] for row in rows] == [["0", "1"], ["1", "0.5"]]
    assert "give a number for each stage in all of them" in inspected(*one, "--stage-speeds", "auto;4,1")
    told = inspected(*words, "--stage-speeds", "3,1;1,3;1,1", "--stage-memory", "1,1;1,1")
    assert "stage_memory is for 2 pipelines, and there are 3; give one for all, or one each" in told


def test_without_a_schedule_there_is_no_timeline(inspected):
    assert "stage" not in inspected("--mesh", "data=1")


def test_a_schedule_is_shown_behind_the_table(inspected):
    """For four stages where the mesh has no pipeline, with the run's microbatches."""
    text = inspected("--mesh", "data=1", "--schedule", "zero_bubble", "--accumulate", "8")
    table, timeline = text.split("\n\n")
    assert "parameters: 8,192" in table
    assert timeline == timeline_text(make_table("zero_bubble", 4, 8))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--schedule=1f1b", "--pipeline-stages", "2", "--microbatches", "3"), ("1f1b", 2, 3)),
        (
            ("--schedule", "interleaved", "--virtual-stages", "2", "--microbatches", "8"),
            ("interleaved", 4, 8, 2),
        ),
        (("--lockstep", "True", "--microbatches", "5"), ("1f1b", 4, 5, 1, True)),
        (("--mesh", "pipeline=2,data=2", "--accumulate", "4"), ("1f1b", 2, 4, 1, True)),
        (("--mesh", "pipeline=2", "--lockstep", "False", "--microbatches", "4"), ("1f1b", 2, 4)),
    ],
)
def test_sizes_and_form_follow_the_options_and_the_mesh(inspected, words, expected):
    words = words if "--mesh" in words else ("--mesh", "data=1", *words)
    assert inspected(*words).endswith("\n\n" + timeline_text(make_table(*expected)))


def test_a_table_from_a_file_has_its_own_sizes(inspected, tmp_path):
    path = tmp_path / "mine.csv"
    write_table(interleaved(3, 5, 2), path)
    text = inspected("--mesh", "data=1", "--schedule", str(path))
    assert "schedule mine.csv: 3 stages, 5 microbatches, 2 chunks a stage, one task a tick\n" in text
    write_table(gpipe(2, 2), path)
    text = inspected("--mesh", "pipeline=2,data=1", "--schedule", str(path), "--microbatches", "4")
    assert "it has 2 microbatches, and 4 were asked for; use 2, or another table" in text


def test_a_wide_timeline_is_cut_at_the_terminal(inspected):
    text = inspected("--mesh", "data=1", "--schedule", "1f1b", "--microbatches", "32", columns=60)
    timeline = text.split("\n\n")[1].splitlines()
    assert max(map(len, timeline[1:6])) <= 60
    assert timeline[6] == "ticks 13 to 69 do not fit here: 216 tasks"


def test_a_timeline_is_drawn(inspected, tmp_path):
    path = tmp_path / "a.svg"
    text = inspected("--mesh", "data=1", "--timeline", str(path))
    assert text.endswith(f"\ntimeline: {path}\n")
    assert "<!-- F0 -->" in path.read_text()


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("--schedule", "1f1"), ("'1f1' (did you mean '1f1b'?)",)),
        (("--schedule", "1f1b", "--virtual-stages", "2"), ("use 1, or the schedule 'interleaved'",)),
        (("--devices", "10000000000"), ("--devices is 10000000000; use 1 to 16777216",)),
        (("--mesh", "data=10000000000"), ("axis 'data' has size 10000000000; allowed: at most 16777216",)),
        (("--timeline", "a.gif"), ("it is drawn as .svg or .png: use a.svg",)),
        (
            ("--devices", "0", "--microbatches", "0", "--pipeline-stages", "-1"),
            (
                "--devices is 0; use 1 to 16777216",
                "--microbatches is 0; use 1 to 8192",
                "--pipeline-stages is -1; use 1 to 1024",
            ),
        ),
    ],
)
def test_mistakes_are_told(words, texts, capsys):
    assert cli.main(["inspect", GPT, "--mesh", "data=1", *words]) == 2
    told = capsys.readouterr().err
    for text in texts:
        assert text in told
    assert "Traceback" not in told


class TestTraffic:
    def test_parameters_and_gradients_are_counted_by_theory(self, inspected):
        """8,192 parameters of 4 bytes, reduced over 4 devices: 2 x 3/4 of them."""
        text = inspected("--mesh", "data=4")
        (row,) = (line.split() for line in text.splitlines() if line.strip().startswith("all-reduce"))
        assert row == ["all-reduce", "data", "48.0", "KiB"]
        assert "no parameters or gradients between devices" in inspected("--mesh", "data=1")

    def test_a_compiled_step_tells_what_it_moves(self, inspected):
        text = inspected("--mesh", "pipeline=2,data=2", "--accumulate", "2", "--compile", "cpu")
        rows = [line.split()[:2] for line in text.partition("compiled for cpu")[2].splitlines()[3:-1]]
        assert sorted(rows) == [
            ["all-reduce", "data"],
            ["all-reduce", "pipeline"],
            ["collective-permute", "pipeline"],
        ]

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (("--mesh", "data=16", "--compile", "cpu"), "8 are simulated; give --cpu-devices 16"),
            (("--mesh", "data=2", "--compile", "h10"), "'h10' (did you mean 'h100'?)"),
        ],
    )
    def test_devices_that_cannot_be_compiled_for(self, inspected, words, expected):
        assert expected in inspected(*words)


def test_sequences_and_heads_that_context_cannot_split_are_refused_as_by_train(inspected):
    inspected = partial(inspected, run_file=GPT)
    assert "128 queries cannot be split into 6 parts" in inspected("--mesh", "context=3")
    text = inspected("--mesh", "context=4,tensor=4", "--context-attention", "all-to-all")
    assert "2 heads of a device cannot be split over 4" in text
    assert "context=3 is odd; use context=2 or 4" in inspected("--mesh", "pipeline=2,context=3")
    assert inspected("--mesh", "context=4,tensor=2").endswith(" a step\n")


def test_memory_needs_a_kind_of_devices(inspected):
    assert "--memory shows figures of a compiler; add --compile cpu" in inspected("--memory")
