#!/bin/bash
# The Slurm job of the PyTorch DDP series (sbatch_run.sh): one torchrun on each of four hosts, which starts the host's ranks and starts
# them again from the last snapshot when one fails.
#   sbatch multigpu_torchrun.slurm.sh PROGRAM TOTAL_EPOCHS SAVE_EVERY [OPTION ...]
# PROGRAM: the path of multigpu_torchrun on every host. RANKS_PER_NODE (1) is the number of ranks of a host; the snapshot must be in a
# folder that all hosts see, since after a restart any of them may have rank 0.
#SBATCH --job-name=multigpu_torchrun
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=4
set -euo pipefail
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # since Slurm 22.05 srun does not take --cpus-per-task from #SBATCH

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --no-python --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${RANKS_PER_NODE:-1}" --max-restarts="${MAX_RESTARTS:-3}" \
  --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head_node:${RDZV_PORT:-29500}" "${@:-./multigpu_torchrun}"
