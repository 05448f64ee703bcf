#!/usr/bin/env bash
# The quickstart on two nodes, one rank on each: makes the model and warms it up once, then trains.
# Usage, in the repository after tools/setup.sh: sbatch slurm/quickstart.sh [key=value ...]
#SBATCH --job-name=areal-quickstart
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --signal=USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

. "$SLURM_SUBMIT_DIR/slurm/job.sh"

config=configs/quickstart_arithmetic.yaml
seed=1
for override in "$@"; do
  case $override in seed=*) seed=${override#seed=} ;; esac
done
model=$runs/quickstart_arithmetic/model$seed   # its warm-up is made once, for all trials of a seed

if [ ! -f "$model/warm/config.json" ]; then
  python tools/make_tiny_model.py "$model/new" --seed "$seed" || exit 1
  srun_sizes=(--nodes=1 --ntasks=1)   # the warm-up is one rank's work
  run_ranks sft --config "$config" "cluster.fileroot=$runs" "$@" "actor.path=$model/new" "sft.output=$model/warm" \
    "trial_name=warmup$seed" || end_job
  srun_sizes=()
fi
run_ranks train --config "$config" "cluster.fileroot=$runs" "actor.path=$model/warm" "$@"
end_job
