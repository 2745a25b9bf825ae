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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
from torch import Tensor, nn

from megazero.base.errors import UserError
from megazero.comm.collectives import all_gather
from megazero.comm.grid import Grid
from megazero.library.agreed import AgreedGather, in_lockstep, other_parts
from megazero.library.built import BuiltPart, refuse_compiled
from megazero.library.calls import Calls
from megazero.library.describe import loss_text, no_attribute, parts_table
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
        parts: of the module, the root first.
        engine: over the units that are trained.
        calls: the runs of the parts.
        tables: whose rows are split.
        lr: of a step that does not say one.
        cast: what happens to the inputs: to the parameters' precision, if one was asked for.
        agreed: how ranks that call different units gather them; None: all call the same.

    Attributes:
        module: the module.
        steps: done so far, skipped ones too.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Sequence[BuiltPart],
        engine: Engine,
        calls: Calls,
        tables: Tables,
        grid: Grid,
        lr: float,
        cast: Callable[[Any], Any],
        agreed: AgreedGather | None = None,
    ):
        self.module, self._parts, self._engine, self._calls, self._grid = module, parts, engine, calls, grid
        self._lr, self._cast, self._tables = lr, cast, tables
        self._units = [unit for part in parts for unit in part.units]
        self._agreed = agreed
        self._whole = WholeValues(module, parts, engine, calls, tables.shards, grid["world"], self._meet)
        self._events = UnitEvents(self._units, grid.comm.ledger.seconds)
        self._watch: tuple[int, TextIO] | None = None
        self._known = _places(module)
        self._one = torch.ones((), device=self._units[0].device)
        self._backwards = 0  # of this step
        self._shards_gradients = any(not unit.gradients_rest_whole for unit in engine.units)
        self._failed = False  # a backward of this step ended on the way
        self._skipped = torch.zeros((), dtype=torch.int64, device=self._one.device)
        self._checked, self._reduced = 0, False
        self.steps = 0
        engine.begin_step()

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
        """Compute the gradients of a loss, and reduce them over the ranks.

        Args:
            loss: one number: of this rank, the mean over its samples.
            last: no other backward follows in this step. True does no harm if one does: it costs another reduction.

        Raises:
            UserError: 505, the loss is no single number, or gradients of gradients are asked for; 506, its graph is of
                an earlier step; 507, ranks have run other parts of the module, or in another order.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"expected one number that depends on parameters, got {loss_text(loss)}"
            raise UserError(505, what, "give the mean of the losses, outside of torch.no_grad()", where="backward")
        self._meet("backward")
        with in_lockstep(self.rank):
            self._require_one_order()
            self._backward(loss, last=last)

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        (stage,) = self._engine.stages
        if self._failed:
            self._forget()
        if self._backwards:
            stage.finish_reduction()
            if self._reduced and not self._shards_gradients:
                for unit in self._engine.units:
                    unit.keep_own_gradients()
                stage.clear()  # what is reduced next holds what was reduced before
        self._reduced = last
        scaled = self._engine.loss(loss, self._one if self._backwards == 0 else self._one - 1)
        self._backwards += 1
        self._failed = True
        with self._calls.backward(), self._tables.backward():
            stage.backward(0, scaled.backward, reduce=last or self._shards_gradients, last=False)
        self._failed = False

    def _forget(self) -> None:
        """Forget the gradients of this step, also those that are under way."""
        (stage,) = self._engine.stages
        stage.finish_reduction()
        for unit in self._engine.units:
            unit.drop_gradients()
        self._tables.forget()
        self._calls.release_all()
        self._engine.begin_step()
        self._calls.close()
        self._backwards, self._reduced, self._failed = 0, False, False

    def step(self, lr: float | None = None, *, table_lr: float | None = None) -> Step:
        """Clip the gradients and update the parameters; the next call sees the new ones.

        Args:
            lr: None: that of the optimizer.
            table_lr: of the tables whose rows are split; None: that of their optimizer.

        Raises:
            UserError: 503, there was no backward, or the last one had last=False; 507, a rank has run other parts.
        """
        if self._failed:
            raise UserError(503, "the last backward failed", "run the step's forward and backward again", where="step")
        if not self._backwards:
            raise UserError(503, "a step without a backward", "call sharded.backward(loss) before", where="step")
        (stage,) = self._engine.stages
        if not self._reduced:
            raise UserError(
                503, "the last backward of the step had last=False", "give the last one last=True", where="step"
            )
        self._meet("step")
        stage.finish_reduction()
        sum_replicas(self._engine.units)
        with in_lockstep(self.rank):
            self._calls.release_all()
            self._require_one_order()
        result = self._engine.finish_step(self._lr if lr is None else lr, beside=self._tables.squares())
        self._skipped += result.skipped
        if self._tables.shards:
            done = self.steps + 1 - int(self._skipped)
            self._tables.update(table_lr, result.applied, done, skipped=bool(result.skipped))
        self._engine.begin_step()
        self._calls.next_step()
        self._backwards = 0
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
        if not self._backwards:
            raise UserError(503, "gradients without a backward", "call sharded.backward(loss) before")
        if not self._reduced and not self._shards_gradients:
            raise UserError(503, "the last backward had last=False", "gradients are reduced by the last one")
        return self._whole.gradients(names)

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
        self._meet("save")
        return self._state().save(Path(folder), SavedStep(self.steps, int(self._skipped)))

    def load(self, folder: str | Path, step: int | None = None) -> int:
        """Take all of a checkpoint of any number of ranks and any stage; return its step. Every rank calls it.

        It is verified first: a refusal changes nothing, and training can go on.

        Args:
            step: None: the newest.

        Raises:
            UserError: 402, there is none; 410, it is damaged; 508, it is of another module or another optimizer.
        """
        self._meet("load")
        state = self._state()
        path, manifest = state.verified(Path(folder), step)
        self._forget()
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

    @contextmanager
    def timeline(self, path: str | Path) -> Iterator[None]:
        """Draw what happens to each unit inside the context, on rank 0, as an SVG or PNG file: one step, say.

        Raises:
            UserError: 405, the file cannot be written.
        """
        with self._events.recording() as events:
            yield
        if self.rank == 0:
            try:
                self._events.draw(Path(path), events)
            except OSError as error:
                raise UserError(405, f"cannot be written: {error.strerror}", where=path) from None

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

    def _meet(self, meeting: str) -> None:
        """Let ranks that call different units come to the same call of this class. Raises UserError 507."""
        if self._agreed is not None:
            self._agreed.meet(meeting)

    def _require_one_order(self) -> None:
        """Refuse a backward, or a step, if ranks have gathered other units, or in another order. Raises UserError 507.

        Their messages have been taken for each other's. Where parameters are sharded over several ranks, the host waits
        for the device here.
        """
        if self._agreed is not None or self.ranks == 1 or all(unit.parameters_rest_whole for unit in self._units):
            return
        mine = torch.tensor([self._calls.order], dtype=torch.int64, device=self._one.device)
        shard = self._units[0].axes.shard
        orders = all_gather(mine, shard, "agree").tolist()
        if odd := [rank for rank, order in zip(shard.ranks, orders, strict=True) if order != orders[0]]:
            raise other_parts(odd[0], shard.ranks[0])


def _places(module: nn.Module) -> dict[tuple[nn.Module, str], nn.Parameter]:
    """Return every parameter of a module by its owner and attribute."""
    return {
        (owner, attribute): parameter
        for owner in module.modules()
        for attribute, parameter in owner._parameters.items()
        if parameter is not None
    }
