//! Tests of the choice of ports, on hosts that are made up, and of the variables.

use std::net::{IpAddr, Ipv6Addr};

use allstream_sys::verbs::{GidType, LinkLayer, Mtu, PortState, Transport};
use rustix::thread::CpuSet;

use super::choose::{Rdma, choose};
use super::facts::{Device, Facts, Found, Gid, Interface, Locked, Port};
use super::read::{may_lock, may_run_near};
use super::wishes::Wishes;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn gid(index: u32, kind: GidType, address: &str, interface: u32) -> Gid {
    let address = match ip(address) {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    Gid { index, kind, address, interface }
}

/// The GIDs of a usual card on Ethernet, of interface 2: for its link-local address and an IPv4 address RoCE v1 and v2, for an IPv6 address v2.
fn usual() -> Vec<Gid> {
    let (v1, v2) = (GidType::ROCE_V1, GidType::ROCE_V2);
    vec![
        gid(0, v1, "fe80::1", 2),
        gid(1, v2, "fe80::1", 2),
        gid(2, v2, "2001:db8::1", 2),
        gid(3, v1, "10.0.0.1", 2),
        gid(4, v2, "10.0.0.1", 2),
    ]
}

fn ethernet(gids: Vec<Gid>) -> Found {
    let mtu = Mtu::BYTES_4096;
    Found {
        state: PortState::ACTIVE,
        layer: LinkLayer::ETHERNET,
        mtu,
        max_mtu: mtu,
        max_message: 1 << 30,
        rate: (2, 32),
        gids,
    }
}

fn infiniband() -> Found {
    let gids = vec![gid(0, GidType::IB, "fe80::2:c903:1", 0), gid(1, GidType::IB, "fe80::2:c903:9", 0)];
    Found { layer: LinkLayer::INFINIBAND, ..ethernet(gids) }
}

fn device(name: &str, ports: impl IntoIterator<Item = Found>) -> Device {
    let ports = (1..).zip(ports).map(|(number, port)| Port { number, found: Ok(port) });
    Device { name: name.into(), transport: Transport::IB, is_far: false, ports: Ok(ports.collect()) }
}

fn host(devices: impl IntoIterator<Item = Device>) -> Facts {
    let interface = |name: &str, index, own: &str| Interface { name: name.into(), index, ip: ip(own) };
    Facts {
        devices: devices.into_iter().collect(),
        unlisted: Vec::new(),
        has_device_files: true,
        locked: Locked::Unlimited,
        interfaces: vec![
            interface("eth2", 2, "10.0.0.1"),
            interface("eth2", 2, "2001:db8::1"),
            interface("eth2", 2, "fe80::1"),
            interface("eth3", 3, "10.3.0.1"),
            interface("eth3", 3, "2001:db8:3::1"),
            interface("eth0", 4, "192.168.1.1"),
        ],
    }
}

fn wishes(device: &str, gid: &str) -> Result<Wishes, String> {
    let said = |name: &str| match name {
        "ALLSTREAM_RDMA_DEVICE" => Some(device.to_owned()),
        "ALLSTREAM_RDMA_GID" => Some(gid.to_owned()),
        _ => None,
    };
    Wishes::from_lookup(said)
}

fn chosen_by(facts: &Facts, device: &str, gid: &str, near: &[&str]) -> Result<Rdma, String> {
    let near: Vec<IpAddr> = near.iter().map(|near| ip(near)).collect();
    choose("libibverbs.so.1", facts, &wishes(device, gid).unwrap(), &near)
}

fn chosen(facts: &Facts) -> Result<Rdma, String> {
    chosen_by(facts, "", "", &[])
}

/// The chosen ports, each with the index of its GID.
fn taken(rdma: &Rdma) -> Vec<String> {
    rdma.ports.iter().map(|port| format!("{}:{} {}", port.device, port.port, port.gid)).collect()
}

/// Why `what` was passed over.
fn why(rdma: &Rdma, what: &str) -> String {
    let found = rdma.passed_over.iter().find(|passed| passed.what == what);
    found.unwrap_or_else(|| panic!("{what}: {:?}", rdma.passed_over)).why.clone()
}

#[track_caller]
fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
}

