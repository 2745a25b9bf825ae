"""Faults in the update of groups and of whole matrices, planted if the config has an optimizer of whole matrices."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megazero.plan.job import Job
from megazero.tools.certify.fault import DATA, SHARDED, TENSOR, Fault, Variant
from megazero.tools.certify.planted_calls import after, changed, instead, itself
from megazero.tools.certify.training import Plant, Rig


def _muon(rig: Rig) -> list[Any]:
    return [rig.built.engine.optimizer._muon]  # type: ignore[attr-defined]


def _waves(rig: Rig) -> list[Any]:
    (muon,) = _muon(rig)
    return muon._waves


def _stale(rig: Rig) -> None:
    """Let the last data rank send the parts of the first step in every step."""
    for wave in _waves(rig) if rig.grid["data"].rank else []:
        sent = []

        def send(send: Callable[[], Any] = wave.send, wave: Any = wave, sent: list[Any] = sent) -> Any:
            sent.append(wave._parts.clone())
            wave._parts.copy_(sent[0])
            return send()

        wave.send = send


def _rotate_groups(rig: Rig) -> None:
    """Give each piece that AdamW updates the update rule of the next one."""
    optimizer: Any = rig.built.engine.optimizer
    pieces = [piece for unit in rig.built.engine.units for piece in optimizer.pieces(unit)]
    pieces = [piece for piece in pieces if piece.group.optimizer == "adamw"]
    groups = [piece.group for piece in pieces]
    for piece, group in zip(pieces, [*groups[1:], *groups[:1]], strict=True):
        object.__setattr__(piece, "group", group)


def _begin_averages(engine: Any, lr: float) -> None:
    """Set averages to the weights, as a run does that resumes without them."""
    for unit in engine.units:
        for masters, average in engine._averages(unit):
            average.copy_(masters)


def _averages(job: Job) -> bool:
    return job.optimizers.averages


def _narrow(rig: Rig) -> list[Any]:
    return [rig.built.engine.optimizer._narrow] * rig.grid["data"].rank  # type: ignore[attr-defined]


def _rounds(job: Job) -> bool:
    return 2 in (job.bytes.master, job.bytes.moment)


def _own(change: Callable[[Any, list[Any]], tuple[Any, list[Any]]]) -> Plant:
    """Return the fault that changes the items that a rank owns, and their parts."""
    return changed(_waves, "own", lambda own: [change(item, list(parts)) for item, parts in own])


_AS_ONE = _own(lambda item, parts: (item._replace(matrix=replace(item.matrix, parts=())), parts))
_LOST = _own(lambda item, parts: (item, [*parts[:-1], torch.zeros_like(parts[-1])]))
_OTHER_BITS = changed(_narrow, "_seed", lambda seed: seed + 1)
_LOST_AVERAGES = after(itself, "built.engine.finish_step", _begin_averages)
_TWICE = instead(_muon, "apply", lambda _, apply, *how: (apply(*how), apply(*how)))
_OTHER_SCALE = changed(_muon, "_settings", lambda it: replace(it, scale={"rms": "spectral"}.get(it.scale, "rms")))


def _fault(name: str, what: str, layout: Variant, plant: Plant) -> Fault:
    return Fault(name, what, layout, plant, needs=lambda job: job.optimizers.whole)


OPTIMIZER_FAULTS = (
    _fault("stale-part", "an owner gets a rank's parts of the first step", SHARDED, _stale),
    _fault("lost-part", "an owner has zeros for the last part of each matrix", TENSOR, _LOST),
    _fault("one-matrix", "queries, keys and values are one matrix", DATA, _AS_ONE),
    _fault("updated-twice", "matrices are updated twice", DATA, _TWICE),
    _fault("other-matrix-scale", "updates of matrices have another scale", SHARDED, _OTHER_SCALE),
    _fault("rotated-groups", "parameters have the update rule of the next group", DATA, _rotate_groups),
    Fault("lost-averages", "averages are not saved", SHARDED, _LOST_AVERAGES, needs=_averages),
    Fault("other-bits", "ranks round with bits of their own", SHARDED, _OTHER_BITS, needs=_rounds),
)
