#!/bin/bash
# What one task of a step runs: `task.sh trainer` on each host of the trainer, `task.sh replica` for each replica, or for each
# node of one that lies over hosts. job.sbatch and replicas.sbatch start it. All options are the services' own variables.
set -euo pipefail

# Slurm copies the TMPDIR of the submitting shell to all nodes, where that folder need not exist, or has too little room.
export TMPDIR
TMPDIR=$(mktemp -d "${MILLRACE_SCRATCH:-/tmp}/millrace-XXXXXX")
export MILLRACE_HOST=${MILLRACE_HOST:-$SLURMD_NODENAME}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_STEP_NODELIST")
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-}"

case $1 in
  trainer)
    : "${MILLRACE_RANKS:=$((${#gpus[@]} > 0 ? ${#gpus[@]} : 1))}"
    export MILLRACE_RANKS TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
    if ((${#hosts[@]} == 1)); then
      command=(python -m services.trainer.launch)
    else
      # Jobs that share a host have ports of their own.
      command=(python -m torch.distributed.run --nnodes "${#hosts[@]}" --node-rank "$SLURM_NODEID" --nproc-per-node "$MILLRACE_RANKS"
        --master-addr "${hosts[0]}" --master-port "${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}" --max-restarts 100
        -m services.trainer)
    fi
    ;;
  replica)
    # The GPUs of a host are shared out among its tasks here: Slurm's --gpus-per-task hides those of the others, and GPUs that
    # do not see each other exchange weights through host memory.
    tasks=$((SLURM_NTASKS / SLURM_NNODES))
    if ((${#gpus[@]} >= tasks)); then
      each=$((${#gpus[@]} / tasks))
      CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${gpus[*]:SLURM_LOCALID * each:each}")
      export CUDA_VISIBLE_DEVICES
    fi
    # A replica over hosts: so many tasks one after another are its nodes.
    if ((${MILLRACE_NODES:-1} > 1)); then
      first=$((SLURM_PROCID / MILLRACE_NODES * MILLRACE_NODES))
      export MILLRACE_NODE_RANK=$((SLURM_PROCID - first)) MILLRACE_LEADER=${MILLRACE_LEADER:-${hosts[first / tasks]}}
    fi
    command=(python -m services.rollout.launch)
    ;;
  *)
    echo "task.sh: $1: is none of trainer, replica" >&2
    exit 2
    ;;
esac

# SIGUSR1 is the drain. With some of its plugins Slurm signals every process of a step, but a drain is one SIGTERM to the service
# alone: a second one does not wait, and ranks and engines are told by the service. So all but this shell ignore SIGUSR1.
(trap '' USR1; exec setsid "${command[@]}") &
service=$!
trap 'rm -rf "$TMPDIR"' EXIT
asked=
trap 'asked=1; kill -TERM "$service" 2>/dev/null || true' USR1
status=0
while kill -0 "$service" 2>/dev/null; do
  wait "$service" && status=0 || status=$?
done
# torchrun ends with 1 when it is told to end, and with it Slurm would kill the trainer's other hosts in their drain.
[[ -n $asked ]] || exit "$status"
