"""Train transformers' Llama from random weights, with ZeRO over all ranks.

    python examples/llama.py                                         one rank
    torchrun --nproc-per-node 2 examples/llama.py --stage 3          two ranks

The model and its loss are those of transformers. Each layer is a unit; the rotary frequencies are a buffer.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from any folder, also without an installation

from examples.training import LENGTH, VOCAB, counting, train


def make(layers: int = 2, width: int = 32) -> nn.Module:
    """Return a small Llama with grouped-query attention."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def loss(model: Callable[..., Any], tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


if __name__ == "__main__":
    train(__doc__, make, counting, loss)
