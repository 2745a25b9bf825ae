"""Build and load this machine's kernels, and report the resources that they use per multiprocessor."""

import time
from collections.abc import Iterator
from dataclasses import asdict

import torch

from megazero.kernels import cpu, cuda, proof, schema
from megazero.kernels.build import BuildError, compiler_report, find_gcc, find_nvcc
from scripts import ptxas
from scripts.gpu_check.findings import Asked, Row

_ = schema  # defines the operations


def obstacle(device: torch.device) -> Row | None:
    """Load the kernels; return None, or a row that says why it failed.

    A machine with neither a compiler nor a prebuilt library lacks the kernels; any other failure is a fault.
    """
    on_gpu = device.type == "cuda"
    try:
        cuda.load() if on_gpu else cpu.load()
        return None
    except BuildError as error:
        try:
            find_nvcc() if on_gpu else find_gcc()
        except BuildError:
            return {"name": "kernels", "absent": str(error)}
        return {"name": "kernels", "fault": str(error)}


def missing(device: torch.device) -> Row | None:
    """Load the kernels for a part that needs them; on failure refer to the part `build`, which reports the reason."""
    row = obstacle(device)
    return None if row is None else {"name": "kernels", "absent": "see build"}


def built(asked: Asked) -> Iterator[Row]:
    """Build, load and prove the kernels; yield one row for all of them, then one for each kernel that spills."""
    begin = time.perf_counter()
    row = obstacle(asked.device)
    if row is not None:
        yield row
        return
    loaded: Row = {"name": "kernels", "build_s": time.perf_counter() - begin}
    begin = time.perf_counter()
    wrong = list(proof.compare(torch.ops.megazero, asked.device))
    said = f"{wrong[0].form} in {wrong[0].dtype}: {wrong[0].error}" if wrong else None
    yield {"name": "proof", "proof_s": time.perf_counter() - begin, "wrong": len(wrong), "fault": said}
    if not asked.on_gpu:
        yield loaded
        return
    try:
        found = ptxas.resources(compiler_report(cuda.library(cuda.present_archs())))
    except FileNotFoundError:
        yield loaded | {"absent": "the compiler's report, of a library that lay ready"}
        return
    most = max(each.registers for each in found)
    yield loaded | {"kernels": len(found), "most_registers": most, "each": [asdict(each) for each in found]}
    for each in found:
        if each.spills:
            yield {"name": each.kernel, "registers": each.registers, "fault": f"{each.spills} bytes spilled"}
