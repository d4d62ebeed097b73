//! The check: compares a rank's result with the oracle's, piece by piece.
//!
//! Inputs repeat after `PERIOD` elements, and so does the result within each block. So the oracle is asked only for the first `PERIOD`
//! elements of a block, and the whole block is compared with repetitions of these, a slice at a time.

use super::case::{Case, PERIOD, Value};

/// The most elements that are compared at a time: a whole number of periods, so that the next slice of a block begins at the start of a period.
const PATTERN: usize = 64 * PERIOD;

/// How many elements of a rank's result are wrong.
pub(crate) fn wrong<T: Value>(case: &Case, buf: &[T], in_place: bool) -> u64 {
    let range = case.result(in_place);
    let len = range.len() as u64;
    buf.get(range).map_or(len, |result| Check::new(case).wrong(0, result))
}

/// Counts the wrong elements of one rank's result.
#[derive(Debug)]
pub(crate) struct Check<'a, T> {
    case: &'a Case,
    /// The block that `expected` belongs to.
    block: Option<usize>,
    /// What the elements of the block must be, from its first one on: at most `PATTERN` of them.
    expected: Vec<f64>,
    /// The values of the element type that are nearest to `expected`, and whether each of them passes the check (`all_pass`). A nearest value
    /// does not pass if the type cannot hold the expected number.
    nearest: Vec<T>,
    all_pass: bool,
}

impl<'a, T: Value> Check<'a, T> {
    pub(crate) fn new(case: &'a Case) -> Check<'a, T> {
        Check { case, block: None, expected: Vec::new(), nearest: Vec::new(), all_pass: false }
    }

    /// How many elements are wrong in a piece of the result, whose first one is the result's element `at`.
    pub(crate) fn wrong(&mut self, mut at: usize, mut piece: &[T]) -> u64 {
        let mut wrong = 0;
        while !piece.is_empty() {
            let (block, within) = (at / self.case.count, at % self.case.count);
            if self.block != Some(block) {
                self.ask(block);
            }
            // Up to the end of the piece, of the pattern or of the block, whichever comes first.
            let start = within % PERIOD;
            let len = piece.len().min(self.expected.len() - start).min(self.case.count - within);
            let (here, rest) = piece.split_at(len);
            wrong += self.wrong_here(start, here);
            (at, piece) = (at + len, rest);
        }
        wrong
    }

    /// Compares these elements with the pattern from its element `start` on, and counts the wrong ones.
    fn wrong_here(&self, start: usize, here: &[T]) -> u64 {
        let range = start..start + here.len();
        // A loop that does not stop at the first difference is compiled to compare many elements at a time.
        let same = here.iter().zip(&self.nearest[range.clone()]).fold(true, |same, (x, y)| same & (x == y));
        if same && self.all_pass {
            return 0;
        }
        let differs = |(x, expected): &(&T, &f64)| !x.is(**expected, self.case.n);
        here.iter().zip(&self.expected[range]).filter(differs).count() as u64
    }

    /// Asks the oracle for one period of a block, and repeats its answer.
    fn ask(&mut self, block: usize) {
        let (first, len) = (block * self.case.count, self.case.count.min(PATTERN));
        self.expected.clear();
        self.expected.extend((0..len.min(PERIOD)).map(|i| self.case.expected::<T>(first + i)));
        while self.expected.len() < len {
            let more = (len - self.expected.len()).min(self.expected.len());
            self.expected.extend_from_within(..more);
        }
        self.nearest = self.expected.iter().map(|expected| T::nearest(*expected)).collect();
        let mut both = self.nearest.iter().zip(&self.expected);
        self.all_pass = both.all(|(nearest, expected)| nearest.is(*expected, self.case.n));
        self.block = Some(block);
    }
}

#[cfg(test)]
mod tests {
    use allstream::{Kind, ReduceOp, bf16, f8e4m3};

    use super::super::case::What;
    use super::*;

