"""Measure components of steps: weight gradient products, host memory, an update on the host, a disk, kernel loading.

products  weight gradients in fp32 from bf16 factors, compared with the same products in bf16
host      copies between a GPU and pinned memory, the time of pinning, and AdamW on all cores
disk      the best of several settings, without the page cache
loading   seconds and device bytes of the first steps of a tiny GPT, in a process that loads all kernels at the start
          (EAGER, as a run does) or each kernel at its first use (LAZY)
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megazero.comm.grid import single
from megazero.comm.pinned import pinned_bytes
from megazero.extensions.homes import HOMES
from megazero.kernels import reference
from megazero.kernels.build import BuildError
from megazero.kernels.products import wide_products
from megazero.kernels.samples import SAMPLES, Draw, Sizes
from megazero.kernels.select import choose, for_host
from megazero.kernels.timing import medians, seconds
from scripts.gpu_check import commands
from scripts.gpu_check.findings import Asked, Row
from scripts.gpu_check.layouts import Case
from scripts.gpu_check.speed import GPT_1_3B, stepper
from scripts.gpu_check.steps import GPT, LLAMA

DISK, PINNED, UPDATED = 4 << 30, 4 << 30, 100_000_000  # bytes, bytes, elements
BYTES = 30  # that an update reads and writes per element (scripts/bench/kernels.py)
LOADING_S = 40


def rows(asked: Asked) -> Iterator[Row]:
    """Yield the rows of all measurements."""
    for each in (products, loading, host, disk):
        yield from each(asked)


def products(asked: Asked) -> Iterator[Row]:
    """Yield the speed of weight gradients [N, K] of T tokens: written or accumulated in fp32, or written in bf16."""
    wide = wide_products(asked.device, torch.bfloat16)
    if wide is None:
        yield {"name": "products with an fp32 result", "absent": "this torch has none for this device"}
    for name, shape, micro in (("GPT-2 1.5B", GPT, 8), ("Llama 3.2 1B", LLAMA, 4)):
        m = shape.of(asked).model
        tokens, hidden, draw = micro * m["seq_len"], m["hidden"], Draw(torch.bfloat16, torch.Generator(asked.device))
        for which, out in {
            "qkv": hidden + 2 * hidden * m["kv_heads"] // m["heads"],
            "up": m["ffn"],
            "head": m["vocab"],
        }.items():
            left, right = draw(tokens, out).T, draw(tokens, hidden)
            into = torch.zeros(out, hidden, device=asked.device)
            calls: dict[str, Callable[[], object]] = {"bf16": partial(torch.matmul, left, right)}
            if wide is not None:
                calls |= {
                    "written": partial(wide.write, into, left, right),
                    "added": partial(wide.add, into, left, right),
                }
            row: Row = {"name": f"{name}, {which}", "size": f"{out}x{tokens}x{hidden}"}
            for how, found in zip(calls, medians(list(calls.values()), asked.device), strict=True):
                flops = 2 * tokens * out * hidden
                row[f"{how}_tflops"] = flops / found / 1e12 if isinstance(found, float) else found
            yield row


def host(asked: Asked) -> Iterator[Row]:
    """Yield the speeds of pinning, of copies to and from the device, and of an update on the host."""
    size = 1 << 20 if asked.tiny else PINNED
    if asked.on_gpu:
        begin = time.perf_counter()
        memory = pinned_bytes(size)
        yield {"name": "memory pinned", "gb": size / 1e9, "gb_per_s": size / (time.perf_counter() - begin) / 1e9}
        there = torch.empty(size, dtype=torch.uint8, device=asked.device)
        for name, copy in (
            ("host to device", lambda: there.copy_(memory, non_blocking=True)),
            ("device to host", lambda: memory.copy_(there, non_blocking=True)),
        ):
            yield {"name": name, "gb_per_s": size / seconds(copy, 3, asked.device) / 1e9}
        del memory, there
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    flat, ops = 1 << 16 if asked.tiny else UPDATED, for_host("auto", torch.float32)
    arguments = SAMPLES["adamw_"](Draw(torch.bfloat16, torch.Generator().manual_seed(0)), Sizes(*[1] * 7, flat=flat))
    update = ops.adamw_ or reference.adamw_
    took = min(seconds(lambda: update(*arguments), 1, torch.device("cpu")) for _ in range(4))
    row: Row = {"name": "AdamW on the host", "threads": torch.get_num_threads(), "kernels": ops.name}
    yield row | {"ns_per_element": took / flat * 1e9, "gb_per_s": BYTES * flat / took / 1e9}


def disk(asked: Asked) -> Iterator[Row]:
    """Yield the speed of the disk of temporary files, with the reads and writes of offloaded state."""
    folder = Path(tempfile.gettempdir())
    most = min(1 << 24 if asked.tiny else DISK, shutil.disk_usage(folder).free // 4)
    for name, home in HOMES.items():
        try:
            found = home.speed(folder, most)
        except (OSError, BuildError) as error:
            yield {"name": name, "absent": str(error)}
            continue
        row: Row = {"name": name, "direct": str(found.direct), "engine": found.engine, "depth": found.depth}
        yield row | {"write_gb_per_s": found.write / 1e9, "read_gb_per_s": found.read / 1e9}


def loading(asked: Asked) -> Iterator[Row]:
    """Yield the seconds and the memory of a process with each way of loading kernels."""
    with TemporaryDirectory(prefix="megazero-loading-") as name:
        folder = Path(name)
        for way in ("EAGER", "LAZY"):
            log, words = folder / way, ["-m", "scripts.gpu_check.rates", asked.device.type]
            fault = commands.python(words, log, LOADING_S, asked.device, CUDA_MODULE_LOADING=way)
            said = [line for line in log.read_text().splitlines() if line.startswith("{")]
            yield {"name": f"{way} loading", "fault": fault or None} | (json.loads(said[-1]) if said else {})


def first_steps(device: torch.device) -> Row:
    """Return the seconds of this process' first steps, and the device megabytes outside of torch's allocator."""
    asked, begin = Asked(device, tiny=True), time.perf_counter()
    found: Row = {}

    def note(name: str) -> None:
        asked.synchronize()
        found[f"{name}_s"] = time.perf_counter() - begin
        if asked.on_gpu:
            free, total = torch.cuda.mem_get_info(device)
            found[f"{name}_mb"] = (total - free - torch.cuda.memory_reserved(device)) / 1e6

    torch.ones(1, device=device)
    note("start")
    ops = choose("auto", device, torch.bfloat16)
    step = stepper(Case("", {"micro_batch": 4}, "bf16", "auto"), single(), asked, ops, GPT_1_3B.of(asked))
    for number in range(3):
        step(number)
        note(f"step_{number + 1}")
    return found


if __name__ == "__main__":
    print(json.dumps(first_steps(torch.device(*(("cuda", 0) if sys.argv[1] == "cuda" else ("cpu",))))))
