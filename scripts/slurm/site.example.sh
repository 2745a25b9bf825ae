# Settings of your cluster for every script in this folder. Copy this file to scripts/slurm/site.sh, which git ignores,
# and keep the lines that you need. It is sourced by the batch shell on the job's first node, before any rank starts;
# what it exports reaches all ranks.

# Modules. `module` is a function of the login shell; the batch shell may have to be told where it comes from.
# source /etc/profile.d/modules.sh
# module purge
# module load cuda/12.8 gcc/13

# The Python to start, where it is not .venv/bin/python.
# python=$HOME/envs/megazero/bin/python

# Where kernels are kept once they are compiled. With a folder that all nodes see, one node compiles for all.
# export XDG_CACHE_HOME=/shared/$USER/cache

# The GPUs, as `megazero plan --hardware` takes them: a name, or a file of `megazero doctor --write` with the disk's rate.
# With it a job whose save takes long is told to save earlier than 120 s before its end.
# hardware=h100-80gb

# Network. The names of interfaces are those of the nodes (`ip -brief address`); docs/operations.md says what listens.
# export GLOO_SOCKET_IFNAME=ib0
# export NCCL_SOCKET_IFNAME=ib0
# export NCCL_IB_HCA=mlx5
# export NCCL_DEBUG=WARN

# GPUs. A run sets these itself, and says them in its first lines; what is exported here stays. More queues of the
# device than streams: a receive never holds up another stream. Kernels loaded at the start: loading one never waits.
# export CUDA_DEVICE_MAX_CONNECTIONS=32
# export CUDA_MODULE_LOADING=EAGER
# export TORCH_FR_BUFFER_SIZE=2000

# Containers, one of two. A command that stands before Python in every task (Apptainer, Singularity):
# container=(apptainer exec --nv --bind "$PWD" /shared/images/megazero.sif)
# Or options of srun, where the cluster has the plugin pyxis:
# options+=(--container-image=/shared/images/megazero.sqsh "--container-mounts=$PWD:$PWD" "--container-workdir=$PWD")

# Binding, instead of options=(--cpu-bind=cores --gpu-bind=none): say, where GPU 0 is not nearest to the first cores.
# options=(--cpu-bind=map_ldom:1,1,0,0,3,3,2,2 --gpu-bind=none)

# How many times a job is put back into the queue after a rank died or hung, without a new checkpoint in between.
# export MEGAZERO_REQUEUES=3
