"""`shardtrain advise predict` on folders of past runs: their rows by value, and what folders lack."""

import json

import pytest
from saved_decoder import save

from shardtrain import cli
from shardtrain.cli.run_rows import read_measured_rows
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.decoder_flops import flops_per_token

TOKENS = 4 * 8
DEVICES = [{"platform": "cpu", "kind": "cpu", "memory_bytes": None, "number": 2}]


def config_of(embed):
    return DecoderConfig(vocab=16, seq=8, embed=embed, num_layers=1, num_heads=2, mlp=16)


def write_metrics(folder, seconds, saved=0.0):
    """Five lines of 10 steps each; the first one compiled for 20 s."""
    folder.mkdir(exist_ok=True)
    lines = [
        {
            "step": 10 * (number + 1),
            "tokens_per_second": TOKENS / seconds,
            "updates_per_second": 1 / seconds,
            "wall_seconds": 20 + 10 * seconds * (number + 1),
            "seconds/step": 20 * (not number) + 9 * seconds,
            "seconds/input": seconds,
            "seconds/save": saved * (number == 3),
            "seconds/evaluation": 7.0,
        }
        for number in range(5)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = {"ranks": [{"devices": DEVICES}, {"devices": DEVICES}]}
    (folder / "environment.jsonl").write_text(json.dumps(record) + "\n")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, embed in (("small", 4), ("large", 8), ("again", 4)):
        save(folder / name, config_of(embed), (1,))
        # a law: 0.1 s and 1e5 s for each teraflop of a device
        teraflops = TOKENS * flops_per_token(config_of(embed)) / 1e12
        write_metrics(folder / name, 0.1 + 1e5 * teraflops / 4, saved=0.75)
    return folder


def test_a_row_is_what_the_folder_says(runs):
    (row,), notes = read_measured_rows([runs / "small"])
    assert notes == []
    assert (row.model, row.device, row.devices) == ("small", "cpu", 4)
    assert row.teraflops is not None
    assert row.step_seconds is not None
    assert row.parameter_mb is not None
    assert row.checkpoint_mb is not None
    assert row.teraflops == pytest.approx(TOKENS * flops_per_token(config_of(4)) / 1e12)
    assert row.step_seconds == pytest.approx(0.1 + 1e5 * row.teraflops / 4)
    assert row.checkpoint_seconds == 0.75
    assert row.startup_seconds == pytest.approx(20 + row.step_seconds)
    assert row.checkpoint_mb > row.parameter_mb > 0


def test_runs_of_one_model_are_left_out_together(runs, capsys):
    rows, _ = read_measured_rows([runs / "small", runs / "large", runs / "again"])
    assert [row.model for row in rows] == ["small", "large", "small"]
    assert rows[1].teraflops is not None
    teraflops = 3 * rows[1].teraflops
    words = ["small", "large", "again"], ["--device", "cpu", "--devices", "4", "--teraflops", f"{teraflops}"]
    assert cli.main(["advise", "predict", *(str(runs / name) for name in words[0]), *words[1]]) == 0
    text = capsys.readouterr().out
    assert text.startswith("model,device,devices,teraflops,operations,parameter_mb,step_seconds,")
    assert "\nlarge,cpu,4," in text
    assert "error on a model that was left out" in text
    assert f"predicted step_seconds: {0.1 + 1e5 * teraflops / 4:.4g}\n" in text


def test_folders_and_files_are_rows_together(runs, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("model,device,teraflops,step_seconds\nother,cpu,1,2\n")
    rows, _ = read_measured_rows([path, runs / "large"])
    assert [row.model for row in rows] == ["other", "large"]


def test_what_a_folder_lacks_is_said(runs, tmp_path, capsys):
    bare = tmp_path / "bare"
    write_metrics(bare, 0.5)
    (row,), notes = read_measured_rows([bare])
    assert (row.step_seconds, row.teraflops, row.checkpoint_mb) == (0.5, None, None)
    assert notes[0].startswith(f"{bare}: sizes and operations are not known: ")
    # both paths are named, not the first alone
    (bare / "environment.jsonl").unlink()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert cli.main(["advise", "predict", str(bare), str(empty)]) == 2
    problem = capsys.readouterr().err
    assert "environment.jsonl does not name the devices of the run" in problem
    assert f"there is no {empty / 'metrics.jsonl'}; give the folder of a run" in problem
    assert cli.main(["advise", "predict"]) == 2
