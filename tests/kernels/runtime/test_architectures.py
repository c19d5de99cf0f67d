"""Limits of the architectures, checked by numbers from NVIDIA's occupancy calculator and known kernels."""

import pytest
import torch

from qerl.kernels.runtime.architectures import ARCHITECTURES, TESTED, architecture_name, architecture_of
from qerl.kernels.runtime.nvrtc import launch_attributes


def test_names_have_the_suffix_from_hopper_on():
    assert architecture_name((8, 0)) == "sm_80" and architecture_name((8, 9)) == "sm_89"
    assert architecture_name((9, 0)) == "sm_90a" and architecture_name((12, 0)) == "sm_120a"
    assert set(TESTED) <= set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("name", "kib"), [("sm_80", 163), ("sm_86", 99), ("sm_89", 99), ("sm_90a", 227), ("sm_120a", 99)]
)
def test_a_cta_may_use_what_the_programming_guide_says(name, kib):
    assert ARCHITECTURES[name].shared_bytes == kib * 1024


@pytest.mark.parametrize(
    ("name", "threads", "registers", "shared", "ctas"),
    [
        ("sm_80", 256, 32, 0, 8),  # 2,048 threads
        ("sm_80", 256, 33, 0, 6),  # 40 registers are allocated
        ("sm_86", 256, 32, 0, 6),  # 1,536 threads
        ("sm_86", 32, 32, 0, 16),  # CTAs
        ("sm_89", 32, 32, 0, 24),
        ("sm_86", 128, 128, 49 * 1024, 2),  # shared memory, 50 KB each with the system's
        ("sm_86", 128, 128, 49 * 1024 + 1, 1),
        ("sm_86", 128, 128, 99 * 1024, 1),
        ("sm_86", 128, 128, 99 * 1024 + 1, 0),
        ("sm_90a", 1024, 64, 0, 1),
        ("sm_90a", 1024, 65, 0, 0),  # 72 x 1,024 registers
        ("sm_90a", 32, 256, 0, 0),
        ("sm_90a", 160, 255, 0, 1),  # 5 of 8 warps
        ("sm_90a", 288, 232, 0, 0),  # 9 warps are checked as 12: 71,424 registers
    ],
)
def test_resident_ctas(name, threads, registers, shared, ctas):
    assert ARCHITECTURES[name].resident_ctas(threads, registers, shared) == ctas


def test_an_unknown_card_gets_the_tightest_limits(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (13, 0))
    unknown = architecture_of(torch.device("cuda"))
    assert unknown.name == "sm_130a" and unknown.shared_bytes == 99 * 1024
    assert not unknown.has_wgmma


@pytest.mark.parametrize(("starts_early", "cluster", "names"), [(False, 1, []), (True, 8, ["PROG", "CLUS"])])
def test_a_launch_asks_for_an_early_start_only_where_the_device_has_one(starts_early, cluster, names):
    driver = pytest.importorskip("cuda.bindings.driver")
    attributes = launch_attributes(driver, starts_early, cluster)
    found = [str(attribute.id.name).removeprefix("CU_LAUNCH_ATTRIBUTE_") for attribute in attributes]
    assert [name[:4] for name in found] == names
