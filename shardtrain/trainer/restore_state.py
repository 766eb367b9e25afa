"""Restore the state of a run from a checkpoint of any layout: read, initialise, drop and broadcast arrays.

Arrays that depend on their layout (the state of a combiner) are restored only on the same layout. Next:
`resume.py`; arrays are read in `checkpoints/restore.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardtrain.checkpoints.differences import Allow, check_state, matches, widen_optimizer_state
from shardtrain.checkpoints.manifest_entries import COMMON, ArrayOrigin, Leaf
from shardtrain.checkpoints.origins import OF_LAYOUT, select_saved_state
from shardtrain.checkpoints.reader import CheckpointReader
from shardtrain.checkpoints.restore import restore_arrays
from shardtrain.functional.frozen import ADAPTERS
from shardtrain.functional.model import path_text
from shardtrain.system.xla_flags import quick_options
from shardtrain.train_step.state import State, restart_local
from shardtrain.trainer.run_checkpoints import RunCheckpoints
from shardtrain.trainer.synchronisation import broadcast_state, find_differing_arrays

PARAMETERS = ("params/", "model_state/")
ROUTERS = ("*/router", "*/router_bias")
"""Arrays of a model with experts that a dense checkpoint does not have."""


def read_arrays(
    checkpoints: RunCheckpoints, reader: CheckpointReader, wanted: State, extra: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Read this island's arrays of a checkpoint; common arrays may come from island 0 later.

    Args:
      checkpoints: the checkpoints of the run, which says what arrays may be missing or unused.
      reader: the reader of the checkpoint.
      wanted: shapes and shardings of the state.
      extra: the extra data of this run's own checkpoint; {} for a checkpoint of another run, from which only
        parameters are read.

    Returns:
      Path -> array on the mesh.

    Raises:
      ValueError: the checkpoint holds another state than this run has.
    """
    run, coordination = checkpoints.run, checkpoints.coordination
    wanted = _readable(checkpoints, select_saved_state(wanted), reader, extra)
    leaves = {path_text(path): leaf for path, leaf in jax.tree.leaves_with_path(wanted)}
    origins = checkpoints.origins(wanted)
    # a run that starts from another checkpoint initialises adapters that are not in it
    adapters = [path for path in leaves if matches(path, ADAPTERS) and path not in reader.stored_arrays]
    routers = ROUTERS if run.start_from.upcycle else ()
    missing = run.allow.missing if extra else (*run.allow.missing, *adapters, *routers)
    if adapters and not extra:
        checkpoints.note(
            f"{len(adapters)} arrays of adapters are not in that checkpoint: they are initialised"
        )
    ignored = [path for path in reader.stored_arrays if not extra and not path.startswith(PARAMETERS)]
    unused = (*run.allow.unused, *(f"{name}*" for name in OF_LAYOUT), *ignored)
    if coordination.grid is not None:
        shapes = [_find_whole_shapes(leaves, origins), _find_whole_shapes(reader.leaves, {})]
        # the stages together must want all saved arrays
        gathered = coordination.gather_islands("arrays", lambda island: shapes)
        asked, saved = (_union([each[i] for each in gathered]) for i in (0, 1))
        allow = Allow(missing=missing, unused=unused)
        check_state(reader, widen_optimizer_state(saved, asked), asked, allow)
        unused = ("*",)
    if not coordination.writes:
        # the arrays in common come from island 0
        own = _readable(checkpoints, select_saved_state(wanted, own=True), reader, extra)
        own_paths = {path_text(path) for path, _ in jax.tree.leaves_with_path(own)}
        leaves = {path: leaf for path, leaf in leaves.items() if checkpoints.has_own and path in own_paths}
        unused = ("*",)
    if not leaves:
        return {}
    try:
        found = restore_arrays(
            reader, leaves, origins, Allow(missing=missing, unused=unused), checkpoints.note
        )
    except ValueError:
        if coordination.writes:
            raise
        # this island's own disk does not have its part; `synchronise_restored` handles that
        return {}
    _report_replicas(checkpoints, reader, origins)
    return found


