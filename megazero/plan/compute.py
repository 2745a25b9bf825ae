"""Estimate the seconds that a device computes on one micro-batch: in one block, and in the two ends of the model.

The time of a matrix product [M, K] x [K, N] is its arithmetic at the rate that large products reach, plus its reads
and writes at the memory's rate, which make small products slower:

    2 M N K / (peak x matmul)  +  item (M K + K N + M N) / (bandwidth x memory)  +  launch

So efficiency falls smoothly with the smallest of M, N and K. A weight's gradient accumulates over micro-batches, so its
product also reads its output. Memory-bound operations take their bytes over the memory's bandwidth. Bytes for a token,
with hidden size h, MLP size f and e bytes an element (/ t: split over tensor ranks, the gated form too):

                     forward                        backward
    norms            2 x 2 h e                      2 x 3 h e
    residual sums    2 x 3 h e, masks 2 h           2 x 2 h e, masks 2 h
    activation       2 f e / t, gated 3             3 f e / t, gated 5
    rotary           2 (h + kv) e / t               2 (h + kv) e / t
    biases           in the products                (h + 2 kv + f) e / t + 2 h e, to sum gradients

Attention between the projections costs 4 s h FLOPs a token in forward (scores, values). *Fused* attention skips the
half that the causal mask hides, stores no scores, and computes them again in backward: 2.5 times the forward (Dao 2023,
arXiv 2307.08691). *Stored* attention (Megatron-LM before fused attention) computes all scores, and reads and writes
s x heads scores of 2 bytes with their dropout and its mask: 13 bytes a score in forward (written; softmax in and out;
dropout in and out, a mask; read), 19 in backward.

Quantisation (`zero.quantize`) adds passes over the memory before and after each collective. Bytes for P gathered
elements of e bytes and P reduced elements of g bytes, with codes of c bytes (scales included), on N ranks:

    gathers         the owner quantises, (e + c) P / N; every rank decodes, (c + e) P
    gradients       quantised for each other rank, received parts added: (g + c) + (c + 2 g), each x P (N - 1) / N
    error feedback  adds a residual, decodes, keeps the error, drops values that are not finite: 10 g + c more

A pass is one kernel for each rank's part. Second shards (`zero.secondary_ranks`) are kept as codes, and only copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from megazero.base.quantized import BLOCK
from megazero.plan.flops import all_attention_flops, attention_flops, flops_per_token
from megazero.plan.job import Job
from megazero.plan.layers import Width, of_job, products
from megazero.plan.machines import Machine
from megazero.plan.model import Kind
from megazero.plan.systems import OURS, System
from megazero.plan.traffic import Flow

_STORED_FORWARD, _STORED_BACKWARD = 13, 19  # bytes read and written for each score
_WAYS = ("forward", "backward")
_LOGITS = 16  # and for each logit, between product and gradient: maximum and sum, exponentials in place, gradient


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one micro-batch: forward, gradient of the input, gradients of the weights, recomputation.

    Attributes:
        columns: weight gradients of the column products, which can hide a sum over tensor ranks.
    """

    forward: float
    input: float
    weight: float
    again: float = 0.0
    columns: tuple[float, ...] = ()

    @property
    def backward(self) -> float:
        """Return the seconds of backward, recomputation included."""
        return self.input + self.weight + self.again

    def times(self, count: float) -> "PassTimes":
        """Return the times of `count` micro-batches or blocks."""
        return PassTimes(count * self.forward, count * self.input, count * self.weight, count * self.again)

    def plus(self, other: "PassTimes") -> "PassTimes":
        """Return the sum of both, without `columns`."""
        return PassTimes(
            self.forward + other.forward, self.input + other.input, self.weight + other.weight, self.again + other.again
        )


