# Functions for scripts that need Soft-RoCE devices: rxe0, and rxe1 beside it.

# `soft_roce NUMBER` makes a device on an interface of its own, with room for the largest packets.
soft_roce() {
    ip link add "rd$1" type dummy
    ip addr add "10.9.$1.1/24" dev "rd$1"
    ip link set "rd$1" mtu 4200 up
    rdma link add "rxe$1" type rxe netdev "rd$1"
}

# `counters NUMBER NAME...` prints a line with the name and the count of each of these counters of a device.
counters() {
    device=rxe$1
    shift
    for name in "$@"; do
        read -r count <"/sys/class/infiniband/$device/ports/1/hw_counters/$name" || return
        echo "$name $count"
    done
}

