"""Report the results of a simulated rank, as text or JSON."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from megazero.base.terminal import WIDEST_TABLE, megabytes
from megazero.comm.grid import Grid
from megazero.comm.ledger import Sent
from megazero.plan.memory import DISK, HOST
from megazero.run.planned import NOT_PLANNED
from megazero.tools.dry_run.dry_run import Simulated, StepRecord
from megazero.tools.dry_run.timeline import MemoryMoment, by_origin

_SHOWN = 8  # origins of the memory that is live at the peak


def as_text(found: Simulated, name: str, device: str) -> str:
    """Return tables: memory at the peak, the step's largest live allocations then, traffic."""
    grid, steady = found.grid, found.steady
    highest, live = steady.timeline.peak_live()
    there = ", ".join(f"{axis} {place['rank']} of {place['size']}" for axis, place in _places(grid).items())
    lines = [f"{name}: rank {grid['world'].rank} of {grid['world'].size} on {device} ({there})", ""]
    lines += _sizes("at the peak of a step", [*_sorted(highest), ("in all", highest.total)])
    off = as_planned(highest) / found.planned.peak - 1
    apart = ", ".join(category for category in highest.bytes if category in NOT_PLANNED and highest.bytes[category])
    words = "by the plan" + f", {apart} apart" * bool(apart)
    lines += [f"  {words:<26} {megabytes(found.planned.peak):>15}  {off:+.1%}", ""]
    first = found.first.timeline.peak_live()[0]
    lines += [f"the peak is in {_where(highest)}", f"(of the first step, {megabytes(first.total)} MB: {_where(first)})"]
    lines += ["", "         MB  the largest allocations of the step then"]
    for size, count, module, operation in by_origin(live)[:_SHOWN]:
        line = f"  {megabytes(size):>11}  {count:>4} x {module}"
        whole = f"{line}  {operation}"
        lines += [whole] if len(whole) <= WIDEST_TABLE else [line, f"{operation:>{WIDEST_TABLE}}"]
    for where, prefix in (("on the host", HOST), ("on disks", DISK)):
        away = {name: held.peak for name, held in found.ledger.bytes.items() if name.startswith(prefix)}
        if away:
            lines += ["", *_sizes(where, ((name.removeprefix(prefix), size) for name, size in away.items()))]
    lines += ["", "sent in a step                       times              MB"]
    for axis, purposes in steady.traffic.items():
        for purpose, sent in purposes.items():
            lines.append(f"  {axis:<9} {purpose:<20} {sent.ops:>8} {megabytes(sent.bytes_sent):>15}")
    lines += [] if steady.traffic else ["  nothing"]
    for axis, purposes in found.planned_traffic.items():
        for purpose, size in purposes.items():
            if size != steady.traffic.get(axis, {}).get(purpose, Sent()).bytes_sent:
                lines.append(f"  {axis:<9} {purpose:<20} {'planned':>8} {megabytes(size):>15}")
    if found.simulated < found.micro_batches:
        sentence = f"{found.simulated:,} of {found.micro_batches:,} micro-batches were simulated; the figures count all"
        lines += ["", f"  {sentence}"]
    return "\n".join(lines)


def _sizes(title: str, sizes: Iterable[tuple[str, int]]) -> list[str]:
    """Return the lines of a table of bytes by name."""
    return [f"{title:<43}MB", *(f"  {name:<26} {megabytes(size):>15}" for name, size in sizes)]


def as_json(found: Simulated, name: str, device: str) -> dict[str, Any]:
    """Return the results; `bytes` and each step's `traffic` have the format of a run's ledger.json."""
    return {
        "config": name,
        "device": device,
        "rank": found.grid["world"].rank,
        "gpus": found.grid["world"].size,
        "axes": _places(found.grid),
        "micro_batches": found.micro_batches,
        "simulated": found.simulated,
        "bytes": found.ledger.bytes_as_dict(),
        "first": _step(found.first),
        "steady": _step(found.steady),
        "planned": {
            "peak_bytes": found.planned.peak,
            "cause": found.planned.cause,
            "bytes": found.planned.held,
            "traffic": found.planned_traffic,
        },
    }


def as_planned(moment: MemoryMoment) -> int:
    """Return the bytes of the categories that a plan includes."""
    return sum(size for category, size in moment.bytes.items() if category not in NOT_PLANNED)


def _step(record: StepRecord) -> dict[str, Any]:
    highest, live = record.timeline.peak_live()
    origins = [
        {"bytes": size, "count": count, "module": module, "operation": operation}
        for size, count, module, operation in by_origin(live)
    ]
    timeline = [
        {
            "action": peak.place.action,
            "part": peak.place.part,
            "peak_bytes": peak.total,
            "end_bytes": end,
            "bytes": {category: size for category, size in peak.bytes.items() if size},
        }
        for peak, end in record.timeline.stretches()
    ]
    return {
        "peak": {"total": highest.total, **_cause(highest), "bytes": dict(_sorted(highest)), "made": origins},
        "activations": record.timeline.peak,
        "traffic": {axis: {p: asdict(sent) for p, sent in of.items()} for axis, of in record.traffic.items()},
        "timeline": timeline,
    }


def _places(grid: Grid) -> dict[str, dict[str, int]]:
    names = ["tensor", "data", "pipeline", *(["shard", "replica"] if grid["replica"].size > 1 else [])]
    return {name: {"rank": grid[name].rank, "size": grid[name].size} for name in names}


def _cause(moment: MemoryMoment) -> dict[str, str]:
    return {"action": moment.place.action, "module": moment.place.module, "operation": moment.operation}


def _where(moment: MemoryMoment) -> str:
    return ", ".join(word for word in _cause(moment).values() if word)


def _sorted(moment: MemoryMoment) -> list[tuple[str, int]]:
    return sorted(((category, size) for category, size in moment.bytes.items() if size), key=lambda pair: -pair[1])
