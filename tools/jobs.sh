# Jobs of `paceline train` in a temporary folder, for scripts that compare them. To be sourced, with the script's arguments:
#
#     readonly SYNOPSIS='tools/NAME.sh [--epochs N] [PROGRAM]' OPTION=epochs DEFAULT=15
#     source "$(dirname "${BASH_SOURCE[0]}")/jobs.sh"
#
# Sets the variable that OPTION names (the script's one option, a number) and `program`, changes to the folder, and removes
# it at the end.

# Time limit of one job.
readonly JOB_SECONDS_MAX=600

fail() {
    printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2
    exit 1
}

usage() {
    printf '%s: %s\nusage: %s\n' "$(basename "$0" .sh)" "$*" "$SYNOPSIS" >&2
    exit 2
}

printf -v "$OPTION" %s "$DEFAULT"
program=$(dirname "${BASH_SOURCE[0]}")/../target/release/paceline
while (($# > 0)); do
    case $1 in
    "--$OPTION")
        [[ ${2-} =~ ^[1-9][0-9]{0,3}$ ]] || usage "--$OPTION takes a number from 1 to 9999"
        printf -v "$OPTION" %s "$2"
        shift 2
        ;;
    -*) usage "unknown option $1" ;;
    *)
        (($# == 1)) || usage "one PROGRAM only"
        program=$1
        shift
        ;;
    esac
done
[[ -x $program ]] || usage "there is no program $program: build it with \`cargo build --release\`, or name another"
program=$(realpath "$program")

# The jobs must not inherit settings or a rank from the caller's environment.
for variable in "${!PACELINE_@}" "${!SLURM_@}" "${!TORCHELASTIC_@}" RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE; do
    unset "$variable"
done

folder=$(mktemp -d "${TMPDIR:-/tmp}/paceline-$(basename "$0" .sh).XXXXXX")
job=
clean_up() {
    if [[ -n $job ]]; then
        kill -TERM "$job" 2>/dev/null || true
        wait "$job" || true
    fi
    rm -rf "$folder"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
cd "$folder"

# start RUN OPTION...: starts a job in the run directory RUN, with its output in RUN.out.
start() {
    local run=$1
    shift
    "$program" train --run-dir "$run" "$@" >"$run.out" 2>&1 </dev/null &
    job=$!
    job_end=$((SECONDS + JOB_SECONDS_MAX))
}

# finish RUN: waits for the job and stores its exit code in `code`.
finish() {
    while kill -0 "$job" 2>/dev/null; do
        if ((SECONDS >= job_end)); then
            cat "$1.out" >&2
            fail "the job of $1 took longer than $JOB_SECONDS_MAX s"
        fi
        sleep 0.02
    done
    code=0
    wait "$job" || code=$?
    job=
}

# finish_well RUN: the same for a job that must complete; stores the hash in `hash`.
finish_well() {
    finish "$1"
    hash=$(sed -n 's/^weights sha256: //p' "$1.out")
    if ((code != 0)) || [[ ! $hash =~ ^[0-9a-f]{64}$ ]]; then
        cat "$1.out" >&2
        fail "the job of $1 ended with exit code $code and without a hash of its weights"
    fi
}

# word RUN PATTERN: the last match of the pattern's group in the output of RUN.
word() {
    sed -nE "s/.*$2.*/\\1/p" "$1.out" | tail -n 1
}

# since MICROSECONDS: seconds since then, with one decimal.
since() {
    local tenths=$(((${EPOCHREALTIME/[.,]/} - $1 + 50000) / 100000))
    printf '%d.%d' $((tenths / 10)) $((tenths % 10))
}

# await_step RUN STEP: waits until the job has saved a checkpoint at STEP or later; fails if the job ends first.
await_step() {
    local newest
    while kill -0 "$job" 2>/dev/null && ((SECONDS < job_end)); do
        newest=$(find "$1/checkpoints" -maxdepth 1 -name 'step-*' 2>/dev/null | sort | tail -n 1)
        if [[ -n $newest ]] && ((10#${newest##*step-} >= $2)); then
            return 0
        fi
        sleep 0.005
    done
    return 1
}
