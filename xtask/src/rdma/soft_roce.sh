# A function for scripts that need one Soft-RoCE device, rxe0: makes it on an interface of its own, with room for the largest packets.
soft_roce() {
    ip link add rd0 type dummy
    ip addr add 10.9.0.1/24 dev rd0
    ip link set rd0 mtu 4200 up
    rdma link add rxe0 type rxe netdev rd0
}

