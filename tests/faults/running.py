"""Numbers, ranks, and the other verbs."""

import json
import os
import shutil
import signal
from collections.abc import Callable

import numpy as np
import torch

from megazero.data.windows import WindowDataset
from megazero.optim.mixture import Mixture
from megazero.pipeline.stage import Stage
from tests.faults.site import SINCE, TWO, Site, before_each_update, fault, is_rank_1


def spoil_forward(site: Site, factor: float) -> None:
    honest = Stage.forward

    def forward(self: Stage, micro_batch: int, x: object, feed: object) -> torch.Tensor:
        loss, self.loss = self.loss, lambda y, feed: loss(y, feed) * factor  # type: ignore[misc]
        try:
            return honest(self, micro_batch, x, feed)  # type: ignore[arg-type]
        finally:
            self.loss = loss

    site.patch.setattr(Stage, "forward", forward)


@fault(
    "gradients that are not finite",
    "MZ-301 rank=0 step=5: loss …, gradient norm nan; first not finite: "
    "…; this step did not update; `megazero data --run RUN --step 5` shows its text; lower optimizer.lr…",
    SINCE,
)
def _(site: Site) -> list[str]:
    spoil_forward(site, float("nan"))
    return site.resume()


@fault(
    "a moment that is not finite",
    "MZ-302 step=6 RUN/checkpoints: not saved: … is not finite after the last update; earlier steps are intact; …",
    SINCE,
)
def _(site: Site) -> list[str]:
    honest = Mixture.update

    def update(self: Mixture, unit: object, **options: object) -> None:
        honest(self, unit, **options)  # type: ignore[arg-type]
        self.runs(unit)[0].state["exp_avg"][3] = float("inf")

    site.patch.setattr(Mixture, "update", update)
    return site.resume("observe.every=100")


def in_rank_1(site: Site, do: Callable[[], object]) -> None:
    honest, here = Stage.forward, is_rank_1(site)

    def forward(self: Stage, *arguments: object) -> torch.Tensor:
        if here():
            do()
        return honest(self, *arguments)  # type: ignore[arg-type]

    site.patch.setattr(Stage, "forward", forward)


@fault(
    "a rank killed",
    "MZ-310 rank=1 step=5: was ended by SIGKILL in forward … on … (pid "
    "…), after …; out of memory? see the system's log",
    SINCE,
)
def _(site: Site) -> list[str]:
    in_rank_1(site, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return site.resume(*TWO)


@fault(
    "a rank stopped",
    "MZ-311 rank=1 step=5: did not answer in … on … (pid …); rank 0 waited; it is stopped (SIGSTOP, a debugger?): …",
    SINCE,
)
def _(site: Site) -> list[str]:
    in_rank_1(site, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    return site.resume(*TWO)


@fault("a rank that exits early", "MZ-313 rank=1 step=5: ended with exit code 0 in forward …", SINCE)
def _(site: Site) -> list[str]:
    in_rank_1(site, lambda: os._exit(0))
    return site.resume(*TWO)


@fault(
    "a fault of our own on a rank", "MZ-390 rank=1 step=5: a fault of megazero's own, see the traceback above", SINCE
)
def _(site: Site) -> list[str]:
    in_rank_1(site, lambda: 1 // 0)
    return site.resume(*TWO)


@fault(
    "a data file damaged while training",
    "MZ-205 …DATA.bin: token … of document … is 999, expected 0 <= id < 400; …",
    SINCE,
)
def _(site: Site) -> list[str]:
    honest = WindowDataset.read

    def read(self: WindowDataset, window: int) -> tuple[np.ndarray, np.ndarray]:
        site.patch.setattr(self, "vocab", 400)
        site.patch.setattr(self.stream.dataset, "read", lambda a, b: np.where(np.arange(a, b) % 10 == 5, 999, 1))
        return honest(self, window)

    site.patch.setattr(WindowDataset, "read", read)
    return site.resume()


@fault(
    "token files cut off while training",
    "MZ-204 …DATA.bin: was truncated after it was opened: it ends at byte 100, expected tokens at byte …; "
    "copy it again, …",
    SINCE,
)
def _(site: Site) -> list[str]:
    prefix = site.folder / "data"
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{site.data.train}{suffix}", f"{prefix}{suffix}")
    before_each_update(site, lambda: os.truncate(f"{prefix}.bin", 100))
    return site.resume(f"data.train={prefix}", "run.steps=20")


@fault(
    "generate with weights of another model",
    "MZ-404 RUN/checkpoints/step_00000004: …: expected …, got …; check that config.yaml is the run's own",
)
def _(site: Site) -> list[str]:
    path = site.run / "config.yaml"
    path.write_text(path.read_text().replace("hidden: 40", "hidden: 48"))
    return ["generate", "--run", str(site.run), "--prompt", "a"]


@fault("an import of an empty folder", "MZ-414 …config.json: cannot be read: …; give a folder of safetensors")
def _(site: Site) -> list[str]:
    return ["import", "--from", "hf", "--model", str(site.folder / "gone"), "--out", str(site.folder / "new")]


@fault(
    "an export of a model that transformers does not have",
    "MZ-415: no family of transformers has this model: arcee: model.position learned would be rotary; …",
)
def _(site: Site) -> list[str]:
    path = site.run / "config.yaml"
    path.write_text(path.read_text().replace("norm: layernorm", "norm: rmsnorm"))
    return ["export", "--to", "hf", "--run", str(site.run), "--out", str(site.folder / "new")]


@fault(
    "an import of numbers that cannot be trained",
    "MZ-415 …config.json: model.hidden % model.heads == 0 with model.head_dim null is broken: 40 % 3 = 1; "
    "this model cannot be trained: …",
)
def _(site: Site) -> list[str]:
    theirs = site.folder / "theirs"
    theirs.mkdir()
    sizes = {"n_layer": 2, "n_embd": 40, "n_head": 3, "vocab_size": 400, "n_positions": 32}
    (theirs / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    return ["import", "--from", "hf", "--model", str(theirs), "--out", str(site.folder / "new")]
