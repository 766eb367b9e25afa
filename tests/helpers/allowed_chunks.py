"""The numbers of chunks per stage that a named schedule supports."""

from contextlib import suppress

from shardtrain.pipeline.schedule import SCHEDULES


def list_allowed_chunks(name: str, most: int = 4) -> list[int]:
    allowed = []
    for num_chunks in range(1, most + 1):
        with suppress(ValueError):
            SCHEDULES[name](1, 1, num_chunks, False)
            allowed.append(num_chunks)
    return allowed
