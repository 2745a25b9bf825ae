"""Generate text with a trained run: the run's own config, its newest weights, its tokenizer.

Each new token is drawn from softmax(logits / temperature) over the `top_k` likeliest (Fan et al. 2018), with a private
generator seeded by `seed`, so the same call gives the same text. Every token computes the whole window again, which is
simple, and fast enough to look at samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.model.batch_context import BatchContext
from megazero.model.transformer import Transformer
from megazero.run.folder import RunFolder
from megazero.tools.opened import load


@dataclass(frozen=True)
class Sampling:
    """The settings for drawing tokens; temperature 0 takes the likeliest."""

    tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0


def generate(folder: RunFolder, prompt: str, sampling: Sampling, *, average: bool = False) -> str:
    """Return the prompt with its continuation; stop early at the end of a document.

    Args:
        average: generate with the averages of the weights.

    Raises:
        UserError: 113, the config names no tokenizer; and those of `load`.
    """
    opened = load(folder.path, average=average)
    if (tokenizer := opened.tokenizer) is None:
        raise UserError(113, "the run has no data.tokenizer", "train with one to get text", where=folder.config)
    ids, window = tokenizer.encode(prompt) or [tokenizer.eod], opened.config.model.seq_len
    new = sample(opened.model, ids, sampling, window=window, vocab=tokenizer.vocab_size, stop=tokenizer.eod)
    # New ids are decoded after those of the prompt, because some tokenizers drop a space at the start of a text.
    return prompt + tokenizer.decode([*ids, *new])[len(tokenizer.decode(ids)) :]


def sample(model: Transformer, ids: list[int], sampling: Sampling, *, window: int, vocab: int, stop: int) -> list[int]:
    """Return new ids after `ids` (not empty), at most `sampling.tokens`, ending before the id `stop`.

    Args:
        window: number of ids that the model can attend to.
        vocab: only ids below this are drawn; the model's vocabulary may be larger than the tokenizer's.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    context, new = list(ids), []
    with torch.no_grad(), doing("generating", sampling.tokens) as progress:
        while len(new) < sampling.tokens:
            tokens_S1 = torch.tensor(context[-window:])[:, None]
            logits_V = model(tokens_S1, BatchContext(0, torch.zeros(1, dtype=torch.int64), training=False))[-1, 0]
            token = int(_draw(logits_V[:vocab], sampling, generator))
            if token == stop:
                break
            context.append(token)
            new.append(token)
            progress.advance()
    return new


def _draw(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    if sampling.temperature == 0:
        return logits_V.argmax()
    top, indices = logits_V.double().topk(min(sampling.top_k, len(logits_V)))
    # Relative to the largest, so that a tiny temperature gives -inf and 0 instead of inf - inf.
    return indices[torch.multinomial(((top - top[0]) / sampling.temperature).softmax(0), 1, generator=generator)]
