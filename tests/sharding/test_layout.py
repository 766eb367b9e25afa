"""Layouts: refused values with their messages, rules by ZeRO stage, files read and written."""

import os
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from shardtrain import axes
from shardtrain.sharding.axis_sizes import axis_sizes, parse_mesh
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.layout_file import read_layout
from shardtrain.sharding.rules import ACTIVATION_RULES, PARAMETER_RULES

TABLES = sorted(Path(__file__).parents[2].glob("meshes/*.toml"))
MESHES = [path for path in TABLES if "[mesh]" in path.read_text()]
KNOWN_AXES = "pipeline, data, fsdp, expert, context, tensor"


def refused(function, *args, **kwargs):
    with pytest.raises(ValueError) as error:
        function(*args, **kwargs)
    return str(error.value)


def problems(text):
    head, *lines = text.split("\n  - ")
    return head, lines


def test_all_problems_of_a_layout_at_once():
    text = refused(
        Layout,
        mesh={
            "dta": 2,
            "pipeline": None,
            "expert": 1.5,
            "data": -2,
            "fsdp": -1,
            "tensor": -1,
            "context": True,
        },
        zero=4,
        sequence_sharded="false",
        parameters={"embed": ("fsdb", "data", "data"), "mlp": "tensor"},
        activations={"seq": ("tensor", "tensor", "tensor"), "vocab": ("xyz",)},
        unnamed="ignore",
    )  # fmt: skip
    assert problems(text) == (
        "this layout cannot be used:",
        [
            "sequence_sharded is 'false'; give True or False",
            "axis 'dta' (did you mean 'data'?)",
            "axis 'pipeline' has size None; allowed: a whole number from 1, or -1 (the rest)",
            "axis 'expert' has size 1.5; allowed: a whole number from 1, or -1 (the rest)",
            "axis 'data' has size -2; allowed: a whole number from 1, or -1 (the rest)",
            "axis 'context' has size True; allowed: a whole number from 1, or -1 (the rest)",
            "axes ['fsdp', 'tensor'] are all -1; at most one can be the rest",
            "rule parameters.mlp is 'tensor'; write a list of axes, mlp = ['fsdp'], or []",
            "rule parameters.embed: axis 'fsdb' (did you mean 'fsdp'?)",
            "rule parameters.embed: axis 'data' occurs 2 times",
            "rule activations.seq: axis 'tensor' occurs 3 times",
            f"rule activations.vocab: axis 'xyz' (known: {KNOWN_AXES})",
            "zero is 4; allowed: 1, 2 or 3",
            "unnamed is 'ignore'; allowed: 'refuse', 'replicate' or 'shard'",
        ],
    )


def test_the_axis_of_experts_has_examples_of_its_own():
    assert Layout(mesh={"expert": 2}).batch_axes == ("data", "fsdp", "expert")
    assert Layout(mesh={"expert": 2}).replica_axes == ("data",)
    assert Layout(mesh={"expert": 1}).batch_axes == ("data", "fsdp")


def test_every_dim_has_both_rules():
    both = set(axes.DIMS) - {axes.BATCH, axes.RESIDUAL_SEQ}
    assert set(PARAMETER_RULES) == both
    assert set(ACTIVATION_RULES) == set(axes.DIMS)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("data=2,fsdp=-1", {"data": 2, "fsdp": -1}),
        (" data = 2 , tensor=4,", {"data": 2, "tensor": 4}),
        ("", {}),
        ("dta=2", {"dta": 2}),  # which axes there are is the layout's to know
    ],
)
def test_parse_mesh(text, sizes):
    assert parse_mesh(text) == sizes


def test_a_mesh_that_cannot_be_read():
    assert refused(parse_mesh, "data,fsdp=two,tensor=--2,data=²,fsdp=2,fsdp=4,=3x") == (
        "mesh 'data,fsdp=two,tensor=--2,data=²,fsdp=2,fsdp=4,=3x' cannot be read:"
        "\n  - 'data' is not AXIS=NUMBER, as in data=2"
        "\n  - 'fsdp=two' is not AXIS=NUMBER, as in data=2"
        "\n  - 'tensor=--2' is not AXIS=NUMBER, as in data=2"
        "\n  - 'data=²' is not AXIS=NUMBER, as in data=2"
        "\n  - axis 'fsdp' is given twice: 2 and 4; give it once"
        "\n  - '=3x' is not AXIS=NUMBER, as in data=2"
    )
    assert refused(parse_mesh, f"data={'9' * 5000}").endswith(
        "...; allowed: at most 16777216; give the number of devices of this axis, or -1 for all that the"
        " others leave"
    )


