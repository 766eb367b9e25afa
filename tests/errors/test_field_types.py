"""Fields of runs with values of another kind: each is refused with what to write, or taken for what it must mean."""

import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from shardtrain.checkpoints.differences import Allow
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.data import (
    Augment,
    Chat,
    Corpus,
    ImageFiles,
    Loading,
    MaskedTokens,
    Mixture,
    Stream,
    Text,
    Tokens,
)
from shardtrain.data.tokenize import TokenizeOptions
from shardtrain.islands.options import Across
from shardtrain.islands.watchdog.diagnosis import Watch
from shardtrain.models.mlp import MlpConfig
from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.scaling import Scaling
from shardtrain.optim.schedules import Schedule
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.config import Run, StartFrom
from shardtrain.trainer.recovery import Recovery
from shardtrain.trainer.strategy import Strategy


def make_run(**changes: Any) -> Run:
    return Run(**{"model": MlpConfig(features=2, mlp=2, num_layers=1, classes=2), "data": Text(), **changes})


def make_images(**changes: Any) -> ImageFiles:
    return ImageFiles(**{"classes": 2, **changes})


def make_tokens(**changes: Any) -> Tokens:
    return Tokens(**{"path": "a.npy", "vocab": 10, **changes})


@pytest.mark.parametrize(
    ("make", "given", "problem"),
    [
        (make_run, {"recovery": 8.0}, "recovery is 8.0; give a Recovery: recovery=Recovery(spike=8.0) or recovery=Recovery(straggler=8.0)"),
        (make_run, {"recovery": {"spike": 8.0}}, "recovery is {'spike': 8.0}; give a Recovery: recovery=Recovery(spike=8.0)"),
        (make_run, {"recovery": None}, "recovery is None; give a Recovery"),
        (make_run, {"watch": 600}, "watch is 600; give a Watch: watch=Watch(silence_seconds=600) or watch=Watch(stall_seconds=600) or watch=Watch(long_seconds=600)"),
        (make_run, {"scaling": "linear"}, "scaling is 'linear'; give a Scaling: scaling=Scaling(rate='linear')"),
        (make_run, {"allow": "params/*"}, "allow is 'params/*'; give an Allow"),
        (make_run, {"strategy": "data=2"}, "strategy is 'data=2'; give a Strategy"),
        (make_run, {"optimizer": 3e-4}, "optimizer is 0.0003; give an Optimizer or a GradientTransformation"),
        (make_run, {"batch": "32"}, "batch is '32'; give a whole number: batch=32"),
        (make_run, {"steps": 10.0}, "steps is 10.0; give a whole number: steps=10"),
        (make_run, {"seed": True}, "seed is True; give a whole number"),
        (make_run, {"nonfinite": "stopp"}, "nonfinite is 'stopp'; allowed: skip, stop, roll_back"),
        (make_run, {"names": {"*/kernel": "tp"}}, "names['*/kernel'] is 'tp'; give a name or None for each dim, as ('embed', 'mlp') or (None,)"),
        (make_run, {"names": {"*/bias": None}}, "names['*/bias'] is None; give a name or None for each dim, as ('embed', 'mlp') or (None,)"),
        (make_run, {"names": {3: ("embed",)}}, "names has the pattern 3; give text, such as '*/kernel'"),
        (make_run, {"loss": 3}, "loss is 3; give a function"),
        (make_run, {"data": [1]}, "data is list, without train and heldout; give an object with train(folder) and heldout(folder), each returning samples by number (heldout may return None)"),
        (Strategy, {"layout": {"dta": 2}}, "layout: this layout cannot be used:\n    - axis 'dta' (did you mean 'data'?)"),
        (Strategy, {"across": "pipeline"}, "across is 'pipeline'; give an Across: across=Across(axis='pipeline')"),
        (Strategy, {"synchronisation": 3}, "synchronisation is 3; give a Synchronisation"),
        (Synchronisation, {"on": "deltass"}, "on is 'deltass'; allowed: gradients, deltas"),
        (Optimizer, {"learning_rate": "3e-4"}, "learning_rate is '3e-4'; give a Schedule: learning_rate=0.0003"),
        (Optimizer, {"learning_rate": -1.0}, "learning_rate: this schedule cannot be used:\n    - peak is -1.0; it must be a number above 0"),
        (Optimizer, {"eps": math.nan}, "eps is nan; give a number, finite"),
        (Optimizer, {"clip": math.inf}, "clip is inf; give a number or None, finite"),
        (Schedule, {"function": optax.constant_schedule(1.0), "peak": 0.5}, "peak is 0.5, but the rate is given as a function, which is the whole schedule; leave peak out, or function"),
        (Schedule, {"peak": None}, "peak is None; give a number"),
        (CheckpointPolicy, {"every_steps": 10.0}, "every_steps is 10.0; give a whole number or None: every_steps=10"),
        (CheckpointPolicy, {"fast": 3}, "fast is 3; give a path or None"),
        (Recovery, {"spike": True}, "spike is True; give a number or None"),
        (Watch, {"stall_seconds": "600"}, "stall_seconds is '600'; give a number: stall_seconds=600.0"),
        (Across, {"shares": 3}, "shares is 3; give auto or None or a list, each item a number: shares=(3,)"),
        (Scaling, {"batch": 3}, "batch is 3; give True or False"),
        (Allow, {"missing": "params/*"}, "missing is 'params/*'; give a list, each item text: missing=('params/*',)"),
        (StartFrom, {"step": "7"}, "step is '7'; give a whole number or best or None: step=7"),
        (Layout, {"parameters": []}, "parameters is []; give a dict"),
        (Stream, {"samples": lambda: [], "keep": "9"}, "keep is '9'; give a whole number: keep=9"),
        (Loading, {"workers": "4"}, "workers is '4'; give a whole number: workers=4"),
        (Augment, {"crop": (0.5,)}, "crop is (0.5,); give a list of 2, each item a number or None"),
        (make_images, {"mean": (0.5, 0.5)}, "mean is (0.5, 0.5); give a list of 3, each item a number"),
        (make_images, {"classes": "10"}, "classes is '10'; give a whole number: classes=10"),
        (make_images, {"heldout_fraction": math.nan}, "heldout_fraction is nan; give a number, finite"),
        (make_images, {"paths": Path("a")}, "paths is PosixPath('a'); give a list, each item a path: paths=(PosixPath('a'),)"),
        (Chat, {"seq": "32"}, "seq is '32'; give a whole number: seq=32"),
        (Chat, {"too_long": "cut"}, "too_long is 'cut'; allowed: truncate, skip"),
        (Corpus, {"packing": True, "text": None}, "text is None; give text\n  - packing is True; allowed: joined, separate, bucketed"),
        (Text, {"paths": "a"}, "paths is 'a'; give a list, each item a path: paths=('a',)"),
        (make_tokens, {"vocab": 10.5}, "vocab is 10.5; give a whole number"),
        (MaskedTokens, {"data": Text(), "mask_token": "0"}, "mask_token is '0'; give a whole number: mask_token=0"),
        (Mixture, {"parts": [Text()], "weights": {}}, "parts is [Text(paths=(), seq=256, heldout_fraction=0.05)]; give a dict"),
        (TokenizeOptions, {"shard_bytes": "1M"}, "shard_bytes is '1M'; give a whole number"),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_kind_is_refused_with_what_to_write(make, given, problem):
    with pytest.raises(ValueError) as error:
        make(**given)
    assert str(error.value).partition(":\n  - ")[2] == problem


def test_short_forms_mean_what_they_must():
    assert Optimizer(learning_rate=3e-4).learning_rate == Schedule(name="constant", peak=3e-4)  # type: ignore[arg-type]
    falling: Any = optax.linear_schedule(1.0, 0.0, 10)
    assert Optimizer(learning_rate=falling).learning_rate == Schedule(function=falling)
    assert make_run(optimizer="lion").optimizer == Optimizer(name="lion")
    given: Any = {"layout": {"data": 2}, "synchronisation": "adasum"}
    assert Strategy(**given) == Strategy(
        layout=Layout(mesh={"data": 2}), synchronisation=Synchronisation(by="adasum")
    )
    given = {"layout": "data=2,fsdp=-1"}
    assert Strategy(**given) == Strategy(layout=Layout(mesh={"data": 2, "fsdp": -1}))
    assert make_run(start_from="runs/a").start_from == StartFrom(checkpoint=Path("runs/a"))
    given = {"shares": [1, 2]}
    assert Across(**given) == Across(shares=(1, 2))
    run = make_run(run_dir="runs/a", log_every=np.int64(3), checkpoints=CheckpointPolicy(every_minutes=np.float32(2)))  # type: ignore[arg-type]  # fmt: skip
    assert (run.run_dir, run.log_every, run.checkpoints.every_minutes) == (Path("runs/a"), 3, 2.0)
    assert (type(run.log_every), type(run.checkpoints.every_minutes)) == (int, float)


def test_names_take_what_names_of_a_model_take():
    for dims in (["embed", None], (("data", "fsdp"), None), PartitionSpec("embed", None)):
        given: Any = {"*/kernel": dims}
        assert make_run(names=given).names == given


def test_all_kinds_and_ranges_are_told_at_once():
    with pytest.raises(ValueError) as error:
        make_run(batch="32", steps=0, recovery=8.0)
    assert [line.split(" is ")[0] for line in str(error.value).splitlines()[1:]] == [
        "  - batch",
        "  - recovery",
        "  - steps",
    ]


class Nonsense:
    """A value that no field takes but one that takes anything."""


def dataclasses_of(kind: type) -> set[type]:
    """A dataclass, and all in its fields."""
    inner = [hint for hint in get_type_hints(kind).values() if is_dataclass(hint)]
    return {kind}.union(*map(dataclasses_of, inner))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", sorted(dataclasses_of(Run), key=str))
def test_no_field_of_a_run_takes_anything(kind):
    make = make_run if kind is Run else kind
    for field in fields(kind):
        if field.name not in ("model", "data"):
            with pytest.raises(ValueError, match=rf"{field.name} is .*Nonsense"):
                make(**{field.name: Nonsense()})
