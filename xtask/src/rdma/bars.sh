# How fast the RDMA link is over Soft-RoCE, compared with perftest and TCP: `cargo xtask rdma --bars`. Each line that this prints is a name
# and a figure, and xtask makes a table of the medians over rounds. $ALLSTREAM is the command, built as a release.

set -e
export ALLSTREAM_TRACE_DIR=off
ip link set lo up
soft_roce 0

# Prints a name and the figure that a command prints. A command that fails, or that prints no figure, ends the script, which says what has failed.
figure() {
    what=$1
    shift
    ended=0
    value=$("$@") || ended=$?
    case $value in
    '' | *[!0-9.]*) found="no figure, but '$value'" ;;
    *) found='' ;;
    esac
    if [ "$ended" != 0 ] || [ "$found" ]; then
        echo "$what failed: $* ended with $ended${found:+ and printed $found}; it has said:" >&2
        cat "$TMPDIR/said" >&2
        exit 1
    fi
    echo "$what $value"
}

# A figure of perftest's last line: column 4 of a bandwidth test is the average in MiB/s, column 5 of a latency test the typical one in us.
perftest() {
    tool=$1 column=$2 client=0
    shift 2
    "$tool" -d rxe0 "$@" >/dev/null 2>&1 &
    server=$!
    sleep 1
    "$tool" -d rxe0 "$@" 127.0.0.1 >"$TMPDIR/said" 2>&1 || client=$?
    # A server that no client comes to would wait for ever.
    if [ "$client" != 0 ]; then kill "$server" 2>/dev/null || true; fi
    wait "$server" || true
    awk -v column="$column" '$1 ~ /^[0-9]+$/ { found = $column } END { print found }' "$TMPDIR/said"
    return "$client"
}

# Microseconds of an operation in place, or out of place if it has no form in place.
perf() {
    "$ALLSTREAM" perf "$@" -w 2 -c 0 >"$TMPDIR/said" 2>&1 || return
    sed 's/ -1/ -1 /; s|N/A\([0-9]\)|N/A \1|g' "$TMPDIR/said" | awk '$1 ~ /^[0-9]+$/ { found = $10 == "N/A" ? $6 : $10 } END { print found }'
}

# Prints what the device has had to do twice, behind this word.
retries() {
    counts=$(counters 0 completer_retry_err rcvd_rnr_err send_rnr_err)
    echo "$counts" | sed "s/^/$1 /"
}

for round in 1 2 3 4 5; do
    figure ib_write_bw perftest ib_write_bw 4 -s 4194304 -n 20
    figure broadcast_4M perf broadcast -N 2 --link rdma --sizes 4M -n 8
    figure ib_write_bw_one_at_a_time perftest ib_write_bw 4 -s 4194304 -n 20 -t 1
    figure broadcast_4M_alloc perf broadcast -N 2 --link rdma --sizes 4M -n 8 --alloc arena
    figure ib_read_bw perftest ib_read_bw 4 -s 4194304 -n 20
    figure ib_write_bw_both perftest ib_write_bw 4 -b -s 4194304 -n 20
    figure all_reduce_16M perf all_reduce -N 2 --link rdma --sizes 16M -n 4
    figure all_reduce_16M_alloc perf all_reduce -N 2 --link rdma --sizes 16M -n 4 --alloc arena
    figure all_reduce_16M_tcp perf all_reduce -N 2 --link tcp --sizes 16M -n 4
    figure all_reduce_4M_4_ranks perf all_reduce -N 4 --link rdma --sizes 4M -n 4
    figure all_reduce_4M_4_ranks_tcp perf all_reduce -N 4 --link tcp --sizes 4M -n 4
    figure ib_write_lat perftest ib_write_lat 5 -s 8 -n 500
    figure send_recv_8 perf send_recv -N 2 --link rdma --sizes 8 -n 500
    figure send_recv_8_tcp perf send_recv -N 2 --link tcp --sizes 8 -n 500
    figure send_recv_8_shm perf send_recv -N 2 --link shm --sizes 8 -n 500
done
retries before
figure all_reduce_8 perf all_reduce -N 2 --link rdma --sizes 8 -n 2500 >/dev/null
retries after

# By two ports, beside the first alone.
soft_roce 1
for round in 1 2 3 4 5; do
    for what in 'broadcast 4K' 'broadcast 256K' 'broadcast 1M' 'broadcast 4M' 'broadcast 4M --alloc arena' 'all_reduce 16M'; do
        set -- $what
        collective=$1 size=$2
        shift 2
        name=$(echo "${collective}_$size${1:+_alloc}")
        export ALLSTREAM_RDMA_DEVICE=rxe0
        figure "${name}_one_port" perf "$collective" -N 2 --link rdma --sizes "$size" -n 8 "$@"
        export ALLSTREAM_RDMA_DEVICE=
        figure "${name}_two_ports" perf "$collective" -N 2 --link rdma --sizes "$size" -n 8 "$@"
    done
done
