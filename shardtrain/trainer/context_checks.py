"""Check that sequences can be sharded: their sizes, what the model makes of it, the program of a pipeline."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardtrain.axes import CONTEXT, PIPELINE, TENSOR
from shardtrain.data import Batch
from shardtrain.errors.messages import problems_error
from shardtrain.functional.activation_rules import activation_rules, noting
from shardtrain.functional.auxiliary import summed_loss
from shardtrain.functional.collective_matmul import NOTED
from shardtrain.functional.model import Model
from shardtrain.functional.rng import new_key
from shardtrain.plan.hlo.rendezvous import permutes_in_branches
from shardtrain.trainer.config import Run


def check_sequences(run: Run, model: Model, sizes: Mapping[str, int], microbatch: Batch) -> None:
    """Trace the loss over sequences that are sharded, without devices, as the step of a run would.

    Args:
      run: the run.
      model: its model.
      sizes: axis -> size.
      microbatch: a batch as the loss receives it, arrays or shapes.

    Raises:
      ValueError: attention cannot split the sequences or heads; a constraint has no rule; or the layout has
        collective matmul, and no product is of parts.
    """
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    params, model_state = jax.eval_shape(lambda: model.init(new_key(0)))

    def loss(params: Any, model_state: Any, key: jax.Array, batch: Any) -> Any:
        apply = lambda *inputs: model.apply(params, model_state, key, True, *inputs)[0]  # noqa: E731
        return summed_loss(run.loss, apply, batch, rng=key)[0]

    layout = run.strategy.layout
    notes: list[str] = []
    with noting(notes.append), activation_rules(layout.activation_rules, mesh, *layout.tracing):
        jax.eval_shape(loss, params, model_state, jax.eval_shape(lambda: new_key(0)), microbatch)
    if layout.collective_matmul and sizes[TENSOR] > 1 and not any(note.startswith(NOTED) for note in notes):
        raise ValueError(
            f"collective_matmul is set, and no product of this model is computed part by part over"
            f" tensor={sizes[TENSOR]}: it leaves none to the run, as the transformers of this library do; or"
            " context times tensor does not divide the positions of its sequences; or the layout has rules"
            " that shard residual_seq, heads or mlp otherwise. Set collective_matmul = false"
        )


def has_permutes(mesh: Mesh, *, sequence_sharded: bool) -> bool:
    """Return whether a mesh has a pipeline over sharded sequences, whose program `check_permutes` checks."""
    over_tensor = sequence_sharded and mesh.shape[TENSOR] > 1
    return mesh.shape[PIPELINE] > 1 and (mesh.shape[CONTEXT] > 1 or over_tensor)


def check_permutes(program: jax.stages.Lowered) -> None:
    """Compile the step of a pipeline over sharded sequences, and check it.

    Args:
      program: of the step.

    Raises:
      ValueError: a loss, a metric or a model cuts positions out of a sharded sequence.
    """
    if found := permutes_in_branches(program.compile().as_text() or ""):
        raise problems_error(
            "a pipeline over sharded sequences in one mesh needs a program whose stages send no parts of them"
            " by permutes, and this one does. Where a loss, metric or model shifts positions of what the"
            " model computes, as in logits[:, 1:], use whole sequences, by"
            " flax.linen.with_logical_constraint(x, ('batch', None, 'vocab')), or positions of the batch; or"
            " use --across pipeline, or context=1 and no --sequence-sharded",
            found,
        )
