# Requeues a job in which a rank has died or does not answer; sourced by train.sbatch.
#
# The job goes back into the queue without the node of that rank, at most MEGAZERO_REQUEUES times (default 3) without a
# new checkpoint in between. Each time adds a line to RUN_DIR/logs/slurm-failures: newest step, job, node, error.
# shellcheck shell=bash

# Puts the job back into the queue, or returns 1 if it may not be requeued.
#   $1 run folder   $2 file with the ranks' standard error   $3 how many bytes of it are from earlier starts
requeue_after_failure() {
    local folder=$1 error node step count most=${MEGAZERO_REQUEUES:-3} counts=$1/logs/slurm-failures
    # A rank was killed, does not answer, or lost its connection. Other failures would recur on any node.
    [ -f "$2" ] || return 1
    error=$(tail -c "+$(($3 + 1))" "$2" | grep -aoE 'MZ-31(0|1|4) rank=.*' | tail -n 1)
    [ -n "$error" ] || return 1
    mkdir -p "$folder/logs" || return 1 # the run may have failed before it made the folder
    step=$(find "$folder/checkpoints" -maxdepth 1 -name 'step_*' -printf '%f\n' 2> /dev/null | sort | tail -n 1)
    step=${step:-start}
    count=$(grep -c "^$step job $SLURM_JOB_ID " "$counts" 2> /dev/null)
    if [ "${count:-0}" -ge "$most" ]; then
        echo "job $SLURM_JOB_ID has failed $((count + 1)) times after the same checkpoint and is not started again ($counts)"
        return 1
    fi
    node=$(bad_node "$error")
    echo "$step job $SLURM_JOB_ID restart ${SLURM_RESTART_COUNT:-0} node ${node:-unknown} $error" >> "$counts" || return 1
    trap '' TERM # requeueing sends SIGTERM to this shell, which still has to exclude the node
    echo "job $SLURM_JOB_ID is started again (failure $((count + 1)) of at most $most)${node:+, without $node}"
    scontrol requeue "$SLURM_JOB_ID" || return 1
    [ -z "$node" ] || exclude "$node" # SLURM changes this only for a waiting job
}

# Prints SLURM's name of the node of an error's rank, if enough other nodes are usable.
bad_node() {
    local said node others
    # The first rank in the line failed; the ranks after the first semicolon waited for it.
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

# Prints the nodes of the partition that are up and not excluded from this job, one per line.
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

# Prints the list of nodes that are excluded from this job.
excluded() {
    scontrol --oneliner show job "$SLURM_JOB_ID" | sed -nE 's/.* ExcNodeList=([^ (]+) .*/\1/p'
}
