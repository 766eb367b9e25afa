"""`shardtrain checkpoint`: what it prints and deletes; checkpoints that are whole, damaged, in parts."""

import fcntl
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardtrain import cli
from shardtrain.checkpoints.checkpointer import Checkpoints
from shardtrain.checkpoints.manifest_entries import ArrayOrigin, WriterPart
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.checkpoints.reader import find_readers
from shardtrain.cli.checkpoint import COMMANDS
from shardtrain.cli.run_file import load_run
from shardtrain.errors.options import list_plain_options
from shardtrain.models.huggingface import from_huggingface, to_huggingface

GOLDEN = Path(__file__).parents[1] / "models" / "golden"
STEPS = (10, 20, 30, 40)


def description(config, **options):
    model = {f"model.{name}": value for name, value in list_plain_options(config).items()}
    return {"run": {**model, "batch": 8, "strategy.layout.mesh.data": 2, **options}, "position": {"epoch": 0}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run's folder with four steps of a GPT-2; at each the embedding is one more than before."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    with np.load(GOLDEN / "gpt2.npz") as file:
        state = {n.removeprefix("weight/"): file[n] for n in file.files if n.startswith("weight/")}
        config, params = from_huggingface(json.loads(str(file["config"])), state)
    with Checkpoints(folder / "checkpoints", CheckpointPolicy(keep=9)) as checkpoints:
        for i, step in enumerate(STEPS):
            params["embedding"] = params["embedding"] + 1
            state = {"step": jnp.int32(step), "params": params_of(params)}
            checkpoints.save(step, state, description(config, batch=8 * (i + 1)))
    return folder


def params_of(tree):
    return {name: params_of(x) if isinstance(x, dict) else jnp.asarray(x) for name, x in tree.items()}


@pytest.fixture
def run(saved, tmp_path):
    """A copy, to be damaged."""
    return shutil.copytree(saved, tmp_path / "run")


def command(capsys, *words):
    """The exit code, and what was printed."""
    try:
        code = cli.main(["checkpoint", *map(str, words)])
    except SystemExit as stop:
        code = stop.code
    return code, "".join(capsys.readouterr())


def damage(run, step, change):
    folder = run / "checkpoints" / f"step_{step:08d}"
    path = max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    return path.relative_to(folder).as_posix()


def flip(content):
    content[len(content) // 2] ^= 1


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_is_there(words, capsys):
    code, text = command(capsys, *words)
    assert code == 0
    assert "usage: shardtrain checkpoint" in text
    assert all(name in text for name in COMMANDS) == (words == ["--help"])


def test_ls_shows_every_step_and_what_is_wrong_at_a_glance(run, capsys):
    name = damage(run, 20, lambda content: content.pop())
    partial = run / "checkpoints" / "step_00000050.by-a.partial"
    partial.mkdir()
    code, text = command(capsys, "ls", run)
    lines = {line.split()[0]: line for line in text.splitlines()[2:]}
    assert code == 0
    assert list(lines) == ["10", "20", "30", "40", partial.name]
    assert lines["10"].endswith("finished")
    assert "data=2" in lines["10"]
    assert lines["20"].endswith(f"{name} has changed since it was saved")
    assert "unfinished" in lines[partial.name]
    code, text = command(capsys, "ls", partial)
    assert code == 2
    assert "contains no checkpoints" in text


@pytest.mark.parametrize(
    "where", ["{run}", "{run}/checkpoints", "{run}/checkpoints/step_00000040", "{run}@40"]
)
def test_show_finds_a_step_by_any_of_its_folders(where, saved, capsys):
    code, text = command(capsys, "show", where.format(run=saved))
    assert code == 0
    assert text.startswith("step 40, saved 20")
    assert "params/blocks/attention/q/kernel" in text
    assert "2 x 16 x 4 x 4   float32   2.0 KiB" in text
    assert "  batch = 32\n" in text
    assert "position: {'epoch': 0}\n" in text
    assert "step 20, saved" in command(capsys, "show", saved, "--step", 20)[1]


def test_diff_names_values_and_options_that_differ(saved, capsys):
    code, text = command(capsys, "diff", f"{saved}@10", f"{saved}@30")
    assert code == 0
    assert "step 10 -> step 30\n" in text
    assert "run: batch: 8 -> 24\n" in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith(" ")}
    assert rows["params/embedding"][0] == "2"
    assert rows["step"][:2] == ["20", "2"]
    assert len([row for row in rows if "/" in row]) == 1
    total = len(find_readers(saved / "checkpoints")[0].leaves)
    assert f"{total - 2} of {total} common arrays are the same\n" in text


def test_ls_names_a_step_whose_folder_was_renamed(tmp_path, capsys):
    with Checkpoints(tmp_path, CheckpointPolicy()) as checkpoints:
        checkpoints.save(10, {"step": jnp.int32(10)}, {})
    (tmp_path / "step_00000010").rename(tmp_path / "step_00000099")
    assert "its manifest is that of step 10\n" in command(capsys, "ls", tmp_path)[1]


def test_diff_takes_a_function_that_moved_between_modules_of_shardtrain_as_the_same(tmp_path, capsys):
    for folder, module in (("old", "shardtrain.loss"), ("new", "shardtrain.functional.loss")):
        with Checkpoints(tmp_path / folder, CheckpointPolicy()) as checkpoints:
            run = {"loss": f"{module}:next_token_loss", "batch": 8}
            checkpoints.save(10, {"step": jnp.int32(10)}, {"run": run})
    _, text = command(capsys, "diff", tmp_path / "old", tmp_path / "new")
    assert text == "step 10 -> step 10\n1 of 1 common arrays are the same\n"


def test_diff_names_arrays_that_one_lacks_or_has_in_another_shape(saved, tmp_path, capsys):
    with Checkpoints(tmp_path, CheckpointPolicy()) as checkpoints:
        state = {"step": jnp.int32(10), "params": {"embedding": jnp.zeros((3, 16)), "mine": jnp.zeros(2)}}
        checkpoints.save(10, state, {})
    _, text = command(capsys, "diff", f"{saved}@10", tmp_path)
    assert "params/mine: only in the second, float32 (2,)\n" in text
    assert "params/positions: only in the first, float32 (12, 16)\n" in text
    assert "params/embedding: float32 (32, 16) -> float32 (3, 16)\n" in text
    assert text.endswith("1 of 1 common arrays are the same\n")


def test_verify_finds_a_flipped_bit_and_names_the_file(run, capsys):
    assert command(capsys, "verify", run)[0] == 0
    name = damage(run, 30, flip)
    code, text = command(capsys, "verify", run)
    assert code == 1
    assert [line.split(":")[1].split(",")[0].strip() for line in text.splitlines() if line[0] == "s"] == [
        "valid", "valid", "broken", "valid",
    ]  # fmt: skip
    assert f"  step_00000030: {name} has other contents than were saved" in text
    assert command(capsys, "verify", run, "--step", 20)[0] == 0
    assert command(capsys, "verify", f"{run}@30")[0] == 1


def test_a_missing_part_is_named(tmp_path, capsys):
    for index in range(2):
        with Checkpoints(tmp_path, CheckpointPolicy(), WriterPart(index, 3)) as checkpoints:
            checkpoints.save(10, {"params": {f"w{index}": jnp.zeros(2)}}, {})
    code, text = command(capsys, "verify", tmp_path)
    assert (code, "part 2 of 3 cannot be seen" in text) == (1, True)
    assert "part 2 is missing" in command(capsys, "ls", tmp_path)[1]
    assert "step 10 lacks parts [2] of 3" in command(capsys, "show", tmp_path)[1]


def test_prune_keeps_the_newest_and_every_so_many(run, capsys):
    words = ["prune", run, "--keep", 1, "--keep-every", 20]
    code, text = command(capsys, *words, "--dry-run")
    assert code == 0
    assert "step 10: would be deleted\nstep 30: would be deleted\n" in text
    assert steps(run) == list(STEPS)
    assert "kept: 20, 40\n" in command(capsys, *words)[1]
    assert steps(run) == [20, 40]


def steps(run):
    return [reader.step for reader in find_readers(run / "checkpoints")]


def test_prune_counts_no_broken_step_and_leaves_the_newest_whole_one(run, capsys):
    damage(run, 40, flip)
    damage(run, 20, flip)
    code, text = command(capsys, "prune", run, "--keep", 1)
    assert code == 0
    assert steps(run) == [30, 40]  # 40 is newer: a run that goes on replaces it, and it may be mended
    assert "kept: 30\n" in text
    damage(run, 30, flip)
    code, text = command(capsys, "prune", run, "--keep", 1)
    assert (code, "is whole, so none is deleted" in text, steps(run)) == (2, True, [30, 40])


def test_prune_waits_for_no_run_that_trains(run, capsys):
    with (run / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, text = command(capsys, "prune", run, "--keep", 1)
    assert (code, f"a process is training in {run}" in text) == (2, True)
    assert steps(run) == list(STEPS)


@pytest.mark.parametrize("held", ["run/.lock", "run/checkpoints/.lock"])
@pytest.mark.parametrize("name", [".", "link", "moved", "../run"])
def test_prune_finds_the_lock_by_any_name_of_the_folder(held, name, run, tmp_path, capsys, monkeypatch):
    """`checkpoints` may lie on another disk, behind a link, where the run's own lock cannot be found."""
    if held == "run/checkpoints/.lock":
        (run / "checkpoints").rename(tmp_path / "moved")
        (run / "checkpoints").symlink_to(tmp_path / "moved")
    else:
        (tmp_path / "moved").symlink_to("run")
    (tmp_path / "link").symlink_to("run/checkpoints")
    where = {".": run / "checkpoints", "../run": run}.get(name, tmp_path)
    monkeypatch.chdir(where)
    with (tmp_path / held).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, text = command(capsys, "prune", name, "--keep", 1)
    assert (code, "a process is training in " in text) == (2, True)
    assert steps(run) == list(STEPS)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["lss"], "there is no command 'lss' (did you mean 'ls'?)"),
        (["ls", "{tmp}/none"], "there is no folder"),
        (["ls", "{tmp}"], "contains no checkpoints; give a run's folder"),
        (["show", "{run}", "--step", "5"], "has no step 5: there are 10, 20, 30, 40"),
        (["show", "{run}@10", "--step", "20"], "is step 10 and step 20 at once; name one"),
        (["prune", "{run}@10", "--keep", "1"], "is one step; give the run's folder"),
        (["prune", "{run}", "--keep", "0"], "keep is 0; use 1 or more"),
        (["export", "{run}", "{tmp}/out", "--using", "no.such"], "there is no module 'no.such'"),
        (["export", "{run}", "{tmp}/out", "--using", "json"], "json has no export_model"),
        (["import", "{tmp}/none", "{tmp}/out"], "there is no"),
        (["import", "{run}", "{run}"], "holds something already"),
    ],
)
def test_mistakes_are_told(words, text, saved, tmp_path, capsys):
    (tmp_path / "tmp").mkdir()
    code, printed = command(capsys, *(word.format(run=saved, tmp=tmp_path / "tmp") for word in words))
    assert code == 2
    assert text in printed
    assert steps(saved) == list(STEPS)


