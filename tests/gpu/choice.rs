//! What is tried: a list of cases, the same on every rank.

use std::time::Duration;

use allstream::plan::{self, Shape, algorithms};
use allstream::{Algo, DType, Kind, ReduceOp};

use crate::cases::{Await, Case, Combine, Form, What};
use crate::driver::Driver;
use crate::values::mix;

/// Whether the ranks of a world are bound to the device, and how they must then reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bound {
    /// Not at all: the host stages everything.
    No,
    Peer,
    Nccl,
}

/// For one call.
pub(crate) const CALL: Duration = Duration::from_secs(60);

const FORMS: [Form; 6] = [Form::InPlace, Form::Into, Form::New, Form::InPlaceV, Form::IntoV, Form::NewV];
/// Of one block, where there are several.
const SMALL: [usize; 5] = [0, 1, 7, 1000, 4097];
/// Megabytes, whatever the type.
const LARGE: [usize; 2] = [1 << 20, 3_000_001];

/// What cases differ in, one after another.
struct Turns {
    n: usize,
    /// Some inputs have NaN, infinities and the like.
    special: bool,
    cases: Vec<Case>,
}

impl Turns {
    fn add(&mut self, (kind, algo, form): (Kind, Algo, Form), len: usize, (dtype, op): (DType, Combine)) {
        let turn = self.cases.len();
        let h = mix(&[turn as u64, self.n as u64]);
        self.cases.push(Case {
            what: What::Collective(kind, algo, form),
            len,
            dtype,
            op,
            root: [0, self.n - 1, self.n / 2][turn % 3],
            special: self.special && h.is_multiple_of(4),
            end: [Await::Wait, Await::Poll, Await::Later][(h >> 8) as usize % 3],
            seed: h,
            timeout: CALL,
            refused: false,
        });
    }
}

/// Whether every rank of `n` on one host has a plan for it.
fn suits(n: usize, kind: Kind, algo: Algo, form: Form) -> bool {
    let (hosts, in_place, varied) = (vec![0; n], form.in_place(kind), form.varies());
    let shape = |rank| Shape { n, rank, root: 0, in_place, varied, hosts: &hosts };
    (0..n).all(|rank| plan::plan(kind, algo, &shape(rank)).is_ok())
}

/// - Every collective in every form at every length, each with another type and reduction;
/// - every type with every reduction in every collective that combines (with a slow driver only for 2 ranks);
/// - every algorithm;
/// - what takes long only where the device is fast.
pub(crate) fn cases(n: usize, driver: &Driver, bound: Bound) -> Vec<Case> {
    let ops = Combine::all();
    let pairs = |kind: Kind| {
        let fits = |dtype: DType| {
            // Functions that do not commute have a plan of their own each; `tests/conformance/calls.rs` has those.
            let fits = move |op: &Combine| *op != Combine::Maps && op.supports(dtype) && op.fits(kind);
            ops.iter().copied().filter(fits).map(move |op| (dtype, op)).collect::<Vec<_>>()
        };
        let all = DType::ALL.iter().copied().flat_map(fits).collect::<Vec<_>>();
        if kind.reduces() { all } else { all.into_iter().filter(|(_, op)| *op == ops[0]).collect() }
    };
    let kinds = || Kind::ALL.into_iter().filter(|kind| *kind != Kind::Barrier);
    // NCCL's NaN has other bits than ours (seen with 2.30.7 on an H200), and which it has nobody promises.
    let mut turns = Turns { n, special: bound != Bound::Nccl, cases: Vec::new() };
    for (k, kind) in kinds().enumerate() {
        let pairs = pairs(kind);
        // Steps that no number of pairs shares a factor with, so that all have their turn.
        let mut next = (0..).map(|turn| pairs[(turn * 37 + k * 11 + n) % pairs.len()]);
        let mut next = || next.next().expect("it has no end");
        // What makes its output makes it on the host, and the calls of a bound communicator have buffers of one kind.
        let new = |form: &Form| matches!(form, Form::New | Form::NewV);
        let forms = FORMS.into_iter().filter(|form| form.is_of(kind) && (bound == Bound::No || !new(form)));
        for form in forms.clone() {
            SMALL.iter().for_each(|len| turns.add((kind, Algo::Auto, form), *len, next()));
        }
        if driver.large() {
            for (form, len) in forms.clone().flat_map(|form| LARGE.map(|len| (form, len))) {
                // Blocks of all ranks together are as large.
                turns.add((kind, Algo::Auto, form), if kind.varies() { len / n + 1 } else { len }, next());
            }
        }
        if kind.reduces() && (n == 2 || driver.large()) {
            for (turn, pair) in pairs.iter().enumerate() {
                let form = if turn % 2 == 0 { Form::InPlace } else { Form::Into };
                turns.add((kind, Algo::Auto, form), 33 + turn % 5, *pair);
            }
        }
        for algo in algorithms(kind).iter().copied() {
            for form in [Form::InPlace, Form::Into].into_iter().filter(|form| suits(n, kind, algo, *form)) {
                turns.add((kind, algo, form), 1001, (DType::F32, Combine::Op(ReduceOp::Sum)));
                let goes = |(dtype, op): &(DType, Combine)| op.goes_by(Some(*dtype), (kind, algo));
                let pair = std::iter::repeat_with(&mut next).find(goes).expect("it has no end");
                turns.add((kind, algo, form), 257, pair);
            }
        }
    }
    turns.cases
}
