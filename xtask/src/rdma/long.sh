# What takes long over Soft-RoCE: ten thousand operations by one device, which counts what it had to do twice, and a hundred jobs of three ranks by one or
# two devices, of which one rank is killed in the middle of large operations. Each `case` is followed by what it printed. $ALLSTREAM is the command.

set -e
export ALLSTREAM_TRACE_DIR=off
ip link set lo up
soft_roce 0

echo "case: operations"
# Half of them in place, half of them not.
"$ALLSTREAM" perf all_reduce -N 2 --link rdma --sizes 8 -n 5000 -w 1 2>&1 || echo "ended with $?"
counters 0 rcvd_rnr_err send_rnr_err completer_retry_err

soft_roce 1
kill=1
while [ "$kill" -le 100 ]; do
    # Half of them while the device reads and writes buffers from `Comm::alloc` where they lie.
    if [ $((kill % 2)) = 0 ]; then set -- --alloc arena; else set --; fi
    # Half of these by one port.
    if [ $((kill % 4)) -lt 2 ]; then export ALLSTREAM_RDMA_DEVICE=rxe0; else export ALLSTREAM_RDMA_DEVICE=; fi
    signalled "kill $kill" KILL 3 "$@"
    kill=$((kill + 1))
done
