"""The converter: bitwise both ways, names it accepts, and every problem at once. Values: test_parity.py."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.encoder import EncoderConfig
from shardtrain.models.huggingface import (
    from_huggingface,
    left_out,
    read_config,
    tensor_shapes,
    tensors,
    to_huggingface,
    write_config,
)
from shardtrain.models.mlp import MlpConfig

FAMILIES = ("gpt2", "llama", "bert")
GOLDEN = Path(__file__).parent / "golden"


def load(family):
    """The config and state dict of a golden file."""
    with np.load(GOLDEN / f"{family}.npz") as file:
        state = {n.removeprefix("weight/"): file[n] for n in file.files if n.startswith("weight/")}
        return json.loads(str(file["config"])), state


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert actual[name].dtype == x.dtype, name
        np.testing.assert_array_equal(actual[name], x, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bitwise(family):
    hf_config, state = load(family)
    config, params = from_huggingface(hf_config, state)
    assert_same(to_huggingface(config, params), state)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_back_and_there_is_bitwise_for_any_weights_and_dtype(family, tied, pure):
    hf_config, _ = load(family)
    hf_config["tie_word_embeddings"] = tied
    config = replace(from_huggingface(*load(family))[0], tied=tied)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), pure(config).params)
    state = to_huggingface(config, params)
    again_config, again = from_huggingface(hf_config, state)
    assert again_config == config
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_configuration_is_read():
    assert from_huggingface(*load("gpt2"))[0] == DecoderConfig(
        vocab=32, seq=12, embed=16, num_layers=2, num_heads=4
    )
    assert from_huggingface(*load("llama"))[0] == DecoderConfig(
        vocab=32, seq=12, embed=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp=24,
        positions="rotary", theta=500.0, norm="rmsnorm", activation="swiglu", bias=False, tied=False,
    )  # fmt: skip


def test_the_configuration_of_an_encoder_is_read():
    config, _ = from_huggingface(*load("bert"))
    assert config == EncoderConfig(vocab=32, seq=12, embed=16, num_layers=2, num_heads=4, mlp=24, segments=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_written_configuration_is_read_as_it_was(family):
    """Ours has only what a family needs; all that it has comes back, so does what is not the default."""
    config, _ = from_huggingface(*load(family))
    other = replace(config, tied=not config.tied, eps=0.125)
    if family != "llama":
        other = replace(other, activation="gelu" if family == "bert" else "gelu_erf")
    for each in (config, other):
        each = replace(each, mlp=each.sizes["mlp"])
        written = json.loads(json.dumps(write_config(each)))
        assert (written["model_type"], read_config(written)[1]) == (family, each)


def test_names_of_the_first_bert_files_and_what_has_no_place():
    """The published file says gamma and beta, and has a pooler, a second task and the tied head twice."""
    config, state = load("bert")
    older = {
        n.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): x for n, x in state.items()
    }
    older["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
    older["cls.predictions.decoder.bias"] = state["cls.predictions.bias"]
    older["bert.embeddings.position_ids"] = np.arange(12)[None]
    dropped = {"bert.pooler.dense.bias": np.zeros(16), "cls.seq_relationship.bias": np.zeros(2)}
    assert_same(to_huggingface(*from_huggingface(config, {**older, **dropped})), state)
    assert left_out(config, {**older, **dropped}) == sorted(dropped)


def test_an_untied_encoder_has_the_bias_that_is_used_and_the_one_that_is_not(pure):
    config = replace(from_huggingface(*load("bert"))[0], tied=False)
    state = to_huggingface(config, pure(config).params)
    used, unused = "cls.predictions.decoder.bias", "cls.predictions.bias"
    np.testing.assert_array_equal(state[used], state[unused])
    hf_config = {**load("bert")[0], "tie_word_embeddings": False}
    _, params = from_huggingface(hf_config, {**state, unused: np.zeros(32)})
    np.testing.assert_array_equal(params["head_bias"], state[used])


def test_arrays_are_read_one_after_the_other(pure):
    """Queries, keys and values are read together, for they are one array over there; nothing else is."""
    config, params = from_huggingface(*load("gpt2"))
    flat = {"/".join(key.key for key in path): x for path, x in jax.tree.leaves_with_path(params)}
    asked = []

    def read(path):
        asked.append(path)
        return flat[path]

    shapes = {path: x.shape for path, x in flat.items()}
    given = []
    for name, array in tensors(config, shapes, read):
        given.append((name, array.shape, len(asked)))
    assert {name: shape for name, shape, _ in given} == tensor_shapes(config)
    assert [name for name, _, _ in given] == list(tensor_shapes(config))
    assert sorted(asked) == sorted(flat)
    assert [num for _, _, num in given][:2] == [1, 2]


def test_older_llama_configs_have_theta_beside_the_rest():
    config, state = load("llama")
    del config["rope_parameters"]
    assert from_huggingface({**config, "rope_theta": 700.0}, state)[0].theta == 700.0
    assert from_huggingface(config, state)[0].theta == 10_000.0


def test_gpt2_names_of_the_hub_with_buffers_and_tied_head():
    """Published GPT-2 files have no prefix, the mask as a buffer, and may repeat the embedding."""
    config, state = load("gpt2")
    bare = {name.removeprefix("transformer."): x for name, x in state.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 12, 12))
    bare["lm_head.weight"] = bare["wte.weight"]
    assert_same(to_huggingface(*from_huggingface(config, bare)), state)


def test_a_head_that_is_not_tied_is_refused():
    config, state = load("gpt2")
    with pytest.raises(ValueError, match="differs") as error:
        from_huggingface(config, {**state, "lm_head.weight": state["transformer.wte.weight"] + 1})
    assert str(error.value).splitlines()[1:] == [
        "  lm_head.weight differs from transformer.wte.weight, to which it is tied."
        " Set tie_word_embeddings to false in the config."
    ]


def test_all_names_that_are_wrong_are_listed():
    config, state = load("llama")
    del state["model.norm.weight"], state["model.layers.1.mlp.up_proj.weight"]
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].T
    state["model.layers.2.mlp.up_proj.weight"] = np.zeros((24, 16))
    with pytest.raises(ValueError, match="missing") as error:
        from_huggingface(config, state)
    assert str(error.value).splitlines() == [
        "state dict of a llama model:",
        "  model.layers.1.mlp.up_proj.weight is missing; it needs shape (24, 16)",
        "  model.norm.weight is missing; it needs shape (16,)",
        "  model.embed_tokens.weight has shape (16, 32); it needs shape (32, 16)",
        "  model.layers.2.mlp.up_proj.weight is extra; leave it out",
    ]


def test_all_parameters_that_are_wrong_are_listed():
    config, params = from_huggingface(*load("gpt2"))
    del params["positions"]
    params["final_norm"]["bias"] = np.zeros(3)
    params["blocks"]["mlp"]["gate"] = {"kernel": np.zeros((2, 16, 64))}
    with pytest.raises(ValueError, match="missing") as error:
        to_huggingface(config, params)
    assert str(error.value).splitlines() == [
        "params:",
        "  positions is missing; it needs shape (12, 16)",
        "  final_norm/bias has shape (3,); it needs shape (16,)",
        "  blocks/mlp/gate/kernel is extra; leave it out",
    ]


@pytest.mark.parametrize(
    ("family", "changes", "problems"),
    [
        (
            "gpt2",
            {"model_type": "gpt3"},
            [
                "model_type is 'gpt3', a family that cannot be read yet; those that can are"
                " 'gpt2', 'llama', 'bert'"
            ],
        ),
        (
            "gpt2",
            {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True},
            [
                "activation_function is 'relu'; Decoder has 'gelu_new' or 'gelu_pytorch_tanh' or 'gelu' only",
                "scale_attn_by_inverse_layer_idx is True; Decoder has False only",
            ],
        ),
        (
            "llama",
            {"attention_bias": True, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}},
            [
                "attention_bias is True; Decoder has False only",
                "rope_type is 'llama3'; Decoder has 'default' only",
            ],
        ),
    ],
)
def test_configurations_that_decoder_lacks_are_refused(family, changes, problems):
    config, state = load(family)
    with pytest.raises(ValueError, match="config") as error:
        from_huggingface({**config, **changes}, state)
    assert str(error.value).splitlines() == [
        "Hugging Face config:",
        *(f"  {problem}" for problem in problems),
    ]


def test_an_incomplete_configuration_is_refused():
    config, state = load("llama")
    del config["hidden_size"], config["vocab_size"]
    with pytest.raises(ValueError, match="missing") as error:
        from_huggingface(config, state)
    assert str(error.value).splitlines()[1:] == ["  vocab_size is missing", "  hidden_size is missing"]


def test_decoders_of_neither_family_are_refused():
    config = DecoderConfig(vocab=8, seq=4, embed=8, num_layers=1, num_heads=2, num_kv_heads=1, norm="rmsnorm")
    with pytest.raises(ValueError, match="written as") as error:
        to_huggingface(config, {})
    assert str(error.value).splitlines() == [
        "DecoderConfig written as a gpt2 model:",
        "  norm is 'rmsnorm'; gpt2 has 'layernorm' only",
        "  num_kv_heads is 1; gpt2 has as many as query heads, 2",
    ]


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="a MlpConfig cannot be written") as error:
        to_huggingface(MlpConfig(features=4, mlp=8, num_layers=1, classes=2), {})
    assert "DecoderConfig, EncoderConfig" in str(error.value)
