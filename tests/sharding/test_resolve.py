"""Resolving dim names with a layout: results by value, refused arrays with their messages and suggestions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtrain import axes
from shardtrain.sharding.array_dims import NamedArray, dims_by_pattern
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.placement_problems import find_fitting_rules, format_naming
from shardtrain.sharding.resolve import complete_layout, format_unplaced, resolve
from shardtrain.sharding.rules import PARAMETER_RULES

SIZES = {"data": 2, "fsdp": 4, "tensor": 8}
HELP = (
    "\n  one of these helps:{ways}"
    '\n    replicate them: --unnamed replicate, in Python Layout(unnamed="replicate")'
)


def refused(function, *args, **kwargs):
    with pytest.raises(ValueError) as error:
        function(*args, **kwargs)
    return str(error.value)


def problems(text):
    head, *lines = text.partition("\n  one of these helps:")[0].split("\n  - ")
    return head, lines


def test_resolve_by_value():
    arrays = {
        "up": NamedArray(dims=("layers", "embed", "mlp"), shape=(3, 64, 256)),
        "table": NamedArray(dims=("vocab", "embed"), shape=(32, 8)),
        "step": NamedArray(dims=None, shape=()),
        # as everywhere in jax: None, and dims without an entry
        "partly": NamedArray(dims=(None, "mlp", None), shape=(3, 16, 5)),
        "gain": NamedArray(dims=(), shape=(7,)),
    }
    assert resolve(arrays, {**PARAMETER_RULES, "embed": ("data", "fsdp")}, SIZES) == {
        "up": (("pipeline",), ("data", "fsdp"), ("tensor",)),
        "table": (("tensor",), ("data", "fsdp")),
        "step": (),
        "partly": ((), ("tensor",), ()),
        "gain": ((),),
    }


def test_arrays_without_names():
    arrays = {"w": NamedArray(dims=None, shape=(3, 5)), "up": NamedArray(dims=("embed",), shape=(8,))}
    assert resolve(arrays, PARAMETER_RULES, SIZES, unnamed="replicate") == {
        "w": ((), ()),
        "up": (("fsdp",),),
    }
    assert refused(resolve, arrays, PARAMETER_RULES, SIZES) == (
        "the layout does not fit the model (1 problem):\n  - w has shape (3, 5) but its dims have no names"
    ) + HELP.format(
        ways="\n    names from outside, as Run(names={'w': (None, None)}), or any pattern of paths"
        '\n    names in the model: out_sharding=("embed", "mlp") in nnx, nn.with_partitioning in linen'
        "\n    shard those without names over fsdp along their largest dim: --unnamed shard"
    )
    alone = {"w": arrays["w"]}
    assert resolve(alone, PARAMETER_RULES, {**SIZES, "fsdp": 5}, unnamed="shard") == {"w": ((), ("fsdp",))}


ODD = {
    "nameless": NamedArray(dims=None, shape=(3, 5)),
    "long": NamedArray(dims=("embed", "mlp", "heads"), shape=(7, 5)),
    "unknown": NamedArray(dims=("embd", "mlp"), shape=(7, 5)),
    "twice": NamedArray(dims=("mlp", "vocab"), shape=(8, 8)),
    "good": NamedArray(dims=("embed", "mlp"), shape=(8, 16)),
}


def test_one_device_needs_no_names():
    one = dict.fromkeys(SIZES, 1)
    layout = complete_layout(Layout(), ODD, one)
    replicated = ((), ())
    assert resolve(ODD, layout.sharded_rules, one) == {
        **dict.fromkeys(["nameless", "long", "twice"], replicated),
        "unknown": ((), ("tensor",)),
        "good": (("fsdp",), ("tensor",)),
    }
    assert layout.unnamed == "replicate"
    assert format_unplaced(Layout(), ODD, one) == (
        "no names for the dims of nameless; no rule for the dims 'embd':"
        " on several devices they need them, or --unnamed replicate"
    )


def test_replicate_applies_to_names_without_a_rule():
    arrays = {name: ODD[name] for name in ("nameless", "good")} | {
        "kv": NamedArray(dims=("embed", "kv", None), shape=(8, 3, 5))
    }
    layout = complete_layout(Layout(unnamed="replicate"), arrays, SIZES)
    specs = resolve(arrays, layout.sharded_rules, SIZES, unnamed="replicate")
    assert specs["kv"] == (("fsdp",), (), ())
    assert specs["nameless"] == ((), ())
    assert layout.activation_rules["kv"] == ()
    text = format_unplaced(Layout(unnamed="replicate"), arrays, SIZES)
    assert text == "no names for the dims of nameless; no rule for the dims 'kv': replicated on every device"
    assert format_unplaced(Layout(), {"good": ODD["good"]}, SIZES) is None


def test_names_of_mesh_axes_are_sharded_over_them():
    arrays = {
        "q": NamedArray(dims=("tensor", "fsdp", None), shape=(8, 8, 3)),
        "table": NamedArray(dims=("data+fsdp", "embed+tensor"), shape=(16, 32)),
    }
    table = NamedArray(dims=("data+fsdp", None), shape=(16, 32))
    layout = complete_layout(Layout(), {**arrays, "table": table}, SIZES)
    assert resolve({**arrays, "table": table}, layout.sharded_rules, SIZES) == {
        "q": (("tensor",), ("fsdp",), ()),
        "table": (("data", "fsdp"), ()),
    }
    assert layout.replica_axes == ()  # each index of data has a part of a parameter only
    assert complete_layout(Layout(), {"q": arrays["q"]}, SIZES).replica_axes == ("data",)
    assert complete_layout(Layout(zero=1), {"q": arrays["q"]}, SIZES).parameter_rules["fsdp"] == ()
    assert complete_layout(Layout(), arrays, SIZES).parameters["embed+tensor"] == ("fsdp", "tensor")
    own = Layout(parameters={"fsdp": (), "tensor": ("data",)})
    assert complete_layout(own, arrays, SIZES).parameters["data+fsdp"] == ("data",)
    assert complete_layout(own, arrays, SIZES).parameters["tensor"] == ("data",)


def test_the_rules_suggested_by_an_error_fit():
    arrays = {
        "qkv": NamedArray(dims=("embed", "kv", "dim"), shape=(8, 16, 12)),
        "out": NamedArray(dims=("kv", "dim", "embed"), shape=(16, 12, 8)),
        "up": NamedArray(dims=("embd", "mlp"), shape=(8, 16)),
        "odd": NamedArray(dims=("odd",), shape=(7,)),
    }
    text = refused(resolve, arrays, PARAMETER_RULES, SIZES)
    assert "no rule for dim 'embd' (did you mean 'embed'?)" in text
    rules = {"kv": ("tensor",), "dim": (), "embd": ("fsdp",), "odd": ()}
    assert find_fitting_rules(arrays, PARAMETER_RULES, SIZES) == rules
    printed = "parameters={'kv': ['tensor'], 'dim': [], 'embd': ['fsdp'], 'odd': []}"
    assert text.endswith(HELP.format(ways=f"\n    rules for them, as Strategy(layout=Layout({printed}))"))
    pasted = eval(f"Layout({printed})", {"Layout": Layout})
    assert set(resolve(arrays, pasted.sharded_rules, SIZES)) == set(arrays)


def test_the_names_suggested_by_an_error_fit():
    arrays = {"a": NamedArray(dims=None, shape=(3,)), "b/w": NamedArray(dims=None, shape=(2, 16, 24))}
    text = format_naming(arrays, PARAMETER_RULES, SIZES)
    assert "Run(names={'b/w': (None, 'fsdp', 'tensor')})" in text
    assert format_naming(arrays, PARAMETER_RULES, SIZES, "replicate") == ""


SHAPES = {"a/up/kernel": (4, 8), "a/up/bias": (8,), "b/down/kernel": (8, 4), "table": (9, 4)}


def test_names_by_pattern():
    found = dims_by_pattern(SHAPES, {"a/*/kernel": ("embed", "mlp"), "*/kernel": ("mlp", None)})
    assert found == {"a/up/kernel": ("embed", "mlp"), "b/down/kernel": ("mlp", None)}


def test_patterns_that_do_not_fit():
    names = {
        "*/kernel": ("embed", "mlp"),
        "a/*": ("mlp", "embed"),
        "b/down/*": ("mlp", "embed"),
        "nothing": (),
    }
    assert refused(dims_by_pattern, SHAPES, names) == (
        "the names of this run do not fit the model's parameters:"
        "\n  - 'b/down/*' matches only what '*/kernel' before it has named; put it first"
        "\n  - 'nothing' matches no parameter; there are a/up/kernel, a/up/bias, b/down/kernel, table"
        "\n  - 'a/*' gives 2 names, ('mlp', 'embed'), but matches a/up/bias (8,);"
        " give each number of dims a pattern of its own"
    )


def test_every_kind_of_problem_at_once():
    arrays = {
        "nameless": NamedArray(dims=None, shape=(2, 2)),
        "long": NamedArray(dims=("embed", "mlp"), shape=(8,)),
        "partly": NamedArray(dims=("embed", None), shape=(6, 8)),
        "unknown": NamedArray(dims=("embd", "mlp"), shape=(8, 12)),
        "twice": NamedArray(dims=("mlp", "vocab"), shape=(8, 8)),
        "small": NamedArray(dims=("mlp",), shape=(3,)),
        "good": NamedArray(dims=("mlp",), shape=(16,)),
    }
    head, lines = problems(refused(resolve, arrays, PARAMETER_RULES, SIZES))
    assert head == "the layout does not fit the model (7 problems):"
    assert lines[1:] == [
        "long has shape (8,) but the names ('embed', 'mlp'); give it 1 names",
        "partly: dim 'embed' of size 6 cannot be split over axes ['fsdp'] of total size 4: 6 % 4 = 2."
        " Use a total of 2, a size of 4 or 8, or the rule embed = []",
        "unknown: no rule for dim 'embd' (did you mean 'embed'?)",
        "unknown: dim 'mlp' of size 12 cannot be split over axes ['tensor'] of total size 8: 12 % 8 = 4."
        " Use a total of 4, a size of 8 or 16, or the rule mlp = []",
        "twice: axis 'tensor' shards 'mlp' and 'vocab' of one array;"
        " give one of them another rule, as vocab = []",
        "small: dim 'mlp' of size 3 cannot be split over axes ['tensor'] of total size 8: 3 % 8 = 3."
        " Use a total of 1, a size of 8, or the rule mlp = []",
    ]
    assert lines[0].startswith("nameless has shape (2, 2) but its dims have no names")


dims = st.lists(st.sampled_from([*PARAMETER_RULES, "unknown", None]), max_size=3).map(tuple)
arrays = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(
        lambda names, shape, nameless: NamedArray(
            dims=None if nameless else names, shape=shape[: len(names)]
        ),
        dims,
        st.tuples(*[st.sampled_from([1, 2, 4, 6, 8, 24])] * 3),
        st.booleans(),
    ),
    max_size=6,
)
sizes = st.fixed_dictionaries({axis: st.sampled_from([1, 1, 2, 3, 4]) for axis in axes.AXES})


def fits(named, sizes):
    """The law, in the words of the document and not in those of the code."""
    if not named.shape:
        return True
    if max(sizes.values()) == 1:
        return True
    if named.dims is None or any(dim is not None and dim not in PARAMETER_RULES for dim in named.dims):
        return False
    used = [axis for dim in named.dims if dim is not None for axis in PARAMETER_RULES[dim]]
    return len(used) == len(set(used)) and all(
        size % math.prod(sizes[axis] for axis in PARAMETER_RULES[dim]) == 0
        for dim, size in zip(named.dims, named.shape, strict=True)
        if dim is not None
    )


@given(arrays=arrays, sizes=sizes)
def test_resolve_places_arrays_that_fit_and_lists_the_others(arrays, sizes):
    wrong = [path for path, named in arrays.items() if not fits(named, sizes)]
    if wrong:
        _, lines = problems(refused(resolve, arrays, PARAMETER_RULES, sizes))
        assert list(dict.fromkeys(line[0] for line in lines)) == wrong
        return
    specs = resolve(arrays, PARAMETER_RULES, sizes)
    assert list(specs) == list(arrays)
    for path, spec in specs.items():
        used = [axis for dim_axes in spec for axis in dim_axes]
        assert len(used) == len(set(used))
        for dim_axes, size in zip(spec, arrays[path].shape, strict=True):
            assert size % math.prod(sizes[axis] for axis in dim_axes) == 0
        if max(sizes.values()) > 1:
            asked = [() if dim is None else PARAMETER_RULES[dim] for dim in arrays[path].dims or ()]
            assert spec == tuple(asked)
