"""Links: slow pairs by name, networks that are slow altogether, devices of one process."""

import jax

from shardtrain.doctor.links import (
    evaluate,
    measure_permute,
)


def rank(partners, bridge=1e9, platform="cpu", pairs=None):
    return {
        "platform": platform,
        "pairs": pairs or {},
        "partners": partners,
        "bridge": bridge,
    }


def test_pairs_on_a_host_and_between_hosts_have_rows_of_their_own(told, by_what):
    facts = [rank({"1": [2e-6, 8e9], "2": [2e-5, 1e9]}), rank({"2": [3e-5, 1.1e9]}), rank({})]
    rows = by_what(evaluate(told(facts, "aab")))
    assert rows["ranks on one host"].finding == "1 pair: 8 B in 2.0 us, 8 MiB both ways at 8.0 GB/s"
    assert rows["ranks on two hosts"].finding == (
        "2 pairs: 8 B in 20.0 us to 30.0 us, 8 MiB both ways at 1.0 to 1.1 GB/s, median 1.1 GB/s"
    )
    assert rows["sum over ranks"].finding.endswith("400.0 ms a step for 100 million parameters in float32")
    assert {row.status for row in rows.values()} == {"ok"}


def test_a_host_that_all_slow_pairs_have_in_common_is_named(told, by_what):
    fast, slow = [2e-5, 1e9], [2e-5, 1e8]
    facts = [
        rank({"1": fast, "2": fast, "3": fast, "4": slow}),
        rank({"2": fast, "3": fast, "4": slow}),
        rank({"3": fast, "4": slow}),
        rank({"4": slow}),
        rank({}),
    ]
    row = by_what(evaluate(told(facts, "abcde")))["ranks on two hosts"]
    assert row.status == "warning"
    assert "slow: rank 0 - rank 4 100.0 MB/s" in row.finding
    assert row.fix == "all slow pairs have rank 4: check the network card, cable and load of e"


def test_a_network_that_is_slow_altogether_says_what_it_costs(told, by_what):
    row = by_what(evaluate(told([rank({"1": [1e-4, 1e8]}), rank({})], "ab")))["ranks on two hosts"]
    assert row.status == "warning"
    assert row.fix.startswith("100 million gradients take 4 s a step")


def test_a_slow_pair_of_gpus_is_named(told, by_what):
    pairs = {"0 - 1": 2e11, "0 - 2": 2e10, "1 - 2": 2e11}
    row = by_what(evaluate(told([rank({}, platform="gpu", pairs=pairs)], "a")))["devices"]
    assert row.status == "warning"
    assert row.finding.endswith("slow: rank 0 0 - 2 20.0 GB/s")


def test_devices_of_this_process_are_measured():
    devices = jax.local_devices()
    assert measure_permute([devices[0], devices[5]], 2**16) > 0
