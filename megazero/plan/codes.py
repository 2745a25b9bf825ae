"""The seconds of the passes that quantise what is sent between ranks (`zero.quantize`), and that bring it back.

They go over the memory before and behind each operation, and are waited for or hidden with it. Of P gathered elements
of e bytes, and P reduced ones of g bytes, as codes of c bytes, scales included, on N ranks:

    gathers         quantised by their owner, (e + c) P / N; written by every rank, (c + e) P
    gradients       quantised for each other rank, and what comes added: (g + c) + (c + 2 g), of P (N - 1) / N
    error feedback  a residual added to each, what codes mean, what is lost, nothing that is not finite: 10 g + c more

A pass is a kernel for each rank's part. Neighbours that have codes already (`zero.secondary_ranks`) copy them.
"""

from megazero.base.quantized import BLOCK
from megazero.plan.compute import Compute
from megazero.plan.traffic import Flow


def passes(compute: Compute, own: list[Flow], gathered: int, reduced: int) -> tuple[float, float]:
    """Return the seconds of a step's passes on a rank, of parameters and of gradients.

    Args:
        own: what the rank sends.
        gathered, reduced: elements of whole units, over all of a step's operations.
    """
    job = compute.job
    ranks, axes = job.shard, (job.shard_axis, "shard")
    if ranks == 1:
        return 0.0, 0.0
    gathers = sum(flow.ops for flow in own if flow.axis in axes and flow.purpose == "parameters")
    # Both hops have as many operations; together their parts are those of one.
    reductions = next((flow.ops for flow in own if flow.axis in axes and flow.purpose == "gradients"), 0)
    parameters = gradients = 0.0
    if job.parameter_bits is not None:
        code, item = _bytes_of_code(job.parameter_bits), job.bytes.parameter
        parameters = compute.passes((code + item) * gathered * (1 + 1 / ranks), gathers * (ranks + 1))
    if job.gradient_bits is not None:
        code, item = _bytes_of_code(job.gradient_bits), job.bytes.gradient
        each, kernels = 2 * code + 3 * item, 2
        if job.error_feedback:
            each, kernels = each + code + 10 * item, kernels + 4
        gradients = compute.passes(each * reduced * (ranks - 1) / ranks, reductions * (ranks - 1) * kernels)
    return parameters, gradients


def _bytes_of_code(bits: int) -> float:
    """Return the bytes of a code, with its part of its block's scale."""
    return bits / 8 + 4 / BLOCK
