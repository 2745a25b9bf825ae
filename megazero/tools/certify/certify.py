"""Certify that every layout computes the model that one process does, and one process the model of a reference.

Each layout (`layouts.py`) trains the same model on the same data, and is compared with one process parameter by
parameter (`comparison.py`): initial weights, the first step's gradients, weights after all steps, loss, gradient norm,
and what is held. One process, and what any layout sends as integers, is compared with the independent reference
(`reference.py`), because a fault in code that both sides run is the same on both.

Tolerances and the measure are in `tolerances.py`; docs/numerics.md says what must be equal to what, and how exactly.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megazero.base.answers import tell
from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.stop_signals import ended_by
from megazero.builders.assemble import bucket_of
from megazero.builders.job import laid_out
from megazero.builders.pipeline import model_shape
from megazero.comm.context import CommContext
from megazero.config.schema import Config
from megazero.launcher.environment import RankContext
from megazero.launcher.rendezvous import connect, disconnect
from megazero.launcher.spawn import run_local
from megazero.launcher.world import World
from megazero.plan.job import Job
from megazero.tools.certify.codes import codes_apart
from megazero.tools.certify.comparison import Compared, compare_all
from megazero.tools.certify.layouts import alone_of, one_process
from megazero.tools.certify.rank import Results, load_results
from megazero.tools.certify.tolerances import Tolerance, tolerance_of
from megazero.tools.certify.training import Plant, follow_rank, nothing, settings, train_rank

Work = Callable[[CommContext, World, Path], None]  # of a rank, which writes its results into the folder
_AT_ONCE, _NUMBERS = 8, 2**24  # layouts that ranks train between two starts, and parameters: both wait on a disk
_HOST_MB = 256  # for what is on its way to disks


@dataclass(frozen=True)
class Row(Compared):
    """The comparison of one layout with one process."""

    layout: Job = field(kw_only=True)

    @property
    def summary(self) -> str:
        worst, times = max(self.times.items(), key=lambda item: item[1])
        return "bitwise equal" if self.bitwise else f"at most {times:.2g} of a tolerance ({worst})"


class Certificate:
    """The layouts of one config, each compared with one process that trains once.

    Args:
        steps: steps of training.
        interruption: lets a signal end the work.

    Attributes:
        alone: the config's job on one process, of which a layout is a variant.
    """

    def __init__(self, config: Config, steps: int):
        self._config, self._steps = settings(config), steps
        self.alone = alone_of(config)
        self._at_once = max(1, min(_AT_ONCE, _NUMBERS // model_shape(config).parameters()))
        self._kept: dict[tuple[str, bool], Results] = {}
        torch.set_num_threads(1)  # here, so that nothing waits for threads that a fork does not copy

    def rows(self, trials: Iterable[tuple[Job, Plant]]) -> Iterator[Row]:
        """Compare what layouts compute with one process, and one process with the independent reference.

        What is sent as integers is compared with that reference in any layout. Neighbours with as many ranks share
        their start.

        Args:
            trials: layouts, and what is changed on the ranks of each before they begin.

        Raises:
            UserError: 303, one process does not get through.
            SystemExit: a signal came while ranks trained.
        """
        for size, some in groupby(trials, lambda trial: 0 if _is_one_process(*trial) else trial[0].ranks):
            group = list(some)
            if size == 0:
                yield from (self._row(layout, [self.one_process(layout.delayed)]) for layout, _ in group)
                continue
            trained = self._trained(size, [self._training(*trial) for trial in group])
            yield from (self._row(layout, found) for (layout, _), found in zip(group, trained, strict=True))

    def _row(self, layout: Job, ranks: list[Results] | str) -> Row:
        if isinstance(ranks, str):
            return Row(layout=layout, fault=ranks)
        expected = self._reference(layout.delayed) if layout.ranks == 1 else self.one_process(layout.delayed)
        model, bits = self._config.model, (layout.parameter_bits, layout.gradient_bits)
        assert model.kv_heads is not None, "a resolved config"
        codes = codes_apart(ranks, *bits, feedback=layout.error_feedback) if any(bits) else ()
        tolerance = tolerance_for(self._config, layout)
        found = compare_all(ranks, expected, model.heads, model.kv_heads, tolerance, codes)
        return Row(layout=layout, **vars(found))

    def one_process(self, delayed: bool) -> Results:
        """Return the results of one process, which is delayed as the layouts are that are compared with it.

        Raises:
            UserError: 303, it does not get through.
        """
        return self._once("one process", delayed, self._training(one_process(self.alone, delayed=delayed), nothing))

    def _reference(self, delayed: bool) -> Results:
        def follow(comm: CommContext, world: World, folder: Path) -> None:
            follow_rank(self._config, self._steps, folder, late=delayed)

        return self._once("the reference", delayed, follow)

    def _once(self, name: str, delayed: bool, work: Work) -> Results:
        if (name, delayed) not in self._kept:
            (found,) = self._trained(1, [work])
            if isinstance(found, str):
                raise UserError(303, f"{name} did not train", "see the line above", where="certify")
            self._kept[name, delayed] = found[0]
        return self._kept[name, delayed]

    def _training(self, layout: Job, plant: Plant) -> Work:
        def train(comm: CommContext, world: World, folder: Path) -> None:
            train_rank(comm, world, _configured(self._config, layout, folder), self._steps, folder, plant)

        return train

    def _trained(self, ranks: int, works: Sequence[Work]) -> Iterator[list[Results] | str]:
        """Yield what all ranks computed in each work, or why they did not; behind a failure, ranks start anew."""
        while works:
            done, fault = self._start(ranks, works[: self._at_once])
            yield from done
            if fault:
                yield fault
            works = works[len(done) + bool(fault) :]

    def _start(self, ranks: int, works: Sequence[Work]) -> tuple[list[list[Results]], str]:
        """Return what all ranks computed in each work before the first that failed, and why that one did."""
        lines, done = list[str](), list[list[Results]]()
        with doing("training layouts"), TemporaryDirectory(prefix="megazero-certify-") as place:
            folder = Path(place)
            begin = partial(self._be, works=works, folder=folder)
            code = run_local(ranks, begin, lambda _, line: lines.append(line), signalled=_end_by)
            for number in range(len(works)):
                found = [load_results(folder / str(number), rank) for rank in range(ranks)]
                if any(each is None for each in found):
                    break
                done.append([each for each in found if each is not None])
        if not code:
            assert len(done) == len(works), "all ranks wrote their results"
            return done, ""
        return done[: len(works) - 1], lines[-1] if lines else f"exit code {code}"  # the last may fail at its end

    def _be(self, place: RankContext, works: Sequence[Work], folder: Path) -> None:
        """Do one rank's part of some works."""
        torch.set_num_threads(1)  # sums do not depend on how many there are
        timeout = timedelta(seconds=self._config.parallel.timeout)
        comm = connect(place, timeout=timeout, fingerprint="", bucket=bucket_of(self._config))
        for number, work in enumerate(works):
            work(comm, place.world, folder / str(number))
        disconnect()


