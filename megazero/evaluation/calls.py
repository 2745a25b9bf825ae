"""Let work in a thread of rank 0 decide what all ranks compute (`serve`).

    rank 0, thread   work -> ask("scores", windows)         the answer
    rank 0           serve             -> Scorer.scores ->
    rank 1 ...       serve             -> Scorer.scores

Between two calls the ranks exchange a message every second: the work may take as long as it needs on rank 0.
"""

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import torch

from megazero.base.doing import doing
from megazero.base.errors import FailedElsewhere, UserError
from megazero.comm.agreement import until_all
from megazero.comm.collectives import all_reduce
from megazero.comm.grid import Grid
from megazero.data.tokenizer import Tokenizer
from megazero.evaluation.scorer import Scorer
from megazero.generation.sampling import Sampling
from megazero.generation.text import Writer


class Calls:
    """The work that rank 0 asks of all ranks."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, grid: Grid):
        self.scorer, self.tokenizer, self._world = scorer, tokenizer, grid["world"]
        self._asked = SimpleQueue[tuple[str, Future[Any]]]()

    def serve(self, work: Callable[[], Any]) -> Any:
        """Run `work` in a thread of rank 0, and do on all ranks what it asks; return its result, on other ranks None.

        Raises:
            FailedElsewhere: the work has failed; on rank 0 its own error.
        """

        def run() -> Any:
            code = 0
            try:
                return work()
            except UserError as error:
                code = error.code
                raise
            finally:
                self._asked.put((json.dumps(["", code]), Future()))

        self._asked, leads = SimpleQueue(), self._world.rank == 0
        with ThreadPoolExecutor(1) as pool, doing("evaluating tasks") as progress:
            result = pool.submit(run) if leads else None
            while (call := self._next(leads))[0]:
                name, arguments, answer = call
                progress.advance()
                progress.detail = f"batch {progress.done:,}"
                try:
                    answer.set_result(self._do(name, arguments))
                except BaseException as error:
                    answer.set_exception(error)
                    raise
        if call[1] and not leads:
            raise FailedElsewhere(0, call[1])
        return None if result is None else result.result()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return the answer of all ranks. The work calls it.

        Args:
            name: "scores", with the arguments of `Scorer.scores`; or "texts", with (prompts as ids, fields of a
                `Sampling`, texts that end a continuation, number of the first prompt).
        """
        answer: Future[Any] = Future()
        self._asked.put((json.dumps([name, arguments]), answer))
        return answer.result()

    def _next(self, leads: bool) -> tuple[str, Any, Future[Any]]:
        """Return the next call: its name ("" after the last one), its arguments, and the future of its answer."""
        found: list[tuple[str, Future[Any]]] = []

        def ready(seconds: float) -> bool:
            with suppress(Empty):
                found.append(self._asked.get(timeout=seconds))
            return bool(found)

        device = self.scorer.device
        until_all(self._world, device, ready if leads else lambda seconds: True)
        text, answer = found[0] if leads else ("", Future())
        size = all_reduce(torch.tensor([len(text)], device=device), self._world, "evaluation")
        row = torch.zeros(int(size), dtype=torch.uint8, device=device)
        if leads:  # the text is ASCII
            row.copy_(torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8))
        name, arguments = json.loads(all_reduce(row, self._world, "evaluation").cpu().numpy().tobytes())
        return name, arguments, answer

    def _do(self, name: str, arguments: Any) -> Any:
        if name == "scores":
            return self.scorer.scores(*arguments)
        prompts, sampling, stop, first = arguments
        writer = Writer(self.scorer.decoder, self.tokenizer, Sampling(**sampling), stop, batch=self.scorer.texts)
        return list(writer.texts(prompts, first=first))
