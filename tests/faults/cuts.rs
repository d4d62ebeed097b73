//! A network that fails in one direction only. The hosts are network namespaces of this machine, which only root can make. Where they cannot be
//! made, the test says so on stderr and passes.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

use allstream::Error;
use serde_json::{Value, json};

use crate::harness::{self, Link, Me, Plan, among_others, say, say_error};

/// The number of ranks on each of the two hosts.
const HALF: usize = 3;
const COUNT: usize = 20_000;

/// Makes sums, and shrinks after each failure. Ends when five sums have succeeded in a world smaller than the first, or when `shrink` fails.
pub(crate) async fn rank(me: Me) {
    let mut comm = me.connect().await;
    let size = comm.size();
    let mut members: Vec<usize> = (0..size).collect();
    let mut taken = 0;
    while members.len() == size || taken < 5 {
        if taken == 3 {
            say("at_work", json!({}));
        }
        match comm.all_reduce(vec![1u64 << me.rank; COUNT]).await {
            Ok(sums) => {
                let sum: u64 = members.iter().map(|member| 1 << member).sum();
                assert!(sums.iter().all(|s| *s == sum), "{members:?}: {:b}, not {sum:b}", sums[0]);
                taken += 1;
            }
            Err(_) => match comm.shrink().await {
                Ok((smaller, verdict)) => {
                    members = verdict.survivors.iter().map(|place| members[*place]).collect();
                    (comm, taken) = (smaller, 0);
                }
                Err(error) => return say_error("end", &error, true),
            },
        }
    }
    say("end", json!({ "members": members }));
    let _ = comm.close().await;
}

fn run(line: &str) -> Result<(), String> {
    let output =
        Command::new("sh").args(["-c", line]).stdin(Stdio::null()).output().map_err(|e| e.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{line}: {}", String::from_utf8_lossy(&output.stderr)))
}

/// Two network namespaces, joined by a pair of virtual interfaces with the addresses 10.213.7.1 and 10.213.7.2.
struct Hosts([String; 2]);

impl Hosts {
    fn new() -> Option<Hosts> {
        let name = |end| format!("af{}{end}", std::process::id());
        let hosts = Hosts([name('a'), name('b')]);
        let made = if rustix::process::geteuid().is_root() {
            hosts.make()
        } else {
            Err("network namespaces are made by root, and this test is run by another".into())
        };
        let left_out = |why: &String| {
            // Directly to stderr, as the harness shows a test's captured output only if it fails.
            let _ = std::io::stderr().write_all(format!("\nskipped: no two hosts: {why}\n").as_bytes());
        };
        made.inspect_err(left_out).ok().map(|()| hosts)
    }

    fn make(&self) -> Result<(), String> {
        let [a, b] = &self.0;
        run(&format!("ip netns add {a} && ip netns add {b}"))?;
        run(&format!("ip link add {a} netns {a} type veth peer name {b} netns {b}"))?;
        for (i, host) in self.0.iter().enumerate() {
            run(&format!("ip -n {host} addr add 10.213.7.{}/24 dev {host}", i + 1))?;
            run(&format!("ip -n {host} link set lo up && ip -n {host} link set {host} up"))?;
        }
        run(&format!("ip netns exec {a} iptables -L -n"))
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in &self.0 {
            let _ = run(&format!("ip netns del {host}"));
        }
    }
}

/// Runs a job, and lets a packet filter drop all TCP packets that host `mute` sends, also those to itself. Returns each rank's last report.
fn cut(mute: usize) -> Option<Vec<Value>> {
    let hosts = Hosts::new()?;
    let of_ranks = (0..2 * HALF).map(|rank| hosts.0[rank / HALF].clone()).collect();
    let plan = Plan::new("is_cut_off", 2 * HALF, Link::Mixed).in_namespaces(of_ranks, "10.213.7.1");
    let job = plan.env("ALLSTREAM_HEARTBEAT_TIMEOUT", "1").start();
    job.ranks.iter().for_each(|rank| drop(rank.hear("at_work")));
    run(&format!("ip netns exec {} iptables -A OUTPUT -p tcp -j DROP", hosts.0[mute])).unwrap();
    let ends = job.ranks.iter().map(|rank| rank.hear("end")).collect();
    // Kills the ranks: some would still wait in `close` for goodbyes that cannot arrive.
    drop(job);
    Some(ends)
}

/// The ranks of the host that is heard go on together. Each rank of the mute host goes on in one other world, or is told that it is lost itself.
#[test]
fn a_network_that_fails_in_one_direction_leaves_no_more_worlds_than_hosts() {
    let _turn = among_others();
    let every = if test_support::full() { vec![1, 0] } else { vec![1] };
    for mute in every {
        let Some(ends) = cut(mute) else { return };
        // For each list of members: the ranks that report it as their world.
        let mut worlds: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
        for (rank, end) in ends.iter().enumerate() {
            println!("host {mute} is mute, rank {rank}: {end}");
            if end["members"].is_array() {
                let members = serde_json::from_value(end["members"].clone()).unwrap();
                worlds.entry(members).or_default().push(rank);
            } else {
                assert_eq!(rank / HALF, mute, "only those that nobody hears may be lost: {end}");
                let error = harness::error_of(end);
                assert!(matches!(error, Error::PeerLost { rank: lost, .. } if lost == rank), "{error}");
            }
        }
        for (members, said) in &worlds {
            assert_eq!(members, said, "members of a world are not in it: {ends:?}");
        }
        let heard = 1 - mute;
        let expected: Vec<usize> = (heard * HALF..(heard + 1) * HALF).collect();
        assert!(worlds.contains_key(&expected) && worlds.len() <= 2, "{ends:?}");
    }
}
