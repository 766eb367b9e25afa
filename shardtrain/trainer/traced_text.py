"""Describe a cut that tracing found: the parameters of each part, and what it sends.

Next: `pipeline/traced_cut.py`, which finds it.
"""

from typing import Any

import jax

from shardtrain.pipeline.cuts import make_partitions
from shardtrain.pipeline.stacking import Partition
from shardtrain.pipeline.traced_cut import TracedModel
from shardtrain.report.quantities import bytes_text
from shardtrain.report.tables import table_text
from shardtrain.trainer.config import Run, model_of
from shardtrain.trainer.setup import microbatch_of

DEFAULT_STAGES = 2
"""The number of stages to show where nothing says it."""


def traced_cut_text(traced: TracedModel, stages: Partition) -> str:
    """Return a table of the parts of a model that was cut by tracing.

    Args:
      traced: the model.
      stages: the cut.
    """
    sizes = {path: x.size for path, x in traced.own_params().items()}
    rows, seen = [], set[str]()
    for part, count in enumerate(stages.counts):
        reads = [path for path in sizes if path in traced.part_paths(stages, part)]
        own = [path for path in reads if path not in seen]
        borrowed = [path for path in reads if path in seen]
        seen.update(reads)
        rows.append(
            (
                str(part),
                str(count),
                f"{sum(sizes[path] for path in own):,}",
                ", ".join(dict.fromkeys(own[:1] + own[-1:])),
                ", ".join(borrowed),
                ", ".join(traced.sent_texts(stages, part)),
                bytes_text(traced.bytes_behind(stages, part)),
            )
        )
    header = ("part", "pieces", "parameters", "first and last", "borrowed", "sent on", "a row")
    text = f"the model says no blocks and is cut by tracing, into {sum(stages.counts)} pieces"
    return f"{text}\n{table_text(header, rows)}"


def inspected_cut_text(run: Run, source: Any, num_stages: int | None) -> str:
    """Return the table of the cut that a run across islands would get.

    Args:
      run: of a pipeline across islands, whose model says no blocks.
      source: its samples.
      num_stages: number of stages; by default the partitions of the run, or 2.

    Raises:
      ValueError: the model cannot be cut like this.
    """
    pipeline = run.strategy.pipeline
    num_stages = num_stages or run.strategy.across.partitions or DEFAULT_STAGES
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in microbatch_of(run, source).items()}
    traced = TracedModel(model_of(run), run.loss, shapes)
    return traced_cut_text(traced, make_partitions(traced, pipeline, num_stages, 1)[0]).rstrip()
