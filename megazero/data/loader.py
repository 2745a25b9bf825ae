"""Read the micro-batches of each step, and of a validation, for one rank of the data axis.

The sampler gives the sample ids of a rank in a step, the mixture maps each id to a window of a source, and each window
is one read of a file. All of this is a pure function of the step, so there is nothing to save and nothing to restore;
the only state is one background thread that reads step s + 1 while step s computes.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from megazero.data.batch import BatchSource, MicroBatch
from megazero.data.mixture import Mixture
from megazero.data.sampler import sample_id
from megazero.data.windows import WindowDataset


class BatchLoader(BatchSource):
    """The micro-batches of one data rank, step by step.

    Args:
        mixture: the samples to read.
        global_batch: sequences per step over all ranks; a multiple of micro_batch x num_data.
        micro_batch: sequences per micro-batch.
        data_rank, num_data: this rank on the data axis, and its size.
        begins: (steps, samples) done before this loader's first step, for example with another global batch.
        ends: the number of the last step, from 1, after which nothing is read ahead; None: there is no last step.
        others: the mixtures that the run uses before or later, with other sequence lengths; `epochs` counts theirs too.
        pack: called with a step's micro-batches in the background thread; returns a function that `step` calls to get
            the micro-batches on the device. None: they are used as they were read.
        stop: ends a `pack` that waits for a device, which may hang; called when the loader is closed.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        global_batch: int,
        micro_batch: int,
        data_rank: int = 0,
        num_data: int = 1,
        begins: tuple[int, int] = (0, 0),
        ends: int | None = None,
        others: Sequence[Mixture] = (),
        pack: Callable[[Sequence[MicroBatch]], Callable[[], list[MicroBatch]]] | None = None,
        stop: Callable[[], object] = lambda: None,
    ):
        assert 0 <= data_rank < num_data and global_batch % (micro_batch * num_data) == 0, "checked by the config"
        self._mixture, self._global_batch, self._ends = mixture, global_batch, ends
        self._mixtures = (mixture, *others)
        self._steps, self._samples = begins
        # [micro-batches, rows]: which sequences of a step are this rank's, as `index_of` of the sampler has it
        self._indices = np.arange(global_batch).reshape(-1, num_data, micro_batch)[:, data_rank]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._pack, self._stop = pack, stop
        self._ahead: tuple[int, Future[Callable[[], list[MicroBatch]]]] | None = None

    def step(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step, in order, a function of the step alone. Raises UserError 205: bad ids."""
        ahead, self._ahead = self._ahead, None
        ready = ahead[1] if ahead is not None and ahead[0] == step else self._thread.submit(self._build, step)
        batches = ready.result()()
        if step + 1 != self._ends:
            self._ahead = (step + 1, self._thread.submit(self._build, step + 1))
        return batches

    def samples(self, steps: int) -> int:
        """Return how many samples the first `steps` steps consume, which is the id of the next sample."""
        return self._samples + sample_id(steps - self._steps, 0, self._global_batch)

    def epoch(self, steps: int) -> float:
        """Return the number of passes over the data set in the first `steps` steps."""
        return sum(mixture.passes(self.samples(steps)) for mixture in self._mixtures)

    def epochs(self, steps: int) -> dict[str, float] | None:
        """Return the passes over each source in the first `steps` steps, by name; None if sources have no names."""
        return epochs_of(self._mixtures, self.samples(steps))

    def close(self) -> None:
        """End the background thread, and drop its result, or its error, for a step that was never requested."""
        self._stop()
        self._thread.shutdown(cancel_futures=True)

    def _build(self, step: int) -> Callable[[], list[MicroBatch]]:
        """Read a step; return a function that returns its micro-batches."""
        batches = self._mixture.micro_batches(self.samples(step) + self._indices)
        return (lambda: batches) if self._pack is None else self._pack(batches)


def epochs_of(mixtures: Sequence[Mixture], samples: int) -> dict[str, float] | None:
    """Return the number of passes over each source in so many samples, summed over sequence lengths, by name.

    Return None if sources have no names.

    Args:
        mixtures: mixtures of the same sources, one for each sequence length.
    """
    named = [found for mixture in mixtures if (found := mixture.epochs(samples)) is not None]
    return {name: sum(found[name] for found in named) for name in named[0]} if named else None


def validation_batches(
    dataset: WindowDataset, micro_batch: int, limit: int | None = None, *, data_rank: int = 0, num_data: int = 1
) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of the windows. In order of windows, micro-batches go to the ranks in turn.

    The last one may have fewer rows. Every rank gets equally many: a surplus one has no valid targets.

    Args:
        dataset: windows to read.
        micro_batch: rows of a micro-batch.
        limit: at most this many windows; None: all.
        data_rank, num_data: this rank on the data axis, and its size.
    """
    num_windows = dataset.num_windows if limit is None else min(limit, dataset.num_windows)
    for first in range(0, num_windows, micro_batch * num_data):
        start = first + data_rank * micro_batch
        windows = np.arange(start, min(start + micro_batch, num_windows))
        if len(windows):
            yield dataset.micro_batch(windows, windows)
        else:
            batch = dataset.micro_batch(np.zeros(1, np.int64), np.zeros(1, np.int64))
            yield replace(batch, valid_SB=torch.zeros_like(batch.valid_SB))
