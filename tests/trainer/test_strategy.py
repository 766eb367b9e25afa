"""Strategies as files: what is written reads back to the same; what cannot be read is refused by name."""

from pathlib import Path

import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quiet_training import train_quietly
from tiny_language_model import TinyConfig

from shardtrain.cli.run_options import parse_run
from shardtrain.combine import mean
from shardtrain.combine.synchronisation import PRESETS, Outer, Synchronisation, preset
from shardtrain.data import Text
from shardtrain.functional.remat_counts import RematCounts
from shardtrain.islands.agreement import FREE, PACKAGES
from shardtrain.islands.options import Across
from shardtrain.pipeline.options import Pipeline
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.config import Run
from shardtrain.trainer.strategy import OF_ISLANDS, Strategy, read_strategy, strategy_text

STRATEGIES = st.builds(
    Strategy,
    layout=st.builds(
        Layout,
        mesh=st.dictionaries(st.sampled_from(["data", "fsdp", "tensor"]), st.integers(1, 8), min_size=1),
        zero=st.sampled_from([1, 2, 3]),
        sequence_sharded=st.booleans(),
        parameters=st.sampled_from([{}, {"embed": ("fsdp",)}, {"we.ird name": ()}]),
    ),
    accumulate=st.integers(1, 64),
    synchronisation=st.sampled_from([*PRESETS.values(), Synchronisation(by="int8+adasum", inside="sum")]),
    across=st.sampled_from([Across(), Across(shares=(1.0, 2.5), reduce="root"), Across(axis="pipeline")]),
    pipeline=st.sampled_from([Pipeline(), Pipeline(schedule="zb_v", virtual_stages=2, stages="1,2,3,2")]),
    remat=st.sampled_from([None, "dots", RematCounts(full=6, none=18)]),
    compute_dtype=st.sampled_from([None, "bfloat16"]),
    islands=st.sampled_from(
        [
            {},
            {"*V100*": {"compute_dtype": "float16", "accumulate": 4}},
            {
                "0": {"remat": "full"},
                "1": {"remat": {"dots": 24}},
                "2-5,7": {"layout": {"mesh": {"data": 2, "fsdp": 2}, "zero": 3}},
            },
        ]
    ),
    predicted=st.sampled_from([{}, {"compute_seconds": 0.25, "update_seconds": 0.0}]),
)


@given(STRATEGIES)
def test_what_is_written_reads_back_to_the_same(tmp_path_factory, strategy):
    path = tmp_path_factory.getbasetemp() / "strategy.toml"
    path.write_text(strategy_text(strategy))
    assert read_strategy(path) == strategy


def test_each_island_has_its_sections_the_later_ones_over_the_earlier():
    layout = Layout(mesh={"data": -1}, zero=2)
    sections = {
        "*v100*": {"compute_dtype": "float16", "layout": {"zero": 1}},
        "1,3-4": {"layout": {"mesh": {"fsdp": 2}}, "accumulate": 4},
        "4": {"compute_dtype": "float32"},
    }
    strategy = Strategy(layout=layout, compute_dtype="bfloat16", islands=sections)
    assert strategy.scales_loss
    old, new = "Tesla V100-SXM2-32GB", "NVIDIA H100"
    assert strategy.select_island(0, new) == strategy
    found = [strategy.select_island(*each) for each in ((0, old), (3, old), (4, old))]
    assert [each.compute_dtype for each in found] == ["float16", "float16", "float32"]
    assert [each.layout.zero for each in found] == [1, 1, 1]
    assert [dict(each.layout.mesh) for each in found] == [{"data": -1}, {"fsdp": 2}, {"fsdp": 2}]
    assert [each.accumulate for each in found] == [1, 4, 4]
    # which all islands agree on, whatever each computes in
    assert all(each.scales_loss for each in found)
    assert not Strategy(compute_dtype="bfloat16").scales_loss


@pytest.mark.parametrize(
    ("islands", "words"),
    [
        ({"1": {"layout": Layout()}}, "give plain values, as in a file"),
        ({"1": {"compute_dtype": None}}, "give plain values, as in a file"),
        ({1: {"accumulate": 2}}, "give the islands as text, such as '1'"),
    ],
)
def test_sections_in_python_are_those_of_a_file(islands, words):
    with pytest.raises(ValueError, match=words):
        Strategy(islands=islands)


