"""Send rows to Weights & Biases, with its own library.

The run's config there is the resolved config, with the plan, the ledger of rank 0 and the git revision of
megazero. No code, machine information or console output is sent. WANDB_MODE, WANDB_BASE_URL, WANDB_API_KEY and the rest
keep their meaning. Without a key or a server the library records the run on disk, and a warning says
how to upload it; if a server fails later, the library keeps every row on disk and retries.
"""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megazero.base.answers import tell, warn
from megazero.base.packages import ROOT, refuse_sinks
from megazero.observe.metrics import Value, scalars
from megazero.observe.sinks import Sink

INIT_SECONDS = 10.0  # for a server to accept a new run, before the first step
FINISH_SECONDS = 30.0  # for the last upload, after the last step


class WandbSink(Sink):
    """A sink that logs rows to the run `name` of `project`, with its files in `folder`/wandb.

    Args:
        run: the id of the run; a resumed run keeps its first one.
        config: the resolved config, as plain values.
        folder: the run's folder, with plan.json and ledger.json.

    Raises:
        UserError: MZ-160, the package is not installed.
    """

    def __init__(self, project: str, name: str, run: str, config: Mapping[str, Any], folder: Path):
        refuse_sinks(wandb=True)
        self._names = {"project": project, "name": name, "id": run, "dir": str(folder)}
        self._config, self._folder = dict(config), folder
        self._run: Any = None

    def start(self) -> None:
        """Begin the run: online if the server accepts it within INIT_SECONDS, else on disk."""
        import wandb  # takes half a second

        settings = wandb.Settings(
            silent=True,  # its output would break our lines
            console="off",
            disable_code=True,
            disable_git=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
        )
        config = {**self._config, "git_revision": _git_revision(), "plan": _content(self._folder / "plan.json")}
        common: dict[str, Any] = {**self._names, "config": config, "settings": settings, "resume": "allow"}
        online = wandb.setup(wandb.Settings(silent=True)).settings.mode == "online"
        no_key = online and not wandb.login(prompt=False, verify=False)
        obstacle = "no API key is configured (`wandb login` sets one)" if no_key else ""
        try:
            self._run = wandb.init(**common, mode="offline" if no_key else None)
        except wandb.Error as error:
            obstacle = f"the server refused the run or does not answer ({type(error).__name__}: {error})"
            wandb.teardown()  # the library thinks that the id is in use
            self._run = wandb.init(**common, mode="offline")
        if obstacle:
            folder = self._run.settings.sync_dir
            warn(f"wandb: {obstacle[:120]}; the run is kept on disk, upload it later with `wandb sync {folder}`")
        elif not self._run.offline:
            tell(f"wandb: {self._run.url}")

    def row(self, row: Mapping[str, Value]) -> None:
        """Pass a row to the library, which does not wait for its server; values that are null are left out."""
        self._run.log({key: value for key, value in scalars(row).items() if value is not None}, step=row["step"])

    def close(self) -> None:
        """Finish the run, if it was begun. Takes FINISH_SECONDS at most when the server is gone."""
        if self._run is not None:
            ledger = _content(self._folder / "ledger.json")
            self._run.config.update({"ledger": ledger[0] if ledger else None})
            self._run.finish()


def _content(path: Path) -> Any:
    return json.loads(path.read_bytes()) if path.exists() else None


def _git_revision() -> str | None:
    """Return the commit of this checkout; None: megazero was installed as a package, or git is not there."""
    try:
        line = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None
