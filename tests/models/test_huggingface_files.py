"""Folders as transformers reads and writes them. That they agree, `make_golden.py` records."""

import json
import os
import sys
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from golden_models import load_model as load
from safetensors.numpy import load_file, save_file

from shardtrain.models.huggingface import from_huggingface
from shardtrain.models.huggingface.files import export_model, import_model, make_config
from shardtrain.models.imagenet_resnet import ImageNetResNetConfig

FAMILIES = ("gpt2", "llama", "phi3", "gemma3", "mixtral", "bert", "resnet18")


def flat(params) -> dict[str, Any]:
    return flatten_dict(params, sep="/")


@pytest.fixture(params=FAMILIES)
def model(request):
    """(name of the family, config, path -> array, the same as a state dict)"""
    hf_config, state = load(request.param)
    config, params = from_huggingface(hf_config, state)
    return request.param, config, flat(params), state


def export(folder, config, arrays, **options):
    shapes = {path: x.shape for path, x in arrays.items()}
    return export_model(folder, vars(config), shapes, arrays.__getitem__, **options)


def filled(config):
    """The configuration as config.json has it."""
    if isinstance(config, ImageNetResNetConfig):
        return config
    rotary = getattr(config, "positions", "learned") == "rotary"
    heads = {"head_dim": config.sizes["head_dim"]} if rotary else {}
    return replace(config, mlp=config.sizes["mlp"], **heads)


def assert_imported(folder, config, arrays):
    found = import_model(folder)
    assert found.config == config
    read = dict(found.arrays)
    assert read.keys() == arrays.keys()
    for path, x in arrays.items():
        assert read[path].dtype == np.float32
        np.testing.assert_array_equal(read[path], x, err_msg=path)


def test_a_folder_comes_back_bitwise(model, tmp_path):
    family, config, arrays, state = model
    assert export(tmp_path / "out", config, arrays) == ["config.json", "model.safetensors"]
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == state.keys()
    for name, x in state.items():
        np.testing.assert_array_equal(written[name], x, err_msg=name)
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["model_type"]
        == load(family)[0]["model_type"]
    )
    assert_imported(tmp_path / "out", filled(config), arrays)


def test_several_files_have_an_index_and_none_is_too_long(model, tmp_path):
    _, config, arrays, state = model
    names = export(tmp_path / "out", config, arrays, max_shard_bytes=4096)
    parts = [name for name in names if name.startswith("model-")]
    assert parts == [f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
    assert len(parts) > 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in state.values())
    for name in parts:
        inside = load_file(tmp_path / "out" / name)
        assert {key for key, part in index["weight_map"].items() if part == name} == inside.keys()
        assert len(inside) == 1 or sum(x.nbytes for x in inside.values()) <= 4096
    assert_imported(tmp_path / "out", filled(config), arrays)


def test_half_of_the_bytes(model, tmp_path):
    _, config, arrays, _ = model
    export(tmp_path / "out", config, arrays, dtype="bfloat16")
    rounded = {path: x.astype(ml_dtypes.bfloat16).astype(np.float32) for path, x in arrays.items()}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert_imported(tmp_path / "out", filled(config), rounded)


def test_tokenizer_files_go_through_and_tell_the_special_tokens(tmp_path):
    config, params = from_huggingface(*load("gpt2"))
    given = tmp_path / "tokenizer"
    given.mkdir()
    for name in ("tokenizer.json", "vocab.txt", "merges.txt", "README.md", "model.safetensors"):
        (given / name).write_text(name)
    (given / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 99}')
    names = export(tmp_path / "out", config, flat(params), tokenizer=given)
    copied = {"tokenizer.json", "vocab.txt", "merges.txt"}
    assert set(names) == {"config.json", "model.safetensors", *copied}
    assert [(tmp_path / "out" / name).read_text() for name in sorted(copied)] == sorted(copied)
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (about["bos_token_id"], about["eos_token_id"], about["pad_token_id"]) == (1, 2, None)
    assert about["vocab_size"] == config.vocab
    assert {path.name for path in import_model(tmp_path / "out").tokenizer} == copied


