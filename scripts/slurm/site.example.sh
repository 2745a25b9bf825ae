# Settings of your cluster for all scripts in this folder. Copy this file to scripts/slurm/site.sh, which git ignores,
# and keep the lines that you need. The batch shell on the job's first node sources it before any rank starts; variables
# that it exports reach all ranks.

# Modules. `module` is a function of the login shell; the batch shell may have to source its definition.
# source /etc/profile.d/modules.sh
# module purge
# module load cuda/12.8 gcc/13

# The Python to start, if it is not .venv/bin/python.
# python=$HOME/envs/megazero/bin/python

# The cache of compiled kernels. With a folder that all nodes see, one node compiles for all.
# export XDG_CACHE_HOME=/shared/$USER/cache

# The GPUs, as a value of `megazero plan --hardware`: a name, or a file of `megazero doctor --write` with a disk rate.
# With it, a job whose save takes long gets the signal to save earlier than 120 s before its end.
# hardware=h100-80gb

# Network. Interface names are those on the nodes (`ip -brief address`); docs/operations.md lists the open ports.
# export GLOO_SOCKET_IFNAME=ib0
# export NCCL_SOCKET_IFNAME=ib0
# export NCCL_IB_HCA=mlx5
# export NCCL_DEBUG=WARN

# GPUs. A run sets these itself, unless exported here, and logs them in its first lines. More device queues than
# streams, so that a receive never blocks another stream. Kernels loaded at the start, so that no step waits for one.
# export CUDA_DEVICE_MAX_CONNECTIONS=32
# export CUDA_MODULE_LOADING=EAGER
# export TORCH_FR_BUFFER_SIZE=2000

# Containers, in one of two ways. A command before Python in every task (Apptainer, Singularity):
# container=(apptainer exec --nv --bind "$PWD" /shared/images/megazero.sif)
# Or options of srun, if the cluster has the plugin pyxis:
# options+=(--container-image=/shared/images/megazero.sqsh "--container-mounts=$PWD:$PWD" "--container-workdir=$PWD")

# Binding, instead of options=(--cpu-bind=cores --gpu-bind=none): for example if GPU 0 is not near the first cores.
# options=(--cpu-bind=map_ldom:1,1,0,0,3,3,2,2 --gpu-bind=none)

# How many times a job is requeued after a rank died or hung, without a new checkpoint in between.
# export MEGAZERO_REQUEUES=3