#[test]
fn of_a_usual_card_the_address_of_ipv4_and_roce_v2_is_taken_and_the_others_are_told() {
    let rdma = chosen(&host([device("mlx5_0", [ethernet(usual())])])).unwrap();
    let text = "mlx5_0 port 1 active, RoCE v2, GID 4 (10.0.0.1 of eth2), MTU 4096";
    assert_eq!((rdma.ports.len(), rdma.ports[0].to_string()), (1, text.to_owned()));
    let told = [
        ("mlx5_0 port 1 GID 0, 3", "not of RoCE v2"),
        ("mlx5_0 port 1 GID 1", "link-local address"),
        ("mlx5_0 port 1 GID 2", "IPv4 come first"),
    ];
    for (what, because) in told {
        says(&why(&rdma, what), &[because]);
    }
    assert_eq!(rdma.passed_over.len(), told.len());
}

#[test]
fn the_interface_at_which_the_others_reach_this_host_comes_before_the_family() {
    let v2 = GidType::ROCE_V2;
    let gids = || vec![gid(0, v2, "10.0.0.1", 2), gid(1, v2, "2001:db8:3::1", 3), gid(2, v2, "10.3.0.1", 3)];
    let with = |gids: Vec<Gid>, near: &[&str]| {
        let facts = host([device("mlx5_0", [ethernet(gids)])]);
        let rdma = chosen_by(&facts, "", "", near).unwrap();
        let because: Vec<String> = rdma.passed_over.iter().map(ToString::to_string).collect();
        (rdma.ports[0].gid, because.join("; "))
    };
    // Nothing is known of the other ranks, or they reach this host at an interface that is not the card's.
    assert_eq!(with(gids(), &[]).0, 0);
    assert_eq!(with(gids(), &["192.168.1.1"]).0, 0);
    let (index, because) = with(gids(), &["10.3.0.1"]);
    assert_eq!(index, 2);
    says(&because, &["GID 0: not of the interface at which", "GID 1: an address of IPv6"]);
    // They reach it by IPv6, so an IPv4 address may lead nowhere.
    let (index, because) = with(gids(), &["2001:db8:3::1"]);
    assert_eq!(index, 1);
    says(&because, &["GID 2: not the address at which"]);
    // They reach it at the card's interface, but at an address that the card does not have.
    assert_eq!(with(gids()[..2].to_vec(), &["10.3.0.1"]).0, 1);
    // An address of another network namespace comes last, whatever number its interface has there.
    let foreign = vec![gid(0, v2, "10.9.0.1", 2), gid(1, v2, "2001:db8::1", 2)];
    let (index, because) = with(foreign, &[]);
    assert_eq!(index, 1);
    says(&because, &["GID 0: of no interface that this process sees"]);
    // Of two equally good addresses, the one with the lower index is taken.
    let twice = vec![gid(5, v2, "10.0.0.1", 2), gid(3, v2, "10.0.0.1", 2)];
    let (index, because) = with(twice, &[]);
    assert_eq!(index, 3);
    says(&because, &["GID 5: as good as the one taken"]);
}

#[test]
fn a_link_local_address_is_better_than_none_and_is_told_with_its_interface() {
    let facts = host([device("mlx5_0", [ethernet(vec![gid(1, GidType::ROCE_V2, "fe80::77", 3)])])]);
    let rdma = chosen(&facts).unwrap();
    assert_eq!((rdma.ports[0].gid, rdma.ports[0].interface.as_deref()), (1, Some("eth3")));
}

#[test]
fn all_active_ports_are_taken_those_near_the_other_ranks_first() {
    let other = vec![gid(1, GidType::ROCE_V2, "10.3.0.1", 3)];
    let facts = host([device("mlx5_0", [ethernet(usual())]), device("mlx5_1", [ethernet(other)])]);
    assert_eq!(taken(&chosen(&facts).unwrap()), ["mlx5_0:1 4", "mlx5_1:1 1"]);
    let near = chosen_by(&facts, "", "", &["10.3.0.1"]).unwrap();
    assert_eq!(taken(&near), ["mlx5_1:1 1", "mlx5_0:1 4"]);
    // Ports that the user has named stay in the user's order.
    let named = chosen_by(&facts, "mlx5_0, mlx5_1:1", "", &["10.3.0.1"]).unwrap();
    assert_eq!(taken(&named), ["mlx5_0:1 4", "mlx5_1:1 1"]);
}

