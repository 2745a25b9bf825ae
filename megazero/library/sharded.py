"""Train a sharded module: call it, `backward`, `step`; look at whole values; save and load.

    sharded = megazero.shard(module, "adamw", stage=3)
    for batch, target in data:
        loss = loss_of(sharded(batch), target)
        sharded.backward(loss)
        sharded.step(lr)

The gradient of a step is the mean over the ranks of the sum over their backwards: with several micro-batches a step
divide each loss by their number, as with torch. Every backward reduces gradients; `last=False` says that another one
follows, so that stages 0 and 1 reduce once a step.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
from torch import Tensor, nn

from megazero.base.errors import UserError
from megazero.library.assembly import Assembly
from megazero.library.backward import Backwards, run_backward
from megazero.library.built import refuse_compiled
from megazero.library.calls import Calls
from megazero.library.describe import no_attribute, parts_table
from megazero.library.lockstep import Lockstep, in_lockstep
from megazero.library.parts import saved_buffers
from megazero.library.state import SavedStep, State
from megazero.library.step import Step
from megazero.library.tables import Tables
from megazero.library.whole import Names, WholeValues
from megazero.observe.unit_table import UnitEvents
from megazero.plan.placements import STAGES
from megazero.zero.engine import Engine
from megazero.zero.reduce import sum_replicas


class Sharded:
    """A module whose parameters, gradients and optimizer state are sharded over ranks; made by `megazero.shard`.

    Args:
        module: its parameters are those of the units by now.
        assembly: of its parts and engine.
        calls: the runs of the parts.
        tables: whose rows are split.
        lr: of a step that does not say one.
        cast: what happens to the inputs: to the parameters' precision, if one was asked for.
        lockstep: the calls that all ranks make together.

    Attributes:
        module: the module.
        steps: done so far, skipped ones too.
    """

    def __init__(
        self,
        module: nn.Module,
        assembly: Assembly,
        calls: Calls,
        tables: Tables,
        lr: float,
        cast: Callable[[Any], Any],
        lockstep: Lockstep,
    ):
        self.module, self._assembly, self._calls = module, assembly, calls
        self._parts, self._grid = assembly.parts, assembly.grid
        self._lr, self._cast, self._tables, self._lockstep = lr, cast, tables, lockstep
        self._watch: tuple[int, TextIO] | None = None
        self._known = _places(module)
        self._use(assembly.engine())
        self._skipped = torch.zeros((), dtype=torch.int64, device=self._units[0].device)
        self._checked = self.steps = 0
        calls.on_thaw = self._thaw

    def _use(self, engine: Engine) -> None:
        self._engine, self._units = engine, [unit for part in self._parts for unit in part.units]
        world, calls, tables = self._grid["world"], self._calls, self._tables
        self._whole = WholeValues(self.module, self._parts, engine, calls, tables.shards, world, self._lockstep)
        self._events = UnitEvents(self._units, self._grid.comm.ledger.seconds)
        self._events.listen(on=self._watch is not None)
        self._backwards = Backwards(engine, calls, tables, self._lockstep)

    def _thaw(self) -> None:
        """Train parameters too that were frozen. Raises UserError 502: between the backwards of a step."""
        if self._backwards.count:
            name = next(shown.name for part in self._parts for shown in part.thawed)
            what = f"{name} was unfrozen between a backward and its step"
            raise UserError(502, what, "call requires_grad_(True) after the step")
        updates = self.steps - int(self._skipped)
        self._use(self._assembly.thaw(self._engine, updates, self._calls.stray))

    @property
    def rank(self) -> int:
        return self._grid["world"].rank

    @property
    def ranks(self) -> int:
        return self._grid["world"].size

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the module's forward.

        Raises:
            UserError: 502, parameters were added to the module, or taken away or replaced, after it was sharded; 507,
                a rank has run other parts of it; 510, it is called from code that torch.compile compiles.
        """
        refuse_compiled("sharded")
        if self._checked <= self.steps:  # once a step
            self._require_unchanged()
            self._lockstep.require_unchanged()
            self._checked = self.steps + 1
        with in_lockstep(self.rank):
            return self.module(*self._cast(arguments), **self._cast(named))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(no_attribute(name, vars(self).get("module")))

    def train(self, mode: bool = True) -> "Sharded":
        """Let the module be in training mode, or not, as `nn.Module.train`; return this."""
        self.module.train(mode)
        return self

    def eval(self) -> "Sharded":
        """Let the module be in evaluation mode; return this."""
        return self.train(False)

    def prefetch_rows(self, ids: Mapping[str, Tensor]) -> None:
        """Look up in several tables whose rows are split, in one exchange; their next look-up returns what came.

        Every rank calls it before a forward, with the ids of that forward.

        Args:
            ids: by the name of the table.

        Raises:
            UserError: 511, there is no such table, or an id is no row; 507, other ranks ask other tables.
        """
        self._tables.fetch(ids)

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        """Compute the gradients of a loss, and reduce them over the ranks; `backward` does so for several modules.

        Args:
            loss: one number: of this rank, the mean over its samples.
            last: no other backward follows in this step. True does no harm if one does: it costs another reduction.

        Raises:
            UserError: 505, the loss is no single number, or gradients of gradients are asked for; 506, its graph is of
                an earlier step; 507, ranks have run other parts of the module, or in another order.
        """
        run_backward(loss, [self._backwards], last=last)

    def step(self, lr: float | None = None, *, table_lr: float | None = None) -> Step:
        """Clip the gradients and update the parameters; the next call sees the new ones.

        Args:
            lr: None: that of the optimizer.
            table_lr: of the tables whose rows are split; None: that of their optimizer.

        Raises:
            UserError: 503, there was no backward, or the last one had last=False; 507, a rank has run other parts.
        """
        self._backwards.require_whole()
        (stage,) = self._engine.stages
        self._lockstep.meet("step")
        stage.finish_reduction()
        sum_replicas(self._engine.units)
        with in_lockstep(self.rank):
            self._calls.release_all()
        self._backwards.leave_frozen()
        result = self._engine.finish_step(self._lr if lr is None else lr, beside=self._tables.squares())
        self._skipped += result.skipped
        if self._tables.shards:
            done = self.steps + 1 - int(self._skipped)
            self._tables.update(table_lr, result.applied, done, skipped=bool(result.skipped))
        self._backwards.next_step()
        self.steps += 1
        if self._watch is not None and self.steps % self._watch[0] == 0 and self.rank == 0:
            print(f"step {self.steps}\n{self._events.table()}", file=self._watch[1], flush=True)
        return Step(result)

    def gathered(self, names: Names = "*") -> AbstractContextManager[dict[str, Tensor]]:
        """Return a context with the whole values of parameters by name; what is changed in place counts from then on.

        Every rank enters it, and makes the same changes.

        Args:
            names: of parameters, or patterns of names.

        Raises:
            UserError: 500, a name fits no parameter; 502, the ranks have changed values differently.
        """
        return self._whole.gathered(names)

    def gradients(self, names: Names = "*") -> dict[str, Tensor]:
        """Return whole reduced gradients, between `backward` and `step`: what `.grad` holds elsewhere.

        Every rank calls it and gets copies: of the mean over the ranks, before clipping, in the dtype of accumulation.

        Args:
            names: of parameters, or patterns of names.

        Raises:
            UserError: 500, a name fits no parameter that is trained; 503, there was no backward.
        """
        self._backwards.require_reduced("gradients")
        return self._whole.gradients(names)

    def clip_gradients(self, names: Names, limit: float) -> Tensor:
        """Limit the norm of some parameters' gradients, taken together, between the last `backward` and `step`.

        Every rank calls it, once for each group; a limit of all that was given to `shard` comes after. Gradients are
        gathered one unit at a time.

        Args:
            names: of parameters, or patterns of names.
            limit: of the norm; above 0.

        Returns: the norm before: one number, fp64, on the device.

        Raises:
            UserError: 500, a name fits no parameter that is trained, or the limit is not above 0; 503, there was no
                backward, or the last one had last=False.
        """
        if not limit > 0:
            raise UserError(500, f"expected a limit above 0, got {limit}", where="clip_gradients")
        self._backwards.require_reduced("clip_gradients")
        return self._whole.clip_gradients(names, limit)

    def full_state_dict(self, *, everywhere: bool = False) -> dict[str, Tensor]:
        """Return what `module.state_dict()` would, whole, in host memory, of the first rank; elsewhere nothing.

        Every rank calls it. Parameters come in the precision of forward and backward.

        Args:
            everywhere: every rank gets it.
        """
        return self._whole.state_dict(everywhere=everywhere)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of a state_dict of the whole module: of rank 0's, those of the others are not read.

        The optimizer's state stays. Every rank calls it.

        Raises:
            UserError: 508, a name is missing, or not the module's, or has another shape.
        """
        self._whole.load_state_dict(state)

    def save(self, folder: str | Path) -> Path:
        """Write parameters, optimizer state and buffers as a step of a folder; return the step's folder.

        Every rank calls it, with the same folder, which all ranks see.

        Raises:
            UserError: 403, it could not be written; 508, the folder has this step already; 302, a value is not finite.
        """
        self._lockstep.meet("save")
        self._calls.follow()
        return self._state().save(Path(folder), SavedStep(self.steps, int(self._skipped)))

    def load(self, folder: str | Path, step: int | None = None) -> int:
        """Take all of a checkpoint of any number of ranks and any stage; return its step. Every rank calls it.

        It is verified first: a refusal changes nothing, and training can go on.

        Args:
            step: None: the newest.

        Raises:
            UserError: 402, there is none; 410, it is damaged; 508, it is of another module or another optimizer.
        """
        self._lockstep.meet("load")
        self._calls.follow()
        state = self._state()
        path, manifest = state.verified(Path(folder), step)
        self._backwards.forget()
        self._calls.void()
        found = state.load(path, manifest)
        self.steps = found.steps
        self._skipped.fill_(found.skipped)
        return self.steps

    def _state(self) -> State:
        buffers = saved_buffers(self.module)
        return State(self._units, self._engine, buffers, self._tables.shards, self._grid, self._stage)

    @property
    def _stage(self) -> int:
        return next(number for number, one in STAGES.items() if one is self._units[0].axes.stage)

    def memory(self) -> dict[str, dict[str, int]]:
        """Return the bytes that this rank holds, now and at most, by category: the ledger."""
        return self._grid.comm.ledger.bytes_as_dict()

    def traffic(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return what this rank has sent: operations, elements and bytes by axis and purpose: the ledger."""
        return self._grid.comm.ledger.traffic_as_dict()

    def watch(self, every: int = 10, out: TextIO = sys.stderr) -> None:
        """Write a table of what happened to each unit, on rank 0 and once in so many steps (`observe/unit_table.py`).

        Args:
            every: 0: not any more.
        """
        self._watch = (every, out) if every else None
        self._events.listen(on=bool(every))

    def describe(self) -> str:
        """Return a table of the parts: parameters, and the bytes of each kind that rest on this rank."""
        return parts_table(self._parts, self._tables.shards, self._engine.optimizer.STATE, self._stage)

    def _require_unchanged(self) -> None:
        """Refuse a module whose parameters are not those that were sharded. Raises UserError 502."""
        now = _places(self.module)
        if now.keys() == self._known.keys() and all(now[place] is self._known[place] for place in now):
            return
        changed = [p for p in {**self._known, **now} if now.get(p) is not self._known.get(p)]
        owner, attribute = changed[0]
        what = f"{type(owner).__name__}.{attribute} was added, taken away or replaced after the module was sharded"
        raise UserError(502, what, "change the module first, values within `with sharded.gathered(...)`")


def _places(module: nn.Module) -> dict[tuple[nn.Module, str], nn.Parameter]:
    """Return every parameter of a module by its owner and attribute."""
    return {
        (owner, attribute): parameter
        for owner in module.modules()
        for attribute, parameter in owner._parameters.items()
        if parameter is not None
    }


def backward(loss: Tensor, *modules: Sharded, last: bool = True) -> None:
    """Compute the gradients of a loss for some sharded modules, and reduce them over the ranks.

    Gradients that reach other sharded modules in its graph are dropped. fp16: the backward runs with the smallest loss
    scale of the modules, and the gradients of each are brought to its own.

    Args:
        loss: one number: of this rank, the mean over its samples.
        modules: in the order of their forwards.
        last: as of `Sharded.backward`.

    Raises:
        UserError: as `Sharded.backward`; 510, there is no module, or one was sharded without an optimizer.
    """
    run_backward(loss, [module._backwards for module in dict.fromkeys(modules)], last=last)
