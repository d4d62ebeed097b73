# Ranks on two machines that a cable connects, each with a Soft-RoCE device: ranks 0 and 1 on machine 0, ranks 2 and 3 on machine 1. Both
# machines run this script; $MACHINE is 0 or 1. No option asks for RDMA: ranks find it, try it, and take it. The name of each `case` is
# followed by what the case printed. $ALLSTREAM is the command.

set -e
export ALLSTREAM_TRACE_DIR=off ALLSTREAM_HEARTBEAT_TIMEOUT=4
export WORLD_SIZE=4 MASTER_ADDR=10.7.0.1 ALLSTREAM_TOKEN=between-two-machines
counter=/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts
ip link set lo up
ip addr add "10.7.0.$((MACHINE + 1))/24" dev eth0
ip link set eth0 mtu 4200 up
rdma link add rxe0 type rxe netdev eth0

# Starts the two ranks of this machine, whose output goes to files.
start() {
    export MASTER_PORT=$1
    shift
    for rank in $((2 * MACHINE)) $((2 * MACHINE + 1)); do
        RANK=$rank LOCAL_RANK=$((rank % 2)) LOCAL_WORLD_SIZE=2 timeout 120 "$ALLSTREAM" perf all_reduce "$@" -w 1 >"/dev/shm/said$rank" 2>&1 &
    done
}

echo "case: found"
start 29500 --sizes 8,4K,1M -n 2
wait
cat /dev/shm/said*

echo "case: off"
rm /dev/shm/said*
start 29600 --sizes 1M -n 100000
if [ "$MACHINE" = 1 ]; then
    # As soon as data moves, this machine is switched off.
    read -r before <"$counter"
    now=$before
    while [ "$now" -lt $((before + 3000)) ] && kill -0 "$!" 2>/dev/null; do
        sleep 0.1
        read -r now <"$counter"
    done
    echo o >/proc/sysrq-trigger
    sleep 60
fi
wait
for rank in 0 1; do
    sed "s/^/rank $rank: /" "/dev/shm/said$rank"
done
rdma resource show
