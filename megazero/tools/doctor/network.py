"""Find how ranks of several hosts can reach each other: network interfaces with their rates, and RDMA ports."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path

from megazero.launcher.environment import interfaces_named
from megazero.launcher.store import address_of
from megazero.tools.doctor.finding import Finding, amount

_NET, _RDMA = Path("/sys/class/net"), Path("/sys/class/infiniband")
_RATE = re.compile(r"([\d.]+) Gb/sec")


def interfaces() -> Iterator[Finding]:
    """Yield the interfaces with an address, and which of them gloo and NCCL are set to use."""
    outside = 0
    for _, name in socket.if_nameindex():
        try:
            address = address_of(name)
        except OSError:  # it has none
            continue
        rate = interface_rate(name)
        outside += not address.startswith("127.")
        values = {"bandwidth": rate} if rate else {}
        text = f"{address}, {amount(rate, 'B/s') if rate else 'rate unknown'}"
        yield Finding(f"interface {name}", text, values=values)
    named = interfaces_named()
    if named:
        yield Finding("interface chosen", ", ".join(f"{name}={value}" for name, value in named.items()))
    elif outside > 1:
        do = "between hosts set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the fast one"
        yield Finding("interface chosen", f"none of {outside}", "absent", do)


def rdma(root: Path = _RDMA) -> Iterator[Finding]:
    ports = rdma_ports(root)
    if not ports:
        yield Finding("RDMA", "no active port; other hosts are reached by TCP")
    for name, rate in ports.items():
        yield Finding(f"RDMA {name}", amount(rate, "B/s"), values={"bandwidth": rate})


def network_rate() -> float | None:
    """Return the bytes/s to other hosts: of all active RDMA ports, else of the fastest interface; None: not known."""
    ports = rdma_ports(_RDMA)
    if ports:
        return sum(ports.values())
    rates = [interface_rate(name) for _, name in socket.if_nameindex() if not name.startswith("lo")]
    return max((rate for rate in rates if rate), default=None)


def interface_rate(name: str, root: Path = _NET) -> float | None:
    """Return the bytes/s of an interface; None where it does not say (loopback, most virtual ones)."""
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
