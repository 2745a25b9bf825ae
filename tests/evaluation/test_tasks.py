"""Tasks of lm-eval: each item equals lm-eval's own `hf` model, on one process and on grids."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import megazero
from megazero.__main__ import main
from megazero.generation.decode import Decoder
from megazero.generation.sampling import Sampling
from megazero.generation.text import Writer
from tests.byte_level import byte_level_bpe

HERE = Path(__file__).parent / "tasks"
LENGTH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of transformers, the run made from it, and task files."""
    folder = tmp_path_factory.mktemp("tasks")
    made = byte_level_bpe([path.read_text() for path in sorted(HERE.iterdir())], 300, ["<|endoftext|>"])
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=304,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    model = transformers.Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder / "theirs")
    made.save(str(folder / "theirs/tokenizer.json"))
    assert main(["import", "--from", "hf", "--model", str(folder / "theirs"), "--out", str(folder / "run")]) == 0
    for path in HERE.iterdir():
        (folder / path.name).write_text(path.read_text().replace("FOLDER", str(folder)))
    return folder


TASKS = ("mz_choice", "mz_rolling", "mz_until")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[Any]]:
    """What lm-eval's own model answers, by task."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from megazero.evaluation.tasks import numbers_of

    model = transformers.Qwen3ForCausalLM.from_pretrained(folder / "theirs")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "theirs/tokenizer.json"), eos_token="<|endoftext|>"
    )
    theirs = HFLM(pretrained=model, tokenizer=made, max_length=LENGTH, batch_size=2, device="cpu")
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(theirs, tasks=[*TASKS], task_manager=manager, bootstrap_iters=0)
    assert found is not None
    own = {task: [each["resps"] for each in found["samples"][task]] for task in TASKS}
    return own | {"numbers": [numbers_of(found)]}


def answers(
    folder: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Our answers by task, and the printed numbers."""
    from megazero.evaluation import tasks

    items, honest, known = tmp_path / "items.json", tasks.simple_evaluate, dict[str, list[Any]]()

    def evaluate(model: Any, **how: Any) -> Any:
        found: Any = honest(model, **how | {"log_samples": True})
        known.update({task: [each["resps"] for each in samples] for task, samples in found["samples"].items()})
        items.write_text(json.dumps(known))
        return found

    monkeypatch.setattr(tasks, "simple_evaluate", evaluate)
    files = ",".join(str(folder / f"{name}.yaml") for name in ("choice", "rolling", "until"))
    capfd.readouterr()
    assert main(["eval", "--run", str(folder / "run"), "--tasks", files, "--json", "--batch", "2", *arguments]) == 0
    return json.loads(items.read_text()), json.loads(capfd.readouterr().out)["tasks"]


FULL = [pytest.param(grid, marks=pytest.mark.full) for grid in (("--nproc", "2", "--tensor", "2"), ("--nproc", "4"))]


@pytest.mark.parametrize("grid", [(), *FULL], ids=["one", "tensor 2", "stage 3 on 4"])
def test_items_equal_those_of_the_hf_model(
    grid: tuple[str, ...],
    folder: Path,
    expected: dict[str, list[Any]],
    tmp_path: Path,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, numbers = answers(folder, tmp_path, capfd, monkeypatch, *grid)
    assert own["mz_until"] == expected["mz_until"]
    for task in TASKS[:2]:
        flat, theirs = (torch.tensor(pairs(each)) for each in (own[task], expected[task]))
        torch.testing.assert_close(flat, theirs, rtol=1e-6, atol=0.0)
    for name, value in expected["numbers"][0].items():
        assert numbers[name] == pytest.approx(value, rel=1e-6), name


def pairs(answers: list[Any]) -> list[list[float]]:
    """Log-likelihoods and flags of a task, without the nesting of documents and repeats."""
    flat = [each[0] for document in answers for each in document]
    return [[float(value) for value in (each if isinstance(each, list | tuple) else [each])] for each in flat]


class _Here:
    """A model in this process for `Harness`, which notes the texts that it continues at once."""

    def __init__(self, folder: Path):
        opened = megazero.load(folder / "theirs")
        assert opened.tokenizer is not None
        self.tokenizer = opened.tokenizer
        self.scorer = SimpleNamespace(length=LENGTH, texts=3, at_once=2)
        self._opened = opened

    def ask(self, name: str, *arguments: Any) -> Any:
        assert name == "texts"
        prompts, sampling, stop, first = arguments
        writer = Writer(Decoder(self._opened.model), self.tokenizer, Sampling(**sampling), stop, batch=3)
        return list(writer.texts(prompts, first=first))


def test_equal_requests_have_samples_of_their_own(folder: Path) -> None:
    from megazero.evaluation.tasks import Harness

    calls: Any = _Here(folder)
    how = {"do_sample": True, "temperature": 1.0, "until": [], "max_gen_toks": 8}
    found = Harness(calls).generate_until([SimpleNamespace(args=("steps:", how))] * 8)
    assert len(set(found)) == 8, found
    assert len(set(Harness(calls).generate_until([SimpleNamespace(args=("", how))] * 2))) == 2, "an empty context"
