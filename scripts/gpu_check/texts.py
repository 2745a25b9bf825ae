"""Generate texts on the device: compare them with the CPU's, and their speed with transformers' generate.

The tokens are greedy. A small model in fp32 must give the tokens of the CPU. Llama 3.2 1B with random weights in bf16
then continues 1 and 16 prompts of 64 tokens by 64 tokens; transformers' model has the same shape and its own weights.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megazero.builders.assemble import build_model
from megazero.generation.decode import Decoder
from megazero.generation.sampling import Sampling
from megazero.kernels.select import choose
from megazero.model.parameter import whole_shapes
from megazero.model.transformer import Transformer
from megazero.tools.convert.tensors import filled
from scripts.gpu_check.findings import Asked, Row, error_line
from scripts.gpu_check.layouts import MODEL, Case, config_of, exact
from scripts.gpu_check.speed import free
from scripts.gpu_check.steps import LLAMA

BATCHES, PROMPT, NEW, REPEATS = (1, 16), 64, 64, 3
Writes = Callable[[list[list[int]]], Any]


def rows(asked: Asked) -> Iterator[Row]:
    """Yield the comparison with the CPU, then the tokens per second of both systems."""
    exact(asked.device)
    small = MODEL | {"position": "rotary", "dropout": 0.0}
    cpu = torch.device("cpu")
    here, there = (_model(small, device, cpu, torch.float32) for device in (asked.device, cpu))
    prompts = _prompts(3, MODEL["vocab"], 9)
    equal = _ours(here, MODEL["vocab"])(prompts) == _ours(there, MODEL["vocab"])(prompts)
    yield {"name": "tokens of a CPU", "equal": equal, "fault": None if equal else "the tokens differ"}
    torch.use_deterministic_algorithms(False)
    shape = LLAMA.of(asked).model
    for name, make in (("ours", _our_writer), ("transformers", _their_writer)):
        try:
            writes = make(shape, asked)
            for batch in BATCHES:
                yield {"name": f"{name}, {batch} texts"} | _measured(writes, _prompts(batch, shape["vocab"]), asked)
            del writes
        except Exception as error:
            yield {"name": name, "fault" if name == "ours" else "absent": error_line(error)}
        free(asked)


def _measured(writes: Writes, prompts: list[list[int]], asked: Asked) -> Row:
    writes(prompts)
    asked.synchronize()
    begin = time.perf_counter()
    for _ in range(REPEATS):
        writes(prompts)
    asked.synchronize()
    seconds = (time.perf_counter() - begin) / REPEATS
    return {"new_tokens_per_s": len(prompts) * NEW / seconds, "ms_per_token": 1e3 * seconds / NEW}


def _our_writer(shape: dict[str, Any], asked: Asked) -> Writes:
    return _ours(_model(shape, asked.device, asked.device, torch.bfloat16), shape["vocab"])


def _their_writer(shape: dict[str, Any], asked: Asked) -> Writes:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["ffn"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=shape["seq_len"],
        tie_word_embeddings=shape["tie_embeddings"],
        bos_token_id=None,
        eos_token_id=None,
        dtype=torch.bfloat16,
    )
    with torch.device(asked.device):
        model: Any = transformers.LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).eval()
    how = transformers.GenerationConfig(do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0)

    def writes(prompts: list[list[int]]) -> Any:
        with torch.no_grad():
            ids = torch.tensor(prompts, device=asked.device)
            return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how).tolist()

    return writes


def _ours(model: Transformer, vocab: int) -> Writes:
    sampling = Sampling(tokens=NEW, temperature=0.0)
    return lambda prompts: Decoder(model).continued(prompts, sampling, vocab=vocab, stops=())


def _model(shape: dict[str, Any], device: torch.device, drawn_on: torch.device, dtype: torch.dtype) -> Transformer:
    """Return a model with random weights, drawn on a device."""
    model = build_model(config_of(Case(""), shape), choose("auto", device, dtype), None)
    draws = torch.Generator(drawn_on).manual_seed(1)
    sizes = whole_shapes(model)

    def take(name: str) -> torch.Tensor:
        drawn = torch.randn(tuple(sizes[name]), generator=draws, device=drawn_on)
        return drawn * 0.02 + 1.0 if name.endswith("norm.weight") else drawn * 0.05

    return filled(model, take, dtype, device)


def _prompts(count: int, vocab: int, length: int = PROMPT) -> list[list[int]]:
    return torch.randint(vocab, (count, length), generator=torch.Generator().manual_seed(2)).tolist()
