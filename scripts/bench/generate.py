"""Compare generation with a cache with transformers' generate: the same weights, threads, prompts and greedy tokens.

    python scripts/bench/generate.py [--launches 3] [--pairs 9] [--json] [--save]

    12 layers, hidden 512, 8 heads in 4 groups, SwiGLU 1,536, vocabulary 8,192: a Llama of 43M parameters, fp32

One process of one thread; a prompt of 64 tokens and 64 new ones, in batches of 1 and 16 texts. The reference (1.000) is
transformers. The new tokens of both are compared. *matrix products alone*: the products of every pass without attention
and all else.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder, also without an installation

from scripts.bench.harness import Group, add_options, run
from scripts.bench.processes import Call, System

LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCAB, PROMPT, NEW = 12, 512, 8, 4, 1536, 8192, 64, 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    return run(groups(), options)


def groups() -> Iterator[Group]:
    """Yield a group for each batch."""
    for batch in (1, 16):
        systems = [System("transformers", theirs, (batch,)), System("ours", ours, (batch,))]
        systems.append(System("matrix products alone", products, (batch,), has_loss=False))
        yield Group(f"generation, {batch} texts at once", systems)


def theirs(batch: int) -> Call:
    """Return a call that generates with transformers, and returns the mean of the new tokens."""
    import torch
    import transformers

    model = _model()
    how = transformers.GenerationConfig(do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0)
    prompts = _prompts(batch)

    def call() -> float:
        with torch.no_grad():
            return float(model.generate(prompts, generation_config=how)[:, PROMPT:].double().mean())

    return call


def ours(batch: int) -> Call:
    """Return a call that generates with megazero, and returns the mean of the new tokens."""
    import megazero

    with tempfile.TemporaryDirectory() as folder:
        _model().save_pretrained(folder)
        opened = megazero.load(folder)
    prompts = _prompts(batch).tolist()

    def call() -> float:
        new = opened.generate(prompts, tokens=NEW, temperature=0.0)
        return sum(map(sum, new)) / sum(map(len, new))

    return call


def products(batch: int) -> Call:
    """Return a call that computes the products with all matrices, and nothing else: a bound for both."""
    import torch

    named = [(name, each.detach()) for name, each in _model().named_parameters() if each.dim() == 2]
    matrices = [(name == "lm_head.weight", each) for name, each in named if "embed" not in name]
    inputs = {each.shape[1]: torch.full((batch * PROMPT, each.shape[1]), 0.5) for _, each in matrices}

    def call() -> float:
        for rows in (batch * PROMPT, *[batch] * (NEW - 1)):
            for is_head, matrix in matrices:
                torch.nn.functional.linear(inputs[matrix.shape[1]][: batch if is_head else rows], matrix)
        return 0.0

    return call


def _model() -> Any:
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    model, draws = transformers.LlamaForCausalLM(config).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=draws) + (parameter.dim() == 1))
    return model


def _prompts(batch: int) -> Any:
    import torch

    return torch.randint(VOCAB, (batch, PROMPT), generator=torch.Generator().manual_seed(2))


if __name__ == "__main__":
    sys.exit(main())
