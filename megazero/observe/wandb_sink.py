"""Send rows and the resolved config to Weights & Biases, by its own library, without ever waiting for its server.

The library blocks for 90 s and then raises when the server is dead, so nothing of it runs in the training thread:

    start()   starts a worker
    row()     puts the row in a queue
    worker    asks whether the server is there (PROBE_SECONDS at most), begins the run, logs rows, finishes
    close()   lets the worker finish; asks the server again when that takes longer than CLOSE_SECONDS

No server, or no API key (we never prompt): the run is recorded offline, one warning says so and how to upload it later.
A server that dies while we train is the library's business: it retries in a process of its own, and keeps every row on
disk. At the end a living server gets FINISH_SECONDS for the upload; a dead one gets none: the library's process would
hold up the exit for its whole time-out, so it is stopped once the rows are on disk, and the same warning is printed.

Only rows and the config go in: no code, no git state, no machine information, no console output. WANDB_MODE,
WANDB_BASE_URL, WANDB_API_KEY and the rest are read by the library as always.
"""

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from megazero.base.packages import refuse_sinks
from megazero.observe.metrics import Number, Value, scalars
from megazero.observe.probe import Probe, host_of
from megazero.observe.sinks import say, warn

INIT_SECONDS = 10.0  # for a server that answers the probe to accept a new run
CLOSE_SECONDS = 1.0  # for the last rows, before we ask whether anybody is listening
LOCAL_SECONDS = 5.0  # for a run that is recorded offline to be closed on disk
FINISH_SECONDS = 30.0  # for the last upload to a server that answers
FLUSH_SECONDS = 0.25  # between writes of the rows to disk: what a kill may cost


class WandbSink:
    """A sink that logs rows to the run `name` of `project`, with its files in `folder`/wandb.

    Args:
        run: its id; a resumed run keeps the one that it began with.
        config: the resolved config, as plain values.

    Raises:
        UserError: MZ-160, the package is not installed.
    """

    def __init__(self, project: str, name: str, run: str, config: Mapping[str, Any], folder: Path):
        refuse_sinks(wandb=True)
        self._project = project
        self._name = name
        self._id: str | None = run
        self._config = dict(config)
        self._folder = folder
        self._queue: SimpleQueue[dict[str, Number] | None] = SimpleQueue()
        self._server: str | None = None  # base URL, once a run goes there
        self._run_folder = str(folder)
        self._gone = False  # nobody takes rows from the queue any more
        self._worker = Thread(target=self._work, name="wandb", daemon=True)

    def start(self) -> None:
        """Begin the run, in the background."""
        self._worker.start()

    def row(self, row: Mapping[str, Value]) -> None:
        """Pass a row to the worker; values that are null are left out. Never waits."""
        if not self._gone:
            self._queue.put({key: value for key, value in scalars(row).items() if value is not None})

    def close(self) -> None:
        """Finish the run, if it was begun. Takes about CLOSE_SECONDS at most when the server is gone."""
        if self._worker.ident is None:
            return
        self._queue.put(None)
        probe = Probe(self._server) if self._server else None
        self._worker.join(CLOSE_SECONDS)
        if not self._worker.is_alive():
            return
        if probe is None:  # offline, or still beginning: the worker's own time-outs bound what is left
            self._worker.join(LOCAL_SECONDS + INIT_SECONDS)
        elif probe.answered():
            self._worker.join(FINISH_SECONDS)
        if self._worker.is_alive():
            self._abandon()

    def _work(self) -> None:
        try:
            run = self._begin()
            while (row := self._queue.get()) is not None:
                run.log(row, step=int(row["step"] or 0))
            run.finish()
            self._stop_service()
        except Exception as error:  # the library raises what it likes; training and the other sinks go on
            if not self._gone:
                warn(f"wandb: {type(error).__name__}: {error}; no more rows go there, metrics.jsonl has them all")
        self._gone = True

    def _begin(self) -> Any:
        """Return a run of the library: online if the server accepts it, else offline with one warning."""
        import wandb  # half a second, so here in the worker and only when asked for

        settings = wandb.setup(wandb.Settings(silent=True)).settings
        if settings.mode != "online":
            return self._init(wandb, settings.mode)
        obstacle = self._obstacle(wandb, settings.base_url)
        if obstacle is None:
            try:
                run = self._init(wandb, "online")
                self._server = settings.base_url
                say(f"wandb: {run.url}")
                return run
            except Exception as error:  # a bad key, a server that hangs after all: as good as none
                obstacle = f"{host_of(settings.base_url)} refused the run ({type(error).__name__}: {error})"[:120]
                self._id = None  # the library thinks that it is in use
        run = self._init(wandb, "offline")
        self._warn_sync(obstacle)
        return run

    def _stop_service(self) -> None:
        """End the library's own process with the run, not at some later exit of ours."""
        import wandb

        wandb.teardown()

    def _obstacle(self, wandb: Any, base_url: str) -> str | None:
        """Return why an online run is impossible, or None."""
        if not wandb.login(prompt=False, verify=False):
            return "no API key is configured (`wandb login` sets one)"
        if not Probe(base_url).answered():
            return f"{host_of(base_url)} does not answer"
        return None

    def _init(self, wandb: Any, mode: str) -> Any:
        wanted = {
            "mode": mode,
            "silent": True,  # its chatter would tear the live line; we say the one thing that matters
            "console": "off",
            "disable_code": True,
            "disable_git": True,
            "x_disable_machine_info": True,
            "x_save_requirements": False,
            "init_timeout": INIT_SECONDS,
            "finish_timeout": FINISH_SECONDS,
            "x_transaction_log_flush_interval": FLUSH_SECONDS,
        }
        known = {key: value for key, value in wanted.items() if key in wandb.Settings.model_fields}
        run = wandb.init(
            project=self._project,
            name=self._name,
            id=self._id,
            resume="allow",
            config=self._config,
            dir=str(self._folder),
            settings=wandb.Settings(**known),
        )
        self._run_folder = run.settings.sync_dir
        return run

    def _abandon(self) -> None:
        """Give up on a server that is gone: the rows are on disk, the exit must not wait for it."""
        import wandb

        self._gone = True
        with contextlib.suppress(OSError):  # it may end on its own just now
            for pid in _service_processes():
                os.kill(pid, signal.SIGTERM)
        self._worker.join(CLOSE_SECONDS)
        with contextlib.suppress(Exception):  # it reports that its process is gone, which we know
            wandb.teardown()
        self._warn_sync(f"{host_of(self._server or '')} does not answer any more")

    def _warn_sync(self, reason: str) -> None:
        warn(f"wandb: {reason}; the run is kept on disk, upload it later with `wandb sync {self._run_folder}`")


def _service_processes() -> list[int]:
    """Return the library's processes among our children; none where the system has no /proc: then the exit waits."""
    children = [pid for listing in Path("/proc/self/task").glob("*/children") for pid in listing.read_text().split()]
    return [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "wandb-core"]
