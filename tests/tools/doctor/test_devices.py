"""GPUs as torch tells of them, a driver whose GPUs torch cannot use, and rates as the kernel writes them."""

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from megazero.launcher.environment import interfaces_named
from megazero.tools.doctor import devices
from megazero.tools.doctor.devices import gpus, interface_rate, network, network_rate, rdma_ports


def port(root: Path, name: str, state: str, rate: str) -> None:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "state").write_text(state + "\n")
    (folder / "rate").write_text(rate + "\n")


def test_active_ports_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    port(tmp_path, "mlx5_0/ports/1", "4: ACTIVE", "200 Gb/sec (4X HDR)")
    port(tmp_path, "mlx5_1/ports/1", "4: ACTIVE", "2.5 Gb/sec (1X SDR)")
    port(tmp_path, "mlx5_2/ports/1", "1: DOWN", "400 Gb/sec (4X NDR)")
    assert rdma_ports(tmp_path) == {"mlx5_0/1": 25e9, "mlx5_1/1": 0.3125e9}
    assert rdma_ports(tmp_path / "none") == {}
    monkeypatch.setattr(devices, "_RDMA", tmp_path)
    assert network_rate() == 25.3125e9


@pytest.mark.parametrize(("text", "rate"), [("10000\n", 1.25e9), ("-1\n", None), ("", None), (None, None)])
def test_rate_of_an_interface(tmp_path: Path, text: str | None, rate: float | None):
    (tmp_path / "eth0").mkdir()
    if text is not None:
        (tmp_path / "eth0/speed").write_text(text)
    assert interface_rate("eth0", tmp_path) == rate


def test_the_network_has_a_rate_and_a_choice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "rdma_ports", lambda root: {"mlx5_0/1": 25e9})
    monkeypatch.setattr(devices, "interfaces_named", dict)
    (found,) = network()
    assert found.text.startswith("25 GB/s; no interface chosen") and found.values == {"bandwidth": 25e9}
    monkeypatch.setattr(devices, "rdma_ports", lambda root: {})
    monkeypatch.setattr(devices, "interface_rate", lambda name: None)
    monkeypatch.setattr(devices, "interfaces_named", lambda: {"GLOO_SOCKET_IFNAME": "ib0"})
    assert [each.text for each in network()] == ["rate unknown; GLOO_SOCKET_IFNAME=ib0"]


def test_variables_that_name_an_interface():
    assert interfaces_named({"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "", "OTHER": "x"}) == {
        "NCCL_SOCKET_IFNAME": "ib0"
    }


def test_driver_without_a_torch_that_can_use_it(monkeypatch: pytest.MonkeyPatch):
    def too_old() -> bool:
        warnings.warn("CUDA initialization: the driver\nis too old", UserWarning, stacklevel=1)
        return False

    monkeypatch.setattr(devices.torch.cuda, "is_available", too_old)
    monkeypatch.setattr(devices.shutil, "which", lambda name: f"/usr/bin/{name}")
    (finding,) = gpus()
    assert finding.state == "absent" and "pip install torch==" in finding.do
    assert finding.text == "there is an NVIDIA driver, but CUDA initialization: the driver is too old"


def test_each_gpu_with_its_data_sheet(monkeypatch: pytest.MonkeyPatch):
    cards = [
        SimpleNamespace(name="NVIDIA H200", total_memory=150_000_000_000, major=9, minor=0),
        SimpleNamespace(name="NVIDIA GeForce RTX 4090", total_memory=24_000_000_000, major=8, minor=9),
    ]
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices.torch.cuda, "get_device_properties", lambda index: cards[index])
    first, second = gpus()
    assert first.text == "NVIDIA H200, 150 GB, compute capability 9.0; data sheet 989 TFLOP/s in 16 bits"
    assert first.values == {"memory_bytes": 150_000_000_000, "sheet_flops": 989e12}
    assert second.name == "GPU 1" and second.text.endswith("not in the table of data sheets")
