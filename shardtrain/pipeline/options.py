"""Options of a pipeline: its schedule, and how blocks are cut into stages. No jax."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import near, refuse
from shardtrain.pipeline.partition import parse_cuts
from shardtrain.pipeline.schedule import SCHEDULES, find_placement
from shardtrain.sharding.shares import parse_weights

SPEEDS, MEMORY = ("auto", "measured"), ("auto", "unlimited")
"""Words that may be given in place of a number for each stage."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Options of a pipeline over the mesh axis `pipeline`, or over islands.

    The number of microbatches is `Strategy.accumulate`.

    Args:
      schedule: the order of the tasks: gpipe, 1f1b, interleaved, zero_bubble, zb_v, or the path of your own
        table (.csv).
      virtual_stages: number of parts of the model on each stage: 1 with 1f1b and zero_bubble, 2 with zb_v, 2
        or more with interleaved, any number with gpipe.
      stages: how blocks are cut into stages: into "equal" numbers, by "params" or "flops", by "time" (for
        islands of unequal speed and memory), or by numbers of blocks such as "3,4,4,1"; replicas across
        islands may each have a cut, "3,1;1,3".
      stage_speeds: speed of the devices of each stage, where blocks are divided by time: "1,0.5,2", in
        teraflops a second if a link speed is given, otherwise in any unit; for several replicas "1,0.5;2,1";
        "auto" takes them from the table of known devices; "measured" lets each island time a block of the
        model at the start.
      stage_memory: memory limit of a device of each stage in gigabytes, where blocks are divided by time:
        "80,40,40"; for several replicas "80,40;16,16"; "auto" takes them from the table of known devices;
        "unlimited" sets no limit.
      link_speed: gigabytes a second from stage to stage, where blocks are divided by time; None means that
        sending takes no time.
      in_flight: number of batches that are in the pipeline at the same time, for pipelines across islands
        that synchronise in waves. Each batch is a step of its pipeline's optimizer; it does not see the
        updates of the others, and its backward uses the weights of its forward. With 1, the pipeline is
        empty after each step.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    schedule: str = "1f1b"
    virtual_stages: int = 1
    stages: str = "equal"
    stage_speeds: str = "auto"
    stage_memory: str = "auto"
    link_speed: float | None = None
    in_flight: int = 1

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if self.virtual_stages < 1:
            problems.append(f"virtual_stages is {self.virtual_stages}; use 1 or more")
        elif self.schedule in SCHEDULES:
            problems += _list_refused(lambda: SCHEDULES[self.schedule](1, 1, self.virtual_stages, False))
        elif not self.schedule.endswith(".csv"):
            problems.append(f"schedule {near(self.schedule, SCHEDULES)}; or a table of your own, a path.csv")
        problems += _list_refused(lambda: parse_cuts(self.stages))
        problems += self._find_in_flight_problems()
        for name, words in (("stage_speeds", SPEEDS), ("stage_memory", MEMORY)):
            parts = getattr(self, name).split(";")
            for part in parts:
                problems += _list_refused(partial(parse_stage_numbers, name, part, words))
            if len(parts) > 1 and "measured" in parts:
                problems.append(
                    f"{name} is {getattr(self, name)!r}; give 'measured' alone, which measures the islands of"
                    " all pipelines, or numbers for each"
                )
        if self.link_speed is not None and not 0 < self.link_speed < math.inf:
            problems.append(f"link_speed is {self.link_speed}; use gigabytes a second above 0")
        refuse("this pipeline cannot be made", problems)

    def _find_in_flight_problems(self) -> list[str]:
        if self.in_flight < 1:
            return [f"in_flight is {self.in_flight} batches; use 1 to flush after each step, or more"]
        if self.in_flight > 1 and (self.schedule != "1f1b" or self.virtual_stages > 1):
            return [
                f"in_flight is {self.in_flight} batches, whose forwards and backwards take turns, and the"
                f" schedule is {self.schedule!r} with {self.virtual_stages} parts on a stage; use 1f1b with"
                " 1, or in_flight 1"
            ]
        if self.in_flight > 1 and self.stages == "time":
            return [
                f"in_flight is {self.in_flight} batches, and stages is 'time', which counts the time and"
                " memory of a pipeline that is flushed after each step; use stages flops or numbers of"
                " blocks, such as --stages 3,1, or in_flight 1"
            ]
        return []

    @property
    def placement(self) -> str:
        """The name of the placement that the schedule needs, see `part_placement.PLACEMENTS`.

        Raises:
          ValueError: the schedule is a file that cannot be read.
        """
        return find_placement(self.schedule, self.virtual_stages)


def parse_stage_numbers(name: str, text: str, words: Sequence[str]) -> tuple[float, ...] | None:
    """Read numbers such as "1,0.5,2", one for each stage; return None if the text is one of these words.

    Raises:
      ValueError: something is not a number above 0.

    >>> parse_stage_numbers("stage_speeds", "1, 0.5", ("auto",))
    (1.0, 0.5)
    """
    if text in words:
        return None
    try:
        found = parse_weights(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}\n  - or give {' or '.join(words)}") from None
    if not all(found):
        raise ValueError(f"{name} is {text!r}; give each stage a number above 0, or {' or '.join(words)}")
    return found


def _list_refused(make: Callable[[], object]) -> list[str]:
    try:
        make()
    except ValueError as error:
        return [str(error)]
    return []
