#!/usr/bin/env bash
# Which crate may know which: refuses every dependency between this workspace's crates that the table below does not
# have, burn below the crates that must not reach it, and Burn's autodiff outside the files that are about it.
#
# Usage: tools/layering.sh
#
# Exit codes: 0 as it should be, 1 something is refused, anything else: cargo could not tell.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Crate -> the workspace's crates that it may depend on, in any way: to run, to build and to be tested. Itself is
# allowed: so a crate has a feature of its own turned on in its tests.
declare -rA MAY_USE=(
    [paceline-rendezvous]=''
    [paceline-collective]='paceline-rendezvous'
    [paceline-launch]='paceline-rendezvous'
    [paceline-submit]='paceline-rendezvous'
    [paceline-doctor]='paceline-rendezvous paceline-gpu paceline-fake-nvml'
    [paceline-gpu]='paceline-fake-nvml'
    [paceline-testing]=''
    [paceline-fake-library]=''
    [paceline-fake-nvml]='paceline-fake-library'
    [paceline-fake-cuda]='paceline-fake-library'
    [paceline-nccl]='paceline-collective paceline-rendezvous paceline-fake-cuda'
    [paceline-ddp]='paceline-nccl paceline-fake-cuda paceline-collective paceline-rendezvous'
    [paceline-train]='paceline-ddp paceline-gpu paceline-collective paceline-rendezvous'
    [paceline-cli]='paceline-launch paceline-submit paceline-doctor paceline-gpu paceline-fake-nvml paceline-collective paceline-rendezvous paceline-nccl paceline-fake-cuda'
    [paceline]='paceline-cli paceline-train paceline-ddp paceline-launch paceline-gpu paceline-collective paceline-rendezvous paceline-nccl paceline-fake-cuda'
)

# What the tests of any crate may use, and nothing else may.
readonly FOR_TESTS='paceline-testing'

# Crates that move bytes and start processes: they build in seconds and serve programs without Burn.
readonly WITHOUT_BURN='paceline-rendezvous paceline-collective paceline-gpu paceline-fake-nvml paceline-launch paceline-submit paceline-doctor paceline-cli paceline-nccl paceline-fake-cuda paceline-fake-library paceline-testing'

# The files that know how Burn works inside: all that a new version of Burn can break without the compiler's help.
readonly AUTODIFF_FILES='crates/ddp/src/hook.rs crates/ddp/src/hook/tests.rs crates/ddp/src/buffer.rs'

refused=0

# refuse SUBJECT REASON
refuse() {
    printf 'refused: %s\n    %s\n' "$1" "$2" >&2
    refused=$((refused + 1))
}

# has LIST WORD
has() {
    [[ " $1 " == *" $2 "* ]]
}

# Features and platforms do not hide an edge.
tree() {
    cargo tree --quiet --all-features --target all --format '{p}' "$@"
}

manifest() {
    printf 'crates/%s/Cargo.toml' "${1#paceline-}"
}

check_table() {
    local crate
    for crate in $members; do
        if [[ ! -v MAY_USE[$crate] ]]; then
            refuse "$(manifest "$crate")" "crate $crate is not in the table of tools/layering.sh: say there what it may use"
        fi
    done
    for crate in "${!MAY_USE[@]}"; do
        if ! has "$members" "$crate"; then
            refuse "tools/layering.sh" "the table has crate $crate, the workspace does not"
        fi
    done
}

# check_edges CRATE
check_edges() {
    local kind edges used
    for kind in normal build dev; do
        edges=$(tree --package "$1" --edges "$kind" --depth 1 --prefix depth)
        while read -r used; do
            if [[ $kind == dev ]] && has "$FOR_TESTS" "$used"; then
                continue
            fi
            if has "$members" "$used" && ! has "$1 ${MAY_USE[$1]}" "$used"; then
                refuse "$(manifest "$1"): $1 -> $used ($kind dependency)" \
                    "$1 may use only: ${MAY_USE[$1]:-no other crate of this workspace}"
            fi
        done < <(awk '/^1/ { print substr($1, 2) }' <<<"$edges")
    done
}

# check_without_burn CRATE
check_without_burn() {
    local below chain
    below=$(tree --package "$1" --edges normal,build,dev --prefix depth)
    # The way from the crate down to the first of Burn's.
    chain=$(awk '
        !found && match($1, /^[0-9]+/) {
            depth = substr($1, 1, RLENGTH) + 0
            name[depth] = substr($1, RLENGTH + 1)
            if (name[depth] ~ /^burn([-_]|$)/) {
                found = 1
                for (i = 0; i <= depth; i++) printf "%s%s", (i ? " -> " : ""), name[i]
            }
        }' <<<"$below")
    if [[ -n $chain ]]; then
        refuse "$(manifest "$1"): $chain" "$1 must not reach burn, directly or through others"
    fi
}

check_autodiff() {
    local hits file line
    hits=$(grep -rnE --include='*.rs' 'backend::autodiff\b|\bautodiff::|\bburn_autodiff\b' crates examples || [[ $? -eq 1 ]])
    while IFS=: read -r file line _; do
        if [[ -n $file ]] && ! has "$AUTODIFF_FILES" "$file"; then
            refuse "$file:$line" "Burn's autodiff internals are known to these files only: $AUTODIFF_FILES"
        fi
    done <<<"$hits"
    for file in $AUTODIFF_FILES; do
        if [[ ! -e $file ]]; then
            refuse "tools/layering.sh" "the table has $file, which does not exist"
        fi
    done
}

members=$(tree --workspace --depth 0 --prefix none)
members=$(awk 'NF { print $1 }' <<<"$members" | sort -u | paste -sd ' ')

check_table
for crate in $members; do
    if [[ -v MAY_USE[$crate] ]]; then
        check_edges "$crate"
    fi
done
for crate in $WITHOUT_BURN; do
    if has "$members" "$crate"; then
        check_without_burn "$crate"
    fi
done
check_autodiff

if ((refused > 0)); then
    printf 'layering: %d refused\n' "$refused" >&2
    exit 1
fi
printf 'layering: %d crates as they should be\n' "$(wc -w <<<"$members")"
