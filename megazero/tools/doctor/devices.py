"""Find the GPUs that torch can compute on, and how fast ranks of several hosts reach each other.

The search for GPUs touches them, so it must come after all ranks have been forked.
"""

import re
import shutil
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from megazero.launcher.environment import interfaces_named
from megazero.plan.hardware import peak_flops
from megazero.tools.doctor.finding import Finding, amount

_DRIVER, _NET, _RDMA = Path("/proc/driver/nvidia/version"), Path("/sys/class/net"), Path("/sys/class/infiniband")
_RATE = re.compile(r"([\d.]+) Gb/sec")


def gpus() -> Iterator[Finding]:
    """Yield each GPU with its memory and its data sheet's FLOP/s, or why there is none."""
    with warnings.catch_warnings(record=True) as caught:  # the reason if there is none
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable and (_DRIVER.exists() or shutil.which("nvidia-smi")):
        why = " ".join(str(caught[-1].message).split())[:160] if caught else f"torch {torch.__version__} sees none"
        do = "use a build of torch for this driver's CUDA: pip install torch==..."
        yield Finding("GPUs", f"there is an NVIDIA driver, but {why}", "absent", do)
    elif not usable:
        yield Finding("GPUs", "none; each rank computes on its share of the CPU")
    for index in range(torch.cuda.device_count() if usable else 0):
        properties = torch.cuda.get_device_properties(index)
        sheet = peak_flops(properties.name, "bf16") or peak_flops(properties.name, "fp16")
        known = f"data sheet {amount(sheet, 'FLOP/s')} in 16 bits" if sheet else "not in the table of data sheets"
        text = f"{properties.name}, {amount(properties.total_memory, 'B')}, "
        text += f"compute capability {properties.major}.{properties.minor}; {known}"
        values = {"memory_bytes": properties.total_memory} | ({"sheet_flops": sheet} if sheet else {})
        yield Finding(f"GPU {index}", text, values=values)


def network() -> Iterator[Finding]:
    """Yield the rate to other hosts, and the interfaces that gloo and NCCL are set to use."""
    rate, named = network_rate(), ", ".join(f"{name}={value}" for name, value in interfaces_named().items())
    text = f"{amount(rate, 'B/s') if rate else 'rate unknown'}; {named or 'no interface chosen (NCCL_SOCKET_IFNAME)'}"
    yield Finding("to other hosts", text, values={"bandwidth": rate} if rate else {})


def network_rate() -> float | None:
    """Return the bytes/s to other hosts: of all active RDMA ports, else of the fastest interface; None: not known."""
    if ports := rdma_ports(_RDMA):
        return sum(ports.values())
    rates = [interface_rate(name) for _, name in socket.if_nameindex() if not name.startswith("lo")]
    return max((rate for rate in rates if rate), default=None)


def interface_rate(name: str, root: Path = _NET) -> float | None:
    """Return the bytes/s of an interface; None where the system has no figure (loopback, most virtual ones)."""
    try:
        megabits = int((root / name / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits * 1e6 / 8 if megabits > 0 else None


def rdma_ports(root: Path) -> dict[str, float]:
    """Return the active ports and their rates in bytes/s, from "4: ACTIVE" and "200 Gb/sec (4X HDR)" in sysfs."""
    found = {}
    for port in sorted(root.glob("*/ports/*")):
        rate = _RATE.match((port / "rate").read_text())
        if "ACTIVE" in (port / "state").read_text() and rate:
            found[f"{port.parents[1].name}/{port.name}"] = float(rate[1]) * 1e9 / 8
    return found