def test_the_page_has_all_that_may_differ_between_islands_and_all_that_may_not():
    page = (Path(__file__).parents[2] / "docs" / "islands.md").read_text()
    section = page.partition("### Islands that differ")[2].partition("\n### ")[0]
    may, _, must = section.partition("| must be equal")
    assert set(OF_ISLANDS) < {name.removeprefix("strategy.") for name in FREE}
    for name in (*OF_ISLANDS, *(name for name in FREE if not name.startswith("strategy."))):
        assert f"`{name}`" in may, name
    for package in PACKAGES:
        assert package in must, package


def test_what_is_no_plain_value_is_left_out_and_named(tmp_path):
    given = Synchronisation(by=mean(), on="deltas", every=7, outer=optax.adam(1e-3))
    text = strategy_text(Strategy(synchronisation=given))
    assert "# synchronisation.by was given in Python" in text
    assert "# synchronisation.outer was given in Python" in text
    path = tmp_path / "strategy.toml"
    path.write_text(text)
    assert read_strategy(path).synchronisation == Synchronisation(on="deltas", every=7)


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("accumulat = 2", ["unknown key 'accumulat' (did you mean 'accumulate' or 'accumulate_dtype'?)"]),
        ("[synchronisation]\nevry = 2", ["unknown key 'evry' (did you mean 'every'?) in [synchronisation]"]),
        ("[synchronisation.outer]\nrate = 2", ["unknown key 'rate'", "in [synchronisation.outer]"]),
        ("accumulate = 0", ["accumulate is 0 microbatches; use 1 or more"]),
        (
            "[synchronisation]\nevery = 3",
            ["is 3, but gradients are combined in every step"],
        ),
        ("layout = 3", ["layout is 3"]),
        ("compute_dtype = 'float8'", ["compute_dtype is 'float8'", "float16"]),
        ("islands = 3", ["islands is 3"]),
        ("[islands]\n1 = 3", ["islands.'1' is 3; give fields and their values"]),
        ("[islands.1]\nacumulate = 3", ["'acumulate' (did you mean 'accumulate'?); islands may differ"]),
        (
            "[islands.1.across]\nshares = 'auto'",
            ["islands.'1' has 'across' (known: layout, accumulate, remat, compute_dtype)", "only in these"],
        ),
        ("[islands.1]\naccumulate = 0", ["islands.'1': ", "accumulate is 0 microbatches; use 1 or more"]),
        ("[islands.1.layout]\nzro = 1", ["islands.'1': unknown key 'zro' (did you mean 'zero'?)"]),
        (
            "[islands.5-2]\naccumulate = 2",
            ["islands.'5-2' has a range without islands; give the lower number"],
        ),
        ("[islands.'5-2,3']\naccumulate = 2", ["islands.'5-2,3' has a range without islands"]),
        ("[islands.'2-']\naccumulate = 2", ["islands.'2-' names no islands; give numbers, such as '2-5,8'"]),
        ("accumulate = ", ["is not a strategy in TOML"]),
        ("[" * 70000, ["is not a strategy in TOML"]),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(text, problems, tmp_path):
    path = tmp_path / "strategy.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_strategy(path)
    assert str(path) in str(error.value)
    for problem in problems:
        assert problem in str(error.value)
    with pytest.raises(ValueError, match=r"the strategy file .* cannot be read"):
        read_strategy(tmp_path / "none.toml")


RUN_FILE = """
from shardtrain import Run, Text
from tiny_language_model import TinyConfig

def run():
    return Run(model=TinyConfig(), data=Text(seq=8), batch=8)
"""


def parsed(tmp_path: Path, *options: str) -> Run:
    (tmp_path / "run.py").write_text(RUN_FILE)
    return parse_run("train", [str(tmp_path / "run.py"), *options])[0]


def test_a_run_leaves_its_strategy_and_another_takes_it(tmp_path, one_device):
    text = tmp_path / "text.txt"
    text.write_bytes(b"shardtrain" * 40)
    data, strategy = Text(paths=(text,), seq=8), Strategy(accumulate=2)
    run_dir = tmp_path / "run"
    train_quietly(Run(model=TinyConfig(), data=data, strategy=strategy, batch=8, steps=1, run_dir=run_dir))
    file = tmp_path / "run" / "strategy.toml"
    assert read_strategy(file) == strategy
    manifest = next((tmp_path / "run" / "checkpoints").glob("step_*/manifest.json"))
    assert "accumulate = 2" in manifest.read_text()


