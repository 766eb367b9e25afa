"""A mixture of experts on one device: the choice, the products, the losses of its routers, its options."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardtrain.functional.auxiliary import Outputs, sum_loss
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models import experts_products
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.decoder_flops import flops_per_token
from shardtrain.models.experts import MixtureOfExperts
from shardtrain.models.experts_options import Experts
from shardtrain.models.experts_routing import Routing, choose
from shardtrain.models.lora import Lora
from shardtrain.models.ops import CpuOps, Ops, set_ops

CONFIG = DecoderConfig(
    vocab=16, seq=8, embed=8, num_layers=2, num_heads=2, mlp=12, activation="swiglu", bias=False
)


def layer(experts, **options):
    moe = MixtureOfExperts(replace(CONFIG, experts=experts, **options), rngs=nnx.Rngs(0))
    if moe.router_bias is not None:
        moe.router_bias[...] = jnp.linspace(-0.3, 0.3, moe.options.num)
    moe.router[...] *= 50  # loads that are far from equal
    return nnx.split(moe)


def dense(moe, x_BTD):
    """All experts compute all tokens; what is not chosen has the weight 0."""
    bias = None if moe.router_bias is None else moe.router_bias[...]
    choice, _ = choose(moe.options, x_BTD @ moe.router[...], bias)
    total = 0 if moe.shared is None else moe.shared(x_BTD)
    for e in range(moe.options.num):
        h = x_BTD @ moe.up[...][e]
        h = jax.nn.gelu(h) if moe.gate is None else h * jax.nn.silu(x_BTD @ moe.gate[...][e])
        weight_BT = jnp.where(choice.experts_BTK == e, choice.weights_BTK, 0).sum(-1)
        total += weight_BT[..., None] * (h @ moe.down[...][e])
    return total


MIXTURES = {
    "softmax": ("num=5,top=2", {}),
    "gelu": ("num=4,top=3,normalised=all", {"activation": "gelu"}),
    "one": ("num=3,top=1", {}),
    "all": ("num=3,top=3", {}),
    "deepseek": ("num=6,top=2,scores=sigmoid,scale=2.5,bias=0.1,shared=2", {}),
    "groups": ("num=6,top=2,scores=sigmoid,bias=0.1,groups=3,top_groups=2", {}),
    "capacity": ("num=5,top=2,capacity=1.1,shared=1", {}),
    "ragged": ("num=5,top=2", {}),
}


# groups have a test of their own, and ragged is softmax by other products
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name in ("softmax", "all", "groups", "one")))
        for name in MIXTURES
    ],
)
def test_a_mixture_is_the_weighted_sum_of_all_experts(name):
    text, options = MIXTURES[name]
    graph, state = layer(text, **options)
    x_BTD = jax.random.normal(jax.random.key(1), (3, 8, 8))
    ops = Ops() if name == "ragged" else CpuOps()

    def gradient(of):
        def loss(state, x_BTD):
            out = of(nnx.merge(graph, state), x_BTD)
            return (out**2).sum(), out

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(state, x_BTD)

    (found, out), (expected, same) = gradient(lambda moe, x: set_ops(moe, ops)(x)[0]), gradient(dense)
    np.testing.assert_allclose(out, same, rtol=1e-5, atol=1e-6)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * float(jnp.abs(want).max() + 1e-6))


def test_ragged_products_are_batched_over_replicas():
    x, kernel = jax.random.normal(jax.random.key(0), (2, 6, 3)), jnp.ones((2, 3, 4))
    counts = jnp.array([[2, 4], [6, 0]])

    @jax.jit
    def gradient(x, counts):
        return jax.grad(lambda k: (experts_products.multiply_ragged(x, k, counts) ** 2).sum())(kernel)

    alone = [gradient(*each) for each in zip(x, counts, strict=True)]
    np.testing.assert_allclose(jax.vmap(gradient)(x, counts), jnp.stack(alone), rtol=1e-5)


@pytest.mark.parametrize("text", ["num=4,top=2,capacity=1.0", "num=3,top=2,capacity=0.7,normalised=all"])
def test_dropped_choices_are_those_above_the_capacity(text):
    """First choices come before second ones, earlier tokens before later ones, in each row by itself."""
    options = Experts.parse(text)
    logits = jax.random.normal(jax.random.key(3), (4, 9, options.num)) * 2
    choice, counts = jax.jit(partial(choose, options))(logits)
    room = options.room(9)
    order = np.argsort(-np.asarray(logits), -1, kind="stable")[..., : options.top]
    expected, dropped = order.copy(), np.zeros(4)
    for row in range(4):
        taken = np.zeros(options.num, int)
        for k in range(options.top):
            for t in range(9):
                expert = order[row, t, k]
                taken[expert] += 1
                if taken[expert] > room:
                    expected[row, t, k] = options.num
                    dropped[row] += 1
    assert dropped.sum() > 3
    np.testing.assert_array_equal(choice.experts_BTK, expected)
    np.testing.assert_array_equal(counts["dropped"], dropped)
    np.testing.assert_array_equal(counts["chosen"].sum(-1), 9 * options.top)


def routed(text, tokens, **options):
    """The logits of a decoder and its `Routing`."""
    config = replace(CONFIG, experts=text, **options)
    return jax.jit(lambda tokens: config(nnx.Rngs(0))(tokens, auxiliary=True))(tokens)


TOKENS = jax.random.randint(jax.random.key(5), (4, 8), 0, 16)


@pytest.mark.parametrize("over", ["sequence", "batch"])
def test_losses_of_routers_are_those_of_the_papers(over):
    text = f"num=4,top=2,balance=0.5,z=0.25,over={over}"
    _, routing = routed(text, TOKENS)
    weights = jnp.array([1.0, 1.0, 0.0, 2.0])
    loss, metrics = routing.losses(weights, jnp.float32(32))
    share = np.asarray(routing.chosen_BLE) / 16
    probability = np.asarray(routing.probability_BLE) / 8
    part = np.asarray(weights / weights.sum())
    if over == "batch":
        share, probability = (np.einsum("B,BLE->LE", part, x)[None] for x in (share, probability))
        part = np.ones(1)
    balance = 4 * (part[:, None] * (share * probability).sum(-1)).sum(0)
    z = np.asarray(weights / weights.sum()) @ np.asarray(routing.z_BL) / 8
    np.testing.assert_allclose(loss, 0.5 * balance.sum() + 0.25 * z.sum(), rtol=1e-5)
    assert metrics["router_balance"][0] == pytest.approx(32 * balance.mean(), rel=1e-5)
    assert metrics["router_z"][1] == 32
    # equal probabilities and loads give 1
    even = replace(
        routing,
        chosen_BLE=jnp.full((4, 2, 4), 4.0),
        probability_BLE=jnp.full((4, 2, 4), 2.0),
        z_BL=jnp.zeros((4, 2)),
    )
    assert even.losses(weights, jnp.float32(1))[0] == pytest.approx(0.5 * 2, rel=1e-5)
    assert even.losses(weights, jnp.float32(3))[1]["expert_load"] == (3, 3)


def test_metrics_of_routers_count_the_choices_and_a_loss_has_none_of_their_names():
    """Of 3 rows with 8 tokens, 2 choices in each of 2 blocks; room for 2 of each expert."""
    _, routing = routed("num=4,top=2,capacity=0.5", TOKENS)
    outputs = Outputs(jnp.zeros((4, 8, 16)), routing, train=True)
    batch = {"weights": jnp.array([1.0, 1, 1, 0])}

    def metrics(*own):
        return sum_loss(lambda apply, batch: (apply().sum(), 24, *own), lambda: outputs, batch)[2]

    dropped, choices = metrics()["expert_drops"]
    assert choices == 3 * 8 * 2 * 2
    assert dropped >= 3 * 2 * (16 - 4 * 2)
    assert dropped == int(dropped)
    with pytest.raises(ValueError, match="the loss returns metrics expert_load, as the model does"):
        metrics({"expert_load": (0.0, 1.0)})


def test_biases_follow_the_error_of_the_loads_in_training_alone():
    model = from_nnx(replace(CONFIG, experts=Experts(num=4, top=1, bias=0.01, balance=0)))
    params, state = jax.jit(model.init)(jax.random.key(0))
    assert model.axis_name is not None
    apply = jax.jit(model.apply, static_argnums=3)
    out, moved = apply(params, state, jax.random.key(0), True, TOKENS)
    loads = np.asarray(out.auxiliary.chosen_BLE.sum(0))
    bias = np.asarray(moved["blocks"]["mlp"]["router_bias"])
    np.testing.assert_allclose(bias, 0.01 * np.sign(8 - loads), rtol=1e-6)
    assert len(np.unique(bias)) > 1
    _, still = apply(params, moved, jax.random.key(0), False, TOKENS)
    np.testing.assert_array_equal(still["blocks"]["mlp"]["router_bias"], bias)


def test_biases_change_the_choice_and_no_weight():
    options = Experts.parse("num=3,top=2,scores=sigmoid,normalised=all")
    logits = jnp.array([[[2.0, 1.0, 0.0]]])
    choice, _ = jax.jit(partial(choose, options))(logits, jnp.array([0.0, 0.0, 1.0]))
    assert choice.experts_BTK.tolist() == [[[2, 0]]]
    np.testing.assert_allclose(choice.weights_BTK[0, 0], jax.nn.sigmoid(jnp.array([0.0, 2.0])), rtol=1e-6)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_experts_are_of_the_best_groups(scores):
    """Chosen token by token from sorted scores, as the paper has it."""
    options = Experts.parse(f"num=12,top=3,scores={scores},groups=4,top_groups=2,normalised=all")
    logits = jax.random.normal(jax.random.key(3), (2, 16, 12))
    bias = jnp.linspace(-0.2, 0.2, 12) if scores == "sigmoid" else jnp.zeros(12)
    choice, _ = jax.jit(partial(choose, options))(logits, bias)
    all_scores = np.asarray(jax.nn.softmax(logits) if scores == "softmax" else jax.nn.sigmoid(logits))
    anywhere = 0
    for row, token in np.ndindex(2, 16):
        biased = (all_scores[row, token] + np.asarray(bias)).reshape(4, 3)
        of_group = np.sort(biased)[:, -2:].sum(1) if scores == "sigmoid" else biased.max(1)
        groups = np.argsort(of_group)[-2:]
        allowed = np.where(np.isin(np.arange(4), groups)[:, None], biased, -np.inf).reshape(-1)
        expected = np.argsort(allowed)[::-1][:3]
        assert choice.experts_BTK[row, token].tolist() == expected.tolist()
        weights = all_scores[row, token, expected]
        np.testing.assert_allclose(choice.weights_BTK[row, token], weights, rtol=1e-6)
        anywhere += set(expected) == set(np.argsort(biased.reshape(-1))[-3:])
    assert anywhere < 32


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("top=2", "num is missing"),
        ("num=4,num=5", "num is given 2 times"),
        ("num=0", "num is 0; use 1 or more"),
        ("num=4,capacity=0", "capacity is 0; use a number above 0"),
        ("num=4,z=nan", "z is nan; give a number, finite"),
        ("num=4,scores=max", "scores is 'max'; allowed: softmax, sigmoid"),
        ("num=4,top=5", "top is 5, and there are 4 experts: use top=4 or less"),
        ("num=4,shared_gate=sigmoid", "there is no shared feed-forward: add shared=1, or leave it out"),
        ("num=6,groups=4", "groups is 4, and 6 experts are not split evenly: 6 % 4 = 2. Use num=4 or 8"),
        ("num=4,groups=2,top_groups=3", "top_groups is 3 of 2: use top_groups=2 or less"),
        ("num=4,top=3,groups=2", "top is 3, and the best groups have 2 experts: use top=2 or less"),
    ],
)
def test_wrong_options_are_refused(text, problem):
    with pytest.raises(ValueError, match="experts: ") as error:
        replace(CONFIG, experts=text)
    assert problem in str(error.value)


def test_adapters_of_experts_alone_are_refused():
    with pytest.raises(ValueError, match="experts have no adapters"):
        replace(CONFIG, experts=Experts(num=4), lora=Lora(rank=2, on=("up", "down")))
    assert replace(CONFIG, experts=Experts(num=4, shared=1), lora=Lora(rank=2, on=("up", "down"))).lora


def test_flops_count_active_experts_alone():
    """A token passes 2 of 8 experts and a shared one of 1 times their size, and the router."""
    few, many = (flops_per_token(replace(CONFIG, experts=f"num={n},top=2,shared=1")) for n in (8, 16))
    per_expert = 3 * CONFIG.embed * 12
    assert few - flops_per_token(CONFIG) == 6 * 2 * (2 * per_expert + CONFIG.embed * 8)
    assert many - few == 6 * 2 * CONFIG.embed * 8


def test_a_capacity_above_all_tokens_drops_nothing():
    options = Experts.parse("num=2,top=2,capacity=1.0")
    assert options.room(8) == 8
    _, counts = jax.jit(partial(choose, options))(jnp.zeros((1, 8, 2)))
    assert counts["dropped"].tolist() == [0]


def test_biases_of_experts_that_have_just_as_many_tokens_stay():
    """With 7 experts the mean of equal counts may be rounded, otherwise on each mesh."""
    options = Experts.parse("num=7,top=1,bias=0.01")
    counts = jnp.full((2, 1, 7), 3.0)
    routing = Routing(
        chosen_BLE=counts, probability_BLE=counts, z_BL=counts[..., 0], dropped_BL=counts[..., 0],
        options=options, seq=21,
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(lambda bias: routing.move_bias(bias))(jnp.zeros((1, 7))), 0)


def test_a_loss_in_chunks_counts_the_rows_of_routers():
    """Its count has a rule of its own for derivatives, which have none themselves."""
    model = from_nnx(replace(CONFIG, experts=Experts(num=4, top=2, balance=0.1), loss_chunk=5))
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    batch = {"tokens": jnp.zeros((2, CONFIG.seq + 1), jnp.int32), "weights": jnp.ones((2, CONFIG.seq + 1))}

    def loss_sum(params):
        def apply(*inputs):
            return model.apply(params, {}, jax.random.key(0), True, *inputs)[0]

        return sum_loss(next_token_loss, apply, batch, rng=jax.random.key(0))[0]

    jax.eval_shape(lambda p: jax.jvp(loss_sum, (p,), (p,))[1], params)
