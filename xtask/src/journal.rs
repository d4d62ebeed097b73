//! What is kept of a command's output while it runs: the counts of its tests, and the lines that explain a failure.
//!
//! A reader of a long log sees its end first, so failures are printed there again. For that the journal keeps the names of the
//! failed tests, libtest's account of the failures, and the lines before the account (processes that tests start write there).

use std::collections::VecDeque;

/// Lines kept from before an account of failures, or from before the program's end if it gave no account.
const BEFORE: usize = 120;
/// Lines kept of one account: the first ones, and the last ones.
const FIRST: usize = 180;
const LAST: usize = 60;
/// Begins the line by which a test says how many cases it went through.
const CASES: &str = "cases: ";
/// Begins the line by which a test that cannot run on this machine says why. libtest counts such a test as passed.
const SKIPPED: &str = "skipped: ";
/// Lines of one part that are printed again.
pub(crate) const PRINTED: usize = 300;

/// Tests that passed, failed and were left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

/// One program's failure.
#[derive(Debug, Default)]
struct Block {
    /// The program, as named in cargo's line `Running NAME`.
    program: String,
    before: Vec<String>,
    first: Vec<String>,
    last: VecDeque<String>,
    left_out: usize,
}

/// Reads output line by line.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    pub(crate) counts: Counts,
    /// Whether there were results of tests at all.
    pub(crate) tested: bool,
    recent: VecDeque<String>,
    program: String,
    /// Whether a line `running N tests` has come whose `test result:` has not.
    running: bool,
    /// `Some` inside libtest's account of failures, which begins with the line `failures:`.
    account: Option<Block>,
    /// Whether the lines are the list of failed tests' names at the account's end.
    naming: bool,
    blocks: Vec<Block>,
    names: Vec<String>,
    /// How long each test took, where libtest was asked to report it.
    pub(crate) times: Vec<Timed>,
    /// What tests said about the number of their cases.
    pub(crate) cases: Vec<String>,
    /// Why tests could not run here.
    pub(crate) skips: Vec<String>,
    /// How many skipped tests the running program has reported: libtest's result counts them as passed.
    skips_of_program: u64,
    /// The number N in the running program's first line `running N tests`.
    tests_of_program: Option<u64>,
}

/// A test's name (after its program's name), and how long it took.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Timed {
    pub(crate) test: String,
    pub(crate) seconds: f64,
}

/// What is printed again at the end about a part that failed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    /// The tests that failed, each with its program.
    pub(crate) names: Vec<String>,
    /// At most about [`PRINTED`] lines.
    pub(crate) lines: Vec<String>,
}

impl Journal {
    pub(crate) fn line(&mut self, line: &str) {
        let line = line.trim_end_matches(['\n', '\r']);
        // A program that ended without a result (a signal, say) is noticed when the next one starts.
        if let Some(program) = program(line) {
            self.cut_short();
            self.program = program.into();
            self.tests_of_program = None;
        }
        if let Some(number) =
            line.strip_prefix("running ").filter(|_| line.ends_with(" tests") || line.ends_with(" test"))
        {
            self.running = true;
            let number = number.split(' ').next().and_then(|number| number.parse().ok());
            self.tests_of_program = self.tests_of_program.or(number);
        }
        if let Some((test, seconds)) = timed(line) {
            self.times.push(Timed { test: named(&self.program, test), seconds });
        }
        if let Some(cases) = line.strip_prefix(CASES) {
            self.cases.push(named(&self.program, cases));
        }
        if let Some(why) = line.strip_prefix(SKIPPED).filter(|_| self.running) {
            self.skips.push(named(&self.program, why));
            self.skips_of_program += 1;
        }
        match &mut self.account {
            Some(block) if line == "failures:" => {
                // libtest writes `failures:` a second time before the list of names.
                self.naming = true;
                block.push(line);
            }
            Some(block) => {
                block.push(line);
                if let (true, Some(name)) = (self.naming, line.strip_prefix("    ")) {
                    self.names.push(named(&self.program, name));
                }
            }
            None if line == "failures:" && self.running => {
                let before = self.recent.drain(..).collect();
                let mut block = Block { program: self.program.clone(), before, ..Block::default() };
                block.push(line);
                self.account = Some(block);
                self.naming = false;
            }
            None => {
                self.recent.push_back(line.into());
                if self.recent.len() > BEFORE {
                    self.recent.pop_front();
                }
            }
        }
        if let Some((found, left_out)) = result(line) {
            self.tested = true;
            // Some tests start their own program again, for a single test. The result that this child prints is not counted. A result is the child's
            // if it filtered tests out and its number of tests is not the program's. The core (the short run, `When::Core`) filters tests
            // out of programs, too, but then the numbers agree.
            let all = found.passed.saturating_add(found.failed).saturating_add(found.skipped);
            let is_ours = left_out == 0 || self.tests_of_program == Some(all);
            self.running = !is_ours;
            if is_ours {
                let skips = std::mem::take(&mut self.skips_of_program).min(found.passed);
                // A line that some process made up may have any numbers.
                let add = |count: &mut u64, more: u64| *count = count.saturating_add(more);
                add(&mut self.counts.passed, found.passed - skips);
                add(&mut self.counts.failed, found.failed);
                add(&mut self.counts.skipped, found.skipped.saturating_add(skips));
            }
            self.blocks.extend(self.account.take());
            self.naming = false;
        }
    }

