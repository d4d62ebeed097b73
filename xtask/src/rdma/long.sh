# What takes long over one Soft-RoCE device: ten thousand operations, between which the device counts what it had to do twice, and a hundred jobs of three
# ranks, of which one rank is killed in the middle of large operations. Each `case` is followed by what it printed. $ALLSTREAM is the command.

set -e
export ALLSTREAM_TRACE_DIR=off
ip link set lo up
ip link add rd0 type dummy
ip addr add 10.9.0.1/24 dev rd0
ip link set rd0 mtu 4200 up
rdma link add rxe0 type rxe netdev rd0

echo "case: operations"
# Half of them in place, half of them not.
"$ALLSTREAM" perf all_reduce -N 2 --link rdma --sizes 8 -n 5000 -w 1 2>&1 || echo "ended with $?"
for name in rcvd_rnr_err send_rnr_err completer_retry_err; do
    read -r count <"/sys/class/infiniband/rxe0/ports/1/hw_counters/$name"
    echo "$name $count"
done

kill=1
while [ "$kill" -le 100 ]; do
    signalled "kill $kill" KILL 3
    kill=$((kill + 1))
done
