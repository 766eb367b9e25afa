"""What a run cannot combine, by the kind of run: one table, and what stages cannot do with a model.

Options that contradict each other in every run are refused by their own values. Next: `setup.py`.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from shardtrain.axes import LAYERS, PIPELINE
from shardtrain.errors.messages import refuse
from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.separable import coupling_problems, order_problems, share_problems
from shardtrain.pipeline.cuts import Parts
from shardtrain.pipeline.stacking import Partition
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.config import Run

KINDS = {
    "pipeline": "a mesh cannot hold the stages of a pipeline",
    "stages": "islands cannot hold the stages of a pipeline",
    "alone": "islands cannot each have an optimizer of its own",
    "elastic": "a run with islands that come and go (--elastic) cannot have these options",
}
"""Kind of run -> title of its errors."""


class Refusal(NamedTuple):
    """An option that some kinds of runs do not have.

    Args:
      kinds: of `KINDS`, separated by spaces.
      option: path of the option in a run.
      text: its {value}, why it is refused, and what to use.
      value: the value that is refused; None refuses all but the default.
      unless: path of another option that must have its default, if the value is to be refused; "" for none.
    """

    kinds: str
    option: str
    text: str
    value: Any = None
    unless: str = ""


REFUSALS = (
    Refusal(
        "pipeline stages",
        "strategy.scales_loss",
        "compute_dtype is 'float16', which needs a scaled loss, and a pipeline does not scale it; use"
        " bfloat16 or float32",
    ),
    Refusal(
        "pipeline stages",
        "strategy.accumulate_dtype",
        "accumulate_dtype is {value!r}, and a pipeline adds up its microbatches in float32; use float32, or"
        " no pipeline",
    ),
    Refusal(
        "pipeline stages",
        "strategy.remat",
        "remat is {value!r}, and a pipeline keeps the inputs of its stages on the devices; use full, or no"
        " pipeline",
        "offload",
    ),
    Refusal(
        "stages",
        "strategy.synchronisation.inside",
        "inside is {value!r}; use mean, as a pipeline has one gradient for its rows",
    ),
    Refusal(
        "stages",
        "strategy.layout.operators",
        "the layout has shardings of single operators, which stages do not follow; leave them out",
    ),
    Refusal(
        "stages",
        "strategy.pipeline.in_flight",
        "in_flight is {value} batches, each a step of a pipeline's own optimizer, and there are no waves; use"
        " --synchronisation wsp --local-steps {value}, or in_flight 1",
        unless="strategy.synchronisation.distance",
    ),
    Refusal(
        "stages alone",
        "strategy.offload",
        "offload is {value!r}, which needs islands that combine gradients in every step; use --offload none,"
        " or --synchronisation every-step without --across pipeline",
    ),
    Refusal("elastic", "strategy.across.shares", "--shares (rows follow the measured speed)"),
    Refusal("elastic", "strategy.across.reduce", "--reduce {value} (islands add up in a ring)"),
    Refusal("elastic", "strategy.across.reduce_dtype", "--reduce-dtype {value} (use --combine {value}+mean)"),
    Refusal("elastic", "strategy.across.gradient_parts", "--gradient-parts {value} (leave it out)"),
    Refusal("elastic", "strategy.accumulate_dtype", "--accumulate-dtype {value} (slots add up in float32)"),
    Refusal("elastic", "strategy.offload", "--offload {value} (use --zero 3, which shards the optimizer)"),
    Refusal("elastic", "batch_unit", "--batch-unit {value} (use examples)"),
    Refusal("elastic", "batch_growth", "--batch-growth {value} (use a schedule of the learning rate)"),
    Refusal("elastic", "gradient_noise_scale", "--gradient-noise-scale (leave it out)"),
    Refusal("elastic", "nonfinite", "--nonfinite {value} (use skip or stop)", "roll_back"),
    Refusal("elastic", "recovery.spike", "--recovery.spike, which rolls back (leave it out)"),
    Refusal("elastic", "checkpoints.fast", "--checkpoints.fast (other islands do not see it)"),
)
"""All that an option and the kind of a run decide, without the model."""


def find_refused(run: Run, kind: str) -> list[str]:
    """Return why a run cannot be of a kind, one line each.

    Args:
      run: the run.
      kind: of `KINDS`.
    """
    found = []
    for row in REFUSALS:
        value, is_plain = attrgetter(row.option)(run), _has_default(run, row.option)
        is_refused = not is_plain if row.value is None else value == row.value
        is_lifted = bool(row.unless) and not _has_default(run, row.unless)
        if kind in row.kinds.split() and is_refused and not is_lifted:
            found.append(row.text.format(value=value))
    return found


def _has_default(run: Run, option: str) -> bool:
    find = attrgetter(option)
    return find(run) == find(Run)


def check_combinations(run: Run, kind: str, others: Sequence[str] = ()) -> None:
    """Check that a run can be of a kind.

    Args:
      run: the run.
      kind: of `KINDS`.
      others: other reasons why not.

    Raises:
      ValueError: lists all reasons.
    """
    refuse(KINDS[kind], [*others, *find_refused(run, kind)])


def check_stage_islands(run: Run, mesh: Mesh) -> None:
    """Check the options of a run whose islands hold the stages of a pipeline.

    Raises:
      ValueError: lists all that do not go together.
    """
    others = []
    if mesh.shape[PIPELINE] > 1:
        others.append(f"the mesh has pipeline={mesh.shape[PIPELINE]}; use pipeline=1 inside each island")
    if jax.process_count() > 1:
        others.append(f"an island has {jax.process_count()} processes; use one each")
    check_combinations(run, "stages", others)


def check_cuts(run: Run, traced: Parts, cuts: Sequence[Partition], mesh: Mesh, *, has_blocks: bool) -> None:
    """Check that the model can be cut by the options of the run.

    Args:
      run: the run.
      traced: the parts of the model.
      cuts: the partition of each pipeline.
      mesh: the mesh of this island.
      has_blocks: whether the model has `blocks`.

    Raises:
      ValueError: lists why not.
    """
    in_flight = run.strategy.pipeline.in_flight
    if run.elastic.islands and jax.tree.leaves(traced.model_state):
        raise ValueError(
            "--elastic is given with --across pipeline, and the model has a state (batch norm), which stages"
            " of other islands would not see; use a norm without statistics (GroupNorm, LayerNorm)"
        )
    if in_flight > 1 and jax.tree.leaves(traced.model_state):
        raise ValueError(
            f"in_flight is {in_flight} batches, and the model has a state (batch norm), which each changes"
            " for the next; use a norm without statistics (GroupNorm, LayerNorm), or in_flight 1"
        )
    if len(set(cuts)) > 1:
        refuse(
            f"pipelines cannot be cut differently ({run.strategy.pipeline.stages})",
            [
                *different_cut_problems(run, traced.model_state),
                *(
                    []
                    if has_blocks
                    else ["the model has no `blocks`, so it is cut by tracing; use one cut for all"]
                ),
                *find_sharded_block_problems(run.strategy.layout, mesh),
            ],
        )


def check_separable(optimizer: Any, dims: Any, traced: Parts) -> None:
    """Check that stages can update their parameters separately with this optimizer.

    Raises:
      ValueError: lists the arrays of different stages that it couples.
    """
    if isinstance(optimizer, Optimizer):
        return
    shapes = traced.params
    refuse(
        "stages update their own parameters, which would not be the update of the whole model; use"
        " another optimizer (adamw, sgd, lion, muon), and Optimizer(clip=...) for clipping",
        coupling_problems(optimizer, dims, shapes) or share_problems(optimizer, dims, shapes),
    )


def check_order(optimizer: Any, dims: Any, params: Any, stages: Partition) -> None:
    """Check that an optimizer can update stacked blocks in the order in which a mesh stores them.

    Args:
      optimizer: the optimizer of the run, as it was given.
      dims: the dim names of the model.
      params: arrays or shapes.
      stages: the partition of the blocks.

    Raises:
      ValueError: its update depends on the order.
    """
    if isinstance(optimizer, Optimizer) or stages.is_plain:
        return
    refuse(
        "the mesh stores blocks in the order of its stages, padded with zeros if the cut is uneven, and"
        " this optimizer would update them differently in the model's own order; use another"
        " optimizer (adamw, sgd, lion, muon), or a cut in equal parts and one virtual stage",
        order_problems(optimizer, dims, params, stages.stored_blocks),
    )


def different_cut_problems(run: Run, model_state: Any) -> list[str]:
    """Return why the pipelines of a run must be cut alike."""
    problems, synchronisation = [], run.strategy.synchronisation
    if synchronisation.on_deltas:
        problems.append("replicas combine deltas; use --combine-on gradients, or one cut for all")
    if synchronisation.by not in ("mean", "sum"):
        problems.append(f"combine is {synchronisation.by!r}; use mean or sum, or one cut for all")
    if jax.tree.leaves(model_state):
        problems.append("the model has a state (batch norm), which is averaged by stage; use one cut for all")
    return problems


def find_sharded_block_problems(layout: Layout, mesh: Mesh) -> list[str]:
    """Return why the blocks of an island cannot have several owners: their dim is sharded in its mesh."""
    dim_axes = [axis for axis in layout.parameter_rules.get(LAYERS, ()) if mesh.shape[axis] > 1]
    if not dim_axes:
        return []
    return [f"the dim 'layers' is sharded over {dim_axes}; use the rule layers = [], or one cut for all"]
