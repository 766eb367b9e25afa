"""What is asked: ranks, hosts and their shares, times, and what cannot be."""

from pathlib import Path

import pytest

from shardtrain.launch.duration import parse_time
from shardtrain.launch.hosts import Host, hosts_problem, parse_hosts, place_ranks, read_hostfile
from shardtrain.launch.job import Job
from shardtrain.launch.launcher import Launch, shell_text


def job(**changes):
    return Job(arguments=("train", "run.py"), program=("shardtrain",), **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"islands": 10**12}, "islands is 1000000000000; use at most 1048576"),
        ({"stop_seconds": -5}, "-5 s for stopping and saving are given; use 0 or more"),
        ({"islands": 2, "processes_per_island": 0}, "processes per island 0: each island needs 1 or more"),
        (
            {"islands": 3, "processes_per_island": (1, 3)},
            "processes per island 1,3 is for 2 islands, and islands is 3; use islands=2, or 3 numbers",
        ),
        (
            {"islands": 3, "hosts": parse_hosts("a,b")},
            "3 ranks cannot be shared evenly by 2 hosts: 3 % 2 = 1. Use 2 or 4 ranks, or give the number of"
            " each host: a:2,b:1",
        ),
        (
            {"islands": 0, "time_seconds": 60},
            "islands is 0; use 1 or more\n  - the time limit of 60 s leaves nothing before the 120 s",
        ),
    ],
)
def test_a_job_that_cannot_be_is_refused_with_the_fix(changes, text):
    with pytest.raises(ValueError) as error:
        job(**changes)
    assert str(error.value).startswith("this job cannot be launched:\n  - ")
    assert text in str(error.value)


def test_an_interface_reaches_every_transport_but_those_that_the_user_has_set():
    found = job(interface="ib0").rank_environment({"NCCL_SOCKET_IFNAME": "eth9"})
    assert found["SHARDTRAIN_INTERFACE"] == "ib0"
    assert found["UCX_NET_DEVICES"] == found["FI_TCP_IFACE"] == found["OMPI_MCA_btl_tcp_if_include"] == "ib0"
    assert found["NCCL_SOCKET_IFNAME"] == "eth9"
    with pytest.raises(ValueError, match="interface 'eth0; x' is no name of one"):
        job(interface="eth0; x")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:x", "'a:x' is no host; write a name, or name:ranks"),
        ("a:0", "'a:0' is no host"),
        ("a,b,a", "a is there 2 times; write a:2 once"),
    ],
)
def test_hosts_that_are_none_are_refused(text, problem):
    with pytest.raises(ValueError) as error:
        parse_hosts(text)
    assert problem in str(error.value)


def test_a_hostfile_of_either_kind_is_read(tmp_path):
    (tmp_path / "hosts").write_text(
        "# the big ones\nn1 slots=4\nn2:2  # half\n\nn3.x.org\nn4 slots = 1 max_slots=2\n"
    )
    names = [(host.name, host.slots) for host in read_hostfile(tmp_path / "hosts")]
    assert names == [("n1", 4), ("n2", 2), ("n3.x.org", None), ("n4", 1)]


@pytest.mark.parametrize(("text", "problem"), [("# none\n", "names no host"), ("a b\n", "'a b' is no host")])
def test_a_hostfile_that_is_none_is_refused(text, problem, tmp_path):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_hostfile(tmp_path / "hosts")
    with pytest.raises(FileNotFoundError, match="there is no hostfile"):
        read_hostfile(tmp_path / "nope")


@pytest.mark.parametrize(
    ("hosts", "islands", "expected"),
    [
        ("a,b", 4, (("a", 2), ("b", 2))),
        ("a:1,b:3", 4, (("a", 1), ("b", 3))),
        ("a:8,b:8", 2, (("a", 1), ("b", 1))),
    ],
)
def test_slots_that_add_up_are_taken_and_others_are_shared_evenly(hosts, islands, expected):
    assert place_ranks(islands, parse_hosts(hosts)) == expected


def test_slots_that_are_too_few_are_refused():
    problem = hosts_problem(4, (Host(name="a", slots=1), Host(name="b", slots=8)))
    assert problem is not None
    assert "is 2, and a:1 take fewer; give slots that add up to 4, or 2 or more to each" in problem


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("01:30:00", 5400),
        ("1-12", 129600),
    ],
)
def test_times_are_read_as_slurm_reads_them(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "-5"])
def test_other_times_are_refused(text):
    with pytest.raises(ValueError, match="write hours:minutes:seconds"):
        parse_time(text)


def test_a_launch_is_text_for_a_shell():
    launch = Launch(
        lines=(("mpiexec", "-n", "2"), ("python", "a b.py")),
        environment={"A": "x y"},
        unset=("B",),
        files={Path("f/hosts"): "a\n"},
    )
    assert shell_text(launch) == (
        "mkdir -p f && cat > f/hosts <<'END'\na\nEND\n"
        "env -u B 'A=x y' \\\n  mpiexec -n 2 \\\n  python 'a b.py'\n"
    )
