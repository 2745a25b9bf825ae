"""Draw the next token of each text of a batch from its logits (`sampling.py` states how).

A token is drawn by adding noise to the logits and taking the largest (Gumbel). The noise is a function of the seed, the
number of the text, the number of the token and the id: so a text does not depend on the batch that it is in, nor on the
number of ranks.

Shapes: B texts, V ids.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.generation.sampling import Sampling
from megazero.kernels import counter


def draw(logits_BV: Tensor, sampling: Sampling, numbers: Sequence[int], count: int) -> Tensor:
    """Return the next id of each text, int64 [B].

    Args:
        logits_BV: fp64; overwritten.
        numbers: of the texts.
        count: the number of tokens drawn before.
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    # Relative to the largest, so that a tiny temperature gives -inf and 0 instead of inf - inf.
    logits_BV -= logits_BV.amax(-1, keepdim=True)
    logits_BV /= sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[1]:
        logits_BV.masked_fill_(logits_BV < logits_BV.topk(sampling.top_k).values[:, -1:], -torch.inf)
    if sampling.top_p < 1:
        ordered, places = logits_BV.sort(descending=True)
        shares = ordered.softmax(-1)
        beyond = shares.cumsum(-1) - shares >= sampling.top_p  # the tokens before it have enough
        beyond[:, 0] = False
        logits_BV.masked_fill_(torch.zeros_like(beyond).scatter_(1, places, beyond), -torch.inf)
    step = torch.tensor(count, device=logits_BV.device)
    for logits_V, number in zip(logits_BV, numbers, strict=True):
        words = counter.words(counter.derive_key(sampling.seed, number), 0, len(logits_V), step)
        uniform = words.double().add_(2.0**31 + 0.5).mul_(2.0**-32)
        logits_V -= uniform.log_().neg_().log_()
    return logits_BV.argmax(-1)


def penalise_(logits_BV: Tensor, seen_BV: Tensor, repetition: float) -> None:
    """Make tokens that a text already has less likely."""
    if repetition != 1:
        worse = torch.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
        logits_BV.copy_(torch.where(seen_BV, worse, logits_BV))
