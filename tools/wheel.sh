#!/usr/bin/env bash
# Builds the wheel and tries it in an empty virtual environment, without PyTorch.
#
# Usage: tools/wheel.sh [--prebuilt DIR] [FOLDER]
#
# The wheel goes to FOLDER (target/wheel). With --prebuilt it has the program and the library that cargo has put in DIR, in place of
# optimised ones. Needs a Python from 3.10 with venv, and setuptools from the package index; exits with 3 where they cannot be had.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if [[ ${1-} == --prebuilt ]]; then
    export PACELINE_PREBUILT=$scratch/prebuilt
    mkdir "$PACELINE_PREBUILT"
    cp "$2/paceline" "$2/deps/libpaceline_python.so" "$PACELINE_PREBUILT/"
    strip --strip-debug "$PACELINE_PREBUILT"/* 2>/dev/null || true # only size
    shift 2
fi
folder=$(realpath -m "${1-target/wheel}")

# lacking WORDS
lacking() {
    printf '%s\n' "$1" >&2
    exit 3
}

python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || lacking 'there is no python3 from 3.10'
python3 -m venv "$scratch/venv" >/dev/null 2>&1 || lacking 'there is no python3 with venv'
python=$scratch/venv/bin/python
pip=("$python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install 'setuptools>=77' 2>/dev/null || lacking 'pip cannot install setuptools'
"${pip[@]}" wheel --no-deps --no-build-isolation --wheel-dir "$scratch/wheel" .
wheel=$(echo "$scratch"/wheel/paceline-*.whl)
"${pip[@]}" install --no-deps --no-index "$wheel"

# The package must not come from the checkout.
cd "$scratch"
"$python" - <<'PYTHON'
import sys

import paceline

assert "torch" not in sys.modules
assert paceline.__file__.startswith(sys.prefix), paceline.__file__
assert paceline.program().startswith(sys.prefix), paceline.program()
try:
    import paceline.torch
except ModuleNotFoundError as error:
    assert "torch" in str(error), error
else:
    raise AssertionError("there should be no PyTorch here")
PYTHON
said=$("$scratch/venv/bin/paceline" --version)
also=$("$python" -m paceline --version)
[[ $said == "paceline "* && $said == "$also" ]] || {
    echo "error: the program says '$said', and through Python '$also'" >&2
    exit 1
}
"$scratch/venv/bin/paceline" run --nproc-per-node 2 "$python" -c 'import os, paceline; print("rank", os.environ["RANK"], paceline.__version__)'

bytes=$(stat -c %s "$wheel")
glibc=$(grep -aoh 'GLIBC_2\.[0-9]*' "$scratch"/venv/lib/python*/site-packages/paceline/*.so "$scratch/venv/bin/paceline" | sort -uV | tail -n 1)
mkdir -p "$folder"
mv "$wheel" "$folder/"
printf '%s: %d MB, needs %s\n' "$(realpath --relative-to="$root" "$folder")/$(basename "$wheel")" $((bytes / 1000000)) "$glibc"
