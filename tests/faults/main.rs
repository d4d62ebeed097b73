//! Faults: ranks that die, stop, call different things, or wait for each other; and strangers that connect without being members.
//!
//! Where it matters, ranks are processes: this binary starts itself again, once per rank (`tests/support/faults.rs`).
//! Every wait has a time limit. With `ALLSTREAM_TEST_FULL=1` more ranks are killed, in the all_reduce test of `kills` 16 instead of 8,
//! and with `all` 64. `ALLSTREAM_TEST_SEED`, set to the seed that an earlier run printed, kills at the same moments as that run.

mod aborts;
mod cuts;
mod forks;
mod guests;
mod kills;
#[cfg(feature = "testing")]
mod late;
mod limits;
mod links;
mod losses;
mod mismatches;
mod others;
mod programs;
mod quarantine;
mod silence;
mod survive;
mod values;

use test_support::faults as harness;

/// One rank in a process of its own. The environment says which role it plays.
#[test]
#[ignore = "run by the tests below, once per rank"]
fn rank() {
    let Some(me) = harness::Me::from_env() else { return };
    harness::block_on(async move {
        match me.role.as_str() {
            "kills" => kills::rank(me).await,
            "early" => kills::early(me).await,
            "stopped" => silence::stopped(me).await,
            "stopped_with_loans" => silence::stopped_with_loans(me).await,
            "reduces" => silence::reduces(me).await,
            "dies_of_it" => mismatches::dies_of_it(me).await,
            "wakes" => silence::wakes(me).await,
            "never_calls" => silence::never_calls(me).await,
            "mismatches" => mismatches::rank(me).await,
            "sends_first" => programs::sends_first(me).await,
            "opposite" => programs::opposite(me).await,
            "many" => programs::many(me).await,
            "quarantine" => quarantine::rank(me).await,
            "loops" => guests::rank(me).await,
            "aborts" => aborts::aborts(me).await,
            "forks" => forks::rank(me).await,
            "leaves_a_child" => forks::leaves_a_child(me).await,
            "is_cut_off" => cuts::rank(me).await,
            "breaks" => links::breaks(me).await,
            "leaves_one" => links::leaves_one(me).await,
            "cannot_enter" => limits::cannot_enter(me).await,
            "runs_out" => limits::runs_out(me).await,
            "no_room_for_peers" => limits::no_room_for_peers(me).await,
            "child_timeout" => aborts::child_timeout(me).await,
            "survives" => survive::rank(me).await,
            "leaves" => losses::leaves(me).await,
            "two_hundred" => losses::two_hundred(me).await,
            "hanging_files" => losses::hanging_files(me).await,
            other => panic!("no part is called {other}"),
        }
    });
}