#[test]
fn the_second_port_is_as_fast_as_the_first_and_near_to_where_this_process_runs() {
    let port = |index, address, interface| ethernet(vec![gid(index, GidType::ROCE_V2, address, interface)]);
    let card = |name: &str, port: Found| device(name, [port]);
    let first = card("mlx5_0", port(1, "10.0.0.1", 2));
    let used = |others: Vec<Device>, named: &str| {
        let devices = std::iter::once(Device { is_far: true, ..first.clone() }).chain(others);
        let rdma = chosen_by(&host(devices), named, "", &["10.0.0.1"]).unwrap();
        taken(&rdma)[..rdma.used].to_vec()
    };
    let second = card("mlx5_1", port(1, "10.3.0.1", 3));
    assert_eq!(used(vec![second.clone()], ""), ["mlx5_0:1 1", "mlx5_1:1 1"]);
    // Of two, the near one; the first stays the first, though it is far.
    let far = Device { is_far: true, ..second.clone() };
    let third = card("mlx5_2", port(2, "192.168.1.1", 4));
    assert_eq!(used(vec![far, third], ""), ["mlx5_0:1 1", "mlx5_2:1 2"]);
    // One that is slower, one of the other kind, and one whose address is none of this process's.
    let slow = card("mlx5_1", Found { rate: (1, 1), ..port(1, "10.3.0.1", 3) });
    let foreign = card("mlx5_1", port(1, "10.9.0.1", 9));
    for other in [slow, card("mlx5_1", infiniband()), foreign.clone()] {
        let devices = [first.clone(), other];
        let rdma = chosen_by(&host(devices), "", "", &["10.0.0.1"]).unwrap();
        assert_eq!(rdma.used, 1, "{:?}", taken(&rdma));
    }
    assert_eq!(used(vec![foreign], "mlx5_0,mlx5_1"), ["mlx5_0:1 1", "mlx5_1:1 1"]);
    // Both cards' memory has to be locked.
    let limited = Facts { locked: Locked::UpTo(100 << 20), ..host([first.clone(), second]) };
    assert_eq!(chosen(&limited).unwrap().used, 1);
}

#[test]
fn a_card_is_near_if_this_process_may_run_on_a_processor_near_to_it() {
    let mut own = CpuSet::new();
    [2, 9].iter().for_each(|cpu| own.set(*cpu));
    for (list, is_near) in [
        ("0-3,8-11\n", true),
        ("9", true),
        ("0-1,4-8", false),
        ("\n", true),
        ("what", true),
        ("1-4294967296", true),
        ("70000", false),
    ] {
        assert_eq!(may_run_near(list, &own), is_near, "{list}");
    }
}

#[test]
fn ports_that_cannot_be_used_are_passed_over_each_with_its_reason() {
    let v1 = GidType::ROCE_V1;
    let bad = [
        (Found { state: PortState::DOWN, ..ethernet(usual()) }, &["is down", "ip link"][..]),
        (Found { state: PortState::DOWN, ..infiniband() }, &["is down", "cable"]),
        (Found { state: PortState::INIT, ..infiniband() }, &["no subnet manager", "opensm"]),
        (Found { state: PortState(77), ..ethernet(usual()) }, &["is not active (PortState 77)"]),
        (
            ethernet(vec![gid(0, v1, "fe80::1", 2), gid(2, v1, "10.0.0.1", 2)]),
            &["no address of RoCE v2", "GID 0, 2", "ip addr"],
        ),
        (ethernet(Vec::new()), &["has no address", "ip addr add"]),
        (Found { gids: Vec::new(), ..infiniband() }, &["has no GID"]),
        (Found { mtu: Mtu(9), ..ethernet(usual()) }, &["an MTU code that does not exist (9)"]),
        (Found { max_message: 0, ..ethernet(usual()) }, &["0 bytes as its largest message"]),
        (Found { layer: LinkLayer(9), ..ethernet(usual()) }, &["neither InfiniBand nor Ethernet"]),
    ];
    for (port, because) in bad {
        let rdma = chosen(&host([device("mlx5_0", [port.clone(), ethernet(usual())])])).unwrap();
        assert_eq!(taken(&rdma), ["mlx5_0:2 4"]);
        says(&why(&rdma, "mlx5_0 port 1"), because);
        // If it is the only port, the error gives the same reason.
        let nothing = chosen(&host([device("mlx5_0", [port])])).unwrap_err();
        says(&nothing, &["no port can be used: mlx5_0 port 1: "]);
        says(&nothing, because);
    }
}

