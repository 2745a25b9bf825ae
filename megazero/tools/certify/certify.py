"""Certify that every layout computes the same model as one process, and one process the same model as a reference.

Each layout (`layouts.py`) trains the same model on the same data, and is compared with one process parameter by
parameter (`comparison.py`): initial weights, the first step's gradients, weights after all steps, loss, gradient norm,
and the states that ranks hold. One process, and the values that any layout sends as integers, are compared with the
independent reference (`reference.py`), because a fault in shared code would be equal on both sides.

Tolerances and the measure are in `tolerances.py`; docs/numerics.md says what must be equal to what, and how exactly.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.stop_signals import end_by
from megazero.builders.assemble import bucket_of
from megazero.builders.job import changed, laid_out
from megazero.comm.context import CommContext
from megazero.config.schema import Config
from megazero.launcher.environment import RankContext
from megazero.launcher.rendezvous import connect, disconnect
from megazero.launcher.spawn import run_local
from megazero.launcher.world import World
from megazero.plan.job import Job
from megazero.tools.certify.codes import codes_apart
from megazero.tools.certify.comparison import Compared, compare
from megazero.tools.certify.layouts import alone_of, one_process
from megazero.tools.certify.rank import Results, load_results, write_results
from megazero.tools.certify.tolerances import Tolerance, tolerance_of
from megazero.tools.certify.training import Plant, follow_rank, nothing, settings, train_rank

_HOST_MB = 256  # host memory for transfers to and from disks


@dataclass(frozen=True)
class Row(Compared):
    """The comparison of one layout with one process."""

    layout: Job = field(kw_only=True)

    @property
    def summary(self) -> str:
        """Return "bitwise equal", or the largest difference divided by its tolerance, and what was compared."""
        worst, times = max(self.times.items(), key=lambda item: item[1])
        return "bitwise equal" if self.bitwise else f"at most {times:.2g} of a tolerance ({worst})"


class Certificate:
    """The layouts of one config, each compared with one process, which trains only once.

    Args:
        steps: number of training steps.

    Attributes:
        alone: the config's job on one process; layouts are variants of it.
    """

    def __init__(self, config: Config, steps: int):
        self._config, self._steps = settings(config), steps
        self.alone = alone_of(config)
        self._kept: dict[tuple[str, bool], Results] = {}
        torch.set_num_threads(1)  # before forks, which do not copy threads

    def row(self, layout: Job, plant: Plant = nothing) -> Row:
        """Compare a layout with one process, or if it is one process with the independent reference.

        Values sent as integers are compared with the reference in every layout.

        Args:
            plant: changes the layout's ranks before they begin.

        Raises:
            UserError: 303, one process failed to train.
            SystemExit: a signal came while ranks trained.
        """
        is_one_process = layout.ranks == 1 and plant is nothing
        ranks = [self.one_process(layout.delayed)] if is_one_process else self._trained(layout, plant)
        if isinstance(ranks, str):
            return Row(layout=layout, fault=ranks)
        expected = self._reference(layout.delayed) if layout.ranks == 1 else self.one_process(layout.delayed)
        model, bits = self._config.model, (layout.parameter_bits, layout.gradient_bits)
        assert model.kv_heads is not None, "a resolved config"
        codes = codes_apart(ranks, *bits, feedback=layout.error_feedback) if any(bits) else ()
        found = compare(ranks, expected, (model.heads, model.kv_heads), tolerance_for(self._config, layout), codes)
        return Row(layout=layout, **vars(found))

    def one_process(self, delayed: bool) -> Results:
        """Return the results of one process, with delayed updates if the compared layouts have them.

        Raises:
            UserError: 303, it failed to train.
        """
        layout = one_process(self.alone, delayed=delayed)
        return self._once("one process", delayed, lambda: self._trained(layout, nothing))

    def _reference(self, delayed: bool) -> Results:
        def follow(comm: CommContext, world: World, folder: Path) -> Results:
            return follow_rank(self._config, self._steps, late=delayed)

        return self._once("the reference", delayed, lambda: self._results(1, follow))

    def _once(self, name: str, delayed: bool, work: Callable[[], list[Results] | str]) -> Results:
        if (name, delayed) not in self._kept:
            found = work()
            if isinstance(found, str):
                raise UserError(303, f"{name} did not train", "see the line above", where="certify")
            (self._kept[name, delayed],) = found
        return self._kept[name, delayed]

    def _trained(self, layout: Job, plant: Plant) -> list[Results] | str:
        def train(comm: CommContext, world: World, folder: Path) -> Results:
            config = laid_out(self._config, layout)
            if layout.uses_disks:
                config = changed(config, {"zero.offload.path": str(folder), "zero.offload.host_mb": _HOST_MB})
            return train_rank(comm, world, config, self._steps, plant)

        return self._results(layout.ranks, train)

    def _results(self, size: int, work: Callable[[CommContext, World, Path], Results]) -> list[Results] | str:
        """Run `work` on `size` ranks, with a folder for its disks; return all ranks' results, or an error line."""
        lines = list[str]()
        with doing("training layouts"), TemporaryDirectory(prefix="megazero-certify-") as name:
            folder, timeout = Path(name), timedelta(seconds=self._config.parallel.timeout)

            def be(place: RankContext) -> None:
                torch.set_num_threads(1)  # so that sums do not depend on the number of threads
                comm = connect(place, timeout=timeout, fingerprint="", bucket=bucket_of(self._config))
                write_results(work(comm, place.world, folder), folder, place.world.rank)
                disconnect()

            code = run_local(size, be, lambda _, line: lines.append(line), signalled=end_by)
            found = [load_results(folder, rank) for rank in range(size)]
        if code:
            return lines[-1] if lines else f"exit code {code}"
        return [each for each in found if each is not None]


def certify(config: Config, layouts: Sequence[Job], steps: int) -> Iterator[Row]:
    """Yield a row for each layout, fewest ranks first; raises the errors of `Certificate.row`."""
    return map(Certificate(config, steps).row, sorted(layouts, key=lambda layout: layout.ranks))


def tolerance_for(config: Config, layout: Job | None = None) -> Tolerance:
    """Return the tolerances of a layout; None: those of layouts that send nothing as integers."""
    job = layout or alone_of(config)
    summed = layout is None or layout.ranks > 1  # one process sums nothing
    return tolerance_of(
        config.precision.dtype,
        reduced=summed and job.bytes.summed < job.bytes.gradient,
        parameter_bits=job.parameter_bits,
        gradient_bits=job.gradient_bits,
        optimizers=job.optimizers.names,
        narrow_moments=job.bytes.moment == 2,
        masters=job.bytes.master >= 4,
    )
