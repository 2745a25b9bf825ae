"""Report a fault to a user: one line with a code, and what to do.

    MZ-203 rank=0 step=17 data/train.bin: token 9001 in document 12 >= vocabulary 8192; use another tokenizer

The parts: code; place (rank, step, file, as far as known); expected against found; what to do.
The hundreds digit is the kind of fault and decides the exit code (docs/operations.md lists every code):

    1xx  usage or configuration    exit 2
    2xx  data and tokens           exit 1
    3xx  a failure while training  exit 1
    4xx  files of a run            exit 1
    5xx  use of the library        exit 1
    6xx  offload to disks          exit 1

Broken invariants of megazero itself are an `assert`, never a `UserError`.
"""

LINE_LIMIT = 300  # characters; a last resort: callers shorten long values themselves
_MOST_FAULTS = 100  # lines of one list; a longer list would not be read to its end


def one_line(text: str) -> str:
    """Return a text as one line of at most LINE_LIMIT printable characters.

    File names and values are untrusted: a control character could move a terminal's cursor or change its colours, so
    each non-printable character is written as its escape.
    """
    line = " ".join(text[: 8 * LINE_LIMIT].split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return line if len(line) <= LINE_LIMIT else line[: LINE_LIMIT - 1] + "…"


def _shortened(where: str) -> str:
    """Return a path, without its middle if it is long, so that the fault itself fits into the line."""
    return where if len(where) <= LINE_LIMIT // 2 else f"{where[: LINE_LIMIT // 4]}…{where[-LINE_LIMIT // 4 :]}"


class UserError(ValueError):
    """A fault that the user can repair. `str()` gives the line (or, for several config violations, the lines) to print.

    Args:
        code: three digits, the hundreds digit as in the module's table.
        what: the fault: expected value against actual value.
        do: what to do about it.
        where: file (and line), option or command; empty if none applies.
        rank, step: of the run, if one is under way.
    """

    def __init__(
        self,
        code: int,
        what: str,
        do: str = "",
        *,
        where: object = "",
        rank: int | None = None,
        step: int | None = None,
    ):
        self.code, self.what, self.do, self.where, self.rank, self.step = code, what, do, where, rank, step
        prefix = f"MZ-{code}"
        prefix += f" rank={rank}" if rank is not None else ""
        prefix += f" step={step}" if step is not None else ""
        prefix += f" {_shortened(str(where))}" if where else ""
        super().__init__(one_line(f"{prefix}: {what}" + (f"; {do}" if do else "")))

    @property
    def exit_code(self) -> int:
        """Return 2 for errors of usage and configuration, 1 for all others."""
        return 2 if self.code < 200 else 1

    def located(self, rank: int, step: int | None, place: str) -> "UserError":
        """Return a copy of this error with the place, and with rank and step where the error has none yet.

        Args:
            place: phase and host; left out for errors of usage and configuration, which do not depend on the rank.
        """
        rank, step = (rank if self.rank is None else self.rank), (step if self.step is None else self.step)
        what = self.what if self.code < 200 else f"{self.what} ({place})"
        return UserError(self.code, what, self.do, where=self.where, rank=rank, step=step)


def of_system(error: OSError) -> UserError:
    """Return the error for a failed system call that no caller handles, such as a file name that is too long."""
    what = f"cannot be used: {error.strerror or error}"
    return UserError(401, what, "check that path, and the disk it is on", where=error.filename or "")


class FailedElsewhere(UserError):  # noqa: N818 - not an error of this rank
    """An error that another rank has raised and reports itself."""

    def __init__(self, rank: int, code: int):
        super().__init__(code, f"stopped, because rank {rank} failed")


class FaultList(UserError):  # noqa: N818 - a list of errors, not another kind of one
    """A list of faults found at once (a config with three broken relations), printed one line each."""

    def __init__(self, errors: list[UserError]):
        assert errors, "a list of faults needs at least one"
        lines = [str(error) for error in errors[:_MOST_FAULTS]]
        if more := len(errors) - len(lines):
            lines.append(f"... and {more:,} more")
        ValueError.__init__(self, "\n".join(lines))
        self.code = errors[0].code
        self.errors = errors

    def located(self, rank: int, step: int | None, place: str) -> UserError:
        """Return the list unchanged: each fault already has its place."""
        return self
