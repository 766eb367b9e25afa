"""The run of one island: where rows follow the measured speed though nobody asked for it."""

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest
from rich.console import Console
from tiny_language_model import TinyConfig

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.data import Text
from shardtrain.elastic.options import Elastic
from shardtrain.islands.options import Across
from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.scaling import Scaling
from shardtrain.trainer.config import Run
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.island_run import IslandDevices, make_island_run
from shardtrain.trainer.strategy import Strategy

RUN = Run(model=TinyConfig(), data=Text(seq=8), batch=8, steps=1)


def across_of(run: Run, other: IslandDevices) -> tuple[Across, str]:
    """What island 0 makes of a run whose island 1 has other devices, and what it prints."""

    def all_gather_islands(name: str, own: Any) -> list[Any]:
        return [own, list(other)] if name == "devices of islands" else [own, own]

    islands: Any = SimpleNamespace(
        placement=SimpleNamespace(island=0, num_islands=2), all_gather_islands=all_gather_islands
    )
    printed = io.StringIO()
    console = Console(file=printed, width=400)
    output: Any = SimpleNamespace(note=console.print)
    return make_island_run(run, Coordination(islands), output).strategy.across, printed.getvalue()


def devices(**changes: Any) -> IslandDevices:
    own = IslandDevices(jax.local_devices()[0].device_kind, jax.device_count())
    return own._replace(**changes)


@pytest.mark.parametrize("other", [devices(number=2), devices(kind="another")])
def test_rows_follow_the_speed_where_islands_differ(other):
    across, printed = across_of(RUN, other)
    assert across == Across(shares="auto", share_limits="auto")
    kind = jax.local_devices()[0].device_kind
    assert printed == (
        f"islands differ (8 x {kind}; {other.number} x {other.kind}): their rows follow the measured speed"
        " (--shares auto), within what fits their memory; weights, such as"
        f" --shares 8,{other.number}, keep them as they are\n"
    )
    limited = replace(RUN, strategy=Strategy(across=Across(share_limits=(4, 8))))
    assert across_of(limited, other)[0] == Across(shares="auto", share_limits=(4, 8))


def test_the_rate_of_islands_that_come_and_go_is_scaled_in_each_step_and_not_by_the_mesh_too():
    optimizer, output = Optimizer(), cast(Any, SimpleNamespace(note=lambda line: None))
    run = replace(RUN, optimizer=optimizer, scaling=Scaling(rate="linear"))
    scaled: list[Any] = [
        make_island_run(replace(run, elastic=elastic), Coordination(), output).optimizer
        for elastic in (Elastic(), Elastic(islands="1..4", batch="members"))
    ]
    assert scaled[0].learning_rate.peak == 8 * optimizer.learning_rate.peak
    assert scaled[1] == optimizer


def test_waves_of_one_step_in_which_nobody_is_ahead_are_every_step():
    run = replace(RUN, strategy=Strategy(synchronisation=Synchronisation(on="deltas", every=1, distance=0)))
    notes: list[str] = []
    output: Any = SimpleNamespace(note=notes.append)
    assert make_island_run(run, Coordination(), output).strategy.synchronisation == Synchronisation()
    assert notes == [
        "waves of one step in which no island may be ahead: gradients are combined in every step"
    ]


@pytest.mark.parametrize(
    ("changes", "other"),
    [
        pytest.param({}, {}, id="equal islands"),
        pytest.param({"strategy": Strategy(across=Across(shares=(8.0, 2.0)))}, {"number": 2}, id="weights"),
        pytest.param({"batch_unit": "tokens"}, {"number": 2}, id="tokens"),
        pytest.param({"batch_growth": "4:2"}, {"number": 2}, id="a batch that grows"),
        # the rows of a replica are part of what these learn
        pytest.param(
            {"strategy": Strategy(synchronisation=Synchronisation(by="adasum"))}, {"number": 2}, id="adasum"
        ),
        pytest.param(
            {"strategy": Strategy(synchronisation=Synchronisation(on="deltas", every=4))},
            {"number": 2},
            id="local steps",
        ),
        pytest.param({}, {"number": 2, "dtype": "bfloat16"}, id="another dtype"),
        pytest.param({"strategy": Strategy(across=Across(axis="pipeline"))}, {"number": 2}, id="stages"),
    ],
)
def test_they_stay_where_a_split_is_not_free(changes, other):
    run = replace(RUN, **changes)
    across, printed = across_of(run, devices(**other))
    assert across == run.strategy.across
    assert printed == ""
