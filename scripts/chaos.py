"""Kill jobs while they save, again and again, and check that no saved step is ever lost.

    python scripts/chaos.py [--kills 1000] [--ranks 2] [--seed 0] [--json]

One tiny run is started again and again in one folder. Some milliseconds after a job has begun to write a checkpoint (at
random in the foreground or in the background), SIGKILL goes to one of its ranks, to its parent, or to all. After every
kill

    every committed step is read completely and verified
    every committed step still exists, except those that retention may delete
    the steps trained after the newest committed step are fewer than one save interval, or two with background saves,
    which train the next interval while a step is being written
    no process of the job is left after half a minute: on a busy machine a killed process takes seconds to end

and at the end, when the run has been allowed to finish, the files of its last step equal those of an undisturbed run,
byte for byte. Prints a line for every violation, and exits with 1 if there was any.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from any folder, also without an installation

import numpy as np
import torch

from megazero.base.errors import UserError
from megazero.checkpoint.retention import verify
from megazero.checkpoint.store import Store
from megazero.config.file import load
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.observe.jsonl import read_rows
from megazero.tools.training.launch import launch

KEEP = 3
_ENDS = 30.0  # seconds that killed processes may take to end
T = TypeVar("T")
CONFIG = """
run: {steps: 1000000}
model: {layers: 2, hidden: 40, heads: 4, vocab: 400, seq_len: 32, dropout: 0.1}
schedule: {warmup: 5, decay: constant}
batch: {global: 4, micro: 1}
data: {train: data}
parallel: {timeout: 20}
observe: {every: 1}
"""


class Chance:
    """A private source of random numbers, reproducible from a seed."""

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)

    def random(self) -> float:
        """Return a number in [0, 1)."""
        return torch.rand((), generator=self._generator).item()

    def choice(self, options: Sequence[T]) -> T:
        """Return one of the options, all equally likely."""
        return options[int(self.random() * len(options))]


@dataclass
class Tally:
    """The counts and faults of a `storm`."""

    kills: int = 0
    whom: dict[str, int] = field(default_factory=dict)
    jobs: int = 0
    partial: int = 0  # kills that left a partially written step
    steps: int = 0
    lost: int = 0  # the most steps trained after the newest committed one
    faults: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4))
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of victims and times")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="megazero-chaos-") as folder:
        tally = storm(Path(folder), options.kills, options.ranks, Chance(options.seed))
    answer = {**vars(tally), "ranks": options.ranks, "seed": options.seed}
    text = (
        f"{tally.kills} kills ({', '.join(f'{n} of {w}' for w, n in sorted(tally.whom.items()))}) of {tally.jobs} jobs"
    )
    text += (
        f", {tally.partial} left a step half written; {tally.steps} steps trained, at most {tally.lost} lost by a kill"
    )
    print(json.dumps(answer) if options.json else text)
    for fault in tally.faults:
        print(fault, file=sys.stderr)
    return 1 if tally.faults else 0


def storm(folder: Path, kills: int, ranks: int, chance: Chance) -> Tally:
    """Kill jobs and check their run as the module describes, in an empty folder."""
    config = folder / "tiny.yaml"
    config.write_text(CONFIG)
    with IndexedDatasetWriter(folder / "data", np.uint16) as writer:
        for document in torch.randint(400, (50, 100), generator=torch.Generator().manual_seed(0)):
            writer.append(document.numpy())
            writer.end_document()
    run, tally = folder / "run", Tally()
    store = Store(run / "checkpoints")
    split = ["parallel.tensor=2"] if ranks > 1 else []
    common = [f"data.train={folder / 'data'}", "checkpoint.resume=auto", f"checkpoint.keep={KEEP}", *split]

    def job(where: Path, *overrides: str) -> int:
        given = load(str(config), [*common, f"run.dir={where}", *overrides])
        return _fork(lambda: launch(given, "chaos", ranks), folder / "output")

    lost = 0
    while tally.kills < kills:
        every, background = chance.choice((1, 2)), chance.choice(("true", "false"))
        before, left = store.steps(), _staging(store)
        pid = job(run, f"checkpoint.every={every}", f"checkpoint.async={background}")
        tally.jobs += 1
        try:
            family = _kill_while_saving(pid, store, left, ranks, chance, tally)
        except BaseException:  # otherwise the job would go on
            os.kill(pid, signal.SIGKILL)
            raise
        # A job killed before it has dropped the rows of its predecessor leaves those rows in the file.
        most = max(every if background == "false" else 2 * every, lost + 1)
        lost = _look(store, run, most, before, family, tally)
    last = max([*store.steps(), 0]) + 3
    for where in (run, folder / "undisturbed"):
        _, status = os.waitpid(job(where, f"run.steps={last}"), 0)
        if status:
            tally.faults.append(f"a job that was not killed ended with {os.waitstatus_to_exitcode(status)}")
            return tally
    tally.steps = last
    whole = Store(folder / "undisturbed/checkpoints").path(last)
    for path in whole.glob("shard_*"):
        if path.read_bytes() != (store.path(last) / path.name).read_bytes():
            tally.faults.append(f"{path.name} of step {last} is not that of the run that was not disturbed")
    return tally


def _staging(store: Store) -> set[str]:
    """Return the names of steps that are being written, or were when a job was killed."""
    return {path.name for path in store.folder.glob(".step_*.tmp")} if store.folder.exists() else set()


def _kill_while_saving(pid: int, store: Store, left: set[str], ranks: int, chance: Chance, tally: Tally) -> list[int]:
    """Wait until some steps have been saved and another is being written, then kill; return the job's processes.

    Args:
        left: names that earlier jobs have left.
    """
    passed, seen = chance.choice((0, 0, 1, 3)), set[str]()
    while not os.waitpid(pid, os.WNOHANG)[0]:
        staging = _staging(store) - left
        seen |= staging
        if not staging or len(seen) <= passed:
            time.sleep(0.0005)
            continue
        time.sleep(chance.random() * chance.choice((0.002, 0.02, 0.1)))
        family = [pid, *(_children(pid) if ranks > 1 else [])]
        whom = chance.choice(("one rank", "one rank", "the parent", "all"))
        if whom == "one rank":
            doomed = [chance.choice(family[1:] or family)]
        else:
            doomed = [pid] if whom == "the parent" else family
        for one in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        tally.kills += 1
        tally.whom[whom] = tally.whom.get(whom, 0) + 1
        deadline = time.monotonic() + 60
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                tally.faults.append(f"kill {tally.kills} of {whom}: the job goes on")
                os.kill(pid, signal.SIGKILL)
                deadline += 60
            time.sleep(0.002)
        return family
    tally.faults.append("a job ended before it was killed")
    tally.kills += 1
    return []


def _look(store: Store, run: Path, most: int, before: list[int], family: list[int], tally: Tally) -> int:
    """Check the run after a kill and record faults; return the number of trained steps that are not saved."""
    deadline = time.monotonic() + _ENDS
    while (left := [pid for pid in family if _lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.005)
    kill = f"kill {tally.kills}"
    if left:
        tally.faults.append(f"{kill}: processes {left} are left")
    steps = store.steps()
    tally.partial += any(store.folder.glob(".step_*.tmp"))
    for step in steps:
        try:
            verify(store.path(step))
        except UserError as error:
            tally.faults.append(f"{kill}: {error}")
    if gone := set(before[:1]) - set(steps):
        deleted = len(steps) >= KEEP and max(gone) < steps[KEEP - 1]
        if not deleted:
            tally.faults.append(f"{kill}: step {gone} is gone, there are {steps}")
    rows = read_rows(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    trained = max((row["step"] for row in rows), default=0)
    lost = trained - max(steps, default=0)
    tally.lost = max(tally.lost, lost)
    if lost >= most:
        tally.faults.append(f"{kill}: {trained} steps were trained, {lost} more than were saved, expected below {most}")
    return lost


def _fork(action: Callable[[], int], output: Path) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = action()
    except UserError as error:
        print(error, file=sys.stderr)
    finally:
        os._exit(code)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
