#!/usr/bin/env bash
# Times all-reduce between network namespaces whose lines are shaped, beside what the simulator predicts. Writes Markdown.
#   benches/shaped.sh [RANKS...]             default: 2 4 8. Needs root, ip and tc; leaves the host's network alone: it makes
#                                            a namespace for each rank and one for the switch, and removes them at its end.
#   RATE, BURST, GSO, CONGESTION             of the lines: see lines.sh
#   SIZES=65536,1048576 ALGOS=ring,direct    bytes of each rank
set -euo pipefail
cd "$(dirname "$0")/.."
ranks=${*:-2 4 8}
sizes=${SIZES:-65536,1048576,16777216}
algos=${ALGOS:-ring,direct,recursive_doubling,halving_doubling,double_binary_tree,naive,auto}
most=$(printf '%s\n' $ranks | sort -n | tail -n 1)
. benches/lines.sh

cargo build --release --all-features --bin allstream --bench shaped --message-format json-render-diagnostics \
    >"$work/build"
bench=$(program bench) allstream=$(program bin)

make_lines "$most"
token=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
measure() { # RANKS
    local r pids=() ok=yes
    for r in $(seq 0 $(($1 - 1))); do
        RANK=$r WORLD_SIZE=$1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29600 ALLSTREAM_TOKEN=$token ALLSTREAM_LINK=tcp \
            ALLSTREAM_HOST_ID=$me-$r timeout 580 ip netns exec "${me}r$r" "$bench" rank "$sizes" "$algos" &
        pids+=($!)
    done
    for r in "${pids[@]}"; do wait "$r" || ok=; done
    [ -n "$ok" ]
}

began=$(cut -d' ' -f1-2 /proc/loadavg)
shape add tbf
line "$bench" >"$work/line"
sed 's/^/shaped /' "$work/line" >&2
for n in $ranks; do
    echo "n=$n, shaped" >&2
    measure "$n" | sed 's/^/shaped /' >>"$work/all"
done
echo "line after: $(line "$bench" | tr '\n' ' ')" >&2
shape del
echo "unshaped: $(line "$bench" | tee "$work/open" | tr '\n' ' ')" >&2
for n in $ranks; do
    echo "n=$n, unshaped" >&2
    measure "$n" | sed 's/^/open /' >>"$work/all"
done

alpha=$(value latency_us "$work/line") beta=$(value bandwidth "$work/line")
simulated() {
    "$allstream" sim all_reduce -n "$n" -b "$bytes" --alpha "$(awk "BEGIN { printf \"%d\", $alpha * 1000 }")ns" \
        --beta "${beta}B/s" --json "$@" | sed -n 's/.*"seconds":\([0-9.e-]*\).*/\1/p'
}
# What no all-reduce can beat: 2(n-1)/n of the bytes, at the rate that tbf was given.
bits() { awk -v r="$rate" 'BEGIN { m = r ~ /gbit/ ? 1e9 : r ~ /mbit/ ? 1e6 : r ~ /kbit/ ? 1e3 : 1; printf "%.0f", r * m }'; }
echo "All-reduce, f32, sum, out of place, one at a time after a barrier; microseconds, the median of the slowest rank's"
echo "times (least to most). $(nproc) cores, Linux $(uname -r), load $began before and $(cut -d' ' -f1-2 /proc/loadavg) after, $(date -u +%F)."
echo
echo "A raw TCP line, $rate, burst $burst, $congestion, packets of $gso: latency $alpha us, $beta bytes a second, 64 KB in $(value 64K_us "$work/line") us;"
echo "unshaped: latency $(value latency_us "$work/open") us, $(value bandwidth "$work/open") bytes a second, 64 KB in $(value 64K_us "$work/open") us."
for n in $ranks; do
    printf '\n### %s ranks\n\n' "$n"
    echo "| bytes | algorithm | measured | simulated | **measured / simulated** | in slices of 32 KB | **ratio** | not shaped | **measured / (2(n-1)/n bytes / rate)** |"
    echo "|---|---|---|---|---|---|---|---|---|"
    grep "^shaped all_reduce n=$n " "$work/all" | while read -r _ _ _ bytes algo is med min max; do
        bytes=${bytes#*=} algo=${algo#*=} is=${is#*=} med=${med#*=} min=${min#*=} max=${max#*=}
        open=$(sed -n "s/^open .* n=$n bytes=$bytes algo=$algo .*med_us=\([0-9.]*\).*/\1/p" "$work/all")
        sim=$(simulated --algo "$is") fine=$(simulated --algo "$is" --slice 32K)
        [ "$algo" = "$is" ] || algo="$algo ($is)"
        awk -v m="$med" -v lo="$min" -v hi="$max" -v s="$sim" -v f="$fine" -v o="$open" -v b="$bytes" -v a="$algo" -v n="$n" -v bits="$(bits)" 'BEGIN {
            least = 2 * (n - 1) / n * b * 8e6 / bits
            printf "| %d | %s | %.0f (%.0f to %.0f) | %.0f | %.2f | %.0f | %.2f | %.0f | %.2f |\n",
                b, a, m, lo, hi, s * 1e6, m / (s * 1e6), f * 1e6, m / (f * 1e6), o, m / least }'
    done
done