    fn case(kind: Kind, op: ReduceOp, rank: usize, elements: usize) -> Case {
        Case::new(What::Collective(kind), op, 1, (rank, 3), elements)
    }

    /// The result that the rank should have.
    fn result<T: Value>(case: &Case) -> Vec<T> {
        (0..case.lengths().1).map(|i| T::nearest(case.expected::<T>(i))).collect()
    }

    /// Element by element, with no pattern.
    fn by_the_oracle<T: Value>(case: &Case, result: &[T]) -> u64 {
        let differs = |(i, x): &(usize, &T)| !x.is(case.expected::<T>(*i), case.n);
        result.iter().enumerate().filter(differs).count() as u64
    }

    #[test]
    fn patterns_are_what_the_oracle_says_of_each_element() {
        // Smaller than a period, not a multiple of it, and several patterns.
        for elements in [1, 3 * 50, 3 * 97 + 1, 3 * (PATTERN + 5), 7 * PATTERN + 30] {
            for (kind, rank) in What::COLLECTIVES.into_iter().flat_map(|kind| [(kind, 1), (kind, 2)]) {
                let case = case(kind, ReduceOp::Sum, rank, elements);
                let result = result::<f32>(&case);
                assert_eq!(Check::new(&case).wrong(0, &result), 0, "{kind:?} of {elements} on rank {rank}");
                // Shifted by one element, most are wrong: as many as the oracle says.
                let shifted: Vec<f32> = result.iter().skip(1).chain(result.first()).copied().collect();
                let expected = by_the_oracle(&case, &shifted);
                assert_eq!(
                    Check::new(&case).wrong(0, &shifted),
                    expected,
                    "{kind:?} of {elements} on rank {rank}"
                );
            }
        }
    }

    #[test]
    fn wrong_elements_are_counted_at_the_ends_of_what_is_compared_at_a_time() {
        let len = 3 * PATTERN + 40;
        let case = case(Kind::AllReduce, ReduceOp::Sum, 0, len);
        let right = result::<f32>(&case);
        let places = [0, 1, PERIOD, PATTERN - 1, PATTERN, 2 * PATTERN - 1, 2 * PATTERN, len - 1];
        // In one piece, and in pieces that end within a period.
        for piece in [len, PATTERN, 1000] {
            let wrong = |result: &[f32]| {
                let mut check = Check::new(&case);
                result.chunks(piece).enumerate().map(|(i, part)| check.wrong(i * piece, part)).sum::<u64>()
            };
            assert_eq!(wrong(&right), 0);
            let mut all = right.clone();
            for place in places {
                let mut one = right.clone();
                one[place] = f32::NAN;
                assert_eq!(wrong(&one), 1, "NaN at {place} in pieces of {piece}");
                all[place] += 1.0;
            }
            assert_eq!(wrong(&all), places.len() as u64, "in pieces of {piece}");
        }
    }

    #[test]
    fn what_differs_by_rounding_is_right() {
        let case = case(Kind::AllReduce, ReduceOp::Avg, 0, 2 * PATTERN);
        let mut result = result::<bf16>(&case);
        let place = (0..result.len()).rev().find(|i| result[*i].to_f32() > 1.0).unwrap();
        result[place] = bf16::from_bits(result[place].to_bits() + 1);
        assert_eq!(Check::new(&case).wrong(0, &result), 0, "three roundings are within the tolerance");
        result[place] = bf16::from_bits(result[place].to_bits() + 8);
        assert_eq!(Check::new(&case).wrong(0, &result), 1);
    }

    /// An element is not right merely because it is the type's nearest value.
    #[test]
    fn a_number_that_the_type_does_not_hold_is_wrong() {
        let case = Case::new(What::Collective(Kind::AllReduce), ReduceOp::Prod, 0, (0, 20), 300);
        let beyond = (0..300).filter(|i| case.expected::<f8e4m3>(*i) > 1000.0).count() as u64;
        assert!(beyond > 0);
        assert_eq!(Check::new(&case).wrong(0, &result::<f8e4m3>(&case)), beyond);
    }
}
