#!/bin/bash
# The tutorial's Slurm job: the elastic demo on two hosts, with eight processes and eight GPUs on each.
#   sbatch ddp_toy.slurm.sh PROGRAM          PROGRAM: the path of ddp_toy on every host, ./ddp_toy by default
#SBATCH --job-name=ddp_toy
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
set -euo pipefail

# srun starts the ranks itself. lockstep reads srun's variables, hosts the store on the first host of the step, and derives its
# port from the job: neither torchrun nor MASTER_ADDR is needed.
srun "${1:-./ddp_toy}" elastic

# The tutorial's own way, with one torchrun per host, works as well:
#   export MASTER_ADDR=$(scontrol show hostname "${SLURM_NODELIST}" | head -n 1)
#   srun --ntasks=2 --ntasks-per-node=1 torchrun --no-python --nnodes=2 --nproc_per_node=8 --rdzv_id="$SLURM_JOB_ID" \
#        --rdzv_backend=c10d --rdzv_endpoint="$MASTER_ADDR:29400" ./ddp_toy elastic
