//! Worlds of two hosts, which are network namespaces of this machine with a cable between them (veth). Only root can make them; otherwise
//! a test says so and is skipped.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// What the ranks do: only join, and say at which addresses they reach the others.
#[test]
#[ignore = "a rank; started by the tests below"]
fn rank_on_a_host() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut place = Rendezvous::from_env().unwrap();
        place.reach = Some(crate::group::Reach::from_env().unwrap());
        // As a program does that tells its ranks itself where to meet. `near` is where these ranks meet.
        let near = std::env::var("MASTER_ADDR").unwrap();
        let ours = Rendezvous::listen_for_ranks(Some((&near, 1)))
            .map_or_else(|e| e.to_string(), |at| at.1.ip().to_string());
        match join(place).await {
            Ok(me) => {
                let peers = me.mesh.peers().iter().flatten();
                let told: Vec<_> = peers.map(|peer| format!("{}={:?}", peer.rank, peer.address)).collect();
                println!("joined: {} listens at {ours}", told.join(" "));
                me.mesh.close(None).await;
            }
            Err(error) => println!("failed: {error}"),
        }
    });
}

fn run(line: &str) -> Result<(), String> {
    let output =
        Command::new("sh").args(["-c", line]).stdin(Stdio::null()).output().map_err(|e| e.to_string())?;
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("{line}: {}", String::from_utf8_lossy(&output.stderr)))
    }
}

/// Two hosts, with the addresses 10.213.9.1 and 10.213.9.2 on the cable between them, and 10.213.8.1 on both.
struct Hosts {
    names: [String; 2],
    scratch: tempfile::TempDir,
}

impl Hosts {
    fn new() -> Option<Hosts> {
        let left_out = |why: String| {
            let _ = std::io::stderr().write_all(format!("\nskipped: no two hosts: {why}\n").as_bytes());
        };
        if !rustix::process::geteuid().is_root() {
            left_out("network namespaces are made by root, and this test is run by another".into());
            return None;
        }
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |end| format!("am{}{number}{end}", std::process::id());
        let scratch = tempfile::tempdir().unwrap();
        let hosts = Hosts { names: [name('a'), name('b')], scratch };
        hosts.make().inspect_err(|why| left_out(why.clone())).ok().map(|()| hosts)
    }

    fn make(&self) -> Result<(), String> {
        let [a, b] = &self.names;
        run(&format!("ip netns add {a} && ip netns add {b}"))?;
        run(&format!("ip link add {a} netns {a} type veth peer name {b} netns {b}"))?;
        for (i, host) in self.names.iter().enumerate() {
            run(&format!("ip -n {host} addr add 10.213.9.{}/24 dev {host}", i + 1))?;
            run(&format!("ip -n {host} link set lo up && ip -n {host} link set {host} up"))?;
            // The address of Docker's bridge, which is the same on every host.
            run(&format!(
                "ip -n {host} link add docker0 type bridge && ip -n {host} addr add 10.213.8.1/24 dev docker0"
            ))?;
            run(&format!("ip -n {host} link set docker0 up"))?;
        }
        Ok(())
    }

    /// Starts a rank on one of the hosts; `names` is the text of its /etc/hosts.
    fn start(&self, host: usize, rank: usize, meet: &str, names: &str, env: &[(&str, &str)]) -> Child {
        let file = self.file(&format!("names-{rank}"), names);
        self.start_by(host, rank, meet, &file, env)
    }

    /// The same with a file as /etc/hosts that several ranks may use.
    fn start_by(&self, host: usize, rank: usize, meet: &str, names: &Path, env: &[(&str, &str)]) -> Child {
        let test = format!("{}::rank_on_a_host", module_path!().split_once("::").unwrap().1);
        let script = "mount --bind \"$0\" /etc/hosts && exec \"$@\"";
        Command::new("ip")
            .args(["netns", "exec", &self.names[host], "unshare", "-m", "sh", "-c", script])
            .arg(names)
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", &test, "--ignored", "--nocapture", "--test-threads=1"])
            .envs([("RANK", rank.to_string()), ("WORLD_SIZE", "2".into())])
            .envs([("MASTER_ADDR", meet), ("MASTER_PORT", "29500"), ("ALLSTREAM_TOKEN", "of this test")])
            .envs([("ALLSTREAM_RENDEZVOUS_TIMEOUT", "15"), ("ALLSTREAM_LINK", "tcp")])
            .envs(env.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.scratch.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in &self.names {
            let _ = run(&format!("ip netns del {host}"));
        }
    }
}

/// What a rank said in the end. The rank ends by itself, at the rendezvous timeout at the latest.
fn said(child: Child) -> String {
    let Output { stdout, stderr, .. } = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&stdout) + String::from_utf8_lossy(&stderr);
    let said = text.lines().find(|line| line.contains("joined: ") || line.contains("failed: "));
    said.unwrap_or_else(|| panic!("nothing said: {text}")).to_owned()
}

