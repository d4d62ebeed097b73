# Two hosts on one machine, told apart by ALLSTREAM_HOST_ID: each has a Soft-RoCE device of its own, at one end of a cable (veth). No option
# asks for RDMA: ranks find it, try it, and use it or not. Each `case` is followed by what the command printed. $ALLSTREAM is the command.

set -e
export ALLSTREAM_TRACE_DIR=off ALLSTREAM_INTERFACE==lo
ip link set lo up
ip link add veth0 type veth peer name veth1
ip addr add 10.8.0.1/24 dev veth0
ip addr add 10.8.0.2/24 dev veth1
for end in veth0 veth1; do
    ip link set "$end" mtu 4200 up
    echo 1 >"/proc/sys/net/ipv4/conf/$end/accept_local"
    echo 0 >"/proc/sys/net/ipv4/conf/$end/rp_filter"
done
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
# Both addresses are this machine's: without these rules packets between them would not go through the cable.
ip rule add pref 10 iif veth0 lookup local
ip rule add pref 11 iif veth1 lookup local
ip rule add pref 20 oif veth0 lookup 100
ip rule add pref 21 oif veth1 lookup 101
ip rule add pref 22 from 10.8.0.1 to 10.8.0.2 lookup 100
ip rule add pref 23 from 10.8.0.2 to 10.8.0.1 lookup 101
ip route add 10.8.0.2 dev veth0 table 100
ip route add 10.8.0.1 dev veth1 table 101
ip rule add pref 30 lookup local
ip rule del pref 0
read -r mac0 </sys/class/net/veth0/address
read -r mac1 </sys/class/net/veth1/address
ip neigh replace 10.8.0.2 lladdr "$mac1" dev veth0 nud permanent
ip neigh replace 10.8.0.1 lladdr "$mac0" dev veth1 nud permanent
rdma link add rxe0 type rxe netdev veth0
rdma link add rxe1 type rxe netdev veth1

# Four ranks, two on each host.
two_hosts() {
    echo "case: $1"
    timeout 100 "$ALLSTREAM" run -n 4 -- sh -c \
        'host=$((RANK / 2)); export ALLSTREAM_HOST_ID=host$host ALLSTREAM_RDMA_DEVICE=rxe$host; exec "$0" "$@"' \
        "$ALLSTREAM" perf all_reduce --sizes "$2" -n 2 -w 1 2>&1 || echo "ended with $?"
    for device in rxe0 rxe1; do
        read -r count <"/sys/class/infiniband/$device/ports/1/hw_counters/sent_pkts"
        echo "$device sent $count packets"
    done
}

two_hosts found 8,4K,1M
tc qdisc add dev veth0 root netem loss 1%
two_hosts lossy 8,64K
tc qdisc replace dev veth0 root netem loss 100%
two_hosts cut 8,4K
