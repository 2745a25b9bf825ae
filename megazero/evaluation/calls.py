"""Let rank 0 decide what all ranks compute: it sends each call of a scorer, and the other ranks repeat it (`serve`).

rank 0      Calls.scores(windows)  ->  Scorer.scores(windows)
rank 1 ...  serve                  ->  Scorer.scores(windows)
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from megazero.base.errors import FailedElsewhere
from megazero.comm.collectives import gather_bytes
from megazero.comm.grid import Grid
from megazero.data.tokenizer import Tokenizer
from megazero.evaluation.scorer import Scorer
from megazero.evaluation.windows import Window
from megazero.generation.sampling import Sampling
from megazero.generation.text import Writer


class Calls:
    """The work that rank 0 asks of all ranks."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, grid: Grid):
        self.scorer, self.tokenizer, self.world = scorer, tokenizer, grid["world"]

    def scores(self, windows: Sequence[Window]) -> list[tuple[float, bool]]:
        """Return `Scorer.scores` of windows. Rank 0 calls it."""
        self.send("scores", windows)
        return self.scorer.scores(windows)

    def texts(self, prompts: Sequence[list[int]], sampling: Sampling, stop: Sequence[str]) -> list[str]:
        """Return continuations of ids. Rank 0 calls it."""
        self.send("texts", [prompts, dataclasses.asdict(sampling), stop])
        return self._texts(prompts, sampling, stop)

    def send(self, name: str, arguments: Any) -> Any:
        """Send a call from rank 0 to all ranks; return it. Every rank calls it, the others without arguments."""
        text = json.dumps([name, arguments]).encode() if name else b""
        return json.loads(gather_bytes(text, self.world, "evaluation", self.scorer.device)[0])

    def serve(self) -> None:
        """Do the work of rank 0's calls until its last one. Raises FailedElsewhere: rank 0 has failed."""
        while True:
            name, arguments = self.send("", None)
            if name == "scores":
                self.scorer.scores(arguments)
            elif name == "texts":
                prompts, sampling, stop = arguments
                self._texts(prompts, Sampling(**sampling), stop)
            elif arguments:  # the code of rank 0's error
                raise FailedElsewhere(0, arguments)
            else:
                return

    def _texts(self, prompts: Sequence[list[int]], sampling: Sampling, stop: Sequence[str]) -> list[str]:
        writer = Writer(self.scorer.decoder, self.tokenizer, sampling, stop, batch=self.scorer.at_once)
        return list(writer.texts(prompts))