class TestFiles:
    """Export and import; the values are those of `tests/models/test_huggingface_files.py`."""

    def test_what_is_exported_comes_back_as_a_checkpoint_to_start_from(self, saved, tmp_path, capsys):
        code, text = command(
            capsys, "export", saved, tmp_path / "out", "--step", 20, "--max-shard-bytes", 9000
        )
        assert code == 0
        assert text.startswith("step 20 -> ")
        assert "model.safetensors.index.json" in text
        (tmp_path / "out" / "tokenizer.json").write_text("{}")
        code, text = command(capsys, "import", tmp_path / "out", tmp_path / "in")
        assert code == 0
        assert f"train on: shardtrain train {tmp_path / 'in' / 'run.py'}" in text
        _, text = command(capsys, "diff", f"{saved}@20", tmp_path / "in")
        assert "step: only in the first" in text
        assert "20 of 20 common arrays are the same" in text
        assert " params/" not in text
        assert (tmp_path / "in" / "tokenizer" / "tokenizer.json").read_text() == "{}"
        model = json.loads((tmp_path / "in" / "model.json").read_text())
        assert model["model"] == "shardtrain.models.decoder:DecoderConfig"
        run = load_run(str(tmp_path / "in" / "run.py"))
        assert run.start_from.checkpoint == tmp_path / "in"
        assert vars(run.model) == model["options"]

    def test_an_imported_checkpoint_is_exported_with_its_tokenizer(self, saved, tmp_path, capsys):
        command(capsys, "export", saved, tmp_path / "out")
        (tmp_path / "out" / "vocab.txt").write_text("a\n")
        command(capsys, "import", tmp_path / "out", tmp_path / "in")
        code, _ = command(capsys, "export", tmp_path / "in", tmp_path / "again", "--dtype", "float16")
        assert code == 0
        assert (tmp_path / "again" / "vocab.txt").read_text() == "a\n"
        about = json.loads((tmp_path / "again" / "config.json").read_text())
        assert (about["model_type"], about["dtype"]) == ("gpt2", "float16")

    def test_a_checkpoint_of_two_stages_is_exported_whole(self, saved, tmp_path, capsys):
        """Each has a block of its own, as stages across islands save them."""
        reader = find_readers(saved / "checkpoints")[0]
        arrays = {path: reader.read(path) for path in reader.leaves}
        for index in range(2):
            mine = {
                path: jnp.asarray(x[index : index + 1] if "/blocks/" in path else x)
                for path, x in arrays.items()
                if "/blocks/" in path or index == 0
            }
            origins = {path: ArrayOrigin(rows=(index,), num_rows=2) for path in mine if "/blocks/" in path}
            with Checkpoints(tmp_path / "cut", CheckpointPolicy(), WriterPart(index, 2)) as checkpoints:
                checkpoints.save(10, mine, reader.extra, origins)
        assert command(capsys, "export", tmp_path / "cut", tmp_path / "a")[0] == 0
        assert command(capsys, "export", f"{saved}@10", tmp_path / "b")[0] == 0
        first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
        assert first == second
        _, text = command(capsys, "diff", f"{saved}@10", tmp_path / "cut")
        assert text.endswith(f"{len(arrays)} of {len(arrays)} common arrays are the same\n")

    def test_a_broken_step_is_not_exported(self, run, tmp_path, capsys):
        damage(run, 40, flip)
        code, text = command(capsys, "export", run, tmp_path / "out")
        assert (code, "step 40 is broken and is not exported" in text) == (2, True)
        assert not (tmp_path / "out").exists()

    def test_a_checkpoint_that_does_not_tell_its_model_needs_the_run_file(self, tmp_path, capsys):
        with Checkpoints(tmp_path / "run", CheckpointPolicy()) as checkpoints:
            checkpoints.save(1, {"params": {"w": jnp.zeros(2)}}, {"run": {"model": "given in Python"}})
        code, text = command(capsys, "export", tmp_path / "run", tmp_path / "out")
        assert (code, "lacks its model's options" in text) == (2, True)
        gpt = Path(__file__).parents[2] / "examples" / "gpt_text.py"
        code, text = command(capsys, "export", tmp_path / "run", tmp_path / "out", "--run-file", gpt)
        assert (code, "embedding is missing; it needs shape (256, 128)" in text) == (2, True)

    def test_a_vision_transformer_gets_images(self, tmp_path, capsys):
        (tmp_path / "vit").mkdir()
        with np.load(GOLDEN / "vit.npz") as file:
            state = {n.removeprefix("weight/"): file[n] for n in file.files if n.startswith("weight/")}
            (tmp_path / "vit" / "config.json").write_text(str(file["config"]))
        save_file(state, tmp_path / "vit" / "model.safetensors")
        code, text = command(capsys, "import", tmp_path / "vit", tmp_path / "in")
        assert (code, "vit: 4,917 parameters" in text) == (0, True)
        run = load_run(str(tmp_path / "in" / "run.py"))
        assert (run.loss.__name__, run.data.classes, run.data.size) == ("classification_loss", 5, 8)
        run_file = tmp_path / "in" / "run.py"
        assert command(capsys, "export", tmp_path / "in", tmp_path / "out", "--run-file", run_file)[0] == 0
        # the newer names of the golden file are those of files, and no value has changed
        written = load_file(tmp_path / "out" / "model.safetensors")
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert from_huggingface(config, written)[0] == run.model
        expected = to_huggingface(*from_huggingface(config, state))
        assert written.keys() == expected.keys() != state.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(written[name], array)

    def bert(self, folder, files):
        folder.mkdir()
        with np.load(GOLDEN / "bert.npz") as file:
            state = {n.removeprefix("weight/"): file[n] for n in file.files if n.startswith("weight/")}
            (folder / "config.json").write_text(str(file["config"]))
        save_file({**state, "bert.pooler.dense.bias": np.zeros(16)}, folder / "model.safetensors")
        for name, text in files.items():
            (folder / name).write_text(text)

    @pytest.mark.parametrize(
        ("files", "token"),
        [
            ({}, None),
            ({"vocab.txt": "[PAD]\n[UNK]\n[MASK]\na\n"}, 2),
            ({"tokenizer.json": '{"added_tokens": [{"id": 7, "content": "[MASK]"}]}'}, 7),
        ],
    )
    def test_an_encoder_gets_masked_tokens(self, files, token, tmp_path, capsys):
        self.bert(tmp_path / "bert", files)
        code, text = command(capsys, "import", tmp_path / "bert", tmp_path / "in")
        assert code == 0
        assert "skipped, as the model has no such array: bert.pooler.dense.bias\n" in text
        about = json.loads((tmp_path / "in" / "model.json").read_text())
        assert about["mask_token"] == token
        assert ("the number of [MASK] was not found" in text) == (token is None)
        if token is None:
            with pytest.raises(ValueError, match=r'look it up, and write "mask_token": NUMBER there'):
                load_run(str(tmp_path / "in" / "run.py"))
            (tmp_path / "in" / "model.json").write_text(json.dumps({**about, "mask_token": 5}))
        run = load_run(str(tmp_path / "in" / "run.py"))
        assert run.loss.__name__ == "masked_token_loss"
        assert (run.model.segments, run.data.data.vocab, run.data.data.seq) == (3, 32, 12)
        assert run.data.mask_token == (5 if token is None else token)

    def test_nothing_of_a_download_stands_in_the_run_file(self, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        code = "open('proof', 'w')"
        for name, folder in (("a", f'"""\n{code}\n"""'), ("b", "plain")):
            self.bert(tmp_path / folder, {"vocab.txt": "[MASK]\n"})
            assert command(capsys, "import", tmp_path / folder, tmp_path / name)[0] == 0
            load_run(str(tmp_path / name / "run.py"))
        first, second = ((tmp_path / name / "run.py").read_text() for name in "ab")
        assert first == second
        assert code not in first
        assert not (tmp_path / "proof").exists()

    @pytest.mark.parametrize(
        ("token", "words"),
        [
            ("4 if open('proof', 'w') else 4", "the id of [MASK] in "),
            (32, "is 32; it is a whole number from 0 to 31"),
            (-1, "is -1; it is a whole number from 0 to 31"),
            (True, "is True; it is a whole number from 0 to 31"),
            (4.0, "is 4.0; it is a whole number from 0 to 31"),
        ],
    )
    def test_a_token_that_is_no_number_is_refused(self, token, words, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        added = {"added_tokens": [{"id": token, "content": "[MASK]"}]}
        self.bert(tmp_path / "bert", {"tokenizer.json": json.dumps(added)})
        code, text = command(capsys, "import", tmp_path / "bert", tmp_path / "in")
        assert (code, words in text) == (2, True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bert"]

    def test_options_that_were_spoilt_since_are_refused_when_the_run_file_is_read(self, tmp_path, capsys):
        self.bert(tmp_path / "bert", {"vocab.txt": "[MASK]\n"})
        assert command(capsys, "import", tmp_path / "bert", tmp_path / "in")[0] == 0
        about = json.loads((tmp_path / "in" / "model.json").read_text())
        about["options"] |= {"vocab": "32", "eps": True, "mine": 1}
        (tmp_path / "in" / "model.json").write_text(json.dumps(about))
        with pytest.raises(ValueError, match="does not describe a EncoderConfig") as error:
            load_run(str(tmp_path / "in" / "run.py"))
        assert [line[4:] for line in str(error.value).splitlines()[1:]] == [
            "'mine' is no option of EncoderConfig",
            "vocab is '32', and not of kind int",
            "eps is True, and not of kind float",
        ]

    def test_export_touches_no_folder_that_it_did_not_make(self, saved, tmp_path, capsys):
        (tmp_path / "out.partial").mkdir()
        (tmp_path / "out.partial" / "thesis.txt").write_text("mine")
        (tmp_path / "out").mkdir()
        assert command(capsys, "export", saved, tmp_path / "out")[0] == 0
        assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "mine"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial"]
