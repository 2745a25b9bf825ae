"""Define a fault that the certificate has to find, and the layouts that faults are planted into."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from megazero.plan.job import Job
from megazero.tools.certify.training import Plant

DTYPES = ("fp64", "fp32", "bf16", "fp16")
Variant = Callable[[Job], Job]  # makes a layout of a job on one process
ALONE: Variant = replace  # for faults that one process has too, which only the reference can find
DATA: Variant = partial(replace, data=2, stage=1)
SHARDED: Variant = partial(replace, data=2, stage=3)
PIPELINE: Variant = partial(replace, pipeline=2)
TENSOR: Variant = partial(replace, tensor=2)
SEQUENCE: Variant = partial(replace, tensor=2, sequence=True)
CHUNKS: Variant = partial(replace, tensor=2, sequence=True, tensor_chunks=2)
OFFLOADED: Variant = partial(replace, data=2, stage=2, offload_optimizer="cpu")
ON_DISKS: Variant = partial(replace, data=2, stage=2, offload_optimizer="nvme")
DISK_INPUTS: Variant = partial(replace, tensor=2, recompute="full", partition=True, offload="nvme")
QUANTISED: Variant = partial(replace, data=2, stage=3, quantize_parameters="int8", quantize_gradients="int8")
CODES: Variant = partial(replace, data=2, stage=2, quantize_gradients="int4")
FED_BACK: Variant = partial(replace, data=2, stage=2, quantize_gradients="int8", error_feedback=True)
NEAR: Variant = partial(replace, data=2, stage=3, secondary_ranks=2)
DELAYED: Variant = partial(replace, data=2, stage=1, offload_optimizer="cpu", delayed=True)


def in_three_chunks(job: Job) -> Job:
    """Return the layout in which the loss is computed in two equal chunks and a short one."""
    return replace(job, data=2, stage=1, loss_chunk=job.tokens // 2 - 1)


@dataclass(frozen=True)
class Fault:
    """One fault to plant.

    Attributes:
        what: what is wrong, in a few words.
        layout: returns the layout that it is planted into, for the job on one process.
        least: factor by which some measure has to exceed its tolerance.
        overflows: it needs gradients that overflow, as in fp16.
        small: it is less than what 16 bits round away.
        needs: returns whether a layout has what the fault changes.
    """

    name: str
    what: str
    layout: Variant
    plant: Plant
    least: float = 1.0
    overflows: bool = False
    small: bool = False
    needs: Callable[[Job], bool] = lambda job: True

    def can_be(self, alone: Job, dtype: str, *, summed: bool) -> bool:
        """Return whether the fault can be planted into a config in a precision.

        Args:
            alone: the config's job on one process.
            summed: `zero.reduce_dtype` is set, which quantised gradients do not support.
        """
        layout = self.layout(alone)
        refused = (layout.error_feedback and dtype == "fp16") or (layout.gradient_bits and summed)
        refused = refused or (self.small and dtype in ("bf16", "fp16"))
        return self.needs(layout) and not refused and (dtype == "fp16" or not self.overflows)
