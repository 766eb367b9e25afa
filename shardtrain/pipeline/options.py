"""Options of a pipeline: its schedule and how blocks are cut. Values only, no jax."""

from collections.abc import Callable
from dataclasses import dataclass

from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import near, problems_error
from shardtrain.pipeline.partition import parse_stages
from shardtrain.pipeline.schedule import SCHEDULES, placement_of


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Options of a pipeline over the mesh axis `pipeline`, or over islands; with one stage there is no
    pipeline.

    The number of microbatches is `Strategy.accumulate`.

    Args:
      schedule: the order of the tasks: gpipe, 1f1b, interleaved, zero_bubble, zb_v, or the path of a table of
        your own (.csv).
      virtual_stages: parts of the model on each stage: 1 with 1f1b and zero_bubble, 2 with zb_v, 2 or more
        with interleaved, any number with gpipe.
      stages: how blocks are cut into stages: "equal", by "params" or "flops", or numbers of blocks such as
        "3,4,4,1".

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    schedule: str = "1f1b"
    virtual_stages: int = 1
    stages: str = "equal"

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if self.virtual_stages < 1:
            problems.append(f"virtual_stages is {self.virtual_stages}; use 1 or more")
        elif self.schedule in SCHEDULES:
            problems += _refused(lambda: SCHEDULES[self.schedule](1, 1, self.virtual_stages, False))
        elif not self.schedule.endswith(".csv"):
            problems.append(f"schedule {near(self.schedule, SCHEDULES)}; or a table of your own, a path.csv")
        problems += _refused(lambda: parse_stages(self.stages))
        if problems:
            raise problems_error("this pipeline cannot be made", problems)

    @property
    def placement(self) -> str:
        """The placement that the schedule needs, a name of `part_placement.PLACEMENTS`.

        Raises:
          ValueError: the schedule is a file that cannot be read.
        """
        return placement_of(self.schedule, self.virtual_stages)


def _refused(make: Callable[[], object]) -> list[str]:
    try:
        make()
    except ValueError as error:
        return [str(error)]
    return []
