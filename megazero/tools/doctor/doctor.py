"""`megazero doctor`: what this machine has, how fast it is, what is missing and how to get it.

A table of checks, each of which yields its lines; a check that fails yields a line with the reason. Ranks measure
before the checks run, because they must be forked before anything touches a GPU or computes.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.files import replace_file
from megazero.base.machine import free_memory, job_memory
from megazero.tools.doctor import host, software
from megazero.tools.doctor.finding import Finding, examine, reason

_MARKS = {"there": " ", "absent": "-", "unknown": "?", "missing": "!"}
_COLUMN = 26
BUSY = "this machine is busy: the measured speeds are too low; do not plan with them"
_RANKS = 2  # ranks that measure where there are no GPUs and the user gives no number
_Checks = dict[str, Callable[[], Iterable[Finding]]]
_NEEDED = {"torch", "packages", "disk"}  # checks that training needs to pass


@dataclass(frozen=True)
class Diagnosis:
    """The findings about a machine.

    Attributes:
        parts: findings by part of the machine.
        hardware: the fields of the hardware file, or the reason why there are none.
    """

    parts: dict[str, list[Finding]]
    hardware: dict[str, Any] | str

    @property
    def missing(self) -> list[str]:
        """Return the names of missing things that training needs."""
        return [finding.name for findings in self.parts.values() for finding in findings if finding.state == "missing"]

    @property
    def is_busy(self) -> bool:
        """Return whether other work ran during the measurements."""
        return any(finding.values.get("busy") for findings in self.parts.values() for finding in findings)


def diagnose(run_folder: Path, nproc: int | None) -> Diagnosis:
    """Examine everything; this takes some ten seconds.

    Args:
        run_folder: the folder where runs will be written.
        nproc: ranks that measure at once; None: one per GPU, else two.

    Raises:
        UserError: 106, more ranks than GPUs.
    """
    load = examine("load", host.load)  # read before the measurements add to it
    torch_lines = examine("torch", software.torch_backends, needed=True)
    works = all(finding.state != "missing" for finding in torch_lines)
    speeds, hardware = _measured(nproc) if works else ([], "torch does not work here")
    machine: _Checks = {"system": host.system, "processor": host.processor, "load": lambda: load}
    machine |= {"memory": host.memory, "limits": host.limits}
    programs: _Checks = {"torch": lambda: torch_lines, "packages": software.packages, "g++": software.cpp_compiler}
    programs |= {"nvcc": software.cuda_compiler, "apex": software.apex}
    disk: _Checks = {"disk": partial(host.disk, run_folder)}
    checks = {"machine": machine, "software": programs}
    if works:
        from megazero.tools.doctor import devices

        checks["devices"] = {"GPUs": devices.gpus, "speeds": lambda: speeds}
        checks["network"] = {"network": devices.network}
        disk["direct I/O"] = partial(host.direct, run_folder)
    parts = {
        part: [found for name, check in of.items() for found in examine(name, check, needed=name in _NEEDED)]
        for part, of in (checks | {"disk": disk}).items()
    }
    return Diagnosis(parts, hardware)


def time_kernels(config: str, overrides: list[str]) -> dict[str, list[Finding]]:
    """Time the kernels at the sizes of a config on this machine's first GPU, else on its CPU.

    Raises:
        UserError: the config is refused.
    """
    from megazero.config.file import load
    from megazero.tools.planning.micro_batch import sized

    loaded = load(config, overrides)
    loaded = sized(loaded, loaded.parallel.tensor * loaded.parallel.pipeline)
    with doing("loading torch"):
        import torch

        from megazero.tools.doctor.kernels import kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with doing(f"timing kernels on this {device.type}"):
        found = list(kernels(loaded, device))
    return {f"kernels in {loaded.precision.dtype} on this {device.type}": found}


def as_text(found: Diagnosis) -> str:
    """Return a heading for each part, a line for each finding, and the names in `missing`."""
    missing = f"missing: {', '.join(found.missing)}" if found.missing else "nothing that training needs is missing"
    return "\n".join([*lines_of(found.parts), "", missing, *[BUSY] * found.is_busy])


def lines_of(parts: dict[str, list[Finding]]) -> list[str]:
    """Return a heading for each part and a line for each finding."""
    lines = []
    for part, findings in parts.items():
        lines.append(part)
        for finding in findings:
            do = f"; {finding.do}" if finding.do else ""
            lines.append(f"{_MARKS[finding.state]} {finding.name:<{_COLUMN}} {finding.text}{do}")
    return lines


def as_json(found: Diagnosis) -> dict[str, Any]:
    """Return `parts`, `missing`, `hardware` (the fields of the file; null if it could not be measured)."""
    hardware = None if isinstance(found.hardware, str) else found.hardware
    return {"parts": json_of(found.parts), "missing": found.missing, "hardware": hardware}


def json_of(parts: dict[str, list[Finding]]) -> dict[str, Any]:
    """Return the fields of each finding, by part."""
    return {part: [asdict(finding) for finding in findings] for part, findings in parts.items()}


def write(found: Diagnosis, path: Path) -> None:
    """Write the hardware file.

    Raises:
        UserError: 340, it was not measured; 405, it cannot be written.
    """
    if isinstance(found.hardware, str):
        raise UserError(340, f"{path} is not written: {found.hardware}", "see the output of doctor", where="doctor")
    from megazero.tools.doctor.hardware import as_yaml

    try:
        replace_file(path, as_yaml(found.hardware).encode())
    except OSError as error:
        raise UserError(405, f"{path}: {error.strerror}", "give another path to --write", where="doctor") from None


def _measured(nproc: int | None) -> tuple[list[Finding], dict[str, Any] | str]:
    """Return the measurements of local ranks, as lines and as hardware."""
    with doing("loading torch"):
        import torch

        from megazero.launcher.environment import local_size
        from megazero.tools.doctor import ranks
        from megazero.tools.doctor.devices import network_rate
        from megazero.tools.doctor.hardware import findings_of, hardware_of, threads_of

    with warnings.catch_warnings():  # about a missing driver, which the line about GPUs reports
        warnings.simplefilter("ignore")
        size = local_size(nproc, tensor=_RANKS, pipeline=1)
        on_gpus = torch.cuda.device_count() > 0  # does not touch them
        try:
            with doing(f"measuring what {size} rank{'s' * (size > 1)} compute and send"):
                messages, devices = ranks.measure(size, free_memory(), on_gpus=on_gpus)
        except Exception as error:  # an unusual machine: the other checks go on
            return [_broken(reason(error))], "ranks cannot be started"
        lines = [_broken(why) for why in dict.fromkeys((messages.broken, devices.broken)) if why]
        lines += [found for one in (devices, messages)[: 1 + (messages is not devices)] for found in findings_of(one)]
        threads = threads_of(devices.values.get("threads", {"count": 1})["count"])
        name = torch.cuda.get_device_name(0) if on_gpus else f"{host.processor_name()}, {threads}"
        return lines, hardware_of(name, messages, devices, job_memory(), network_rate(), on_gpus=on_gpus)


def _broken(why: str) -> Finding:
    return Finding("local ranks", why, "missing", "runs of several ranks need it")