@pytest.mark.parametrize(
    ("mesh", "num_devices", "sizes"),
    [
        ({"data": 2, "tensor": -1}, 8, (1, 2, 1, 1, 1, 4)),
        ({"data": 2, "fsdp": 4, "tensor": -1}, 8, (1, 2, 4, 1, 1, 1)),
        ({}, 1, (1,) * 6),
    ],
)
def test_axis_sizes(mesh, num_devices, sizes):
    assert axis_sizes(mesh, num_devices) == dict(zip(axes.AXES, sizes, strict=True))


SIMULATED = " On a CPU, --cpu-devices N simulates N devices."


@pytest.mark.parametrize(
    ("mesh", "num_devices", "text"),
    [
        (
            {"data": 3, "tensor": -1},
            8,
            "mesh 'data=3,tensor=-1' needs a multiple of 3 devices, and there are 8;"
            " make the other sizes multiply to a divisor of 8 (1, 2, 4, 8).",
        ),
        (
            {"data": 2, "fsdp": 2},
            6,
            "mesh 'data=2,fsdp=2' needs 4 devices, and there are 6;"
            " make the sizes multiply to 6 (its divisors: 1, 2, 3, 6), or let one size be -1.",
        ),
    ],
)
def test_sizes_that_do_not_use_the_devices(mesh, num_devices, text):
    assert refused(axis_sizes, mesh, num_devices) == text + SIMULATED


def test_rules_of_each_zero_stage():
    for zero in (1, 2, 3):
        layout = Layout(mesh={"fsdp": 8}, zero=zero, parameters={"vocab": ("fsdp", "tensor")})
        assert layout.sharded_rules == {**PARAMETER_RULES, "vocab": ("fsdp", "tensor")}
        fsdp = ("fsdp",) if zero == 3 else ()
        assert layout.parameter_rules == {
            **PARAMETER_RULES,
            "vocab": (*fsdp, "tensor"),
            "embed": fsdp,
            "channels_in": fsdp,
        }
        assert layout.batch_axes == ("data", "fsdp")
        assert layout.replica_axes == (("data",) if zero == 3 else ("data", "fsdp"))


def test_replica_axes_follow_the_rules():
    assert Layout(activations={"batch": ("data",)}, zero=1).replica_axes == ("data",)
    assert Layout(activations={"batch": ()}).replica_axes == ()
    assert Layout(parameters={"embed": ("data", "fsdp")}).replica_axes == ()
    unsharded = {dim: () for dim, dim_axes in PARAMETER_RULES.items() if "fsdp" in dim_axes}
    assert Layout(parameters=unsharded).replica_axes == ("data", "fsdp")


def test_sequence_sharded():
    known = {**{axis: (axis,) for axis in axes.AXES}, **ACTIVATION_RULES}
    assert Layout().activation_rules == known
    sharded = Layout(sequence_sharded=True)
    assert sharded.activation_rules == {**known, "residual_seq": ("context", "tensor")}
    asked = replace(sharded, activations={"residual_seq": ("context",)})
    assert asked.activation_rules == known


def test_collective_matmul_needs_a_sharded_sequence():
    assert refused(Layout, collective_matmul=True) == (
        "this layout cannot be used:\n  - collective_matmul multiplies parts of a sequence that is sharded"
        " over tensor, and sequence_sharded is False; set it too (--sequence-sharded)"
    )


def test_a_rule_for_parameters_holds_for_activations_too():
    """Without the axes that shard the batch: over those, weights are gathered where they are used."""
    layout = Layout(parameters={"kv": ("tensor", "fsdp"), "odd": ("data",), "mlp": ("fsdp",)})
    found = layout.activation_rules
    assert (found["kv"], found["odd"], found["mlp"]) == (("tensor",), (), ("tensor",))
    asked = replace(layout, activations={"kv": ("fsdp",)})
    assert asked.activation_rules["kv"] == ("fsdp",)


