"""Read and render chat templates in transformers' format: Jinja, in its sandbox (the package jinja2).

A template is an untrusted program. In Jinja's sandbox it can read its inputs but not change them, and it cannot reach
files, modules or attributes that begin with an underscore. Its time and memory are not bounded.

The rendered text depends on the record alone, so that the same command line gives the same bytes on any day:
`strftime_now`, `random` and `lipsum` are not available. Other names and settings are those of transformers:
`bos_token`, `eos_token` ..., `messages`, `tools`, `add_generation_prompt`, `raise_exception`, `tojson`, `break`,
`continue`, `{% generation %}`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megazero.base.errors import UserError
from megazero.base.reading import looked_up, read_file
from megazero.data.tokenizer import Tokenizer
from megazero.data.tokenizers.common import BESIDE_BYTES, CHAT_TEMPLATE, CONFIG, config_beside

if TYPE_CHECKING:  # a package that may be missing
    from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FAULT = 226  # the code of an error in the template itself, whatever the record
BEGIN, END = "\ufdd0", "\ufdd1"  # around the output of a {% generation %} block; Unicode noncharacters
_JINJA = (3, 1, 6)


class RenderError(Exception):
    """An error that a template raises, or that occurs in it, for some record."""


class Template:
    """A chat template.

    Args:
        source: its text.
        where: its file, for error messages.
        names: more variables that it may use, `bos_token` and the like.

    Attributes:
        marks_answers: it has {% generation %} blocks.

    Raises:
        UserError: 162, jinja2 is not installed or too old; 226, `source` is not a valid template.
    """

    def __init__(self, source: str, where: Path, names: Mapping[str, str]):
        _require_jinja(where)
        from jinja2 import nodes

        self.source, self.where, self.names = source, where, dict(names)
        try:
            environment = _environment()
            self.marks_answers = any(True for _ in environment.parse(source).find_all(nodes.ExtensionAttribute))
            self._compiled = environment.from_string(source)
        except Exception as error:  # of the library, or of Python's compiler for the code it generates
            line = f"line {lineno}: " if (lineno := getattr(error, "lineno", None)) else ""
            raise self._fault(f"is not a Jinja template: {line}{_words(error)}") from None

    def __repr__(self) -> str:
        return f"Template({self.source!r}, {sorted(self.names.items())})"

    def render(self, messages: Sequence[Any], tools: Any, *, prompt: bool) -> str:
        """Return a conversation as text.

        Args:
            messages, tools: of the conversation.
            prompt: append the beginning of the next answer (`add_generation_prompt`).

        Raises:
            RenderError: the template raises an error, or an error occurs in it.
            UserError: 226, it does something that the sandbox forbids.
        """
        from jinja2.exceptions import SecurityError

        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        try:
            return self._compiled.render(**self.names, **given)
        except SecurityError as error:
            raise self._fault(f"does what a template must not do: {_words(error)}") from None
        except Exception as error:
            raise RenderError(f"the template raises: {_words(error)}") from None

    def _fault(self, what: str) -> UserError:
        return UserError(TEMPLATE_FAULT, what, "repair the template, or give another one to --chat", where=self.where)


def _environment() -> "ImmutableSandboxedEnvironment":
    """Return Jinja's sandbox with the names and blocks that transformers adds, and without random functions."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block {% generation %}: its output is an answer, and is put between BEGIN and END."""

        tags = {"generation"}  # noqa: RUF012 - as the library declares it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    def raise_exception(message: object) -> NoReturn:
        raise TemplateError(str(message))

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # nothing is escaped for HTML
    made.globals["raise_exception"] = raise_exception
    del made.filters["random"], made.globals["lipsum"]
    return made


def _require_jinja(where: Path) -> None:
    """Refuse templates if jinja2 is missing, or is a version whose sandbox has known holes. Raises UserError 162."""
    found = version("jinja2") if find_spec("jinja2") is not None else "none"
    if tuple(map(int, re.findall(r"\d+", found)[:3])) < _JINJA:
        what = f"expected the package jinja2 {'.'.join(map(str, _JINJA))} or later, whose sandbox is safe, got {found}"
        raise UserError(162, what, "run `pip install -U jinja2`, or install megazero[chat]", where=where)


def open_template(path: Path | None, tokenizer: Tokenizer) -> Template:
    """Open a chat template.

    Args:
        path: its file; None: the tokenizer's, in chat_template.jinja or tokenizer_config.json next to the tokenizer.
        tokenizer: gives the names of special tokens.

    Raises:
        UserError: 162, jinja2 is not installed; 209, tokenizer_config.json is damaged; 226, there is no template.
    """
    config, beside = config_beside(tokenizer.path), tokenizer.path.with_name(CHAT_TEMPLATE)
    where = path or (beside if beside.exists() else tokenizer.path.with_name(CONFIG))
    if path is None and not beside.exists():
        source = config.get("chat_template")
        if isinstance(source, list):  # several templates: use the default
            named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
            source = named.get("default")
    else:
        try:
            source = read_file(where, BESIDE_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            said = f"{error.strerror}{looked_up(where)}" if isinstance(error, OSError) else f"not UTF-8: {error.reason}"
            raise UserError(TEMPLATE_FAULT, f"template cannot be read: {said}", "check --chat", where=where) from error
    if not isinstance(source, str):
        what = f"no chat template: there is no {CHAT_TEMPLATE} next to it, and none in {CONFIG}"
        raise UserError(TEMPLATE_FAULT, what, "add one of them", where=tokenizer.path)
    return Template(source, where, _token_names(config, tokenizer))


def _token_names(config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """Return the names of special tokens by role (`bos_token` ...): the config's, else the tokenizer's."""
    of_id = {i: name for name, i in tokenizer.specials.items()}
    own = {"bos_token": of_id[tokenizer.bos], "eos_token": of_id[tokenizer.eod]}
    if tokenizer.bos == tokenizer.eod:
        del own["bos_token"]
    told = {key: value.get("content") if isinstance(value, dict) else value for key, value in config.items()}
    return own | {key: name for key, name in told.items() if key.endswith("_token") and isinstance(name, str)}


def _words(error: BaseException) -> str:
    return " ".join(re.sub(r"[\ud800-\udfff]", "?", str(error)).split())[:120] or type(error).__name__
