"""Train transformers' GPT-2 from random weights, with ZeRO over all ranks.

    python examples/gpt2.py                                          one rank
    torchrun --nproc-per-node 2 examples/gpt2.py --stage 3           two ranks

The model and its loss are those of transformers. Each block is a unit; the embedding, which is also the head, belongs
to the root unit.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from any folder, also without an installation

from examples.training import LENGTH, VOCAB, counting, train


def make(layers: int = 2, width: int = 32) -> nn.Module:
    """Return a small GPT-2 without dropout, so that results do not depend on the number of ranks."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    return GPT2LMHeadModel(config)


def loss(model: Callable[..., Any], tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


if __name__ == "__main__":
    train(__doc__, make, counting, loss)
