#!/usr/bin/env bash
# Sets up (tools/setup.sh), then runs the main job once: a small model is made, warmed up until it adds about half of all
# sums right, and trained by asynchronous RL on one trainer and one rollout rank.
# Usage: tools/quickstart.sh [key=value ...]     for instance seed=2, or a key of configs/quickstart_arithmetic.yaml
# Ctrl-C or TERM stops the run in good order, with a checkpoint; the same command goes on from it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/setup.sh
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
unset PYTHONPATH

config=configs/quickstart_arithmetic.yaml
seed=1
for override in "$@"; do
  case $override in seed=*) seed=${override#seed=} ;; esac
done
model=models/quickstart/seed$seed

mpi=(mpirun --oversubscribe --bind-to none)   # this machine's Open MPI; ranks may outnumber cores
[ "$(id -u)" != 0 ] || mpi+=(--allow-run-as-root)

# mpirun kills the ranks one second after it was told to end; USR1 it hands on, and the ranks stop in good order. In a
# session of its own it does not hear the terminal's Ctrl-C.
job=
interrupted=
stopped=
pass_on() { stopped=1 interrupted=1; [ -z "$job" ] || kill -s USR1 "$job" 2>/dev/null || true; }
trap pass_on INT TERM USR1 HUP

run_ranks() {  # how many, command...
  local code
  [ -z "$stopped" ] || exit 75   # asked for between two jobs
  setsid "${mpi[@]}" -n "$1" areal-hpc "${@:2}" <&- &
  job=$!
  while :; do
    interrupted=
    code=0
    wait "$job" || code=$?
    [ -n "$interrupted" ] || break
  done
  job=
  return "$code"
}

started=$SECONDS
if [ ! -f "$model/warm/config.json" ]; then
  python tools/make_tiny_model.py "$model/new" --seed "$seed"
  rm -rf "runs/quickstart_arithmetic/warmup$seed" "$model/warm"   # of a warm-up that was interrupted
  # in a trial of its own whatever the overrides: training cannot go on from its checkpoint
  # alone on the machine, so with a thread for each of two cores
  OMP_NUM_THREADS=2 run_ranks 1 \
    sft --config "$config" "$@" actor.path="$model/new" sft.output="$model/warm" \
    cluster.fileroot=runs experiment_name=quickstart_arithmetic trial_name="warmup$seed"
fi
run_ranks 2 train --config "$config" "$@"
python tools/quickstart_summary.py $((SECONDS - started)) "$config" "$@"
