"""The benchmark of checkpoints: what its processes read."""

import pytest


@pytest.mark.parametrize("third", [False, True])
def test_every_way_restores_what_is_asked_for(script, tmp_path, third):
    benchmark = script("checkpoint")
    benchmark.save(tmp_path, 64, 6)
    runs = [benchmark.restore(tmp_path, third, way) for way in ("toolkit", "verified")]
    blocks = (2 if third else 6) * (12 * 64**2 + 64)
    table = 0 if third else benchmark.VOCAB * 64
    assert {run["array_bytes"] for run in runs} == {3 * 4 * (table + blocks)}
    assert 0 < runs[0]["read"] < runs[1]["read"]
