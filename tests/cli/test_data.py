"""`shardtrain data`, and the page of data from end to end: tokenizer, tokens, a run that learns from them."""

import dataclasses
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from quiet_training import train_quietly
from rich.console import Console
from written_formats import DOCUMENTS, picture, write_files

from shardtrain import Optimizer, Schedule, cli
from shardtrain.cli.run_options import parse_run
from shardtrain.report.work_progress import work_progress

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text()


def test_the_page_trains_a_tokenizer_and_a_model_from_parquet(tmp_path, monkeypatch, capsys):
    """By its commands, in their order; only smaller."""
    monkeypatch.chdir(tmp_path)
    Path("web").mkdir()
    for i in range(4):
        texts = [f"document {j} of file {i} says {'many words and ' * 9}no more" for j in range(12)]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), f"web/{i}.parquet", row_group_size=5)
    code = re.search(r"`my_run.py`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    Path("my_run.py").write_text(code[1])
    section = PAGE.partition("## Tokenize a large corpus")[2].partition("\n## ")[0]
    commands = [shlex.split(line) for line in re.findall(r"^uv run shardtrain (.*)$", section, re.MULTILINE)]
    assert [words[:2] for words in commands] == [
        ["data", "train-tokenizer"],
        ["data", "tokenize"],
        ["data", "check"],
        ["train", "my_run.py"],
    ]
    smaller = {"32768": "300", "16": "1"}
    for words in commands[:3]:
        assert cli.main([smaller.get(word, word) for word in words]) == 0
    out = capsys.readouterr().out
    assert "tok.json: vocabulary 300, trained on documents of 4 files" in out
    assert "tokens: 48 documents, " in out
    assert "files: all can be read" in out
    sizes = {"num_layers": "1", "embed": "16", "num_heads": "2", "mlp": "16"}
    options = [word for name, size in sizes.items() for word in (f"--model.{name}", size)]
    run, _ = parse_run("train", [*commands[3][1:], *options])
    run = dataclasses.replace(run, batch=8, steps=20, run_dir=tmp_path / "run", log_every=1)
    run = dataclasses.replace(run, optimizer=Optimizer(learning_rate=Schedule(name="constant", peak=0.05)))
    _, printed, lines = train_quietly(run)
    assert lines[-1]["train/loss"] < 0.6 * lines[0]["train/loss"]
    assert re.search(r"corpus: \d+ npy; [\d,]+ tokens", printed)


def test_a_mixture_is_changed_by_options(tmp_path, monkeypatch):
    """Of the run file on the page."""
    monkeypatch.chdir(tmp_path)
    code = re.search(r"## Mixtures\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    folder = write_files("jsonl", tmp_path / "data", DOCUMENTS)
    for name in ("web", "code"):
        assert cli.main(["data", "tokenize", str(folder), "--out", f"tokens/{name}", "--workers", "1"]) == 0
    Path("mixed.py").write_text(code[1])
    run, _ = parse_run("train", ["mixed.py"])
    assert run.data.stages() == ((0, (0.7, 0.3)),)
    words = ["--data.weights", "web 1 code 3", "--data.later", "50: code 1"]
    words += ["--data.parts.web.seq", "4"]
    run, _ = parse_run("train", ["mixed.py", *words, "--data.parts.web.paths", str(folder)])
    assert run.data.stages() == ((0, (1.0, 3.0)), (50, (0.0, 1.0)))
    assert (run.data.parts["web"].seq, run.data.parts["code"].seq) == (4, 128)
    assert run.data.parts["web"].paths == (folder,)


def test_the_images_of_the_page_are_options_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"## Images\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    Path("pictures.py").write_text(code[1])
    words = ["--data", "a", "b/*.tar", "--data.on-error", "skip", "--data.label", "cls"]
    run, _ = parse_run("train", ["pictures.py", *words])
    assert run.data.paths == (Path("a"), Path("b/*.tar"))
    assert (run.data.on_error, run.data.label, run.data.classes) == ("skip", "cls", 200)
    words += ["--data.augment.crop", "0.3", "1", "--data.augment.no-flip", "--data.augment.contrast", "0.4"]
    run, _ = parse_run("train", ["pictures.py", *words, "--data.mean", "0.5", "0.5", "0.5"])
    found = run.data.augment
    assert (found.crop, found.flip, found.contrast, found.cutmix) == ((0.3, 1.0), False, 0.4, 1.0)
    assert run.data.mean == (0.5, 0.5, 0.5)


def test_the_source_of_the_page_is_read_by_its_methods():
    section = PAGE.partition("## A source of your own")[2]
    made: dict[str, Any] = {}
    (own,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    exec(own, made)
    # one sample by its number, and rows at once
    assert made["Numbers"]()[3]["x"].tolist() == made["Numbers"]().stacked_samples([3])["x"][0].tolist()
    assert made["plain"]["x"].shape == made["noisy"]["x"].shape == (4, 3)
    assert (made["plain"]["x"] == made["plain"]["x"].round()).all()
    assert (made["noisy"]["x"] != made["plain"]["x"]).all()


def test_what_is_there_is_listed_shown_and_measured(tmp_path, capsys):
    folder = str(write_files("jsonl", tmp_path / "data", DOCUMENTS))
    assert cli.main(["data", "ls", folder]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[1].split()[:2] == ["jsonl", "12"]
    assert lines[-1].split()[:2] == ["sum", str(len(DOCUMENTS))]
    assert cli.main(["data", "show", folder, "--number", "12", "--count", "2"]) == 0
    out = capsys.readouterr().out
    assert f"row 12: {folder}/part-1/a.jsonl, row 0\n  id: 0\n  text: number 8\nrow 13: " in out
    assert cli.main(["data", "stats", folder]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"3 files, {len(DOCUMENTS)} documents, {sum(map(len, DOCUMENTS))} characters\n")
    assert "0 %: 0, 25 %: 8, 50 %: 9," in out
    assert cli.main(["data", "tokenize", folder, "--out", str(tmp_path / "out"), "--workers", "1"]) == 0
    capsys.readouterr()
    assert cli.main(["data", "show", str(tmp_path / "out"), "--number", "1", "--seq", "10"]) == 0
    out = capsys.readouterr().out
    assert "shard-00000.npy, token 10\n" in out
    assert "documents end before tokens: 3\n" in out
    assert "text: nt\\x00another" in out.replace("\0", "\\x00")
    assert cli.main(["data", "show", str(tmp_path / "out"), "--number", "99999"]) == 2
    assert "windows of seq 256, numbered from 0; windows 99999 to 99999 were" in capsys.readouterr().err
    assert cli.main(["data", "show", folder, "--number", "99"]) == 2
    assert (
        f"row is 99; there are {len(DOCUMENTS)} rows, use 0 to {len(DOCUMENTS) - 1}"
        in capsys.readouterr().err
    )


def test_check_lists_all_that_cannot_be_read(tmp_path, capsys):
    folder = write_files("parquet", tmp_path / "data", DOCUMENTS)
    cut = folder / "part-1/a.parquet"
    cut.write_bytes(cut.read_bytes()[:-9])
    (folder / "part-2/b.jsonl").write_bytes(b'{"text": "a"}\n{"text": \n{"txt": 1}\n')
    assert cli.main(["data", "check", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{cut}: it is no whole Parquet file (")
    assert lines[1].startswith(f"{folder}/part-2/b.jsonl, row 1: the line is no JSON (")
    assert lines[2].startswith(
        f"{folder}/part-2/b.jsonl, row 2: it has no field 'text' (did you mean 'txt'?)"
    )
    assert lines[3:] == ["4 files: 3 problems"]
    assert cli.main(["data", "ls", str(folder)]) == 0
    assert f"{cut}: it is no whole Parquet file (" in capsys.readouterr().out
    tokens = str(tmp_path / "out")
    skip = ["--on-error", "skip", "--workers", "1", "--shard-bytes", "400"]
    assert cli.main(["data", "tokenize", str(folder), "--out", tokens, *skip]) == 0
    assert "skipped 3 that cannot be read:\n" in capsys.readouterr().out
    with Path(tokens, "shard-00000.npy").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x07")
    assert cli.main(["data", "check", tokens]) == 1
    assert "shard-00000.npy: it does not have the checksum of its manifest\n" in capsys.readouterr().out
    # also of several folders, and by patterns
    other = str(tmp_path / "other")
    assert cli.main(["data", "tokenize", str(folder), "--out", other, *skip]) == 0
    capsys.readouterr()
    for paths in ([tokens, other], [other, f"{tokens}/*.npy"]):
        assert cli.main(["data", "check", *paths]) == 1
        out = capsys.readouterr().out
        assert f"{tokens}/shard-00000.npy: it does not have the checksum" in out
        assert "files: 1 problems" in out
    ends = max(Path(other).glob("*.ends"), key=lambda path: path.stat().st_size)
    with ends.open("r+b") as file:
        file.write(b"\1")
    assert cli.main(["data", "check", other]) == 1
    assert f"{ends}: it does not have the checksum" in capsys.readouterr().out


def test_tokens_with_a_separator_of_their_own_are_decoded(tmp_path, capsys):
    from tokenizers import Tokenizer, models

    words = {"[UNK]": 0, "[EOD]": 1, "one": 2}
    Tokenizer(models.WordLevel(words, unk_token="[UNK]")).save(str(tmp_path / "tok.json"))
    (tmp_path / "a.txt").write_text("one")
    out = str(tmp_path / "out")
    made = ["--out", out, "--tokenizer", str(tmp_path / "tok.json"), "--workers", "1"]
    assert cli.main(["data", "tokenize", str(tmp_path / "a.txt"), *made, "--separator", "[EOD]"]) == 0
    assert cli.main(["data", "show", out, "--seq", "1"]) == 0
    assert "text: one [EOD]" in capsys.readouterr().out


def test_messages_name_the_options_of_the_command(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"txt": "a"}\n')
    made = ["--out", str(tmp_path / "out"), "--workers", "1"]
    assert cli.main(["data", "tokenize", str(tmp_path / "a.jsonl"), *made]) == 2
    shown = capsys.readouterr().err
    assert "name that of the text: --text; repair it, or leave out what cannot be read: --on-error" in shown
    assert cli.main(["data", "check", str(tmp_path / "a.jsonl")]) == 1
    assert "name that of the text: --text\n" in capsys.readouterr().out
    # once for all rows that have the same problem
    (tmp_path / "a.jsonl").write_text('{"txt": "a"}\n' * 39 + "{\n")
    assert cli.main(["data", "check", str(tmp_path / "a.jsonl")]) == 1
    first, other, many, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path}/a.jsonl, row 0: it has no field 'text'")
    assert other.startswith(f"{tmp_path}/a.jsonl, row 39: the line is no JSON")
    assert many.startswith(f"the same in 38 more rows: {tmp_path}/a.jsonl: it has no field 'text'")
    assert last == "1 files: 40 problems"
    (tmp_path / "b.jsonl").write_text("no\n")
    assert cli.main(["data", "show", str(tmp_path / "b.jsonl")]) == 2
    assert "on-error" not in capsys.readouterr().err


def test_mistakes_are_refused(tmp_path, capsys):
    tokens = write_files("npy", tmp_path / "data", DOCUMENTS)
    for words, message in (
        (["lst"], "there is no command 'lst' (did you mean 'ls'?)"),
        (["ls"], "no data was given; name files, folders or patterns"),
        (["tokenize", str(tokens), "--out", str(tmp_path / "o")], "a.npy has tokens already; give text"),
        (
            ["tokenize", __file__, "--out", str(tmp_path / "o"), "--format", "text", "--workers", "0"],
            "workers is 0",
        ),
        (["show", str(tokens), "--count", "0"], "count is 0; use 1 or more"),
        (["train-tokenizer", str(tokens), "--out", "x"], "a.npy has tokens already; give text"),
    ):
        assert cli.main(["data", *words]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["data"]) == 2
    assert cli.main(["data", "--help"]) == 0
    assert "tokenize " in capsys.readouterr().out


def test_images_are_listed_and_shown(tmp_path, capsys):
    for name in ("wren", "gull"):
        (tmp_path / "birds" / name).mkdir(parents=True)
        (tmp_path / "birds" / name / "1.png").write_bytes(picture(1))
    assert cli.main(["data", "show", str(tmp_path / "birds")]) == 0
    out = capsys.readouterr().out
    assert "  image: b'" in out
    assert "  label: 0\n  class: gull\n" in out


def test_progress_is_a_line_now_and_then():
    shown, now = io.StringIO(), iter([0.0, 1.0, 30.0, 31.0])
    with work_progress("shards", Console(file=shown), lambda: next(now)) as report:
        for done in (2, 3, 5, 8):
            report(done, 8)
    assert shown.getvalue().splitlines() == ["shards 2/8", "shards 5/8  left 30s", "shards 8/8  left 0s"]


def test_the_usage_names_every_command_of_the_page(capsys):
    assert cli.main(["data", "--help"]) == 0
    usage = capsys.readouterr().out
    for name in re.findall(r"shardtrain data ([\w-]+)", PAGE):
        assert f"  {name} " in usage


@pytest.mark.full
def test_the_run_of_conversations_learns_their_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/fine_tuning.md").read_text()
    code = re.search(r"`my_chat.py`:\n\n```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    Path("my_chat.py").write_text(code[1])
    Path("chats").mkdir()
    rows = [{"prompt": f"question {i}", "completion": "yes" * (1 + i % 9)} for i in range(40)]
    Path("chats/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"text": "a"}]))
    sizes = {"num-layers": "1", "embed": "16", "num-heads": "2", "mlp": "16"}
    options = [word for name, size in sizes.items() for word in (f"--model.{name}", size)]
    options += ["--data.on-error", "skip", "--learning-rate", "0.05", "--batch", "8"]
    run, _ = parse_run("train", ["my_chat.py", *options])
    run = dataclasses.replace(run, run_dir=tmp_path / "run", log_every=1)
    _, printed, lines = train_quietly(run)
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < 0.3 * losses[0]
    assert all(line["data_skipped"] == 1 for line in lines if "train/loss" in line)
    assert "chat: 1 jsonl; 40 conversations, " in printed


def test_conversations_are_shown_with_what_is_learned(tmp_path, capsys):
    talk = [{"role": "user", "content": "Grüße"}, {"role": "assistant", "content": "Hi 📄"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ({"messages": talk}, {"text": "a"})))
    assert cli.main(["data", "show", str(path), "--template", "chatml"]) == 0
    assert capsys.readouterr().out == (
        f"conversation 0: {path}, row 0: 75 tokens, 17 of them are learned\n"
        "<|im_start|>user\nGrüße<|im_end|>\n<|im_start|>assistant\n⟦Hi 📄<|im_end|>⟧\n\n"
    )
    assert cli.main(["data", "show", str(path), "--template", "chatml", "--number", "1"]) == 2
    assert "row 1: it has no field 'messages'" in capsys.readouterr().err
    assert cli.main(["data", "show", str(path), "--template", "tokenizer"]) == 2
    assert "no chat template" in capsys.readouterr().err
