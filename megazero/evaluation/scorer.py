"""Score windows and continue texts with a model that is split over ranks, on the ranks that hold it.

Every function here is collective: all ranks of the grid call it with equal arguments, and get equal results. Data ranks
share the work.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megazero.builders.assemble import DTYPES, Built, StageInputs, feeds_of
from megazero.comm.collectives import all_reduce
from megazero.comm.grid import Grid
from megazero.config.schema import Config
from megazero.data.batch import MicroBatch
from megazero.evaluation.windows import Window, batches_of, windows_of
from megazero.generation.decode import Decoder
from megazero.model.batch_context import BatchContext

_AT_ONCE = 8  # batches at once for each stage of a pipeline, to fill it


class Interrupted(Exception):  # noqa: N818 - no error
    """The evaluation was asked to stop, on all ranks at the same point."""


class Scorer:
    """Computes with a built model.

    Args:
        config: of the model and the batch: `batch.rows` windows or texts at once on a data rank.

    Attributes:
        device: of this rank.
        length: the most inputs of a window.
        at_once, texts: the windows that keep all ranks busy; the texts that are continued at once.
        stop: called before each pass, equally often on all ranks; True (on all): raise `Interrupted`.
    """

    def __init__(self, config: Config, grid: Grid, device: torch.device, built: Built):
        self._grid, self.device, self._built, self.length = grid, device, built, config.model.seq_len
        self._feeds, self._dtype = feeds_of(grid["tensor"], device, config.parallel.sequence), config.precision.dtype
        self._rows, stages = config.batch.rows, grid["pipeline"].size
        self.texts = self._rows * grid["data"].size
        self.at_once = self.texts * (_AT_ONCE * stages if stages > 1 else 1)
        self.decoder = Decoder(built.model, self._forward, device, grid["data"])
        self.stop: Callable[[], bool] = lambda: False

    @torch.no_grad()
    def scores(self, windows: Sequence[Window]) -> list[tuple[float, bool]]:
        """Return for each window the loss of its scored tokens, in nats, and whether each is the most probable one."""
        found, data = torch.zeros(len(windows), 2, dtype=torch.float64, device=self.device), self._grid["data"]
        for start in range(0, len(windows), self.at_once):
            if self.stop():
                raise Interrupted
            some = windows[start : start + self.at_once]
            batches = list(batches_of(some, self._padded(some), self._rows, data.rank, data.size))
            losses = self._built.pipeline.evaluate(batches, self._feed)  # none without the last stage
            for batch, (losses_SB, greedy_SB) in zip(batches, losses, strict=False):
                own_B = batch.sample_ids_B < len(some)
                missed_B = (batch.valid_SB.to(self.device) & (greedy_SB == 0)).any(0)
                both_B2 = torch.stack((losses_SB.sum(0, dtype=torch.float64), (~missed_B).double()), 1)
                found[(start + batch.sample_ids_B[own_B]).to(self.device)] = both_B2[own_B.to(self.device)]
        for axis in self._grid.partial("loss"):
            all_reduce(found, axis, "evaluation")
        return [(nats, greedy == 1) for nats, greedy in found.tolist()]

    def of_text(self, ids: Sequence[int], size: int, eod: int, stride: int | None) -> dict[str, float]:
        """Return the mean loss of a text's tokens, its perplexity, bits per byte and tokens.

        Args:
            size: the bytes of the text.
            eod: the id before it.
            stride: new tokens that a window scores; None: half of a window.
        """
        windows = list(windows_of(ids, eod, self.length, min(stride or max(1, self.length // 2), self.length)))
        nats = math.fsum(loss for loss, _ in self.scores(windows))
        loss = nats / len(ids)
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {"loss": loss, "perplexity": perplexity, "bits_per_byte": nats / math.log(2) / size, "tokens": len(ids)}

    def _feed(self, batch: MicroBatch) -> StageInputs:
        feed = self._feeds(batch, 0, False)
        return replace(feed, now=replace(feed.now, greedy=True))

    def _padded(self, windows: Sequence[Window]) -> int:
        """Return a length that holds all windows, and that tensor ranks can share."""
        unit = 16 * self._grid["tensor"].size
        longest = max(1, *(len(ids) - 1 for ids, _ in windows))
        return min(self.length, -(-longest // unit) * unit)

    def _forward(self, tokens_SB: Tensor, step: BatchContext) -> Tensor:
        """Run the stages of all pipeline ranks; return the logits after the last token on each of them, [1, B, V]."""
        if self.stop():
            raise Interrupted
        batch = MicroBatch(tokens_SB, tokens_SB, tokens_SB, None, None, step.sample_ids_B)
        found = self._built.pipeline.evaluate([batch], lambda _: StageInputs(tokens_SB, None, None, step))
        axis, model = self._grid["pipeline"], self._built.model
        if axis.size == 1:
            return found[0]
        shape = 1, tokens_SB.shape[1], model.tensor.shard(model.shape.vocab)
        logits_1BV = found[0] if found else torch.zeros(shape, dtype=DTYPES[self._dtype], device=self.device)
        return all_reduce(logits_1BV.contiguous(), axis, "logits")
