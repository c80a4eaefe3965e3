#!/usr/bin/env bash
# Checks the invariants of ARCHITECTURE.md that can be read off the sources. It rejects dependencies between crates that the table
# below does not list, Burn in a crate that must build without it, Burn's internals outside the files that own them, I/O and clocks in
# pure code, shared memory with a name, and crates that ARCHITECTURE.md does not list.
#
# Usage: tools/layering.sh
#
# Exit codes: 0 all invariants hold, 1 something was rejected, any other: cargo failed.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Crate -> the workspace's crates that it may depend on, to run, to build or to be tested. A crate may depend on itself, to turn on one
# of its features in its tests.
declare -rA MAY_USE=(
    [paceline-words]=''
    [paceline-rendezvous]='paceline-words'
    [paceline-kernels]=''
    [paceline-nn]='paceline-kernels'
    [paceline-collective]='paceline-rendezvous'
    [paceline-launch]='paceline-rendezvous paceline-words'
    [paceline-submit]='paceline-rendezvous'
    [paceline-doctor]='paceline-words paceline-collective paceline-rendezvous paceline-gpu paceline-nccl paceline-fake-nvml'
    [paceline-gpu]='paceline-words paceline-fake-nvml'
    [paceline-testing]=''
    [paceline-usage]='paceline-words paceline-gpu paceline-fake-nvml'
    [paceline-report]='paceline-words paceline-usage'
    [paceline-fake-library]=''
    [paceline-fake-nvml]='paceline-fake-library'
    [paceline-fake-cuda]='paceline-fake-library'
    [paceline-nccl]='paceline-collective paceline-rendezvous paceline-fake-cuda'
    [paceline-python]='paceline-collective paceline-rendezvous paceline-gpu paceline-usage paceline-fake-nvml'
    [paceline-ddp]='paceline-nn paceline-nccl paceline-fake-cuda paceline-collective paceline-rendezvous'
    [paceline-split]='paceline-nn paceline-ddp paceline-collective paceline-rendezvous'
    [paceline-checkpoint]='paceline-ddp paceline-collective paceline-rendezvous'
    [paceline-train]='paceline-kernels paceline-nn paceline-split paceline-checkpoint paceline-ddp paceline-usage paceline-collective paceline-rendezvous'
    [paceline-cli]='paceline-words paceline-launch paceline-submit paceline-doctor paceline-gpu paceline-usage paceline-report paceline-fake-nvml paceline-collective paceline-rendezvous paceline-nccl paceline-fake-cuda'
    [burn-train-example]='paceline'
    [paceline]='paceline-words paceline-nn paceline-split paceline-cli paceline-report paceline-train paceline-checkpoint paceline-ddp paceline-launch paceline-gpu paceline-usage paceline-collective paceline-rendezvous paceline-nccl paceline-fake-cuda'
)

# Only tests may use this crate; those of any crate may.
readonly FOR_TESTS='paceline-testing'

# Only these crates may reach Burn. The others move bytes and start processes, build in seconds and serve programs without Burn.
readonly WITH_BURN='paceline-nn paceline-ddp paceline-split paceline-checkpoint paceline-train paceline burn-train-example'

# The files that know Burn's internals. A new version of Burn can break only these without a compiler error.
readonly BURN_FILES='crates/nn/src/tape.rs crates/nn/src/values.rs crates/ddp/src/buffer.rs crates/ddp/src/cuda.rs crates/ddp/src/device/rocm.rs'
readonly BURN_INSIDES='backend::autodiff\b|\bautodiff::|\bburn_autodiff\b|\bburn::backend\b|\bcubecl|\bburn_(cubecl|cuda|dispatch|backend|flex)\b|\bDispatchTensor\b'

# Pure code: files, and folders with everything below them.
readonly PURE='
    crates/collective/src/plan.rs crates/collective/src/plan crates/collective/src/settle.rs crates/collective/src/settle crates/collective/src/tree.rs
    crates/ddp/src/plan.rs crates/ddp/src/pace.rs crates/ddp/src/pace crates/ddp/src/sampler.rs crates/ddp/src/sampler crates/ddp/src/device/pick.rs crates/ddp/src/device/adapters.rs
    crates/launch/src/judge.rs crates/launch/src/judge crates/launch/src/recovery.rs crates/launch/src/stop.rs crates/launch/src/elastic/decide.rs
    crates/launch/src/elastic/decide crates/launch/src/binding/decide.rs crates/launch/src/output/fold.rs
    crates/launch/src/stall/judge.rs crates/launch/src/report/known.rs crates/launch/src/report/advice.rs
    crates/doctor/src/gpu crates/doctor/src/nodes/judge.rs crates/cli/src/doctor/job/judge.rs
    crates/gpu/src/bus.rs crates/gpu/src/topology.rs crates/gpu/src/topology crates/usage/src/totals.rs crates/usage/src/totals
    crates/usage/src/report.rs crates/usage/src/report crates/usage/src/idle.rs crates/cli/src/compare/figures.rs crates/cli/src/compare/verdict.rs
    crates/cli/src/compare/render.rs crates/cli/src/chaos/plan.rs crates/cli/src/chaos/scene.rs crates/cli/src/chaos/report.rs
    crates/split/src/pipeline/schedule.rs crates/split/src/pipeline/order.rs crates/split/src/pipeline/simulate.rs crates/split/src/pipeline/cut.rs
    crates/train/src/plan.rs crates/train/src/plan
    crates/train/src/config/table.rs crates/train/src/config/kind.rs crates/train/src/config/derive.rs crates/train/src/config/check.rs crates/train/src/config/advice.rs
    crates/train/src/config/render.rs crates/train/src/config/value.rs crates/train/src/schedule.rs'
