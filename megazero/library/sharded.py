"""Train a sharded module: call it, `backward`, `step`; look at whole values; save and load.

    sharded = megazero.shard(module, "adamw", stage=3)
    for batch, target in data:
        loss = loss_of(sharded(batch), target)
        sharded.backward(loss)
        sharded.step(lr)

The gradient of a step is summed over the backwards of a rank and averaged over the ranks: with several micro-batches,
divide each loss by their number, as in torch. Every backward reduces gradients. `last=False` says that another backward
follows, so that stages 0 and 1 reduce once a step.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
from torch import Tensor, nn

from megazero.base.errors import UserError
from megazero.library.assembly import Assembly, run_backward
from megazero.library.shown import refuse_compiled
from megazero.library.state import State
from megazero.library.unit_table import UnitEvents
from megazero.library.values import in_lockstep
from megazero.library.whole import WholeValues
from megazero.plan.optimizers import AVERAGE
from megazero.zero.engine import StepNumbers, StepResult
from megazero.zero.reduce import sum_replicas


@dataclass(frozen=True)
class Step:
    """The results of a step; reading one waits for the device.

    Attributes:
        result: the engine's result, on the device.
    """

    result: StepResult

    @cached_property
    def numbers(self) -> StepNumbers:
        """Return all results on the host."""
        return StepNumbers.of(self.result.packed.tolist())

    @property
    def grad_norm(self) -> float:
        """Return the norm of the step's gradient over all ranks, before clipping."""
        return self.numbers.grad_norm

    @property
    def skipped(self) -> bool:
        """Return whether nothing was updated, because the gradient was not finite."""
        return self.numbers.skipped

    @property
    def loss(self) -> float:
        """Return the mean over the ranks of the sum of the step's losses."""
        return self.numbers.loss


