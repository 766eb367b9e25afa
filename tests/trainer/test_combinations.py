"""What the table of combinations refuses: a run for each row of it, and an ordinary run for none."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny_language_model import TinyConfig

from shardtrain import Run, Strategy, Text
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.islands.options import Across
from shardtrain.pipeline.options import Pipeline
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.trainer.combinations import KINDS, REFUSALS, check_stage_islands, find_refused
from shardtrain.trainer.recovery import Recovery

PLAIN = Run(model=TinyConfig(), data=Text(seq=8))
STAGES = Across(axis="pipeline")
SHARDED = Layout(mesh={"tensor": 2}, operators={"blocks/up": {"tensor": "1"}})

RUNS: dict[str, dict[str, Any]] = {
    "compute_dtype is 'float16'": {"compute_dtype": "float16"},
    "accumulate_dtype is 'bfloat16'": {"accumulate_dtype": "bfloat16"},
    "remat is 'offload'": {"remat": "offload"},
    "inside is 'sum'": {"synchronisation": Synchronisation(inside="sum")},
    "the layout has shardings of single operators": {"layout": SHARDED},
    "in_flight is 3 batches": {"across": STAGES, "pipeline": Pipeline(in_flight=3)},
    "offload is 'optimizer', which needs": {"offload": "optimizer"},
    "--shares": {"across": Across(shares=(1.0, 2.0))},
    "--reduce root": {"across": Across(reduce="root")},
    "--reduce-dtype": {"across": Across(reduce_dtype="bfloat16")},
    "--gradient-parts": {"across": Across(gradient_parts=4)},
    "--accumulate-dtype": {"accumulate_dtype": "bfloat16"},
    "--offload": {"offload": "optimizer"},
    "--batch-unit tokens": {"batch_unit": "tokens"},
    "--batch-growth": {"batch_growth": "5:2"},
    "--gradient-noise-scale": {"gradient_noise_scale": True},
    "--nonfinite roll_back": {"nonfinite": "roll_back"},
    "--recovery.spike": {"recovery": Recovery(spike=2.0)},
    "--checkpoints.fast": {"checkpoints": CheckpointPolicy(fast=Path("fast"))},
}
"""Beginning of the text of a row -> options of a run that it refuses."""


def make_run(options):
    """Return a run with these options of its own or of its strategy."""
    fields = Strategy.__dataclass_fields__
    strategy = {name: value for name, value in options.items() if name in fields}
    others = {name: value for name, value in options.items() if name not in fields}
    return replace(PLAIN, strategy=Strategy(**strategy), **others)


@pytest.mark.parametrize(("row", "asked"), list(zip(REFUSALS, RUNS.items(), strict=True)), ids=list(RUNS))
def test_each_row_refuses_its_option_for_its_kinds_alone(row, asked):
    (begin, options), kinds = asked, row.kinds.split()
    assert set(kinds) <= set(KINDS)
    run = make_run(options)
    for kind in KINDS:
        found = [text for text in find_refused(run, kind) if text.startswith(begin)]
        # says what to use
        assert len(found) == (kind in kinds)
        assert all(re.search("use |leave |[(]", text) for text in found)
    assert not any(find_refused(PLAIN, kind) for kind in KINDS)


def test_islands_that_hold_stages_list_all_problems():
    run = make_run({"remat": "offload", "offload": "optimizer"})
    mesh = make_mesh(Layout(mesh={"pipeline": 2}), jax.devices()[:2])
    with pytest.raises(
        ValueError,
        match=r"islands cannot hold(?s:.*)has pipeline=2; use pipeline=1(?s:.*)remat is(?s:.*)offload is",
    ):
        check_stage_islands(run, mesh)