readonly IMPURE='\bstd::(fs|env|process|thread|os)\b|\bnet::(Tcp|Udp|ToSocketAddrs)|\b(Instant|SystemTime)::now\b|\bFile::(open|create)\b|\bfs::[a-z]|\brustix::|\blibc::[a-z]'

refused=0

# refuse SUBJECT REASON
refuse() {
    printf 'rejected: %s\n    %s\n' "$1" "$2" >&2
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
            refuse "$(manifest "$crate")" "crate $crate is not in the table of tools/layering.sh: add it with the crates that it may use"
        fi
    done
    for crate in "${!MAY_USE[@]}"; do
        if ! has "$members" "$crate"; then
            refuse "tools/layering.sh" "crate $crate is in the table but not in the workspace"
        fi
    done
}

check_edges() {
    local kind edges crate used
    for kind in normal build dev; do
        # Each crate of the workspace at depth 0, with what it uses below.
        edges=$(tree --workspace --edges "$kind" --depth 1 --no-dedupe --prefix depth)
        while read -r crate used; do
            if [[ ! -v MAY_USE[$crate] ]] || { [[ $kind == dev ]] && has "$FOR_TESTS" "$used"; }; then
                continue
            fi
            if has "$members" "$used" && ! has "$crate ${MAY_USE[$crate]}" "$used"; then
                refuse "$(manifest "$crate"): $crate -> $used ($kind dependency)" \
                    "$crate may use only: ${MAY_USE[$crate]:-no other crate of this workspace}"
            fi
        done < <(awk '/^0/ { crate = substr($1, 2) } /^1/ { print crate, substr($1, 2) }' <<<"$edges")
    done
}

check_without_burn() {
    local below chain crate packages=()
    for crate in $members; do
        has "$WITH_BURN" "$crate" || packages+=(--package "$crate")
    done
    # What several crates use is listed below the first of them.
    below=$(tree "${packages[@]}" --edges normal,build,dev --prefix depth)
    # The path from that crate down to the first crate of Burn.
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
        crate=${chain%% *}
        refuse "$(manifest "$crate"): $chain" "$crate must not reach burn, directly or through others"
    fi
}

# exists FILE: a path that has moved would silently check nothing.
exists() {
    [[ -e $1 ]] || refuse 'tools/layering.sh' "names $1, which does not exist"
}

check_burn_insides() {
    local hits file line
    hits=$(grep -rnE --include='*.rs' "$BURN_INSIDES" crates examples || [[ $? -eq 1 ]])
    while IFS=: read -r file line text; do
        if [[ -n $file && ! $text =~ ^[[:space:]]*// ]] && ! has "$BURN_FILES" "$file"; then
            refuse "$file:$line" "only these files may know Burn's internals: $BURN_FILES"
        fi
    done <<<"$hits"
    for file in $BURN_FILES; do
        exists "$file"
    done
}

check_pure() {
    local path file hits
    for path in $PURE; do
        exists "$path"
        while read -r file; do
            # Skips comments, and the tests at the end of a file.
            hits=$(awk '/#\[cfg\(test\)\]/ { exit } !/^[[:space:]]*\/\// { print FNR ": " $0 }' "$file" | grep -E "$IMPURE" || [[ $? -eq 1 ]])
            if [[ -n $hits ]]; then
                refuse "$file:$hits" 'pure code does no I/O and reads no clock: time, files and environment are arguments'
            fi
        done < <(find "$path" -name '*.rs' ! -name tests.rs ! -path '*/tests/*' 2>/dev/null)
    done
}

check_shared_memory() {
    local hits
    hits=$(grep -rnE --include='*.rs' '\bshm_open\b|\bshmget\b' crates || [[ $? -eq 1 ]])
    if [[ -n $hits ]]; then
        refuse "$hits" 'shared memory is memfd, which has no name and ends with its last user'
    fi
}

check_described() {
    local crate
    for crate in $members; do
        grep -qF "| \`${crate#paceline-}\` |" ARCHITECTURE.md ||
            refuse ARCHITECTURE.md "its table of crates lacks \`${crate#paceline-}\`"
    done
}

members=$(tree --workspace --depth 0 --prefix none)
members=$(awk 'NF { print $1 }' <<<"$members" | sort -u | paste -sd ' ')

check_table
check_edges
check_without_burn
check_burn_insides
check_pure
check_shared_memory
check_described

if ((refused > 0)); then
    printf 'layering: %d rejected\n' "$refused" >&2
    exit 1
fi
printf 'layering: all invariants hold in %d crates\n' "$(wc -w <<<"$members")"
