#!/bin/sh
# allstream's GPU pack: conformance on a CUDA device, examples and tables. README.md beside this file says more.
#
#   ./run                 all parts, one after another
#   ./run PART [TEXT]     one part; of it only the steps whose names contain TEXT
#   ./run list            the names of the parts
#
# Results go to $OUT/PART ($OUT is ./out if it is not set). A part ends by itself after at most $LIMIT seconds (480). Exit
# codes: 0 all passed or were skipped, 1 something failed, 2 this machine cannot run the programs, 3 there is no GPU.

set -u
here=$(cd "$(dirname "$0")" && pwd) || exit 2
# What tells most comes first: a machine may be lent for a short while.
all="ceiling perf-threads threads perf-processes processes mps examples staged ctas threads-many processes-many sanitizer"
say() { printf '%s\n' "$*"; }
escaped() { printf '%s' "$1" | sed 's/\\/\\\\/g; s/"/\\"/g' | tr -d '\n\r\t'; }

if [ "${1:-}" = list ]; then
    for part in $all; do say "$part"; done
    exit 0
fi
if ! command -v timeout >/dev/null 2>&1; then
    say "gpu-pack: there is no \`timeout\` here (it is in coreutils): parts would have no time limit" >&2
    exit 2
fi
out=${OUT:-./out}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
limit=${LIMIT:-480}
# Of that, what a step leaves for writing down what came of it, and what is worth beginning one.
reserve=15 least=10
if [ "$limit" -lt 60 ]; then reserve=1 least=1; fi

# Without a name: each part in a process of its own, and all of it in one file.
if [ $# -eq 0 ]; then
    failed=0
    rm -f "$out/summary.txt" "$out/results.json"
    for part in $all; do
        OUT=$out LIMIT=$limit "$0" "$part"
        code=$?
        case $code in
        0) ;;
        1) failed=1 ;;
        *) exit $code ;;
        esac
    done
    say "{" >"$out/results.json"
    comma=
    for part in $all; do
        printf '%s"%s": ' "$comma" "$part"
        cat "$out/$part/results.json"
        comma=,
    done >>"$out/results.json"
    say "}" >>"$out/results.json"
    say
    for part in $all; do
        sed "s/^/$part: /" "$out/$part/summary.txt"
    done | tee "$out/summary.txt"
    say "in $out: summary.txt, results.json, and a folder for each part"
    exit $failed
fi

part=$1 only=${2:-}
case " $all " in
*" $part "*) ;;
*)
    say "gpu-pack: there is no part \`$part\`; there are: $all" >&2
    exit 2
    ;;
esac

# What is set for other runs must not change this one.
library=${ALLSTREAM_CUDA_LIBRARY:-}
for name in $(env | sed -n 's/^\(ALLSTREAM_[A-Za-z0-9_]*\)=.*/\1/p') RANK WORLD_SIZE MASTER_ADDR MASTER_PORT; do
    unset "$name"
done
if [ -n "$library" ]; then
    export ALLSTREAM_CUDA_LIBRARY="$library"
fi

begun=$(date +%s)
if ! info=$(timeout 120 "$here/bin/allstream" info 2>&1); then
    say "gpu-pack: $here/bin/allstream does not run here (it needs x86-64 or whatever it was built for, and glibc 2.35):" >&2
    say "$info" >&2
    exit 2
fi
cuda=$(say "$info" | sed -n 's/^CUDA  *//p')
case $cuda in
yes:*) ;;
*)
    say "gpu-pack: there is no GPU here that this could run on: ${cuda#no: }" >&2
    exit 3
    ;;
esac

out=$out/$part
# Of an earlier run of this part.
rm -rf "$out/logs" "$out/tables" "$out/summary.txt" "$out/results.json"
mkdir -p "$out/logs" "$out/tables" || exit 2
export ALLSTREAM_TRACE_DIR="$out/trace"

# A library that someone names may be anything; where it is a GPU's driver, let the loader find it (LD_LIBRARY_PATH).
measured=true
mark=
if [ -n "$library" ]; then
    measured=false
    mark="NOT MEASURED ON A DEVICE: the driver is what ALLSTREAM_CUDA_LIBRARY names, $library"
else
    case $cuda in
    *" by libcuda.so.1;"*) ;;
    *)
        measured=false
        mark="NOT MEASURED ON A DEVICE, as far as can be told: the driver is not called libcuda.so.1 (${cuda#yes: })"
        ;;
    esac
fi
{
    [ -z "$mark" ] || say "$mark"
    say "$(uname -srm), $(getconf GNU_LIBC_VERSION 2>/dev/null), $(getconf _NPROCESSORS_ONLN) cores"
    say "$info"
} >"$out/machine.txt"
say "== $part, at most $limit s"
if [ "$part" = ceiling ]; then cat "$out/machine.txt"; fi

steps=0 passed=0 failed=0 skipped=0
: >"$out/summary.txt"
rows=
tables=

