"""Evaluate a model on tasks of lm-eval (github.com/EleutherAI/lm-evaluation-harness), on the ranks that hold the model.

Rank 0 runs lm-eval, and asks all ranks for the work (`calls.py`). Only rank 0 imports this file. Tokens are scored as
lm-eval's `hf` model scores them, with the tokenizer of the run and its end-of-document token before texts that have no
context.
"""

import contextlib
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.files import replace_file
from megazero.evaluation.calls import Calls
from megazero.evaluation.windows import Window, windows_of
from megazero.generation.sampling import Sampling
from megazero.launcher.environment import forbid_pools

forbid_pools()
logging.getLogger("lm_eval").setLevel(logging.ERROR)
_RESAMPLES = 1000  # for the standard errors of metrics that are no means


class Harness(TemplateLM):
    """The model that lm-eval sees on rank 0."""

    def __init__(self, calls: Calls):
        super().__init__()
        self._calls, self._tokenizer, self._length = calls, calls.tokenizer, calls.scorer.length

    @property
    def eot_token_id(self) -> int:
        """Return the id of the end of a document, which precedes texts without context."""
        return self._tokenizer.eod

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return self._tokenizer.encode(string)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        length = self._length + 1
        return self._scored([((before + own)[-length:], min(len(own), self._length)) for _, before, own in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each text, from windows that do not share targets."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        windows = [list(windows_of(ids, self.eot_token_id, self._length, self._length)) for ids in texts]
        found = iter(self._scored([window for own in windows for window in own]))
        return [sum(next(found)[0] for _ in own) for own in windows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Return a continuation of each context, up to one of its stop texts."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        found, eod = [""] * len(requests), self._tokenizer.decode([self.eot_token_id])
        with doing("generating", len(requests)) as progress:
            for settings, numbers in groups.items():
                how: dict[str, Any] = {**normalize_gen_kwargs(json.loads(settings))}
                new, stop = how["max_gen_toks"], [text for text in [*how["until"], eod] if text]
                names = {"temperature": 0.0, "top_k": 50, "top_p": 1.0}
                sampling = Sampling(new, **{name: how.get(name, default) for name, default in names.items()})
                room = self._length - new
                if room <= 0:
                    what = f"a task asks for {new:,} new tokens, model.seq_len is {self._length:,}"
                    raise UserError(230, what, "leave the task out", where="tasks")
                ids = {number: self.tok_encode(requests[number].args[0])[-room:] for number in numbers}
                numbers.sort(key=lambda number: -len(ids[number]))
                for some in _cut(numbers, self._calls.scorer.at_once):
                    texts = self._calls.texts([ids[number] for number in some], sampling, stop)
                    for number, text in zip(some, texts, strict=True):
                        found[number] = text
                    progress.advance(len(some))
        return found

    def _scored(self, windows: Sequence[Window]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each window's scored tokens, and whether greedy decoding gives them."""
        found: list[tuple[float, bool]] = [(0.0, False)] * len(windows)
        order = sorted(range(len(windows)), key=lambda number: -len(windows[number][0]))
        with doing("evaluating", len(order)) as progress:
            for some in _cut(order, self._calls.scorer.at_once):
                for number, (nats, greedy) in zip(some, self._calls.scores([windows[i] for i in some]), strict=True):
                    found[number] = -nats, greedy
                progress.advance(len(some))
        return found


def _cut(numbers: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(numbers), size):
        yield numbers[start : start + size]


class Tasks:
    """Tasks of lm-eval.

    Args:
        names: of tasks or groups of lm-eval, or files (.yaml) that define a task.

    Raises:
        UserError: 230, a task is unknown, or its data cannot be loaded.
    """

    def __init__(self, names: Sequence[str]):
        self._names, self._manager = list(names), TaskManager()
        with _explained(), doing("loading tasks"):
            self._manager.load(self._names)

    def numbers(self, calls: Calls, items: Path | None, *, errors: bool) -> dict[str, float]:
        """Return the numbers of lm-eval's results (`numbers_of`). Rank 0 calls it while the other ranks serve.

        Args:
            items: the file for the answers to each item; None: none.
            errors: with standard errors.
        """
        how: dict[str, Any] = {"bootstrap_iters": _RESAMPLES * errors, "log_samples": items is not None}
        how |= dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed"))  # leave torch's generator alone
        how |= {"tasks": self._names, "task_manager": self._manager}
        try:
            with _explained():
                found: Any = simple_evaluate(Harness(calls), **how)
        except UserError as error:
            calls.send("end", error.code)
            raise
        calls.send("end", 0)
        if items is not None:
            write_items(found["samples"], items)
        return numbers_of(found)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Hide progress bars, and report a task that cannot be loaded or run as UserError 230."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except (KeyError, ValueError, OSError, ImportError) as error:
        if isinstance(error, UserError):
            raise
        do = "give names that `lm-eval ls tasks` prints, or files of tasks"
        raise UserError(230, " ".join(str(error).split()).strip("'\""), do, where="tasks") from error


def numbers_of(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of results by `TASK.METRIC`, `TASK.METRIC.FILTER` where a filter has a name."""
    numbers: dict[str, float] = {}
    for name, of in found["results"].items():
        for key, value in of.items():
            metric, _, chosen = key.partition(",")
            if isinstance(value, int | float) and key != "sample_len":
                numbers[f"{name}.{metric}{'' if chosen in ('', 'none') else f'.{chosen}'}"] = float(value)
    return numbers


def write_items(samples: Mapping[str, Any], path: Path) -> None:
    """Write each item of the tasks, with the answers and metrics, as JSON lines. Raises UserError 403."""
    items = ({"task": name, **item} for name, of in samples.items() for item in of)
    try:
        replace_file(path, (json.dumps(item, ensure_ascii=False, default=str).encode() + b"\n" for item in items))
    except OSError as error:
        raise UserError(403, f"cannot be written: {error.strerror}", "give another --items", where=path) from None