def assemble(wanted: State, arrays: Mapping[str, jax.Array], init: Callable[[], State]) -> State:
    """Assemble the state from the arrays that were read; the others are initialised.

    Args:
      wanted: shapes of the state.
      arrays: path -> array.
      init: makes the state before the first step.
    """
    if all(path_text(path) in arrays for path, _ in jax.tree.leaves_with_path(wanted)):
        return jax.tree.map_with_path(lambda path, _: arrays[path_text(path)], wanted)
    return jax.tree.map_with_path(lambda path, x: arrays.get(path_text(path), x), init())


def synchronise_restored(
    checkpoints: RunCheckpoints, state: State, arrays: Mapping[str, jax.Array], *, resumed: bool
) -> State:
    """Broadcast the common arrays from island 0, and verify that all islands have the same bits.

    Args:
      checkpoints: the checkpoints of the run.
      state: the state of this island.
      arrays: path -> array that this island has read.
      resumed: whether the checkpoint is of this run.

    Raises:
      RuntimeError: the islands have different bits after the broadcast.
    """
    coordination = checkpoints.coordination
    is_lost = checkpoints.own_optimizers and resumed
    is_lost = is_lost and not any(path.startswith("opt_state/") for path in arrays)
    lost = coordination.all_gather("own state", is_lost)
    own_optimizers = checkpoints.run.strategy.synchronisation.on_deltas and not any(lost)
    state = broadcast_state(coordination, state, own_optimizers)
    state = restart_round(checkpoints, state, arrays)
    if wrong := find_differing_arrays(coordination, state, own_optimizers):
        raise RuntimeError(f"islands have different bits after the broadcast from island 0: {wrong}")
    if any(lost):
        checkpoints.note(
            f"{sum(lost)} of {len(lost)} ranks found no checkpoint of their own island for this step:"
            " all continue with the optimizer's state of island 0"
        )
    return state


def restart_round(checkpoints: RunCheckpoints, state: State, arrays: Mapping[str, jax.Array]) -> State:
    """Restart the local steps on all islands, unless each has read its local changes since the last merge."""
    if checkpoints.coordination.transfer is None or not state.local:
        return state
    has_read = checkpoints.coordination.all_gather(
        "local steps", any(path.startswith("local/") for path in arrays)
    )
    if all(has_read):
        return state
    if any(has_read):
        checkpoints.note(
            "not all islands found their changes since the last merge: the changes are dropped on all islands"
        )
    return state._replace(local=restart_local(state.local, state.model_state))


def _readable(
    checkpoints: RunCheckpoints, wanted: State, reader: CheckpointReader, extra: Mapping[str, Any]
) -> State:
    """Drop per-replica arrays, and arrays that depend on another layout, from the wanted state."""
    coordination = checkpoints.coordination
    if not any(path.startswith("loss_scale/") for path in reader.stored_arrays):
        wanted = wanted._replace(loss_scale=())  # the checkpoint has none
    if coordination.islands is not None and not checkpoints.own_optimizers and not coordination.writes:
        wanted = wanted._replace(opt_state=())
    # each island saved its own part, and their meshes may differ
    own = reader.manifests.get(checkpoints.island[0] if checkpoints.has_own else 0)
    if not extra or (own.extra if own else extra).get("layout") == checkpoints.layout:
        return wanted
    for name, what in {
        "combine_state": "the residuals of compression are",
        "local": "changes of each replica since the last merge are",
        "outer_state": "the outer optimizer's state is",
    }.items():
        if any(path.startswith(f"{name}/") for path in reader.stored_arrays):
            checkpoints.note(
                f"{what} dropped, because the buckets, devices or synchronisation of the saved layout differ"
            )
    if wanted.loss_scale:
        checkpoints.note(
            "the loss scale starts again because the layout differs: steps are skipped until it fits"
        )
    return wanted._replace(combine_state=(), local=(), outer_state=(), loss_scale=())