# ended NAME SECONDS RESULT REASON
ended() {
    steps=$((steps + 1))
    case $3 in
    passed) passed=$((passed + 1)) ;;
    skipped) skipped=$((skipped + 1)) ;;
    *) failed=$((failed + 1)) ;;
    esac
    line=$(printf '%-40s %6s s  %s%s' "$1" "$2" "$3" "${4:+: $4}")
    say "$line"
    say "$line" >>"$out/summary.txt"
    rows="$rows${rows:+,}
    {\"step\": \"$1\", \"seconds\": $2, \"result\": \"$3\", \"reason\": \"$(escaped "${4:-}")\"}"
}

wanted() {
    case $1 in
    *"$only"*) return 0 ;;
    *) return 1 ;;
    esac
}

skip() {
    wanted "$1" && ended "$1" 0 skipped "$2"
}

left() { say $((limit - ($(date +%s) - begun))); }

# Ctrl-C ends the step that runs, too, and what was started for the part.
running=
mps=
leave() {
    if [ -n "$running" ]; then kill "$running" 2>/dev/null; fi
    if [ -n "$mps" ]; then
        say quit | timeout 20 nvidia-cuda-mps-control >/dev/null 2>&1
        rm -rf "$mps"
        mps=
    fi
}
trap 'leave; exit 130' INT TERM HUP
trap leave EXIT

# step NAME TEXT COMMAND...: passes if the command ends well within the time that is left and has said TEXT. What it says is
# its log.
step() {
    name=$1 text=$2
    shift 2
    wanted "$name" || return 1
    time=$(($(left) - reserve))
    if [ "$time" -lt "$least" ]; then
        ended "$name" 0 skipped "the part's time is over: ./run $part $name runs it alone"
        return 1
    fi
    start=$(date +%s)
    timeout -k 5 "$time" "$@" >"$out/logs/$name.txt" 2>&1 </dev/null &
    running=$!
    wait "$running"
    code=$?
    running=
    if [ "$code" -eq 0 ] && ! grep -qF "$text" "$out/logs/$name.txt"; then
        code="0 without \`$text\`"
    fi
    seconds=$(($(date +%s) - start))
    case $code in
    0) ended "$name" "$seconds" passed "" ;;
    124 | 137) ended "$name" "$seconds" FAILED "not done after $time s; see $part/logs/$name.txt" ;;
    *)
        ended "$name" "$seconds" FAILED "exit code $code; see $part/logs/$name.txt"
        tail -n 25 "$out/logs/$name.txt" | sed 's/^/    /'
        ;;
    esac
    [ "$code" = 0 ]
}

if $measured; then sizes=real; else sizes=rehearsal; fi
conformance() {
    for test in "$@"; do
        step "conformance-$test$suffix" "test result: ok. 1 passed" env ALLSTREAM_TEST_DRIVER=$sizes \
            RUST_BACKTRACE=0 "$here/bin/gpu" "$test" --exact --nocapture --test-threads=1
    done
}

# measure NAME WHAT threads|processes RANKS OPTION...: a table; times are from the call until its await has returned, if no
# option says otherwise.
suffix=
measure() {
    name=perf-$1$suffix what=$2 places=$3 ranks=$4
    shift 4
    file=$out/tables/$name
    $measured || file=$out/tables/not-measured-$name
    set -- perf "$what" --device -N "$ranks" -J "$file.json" "$@"
    [ "$places" = processes ] || set -- "$@" --threads
    if $measured; then set -- "$@" -b 1K -e 256M -f 4; else set -- "$@" -b 1K -e 16K -f 4 -n 4 -w 1; fi
    step "$name" "# Out of bounds values : 0 OK" "$here/bin/allstream" "$@" || return
    {
        [ -z "$mark" ] || say "# $mark"
        cat "$out/logs/$name.txt"
    } >"$file.txt"
    tables="$tables${tables:+ }$name=$file.json"
    if [ "$part" = ceiling ]; then grep '^# copies' "$out/logs/$name.txt"; fi
}
table() {
    measure "$1-$3-$2" "$1" "$2" "$3" --await
}

# Tables of ranks in one process, or in several.
several() {
    if ! $measured; then
        if [ "$1" = threads ]; then table all_reduce threads 2; else table all_gather processes 2; fi
        return
    fi
    for ranks in 2 4 8; do table all_reduce "$1" $ranks; done
    for what in all_gather reduce_scatter broadcast; do
        table $what "$1" 4
    done
    for ranks in 2 4 8; do
        measure "all_reduce-$ranks-$1-bf16" all_reduce "$1" $ranks --await -d bf16
    done
    for what in all_to_all send_recv; do
        table $what "$1" 4
    done
    for what in all_gather reduce_scatter broadcast; do
        table $what "$1" 2
        table $what "$1" 8
    done
}

