"""The converter: bitwise both ways, names it accepts, and every problem at once. Values: test_parity.py."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import GOLDEN
from golden_models import load_model as load

from shardtrain.imported import read_model, write_about
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.huggingface.families import FAMILIES as KNOWN
from shardtrain.models.huggingface.families import (
    from_huggingface,
    iterate_tensors,
    list_left_out,
    list_tensor_shapes,
    read_config,
    to_huggingface,
    write_config,
)
from shardtrain.models.mlp import MlpConfig
from shardtrain.models.rotary import YarnScaling

FAMILIES = tuple(
    sorted(path.stem for path in GOLDEN.glob("*.npz") if not path.stem.startswith(("vit", "resnet", "t5")))
)


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert actual[name].dtype == x.dtype, name
        np.testing.assert_array_equal(actual[name], x, err_msg=name)


@pytest.mark.parametrize("family", [*FAMILIES, "t5", "t5_v1_1", "resnet18", "resnet50"])
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_written_configuration_is_read_as_it_was(family):
    """Ours has only what a family needs; all that it has comes back, so does what is not the default."""
    config, _ = from_huggingface(*load(family))
    other = replace(config, tied=not config.tied, eps=0.125)
    if family in ("gpt2", "bert"):
        other = replace(other, activation="gelu" if family == "bert" else "gelu_erf")
    for each in (config, other):
        each = replace(each, mlp=each.sizes["mlp"])
        each = (
            each if family in ("gpt2", "bert", "gpt_neox") else replace(each, head_dim=each.sizes["head_dim"])
        )
        written = json.loads(json.dumps(write_config(each)))
        assert (written["model_type"], read_config(written)[1]) == (load(family)[0]["model_type"], each)


def test_a_family_may_be_named():
    """A Phi-3 whose heads are rotated whole is a Mistral, too, and is written as what it was."""
    hf_config, state = load("phi3")
    hf_config["rope_parameters"]["partial_rotary_factor"] = 1.0
    config, params = from_huggingface(hf_config, state)
    assert write_config(config)["model_type"] == "mistral"
    assert write_config(config, "phi3")["model_type"] == "phi3"
    assert_same(to_huggingface(config, params, "phi3"), state)
    again, same = from_huggingface(write_config(config), to_huggingface(config, params))
    assert again == replace(config, head_dim=8)
    jax.tree.map(np.testing.assert_array_equal, same, params)
    with pytest.raises(ValueError, match="written as a llama model") as error:
        to_huggingface(config, params, "llama")
    assert str(error.value).splitlines()[1:] == ["  - window is 4; llama has None only"]
    with pytest.raises(ValueError, match="family is 'phi'; allowed are 'gpt2', 'llama'"):
        to_huggingface(config, params, "phi")


def test_published_entries_of_earlier_versions():
    """Gemma 3 had two bases of wavelengths and a number for its pattern, Llama 3 its scaling on its own."""
    config = load("gemma3")[0]
    rope = config.pop("rope_parameters")["full_attention"]
    del config["layer_types"]
    older = {"rope_theta": 5000.0, "rope_local_base_freq": 100.0, "sliding_window_pattern": 3}
    older["rope_scaling"] = {"factor": rope["factor"], "rope_type": "linear"}
    assert read_config({**config, **older})[1] == read_config(load("gemma3")[0])[1]
    config = load("llama3")[0]
    rope = dict(config.pop("rope_parameters"))
    older = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert read_config({**config, **older})[1] == read_config(load("llama3")[0])[1]
    # DeepSeek's numbers of YaRN
    yarn = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    found = read_config({**config, "rope_scaling": {**yarn, "mscale": 1.0, "mscale_all_dim": 0.5}})[1]
    magnitude = (0.1 * np.log(40) + 1) / (0.05 * np.log(40) + 1)
    assert found.rope_scaling == YarnScaling(factor=40.0, original_seq=4096, magnitude=magnitude)


def test_the_factors_of_a_phi3_with_128k_positions_are_options_of_an_import(tmp_path):
    """As many digits, and as many factors, as the published file has."""
    config = load("phi3_long")[0]
    factors = [1 + i / 7 for i in range(48)]
    rope = {**config["rope_parameters"], "short_factor": factors, "long_factor": factors}
    sizes = {"hidden_size": 384, "original_max_position_embeddings": 8, "head_dim": None}
    rope["partial_rotary_factor"] = 1.0
    found = read_config({**config, **sizes, "rope_parameters": rope})[1]
    assert len(str(found.rope_scaling)) > 1000
    write_about(tmp_path / "model.json", found)
    assert read_model(tmp_path / "model.json", DecoderConfig) == found


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
    assert list_left_out(config, {**older, **dropped}) == sorted(dropped)


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
    for name, array in iterate_tensors(config, shapes, read):
        given.append((name, array.shape, len(asked)))
    assert {name: shape for name, shape, _ in given} == list_tensor_shapes(config)
    assert [name for name, _, _ in given] == list(list_tensor_shapes(config))
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
        "  - lm_head.weight differs from transformer.wte.weight, to which it is tied."
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
        "  - model.layers.1.mlp.up_proj.weight is missing; it needs shape (24, 16)",
        "  - model.norm.weight is missing; it needs shape (16,)",
        "  - model.embed_tokens.weight has shape (16, 32); it needs shape (32, 16)",
        "  - model.layers.2.mlp.up_proj.weight is extra; leave it out",
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
        "  - positions is missing; it needs shape (12, 16)",
        "  - final_norm/bias has shape (3,); it needs shape (16,)",
        "  - blocks/mlp/gate/kernel is extra; leave it out",
    ]


REFUSED = [
    (
        "gpt2",
        {"model_type": "gpt3"},
        "model_type is 'gpt3', a family that cannot be read yet; those that can are"
        f" {', '.join(map(repr, KNOWN))}",
    ),
    (
        "gpt2",
        {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True},
        "activation_function is 'relu'; Decoder has 'gelu_new' or 'gelu_pytorch_tanh' or 'gelu' only",
        "scale_attn_by_inverse_layer_idx is True; Decoder has False only",
    ),
    (
        "llama",
        {"attention_bias": True, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 5e5}},
        "rope_type is 'dynamic'; Decoder has 'default' or 'linear' or 'llama3' or 'yarn' or 'longrope' only",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": False}},
        "original_max_position_embeddings is missing",
        "truncate is False; Decoder has True only",
    ),
    (
        "qwen2",
        {"use_sliding_window": True, "hidden_act": "gelu"},
        "hidden_act is 'gelu'; Decoder has 'silu' or 'swish' only",
        "use_sliding_window is True; Decoder has False only",
    ),
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, and there are 4 experts"),
    (
        "qwen2_moe",
        {"decoder_sparse_step": 2, "mlp_only_layers": [0], "shared_expert_intermediate_size": 30},
        "decoder_sparse_step is 2; Decoder has 1 only",
        "mlp_only_layers is [0]; Decoder has [] or None only",
        "shared_expert_intermediate_size is 30; Decoder has multiples of moe_intermediate_size, 12",
    ),
    (
        "qwen3_moe",
        {"num_experts_per_tok": 1},
        "num_experts_per_tok is 1, and weights that add up to 1 train no router",
    ),
    (
        "gemma2",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
        },
        "layer_types is ['full_attention', 'sliding_attention', 'full_attention'];"
        " Decoder has 'full_attention' in every n-th block only",
    ),
    (
        "gemma3",
        {"layer_types": ["full_attention"]},
        "layer_types is ['full_attention']; it is a list of 4 times 'sliding_attention' or 'full_attention'",
    ),
    (
        "phi3",
        {
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, 1.0]},
        },
        "long_factor is missing",
    ),
    (
        "phi3_long",
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, "2"], "long_factor": []}},
        "short_factor is [1.0, '2']; it is a list of numbers from 1e-6 to 1e15",
        "long_factor is []; it is a list of numbers from 1e-6 to 1e15",
    ),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[0])
def test_configurations_that_decoder_lacks_are_refused(row):
    family, changes, *problems = row
    config, state = load(family)
    with pytest.raises(ValueError, match="config") as error:
        from_huggingface({**config, **changes}, state)
    assert str(error.value).splitlines() == [
        "Hugging Face config:",
        *(f"  - {problem}" for problem in problems),
    ]


def test_an_incomplete_configuration_is_refused():
    config, state = load("llama")
    del config["hidden_size"], config["vocab_size"]
    with pytest.raises(ValueError, match="missing") as error:
        from_huggingface(config, state)
    assert str(error.value).splitlines()[1:] == ["  - vocab_size is missing", "  - hidden_size is missing"]


def test_decoders_of_neither_family_are_refused():
    config = DecoderConfig(vocab=8, seq=4, embed=8, num_layers=1, num_heads=2, num_kv_heads=1, norm="rmsnorm")
    with pytest.raises(ValueError, match="written as") as error:
        to_huggingface(config, {})
    assert str(error.value).splitlines() == [
        "DecoderConfig written as a gpt2 model:",
        "  - norm is 'rmsnorm'; gpt2 has 'layernorm' only",
        "  - num_kv_heads is 1; gpt2 has None or 2 only",
    ]


def test_mixtures_that_a_family_has_not_are_refused():
    config = from_huggingface(*load("qwen2_moe"))[0]
    for text, problem in {
        "num=5,shared=2": "experts: shared_gate is 'none'; qwen2_moe has 'sigmoid' only",
        "num=5,shared=2,shared_gate=sigmoid,bias=0.1": "experts: bias is 0.1; qwen2_moe has 0.0 only",
        "": "experts is None; qwen2_moe has a mixture in each block",
    }.items():
        with pytest.raises(ValueError, match=problem):
            write_config(replace(config, experts=text), "qwen2_moe")
    with pytest.raises(ValueError, match="experts: is_normalised is False; mixtral has True only"):
        write_config(replace(from_huggingface(*load("mixtral"))[0], experts="num=4,top=1"), "mixtral")
    # what a mixture has for training is in no file
    trained = replace(config, experts=f"{config.experts},capacity=1.5,balance=0.1,over=batch,z=0.1")
    assert write_config(trained) == write_config(config)


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="a MlpConfig cannot be written") as error:
        to_huggingface(MlpConfig(features=4, mlp=8, num_layers=1, classes=2), {})
    assert "DecoderConfig, EncoderConfig" in str(error.value)


def test_a_query_scale_above_one_is_written_and_read():
    config = replace(from_huggingface(*load("gemma3"))[0], query_scale=2.0)
    written = write_config(config)
    assert written["query_pre_attn_scalar"] == 0.25
    assert read_config(written)[1].query_scale == 2.0


def test_stretched_windows_are_not_written_as_gemma3():
    config = from_huggingface(*load("gemma3"))[0]
    assert config.window
    assert config.rope_scaling
    with pytest.raises(ValueError, match="set window_theta"):
        write_config(replace(config, window_theta=None), "gemma3_text")


def test_the_part_of_a_head_that_is_rotated_comes_back():
    """30 / 44 of 44, with its fraction cut off, is 29."""
    config = replace(from_huggingface(*load("phi3"))[0], embed=176, rotary_dims=30)
    written = write_config(config, "phi3")
    assert read_config(written)[1] == replace(config, mlp=24, head_dim=44)


def test_the_first_files_of_phi3_call_longrope_otherwise():
    config, state = load("phi3_long")
    rope = config.pop("rope_parameters")
    del rope["original_max_position_embeddings"], rope["rope_type"]
    older = {**config, "rope_scaling": {**rope, "type": "su"}, "rope_theta": rope["rope_theta"]}
    assert from_huggingface(older, state)[0] == from_huggingface(*load("phi3_long"))[0]