def _find_whole_shapes(leaves: Mapping[str, Any], origins: Mapping[str, ArrayOrigin]) -> dict[str, Any]:
    return {
        path: [origins.get(path, COMMON).whole(tuple(x.shape)), getattr(x.dtype, "name", x.dtype)]
        for path, x in leaves.items()
        if not path.startswith(OF_LAYOUT)
    }


def _union(of_islands: Sequence[Mapping[str, Any]]) -> dict[str, Leaf]:
    return {
        path: Leaf(shape=tuple(shape), dtype=dtype)
        for each in of_islands
        for path, (shape, dtype) in each.items()
    }


def _report_replicas(
    checkpoints: RunCheckpoints, reader: CheckpointReader, origins: Mapping[str, ArrayOrigin]
) -> None:
    """Report which optimizer state each replica takes, if the number of replicas has changed."""
    path = next((path for path in reader.stored_arrays if path.startswith("opt_state/")), None)
    if path is None:
        return
    before = reader.stored_arrays[path][0].leaf.origin.num_replicas
    now = origins.get(path, COMMON).num_replicas
    if before != now:
        checkpoints.note(
            f"{before or 1} optimizer states were saved, and this run has {now or 1}: replica r continues"
            f" with the state of replica r % {before or 1}"
        )


VALUES = "optimizer.values"
"""The field of the description of a run: path in the optimizer state -> value before the first step."""

INJECTED, OF_SCHEDULES = "/hyperparams/", "/hyperparams_states/"


def compute_initial_values(optimizer: optax.GradientTransformation, params: Any) -> dict[str, float]:
    """Return the scalars in the state of an optimizer before the first step, by path.

    Scalars that belong to a parameter or a schedule are left out.

    Args:
      optimizer: the optimizer.
      params: shapes of the parameters.
    """
    own = [path_text(path) for path, _ in jax.tree.leaves_with_path(params)]

    def numbers() -> dict[str, jax.Array]:
        state = optimizer.init(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params))
        leaves = {f"opt_state/{path_text(path)}": x for path, x in jax.tree.leaves_with_path(state)}
        scheduled = [path for path in leaves if OF_SCHEDULES in path]
        return {
            path: x
            for path, x in leaves.items()
            if x.ndim == 0
            and not jnp.issubdtype(x.dtype, jax.dtypes.extended)  # random keys
            and not any(path.endswith(f"/{name}") for name in own)
            and not any(each.startswith(path.replace(INJECTED, OF_SCHEDULES) + "/") for each in scheduled)
        }

    options = quick_options(jax.default_backend())
    found = jax.device_get(jax.jit(numbers, compiler_options=options)())
    return {path: float(x) for path, x in sorted(found.items())}


def apply_new_values(
    state: State, saved: Mapping[str, Any], now: Mapping[str, Any], note: Callable[[str], None]
) -> State:
    """Return a restored state with the optimizer values that the code changed, if no step changed them too.

    Args:
      state: the state.
      saved: description of the run that saved it.
      now: description of this run.
      note: receives a line for each changed value.
    """
    new, old = now.get(VALUES) or {}, saved.get(VALUES) or {}

    def value(path: Any, x: Any) -> Any:
        name = path_text(path)
        if name not in new:
            return x
        (kept,) = set(np.unique(x.addressable_data(0)).tolist()) if x.size else {None}
        # checkpoints of earlier versions do not have it; injected values do not change
        before = old.get(name, kept if INJECTED in name else new[name])
        if before == new[name]:
            return x
        if kept != np.asarray(before, x.dtype):
            note(
                f"WARNING: {name} is {new[name]:g} in the code, and was {before:g}; steps have changed it to"
                f" {kept:g} since, which is used"
            )
            return x
        note(f"{name} is {new[name]:g}, and was {before:g} in the checkpoint: the new value is used")
        return jax.device_put(jnp.full_like(x, new[name]), x.sharding)

    return jax.tree.map_with_path(value, state)
