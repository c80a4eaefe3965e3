#!/usr/bin/env bash
# Tests everything about GPUs that needs a machine with one, in less than eight minutes.
#
# Usage: tools/gpu/prove.sh [--device cuda|vulkan|cpu] [--out DIR] [--seconds S] [--tiny] [PACK]
#
# PACK is the archive from tools/gpu/pack.sh, or the folder that it unpacks to. The default is this script's own folder if it has the
# programs, else target/gpu/paceline-gpu.tar.xz. The script needs no compiler and no network. PyTorch, for its step times and its NCCL,
# comes from the Python in PACELINE_BENCH_PYTHON, by default python3; without it there is no comparison.
#
# The parts. Each has its own time limit, and a failure does not stop the next:
#   inventory                 driver, libraries, PyTorch
#   gpu topo, doctor, p2p     the devices as Paceline sees them, and a snapshot of them
#   start                     one step, and how long its kernels took to compile; ends the script if the device is missing
#   two ranks                 same bits as one rank with as many shards, in the tree's order
#   processor                 the losses of one rank are near those of the CPU
#   train                     the digits on one rank
#   step times                three models, f32 and bf16, one rank and two, Paceline and PyTorch: a first round
#   two ranks again           near one rank, in NCCL's own order
#   killed and stopped rank   which rank the report names, and after how long
#   trace                     one step of two ranks
#   layouts                   a language model in stages of ZeRO, a pipeline and parts on two ranks: same bits as one rank
#   lost rank                 one of two ranks is killed, and the other one goes on: same bits as without
#   two ranks again           through the host: same bits as one rank
#   train again               the same weights
#   more layouts              other schedules, meshes on four ranks, several devices of one process, a plan
#   step times                more rounds; the library that went first goes last
#
# The most important parts come first, because the time that a GPU's kernels take to compile is unknown, and every process compiles
# them again. A part does not start if the slowest part of its kind would not finish in the remaining time.
#
# With one GPU both ranks compute on it. NCCL permits that only for ranks of different machines, so each rank gets its own
# NCCL_HOSTID, and their data goes over the loopback. The results are right, and it is slow.
#
# --tiny computes next to nothing. It tests this script, with --device cpu on any machine, and its times are meaningless.
#
# DIR, by default $OUT, receives summary.txt (also on stdout), log.txt (every command, its output, its exit code),
# step_time.jsonl, losses.jsonl, trace.json, snapshot.json and usage.json.
#
# A part fails if the thread of a device panics, whatever its exit code.
#
# Exit codes: 0 all parts passed, 1 some failed, 2 wrong usage, 3 the device is missing.

set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
    printf 'prove: %s\nusage: tools/gpu/prove.sh [--device cuda|vulkan|cpu] [--out DIR] [--seconds S] [--tiny] [PACK]\n' "$*" >&2
    exit 2
}

device=cuda
out=${OUT-}
# Time limit of the whole script, in seconds.
budget=460
tiny=
pack=
while (($# > 0)); do
    case $1 in
    --device)
        [[ ${2-} =~ ^(cuda|vulkan|cpu)$ ]] || usage "--device takes cuda, vulkan or cpu"
        device=$2
        shift 2
        ;;
    --out)
        [[ -n ${2-} ]] || usage "--out takes a folder"
        out=$2
        shift 2
        ;;
    --seconds)
        [[ ${2-} =~ ^[1-9][0-9]{1,3}$ ]] || usage "--seconds takes a number from 10 to 9999"
        budget=$2
        shift 2
        ;;
    --tiny)
        tiny=yes
        shift
        ;;
    -*) usage "unknown option $1" ;;
    *)
        [[ -z $pack ]] || usage "one PACK only"
        pack=$1
        shift
        ;;
    esac
done
[[ -n $out ]] || usage "--out DIR is missing: the folder for the results"
mkdir -p "$out" && out=$(realpath "$out") || usage "the folder $out cannot be created"

# Makes the caller's relative paths absolute, because the work runs in another folder. Links are kept: the Python of a virtual
# environment is one.
if [[ -n $pack ]]; then
    [[ -e $pack ]] || usage "$pack does not exist"
    pack=$(realpath "$pack")
