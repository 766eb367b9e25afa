"""The models of cases: how each is made, its loss and samples, and what its plain form computes.

Next: `checked.py`, which compares the two.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from case import Case
from flax import nnx
from layer_stack import LayerStack
from tiny_language_model import TinyConfig

import shardtrain as st
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.encoder import EncoderConfig
from shardtrain.models.encoder_decoder import EncoderDecoderConfig
from shardtrain.models.imagenet_resnet import ImageNetResNetConfig
from shardtrain.models.linen_decoder import LinenDecoder
from shardtrain.models.mlp import MlpConfig
from shardtrain.models.resnet import ResNetConfig
from shardtrain.models.vgg import VggConfig
from shardtrain.models.vit import VitConfig

CLASSES = 4
Sample = dict[str, np.ndarray]


@dataclass(frozen=True)
class Subject:
    """A model of a case.

    Args:
      model: what `Run.model` takes.
      loss: its loss.
      samples: of training and held-out data, together.
      apply: (params, model_state, train, *inputs) -> (outputs, model_state), by Flax alone; None where only
        this library can say what is computed: dropout by position, losses of the model's own.
    """

    model: Any
    loss: Callable[..., Any]
    samples: list[Sample]
    apply: Callable[..., Any] | None


def squares(apply: Callable[..., Any], batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the sum of squared differences, weighed by rows or by places, and what counts."""
    losses = jnp.square(apply(batch["x"]) - batch["y"]).sum(-1)
    weights = batch["weights"].reshape(*batch["weights"].shape, *[1] * (losses.ndim - batch["weights"].ndim))
    weights = jnp.broadcast_to(weights, losses.shape)
    return (losses * weights).sum(), weights.sum()


def make_subject(case: Case) -> Subject:
    """Make the model of a case, its data and its plain form."""
    return SUBJECTS[case.kind](case, np.random.default_rng(case.seed))


def weigh(case: Case, random: np.random.Generator, samples: list[Sample], length: int | None) -> list[Sample]:
    """Add weights to samples, of rows or of tokens; some are 0."""
    choices = np.array([0, 0.5, 1, 2], np.float32)
    for sample in samples:
        if case.weights == "rows":
            sample["weights"] = random.choice(choices[1:])
        elif case.weights == "tokens" and length is not None:
            sample["weights"] = random.choice(choices, length)
    return samples


def split_documents(case: Case, random: np.random.Generator, length: int) -> Sample:
    """Return the numbers of the documents of a row, rising; {} where rows are single documents."""
    if not case.packed:
        return {}
    return {"segments": np.cumsum(random.random(length) < 0.3).astype(np.int32)}


def num_drawn(case: Case) -> int:
    """Number of samples: of training, and half as many and one held out, so that rows do not divide."""
    return case.num_samples + case.rows // 2 + 1


def apply_nnx(factory: Callable[[nnx.Rngs], nnx.Module]) -> Callable[..., Any]:
    """Return what an nnx module computes, by Flax alone."""

    def apply(params: Any, model_state: Any, train: bool, *inputs: Any) -> tuple[Any, Any]:
        module = factory(nnx.Rngs(0))
        graph, own, statistics, rest = nnx.split(module, nnx.Param, nnx.BatchStat, ...)
        nnx.replace_by_pure_dict(own, params)
        nnx.replace_by_pure_dict(statistics, model_state)
        module = nnx.merge(graph, own, statistics, rest)
        module.train() if train else module.eval()
        outputs = module(*inputs)
        return outputs, _with_names(nnx.to_pure_dict(nnx.state(module, nnx.BatchStat)))

    return apply


def _with_names(tree: Any) -> Any:
    """Return a tree whose keys are texts, as those of this library."""
    return {str(key): _with_names(x) for key, x in tree.items()} if isinstance(tree, dict) else tree


def is_known_alone(options: Mapping[str, Any]) -> bool:
    """Whether the plain form of a model is not Flax's: dropout, and losses of the model's own."""
    return bool(options.get("dropout") or options.get("experts"))