class Compute:
    """The seconds of one job on one machine.

    Raises:
        ValueError: the machine has no peak for the job's precision.
    """

    def __init__(self, job: Job, machine: Machine, system: System = OURS):
        self.job, self.shape, self.system = job, job.shape, system
        self.item, self.t = job.bytes.parameter, job.tensor
        peak = machine.peak(self.item)
        if peak is None:
            raise ValueError(f"{machine.name} has no peak for matrix products of {self.item} bytes an element")
        self.peak, self.launch = peak, machine.launch
        self._rate, self._fused = peak * machine.reached.matmul, peak * machine.reached.fused_attention
        self._bandwidth = machine.memory_bandwidth * machine.reached.memory
        self.tokens, self.stream = job.tokens, job.local(job.tokens)

    def moved(self, size: float, kernels: int = 1) -> float:
        """Return the seconds of memory-bound kernels that together move `size` bytes."""
        return size / self._bandwidth + kernels * self.launch

    def block(self) -> PassTimes:
        """Return the times of one block for one micro-batch, the mean over all blocks."""
        blocks = [(self._block(kind), count / self.shape.layers) for kind, count in self.shape.counted().items()]
        mean = reduce(PassTimes.plus, (times.times(share) for times, share in blocks))
        return replace(mean, columns=blocks[0][0].columns)

    def _block(self, kind: Kind) -> PassTimes:
        forward_products = self.products()
        weights = [self._product(*sizes, self.tokens, grows=True) for sizes in self._sizes()]
        columns = [w for w, layer in zip(weights, products(self.job), strict=True) if layer.product == "column"]
        core, core_backward = self._attention(kind)
        light, light_backward, biases = self._light(kind)
        forward = sum(forward_products) + core + light
        left_out = forward_products[-1] + light / 4 if self.omits_last else 0.0
        again = {"none": 0.0, "selective": core, "full": forward - left_out}[self.job.recompute]
        backward = sum(forward_products) + core_backward + light_backward
        return PassTimes(forward, backward, sum(weights) + biases, again, tuple(columns))

    def products(self, chunks: int = 1) -> list[float]:
        """Return the seconds of a block's forward products, in forward order, for 1 / `chunks` of the tokens."""
        return [self._product(self.tokens / chunks, *sizes) for sizes in self._sizes()]

    def head(self) -> PassTimes:
        """Return the times of norm, projection and loss; backward repeats the projection of all chunks but the last."""
        h, rows, each = self.shape.hidden, self.shape.vocab / self.t, self.job.scored
        chunks, stream = -(-self.tokens // each), self.stream * h * self.item
        product, loss = chunks * self._product(self.tokens / chunks, rows, h), self.moved(self.tokens * rows * _LOGITS)
        weight = chunks * self._product(rows, h, self.tokens / chunks, grows=True)
        forward, backward = (product + loss / 2 + self.moved(size) for size in (2 * stream, 3 * stream))
        return PassTimes(forward, backward, weight, (product + loss / 2) * (chunks - 1) * each / self.tokens)

    def embedding(self) -> PassTimes:
        """Return the times of the embedding."""
        stream = self.stream * self.shape.hidden * self.item
        return PassTimes(self.moved(4 * stream), 0.0, self.moved(3 * stream))

    def update(self, elements: float) -> float:
        """Return the seconds of an update of `elements` elements, without whole matrices."""
        return self.moved(elements * self.job.bytes.moved_by_update(self.job.kept))

    def codes(self, own: Sequence[Flow], gathered: int, reduced: int) -> tuple[float, float]:
        """Return the seconds of a step's passes that quantise parameters, and gradients.

        Args:
            own: the flows that the rank sends.
            gathered, reduced: elements of whole units, summed over all operations of a step.
        """
        job, ranks, axes = self.job, self.job.shard, (self.job.shard_axis, "shard")
        if ranks == 1:
            return 0.0, 0.0
        gathers = sum(flow.ops for flow in own if flow.axis in axes and flow.purpose == "parameters")
        # Both hops have equally many operations; their parts together are those of a single hop.
        reductions = next((flow.ops for flow in own if flow.axis in axes and flow.purpose == "gradients"), 0)
        parameters = gradients = 0.0
        if job.parameter_bits is not None:
            each = _bytes_of_code(job.parameter_bits) + self.item
            parameters = self.moved(each * gathered * (1 + 1 / ranks), gathers * (ranks + 1))
        if job.gradient_bits is not None:
            code, item = _bytes_of_code(job.gradient_bits), job.bytes.gradient
            each, kernels = 2 * code + 3 * item, 2
            if job.error_feedback:
                each, kernels = each + code + 10 * item, kernels + 4
            gradients = self.moved(each * reduced * (ranks - 1) / ranks, reductions * (ranks - 1) * kernels)
        return parameters, gradients

    def flops(self) -> tuple[float, float]:
        """Return the FLOPs of a token: the model's, and those that the device executes, recompute included."""
        shape = self.shape
        model, cores = flops_per_token(shape), all_attention_flops(shape)
        again = {"none": 0.0, "selective": cores, "full": (model - 6 * shape.vocab * shape.hidden) / 3}
        left_out = self.job.recompute == "full" and self.omits_last
        last_products = 2 * shape.layers * products(self.job)[-1].matrix * left_out
        return model, model + (again[self.job.recompute] - last_products)

    @property
    def omits_last(self) -> bool:
        """True if a replayed block leaves out its last product."""
        return self.job.omits_last and not self.system.replays_all

    def _sizes(self) -> list[tuple[float, float]]:
        """Return (outputs, inputs) of each product of a block on one tensor rank, in forward order."""
        t, found = self.t, []
        for layer in products(self.job):
            column = layer.product == "column"
            found.append((layer.outputs / (t if column else 1), layer.inputs / (1 if column else t)))
        return found

    def _product(self, m: float, n: float, k: float, *, grows: bool = False) -> float:
        size = self.item * (m * k + k * n)
        size += 2 * self.job.bytes.gradient * m * n if grows else self.item * m * n
        return 2 * m * n * k / self._rate + self.moved(size)

    def _attention(self, kind: Kind) -> tuple[float, float]:
        """Return the seconds of the layers between the projections, forward and backward."""
        shape, T, t = self.shape, self.tokens, self.t
        flops = T * attention_flops(shape, kind) / t
        if not self.system.stored_scores:
            forward = flops / 2 / self._fused + self.launch
            light = [layer for layer in of_job(self.job, kind) if layer.core and layer.forward != Width()]
            passes = [sum(self.moved(self._passed(getattr(layer, way))) for layer in light) for way in _WAYS]
            return forward + passes[0], 2.5 * forward + passes[1]
        scores = T * shape.seq_len * shape.heads / t
        forward = flops / self._rate + self.moved(scores * _STORED_FORWARD)
        return forward, 2 * flops / self._rate + self.moved(scores * _STORED_BACKWARD)

    def _light(self, kind: Kind) -> tuple[float, float, float]:
        """Return the seconds of norms, sums and activation: forward, backward, and the sums of biases' gradients."""
        layers = [layer for layer in of_job(self.job, kind) if not layer.core]
        masks = self.stream * sum(layer.masks for layer in layers)
        kernels = [sum(layer.kernels[way] for layer in layers) for way in (0, 1)]
        passes = [sum(self._passed(getattr(layer, way)) for layer in layers) + masks for way in _WAYS]
        biases = sum(self._passed(layer.biases) for layer in layers)
        forward, backward = (self.moved(size, count) for size, count in zip(passes, kernels, strict=True))
        return forward, backward, self.moved(biases)

    def _passed(self, width: Width) -> float:
        """Return the bytes on one rank of `width` elements for each token of a micro-batch."""
        return (self.stream * width.stream + self.tokens * width.split / self.t) * self.item


def _bytes_of_code(bits: int) -> float:
    """Return the bytes of a code, including its part of the block's scale."""
    return bits / 8 + 4 / BLOCK
