"""Known devices and MFU: the table is consistent, and an unknown device has no peak."""

import pytest

from shardtrain.plan.devices import DEVICES, HOPPER, OTHER_NAMES, Device, find_device


def known(kind: str) -> Device:
    device = find_device(kind)
    assert device is not None
    return device


def test_a_device_is_known_by_its_device_kind():
    h100 = find_device("NVIDIA H100 80GB HBM3")
    assert h100 == Device(
        kind="NVIDIA H100 80GB HBM3",
        source="NVIDIA H100 Tensor Core GPU datasheet",
        matrix_flops_per_second=989.5e12,
        memory_bytes=80_000_000_000,
        memory_bytes_per_second=3.35e12,
        float32_flops_per_second=67e12,
        compute_capability="9.0",
        reached=HOPPER,
    )
    assert find_device("NVIDIA H100 PCIe") != h100


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100", "NVIDIA A10G", "nvidia h200", "Tesla V100", ""])
def test_no_guess_for_an_unknown_device(kind):
    assert find_device(kind) is None


def test_each_name_is_of_one_device():
    kinds = [device.kind for device in DEVICES]
    assert len(set(kinds)) == len(kinds)
    assert all(known(kind).kind == kind for kind in kinds)
    assert not set(OTHER_NAMES) & set(kinds)
    assert {known(other).kind for other in OTHER_NAMES} == set(OTHER_NAMES.values())


@pytest.mark.parametrize(
    "device", [d for d in DEVICES if d.matrix_flops_per_second], ids=lambda device: device.kind
)
def test_the_units_are_single_ones(device):
    """A figure entered in tera, with sparsity doubled twice, or in bits would leave these ranges."""
    assert 7e13 <= device.matrix_flops_per_second <= 2.5e15
    assert 16e9 <= device.memory_bytes <= 300e9
    assert 3e11 <= device.memory_bytes_per_second <= 8e12
    # flops that one byte from memory must feed, on every accelerator of these years
    assert 75 <= device.matrix_flops_per_second / device.memory_bytes_per_second <= 600


@pytest.mark.parametrize("device", [d for d in DEVICES if d.matrix_flops_per_second is None], ids=str)
def test_a_device_without_bfloat16_has_a_float32_rate(device):
    assert device.float32_flops_per_second is not None
    assert 4e12 <= device.float32_flops_per_second <= 2e13
    assert 6e9 <= device.memory_bytes <= 32e9
    assert 12 <= device.float32_flops_per_second / device.memory_bytes_per_second <= 30
    if device.float16_flops_per_second is not None:
        assert 2 <= device.float16_flops_per_second / device.float32_flops_per_second <= 8.1
