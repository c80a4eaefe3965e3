#!/usr/bin/env bash
# Type-checks the code of GPU back ends, which .ci/run leaves out: clippy, with warnings as errors, for each feature alone.
#
# Usage: tools/gpu/check.sh [FEATURE]...
#
# FEATURE is cuda or vulkan, by default both. It needs no GPU, driver, CUDA or Vulkan. `cuda`
# needs an LLVM that Burn's build downloads; with PACELINE_LLVM=system the distribution's is used instead, see
# tools/gpu/llvm.sh. `metal` and `rocm` share the code of `vulkan`, and build only on their own platforms.
#
# This takes too long for .ci/run: from a clean folder `cuda` took 11 minutes of processor time, and `vulkan` another 7 in the same
# folder, on a virtual machine with two cores of an Intel Xeon (one job at a time). It links nothing and runs nothing.
#
# Exit codes: 0 no warnings, 2 wrong usage, else cargo's.

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

# The crates with code behind these features. Burn and its dependencies are checked once for each feature.
packages=(--package paceline-ddp --package paceline-train --package paceline)

for feature in "${features[@]}"; do
    if [[ $feature == cuda && ${PACELINE_LLVM-} == system ]]; then
        XDG_DATA_HOME=$(tools/gpu/llvm.sh)
        export XDG_DATA_HOME
    fi
    begun=$SECONDS
    cargo clippy "${packages[@]}" --all-targets --features "paceline/$feature,paceline/burn-train" -- -D warnings
    printf 'check: %s passed after %d s\n' "$feature" $((SECONDS - begun))
done