def test_rules_of_a_replica_have_no_replica_axis():
    rules = Layout(zero=3, activations={"mine": ("data", "tensor")}).rules_of_replica()
    assert (rules["batch"], rules["mine"], rules["data"], rules["fsdp"]) == (
        ("fsdp",),
        ("tensor",),
        (),
        ("fsdp",),
    )
    assert Layout(zero=1).rules_of_replica()["batch"] == ()


@pytest.mark.parametrize("path", MESHES, ids=lambda path: path.stem)
def test_the_layouts_of_meshes_are_read_and_written(path, tmp_path):
    layout = read_layout(path)
    axis_sizes(layout.mesh, 8)
    (tmp_path / "copy.toml").write_text(tomli_w.dumps(asdict(layout)))
    assert read_layout(tmp_path / "copy.toml") == layout


def test_a_cluster_file_is_no_layout():
    assert MESHES
    clusters = [path for path in TABLES if "[[islands]]" in path.read_text()]
    assert len(clusters) >= 2
    for cluster in clusters:
        with pytest.raises(
            ValueError, match="is a cluster file, as it has islands; a layout has none: give it to"
        ):
            read_layout(cluster)


rules = st.dictionaries(
    st.sampled_from([*axes.DIMS, "my dim", 'a "quoted" one', "dotted.name", "größe"]),
    st.lists(st.sampled_from(axes.AXES), unique=True).map(tuple),
    max_size=4,
)
layouts = st.builds(
    Layout,
    mesh=st.dictionaries(st.sampled_from(axes.AXES), st.integers(1, 4096), max_size=3),
    zero=st.integers(1, 3),
    sequence_sharded=st.booleans(),
    context_attention=st.sampled_from(["ring", "all-gather", "all-to-all"]),
    parameters=rules,
    activations=rules,
    unnamed=st.sampled_from(["refuse", "replicate"]),
).flatmap(lambda found: st.sampled_from([found, replace(found, collective_matmul=found.sequence_sharded)]))


@given(layout=layouts)
def test_a_layout_as_text_is_read_back(layout, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "layout.toml"
    path.write_text(tomli_w.dumps(asdict(layout)), encoding="utf-8")
    assert read_layout(path) == layout


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("zro = 1\n[msh]\ndata = 2", "\n  - unknown key 'msh' (did you mean 'mesh'?)"),
        ("zero = ", "is not a layout in TOML: "),
        ("zero = 7", "layout.toml: this layout cannot be used:\n  - zero is 7; allowed: 1, 2 or 3"),
        ("[parameters]\nembed = 3", "layout.toml: "),
        ('[parameters]\nembed = "fsdp"', "rule parameters.embed is 'fsdp'; write a list of axes"),
    ],
)
def test_a_file_that_is_no_layout(text, error, tmp_path):
    path = tmp_path / "layout.toml"
    path.write_text(text)
    found = refused(read_layout, path)
    assert found.startswith(str(path))
    assert error in found


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a = " + "[" * 9_999, "is not a layout in TOML"),
        ("[mesh]\ndata = 10000000000", "axis 'data' has size 10000000000; allowed: at most 16777216"),
        ("[mesh]\ndata = " + "9" * 5000, "is not a layout in TOML"),
        ("#" * 99_999, "has 99,999 bytes; at most 65,536 are read"),
        ("[mesh]\n" + ".".join("a" * 4_000) + " = 1", "it is nested deeper than 64 levels"),
    ],
)
def test_crafted_files_are_refused(content, words, tmp_path):
    (tmp_path / "mine.toml").write_text(content)
    with pytest.raises(ValueError, match=re.escape(words)):
        read_layout(tmp_path / "mine.toml")


def test_a_layout_that_is_no_regular_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "mine.toml")
    with pytest.raises(ValueError, match=r"mine\.toml is a FIFO, not a regular file"):
        read_layout(tmp_path / "mine.toml")


def test_a_large_number_of_devices_is_refused_quickly():
    with pytest.raises(ValueError, match="there are 10000000000; make the sizes multiply"):
        axis_sizes({"data": 3}, 10**10)