class Sharded(WholeValues):
    """A module whose parameters, gradients and optimizer state are sharded over ranks; made by `megazero.shard`.

    Args:
        assembly: the module's components and its engine.
        cast: converts the inputs to the parameters' precision, if one was given.

    Attributes:
        module: the module.
        rank, ranks: this rank, and the number of ranks.
        steps: the number of steps done so far, including skipped ones.
    """

    def __init__(self, assembly: Assembly, cast: Callable[[Any], Any]):
        super().__init__(assembly)
        self._cast, self.rank, self.ranks = cast, self._world.rank, self._world.size
        self._watch: tuple[int, TextIO] | None = None
        self._known = _places(self.module)  # ids stay valid: parts and tables hold the parameters
        self._skipped = torch.zeros((), dtype=torch.int64, device=assembly.values.device)
        self._checked = self.steps = 0
        self._listen()
        assembly.calls.on_thaw = self._thaw

    def _thaw(self) -> None:
        """Start to train the parameters that have been unfrozen. Raises UserError 502."""
        self._assembly.thaw(self.steps - int(self._skipped))
        self._listen()

    def _listen(self) -> None:
        """Start to count the events of the units, if they are watched."""
        self._events = UnitEvents(self._assembly.values.units, self._assembly.memory.world.comm.ledger.seconds)
        self._events.listen(on=self._watch is not None)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the module's forward.

        Raises:
            UserError: 502, parameters were added, removed or replaced after the module was sharded, or unfrozen between
                a forward and its step; 507, a rank has run other parts of it; 510, it is called from code that
                torch.compile compiles.
        """
        refuse_compiled("sharded")
        if self._checked <= self.steps:  # once a step
            now = _places(self.module)
            if changed := [place for place in {**self._known, **now} if now.get(place) != self._known.get(place)]:
                owner, attribute = changed[0]
                what = f"{type(owner).__name__}.{attribute} was added, removed or replaced after `shard`"
                raise UserError(502, what, "change the module before that, values within `with sharded.gathered(...)`")
            self._assembly.values.require_unchanged()
            self._checked = self.steps + 1
        with in_lockstep(self.rank):
            return self.module(*self._cast(arguments), **self._cast(named))

    def __getattr__(self, name: str) -> NoReturn:
        there = hasattr(vars(self).get("module"), name)
        raise AttributeError(f"Sharded has no attribute {name!r}" + f": use sharded.module.{name}" * there)

    def train(self, mode: bool = True) -> "Sharded":
        """Set the training mode of the module, as `nn.Module.train` does; return self."""
        self.module.train(mode)
        return self

    def eval(self) -> "Sharded":
        """Set the module to evaluation mode; return self."""
        return self.train(False)

    def prefetch_rows(self, ids: Mapping[str, Tensor]) -> None:
        """Look up rows of several split tables at once; the next look-up in each table returns them.

        Every rank calls it before a forward, with the ids of that forward.

        Args:
            ids: the ids for each table, by the name of its module.

        Raises:
            UserError: 511, there is no such table, or an id is no row; 507, ranks look up in different tables.
        """
        self._assembly.tables.fetch(ids)

    def backward(self, loss: Tensor, *, last: bool = True) -> None:
        """Compute the gradients of a loss, and reduce them over the ranks; `backward` does so for several modules.

        Args:
            loss: one number, the mean over this rank's samples.
            last: whether no other backward follows in this step. If one does, True only costs another reduction.

        Raises:
            UserError: 505, the loss is not one number, or gradients of gradients are asked for; 506, its graph is from
                an earlier step; 507, ranks have run other parts of the module, or in another order.
        """
        run_backward(loss, [self._assembly], last=last)

    def step(self, lr: float | None = None, *, table_lr: float | None = None) -> Step:
        """Clip the gradients and update the parameters; the next call sees the new ones.

        Args:
            lr: the learning rate; None: that of the optimizer.
            table_lr: the learning rate of the tables whose rows are split; None: that of their optimizer.

        Raises:
            UserError: 503, there was no backward, or the last one had last=False; 507, a rank has run other parts.
        """
        assembly, values = self._assembly, self._assembly.values
        assembly.require_whole()
        assembly.meet("step")
        assembly.refuse_thawed()
        assembly.stage_gradients.finish_reduction()
        sum_replicas(assembly.engine.units)
        with in_lockstep(self.rank):
            values.release_all()
        assembly.optimizer.frozen = assembly.frozen
        result = assembly.engine.finish_step(
            assembly.recipe.lr if lr is None else lr, elsewhere=assembly.tables.squares()
        )
        self._skipped += result.skipped
        if groups := assembly.tables.groups:
            done, skipped = self.steps + 1 - int(self._skipped), bool(result.skipped)  # waits for the device
            for group in groups:
                group.update(table_lr, result.applied.view(-1)[0], done, skipped=skipped)
        values.begin_epoch()
        values.gather.finish()
        assembly.begin_step()
        self.steps += 1
        if self._watch is not None and self.steps % self._watch[0] == 0 and self.rank == 0:
            print(f"step {self.steps}\n{self._events.table()}", file=self._watch[1], flush=True)
        return Step(result)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Compute with the averages of the parameters inside of the context. Every rank enters it, between two steps.

        Raises:
            UserError: 510, the optimizer keeps none.
        """
        if AVERAGE not in self._assembly.optimizer.kinds:
            do = 'give the optimizer {"average": {"kind": "ema", "decay": 0.999}}'
            raise UserError(510, "the optimizer keeps no averages of the parameters", do, where="averaged")
        self._exchange_averages()
        try:
            yield
        finally:
            self._exchange_averages()

    def _exchange_averages(self) -> None:
        self._assembly.meet("averaged")
        with in_lockstep(self.rank):
            self._assembly.values.release_all()
        self._assembly.engine.exchange_averages()
        self._assembly.values.begin_epoch()
        self._assembly.values.gather.finish()

    def save(self, folder: str | Path) -> Path:
        """Write parameters, optimizer state and buffers as a step of a folder; return the step's folder.

        Every rank calls it, with the same folder, which all ranks see.

        Raises:
            UserError: 403, it could not be written; 508, the folder has this step already; 302, a value is not finite.
        """
        self._assembly.meet("save")
        self._assembly.calls.follow()
        return State(self._assembly).save(Path(folder), self.steps, int(self._skipped))

    def load(self, folder: str | Path, step: int | None = None) -> int:
        """Load a checkpoint that any number of ranks in any stage saved; return its step. Every rank calls it.

        It is verified first: if it is refused, nothing changes, and training can go on.

        Args:
            step: the step to load; None: the newest.

        Raises:
            UserError: 402, there is none; 410, it is damaged; 508, it belongs to another module or optimizer.
        """
        self._assembly.meet("load")
        self._assembly.calls.follow()
        state = State(self._assembly)
        path, manifest = state.verified(Path(folder), step)
        self._assembly.forget()
        self._assembly.values.begin_epoch()
        self.steps, skipped = state.load(path, manifest)
        self._skipped.fill_(skipped)
        return self.steps

    def memory(self) -> dict[str, dict[str, int]]:
        """Return the bytes that this rank holds, current and peak, by category, from the ledger."""
        return self._assembly.memory.world.comm.ledger.bytes_as_dict()

    def traffic(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the operations, elements and bytes that this rank has sent, by axis and purpose, from the ledger."""
        return self._assembly.memory.world.comm.ledger.traffic_as_dict()

    def watch(self, every: int = 10, out: TextIO = sys.stderr) -> None:
        """Print a table of the events of each unit on rank 0, once in `every` steps (`unit_table.py`).

        Args:
            every: 0 stops the table.
        """
        self._watch = (every, out) if every else None
        self._listen()


def _places(module: nn.Module) -> dict[tuple[nn.Module, str], int]:
    """Return the id of every parameter of a module by its owner and attribute."""
    each = ((owner, name, p) for owner in module.modules() for name, p in owner._parameters.items())
    return {(owner, name): id(p) for owner, name, p in each if p is not None}


def backward(loss: Tensor, *modules: Sharded, last: bool = True) -> None:
    """Compute the gradients of a loss for some sharded modules, and reduce them over the ranks.

    Gradients that reach other sharded modules in its graph are dropped. fp16: the backward runs with the smallest loss
    scale of the modules, and the gradients of each module are rescaled to its own loss scale.

    Args:
        loss: one number, the mean over this rank's samples.
        modules: in the order of their forwards.
        last: as in `Sharded.backward`.

    Raises:
        UserError: as `Sharded.backward`; 510, there is no module, or one was sharded without an optimizer.
    """
    run_backward(loss, [module._assembly for module in dict.fromkeys(modules)], last=last)
