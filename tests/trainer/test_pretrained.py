"""Runs that start from a folder of Hugging Face: its model, its parameters, its tokenizer."""

import importlib.util
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from fine_tuning import initial, paths, run_of
from safetensors.numpy import load_file, save_file

from shardtrain import Corpus, read_pretrained
from shardtrain.checkpoints.reader import CheckpointReader
from shardtrain.cli.checkpoint_files import Export, Import, export_checkpoint, import_checkpoint
from shardtrain.cli.run_file import load_run
from shardtrain.cli.run_options import parse_run
from shardtrain.data import write_tokens
from shardtrain.functional.frozen import drop_paths
from shardtrain.functional.model import path_text
from shardtrain.functional.nnx_model import convert_model
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.huggingface.files import export_model
from shardtrain.models.lora import Lora
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.config import StartFrom
from shardtrain.trainer.pretrained import add_adapters, open_pretrained
from shardtrain.trainer.resume import find_parameters
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.train import train
from shardtrain.trainer.trained_model import load

MODEL = DecoderConfig(
    vocab=64, seq=8, embed=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp=32,
    positions="rotary", norm="rmsnorm", activation="swiglu", bias=False, tied=False,
)  # fmt: skip
PROGRAMS = Path(__file__).parents[1] / "programs"
MESH = Strategy(layout=Layout(mesh={"data": 2, "fsdp": 2, "tensor": 2}))
PIPELINE = Strategy(layout=Layout(mesh={"pipeline": 2, "data": 4}), accumulate=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(folder, its parameters), in several files."""
    params = initial(run_of(MODEL, seed=5))
    arrays = {path_text(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)}
    folder = tmp_path_factory.mktemp("pretrained") / "base"
    shapes = {path: x.shape for path, x in arrays.items()}
    files = export_model(folder, vars(MODEL), shapes, arrays.__getitem__, max_shard_bytes=10_000)
    assert len(files) > 3
    (folder / "tokenizer.json").write_text("{}")
    return folder, params


@pytest.mark.full
def test_parameters_in_a_pipeline_are_those_of_the_folder_and_new_adapters_are_trained(base, tmp_path):
    folder, params = base
    model = read_pretrained(folder, lora=Lora(rank=2, on=("q", "v")))
    assert model == replace(MODEL, lora=Lora(rank=2, on=("q", "v")))
    start = StartFrom(checkpoint=folder)
    run = run_of(model, tmp_path, steps=1, strategy=PIPELINE, start_from=start)
    found = jax.device_get(train(run, None).state.params)
    kept = drop_paths(found, set(paths(found)) - set(paths(params)))
    jax.tree.map(np.testing.assert_array_equal, kept, params)
    assert np.abs(found["blocks"]["attention"]["q"]["lora_b"]).max() > 0


@pytest.mark.full
def test_islands_and_stages_start_from_a_folder(base, mpiexec, tmp_path):
    """Each stage reads its own blocks; losses and trained adapters are those of replicas."""
    mpiexec(2, PROGRAMS / "pretrained_islands.py", base[0], tmp_path)


def test_a_folder_is_loaded_as_a_model(base):
    folder, params = base
    model = load(folder, read_pretrained(folder))
    np.testing.assert_array_equal(
        model.blocks.mlp.gate.kernel[...], params["blocks"]["mlp"]["gate"]["kernel"]
    )


def test_the_tokens_that_end_a_text_come_through(base, tmp_path, one_device, capsys):
    """Import, export, and a run that starts from the import keep the end tokens that hold."""
    folder, imported = tmp_path / "base", tmp_path / "in"
    shutil.copytree(base[0], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": 1, "eos_token_id": [3, 5]}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    import_checkpoint(Import(folder=folder, out=imported))
    assert find_parameters(imported).extra["tokens"] == find_parameters(folder).extra["tokens"]
    for steps in (1, 2):
        run = run_of(MODEL, tmp_path / "run", steps=steps, start_from=StartFrom(checkpoint=folder))
        train(run, None)
    for name in ("in", "run"):
        out = tmp_path / f"{name}_out"
        export_checkpoint(Export(run=str(tmp_path / name), out=out))
        about = json.loads((out / "config.json").read_text())
        assert [about[f"{which}_token_id"] for which in ("bos", "eos", "pad")] == [1, [5, 7], None]
    # a folder that names others has the last word
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    (folder / "config.json").unlink()
    export_checkpoint(Export(run=str(imported), out=tmp_path / "other", tokenizer=folder))
    assert json.loads((tmp_path / "other/config.json").read_text())["eos_token_id"] == 9


def test_one_option_sets_model_parameters_and_tokenizer(base, tmp_path, monkeypatch):
    folder, _ = base
    monkeypatch.chdir(tmp_path)
    Path("my_run.py").write_text(
        "from shardtrain import *\nfrom shardtrain.models.decoder import DecoderConfig\n"
        "MODEL = DecoderConfig(vocab=8, seq=8, embed=8, num_layers=1, num_heads=2, dtype='bfloat16')\n"
        "def run(): return Run(model=MODEL, data=Chat())\n"
        "def corpus(): return Run(model=MODEL, data=Corpus())\n"
        "BOTH = Mixture(parts={'a': Chat(), 'b': Chat()}, weights='a 1 b 1')\n"
        "def mixture(): return Run(model=MODEL, data=BOTH)\n"
    )
    words = ["--start-from", str(folder), "--model.lora", "rank=2"]
    run, _ = parse_run("train", ["my_run.py", *words])
    assert run.model == replace(MODEL, lora=Lora(rank=2), dtype="bfloat16")
    assert run.start_from.checkpoint == folder
    assert run.data.tokenizer == str(folder)
    kept, _ = parse_run("train", ["my_run.py", *words, "--data.tokenizer", "other"])
    assert kept.data.tokenizer == "other"
    plain, _ = parse_run("train", ["my_run.py"])
    assert (plain.model.vocab, plain.data.tokenizer) == (8, "bytes")
    # parts of a mixture that would read bytes have it too
    mixed, _ = parse_run("train", ["my_run.py:mixture", *words, "--data.parts.b.tokenizer", "other"])
    assert [part.tokenizer for part in mixed.data.parts.values()] == [str(folder), "other"]
    # however the option is spelt
    spelt, _ = parse_run("train", ["my_run.py", "--start_from", str(folder)])
    assert (spelt.model.vocab, spelt.data.tokenizer) == (run.model.vocab, str(folder))
    # text is read by the folder's tokenizer, and files of tokens have theirs
    write_tokens(tmp_path / "a.npy", [range(9)])
    Path("a.txt").write_text("a")
    for path, tokenizer in (("a.txt", str(folder)), ("a.npy", "bytes")):
        found, _ = parse_run("train", ["my_run.py:corpus", *words, "--data", path])
        assert isinstance(found.data, Corpus)
        assert found.data.tokenizer == tokenizer


def test_starts_that_are_refused(base, tmp_path, one_device):
    folder, _ = base
    run = run_of(replace(MODEL, mlp=16), tmp_path, start_from=StartFrom(checkpoint=folder), steps=1)
    text = "mlp/up/kernel: saved float32 (2, 16, 32), asked for float32 (2, 16, 16)"
    with pytest.raises(ValueError, match=re.escape(text)):
        train(run, None)
    with pytest.raises(ValueError, match="is a folder of Hugging Face, which has no steps; leave step 3 out"):
        open_pretrained(folder, 3)


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """(folder of adapters, their parameters by path, the option of the model)."""
    model = replace(MODEL, lora=Lora(rank=3, alpha=6, on=("q", "o", "down")))
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(convert_model(model).init, jax.random.key(0))[0]
    arrays = {
        path_text(path): random.normal(size=x.shape).astype(np.float32)
        for path, x in jax.tree.leaves_with_path(shapes)
        if "lora" in path_text(path)
    }
    folder = tmp_path_factory.mktemp("adapters") / "adapter"
    export_model(folder, vars(model), {}, arrays.__getitem__, adapters=True)
    return folder, arrays, model


def changed(folder, out, entries=None, arrays=None):
    """A copy of a folder of adapters with other entries and arrays; None leaves one out."""
    out.mkdir()
    about = json.loads((folder / "adapter_config.json").read_text()) | (entries or {})
    (out / "adapter_config.json").write_text(json.dumps(about))
    found = load_file(folder / "adapter_model.safetensors") | (arrays or {})
    kept = {name: x for name, x in found.items() if x is not None}
    save_file(kept, out / "adapter_model.safetensors")
    return out


def test_adapters_of_peft_come_back_bitwise_beside_their_model(base, tuned, tmp_path):
    folder, params = base
    adapter, arrays, model = tuned
    as_peft_writes = {
        "target_modules": ["q_proj"],
        "use_dora": False,
        "rank_pattern": {},
        "auto_mapping": None,
    }
    adapter = changed(adapter, tmp_path / "peft", as_peft_writes)
    config = read_pretrained(folder, adapter)
    assert config.lora == model.lora
    reader = add_adapters(open_pretrained(folder), adapter, config)
    for path, x in arrays.items():
        np.testing.assert_array_equal(reader.read(f"params/{path}"), x)
    np.testing.assert_array_equal(reader.read("params/embedding"), params["embedding"])
    assert len(reader.leaves) == len(jax.tree.leaves(params)) + len(arrays)


def test_an_import_has_the_adapters_and_an_export_merges_them(base, tuned, tmp_path, capsys):
    folder, params = base
    adapter, arrays, model = tuned
    (folder / "tokenizer.json").write_text("{}")
    assert import_checkpoint(Import(folder=folder, out=tmp_path / "in", adapter=adapter)) == 0
    assert "lora=Lora(rank=3, alpha=6, on=('q', 'o', 'down'))" in capsys.readouterr().out
    run = load_run(str(tmp_path / "in" / "run.py"))
    assert run.model.lora == model.lora
    found = find_parameters(tmp_path / "in")
    for path, x in arrays.items():
        np.testing.assert_array_equal(found.read(f"params/{path}"), x)
    # the adapters alone come back bitwise, and merged ones are those of a merge by hand
    assert export_checkpoint(Export(run=str(tmp_path / "in"), out=tmp_path / "peft", adapters=True)) == 0
    again, before = (load_file(each / "adapter_model.safetensors") for each in (tmp_path / "peft", adapter))
    assert again.keys() == before.keys()
    assert all(np.array_equal(again[name], before[name]) for name in before)
    assert export_checkpoint(Export(run=str(tmp_path / "in"), out=tmp_path / "out")) == 0
    merged = load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    first, second = (arrays[f"blocks/mlp/down/lora_{kind}"][1] for kind in "ab")
    kernel = np.asarray(params["blocks"]["mlp"]["down"]["kernel"])[1]
    np.testing.assert_allclose(merged, (kernel + 2 * first @ second).T, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="is missing; it needs shape"):
        import_checkpoint(
            Import(
                folder=folder,
                out=tmp_path / "no",
                adapter=changed(adapter, tmp_path / "x", {}, {FIRST: None}),
            )
        )
    assert not (tmp_path / "no").exists()


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("entries", "arrays", "text"),
    [
        ({"use_dora": True}, {}, "use_dora is True; lora has False or None only"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights is 'pissa'"),
        ({"r": 0}, {}, "r is 0; it is a whole number from 1"),
        ({"lora_alpha": "6"}, {}, "lora_alpha is '6'; it is a number"),
        ({"r": 4}, {}, f"{FIRST} has shape (3, 16); it needs shape (4, 16)"),
        ({}, {FIRST: None}, f"{FIRST} is missing; it needs shape (3, 16)"),
        ({}, {"base_model.model.lm_head.lora_A.weight": np.ones(2)}, "lm_head.lora_A.weight is extra"),
    ],
)
def test_other_adapters_are_refused(entries, arrays, text, base, tuned, tmp_path):
    with pytest.raises(ValueError, match=re.escape(text)):
        read_pretrained(base[0], changed(tuned[0], tmp_path / "other", entries, arrays))


def test_adapters_that_do_not_fit_the_run_are_refused(base, tuned, tmp_path, monkeypatch):
    folder, adapter = base[0], tuned[0]
    other = read_pretrained(folder, lora=Lora(rank=3, on=("q", "o", "down")))
    with pytest.raises(ValueError, match=r"lora rank=3,on=q\+o\+down, and the adapters in .*alpha=6,"):
        add_adapters(open_pretrained(folder), adapter, other)
    with pytest.raises(ValueError, match="adapter is a of no model; give its folder as checkpoint too"):
        StartFrom(adapter=Path("a"))
    with pytest.raises(ValueError, match="added only to the parameters of a folder of Hugging Face"):
        add_adapters(CheckpointReader(step=0, folders={}, num_parts=1), adapter, MODEL)
    monkeypatch.chdir(tmp_path)
    Path("my_run.py").write_text(
        "from shardtrain import *\nfrom shardtrain.models.mlp import MlpConfig\n"
        "def run(): return Run(model=MlpConfig(features=2, mlp=2, num_layers=1, classes=2), data=Chat())\n"
    )
    words = ["--start-from", str(folder), "--start-from.adapter", str(adapter)]
    assert parse_run("train", ["my_run.py", *words])[0].model == read_pretrained(folder, adapter)


def test_the_example_tunes_a_folder_and_writes_one_with_the_same_logits(tmp_path, one_device):
    path = Path(__file__).parents[2] / "examples/fine_tune.py"
    spec = importlib.util.spec_from_file_location("fine_tune", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main(tmp_path, steps=20) < 1e-5
    assert {"chat_template", "eos_token"} <= set(
        json.loads((tmp_path / "merged/tokenizer_config.json").read_text())
    )
    lines = (tmp_path / "tuned/metrics.jsonl").read_text().splitlines()
    losses = [line["train/loss"] for line in map(json.loads, lines) if "train/loss" in line]
    assert losses[-1] < losses[0] - 0.05
