"""The score of held-out windows, against scores that are known beforehand."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from megazero.base.errors import UserError
from megazero.comm.grid import single
from megazero.data.batch import MicroBatch
from megazero.data.loader import validation_batches
from megazero.data.tokenizer import open_tokenizer
from megazero.train.validation import Validation
from tests.tiny_run import VOCAB, TinyData, built
from tests.windows import open_datasets

CPU = torch.device("cpu")


def validation(given: list[MicroBatch], losses, token_bytes: np.ndarray | None) -> Validation:
    """Of one process, with losses of one batch at a time."""
    grid = single()
    axes = grid.partial("loss")
    return Validation("", None, lambda: given, lambda many: [losses(b) for b in many], token_bytes, axes, 1, CPU)


def scored(of: Validation) -> dict[str, float]:
    found = of.score(1, lambda: False)
    assert found is not None
    return {**found}


def batches(tiny_data: TinyData, micro: int, limit: int | None, mask_eod: bool = False) -> list[MicroBatch]:
    _, valid = open_datasets(str(tiny_data.train), 0.1, 32, VOCAB, mask_eod)
    assert valid is not None
    return list(validation_batches(valid, micro, limit))


@pytest.mark.parametrize("mask_eod", [False, True])
def test_uniform_model_costs_log_vocab(tiny_data: TinyData, mask_eod: bool):
    tokens = open_tokenizer(tiny_data.tokenizer)
    given = batches(tiny_data, 3, 25, mask_eod)
    assert [batch.tokens_SB.shape[1] for batch in given] == [3] * 8 + [1]
    uniform = validation(given, lambda b: b.valid_SB * math.log(VOCAB), tokens.token_bytes())
    score = scored(uniform)
    targets = torch.cat([batch.targets_SB[batch.valid_SB] for batch in given])
    assert len(targets) < 25 * 32 if mask_eod else len(targets) == 25 * 32
    size = tokens.token_bytes()[targets.numpy()].sum()
    assert score["valid_loss"] == pytest.approx(math.log(VOCAB), rel=1e-6)  # the losses are fp32
    assert score["valid_bits_per_byte"] == pytest.approx(len(targets) * math.log2(VOCAB) / size, rel=1e-6)


def test_bytes_are_those_of_the_text(tiny_data: TinyData):
    """Bits per byte divide by the text that was scored, so they compare across tokenizers."""
    tokenizer, given = open_tokenizer(tiny_data.tokenizer), batches(tiny_data, 1, 3)
    text = "".join(tokenizer.decode(batch.targets_SB[:, 0].tolist()) for batch in given)
    one_bit_per_token = validation(given, lambda b: b.valid_SB * math.log(2), tokenizer.token_bytes())
    expected = 3 * 32 / len(text.encode())
    assert scored(one_bit_per_token)["valid_bits_per_byte"] == pytest.approx(expected, rel=1e-6)


def test_mean_is_over_tokens_not_over_batches(tiny_data: TinyData):
    given = batches(tiny_data, 2, 3)  # two windows, then one
    by_size = validation(given, lambda b: b.valid_SB.double() * b.valid_SB.shape[1], None)
    assert scored(by_size) == {"valid_loss": (2 * 2 + 1 * 1) / 3}


def test_nothing_to_score_is_nan(tiny_data: TinyData):
    given = batches(tiny_data, 1, 1)
    given[0].valid_SB.zero_()
    score = scored(validation(given, lambda b: torch.zeros(b.valid_SB.shape), np.ones(VOCAB, np.int64)))
    assert math.isnan(score.pop("valid_loss")) and not score


def test_score_of_a_model_repeats_without_dropout_and_whatever_the_micro_batch(tiny_data: TinyData, tmp_path: Path):
    def score(micro: int, *options: str) -> float:
        options = (f"batch.micro={micro}", "precision.dtype=fp64", "data.valid_samples=4", *options)
        trainer, _ = built(tiny_data.load(tmp_path / "-".join(map(str, (micro, *options))).replace("/", ""), *options))
        with torch.no_grad():
            first, second = (trainer.evaluations[0].score(1, lambda: False) for _ in range(2))
        trainer.close()
        assert first is not None and first == second
        return first["valid_loss"]

    whole = score(4)
    assert score(4, "model.dropout=0.5") == whole
    assert abs(score(1) - whole) <= 1e-13 * whole
    assert whole == pytest.approx(math.log(VOCAB), rel=0.02)  # an untrained model knows nothing


def test_ids_that_the_tokenizer_does_not_have_are_found_before_training(tiny_data: TinyData):
    given = batches(tiny_data, 2, 4)
    largest = max(int(batch.targets_SB.max()) for batch in given)
    ones = np.ones(largest + 1, np.int64)
    validation(given, lambda b: b.valid_SB * 1.0, ones).check("valid.bin")
    with pytest.raises(UserError, match=f"MZ-112 valid.bin: token {largest} .*{largest} pieces"):
        validation(given, lambda b: b.valid_SB * 1.0, ones[:-1]).check("valid.bin")