def test_options_change_single_fields_of_a_file_and_a_preset_its_synchronisation(tmp_path):
    strategy = Strategy(
        layout=Layout(mesh={"data": 4, "tensor": 2}),
        synchronisation=Synchronisation(on="deltas", every=2, outer=Outer(learning_rate=0.5)),
    )
    file = tmp_path / "strategy.toml"
    file.write_text(strategy_text(strategy))
    changed = parsed(tmp_path, "--strategy", str(file), "--local-steps", "5", "--mesh", "data=8").strategy
    assert changed.synchronisation == Synchronisation(on="deltas", every=5, outer=Outer(learning_rate=0.5))
    assert changed.layout.mesh == {"data": 8}
    changed = parsed(tmp_path, "--strategy", str(file), "--synchronisation=diloco").strategy
    assert changed.synchronisation == preset("diloco")
    assert changed.layout == strategy.layout


def test_a_preset_and_its_fields(tmp_path):
    options = ["--synchronisation", "streaming-diloco", "--fragments", "2", "--outer-momentum", "0.8"]
    found = parsed(tmp_path, *options, "--combine", "int8+mean").strategy.synchronisation
    outer = Outer(learning_rate=0.7, momentum=0.8, nesterov=True)
    assert found == Synchronisation(by="int8+mean", on="deltas", every=30, fragments=2, outer=outer)
    with pytest.raises(ValueError, match="did you mean 'diloco'"):
        parsed(tmp_path, "--synchronisation", "dilocco")


def test_gradients_in_16_bits_are_refused_where_they_are_not_sent():
    narrow = Across(reduce_dtype="bfloat16")
    with pytest.raises(ValueError) as error:
        Strategy(across=narrow, synchronisation=Synchronisation(by="int8+mean", on="deltas", every=2))
    assert str(error.value) == (
        "this strategy cannot be used:\n"
        "  - reduce_dtype is 'bfloat16', and deltas are float32; use a codec: --combine bfloat16+mean\n"
        "  - reduce_dtype is 'bfloat16', and 'int8+mean' has a codec already; use one of the two"
    )
    with pytest.raises(ValueError) as error:
        Across(reduce_dtype="bfloat16", axis="pipeline")
    assert str(error.value) == (
        "islands cannot be joined like this:\n"
        "  - reduce_dtype is 'bfloat16', and stages send float32; use a codec (bfloat16+mean)"
    )
    Strategy(across=narrow, synchronisation=Synchronisation(by="adasum"))


def test_parts_of_gradients_are_refused_where_they_are_no_mean():
    with pytest.raises(ValueError, match="gradient_parts is 2, and 'adasum' of gradients is no mean of"):
        Strategy(across=Across(gradient_parts=2), synchronisation=Synchronisation(by="adasum"))
    with pytest.raises(ValueError) as error:
        Across(gradient_parts=2, axis="pipeline")
    assert str(error.value) == (
        "islands cannot be joined like this:\n"
        "  - gradient_parts is 2, and stages of a pipeline send gradients after all of their tasks; use 1"
    )
    with pytest.raises(ValueError, match="gradient_parts is 0; use 1 or more"):
        Across(gradient_parts=0)


def test_numbers_of_blocks_are_a_table_or_a_text(tmp_path):
    path = tmp_path / "strategy.toml"
    counts = RematCounts(full=6, none=18)
    for text in ("remat = { full = 6, none = 18 }", 'remat = "none=18,full=6"'):
        path.write_text(f'{text}\n[islands."1"]\nremat = {{ dots = 24 }}\n')
        strategy = read_strategy(path)
        assert strategy.remat == counts
        # a section has numbers of its own, and adds none to those of the strategy
        assert strategy.select_island(1, "cpu").remat == RematCounts(dots=24)
    path.write_text("remat = { ful = 6 }\n")
    with pytest.raises(ValueError, match=r"there is no 'ful' \(did you mean 'full'"):
        read_strategy(path)
