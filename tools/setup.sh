#!/usr/bin/env bash
# Sets up this checkout: system packages (Debian's, where it may install them), .venv, parallel h5py, the project.
# Usage: tools/setup.sh [--tests]     --tests: also what the tests start (Slurm, strace, shellcheck, ...)
# What is done is not done again: each part leaves a stamp with a hash of what it was made from in .venv/stamps.
# Environment: PYTHON (a Python 3.11), HDF5_DIR (parallel HDF5's prefix), MPICC (MPI's C compiler), pip's own PIP_*.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME
export PIP_DISABLE_PIP_VERSION_CHECK=1
started=$SECONDS

fail() { echo "setup: $*" >&2; exit 1; }

# --- system packages -------------------------------------------------------------------------------------------------
packages=(g++ git cmake ninja-build pkg-config openmpi-bin libopenmpi-dev libhdf5-openmpi-dev libnuma1
  python3-dev python3-venv)
[ "${1:-}" != --tests ] || packages+=(slurm-wlm munge strace shellcheck iproute2 util-linux)

missing_packages() {
  local have
  have=$(dpkg-query -W -f='${Status} ${Package}\n' "${packages[@]}" 2>/dev/null | sed -n 's/^install ok installed //p' || true)
  comm -23 <(printf '%s\n' "${packages[@]}" | sort) <(sort <<<"$have")
}

install_packages() {
  local missing
  mapfile -t missing < <(missing_packages)
  [ ${#missing[@]} -gt 0 ] || return 0
  echo "setup: installing ${missing[*]}"
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"; } \
    >build/apt.log 2>&1 || fail "apt-get could not install ${missing[*]}: $(grep -m1 '^E:' build/apt.log)"
}

# --- what must be there, whoever installed it ------------------------------------------------------------------------
find_python() {  # a Python 3.11: the pinned packages are built for it
  local p
  for p in ${PYTHON:+"$PYTHON"} python3.11 python3 /usr/bin/python3; do
    "$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && { echo "$p"; return; }
  done
}

find_hdf5() {  # the prefix of an HDF5 built for MPI
  local p
  for p in "${HDF5_DIR:-}" "${HDF5_ROOT:-}" "${HDF5_HOME:-}" /usr/lib/*/hdf5/openmpi "$(dirname "$(command -v h5pcc)")/.."; do
    grep -qs '^#define H5_HAVE_PARALLEL 1' "$p"/include/H5pubconf*.h && { echo "$p"; return; }
  done
}

check_tools() {
  local lacking=() python_h='import os, sysconfig; print(os.path.join(sysconfig.get_paths()["include"], "Python.h"))'
  python=$(find_python) || true
  hdf5=$(find_hdf5) || true
  [ -n "$python" ] || lacking+=("Python 3.11 with venv (or set PYTHON)")
  [ -z "$python" ] || [ -f "$("$python" -c "$python_h")" ] || lacking+=("the headers of $python (Python.h)")
  command -v "${MPICC:-mpicc}" >/dev/null || lacking+=("${MPICC:-mpicc} (MPI's C compiler; or set MPICC)")
  [ -n "$hdf5" ] || lacking+=("HDF5 built for MPI (or set HDF5_DIR to its prefix)")
  command -v cmake >/dev/null || lacking+=("cmake")
  command -v c++ >/dev/null || lacking+=("a C++ compiler")
  [ ${#lacking[@]} -eq 0 ] || fail "missing: $(printf '%s; ' "${lacking[@]}")load the site's modules for them," \
    "by name for instance: module load python/3.11 gcc cmake openmpi hdf5-parallel"
}

# --- .venv ----------------------------------------------------------------------------------------------------------
key_of() { cat "$@" | sha256sum | cut -d' ' -f1; }
done_before() { [ "$(cat ".venv/stamps/$1" 2>/dev/null)" = "$2" ]; }  # name, key
stamp() { echo "$2" >".venv/stamps/$1"; }

pip_install() {  # pip's own words go to the log; of a failure the lines that name it are shown
  .venv/bin/python -m pip install --no-deps --no-build-isolation "$@" >>build/pip.log 2>&1 || {
    ! grep -q 'torch==[0-9.]*+cpu' <(grep -E '^ERROR: .*(matching distribution|satisfies)' build/pip.log) ||
      fail "pip cannot see $(grep -o '^torch==[^ ]*' requirements.lock): give it PyTorch's CPU wheel index" \
        "through PIP_EXTRA_INDEX_URL, or a folder with that wheel through PIP_FIND_LINKS"
    fail "pip failed, see build/pip.log: $(grep -m3 -E '^(ERROR|error)' build/pip.log | tr '\n' ' ')"
  }
}

locked() { grep -E "^($1)==" requirements.lock; }  # the lock's lines of some packages, a pattern

build_h5py() {  # beside the large downloads; without the cache, where a build for no MPI may lie under the same name
  HDF5_MPI=ON CC=${MPICC:-mpicc} HDF5_DIR=$hdf5 .venv/bin/python -m pip wheel --no-cache-dir --no-deps \
    --no-build-isolation --no-binary=h5py --require-hashes -r build/h5py.txt -w build/wheels >build/h5py.log 2>&1
}

install_requirements() {
  local first='torch|numpy|mpi4py|cython|pkgconfig|setuptools|packaging|pathspec|scikit-build-core|nanobind' builder
  echo "setup: installing the packages of requirements.lock and building parallel h5py, some minutes"
  rm -rf .venv build/wheels build/pip.log
  "$python" -m venv .venv
  mkdir -p .venv/stamps
  locked "$first" >build/first.txt   # what the builds need, and torch, the one that may be out of sight
  locked 'h5py' >build/h5py.txt
  grep -vE "^(#|($first|h5py)==)" requirements.lock >build/rest.txt
  pip_install --require-hashes -r build/first.txt
  build_h5py & builder=$!
  trap 'kill '"$builder"' 2>/dev/null || true' EXIT
  pip_install --require-hashes -r build/rest.txt
  wait "$builder" || fail "h5py did not build against $hdf5, see build/h5py.log: $(grep -m1 -iE 'error' build/h5py.log)"
  trap - EXIT
  pip_install --no-index build/wheels/h5py-*.whl
  .venv/bin/python -c 'import h5py; assert h5py.get_config().mpi, "h5py was built without MPI"'
}

# --- the parts in order -----------------------------------------------------------------------------------------------
# the folder too: .venv holds absolute paths, so a checkout that was moved or copied is set up again
packages_key=$(key_of requirements.lock <(pwd -P) <(sed -n '/^install_requirements/,/^}/p' tools/setup.sh))
project_key=$(key_of pyproject.toml CMakeLists.txt src/areal_hpc/native/*.[ch]pp)-$packages_key
may_install=
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then may_install=1; fi

all_done() {
  done_before packages "$packages_key" && done_before project "$project_key" &&
    { [ -z "$may_install" ] || [ -z "$(missing_packages)" ]; }
}

if all_done; then   # nothing is written: the checkout may be another user's
  echo "setup: ready"
  exit
fi
mkdir -p build
exec 9>build/setup.lock
flock 9   # two commands started at once: the second waits, then finds all done
[ -z "$may_install" ] || install_packages
if ! done_before packages "$packages_key"; then
  check_tools
  install_requirements
  stamp packages "$packages_key"
fi
if ! done_before project "$project_key"; then
  check_tools
  echo "setup: building the project's native part"
  : >build/pip.log
  pip_install --editable .
  stamp project "$project_key"
fi
echo "setup: ready in $((SECONDS - started)) s"
