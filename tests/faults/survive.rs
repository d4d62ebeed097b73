//! Ranks are killed, and the survivors go on together in a smaller communicator: `Comm::shrink`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use test_support::tell_cases;

use crate::harness::{Job, Link, Me, PATIENCE, Plan, Random, alone, assert_no_new_names, names_left, say};

/// Elements of each buffer: several frames on every link.
const COUNT: usize = 50_000;

/// Makes sums until five have succeeded among no more than `left` ranks. After each failure the survivors call `shrink`.
pub(crate) async fn rank(me: Me) {
    let left = me.number("left");
    let mut comm = me.connect().await;
    let mut members: Vec<usize> = (0..comm.size()).collect();
    let mut taken = 0;
    while members.len() > left || taken < 5 {
        if taken == 3 {
            say("at_work", json!({ "members": members }));
        }
        let sum: u64 = members.iter().map(|member| 1 << member).sum();
        match comm.all_reduce(vec![1u64 << me.rank; COUNT]).await {
            Ok(sums) => {
                assert!(sums.iter().all(|s| *s == sum), "{members:?}: {:b}, not {sum:b}", sums[0]);
                taken += 1;
            }
            Err(failed) => {
                assert_eq!(failed.buf.map(|buf| buf.len()), Some(COUNT), "the buffer comes back");
                let (smaller, verdict) = comm.shrink().await.unwrap();
                members = verdict.survivors.iter().map(|place| members[*place]).collect();
                say("survives", json!({ "name": smaller.name(), "members": members }));
                assert_eq!((smaller.size(), members[smaller.rank()]), (members.len(), me.rank));
                (comm, taken) = (smaller, 0);
            }
        }
    }
    say("through", json!({ "members": members }));
    comm.close().await.unwrap();
}

/// Kills ranks at random moments until `left` are alive. Those must end well, and the reports of all ranks, also of the dead, must agree.
fn kill_until(left: usize, n: usize, link: Link, random: &mut Random) {
    let plan = Plan::new("survives", n, link).args(json!({ "left": left }));
    let Job { mut ranks, traces } = plan.start();
    ranks.iter().for_each(|rank| drop(rank.hear("at_work")));
    let mut dead = Vec::new();
    while ranks.len() > left {
        // The next death often comes before the survivors of the last one have shrunk, which takes some milliseconds.
        std::thread::sleep(Duration::from_secs_f64(random.fraction().powi(3) * 0.02));
        let victim = ranks.swap_remove((random.fraction() * ranks.len() as f64) as usize);
        victim.signal(Signal::KILL);
        dead.push(victim);
    }
    let mut survivors: Vec<usize> = ranks.iter().map(|rank| rank.rank).collect();
    survivors.sort_unstable();
    let mut said: Vec<Value> = Vec::new();
    for rank in &mut ranks {
        assert_eq!(rank.ended(Instant::now() + PATIENCE), Some(0), "rank {}: {}", rank.rank, rank.log());
    }
    for rank in ranks.iter().chain(&dead) {
        said.extend(rank.rest());
    }
    let mut groups: BTreeMap<String, Value> = BTreeMap::new();
    for line in said.iter().filter(|line| line["event"] == "survives") {
        let name = line["name"].as_str().unwrap().to_owned();
        let members = groups.entry(name).or_insert_with(|| line["members"].clone());
        assert_eq!(*members, line["members"], "the survivors differ");
    }
    let through: Vec<&Value> = said.iter().filter(|line| line["event"] == "through").collect();
    assert_eq!(through.len(), left);
    through.iter().for_each(|line| assert_eq!(line["members"], json!(survivors)));
    drop(traces);
}

#[test]
fn ranks_are_killed_at_random_moments_until_one_is_left_and_the_rest_go_on() {
    let _alone = alone();
    let names = names_left();
    let mut random = Random::seeded();
    let repetitions = test_support::times(6, 40, 200);
    for i in 0..repetitions {
        let link = [Link::Shm, Link::Tcp, Link::Mixed][i % 3];
        kill_until(1, 8, link, &mut random);
    }
    tell_cases("worlds of 8 of which 7 are killed one after another", repetitions);
    assert_no_new_names(&names);
}

#[test]
fn a_whole_host_dies_and_the_other_goes_on() {
    let _alone = alone();
    for half in [0, 1] {
        let job = Plan::new("survives", 6, Link::Mixed).args(json!({ "left": 3 })).start();
        job.ranks.iter().for_each(|rank| drop(rank.hear("at_work")));
        let (dead, survivors): (Vec<_>, Vec<_>) =
            job.ranks.into_iter().partition(|rank| rank.rank / 3 == half);
        dead.iter().for_each(|rank| rank.signal(Signal::KILL));
        let expected: Vec<usize> = survivors.iter().map(|rank| rank.rank).collect();
        for mut rank in survivors {
            assert_eq!(rank.hear("through")["members"], json!(expected));
            assert_eq!(rank.ended(Instant::now() + PATIENCE), Some(0), "{}", rank.log());
        }
    }
}