def plain_config(config: Any) -> Any:
    """Return a configuration that computes the same in the plainest way."""
    changes = {"remat": "none", "loss_chunk": None, "scan": True}
    return replace(config, **{name: value for name, value in changes.items() if hasattr(config, name)})


def make_decoder(case: Case, random: np.random.Generator) -> Subject:
    """A decoder, also with experts and in linen."""
    config = DecoderConfig(**case.model)
    tokens = [
        {"tokens": random.integers(0, config.vocab, config.seq + 1).astype(np.int32)}
        | split_documents(case, random, config.seq)
        for _ in range(num_drawn(case))
    ]
    if case.kind == "linen":
        module, plain = LinenDecoder(config), LinenDecoder(plain_config(config))
        model = st.from_linen(module, jax.ShapeDtypeStruct((1, config.seq), jnp.int32))

        def apply(params: Any, model_state: Any, train: bool, *inputs: Any) -> tuple[Any, Any]:
            return plain.apply({"params": params}, *inputs), {}

    else:
        model, apply = config, apply_nnx(plain_config(config))
    samples = weigh(case, random, tokens, config.seq)
    return Subject(model, st.next_token_loss, samples, None if is_known_alone(case.model) else apply)


def make_tiny(case: Case, random: np.random.Generator) -> Subject:
    """The small language model of other tests."""
    config = TinyConfig(**case.model)
    samples = [
        {"tokens": random.integers(0, config.vocab, config.seq + 1).astype(np.int32)}
        for _ in range(num_drawn(case))
    ]
    samples = weigh(case, random, samples, config.seq)
    return Subject(
        config, st.next_token_loss, samples, None if is_known_alone(case.model) else apply_nnx(config)
    )


