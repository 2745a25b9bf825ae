"""Generate text with a trained run: the run's own config, its newest weights, its tokenizer.

Each new token is drawn from softmax(logits / temperature) over the `top_k` likeliest (Fan et al. 2018), with a private
generator seeded by `seed`, so the same call gives the same text. Every token computes the whole window again, which is
simple, and fast enough to look at samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.builders.assemble import DTYPES, build_model
from megazero.checkpoint.manifest import Manifest
from megazero.checkpoint.store import Store
from megazero.checkpoint.weights import newest_weights
from megazero.config.file import load
from megazero.data.tokenizer import open_tokenizer
from megazero.model.batch_context import BatchContext
from megazero.model.parameter import whole_shapes
from megazero.model.transformer import Transformer
from megazero.observe.sinks import warn
from megazero.run.folder import RunFolder


@dataclass(frozen=True)
class Sampling:
    """The settings for drawing tokens; temperature 0 takes the likeliest."""

    tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0


def generate(folder: RunFolder, prompt: str, sampling: Sampling) -> str:
    """Return the prompt with its continuation; stop early at the end of a document.

    Raises:
        UserError: 112, a tokenizer larger than the model's vocabulary; 113, the folder is not a run or its config names
            no tokenizer; 162, 209, 210, as `open_tokenizer`; 221, the tokenizer differs from that of training; 402,
            there are no weights yet; 404, they are another model's; 410, they are damaged.
    """
    folder.require_run()
    config = load(str(folder.config))
    if config.data.tokenizer is None:
        raise UserError(113, "the run has no data.tokenizer", "train with one to get text", where=folder.config)
    tokenizer = open_tokenizer(config.data.tokenizer, config.model.vocab)
    model = build_model(config)
    found = load_newest_weights(model, Store(folder.checkpoints), DTYPES[config.precision.dtype])
    if found.identity.get("tokenizer") not in (None, tokenizer.fingerprint):
        what = f"the model was trained with tokenizer {found.identity['tokenizer']}, {tokenizer.path} is "
        raise UserError(221, f"{what}{tokenizer.fingerprint}", "use the training's tokenizer", where=folder.config)
    ids = tokenizer.encode(prompt) or [tokenizer.eod]
    new = sample(model, ids, sampling, window=config.model.seq_len, vocab=tokenizer.vocab_size, stop=tokenizer.eod)
    # New ids are decoded after those of the prompt, because some tokenizers drop a space at the start of a text.
    return prompt + tokenizer.decode([*ids, *new])[len(tokenizer.decode(ids)) :]


def load_newest_weights(model: Transformer, store: Store, dtype: torch.dtype) -> Manifest:
    """Load the newest whole weights into a (meta) model; return their manifest. Raises UserError 402, 404, 410."""
    manifest, weights = newest_weights(store, whole_shapes(model), warn)
    for name, parameter in dict(model.named_parameters()).items():
        torch.utils.swap_tensors(parameter, nn.Parameter(weights[name].to(dtype)))
    return manifest


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