/// As torchrun does: it deals ranks out in the order in which hosts come, and lets them meet at the host of its store.
#[test]
fn ranks_meet_where_rank_0_is_not() {
    let Some(hosts) = Hosts::new() else { return };
    let begun = Instant::now();
    let ranks = [(1, 0), (0, 1)].map(|(host, rank)| hosts.start(host, rank, "10.213.9.1", "", &[]));
    let told = ranks.map(said);
    assert!(told[0].contains("joined: 1=[10.213.9.1:"), "{told:?}");
    assert!(told[1].contains("joined: 0=[10.213.9.2:"), "{told:?}");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

/// Debian gives a host's own name the address 127.0.1.1 in its /etc/hosts: rank 0 and a rank of its host meet over it, and are reached
/// from elsewhere all the same.
#[test]
fn a_host_whose_own_name_is_a_loopback_address_is_reached_from_another() {
    let Some(hosts) = Hosts::new() else { return };
    let there = [("WORLD_SIZE", "3")];
    let own = "127.0.0.1 localhost\n127.0.1.1 first\n";
    let other = "127.0.0.1 localhost\n10.213.9.1 first\n";
    let ranks = [(0, 0, own), (0, 1, own), (1, 2, other)]
        .map(|(host, rank, names)| hosts.start(host, rank, "first", names, &there));
    let told = ranks.map(said);
    assert!(told.iter().all(|told| told.contains("joined: ")), "{told:?}");
    // Of a rank's addresses, the one at which it was reached stands first; 10.213.8.1 is an address of both hosts.
    assert!(told[2].contains("0=[10.213.9.1:") && told[2].contains("1=[10.213.9.1:"), "{told:?}");
    for (told, own) in told.iter().zip(["10.213.9.1", "10.213.9.1", "10.213.9.2"]) {
        assert!(told.ends_with(&format!("listens at {own}")), "{told}");
    }
}

#[test]
fn a_rank_is_reached_by_the_interface_and_at_the_ports_that_are_named() {
    let Some(hosts) = Hosts::new() else { return };
    let env = [("ALLSTREAM_INTERFACE", "^docker"), ("ALLSTREAM_PORTS", "20000-20009")];
    let ranks = [0, 1].map(|rank| hosts.start(rank, rank, "10.213.9.1", "", &env));
    let told = ranks.map(said);
    assert!(told[0].contains("joined: 1=[10.213.9.2:2000"), "{told:?}");
    assert!(told[1].contains("joined: 0=[10.213.9.1:2000"), "{told:?}");
    // The other way round: the address that both hosts have is told first. There each reaches only itself, and tries the next one.
    let begun = Instant::now();
    let env = [("ALLSTREAM_INTERFACE", "docker,10.213.9.0/24")];
    let ranks = [0, 1].map(|rank| hosts.start(rank, rank, "10.213.9.1", "", &env));
    let told = ranks.map(said);
    assert!(
        told[0].contains("joined: 1=[10.213.9.2:") && told[1].contains("joined: 0=[10.213.9.1:"),
        "{told:?}"
    );
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    // An interface that this host does not have: all ranks are told so, and which addresses there are.
    let none = hosts.start(1, 1, "10.213.9.1", "", &[("ALLSTREAM_INTERFACE", "ib")]);
    let told = [hosts.start(0, 0, "10.213.9.1", "", &[]), none].map(said);
    for told in &told {
        assert!(told.contains("failed: ") && told.contains("ALLSTREAM_INTERFACE is `ib`"), "{told}");
        assert!(told.contains("docker0 10.213.8.1"), "{told}");
    }
}

/// In Kubernetes the name of rank 0's own pod is known some seconds after its start.
#[test]
fn a_name_that_is_known_later_is_good_for_rank_0_too() {
    let Some(hosts) = Hosts::new() else { return };
    let later = hosts.file("later", "127.0.0.1 localhost\n");
    let ranks = [0, 1].map(|rank| hosts.start_by(0, rank, "train-master-0", &later, &[]));
    // Until both have asked for the name in vain.
    std::thread::sleep(Duration::from_millis(300));
    let mut file = std::fs::OpenOptions::new().append(true).open(&later).unwrap();
    file.write_all(b"10.213.9.1 train-master-0\n").unwrap();
    let told = ranks.map(said);
    assert!(told.iter().all(|told| told.contains("joined: ")), "{told:?}");
}
