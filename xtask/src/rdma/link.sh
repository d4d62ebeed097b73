# The link over RDMA, on one Soft-RoCE device: each `case` is followed by what it printed. $ALLSTREAM is the command.
# rdma.rs checks what the cases printed. A `perf` below that fails, or that its time limit ends (code 124), adds a line `ended with`.

set -e
export ALLSTREAM_TRACE_DIR=off ALLSTREAM_HEARTBEAT_TIMEOUT=4
ip link set lo up

echo "case: missing"
ALLSTREAM_LINK=rdma timeout 60 "$ALLSTREAM" run -n 2 -- "$ALLSTREAM" perf all_reduce --sizes 8 -n 1 -w 1 2>&1 || echo "ended with $?"

soft_roce 0

# Every collective; `perf` compares the results with its oracle.
for ranks in 2 4; do
    for collective in all_reduce reduce broadcast all_gather reduce_scatter all_to_all gather scatter scan exscan send_recv; do
        echo "case: $ranks $collective"
        timeout 60 "$ALLSTREAM" perf "$collective" -N "$ranks" --link rdma --sizes 8,4K,1M -n 2 -w 1 2>&1 || echo "ended with $?"
    done
done

# Buffers from `Comm::alloc`, which the device reads and writes where they lie.
for collective in all_reduce broadcast all_gather send_recv; do
    echo "case: 2 $collective in alloc"
    timeout 60 "$ALLSTREAM" perf "$collective" -N 2 --link rdma --alloc arena --sizes 8,64K,1M -n 2 -w 1 2>&1 || echo "ended with $?"
done

# Two ports side by side. The second one goes again, so that what follows is about one device.
soft_roce 1
for collective in all_reduce send_recv; do
    for where in user arena; do
        echo "case: 2 $collective by two ports, $where"
        timeout 60 "$ALLSTREAM" perf "$collective" -N 2 --link rdma --alloc "$where" --sizes 8,64K,1M -n 2 -w 1 2>&1 || echo "ended with $?"
    done
done
echo "case: second port"
counters 1 rdma_recvs
rdma resource show
rdma link delete rxe1

# Small packets: an MTU of 1500 has room for 1024 bytes of data, so a message is many packets.
echo "case: small packets"
ip link set rd0 mtu 1500
timeout 60 "$ALLSTREAM" perf all_reduce -N 2 --link rdma --sizes 1M -n 2 -w 1 2>&1 || echo "ended with $?"
ip link set rd0 mtu 4200

echo "case: counters"
counters 0 rcvd_rnr_err send_rnr_err retry_rnr_exceeded_err
rdma resource show

signalled killed KILL 4
signalled 'killed in alloc' KILL 4 --alloc arena
signalled stopped STOP 4
