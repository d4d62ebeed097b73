//! Ranks as processes that are killed and stopped: survivors' verdicts are compared here.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use allstream::{Comm, Error, Lost, Rendezvous, Verdict};
use futures::executor::block_on;
use rustix::process::{Pid, Signal, getpid, kill_process};

use crate::support::{Ended, Ranks, join, link_env, role, spawn_ranks, times};

/// How long a world of ranks may take for everything.
const LIMIT: Duration = Duration::from_secs(60);
/// How long an agreement may take once nothing more happens.
const SOON: Duration = Duration::from_secs(20);

/// Lets one world of processes run at a time: these tests depend on timing.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn setting(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

/// A folder of files in which ranks and the test leave each other messages. The test removes it when it ends.
struct Board(PathBuf, Owner);

#[derive(PartialEq)]
enum Owner {
    Test,
    Rank,
}

impl Drop for Board {
    fn drop(&mut self) {
        if self.1 == Owner::Test {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

impl Board {
    fn new(name: &str) -> Board {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("allstream-{name}-{}-{count}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Board(path, Owner::Test)
    }

    /// The board that the test made, which a rank finds by `AGREE_BOARD`.
    fn from_env() -> Board {
        Board(PathBuf::from(setting("AGREE_BOARD")), Owner::Rank)
    }

    fn put(&self, name: &str, text: &str) {
        let at = self.0.join(format!("{name}.new"));
        std::fs::write(&at, text).unwrap();
        std::fs::rename(at, self.0.join(name)).unwrap();
    }

    fn wait(&self, name: &str) -> String {
        let end = Instant::now() + LIMIT;
        loop {
            if let Ok(text) = std::fs::read_to_string(self.0.join(name)) {
                return text;
            }
            assert!(Instant::now() < end, "{name} never came");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Prints what this rank got, as a line that [`told`] reads.
fn tell(number: usize, got: &Result<Verdict, Error>) {
    let said = match got {
        Ok(v) => format!("verdict {number} {} {:?} {:?}", v.flag, v.survivors, v.lost),
        Err(e) => format!("error {number} {e}"),
    };
    // A single write, so that a killed rank has printed the whole line or nothing.
    std::io::stdout().write_all(format!("\n@@{said}\n").as_bytes()).unwrap();
}

/// What a rank told.
fn told(rank: &Ended) -> Vec<String> {
    rank.stdout.lines().filter_map(|l| l.strip_prefix("@@")).map(str::to_owned).collect()
}

/// Checks that every rank not in `killed` ended well and told the same `calls` lines, and that killed ranks told none but
/// these; returns the lines.
fn agreed(ended: &[Ended], killed: &[usize], calls: usize) -> Vec<String> {
    let survivors: Vec<&Ended> = ended.iter().filter(|e| !killed.contains(&e.rank)).collect();
    for rank in &survivors {
        assert!(rank.success(), "rank {} did not end well: {}{}", rank.rank, rank.stdout, rank.stderr);
    }
    let all: BTreeSet<Vec<String>> = survivors.iter().map(|e| told(e)).collect();
    assert_eq!(all.len(), 1, "survivors differ: {all:#?}");
    let one = all.into_iter().next().unwrap();
    assert_eq!(one.len(), calls, "{one:?}");
    for said in ended.iter().filter(|e| killed.contains(&e.rank)).flat_map(told) {
        assert!(one.contains(&said), "a rank told {said:?} before it was killed, the others {one:?}");
    }
    one
}

/// Waits until all ranks are at work; panics with what they printed if one ends before that.
fn running(mut ranks: Ranks, board: &Board, n: usize) -> Ranks {
    let end = Instant::now() + LIMIT;
    while (0..n).any(|rank| !board.0.join(format!("running-{rank}")).exists()) {
        let ended = |rank| !matches!(ranks.child(rank).try_wait(), Ok(None));
        if (0..n).any(ended) || Instant::now() > end {
            panic!("ranks are not all running: {:#?}", ranks.wait(Duration::from_secs(1)));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    ranks
}

fn kill(ranks: &mut Ranks, rank: usize, signal: Signal) {
    let pid = Pid::from_child(ranks.child(rank));
    kill_process(pid, signal).unwrap();
}

fn envs(
    link: &'static str,
    n: usize,
    board: &Board,
    more: &[(&str, String)],
) -> impl Fn(usize) -> Vec<(String, String)> {
    let mut fixed = vec![("AGREE_BOARD".to_owned(), board.0.display().to_string())];
    fixed.extend(more.iter().map(|(k, v)| ((*k).to_owned(), v.clone())));
    move |rank| link_env(link, rank, n).into_iter().chain(fixed.clone()).collect()
}

#[test]
fn survivors_of_a_rank_killed_in_a_collective_get_one_verdict_and_meet_again() {
    const N: usize = 4;
    if role() {
        let comm = join();
        return block_on(reduce_until_it_fails(comm));
    }
    let _alone = alone();
    for (link, victim) in [("shm", 3), ("tcp", 0), ("mixed", 1)] {
        let board = Board::new("agree-killed");
        let ranks = spawn_ranks(
            "agree::processes::survivors_of_a_rank_killed_in_a_collective_get_one_verdict_and_meet_again",
            N,
            LIMIT,
            envs(link, N, &board, &[]),
        );
        let mut ranks = running(ranks, &board, N);
        kill(&mut ranks, victim, Signal::KILL);
        let ended = ranks.wait(LIMIT);
        let survivors: Vec<usize> = (0..N).filter(|r| *r != victim).collect();
        let expected = [
            format!("verdict 0 true {survivors:?} [{victim}]"),
            format!("verdict 1 false {survivors:?} [{victim}]"),
            "the sum of 3".to_owned(),
        ];
        assert_eq!(agreed(&ended, &[victim], 3), expected, "{link}");
    }
}

/// Reduces until a rank is lost, agrees, and goes on in a new world with those that are left.
async fn reduce_until_it_fails(mut comm: Comm) {
    let (board, rank) = (Board::from_env(), comm.rank());
    let mut buf = vec![1f32; 1 << 20];
    for i in 0.. {
        if i == 3 {
            board.put(&format!("running-{rank}"), "");
        }
        match comm.all_reduce(buf).await {
            Ok(sum) => buf = sum,
            Err(failed) => {
                assert!(matches!(failed.error, Error::PeerLost { .. }), "{failed}");
                break;
            }
        }
    }
    let first = comm.agree_within(true, SOON).await;
    tell(0, &first);
    let verdict = first.unwrap();
    // In a second agreement, the first survivor votes false.
    tell(1, &comm.share().agree_within(rank != verdict.survivors[0], SOON).await);
    drop(comm);
    let (place, n) = (verdict.survivors.iter().position(|r| *r == rank).unwrap(), verdict.survivors.len());
    let again = |at: &str| Rendezvous::tcp(at, place, n).unwrap().token("again");
    let again = if place == 0 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = format!("tcp://{}", listener.local_addr().unwrap());
        board.put("address", &at);
        again(&at).listener(listener)
    } else {
        again(&board.wait("address"))
    };
    let mut smaller = Comm::connect(again).await.unwrap();
    let sum = smaller.all_reduce(vec![1i32; 10]).await.unwrap();
    std::io::stdout().write_all(format!("\n@@the sum of {}\n", sum[0]).as_bytes()).unwrap();
    smaller.close().await.unwrap();
}

/// Random numbers; the seed is printed where a test fails.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Agrees many times in a row, with flags that every rank can compute for all ranks.
fn agree_many() {
    let (board, comm) = (Board::from_env(), join());
    let calls: usize = setting("AGREE_CALLS").parse().unwrap();
    let rank = comm.rank();
    board.put(&format!("running-{rank}"), "");
    board.wait("go");
    for i in 0..calls {
        let got = comm.agree_within((i + rank) % 3 != 0, SOON).wait();
        tell(i, &got);
        got.unwrap();
    }
    drop(comm);
}

/// Kills ranks at random moments of many agreements in a row.
fn kill_some(name: &str, repetitions: u64, victims: &[usize]) {
    const N: usize = 5;
    const CALLS: usize = 200;
    let seed = std::env::var("ALLSTREAM_TEST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(|| {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        since.as_nanos() as u64 | 1
    });
    println!("ALLSTREAM_TEST_SEED={seed}");
    let mut random = Random(seed);
    let mut within = 0;
    for i in 0..repetitions {
        let board = Board::new("agree-many");
        let link = ["shm", "tcp"][i as usize % 2];
        let more = [("AGREE_CALLS", CALLS.to_string())];
        let ranks = spawn_ranks(name, N, LIMIT, envs(link, N, &board, &more));
        let mut ranks = running(ranks, &board, N);
        board.put("go", "");
        for &victim in victims {
            // 200 agreements take some tens of milliseconds.
            std::thread::sleep(Duration::from_micros(random.below(40_000)));
            kill(&mut ranks, victim, Signal::KILL);
        }
        let ended = ranks.wait(LIMIT);
        let said = agreed(&ended, victims, CALLS);
        let mut lost = 0;
        for (number, line) in said.iter().enumerate() {
            // A lost rank stays lost; a verdict's flag is true if all its survivors voted true.
            let gone: Vec<usize> =
                (0..N).filter(|r| victims.contains(r) && said_lost(line).contains(r)).collect();
            assert!(gone.len() >= lost, "{line}");
            lost = gone.len();
            let survivors: Vec<usize> = (0..N).filter(|r| !gone.contains(r)).collect();
            let flag = survivors.iter().all(|r| (number + r) % 3 != 0);
            assert_eq!(*line, format!("verdict {number} {flag} {survivors:?} {gone:?}"), "seed {seed}");
        }
        within += usize::from(lost > 0 && said_lost(&said[0]).is_empty());
    }
    println!("{within} of {repetitions} times the first was killed between the first agreement and the last");
}

/// The list of lost ranks at the end of a verdict's line.
fn said_lost(line: &str) -> Vec<usize> {
    let list = line.rsplit('[').next().unwrap_or_default().trim_end_matches(']');
    list.split(", ").filter_map(|r| r.parse().ok()).collect()
}

#[test]
fn the_coordinator_is_killed_at_any_moment_and_survivors_agree() {
    if role() {
        return agree_many();
    }
    let _alone = alone();
    kill_some(
        "agree::processes::the_coordinator_is_killed_at_any_moment_and_survivors_agree",
        times(30, 60, 200),
        &[0],
    );
}

#[test]
fn two_are_killed_one_after_the_other_and_survivors_agree() {
    if role() {
        return agree_many();
    }
    let _alone = alone();
    let repetitions = times(8, 15, 50);
    kill_some(
        "agree::processes::two_are_killed_one_after_the_other_and_survivors_agree",
        repetitions,
        &[0, 1],
    );
}

/// The victim stops itself and sleeps through an agreement, in which it may have voted; then it is woken.
fn stop_in_between() {
    let (board, comm) = (Board::from_env(), join());
    let (rank, victim) = (comm.rank(), setting("AGREE_VICTIM").parse::<usize>().unwrap());
    tell(0, &comm.agree_within(true, SOON).wait());
    if rank == victim {
        let voted = (setting("AGREE_VOTED") == "true").then(|| comm.agree_within(true, LIMIT));
        board.put("stopping", "");
        kill_process(getpid(), Signal::STOP).unwrap();
        // `kill_process` may return before the whole process has stopped.
        board.wait("woken");
        let is_out =
            |e: &Error| matches!(e, Error::PeerLost { rank: r, how: Lost::Silent(_), .. } if *r == rank);
        match voted.map(|agree| agree.wait()) {
            // The vote came in time, so this is the verdict that the others have.
            Some(Ok(verdict)) => tell(1, &Ok(verdict)),
            Some(Err(error)) => assert!(is_out(&error), "{error}"),
            None => {}
        }
        let error = comm.agree_within(true, SOON).wait().unwrap_err();
        assert!(is_out(&error), "{error}");
        let again = comm.agree(true).wait().unwrap_err();
        assert_eq!(again.to_string(), error.to_string());
        board.put("told", "");
        return;
    }
    tell(1, &comm.agree_within(true, SOON).wait());
    // If the victim had voted, the verdict may have come before anyone noticed that the victim had stopped. The test wakes the victim once all
    // survivors have said what they decided, so each waits here until the victim counts as lost.
    let end = Instant::now() + SOON;
    while comm.check().is_ok() {
        assert!(Instant::now() < end, "the stopped rank is not lost");
        std::thread::sleep(Duration::from_millis(1));
    }
    board.put(&format!("decided-{rank}"), "");
    board.wait("told");
    tell(2, &comm.agree_within(true, SOON).wait());
    drop(comm);
}

#[test]
fn a_stopped_rank_is_lost_by_heartbeat_and_told_so_when_it_wakes() {
    const N: usize = 3;
    if role() {
        return stop_in_between();
    }
    let _alone = alone();
    for (link, victim, voted) in [("shm", 0, false), ("tcp", 2, false), ("shm", 0, true), ("tcp", 1, true)] {
        let board = Board::new("agree-stopped");
        let more = [
            ("AGREE_VICTIM", victim.to_string()),
            ("AGREE_VOTED", voted.to_string()),
            ("ALLSTREAM_HEARTBEAT_TIMEOUT", "1".to_owned()),
        ];
        let mut ranks = spawn_ranks(
            "agree::processes::a_stopped_rank_is_lost_by_heartbeat_and_told_so_when_it_wakes",
            N,
            LIMIT,
            envs(link, N, &board, &more),
        );
        board.wait("stopping");
        for rank in (0..N).filter(|r| *r != victim) {
            board.wait(&format!("decided-{rank}"));
        }
        board.put("woken", "");
        kill(&mut ranks, victim, Signal::CONT);
        let ended = ranks.wait(LIMIT);
        let survivors: Vec<usize> = (0..N).filter(|r| *r != victim).collect();
        let all: Vec<usize> = (0..N).collect();
        assert!(ended[victim].success(), "{}{}", ended[victim].stdout, ended[victim].stderr);
        let expected = [
            format!("verdict 0 true {all:?} []"),
            format!("verdict 1 true {survivors:?} [{victim}]"),
            format!("verdict 2 true {survivors:?} [{victim}]"),
        ];
        let said = agreed(&ended, &[victim], 3);
        if voted {
            // Whether the victim's vote came in time is not known here; in the last verdict it is lost in any case.
            assert_eq!((&said[0], &said[2]), (&expected[0], &expected[2]), "{link}");
        } else {
            assert_eq!(said, expected, "{link}");
        }
    }
}
