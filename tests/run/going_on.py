"""Let a small run go on with other options."""

from pathlib import Path

from megazero.__main__ import main
from tests.tiny_run import TinyData

LINE = ("checkpoint.every=1", "data.valid=null", "model.position=rotary", "observe.every=1", "schedule.decay=constant")


def go_on(tiny_data: TinyData, run: Path, *overrides: str, allow: str | None = None, nproc: int | None = None) -> int:
    """Train on in a run's folder, which was begun with `LINE`; return the exit code."""
    line = ["train", "--config", str(tiny_data.config), f"run.dir={run}", *LINE, "checkpoint.resume=auto", *overrides]
    line += ["--allow-change", allow] if allow else []
    return main(line + (["--nproc", str(nproc)] if nproc else []))
