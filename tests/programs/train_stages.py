"""Whole runs of a pipeline across islands: args are the text, a folder, and islands of a pipeline."""

import dataclasses
import functools
import sys
from contextlib import nullcontext
from pathlib import Path

import jax
from island_runs import (
    IS_FIRST,
    ISLANDS,
    RATE,
    bits,
    copy_without,
    failing_save,
    find_refusal,
    make_run,
    make_train,
)
from tiny_language_model import TinyConfig

import shardtrain as st

TEXT, FOLDER, NUM_STAGES = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
SHARES = (1.0,) if ISLANDS is None or ISLANDS.placement.num_islands == NUM_STAGES else (3.0, 1.0)
# two pipelines cut the model differently: the second block has other stages in each
STAGES = "params" if SHARES == (1.0,) else "1,2;2,1"
STRATEGY = st.Strategy(layout=st.Layout(mesh={"data": -1}), accumulate=2)
if ISLANDS is not None:
    across = st.Across(axis="pipeline", partitions=NUM_STAGES, shares=SHARES)
    STRATEGY = dataclasses.replace(STRATEGY, across=across, pipeline=st.Pipeline(stages=STAGES))
RUN = make_run(
    TEXT,
    model=TinyConfig(num_layers=3, dropout=0.1),
    # the gradient is longer than this: its norm is that of all stages
    optimizer=st.Optimizer(learning_rate=RATE, clip=0.5),
    strategy=STRATEGY,
    sample=lambda apply: "a sample",
)
run = make_train(RUN, FOLDER)
change = functools.partial(dataclasses.replace, STRATEGY)


def refused(**changes: object) -> str:
    return find_refusal(run, "whole", strategy=change(**changes))


whole, text = run("whole")
if ISLANDS is not None:
    assert not IS_FIRST or "no sample: the model is distributed over islands" in text, text
    assert not IS_FIRST or "blocks 1,2; 2,1\n" in text or SHARES == (1.0,), text
    if jax.device_count() > 1:
        assert "use pipeline=1 inside each island" in refused(layout=st.Layout(mesh={"pipeline": -1}))
    copy_without(6, FOLDER / "whole", FOLDER / "otherwise")
    if SHARES == (1.0,):
        copy_without(6, FOLDER / "whole", FOLDER / "parts")
        # the last save fails at one stage, and is repeated there
        with failing_save(6) if ISLANDS.placement.island == 1 else nullcontext():
            parts, text = run("parts")
        assert len(list((FOLDER / "parts" / "checkpoints").glob("step_00000006.part-?-of-2"))) == 2
        assert bits(parts.state) == bits(whole.state)
        assert not IS_FIRST or "resumed from step 4" in text, text
        # "params" cut it into 1,2
        _, text = run("otherwise", strategy=change(pipeline=st.Pipeline(stages="time", stage_speeds="9,1")))
        by_time = "stages cut by time, by the speeds that were given" in text and "blocks 2,1" in text
        assert by_time or not IS_FIRST, text
    else:
        # no stages any more
        run("otherwise", strategy=change(across=st.Across()))
        three = refused(pipeline=st.Pipeline(stages="1,2;2,1;1,2"))
        assert "has 3 cuts, and there are 2 pipelines; give one for all; 2, one each" in three
        # islands that differ in what decides the communicators are told so, and make none
        told = refused(pipeline=st.Pipeline(stages=STAGES if ISLANDS.placement.island == 0 else "1,2"))
        assert "islands do not agree" in told, told
        assert "strategy.pipeline.stages: 1,2 on island 1" in told, told
        told = refused(synchronisation=st.Synchronisation(on="deltas", by="adasum"))
        assert "cannot be cut differently (1,2;2,1)" in told, told
        assert "combine deltas; use --combine-on gradients, or one cut for all" in told, told
        assert "combine is 'adasum'; use mean or sum, or one cut for all" in told, told
    assert "do not make whole pipelines" in refused(across=st.Across(axis="pipeline", partitions=3))
    sys.stdout.write(" ".join(sorted(path.name for path in (FOLDER / "whole" / "checkpoints").glob("*6*"))))
