"""The training data of a run: one source of windows, or several that are mixed by weight.

A sample id determines a source and the number of the sample within that source (interleave); this number determines a
window (sampler). Every source is read independently, each window once per epoch, in an order of its own. So the text of
a sample is a pure function of its id, found in O(1) for any number of sources.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from megazero.data.batch import MicroBatch
from megazero.data.interleave import Interleaving
from megazero.data.sampler import window_of
from megazero.data.windows import WindowDataset, micro_batch


@dataclass(frozen=True)
class Source:
    """A source of windows.

    Attributes:
        name: its name in metrics and messages; None: the only source, `data.train`.
        weight: how many samples of a period it gives, unless a phase sets another weight.
        seed: the seed of the order of its windows.
    """

    name: str | None
    windows: WindowDataset
    weight: int
    seed: int


def seed_of(seed: int, name: str) -> int:
    """Return the 64-bit seed of a named source: it differs between sources of a run, and between seeds of runs."""
    return xxhash.xxh3_64_intdigest(f"{seed} {name}".encode())


@dataclass(frozen=True)
class Phase:
    """A part of a run in which the weights of its sources are constant.

    Attributes:
        first: its first sample id.
        weights: one for each source; 0 if the source gives no sample in this phase. All are 0 if another mixture gives
            the samples, because they have another length.
        gone: weights in this phase of sources that gave samples then, but are no longer in the config: their samples
            keep their places in the order.
    """

    first: int
    weights: tuple[int, ...]
    gone: tuple[int, ...] = ()


class Mixture:
    """The windows of some sources, in the order in which a run reads them.

    When the weights change, each source continues where it was: no window comes twice in an epoch.

    Args:
        sources: at least one; if several, all with names.
        phases: in order of their first sample, the first at sample 0; None: one, with the sources' own weights.

    Attributes:
        sources: the sources.
        num_windows: the number of windows of all sources.
    """

    def __init__(self, sources: Sequence[Source], phases: Sequence[Phase] | None = None):
        self.sources = tuple(sources)
        self._num_windows = np.array([source.windows.num_windows for source in sources], np.int64)
        self._seeds = np.array([source.seed & (2**64 - 1) for source in sources], np.uint64)
        self.num_windows = int(self._num_windows.sum())
        self.phases = tuple(phases or [Phase(0, tuple(source.weight for source in sources))])
        self._firsts = np.array([phase.first for phase in self.phases], np.int64)
        assert self._firsts[0] == 0 and (np.diff(self._firsts) > 0).all(), "checked by the config"
        self._orders = [Interleaving((*phase.weights, *phase.gone)) for phase in self.phases]
        self._before = [np.zeros(len(sources), np.int64)]  # samples of each source before each phase
        for first in self._firsts[1:].tolist():
            self._before.append(self.counts(first))

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (index of the source, window in it) of sample ids of any shape."""
        which = np.searchsorted(self._firsts, samples, side="right") - 1
        sources, numbers = np.empty_like(samples), np.empty_like(samples)
        for k in np.unique(which).tolist():
            own = which == k
            sources[own], numbers[own] = self._orders[k].of(samples[own] - self._firsts[k])
            numbers[own] += self._before[k][sources[own]]
        return sources, window_of(numbers, self._num_windows[sources], self._seeds[sources])

    def micro_batches(self, samples: np.ndarray) -> list[MicroBatch]:
        """Return samples [micro-batches, rows] as micro-batches. Raises UserError 205: bad ids."""
        mask_eod = self.sources[0].windows.mask_eod
        found = []
        for rows, sources, windows in zip(samples, *self.locate(samples), strict=True):
            reads = [self.sources[k].windows.read(int(window)) for k, window in zip(sources, windows, strict=True)]
            found.append(micro_batch(reads, rows, mask_eod=mask_eod))
        return found

    def counts(self, samples: int) -> np.ndarray:
        """Return how many of the first `samples` samples each source gives, int64 [sources]."""
        known = self._firsts[: len(self._before)]  # all, once the constructor is done
        phase = int(np.searchsorted(known, samples, side="right")) - 1
        counts = self._orders[phase].counts(samples - int(self._firsts[phase]))
        return self._before[phase] + counts[: len(self.sources)]

    def epochs(self, samples: int) -> dict[str, float] | None:
        """Return the number of passes over each source in so many samples, by name; None if sources have no names."""
        if self.sources[0].name is None:
            return None
        counts = self.counts(samples) / self._num_windows
        return {str(source.name): float(count) for source, count in zip(self.sources, counts, strict=True)}

    def digest(self) -> str:
        """Return a digest of the text and its order: it changes with the text, the weights and the names."""
        each = [f"{s.windows.num_windows} windows, xxh3 {s.windows.stream.digest()}" for s in self.sources]
        if self.sources[0].name is None:
            return each[0]
        named = [f"{source.name}: {text}" for source, text in zip(self.sources, each, strict=True)]
        for phase in self.phases:
            gone = f" and {phase.gone}" if phase.gone else ""
            named.append(f"from sample {phase.first} weights {phase.weights}{gone}")
        digest = xxhash.xxh3_64_hexdigest("\n".join(named).encode())
        return f"{len(each)} source{'s' * (len(each) > 1)}, xxh3 {digest}"

    def passes(self, samples: int) -> float:
        """Return how many passes over all windows the run's first `samples` samples make.

        Samples of other sequence lengths, and of sources that are gone, do not count.
        """
        return int(self.counts(samples).sum()) / self.num_windows
