"""Facts of a host from files, as other machines have them."""

from shardtrain.system.host import infiniband_links, memory_bytes, network_links


def test_networks_have_a_state_and_a_speed_where_the_driver_knows_one(tmp_path):
    for name, files in {
        "lo": {"operstate": "unknown"},
        "eth0": {"operstate": "up", "speed": "25000"},
        "eth1": {"operstate": "down", "speed": "-1"},
        "bonding_masters": {},
    }.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(f"{text}\n")
    assert network_links(tmp_path) == {
        "eth0": {"state": "up", "mbit_per_second": 25000},
        "eth1": {"state": "down", "mbit_per_second": None},
    }


def test_infiniband_ports_have_a_state_and_a_rate(tmp_path):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    assert infiniband_links(tmp_path) == {"mlx5_0/1": {"state": "4: ACTIVE", "rate": "200 Gb/sec (4X HDR)"}}
    assert infiniband_links(tmp_path / "none") == {}


def test_memory_is_in_bytes(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:       1024 kB\nMemFree: 1 kB\n")
    assert memory_bytes("MemTotal", tmp_path / "meminfo") == 2**20
    assert memory_bytes("MemTotal", tmp_path / "none") is None
