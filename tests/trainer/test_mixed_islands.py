"""Islands that compute in different dtypes train one model, as one device does in float32."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quiet_training import train_quietly
from tiny_language_model import TinyConfig

from shardtrain.data import Text
from shardtrain.functional.loss import next_token_loss
from shardtrain.models.decoder import DecoderConfig
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.trainer.config import Run
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.island_run import make_island_run
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.train import train

PROGRAM = Path(__file__).parents[1] / "programs" / "mixed_islands.py"


def large_loss(apply, batch):
    total, count = next_token_loss(apply, batch)
    return 8 * total, count


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    letters = np.random.default_rng(0).choice(list(b"abcd"), 400 * 8, p=[0.7, 0.1, 0.1, 0.1])
    path.write_bytes(letters.astype(np.uint8).tobytes())
    return path


def trained(text, folder, **changes):
    run = Run(
        model=TinyConfig(num_layers=2),
        data=Text(paths=(text,), seq=8, heldout_fraction=0.06),
        loss=large_loss,
        optimizer=optax.sgd(0.01),
        batch=8,
        steps=30,
        seed=3,
        log_every=1,
        evaluate_every=None,
    )
    found, _, lines = train_quietly(dataclasses.replace(run, run_dir=folder, **changes))
    return found.state, lines


@pytest.fixture(scope="module")
def alone(text, on_one_device, tmp_path_factory):
    """The held-out loss after each step in float32 on one device."""
    with on_one_device():
        _, lines = trained(text, tmp_path_factory.mktemp("alone"), evaluate_every=1)
    return [line["heldout/loss"] for line in lines]


def is_that_of_as_many_updates_in_float32(loss, num_updates, alone):
    """A step lowers it by 5 to 10 %; the samples of skipped steps differ."""
    assert alone[num_updates] < loss < alone[num_updates - 2]


@pytest.mark.full
def test_float16_beside_bfloat16_beside_float32(text, alone, mpiexec, tmp_path):
    (skipped,) = {json.loads(out)["skipped"] for out in mpiexec(3, PROGRAM, tmp_path, text)}
    lines = read_jsonl(tmp_path / "mean" / "metrics.jsonl")
    assert sum(line["skipped"] for line in lines) == skipped
    is_that_of_as_many_updates_in_float32(lines[-1]["heldout/loss"], 30 - skipped, alone)


def test_one_device_in_float16_scales_its_loss(text, alone, tmp_path, one_device):
    state, lines = trained(text, tmp_path / "half", strategy=Strategy(compute_dtype="float16"))
    skipped = [line["skipped"] for line in lines]
    num_skipped = int(sum(skipped))
    assert num_skipped > 0
    # each overflow halves it; the scale of a line is that of its step
    scales = [line["loss_scale"] for line in lines]
    assert scales == [2.0 ** (15 - int(sum(skipped[:step]))) for step in range(30)]
    assert state.loss_scale.scale == 2.0 ** (15 - num_skipped)
    assert state.loss_scale.good_steps == skipped[::-1].index(1.0)
    is_that_of_as_many_updates_in_float32(lines[-1]["heldout/loss"], 30 - num_skipped, alone)


def test_a_gradient_that_is_not_finite_in_float32_stops_a_run_with_a_scale(text, tmp_path, one_device):
    def broken_loss(apply, batch):
        total, count = next_token_loss(apply, batch)
        # its value is finite, and its gradient is not
        return total + 0 * jnp.sqrt(jnp.maximum(total - 1e9, 0)), count

    strategy = Strategy(compute_dtype="bfloat16", islands={"*V100*": {"compute_dtype": "float16"}})
    with pytest.raises(FloatingPointError, match="nonfinite is 'stop'"):
        trained(text, tmp_path / "run", strategy=strategy, loss=broken_loss, nonfinite="stop")


def test_a_run_goes_on_in_another_dtype_and_without_a_scale(text, tmp_path, one_device):
    ways: Any = (("float32", 2), ("float16", 12), ("bfloat16", 13))
    for dtype, steps in ways:
        strategy = Strategy(compute_dtype=dtype)
        state, lines = trained(text, tmp_path / "run", strategy=strategy, steps=steps)
        assert bool(state.loss_scale) == (dtype == "float16")
        assert lines[-1]["step"] == steps


def test_a_model_in_float16_without_a_scale_is_refused(text, tmp_path):
    model = DecoderConfig(vocab=256, seq=8, embed=8, num_layers=1, num_heads=1, dtype="float16")
    with pytest.raises(ValueError, match="which scales it: --compute-dtype float16"):
        trained(text, tmp_path / "run", model=model)


def test_what_needs_a_scale_and_has_none_is_refused(text, tmp_path):
    strategy = Strategy(compute_dtype="float16", accumulate=2)
    strategy = dataclasses.replace(
        strategy, layout=dataclasses.replace(strategy.layout, mesh={"pipeline": 2, "data": 4})
    )
    with pytest.raises(ValueError, match="a pipeline does not scale it; use bfloat16 or float32"):
        trained(text, tmp_path / "run", strategy=strategy)


def test_a_section_for_islands_that_are_not_there(text, tmp_path):
    run = Run(model=TinyConfig(), data=Text(paths=(text,), seq=8), batch=8, run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match="a section for islands 3, and the highest number here is 0"):
        train(dataclasses.replace(run, strategy=Strategy(islands={"3": {"accumulate": 2}})))
    notes = []
    strategy = Strategy(islands={"*V100*": {"accumulate": 2}})
    output: Any = SimpleNamespace(note=notes.append)
    make_island_run(dataclasses.replace(run, strategy=strategy), Coordination(), output)
    assert notes == ["WARNING: no island has devices '*V100*', a section of the strategy; they are cpu"]
