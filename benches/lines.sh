# Makes network namespaces whose lines are shaped, for scripts that source this file. Needs root, ip and tc; leaves the host's network alone.
#   RATE=1gbit BURST=10kb GSO=8192           of each line, each way; GSO: the most bytes of a packet. tbf cuts up packets that
#                                            are larger than the burst, which cost half of the rate here.
#   CONGESTION=reno                          a congestion control that the host allows in namespaces. BBR would pace unshaped lines, too.
rate=${RATE:-1gbit} burst=${BURST:-10kb} gso=${GSO:-8192} congestion=${CONGESTION:-reno}
me=as$$ work=$(mktemp -d)

# Kills what runs in the namespaces, and removes them, at the end of the script.
cleanup() {
    set +e
    trap '' INT TERM
    for net in $(ip netns list | cut -d' ' -f1 | grep -E "^$me(sw|r[0-9]+)$"); do
        # Only processes that this script has started can be in there.
        kill $(ip netns pids "$net") 2>/dev/null
        ip netns del "$net"
    done
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# make_lines RANKS: a switch (a bridge in a namespace of its own), and one veth to it from each rank's namespace, ${me}r0 and so on.
make_lines() {
    local r
    lines=$1
    ip netns add "${me}sw"
    ip -n "${me}sw" link add sw type bridge stp_state 0
    ip -n "${me}sw" link set sw up
    for r in $(seq 0 $((lines - 1))); do
        ip netns add "${me}r$r"
        ip link add line netns "${me}r$r" type veth peer name "to$r" netns "${me}sw"
        ip -n "${me}sw" link set "to$r" master sw up
        ip -n "${me}r$r" addr add "10.0.0.$((r + 1))/24" dev line
        ip -n "${me}r$r" link set lo up
        ip -n "${me}r$r" link set line up
        ip -n "${me}r$r" link set line gso_max_size "$gso"
        ip netns exec "${me}r$r" sysctl -qw "net.ipv4.tcp_congestion_control=$congestion"
    done
}

# shape add tbf | shape del: shapes the lines, or stops it; what a rank sends at the rank's end, what it receives at the switch's end.
shape() {
    local r
    for r in $(seq 0 $((lines - 1))); do
        tc -n "${me}r$r" qdisc "$1" dev line root ${2:+tbf rate $rate burst $burst latency 100ms}
        tc -n "${me}sw" qdisc "$1" dev "to$r" root ${2:+tbf rate $rate burst $burst latency 100ms}
    done
}

# line PROGRAM: what a TCP connection between the first two ranks can do, by `shaped line` of benches/shaped.rs.
line() {
    timeout 60 ip netns exec "${me}r0" "$1" line listen 10.0.0.1:29700 &
    timeout 60 ip netns exec "${me}r1" "$1" line 10.0.0.1:29700
    wait $!
}

# value NAME FILE: a number that `line` has printed.
value() { sed -n "s/^.*$1=\([0-9.]*\).*/\1/p" "$2"; }

# program KIND [FILE]: the path of the last program of this kind (bin, bench, example) in a file of cargo's messages.
program() { sed -n "s/.*\"kind\":\[\"$1\"\].*\"executable\":\"\([^\"]*\)\".*/\1/p" "${2:-$work/build}" | tail -n 1; }
