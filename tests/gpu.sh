#!/usr/bin/env bash
# On a machine with GPUs: runs what can be run there within ten minutes (or --limit-s), prints the figures as a table for
# the README, and says what it could not run.    bash tests/gpu.sh [--dry-run] [--out FOLDER] [--limit-s SECONDS]
# With --dry-run, which needs no GPU: every line that needs none. Installs nothing: GPU containers bring their own builds.
set -euo pipefail
checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$checkout${PYTHONPATH:+:$PYTHONPATH}" PYTHONWARNINGS="ignore::UserWarning"
cd "$checkout"
exec "${PYTHON:-python3}" tests/gpu.py "$@"