    /// Ends the running program. If its result has not come, that is kept as a failure.
    fn cut_short(&mut self) {
        if let Some(block) = self.account.take() {
            self.blocks.push(block);
        } else if self.running {
            let before = self.recent.drain(..).collect();
            self.blocks.push(Block { program: self.program.clone(), before, ..Block::default() });
            self.names.push(named(&self.program, "(ended without a result)"));
        }
        self.running = false;
        self.naming = false;
        self.skips_of_program = 0;
    }

    /// The last kept line that starts with `start`.
    pub(crate) fn last(&self, start: &str) -> Option<&str> {
        self.recent.iter().rev().map(String::as_str).find(|line| line.starts_with(start))
    }

    /// What to print again about a part that failed, once it has ended.
    pub(crate) fn report(mut self) -> Report {
        self.cut_short();
        if self.blocks.is_empty() {
            let before = self.recent.drain(..).collect();
            self.blocks.push(Block { before, ..Block::default() });
        }
        let share = PRINTED / self.blocks.len();
        let lines = self.blocks.into_iter().flat_map(|block| block.shown(share)).collect();
        Report { names: self.names, lines }
    }
}

impl Block {
    fn push(&mut self, line: &str) {
        if self.first.len() < FIRST {
            self.first.push(line.into());
            return;
        }
        self.last.push_back(line.into());
        if self.last.len() > LAST {
            self.last.pop_front();
            self.left_out += 1;
        }
    }

    /// At most about `most` lines. If there are more, the lines before the account are dropped first, then the middle of the account.
    fn shown(self, most: usize) -> Vec<String> {
        let Block { program, before, mut first, mut last, mut left_out } = self;
        let over = (first.len() + last.len()).saturating_sub(most);
        if over > 0 {
            // The end lists the names of the failed tests and their number, so up to a third of the lines is kept for it.
            let end = last.len().min(most / 3);
            left_out += last.len() - end;
            last.drain(..last.len() - end);
            let start = most - end;
            left_out += first.len().saturating_sub(start);
            first.truncate(start);
        }
        let room = most - (first.len() + last.len()).min(most);
        let mut lines = Vec::new();
        if !program.is_empty() {
            lines.push(format!("-- {program}"));
        }
        lines.extend(before.into_iter().rev().take(room).collect::<Vec<_>>().into_iter().rev());
        lines.extend(first);
        if left_out > 0 {
            lines.push(format!("-- {left_out} lines are left out here --"));
        }
        lines.extend(last);
        lines
    }
}

fn named(program: &str, test: &str) -> String {
    if program.is_empty() { test.into() } else { format!("{program}: {test}") }
}

/// Reads `     Running tests/faults.rs (target/debug/deps/faults-0123456789abcdef)` and `   Doc-tests allstream`.
fn program(line: &str) -> Option<&str> {
    let text = line.trim_start();
    if let Some(name) = text.strip_prefix("Doc-tests ") {
        return line.starts_with("   ").then_some(name);
    }
    let (name, file) = text.strip_prefix("Running ")?.split_once(" (")?;
    (line.starts_with("     ") && file.ends_with(')')).then_some(name)
}

