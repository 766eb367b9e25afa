"""T5: relative positions, padding, logits, gradients and continuations of transformers, files in and out."""

import json
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from golden_models import load_golden, select
from safetensors.numpy import load_file, save_file

from shardtrain import TokenPairs, from_nnx, load
from shardtrain.cli.checkpoint_files import Export, Import, export_checkpoint, import_checkpoint
from shardtrain.cli.run_file import load_run
from shardtrain.functional.activation_rules import activation_rules
from shardtrain.functional.loss import translation_loss
from shardtrain.functional.run_trace import give_ops
from shardtrain.models import huggingface
from shardtrain.models.encoder_decoder import EncoderDecoderConfig
from shardtrain.models.generate import generate
from shardtrain.models.huggingface.adapters import merge_adapters
from shardtrain.models.huggingface.families import list_left_out, read_config, write_config
from shardtrain.models.huggingface.files import make_config
from shardtrain.models.lora import Lora
from shardtrain.models.relative_positions import find_bucket
from shardtrain.models.sampling import Sampling
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh

SMALL = EncoderDecoderConfig(
    vocab=32, seq=512, embed=16, num_encoder_layers=2, num_decoder_layers=3, num_heads=4, head_dim=8, mlp=24,
    positions="relative", norm="rmsnorm", eps=1e-6, activation="relu", bias=False, query_scale=1.0,
    head_scale=0.25, relative_buckets=8, relative_distance=10,
)  # fmt: skip
EXPECTED = {"t5": SMALL, "t5_v1_1": replace(SMALL, activation="geglu", tied=False, head_scale=None)}
OF_T5 = pytest.mark.parametrize(
    "golden", ["t5", pytest.param("t5_v1_1", marks=pytest.mark.full)], indirect=True
)


@pytest.fixture(scope="module", params=sorted(EXPECTED))
def golden(request):
    return {"name": request.param} | load_golden(request.param)


def config_json(golden) -> dict[str, Any]:
    return json.loads(str(golden["config"]))


@pytest.fixture(scope="module")
def imported(golden):
    return huggingface.from_huggingface(config_json(golden), select(golden, "weight/"))


@pytest.fixture(scope="module")
def apply(imported):
    """(params, *inputs) -> logits."""
    model = from_nnx(imported[0])
    return lambda params, *inputs: model.apply(params, {}, jax.random.key(0), False, *inputs)[0]


def test_configurations_are_read_and_written(golden, imported):
    config = imported[0]
    assert config == EXPECTED[golden["name"]]
    assert make_config(asdict(config)) == config
    written = json.loads(json.dumps(write_config(config)))
    assert read_config(written)[1] == config
    assert write_config(config, "mt5")["architectures"] == ["MT5ForConditionalGeneration"]
    # the first files say less
    older = {"model_type": "t5", "vocab_size": 8, "d_model": 4, "d_kv": 4, "d_ff": 8, "num_heads": 1}
    found = read_config({**older, "num_layers": 2})[1]
    assert (found.num_decoder_layers, found.tied, found.head_scale, found.activation) == (
        2,
        True,
        0.5,
        "relu",
    )
    assert (found.relative_buckets, found.relative_distance, found.seq) == (32, 128, 512)


@pytest.mark.parametrize("cached", [True, False])
@OF_T5
def test_likeliest_targets_are_those_of_transformers_token_by_token(golden, imported, apply, cached):
    def without_end(params, *inputs):
        """A target does not end here, as it was asked of transformers."""
        found = apply(params, *inputs)
        logits, *cache = found if cached else (found,)
        logits = logits.at[..., 1].set(-jnp.inf)
        return (logits, *cache) if cached else logits

    model = jax.tree_util.Partial(without_end, imported[1])
    sources = [row[kept > 0] for row, kept in zip(golden["tokens"], golden["mask"], strict=True)]
    greedy = Sampling(temperature=0.0)
    found = generate(model, sources, 9, jax.random.key(0), seq=512, begin=0, sampling=greedy, cached=cached)
    np.testing.assert_array_equal(found, golden["generated"][:, 1:])


