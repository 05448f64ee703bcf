#!/usr/bin/env bash
# Sets up (tools/setup.sh), then runs the test suite. Usage: tools/test.sh [--full]     --full: the long matrices too
# Every stage runs, whatever failed before it; the last line counts all tests.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

full=()
case "${1:-}" in
  "") ;;
  --full) full=(-m "full or not full") ;;
  *) echo "usage: tools/test.sh [--full]" >&2; exit 2 ;;
esac

tools/setup.sh --tests || exit 1
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
unset PYTHONPATH
logs=build/test-logs
mkdir -p "$logs"
passed=0 failed=0 skipped=0 summary=()

count() {  # stage, word: how many tests of a kind pytest's last line counts
  grep -aoE "[0-9]+ $2" <(grep -aE '(passed|failed|skipped|error).* in [0-9.]+s' "$logs/$1.log" | tail -n 1) |
    grep -oE '^[0-9]+' || echo 0
}

stage() {  # name, command...
  local name=$1 started=$SECONDS code p f s
  shift
  echo "=== $name: $*"
  "$@" 2>&1 | tee "$logs/$name.log"
  code=$?
  p=$(count "$name" passed) f=$(($(count "$name" failed) + $(count "$name" error))) s=$(count "$name" skipped)
  # a check that is no pytest counts as one test, and so does a launch that died without a word
  if [ $((p + f + s)) = 0 ] || { [ $code != 0 ] && [ "$f" = 0 ]; }; then
    if [ $code = 0 ]; then p=1; else f=$((f + 1)); fi
  fi
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
  summary+=("$(printf '%-10s %4d passed %4d failed %4d skipped %6d s' "$name" "$p" "$f" "$s" $((SECONDS - started)))")
}

on_ranks() { python tests/launch.py --timeout 1500 "$@"; }  # [--tcp] N command...

stage ruff ruff check .
stage shell shellcheck tools/*.sh slurm/*.sh tests/slurm/*.sh .ci/run
stage pure pytest tests --ignore tests/rollout --ignore tests/mpi --ignore tests/e2e --ignore tests/slurm "${full[@]}"
stage rollout pytest tests/rollout "${full[@]}"   # a process of its own: vLLM changes the environment of its children
stage mpi-shm on_ranks 4 pytest tests/mpi "${full[@]}"
stage mpi-tcp on_ranks --tcp 4 pytest tests/mpi "${full[@]}"
[ ${#full[@]} = 0 ] || stage mpi-8 on_ranks 8 pytest tests/mpi/test_trainer_parity.py   # the layout of 8 ranks
stage e2e pytest tests/e2e "${full[@]}"
stage slurm pytest tests/slurm "${full[@]}"

printf '%s\n' "" "${summary[@]}"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
