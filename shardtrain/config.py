"""Import path of run files that `checkpoint import` wrote before 0.2; today: `shardtrain.StartFrom`."""

from shardtrain.trainer.config import StartFrom

__all__ = ["StartFrom"]
