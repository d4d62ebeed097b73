#!/usr/bin/env bash
# Two hosts, over TCP and over RDMA: a report with tables for docs/cluster.md. Usage: two_hosts.sh HOST HOST > report.md
#   RANKS=1                  ranks on each host
#   SIZES=8,4K,64K,1M,16M    bytes
#   ALLSTREAM=...            the command, at the same path on both hosts; by default the one that cargo has built in release
#   REACH="ssh -o BatchMode=yes"   what runs a command on a host, as `allstream run --ssh` takes it
set -euo pipefail

if [ $# -ne 2 ]; then
    echo "two_hosts.sh: expected two hosts, found $# arguments: two_hosts.sh node0 node1 > report.md" >&2
    exit 2
fi
ranks=${RANKS:-1} sizes=${SIZES:-8,4K,64K,1M,16M} reach=${REACH:-ssh -o BatchMode=yes}
root=$(cd "$(dirname "$0")/.." && pwd)
# cargo takes a relative target folder to start where it is called: here, at the root.
target=$(cd "$root" && realpath -m "${CARGO_TARGET_DIR:-target}")
allstream=${ALLSTREAM:-$target/release/allstream}

# Runs a command on a host. If it fails, the report says so, and the script goes on.
on() {
    local host=$1
    shift
    # The words of $reach are a command and its arguments.
    $reach "$host" "$@" 2>&1 || echo "(ended with $?)"
}

# The hardware counters of a host's RDMA cards that are not zero.
counters() {
    on "$1" 'grep -H -v "^0$" /sys/class/infiniband/*/ports/*/hw_counters/* 2>/dev/null || true'
}

table() {
    local link=$1 collective=$2
    printf '\n### %s over %s\n\n```text\n' "$collective" "$link"
    ALLSTREAM_LINK=$link timeout 300 "$allstream" run --ssh "$reach" --hosts "$first:$ranks,$second:$ranks" --no-prefix -- \
        "$allstream" perf "$collective" --sizes "$sizes" 2>&1 || echo "(ended with $?)"
    printf '```\n'
}

export NO_COLOR=1
first=$1 second=$2
printf '# %s and %s, %s ranks each, %s\n' "$first" "$second" "$ranks" "$(date -u +%Y-%m-%d)"
for host in "$first" "$second"; do
    printf '\n## %s\n\n```text\n' "$host"
    on "$host" 'uname -srm; nproc'
    on "$host" "$allstream" info
    printf '```\n'
done

printf '\n## Tables\n'
before=$(for host in "$first" "$second"; do counters "$host"; done)
for collective in all_reduce all_gather pingpong; do
    # It runs between ranks 0 and 1, which are on one host unless each host has one rank.
    if [ "$collective" = pingpong ] && [ "$ranks" -ne 1 ]; then continue; fi
    for link in tcp rdma; do table "$link" "$collective"; done
done
after=$(for host in "$first" "$second"; do counters "$host"; done)

printf '\n## Counters of the cards that changed (before: `<`, after: `>`)\n\n```text\n'
diff <(echo "$before") <(echo "$after") || true
printf '```\n'
