"""What a stage has is split by the owners of its blocks, and joined again to the same."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from tiny_language_model import TinyConfig

from shardtrain.combine.fragments import by_path
from shardtrain.functional.loss import classification_loss, next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models.resnet import ResNetConfig
from shardtrain.pipeline.block_owners import owner_groups
from shardtrain.pipeline.costs import Traced
from shardtrain.pipeline.stacking import Partition
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.train_step.owner_transfers import OwnerTransfers

ROWS = {"weights": np.ones(2, np.float32)}
TOKENS = {**ROWS, "tokens": np.zeros((2, 9), np.int32)}
IMAGES = {**ROWS, "image": np.zeros((2, 8, 8, 1), np.float32), "label": np.zeros(2, np.int32)}
RESNET = ResNetConfig(depth=20, filters=4, num_groups=2, height=8, width=8, colours=1, classes=10)


@pytest.mark.parametrize(
    ("config", "loss", "batch"),
    [(TinyConfig(num_layers=6, tied=False), next_token_loss, TOKENS), (RESNET, classification_loss, IMAGES)],
    ids=["stacked", "a list"],
)
def test_each_array_is_in_the_group_of_its_owners(config, loss, batch):
    model = from_nnx(config)
    cuts = [Partition(num_stages=3, counts=counts) for counts in ((1, 4, 1), (3, 2, 1))]
    traced = Traced(model, loss, batch)
    for stage in range(3):
        stage_model = StageModel(model=model, stages=cuts[0], traced=traced, stage=stage)
        groups = [group for group in owner_groups(cuts) if group.stages[0] == stage]
        transfers: Any = [SimpleNamespace() for _ in groups]
        owners = OwnerTransfers(stage_model, groups, transfers)
        shapes = stage_model.own(traced.params)
        random = np.random.default_rng(stage)
        params = jax.tree.map(lambda x, r=random: jax.device_put(r.normal(size=x.shape)), shapes)
        state = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
        # no parameter's, though its path ends like that of one
        state["model_state"] = {path: jax.device_put(np.zeros(1)) for path in by_path(params)}
        parts = owners.split(state)
        joined = owners.join(state, parts)
        jax.tree.map(np.testing.assert_array_equal, joined, state)
        # every element of a parameter is in one group; what is no parameter's is in all
        for path, x in by_path(state).items():
            found = [part[path] for part in parts if path in part]
            if path.endswith("count") or path.startswith("model_state/"):
                assert len(found) == len(groups)
            else:
                assert sum(each.size for each in found) == x.size, path
        for part, own in zip(owners.split(params), owners.shapes(shapes), strict=True):
            assert {path: x.shape for path, x in part.items()} == {p: x.shape for p, x in own.items()}
        # another owner of a group has the same arrays of it
        for group, part in zip(groups, owners.split(params), strict=True):
            other = StageModel(model=model, stages=cuts[1], traced=traced, stage=group.stages[1])
            same = [each for each in owner_groups(cuts) if each.stages[1] == group.stages[1]]
            like = OwnerTransfers(other, same, [transfers[0]] * len(same)).shapes(other.own(traced.params))
            assert {p: x.shape for p, x in part.items()} == {
                p: x.shape for p, x in like[same.index(group)].items()
            }
