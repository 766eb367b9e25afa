"""Connect an island to the others: to all of them, or to the owners of its blocks in other pipelines.

Next: `coordination.py`, `train_step/owner_transfers.py`.
"""

import jax

from shardtrain.islands.device_memory import cuda_aware, decide_device_memory
from shardtrain.islands.membership import Islands
from shardtrain.islands.transfer import Transfer
from shardtrain.pipeline.block_owners import owner_groups
from shardtrain.train_step.owner_transfers import OwnerTransfers
from shardtrain.trainer.config import Run
from shardtrain.trainer.setup import RunSetup


def make_transfers(
    run: Run, setup: RunSetup, islands: Islands
) -> tuple[Transfer | None, OwnerTransfers | None]:
    """Return the transfer to the other islands, and where islands are stages those to the owners of blocks.

    A collective call of all ranks: all make every group's transfer, in the same order.

    Args:
      run: the run.
      setup: the setup of this island.
      islands: several of them.
    """
    across, platform = run.strategy.across, jax.devices()[0].platform
    on_device = decide_device_memory(across.memory, islands, platform, cuda_aware)
    if setup.seats is None or setup.stage_model is None:
        return islands.transfer(setup.mesh, across, on_device), None
    found = []
    for group in owner_groups(setup.cuts):
        joins = group.stages[setup.seats.replica] == setup.seats.stage
        if transfer := islands.transfer(setup.mesh, across, on_device, joins=joins):
            found.append((group, transfer))
    groups, transfers = zip(*found, strict=True)
    return transfers[0], OwnerTransfers(setup.stage_model, groups, transfers)
