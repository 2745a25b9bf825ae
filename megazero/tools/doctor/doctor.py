"""`megazero doctor`: what this machine has, how fast it is, what is missing and how to get it.

Every probe (of this room) gives its lines, and one that fails gives a line with the reason. The order in which they run
is not the one in which they are shown: ranks are forked before anything touches a GPU or computes.
"""

import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.files import replace_file
from megazero.base.machine import free_memory, share
from megazero.base.terminal import wrapped
from megazero.tools.doctor import host, software
from megazero.tools.doctor.finding import Finding, amount, duration, examine, reason

if TYPE_CHECKING:
    from megazero.tools.doctor.hardware import Hardware
    from megazero.tools.doctor.ranks import Measured

_MARKS = {"there": " ", "absent": "-", "unknown": "?", "missing": "!"}
_COLUMN = 26
BUSY = "this machine is busy: the speeds above are lower than it is when quiet; do not plan with them"
_RANKS = 2  # that measure, where neither a GPU nor the user says how many


@dataclass(frozen=True)
class Diagnosis:
    """The findings about a machine.

    Attributes:
        parts: findings by part of the machine.
        hardware: for the planner; or why there is none.
    """

    parts: dict[str, list[Finding]]
    hardware: "Hardware | str"

    @property
    def missing(self) -> list[str]:
        """Return what training needs and is not there."""
        return [finding.name for finding in self._all() if finding.state == "missing"]

    @property
    def is_busy(self) -> bool:
        """Return whether other work ran while this was measured."""
        return any(finding.name == "load" and finding.values.get("busy") for finding in self._all())

    @property
    def absent(self) -> list[str]:
        return [finding.name for finding in self._all() if finding.state == "absent"]

    def _all(self) -> Iterator[Finding]:
        for findings in self.parts.values():
            yield from findings


def diagnose(run_folder: Path, nproc: int | None) -> Diagnosis:
    """Examine everything; this takes some ten seconds.

    Args:
        run_folder: where runs are to be written.
        nproc: ranks that measure at once; None: one per GPU, else two.

    Raises:
        UserError: 106, more ranks than GPUs.
    """
    parts: dict[str, list[Finding]] = {}
    load = examine("load", host.load)  # before this measures
    torch_lines = examine("torch", software.backends, needed=True)
    works = all(finding.state != "missing" for finding in torch_lines)
    hardware: Hardware | str = "torch does not work here"
    devices: list[Finding] = []
    if works:
        from megazero.launcher.environment import local_size

        with warnings.catch_warnings():  # of a driver that is not there; the line about GPUs says it
            warnings.simplefilter("ignore")
            devices, hardware = _devices(local_size(nproc, tensor=_RANKS, pipeline=1))
    parts["machine"] = [
        *examine("system", host.system),
        *examine("processor", host.processor),
        *load,
        *examine("memory", host.memory),
        *examine("limits", host.limits),
    ]
    parts["software"] = [
        *torch_lines,
        *examine("packages", software.packages, needed=True),
        *examine("g++", software.cpp_compiler),
        *examine("nvcc", software.cuda_compiler),
        *examine("apex", software.apex),
    ]
    if works:
        from megazero.tools.doctor import network
        from megazero.tools.doctor.gpus import gpus

        parts["devices"] = [*examine("GPUs", gpus), *devices]
        parts["network"] = [*examine("interfaces", network.interfaces), *examine("RDMA", network.rdma)]
    parts["disk"] = examine("disk", partial(host.disk, run_folder), needed=True)
    if works:
        parts["disk"] += examine("direct I/O", partial(host.direct, run_folder))
    return Diagnosis(parts, hardware)


def as_text(found: Diagnosis, columns: int | None = None) -> str:
    """Return a line for each finding; longer ones broken at so many columns, None: nowhere."""
    lines = []
    for part, findings in found.parts.items():
        lines.append(part)
        for finding in findings:
            do = f"; {finding.do}" if finding.do else ""
            line = f"{_MARKS[finding.state]} {finding.name:<{_COLUMN}} {finding.text}{do}"
            lines += wrapped(line, columns, "    ")
    last = [f"missing: {', '.join(found.missing)}" if found.missing else "nothing that training needs is missing"]
    last += [f"could be added: {', '.join(found.absent)}"] if found.absent else []
    last += [BUSY] if found.is_busy else []
    lines += ["", *(part for line in last for part in wrapped(line, columns, "    "))]
    return "\n".join(lines)


