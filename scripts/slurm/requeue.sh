# What becomes of a job whose rank has died or does not answer; sourced by train.sbatch.
#
# It goes back into the queue without the node of that rank, at most MEGAZERO_REQUEUES times (3) without a new checkpoint
# in between. Each time is a line in RUN_DIR/logs/slurm-failures: the newest step, the job, the node, the error.
# shellcheck shell=bash

# Puts the job back into the queue; fails, and says why, where it is not to be.
#   $1 run folder   $2 what the ranks wrote to standard error   $3 how much of that is of earlier starts, in bytes
requeue_after_failure() {
    local folder=$1 error node step count most=${MEGAZERO_REQUEUES:-3} counts=$1/logs/slurm-failures
    # A rank that was ended, that does not answer, or that lost its connection. Other failures come again on any node.
    [ -f "$2" ] || return 1
    error=$(tail -c "+$(($3 + 1))" "$2" | grep -aoE 'MZ-31(0|1|4) rank=.*' | tail -n 1)
    [ -n "$error" ] || return 1
    mkdir -p "$folder/logs" || return 1 # it may have died before there was one
    step=$(find "$folder/checkpoints" -maxdepth 1 -name 'step_*' -printf '%f\n' 2> /dev/null | sort | tail -n 1)
    step=${step:-start}
    count=$(grep -c "^$step job $SLURM_JOB_ID " "$counts" 2> /dev/null)
    if [ "${count:-0}" -ge "$most" ]; then
        echo "job $SLURM_JOB_ID has failed $((count + 1)) times after the same checkpoint and is not started again ($counts)"
        return 1
    fi
    node=$(bad_node "$error")
    echo "$step job $SLURM_JOB_ID restart ${SLURM_RESTART_COUNT:-0} node ${node:-unknown} $error" >> "$counts" || return 1
    trap '' TERM # requeueing ends this shell, and what follows has to be done yet
    echo "job $SLURM_JOB_ID is started again (failure $((count + 1)) of at most $most)${node:+, without $node}"
    scontrol requeue "$SLURM_JOB_ID" || return 1
    [ -z "$node" ] || exclude "$node" # SLURM changes this of a waiting job only
}

# The node that an error's rank is on, as SLURM calls it, if there are enough others.
bad_node() {
    local said node others
    # The first rank in the line is the one to blame; after the first semicolon are those who waited for it.
    said=$(sed -nE 's/;.*//; s/^MZ-31[01] .* on ([A-Za-z0-9._-]+) \(pid [0-9]+\).*/\1/p' <<< "$1")
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        [ "${said%%.*}" = "$node" ] || [ "$said" = "$node" ] || continue
        others=$(usable_nodes | grep -cvx "$node")
        if [ "$others" -ge "$SLURM_JOB_NUM_NODES" ]; then
            echo "$node"
        else
            echo "$node is not excluded: partition $SLURM_JOB_PARTITION has $others other nodes that work" >&2
        fi
        return
    done
}

# Nodes of the partition that are up and that this job has not been kept from, one a line.
usable_nodes() {
    local kept_from
    kept_from=$(scontrol show hostnames "$(excluded)" 2> /dev/null)
    sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" \
        --states=idle,allocated,mixed,completing,reserved --format=%N | sort -u |
        grep -vxF "${kept_from:-/}"
}

exclude() {
    local before
    before=$(excluded)
    scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${before:+$before,}$1"
}

# The list of nodes that this job is kept from.
excluded() {
    scontrol --oneliner show job "$SLURM_JOB_ID" | sed -nE 's/.* ExcNodeList=([^ (]+) .*/\1/p'
}
