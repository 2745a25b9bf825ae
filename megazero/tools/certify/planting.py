"""Test that the certificate finds planted faults: every fault that its config can have, in every precision.

The faults are planted into a model of the config's shape with dropout and tied embeddings, on a batch of four
micro-batches. A fault is found if a measure exceeds its tolerance; faults for which the certificate's settings were
chosen must exceed it ten times.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megazero.base.errors import UserError
from megazero.builders.job import changed
from megazero.config.schema import Config
from megazero.tools.certify.certify import Certificate, Row
from megazero.tools.certify.fault import DTYPES, Fault
from megazero.tools.certify.layouts import admission, alone_of
from megazero.tools.certify.planted_faults import FAULTS
from megazero.tools.certify.planted_optimizers import OPTIMIZER_FAULTS
from megazero.tools.certify.planted_options import OPTION_FAULTS

# Dropout, a tied head and documents, and four micro-batches.
_SUITED = {"model.tie_embeddings": True, "batch.global_": 4, "batch.micro": 1, "data.mask_eod": True}
NOTHING = "nothing"
ALL = (*FAULTS, *OPTION_FAULTS, *OPTIMIZER_FAULTS)


@dataclass(frozen=True)
class Planted:
    """The finding of one fault in one precision.

    Attributes:
        what, layout: those of the fault.
        measure: the measure whose difference exceeds its tolerance most.
        times: that difference divided by its tolerance; infinite where nothing may differ.
        right: True if the certificate found the fault, or found nothing where none was planted.
    """

    fault: str
    what: str
    layout: str
    dtype: str
    measure: str
    times: float
    right: bool


def names() -> list[str]:
    """Return the names of everything that can be planted."""
    return [NOTHING, *(fault.name for fault in ALL)]


def plant(
    config: Config, chosen: Sequence[str], steps: int, dtypes: Sequence[str] = DTYPES, faults: Sequence[Fault] = ALL
) -> Iterator[Planted]:
    """Yield the finding of every chosen fault in every precision.

    Args:
        chosen: names of the faults to plant.
        faults: all faults; their layouts also run without a fault for the name "nothing".

    Raises:
        UserError: 106, the config does not admit a layout; 303, one process failed to train.
    """
    config = changed(config, _SUITED | {"model.dropout": config.model.dropout or 0.1})
    alone = alone_of(config)
    for dtype in dtypes:
        # `zero.reduce_dtype` is kept only in the dtypes that support it.
        reduced = {} if dtype in ("fp32", "bf16") else {"zero.reduce_dtype": None}
        own = changed(config, {"precision.dtype": dtype} | reduced)
        admits, summed = admission(own), own.zero.reduce_dtype is not None
        allowed = {fault: fault.layout(alone) for fault in faults if fault.can_be(alone, dtype, summed=summed)}
        if refused := next((layout for layout in allowed.values() if not admits(layout)), None):
            what = f"faults are planted into the layout {refused}, which the config does not allow"
            raise UserError(106, what, "use even heads, kv_heads, ffn, seq_len, and two layers", where="certify")
        certificate = Certificate(own, steps)
        layouts = {fault: fault.layout(certificate.alone) for fault in allowed}
        if NOTHING in chosen:
            yield _nothing(list(map(certificate.row, dict.fromkeys(layouts.values()))), dtype)
        for fault in (fault for fault in layouts if fault.name in chosen):
            yield _found(fault, certificate.row(layouts[fault], fault.plant), dtype)


def _nothing(rows: Sequence[Row], dtype: str) -> Planted:
    """Return the finding for layouts without a planted fault; it is right if no row has a fault."""
    measure, times = max((_most(row) for row in rows), key=lambda most: most[1])
    return Planted(NOTHING, "no fault", "all below", dtype, measure, times, not any(row.fault for row in rows))


def _found(fault: Fault, row: Row, dtype: str) -> Planted:
    measure, times = _most(row)
    right = row.fault is not None and bool(row.times) and times >= fault.least
    return Planted(fault.name, fault.what, str(row.layout), dtype, measure, times, right)


def _most(row: Row) -> tuple[str, float]:
    """Return the measure that most exceeds its tolerance, and the ratio; of several infinite ones the first."""
    if not row.times:
        return f"does not run: {row.fault}", math.inf
    return max(row.times.items(), key=lambda item: item[1])


def table(found: Sequence[Planted], steps: int) -> str:
    """Return a table in Markdown: a row for each fault, a column for each precision."""
    lines = [
        f"Planted faults, {steps} steps: the measure that finds each, and its difference divided by the tolerance",
        "",
        f"| fault | layout | {' | '.join(DTYPES)} |",
        f"|---|---|{'---|' * len(DTYPES)}",
    ]
    for name in dict.fromkeys(each.fault for each in found):
        of_fault = {each.dtype: each for each in found if each.fault == name}
        first = next(iter(of_fault.values()))
        cells = " | ".join(_cell(of_fault[dtype]) if dtype in of_fault else "" for dtype in DTYPES)
        lines.append(f"| {first.what} | {first.layout} | {cells} |")
    return "\n".join(lines)


def _cell(found: Planted) -> str:
    how = f"{found.measure}, " + ("exact" if math.isinf(found.times) else f"{found.times:.2g}")
    if found.right:
        return how if found.fault != NOTHING else f"none, at most {found.times:.2g} ({found.measure})"
    return f"WRONG: {how}" if found.fault == NOTHING else f"MISSED: {how}"


def as_json(found: Sequence[Planted], steps: int) -> dict[str, Any]:
    """Return {steps, planted: the findings} for JSON, with null for an infinite `times`."""
    rows = [asdict(each) | {"times": each.times if math.isfinite(each.times) else None} for each in found]
    return {"steps": steps, "planted": rows}
