"""Disks, checkpoints and locks."""

import errno
import json
import os
import shutil

from megazero.checkpoint.manifest import FILE_NAME
from megazero.checkpoint.store import Store
from megazero.observe.jsonl import JsonlSink
from megazero.optim.mixture import Mixture
from megazero.run.lock import RunLock
from tests.faults.site import (
    SINCE,
    STEP,
    TWO,
    Site,
    before_each_update,
    fault,
    full_from,
    is_rank_1,
    spoil,
)

FULL = (
    "MZ-403 …step=6 RUN/checkpoints: checkpoint not saved: No space left on device; earlier "
    "ones are intact; fix that, and run again with checkpoint.resume=auto"
)


@fault("a disk that is full in the middle of a save", FULL, SINCE)
def _(site: Site) -> list[str]:
    full_from(site, 1)
    return site.resume()


@fault("the same in the background", FULL, SINCE)
def _(site: Site) -> list[str]:
    full_from(site, 1)
    return site.resume("checkpoint.async=true")


@fault(
    "one rank's disk full",
    FULL.replace("MZ-403 …", "MZ-403 rank=1 ").replace(" intact; ", " intact (in save on …); "),
    SINCE,
)
def _(site: Site) -> list[str]:
    full_from(site, 1, is_rank_1(site))
    return site.resume(*TWO)


