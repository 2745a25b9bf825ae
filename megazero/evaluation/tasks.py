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
from itertools import islice
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.evaluation.calls import Calls
from megazero.evaluation.windows import Window, windows_of

logging.getLogger("lm_eval").setLevel(logging.ERROR)


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
        if not all(own for *_, own in requests):
            raise ValueError("a request has an empty continuation")
        first, most = [self.eot_token_id], self._length
        windows = [(((before or first) + own)[-most - 1 :], len(own)) for _, before, own in requests]
        return self._scored([(ids, min(scored, most)) for ids, scored in windows])

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
        for settings, numbers in groups.items():
            how: dict[str, Any] = {**normalize_gen_kwargs(json.loads(settings))}
            new, stop = how["max_gen_toks"], [text for text in [*how["until"], eod] if text]
            sampling = {"tokens": new, "temperature": how.get("temperature", 0.0), "top_p": how.get("top_p", 1.0)}
            sampling["top_k"] = max(0, how.get("top_k", 50))
            ids = {i: self.tok_encode(requests[i].args[0])[new - self._length :] for i in numbers}
            size = self._calls.scorer.texts
            for number, some in enumerate(_batches({i: len(own) for i, own in ids.items()}, size)):
                given = [ids[i] or [self.eot_token_id] for i in some]
                for i, text in zip(some, self._calls.ask("texts", given, sampling, stop, number * size), strict=True):
                    found[i] = text
        return found

    def _scored(self, windows: Sequence[Window]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each window's scored tokens, and whether greedy decoding gives them."""
        found: list[tuple[float, bool]] = [(0.0, False)] * len(windows)
        for some in _batches({i: len(ids) for i, (ids, _) in enumerate(windows)}, self._calls.scorer.at_once):
            for i, (nats, greedy) in zip(some, self._calls.ask("scores", [windows[i] for i in some]), strict=True):
                found[i] = -nats, greedy
        return found


def _batches(lengths: Mapping[int, int], size: int) -> Iterator[list[int]]:
    """Yield the keys in batches of `size`, the longest first, so that memory suffices for all if it does for one."""
    order = iter(sorted(lengths, key=lambda i: -lengths[i]))
    while some := list(islice(order, size)):
        yield some


class Tasks:
    """Tasks of lm-eval.

    Args:
        names: of tasks or groups of lm-eval, or files (.yaml) that define a task.
        length: the most tokens of a context and its continuation.

    Raises:
        UserError: 230, a task is unknown, cannot be loaded, or cannot be run.
    """

    def __init__(self, names: Sequence[str], length: int):
        self._names, self._manager = list(dict.fromkeys(names)), TaskManager()
        found = dict[str, str]()
        with doing("loading tasks"):
            for asked in self._names:
                with _explained(asked):
                    for name, task in self._manager.load([asked])["tasks"].items():
                        _require_possible(name, task, length)
                        if found.setdefault(name, asked) != asked:
                            raise UserError(230, f"{name} is also in {found[name]}", "leave one out", where=asked)

    def numbers(self, calls: Calls) -> dict[str, float]:
        """Return the numbers of lm-eval's results (`numbers_of`): work for `Calls.serve`."""
        # Standard errors would need processes of their own.
        how = dict[str, Any](task_manager=self._manager, bootstrap_iters=0, log_samples=False, torch_random_seed=None)
        numbers = dict[str, float]()
        for name in self._names:
            with _explained(name):
                how["tasks"] = [name]
                found: Any = simple_evaluate(Harness(calls), **how)
                numbers |= numbers_of(found)
        return numbers


def _require_possible(name: str, task: Any, length: int) -> None:
    """Refuse a task that a text model of this length cannot do, or that runs code. Raises UserError 230."""
    new: Any = {**normalize_gen_kwargs(task.get_config("generation_kwargs") or {})}["max_gen_toks"]
    what, unsafe = "", getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False)
    if task.OUTPUT_TYPE == "generate_until" and new >= length:
        what = f"asks for {new:,} new tokens, model.seq_len is {length:,}"
    if what or unsafe:
        raise UserError(230, what or "runs code or shows images", "leave the task out", where=name)


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Hide progress bars, and report a task that cannot be loaded or run as UserError 230."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:  # of a package's reader of tasks, data or templates
        if isinstance(error, UserError):
            raise
        what = " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split())
        raise UserError(230, what if " " in what else repr(error), "see `lm-eval ls tasks`", where=name) from error


def numbers_of(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of results by `TASK.METRIC`, `TASK.METRIC.FILTER` where a filter has a name."""
    numbers: dict[str, float] = {}
    for name, of in found["results"].items():
        for key, value in of.items():
            metric, _, chosen = key.partition(",")
            if isinstance(value, int | float) and key != "sample_len":
                numbers[f"{name}.{metric}{'' if chosen in ('', 'none') else f'.{chosen}'}"] = float(value)
    return numbers
