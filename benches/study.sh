#!/usr/bin/env bash
# The study of examples/14_study between network namespaces whose lines are shaped (lines.sh has RATE, BURST, GSO, CONGESTION).
#   benches/study.sh [OPTIONS...]            of 14_study, such as --workers 1,2,4,8 --computing sleep --simulate 16,32
#   HOSTS=8                                  namespaces, at least as many as the most workers
set -euo pipefail
cd "$(dirname "$0")/.."
. benches/lines.sh
cargo build --release --bench shaped --message-format json-render-diagnostics >"$work/bench"
cargo build --release --example 14_study --message-format json-render-diagnostics >"$work/example"
bench=$(program bench "$work/bench") study=$(program example "$work/example")
make_lines "${HOSTS:-8}"
shape add tbf
began=$(cut -d' ' -f1-2 /proc/loadavg)
line "$bench" >"$work/line"
alpha=$(value latency_us "$work/line") beta=$(value bandwidth "$work/line")
echo "A raw TCP line, $rate, burst $burst, $congestion, packets of $gso: latency $alpha us, $beta bytes a second. $(nproc) cores, $(date -u +%F)."
ip netns exec "${me}r0" "$study" --listen 10.0.0.1 --netns "${me}r" --latency-us "$alpha" --bandwidth "$beta" "$@"
echo "Load $began before, $(cut -d' ' -f1-2 /proc/loadavg) after."
