"""The machine as `megazero plan --hardware FILE` reads it: what one device can do, made of what was measured."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from megazero.tools.doctor.ranks import NCCL, SHARED, SOCKETS, Measured


@dataclass(frozen=True)
class Link:
    """A link from one device to others: bytes/s, and the seconds that an operation takes at least."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Hardware:
    """One device of a node of like ones; on a CPU a device is one rank on its share of the cores.

    Attributes:
        name: as a person would call it.
        memory_bytes: the device's.
        peak_flops: FLOP/s of a matrix product, by dtype.
        memory_bandwidth: bytes/s, read and written ones counted.
        devices_per_node: how many share a host.
        in_node: between devices of one host.
        cross_node: between hosts; this device's share of the host's network.
        host_link_bandwidth: bytes/s between the device's memory and the host's, one way.
        host_memory_bytes: this device's share of the host's memory.
        launch: seconds of an operation with nothing to do.
        attention: FLOP/s of fused attention over those of a matrix product.
        nccl_channels: as `plan` counts on them, not measured; 0: a CPU, which computes nothing while it sends.
    """

    name: str
    memory_bytes: int
    peak_flops: dict[str, float]
    memory_bandwidth: float
    devices_per_node: int
    in_node: Link
    cross_node: Link
    host_link_bandwidth: float
    host_memory_bytes: int
    launch: float | None = None
    attention: float | None = None
    nccl_channels: int = 24

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        attention = found.pop("attention")
        reached = {} if attention is None else {"attention": attention}
        reached |= {} if self.nccl_channels else {"beside": 0.0}
        optional = {"launch": found.pop("launch"), "reached": reached or None}
        return found | {name: value for name, value in optional.items() if value is not None}

    def as_yaml(self) -> str:
        """Return the file, its units in comments."""
        lines = ["# Measured by `megazero doctor`. Of one device; all devices of the host were busy at once."]
        lines += [f"name: {json.dumps(self.name)}", f"memory_bytes: {self.memory_bytes}"]
        lines += ["peak_flops:  # FLOP/s of a large matrix product"]
        lines += [f"  {dtype}: {rate:.4e}" for dtype, rate in self.peak_flops.items()]
        lines += [f"memory_bandwidth: {self.memory_bandwidth:.4e}  # bytes/s, read and written"]
        lines += [f"devices_per_node: {self.devices_per_node}"]
        for name, link, what in (
            ("in_node", self.in_node, "bytes/s that a device sends to others of its host"),
            ("cross_node", self.cross_node, "bytes/s that a device sends to other hosts, all of them sending"),
        ):
            lines += [f"{name}:", f"  bandwidth: {link.bandwidth:.4e}  # {what}"]
            lines += [f"  latency: {link.latency:.4e}  # seconds of an operation on a few bytes"]
        lines += [f"host_link_bandwidth: {self.host_link_bandwidth:.4e}  # bytes/s to or from the host's memory"]
        lines += [f"host_memory_bytes: {self.host_memory_bytes}  # a device's share"]
        lines += [f"nccl_channels: {self.nccl_channels}  # of a collective in a node: not measured; 0: a CPU"]
        if self.launch is not None:
            lines += [f"launch: {self.launch:.4e}  # seconds of an operation with nothing to do"]
        if self.attention is not None or not self.nccl_channels:
            lines.append("reached:")
        if self.attention is not None:
            lines.append(f"  attention: {self.attention:.4f}  # FLOP/s of fused attention, of a product's")
        if not self.nccl_channels:
            lines.append("  beside: 0.0  # of the time that a CPU computes, in which bytes move without it")
        return "\n".join(lines) + "\n"


def hardware_of(
    name: str, messages: Measured, devices: Measured, memory: int, network: float | None, *, on_gpus: bool
) -> Hardware | str:
    """Return a device of this machine, or a text of what was not measured of it.

    Two hosts cannot be measured on one. Between hosts a device has its share of the network, where that says how fast
    it is, and ranks on a CPU never more than sockets of one host; the latency is that of sockets.

    Args:
        messages: between ranks on the CPU.
        devices: what they compute.
        memory: bytes of the host that the job may use.
        network: bytes/s of the host's network, if it is known.
    """
    values, size = devices.values, devices.size
    peaks = {name.removeprefix("matmul "): rate for name, rate in values.items() if name.startswith("matmul ")}
    far = link_of(messages, SOCKETS)
    near = link_of(devices, NCCL) or link_of(messages, SHARED) or far
    copy = values.get("memory copy")
    host_copy = values.get("host copy") if on_gpus else copy
    own_memory = values.get("memory") if on_gpus else memory // size
    if not (peaks and copy and host_copy and own_memory and near and far):
        known = {"matmul": peaks, "memory copy": copy, "host copy": host_copy, "messages between ranks": far}
        return f"not measured: {', '.join(what for what, value in known.items() if not value)}"
    bandwidth = network / size if network else far.bandwidth
    cross = Link(bandwidth if on_gpus else min(bandwidth, far.bandwidth), far.latency)
    attention = [
        min(1.0, rate / peaks[dtype])
        for what, rate in values.items()
        if (dtype := what.removeprefix("attention ")) != what and dtype in peaks
    ]
    return Hardware(
        *(name, int(own_memory), peaks, copy, size, near, cross, host_copy, memory // size),
        launch=values.get("launch latency"),
        attention=next(iter(attention), None),
        nccl_channels=Hardware.nccl_channels if on_gpus else 0,
    )


def link_of(measured: Measured, road: str) -> Link | None:
    """Return the bandwidth of both collectives together, the latency of the slower one; None: not measured."""
    bandwidth = measured.values.get(f"{road} bandwidth")
    latencies = [value for name, value in measured.values.items() if name.startswith(road) and name.endswith("latency")]
    return Link(bandwidth, max(latencies)) if bandwidth else None
