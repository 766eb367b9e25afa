"""What judges are given, and rows by what they are about."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shardtrain.doctor.check import RankFacts, Row


@pytest.fixture(scope="session")
def told() -> Callable[..., list[RankFacts]]:
    """(facts of each rank, hosts="aab"): what ranks found, on hosts of one letter."""

    def told(facts: Sequence[dict[str, Any]], hosts: str) -> list[RankFacts]:
        assert len(facts) == len(hosts)
        named = enumerate(zip(facts, hosts, strict=True))
        return [
            RankFacts(rank=rank, name=f"rank {rank}", host=host, facts=each) for rank, (each, host) in named
        ]

    return told


@pytest.fixture(scope="session")
def by_what() -> Callable[[Sequence[Row]], dict[str, Row]]:
    """Rows by what they are about; no two are about the same."""

    def by_what(rows: Sequence[Row]) -> dict[str, Row]:
        assert len({row.item for row in rows}) == len(rows)
        return {row.item: row for row in rows}

    return by_what
