"""A vision transformer: published sizes, its patches, and transformers' logits and gradients."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_models import load_golden, select

from shardtrain.models import huggingface
from shardtrain.models.huggingface.families import read_config, write_config
from shardtrain.models.vit import VitConfig, vit

CONFIG = VitConfig(height=8, width=12, classes=5, patch=4, embed=16, num_layers=2, num_heads=4, mlp=24)
MEAN = replace(CONFIG, pooling="mean")
IMAGES = np.random.default_rng(0).normal(size=(3, 8, 12, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def golden():
    return load_golden("vit")


@pytest.fixture(scope="module")
def imported(golden):
    return huggingface.from_huggingface(json.loads(str(golden["config"])), select(golden, "weight/"))


def test_names_are_those_of_files_and_values_stay_bitwise(golden, imported):
    config, params = imported
    state = huggingface.to_huggingface(config, params)
    assert "vit.encoder.layer.1.attention.output.dense.weight" in state  # as `save_pretrained` writes it
    kernel = state["vit.embeddings.patch_embeddings.projection.weight"]
    np.testing.assert_array_equal(kernel, golden["weight/vit.embeddings.patch_embeddings.projection.weight"])
    again_config, again = huggingface.from_huggingface(write_config(config), state)
    assert again_config == config
    jax.tree.map(np.testing.assert_array_equal, again, params)
    # files of the model without its classifier's prefix, and with its pooler
    bare = {name.removeprefix("vit."): x for name, x in state.items()}
    bare["pooler.dense.weight"] = np.zeros((16, 16))
    jax.tree.map(
        np.testing.assert_array_equal, huggingface.from_huggingface(write_config(config), bare)[1], params
    )


def test_what_the_family_has_not_is_refused(imported):
    wanted = write_config(imported[0])
    with pytest.raises(ValueError, match=r"hidden_act is 'selu'; Vit has .*\n.*id2label is 3; it is an ob"):
        read_config({**wanted, "hidden_act": "selu", "id2label": 3})
    with pytest.raises(ValueError, match=r"image_size is \[8, 12\]; it is a whole number"):
        read_config({**wanted, "image_size": [8, 12]})
    with pytest.raises(
        ValueError, match=r"pooling is 'mean'; vit has 'token' only\n.*width is 12; vit has 8"
    ):
        write_config(MEAN)
    del wanted["id2label"]
    assert read_config(wanted)[1].classes == 2


def test_the_mean_of_all_positions_is_classified(pure, quick_jit):
    params = pure(MEAN).params
    moved = {**params, "positions": params["positions"][::-1]}
    images = np.ones_like(IMAGES)  # all patches alike: their order then changes nothing but rounding
    apply = quick_jit(pure(MEAN).apply)
    np.testing.assert_allclose(apply(params, images), apply(moved, images), rtol=1e-4, atol=1e-5)
    assert apply(params, IMAGES).shape == (3, 5)
    assert CONFIG.seq == MEAN.seq + 1


def test_images_of_another_size_and_unknown_sizes_are_refused():
    with pytest.raises(ValueError, match=r"Build it with height=4, width=12, colours=3"):
        nnx.eval_shape(lambda: CONFIG(nnx.Rngs(0))(jnp.zeros((1, 4, 12, 3))))
    with pytest.raises(ValueError, match=r"size is 'bse'; .* Use size='base'"):
        vit("bse")  # type: ignore[arg-type]
