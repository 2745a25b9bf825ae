"""Make the Jinja environment of chat templates: the sandbox, with what transformers adds and without what draws lots.

Kept apart because it needs the package jinja2 as soon as it is imported.
"""

import json
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from data_tools.marks import BEGIN, END

ANSWER = nodes.ExtensionAttribute  # what a parsed template has where {% generation %} stands
_MOST_POWER = 64


def new_environment(most: int) -> ImmutableSandboxedEnvironment:
    """Return an environment in which no text or list is repeated to more than `most` elements."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.most = most
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "dict": _dict, "namespace": _Namespace}
    del environment.filters["random"], environment.globals["lipsum"]
    return environment


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with bounds for what one operation can make."""

    intercepted_binops = frozenset({"*", "**"})
    most: int

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if abs(right) > _MOST_POWER or abs(left) > 2**_MOST_POWER:
                raise SecurityError(f"a power of more than {_MOST_POWER}")
        elif isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple):
            sequence, count = (left, right) if isinstance(left, str | list | tuple) else (right, left)
            if isinstance(count, int) and len(sequence) * count > self.most:
                raise SecurityError(f"a text or list of more than {self.most:,} elements")
        return super().call_binop(context, operator, left, right)


class _Namespace(Namespace):
    """A namespace of a template, without attributes that Python keeps for itself."""

    def __init__(self, *given: Any, **values: Any):
        super().__init__()
        for name, value in dict(*given, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"an attribute of a namespace with an underscore: {name}")
        super().__setitem__(name, value)


class _Generation(Extension):
    """The block {% generation %}: what it renders is an answer, and comes between BEGIN and END."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


def _raise(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _dict(*given: Any, **values: Any) -> dict[Any, Any]:
    """Return a dict; a template gets the function and not the type, which has more to offer."""
    return dict(*given, **values)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as transformers' `tojson` does: characters stay, nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
