# A function for scripts on one Soft-RoCE device, rxe0: `signalled CASE SIGNAL RANKS ARGUMENTS` sends a signal to rank 2 of a job in the
# middle of large operations, of `perf all_reduce` with these further arguments. It prints what the other ranks said, and after how many
# milliseconds all of them had named rank 2. That time is
# printed and not checked, as an emulated machine on a busy host runs late.
signalled() {
    signal=$2 ranks=$3
    echo "case: $1"
    shift 3
    ALLSTREAM_LINK=rdma timeout 60 "$ALLSTREAM" run -n "$ranks" --on-failure keep -- \
        sh -c 'test "$RANK" != 2 || echo $$ >/dev/shm/rank2; exec "$0" "$@"' \
        "$ALLSTREAM" perf all_reduce --sizes 4M -n 100000 -w 1 "$@" >/dev/shm/said 2>&1 &
    job=$!
    while [ ! -s /dev/shm/rank2 ]; do sleep 0.1; done
    rank2=$(cat /dev/shm/rank2)
    rm /dev/shm/rank2
    # Waits until data moves.
    read -r before </sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts
    now=$before
    while [ "$now" -lt $((before + 3000)) ] && kill -0 "$job" 2>/dev/null; do
        sleep 0.1
        read -r now </sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts
    done
    begun=$(date +%s%3N)
    kill "-$signal" "$rank2"
    rank=0
    while [ "$rank" -lt "$ranks" ]; do
        while [ "$rank" != 2 ] && ! grep -q "^\[$rank\] allstream: rank 2 was lost" /dev/shm/said && kill -0 "$job" 2>/dev/null; do sleep 0.05; done
        rank=$((rank + 1))
    done
    echo "told after $(($(date +%s%3N) - begun)) ms"
    if [ "$signal" = STOP ]; then kill -KILL "$rank2" || true; fi
    wait "$job" || true
    grep '^\[.\] allstream: ' /dev/shm/said || cat /dev/shm/said
    rdma resource show
}

