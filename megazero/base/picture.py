"""Write pictures atomically as SVG or PNG.

matplotlib is used through its object interface, which needs no display and shares no state with a caller's plots.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.base.errors import UserError
from megazero.base.files import replace_file
from megazero.base.packages import is_installed, missing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png")


def check_name(path: Path | None, verb: str) -> None:
    """Refuse a picture with an unknown suffix, and any if matplotlib is missing. Raises UserError 100, 121."""
    if path is not None and path.suffix not in FORMATS:
        raise UserError(100, f"--draw {path}: expected a name that ends in {' or '.join(FORMATS)}", where=verb)
    if path is not None and not is_installed("matplotlib") and (error := missing("matplotlib")):
        raise error


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator["Figure"]:
    """Yield an empty figure of width x height inches; write it on exit, in the path's format. Raises OSError."""
    from matplotlib import rc_context  # imported here: it takes half a second and 30 MB
    from matplotlib.figure import Figure

    figure, image = Figure(figsize=(width, height), dpi=150, layout="constrained"), io.BytesIO()
    yield figure
    metadata = {"Date": None} if path.suffix == ".svg" else None  # no date: equal figures give equal bytes
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "megazero"}):  # text stays text; ids are deterministic
        figure.savefig(image, format=path.suffix[1:], metadata=metadata)
    replace_file(path, image.getvalue())
