//! The results that a program must have: computed for all ranks, one operation after another, without the engine.

use std::ops::Range;

use allstream::Kind;

use super::make::{Act, Collective, Program, Step};
use crate::cases::{Combine, Form, counts};
use crate::values::{Value, mix};

/// What an operation leaves on a rank: for each buffer, the bits of its elements.
pub(crate) type Bits = Vec<Vec<u64>>;

pub(crate) struct Oracle {
    /// The results, by operation and by rank of its group.
    pub(crate) results: Vec<Vec<Bits>>,
}

/// `$body` with the Rust type of one of [`super::make::TYPES`].
macro_rules! of_type {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            allstream::DType::U8 => {
                type $t = u8;
                $body
            }
            allstream::DType::I32 => {
                type $t = i32;
                $body
            }
            allstream::DType::U64 => {
                type $t = u64;
                $body
            }
            allstream::DType::F32 => {
                type $t = f32;
                $body
            }
            _ => {
                type $t = allstream::bf16;
                $body
            }
        }
    };
}
pub(crate) use of_type;

pub(crate) fn bits<T: Value>(values: &[T]) -> Vec<u64> {
    values.iter().map(|x| x.bits()).collect()
}

/// A hash of a whole result, from which the inputs of later operations are made.
pub(crate) fn hash(result: &Bits) -> u64 {
    let each = |h: u64, x: &u64| (h ^ x).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    result.iter().flatten().fold(0xcbf2_9ce4_8422_2325, each)
}

/// The seed of a rank's input to operation `at`. `source`: the hash of the earlier result on which the input depends, if any.
pub(crate) fn seed(program: &Program, at: usize, rank: usize, source: Option<u64>) -> u64 {
    mix(&[program.seed, at as u64, rank as u64, source.unwrap_or(0)])
}

/// `count` input elements made from `seed`: values that suit the reduction, if there is one.
pub(crate) fn input<T: Value>(op: Option<Combine>, seed: u64, count: usize) -> Vec<T> {
    let one = |i| {
        op.map_or_else(|| T::make(None, false, mix(&[seed, i]), 0), |op| op.make(false, mix(&[seed, i]), 1))
    };
    (0..count as u64).map(one).collect()
}

/// What an output buffer contains before the operation writes there.
pub(crate) fn blank<T: Value>(seed: u64, count: usize) -> Vec<T> {
    input(None, !seed, count)
}

/// The sizes of a collective's buffers.
pub(crate) struct Sizes {
    n: usize,
    /// Elements by sender and receiver. All senders have the same row, except in an all_to_all.
    table: Vec<Vec<usize>>,
}

impl Sizes {
    pub(crate) fn new(c: &Collective, n: usize, seed: u64) -> Sizes {
        let one = |from: usize| match (c.form.varies(), c.kind) {
            (false, _) => vec![c.len; n],
            (true, Kind::AllToAll) => counts(mix(&[seed, from as u64]), n, c.len),
            _ => counts(seed, n, c.len),
        };
        Sizes { n, table: (0..n).map(one).collect() }
    }

    /// The count of each rank.
    pub(crate) fn counts(&self) -> &[usize] {
        &self.table[0]
    }

    pub(crate) fn sends(&self, rank: usize) -> &[usize] {
        &self.table[rank]
    }

    pub(crate) fn recvs(&self, rank: usize) -> Vec<usize> {
        self.table.iter().map(|row| row[rank]).collect()
    }

    pub(crate) fn total(&self) -> usize {
        self.table[0].iter().sum()
    }

    /// The place of a rank's block in a buffer of all blocks.
    pub(crate) fn block(&self, rank: usize) -> Range<usize> {
        let start = self.table[0][..rank].iter().sum();
        start..start + self.table[0][rank]
    }

    /// How many elements a rank's input has (0: it has none).
    pub(crate) fn input(&self, c: &Collective, rank: usize) -> usize {
        match c.kind {
            Kind::AllGather | Kind::Gather => self.table[0][rank],
            Kind::ReduceScatter => self.total(),
            Kind::Scatter => {
                if rank == c.root {
                    self.total()
                } else {
                    0
                }
            }
            Kind::AllToAll => self.table[rank].iter().sum(),
            Kind::Barrier => 0,
            _ => c.len,
        }
    }

    /// How many elements a rank's output has, out of place. (3: a buffer that the operation must leave as it is.)
    pub(crate) fn output(&self, c: &Collective, rank: usize) -> usize {
        match c.kind {
            Kind::AllGather => self.total(),
            Kind::Gather => {
                if rank == c.root {
                    self.total()
                } else {
                    3
                }
            }
            Kind::ReduceScatter | Kind::Scatter => self.table[0][rank],
            Kind::AllToAll => self.recvs(rank).iter().sum(),
            Kind::Barrier => 0,
            Kind::Reduce => {
                if rank == c.root {
                    c.len
                } else {
                    3
                }
            }
            _ => c.len,
        }
    }
}

