"""Continue texts and conversations: encode prompts, decode new tokens, end at stop texts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megazero.base.errors import UserError
from megazero.data.conversation import prompt_of
from megazero.data.templates import Template, open_template
from megazero.data.tokenizer import Tokenizer
from megazero.data.tokenizers.common import GENERATION, config_beside
from megazero.generation.decode import Decoder
from megazero.generation.sampling import Sampling

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]  # a text, the messages of a conversation, ids


@dataclass(frozen=True)
class Writer:
    """Continues texts with a model.

    Attributes:
        sampling: how tokens are drawn.
        stop: a continuation ends before the first of these texts.
        chat: prompts are conversations, or the first message of one, and answers are returned without their prompts.
        batch: the number of texts that are continued at once.
        warn: called once, if a prompt is longer than the sequences of training.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    sampling: Sampling
    stop: Sequence[str] = ()
    chat: bool = False
    batch: int = 8
    warn: Callable[[str], object] = str

    def ids_of(self, prompt: Prompt, where: object) -> list[int]:
        """Return the ids of a prompt.

        Args:
            where: the prompt, for error messages.

        Raises:
            UserError: 226 and 227, the template, or the conversation, is faulty; 112, the model cannot continue the
                prompt (`Decoder.check`); 229, messages without `chat`.
        """
        if prompt and isinstance(prompt[0], int):
            ids: list[int] = [*prompt]  # type: ignore[list-item]
        elif self.chat:
            messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            ids = prompt_of(messages, self._template, self.tokenizer, where)
        elif isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        else:
            raise UserError(229, "expected a text, got messages", "give --chat, or chat=True", where=where)
        ids = ids or [self.tokenizer.eod]
        self.decoder.check(ids, self.tokenizer.vocab_size, where=where)
        return ids

    def texts(self, prompts: Sequence[Prompt], *, first: int = 0) -> Iterator[str]:
        """Yield the continuation of each prompt, after it if it is a text and not `chat`. All ranks of a model call it.

        Args:
            first: the number of the first prompt, on which the drawn tokens depend.
        """
        trained, warned = self.decoder.model.shape.seq_len, False
        for start in range(0, len(prompts), self.batch):
            some = prompts[start : start + self.batch]
            numbers = range(first + start, first + start + len(some))
            ids = [self.ids_of(prompt, f"prompt {n + 1:,}") for prompt, n in zip(some, numbers, strict=True)]
            longest = max(map(len, ids))
            if longest > trained and not warned:
                warned = True
                self.warn(f"a prompt has {longest:,} ids, the model was trained on sequences of {trained:,}")

            def ended(text: int, new: list[int], ids: list[list[int]] = ids) -> bool:
                tail = self._decoded(ids[text], new) if self.stop else ""
                return any(stop in tail for stop in self.stop)

            how = {"vocab": self.tokenizer.vocab_size, "stops": self._stops, "numbers": numbers}
            found = self.decoder.continued(ids, self.sampling, **how, ended=ended)
            for prompt, own, new in zip(some, ids, found, strict=True):
                text = self._decoded(own, new)
                for stop in self.stop:
                    text = text.partition(stop)[0]
                yield text if self.chat or not isinstance(prompt, str) else prompt + text

    def _decoded(self, ids: list[int], new: list[int]) -> str:
        """Return the text of new ids, decoded after the prompt: some tokenizers drop a space at the start of a text."""
        return self.tokenizer.decode([*ids, *new])[len(self.tokenizer.decode(ids)) :]

    @cached_property
    def _template(self) -> Template:
        return open_template(None, self.tokenizer)

    @cached_property
    def _stops(self) -> set[int]:
        """Return the ids that end a text: the end of a document, and those of a generation config."""
        found = config_beside(self.tokenizer.path, GENERATION).get("eos_token_id")
        more = found if isinstance(found, list) else [found]
        return {self.tokenizer.eod, *(each for each in more if isinstance(each, int))}
