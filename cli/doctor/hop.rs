//! A hop: a stream of one process writes a word that a stream of another waits for.

use std::thread;
use std::time::{Duration, Instant};

use super::answer::{Answer, median, show_us, step, us};
use super::driver::{Gate, Gpu, Problem, Word, problem, soon};
use super::process::Second;
use super::shared::Shared;

/// Trips there and back in a round. All their waits and writes are put on the streams before the first trip begins, so that the hosts have no part in
/// what is timed: 50 on this process's stream, 100 on the other's ([`AHEAD`]), for which a stream has room.
const TRIPS: u32 = 25;
/// The most trips that are on the second process's stream and not made yet.
const AHEAD: u32 = 2 * TRIPS;
/// A word for each direction, and one that tells the second process that the probe is over.
const WORDS: usize = 3;
const MOST_ROUNDS: u32 = 40;
/// How long all rounds together may take.
const LIMIT: Duration = Duration::from_millis(1500);

pub(crate) fn hop(gpu: &'static Gpu, mut second: Second) -> Result<Answer, Problem> {
    let shared = match Shared::<WORDS>::new(gpu, &mut second)? {
        Ok(shared) => shared,
        Err(text) => return Ok(Answer::no(text)),
    };
    let [here, there, over] = shared.words;
    // However the probe ends, no stream of either process is left waiting.
    let _open = [Gate(here), Gate(there), Gate(over)];
    let [gate] = gpu.words()?.map(Gate);
    let stream = gpu.stream()?;
    here.set(1);
    let (start, mut times, mut hops) = (Instant::now(), Vec::new(), 0);
    for round in 1..=MOST_ROUNDS {
        let first = (round - 1) * TRIPS;
        step(&format!("round {round}"));
        stream.wait(gate.0, round)?;
        for trip in first + 1..=first + TRIPS {
            stream.wait(here, trip)?;
            stream.write(there, trip)?;
        }
        // Meanwhile the second process fills its stream, so that hosts have no part in what is timed.
        thread::sleep(Duration::from_millis(2));
        let begin = Instant::now();
        gate.0.set(round);
        let all = soon(LIMIT.saturating_sub(start.elapsed()), || there.get() >= first + TRIPS);
        let passed = us(begin.elapsed());
        // `here` already shows the number that a round's first trip waits for, so the first write to `there` takes no hop. Each later one takes two.
        let made = 2 * there.get().saturating_sub(first + 1).min(TRIPS - 1);
        hops += made;
        if made > 0 {
            times.push(passed / f64::from(made));
        }
        if !all || start.elapsed() > LIMIT {
            break;
        }
    }
    if times.is_empty() {
        return Err(problem(format!("no stream of the other process has answered within {LIMIT:?}")));
    }
    let rounds = times.len();
    let each = median(&mut times);
    over.set(1);
    // The other process's stream holds trips that are not made: the open word lets it finish them, and the process ends.
    there.set(Word::OPEN);
    second.end();
    Ok(Answer::new(show_us(each), format!("median of {rounds} rounds, {hops} hops")).with("hop_us", each))
}

pub(crate) fn second(gpu: &'static Gpu) -> Result<(), Problem> {
    let [here, there, over] = Shared::<WORDS>::given(gpu)?;
    let stream = gpu.stream()?;
    let mut trip = 0;
    while over.get() == 0 && trip < MOST_ROUNDS * TRIPS {
        if trip >= there.get() + AHEAD {
            thread::sleep(Duration::from_micros(50));
            continue;
        }
        trip += 1;
        stream.wait(there, trip)?;
        stream.write(here, trip + 1)?;
    }
    stream.synchronize()?;
    Ok(())
}