#[test]
fn devices_that_cannot_be_used_are_passed_over_each_with_its_reason() {
    let good = || device("mlx5_0", [ethernet(usual())]);
    let other = |change: &dyn Fn(&mut Device)| {
        let mut other = device("other", [ethernet(usual())]);
        change(&mut other);
        let rdma = chosen(&host([other, good()])).unwrap();
        assert_eq!(taken(&rdma), ["mlx5_0:1 4"]);
        rdma
    };
    let iwarp = other(&|device| device.transport = Transport::IWARP);
    says(&why(&iwarp, "other"), &["IBV_TRANSPORT_IWARP", "InfiniBand and RoCE v2"]);
    let closed = other(&|device| device.ports = Err("ibv_open_device: Permission denied".into()));
    assert_eq!(why(&closed, "other"), "ibv_open_device: Permission denied");
    let portless = other(&|device| device.ports = Ok(Vec::new()));
    says(&why(&portless, "other"), &["no port"]);
    let silent =
        other(&|device| device.ports = Ok(vec![Port { number: 1, found: Err("ibv_query_port: no".into()) }]));
    assert_eq!(why(&silent, "other port 1"), "ibv_query_port: no");

    let unlisted = Facts { unlisted: vec!["bnxt_re0".into()], ..host([good()]) };
    says(&why(&chosen(&unlisted).unwrap(), "bnxt_re0"), &["ibverbs-providers"]);
    let contained = Facts { has_device_files: false, ..unlisted };
    says(&why(&chosen(&contained).unwrap(), "bnxt_re0"), &["--device=/dev/infiniband"]);
}

#[test]
fn without_a_device_it_says_what_would_make_one() {
    says(&chosen(&host([])).unwrap_err(), &["there is no device;", "modprobe rdma_rxe"]);
    let contained = Facts { has_device_files: false, ..host([]) };
    says(&chosen(&contained).unwrap_err(), &["no /dev/infiniband", "--device=/dev/infiniband"]);
}

#[test]
fn infiniband_takes_its_first_address_and_comes_before_ethernet_unless_the_user_says_otherwise() {
    let facts = host([device("mlx5_0", [ethernet(usual())]), device("mlx5_1", [infiniband()])]);
    let rdma = chosen(&facts).unwrap();
    assert_eq!(taken(&rdma), ["mlx5_1:1 0"]);
    assert_eq!(
        rdma.ports[0].to_string(),
        "mlx5_1 port 1 active, InfiniBand, GID 0 (fe80::2:c903:1), MTU 4096"
    );
    let because = why(&rdma, "mlx5_0 port 1");
    assert!(because.starts_with("it is RoCE v2, and mlx5_1 is InfiniBand"), "{because}");
    says(&because, &["ALLSTREAM_RDMA_DEVICE"]);
    let named = chosen_by(&facts, "mlx5_0", "", &[]).unwrap();
    assert_eq!(taken(&named), ["mlx5_0:1 4"]);
    says(&why(&named, "mlx5_1 port 1"), &["left out: ALLSTREAM_RDMA_DEVICE is `mlx5_0`"]);
    // Old InfiniBand drivers do not say of which kind the network is.
    let unsaid = Found { layer: LinkLayer::UNSPECIFIED, ..infiniband() };
    assert_eq!(taken(&chosen(&host([device("old", [unsaid])])).unwrap()), ["old:1 0"]);
}

#[test]
fn devices_and_ports_can_be_named_or_left_out_by_whole_names() {
    let card = |name: &str| device(name, [ethernet(usual()), ethernet(usual())]);
    let facts = host([card("mlx5_1"), card("mlx5_10")]);
    for (said, wanted) in [
        ("mlx5_1", &["mlx5_1:1 4", "mlx5_1:2 4"][..]),
        (" mlx5_10:2 , mlx5_1:1 ", &["mlx5_10:2 4", "mlx5_1:1 4"]),
        ("^mlx5_1", &["mlx5_10:1 4", "mlx5_10:2 4"]),
        ("^mlx5_1,mlx5_10:1", &["mlx5_10:2 4"]),
        ("^never_heard_of", &["mlx5_1:1 4", "mlx5_1:2 4", "mlx5_10:1 4", "mlx5_10:2 4"]),
    ] {
        assert_eq!(taken(&chosen_by(&facts, said, "", &[]).unwrap()), wanted, "{said}");
    }
    let absent = chosen_by(&facts, "mlx5_1,mlx5_7", "", &[]).unwrap_err();
    assert_eq!(
        absent,
        "ALLSTREAM_RDMA_DEVICE is `mlx5_1,mlx5_7`, and there is no device mlx5_7 here; there are: mlx5_1, mlx5_10"
    );
    says(&chosen_by(&host([]), "mlx5_1", "", &[]).unwrap_err(), &["there are: none"]);
    let absent = chosen_by(&facts, "mlx5_1:3", "", &[]).unwrap_err();
    says(&absent, &["mlx5_1 has no port 3", "it has 1, 2"]);
    let all_but_all = chosen_by(&facts, "^mlx5_1,mlx5_10", "", &[]).unwrap_err();
    says(&all_but_all, &["no port can be used", "left out: ALLSTREAM_RDMA_DEVICE is `^mlx5_1,mlx5_10`"]);
}

