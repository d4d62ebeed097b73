#!/bin/sh
# allstream's GPU pack: conformance on a CUDA device, examples and tables. README.md beside this file says more.
#
#   ./run [TEXT]     all parts, or those whose names contain TEXT
#
# Results go to $OUT, or ./out. Exit codes: 0 all passed, 1 something failed, 2 this machine cannot run the programs,
# 3 there is no GPU.

set -u
here=$(cd "$(dirname "$0")" && pwd) || exit 2
only=${1:-}
say() { printf '%s\n' "$*"; }

if ! command -v timeout >/dev/null 2>&1; then
    say "gpu-pack: there is no \`timeout\` here (it is in coreutils): parts would have no time limit" >&2
    exit 2
fi

# What is set for other runs must not change this one.
library=${ALLSTREAM_CUDA_LIBRARY:-}
for name in $(env | sed -n 's/^\(ALLSTREAM_[A-Za-z0-9_]*\)=.*/\1/p') RANK WORLD_SIZE MASTER_ADDR MASTER_PORT; do
    unset "$name"
done
if [ -n "$library" ]; then
    export ALLSTREAM_CUDA_LIBRARY="$library"
fi

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

out=${OUT:-./out}
mkdir -p "$out/logs" "$out/tables" && out=$(cd "$out" && pwd) || exit 2
# Of an earlier run; nothing else that may lie there.
rm -f "$out"/logs/conformance-*.txt "$out"/logs/example-*.txt "$out"/logs/perf-*.txt \
    "$out"/logs/host-*.txt "$out"/logs/compute-sanitizer.txt \
    "$out"/tables/perf-* "$out"/tables/overlap.txt "$out"/tables/not-measured-perf-* "$out/summary.txt" "$out/results.json"
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
} | tee "$out/machine.txt"
say

parts=0 passed=0 failed=0 skipped=0
: >"$out/summary.txt"
rows=
escaped() { printf '%s' "$1" | sed 's/\\/\\\\/g; s/"/\\"/g' | tr -d '\n\r\t'; }

# ended NAME SECONDS RESULT REASON
ended() {
    parts=$((parts + 1))
    case $3 in
    passed) passed=$((passed + 1)) ;;
    skipped) skipped=$((skipped + 1)) ;;
    *) failed=$((failed + 1)) ;;
    esac
    line=$(printf '%-32s %6s s  %s%s' "$1" "$2" "$3" "${4:+: $4}")
    say "$line"
    say "$line" >>"$out/summary.txt"
    rows="$rows${rows:+,}
    {\"part\": \"$1\", \"seconds\": $2, \"result\": \"$3\", \"reason\": \"$(escaped "${4:-}")\"}"
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

# Ctrl-C ends the part that runs, too.
running=
trap 'if [ -n "$running" ]; then kill "$running" 2>/dev/null; fi; exit 130' INT TERM HUP

# part NAME LIMIT TEXT COMMAND...: passes if the command ends well within LIMIT seconds and has said TEXT. What it says is
# its log.
part() {
    name=$1 limit=$2 text=$3
    shift 3
    wanted "$name" || return 1
    start=$(date +%s)
    timeout -k 10 "$limit" "$@" >"$out/logs/$name.txt" 2>&1 </dev/null &
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
    124 | 137) ended "$name" "$seconds" FAILED "not done after $limit s; see logs/$name.txt" ;;
    *)
        ended "$name" "$seconds" FAILED "exit code $code; see logs/$name.txt"
        tail -n 25 "$out/logs/$name.txt" | sed 's/^/    /'
        ;;
    esac
    [ "$code" = 0 ]
}

# Conformance: 1, 2, 4 and 8 ranks on the one device, and some that are not bound to it.
if $measured; then sizes=real; else sizes=rehearsal; fi
for test in one_thread two_threads four_threads eight_threads three_threads_staged \
    one_process two_processes four_processes eight_processes; do
    part "conformance-$test" 420 "test result: ok. 1 passed" env ALLSTREAM_TEST_DRIVER=$sizes RUST_BACKTRACE=0 \
        "$here/bin/gpu" "$test" --exact --nocapture --test-threads=1
done

