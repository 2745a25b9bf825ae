"""Evaluate a run while it trains (`observe.evaluate`): losses of texts, tasks of lm-eval, samples.

The ranks of the run compute with the parameters where they are. Nothing of the training's state is changed, and no
random number is drawn from a generator, so training has the same bits with evaluations and without.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.files import replace_file
from megazero.builders.assemble import Built
from megazero.comm.grid import Grid
from megazero.config.schema import Config
from megazero.data.tokenizer import Tokenizer
from megazero.evaluation.calls import Calls
from megazero.evaluation.scorer import Interrupted, Scorer
from megazero.evaluation.windows import Text, read_text
from megazero.generation.sampling import Sampling
from megazero.generation.text import Writer
from megazero.observe.metrics import EVAL
from megazero.train.validation import Evaluation

Work = Callable[[int], Mapping[str, float]]


class _During(Evaluation):
    """Work on the run's ranks that gives results by name.

    Args:
        what: its name, for the line of progress.
        work: (step) -> results by `NAME.METRIC`; collective.
    """

    def __init__(self, every: int | None, scorer: Scorer, what: str, work: Work):
        self.every, self._scorer, self._what, self._work = every, scorer, what, work

    def score(self, done: int, stop: Callable[[], bool]) -> Mapping[str, float] | None:
        """Return the results of the work, or None if it was interrupted."""
        self._scorer.stop = stop
        try:
            with doing(self._what):
                return {f"{EVAL}{name}": value for name, value in self._work(done).items()}
        except Interrupted:
            return None


def evaluations(
    config: Config, grid: Grid, device: torch.device, built: Built, tokenizer: Tokenizer | None, folder: Path
) -> list[Evaluation]:
    """Return the evaluations that a config asks for. Does not communicate.

    Args:
        folder: of the run; each step's samples are written to a file in its folder `samples`.

    Raises:
        UserError: 113, there is no tokenizer; 112, a sample is too long; 229, a text cannot be read, or two have one
            name; 121 and 230, lm-eval or a task is missing, or a task cannot be run.
    """
    asked = config.observe.evaluate
    if not (asked.texts or asked.tasks or asked.samples):
        return []
    if tokenizer is None:
        raise UserError(113, "data.tokenizer is null", "name the tokenizer of the data", where="observe.evaluate")
    scorer, leads = Scorer(config, grid, device, built), grid["world"].rank == 0
    found, texts = dict[str, Work](), dict[str, Text]()
    for path in map(Path, asked.texts):
        if path.name in texts:
            raise UserError(229, f"two files are named {path.name}", "rename one", where="observe.evaluate.texts")
        texts[path.name] = read_text(path, tokenizer)
    if texts:
        found["evaluating texts"] = partial(_texts, scorer, texts, tokenizer.eod)
    if asked.samples:
        writer = Writer(scorer.decoder, tokenizer, Sampling(seed=config.run.seed), batch=scorer.texts)
        for prompt in asked.samples:
            writer.ids_of(prompt, "observe.evaluate.samples")  # raises before training what would be raised after it
        found["writing samples"] = partial(_samples, writer, asked.samples, folder / "samples" if leads else None)
    if asked.tasks:
        found["evaluating tasks"] = _tasks(asked.tasks, Calls(scorer, tokenizer, grid), leads=leads)
    return [_During(asked.every, scorer, what, work) for what, work in found.items()]


def _texts(scorer: Scorer, texts: Mapping[str, Text], eod: int, done: int) -> dict[str, float]:
    found = {name: scorer.of_text(ids, size, eod, None) for name, (ids, size) in texts.items()}
    return {f"{name}.{metric}": own[metric] for name, own in found.items() for metric in ("loss", "bits_per_byte")}


def _samples(writer: Writer, prompts: tuple[str, ...], folder: Path | None, done: int) -> dict[str, float]:
    texts = list(writer.texts(prompts))
    if folder is not None:
        pairs = zip(prompts, texts, strict=True)
        lines = [json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False) + "\n" for prompt, text in pairs]
        folder.mkdir(exist_ok=True)
        replace_file(folder / f"step_{done}.jsonl", "".join(lines).encode())
    return {}


def _tasks(names: tuple[str, ...], calls: Calls, *, leads: bool) -> Work:
    if not leads:
        return lambda done: calls.serve(dict) or {}
    from megazero.evaluation.tasks import Tasks  # lm-eval takes seconds and memory

    tasks = Tasks(names, calls.scorer.length)
    return lambda done: calls.serve(partial(tasks.numbers, calls))
