# Shared by the batch scripts of this folder, which source it from the repository's root.
# shellcheck shell=bash

# Defaults, which site.sh may change.
python=.venv/bin/python
[ -x "$python" ] || python=python3
hardware= # a value of `megazero plan --hardware`; "": unknown
container=() # words before Python in every task
# A rank sees all GPUs of its node and uses the one with its local rank: NCCL copies directly between GPUs of a node
# only if both ranks see both GPUs. Its threads stay on the cores of its task.
options=(--cpu-bind=cores --gpu-bind=none)

# srun of SLURM 22.05 and later does not inherit --cpus-per-task from sbatch.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SRUN_CPUS_PER_TASK}

if [ -f scripts/slurm/site.sh ]; then
    # shellcheck source=/dev/null
    . scripts/slurm/site.sh || exit 1
fi

# Runs Python in one task on this node.
once() {
    srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$SLURMD_NODENAME" "${options[@]}" \
        "${container[@]}" "$python" "$@"
}

# Runs Python in one task on each of the job's nodes.
on_each_node() {
    srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        --kill-on-bad-exit=0 "${options[@]}" "${container[@]}" "$python" "$@"
}
