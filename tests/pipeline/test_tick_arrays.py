"""Tables as arrays: what waits has a slot of its own, and there are no more slots than live at once."""

import pytest
from allowed_chunks import list_allowed_chunks

from shardtrain.pipeline.schedule import SCHEDULES, forward_only, make_table
from shardtrain.pipeline.table import KINDS
from shardtrain.pipeline.tick_arrays import NONE, make_ticks

SIZES = [(1, 1), (2, 5), (4, 2), (8, 16)]


def tables():
    for name in SCHEDULES:
        for stages, microbatches in SIZES:
            for lockstep in (True, False):
                yield make_table(name, stages, microbatches, list_allowed_chunks(name)[0], lockstep)
    yield forward_only(4, 8, lockstep=True)
    yield forward_only(4, 8, 3, lockstep=True)
    yield forward_only(3, 5, 2, lockstep=True, placement="v")


def walked(table):
    """Walk over the arrays as a mesh does, with names of values in place of values; returns what was done."""
    ticks = make_ticks(table)
    columns, stages, parts = ticks.columns, table.num_stages, table.num_parts
    placement = table.part_placement
    inputs: list = [[None] * ticks.num_inputs for _ in range(stages)]
    cotangents: list = [[None] * ticks.num_cotangents for _ in range(stages)]
    sent: list = [(None, None)] * stages
    done = []
    for tick in range(table.num_ticks):
        row = {name: column[tick] for name, column in columns.items()}
        arriving = list(sent)
        sent = [(None, None)] * stages
        for stage in range(stages):
            for hop in placement.hops:
                if (slot := row[f"arriving_input_{hop}"][stage]) != NONE:
                    inputs[stage][slot] = arriving[(stage - hop) % stages][0]
                if (slot := row[f"arriving_cotangent_{hop}"][stage]) != NONE:
                    cotangents[stage][slot] = arriving[(stage + hop) % stages][1]
            output = cotangent = None
            for kind in KINDS:
                if (microbatch := row[kind][stage]) == NONE:
                    continue
                chunk = row[f"{kind}_chunk"][stage]
                part = placement.part(stage, chunk)
                slot, cotangent_slot = row[f"{kind}_input"][stage], row[f"{kind}_cotangent"][stage]
                if kind == "forward":
                    if part == 0:
                        inputs[stage][slot] = (0, microbatch)
                    output = (part + 1, microbatch)
                if kind == "backward":
                    if part == parts - 1 and table.has_weight:
                        cotangents[stage][cotangent_slot] = (parts, microbatch)
                    cotangent = (part, microbatch)
                assert inputs[stage][slot] == (part, microbatch)
                if kind == "weight" or (kind == "backward" and part < parts - 1):
                    assert cotangents[stage][cotangent_slot] == (part + 1, microbatch)
                done.append((tick, stage, chunk, microbatch, kind))
            sent[stage] = (output, cotangent)
    return done


@pytest.mark.parametrize(
    "table", list(tables()), ids=lambda t: f"{t.name}-{t.num_stages}-{t.num_microbatches}"
)
def test_every_task_finds_what_it_needs(table):
    assert walked(table) == [tuple(task) for task in table.tasks]


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_slots_of_1f1b_do_not_grow_with_microbatches(stages):
    for microbatches in (stages, 2 * stages, 8 * stages):
        ticks = make_ticks(make_table("1f1b", stages, microbatches, lockstep=True))
        # the first stage has what it began 2 (S - 1) ticks ago, and what it is at
        assert ticks.num_inputs == min(microbatches, 2 * stages - 1)
        assert ticks.num_cotangents == (stages > 1)
        used = [ticks.columns["forward_input"][:, stage].max() + 1 for stage in range(stages)]
        # what arrives waits a tick on no stage
        assert used == [min(microbatches, 2 * (stages - stage) - 1) for stage in range(stages)]


@pytest.mark.parametrize(
    ("name", "chunks", "inputs"),
    [("gpipe", 1, 8), ("interleaved", 2, 11), ("zero_bubble", 1, 7), ("zb_v", 2, 10)],
)
def test_slots_of_other_schedules(name, chunks, inputs):
    assert make_ticks(make_table(name, 4, 8, chunks, lockstep=True)).num_inputs == inputs
    longer = make_ticks(make_table(name, 4, 32, chunks, lockstep=True)).num_inputs
    assert longer == (32 if name == "gpipe" else inputs)
