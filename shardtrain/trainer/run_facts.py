"""The facts of a run that all its islands must have in common: its description, its arrays, its program.

Next: `prepared_run.py`, which compares them.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.islands.rank_facts import facts, program_fact
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.pipeline.traced_cut import TracedModel
from shardtrain.train_step.replica_state import fragments_of
from shardtrain.trainer.config import Run, describe
from shardtrain.trainer.setup import RunSetup


def pipeline_facts(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that decide what islands exchange before all their facts are compared.

    Args:
      description: the run, from `config.describe`.

    >>> pipeline_facts({"batch": 8, "strategy.across.axis": "data", "strategy.pipeline.stages": "1,3"})
    {'run/strategy.across.axis': 'data', 'run/strategy.pipeline.stages': '1,3'}
    """
    found = {
        f"run/{name}": value
        for name, value in description.items()
        if name.startswith(("strategy.across.", "strategy.pipeline."))
    }
    # as it arrives at the others, so that a tuple here is not another value than a list there
    return json.loads(json.dumps(found))


def run_facts(run: Run, setup: RunSetup, description: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that all islands must have in common."""
    trees = {"parameters": setup.placement.specs.abstract.params}
    # the arrays of the state must be the same on all, whatever each computes in
    scales_loss = run.strategy.scales_loss
    description = {
        **description,
        "synchronisation.rows": _rows_digest(run, setup),
        "an island computes in float16": scales_loss,
    }
    if (stage_model := setup.stage_model) is not None:
        trees = {"parameters": stage_model.traced.params}
        sizes = (stage_model.stages.num_stages, run.strategy.accumulate, stage_model.stages.num_chunks)
        tasks = repr(make_table(run.strategy.pipeline.schedule, *sizes).tasks)
        digest = hashlib.sha256(tasks.encode()).hexdigest()[:16]
        description = {
            **description,
            "accumulate": run.strategy.accumulate,
            "compute_dtype": run.strategy.compute_dtype,
            "pipeline.tasks": digest,
            "pipeline.blocks": [list(cut.counts) for cut in setup.cuts],
            "pipeline.sent": _sent(stage_model),
        }
    return facts(description, trees=trees, fingerprint=description["data.fingerprint"])


def _sent(stage_model: StageModel) -> list[list[str]]:
    """Return what each part of a model that was cut by tracing sends on; [] for a model with blocks."""
    traced, stages = stage_model.traced, stage_model.stages
    if not isinstance(traced, TracedModel):
        return []
    return [traced.sent_texts(stages, part) for part in range(len(stages.counts))]


def _rows_digest(run: Run, setup: RunSetup) -> str | None:
    """Return a digest of which layers are in which row, and of the rows of each fragment, that islands send.

    None where the layers of an island are in order and sent together: then it is the same on any mesh.
    """
    specs = setup.placement.specs
    rows = [dict(each.rows) for each in fragments_of(run.strategy.synchronisation, specs)]
    stored = None if specs.stages is None or specs.stages.is_plain else specs.stages.stored_blocks
    if setup.stage_model is not None or (len(rows) == 1 and stored is None):
        return None
    return hashlib.sha256(repr((stored, rows)).encode()).hexdigest()[:16]


def step_program(
    run: Run, setup: RunSetup, batch: Any, programs: Sequence[jax.stages.Lowered]
) -> dict[str, str]:
    """Return the hash of the programs of a step, equal on islands of the same mesh and share of the batch."""
    return program_fact(
        "\n".join(program.as_text() for program in programs),
        mesh=dict(setup.mesh.shape),
        batch=str(jax.tree.map(jnp.shape, batch)),
        layout=str(describe(run.strategy.layout)),
        compute_dtype=str(run.strategy.compute_dtype),
        remat=str(run.strategy.remat),
        kind=jax.devices()[0].device_kind,
        processes=jax.process_count(),
    )