def test_a_folder_that_holds_something_is_left_alone(model, tmp_path):
    _, config, arrays, _ = model
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds something already"):
        export(tmp_path, config, arrays)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_one_array_is_read_at_a_time(tmp_path):
    config, params = from_huggingface(*load("llama"))
    arrays, held = flat(params), []

    def read(path):
        held.append(path)
        return arrays[path]

    shapes = {path: x.shape for path, x in arrays.items()}
    export_model(tmp_path / "out", vars(config), shapes, read, max_shard_bytes=2048)
    assert sorted(held) == sorted(arrays)
    found = import_model(tmp_path / "out").arrays
    assert iter(found) is found  # nothing is read before it is asked for
    assert next(found)[0] == "embedding"


def test_options_tell_the_kind_of_model(model):
    _, config, _, _ = model
    assert make_config(vars(config)) == config


def test_options_of_another_model_are_refused():
    with pytest.raises(ValueError, match="no one model that a Hugging Face family has") as error:
        make_config({"features": 4, "mlp": 8, "num_layers": 1})
    lines = str(error.value).splitlines()[1:]
    kinds = ["DecoderConfig", "EncoderConfig", "EncoderDecoderConfig", "ImageNetResNetConfig", "VitConfig"]
    assert [line.split(":")[0].strip() for line in lines] == kinds
    assert "vocab is missing" in lines[0]
    assert "features is no option" in lines[1]


def test_what_is_not_there_or_damaged_is_told(tmp_path):
    hf_config, state = load("gpt2")
    with pytest.raises(FileNotFoundError, match=r"there is no .*config\.json; give a folder with config"):
        import_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors; give a folder with"):
        import_model(tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"cannot be read: .*; download or copy it again"):
        import_model(tmp_path)
    del state["transformer.wpe.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"transformer\.wpe\.weight is missing; it needs shape \(12, 16\)"):
        import_model(tmp_path)


def test_without_the_extra_the_way_to_it_is_told(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(load("gpt2")[0]))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match="comes with the extra hf: uv sync --extra hf"):
        import_model(tmp_path)


def test_the_limit_of_a_file_and_the_dtype_are_checked(tmp_path):
    config, params = from_huggingface(*load("gpt2"))
    arrays = flat(params)
    with pytest.raises(ValueError, match="dtype is 'bf16'; allowed are"):
        export(tmp_path / "out", config, arrays, dtype="bf16")
    with pytest.raises(ValueError, match="max_shard_bytes is 0"):
        export(tmp_path / "out", config, arrays, max_shard_bytes=0)


