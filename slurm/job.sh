# shellcheck shell=bash
# What the batch scripts share; sourced by them, in the folder that `sbatch` was called in: the repository's.
#
#   run_ranks ARGS...    srun areal-hpc ARGS..., waited for whatever signals arrive
#   end_job              ends the batch script with the job's outcome; after 75 has it started again, unless somebody
#                        asked for the stop: `areal-hpc stop` or a plain `scancel` (signals ask for a stop and a new start)
#
# Outcomes are 0 (done), 75 (stopped in good order), 78 (bad configuration), else a crash. srun's own exit code tells 0
# from the rest only, so the code comes from log/exit.<jobid>.<restart>.json of the run where the job wrote one.
# Site's own lines (module load ...; export SRUN_MPI=cray_shasta) go into slurm/site.sh. Environment:
# SRUN_MPI  how srun and the MPI library meet, see `srun --mpi=list`      default pmix
# RUNS      folder of the runs                                           default runs

cd "${SLURM_SUBMIT_DIR:?submit with sbatch, in the folder of the repository}" || exit 1
# shellcheck source=/dev/null
[ ! -f slurm/site.sh ] || . slurm/site.sh
set -uo pipefail   # after the site's lines: modules use unset variables
export PATH="$PWD/.venv/bin:$PATH" HF_HUB_OFFLINE=1
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}" SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
runs=${RUNS:-runs}
restart=${SLURM_RESTART_COUNT:-0}
code=0
run=   # the folder of the last run, where it wrote an exit file

# Seconds since the epoch at which the walltime ends; the job begins no step that would not fit.
end=$(squeue --noheader --job "$SLURM_JOB_ID" --format %e)
if end=$(date --date "$end" +%s 2>/dev/null); then export AREAL_HPC_END_TIME=$end; fi

srun_sizes=()   # srun's flags where a step has not one rank for each task of the job
srun_pid=
interrupted=
pass_on() { interrupted=1; [ -z "$srun_pid" ] || kill -s "$1" "$srun_pid" 2>/dev/null || true; }
trap 'pass_on USR1' USR1   # `scancel --batch --signal=USR1`; srun hands it to the ranks
trap 'interrupted=1' TERM  # Slurm sends it to the ranks itself

exit_files() {  # with their times: a second run in one folder writes the same name
  compgen -G "$runs/*/*/log/exit.$SLURM_JOB_ID.$restart.json" | xargs -r -d '\n' stat --format '%.Y %n' | sort
}

run_ranks() {
  local before file
  before=$(exit_files)
  srun "${srun_sizes[@]}" --mpi="${SRUN_MPI:-pmix}" --kill-on-bad-exit=1 areal-hpc "$@" &
  srun_pid=$!
  while :; do  # a signal ends `wait`, not srun: the ranks are still closing their files
    interrupted=
    wait "$srun_pid"
    code=$?
    [ -n "$interrupted" ] || break
  done
  srun_pid=
  file=$(comm -13 <(echo "$before") <(exit_files) | tail -n 1 | cut -d' ' -f2-)
  run=${file%/log/*}
  [ -z "$file" ] || code=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["code"])' "$file")
  return "$code"
}

end_job() {
  echo "job $SLURM_JOB_ID, restart $restart: exit code $code"
  if [ "$code" = 75 ]; then
    if [ -n "$run" ] && [ -e "$run/stop" ]; then
      echo "not requeued: areal-hpc stop asked for it"
    elif [ "$(squeue --noheader --job "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
      scontrol requeue "$SLURM_JOB_ID"
    else
      echo "not requeued: the job was cancelled, or its walltime is over"
    fi
  fi
  exit "$code"
}
