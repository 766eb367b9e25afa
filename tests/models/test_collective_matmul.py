"""Products of parts of a sequence while others are sent: those of whole sequences, in order, or refused."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.functional.activation_rules import activation_rules, noting
from shardtrain.functional.collective_matmul import CollectiveMatmul
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.experts_options import Experts
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh

SMALL = DecoderConfig(vocab=16, seq=8, embed=8, num_layers=1, num_heads=4, mlp=16, remat="none", scan=False)
TOKENS = np.random.default_rng(0).integers(0, 16, (4, 8), np.int32)


def under(function: Any, mesh: dict[str, int], **options: Any) -> Any:
    """A function that is traced under the rules of a mesh, and that mesh."""
    layout = Layout(mesh=mesh, sequence_sharded=True, collective_matmul=True, **options)
    devices = make_mesh(layout, jax.devices()[: int(np.prod(list(mesh.values())))])

    def traced(*arguments: Any) -> Any:
        with activation_rules(layout.activation_rules, devices, *layout.tracing):
            return function(*arguments)

    return traced, devices


def gradients(apply: Any, inputs: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        found = apply(params, *inputs)
        floats = [x for x in jax.tree.leaves(found) if jnp.issubdtype(x.dtype, jnp.floating)]
        return jnp.stack([jnp.sin(x).sum() for x in floats]).sum()

    return lambda params: (loss(params), jax.grad(loss)(params))


def test_gradients_of_experts_and_a_shared_feed_forward_are_those_of_one_device(pure, quick_jit):
    """Other models on meshes: the fuzzer."""
    model = pure(replace(SMALL, activation="swiglu", bias=False, experts=Experts(num=2, top=1, shared=1)))
    compute = gradients(model.apply, (TOKENS,))
    expected = quick_jit(compute)(model.params)
    on_mesh, devices = under(compute, {"data": 2, "tensor": 2})
    whole = NamedSharding(devices, PartitionSpec())
    got = jax.jit(on_mesh, in_shardings=whole, out_shardings=whole)(model.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


def permutes(config: Any, pure: Any, mesh: dict[str, int], num_tokens: int = 8, **options: Any) -> int:
    """How many permutes the traced forward pass of a model has."""
    model = pure(config)
    on_mesh, _ = under(model.apply, mesh, **options)
    return str(jax.make_jaxpr(on_mesh)(model.params, TOKENS[:, :num_tokens])).count(" ppermute[")


def test_each_product_of_a_block_has_its_exchanges(pure):
    # of four products, queries, keys and values together, on four devices
    assert permutes(SMALL, pure, {"tensor": 4}) == 4 * 3
    assert permutes(SMALL, pure, {"data": 4}) == 0
    # batches of several lengths may have one that has no equal parts
    assert permutes(SMALL, pure, {"tensor": 4}, num_tokens=6) == 0
    # in stages, pairs of devices gather from each other
    assert permutes(SMALL, pure, {"pipeline": 2, "tensor": 4}) == 0


def test_what_a_layout_does_not_shard_over_tensor_is_multiplied_whole(pure):
    whole = dict.fromkeys(("heads", "kv_heads"), ())
    assert permutes(SMALL, pure, {"tensor": 4}, activations=whole) == 2 * 3
    assert permutes(SMALL, pure, {"tensor": 4}, activations={"residual_seq": ()}) == 0
    # dims that another axis shards too, as where examples are over data alone
    mesh, alone = {"fsdp": 2, "tensor": 2}, {"batch": ("data",)}
    assert permutes(SMALL, pure, mesh, activations={**alone, "mlp": ("tensor", "fsdp")}) == 2
    assert permutes(SMALL, pure, mesh, activations={**alone, "head_dim": ("fsdp",)}) == 2
    assert permutes(SMALL, pure, mesh, activations={**alone, "embed": ("fsdp",)}) == 0


def test_a_part_is_sent_while_the_one_before_is_multiplied():
    """Each exchange but the first waits for the product before the last; each product has its barrier."""
    x, kernel = jax.ShapeDtypeStruct((2, 8, 4), jnp.float32), jax.ShapeDtypeStruct((4, 16), jnp.float32)
    on_mesh, _ = under(lambda x, k: CollectiveMatmul().gathered(x, k, ("embed", "mlp")), {"tensor": 4})
    (call,) = [
        each for each in jax.make_jaxpr(on_mesh)(x, kernel).eqns if "custom_vjp" in each.primitive.name
    ]
    (on_shards,) = call.params["call_jaxpr"].eqns[:1]
    steps = on_shards.params["jaxpr"].eqns
    made_by = {id(out): step for step in steps for out in step.outvars}
    sent = [step for step in steps if step.primitive.name == "ppermute"]
    dots = [step for step in steps if step.primitive.name == "dot_general"]
    assert (len(sent), len(dots)) == (3, 4)
    operands = [made_by[id(dot.invars[1])] for dot in dots]
    assert {step.primitive.name for step in operands} == {"optimization_barrier"}
    assert len({id(step) for step in operands}) == 4
    for exchange, dot in zip(sent[1:], dots[:2], strict=True):
        barrier = made_by[id(exchange.invars[0])]
        assert barrier.primitive.name == "optimization_barrier"
        assert any(dot is made_by.get(id(each)) for each in barrier.invars)


def test_products_in_8_bits_are_refused(pure):
    on_mesh, _ = under(pure(replace(SMALL, products="float8")).apply, {"tensor": 4})
    with pytest.raises(ValueError, match="products='float8' need whole sequences, and the layout has coll"):
        jax.eval_shape(on_mesh, pure(SMALL).params, TOKENS)


def test_the_run_says_so(pure):
    lines: list[str] = []
    with noting(lines.append):
        on_mesh, _ = under(pure(SMALL).apply, {"tensor": 4})
        jax.eval_shape(on_mesh, pure(SMALL).params, TOKENS)
    assert "products: while parts of the sequence are exchanged over tensor=4 (collective matmul)" in lines
