"""Models of transformers that no example has train in every stage as in one process: T5, Mixtral, BERT, Mamba."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import megazero
from tests.library.running import ADAMW, on_ranks, train_plain

FP64, STEPS, VOCAB = 1e-12, 2, 40


def t5() -> nn.Module:
    """Return an encoder with a decoder that share one embedding, and a table of positions in the first blocks only."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    config = transformers.T5Config(vocab_size=VOCAB, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def mixtral() -> nn.Module:
    """Return a model of experts, of which some see no token of a rank."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 6, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(vocab_size=VOCAB, **sizes, **heads, experts_implementation="eager")
    )


def bert() -> nn.Module:
    """Return a model with norms behind the sums, and a head tied to the embedding."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=VOCAB, num_attention_heads=2, **sizes, **dropped)
    return transformers.BertForMaskedLM(config)


def mamba() -> nn.Module:
    """Return a state space model, whose recurrence is plain torch here."""
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=16, state_size=4, num_hidden_layers=2)
    return transformers.MambaForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"t5": t5, "mixtral": mixtral, "bert": bert, "mamba": mamba}


def made(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name]().double()


def loss(module: Callable[..., Any], step: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(11 * step + rank)
    tokens = torch.randint(3, VOCAB, (2, 6), generator=draw)
    return module(input_ids=tokens, labels=tokens).loss


def trained(name: str, stage: int) -> dict[str, Tensor]:
    options = {"name": "adamw", **ADAMW}
    sharded = megazero.shard(made(name), options, stage=stage, clip=0.5, kernels="reference")
    for step in range(STEPS):
        sharded.backward(loss(sharded, step, sharded.rank))
        sharded.step()
    return sharded.full_state_dict()


def plain(name: str, ranks: int) -> dict[str, Tensor]:
    module = made(name)
    train_plain(module, lambda step, rank: loss(module, step, rank), ranks, STEPS)
    return module.state_dict()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stage", range(4))
def test_a_model_trains_as_in_one_process(name: str, stage: int):
    found, expected = on_ranks(2, trained, name, stage)[0], plain(name, 2)
    assert list(found) == list(expected)
    for key, values in expected.items():
        assert torch.allclose(found[key], values, rtol=FP64, atol=FP64), key