#[test]
fn an_address_that_is_named_is_taken_or_said_to_be_missing() {
    let facts = host([device("mlx5_0", [ethernet(usual())])]);
    let named = chosen_by(&facts, "", "2", &["10.0.0.1"]).unwrap();
    assert_eq!((taken(&named), named.passed_over.len()), (vec!["mlx5_0:1 2".to_owned()], 0));
    let absent = chosen_by(&facts, "", "7", &[]).unwrap_err();
    says(
        &absent,
        &["mlx5_0 port 1: it has no GID 7, which ALLSTREAM_RDMA_GID names; it has of RoCE v2: 1, 2, 4"],
    );
    let v1 = chosen_by(&facts, "", "3", &[]).unwrap_err();
    says(&v1, &["GID 3, which ALLSTREAM_RDMA_GID names, is not of RoCE v2; it has of RoCE v2: 1, 2, 4"]);
    let second = host([device("ib0", [infiniband()])]);
    assert_eq!(taken(&chosen_by(&second, "", "1", &[]).unwrap()), ["ib0:1 1"]);
    says(&chosen_by(&second, "", "9", &[]).unwrap_err(), &["no GID 9", "it has of InfiniBand: 0, 1"]);
}

#[test]
fn variables_that_cannot_be_understood_are_told_with_what_was_expected() {
    assert_eq!(wishes("", " ").unwrap(), Wishes::default());
    for said in ["mlx5_0,", ",", "^", "mlx5_0:0", "mlx5_0:x", "mlx5_0:", "=mlx5_0", "mlx5_0,^mlx5_1", "a b"] {
        let error = wishes(said, "").unwrap_err();
        says(&error, &["ALLSTREAM_RDMA_DEVICE is `", "`mlx5_0,mlx5_1:1`"]);
    }
    for said in ["-1", "three", "0x3", "4294967296", "1,2"] {
        says(&wishes("", said).unwrap_err(), &[&format!("ALLSTREAM_RDMA_GID is `{said}`"), "such as 3"]);
    }
}

#[test]
fn a_packet_that_could_be_larger_is_told_with_the_interface_s_mtu_that_it_takes() {
    let mtu = |found: Found, mtu| Found { mtu, ..found };
    let text = |port: Found| chosen(&host([device("d", [port])])).unwrap().ports[0].to_string();
    says(
        &text(mtu(ethernet(usual()), Mtu::BYTES_1024)),
        &["MTU 1024 (the port can do 4096: give its interface an MTU of 4200"],
    );
    let said = text(mtu(infiniband(), Mtu::BYTES_2048));
    assert!(said.ends_with("MTU 2048 (the port can do 4096)"), "{said}");
}

#[test]
fn a_lock_limit_that_is_too_small_is_told_with_what_is_needed_and_what_raises_it() {
    let with = |locked| chosen(&Facts { locked, ..host([device("mlx5_0", [ethernet(usual())])]) });
    let error = with(Locked::UpTo(8 << 20)).unwrap_err();
    let parts = [
        "mlx5_0 port 1 could be used",
        "8388608 bytes",
        "67108864 are needed",
        "`ulimit -l unlimited`",
        "--ulimit memlock=-1; ALLSTREAM_RDMA_MEMORY=0 needs 25165824, for slower links",
    ];
    says(&error, &parts);
    assert!(with(Locked::UpTo(64 << 20)).is_ok());
    // If the user allows less memory to be registered, less is needed.
    let limited = Facts { locked: Locked::UpTo(24 << 20), ..host([device("mlx5_0", [ethernet(usual())])]) };
    let narrow = Wishes { memory: Some(0), ..Wishes::default() };
    assert!(choose("libibverbs.so.1", &limited, &narrow, &[]).is_ok());
    // If no port could be used anyway, the error says that instead.
    let nothing = chosen(&Facts { locked: Locked::UpTo(0), ..host([]) }).unwrap_err();
    says(&nothing, &["there is no device"]);
}

