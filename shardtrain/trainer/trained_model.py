"""A model outside a run: built with initial parameters, or loaded with trained ones.

No optimizer, mesh or placement takes part; arrays come whole onto the default device. See
docs/trained_model.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardtrain.checkpoints.differences import mismatches
from shardtrain.checkpoints.evaluated_params import exported_params
from shardtrain.checkpoints.manifest_entries import Leaf
from shardtrain.checkpoints.reader import CheckpointReader
from shardtrain.errors.messages import problems_error
from shardtrain.functional.model import Model, Tree, path_text
from shardtrain.functional.nnx_model import as_model
from shardtrain.trainer.config import describe, differences
from shardtrain.trainer.restore_state import PARAMETERS
from shardtrain.trainer.resume import find_checkpoint

Values = Callable[[str], Any]
"""Path of an array, such as `params/embedding` -> its values."""


def build(model: Any, seed: int = 0) -> Any:
    """Build a model outside a run, with the initial parameters of a run of this seed.

    Args:
      model: what a run takes: a function rngs -> nnx.Module (a config of `shardtrain.models` is one), or a
        `Model` of `from_linen`.
      seed: that of `Run`.

    Returns:
      The nnx.Module; of a `Model` its variables, as linen's `apply` takes them.

    Raises:
      ValueError: it is no such model; see `as_model`.

    >>> from shardtrain.models.decoder import DecoderConfig
    >>> model = build(DecoderConfig(vocab=8, seq=4, embed=8, num_layers=1, num_heads=2))
    >>> model(jnp.zeros((1, 4), int)).shape
    (1, 4, 8)
    """
    pure = as_model(model)
    params, model_state = jax.jit(pure.init)(jax.random.key(seed))
    values = {f"params/{path}": x for path, x in _flat(params).items()}
    values |= {f"model_state/{path}": x for path, x in _flat(model_state).items()}
    return _assembled(model, params, model_state, values.__getitem__, seed)


def load(run_dir: str | Path, model: Any, step: int | None = None, *, evaluated: bool = True) -> Any:
    """Load the parameters of a run, whatever mesh, pipeline or islands trained them, into a model.

    They are those that the run evaluates and exports: with `Run(evaluate_with="ema")` their average.

    Args:
      run_dir: a run's folder, its folder of checkpoints, or the folder of a step.
      model: the model that the run has trained, as its run file has it; see `build`. A run folder holds
        descriptions and arrays, and no code to build a model from.
      step: after which it was saved; None takes the newest.
      evaluated: False takes those that the optimizer trains, whatever the run evaluates.

    Returns:
      The nnx.Module, for use: without dropout, and with running averages (`nnx.view(module,
      deterministic=False, use_running_average=False)` is the one for training). Of a `Model` its
      variables, as linen's `apply` takes them.

    Raises:
      ValueError: there is no such checkpoint, it is broken, or it is of another model: all arrays and
        options that differ. Or the run evaluates with a function, which no checkpoint holds.
    """
    reader = find_checkpoint(Path(run_dir), step)
    params, model_state = jax.eval_shape(as_model(model).init, jax.random.key(0))
    wanted = {
        f"{kind}/{path}": Leaf(shape=tuple(x.shape), dtype=x.dtype.name)
        for kind, tree in (("params", params), ("model_state", model_state))
        for path, x in _flat(tree).items()
    }
    saved = {path: leaf for path, leaf in reader.leaves.items() if path.startswith(PARAMETERS)}
    if wrong := mismatches(saved, wanted):
        wrong += _changed_options(reader.extra, model)
        raise problems_error(f"step {reader.step} in {run_dir} is of another model than was given", wrong)
    built = _assembled(model, params, model_state, _saved_values(reader, evaluated), seed=0)
    if isinstance(model, Model):
        return built
    return nnx.view(built, deterministic=True, use_running_average=True, raise_if_not_found=False)


def _saved_values(reader: CheckpointReader, evaluated: bool) -> Values:
    how = (reader.extra.get("run") or {}).get("evaluate_with") if evaluated else None
    exported = exported_params(how, reader.leaves, reader.read)

    def value(path: str) -> jax.Array:
        kind, _, name = path.partition("/")
        return jnp.asarray(exported(name) if kind == "params" else reader.read(path))

    return value


def _changed_options(extra: Mapping[str, Any], model: Any) -> list[str]:
    """Options of a model that is a dataclass, where they are not those of the run."""
    if not is_dataclass(model) or isinstance(model, type | Model):
        return []
    before = {name: value for name, value in (extra.get("run") or {}).items() if name.startswith("model.")}
    changed = differences(before, describe(model, "model")) if before else []
    return [f"of the run's options {line}; give the model with the first" for line in changed]


def _assembled(model: Any, params: Tree, model_state: Tree, values: Values, seed: int) -> Any:
    """The model with these values in it; the trees may hold shapes."""
    if isinstance(model, Model):
        return {"params": _filled("params", params, values), **_filled("model_state", model_state, values)}
    with nnx.use_eager_sharding(False):
        abstract = nnx.eval_shape(lambda: model(nnx.Rngs(0)))
    graph, own_params, _, own_state = nnx.split(abstract, nnx.Param, nnx.RngState, ...)

    def rngs() -> Any:
        with nnx.use_eager_sharding(False):
            return nnx.split(model(nnx.Rngs(seed)), nnx.RngState, ...)[1]

    # of all that the model makes of its seed, the compiler keeps the keys of its dropout alone
    return nnx.merge(
        graph,
        _variables("params", own_params, values),
        jax.jit(rngs)(),
        _variables("model_state", own_state, values),
    )


def _variables(kind: str, state: Any, values: Values) -> Any:
    """The variables of an nnx module, with values by their paths."""
    flat = [
        (path, variable.replace(values("/".join([kind, *map(str, path)]))))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.from_flat_state(flat)


def _filled(kind: str, tree: Tree, values: Values) -> Tree:
    return jax.tree.map_with_path(lambda path, _: values(f"{kind}/{path_text(path)}"), tree)


def _flat(tree: Tree) -> dict[str, Any]:
    return {path_text(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
