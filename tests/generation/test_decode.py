"""A cache changes no logits: all kinds of layers, unequal texts, tensor ranks. No text depends on its batch."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megazero.builders.assemble import build_model
from megazero.builders.pipeline import model_shape
from megazero.comm.grid import Axis, Grid
from megazero.config.file import load
from megazero.config.schema import Config
from megazero.generation import decode
from megazero.generation.decode import Decoder, Stream
from megazero.generation.draw import draw, penalise_
from megazero.generation.sampling import Sampling
from megazero.kernels.operations import REFERENCE
from megazero.model.batch_context import BatchContext
from megazero.model.parameter import declaration_of
from megazero.model.transformer import Transformer
from megazero.plan.cache import cache_bytes
from megazero.tools.convert.tensors import filled
from tests.ranks import run_ranks
from tests.tools.certify.test_options import SETS
from tests.tools.convert.models import FAMILIES, model_of

LONG, SHORT, NEW = 13, 4, 9
PROMPTS = [list(range(3, 3 + LONG)), [7] * SHORT, [9, 2, 5, 8, 1, 1, 6]]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
OPTIONS: dict[str, tuple[str, ...]] = {"gpt": (), **SETS}


def config_of(name: str, *more: str) -> Config:
    sizes = ("model.layers=4", "model.hidden=48", "model.heads=4", "model.vocab=50", "model.seq_len=32")
    return load("tiny", [*sizes, "model.ffn=64", *OPTIONS[name], *more])


def built(config: Config, dtype: torch.dtype, tensor: Axis | None = None) -> Transformer:
    model, whole = build_model(config, REFERENCE, tensor), build_model(config)
    declared = {name: declaration_of(p) for name, p in whole.named_parameters()}

    def weights(name: str) -> Tensor:
        own = declared[name]
        scale = 3.0 if own.std else 1.0  # so that attention is not flat
        return own.initial(0, name, 0, math.prod(own.shape)).view(own.shape) * scale

    return filled(model, weights, dtype)


def alone(model: Transformer, ids: Sequence[int]) -> Tensor:
    """The logits after a text, without a cache: [V]."""
    step = BatchContext(0, torch.zeros(1, dtype=torch.int64), training=False)
    return model(torch.tensor(ids)[:, None], step)[-1, 0]


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def steps(model: Transformer, chunk: int) -> list[Tensor]:
    """The logits after the prompts and after each further token, with a cache: [B, V]."""
    stream = Stream(Decoder(model), PROMPTS, LONG + NEW)
    found = [stream.logits(stream.prompts_SB)]
    return [*found, *(stream.logits(torch.full((1, len(PROMPTS)), token + 1)) for token in range(NEW - 1))]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("chunk", [512, 5])
@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_a_cache_changes_no_logits(name: str, chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "CHUNK", chunk)
    model = built(config_of(name), dtype)
    for count, logits_BV in enumerate(steps(model, chunk)):
        for prompt, logits_V in zip(PROMPTS, logits_BV, strict=True):
            expected = alone(model, [*prompt, *range(1, count + 1)])
            assert apart(logits_V, expected) <= TOLERANCES[dtype], (count, len(prompt))


def of_tensor_rank(grid: Grid, name: str) -> list[Tensor]:
    with torch.no_grad():
        return steps(
            built(config_of(name, f"parallel.tensor={grid['tensor'].size}"), torch.float64, grid["tensor"]), 512
        )


@pytest.mark.parametrize("name", ["gpt", "gemma", pytest.param("granite", marks=pytest.mark.full)])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_tensor_ranks_have_the_logits_of_one(name: str, ranks: int) -> None:
    with torch.no_grad():
        expected = steps(built(config_of(name), torch.float64), 512)
    for found in run_ranks(ranks, of_tensor_rank, name, tensor=ranks):
        assert all(apart(a, b) <= 1e-12 for a, b in zip(found, expected, strict=True))


def bytes_of_rank(grid: Grid, name: str, length: int) -> int:
    model = built(config_of(name, f"parallel.tensor={grid['tensor'].size}"), torch.float32, grid["tensor"])
    stream = Stream(Decoder(model), PROMPTS, length)
    with torch.no_grad():
        stream.logits(stream.prompts_SB)
    return grid.comm.ledger.bytes["cache"].now


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("ranks", "length"), [(1, LONG + NEW), (2, 700)])
def test_the_cache_takes_the_planned_bytes(name: str, ranks: int, length: int) -> None:
    expected = cache_bytes(model_shape(config_of(name)), ranks, len(PROMPTS), length, 4)
    assert set(run_ranks(ranks, bytes_of_rank, name, length, tensor=ranks)) == {expected}


@pytest.mark.parametrize("sampling", [Sampling(20, 0.0), Sampling(20, 1.0, 0, seed=3), Sampling(20, 0.7, 20, 0.9, 1.3)])
def test_a_text_does_not_depend_on_its_batch(sampling: Sampling) -> None:
    model, how = built(config_of("gemma"), torch.float64), {"vocab": 50, "stops": {49}}
    together = Decoder(model).continued(PROMPTS, sampling, **how)
    for number, prompt in enumerate(PROMPTS):
        assert Decoder(model).continued([prompt], sampling, **how, numbers=[number]) == [together[number]]


def test_learned_positions_end_a_text() -> None:
    model = built(config_of("gpt"), torch.float64)
    together = Decoder(model).continued(PROMPTS, Sampling(40, 1.0), vocab=50, stops=())
    assert [len(new) for new in together] == [32 - len(prompt) for prompt in PROMPTS]
    beyond = Decoder(built(config_of("olmo"), torch.float64)).continued(PROMPTS, Sampling(40, 1.0), vocab=50, stops=())
    assert [len(new) for new in beyond] == [40] * len(PROMPTS)


def test_what_is_drawn_follows_the_settings() -> None:
    logits_V = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0], dtype=torch.float64)

    def shares(**how: Any) -> Tensor:
        rows = logits_V.repeat(5_000, 1)
        found = draw(rows, Sampling(**how), range(len(rows)), 0)
        return torch.bincount(found, minlength=5) / len(rows)

    def close(found: Tensor, expected: Tensor) -> bool:
        return bool(((found - expected).abs() <= 5 * (expected * (1 - expected) / 5_000).sqrt()).all())

    assert close(shares(temperature=1.0, top_k=0), logits_V.softmax(0))
    assert close(shares(temperature=0.5, top_k=2), (2 * logits_V[:2]).softmax(0) @ torch.eye(2, 5, dtype=torch.float64))
    most = (logits_V.softmax(0) * torch.tensor([1, 1, 0, 0, 0])) / logits_V.softmax(0)[:2].sum()
    assert close(shares(temperature=1.0, top_k=0, top_p=0.7), most)  # the first has 0.64
    assert shares(temperature=1.0, top_k=0, top_p=0.6)[0] == shares(temperature=1e-300)[0] == 1
    penalised = logits_V[None].clone()
    penalise_(penalised, torch.tensor([[True, False, False, True, False]]), 2.0)
    assert penalised.tolist() == [[1.0, 1.0, 0.0, -2.0, -2.0]]


QUICK = ("gemma3_text", "qwen3", "gpt2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in FAMILIES])
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Any) -> None:
    """200 tokens, with random weights, from prompts of unequal length in one batch."""
    import megazero

    theirs = model_of(name, **{"n_positions" if name == "gpt2" else "max_position_embeddings": 256}).eval()
    theirs.generation_config.eos_token_id = None
    theirs.save_pretrained(tmp_path)
    ours = megazero.load(tmp_path)
    draws = torch.Generator().manual_seed(1)
    # Beyond the 16 positions after which transformers changes the angles of a model with longrope.
    prompts = [torch.randint(3, 400, (length,), generator=draws).tolist() for length in (20, 17)]
    found = ours.generate(prompts, tokens=200, temperature=0.0)
    config = transformers.GenerationConfig(do_sample=False, max_new_tokens=200, pad_token_id=0)
    for prompt, own in zip(prompts, found, strict=True):
        expected = theirs.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()
        assert own == expected and len(own) == 200
