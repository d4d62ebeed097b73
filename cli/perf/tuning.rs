//! `allstream perf --check-tuning`: how much slower the automatically chosen algorithm is than the best of those that can be named.

use allstream::{Algo, Comm, Error, plan};
use serde::{Deserialize, Serialize};

use super::PerfArgs;
use super::case::What;
use super::measure::{Effort, measure_in_place};
use crate::console::Console;
use crate::error::BoxError;

/// A choice is good if its time is at most this many times the best algorithm's time.
const BAR: f64 = 1.15;
/// Rounds for each size. In each round every algorithm is measured once.
const ROUNDS: usize = 5;

/// The times of one size, in place, in microseconds: each is the median of the medians of all rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Choice {
    pub(crate) size: usize,
    /// The time with the algorithm that is chosen if the call names none.
    pub(crate) auto_us: f64,
    /// The name and the time of each algorithm that can be named, fastest first.
    pub(crate) named: Vec<(String, f64)>,
}

impl Choice {
    fn new(size: usize, auto_us: f64, mut named: Vec<(String, f64)>) -> Choice {
        named.sort_by(|a, b| a.1.total_cmp(&b.1));
        Choice { size, auto_us, named }
    }

    /// The chosen algorithm's time divided by the best one's.
    fn ratio(&self) -> f64 {
        self.named.first().map_or(1.0, |(_, best)| self.auto_us / best)
    }

    fn line(&self) -> String {
        let named: Vec<_> = self.named.iter().map(|(name, us)| format!("{name} {us:.2}")).collect();
        let verdict = if self.ratio() <= BAR { "" } else { "  <" };
        format!(
            " {:>12}{:>12.2}{:>8.2}{verdict:3}  {}",
            self.size,
            self.auto_us,
            self.ratio(),
            named.join(", ")
        )
    }
}

/// The two lines of the columns' headings.
fn head() -> [String; 2] {
    [
        format!(
            "#{:>12}{:>12}{:>8}     by each algorithm that can be named, fastest first",
            "size", "chosen", "ratio"
        ),
        format!("#{:>12}{:>12}{:>8}     (us, in place)", "(B)", "(us)", "to best"),
    ]
}

/// The line after the table. `None`: nothing was measured.
pub(crate) fn footer(choices: &[Choice]) -> Option<String> {
    let worst = choices.iter().max_by(|a, b| a.ratio().total_cmp(&b.ratio()))?;
    let good = choices.iter().filter(|choice| choice.ratio() <= BAR).count();
    let best = worst.named.first().map_or("none", |(name, _)| name);
    Some(format!(
        "# Tuning               : {good} of {} sizes within {:.0} % of the best; worst {:.2} times {best}'s time, at {} B",
        choices.len(),
        (BAR - 1.0) * 100.0,
        worst.ratio(),
        worst.size
    ))
}

/// Measures all sizes, and prints a line for each.
pub(crate) fn check(
    comm: &mut Comm,
    args: &PerfArgs,
    effort: &mut Effort,
    console: &Console,
) -> Result<Vec<Choice>, BoxError> {
    let What::Collective(kind) = args.collective else { return Ok(Vec::new()) };
    let (iters, checks) = (effort.iters, effort.check);
    let mut algos = vec![Algo::Auto];
    let unit = effort.memory.dtype.size();
    let small = args.case(comm, 4, unit)?;
    for &algo in plan::algorithms(kind) {
        (effort.algo, effort.iters) = (algo, Some(1));
        // A call with an algorithm that cannot be named here fails on all ranks alike, before it sends anything.
        match measure_in_place(comm, &small, effort) {
            Ok(_) => algos.push(algo),
            Err(Error::Invalid { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    head().iter().try_for_each(|line| console.line(line))?;
    let cases = args.cases(comm, unit)?;
    let bar = console.bar("sizes", cases.len());
    let mut choices = Vec::new();
    for case in cases {
        bar.inc(1);
        let size = case.elements() * unit;
        effort.iters = Some(iters.unwrap_or_else(|| Effort::iterations(size)).div_ceil(ROUNDS));
        let mut times = vec![Vec::new(); algos.len()];
        for round in 0..ROUNDS {
            // Each round begins with the next algorithm, so that none is always the first.
            for which in (0..algos.len()).map(|turn| (turn + round) % algos.len()) {
                (effort.algo, effort.check) = (algos[which], checks && round == 0);
                let time = measure_in_place(comm, &case, effort)?;
                if let Some(wrong) = time.wrong.filter(|wrong| *wrong > 0) {
                    return Err(format!("{wrong} elements are wrong with algorithm {}", effort.algo).into());
                }
                times[which].push(time.median_us);
            }
        }
        let medians = times.into_iter().map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        });
        let mut medians = algos.iter().map(|algo| algo.name().to_owned()).zip(medians);
        let auto_us = medians.next().map_or(0.0, |(_, us)| us);
        let choice = Choice::new(size, auto_us, medians.collect());
        console.line(&choice.line())?;
        choices.push(choice);
    }
    bar.finish_and_clear();
    Ok(choices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_choice_is_named() {
        let named = |direct, ring| vec![("ring".to_owned(), ring), ("direct".to_owned(), direct)];
        let choices = [Choice::new(4, 2.1, named(2.0, 5.0)), Choice::new(64, 30.0, named(30.0, 20.0))];
        assert_eq!(choices[0].named[0].0, "direct");
        assert!(!choices[0].line().contains('<') && choices[1].line().contains('<'), "{}", choices[1].line());
        let footer = footer(&choices).unwrap();
        assert!(footer.contains("1 of 2 sizes within 15 %"), "{footer}");
        assert!(footer.contains("1.50 times ring's time, at 64 B"), "{footer}");
    }
}
