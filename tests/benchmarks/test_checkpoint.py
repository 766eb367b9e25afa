"""The benchmark of checkpoints: what its processes read."""

import pytest


@pytest.mark.parametrize("case", ["a third of the blocks", "1 device"])
def test_every_way_restores_what_is_asked_for(script, tmp_path, case):
    benchmark = script("checkpoint")
    saved, devices, third = benchmark.CASES[case]
    sizes = {"embed": 64, "layers": 6, "vocab": 64}
    told = {**sizes, "folder": str(tmp_path), "third": third}
    benchmark.save({**told, "devices": saved})
    runs = [benchmark.restore({**told, "how": way, "devices": devices}) for way in ("toolkit", "verified")]
    whole = 3 * 4 * (64 * 64 + 6 * 12 * 64**2 + 6 * 64)
    assert {run["array_bytes"] for run in runs} == {whole // 3 - 4 * 64 * 64 if third else whole}
    assert 0 < runs[0]["read"] < runs[1]["read"]