# Processes that share a GPU take turns on it; under MPS their kernels run side by side.
with_mps() {
    if ! command -v nvidia-cuda-mps-control >/dev/null 2>&1; then
        skip mps "nvidia-cuda-mps-control is not installed"
        return
    fi
    if ! $measured; then
        skip mps "it serves a device, and there is none"
        return
    fi
    mps=$(mktemp -d /tmp/mps.XXXXXX) || return
    export CUDA_MPS_PIPE_DIRECTORY="$mps/pipe" CUDA_MPS_LOG_DIRECTORY="$mps/log"
    mkdir -p "$mps/pipe" "$mps/log"
    if ! timeout 30 nvidia-cuda-mps-control -d >"$out/logs/mps.txt" 2>&1; then
        skip mps "it does not start: $(tail -n 1 "$out/logs/mps.txt")"
        rm -rf "$mps"
        mps=
        return
    fi
    suffix=-mps
    for ranks in 2 4 8; do table all_reduce processes $ranks; done
    conformance two_processes four_processes
    for what in all_gather reduce_scatter broadcast; do
        table $what processes 4
    done
    cat "$mps"/log/* >>"$out/logs/mps.txt" 2>/dev/null
}

sanitizer() {
    tool=
    for found in compute-sanitizer /usr/local/cuda/bin/compute-sanitizer; do
        [ -n "$tool" ] || tool=$(command -v "$found" 2>/dev/null)
    done
    if [ -z "$tool" ]; then
        skip compute-sanitizer "not installed"
    elif ! $measured; then
        skip compute-sanitizer "it watches a device, and there is none"
    else
        step compute-sanitizer "test result: ok. 1 passed" "$tool" --tool memcheck --error-exitcode 9 \
            "$here/bin/gpu" short --exact --ignored --nocapture --test-threads=1
    fi
}

examples() {
    step example-12_gpu "the mean is 1.5" "$here/examples/12_gpu"
    # cudarc, which it uses, has the driver from the loader's path.
    if $measured; then overlap="64 1024"; else overlap="0.1 16"; fi
    folder=$(dirname "${library:-/}")
    # shellcheck disable=SC2086 # two words
    step example-13_gpu_overlap "by kernels on the GPUs" \
        env LD_LIBRARY_PATH="${library:+$folder:}${LD_LIBRARY_PATH:-}" "$here/examples/13_gpu_overlap" $overlap &&
        $measured && cp "$out/logs/example-13_gpu_overlap.txt" "$out/tables/overlap.txt"
}

# Through the host's memory, and the same link by itself, on the host's.
staged() {
    for link in shm tcp; do
        measure staged-$link-all_reduce-2-processes all_reduce processes 2 --staged --link $link
        if $measured; then
            name=host-$link-all_reduce-2-processes
            step $name "# Out of bounds values : 0 OK" "$here/bin/allstream" perf all_reduce \
                -N 2 --link $link -b 1K -e 256M -f 4 -J "$out/tables/perf-$name.json" &&
                cp "$out/logs/$name.txt" "$out/tables/perf-$name.txt"
        fi
    done
    conformance three_threads_staged
}

# How many of the device's blocks ranks on one device should take.
ctas() {
    if ! $measured; then
        skip perf-ctas "it has a meaning on a device only"
        return
    fi
    for ctas in 264 132 64 32 16 8 528; do
        export ALLSTREAM_MAX_CTAS=$ctas
        measure ctas-$ctas-all_reduce-4-threads all_reduce threads 4 --await
    done
    unset ALLSTREAM_MAX_CTAS
}

case $part in
ceiling)
    # One rank: what stands above its table is how fast the device copies, beside which all others are read.
    table all_reduce threads 1
    # A stream waits for each, the host for the last of many.
    measure join-all_reduce-2-threads all_reduce threads 2 --join
    ;;
perf-threads) several threads ;;
threads) conformance one_thread two_threads four_threads ;;
threads-many) conformance eight_threads ;;
perf-processes) several processes ;;
processes) conformance one_process two_processes four_processes ;;
processes-many) conformance eight_processes ;;
mps) with_mps ;;
examples) examples ;;
staged) staged ;;
ctas) ctas ;;
sanitizer) sanitizer ;;
esac

# All of it in one file.
{
    say "{"
    say "  \"measured_on_device\": $measured,"
    say "  \"mark\": \"$(escaped "$mark")\","
    say "  \"machine\": \"$(escaped "$(uname -srm)")\","
    say "  \"cuda\": \"$(escaped "$cuda")\","
    say "  \"seconds\": $(($(date +%s) - begun)),"
    say "  \"steps\": [$rows
  ],"
    say "  \"tables\": {"
    comma=
    for entry in $tables; do
        printf '%s"%s": ' "$comma" "${entry%%=*}"
        cat "${entry#*=}"
        comma=,
    done
    say "  }"
    say "}"
} >"$out/results.json"

{
    say "$passed passed, $failed failed, $skipped skipped, $(($(date +%s) - begun)) s"
    [ -z "$mark" ] || say "$mark"
} | tee -a "$out/summary.txt"
grep ' skipped: ' "$out/summary.txt" | sed 's/^/not done: /'
say "in $out: summary.txt, results.json, tables/, logs/"
if [ "$steps" -eq 0 ]; then
    say "gpu-pack: no step of $part has \`$only\` in its name" >&2
    exit 2
fi
[ "$failed" -eq 0 ]
