"""Versions: what must agree, and what may differ."""

from shardtrain.doctor.versions import SHOWN, evaluate

SAME = {f"versions/{name}": "1.0" for name in SHOWN} | {
    "flags/xla_x": "true",
    "python": "/env/python",
    "machine": "x86_64",
    "system": "Debian, Linux 6",
    "libc": "glibc 2.36",
    "driver": None,
}


def test_what_agrees_is_shown_once(told, by_what):
    rows = by_what(evaluate(told([SAME, SAME], "ab")))
    assert {row.status for row in rows.values()} == {"ok"}
    assert rows["packages"].finding.startswith("python 1.0, jax 1.0")
    assert rows["flags"].finding == "xla_x=true"
    assert rows["system"].finding == "Debian, Linux 6, x86_64, glibc 2.36"


def test_packages_and_flags_that_differ_are_wrong(told, by_what):
    other = {**SAME, "versions/jax": "1.1", "flags/xla_x": "false"}
    rows = by_what(evaluate(told([SAME, other, SAME], "abc")))
    assert (rows["packages"].status, rows["packages"].finding) == (
        "wrong",
        "jax: 1.0 on rank 0, rank 2; 1.1 on rank 1",
    )
    assert rows["packages"].fix == "install the same versions on every host, from one lock file"
    assert rows["flags"].finding == "xla_x: true on rank 0, rank 2; false on rank 1"


def test_a_package_that_is_missing_everywhere_is_wrong(told, by_what):
    row = by_what(evaluate(told([{**SAME, "versions/flax": None, "versions/mpi4jax": None}], "a")))[
        "packages"
    ]
    assert (row.status, row.finding) == ("wrong", "not installed: flax, mpi4jax")


def test_a_package_of_mpi_may_be_missing(told, by_what):
    row = by_what(evaluate(told([{**SAME, "versions/mpi4jax": None}], "a")))["packages"]
    assert row.status == "ok"
    assert "mpi4jax" not in row.finding
    assert "mpi4py 1.0" in row.finding


def test_systems_may_differ_and_drivers_should_not(told, by_what):
    rows = by_what(evaluate(told([SAME, {**SAME, "libc": "glibc 2.39", "python": "/x"}], "ab")))
    assert (rows["system"].status, rows["python"].status) == ("note", "note")
    drivers = [{**SAME, "driver": "550.1"}, {**SAME, "driver": "580.2"}]
    row = by_what(evaluate(told(drivers, "ab")))["system"]
    assert row.status == "warning"
    assert "550.1, 580.2" in row.fix
