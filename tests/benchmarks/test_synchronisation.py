"""The benchmarks of ways to synchronise: the arithmetic of their tables, and a tiny run of one."""

import dataclasses
import doctest
import importlib
from pathlib import Path

import pytest
from tiny_language_model import TinyConfig

import shardtrain
from shardtrain.data import Text

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def modules():
    """The two scripts as modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("synchronisation"), importlib.import_module("slow_link")


@pytest.fixture
def plain(modules):
    return modules[0]


@pytest.fixture
def link(modules):
    return modules[1]


def test_losses_stand_beside_every_step_seed_by_seed(plain):
    rows = [
        plain.Row("every-step", 2, (2.0, 4.0), 400.0, 400),
        plain.Row("diloco", 2, (2.2, 4.2), 20.0, 400),
        plain.Row("every-step", 4, (5.0, 5.0), 400.0, 400),
        plain.Row("streaming", 4, (5.0, 6.0), 20.0, 100),
    ]
    assert plain.table(rows).splitlines()[2:] == [
        "| 2 | every-step | 3.0000 | 1.0000 | 1.0000, 1.0000 | 400 | 1.0000 | 400 | 1.000 |",
        "| 2 | diloco | 3.2000 | 1.0750 | 1.1000, 1.0500 | 20 | 0.0500 | 400 | 1.000 |",
        "| 4 | every-step | 5.0000 | 1.0000 | 1.0000, 1.0000 | 400 | 1.0000 | 400 | 1.000 |",
        "| 4 | streaming | 5.5000 | 1.1000 | 1.0000, 1.2000 | 20 | 0.0500 | 100 | 0.250 |",
    ]


@pytest.mark.full
def test_ways_continue_from_one_base_model_and_runs_of_a_folder_are_kept(
    plain, monkeypatch, tmp_path, capsys
):
    # main sets both for its own process
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "")
    text = tmp_path / "text.txt"
    text.write_text("some text to learn from\n" * 200)
    run_of = plain.run_of

    def tiny(*arguments):
        data = Text(paths=(text,), seq=8)
        return dataclasses.replace(run_of(*arguments), model=TinyConfig(), data=data)

    monkeypatch.setattr(plain, "run_of", tiny)
    small = ["--replicas", "8", "--steps", "10", "--every", "5", "--seeds", "0", "--evaluate-batches", "1"]
    small += ["--warmup", "1", "--base-steps", "4", "--base-seed", "3"]
    small += ["--synchronous-steps", "5", "--ways", "diloco;diloco, after 5 synchronous steps"]
    small += ["--folder", str(tmp_path / "runs")]
    assert plain.main(small) == 0
    out = capsys.readouterr().out
    assert out.startswith("base,_seed_3: held-out loss ")
    every_step, diloco, later = (row.split("|") for row in out.splitlines()[3:])
    assert float(every_step[4]) == 1
    assert 0.5 < float(diloco[4]) < 2
    # bytes are those of the merges
    for row, share in ((diloco, "0.2000"), (later, "0.6000")):
        assert [cell.strip() for cell in (row[7], row[9])] == [share, "1.000"]
    runs = tmp_path / "runs"
    for name in ("every-step,_seed_0", "diloco,_8_replicas,_seed_0"):
        assert f"{runs}/base,_seed_3" in (runs / name / "run.txt").read_text()
    monkeypatch.setattr(shardtrain, "train", None)
    assert plain.main(small) == 0
    assert capsys.readouterr().out == out


def lines(steps, step_seconds, waiting, num_bytes, loss):
    """Metrics of a run: the first and the last lines late, as a run writes them."""
    found = []
    for step in range(1, steps + 1):
        seconds = {"step": step_seconds - waiting, "islands": waiting, "save": 0.0, "evaluation": 0.0}
        written = num_bytes(step + 2) if step > 1 else sum(num_bytes(i) for i in (1, 2, 3))
        line = {"step": step, "bytes/islands": written if step <= steps - 2 else 0}
        found.append({**line, **{f"seconds/{kind}": x for kind, x in seconds.items()}})
    found[-1] |= {"seconds/save": 100.0, "seconds/evaluation": 100.0, "heldout/loss": loss}
    return found


def test_figures_of_a_run_are_those_of_its_steps(link):
    found = link.figures(lines(20, 0.5, 0.4, lambda step: 1000, 2.5), first_step=9)
    assert found == link.Figures(20, 2.5, pytest.approx(0.5), pytest.approx(0.8), 1000, 1000)
    # fragments of unequal size, and a last step that merges all
    sizes = {5: 100, 10: 300, 15: 100, 20: 400}
    found = link.figures(lines(20, 0.1, 0.0, lambda step: sizes.get(step, 0), 2.5), first_step=9)
    assert (found.mean_bytes, found.peak_bytes) == (45, 300)


def test_equal_time_gives_the_steps_that_fit(link):
    asked = []

    def train(name, steps):
        asked.append((name, steps))
        seconds = {"every-step": 0.5, "diloco": 0.1, "slow": 3.0}[name]
        loss = {"every-step": 2.0, "diloco": 2.2 if steps == 40 else 1.5, "slow": 4.0}[name]
        return link.Figures(steps, loss, seconds, 0.5, 1000 / steps, 1000)

    rows = link.measure(train, ["every-step", "diloco", "slow"], 40, 20)
    assert asked == [("every-step", 40), ("diloco", 40), ("diloco", 200), ("slow", 40), ("slow", 20)]
    assert "loss after 40 steps" in link.table(rows)
    assert "steps in 20 s" in link.table(rows)
    assert link.table(rows).splitlines()[3] == (
        "| diloco | 25 | 1.0000 | 1,000 | 1.000 | 0.100 | 50% | 2.2000 | 1.1000 | 4 | 200 | 1.5000 | 0.7500 |"
    )


def test_without_namespaces_a_message_says_what_is_needed(link, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(FOLDER.parent / "tests" / "faults")
    network = importlib.import_module("network")
    monkeypatch.setattr(network.Hosts, "_line", lambda self: "forbidden unshare: Operation not permitted\n")
    assert link.main(["--folder", str(tmp_path)]) == 1
    assert "run it as root, or allow user namespaces: forbidden unshare" in capsys.readouterr().err


def test_examples(link):
    assert doctest.testmod(link) == doctest.TestResults(0, 1)
