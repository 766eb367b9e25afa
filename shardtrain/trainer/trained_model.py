"""Build a model with initial parameters, or load it with trained ones, outside a run.

See docs/trained_model.md.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.core import Tracer

from shardtrain.checkpoints.differences import Allow, compare_descriptions, find_mismatches
from shardtrain.checkpoints.evaluated_params import make_exported_params
from shardtrain.checkpoints.manifest_entries import Leaf
from shardtrain.checkpoints.origins import restore_block_order
from shardtrain.checkpoints.reader import CheckpointReader
from shardtrain.checkpoints.restore import restore_arrays
from shardtrain.errors.messages import problems_error, refuse
from shardtrain.errors.options import rewrite_texts
from shardtrain.errors.user_code import user_code
from shardtrain.functional.activation_rules import activation_rules
from shardtrain.functional.auxiliary import plain
from shardtrain.functional.model import Model, Tree, group_by_path, path_text
from shardtrain.functional.module_factory import construct
from shardtrain.functional.nnx_model import convert_model
from shardtrain.functional.rng import new_key
from shardtrain.functional.split_module import fill_values, set_mode, split_module, split_variables
from shardtrain.models.ops import find_ops, set_ops
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.system.xla_flags import quick_options
from shardtrain.train_step.placement import Placement, make_placement, restorable_state
from shardtrain.train_step.state import State
from shardtrain.trainer.config import Run, describe
from shardtrain.trainer.evaluation import make_select_params
from shardtrain.trainer.restore_state import PARAMETERS
from shardtrain.trainer.resume import find_parameters
from shardtrain.trainer.setup import RunSetup

Values = Callable[[str], Any]
"""Path of an array, such as `params/embedding` -> its values."""


def build(model: Any, seed: int = 0) -> Any:
    """Build a model outside a run, with the initial parameters of a run of this seed.

    Args:
      model: the same as `Run.model`: a function rngs -> nnx.Module (a config of `shardtrain.models` is one),
        or a `Model` of `from_linen`.
      seed: the same as `Run.seed`.

    Returns:
      The nnx.Module; for a `Model` its variables, as linen's `apply` takes them.

    Raises:
      ValueError: `model` is none of these; see `convert_model`.

    >>> from shardtrain.models.decoder import DecoderConfig
    >>> model = build(DecoderConfig(vocab=8, seq=4, embed=8, num_layers=1, num_heads=2))
    >>> model(jnp.zeros((1, 4), int)).shape
    (1, 4, 8)
    """
    pure = convert_model(model)
    key = new_key(seed)
    # inside another jit the options are those of the whole program
    options = None if isinstance(key, Tracer) else quick_options(jax.default_backend())
    params, model_state = jax.jit(pure.init, compiler_options=options)(key)
    values = group_by_path({"params": params, "model_state": model_state})
    return _assemble(model, params, model_state, values.__getitem__, seed)


def load(
    run_dir: str | Path,
    model: Any,
    step: int | Literal["best"] | None = None,
    *,
    evaluated: bool = True,
    base: str | Path | None = None,
) -> Any:
    """Load the parameters of a run, whatever mesh, pipeline or islands trained them, into a model.

    These are the parameters that the run evaluates and exports: with `Run(evaluate_with="ema")` the average.

    Args:
      run_dir: a run's folder, its folder of checkpoints, the folder of a step, or a folder of Hugging Face
        (whose model is `pretrained(folder)`).
      model: the model of the run, as in its run file; see `build`. A run folder contains descriptions and
        arrays, but no code to build a model from.
      step: the step of the checkpoint; None means the newest, "best" the best by the metric of
        `CheckpointPolicy.best`.
      evaluated: load the parameters that the run evaluates; False loads those that the optimizer trains.
      base: the checkpoint that the run started from, if its own checkpoints have only trained parameters.

    Returns:
      The nnx.Module in evaluation mode: without dropout, and with running averages (`nnx.view(module,
      deterministic=False, use_running_average=False)` is the one for training). For a `Model`
      its variables, as linen's `apply` takes them.

    Raises:
      ValueError: there is no such checkpoint, it is broken, or it is of another model: lists all arrays and
        options that differ. Or the run evaluates with a function, which no checkpoint contains.
    """
    reader = find_parameters(Path(run_dir), step, None if base is None else Path(base))
    params, model_state = jax.eval_shape(convert_model(model).init, new_key(0))
    if wrong := _find_differences(reader, group_by_path({"params": params, "model_state": model_state})):
        wrong += _list_changed_options(reader.extra, model)
        raise problems_error(f"step {reader.step} in {run_dir} is of another model than was given", wrong)
    how = (reader.extra.get("run") or {}).get("evaluate_with") if evaluated else None
    exported = make_exported_params(how, reader.leaves, reader.read)

    def value(path: str) -> jax.Array:
        kind, _, name = path.partition("/")
        return jnp.asarray(exported(name) if kind == "params" else reader.read(path))

    built = _assemble(model, params, model_state, value, seed=0)
    if isinstance(model, Model):
        return built
    return set_mode(built, train=False)


def _find_differences(reader: CheckpointReader, wanted: Mapping[str, Any]) -> list[str]:
    """Return the parameters and model state in which a checkpoint differs from a model."""
    saved = {path: leaf for path, leaf in reader.leaves.items() if path.startswith(PARAMETERS)}
    leaves = {path: Leaf(shape=tuple(x.shape), dtype=x.dtype.name) for path, x in wanted.items()}
    return find_mismatches(saved, leaves)


def _list_changed_options(extra: Mapping[str, Any], model: Any) -> list[str]:
    """Return the fields of a dataclass model that differ from the options of the run."""
    if not is_dataclass(model) or isinstance(model, type | Model):
        return []
    saved = rewrite_texts(type(model), extra.get("run") or {}, "model.")
    before = {name: value for name, value in saved.items() if name.startswith("model.")}
    changed = compare_descriptions(before, describe(model, "model")) if before else []
    return [f"of the run's options {line}; give the model with the first" for line in changed]


def _assemble(model: Any, params: Tree, model_state: Tree, values: Values, seed: int) -> Any:
    """Return the model with the given values; the trees may contain shapes instead of arrays."""
    if isinstance(model, Model):
        return {"params": _fill("params", params, values), **_fill("model_state", model_state, values)}
    _, split = split_module(model, sync_batch_norm=False)

    def rngs() -> Any:
        with nnx.use_eager_sharding(False):
            return split_variables(construct(model, nnx.Rngs(seed)))[2]

    # jit removes the unused initial parameters: only the keys of dropout are computed
    module = nnx.merge(
        split.graphs[None],
        fill_values(split.params, _fill("params", params, values)),
        jax.jit(rngs)(),
        fill_values(split.model_state, _fill("model_state", model_state, values)),
    )
    return set_ops(module, find_ops())


def _fill(kind: str, tree: Tree, values: Values) -> Tree:
    return jax.tree.map_with_path(lambda path, _: values(f"{kind}/{path_text(path)}"), tree)


PARAMS = PARAMETERS[0]


class RestoredModel(NamedTuple):
    """A model with the parameters of a checkpoint.

    Args:
      model: the model.
      placement: its placement on the mesh.
      state: its parameters and model state; the optimizer's is empty.
    """

    model: Model
    placement: Placement
    state: State

    def round_rows(self, batch: int) -> int:
        """Return the rows of a batch, rounded up so that every device has the same number of rows."""
        shards = math.prod(self.placement.mesh.shape[axis] for axis in self.placement.layout.batch_axes)
        return -(-batch // shards) * shards

    @property
    def apply(self) -> jax.tree_util.Partial:
        """The model in evaluation mode as a function of its inputs; its parameters are leaves of it."""
        return jax.tree_util.Partial(
            _ModelApply(self.model, self.placement), self.state.params, self.state.model_state
        )


def restore_model(
    reader: CheckpointReader, model: Model, layout: Layout, *, evaluated: bool = True
) -> RestoredModel:
    """Restore the parameters of a checkpoint, whatever layout saved it.

    Args:
      reader: the reader of a complete checkpoint.
      model: its model.
      layout: the layout on this machine, without stages of a pipeline.
      evaluated: restore the parameters that the run evaluates; False restores those that it trains.

    Raises:
      ValueError: the layout does not fit the devices or the model; the checkpoint is of another model, all
        arrays that differ; or its run evaluates with a function, which no checkpoint holds.
    """
    placement = make_placement(model, optax.identity(), layout, make_mesh(layout))
    state = restorable_state(placement)
    wanted = {path: x for path, x in group_by_path(state).items() if path.startswith(PARAMETERS)}
    refuse(f"step {reader.step} is of another model than this one", _find_differences(reader, wanted))
    how = (reader.extra.get("run") or {}).get("evaluate_with") if evaluated else None
    computed = [path for path in wanted if path.startswith(PARAMS)] if how else []
    stored = {path: x for path, x in wanted.items() if path not in computed}
    found: dict[str, Any] = restore_arrays(reader, stored, {}, Allow(unused=("*",)))
    value = make_exported_params(how, reader.leaves, reader.read)
    for path in computed:
        found[path] = jax.device_put(value(path.removeprefix(PARAMS)), wanted[path].sharding)
    zeros = jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), state[:2])
    state = jax.tree.map_with_path(lambda path, x: found.get(path_text(path), x), state)
    return RestoredModel(model, placement, state._replace(step=zeros[0], seed=zeros[1]))


@dataclass(frozen=True, eq=False)
class _ModelApply:
    """A model as a function of its parameters, under the rules of a layout; hashable by identity."""

    model: Model
    placement: Placement | None = None

    def __call__(self, params: Any, model_state: Any, *inputs: Any) -> Any:
        rules: Any = nullcontext()
        if self.placement is not None:
            layout = self.placement.layout
            rules = activation_rules(layout.activation_rules, self.placement.mesh, *layout.tracing)
        with rules:
            return plain(self.model.apply(params, model_state, new_key(0), False, *inputs)[0])


def sample_text(run: Run, setup: RunSetup, state: State) -> str:
    """Return the text of `run.sample` for the parameters that the run evaluates.

    Raises:
      UserCodeFailed: it raised.
    """
    assert run.sample is not None
    params = restore_block_order(setup.placement, make_select_params(run, setup)(state))
    with user_code(lambda error: "the sample"):
        return run.sample(jax.tree_util.Partial(_ModelApply(setup.model), params, state.model_state))
