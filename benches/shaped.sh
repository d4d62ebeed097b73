#!/usr/bin/env bash
# All-reduce between network namespaces whose lines are shaped, beside what the simulator says. Writes Markdown.
#   benches/shaped.sh [RANKS...]             default: 2 4 8. Needs root, ip and tc, and nothing of the host's network:
#                                            the ranks' namespaces, and one that is the switch, go when it ends.
#   RATE=1gbit BURST=10kb GSO=8192           of each line, each way; GSO: the most bytes of a packet. Packets that outgrow
#                                            the burst are cut up by tbf, which cost half the line here.
#   CONGESTION=reno                          one that the host allows in namespaces. BBR paces unshaped lines.
#   SIZES=65536,1048576 ALGOS=ring,direct    bytes of each rank
set -euo pipefail
cd "$(dirname "$0")/.."
ranks=${*:-2 4 8}
rate=${RATE:-1gbit} burst=${BURST:-10kb} gso=${GSO:-8192} congestion=${CONGESTION:-reno}
sizes=${SIZES:-65536,1048576,16777216}
algos=${ALGOS:-ring,direct,recursive_doubling,halving_doubling,double_binary_tree,naive,auto}
me=as$$ work=$(mktemp -d) most=$(printf '%s\n' $ranks | sort -n | tail -n 1)

cleanup() {
    set +e
    trap '' INT TERM
    for net in $(ip netns list | cut -d' ' -f1 | grep -E "^$me(sw|r[0-9]+)$"); do
        # Only what was started here can be in there.
        kill $(ip netns pids "$net") 2>/dev/null
        ip netns del "$net"
    done
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

cargo build --release --all-features --bin allstream --bench shaped --message-format json-render-diagnostics \
    >"$work/build"
program() { sed -n "s/.*\"kind\":\[\"$1\"\].*\"executable\":\"\([^\"]*\)\".*/\1/p" "$work/build" | tail -n 1; }
bench=$(program bench) allstream=$(program bin)

# The lines: a switch (a bridge in a namespace of its own), and one veth to it from each rank's namespace.
ip netns add "${me}sw"
ip -n "${me}sw" link add sw type bridge stp_state 0
ip -n "${me}sw" link set sw up
for r in $(seq 0 $((most - 1))); do
    ip netns add "${me}r$r"
    ip link add line netns "${me}r$r" type veth peer name "to$r" netns "${me}sw"
    ip -n "${me}sw" link set "to$r" master sw up
    ip -n "${me}r$r" addr add "10.0.0.$((r + 1))/24" dev line
    ip -n "${me}r$r" link set lo up
    ip -n "${me}r$r" link set line up
    ip -n "${me}r$r" link set line gso_max_size "$gso"
    ip netns exec "${me}r$r" sysctl -qw "net.ipv4.tcp_congestion_control=$congestion"
done
# Both ways: what a rank sends at its end, what it receives at the switch's.
shape() {
    local r
    for r in $(seq 0 $((most - 1))); do
        tc -n "${me}r$r" qdisc "$1" dev line root ${2:+tbf rate $rate burst $burst latency 100ms}
        tc -n "${me}sw" qdisc "$1" dev "to$r" root ${2:+tbf rate $rate burst $burst latency 100ms}
    done
}
line() {
    timeout 60 ip netns exec "${me}r0" "$bench" line listen 10.0.0.1:29700 &
    timeout 60 ip netns exec "${me}r1" "$bench" line 10.0.0.1:29700
    wait $!
}
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
line >"$work/line"
sed 's/^/shaped /' "$work/line" >&2
for n in $ranks; do
    echo "n=$n, shaped" >&2
    measure "$n" | sed 's/^/shaped /' >>"$work/all"
done
echo "line after: $(line | tr '\n' ' ')" >&2
shape del
echo "unshaped: $(line | tee "$work/open" | tr '\n' ' ')" >&2
for n in $ranks; do
    echo "n=$n, unshaped" >&2
    measure "$n" | sed 's/^/open /' >>"$work/all"
done

value() { sed -n "s/^.*$1=\([0-9.]*\).*/\1/p" "${2:-$work/line}"; }
alpha=$(value latency_us) beta=$(value bandwidth)
simulated() {
    "$allstream" sim all_reduce -n "$n" -b "$bytes" --alpha "$(awk "BEGIN { printf \"%d\", $alpha * 1000 }")ns" \
        --beta "${beta}B/s" --json "$@" | sed -n 's/.*"seconds":\([0-9.e-]*\).*/\1/p'
}
# What no all-reduce can beat: 2(n-1)/n of the bytes, at the rate that tbf was given.
bits() { awk -v r="$rate" 'BEGIN { m = r ~ /gbit/ ? 1e9 : r ~ /mbit/ ? 1e6 : r ~ /kbit/ ? 1e3 : 1; printf "%.0f", r * m }'; }
echo "All-reduce, f32, sum, out of place, one at a time after a barrier; microseconds, the median of the slowest rank's"
echo "times (least to most). $(nproc) cores, Linux $(uname -r), load $began before and $(cut -d' ' -f1-2 /proc/loadavg) after, $(date -u +%F)."
echo
echo "A raw TCP line, $rate, burst $burst, $congestion, packets of $gso: latency $alpha us, $beta bytes a second, 64 KB in $(value 64K_us) us;"
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
