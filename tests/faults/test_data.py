"""Data that is lost or cut off, between runs and during one: the file is named, and what to do."""

import re

import pytest

from shardtrain.data import Text


def train(*words):
    return ["train", "tiny.py", *words]


@pytest.fixture
def empty(lives, cheap):
    """The folder without a run, and with its text as it was."""
    import shutil

    shutil.rmtree(cheap / "run", ignore_errors=True)
    text = (cheap / "text.txt").read_bytes()
    yield cheap
    lives.end()
    (cheap / "text.txt").write_bytes(text)


def test_a_text_that_is_lost_between_runs(lives, empty):
    assert lives.run(*train("--steps", "2"))[0] == 0
    text = empty / "text.txt"
    text.unlink()
    code, said = lives.run(*train("--steps", "6"))
    assert code == 2
    assert f"{text} is not there, or empty; give a text file or a folder of them" in said


@pytest.mark.parametrize("what", ["npy", "json"])
def test_a_token_file_of_the_run_folder_is_made_again(what, empty):
    text = Text(paths=(empty / "text.txt",), seq=8)
    packed = text.pack(empty / "run")
    (file,) = (empty / "run").glob(f"text-*.{what}")
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", None):
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        assert text.pack(empty / "run") == packed
        assert file.read_bytes() == whole


def test_a_token_file_that_is_cut_off_during_a_run_ends_it_by_name(lives, empty):
    """Through a mapping this would be SIGBUS."""
    lives.begin(words=train())
    lives.until("saved")
    (file,) = (empty / "run").glob("text-*.npy")
    with file.open("r+b") as tokens:
        tokens.truncate(1000)
    assert lives.ended() == 1
    said = lives.printed()
    assert (
        f", in 'reading a batch': {file} was cut off while it was read: it ends after 872 of 3,001 tokens"
        in said
    )
    assert re.search(r"shardtrain train: at step \d+, in 'reading", said)
    assert "delete it where it was made from text, and give the same command again" in said
    code, said = lives.run(*train("--steps", "1"))
    assert code == 0, said
    assert re.search(r"resumed from step \d+", said)


def test_another_seed_loss_or_model_in_the_same_folder(lives, empty):
    assert lives.run(*train("--steps", "2"))[0] == 0
    code, said = lives.run(*train("--steps", "4", "--seed", "5"))
    assert code == 2
    assert "seed is 5, but the run in run started with seed 0" in said
    assert "Use --seed 0, or another --run-dir" in said
    source = (empty / "tiny.py").read_text().replace("(256, 256)", "(256, 300)")
    source = source.replace(
        "import Layout", "import Layout\nfrom shardtrain.functional.loss import next_token_loss"
    )
    source = source.replace(
        "def run(", "def loss(*arguments):\n    return next_token_loss(*arguments)\n\n\ndef run("
    )
    (empty / "other.py").write_text(source.replace("model=Bigram", "model=Bigram, loss=loss"))
    code, said = lives.run("train", "other.py", "--steps", "4")
    assert code == 2
    assert "the checkpoint in run is of another run" in said
    assert re.search(r"loss: .* -> .*; put it back, or allow it: --allow.changed loss", said)
    code, said = lives.run("train", "other.py", "--steps", "4", "--allow.changed", "loss", "model")
    assert code == 2
    assert "params/table: saved float32 (256, 256), asked for float32 (256, 300)" in said
    assert "use the model and optimizer that it was saved with, or another run folder" in said
