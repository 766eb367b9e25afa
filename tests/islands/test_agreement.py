"""Agreement: which facts there are, what counts as the same program, and the diff by value."""

import json
import platform
import re
from dataclasses import replace
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardtrain.islands import agreement
from shardtrain.islands.agreement import (
    FREE,
    JAX_OPTIONS,
    PACKAGES,
    check_agreement,
    disagreement,
    facts,
    flags,
    program_fact,
    program_hash,
    run_facts,
    tree_facts,
    versions,
)
from shardtrain.models.decoder import DecoderConfig
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.config import Run, describe
from shardtrain.trainer.sources import describe_data
from shardtrain.trainer.strategy import Strategy

THREE = ["island 0 (host a)", "island 1 (host b)", "island 2 (host c)"]


class Paths:
    """Data whose files lie elsewhere on each host."""

    def train(self, folder): ...
    def heldout(self, folder): ...


RUN = Run(model=DecoderConfig(vocab=8, seq=4, embed=4, num_layers=2, num_heads=2), data=Paths())


def diff(*facts_by_rank, **options):
    text = disagreement(facts_by_rank, THREE[: len(facts_by_rank)], **options)
    if text is None:
        return []
    first, *lines = text.split("\n")
    assert first == "islands do not agree, so nothing was started:"
    assert all(line.startswith("  ") for line in lines)
    return [line[2:] for line in lines]


def test_one_rank_is_named_and_the_majority_comes_first():
    other, most = {"versions/jax": "0.10.1", "run/batch": 32}, {"versions/jax": "0.10.2", "run/batch": 32}
    assert diff(most, other, most) == [
        "jax: 0.10.2 on island 0 (host a), island 2 (host c); 0.10.1 on island 1 (host b)",
        "-> install the same versions on every host, from one lock file",
    ]
    assert diff(other, most, most)[0] == (
        "jax: 0.10.2 on island 1 (host b), island 2 (host c); 0.10.1 on island 0 (host a)"
    )
    assert diff(other, most)[0] == "jax: 0.10.1 on island 0 (host a); 0.10.2 on island 1 (host b)"


def test_each_kind_says_what_to_do():
    kinds = ("versions", "flags", "run", "parameters", "data", "program")
    mine, yours = ({f"{kind}/x": value for kind in kinds} for value in (1, 2))
    where = "1 on island 0 (host a); 2 on island 1 (host b)"
    assert diff(mine, yours) == [
        f"x: {where}",
        "-> install the same versions on every host, from one lock file",
        f"x: {where}",
        "-> give every island the same XLA_FLAGS and JAX_ variables",
        f"x: {where}",
        "-> start every island with the same run file and the same options",
        f"parameters/x: {where}",
        "-> they build different models: bring the model's file and its options to one version",
        f"data/x: {where}",
        "-> give every island a copy of the same data",
        f"program/x: {where}",
        "-> their code differs: bring the run file, the model and shardtrain to one version",
    ]


def test_what_is_not_there_is_a_difference():
    assert diff({"parameters/up": "float32 (2,)"}, {"parameters/down": "float32 (2,)"})[:2] == [
        "parameters/up: float32 (2,) on island 0 (host a); (not there) on island 1 (host b)",
        "parameters/down: (not there) on island 0 (host a); float32 (2,) on island 1 (host b)",
    ]


def test_programs_are_compared_where_they_should_be_the_same():
    big, small = ({f"program/step on rows {rows}": "aa"} for rows in (24, 8))
    assert diff(big, small, small) == []
    assert diff(small, big, {"program/step on rows 8": "bb"}) == [
        "program/step on rows 8: aa on island 0 (host a); bb on island 2 (host c)",
        "-> their code differs: bring the run file, the model and shardtrain to one version",
    ]


def test_only_some_lines_of_a_kind():
    mine, yours = ({f"parameters/{i}": dtype for i in range(50)} for dtype in ("float32", "bfloat16"))
    lines = diff(mine | {"run/batch": 1}, yours | {"run/batch": 2}, most_lines=3)
    assert [line.partition(":")[0] for line in lines[:3]] == ["parameters/0", "parameters/1", "parameters/2"]
    assert lines[3] == "and 47 more of parameters"
    assert lines[5] == "batch: 1 on island 0 (host a); 2 on island 1 (host b)"
    assert len(diff(mine, yours)) == 8 + 2


