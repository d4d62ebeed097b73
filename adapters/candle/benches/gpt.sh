#!/usr/bin/env bash
# The GPT in segments between network namespaces whose lines are shaped (benches/lines.sh of the repository has RATE, BURST, GSO,
# CONGESTION). Computing is measured alone, and slept then. Writes Markdown.
#   adapters/candle/benches/gpt.sh
#   HOSTS=4 BATCHES="4 8 16" BUCKETS="0 25"  ranks, sequences of each rank in a step, and MB of a bucket (0: the default)
set -euo pipefail
cd "$(dirname "$0")/../../.."
. benches/lines.sh
hosts=${HOSTS:-4}
cargo build --release --bench shaped --message-format json-render-diagnostics >"$work/bench"
cargo build --release --manifest-path adapters/candle/Cargo.toml --bench gpt --message-format json-render-diagnostics >"$work/gpt"
bench=$(program bench "$work/bench") gpt=$(program bench "$work/gpt")
make_lines "$hosts"
shape add tbf
began=$(cut -d' ' -f1-2 /proc/loadavg)
line "$bench" >"$work/line"
token=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
ranks() { # BUCKET_MB TIMES
    local r pids=() ok=yes
    for r in $(seq 0 $((hosts - 1))); do
        RANK=$r WORLD_SIZE=$hosts MASTER_ADDR=10.0.0.1 MASTER_PORT=29600 ALLSTREAM_TOKEN=$token ALLSTREAM_LINK=tcp \
            ALLSTREAM_HOST_ID=$me-$r timeout 300 ip netns exec "${me}r$r" "$gpt" rank "$@" &
        pids+=($!)
    done
    for r in "${pids[@]}"; do wait "$r" || ok=; done
    [ -n "$ok" ]
}
echo "A raw TCP line, $rate, burst $burst, $congestion, packets of $gso: latency $(value latency_us "$work/line") us, $(value bandwidth "$work/line") bytes a second. $(nproc) cores, $(date -u +%F)."
echo
echo "| sequences of each rank | ranks | MB of a bucket | buckets | slept, ms | compute, ms | communicating alone, ms | communicating in a step, ms | exposed, ms | **exposed / alone** | **exposed / in a step** |"
echo "|---|---|---|---|---|---|---|---|---|---|---|"
for batch in ${BATCHES:-4 8 16}; do
    times=$("$gpt" alone "$batch")
    for bucket in ${BUCKETS:-0 25}; do
        # shellcheck disable=SC2086
        ranks "$bucket" $times >"$work/row"
        echo "| $batch $(cat "$work/row")"
    done
done
echo
echo "Load $began before, $(cut -d' ' -f1-2 /proc/loadavg) after."
