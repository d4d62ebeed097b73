//! A rank whose process has reached a limit: of descriptors, of the size of files, of address space. All ranks get an error that names the
//! limit and the rank, and none of them waits until a deadline.

use std::fs::File;
use std::time::{Duration, Instant};

use allstream::{Comm, Error, Rendezvous};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;

use crate::harness::{Link, Me, Plan, among_others, say, say_error};

/// Number of ranks where descriptors run out. Each has a control connection to each other rank, and one data connection in each direction.
const SIZE: usize = 5;
/// Within how many seconds all ranks must know.
const KNOWN: f64 = 8.0;

fn limit(resource: Resource, most: u64) {
    let maximum = getrlimit(resource).maximum;
    setrlimit(resource, Rlimit { current: Some(most), maximum }).unwrap();
}

/// Lowers the limit to 100 descriptors, and opens all of them except `left`. They are closed when the returned files are dropped.
fn all_but(left: usize) -> Vec<File> {
    limit(Resource::Nofile, 100);
    let mut held: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    held.truncate(held.len().saturating_sub(left));
    held
}

/// One rank reaches its limit while it connects, or at the first operation.
pub(crate) async fn cannot_enter(me: Me) {
    let (limited, victim) = (me.args["limit"].as_str().unwrap().to_owned(), me.number("victim"));
    let begun = Instant::now();
    let _held = match &limited[..] {
        _ if me.rank != victim => Vec::new(),
        "files" => {
            limit(Resource::Fsize, 1 << 30);
            Vec::new()
        }
        "space" => {
            limit(Resource::As, 3 << 30);
            Vec::new()
        }
        _ => all_but(me.number("left")),
    };
    let connected = Comm::connect(Rendezvous::from_env().unwrap()).await;
    // With some numbers of descriptors left, the world forms, but its data connections cannot be opened.
    let end = match connected {
        Err(error) => Err(error),
        Ok(mut world) => {
            let end = world.timeout(Duration::from_secs(30)).all_reduce(vec![1u32; 100_000]).await;
            end.map(|sum| assert_eq!(sum[7] as usize, world.size())).map_err(Error::from)
        }
    };
    let after = begun.elapsed().as_secs_f64();
    match end {
        Ok(()) => say("end", json!({ "after": after, "text": null })),
        Err(error) => say("end", json!({ "after": after, "text": error.to_string() })),
    }
}

/// Runs such a job. Returns each rank's error text, or `None` for a rank whose operation succeeded.
fn ends(limited: &str, (victim, left): (usize, usize), size: usize, link: Link) -> Vec<Option<String>> {
    let args = json!({ "limit": limited, "victim": victim, "left": left });
    let job = Plan::new("cannot_enter", size, link).args(args).start();
    let ends = job.ranks.iter().map(|rank| {
        let said = rank.hear("end");
        println!("{limited}, {left} left of rank {victim}'s, rank {}: {said}", rank.rank);
        assert!(said["after"].as_f64().unwrap() < KNOWN, "{said}");
        said["text"].as_str().map(str::to_owned)
    });
    let ends = ends.collect();
    job.finish();
    ends
}

#[test]
fn a_rank_that_cannot_enter_the_world_is_named_to_all_with_the_limit() {
    let _turn = among_others();
    for (limited, name, raised) in
        [("files", "RLIMIT_FSIZE", "ulimit -f"), ("space", "RLIMIT_AS", "ulimit -v")]
    {
        for victim in [0, 2] {
            for (rank, text) in ends(limited, (victim, 0), 3, Link::Shm).into_iter().enumerate() {
                let text = text.unwrap();
                assert!(text.contains(name) && text.contains(raised), "rank {rank}: {text}");
                assert!(rank == victim || text.contains(&format!("rank {victim}")), "rank {rank}: {text}");
            }
        }
    }
}

/// With different numbers of descriptors left, so that each time another one is the first that cannot be opened. With fewer than 12, the rank
/// cannot tell anybody.
#[test]
fn a_rank_without_descriptors_is_told_of_to_all() {
    let _turn = among_others();
    let every = test_support::full();
    let some: Vec<usize> = if every { (12..60).collect() } else { vec![12, 20, 24, 28] };
    for left in some {
        for victim in [0, 2] {
            let ends = ends("descriptors", (victim, left), SIZE, Link::Tcp);
            let bad: Vec<_> = ends.iter().flatten().collect();
            assert!(bad.is_empty() || bad.len() == SIZE, "{ends:?}");
            for text in bad {
                assert!(text.contains("RLIMIT_NOFILE") && text.contains("ulimit -n"), "{text}");
            }
        }
    }
}

/// Descriptors run out once the world has formed.
pub(crate) async fn runs_out(me: Me) {
    let mut world = me.connect().await;
    world.barrier().await.unwrap();
    let mut group = world.dup().await.unwrap();
    let mut held = Vec::new();
    if me.rank == 1 {
        held = all_but(0);
    }
    world.barrier().await.unwrap();
    let begun = Instant::now();
    let end = group.timeout(Duration::from_secs(30)).all_reduce(vec![1u32; 100_000]).await;
    say("after", json!({ "seconds": begun.elapsed().as_secs_f64() }));
    say_error("told", &end.unwrap_err().into(), true);
    drop(held);
    world.barrier().await.unwrap();
    world.close().await.unwrap();
}

/// Runs two ranks of this role. Both must be told soon that rank 1 has reached a limit, with the limit's name and the command that raises it.
fn both_are_told(role: &'static str, link: Link, limit: [&str; 2]) {
    let _turn = among_others();
    let job = Plan::new(role, 2, link).start();
    for rank in &job.ranks {
        let seconds = rank.hear("after")["seconds"].as_f64().unwrap();
        let text = rank.hear("told")["text"].as_str().unwrap().to_owned();
        println!("rank {} after {seconds:.2} s: {text}", rank.rank);
        assert!(seconds < KNOWN, "{seconds}");
        for words in ["rank 1"].into_iter().chain(limit) {
            assert!(text.contains(words), "{words}: {text}");
        }
    }
    job.finish();
}

#[test]
fn descriptors_that_run_out_are_told_on_both_sides_of_a_connection() {
    both_are_told("runs_out", Link::Tcp, ["RLIMIT_NOFILE", "ulimit -n"]);
}

/// Rank 1 has address space left for its own memory, but not for mapping another rank's.
pub(crate) async fn no_room_for_peers(me: Me) {
    let mut world = me.connect().await;
    if me.rank == 1 {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let taken = pages.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 4096;
        limit(Resource::As, taken + (1 << 30));
    }
    let begun = Instant::now();
    let end = world.timeout(Duration::from_secs(30)).all_reduce(vec![1u32; 100_000]).await;
    say("after", json!({ "seconds": begun.elapsed().as_secs_f64() }));
    say_error("told", &end.unwrap_err().into(), true);
}

#[test]
fn address_space_that_has_no_room_for_a_peer_s_memory_is_told_to_all() {
    both_are_told("no_room_for_peers", Link::Shm, ["RLIMIT_AS", "ulimit -v"]);
}
