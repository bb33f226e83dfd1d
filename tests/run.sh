#!/usr/bin/env bash
# The whole test suite on CPU. Arguments go to pytest:  bash tests/run.sh -k schedule
set -euo pipefail
checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$checkout/examples/llama/setup.sh" requirements-test.txt

cd "$checkout"
# All of them two at a time, file by file: half of what a job of a test takes is waiting.
[ $# -gt 0 ] || set -- -n 2 --dist loadfile --no-loadscope-reorder
echo "== pytest $*"
exec python -m pytest "$@"
