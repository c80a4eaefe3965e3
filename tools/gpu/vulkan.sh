#!/usr/bin/env bash
# Trains on any Vulkan device, software included: one job on 1 and on 2 ranks, with the same shards, and compares
# the SHA-256 of the weights. It reports the device, because a software device is accepted and is not a GPU. It also hides the drivers,
# and checks that the result is an error with a hint and not a panic.
#
# Usage: tools/gpu/vulkan.sh [--epochs N] [--model tiny|small|base] [PROGRAM]
#
# PROGRAM is a `paceline` with the feature `vulkan`; by default the script builds one in release mode. Vulkan's own variables choose
# among several adapters: VK_DRIVER_FILES=/usr/share/vulkan/icd.d/lvp_icd.x86_64.json leaves only Mesa's software.
# A Markdown table goes to stdout, progress to stderr. Everything else is in a temporary folder, which is removed.
#
# Exit codes: 0 equal hashes, 1 hashes differ or a job failed, 2 wrong usage, 3 skipped: there is no Vulkan device here.

set -euo pipefail

readonly SHARDS=2
# Time limit of one job. A software device compiles each kernel once per rank, and is slow.
readonly JOB_SECONDS_MAX=1200

usage() {
    printf 'vulkan: %s\nusage: tools/gpu/vulkan.sh [--epochs N] [--model tiny|small|base] [PROGRAM]\n' "$*" >&2
    exit 2
}

epochs=1
model=tiny
program=
while (($# > 0)); do
    case $1 in
    --epochs)
        [[ ${2-} =~ ^[1-9][0-9]{0,3}$ ]] || usage "--epochs takes a number from 1 to 9999"
        epochs=$2
        shift 2
        ;;
    --model)
        [[ ${2-} =~ ^(tiny|small|base)$ ]] || usage "--model takes tiny, small or base"
        model=$2
        shift 2
        ;;
    -*) usage "unknown option $1" ;;
    *)
        [[ -z $program ]] || usage "one PROGRAM only"
        program=$1
        shift
        ;;
    esac
done

if [[ -z $program ]]; then
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
    printf 'building\n' >&2
    cargo build --release --manifest-path "$root/Cargo.toml" --package paceline --features vulkan >&2
    program=${CARGO_TARGET_DIR:-$root/target}/release/paceline
fi
[[ -x $program ]] || usage "there is no program $program"

dir=$(mktemp -d)
trap 'rm -rf -- "$dir"' EXIT

# The jobs must not inherit settings from this shell.
while IFS= read -r name; do
    unset "$name"
done < <(compgen -v PACELINE_ || true)

# train RANKS: the job's output goes to $dir/RANKS.out and $dir/RANKS.err
train() {
    timeout --kill-after=10s "$JOB_SECONDS_MAX" "$program" train --device vulkan --nproc-per-node "$1" --shards "$SHARDS" \
        --model "$model" --epochs "$epochs" --timeout-seconds 600 --run-dir "$dir/run-$1" --usage off \
        >"$dir/$1.out" 2>"$dir/$1.err" </dev/null
}

# field PATTERN FILE: the first match of the pattern's group
field() {
    sed -n "s/$1/\\1/p" "$2" | head -n 1
}

code=0
VK_DRIVER_FILES=/nonexistent VK_ICD_FILENAMES=/nonexistent train 1 || code=$?
if grep -q "built without vulkan" "$dir/1.err"; then
    usage "$program was built without the feature vulkan"
fi
if ((code != 3)) || ! grep -q '^error: vulkan finds no device: ' "$dir/1.err" || ! grep -q '^hint: ' "$dir/1.err"; then
    printf 'vulkan: without drivers the job ended with exit code %d and this output:\n' "$code" >&2
    sed 's/^/    /' "$dir/1.err" >&2
    exit 1
fi
printf 'without drivers: %s\n' "$(grep -m 1 '^error: ' "$dir/1.err")" >&2

hashes=()
rows=()
for ranks in 1 2; do
    printf 'training on %d rank(s)\n' "$ranks" >&2
    begun=$SECONDS code=0
    train "$ranks" || code=$?
    sed 's/^/    /' "$dir/$ranks.err" >&2
    if ((code == 3)); then
        printf 'skipped: there is no Vulkan device here\n' >&2
        exit 3
    elif ((code != 0)); then
        printf 'vulkan: the job on %d rank(s) failed with exit code %d\n' "$ranks" "$code" >&2
        sed 's/^/    /' "$dir/$ranks.out" >&2
        exit 1
    fi
    hash=$(field '^weights sha256: \([0-9a-f]\{64\}\)$' "$dir/$ranks.out")
    adapter=$(field '^ranks *[0-9]* on vulkan (\(.*\)), [0-9]* compute thread.*$' "$dir/$ranks.out")
    accuracy=$(field '^.* accuracy *\([0-9.]* %\).*$' <(tac "$dir/$ranks.out"))
    if [[ -z $hash || -z $adapter ]]; then
        printf 'vulkan: the output of the job on %d rank(s) lacks the device or the hash\n' "$ranks" >&2
        exit 1
    fi
    hashes+=("$hash")
    rows+=("$(printf '| %d | %s | %d s | %s | `%s` |' "$ranks" "$adapter" $((SECONDS - begun)) "$accuracy" "${hash:0:16}")")
done

printf '| ranks | adapter | time | accuracy | weights |\n|---|---|---|---|---|\n'
printf '%s\n' "${rows[@]}"
if grep -q 'has no GPU here' "$dir/1.err"; then
    printf '\nNo GPU was used: this adapter is software that computes on the CPU.\n'
fi
if [[ ${hashes[0]} != "${hashes[1]}" ]]; then
    printf 'vulkan: the hashes differ: %s\n' "${hashes[*]}" >&2
    exit 1
fi
