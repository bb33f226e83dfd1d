# Sourced, not run:  source examples/llama/setup.sh requirements-test.txt
#
# Leaves an active virtual environment with the pinned packages and this checkout in it. Uses the one that
# is active, else makes .venv in the checkout. When everything is in place it only looks (0.2 s).

_checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
_pins="$_checkout/examples/llama/${1:?name of a requirements file beside setup.sh}"

if [[ -z "${VIRTUAL_ENV:-}" && -z "${CONDA_PREFIX:-}" ]]; then
  if [[ ! -x "$_checkout/.venv/bin/python" ]]; then
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
      echo "odyssey needs Python 3.11 or newer; python3 is $(python3 -V 2>&1)." >&2
      exit 2
    }
    echo "== making a virtual environment in .venv"
    python3 -m venv "$_checkout/.venv"
  fi
  source "$_checkout/.venv/bin/activate"
fi

# Exit 0: every pin is met and the package that would be imported is this checkout's.
_in_place() {
  (cd / && python - "$_pins" "$_checkout") <<'PYTHON'
import importlib.util
import pathlib
import sys
from importlib.metadata import PackageNotFoundError, version


def pins(path):
    for line in path.read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            yield from pins(path.parent / line[3:].strip())
        elif line:
            yield line.split("==")


try:
    for name, wanted in pins(pathlib.Path(sys.argv[1])):
        if version(name).partition("+")[0] != wanted:  # 2.13.0+cpu is 2.13.0
            sys.exit(f"{name} {version(name)} is installed, {wanted} is wanted")
    version("odyssey-megatron")
except PackageNotFoundError as missing:
    sys.exit(str(missing.args[0]) + " is missing")
found = importlib.util.find_spec("odyssey_megatron")
if found is None or pathlib.Path(sys.argv[2]) not in pathlib.Path(found.origin).parents:
    sys.exit("odyssey-megatron is not this checkout's")
PYTHON
}

if ! _why="$(_in_place 2>&1)"; then
  echo "== installing ${_pins##*/} into ${VIRTUAL_ENV:-$CONDA_PREFIX} ($_why)"
  python -m pip install -qq --disable-pip-version-check -r "$_pins"
  # The pins are met, so nothing may be resolved again; setuptools is among them, so no network either.
  python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e "$_checkout"
fi
unset _checkout _pins _why
unset -f _in_place
