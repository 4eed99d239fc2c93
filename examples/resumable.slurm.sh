#!/bin/bash
# A Slurm job that stops before its time is over, puts itself into the queue again and resumes, for programs with StopOnSignal such
# as mingpt, which return 75 when they have saved and want to be started again.
#   sbatch resumable.slurm.sh PROGRAM [ARGUMENT ...]
# Slurm sends SIGUSR1 to the tasks of srun 120 s before the end of the time, and when `scancel --signal=USR1 JOB` asks.
#SBATCH --job-name=resumable
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
srun --kill-on-bad-exit=0 "$@"  # the first task that stops must not end the others
code=$?
echo "exit code $code"
if [ $code = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