def test_tables_are_compared_by_entry():
    mine = {"parameters": {"up": "float32 (4,)", "down": {"w": "float32 (2,)"}}}
    yours = {"parameters": {"up": "float32 (4,)", "down": {"w": "float32 (3,)"}}}
    assert diff(mine, yours)[0] == (
        "parameters/down/w: float32 (2,) on island 0 (host a); float32 (3,) on island 1 (host b)"
    )


def test_long_values_are_cut_to_where_they_differ():
    mine, yours = ({"run/data.paths": ["/data/" + "x" * 200 + end + "y" * 100]} for end in "12")
    line = diff(mine, yours)[0]
    assert line == (
        f"data.paths: ...{'x' * 10}1{'y' * 49}... on island 0 (host a);"
        f" ...{'x' * 10}2{'y' * 49}... on island 1 (host b)"
    )
    assert "shorter" in diff({"run/a": "shorter"}, {"run/a": "long" * 30})[0]
    start, end = (diff({"run/a": "x" * 80}, {"run/a": "x" * n})[0] for n in (0, 81))
    assert start.endswith("(host a);  on island 1 (host b)")
    assert "on island 0 (host a)" in end


@pytest.mark.parametrize(
    ("mine", "yours", "shown"), [(None, "None", ["None", "'None'"]), (True, 1, ["True", "1"])]
)
def test_kinds_of_values_are_told_apart(mine, yours, shown):
    line = diff({"run/a": mine}, {"run/a": yours})[0]
    assert line == f"a: {shown[0]} on island 0 (host a); {shown[1]} on island 1 (host b)"


def test_versions_are_those_installed():
    found = versions()
    assert set(found) == {"versions/python", *(f"versions/{package}" for package in PACKAGES)}
    assert found["versions/jax"] == jax.__version__
    assert platform.python_version().startswith(f"{found['versions/python']}.")
    assert all(re.fullmatch(r"\d+\.\d+\S*", version or "") for version in found.values())


def test_a_package_that_is_not_there_is_a_fact_too(monkeypatch):
    def no_version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(agreement.metadata, "version", no_version)
    assert versions()["versions/mpi4jax"] is None


def test_flags_of_xla_that_change_nothing_are_left_out():
    found = flags(
        {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_dump_to=/tmp/a --xla_hlo_profile"
            " --xla_gpu_per_fusion_autotune_cache_dir=/x --xla_cpu_enable_fast_math=true --xla_b"
            " --xla_cpu_enable_fast_math=false",
            "NVIDIA_TF32_OVERRIDE": "0",
            "HOME": "/home",
        }
    )
    xla = {name: value for name, value in found.items() if "xla" in name}
    assert xla == {"flags/xla_b": "true", "flags/xla_cpu_enable_fast_math": "false"}
    assert found["flags/NVIDIA_TF32_OVERRIDE"] == "0"
    assert flags({})["flags/NVIDIA_TF32_OVERRIDE"] is None
    assert "flags/HOME" not in found


def test_options_of_jax_are_facts():
    found = flags({})
    for name in JAX_OPTIONS:
        assert hasattr(jax.config, name), name
        assert found[f"flags/{name}"] == agreement._plain(getattr(jax.config, name))
    assert type(found["flags/jax_threefry_partitionable"]) is bool
    with jax.numpy_dtype_promotion("strict"):
        assert diff(found, flags({})) == [
            "jax_numpy_dtype_promotion: standard on island 0 (host a); strict on island 1 (host b)",
            "-> give every island the same XLA_FLAGS and JAX_ variables",
        ]


def test_all_fields_of_a_run_are_facts_but_those_that_are_free():
    """A layout of its own, other microbatches and folders are right; everything else has to agree."""
    description = describe(RUN)
    found = run_facts(description, None)
    left_out = [name for name in description if f"run/{name}" not in found]
    layout = [name for name in description if name.startswith("strategy.layout.")]
    of_strategy = ["strategy.accumulate", "strategy.compute_dtype", "strategy.remat", *layout]
    loading = ["loading.heldout_workers", "loading.prefetch", "loading.workers"]
    assert sorted(left_out) == sorted(["replay", "run_dir", *loading, *of_strategy])
    other = Strategy(layout=Layout(mesh={"fsdp": 2}, zero=1), accumulate=4)
    assert run_facts(describe(replace(RUN, strategy=other)), None) == found
    assert run_facts(describe(replace(RUN, batch=64)), None) != found