impl Oracle {
    pub(crate) fn new(program: &Program) -> Oracle {
        let mut oracle = Oracle { results: Vec::new() };
        let mut hashes: Vec<Vec<Option<u64>>> = Vec::new();
        for (at, step) in program.steps.iter().enumerate() {
            let members = &program.groups[step.group];
            let source = |rank: usize| step.source.and_then(|s| hashes[s][members[rank]]);
            let seeds: Vec<u64> = (0..members.len()).map(|r| seed(program, at, r, source(r))).collect();
            let common = seed(program, at, 0, None);
            let results = result(step, &seeds, common);
            let mut seen = vec![None; program.n];
            for (rank, result) in results.iter().enumerate() {
                if takes_part(step, rank) && step.drops & 1 << rank == 0 {
                    seen[members[rank]] = Some(hash(result));
                }
            }
            hashes.push(seen);
            oracle.results.push(results);
        }
        oracle
    }
}

/// Whether a rank of the group has a result of this operation.
pub(crate) fn takes_part(step: &Step, rank: usize) -> bool {
    match step.act {
        Act::Split { .. } | Act::End { .. } => false,
        Act::Message { from, to, .. } => rank == from || rank == to,
        _ => true,
    }
}

fn result(step: &Step, seeds: &[u64], common: u64) -> Vec<Bits> {
    let n = seeds.len();
    match &step.act {
        Act::Split { .. } | Act::End { .. } => vec![Vec::new(); n],
        Act::Collective(c) => of_type!(c.dtype, T => collective::<T>(c, seeds, common)),
        Act::List { kind, op, root, lens, .. } => {
            let buffer = |j: usize, len: usize| -> Vec<u64> {
                let of = |rank: usize| input::<u64>(Some(*op), mix(&[seeds[rank], j as u64]), len);
                if *kind == Kind::Broadcast {
                    of(*root)
                } else {
                    folded(*op, &(0..n).map(of).collect::<Vec<_>>())
                }
            };
            let one: Bits = lens.iter().enumerate().map(|(j, len)| buffer(j, *len)).collect();
            vec![one; n]
        }
        Act::Bytes { all, root, len } => {
            let of = |rank: usize| bits(&input::<u8>(None, seeds[rank], bytes(*all, *len, seeds[rank])));
            let one: Bits = if *all { (0..n).map(of).collect() } else { vec![of(*root)] };
            vec![one; n]
        }
        Act::Message { from, to, dtype, len, .. } => of_type!(*dtype, T => {
            let sent = bits(&input::<T>(None, seeds[*from], *len));
            (0..n).map(|r| if r == *from || r == *to { vec![sent.clone()] } else { Vec::new() }).collect()
        }),
        Act::Shift { by, dtype, len, .. } => of_type!(*dtype, T => {
            (0..n).map(|r| vec![bits(&input::<T>(None, seeds[(r + n - by) % n], *len))]).collect()
        }),
    }
}

/// How many bytes a rank contributes. (In a broadcast, only the root's bytes matter.)
pub(crate) fn bytes(all: bool, len: usize, seed: u64) -> usize {
    if all { (mix(&[seed, 3]) % (len as u64 + 1)) as usize } else { len }
}

fn folded<T: Value>(op: Combine, inputs: &[Vec<T>]) -> Vec<T> {
    (0..inputs[0].len()).map(|i| op.fold(&inputs.iter().map(|x| x[i]).collect::<Vec<_>>())).collect()
}

fn collective<T: Value>(c: &Collective, seeds: &[u64], common: u64) -> Vec<Bits> {
    let n = seeds.len();
    let (sizes, op) = (Sizes::new(c, n, common), c.kind.reduces().then_some(c.op));
    let inputs: Vec<Vec<T>> = (0..n).map(|r| input(op, seeds[r], sizes.input(c, r))).collect();
    let whole = |inputs: &[Vec<T>]| inputs.concat();
    // What is in a rank's output if the collective writes nothing there.
    let before = |rank: usize| -> Vec<T> {
        match c.form {
            Form::InPlace => inputs[rank].clone(),
            Form::New | Form::NewV => Vec::new(),
            _ => blank(seeds[rank], sizes.output(c, rank)),
        }
    };
    let one = |rank: usize| -> Vec<T> {
        match c.kind {
            Kind::AllReduce => folded(c.op, &inputs),
            Kind::Broadcast => inputs[c.root].clone(),
            Kind::Reduce if rank == c.root => folded(c.op, &inputs),
            Kind::AllGather => whole(&inputs),
            Kind::Gather if rank == c.root => whole(&inputs),
            Kind::Reduce | Kind::Gather => before(rank),
            Kind::ReduceScatter => folded(c.op, &inputs)[sizes.block(rank)].to_vec(),
            Kind::Scatter if rank == c.root && c.form == Form::InPlace => inputs[rank].clone(),
            Kind::Scatter => inputs[c.root][sizes.block(rank)].to_vec(),
            Kind::AllToAll => (0..n)
                .flat_map(|from| {
                    let start: usize = sizes.sends(from)[..rank].iter().sum();
                    inputs[from][start..start + sizes.sends(from)[rank]].iter().copied()
                })
                .collect(),
            Kind::Scan => folded(c.op, &inputs[..=rank]),
            Kind::ExScan if rank == 0 => before(rank),
            Kind::ExScan => folded(c.op, &inputs[..rank]),
            Kind::Barrier => Vec::new(),
        }
    };
    debug_assert_eq!(sizes.n, n);
    (0..n).map(|rank| vec![bits(&one(rank))]).collect()
}