fi
for variable in PACELINE_BENCH_PYTHON PACELINE_NCCL_LIBRARY PACELINE_CUDA_LIBRARY PACELINE_NVML_LIBRARY CUDA_PATH; do
    if [[ ${!variable-} == */* || -d ${!variable-} ]]; then
        printf -v "$variable" '%s' "$(realpath -ms "${!variable}")"
    fi
done

work=$(realpath "$(mktemp -d "${TMPDIR:-/tmp}/paceline-prove.XXXXXX")")
running=
clean_up() {
    if [[ -n $running ]]; then
        kill -TERM "$running" 2>/dev/null
        wait "$running"
    fi
    rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [[ -z $pack ]]; then
    pack=$here
    [[ -x $here/paceline ]] || pack=$here/../../target/gpu/paceline-gpu.tar.xz
fi
if [[ -f $pack ]]; then
    # Some machines have Python and no xz.
    tar -xJf "$pack" -C "$work" 2>/dev/null ||
        python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$pack" "$work" ||
        usage "$pack cannot be unpacked"
    pack=$work/paceline-gpu
fi
paceline=$pack/paceline
step_time=$pack/step_time
[[ -x $paceline && -x $step_time ]] || usage "$pack has no programs \`paceline\` and \`step_time\`: make it with tools/gpu/pack.sh"

# The jobs must not inherit settings or a rank from the caller's environment.
python=${PACELINE_BENCH_PYTHON:-python3}
for variable in "${!SLURM_@}" "${!TORCHELASTIC_@}" RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE; do
    unset "$variable"
done
# Launchers keep their logs here, so that nothing outlives this run.
export XDG_STATE_HOME=$work/state

log=$out/log.txt
summary=$out/summary.txt
: >"$log"
rows=()
failures=0
cd "$work" || exit 1

# The amount of work.
epochs=3
# Small batches, because kernels of the image models are slow on a GPU without Burn's autotune, and the CPU is slow anyway.
few=(--steps 6 --warmup 0 --batch 8 --shards 2 --losses --device "$device")
many=(--steps 40 --warmup 15 --seconds 5 --device "$device")
long=(--workload gpt --steps 200 --warmup 20 --seconds 15 --device "$device")
if [[ -n $tiny ]]; then
    epochs=1
    few+=(--batch 2)
    many=(--steps 3 --warmup 1 --batch 2 --device "$device")
    long=(--workload gpt --steps 5 --warmup 1 --batch 2 --device "$device")
fi

# --- One part after another ---

# Whole seconds of the slowest part of each kind that finished.
declare -A slowest=()

# part KIND NAME SECONDS COMMAND...: runs a command with a time limit. Its output is in NAME.out and NAME.err, its exit code
# in `code` (124 at the limit, 125 if no time was left for it) and its seconds in `took`. It passed if `code` is 0 and `panicked` is
# empty.
part() {
    local kind=$1 name=$2 limit=$3 left=$((budget - SECONDS)) begun=${EPOCHREALTIME/[.,]/} need
    shift 3
    # The first of a kind takes at least as long as the smallest program.
    need=${slowest[$kind]:-${slowest[start]:-0}}
    printf 'prove: %3d s  %s\n' "$SECONDS" "$name" >&2
    code=0 panicked=
    : >"$name.out"
    : >"$name.err"
    if ((left < 5 || left < need)); then
        code=125
    else
        # In the background, so that this script can be ended while it runs.
        timeout --kill-after=5 $((limit < left ? limit : left)) "$@" >"$name.out" 2>"$name.err" </dev/null &
        running=$!
        wait "$running" || code=$?
        running=
    fi
    took=$(since "$begun")
    # 137: the command did not end on SIGTERM.
    if ((code == 124 || code == 137 && ${took%.*} >= (limit < left ? limit : left))); then
        code=$((limit < left ? 124 : 125))
    elif ((code == 0 && ${took%.*} >= ${slowest[$kind]:-0})); then
        slowest[$kind]=$((${took%.*} + 1))
    fi
    panicked=$(panic "$name")
    {
        printf '=== %s\n$ %s\n' "$name" "$*"
        head -c 300000 "$name.out"
        printf -- '--- on stderr\n'
        head -c 300000 "$name.err"
        printf -- '--- exit code %d after %s s\n\n' "$code" "$took"
    } >>"$log"
    ((code == 0)) && [[ -z $panicked ]]
}

# panic PART: the panic message of a device's thread, in any rank. CubeCL catches the panic and continues, so the job may exit with 0.
# But a kernel that was not compiled wrote nothing, and later results come from uninitialised memory.
panic() {
    # The line with the thread's name, and the next one, which has the reason.
    grep -m 1 -A 1 -E "thread 'DS[DU]-" "$1.err" | sed -E "s/^\\[rank [0-9]+\\] //; s/^.*(thread 'DS)/\\1/" | paste -sd ' '
}

# since MICROSECONDS: seconds since then, with two decimals.
since() {
    local hundredths=$(((${EPOCHREALTIME/[.,]/} - $1 + 5000) / 10000))
    printf '%d.%02d' $((hundredths / 100)) $((hundredths % 100))
}

# tell NAME ok|FAILED|skipped WORDS...
tell() {
    rows+=("$(printf '%-8s %-34s %s' "$2" "$1" "${*:3}")")
    [[ $2 != FAILED ]] || failures=$((failures + 1))
}

# failed NAME [PART]: reports how the last part ended, with the line that says why.
failed() {
    local words why part=${2:-$1}
    case $code in
    0) words="a device's thread panicked, and the results are meaningless" ;;
    124) words="not finished after $took s" ;;
    125)
        tell "$1" skipped "no time was left"
        return
        ;;
    *) words="exit code $code" ;;
    esac
    if [[ -n $panicked ]]; then
        tell "$1" FAILED "$words: ${panicked:0:250}"
        return
    fi
    # Paceline's programs print the error first, Python prints it last. `gpu p2p` prints its findings on stdout.
    why=$(grep -m 1 -E '^(\[rank [0-9]+\] )?(error|step_time): ?' "$part.err" || grep -m 1 '^error: ' "$part.out" ||
        grep -v '^[[:space:]]*$' "$part.err" | tail -n 1)
    tell "$1" FAILED "$words: ${why:0:250}"
}

# finish CODE
finish() {
    local row
    {
        printf 'Paceline on %s, %s, %s after %d s\n\n' "${card:-$device}" "$(uname -sr)" "$(date -u +%FT%TZ)" "$SECONDS"
        for row in "${rows[@]}"; do
            printf '%s\n' "$row"
        done
        if [[ -s $out/step_time.jsonl ]]; then
            printf '\n'
            times
        fi
    } | tee "$summary"
    exit "$1"
}

# --- Output of the parts ---

# lines NAME: the JSON lines of a job's output, without the launcher's prefixes.
lines() {
    sed -nE 's/^[^{]*(\{"[a-z_]+":.*\})$/\1/p' "$1.out"
}

# For awk: the value of a field of the object in this line, which has no nested objects; empty if it is missing.
readonly FIELD='
    function field(name,   text) {
        if (!match($0, "\"" name "\": ?(\"[^\"]*\"|[^,}]*)")) return ""
        text = substr($0, RSTART, RLENGTH)
        sub(/^"[^"]*": ?/, "", text)
        gsub(/"/, "", text)
        return text
    }'

# hashes NAME: one line per workload, with the hash of the weights.
hashes() {
    lines "$1" | awk "$FIELD"'field("weights_sha256") { print field("workload"), field("weights_sha256") }'
}

# losses NAME: one line per step: workload, step and loss.
losses() {
    lines "$1" | awk "$FIELD"'field("loss") { print field("workload"), field("step"), field("loss") }'
}

# farthest ONE OTHER: the largest relative difference between two runs' losses in first steps, the largest in later steps, and the
# number of steps; empty if the runs do not have the same steps.
farthest() {
    paste -d ' ' <(losses "$1") <(losses "$2") | awk '
        NF != 6 || $1 != $4 || $2 != $5 { other = 1; next }
        {
            # A loss that is NaN or infinite is null in JSON, and differs from everything.
            difference = 1
            if ($3 != "null" && $6 != "null") {
                difference = $3 > $6 ? $3 - $6 : $6 - $3
                larger = $3 > $6 ? $3 : $6
                if (larger > 0) difference /= larger
            }
            if ($2 == 0 && difference > first) first = difference
            if ($2 != 0 && difference > later) later = difference
            steps++
        }
        END { if (steps && !other) printf "%.1e %.1e %d\n", first, later, steps }'
}

# keep NAME: adds the losses of a run to losses.jsonl.
keep() {
    lines "$1" | sed -E "s/^\\{/{\"run\":\"$1\",/" >>"$out/losses.jsonl"
}

# compare NAME WITH [FIRST LATER]: compares a finished run with an earlier one. The weights should be equal; with FIRST and LATER
# it is enough if the losses differ by at most so much in the first step and in later ones.
compare() {
    if ((code != 0)) || [[ -n $panicked ]]; then
        failed "$1"
        return
    fi
    keep "$1"
    local first later steps far='losses cannot be compared'
    if read -r first later steps < <(farthest "$2" "$1"); then
        far="losses differ by up to $first in first steps and $later in later ones, over $steps steps"
    fi
    if [[ -n $(hashes "$1") && $(hashes "$1") == "$(hashes "$2")" ]]; then
        tell "$1" ok "$took s, same bits as $2"
    elif [[ -n ${3-} && -n ${steps-} ]] &&
        awk -v first="$first" -v later="$later" -v a="$3" -v b="$4" 'BEGIN { exit !(first <= a && later <= b) }'; then
        tell "$1" ok "$took s, near $2: $far"
    else
        tell "$1" FAILED "other weights than $2; $far"
    fi
}

# sha NAME: the hash that a run of `paceline train` printed.
sha() {
    sed -nE 's/^(\[rank 0\] )?weights sha256: ([0-9a-f]{64})$/\2/p' "$1.out"
}

# layout NAME WITH WORDS...: trains the language model by the words of a command, and compares its weights with those of an earlier
# layout, if WITH names one.
layout() {
    local name=$1 with=$2
    shift 2
    if ! part layout "$name" 120 "$@" --epochs 1 --run-dir "$work/$name"; then
        failed "$name"
    elif [[ -z $with ]]; then
        tell "$name" ok "$took s"
    elif [[ $(sha "$name") == "$(sha "$with")" ]]; then
        tell "$name" ok "$took s, same bits as $with: $(sha "$name" | cut -c 1-16)"
    else
        tell "$name" FAILED "other weights than $with: $(sha "$name" | cut -c 1-16) and $(sha "$with" | cut -c 1-16)"
    fi
}

# --- Faults ---

# process_of RANK: the process id of a rank of the marked job.
process_of() {
    local environ
    for environ in /proc/[0-9]*/environ; do
        if grep -qzx "PACELINE_PROVE=$mark" "$environ" 2>/dev/null && grep -qzx "RANK=$1" "$environ" 2>/dev/null; then
            environ=${environ#/proc/}
            printf '%s\n' "${environ%/environ}"
            return
        fi
    done
    return 1
}

# Whether an MPS server, which may be outside the container, shares the GPU among its clients.
shares_by_mps() {
    grep -qs '^nvidia-cuda-mps' /proc/[0-9]*/comm || [[ -e ${CUDA_MPS_PIPE_DIRECTORY:-/tmp/nvidia-mps}/control ]]
}

# The timeout in seconds between ranks of jobs that get a fault. While they compile the kernels of the first step, one may
# be behind the other by at most that step.
patience() {
    lines start | awk "$FIELD"'{ seconds = 16 + int(field("step_seconds")) } END { printf "%d", seconds < 60 && NR ? seconds : 60 }'
}

# give_up: ends the running job, by force if necessary.
give_up() {
    local end=$((SECONDS + 10))
    kill -TERM "$running" 2>/dev/null
    while kill -0 "$running" 2>/dev/null && ((SECONDS < end)); do
        sleep 0.1
    done
    kill -KILL "$running" 2>/dev/null
    wait "$running" || code=$?
}

# strike NAME SIGNAL EXPECT: sends a signal to rank 1 of a running job of two ranks, and checks how the job ends.
strike() {
    local name=$1 victim begun end patience left=$((budget - SECONDS)) ready=$((2 * ${slowest[start]:-5} + 10)) over=20
    printf 'prove: %3d s  %s\n' "$SECONDS" "$name" >&2
    patience=$(patience)
    if [[ $2 == STOP ]]; then
        # Its peers wait for it first, and then once more to agree on which rank it was.
        over=$((2 * patience + 20))
    fi
    if ((left < ready + over)); then
        code=125
        tell "$name" skipped "no time was left"
        return
    fi
    mark=$name-$$
    code=0
    # The same shapes as in the part `start`, so that the kernels are the same.
    PACELINE_PROVE=$mark PACELINE_TIMEOUT_SECONDS=$patience "${two[@]}" "${alone[@]}" "$step_time" --workload mlp --batch 2 \
        --steps 1000000 --losses --device "$device" >"$name.out" 2>"$name.err" </dev/null &
    running=$!
    end=$((SECONDS + left - over))
    ((end <= SECONDS + 90)) || end=$((SECONDS + 90))
    until (($(losses "$name" | wc -l) >= 10)) || ! kill -0 "$running" 2>/dev/null || ((SECONDS >= end)); do
        sleep 0.1
    done
    victim=$(process_of 1)
    begun=${EPOCHREALTIME/[.,]/}
    if [[ -n $victim ]] && kill "-$2" "$victim"; then
        end=$((SECONDS + over))
        while kill -0 "$running" 2>/dev/null && ((SECONDS < end)); do
            sleep 0.02
        done
        took=$(since "$begun")
        kill -KILL "$victim" 2>/dev/null
        if kill -0 "$running" 2>/dev/null; then
            give_up
            tell "$name" FAILED "the job still ran after $took s"
        else
            wait "$running" || code=$?
            if ((code != 0)) && grep -qiE "$3" "$name.err"; then
                tell "$name" ok "ended after $took s: $(grep -iE "$3" "$name.err" | head -n 1 | cut -c 1-160)"
            else
                tell "$name" FAILED "exit code $code after $took s, and no error names rank 1: $(head -n 1 "$name.err" | cut -c 1-160)"
            fi
        fi
    else
        give_up
        tell "$name" FAILED "the job of two ranks never started to train: $(tail -n 1 "$name.err" | cut -c 1-160)"
    fi
    running=
    panicked=$(panic "$name")
    [[ -z $panicked ]] || tell "$name, kernels" FAILED "a device's thread panicked: ${panicked:0:250}"
    {
        printf '=== %s\n' "$name"
        tail -n 5 "$name.out"
        printf -- '--- on stderr\n'
        head -c 100000 "$name.err"
        printf -- '--- exit code %d\n\n' "$code"
    } >>"$log"
}

# --- Step times ---

# timed ROUND PEER PRECISION WORLD
timed() {
    local name="times-$2-$3-$4" command=()
    case $2 in
    paceline) command=("$step_time") ;;
    ring) command=("$step_time" --reduction ring) ;;
    torch) command=("$python" "$here/peer_step.py") ;;
    esac
    command+=("${many[@]}" --precision "$3")
    if (($4 == 2)); then
        command=("${two[@]}" "${alone[@]}" "${command[@]}")
    fi
    if part "$4 $3" "$name" 90 "${command[@]}"; then
        ((${took%.*} < ${slowest[times]:-0})) || slowest[times]=$((${took%.*} + 1))
        lines "$name" | sed -E "s/^\\{/{\"round\":$1,/" >>"$out/step_time.jsonl"
    elif [[ -z ${broken[$name]-} ]]; then
        # Reported once; its other rounds are left out. A lack of time for another round is not reported.
        ((code == 125 && $1 > 1)) || failed "$name"
        broken[$name]=1
    fi
}