def test_paths_of_data_count_where_there_is_no_fingerprint():
    assert "data.paths" in FREE
    description = {"data.paths": ["a"], "data.seq": 8}
    assert run_facts(description, "f1") == {"run/data.seq": 8, "data/fingerprint": "f1"}
    assert run_facts(description, None) == {
        "run/data.paths": ["a"], "run/data.seq": 8, "data/fingerprint": None,
    }  # fmt: skip


def test_trees_are_facts_by_path():
    shapes = {"blocks": {"up": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)}, "step": np.int32(0)}
    expected = {"parameters/blocks/up": "bfloat16 (2, 3)", "parameters/step": "int32 ()"}
    assert tree_facts("parameters", shapes) == expected
    found = facts({}, trees={"parameters": shapes, "model state": {}}, program={"program/step": "aa"})
    assert expected.items() <= found.items()
    assert found["program/step"] == "aa"
    assert all(name.partition("/")[0] != "model state" for name in found)


def lowered(scale=2.0, axis="data", size=2, callback=False):
    mesh = Mesh(np.array(jax.devices()[:size]), (axis,))

    def step(x):
        if callback:
            x = jax.pure_callback(lambda v: np.asarray(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return (x * scale).sum()

    sharding = NamedSharding(mesh, PartitionSpec(axis))
    return jax.jit(step, in_shardings=sharding).lower(jnp.ones(8)).as_text()


def test_the_same_program_has_the_same_hash():
    assert re.fullmatch("[0-9a-f]{16}", program_hash(lowered()))
    assert program_hash(lowered()) == program_hash(lowered())
    others = (lowered(scale=3.0), lowered(axis="fsdp"), lowered(size=4))
    assert len({program_hash(text) for text in (lowered(), *others)}) == 4


def test_addresses_are_no_part_of_a_program():
    call = '%%0 = stablehlo.custom_call @callback(x) {backend_config = "%s", comm = %d : i64}'
    assert program_hash(call % (140234567890, 94012345678)) == program_hash(call % (9401234567, 1402345678))
    assert program_hash(call % ("0x7f31aa00", 123456789)) == program_hash(call % ("0x7f31bb00", 123456780))
    assert program_hash(call % ("a", 16)) != program_hash(call % ("b", 16))
    # a number of the model is
    constant = "stablehlo.constant dense<%d> : tensor<i64>"
    assert program_hash(constant % 1234567890) != program_hash(constant % 1234567891)
    assert program_hash(lowered(callback=True)) == program_hash(lowered(callback=True))


def test_what_a_program_depends_on_is_in_its_name():
    found = program_fact("module", rows=16, mesh="data=2", platform="cpu")
    assert found == {"program/step on mesh data=2, platform cpu, rows 16": program_hash("module")}
    assert program_fact("module") == {"program/step": program_hash("module")}


def test_all_ranks_end_with_the_same_error():
    """`share` as the bridge has it: what this rank gives, and what all gave."""
    given = {}

    def share(name, value, timeout_seconds):
        assert (name, timeout_seconds) == ("agreement", 7.0)
        given[value["name"]] = json.loads(json.dumps(value))
        return list(given.values())

    check_agreement(share, "island 0", {"run/batch": 32}, 7.0)
    check_agreement(share, "island 1", {"run/batch": 32}, 7.0)
    with pytest.raises(ValueError, match="batch: 32 on island 0, island 1; 64 on island 2"):
        check_agreement(share, "island 2", {"run/batch": 64}, 7.0)


@pytest.mark.parametrize("change", ["train", "heldout"])
def test_samples_of_the_users_own_must_be_as_many_on_all_islands(change):
    def mine(num_train, num_heldout):
        return facts(describe(RUN) | describe_data([0] * num_train, {"": [0] * num_heldout}, False))

    found = diff(mine(10, 4), mine(14, 4) if change == "train" else mine(10, 5))
    name, first, second = {
        "train": ("data.samples", "10", "14"),
        "heldout": ("data.heldout", "4 samples", "5 samples"),
    }[change]
    assert found[:-1] == [f"{name}: {first} on island 0 (host a); {second} on island 1 (host b)"]
