"""Activation constraints of Flax under a layout: followed, strict, not applied to initialisers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax.linen.spmd import with_logical_constraint
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.functional.activation_rules import activation_rules
from shardtrain.functional.linen_model import from_linen
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh

LAYOUT = Layout(mesh={"data": 2, "fsdp": 2, "tensor": 2})


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(LAYOUT)


def constrained(dims, mesh, rules=LAYOUT.activation_rules, shape=(4, 4, 4)):
    """The sharding that a constraint leads to."""

    def function(x):
        with activation_rules(rules, mesh):
            return with_logical_constraint(x, dims)

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(function, in_shardings=whole)(jnp.ones(shape)).sharding


@pytest.mark.parametrize(
    ("dims", "spec"),
    [
        (("batch", "seq", "mlp"), PartitionSpec(("data", "fsdp"), None, "tensor")),
        (("vocab", None, "batch"), PartitionSpec("tensor", None, ("data", "fsdp"))),
        (("seq", None, "experts"), PartitionSpec()),
    ],
)
def test_constraints_follow_the_rules(dims, spec, mesh):
    assert constrained(dims, mesh).is_equivalent_to(NamedSharding(mesh, spec), 3)


def refused(function, *arguments):
    with pytest.raises(ValueError) as error:
        function(*arguments)
    return str(error.value)


def test_constraints_are_strict(mesh):
    """All of them at once, with the line of the model and rules that would do."""
    rules = {"heads": ("tensor",), "vocab": ("tensor", "data"), "batch": ()}

    def function(x):
        with activation_rules(rules, mesh):
            for _ in range(2):
                x = with_logical_constraint(x, ("heads", "xyz", "vocab"))
            return with_logical_constraint(x, ("btch", None, "heads"))

    line = function.__code__.co_firstlineno
    three, two = (
        f"('heads', 'xyz', 'vocab') (test_activation_rules.py:{line + 3})",
        f"test_activation_rules.py:{line + 4}",
    )
    for _ in range(2):  # what was refused is refused again, whatever jax has kept
        assert refused(jax.jit(function), jnp.ones((4, 4, 4))) == (
            "constraints on activations cannot be followed:"
            f"\n  - {three}: no rule for dim 'xyz' (known: heads, vocab, batch)"
            f"\n  - {three}: axis 'tensor' shards 2 dims of one array"
            f"\n  - ('btch', None, 'heads') ({two}): no rule for dim 'btch' (did you mean 'batch'?)"
            "\n  one of these helps:"
            "\n    rules for them, as Strategy(layout=Layout(activations={'xyz': [], 'btch': []}))"
            '\n    replicate them: --unnamed replicate, in Python Layout(unnamed="replicate")'
        )
    with pytest.raises(ValueError, match="occur more than once"):
        constrained(("seq", "seq", None), mesh)


def test_a_refused_checkpointed_block_is_refused_again(mesh):
    block = jax.checkpoint(lambda x: with_logical_constraint(2 * x, ("nothing", "mlp")))

    def function(x):
        with activation_rules(LAYOUT.activation_rules, mesh):
            return block(x)

    first = refused(jax.jit(function), jnp.ones((4, 4)))
    assert "no rule for dim 'nothing'" in first
    assert refused(jax.jit(lambda x: function(x)), jnp.ones((4, 4))) == first


def test_names_without_a_rule_are_replicated_where_the_layout_says_so(mesh):
    def function(x):
        with activation_rules(LAYOUT.activation_rules, mesh, "replicate"):
            return with_logical_constraint(x, ("nothing", None, "mlp"))

    whole = NamedSharding(mesh, PartitionSpec())
    found = jax.jit(function, in_shardings=whole)(jnp.ones((4, 4, 4))).sharding
    assert found.is_equivalent_to(NamedSharding(mesh, PartitionSpec(None, None, "tensor")), 3)


def test_one_device_accepts_every_constraint():
    one = make_mesh(Layout(mesh={"data": 1}), jax.devices()[:1])

    @jax.jit
    def function(x):
        with activation_rules(Layout().activation_rules, one):
            return with_logical_constraint(x, ("heads", "nothing", "mlp"))

    assert function(jnp.ones((4, 4, 4))).shape == (4, 4, 4)


def test_names_of_mesh_axes_are_sharded_over_them(mesh):
    spec = PartitionSpec("fsdp", None, "tensor")
    assert constrained(("fsdp", None, "tensor"), mesh).is_equivalent_to(NamedSharding(mesh, spec), 3)


def test_a_constraint_of_jax_over_replica_axes_is_refused(mesh):
    def function(x):
        with activation_rules(LAYOUT.rules_of_replica(), mesh):
            constrain = lambda row: jax.lax.with_sharding_constraint(row, PartitionSpec("data"))  # noqa: E731
            return jax.vmap(constrain, spmd_axis_name=("data",))(x)

    text = refused(jax.jit(function), jnp.ones((2, 4)))
    assert "over which each index has a batch of its own" in text
    assert "nn.with_logical_constraint(x, ('batch', None, 'embed'))" in text


PARTITIONINGS = {"mesh axes": nn.with_partitioning, "logical": nn.with_logical_partitioning}
INIT = nn.initializers.lecun_normal()


class Kernels(nn.Module):
    """Kernels that Flax flattens while it initialises them, in all their kinds, and two that it does not."""

    partitioning: str
    names: tuple

    @nn.compact
    def __call__(self, x):
        names = {n: PARTITIONINGS[self.partitioning](INIT, self.names[:n]) for n in (1, 2, 3, 4)}
        x = nn.Embed(8, 8, embedding_init=names[2])(x)
        x = nn.DenseGeneral((2, 4), kernel_init=names[3])(x)
        x = nn.DenseGeneral((2, 2, 2), axis=(-2, -1), kernel_init=names[4])(x).reshape(*x.shape[:2], 8)
        x = nn.MultiHeadDotProductAttention(num_heads=2, kernel_init=names[1])(x)
        step = nn.remat(Layer)
        scan = nn.scan(
            step,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = scan(names[3])(x, None)
        return nn.Conv(4, (2,), kernel_init=names[3])(x).mean()


class Layer(nn.Module):
    init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x, _):
        return x + nn.MultiHeadDotProductAttention(num_heads=2, kernel_init=self.init)(x), None


@pytest.mark.parametrize("partitioning", PARTITIONINGS)
def test_initialisers_evaluated_in_apply_see_no_mesh(partitioning, mesh):
    """Their kernels are flat there, and the names are those of the dims that they get later."""
    tokens = jnp.zeros((4, 4), jnp.int32)
    names = (
        ("embed", "heads", "head_dim", "mlp") if partitioning == "logical" else ("fsdp", "tensor", None, None)
    )
    model = from_linen(Kernels(partitioning, names), tokens)
    assert model.dims["Embed_0"]["embedding"] == names[:2]
    assert model.dims["DenseGeneral_0"]["kernel"] == names[:3]
    assert model.dims["MultiHeadDotProductAttention_0"]["query"]["kernel"] == (names[0], None, None)
    scanned = model.dims["ScanCheckpointLayer_0"]["MultiHeadDotProductAttention_0"]["out"]["kernel"]
    assert scanned == ("layers", *names[:3])
    params = jax.eval_shape(model.init, jax.random.key(0))[0]

    def loss(params):
        with activation_rules(LAYOUT.activation_rules, mesh):
            return model.apply(params, {}, jax.random.key(0), True, tokens)[0]

    assert jax.tree.structure(jax.eval_shape(jax.grad(loss), params)) == jax.tree.structure(params)


def test_constraints_do_nothing_outside_the_rules(mesh):
    """Before them, and after a trace that fails."""
    x = jnp.ones((2, 2))
    assert with_logical_constraint(x, ("no such dim", "mlp")) is x
    with pytest.raises(KeyError), activation_rules(LAYOUT.activation_rules, mesh):
        raise KeyError
    assert with_logical_constraint(x, ("no such dim", "mlp")) is x


@pytest.mark.parametrize("wrap", ["checkpoint", "scan", "jit"])
def test_traces_under_other_rules_are_not_reused(wrap, mesh):
    """jax keeps the traces of these by function and shapes; the rules in use are part of the key."""

    def block(x, _=None):
        return with_logical_constraint(2 * x, ("seq", "mlp")), None

    checkpointed, jitted = jax.checkpoint(block), jax.jit(block)
    wrapped = {
        "checkpoint": lambda x: checkpointed(x)[0],
        "scan": lambda x: jax.lax.scan(block, x, length=2)[0],
        "jit": lambda x: jitted(x)[0],
    }[wrap]

    def sharding(rules):
        def function(x):
            with activation_rules(rules, mesh):
                return wrapped(x)

        return jax.jit(function).lower(jnp.ones((4, 4))).as_text()

    for dim_axes in ("tensor", "data", "tensor"):
        others = {"tensor", "data"} - {dim_axes}
        text = sharding({"seq": (), "mlp": (dim_axes,)})
        assert f'[{{}}, {{"{dim_axes}"}}]' in text
        assert not any(f'{{"{other}"}}' in text for other in others)
