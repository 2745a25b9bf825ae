"""Output of commands without the heartbeat's lines, which come or not as fast as the machine is at the time."""

import re

_LINE = re.compile(r"^(?!MZ-|warning)[^\n]* \d+ s\n", re.MULTILINE)  # they end with whole seconds, no other line does


def without_heartbeat(text: str) -> str:
    """Return what else was written."""
    return _LINE.sub("", text)
