"""Print the output of commands: answers on standard output, everything else on standard error."""

import atexit
import io
import json
import os
import sys
from contextlib import suppress

from megazero.base.errors import UserError, one_line
from megazero.base.heartbeat import HEART
from megazero.base.terminal import fitted, width


def answer(text: str) -> int:
    """Print the answer of a verb; return its exit code, 0. A reader that closes the pipe early (`| head`) is no error.

    Raises:
        UserError: 405, standard output cannot be written.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # the terminal's encoding may lack characters of the text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with HEART.paused():
            print(text, flush=True)
    except BrokenPipeError:
        pass
    except OSError as error:
        raise UserError(405, f"standard output: {error.strerror}", "write to a disk that is not full") from None
    return 0


def show(found: object, text: str, *, as_json: bool) -> int:
    """Print a command's result, `found` as JSON, or `text` wrapped to the terminal's width; return its exit code, 0.

    Raises:
        UserError: 405, standard output cannot be written.
    """
    return answer(json.dumps(found, indent=1) if as_json else fitted(text, width()))


def flush_output() -> None:
    """Flush standard output; drop output without a reader, for which Python would exit with code 120."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


def leave(code: int) -> int:
    """End this process without torch's teardown, which takes a second; return the exit code if torch is not loaded.

    Run the registered exit functions and flush the output first, as Python does.
    """
    if "torch" not in sys.modules:
        return code
    atexit._run_exitfuncs()
    flush_output()  # standard error has no buffer beyond a line
    os._exit(code)


def fail(said: object, code: int) -> int:
    """Print on standard error why a command ends; return `code`."""
    tell(said)
    return code


def tell(line: object) -> None:
    """Write a line on standard error. Ignore a failure: a lost message is no reason to end the process."""
    with HEART.paused(), suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print a text of a run. Without a reader (`| head`) the run goes on, because its files are what counts."""
    with HEART.paused(), suppress(OSError, ValueError):
        print(text, flush=True)


def warn(text: str) -> None:
    """Write a warning as one line on standard error."""
    tell(one_line(f"warning: {text}"))
