#!/usr/bin/env bash
# Trains on whatever Vulkan there is, software included: one job on 1 and on 2 ranks, cut into the same shards, and compares
# the SHA-256 of the weights. Says what it ran on, because software counts and is no GPU. Also takes the drivers away, and
# looks whether that is an error with a hint and no panic.
#
# Usage: tools/gpu/vulkan.sh [--epochs N] [--model tiny|small|base] [PROGRAM]
#
# PROGRAM is a `paceline` with the feature `vulkan`; built in release if not given. Where several adapters are to be had,
# Vulkan's own variables choose: VK_DRIVER_FILES=/usr/share/vulkan/icd.d/lvp_icd.x86_64.json leaves Mesa's software only.
# A Markdown table goes to stdout, progress to stderr. Everything else is in a temporary folder that is removed.
#
# Exit codes: 0 one hash, 1 hashes differ or a job failed, 2 wrong usage, 3 skipped: there is no Vulkan device here.

set -euo pipefail

readonly SHARDS=2
# Longest that one job may take: software compiles each kernel once per rank, and computes slowly.
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

# Settings of this shell would be settings of the jobs.
while IFS= read -r name; do
    unset "$name"
done < <(compgen -v PACELINE_ || true)

# train RANKS: the job's output goes to $dir/RANKS.out and $dir/RANKS.err
train() {
    timeout --kill-after=10s "$JOB_SECONDS_MAX" "$program" train --device vulkan --nproc-per-node "$1" --shards "$SHARDS" \
        --model "$model" --epochs "$epochs" --timeout-seconds 600 --run-dir "$dir/run-$1" --usage off \
        >"$dir/$1.out" 2>"$dir/$1.err" </dev/null
}

# field PATTERN FILE: what the pattern's group matches first
field() {
    sed -n "s/$1/\\1/p" "$2" | head -n 1
}

code=0
VK_DRIVER_FILES=/nonexistent VK_ICD_FILENAMES=/nonexistent train 1 || code=$?
if grep -q "built without vulkan" "$dir/1.err"; then
    usage "$program was built without the feature vulkan"
fi
if ((code != 3)) || ! grep -q '^error: vulkan finds no device: ' "$dir/1.err" || ! grep -q '^hint: ' "$dir/1.err"; then
    printf 'vulkan: without drivers the job ended with exit code %d and said\n' "$code" >&2
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
        printf 'vulkan: the job on %d rank(s) did not say what it computed on, or no hash\n' "$ranks" >&2
        exit 1
    fi
    hashes+=("$hash")
    rows+=("$(printf '| %d | %s | %d s | %s | `%s` |' "$ranks" "$adapter" $((SECONDS - begun)) "$accuracy" "${hash:0:16}")")
done

printf '| ranks | adapter | time | accuracy | weights |\n|---|---|---|---|---|\n'
printf '%s\n' "${rows[@]}"
if grep -q 'has no GPU here' "$dir/1.err"; then
    printf '\nNo GPU was used: this adapter is a program that computes on the processor.\n'
fi
if [[ ${hashes[0]} != "${hashes[1]}" ]]; then
    printf 'vulkan: the hashes differ: %s\n' "${hashes[*]}" >&2
    exit 1
fi
