"""Check that a mesh, a model and the combiner of replicas fit together.

Next: `placement.py`, which calls them.
"""

from collections.abc import Mapping
from typing import Any

import jax

from shardtrain import axes
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.errors.messages import refuse
from shardtrain.functional.model import Model, path_text
from shardtrain.functional.rng import new_key
from shardtrain.pipeline.stacking import Partition
from shardtrain.sharding.array_dims import NamedArray
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.rules import Rules
from shardtrain.sharding.specs import spec_axes


def check_elements(arrays: Mapping[str, NamedArray]) -> None:
    """Check that every parameter has elements, so that there is something to train, shard and save.

    Raises:
      ValueError: lists every parameter without elements, with its shape.
    """
    empty = [f"{path} has shape {named.shape}" for path, named in arrays.items() if 0 in named.shape]
    refuse(
        "the model has parameters without elements; leave them out, or give each dim a size of 1 or more",
        empty,
    )


def check_operators(layout: Layout, sizes: Mapping[str, int], synchronisation: Synchronisation) -> None:
    """Check that a mesh and a combiner allow shardings of single operators.

    Raises:
      ValueError: lists what does not.
    """
    if not layout.operators:
        return
    problems = []
    if (num_stages := sizes[axes.PIPELINE]) > 1:
        problems.append(f"pipeline is {num_stages}, and the stages of a mesh run one program; use pipeline=1")
    over_data = [name for name, shards in layout.operators.items() if axes.DATA in shards]
    if over_data and not synchronisation.is_mean:
        problems.append(
            f"{over_data[0]} is split over data, over which {synchronisation.by!r} combines replicas; use"
            " fsdp and tensor, or --combine mean"
        )
    refuse("operators cannot have shardings of their own", problems)


def check_stages(
    model: Model,
    layout: Layout,
    sizes: Mapping[str, int],
    synchronisation: Synchronisation,
    stages: Partition | None,
) -> None:
    """Check that a pipeline inside the mesh can run this model, attention and combiner.

    Raises:
      ValueError: the partition does not fit the mesh; or lists everything that such a pipeline cannot do.
    """
    # the mesh and the partition must be of the same number of stages
    num_stages = sizes[axes.PIPELINE]
    if (1 if stages is None else stages.num_stages) != num_stages:
        raise ValueError(
            f"the mesh has pipeline={num_stages}, and the model is cut into"
            f" {'no stages' if stages is None else f'{stages.num_stages} stages'}; make them with"
            f" pipeline.cuts.make_partition(model, Pipeline(), {num_stages}, loss, microbatch)"
        )
    if stages is None:
        return
    # all stages run one program in lock-step, which excludes some models and combiners
    problems = []
    combiner = synchronisation.combiner
    if combiner.across_leaves and not combiner.is_one_vector:
        problems.append(
            f"each stage combines its own layers, and {synchronisation.by!r} needs all of them at once, by"
            " their names; use another combiner, such as 'adasum' or 'adasum:whole', or join replicas as"
            " islands (--across)"
        )
    if model.chain is None or not model.chain.stacked:
        problems.append(
            "all its stages run one program, so blocks must be alike, their parameters stacked along the dim"
            f" {axes.LAYERS!r}, and this model's are not; stack them, or use --across pipeline"
        )
    num = sizes.get(axes.CONTEXT, 1)
    if num > 1 and num % 2 and layout.context_attention == "ring":
        problems.append(
            f"stages compute different things at a time, so a ring sends keys between pairs of devices, and"
            f" context={num} is odd; use context={num - 1} or {num + 1}, --context-attention all-to-all or"
            " all-gather, or --across pipeline, where each island has a mesh of its own"
        )
    num = sizes.get(axes.TENSOR, 1)
    if layout.collective_matmul and num > 1 and num % 2:
        problems.append(
            "stages compute different things at a time, so parts of a sequence are sent between pairs of"
            f" devices, and tensor={num} is odd; use tensor={num - 1} or {num + 1}, or no --collective-matmul"
        )
    # a microbatch does not wait for the model state of the one before it
    state = jax.eval_shape(lambda: model.init(new_key(0))[1])
    if kept := [path_text(path) for path, _ in jax.tree.leaves_with_path(state)]:
        problems.append(
            f"it does not update running statistics, and the model has {', '.join(kept)}; use a norm without"
            " them, or --across pipeline"
        )
    refuse(f"pipeline={num_stages} inside a mesh cannot run this", problems)


def check_experts(arrays: Mapping[str, NamedArray], rules: Rules, sizes: Mapping[str, int]) -> None:
    """Check that a model has experts if the mesh has an axis expert.

    Raises:
      ValueError: it has none, so each device of the axis would have a replica.
    """
    number = sizes.get(axes.EXPERT, 1)
    dims = {dim for named in arrays.values() for dim in named.dims or () if dim is not None}
    if number > 1 and not any(axes.EXPERT in rules.get(dim, ()) for dim in dims):
        raise ValueError(
            f"the mesh has expert={number}, and the model has no experts to shard; use data={number} or"
            f" fsdp={number}, or a model with a mixture of experts, as --model.experts num={number}"
        )


def check_data_axis(sharded: Any) -> None:
    """Check that no parameter is sharded over the data axis: a combiner needs whole replicas.

    Raises:
      ValueError: parameters are sharded over the data axis.
    """
    specs = jax.tree.leaves_with_path(sharded)
    refuse(
        "a combiner joins whole replicas over the data axis, but the layout shards parameters over it;"
        " use fsdp for that, or combine by 'mean'",
        [path_text(path) for path, spec in specs if axes.DATA in spec_axes(spec)],
    )


def check_layers(sharded: Any, stacked: frozenset[str]) -> None:
    """Check that each stage has its own whole layers of all arrays that stack layers.

    Raises:
      ValueError: layers are sharded over another axis too, or not over the axis pipeline.
    """
    specs = jax.tree.leaves_with_path(sharded)
    of_stages = {path_text(path) for path, spec in specs if axes.PIPELINE in spec_axes(spec)}
    refuse(
        f"a combiner in a pipeline joins whole layers, but the layout shards the dim {axes.LAYERS!r} over"
        f" other axes; give it the axis {axes.PIPELINE!r} alone, or combine by 'mean'",
        sorted(of_stages ^ stacked),
    )
