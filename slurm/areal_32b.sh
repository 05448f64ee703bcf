#!/usr/bin/env bash
# The 32B run of configs/areal_32b.yaml: 128 ranks, one GPU each.
# Usage, in the repository: sbatch slurm/areal_32b.sh [key=value ...]
#SBATCH --job-name=areal-32b
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

. "$SLURM_SUBMIT_DIR/slurm/job.sh"

run_ranks train --config configs/areal_32b.yaml "cluster.fileroot=$runs" "$@"
end_job
