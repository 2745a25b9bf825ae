"""Make temporary folders that are always removed, if not by their owner then by a later process.

A process that is killed leaves its folder behind. So each is named after its owner from the moment it is made: the
host's last boot, the PID namespace, the process and its start time; and a process that makes one first removes those
whose owner is proven dead. The proof is: same host since its last boot, same PID namespace, and no process of that
number that began then. Folders of other users, hosts and containers, and those not named so, are left alone.
"""

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megazero.comm.processes import Process, boot_id

_NAME = re.compile(r"megazero-(?:[a-z]+-)?([0-9a-f]{32})\.([0-9]{1,20})\.([0-9]{1,10})\.([0-9]{1,20})\.[a-z0-9_]+")


@contextlib.contextmanager
def scratch_folder(purpose: str = "") -> Iterator[Path]:
    """Make a folder of this process, and remove it at the end of the context.

    Args:
        purpose: a word of lower-case letters for the folder's name.
    """
    whole = f"megazero-{purpose}-" if purpose else "megazero-"
    if owner := _owner():
        _reap(Path(tempfile.gettempdir()), owner)
        whole += f"{owner}{Process.own().pid}.{Process.own().started}."
    with tempfile.TemporaryDirectory(prefix=whole, ignore_cleanup_errors=True) as name:
        yield Path(name)


def _owner() -> str:
    """Return the part of a folder's name for this host and PID namespace; "" where the system does not report it."""
    try:
        view = os.stat("/proc/self/ns/pid").st_ino
        return f"{boot_id().replace('-', '')}.{view}." if Process.own().lives else ""
    except OSError:
        return ""


def _reap(where: Path, owner: str) -> None:
    """Remove the folders of dead processes of this user."""
    try:
        with os.scandir(where) as entries:
            found = [Path(entry.path) for entry in entries if _NAME.fullmatch(entry.name)]
    except OSError:
        return
    for path in found:
        with contextlib.suppress(OSError):  # another starter was faster
            if _is_dead(path, owner):
                shutil.rmtree(path, ignore_errors=True)  # never follows a link, nor starts from one


def _is_dead(path: Path, owner: str) -> bool:
    match = _NAME.fullmatch(path.name)
    assert match is not None, "only such names are asked for"
    boot, view, pid, started = match.groups()
    whose = path.lstat()
    if f"{boot}.{view}." != owner or not stat.S_ISDIR(whose.st_mode) or whose.st_uid != os.geteuid():
        return False
    return not Process(int(pid), int(started)).lives
