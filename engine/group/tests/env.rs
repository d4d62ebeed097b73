//! What is read from the environment, and what is said where it does not suffice.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::group::address::host_name;

fn read(vars: &[(&str, &str)]) -> Result<Rendezvous, String> {
    let vars: HashMap<String, String> = vars.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    Rendezvous::from_lookup(&|name| vars.get(name).cloned()).map_err(|e| e.to_string())
}

const TORCH: [(&str, &str); 5] = [
    ("RANK", "3"),
    ("WORLD_SIZE", "8"),
    ("MASTER_ADDR", "node0"),
    ("MASTER_PORT", "29500"),
    ("ALLSTREAM_TOKEN", "s3cret"),
];

fn torch_with(extra: &[(&str, &str)]) -> Result<Rendezvous, String> {
    let mut vars = TORCH.to_vec();
    vars.extend(extra);
    read(&vars)
}

fn torch_without(name: &str) -> String {
    let vars: Vec<_> = TORCH.into_iter().filter(|(k, _)| *k != name).collect();
    read(&vars).unwrap_err()
}

fn says(error: &str, words: &[&str]) {
    for word in words {
        assert!(error.contains(word), "`{word}` is missing in: {error}");
    }
}

#[test]
fn torchrun_with_defaults() {
    let r = torch_with(&[]).unwrap();
    assert_eq!((r.rank(), r.size(), r.place().as_str()), (3, 8, "node0:29500"));
    assert_eq!(r.timeout, Duration::from_secs(60));
    assert_eq!(
        r.heartbeat,
        Heartbeat { interval: Duration::from_millis(500), silent: Duration::from_secs(10) }
    );
    assert_eq!((r.link, r.host_id, r.listener.is_none()), (LinkChoice::AUTO, None, true));
    assert_eq!(r.token, Some(Token::new(b"s3cret")));
}

#[test]
fn open_mpi_and_slurm() {
    let common = [("MASTER_PORT", "1234"), ("ALLSTREAM_INSECURE", "1")];
    let ompi = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2"), ("MASTER_ADDR", "10.0.0.1")];
    let r = read(&[&ompi[..], &common].concat()).unwrap();
    assert_eq!((r.rank, r.size, r.place()), (0, 2, "10.0.0.1:1234".into()));
    assert_eq!(r.token, Some(Token::new(b"")));

    let slurm = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.9")];
    let r = read(&[&slurm[..], &common].concat()).unwrap();
    assert_eq!((r.rank, r.size, r.place()), (1, 2, "10.0.0.9:1234".into()));
    let r = read(&[&slurm[..], &common, &[("MASTER_ADDR", "head")]].concat()).unwrap();
    assert_eq!(r.place(), "head:1234");
    // One variable of a launcher's two does not hide another launcher, both of whose variables are set.
    let r = read(&[&ompi[..], &common, &[("WORLD_SIZE", "9")]].concat()).unwrap();
    assert_eq!(r.size, 2);
}