# setting ROUND WORLD PRECISION: runs every library once, one right after another. An incomplete comparison is useless, so it does not
# start unless there is time for all of it.
setting() {
    local peer mine=() begun=$SECONDS need
    for peer in "${peers[@]}"; do
        if [[ $peer != ring || $2-$3 == 2-f32 ]] && [[ -z ${broken[times-$peer-$3-$2]-} ]]; then
            mine+=("$peer")
        fi
    done
    need=${cost[$2-$3]:-$((${#mine[@]} * ${slowest[times]:-${slowest[check]:-${slowest[start]:-5}}}))}
    if ((${#mine[@]} == 0 || budget - SECONDS < need)); then
        return
    fi
    for peer in "${mine[@]}"; do
        timed "$1" "$peer" "$3" "$2"
    done
    cost[$2-$3]=$((SECONDS - begun + 1))
    measured=$((measured + 1))
}

# settings ROUND SETTING...
settings() {
    local round=$1 one
    shift
    for one in "$@"; do
        setting "$round" "${one% *}" "${one#* }"
    done
}

# times: a row for each workload, precision and number of ranks, with the median, minimum and maximum over the rounds.
times() {
    awk "$FIELD"'
        # The median, minimum and maximum of the numbers in a text.
        function spread(text,   values, count, i, j, value) {
            count = split(text, values, " ")
            if (!count) return "-"
            for (i = 2; i <= count; i++) {
                value = values[i] + 0
                for (j = i - 1; j >= 1 && values[j] + 0 > value; j--) values[j + 1] = values[j]
                values[j + 1] = value
            }
            return sprintf("%.2f (%.2f to %.2f)", values[int((count + 1) / 2)], values[1], values[count])
        }
        {
            peer = field("peer") ~ /^torch/ ? "torch" : field("reduction") == "ring" ? "ring" : "paceline"
            key = field("workload") " " field("precision") " " field("world")
            if (!(key in seen)) { seen[key] = 1; keys[++total] = key }
            step[key, peer] = step[key, peer] " " field("step_seconds") * 1e3
            streamed[key, peer] = streamed[key, peer] " " field("streamed_seconds") * 1e3
            at[key, peer, field("round")] = field("step_seconds")
            if (field("round") + 0 > rounds) rounds = field("round") + 0
        }
        END {
            printf "ms per step, median of up to %d rounds (minimum to maximum); ratio: PyTorch / Paceline in the same round\n\n", rounds
            print "| workload | precision | ranks | Paceline | in NCCL\047s order | PyTorch | ratio | Paceline, streamed | PyTorch, streamed |"
            print "|---|---|---|---|---|---|---|---|---|"
            for (i = 1; i <= total; i++) {
                key = keys[i]; split(key, part, " "); ratios = ""
                for (round = 1; round <= rounds; round++)
                    if (at[key, "paceline", round] > 0 && at[key, "torch", round] > 0)
                        ratios = ratios " " at[key, "torch", round] / at[key, "paceline", round]
                printf "| %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", part[1], part[2], part[3],
                    spread(step[key, "paceline"]), spread(step[key, "ring"]), spread(step[key, "torch"]), spread(ratios),
                    spread(streamed[key, "paceline"]), spread(streamed[key, "torch"])
            }
        }' "$out/step_time.jsonl"
}

# --- Inventory ---

inventory() {
    printf '=== inventory\n'
    cat "$pack/BUILD"
    uname -a
    sed -n 's/^model name[[:space:]]*: //p' /proc/cpuinfo | head -n 1
    printf '%d cores, %s\n' "$(nproc)" "$(sed -n 's/^MemTotal: *//p' /proc/meminfo)"
    timeout 10 nvidia-smi
    ldconfig -p | grep -E 'libcuda\.so|libnccl|libvulkan|libnvidia-ml'
    nvcc --version
    printf 'NCCL: %s\nlibdevice: %s\nPyTorch: %s\n' "${nccl:-not found}" "${libdevice:-not found}" "${torch:-not found}"
    env | grep -E '^(CUDA|NCCL|NVIDIA|PACELINE|LD_LIBRARY_PATH)' | sort
    printf '\n'
}

torch=$("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null)
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null)
# Prefers the NCCL of the PyTorch that is timed, so that both sides use the same.
nccl=${PACELINE_NCCL_LIBRARY-}
if [[ -z $nccl && -d $site ]]; then
    nccl=$(find "$site/nvidia" -name libnccl.so.2 2>/dev/null | head -n 1)
fi
if [[ -z $nccl ]]; then
    nccl=$(ldconfig -p 2>/dev/null | sed -nE 's/.*libnccl\.so\.2 .*=> (.*)/\1/p' | head -n 1)
fi
if [[ -n $nccl ]]; then
    export PACELINE_NCCL_LIBRARY=$nccl
fi
# Burn's kernels need CUDA's libdevice, from a toolkit or from Triton's copy.
libdevice=
for root in "${CUDA_PATH-}" /usr/local/cuda /usr/local/cuda-*; do
    if [[ -n $root && -e $root/nvvm/libdevice/libdevice.10.bc ]]; then
        libdevice=$root/nvvm/libdevice/libdevice.10.bc
        export CUDA_PATH=$root
        break
    fi
done
if [[ -z $libdevice && -d $site ]]; then
    libdevice=$(find "$site/triton" "$site/nvidia" -name libdevice.10.bc 2>/dev/null | head -n 1)
    if [[ -n $libdevice ]]; then
        mkdir -p cuda/nvvm/libdevice
        ln -s "$libdevice" cuda/nvvm/libdevice/
        export CUDA_PATH=$work/cuda
    fi
fi
card=$(timeout 10 nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
inventory >>"$log" 2>&1

if [[ $device != cpu ]]; then
    if part look topo 30 "$paceline" gpu topo; then
        tell topo ok "see log.txt"
    else
        failed topo
    fi
    # Exit code 1 means findings.
    part look doctor 60 "$paceline" gpu doctor --save-snapshot "$out/snapshot.json"
    if [[ -s $out/snapshot.json ]] && ((code <= 1)); then
        tell doctor ok "$(grep -E '^[0-9]+ errors?, ' doctor.out || printf 'nothing wrong found')"
    else
        failed doctor
    fi
    if part look p2p 60 "$paceline" gpu p2p; then
        tell p2p ok "$(tail -n 1 p2p.out | cut -c 1-150)"
    else
        failed p2p
    fi
fi

# The number of devices as CUDA counts them: CUDA_VISIBLE_DEVICES hides some from ranks, but not from nvidia-smi.
cards=$(sed -nE '1s/^([0-9]+) devices?, .*/\1/p' p2p.out 2>/dev/null)
if [[ -z $cards ]]; then
    cards=$(timeout 10 nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
    if [[ -n ${CUDA_VISIBLE_DEVICES-} ]]; then
        commas=${CUDA_VISIBLE_DEVICES//[!,]/}
        cards=$((${#commas} + 1 < cards ? ${#commas} + 1 : cards))
    fi
fi

# The smallest program that computes on the device.
if part start start 90 "$step_time" --workload mlp --batch 2 --steps 1 --warmup 0 --device "$device"; then
    tell "start on $device" ok "$took s in all, $(lines start | awk "$FIELD"'{
        printf "%.2f s of it in the first step, which compiles its kernels; the second took %.2f ms",
            field("step_seconds"), field("streamed_seconds") * 1e3 }')"
else
    failed "start on $device" start
    if ((code != 0)); then
        tell 'all other parts' skipped "there is no $device device here"
        finish 3
    fi
fi

# --- Training, most important parts first ---

: >"$out/losses.jsonl"
: >"$out/step_time.jsonl"
cat >rank.sh <<'END'
#!/bin/sh
# One rank of several that share a GPU. To NCCL it is a separate machine that can only be reached over the loopback. Otherwise NCCL
# may take two such machines for one NVLink domain, or use another network plugin.
export NCCL_HOSTID="paceline-prove-$RANK" NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket NCCL_IB_DISABLE=1
export NCCL_MNNVL_ENABLE=0 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
# The ranks take turns on the GPU, and a block that waits for the other rank would occupy it.
export NCCL_MAX_CTAS=2
exec "$@"
END
chmod +x rank.sh
alone=()
if [[ $device == cuda ]] && ((cards < 2)); then
    alone=("$work/rank.sh")
fi
two=("$paceline" run --nproc-per-node 2 --usage off)

sound=
if part check one-rank 120 "$step_time" "${few[@]}"; then
    keep one-rank
    sound=yes
    tell one-rank ok "$took s, three models of two shards each"
    part check two-ranks 120 "${two[@]}" "${alone[@]}" "$step_time" "${few[@]}"
    compare two-ranks one-rank
    if [[ $device != cpu ]]; then
        # Initial weights and data are the same, so this detects a GPU that computes wrong results. Products of f32 matrices run
        # in TF32 there, which has 11 significant bits where f32 has 24. bf16 has 8, and on a CPU models in bf16 differ from f32 by
        # 6e-4 in the first step and by 1.2e-2 in the next five, while losses fall to less than half. A correct GPU stays within
        # these bounds. A faulty one does not: scores that are all zero would differ by 7e-3 in the perceptron's first step, and with
        # wrong gradients losses do not fall.
        part processor processor 60 "$step_time" "${few[@]/#$device/cpu}"
        if ((code == 124)); then
            tell processor skipped "not finished after $took s, so there is nothing to compare with"
        else
            compare processor one-rank 5e-3 5e-2
        fi
    fi
else
    failed one-rank
fi

train=("$paceline" train --device "$device" --nproc-per-node 1 --epochs "$epochs" --usage off)
if part train train 120 "${train[@]}" --run-dir "$work/train"; then
    tell train ok "$took s, $(grep "^epoch $epochs/$epochs" train.out | cut -c 1-100)"
else
    failed train
fi

declare -A broken=() cost=()
measured=0
peers=(paceline)
if [[ $device == cuda ]]; then
    # For the cost of the tree's order.
    peers+=(ring)
fi
if [[ -z $torch ]]; then
    tell 'PyTorch' skipped "$python has no torch"
elif [[ $device != vulkan && -z $tiny ]]; then
    peers+=(torch)
fi
# Two ranks on one GPU show the cost of sharing, and nothing about two GPUs, so they come later.
early=('1 f32' '2 f32' '1 bf16' '2 bf16')
late=()
if ((${#alone[@]} > 0)); then
    early=('1 f32' '1 bf16')
    late=('2 f32' '2 bf16')
fi
settings 1 "${early[@]}"

if [[ $device == cuda && -n $sound ]]; then
    part check two-ranks-ring 120 "${two[@]}" "${alone[@]}" "$step_time" "${few[@]}" --reduction ring
    compare two-ranks-ring one-rank 1e-3 1e-3
fi

if [[ $device != cpu ]] && shares_by_mps; then
    tell killed-rank skipped "an MPS server runs here, whose clients may die with the killed one, so the result would prove nothing"
else
    strike killed-rank KILL 'rank 1.*(kill|signal 9)'
fi
strike stopped-rank STOP 'rank 1'

if part check trace 120 "$paceline" run --nproc-per-node 2 --usage on --usage-json "$out/usage.json" --lang en "${alone[@]}" \
    "$step_time" "${long[@]}" --trace "$out/trace.json"; then
    tell trace ok "$took s, $(lines trace | awk "$FIELD"'{
        printf "reducing %.2f ms per step, %.2f of them during the backward pass", field("reduced_seconds") * 1e3, field("overlapped_seconds") * 1e3 }')"
    if [[ -s $out/usage.json ]]; then
        tell tracker ok "$(sed -n 's/^• //p' trace.err | head -n 4 | paste -sd ';')"
    else
        tell tracker FAILED "the job left no usage report"
    fi
else
    failed trace
fi

# Twelve steps of a model of two blocks.
for ((line = 0; line < 64; line++)); do
    printf '%d bottles on the wall, and one of them falls down\n' "$line"
done >text
text=(--task lm --data "$work/text" --device "$device" --layers 2 --heads 2 --width 32 --context 32 --dropout 0.1
    --global-batch 8 --shards 2 --accumulate 2 --clip-norm 1)
lm=("$paceline" train "${text[@]}")
layout lm '' "${lm[@]}" --nproc-per-node 1 --usage off
if [[ -n $(sha lm) ]]; then
    for words in '--zero 3' '--pp 2 --schedule 1f1b' '--zero 2' '--zero 1' '--recompute blocks'; do
        name=${words//--/}
        # shellcheck disable=SC2086 # several words
        layout "lm-${name// /-}" lm "${two[@]}" "${alone[@]}" "${lm[@]}" $words
    done
    layout lm-2-parts '' "${lm[@]}" --nproc-per-node 1 --usage off --tp 2
    layout lm-tp-2 lm-2-parts "${two[@]}" "${alone[@]}" "${lm[@]}" --tp 2
    if [[ $device != cpu ]] && shares_by_mps; then
        tell lost-rank skipped "an MPS server runs here, whose clients may die with the killed one"
    elif part lost lost-rank 180 "$paceline" chaos --kills 1 --seed 7 --faults kill --reference -- \
        "${two[@]}" --recovery live "${alone[@]}" "${lm[@]}" --epochs 10 --recovery live; then
        tell lost-rank ok "$took s, $(sed -nE 's/^(recovery|same bits) +//p' lost-rank.out | paste -sd ';')"
    else
        failed lost-rank
    fi
fi

if [[ $device == cuda && -n $sound ]]; then
    part check two-ranks-host 120 "${two[@]}" "${alone[@]}" "$step_time" "${few[@]}" --backend host
    compare two-ranks-host one-rank
fi

if [[ -n $(sha train) ]]; then
    if ! part train train-again 120 "${train[@]}" --run-dir "$work/train-again"; then
        failed train-again
    elif [[ $(sha train) == "$(sha train-again)" ]]; then
        tell train-again ok "$took s, the same weights: $(sha train | cut -c 1-16)"
    else
        tell train-again FAILED "other weights: $(sha train | cut -c 1-16) and $(sha train-again | cut -c 1-16)"
    fi
fi

settings 1 "${late[@]}"

# more NAME WITH WORDS...: a layout, unless the time that is left is that of the rounds below.
more() {
    if ((budget - SECONDS < 90)); then
        tell "$1" skipped "the time that is left is for step times"
    else
        layout "$@"
    fi
}

if [[ -n $(sha lm) ]]; then
    for words in '--pp 2 --schedule zb-h1' '--pp 2 --schedule interleaved' '--pp 2 --schedule gpipe'; do
        name=${words//--/}
        # shellcheck disable=SC2086 # several words
        more "lm-${name// /-}" lm "${two[@]}" "${alone[@]}" "${lm[@]}" $words
    done
    # Ranks share one card, or each has its own.
    if [[ $device == cuda ]] && ((cards > 1 && cards < 4)); then
        tell 'four ranks' skipped "there are $cards cards"
    else
        four=("$paceline" run --nproc-per-node 4 --usage off)
        more lm-pp-2-dp-2 lm "${four[@]}" "${alone[@]}" "${lm[@]}" --pp 2
        more lm-tp-2-dp-2 lm-2-parts "${four[@]}" "${alone[@]}" "${lm[@]}" --tp 2
        more lm-pp-2-tp-2 lm-2-parts "${four[@]}" "${alone[@]}" "${lm[@]}" --pp 2 --tp 2
        more lm-pp-2-zero-3 lm "${four[@]}" "${alone[@]}" "${lm[@]}" --pp 2 --zero 3
    fi
    more lm-2-sequences '' "${lm[@]}" --nproc-per-node 1 --usage off --tp 2 --sequence-parallel on
    more lm-sequence-2 lm-2-sequences "${two[@]}" "${alone[@]}" "${lm[@]}" --tp 2 --sequence-parallel on
    if [[ $device == cpu ]] || ((cards > 1)); then
        for strategy in dp model; do
            more "lm-strategy-$strategy" lm "${lm[@]}" --usage off --strategy "$strategy" --devices 2
        done
    else
        tell 'several devices' skipped "there is one"
    fi
    if part plan plan 120 "$paceline" plan "${text[@]}" --nproc-per-node 2; then
        tell plan ok "$took s, $(grep -cE '^(dp|pp|tp) [0-9]' plan.out) layouts"
    else
        failed plan
    fi
fi

for ((round = 2; round <= 5; round++)); do
    before=$measured
    # The library that went first goes last.
    peers=("${peers[@]: -1}" "${peers[@]:0:${#peers[@]}-1}")
    settings "$round" "${early[@]}"
    ((measured > before)) || break
done
unbegun=
for setting in "${early[@]}" "${late[@]}"; do
    [[ -n ${cost[${setting/ /-}]-} ]] || unbegun+=" ${setting/ /-}"
done
if [[ -s $out/step_time.jsonl ]]; then
    tell 'step times' ok "$measured comparisons${unbegun:+; no time was left for (ranks-precision)$unbegun}"
elif ((measured > 0)); then
    tell 'step times' FAILED "not one was measured"
else
    tell 'step times' skipped "no time was left"
fi

finish $((failures > 0))
