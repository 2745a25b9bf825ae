"""Continue a batch of texts, token by token, with a cache of keys and values.

Texts of unequal length are aligned at their ends. The prompts pass the model in chunks, then one new token of each text
at a time. A text that has ended stays in the batch until all have, and its further tokens are dropped.

Shapes: S columns, B texts, V ids.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.comm.collectives import all_gather, all_reduce, gather_bytes
from megazero.comm.grid import Axis
from megazero.generation.draw import draw, penalise_
from megazero.generation.sampling import Sampling
from megazero.model.batch_context import BatchContext
from megazero.model.cache import Cache
from megazero.model.transformer import Transformer
from megazero.plan.cache import CHUNK


class Stream:
    """A batch of texts that grow, and the model's cache of them.

    Args:
        prompts: their ids, at least one each.
        length: the most ids of a text of the batch, with the padding before it.
        longest: the length of the prompts with their padding; 0: that of the longest one.

    Attributes:
        limit: the most ids of a text: the number of learned positions, else `length`.
        held: the bytes of the cache, in the ledger too.
    """

    def __init__(self, decoder: "Decoder", prompts: Sequence[Sequence[int]], length: int, longest: int = 0):
        self._decoder, model, self.held, longest = decoder, decoder.model, 0, longest or max(map(len, prompts))
        self.device = decoder.device or next(iter(model.parameters())).device
        pads = [longest - len(prompt) for prompt in prompts]
        rows = [[0] * pad + [*prompt] for pad, prompt in zip(pads, prompts, strict=True)]
        self.prompts_SB = torch.tensor(rows, device=self.device).T.contiguous()
        self.limit = model.shape.seq_len if model.shape.position == "learned" else length
        self._cache = Cache(pads, length, self.limit, min(CHUNK, length), self.device)
        for rotary in {*model.rotaries} - {None}:
            assert rotary is not None
            rotary.reach(length)

    def logits(self, tokens_SB: Tensor) -> Tensor:
        """Add columns of tokens; return the logits after the last one, [B, V], of the whole vocabulary."""
        model, forward = self._decoder.model, self._decoder.forward or self._decoder.model
        for part_SB in tokens_SB.split(CHUNK):
            ids_B = torch.zeros(part_SB.shape[1], dtype=torch.int64, device=self.device)
            places = self._cache.positions(len(part_SB))
            step = BatchContext(0, ids_B, positions_SB=places, training=False, cache=self._cache)
            with model.whole_sequence():
                logits_1BV = forward(part_SB, step)
            self._cache.stop += len(part_SB)
        if self._cache.stop == len(tokens_SB):  # the first call has allocated it
            self.held = sum(columns.both.nbytes for columns in self._cache.layers.values())
            model.tensor.comm.ledger.hold("cache", self.held)
        return all_gather(logits_1BV[0].T.contiguous(), model.tensor, "logits").T[:, : model.shape.vocab]


@dataclass(frozen=True)
class Decoder:
    """A model that continues texts, on one rank or on many that call it together.

    Attributes:
        forward: (tokens [S, B], context with a cache) -> logits after the last token, [1, B, V], of this rank's part of
            the vocabulary; None: the model's own.
        device: where the model computes; None: where its parameters are.
        data: the ranks that share the texts. They call `forward` equally often, as it may gather parameters over them.
    """

    model: Transformer
    forward: Callable[[Tensor, BatchContext], Tensor] | None = None
    device: torch.device | None = None
    data: Axis = Axis("data")  # noqa: RUF009 - of one rank; nothing is sent

    def check(self, ids: Sequence[int], vocab: int, new: int = 1, where: object = "generate") -> None:
        """Refuse no ids, ids that are not below `vocab`, and too many for `new` more. Raises UserError 112."""
        shape = self.model.shape
        odd = [token for token in ids if not 0 <= token < vocab]
        what = f"id {odd[0]} is not one of {vocab:,}" if odd else "" if len(ids) else "expected ids, got none"
        if shape.position == "learned" and len(ids) + new > shape.seq_len:
            what = f"expected at most {shape.seq_len - new:,} ids, as positions are learned, got {len(ids):,}"
        if what:
            raise UserError(112, what, "change the prompt", where=where)

    @torch.no_grad()
    def continued(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        vocab: int,
        stops: Collection[int],
        numbers: Sequence[int] | None = None,
        ended: Callable[[int, list[int]], bool] = lambda text, ids: False,
    ) -> list[list[int]]:
        """Return the new ids of each text, at most `sampling.tokens`, ending before one of `stops`.

        A model with learned positions ends a text at its last position.

        Args:
            prompts: ids that `check` permits, at least one each.
            vocab: only ids below this are drawn; the model's vocabulary may be larger than the tokenizer's.
            numbers: of the texts, on which the drawn tokens depend; None: 0, 1, ...
            ended: called with the index of a text and its new ids; True: the text has ended.
        """
        size, rank, longest = self.data.size, self.data.rank, max(map(len, prompts))
        own = [*range(rank, len(prompts), size)] or [0]  # a rank without a text repeats the first one
        texts, order = [prompts[text] for text in own], [numbers[text] if numbers else text for text in own]
        stream = Stream(self, texts, longest + sampling.tokens, longest)
        found, tokens_SB = [list[int]() for _ in own], stream.prompts_SB
        open_ = {row for row, prompt in enumerate(texts) if len(prompt) < stream.limit}
        seen_BV = torch.zeros(len(own), vocab, dtype=torch.bool, device=stream.device)
        for row, prompt in zip(seen_BV, texts, strict=True):
            row[torch.tensor(prompt, device=stream.device)] = True
        try:
            for count in range(sampling.tokens):
                if not all_reduce(torch.tensor([len(open_)], device=stream.device), self.data, "agree"):
                    break  # on all ranks that share the texts
                logits_BV = stream.logits(tokens_SB)[:, :vocab].double()
                penalise_(logits_BV, seen_BV, sampling.repetition)
                next_B = draw(logits_BV, sampling, order, count)
                seen_BV.scatter_(1, next_B[:, None], True)
                for row, token in enumerate(next_B.tolist()):
                    if row in open_ and token in stops:
                        open_.remove(row)
                    elif row in open_:
                        found[row].append(token)
                        if ended(own[row], found[row]) or len(texts[row]) + len(found[row]) == stream.limit:
                            open_.remove(row)
                tokens_SB = next_B[None]
        finally:
            self.model.tensor.comm.ledger.hold("cache", -stream.held)
        every = gather_bytes(json.dumps(found).encode(), self.data, "texts", stream.device)
        parts = [json.loads(part) for part in every]
        return [parts[text % size][text // size] for text in range(len(prompts))]