def import_with(tmp_path, change, family="gpt2", files=()):
    """What a folder with a changed config.json, or changed files, is refused with."""
    config, state = load(family)
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    save_file(state, tmp_path / "model.safetensors")
    for name, content in dict(files).items():
        (tmp_path / name).unlink(missing_ok=True)
        content(tmp_path / name) if callable(content) else (tmp_path / name).write_text(content)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        dict(import_model(tmp_path).arrays)
    return str(error.value)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("gpt2", {"n_layer": 10**9}, "the config has 1000000000 layers, and the files have "),
        ("mixtral", {"num_local_experts": 10**8}, "has 2 layers of 100000000 experts, and the files have 41"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0; it is a whole number from 1"),
        ("gpt2", {"n_layer": "2"}, "n_layer is '2'; it is a whole number from 1 to 2147483647"),
        ("gpt2", {"n_layer": True}, "n_layer is True; it is a whole number"),
        ("gpt2", {"vocab_size": 33}, "wte.weight has shape (32, 16); it needs shape (33, 16)"),
        ("gpt2", {"vocab_size": 2**31}, "vocab_size is 2147483648; it is a whole number"),
        ("gpt2", {"n_embd": -4}, "n_embd is -4; it is a whole number from 1"),
        ("bert", {"layer_norm_eps": float("inf")}, "Infinity is no number in JSON"),
        ("bert", {"layer_norm_eps": "1e-5"}, "layer_norm_eps is '1e-5'; it is a number from 1e-30 to 1"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters is [1]; it is an object, or null"),
        ("llama", {"rope_parameters": {"rope_theta": "1"}}, "rope_theta is '1'; it is a number from 1 to"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it is true or false"),
        ("gpt2", {"model_type": ["gpt2"]}, "model_type is ['gpt2'], a family that cannot be read yet"),
        ("gpt2", {"activation_function": {}}, "activation_function is {}; Decoder has"),
    ],
)
def test_entries_of_a_config_that_are_refused(family, change, words, tmp_path):
    assert words in import_with(tmp_path, change, family)


OUT = "is a link out of its folder, to /etc/"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": "[1]"}, "config.json is [1]; it is an object of names and values"),
        ({"config.json": '{"a": 1, "a": 2}'}, "the key 'a' occurs twice"),
        ({"config.json": "[" * 99_999}, "it is nested deeper than 64 levels"),
        ({"config.json": os.mkfifo}, "config.json is a FIFO, not a regular file"),
        ({"model.safetensors": os.mkfifo}, "has no model.safetensors"),
        ({"model.safetensors.index.json": '{"weight_map": []}'}, "has no weight_map from names"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "../x"}}'}, "leads out of its folder"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "/dev/zero"}}'}, "leads out of its folder"),
        ({"model.safetensors": "\xff" * 99}, "cannot be read: "),
        ({"config.json": lambda path: path.symlink_to("/etc/hostname")}, OUT),
        ({"tokenizer.json": lambda path: path.symlink_to("/etc/passwd")}, OUT),
        ({"model.safetensors": lambda path: path.symlink_to("../else")}, "is a link out of its folder"),
    ],
)
def test_files_of_a_download_that_are_refused(files, words, tmp_path):
    (tmp_path / "in").mkdir()
    save_file(load("gpt2")[1], tmp_path / "else")
    assert words in import_with(tmp_path / "in", {}, files=files)


def test_arrays_that_are_no_parameters_are_refused(tmp_path):
    _, state = load("gpt2")
    wrong = {**state, "transformer.wpe.weight": np.zeros((12, 16), np.int64), "a\x1b[2J": np.zeros(1)}
    said = import_with(tmp_path, {}, files={"model.safetensors": lambda path: save_file(wrong, path)})
    assert "transformer.wpe.weight has dtype I64; parameters have F64, F32, F16 or BF16" in said
    assert r"'a\x1b[2J' has control characters in its name" in said


def test_values_that_are_no_numbers_are_named_with_their_array(tmp_path):
    _, state = load("gpt2")
    wrong = state["transformer.wpe.weight"].copy()
    wrong[0, :2] = np.nan, np.inf
    damaged = {**state, "transformer.wpe.weight": wrong}
    said = import_with(tmp_path, {}, files={"model.safetensors": lambda path: save_file(damaged, path)})
    assert "has 2 values that are no numbers (NaN or infinite) among the" in said
    assert "of transformer.wpe.weight; download" in said


def test_quantized_weights_are_named(tmp_path):
    said = import_with(tmp_path, {"quantization_config": {"quant_method": "gptq"}})
    assert "quantization_config is {'quant_method': 'gptq'}, and quantized weights are not read" in said


def test_the_cache_of_the_hub_is_read_through_its_links(tmp_path):
    config, state = load("gpt2")
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0f", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text(json.dumps(config))
    save_file(state, blobs / "2")
    (blobs / "3").write_text("{}")
    for blob, name in (("1", "config.json"), ("2", "model.safetensors"), ("3", "tokenizer.json")):
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    found = import_model(snapshot)
    assert [path.name for path in found.tokenizer] == ["tokenizer.json"]
    assert len(dict(found.arrays)) > 10


def test_special_tokens_that_are_no_numbers_are_not_exported(tmp_path):
    config, params = from_huggingface(*load("gpt2"))
    (tmp_path / "config.json").write_text('{"bos_token_id": "x", "eos_token_id": [1, 2]}')
    with pytest.raises(ValueError, match="bos_token_id is 'x'; it is a whole number from 0"):
        export(tmp_path / "out", config, flat(params), tokenizer=tmp_path)
    assert not (tmp_path / "out").exists()