def _end_by(number: int) -> None:
    """End the command, because a signal came while ranks trained."""
    tell(ended_by(number))
    raise SystemExit(128 + number)


def certify(config: Config, layouts: Sequence[Job], steps: int) -> Iterator[Row]:
    """Yield a row for each layout, those of fewest ranks first; raises what `Certificate.rows` raises."""
    certificate = Certificate(config, steps)
    return certificate.rows((layout, nothing) for layout in sorted(layouts, key=lambda layout: layout.ranks))


def tolerance_for(config: Config, layout: Job | None = None) -> Tolerance:
    """Return the tolerances of a layout; None: of layouts that send nothing as integers."""
    job = layout or alone_of(config)
    bits = {"parameter_bits": job.parameter_bits, "gradient_bits": job.gradient_bits}
    summed = layout is None or layout.ranks > 1  # one process sums nothing
    return tolerance_of(config.precision.dtype, reduced=summed and job.bytes.summed < job.bytes.gradient, **bits)


def _is_one_process(layout: Job, plant: Plant) -> bool:
    """Return whether the layout is one that others are compared with, which trains once."""
    return layout.ranks == 1 and plant is nothing


def _configured(config: Config, layout: Job, folder: Path) -> Config:
    """Return a config of a layout whose disks, if it has any, are a folder."""
    changed = laid_out(config, layout)
    if not layout.uses_disks:
        return changed
    offload = changed.zero.offload.model_copy(update={"path": str(folder), "host_mb": _HOST_MB})
    return changed.model_copy(update={"zero": changed.zero.model_copy(update={"offload": offload})})
