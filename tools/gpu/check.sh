#!/usr/bin/env bash
# Type-checks the code of GPU back ends, which the ordinary gates do not: clippy, with warnings as errors, for each feature alone.
#
# Usage: tools/gpu/check.sh [FEATURE]...
#
# FEATURE is cuda or vulkan; both if none is given. Nothing of a GPU has to be there: no driver, no CUDA, no Vulkan. `cuda`
# needs an LLVM that Burn's build downloads; with PACELINE_LLVM=system the distribution's is used instead, see
# tools/gpu/llvm.sh. `metal` and `rocm` share the code of `vulkan`, and build on machines of their own only.
#
# Too long for the ordinary gates: `cuda` took 11 minutes of processor time from nothing, and `vulkan` another 7 in the same folder, on
# a virtual machine with two cores of an Intel Xeon (one job at a time). Nothing is linked, and nothing is run.
#
# Exit codes: 0 all well, 2 wrong usage, else cargo's.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

features=("$@")
if ((${#features[@]} == 0)); then
    features=(cuda vulkan)
fi
for feature in "${features[@]}"; do
    if [[ $feature != cuda && $feature != vulkan ]]; then
        printf 'check: there is no feature %s to check\nusage: tools/gpu/check.sh [cuda|vulkan]...\n' "$feature" >&2
        exit 2
    fi
done

# The crates with code behind these features; Burn and what it needs are checked once for each.
packages=(--package paceline-ddp --package paceline-train --package paceline)

for feature in "${features[@]}"; do
    if [[ $feature == cuda && ${PACELINE_LLVM-} == system ]]; then
        XDG_DATA_HOME=$(tools/gpu/llvm.sh)
        export XDG_DATA_HOME
    fi
    begun=$SECONDS
    cargo clippy "${packages[@]}" --all-targets --features "paceline/$feature,paceline/burn-train" -- -D warnings
    printf 'check: %s is well, after %d s\n' "$feature" $((SECONDS - begun))
done
