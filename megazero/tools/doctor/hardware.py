"""Convert measurements to findings, and to the file of `megazero plan --hardware FILE`: one device of equal ones.

On a CPU a device is one rank on its share of the cores. The fields are those of `planning/machine_file.py`.
"""

import json
from collections.abc import Iterator
from typing import Any

from megazero.tools.doctor.finding import Finding, amount, duration
from megazero.tools.doctor.ranks import NCCL, SHARED, SOCKETS, Measured

NCCL_CHANNELS = 24
_UNITS = {"flops": "FLOP/s", "bandwidth": "B/s"}


def hardware_of(
    name: str, messages: Measured, devices: Measured, memory: int, network: float | None, *, on_gpus: bool
) -> dict[str, Any] | str:
    """Return the fields of a device of this machine, or a text that names what was not measured.

    Links between hosts cannot be measured on one host. Their bandwidth is a device's share of the network's rate, if
    that is known, and for ranks on a CPU at most that of sockets on one host; their latency is that of sockets.

    Args:
        messages: measurements between ranks on the CPU.
        devices: measurements of the devices.
        memory: bytes of the host that the job may use.
        network: bytes/s of the host's network, if it is known.
    """
    size, rates = devices.size, {name: next(iter(figures.values())) for name, figures in devices.values.items()}
    peaks = {name.removeprefix("matmul "): rate for name, rate in rates.items() if name.startswith("matmul ")}
    far = messages.values.get(SOCKETS)
    near = devices.values.get(NCCL) or messages.values.get(SHARED) or far
    copy = rates.get("memory copy")
    host_copy = rates.get("host copy") if on_gpus else copy
    own_memory = rates.get("memory") if on_gpus else memory // size
    if not (peaks and copy and host_copy and own_memory and near and far):
        known = {"matmul": peaks, "memory copy": copy, "host copy": host_copy, "messages between ranks": far}
        return f"not measured: {', '.join(what for what, value in known.items() if not value)}"
    bandwidth = network / size if network else far["bandwidth"]
    shares = [min(1.0, rates[f"attention {d}"] / peak) for d, peak in peaks.items() if f"attention {d}" in rates]
    reached = {"attention": shares[0]} if shares else {}
    found = {
        "name": name,
        "memory_bytes": int(own_memory),
        "peak_flops": peaks,
        "memory_bandwidth": copy,
        "devices_per_node": size,
        "in_node": near,
        "cross_node": far | {"bandwidth": bandwidth if on_gpus else min(bandwidth, far["bandwidth"])},
        "host_link_bandwidth": host_copy,
        "host_memory_bytes": memory // size,
        "nccl_channels": NCCL_CHANNELS if on_gpus else 0,
        "launch": rates.get("launch"),
        "reached": reached | ({} if on_gpus else {"beside": 0.0}),
    }
    return {field: value for field, value in found.items() if value or field == "nccl_channels"}


def findings_of(measured: Measured) -> Iterator[Finding]:
    """Yield the measurements, or why they failed. A transport has a line for each of its collectives."""
    threads = measured.values.get("threads", {}).get("count")
    each = f"{measured.size} at once" + (f", {threads_of(threads)} each" if threads else "")
    for name, figures in measured.values.items():
        if name not in ("threads", "memory", NCCL, SHARED, SOCKETS):
            words = (
                f"{of} {duration(value)}" if of == "latency" else amount(value, _UNITS[of])
                for of, value in figures.items()
            )
            yield Finding(name, f"{', '.join(words)} ({each})", values=figures)
    for name, why in measured.faults.items():
        do = "sockets are used instead, which are slower" if name == SHARED else ""
        yield Finding(name, why, "absent" if do else "unknown", do)


def threads_of(count: float) -> str:
    """Return a number of threads as text."""
    return f"{count:.0f} thread{'s' * (count > 1)}"


def as_yaml(hardware: dict[str, Any]) -> str:
    """Return the file's text, a field on each line. Numbers and mappings in JSON are valid YAML."""
    lines = ["# Measured by `megazero doctor`. Per device, with all devices of the host busy at once."]
    lines += [f"{field}: {json.dumps(_rounded(value))}" for field, value in hardware.items()]
    return "\n".join(lines) + "\n"


def _rounded(value: Any) -> Any:
    """Return a value with its floats at five digits."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value
