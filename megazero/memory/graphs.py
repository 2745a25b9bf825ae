"""Replay recomputed layers as CUDA graphs: one launch for a layer's forward, and one for its backward.

This is for layers that a GPU computes faster than the host can launch their kernels. The launches of a layer are
recorded once and then replayed. A replay runs the same kernels at the same addresses, so

    input, output, gradients of both   are copied to and from four tensors that all graphs share (`Exchange`)
    parameters and their gradients     are where their units' pools have put them: there is a graph for each combination
                                       of addresses, and pools rotate over few
    activations                        live inside the backward's graph, which recomputes them (full recompute)

Graphs run one at a time, so all of them share one memory pool.

A replay runs no host code: the uses of parameters and the deliveries of their gradients are counted after it, and a
unit's reduction starts after its layer, not inside it. A layer's output may depend only on its input and parameters: no
dropout, no documents. To record, torch waits for the whole device, so no message of another rank may be pending then:
no pipelines. Recording happens in the first steps, after `WARM_UP` calls in which the kernels' libraries initialise.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from megazero.comm.ledger import Ledger
from megazero.memory.recompute import ActivationStore, LayerContext, Recomputed
from megazero.zero.gradients import DeliveryCounter, GradientAccumulator

WARM_UP = 2  # calls of each layer's forward, and of its backward, before recording

Work = Callable[[], None]
Record = Callable[[Work], Work]  # records the launches of `work` without running them; returns the replay function
Key = tuple[Any, ...]


def graphs_of(device: torch.device) -> Record | None:
    """Return a function that records CUDA graphs in one memory pool; None for a device other than CUDA."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()

    def record(work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        # Other threads (the loader's copies, the monitor's events) may use the device during the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
        return graph.replay

    return record


class _Notes(DeliveryCounter):
    """Records deliveries of gradients instead of counting them.

    Args:
        delivered: receives the parameter's name at each delivery.
    """

    def __init__(self, delivered: list[str]):
        super().__init__("of a graph")
        self._names = delivered

    def expect(self, parameter: str) -> None: ...

    def delivered(self, parameter: str) -> None:
        self._names.append(parameter)


class Exchange:
    """Four tensors with the shape of a block's input, through which graphs receive and return data."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, ledger: Ledger):
        self.memory = torch.empty(4, *shape, dtype=dtype, device=device)
        ledger.hold("graphs", self.memory.nbytes)
        self.input, self.output, self.grad_output, self.grad_input = self.memory.unbind()


class GraphedLayer(Recomputed):
    """A recomputed layer whose forward and backward are replayed.

    Args:
        layer: returns a new tensor of its input's shape, which depends only on its input and parameters.
        store: keeps its input.
        record: from `graphs_of`.
        exchange: shared by all graphed layers, which run one at a time.
    """

    def __init__(self, layer: nn.Module, store: ActivationStore, record: Record, exchange: Exchange):
        super().__init__(layer, store)
        self._module, self._exchange = layer, exchange
        self._forwards, self._backwards = _Recorded(record), _Recorded(record)

    @cached_property
    def _parameters(self) -> list[nn.Parameter]:
        """Return the parameters, cached at the first call: they get their memory after the layer's construction."""
        return list(self._module.parameters())

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """Replay the recorded forward of the layer; return its output."""
        at = self._exchange
        at.input.copy_(x)

        def work(_: list[str]) -> None:
            at.output.copy_(self.layer(at.input, context))

        self._forwards.do(self._places, work)
        return at.output.clone()

    def backward(self, x: Tensor, grad: Tensor, context: LayerContext) -> Tensor:
        """Replay the recorded recomputation and backward; return the gradient of the input."""
        at, recompute = self._exchange, super().backward
        at.input.copy_(x)
        at.grad_output.copy_(grad)
        slots: list[GradientAccumulator] = [p.gradient_slot for p in self._parameters]  # type: ignore[attr-defined]
        for slot in slots:
            slot.open()

        def work(delivered: list[str]) -> None:
            counters, notes = [slot.counter for slot in slots], _Notes(delivered)
            for slot in slots:
                slot.count_with(notes)
            try:
                again = recompute(at.input, at.grad_output, context)
                assert again is not None, "the output depends on the input"
                at.grad_input.copy_(again)
            finally:
                for slot, counter in zip(slots, counters, strict=True):
                    slot.count_with(counter)

        key = (*self._places, *((slot.view.data_ptr(), slot.fresh) for slot in slots))
        by_name = {slot.name: slot for slot in slots}
        delivered = [by_name[name] for name in self._backwards.do(key, work)]
        for slot in delivered:  # expect all uses first: a unit's gradients are complete at its last delivery
            slot.fresh = False
            slot.expect()
        for slot in delivered:
            slot.counter.delivered(slot.name)
        return at.grad_input.clone()

    @property
    def _places(self) -> Key:
        return tuple(parameter.data_ptr() for parameter in self._parameters)


class _Recorded:
    """The recordings of one layer's forward or backward, by the addresses that they use."""

    def __init__(self, record: Record):
        self._record, self._calls = record, 0
        self._known: dict[Key, tuple[Work, list[str]]] = {}

    def do(self, key: Key, work: Callable[[list[str]], None]) -> list[str]:
        """Run `work`, after the warm-up by a replay; return the names of the gradients that it delivered, in order.

        Args:
            key: the addresses that the work uses.
            work: appends the parameter's name of each delivered gradient to its argument.
        """
        self._calls += 1
        delivered: list[str] = []
        if self._calls <= WARM_UP:
            work(delivered)
            return delivered
        if key not in self._known:
            self._known[key] = self._record(lambda: work(delivered)), delivered
        replay, delivered = self._known[key]
        replay()
        return delivered
