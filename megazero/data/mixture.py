"""The training data of a run: one source of windows, or several that are mixed by weight.

A sample id names a source and the number of the sample among that source's (interleave), and that number a window
(sampler): every source is gone through by itself, each window once per epoch, in an order of its own. So which text a
sample is, is a pure function of its id, at O(1) for any number of sources.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from megazero.data.interleave import Interleaving
from megazero.data.sampler import position_of, window_of
from megazero.data.windows import MicroBatch, WindowDataset, micro_batch


@dataclass(frozen=True)
class Source:
    """A source of windows.

    Attributes:
        name: as metrics and messages have it; None: the only one, of `data.train`.
        weight: how many samples of a period it gives.
        seed: of the order of its windows.
    """

    name: str | None
    windows: WindowDataset
    weight: int
    seed: int


def seed_of(seed: int, name: str) -> int:
    """Return the seed of a named source, of 64 bits: no two sources of a run have the same order, nor two runs'."""
    return xxhash.xxh3_64_intdigest(f"{seed} {name}".encode())


class Mixture:
    """The windows of some sources, in the order in which a run reads them.

    Args:
        sources: at least one; if several, all with names.

    Attributes:
        sources: the same.
        num_windows: of all sources.
    """

    def __init__(self, sources: Sequence[Source]):
        self.sources = tuple(sources)
        self._interleaving = Interleaving([source.weight for source in sources])
        self._num_windows = np.array([source.windows.num_windows for source in sources], np.int64)
        self._seeds = np.array([source.seed & (2**64 - 1) for source in sources], np.uint64)
        self.num_windows = int(self._num_windows.sum())

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (place of the source, window of it) of sample ids of any shape."""
        sources, numbers = self._interleaving.of(samples)
        return sources, window_of(numbers, self._num_windows[sources], self._seeds[sources])

    def number_of(self, sample: int) -> tuple[int, int]:
        """Return (place of the source, number of the sample among that source's, from 0) of a sample id."""
        sources, numbers = self._interleaving.of(np.array([sample]))
        return int(sources[0]), int(numbers[0])

    def sample_of(self, source: int, window: int, epoch: int) -> int:
        """Return the id of the sample that is a window of a source, by its place, in an epoch of that source."""
        chosen = self.sources[source]
        return self._interleaving.sample(source, position_of(window, epoch, chosen.windows.num_windows, chosen.seed))

    def micro_batches(self, samples: np.ndarray) -> list[MicroBatch]:
        """Return samples [micro-batches, rows] as micro-batches. Raises UserError 205: bad ids."""
        mask_eod = self.sources[0].windows.mask_eod
        found = []
        for rows, sources, windows in zip(samples, *self.locate(samples), strict=True):
            reads = [self.sources[k].windows.read(int(window)) for k, window in zip(sources, windows, strict=True)]
            found.append(micro_batch(reads, rows, mask_eod=mask_eod))
        return found

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first so many samples each source has given."""
        return self._interleaving.counts(samples).tolist()

    def epochs(self, samples: int) -> dict[str, float] | None:
        """Return how often so many samples go through each source, by its name; None where it has none."""
        if self.sources[0].name is None:
            return None
        counts = self._interleaving.counts(samples) / self._num_windows
        return {str(source.name): float(count) for source, count in zip(self.sources, counts, strict=True)}

    def digest(self) -> str:
        """Return a digest of what is read in which order: other text, weights or names have another."""
        each = [f"{s.windows.num_windows} windows, xxh3 {s.windows.stream.digest()}" for s in self.sources]
        if self.sources[0].name is None:
            return each[0]
        named = [f"{s.name} weight {s.weight}: {text}" for s, text in zip(self.sources, each, strict=True)]
        digest = xxhash.xxh3_64_hexdigest("\n".join(named).encode())
        return f"{len(named)} source{'s' * (len(named) > 1)}, xxh3 {digest}"
