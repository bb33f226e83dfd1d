#!/usr/bin/env bash
# The test suite on CPU. Arguments go to pytest:  bash tests/run.sh -k schedule
set -euo pipefail
checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$checkout/examples/llama/setup.sh" requirements-test.txt

cd "$checkout"
# Transformer Engine's Python modules, in a folder of their own: only tests that bring kernels for them look there.
_te="$(<tests/te/requirements.txt)"
_folder="$(python -c 'import sys; print(sys.prefix)')/$_te"
if [[ ! -d "$_folder" ]]; then
  python -m pip install -qq --disable-pip-version-check --no-deps --target "$_folder.unfinished" "$_te"
  mv "$_folder.unfinished" "$_folder"
fi
if [ $# -eq 0 ]; then
  # Two at a time, file by file: half of what a job of a test takes is waiting. And of the hours of tests that are marked
  # matrix a few minutes, on each day and at each commit others.
  seed="${ODYSSEY_SLICE:-$(date +%F)-$(git rev-parse --short HEAD 2>/dev/null || true)}"
  set -- -n 2 --dist loadfile --no-loadscope-reorder --slice "$seed"
fi
echo "== pytest $*"
exec python -m pytest "$@"