def test_published_files_are_read_bitwise(golden, imported):
    """They name the table three times, and have an array that is not used."""
    config, params = imported
    state = select(golden, "weight/")
    shared = state["shared.weight"]
    extra = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    older = {f"{half}.embed_tokens.weight": shared for half in ("encoder", "decoder")} | {
        extra: np.ones((8, 4))
    }
    older |= {"lm_head.weight": shared} if config.tied else {}
    again = huggingface.from_huggingface(config_json(golden), {**state, **older})
    assert again[0] == config
    jax.tree.map(np.testing.assert_array_equal, again[1], params)
    assert list_left_out(config_json(golden), {**state, **older}) == [extra]


def test_adapters_are_merged_into_blocks_that_stand_in_a_list(pure):
    """On export: of a decoder, whose blocks are stacked, layer by layer; here each kernel by itself."""
    config = replace(SMALL, lora=Lora(rank=2, alpha=3, on=("q", "v", "up")))
    flat: Any = {"/".join(map(str, path)): x for path, x in flatten_dict(pure(config).params).items()}
    plain, shapes, read = merge_adapters(
        config, {path: x.shape for path, x in flat.items()}, flat.__getitem__
    )
    assert plain == SMALL
    assert sorted(path for path in flat if path not in shapes) == sorted(p for p in flat if "/lora_" in p)
    for path, shape in shapes.items():
        parent = path.removesuffix("/kernel")
        expected = flat[path]
        if parent.rpartition("/")[2] in ("q", "v", "up"):
            expected = expected + 1.5 * np.tensordot(flat[f"{parent}/lora_a"], flat[f"{parent}/lora_b"], 1)
        assert expected.shape == shape
        np.testing.assert_allclose(read(path), expected, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.full
def test_an_import_has_a_run_file_for_pairs_and_is_exported_again(golden, tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "config.json").write_text(str(golden["config"]))
    save_file(select(golden, "weight/"), folder / "model.safetensors")
    assert import_checkpoint(Import(folder=folder, out=tmp_path / "in")) == 0
    run = load_run(str(tmp_path / "in" / "run.py"))
    assert (run.loss, type(run.data), run.data.source_seq) == (translation_loss, TokenPairs, 512)
    assert export_checkpoint(Export(run=str(tmp_path / "in"), out=tmp_path / "out")) == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, x in select(golden, "weight/").items():
        np.testing.assert_array_equal(written[name], x, err_msg=name)
    # and it is loaded as a model
    logits = load(tmp_path / "in", run.model)(golden["tokens"], golden["target"][:, :-1], golden["mask"])
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-5)


def test_published_buckets():
    """The first distance of each bucket of T5's 32 up to 128 positions, of one side and of a decoder."""
    distances = -np.arange(200)
    starts = {}
    for causal in (False, True):
        found = find_bucket(distances, num_buckets=32, max_distance=128, causal=causal)
        starts[causal] = [int(np.argmax(found == bucket)) for bucket in range(found.max() + 1)]
    assert starts[False] == [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]
    assert starts[True] == [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"positions": "rotary"}, "positions is 'rotary'; t5 has 'relative' only"),
        ({"bias": True, "norm": "layernorm"}, "bias is True; t5 has False only"),
        ({"head_scale": 0.5}, "head_scale is 0.5; t5 has None or 0.25 only"),
        ({"num_kv_heads": 2}, "num_kv_heads is 2; t5 has None or 4 only"),
    ],
)
def test_what_the_family_has_not_is_refused(changes, problem):
    with pytest.raises(ValueError, match="written as a t5 model") as error:
        write_config(replace(SMALL, **changes))
    assert problem in str(error.value)
    with pytest.raises(ValueError, match="feed_forward_proj is 'gated-relu'; EncoderDecoder has"):
        read_config({**write_config(SMALL), "feed_forward_proj": "gated-relu"})


@pytest.mark.parametrize("kind", ["ring", "all-gather"])
def test_rings_over_a_mesh_axis_are_refused(kind):
    """With the change to make, while the step is traced."""
    tokens = jnp.zeros((2, 8), jnp.int32)
    layout = Layout(mesh={"context": 2}, context_attention=kind)
    rules = activation_rules(layout.activation_rules, make_mesh(layout, jax.devices()[:2]), *layout.tracing)
    text = f"attention by {kind} over context=2 has no relative positions; use --context-attention all-to-all"
    with rules, pytest.raises(ValueError, match=text):
        jax.eval_shape(lambda: give_ops(SMALL(nnx.Rngs(0)))(tokens, tokens))