@fault("a disk that is full for metrics.jsonl", "warning: JsonlSink: …No space left on device…", "the row", 0)
def _(site: Site) -> list[str]:
    def row(self: JsonlSink, row: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    site.patch.setattr(JsonlSink, "row", row)
    return site.resume()


BLOCK = "block 0 (bytes 0 to …): expected xxh3 …, got …; restore the file, or resume from another step"


@fault(
    "a bit flipped in a shard",
    f"warning: MZ-410 {STEP}/shard_00000.safetensors: {BLOCK}; going on from an older step",
    SINCE,
    0,
)
def _(site: Site) -> list[str]:
    spoil(site.step / "shard_00000.safetensors")
    return site.resume()


@fault(
    "a shard cut off",
    f"warning: MZ-410 {STEP}/shard_00000.safetensors: expected … bytes, got …; going on from an older step",
    SINCE,
    0,
)
def _(site: Site) -> list[str]:
    os.truncate(site.step / "shard_00000.safetensors", 5000)
    return site.resume()


@fault(
    "a shard missing",
    f"warning: MZ-410 {STEP}/shard_00000.safetensors: cannot be read: No such file…; going on from an older step",
    SINCE,
    0,
)
def _(site: Site) -> list[str]:
    (site.step / "shard_00000.safetensors").unlink()
    return site.resume()


@fault(
    "a shard of another step",
    f"warning: MZ-410 {STEP}/shard_00000.safetensors: {BLOCK}; going on from an older step",
    SINCE,
    0,
)
def _(site: Site) -> list[str]:
    shutil.copy(Store(site.run / "checkpoints").path(2) / "shard_00000.safetensors", site.step)
    return site.resume()


@fault(
    "a link for a shard",
    f"warning: MZ-410 {STEP}/shard_00000.safetensors: cannot be read: …; going on from an older step",
    SINCE,
    0,
)
def _(site: Site) -> list[str]:
    path = site.step / "shard_00000.safetensors"
    path.rename(site.folder / "elsewhere")
    path.symlink_to(site.folder / "elsewhere")
    return site.resume()


@fault(
    "a manifest edited",
    f"warning: MZ-410 {STEP}/{FILE_NAME}: was edited or damaged: "
    f"expected SHA-256 …, got …; going on from an older step",
    SINCE,
    0,
)
def _(site: Site) -> list[str]:
    content = json.loads((site.step / FILE_NAME).read_text())
    content["progress"]["next_sample"] = 0
    (site.step / FILE_NAME).write_text(json.dumps(content))
    return site.resume()


@fault(
    "a manifest cut off",
    f"warning: MZ-410 {STEP}/{FILE_NAME}: is not a manifest: not JSON: …; …; going on from an older step",
    SINCE,
    0,
)
def _(site: Site) -> list[str]:
    os.truncate(site.step / FILE_NAME, 100)
    return site.resume()


@fault(
    "a manifest missing",
    f"warning: MZ-410 {STEP}/{FILE_NAME}: cannot be read: No such file or directory; …; going on from an older step",
    SINCE,
    0,
)
def _(site: Site) -> list[str]:
    (site.step / FILE_NAME).unlink()
    return site.resume()


@fault(
    "every checkpoint damaged",
    "MZ-411 RUN/checkpoints: none of 2 checkpoints is whole (steps 4, "
    "2); restore a checkpoint, or start again in another run.dir",
    "the run",
)
def _(site: Site) -> list[str]:
    for step in (2, 4):
        spoil(Store(site.run / "checkpoints").path(step) / FILE_NAME)
    return site.resume()


OTHER = f"MZ-412 {STEP}: does not fit this run (saved -> this): "


def other(what: str, line: str, *overrides: str) -> None:
    fault(what, OTHER + line + "; resume with the config it was made with")(lambda site: site.resume(*overrides))


def permitted(what: str, line: str, key: str, *overrides: str) -> None:
    mend = f"; resume with the config it was made with, or allow it with --allow-change {key}"
    fault(what, OTHER + line + mend)(lambda site: site.resume(*overrides))


other("resumed with another model", "model.layers 2 -> 3", "model.layers=3")
fault(
    "resumed with another vocabulary",
    f"{OTHER}model.vocab 400 -> 416; resume with the config it was made with, or begin a run with "
    "checkpoint.load=weights, where the vocabulary may grow",
)(lambda site: site.resume("model.vocab=416"))
other("resumed in another precision", "precision.dtype fp32 -> bf16", "precision.dtype=bf16")
permitted("resumed with another optimizer", "optimizer.eps 1e-08 -> 1e-06", "optimizer.eps", "optimizer.eps=1e-6")
permitted(
    "resumed with other stages",
    "stages[0].until_step None -> 5, stages[0].batch.global None -> 2",
    "stages",
    "stages=[{until_step: 5, batch: {global: 2}}]",
)
other("resumed with another seed", "run.seed 0 -> 1", "run.seed=1")
other("resumed without the tokenizer", "tokenizer … -> None", "data.tokenizer=null")
other("resumed with other data", "data.valid 0.1 -> 0.4", "data.valid=0.4")


@fault(
    "a change that is not allowed when a run resumes",
    "MZ-123 --allow-change: model.layers cannot change: the weights have this shape, or were trained with this value",
    code=2,
)
def _(site: Site) -> list[str]:
    return site.resume("model.layers=3", "--allow-change", "model.layers")


@fault(
    "no checkpoint to resume from",
    "MZ-402 …nowhere: no checkpoint to resume from; give the folder of a run or of a step",
)
def _(site: Site) -> list[str]:
    return site.train("run.dir=" + str(site.folder / "new"), f"checkpoint.resume={site.folder / 'nowhere'}")


@fault(
    "an older step asked for", "MZ-413 RUN/checkpoints: holds step 4, which is newer than the step 2 to resume from; …"
)
def _(site: Site) -> list[str]:
    return site.resume(f"checkpoint.resume={Store(site.run / 'checkpoints').path(2)}")


@fault(
    "two jobs in one folder",
    "MZ-420 RUN: another job trains here: process … on …, since …; wait for it, end it, or give another run.dir",
)
def _(site: Site) -> list[str]:
    RunLock(site.run / "lock").take()
    return site.resume()


@fault(
    "the lock of a job that died", "warning: RUN: taken over from a job that has died (process … on …, since …)", code=0
)
def _(site: Site) -> list[str]:
    pid = os.fork()
    if not pid:
        try:
            RunLock(site.run / "lock").take()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return site.resume()


@fault(
    "a file `lock` that is not a lock",
    "MZ-420 RUN/lock: is not a lock file, or damaged; remove it if no job trains there",
)
def _(site: Site) -> list[str]:
    (site.run / "lock").write_text("mine")
    return site.resume()


@fault(
    "the lock taken by another job meanwhile",
    "MZ-421 step=6 RUN: another job took over this folder while this one trained; …",
    SINCE,
)
def _(site: Site) -> list[str]:
    honest = Mixture.update

    def update(self: Mixture, unit: object, **options: object) -> None:
        content = json.loads((site.run / "lock").read_text())
        (site.run / "lock").write_text(json.dumps(content | {"word": "other"}))
        honest(self, unit, **options)  # type: ignore[arg-type]

    site.patch.setattr(Mixture, "update", update)
    return site.resume()


@fault(
    "a step under another step's name",
    "warning: MZ-410 RUN/checkpoints/step_00000005/manifest.json: is inconsistent: the folder is named step 5, "
    "the manifest says step 4; restore the file, or resume from another step; going on from an older step",
    SINCE,
    0,
)
def _(site: Site) -> list[str]:
    site.step.rename(Store(site.run / "checkpoints").path(5))
    return site.resume()


@fault("a FIFO for a manifest", f"warning: MZ-410 {STEP}/{FILE_NAME}: …expected a regular file, got a FIFO…", SINCE, 0)
def _(site: Site) -> list[str]:
    (site.step / FILE_NAME).unlink()
    os.mkfifo(site.step / FILE_NAME)
    return site.resume()


@fault(
    "a line of metrics.jsonl that is not a row",
    "MZ-406 RUN/metrics.jsonl: is damaged: line 2: expected a JSON object, got list; repair or remove the line, …",
)
def _(site: Site) -> list[str]:
    path = site.run / "metrics.jsonl"
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([rows[0], b"[1]\n", *rows[1:]]))
    return site.resume()


@fault(
    "a lock of another shape",
    "MZ-420 RUN/lock: is not a lock file, or damaged; remove it if no job trains there",
)
def _(site: Site) -> list[str]:
    keys = ("word", "host", "kernel", "pid", "born", "since", "job")
    (site.run / "lock").write_text(json.dumps({key: [] for key in keys}))
    return site.resume()


@fault(
    "the lock removed meanwhile",
    "MZ-421 step=6 RUN: the lock was removed while this job trained, by hand or by another job that has ended; …",
    SINCE,
)
def _(site: Site) -> list[str]:
    before_each_update(site, lambda: (site.run / "lock").unlink(missing_ok=True))
    return site.resume()


@fault(
    "the run's folder moved while it trains",
    "MZ-423 step=6 RUN/checkpoints: checkpoint not saved: the run's folder was deleted or moved during training; …",
    SINCE,
)
def _(site: Site) -> list[str]:

    def move() -> None:
        if site.run.is_dir():
            site.run.rename(site.folder / "elsewhere")

    before_each_update(site, move)
    return site.resume("observe.every=100")