#[test]
fn one_rank_needs_no_network_and_no_secret() {
    let r = read(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap();
    assert_eq!((r.size, r.address, r.token), (1, None, None));
}

#[test]
fn nothing_set_says_what_to_do() {
    let error = read(&[]).unwrap_err();
    says(
        &error,
        &["Rendezvous::from_env", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "allstream run", "none of"],
    );
}

#[test]
fn a_program_that_nobody_launched_is_alone_where_it_says_so() {
    let look = |vars: &[(&str, &str)]| {
        let vars: HashMap<String, String> =
            vars.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        Rendezvous::from_lookup_or_alone(&|name| vars.get(name).cloned()).map_err(|e| e.to_string())
    };
    // In the shell of an allocation of Slurm's, too, and where variables are empty.
    for vars in
        [&[][..], &[("SLURM_NTASKS", "8"), ("MASTER_ADDR", "node0")], &[("RANK", ""), ("WORLD_SIZE", " ")]]
    {
        let alone = look(vars).unwrap();
        assert_eq!((alone.rank(), alone.size()), (0, 1), "{vars:?}");
    }
    let launched = look(&TORCH).unwrap();
    assert_eq!((launched.rank(), launched.size()), (3, 8));
    says(&look(&[("WORLD_SIZE", "8")]).unwrap_err(), &["WORLD_SIZE=8 is set, but RANK is not"]);
    says(&look(&[("SLURM_PROCID", "1")]).unwrap_err(), &["SLURM_PROCID=1 is set"]);
    says(&look(&[("PMIX_RANK", "1")]).unwrap_err(), &["PMIX_RANK=1 is set"]);
    says(&read(&[]).unwrap_err(), &["Rendezvous::from_env_or_alone"]);
}

#[test]
fn what_is_missing_is_named() {
    says(&torch_without("RANK"), &["WORLD_SIZE=8 is set, but RANK is not"]);
    says(&torch_without("WORLD_SIZE"), &["RANK=3 is set, but WORLD_SIZE is not"]);
    says(&torch_without("MASTER_ADDR"), &["MASTER_ADDR is not set", "127.0.0.1"]);
    says(&torch_without("MASTER_PORT"), &["MASTER_PORT is not set"]);
    let token = torch_without("ALLSTREAM_TOKEN");
    says(&token, &["ALLSTREAM_TOKEN", "ALLSTREAM_TOKEN_FILE", "allstream run", "ALLSTREAM_INSECURE=1"]);
}

#[test]
fn what_is_wrong_is_named() {
    for (name, value, words) in [
        ("RANK", "8", &["RANK=8", "WORLD_SIZE=8", "0 to 7"][..]),
        ("RANK", "-1", &["RANK is `-1`", "whole number"]),
        ("WORLD_SIZE", "0", &["at least 1"]),
        ("WORLD_SIZE", "eight", &["WORLD_SIZE is `eight`"]),
        ("MASTER_PORT", "70000", &["MASTER_PORT", "70000", "65535"]),
        ("MASTER_PORT", "0", &["MASTER_PORT", "port 0"]),
        ("MASTER_ADDR", "a b", &["MASTER_ADDR", "a b"]),
        ("MASTER_ADDR", "host:29500", &["MASTER_ADDR", "host:29500"]),
        ("ALLSTREAM_LINK", "roce", &["ALLSTREAM_LINK is `roce`", "shm, tcp, rdma"]),
        ("ALLSTREAM_RENDEZVOUS_TIMEOUT", "soon", &["ALLSTREAM_RENDEZVOUS_TIMEOUT", "soon"]),
        ("ALLSTREAM_RENDEZVOUS_TIMEOUT", "inf", &["ALLSTREAM_RENDEZVOUS_TIMEOUT", "inf"]),
        ("ALLSTREAM_HEARTBEAT_TIMEOUT", "-1", &["ALLSTREAM_HEARTBEAT_TIMEOUT", "-1"]),
        ("ALLSTREAM_HEARTBEAT_TIMEOUT", "NaN", &["ALLSTREAM_HEARTBEAT_TIMEOUT", "NaN"]),
    ] {
        says(&torch_with(&[(name, value)]).unwrap_err(), words);
    }
    says(
        &torch_with(&[("RANK", "0"), ("ALLSTREAM_RENDEZVOUS_FD", "x")]).unwrap_err(),
        &["ALLSTREAM_RENDEZVOUS_FD"],
    );
    let vars: Vec<_> =
        TORCH[..4].iter().copied().chain([("ALLSTREAM_TOKEN_FILE", "/no/such/file")]).collect();
    says(&read(&vars).unwrap_err(), &["ALLSTREAM_TOKEN_FILE", "/no/such/file"]);
}

#[test]
fn options_are_taken() {
    let r = torch_with(&[
        ("RANK", "0"),
        ("ALLSTREAM_LINK", "SHM"),
        ("ALLSTREAM_HOST_ID", "a"),
        ("ALLSTREAM_RENDEZVOUS_TIMEOUT", "2.5"),
        ("ALLSTREAM_HEARTBEAT_TIMEOUT", "0.4"),
        ("ALLSTREAM_RENDEZVOUS_FD", "7"),
    ])
    .unwrap();
    assert_eq!((r.link, r.host_id.as_deref()), (LinkChoice::SHM, Some("a")));
    assert_eq!(r.timeout, Duration::from_millis(2500));
    assert_eq!(
        r.heartbeat,
        Heartbeat { interval: Duration::from_millis(100), silent: Duration::from_millis(400) }
    );
    assert!(matches!(r.listener, Some(Listener::Inherited(7))));
    // Only rank 0 listens.
    assert!(torch_with(&[("ALLSTREAM_RENDEZVOUS_FD", "x")]).unwrap().listener.is_none());
}

#[test]
fn addresses() {
    for (text, host, port, shown) in [
        ("tcp://host:1", "host", 1, "host:1"),
        ("host:65535", "host", 65535, "host:65535"),
        ("tcp://[::1]:80", "::1", 80, "[::1]:80"),
        ("tcp://[fe80::1%eth0]:80/", "fe80::1%eth0", 80, "[fe80::1%eth0]:80"),
        ("tcp://10.1.2.3:80", "10.1.2.3", 80, "10.1.2.3:80"),
    ] {
        let a = Address::parse(text).unwrap();
        assert_eq!((a.host.as_str(), a.port, a.to_string().as_str()), (host, port, shown));
    }
    for bad in [
        "",
        ":",
        ":80",
        "host",
        "host:",
        "host:0",
        "::1:80",
        "[::1]",
        "[host]:80",
        "udp://h:1",
        "h:1:2",
        "[]:1",
    ] {
        assert!(Address::parse(bad).is_err(), "{bad}");
    }
    for literal in ["::1", "[::1]"] {
        assert_eq!(torch_with(&[("MASTER_ADDR", literal)]).unwrap().place(), "[::1]:29500");
    }
    says(
        &Rendezvous::tcp("tcp://h:1", 2, 2).unwrap_err().to_string(),
        &["Rendezvous::tcp", "rank 2", "0 to 1"],
    );
}

#[test]
fn the_secret_is_not_shown() {
    let r = torch_with(&[]).unwrap();
    assert!(!format!("{r:?}").contains("s3cret") && format!("{r:?}").contains("hidden"));
}

proptest! {
    #[test]
    fn garbage_is_an_error_never_a_panic(text in ".{0,40}", name in 0usize..5) {
        let _ = Address::parse(&text);
        let _ = host_name(&text);
        let _ = torch_with(&[(TORCH[name].0, &text)]);
    }
}
