#!/bin/sh
# Shows on a machine with a GPU what a CPU cannot: kernels (built, against fp64, timed), steps that may not wait, training,
# stage 3's exchange, the host's time, ranks and NCCL: one command, under 8 minutes, each part with a limit of its own.
# Needs torch with CUDA, numpy, xxhash, einops and safetensors; what else is missing (nvcc, Liger, a second GPU) is a line
# that says so. Nothing is fetched.
#
#     scripts/gpu_check.sh [--json FILE] [--only PART ...] [--seconds 460]      tables beside FILE too, in Markdown
#     scripts/gpu_check.sh --device cpu --tiny      # the same steps with the CPU's kernels and small sizes
# PYTHON=.venv/bin/python scripts/gpu_check.sh takes another interpreter than python3.
root=$(cd "$(dirname "$0")/.." && pwd) || exit 1
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m scripts.gpu_check "$@"