part example-12_gpu 120 "the mean is 1.5" "$here/examples/12_gpu"
# cudarc, which it uses, has the driver from the loader's path.
if $measured; then overlap="64 1024"; else overlap="0.1 16"; fi
folder=$(dirname "${library:-/}")
# shellcheck disable=SC2086 # two words
part example-13_gpu_overlap 120 "by kernels on the GPUs" \
    env LD_LIBRARY_PATH="${library:+$folder:}${LD_LIBRARY_PATH:-}" "$here/examples/13_gpu_overlap" $overlap \
    && $measured && cp "$out/logs/example-13_gpu_overlap.txt" "$out/tables/overlap.txt"

sanitizer=
for found in compute-sanitizer /usr/local/cuda/bin/compute-sanitizer; do
    [ -n "$sanitizer" ] || sanitizer=$(command -v "$found" 2>/dev/null)
done
if [ -z "$sanitizer" ]; then
    skip compute-sanitizer "not installed"
elif ! $measured; then
    skip compute-sanitizer "it watches a device, and there is none"
else
    part compute-sanitizer 600 "test result: ok. 1 passed" "$sanitizer" --tool memcheck --error-exitcode 9 \
        "$here/bin/gpu" short --exact --ignored --nocapture --test-threads=1
fi

# Tables: NAME WHAT threads|processes RANKS OPTION...; times are from the call until its await has returned, if no option
# says otherwise.
tables=
measure() {
    name=perf-$1 what=$2 places=$3 ranks=$4
    shift 4
    file=$out/tables/$name
    $measured || file=$out/tables/not-measured-$name
    set -- perf "$what" --device -N "$ranks" -J "$file.json" "$@"
    [ "$places" = processes ] || set -- "$@" --threads
    if $measured; then set -- "$@" -b 1K -e 256M -f 4; else set -- "$@" -b 1K -e 16K -f 4 -n 4 -w 1; fi
    part "$name" 420 "# Out of bounds values : 0 OK" "$here/bin/allstream" "$@" || return
    {
        [ -z "$mark" ] || say "# $mark"
        cat "$out/logs/$name.txt"
    } >"$file.txt"
    tables="$tables${tables:+ }$name=$file.json"
}
table() {
    measure "$1-$3-$2" "$1" "$2" "$3" --await
}
if $measured; then
    for places in threads processes; do
        for ranks in 1 2 4 8; do
            table all_reduce $places $ranks
        done
        for ranks in 2 4 8; do
            measure all_reduce-$ranks-$places-bf16 all_reduce $places $ranks --await -d bf16
        done
        for what in all_gather reduce_scatter broadcast; do
            table $what $places 2
            table $what $places 8
        done
        for what in all_gather reduce_scatter broadcast all_to_all send_recv; do
            table $what $places 4
        done
    done
else
    table all_reduce threads 2
    table all_gather processes 2
fi
# A stream waits for each, the host for the last of many.
measure join-all_reduce-2-threads all_reduce threads 2 --join
# Through the host's memory, and the same link by itself, on the host's.
for link in shm tcp; do
    measure staged-$link-all_reduce-2-processes all_reduce processes 2 --staged --link $link
    if $measured; then
        part host-$link-all_reduce-2-processes 420 "# Out of bounds values : 0 OK" "$here/bin/allstream" perf all_reduce \
            -N 2 --link $link -b 1K -e 256M -f 4 -J "$out/tables/perf-host-$link-all_reduce-2-processes.json" &&
            cp "$out/logs/host-$link-all_reduce-2-processes.txt" "$out/tables/perf-host-$link-all_reduce-2-processes.txt"
    fi
done
# How many of the device's blocks ranks on one device should take.
if $measured; then
    for ctas in 8 16 32 64 132 264 528; do
        export ALLSTREAM_MAX_CTAS=$ctas
        measure ctas-$ctas-all_reduce-4-threads all_reduce threads 4 --await
    done
    unset ALLSTREAM_MAX_CTAS
fi

# All of it in one file.
{
    say "{"
    say "  \"measured_on_device\": $measured,"
    say "  \"mark\": \"$(escaped "$mark")\","
    say "  \"machine\": \"$(escaped "$(uname -srm)")\","
    say "  \"cuda\": \"$(escaped "$cuda")\","
    say "  \"parts\": [$rows
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

say
{
    say "$passed passed, $failed failed, $skipped skipped"
    [ -z "$mark" ] || say "$mark"
} | tee -a "$out/summary.txt"
say "in $out: summary.txt, results.json, tables/, logs/"
if [ "$parts" -eq 0 ]; then
    say "gpu-pack: no part's name contains \`$only\`" >&2
    exit 2
fi
[ "$failed" -eq 0 ]