#[test]
fn the_capability_to_lock_counts_outside_of_user_namespaces() {
    let all = "         0          0 4294967295\n";
    assert!(may_lock("Name:\tx\nCapEff:\t000001ffffffffff\n", all));
    assert!(may_lock("CapEff:\t0000000000004000\n", all));
    assert!(!may_lock("CapEff:\t00000000a80425fb\n", all));
    assert!(!may_lock("CapEff:\t000001ffffffffff\n", "0 1000 1\n"));
    assert!(!may_lock("", "") && !may_lock("CapEff:\twords\n", all));
}

#[test]
fn what_hosts_say_at_random_makes_a_choice_or_an_error_and_no_panic() {
    use proptest::prelude::*;
    let gid = (0u32..6, 0u32..5, any::<[u8; 16]>(), any::<bool>(), 0u32..5).prop_map(
        |(index, kind, raw, v4, interface)| Gid {
            index,
            kind: GidType(kind),
            address: if v4 { "::ffff:10.0.0.1".parse().unwrap() } else { Ipv6Addr::from(raw) },
            interface,
        },
    );
    let port = (0u32..7, 0u8..4, 0u32..8, 0u32..8, 0u32..3, prop::collection::vec(gid, 0..5)).prop_map(
        |(state, layer, mtu, max_mtu, max_message, gids)| Found {
            rate: (2, 32),
            state: PortState(state),
            layer: LinkLayer(layer),
            mtu: Mtu(mtu),
            max_mtu: Mtu(max_mtu),
            max_message,
            gids,
        },
    );
    let device = (-1i32..4, prop::collection::vec(port, 0..3));
    let said = (prop::collection::vec(device, 0..4), prop::option::of(0u32..7), any::<bool>());
    proptest!(|((devices, index, has_device_files) in said)| {
        let made = devices.into_iter().enumerate().map(|(at, (transport, ports))| {
            Device { transport: Transport(transport), ..device_of(at, ports) }
        });
        let facts = Facts { has_device_files, ..host(made) };
        let index = index.map(|index| index.to_string()).unwrap_or_default();
        match chosen_by(&facts, "", &index, &["10.0.0.1"]) {
            Err(problem) => prop_assert!(!problem.is_empty()),
            Ok(rdma) => {
                prop_assert!(!rdma.ports.is_empty());
                for port in &rdma.ports {
                    prop_assert_eq!(port.layer, rdma.ports[0].layer);
                    let device = facts.devices.iter().find(|device| device.name == port.device).unwrap();
                    let found = device.ports.as_ref().unwrap()[usize::from(port.port) - 1].found.as_ref().unwrap();
                    prop_assert_eq!(found.state, PortState::ACTIVE);
                    prop_assert!(found.gids.iter().any(|gid| gid.index == port.gid && gid.ip() == port.address));
                }
            }
        }
    });
}

fn device_of(at: usize, ports: Vec<Found>) -> Device {
    device(&format!("d{at}"), ports)
}

#[test]
fn what_queue_pairs_are_set_to_is_read_or_refused() {
    let read = |name: &str, value: &str| {
        let (name, value) = (format!("ALLSTREAM_RDMA_{name}"), value.to_owned());
        Wishes::from_lookup(move |asked| (asked == name).then(|| value.clone()))
    };
    let set = |name, value| read(name, value).unwrap();
    assert_eq!((set("TIMEOUT", "20").timeout, set("RETRY", " 3 ").retry), (Some(20), Some(3)));
    assert_eq!((set("TC", "106").traffic_class, set("SL", "15").service_level), (Some(106), Some(15)));
    assert_eq!((set("PKEY", "65535").pkey, set("TIMEOUT", "").timeout), (Some(65535), None));
    assert_eq!((set("MEMORY", "8").memory, set("MEMORY", "").memory), (Some(8 << 20), None));
    for (name, value, wanted) in [
        ("MEMORY", "8M", "MiB of memory, such as 40"),
        ("MEMORY", "99999999999999999999", "MiB of memory"),
        ("TIMEOUT", "32", "the code of a time (4.096 us, doubled so often), from 0 to 31"),
        ("RETRY", "8", "how often a packet is sent again, from 0 to 7"),
        ("TC", "256", "a traffic class, from 0 to 255"),
        ("SL", "-1", "a service level, from 0 to 15"),
        ("PKEY", "0xffff", "the index of a partition key, from 0 to 65535"),
    ] {
        says(&read(name, value).unwrap_err(), &[&format!("ALLSTREAM_RDMA_{name} is `{value}`"), wanted]);
    }
}
