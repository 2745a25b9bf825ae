"""Rates as the kernel writes them."""

from pathlib import Path

import pytest

from megazero.launcher.environment import interfaces_named
from megazero.tools.doctor import network
from megazero.tools.doctor.network import interface_rate, interfaces, network_rate, rdma, rdma_ports


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
    assert [finding.text for finding in rdma(tmp_path)] == ["25 GB/s", "312 MB/s"]
    (none,) = rdma(tmp_path / "none")
    assert none.text.startswith("no active port")
    monkeypatch.setattr(network, "_RDMA", tmp_path)
    assert network_rate() == 25.3125e9


@pytest.mark.parametrize(("text", "rate"), [("10000\n", 1.25e9), ("-1\n", None), ("", None), (None, None)])
def test_rate_of_an_interface(tmp_path: Path, text: str | None, rate: float | None):
    (tmp_path / "eth0").mkdir()
    if text is not None:
        (tmp_path / "eth0/speed").write_text(text)
    assert interface_rate("eth0", tmp_path) == rate


def test_several_interfaces_want_a_choice(monkeypatch: pytest.MonkeyPatch):
    def address(name: str) -> str:
        if name == "down0":
            raise OSError(99, "Cannot assign requested address")
        return {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}[name]

    monkeypatch.setattr(network, "address_of", address)
    names = ["lo", "eth0", "ib0", "down0"]
    monkeypatch.setattr(network.socket, "if_nameindex", lambda: list(enumerate(names)))
    monkeypatch.setattr(network, "interfaces_named", dict)
    found = list(interfaces())
    assert [finding.name for finding in found] == [f"interface {name}" for name in ("lo", "eth0", "ib0", "chosen")]
    assert found[-1].state == "absent" and "NCCL_SOCKET_IFNAME" in found[-1].do
    monkeypatch.setattr(network, "interfaces_named", lambda: {"GLOO_SOCKET_IFNAME": "ib0"})
    assert list(interfaces())[-1].text == "GLOO_SOCKET_IFNAME=ib0"


def test_variables_that_name_an_interface():
    assert interfaces_named({"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "", "OTHER": "x"}) == {
        "NCCL_SOCKET_IFNAME": "ib0"
    }
