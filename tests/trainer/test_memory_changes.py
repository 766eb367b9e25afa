"""Options that may save memory: each is tried alone, and those that a run has are not tried."""

from dataclasses import replace

import shardtrain as st
from shardtrain.cli import inspect
from shardtrain.models.decoder import DecoderConfig
from shardtrain.plan.compile import Figures
from shardtrain.trainer.run_step import list_memory_changes

MODEL = DecoderConfig(vocab=16, seq=8, embed=8, num_layers=1, num_heads=2, mlp=16, remat="dots")
RUN = st.Run(model=MODEL, data=st.Text(seq=8), batch=4, steps=1)


def test_each_option_is_tried_alone():
    found = dict(list_memory_changes(RUN))
    assert list(found) == [
        "--remat none",
        "--remat weights",
        "--remat outputs",
        "--remat full",
        "--remat offload",
        "--accumulate 2",
        "--offload optimizer",
        "--model.loss-chunk 8",
        "--optimizer.momentum-dtype bfloat16",
    ]
    assert found["--remat full"] == replace(RUN, strategy=replace(RUN.strategy, remat="full"))
    assert found["--model.loss-chunk 8"].model == replace(MODEL, loss_chunk=8)
    again = dict(list_memory_changes(found["--optimizer.momentum-dtype bfloat16"]))
    assert "--optimizer.momentum-dtype bfloat16" not in again
    more = found["--accumulate 2"]
    halves = dict(list_memory_changes(more))["--accumulate-dtype bfloat16"]
    assert halves == replace(more, strategy=replace(more.strategy, accumulate_dtype="bfloat16"))
    assert "--accumulate-dtype bfloat16" not in dict(list_memory_changes(halves))
    named = replace(RUN, model=lambda rngs: None, optimizer=st.Optimizer(name="adafactor"))
    assert list(dict(list_memory_changes(named)))[-2:] == ["--accumulate 2", "--offload optimizer"]


def test_inspect_shows_what_each_needs(monkeypatch):
    def compiled(run, kind, sizes):
        if run.strategy.accumulate == 2:
            raise ValueError("2 microbatches: too many\nmore")
        of = Figures(argument_bytes=1024, output_bytes=0, alias_bytes=0, temp_bytes=3072, collectives=())
        return replace(of, temp_bytes=1024) if run.strategy.remat == "full" else of

    monkeypatch.setattr(inspect, "compile_figures", compiled)
    text = inspect._compile(RUN, inspect.InspectOptions(compile="cpu", memory=True), {"data": 1})
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "as given 1.0 KiB 3.0 KiB 4.0 KiB 100%" in rows
    assert "--remat full 1.0 KiB 1.0 KiB 2.0 KiB 50%" in rows
    assert "--accumulate 2 refused: 2 microbatches: too many" in rows
    assert "option" not in inspect._compile(RUN, inspect.InspectOptions(compile="cpu"), {"data": 1})
