#!/usr/bin/env bash
# Resolves requirements.in into requirements.lock: every package pinned, with the sha256 of the file that pip chose.
# Usage: tools/lock.sh   (needs .venv from tools/setup.sh, or PYTHON=python3.11; installs nothing)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

alone='^[^#]*# alone'
grep -vE "$alone" requirements.in >"$work/with.in"
grep -E "$alone" requirements.in >"$work/alone.in"
resolve() { "$python" -m pip install --quiet --dry-run --ignore-installed --report "$@"; }
resolve "$work/with.json" -r "$work/with.in"
resolve "$work/alone.json" --no-deps --no-binary h5py -r "$work/alone.in"

"$python" - "$work/with.json" "$work/alone.json" >"$work/lock" <<'PY'
import json
import re
import sys

# Their builds on the package index do not load beside the CPU build of torch; triton is a GPU compiler of 1 GB.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton"}
rows = {}
for path in sys.argv[1:]:
    for entry in json.load(open(path))["install"]:
        name = re.sub(r"[-_.]+", "-", entry["metadata"]["name"]).lower()
        if name not in LEFT_OUT:
            digest = entry["download_info"]["archive_info"]["hashes"]["sha256"]
            rows[name] = f"{name}=={entry['metadata']['version']} --hash=sha256:{digest}"
print("# Made by tools/lock.sh from requirements.in for Python 3.11 on x86-64 Linux; installed with --no-deps.")
print(*(rows[name] for name in sorted(rows)), sep="\n")
PY
mv "$work/lock" requirements.lock
echo "requirements.lock: $(grep -c == requirements.lock) packages"
