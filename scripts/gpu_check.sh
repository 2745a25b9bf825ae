#!/bin/sh
# Builds the CUDA kernels, tests them against fp64 on this machine's GPU, times them, and trains, in several ranks that
# share the GPU too: one command, one table, JSON beside it, under 8 minutes. Needs torch with CUDA, nvcc, numpy, xxhash,
# einops and safetensors; nothing is fetched.
#
#     scripts/gpu_check.sh [--json FILE] [--only PART ...]
#     scripts/gpu_check.sh --device cpu --tiny      # the same steps with the CPU's kernels and small sizes
# PYTHON=.venv/bin/python scripts/gpu_check.sh takes another interpreter than python3.
root=$(cd "$(dirname "$0")/.." && pwd) || exit 1
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m scripts.gpu_check "$@"
