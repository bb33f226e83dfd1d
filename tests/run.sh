#!/usr/bin/env bash
# The whole test suite on CPU. Arguments go to pytest:  bash tests/run.sh -k schedule
set -euo pipefail
checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$checkout/examples/llama/setup.sh" requirements-test.txt

cd "$checkout"
echo "== pytest $*"
exec python -m pytest "$@"
