#!/usr/bin/env bash
# Packs the programs and scripts that tools/gpu/prove.sh needs into one archive, for a machine with a GPU and without a compiler.
#
# Usage: tools/gpu/pack.sh [--features LIST] [FILE]
#
# LIST is the features of GPU back ends to build with, by default cuda. FILE is the archive, by default
# target/gpu/paceline-gpu.tar.xz. `cuda` needs an LLVM that Burn's build downloads; with PACELINE_LLVM=system the distribution's is used
# instead, see tools/gpu/llvm.sh. The programs need a C library that is not older than this machine's, and neither LLVM nor Rust.
#
# Exit codes: 0 the archive was written, 1 it failed or is too large to carry, 2 wrong usage, else cargo's.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# The archive travels with a checkout, and both together must fit into 64 MiB. The rest is a margin for other files.
readonly TOGETHER_MAX=$((64 * 1024 * 1024 - 2000000))

usage() {
    printf 'pack: %s\nusage: tools/gpu/pack.sh [--features LIST] [FILE]\n' "$*" >&2
    exit 2
}

features=cuda
target=${CARGO_TARGET_DIR:-target}
archive=
while (($# > 0)); do
    case $1 in
    --features)
        [[ ${2-} =~ ^[a-z]+(,[a-z]+)*$ ]] || usage "--features takes names separated by commas"
        features=$2
        shift 2
        ;;
    -*) usage "unknown option $1" ;;
    *)
        [[ -z $archive ]] || usage "one FILE only"
        archive=$1
        shift
        ;;
    esac
done
archive=${archive:-$target/gpu/paceline-gpu.tar.xz}

if [[ ,$features, == *,cuda,* && ${PACELINE_LLVM-} == system ]]; then
    XDG_DATA_HOME=$(tools/gpu/llvm.sh)
    export XDG_DATA_HOME
fi
list=paceline/${features//,/,paceline/}
# One command builds the common dependencies once for both.
cargo build --release --package paceline --features "$list" --bin paceline --example step_time

folder=$(mktemp -d "${TMPDIR:-/tmp}/paceline-pack.XXXXXX")
trap 'rm -rf "$folder"' EXIT
pack=$folder/paceline-gpu
mkdir "$pack"
strip -o "$pack/paceline" "$target/release/paceline"
strip -o "$pack/step_time" "$target/release/examples/step_time"
cp tools/gpu/prove.sh tools/gpu/peer_step.py "$pack"
{
    printf 'commit %s\nfeatures %s\n' "$(git describe --always --dirty --abbrev=12)" "$features"
    rustc --version
    (cd "$pack" && stat -c '%n %s bytes' paceline step_time)
} >"$pack/BUILD"

mkdir -p "$(dirname "$archive")"
# Both programs contain the same LLVM. A dictionary as large as one of them stores it once.
tar --sort=name --owner=0 --group=0 --numeric-owner -C "$folder" -c paceline-gpu |
    xz --threads=2 --x86 --lzma2=preset=9,dict=256MiB >"$archive.part"
mv "$archive.part" "$archive"
bytes=$(stat -c %s "$archive")
cat "$pack/BUILD" >&2
printf 'pack: %s, %d bytes\n' "$archive" "$bytes" >&2
# Deleted files that git still lists do not count.
checkout=$(git ls-files -z --cached --others --exclude-standard | { xargs -0 stat -c %s 2>/dev/null || true; } |
    awk '{ sum += $1 } END { printf "%d", sum }')
if ((bytes + checkout > TOGETHER_MAX)); then
    printf 'pack: together with the %d bytes of the checkout this exceeds %d bytes: build with fewer features\n' "$checkout" "$TOGETHER_MAX" >&2
    exit 1
fi
printf '%s\n' "$archive"
