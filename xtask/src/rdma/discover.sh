# What `allstream info` says of Soft-RoCE: each `case` is followed by what the command printed. $ALLSTREAM is the command.
# rdma.rs checks what was printed.

set -e
case_of() {
    echo "case: $1"
    shift
    "$@" | sed -n '/^RDMA /,$p'
}

ip link set lo up
case_of none "$ALLSTREAM" info

# An MTU of 4200 has room for the largest packets of RDMA.
ip link add rd0 type dummy
ip addr add 10.9.0.1/24 dev rd0
ip link set rd0 mtu 4200 up
rdma link add rxe0 type rxe netdev rd0
case_of one "$ALLSTREAM" info
echo "case: table"
for number in 0 1 2 3 4 5 6 7; do
    port=/sys/class/infiniband/rxe0/ports/1
    # An empty entry has no kind: reading it fails.
    if { read -r kind <"$port/gid_attrs/types/$number"; } 2>/dev/null; then
        read -r address <"$port/gids/$number"
        echo "$number $kind $address"
    fi
done

case_of forced env ALLSTREAM_RDMA_GID=0 "$ALLSTREAM" info
case_of absent env ALLSTREAM_RDMA_GID=77 "$ALLSTREAM" info
case_of unlocked setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock prlimit --memlock=65536 "$ALLSTREAM" info

ip link add rd1 type dummy
ip addr add 10.8.0.1/24 dev rd1
ip link set rd1 mtu 1500 up
rdma link add rxe1 type rxe netdev rd1
case_of two env ALLSTREAM_INTERFACE==rd1 "$ALLSTREAM" info
case_of named env ALLSTREAM_RDMA_DEVICE=rxe0 "$ALLSTREAM" info

ip link set rd0 down
case_of down env ALLSTREAM_RDMA_DEVICE=rxe0 "$ALLSTREAM" info
