#!/bin/sh
# Runs all checks that need a GPU: one command, at most nine minutes; each part has its own time limit. Parts and
# options: scripts/gpu_check/__main__.py, docs/gpu.md. Needs torch with CUDA and the project's packages; if another tool
# is missing (nvcc, compute-sanitizer, Liger, a second GPU), the report says so in a line. Fetches nothing: missing
# packages are taken from build/carried, if `python -m scripts.gpu_check.carry` has been run.
#
#     scripts/gpu_check.sh [--json FILE] [--only PART ...] [--second]
#     scripts/gpu_check.sh --device cpu --tiny      # the same steps with the CPU's kernels and small sizes
# PYTHON=.venv/bin/python scripts/gpu_check.sh uses another interpreter than python3.
root=$(cd "$(dirname "$0")/.." && pwd) || exit 1
python="${PYTHON:-python3}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
installed=$("$python" -m scripts.gpu_check.carry --install)
PYTHONPATH="${installed:+$installed:}$PYTHONPATH" exec "$python" -m scripts.gpu_check "$@"
