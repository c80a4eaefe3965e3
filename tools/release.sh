#!/usr/bin/env bash
# Builds what people without Rust get, and tries it: the wheel in an empty virtual environment without PyTorch, and the static program in an
# empty root folder.
#
# Usage: tools/release.sh [--prebuilt DIR] [FOLDER]
#
# Both go to FOLDER (target/release-files). With --prebuilt there is the wheel alone, with the program and the library that cargo has put in
# DIR, in place of optimised ones. Needs a Python from 3.10 with venv, and setuptools from the package index; for the static program Rust's
# target for musl and musl-gcc too. Exits with 3 where these cannot be had, and with 1 if the wheel is too large or needs a newer glibc than
# it says.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
readonly GLIBC=2.34
megabytes_max=15
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# lacking WORDS
lacking() {
    printf '%s\n' "$1" >&2
    exit 3
}

# wrong WORDS
wrong() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

musl=$(uname -m)-unknown-linux-musl
if [[ ${1-} == --prebuilt ]]; then
    export PACELINE_PREBUILT=$scratch/prebuilt
    mkdir "$PACELINE_PREBUILT"
    cp "$2/paceline" "$2/deps/libpaceline_python.so" "$PACELINE_PREBUILT/"
    strip "$PACELINE_PREBUILT"/*
    # Code that is not optimised takes 1.8 times the room. So what makes the wheel too large is found by whoever adds it.
    megabytes_max=27
    musl=
    shift 2
else
    [[ -d $(rustc --print sysroot)/lib/rustlib/$musl ]] || lacking "rustc has no target for musl: rustup target add $musl"
    command -v musl-gcc >/dev/null || lacking 'there is no C compiler for musl: apt-get install musl-tools'
fi
folder=$(realpath -m "${1-target/release-files}")
built=$(realpath -m "${CARGO_TARGET_DIR-target}")
mkdir -p "$folder"

python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || lacking 'there is no python3 from 3.10'
python3 -m venv "$scratch/venv" >/dev/null 2>&1 || lacking 'there is no python3 with venv'
python=$scratch/venv/bin/python
pip=("$python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install 'setuptools>=77' 2>/dev/null || lacking 'pip cannot install setuptools'
# With this name pip refuses the wheel where glibc is older.
"${pip[@]}" wheel --no-deps --no-build-isolation --wheel-dir "$scratch/wheel" \
    --config-settings=--build-option="--plat-name=manylinux_${GLIBC/./_}_$(uname -m)" .
wheel=$folder/$(basename "$scratch"/wheel/paceline-*.whl)
"$python" - "$scratch"/wheel/paceline-*.whl "$wheel" <<'PYTHON'
import sys
from zipfile import ZIP_DEFLATED, ZipFile

with ZipFile(sys.argv[1]) as quick, ZipFile(sys.argv[2], "w") as small:
    for member in quick.infolist():
        small.writestr(member, quick.read(member), ZIP_DEFLATED, compresslevel=9)
PYTHON
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
program=$scratch/venv/bin/paceline
said=$("$program" --version)
also=$("$python" -m paceline --version)
[[ $said == "paceline "* && $said == "$also" ]] || wrong "the program says '$said', and through Python '$also'"
"$program" run --nproc-per-node 2 "$python" -c 'import os, paceline; print("rank", os.environ["RANK"], paceline.__version__)'

bytes=$(stat -c %s "$wheel")
glibc=$(grep -aoh 'GLIBC_2\.[0-9]*' "$scratch"/venv/lib/python*/site-packages/paceline/*.so "$program" | sort -uV | tail -n 1)
printf '%s: %d.%02d MB, needs %s\n' "$(realpath --relative-to="$root" "$wheel")" $((bytes / 1000000)) $((bytes % 1000000 / 10000)) "$glibc"
((bytes <= megabytes_max * 1000000)) || wrong "a wheel has $megabytes_max MB at most"
[[ $(printf 'GLIBC_%s\n' "${glibc#GLIBC_}" "$GLIBC" | sort -V | tail -n 1) == "GLIBC_$GLIBC" ]] ||
    wrong "its name says glibc $GLIBC; build it on an older system"
[[ -n $musl ]] || exit 0

(cd "$root" && cargo build --release --locked --package paceline --target "$musl")
static=$folder/paceline-$musl
cp "$built/$musl/release/paceline" "$static"

# As in a container that has nothing but the program: no other file, and what the kernel gives.
mkdir -p empty/{dev,proc,tmp}
touch empty/dev/null
cp "$static" empty/paceline
# alone ARGUMENT...
alone() {
    # shellcheck disable=SC2016 # the inner shell expands it
    unshare --map-root-user --mount --pid --fork --kill-child sh -c '
        mount -t proc proc empty/proc && mount --bind /dev/null empty/dev/null && exec chroot empty /paceline "$@"' sh "$@"
}
also=$(alone --version)
[[ $said == "$also" ]] || wrong "the static program says '$also', and the other one '$said'"
weights=$("$program" train --epochs 2 --run-dir run | tail -n 1)
also=$(alone train --epochs 2 --run-dir /tmp/run | tail -n 1)
[[ $weights == "weights sha256: "* && $weights == "$also" ]] || wrong "the static program ends with '$also', and the other one with '$weights'"
also=$(PACELINE_NVML_LIBRARY=libnvidia-ml.so.1 alone gpu topo 2>&1 || true)
[[ $also == *"linked statically"* ]] || wrong "the static program does not say that it cannot load a driver's library: $also"
bytes=$(stat -c %s "$static")
printf '%s: %d MB, needs no library; %s\n' "$(realpath --relative-to="$root" "$static")" $((bytes / 1000000)) "$weights"
