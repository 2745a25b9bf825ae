"""GPUs as torch tells of them, and a driver whose GPUs torch cannot use."""

import warnings
from types import SimpleNamespace

import pytest

from megazero.tools.doctor import gpus as probe
from megazero.tools.doctor.gpus import gpus


def test_driver_without_a_torch_that_can_use_it(monkeypatch: pytest.MonkeyPatch):
    def too_old() -> bool:
        warnings.warn("CUDA initialization: the driver\nis too old", UserWarning, stacklevel=1)
        return False

    monkeypatch.setattr(probe.torch.cuda, "is_available", too_old)
    monkeypatch.setattr(probe.shutil, "which", lambda name: f"/usr/bin/{name}")
    (finding,) = gpus()
    assert finding.state == "absent" and "make setup TORCH=" in finding.do
    assert finding.text == "there is an NVIDIA driver, but CUDA initialization: the driver is too old"


def test_each_gpu_with_its_data_sheet(monkeypatch: pytest.MonkeyPatch):
    cards = [
        SimpleNamespace(name="NVIDIA H200", total_memory=150_000_000_000, major=9, minor=0),
        SimpleNamespace(name="NVIDIA GeForce RTX 4090", total_memory=24_000_000_000, major=8, minor=9),
    ]
    monkeypatch.setattr(probe.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(probe.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(probe.torch.cuda, "get_device_properties", lambda index: cards[index])
    first, second = gpus()
    assert first.text == "NVIDIA H200, 150 GB, compute capability 9.0; data sheet 989 TFLOP/s in 16 bits"
    assert first.values == {"memory_bytes": 150_000_000_000, "sheet_flops": 989e12}
    assert second.name == "GPU 1" and second.text.endswith("not in our table of data sheets")
