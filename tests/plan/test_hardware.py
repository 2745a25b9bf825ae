"""The table of peaks: names as drivers spell them, and nothing for names that are only similar."""

import pytest

from megazero.plan.hardware import DEVICES, peak_flops
from megazero.plan.machines import MACHINES


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
        ("Tesla V100-SXM3-32GB-H", "fp16", 125e12),
        ("Tesla V100-PCIE-16GB", "fp16", 112e12),
        ("Tesla V100S-PCIE-32GB", "fp16", 130e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("A100-SXM4-40GB", "fp16", 312e12),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "bf16", 835e12),
        ("NVIDIA GH200 480GB", "bf16", 989e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H200 NVL", "fp16", 835e12),
        ("NVIDIA B200", "bf16", 2250e12),
        ("NVIDIA GB200", "bf16", 2500e12),
    ],
)
def test_names_of_drivers(name: str, dtype: str, peak: float):
    assert peak_flops(name, dtype) == peak


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("", "fp32"),
        ("cpu", "fp32"),
        ("Intel(R) Xeon(R) Platinum 8480+", "bf16"),
        ("NVIDIA A800-SXM4-80GB", "bf16"),
        ("NVIDIA H20", "bf16"),
        ("NVIDIA GeForce RTX 4090", "bf16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),
        ("Tesla V100-SXM2-32GB", "bf16"),  # no bf16 matrix units
        ("NVIDIA H200", "int8"),
    ],
)
def test_unknown_is_none(name: str, dtype: str):
    assert peak_flops(name, dtype) is None


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device["pattern"])
def test_rows_are_ordered_by_precision_and_have_a_source(device):
    peaks = device["tflops"]
    assert peaks["fp16"] == peaks.get("bf16", peaks["fp16"]) > peaks["fp32"] >= peaks["fp64"] > 0
    assert "data sheet" in device["source"]


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        ("v100-32gb", "Tesla V100-SXM3-32GB"),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB"),
        ("h100-80gb", "NVIDIA H100 80GB HBM3"),
        ("h200", "NVIDIA H200"),
        ("b200", "NVIDIA B200"),
    ],
)
def test_machines_have_the_peaks_of_their_devices(machine: str, name: str):
    peaks = {dtype: peak_flops(name, dtype) for dtype in ("bf16", "fp16", "fp32", "fp64")}
    assert MACHINES[machine].peak_flops == {dtype: peak for dtype, peak in peaks.items() if peak is not None}
