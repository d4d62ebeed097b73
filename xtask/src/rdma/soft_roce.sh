# Functions for scripts that need one Soft-RoCE device, rxe0.

# Where the device counts what its hardware would.
hw_counters=/sys/class/infiniband/rxe0/ports/1/hw_counters

# Makes the device on an interface of its own, with room for the largest packets.
soft_roce() {
    ip link add rd0 type dummy
    ip addr add 10.9.0.1/24 dev rd0
    ip link set rd0 mtu 4200 up
    rdma link add rxe0 type rxe netdev rd0
}

# Prints a line with the name and the count of each of these counters.
counters() {
    for name in "$@"; do
        read -r count <"$hw_counters/$name" || return
        echo "$name $count"
    done
}

