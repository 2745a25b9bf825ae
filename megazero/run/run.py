"""Define a run as one of its ranks sees it: the config, the folder, and the other ranks."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from megazero.builders.assemble import Built
from megazero.comm.agreement import agree
from megazero.comm.collectives import gather_bytes
from megazero.comm.grid import Grid
from megazero.comm.home import Homes
from megazero.config.schema import Config
from megazero.data.tokenizer import Tokenizer
from megazero.launcher.signals import Signals
from megazero.run.folder import RunFolder
from megazero.run.lock import RunLock
from megazero.run.planned import Planner
from megazero.train.validation import Evaluation

T = TypeVar("T")
# (config of a part, grid, device, built parts, tokenizer, folder of the run) -> evaluations during training
Evaluations = Callable[[Config, Grid, torch.device, Built, Tokenizer | None, Path], list[Evaluation]]


@dataclass(frozen=True)
class Run:
    """A run, as one of its ranks sees it. Where the run starts is a `Start` (`run/resume.py`).

    Attributes:
        config: resolved, with a micro-batch; stages are laid over it (`config/stages.py`).
        grid, device: the ranks, and the device of this one.
        folder: the folder of the run.
        lock: the lock of that folder; rank 0 holds it.
        signals: the signals that this rank got.
        plan: returns the plan of a part of the run.
        homes: opens the places, beyond device and host, where a config may let values rest.
        evaluations: returns the evaluations that a config asks for, in addition to validations.
        name: the name of the config.
        allowed: options and sections that `--allow-change` names.
    """

    config: Config
    grid: Grid
    device: torch.device
    folder: RunFolder
    lock: RunLock
    signals: Signals
    plan: Planner
    homes: Homes
    evaluations: Evaluations
    name: str = ""
    allowed: tuple[str, ...] = ()

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which writes the run's files."""
        return self.grid["world"].rank == 0

    def agree(self, action: Callable[[], T]) -> T:
        """Run an action on every rank; all raise if it fails on one (`comm/agreement.py`)."""
        return agree(self.grid["world"], self.device, action)

    def from_first(self, action: Callable[[], Any]) -> Any:
        """Run an action on rank 0 alone; return its result, of JSON's types, on all ranks. All raise if it fails."""
        found = json.dumps(self.agree(lambda: action() if self.is_first else None))
        return json.loads(self.gather(found if self.is_first else "")[0])

    def gather(self, text: str) -> list[str]:
        """Return every rank's text on all ranks."""
        return [each.decode() for each in gather_bytes(text.encode(), self.grid["world"], "agree", self.device)]