def make_encoder(case: Case, random: np.random.Generator) -> Subject:
    """An encoder with masked tokens; a fifth of each row is padding."""
    config = EncoderConfig(**case.model)
    samples = []
    for _ in range(num_drawn(case)):
        targets = random.integers(0, config.vocab, config.seq).astype(np.int32)
        chosen = random.random(config.seq) < 0.4
        mask = np.arange(config.seq) < random.integers(config.seq // 2, config.seq + 1)
        samples.append(
            {
                "tokens": np.where(chosen, 0, targets).astype(np.int32),
                "targets": targets,
                "chosen": chosen.astype(np.float32),
                "mask": mask.astype(np.int32),
            }
        )
    samples = weigh(case, random, samples, config.seq)
    apply = None if is_known_alone(case.model) else apply_nnx(plain_config(config))
    return Subject(config, st.masked_token_loss, samples, apply)


def make_encoder_decoder(case: Case, random: np.random.Generator) -> Subject:
    """T5's kind, on pairs of sequences."""
    config = EncoderDecoderConfig(**case.model)
    samples = [
        {
            "source": random.integers(0, config.vocab, config.seq).astype(np.int32),
            "target": random.integers(0, config.vocab, config.seq + 1).astype(np.int32),
            "source_mask": (np.arange(config.seq) < random.integers(2, config.seq + 1)).astype(np.int32),
        }
        for _ in range(num_drawn(case))
    ]
    samples = weigh(case, random, samples, config.seq)
    apply = None if is_known_alone(case.model) else apply_nnx(plain_config(config))
    return Subject(config, st.translation_loss, samples, apply)


IMAGES: dict[str, Any] = {
    "vit": VitConfig,
    "resnet": ResNetConfig,
    "imagenet": ImageNetResNetConfig,
    "vgg": VggConfig,
}


def make_images(case: Case, random: np.random.Generator) -> Subject:
    """A classifier of images that constrains its activations."""
    config = IMAGES[case.kind](**case.model)
    model, plain = config, plain_config(config) if case.kind == "vit" else config
    if case.model.get("norm") == "batch":
        model = st.from_nnx(config, sync_batch_norm=True)
    shape = (config.height, config.width, config.colours)
    samples = [
        {"image": random.normal(size=shape).astype(np.float32), "label": np.int32(random.integers(CLASSES))}
        for _ in range(num_drawn(case))
    ]
    samples = weigh(case, random, samples, None)
    apply = None if is_known_alone(case.model) else apply_nnx(plain)
    return Subject(model, st.classification_loss, samples, apply)


def make_mlp(case: Case, random: np.random.Generator) -> Subject:
    """A residual classifier of vectors."""
    config = MlpConfig(**case.model)
    samples = [
        {
            "image": random.normal(size=config.features).astype(np.float32),
            "label": np.int32(random.integers(CLASSES)),
        }
        for _ in range(num_drawn(case))
    ]
    apply = None if is_known_alone(case.model) else apply_nnx(config)
    return Subject(config, st.classification_loss, weigh(case, random, samples, None), apply)


def make_stack(case: Case, random: np.random.Generator) -> Subject:
    """Plain nnx layers that constrain nothing."""
    options = dict(case.model)
    layers, shape = options["layers"], tuple(map(int, options["shape"]))
    tokens, head = int(options.get("tokens", 0)), options.get("head", "mean")
    factory = partial(_build_stack, layers, shape, tokens, head)
    places = jax.eval_shape(
        lambda: factory(nnx.Rngs(0))(
            jnp.zeros((1, *shape[:-1]), jnp.int32) if tokens else jnp.zeros((1, *shape))
        )
    ).shape[1:-1]
    samples = []
    for _ in range(num_drawn(case)):
        x = random.normal(size=shape).astype(np.float32)
        if tokens:
            x = random.integers(0, tokens, shape[:-1]).astype(np.int32)
        samples.append({"x": x, "y": random.normal(size=(*places, CLASSES)).astype(np.float32)})
    samples = weigh(case, random, samples, places[0] if len(places) == 1 else None)
    has_norm = any(word.startswith("batchnorm") for word in layers)
    draws = any(word.startswith("dropout") for word in layers)
    model = st.from_nnx(factory, sync_batch_norm=True) if has_norm else factory
    return Subject(model, squares, samples, None if draws else apply_nnx(factory))


def _build_stack(
    layers: tuple[str, ...], shape: tuple[int, ...], tokens: int, head: str, rngs: nnx.Rngs
) -> LayerStack:
    return LayerStack(layers, shape, tokens, head, rngs)


SHARDED_OVER = {"embed": "fsdp", "mlp": "tensor", "fsdp": "fsdp", "tensor": "tensor"}


def dim_names(case: Case, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str | None, ...]]:
    """Return the names of the dims of a plain model's parameters, as `Run.names` takes them."""
    if case.kind != "stack" or case.names == "none":
        return {}
    found: dict[str, tuple[str | None, ...]] = {}
    for number, (path, shape) in enumerate(shapes.items()):
        pair = {"mlp": ("embed", "mlp"), "back": ("mlp", "embed"), "axes": ("fsdp", "tensor")}.get(
            case.names, ("embed", "mlp") if number % 2 else ("mlp", "embed")
        )
        if path.endswith("head/kernel"):
            pair = ("embed", None)
        names = (*(None,) * (len(shape) - 2), *pair) if len(shape) > 1 else (None,)
        # a size that an axis does not divide would be refused
        found[path] = tuple(
            None if name and size % case.mesh.get(SHARDED_OVER[name], 1) else name
            for name, size in zip(names, shape, strict=True)
        )
    return found


SUBJECTS: dict[str, Callable[[Case, np.random.Generator], Subject]] = {
    "stack": make_stack,
    "decoder": make_decoder,
    "experts": make_decoder,
    "linen": make_decoder,
    "tiny": make_tiny,
    "encoder": make_encoder,
    "t5": make_encoder_decoder,
    "vit": make_images,
    "resnet": make_images,
    "imagenet": make_images,
    "vgg": make_images,
    "mlp": make_mlp,
}
"""Kind of model -> makes the subject of a case."""
