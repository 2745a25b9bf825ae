"""Replay recomputed layers as CUDA graphs: one launch of the host for a layer's forward, and one for its backward.

This is for layers that a GPU computes faster than the host can launch them. What a layer launches is recorded once, and
replayed from then on. A replay runs the same kernels at the same addresses, so

    input, output, gradients of both   are copied to and from four tensors that all graphs share (`Exchange`)
    parameters and their gradients     lie where their units' pools have put them: there is a graph for each combination
                                       of places, and pools rotate over few
    activations                        live inside the backward's graph, which computes them again (full recompute)

Graphs run one at a time, so all of them take their memory from one pool.

A replay does nothing else of what the host does: the uses of parameters and the deliveries of their gradients are
counted behind it, and a unit's reduction starts behind its layer instead of inside of it. What a layer computes may
depend on its input and its parameters only: no dropout, no documents. To record, torch waits for all of the device,
so no message of another rank may be awaited then: no pipelines. It happens in the first steps, behind `WARM_UP` calls
in which the kernels' libraries prepare themselves.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megazero.comm.ledger import Ledger
from megazero.memory.recompute import ActivationStore, LayerContext, PlainStore, Recomputed

WARM_UP = 2  # calls of a layer's forward, and of its backward, that are not recorded

Work = Callable[[], None]
Key = tuple[Any, ...]


class Graphs(Protocol):
    """A way to record work on a device and to do it again."""

    def record(self, work: Work) -> Work:
        """Record what some work launches, without doing it; return the function that does it."""
        ...


class CudaGraphs:
    """CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        # Other threads (the loader's copies, the monitor's events) use the device meanwhile, which is no fault.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay


def graphs_of(device: torch.device) -> Graphs | None:
    """Return a device's way to record; None: it has none, as where a GPU is only pretended."""
    return CudaGraphs() if device.type == "cuda" else None


class Slot(Protocol):
    """The place of a parameter's gradient, as a graph needs it (`zero/gradients.py`).

    Attributes:
        view: the memory; it may move from one micro-batch to the next.
        fresh: the next delivery overwrites what the memory holds; later ones add to it.
    """

    view: Tensor
    fresh: bool

    def open(self) -> None:
        """Make sure that there is memory."""
        ...

    def expect(self) -> None:
        """Announce a use of the parameter."""
        ...

    def delivered(self) -> None:
        """Count a gradient that has been written."""
        ...

    def write(self, gradient: Tensor) -> None:
        """Write a gradient without counting it."""
        ...

    def write_product(self, left: Tensor, right: Tensor) -> None:
        """Write the gradient left @ right without counting it."""
        ...

    def write_rows(self, rows: Tensor, values: Tensor) -> None:
        """Write a gradient that is zero except in some rows, without counting it."""
        ...


class _Uncounted:
    """A slot whose deliveries are noted instead of counted (a `GradientSlot` of the model).

    Args:
        deliveries: receives the slot at each of them.
    """

    def __init__(self, slot: Slot, deliveries: list[Slot]):
        self._slot, self._deliveries = slot, deliveries

    def expect(self) -> None: ...

    def add(self, gradient: Tensor) -> None:
        self._slot.write(gradient)
        self._deliveries.append(self._slot)

    def add_sum(self, rows: Tensor) -> None:
        self.add(rows.sum(0))

    def add_product(self, left: Tensor, right: Tensor) -> None:
        self._slot.write_product(left, right)
        self._deliveries.append(self._slot)

    def add_rows(self, rows: Tensor, values: Tensor) -> None:
        self._slot.write_rows(rows, values)
        self._deliveries.append(self._slot)


class Exchange:
    """Four tensors of a block's input's shape, through which graphs take and give what passes between layers."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, ledger: Ledger):
        self.memory = torch.empty(4, *shape, dtype=dtype, device=device)
        ledger.hold("graphs", self.memory.nbytes)
        self.input, self.output, self.grad_output, self.grad_input = self.memory.unbind()


class GraphedLayer(Recomputed):
    """A recomputed layer whose forward and backward are replayed.

    Args:
        layer: returns a new tensor of its input's shape, and depends on nothing but its input and its parameters.
        store: keeps its input.
        exchange: shared by all layers that run one at a time.
    """

    def __init__(self, layer: nn.Module, store: ActivationStore | type[PlainStore], graphs: Graphs, exchange: Exchange):
        super().__init__(layer, store)
        self._module, self._exchange = layer, exchange
        self._forwards, self._backwards = _Recorded(graphs), _Recorded(graphs)

    @cached_property
    def _parameters(self) -> list[nn.Parameter]:
        """The parameters; not before the first call, because those that have memory come behind the layer's making."""
        return list(self._module.parameters())

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        at = self._exchange
        at.input.copy_(x)

        def work(_: list[Slot]) -> None:
            at.output.copy_(self.layer(at.input, context))

        self._forwards.do(self._places, work)
        return at.output.clone()

    def backward(self, x: Tensor, grad: Tensor, context: LayerContext) -> Tensor:
        at, recompute = self._exchange, super().backward
        at.input.copy_(x)
        at.grad_output.copy_(grad)
        slots: list[Slot] = [parameter.gradient_slot for parameter in self._parameters]  # type: ignore[attr-defined]
        for slot in slots:
            slot.open()

        def work(deliveries: list[Slot]) -> None:
            with _uncounted(self._parameters, deliveries):
                again = recompute(at.input, at.grad_output, context)
                assert again is not None, "the output depends on the input"
                at.grad_input.copy_(again)

        key = (*self._places, *((slot.view.data_ptr(), slot.fresh) for slot in slots))
        delivered = self._backwards.do(key, work)
        for slot in delivered:  # of a unit all uses first: its gradients are complete with the last delivery
            slot.fresh = False
            slot.expect()
        for slot in delivered:
            slot.delivered()
        return at.grad_input.clone()

    @property
    def _places(self) -> Key:
        return tuple(parameter.data_ptr() for parameter in self._parameters)


class _Recorded:
    """The recordings of one layer's forward or backward, by the places of all that they touch."""

    def __init__(self, graphs: Graphs):
        self._graphs, self._calls = graphs, 0
        self._known: dict[Key, tuple[Work, list[Slot]]] = {}

    def do(self, key: Key, work: Callable[[list[Slot]], None]) -> list[Slot]:
        """Do some work, recorded before if it may be; return the slots that it has written to, in order.

        Args:
            work: notes those in the list that it is given.
        """
        self._calls += 1
        if self._calls <= WARM_UP:
            written: list[Slot] = []
            work(written)
            return written
        if key not in self._known:
            written = []
            replay = self._graphs.record(lambda: work(written))
            self._known[key] = replay, written
        replay, written = self._known[key]
        replay()
        return written


@contextmanager
def _uncounted(parameters: list[nn.Parameter], deliveries: list[Slot]) -> Iterator[None]:
    """Be a context in which the gradients of some parameters are written and not counted."""
    slots = [parameter.gradient_slot for parameter in parameters]  # type: ignore[attr-defined]
    for parameter, slot in zip(parameters, slots, strict=True):
        parameter.gradient_slot = _Uncounted(slot, deliveries)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter, slot in zip(parameters, slots, strict=True):
            parameter.gradient_slot = slot  # type: ignore[attr-defined]
