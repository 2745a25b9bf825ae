"""Continue a batch of texts, token by token, with a cache of keys and values.

Texts of unequal length are aligned at their ends. The prompts pass the model in chunks, then one new token of each text
at a time. A text that has ended stays in the batch until all have, and its further tokens are dropped.

Shapes: S columns, B texts, V ids.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from megazero.comm.collectives import all_gather
from megazero.generation.sampling import Sampling, draw, penalise_
from megazero.model.batch_context import BatchContext
from megazero.model.cache import Cache
from megazero.model.transformer import Transformer
from megazero.plan.cache import CHUNK


class Stream:
    """A batch of texts that grow, and the model's cache of them.

    Args:
        prompts: their ids, at least one each.
        length: the most ids of a text of the batch, with the padding before it.

    Attributes:
        limit: the most ids of a text: the number of learned positions, else `length`.
    """

    def __init__(self, model: Transformer, prompts: Sequence[Sequence[int]], length: int):
        longest, self._model = max(map(len, prompts)), model
        self.device = next(iter(model.parameters())).device
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
        for part_SB in tokens_SB.split(CHUNK):
            *body, head = self._model.layers
            ids_B = torch.zeros(part_SB.shape[1], dtype=torch.int64, device=self.device)
            places = self._cache.positions(len(part_SB))
            step = BatchContext(0, ids_B, positions_SB=places, training=False, cache=self._cache)
            x = part_SB
            for layer in body:
                x = layer(x, step)
            self._cache.stop += len(part_SB)
        if self._cache.stop == len(tokens_SB):  # the first call has allocated it
            held = sum(columns.both.nbytes for columns in self._cache.layers.values())
            self._model.tensor.comm.ledger.hold("cache", held)
        logits_1BV = head(x[-1:].contiguous(), step)
        whole_VB = all_gather(logits_1BV[0].T.contiguous(), self._model.tensor, "logits")
        return whole_VB.T[:, : self._model.shape.vocab]


@torch.no_grad()
def continued(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    vocab: int,
    stops: Collection[int],
    numbers: Sequence[int] | None = None,
    ended: Callable[[int, list[int]], bool] = lambda text, ids: False,
) -> list[list[int]]:
    """Return the new ids of each text, at most `sampling.tokens`, ending before one of `stops`. Every rank calls it.

    A model with learned positions ends a text at its last position.

    Args:
        vocab: only ids below this are drawn; the model's vocabulary may be larger than the tokenizer's.
        numbers: of the texts, on which the drawn tokens depend; None: 0, 1, ...
        ended: called with the index of a text and its new ids; True: the text has ended.
    """
    stream = Stream(model, prompts, max(map(len, prompts)) + sampling.tokens)
    found, order = [list[int]() for _ in prompts], list(numbers or range(len(prompts)))
    open_ = {text for text, prompt in enumerate(prompts) if len(prompt) < stream.limit}
    seen_BV = torch.zeros(len(prompts), vocab, dtype=torch.bool, device=stream.device)
    for row, prompt in zip(seen_BV, prompts, strict=True):
        row[torch.tensor(prompt, device=stream.device)] = True
    tokens_SB = stream.prompts_SB
    for count in range(sampling.tokens if open_ else 0):
        logits_BV = stream.logits(tokens_SB)[:, :vocab].double()
        penalise_(logits_BV, seen_BV, sampling.repetition)
        next_B = draw(logits_BV, sampling, order, count)
        seen_BV.scatter_(1, next_B[:, None], True)
        for text, token in enumerate(next_B.tolist()):
            if text in open_ and token in stops:
                open_.remove(text)
            elif text in open_:
                found[text].append(token)
                if ended(text, found[text]) or len(prompts[text]) + len(found[text]) == stream.limit:
                    open_.remove(text)
        if not open_:
            break
        tokens_SB = next_B[None]
    return found