def as_json(found: Diagnosis) -> dict[str, Any]:
    """Return `parts`, `missing`, `hardware` (as the file has it; null if it could not be measured)."""
    hardware = None if isinstance(found.hardware, str) else found.hardware.as_dict()
    parts = {part: [asdict(finding) for finding in findings] for part, findings in found.parts.items()}
    return {"parts": parts, "missing": found.missing, "hardware": hardware}


def write(found: Diagnosis, path: Path) -> None:
    """Write the hardware file.

    Raises:
        UserError: 340, it was not measured; 405, it cannot be written.
    """
    if isinstance(found.hardware, str):
        raise UserError(340, f"{path} is not written: {found.hardware}", "see what doctor says", where="doctor")
    try:
        replace_file(path, found.hardware.as_yaml().encode())
    except OSError as error:
        raise UserError(405, f"{path}: {error.strerror}", "give another --write", where="doctor") from None


def _devices(size: int) -> "tuple[list[Finding], Hardware | str]":
    """Return what `size` ranks measure, in lines and as hardware."""
    with doing("loading torch"):
        import torch

        from megazero.tools.doctor import ranks
    from megazero.tools.doctor.gpus import gpu_name
    from megazero.tools.doctor.hardware import hardware_of
    from megazero.tools.doctor.network import network_rate

    on_gpus = torch.cuda.device_count() > 0  # does not touch them
    try:
        with doing(f"measuring what {size} rank{'s' * (size > 1)} compute and send"):
            messages, devices = ranks.measure(size, free_memory(), on_gpus=on_gpus)
    except Exception as error:  # an odd machine: the other probes go on
        return [_broken(reason(error))], "ranks cannot be started"
    lines = [_broken(why) for why in dict.fromkeys((messages.broken, devices.broken)) if why]
    lines += [*_speeds(devices), *_messages(messages, devices)]
    try:
        name = gpu_name() if on_gpus else f"{host.processor_name()}, {_threads(devices.values.get('threads', 1))}"
        memory, network = share().memory, network_rate()
        return lines, hardware_of(name, messages, devices, memory, network, on_gpus=on_gpus)
    except Exception as error:
        return lines, reason(error)


def _threads(count: float) -> str:
    return f"{count:.0f} thread{'s' * (count > 1)}"


def _broken(why: str) -> Finding:
    return Finding("local ranks", why, "missing", "runs of several ranks need it")


def _speeds(devices: "Measured") -> Iterator[Finding]:
    """Yield what one device computes and copies."""
    threads = devices.values.get("threads")
    each = f"{devices.size} at once" + (f", {_threads(threads)} each" if threads else "")
    for name, value in devices.values.items():
        if name.startswith(("matmul", "attention")):
            yield Finding(name, f"{amount(value, 'FLOP/s')} ({each})", values={"flops": value})
        elif name.endswith("copy"):
            yield Finding(name, f"{amount(value, 'B/s')} ({each})", values={"bandwidth": value})
        elif name == "launch latency":
            yield Finding("an operation's start", f"{duration(value)} ({each})", values={"latency": value})
    for name, fault in devices.faults.items():
        if name.startswith(("matmul", "attention", "launch")) or name.endswith("copy"):
            yield Finding(name, fault, "unknown")


def _messages(messages: "Measured", devices: "Measured") -> Iterator[Finding]:
    """Yield what goes between local ranks, by transport and operation."""
    found, faults = messages.values | devices.values, messages.faults | devices.faults
    for name in (name for name in found if name.endswith(" bandwidth")):
        if f"{name.removesuffix('bandwidth')}latency" in found:
            road = name.removesuffix(" bandwidth")
            latency = found[f"{road} latency"]
            text = f"{amount(found[name], 'B/s')}, latency {duration(latency)}"
            yield Finding(road, text, values={"bandwidth": found[name], "latency": latency})
    for name in (name for name in faults if name.endswith(" bandwidth")):
        yield Finding(name.removesuffix(" bandwidth"), faults[name], "absent", "sockets do as well, and slower")
