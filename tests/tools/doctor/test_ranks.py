"""Real ranks that measure; what they have is kept whatever happens to one of them."""

import os
import signal

import pytest
import torch

from megazero.comm.transport.shared_memory import supported
from megazero.tools.doctor import ranks, speed
from megazero.tools.doctor.hardware import hardware_of
from megazero.tools.doctor.ranks import NCCL, SHARED, SOCKETS, Measured

ROOM = 1 << 28  # bytes
COMPUTED = {"threads", "matmul fp32", "attention fp32", "launch", "memory copy"}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much is measured as shows that it is."""
    monkeypatch.setattr(ranks, "DTYPES", {"fp32": torch.float32})
    monkeypatch.setattr(ranks, "_MANY", 20)
    monkeypatch.setattr(ranks, "_MESSAGE", 1 << 20)
    monkeypatch.setattr(speed, "_LARGEST", {"cpu": 256})
    monkeypatch.setattr(speed, "_SECONDS", 0.02)
    monkeypatch.setattr(speed, "_ATTENTION", {"cpu": (1, 2, 64, 16)})


def test_all_roads_are_measured():
    _, found = ranks.measure(2, ROOM, on_gpus=False)
    assert (found.size, found.broken) == (2, "") and min(min(one.values()) for one in found.values.values()) > 0
    roads = (SHARED, SOCKETS) if supported() else (SOCKETS,)
    assert set(found.values) == {f"{road} {op}" for road in roads for op in ranks._OPERATIONS} | {*roads} | COMPUTED
    for road in roads:
        both = [found.values[f"{road} {operation}"] for operation in ranks._OPERATIONS]
        rates = [one["bandwidth"] for one in both]
        assert min(rates) * 0.5 <= found.values[road]["bandwidth"] <= max(rates) * 2
        assert found.values[road]["latency"] >= min(one["latency"] for one in both)


def test_one_rank_computes_and_two_talk():
    messages, devices = ranks.measure(1, ROOM, on_gpus=False)
    assert set(devices.values) == COMPUTED and devices.size == 1
    assert SOCKETS in messages.values and "matmul fp32" not in messages.values


def test_what_one_device_cannot_do_is_a_reason(monkeypatch: pytest.MonkeyPatch):
    def refuse(dtype: torch.dtype, device: torch.device) -> float:
        raise RuntimeError(f'"addmm" not implemented for {dtype}')

    monkeypatch.setattr(ranks, "matmul_flops", refuse)
    _, found = ranks.measure(2, ROOM, on_gpus=False)
    assert found.faults == {"matmul fp32": 'RuntimeError: "addmm" not implemented for torch.float32'}
    assert "memory copy" in found.values and SOCKETS in found.values


def test_rank_that_is_killed_leaves_what_was_measured(monkeypatch: pytest.MonkeyPatch, capfd):
    parent = os.getpid()

    def die(size: int, device: torch.device) -> float:
        assert os.getpid() != parent
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    monkeypatch.setattr(ranks, "copy_bandwidth", die)
    _, found = ranks.measure(2, ROOM, on_gpus=False)
    assert "matmul fp32" in found.values and SOCKETS not in found.values
    assert found.broken.startswith("MZ-310") and "SIGKILL" in found.broken
    assert capfd.readouterr().err == found.broken + "\n"


def test_rank_that_cannot_begin_says_why(monkeypatch: pytest.MonkeyPatch, capfd):
    def nowhere(*_: object, **__: object) -> None:
        raise StopIteration("no loopback")

    monkeypatch.setattr(ranks, "connect", nowhere)
    _, found = ranks.measure(2, ROOM, on_gpus=False)
    assert found.values == {} and found.broken.startswith("MZ-340") and "no loopback" in found.broken
    assert "Traceback" not in capfd.readouterr().err


def test_the_slowest_rank_counts():
    first = [("copy", {"bandwidth": 3.0, "latency": 1.0}, ""), ("matmul fp16", {}, "why"), ("late", {"flops": 1.0}, "")]
    second = [("copy", {"bandwidth": 2.0, "latency": 4.0}, ""), ("matmul fp16", {"flops": 5.0}, "")]
    found = ranks._slowest([first, second], "gone")
    assert found.values == {"copy": {"bandwidth": 2.0, "latency": 4.0}}
    assert found.faults == {"matmul fp16": "why", "late": "gone"}


FAST, SLOW = {"bandwidth": 4e9, "latency": 2e-5}, {"bandwidth": 1e9, "latency": 1e-4}
HOST = {SHARED: FAST, SOCKETS: SLOW}
CPU = Measured(2, HOST | {"matmul fp32": {"flops": 1e10}, "memory copy": {"bandwidth": 2e10}}, {})
MORE = Measured(2, CPU.values | {"attention fp32": {"flops": 4e9}, "launch": {"latency": 3e-6}}, {})
GPU = {"matmul bf16": {"flops": 8e14}, "memory copy": {"bandwidth": 4e12}, "host copy": {"bandwidth": 5e10}}
GPU |= {"memory": {"bytes": 8e10}}
PAIR = {NCCL: {"bandwidth": 3e11, "latency": 3e-5}}
OF_CPU = {
    "name": "m",
    "memory_bytes": 500,
    "peak_flops": {"fp32": 1e10},
    "memory_bandwidth": 2e10,
    "devices_per_node": 2,
    "in_node": FAST,
    "cross_node": SLOW,
    "host_link_bandwidth": 2e10,
    "host_memory_bytes": 500,
    "nccl_channels": 0,
    "reached": {"beside": 0.0},
}
OF_GPU = OF_CPU | {
    "memory_bytes": 80_000_000_000,
    "peak_flops": {"bf16": 8e14},
    "memory_bandwidth": 4e12,
    "host_link_bandwidth": 5e10,
    "nccl_channels": 24,
    "reached": None,
}
ATTENTION = {"launch": 3e-6, "reached": {"attention": 0.4, "beside": 0.0}}
NVLINK = {"in_node": {"bandwidth": 3e11, "latency": 3e-5}, "cross_node": {"bandwidth": 2.5e10, "latency": 1e-4}}


@pytest.mark.parametrize(
    ("devices", "network", "on_gpus", "expected"),
    [
        (CPU, None, False, OF_CPU),
        (MORE, None, False, OF_CPU | ATTENTION),
        (CPU, 1e9, False, OF_CPU | {"cross_node": SLOW | {"bandwidth": 5e8}}),
        (CPU, 1e12, False, OF_CPU),
        (Measured(1, GPU, {}), None, True, OF_GPU | {"devices_per_node": 1, "host_memory_bytes": 1000}),
        (Measured(2, GPU | PAIR, {}), 5e10, True, OF_GPU | NVLINK),
    ],
    ids=["cpu", "cpu-and-attention", "slow-network", "fast-network", "one-gpu", "two-gpus"],
)
def test_hardware_of_what_was_measured(devices: Measured, network, on_gpus: bool, expected: dict):
    found = hardware_of("m", CPU, devices, 1000, network, on_gpus=on_gpus)
    assert found == {field: value for field, value in expected.items() if value is not None}


def test_what_lacks_is_named():
    assert hardware_of("m", CPU, Measured(1, {}, {}), 1000, None, on_gpus=True) == (
        "not measured: matmul, memory copy, host copy"
    )
