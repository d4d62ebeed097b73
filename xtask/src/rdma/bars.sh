# How fast the RDMA link is over Soft-RoCE, compared with perftest and TCP: `cargo xtask rdma --bars`. Each line that this prints is a name
# and a figure, and xtask makes a table of the medians over rounds. $ALLSTREAM is the command, built as a release.

set -e
export ALLSTREAM_TRACE_DIR=off
ip link set lo up
soft_roce

# A figure of perftest's last line: column 4 of a bandwidth test is the average in MiB/s, column 5 of a latency test the typical one in us.
perftest() {
    tool=$1 column=$2
    shift 2
    "$tool" -d rxe0 "$@" >/dev/null 2>&1 &
    server=$!
    sleep 1
    "$tool" -d rxe0 "$@" 127.0.0.1 2>/dev/null | awk -v column="$column" '$1 ~ /^[0-9]+$/ { found = $column } END { print found }'
    wait "$server" || true
}

# Microseconds of an operation in place, or out of place if it has no form in place.
perf() {
    "$ALLSTREAM" perf "$@" -w 2 -c 0 2>/dev/null | sed 's/ -1/ -1 /; s|N/A\([0-9]\)|N/A \1|g' | awk '$1 ~ /^[0-9]+$/ { found = $10 == "N/A" ? $6 : $10 } END { print found }'
}

counters() {
    for name in completer_retry_err rcvd_rnr_err send_rnr_err; do
        read -r count <"/sys/class/infiniband/rxe0/ports/1/hw_counters/$name"
        echo "$1 $name $count"
    done
}

for round in 1 2 3 4 5; do
    echo "ib_write_bw $(perftest ib_write_bw 4 -s 4194304 -n 20)"
    echo "broadcast_4M $(perf broadcast -N 2 --link rdma --sizes 4M -n 8)"
    echo "ib_write_bw_one_at_a_time $(perftest ib_write_bw 4 -s 4194304 -n 20 -t 1)"
    echo "broadcast_4M_alloc $(perf broadcast -N 2 --link rdma --sizes 4M -n 8 --alloc arena)"
    echo "ib_read_bw $(perftest ib_read_bw 4 -s 4194304 -n 20)"
    echo "ib_write_bw_both $(perftest ib_write_bw 4 -b -s 4194304 -n 20)"
    echo "all_reduce_16M $(perf all_reduce -N 2 --link rdma --sizes 16M -n 4)"
    echo "all_reduce_16M_alloc $(perf all_reduce -N 2 --link rdma --sizes 16M -n 4 --alloc arena)"
    echo "all_reduce_16M_tcp $(perf all_reduce -N 2 --link tcp --sizes 16M -n 4)"
    echo "all_reduce_4M_4_ranks $(perf all_reduce -N 4 --link rdma --sizes 4M -n 4)"
    echo "all_reduce_4M_4_ranks_tcp $(perf all_reduce -N 4 --link tcp --sizes 4M -n 4)"
    echo "ib_write_lat $(perftest ib_write_lat 5 -s 8 -n 500)"
    echo "send_recv_8 $(perf send_recv -N 2 --link rdma --sizes 8 -n 500)"
    echo "send_recv_8_tcp $(perf send_recv -N 2 --link tcp --sizes 8 -n 500)"
    echo "send_recv_8_shm $(perf send_recv -N 2 --link shm --sizes 8 -n 500)"
done
counters before
perf all_reduce -N 2 --link rdma --sizes 8 -n 2500 >/dev/null
counters after