/// Reads `test faults::one ... ok <1.234s>`, as libtest writes with `--report-time`. What the test itself printed may stand
/// between `...` and `<`.
fn timed(line: &str) -> Option<(&str, f64)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let (_, seconds) = rest.rsplit_once('<')?;
    Some((name, seconds.strip_suffix("s>")?.parse().ok()?))
}

/// Reads `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s`: the counts, and how many tests
/// were filtered out. A process that shares the pipe may have written an unfinished line in front of it.
fn result(line: &str) -> Option<(Counts, u64)> {
    let (_, rest) = line.split_once("test result: ")?;
    let numbers = rest.strip_prefix("ok. ").or_else(|| rest.strip_prefix("FAILED. "))?;
    let (mut counts, mut left_out) = (Counts::default(), 0);
    for field in numbers.split(';') {
        let mut words = field.split_whitespace();
        let (Some(number), Some(what)) = (words.next(), words.next()) else { continue };
        match (number.parse(), what) {
            (Ok(number), "passed") => counts.passed = number,
            (Ok(number), "failed") => counts.failed = number,
            (Ok(number), "ignored") => counts.skipped = number,
            (Ok(number), "filtered") => left_out = number,
            _ => {}
        }
    }
    Some((counts, left_out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_tests_are_read() {
        let line =
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s";
        assert_eq!(result(line), Some((Counts { passed: 12, failed: 0, skipped: 1 }, 0)));
        let line = "no end of linetest result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured";
        assert_eq!(result(line), Some((Counts { passed: 1, failed: 2, skipped: 0 }, 0)));
        assert_eq!(result("test a::b ... ok"), None);
    }

    #[test]
    fn numbers_that_no_test_program_has_do_no_harm() {
        let line =
            format!("test result: FAILED. {0} passed; {0} failed; {0} ignored; 0 filtered out", u64::MAX);
        let counts = journal([line.as_str(); 2]).counts;
        assert_eq!(counts, Counts { passed: u64::MAX, failed: u64::MAX, skipped: u64::MAX });
    }

    #[test]
    fn a_program_that_a_test_starts_for_itself_is_no_test_more() {
        let child = "running 1 test\ntest a ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 1 filtered out";
        let lines = format!(
            "     Running tests/cuda.rs (x)\nrunning 2 tests\n{child}\ntest a ... ok\ntest b ... FAILED\n\
            failures:\n\nb: because\n\nfailures:\n    b\n\ntest result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out"
        );
        let journal = journal(lines.lines());
        assert_eq!(journal.counts, Counts { passed: 1, failed: 1, skipped: 0 });
        assert_eq!(journal.report().names, ["tests/cuda.rs: b"]);
        // The same if tests are filtered out of the program itself, too.
        let lines = format!(
            "     Running tests/cuda.rs (x)\nrunning 2 tests\n{child}\ntest a ... ok\ntest b ... ok\n\
            test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out"
        );
        assert_eq!(self::journal(lines.lines()).counts, Counts { passed: 2, failed: 0, skipped: 0 });
    }

    #[test]
    fn times_of_tests_and_counts_of_cases_are_kept_with_their_program() {
        let lines = "     Running tests/faults/main.rs (x)\nrunning 2 tests\ncases: 12 kills\n\
            test kills::one ... ok <1.250s>\ntest kills::two ... FAILED <0.001s>\ntest three ... ok\n\
            test result: ok. 2 passed; 0 failed";
        let journal = journal(lines.lines());
        let timed = |test: &str, seconds| Timed { test: format!("tests/faults/main.rs: {test}"), seconds };
        assert_eq!(journal.times, [timed("kills::one", 1.25), timed("kills::two", 0.001)]);
        assert_eq!(journal.cases, ["tests/faults/main.rs: 12 kills"]);
    }

    fn journal(lines: impl IntoIterator<Item = impl AsRef<str>>) -> Journal {
        let mut journal = Journal::default();
        for line in lines {
            journal.line(line.as_ref());
        }
        journal
    }

    /// What cargo and libtest write, with stdout and stderr in one pipe.
    const ONE_FAILED: &str = "\
     Running tests/laws/main.rs (target/debug/deps/laws-0123)

running 1 test
test law_1 ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s

     Running tests/faults.rs (target/debug/deps/faults-0123)

running 2 tests
rank 3: a word on stderr
test kills::one ... FAILED
test kills::two ... ok

failures:

---- kills::one stdout ----
thread 'kills::one' panicked: left 1, right 2

failures:
    kills::one

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s

error: test failed, to rerun pass `--test faults`";

    #[test]
    fn a_failed_test_is_named_with_its_program_and_what_led_to_it() {
        let journal = journal(ONE_FAILED.lines());
        assert_eq!(journal.counts, Counts { passed: 2, failed: 1, skipped: 0 });
        let report = journal.report();
        assert_eq!(report.names, ["tests/faults.rs: kills::one"]);
        let text = report.lines.join("\n");
        for words in ["-- tests/faults.rs", "a word on stderr", "left 1, right 2", "test result: FAILED"] {
            assert!(text.contains(words), "`{words}` is missing in:\n{text}");
        }
    }

    #[test]
    fn a_test_that_says_that_it_cannot_run_here_counts_as_skipped() {
        let journal = journal([
            "     Running cli/tests/command/main.rs (target/debug/deps/command-1)",
            "running 3 tests",
            "test a ... ok",
            "",
            "skipped: no mpirun here",
            "test b ... ok",
            "test c ... ignored, started by others",
            "test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured",
        ]);
        assert_eq!(journal.counts, Counts { passed: 1, failed: 0, skipped: 2 });
        assert_eq!(journal.skips, ["cli/tests/command/main.rs: no mpirun here"]);
    }

    #[test]
    fn what_follows_a_failure_does_not_push_it_out() {
        let later = (0..5000).map(|i| format!("#{i} NEW cov: 1"));
        let report = journal(ONE_FAILED.lines().map(String::from).chain(later)).report();
        assert!(report.lines.iter().any(|line| line.contains("left 1, right 2")));
        assert!(report.lines.len() <= PRINTED + 2, "{}", report.lines.len());
    }

    #[test]
    fn long_accounts_are_shortened_in_the_middle_and_many_share() {
        let program = |name: &str| {
            let start = [format!("     Running {name} (target/x)"), "running 1 test".into()];
            let noise = (0..500).map(|i| format!("noise {i}"));
            let account = (0..1000).map(|i| format!("account {i}"));
            let end = ["failures:", "    t", "", "test result: FAILED. 0 passed; 1 failed"].map(String::from);
            let before = start.into_iter().chain(noise).chain(["failures:".into()]);
            before.chain(account).chain(end).collect::<Vec<_>>()
        };
        for programs in [1, 4] {
            let all = (0..programs).flat_map(|i| program(&format!("p{i}")));
            let report = journal(all).report();
            assert_eq!(report.names.len(), programs);
            assert!(report.lines.len() <= PRINTED + 2 * programs, "{}", report.lines.len());
            let count = |text: &str| report.lines.iter().filter(|line| line.contains(text)).count();
            assert_eq!(
                (count("account 0"), count("account 999"), count("FAILED")),
                (programs, programs, programs)
            );
            assert_eq!(count("lines are left out"), programs);
            assert_eq!(count("noise 499"), usize::from(programs == 1));
        }
    }

    #[test]
    fn a_program_that_ends_without_a_result_is_named() {
        let lines = "     Running tests/a.rs (x)\n\nrunning 2 tests\ntest one ... ok\nerror: test failed\n  signal: 11\n     \
            Running tests/b.rs (x)\nrunning 1 test\ntest result: ok. 1 passed; 0 failed";
        let report = journal(lines.lines()).report();
        assert_eq!(report.names, ["tests/a.rs: (ended without a result)"]);
        assert!(report.lines.iter().any(|line| line.contains("signal: 11")));
        let killed = journal(["running 1 test", "test slow has been running for over 60 seconds"]).report();
        assert_eq!(killed.names, ["(ended without a result)"]);
        assert!(killed.lines.iter().any(|line| line.contains("slow")));
    }

    #[test]
    fn without_tests_the_last_lines_are_kept() {
        let report = journal((0..1000).map(|i| format!("error {i}"))).report();
        assert!(report.names.is_empty());
        assert_eq!(report.lines.len(), BEFORE);
        assert_eq!(report.lines.last().map(String::as_str), Some("error 999"));
    }
}
