//! Symbolic values: which contributions, combined in which order. Equal values have equal ids.

use std::collections::HashMap;

use crate::Rank;

/// Most ranks that can be checked: contributions are bits of a `u128`.
pub(super) const MAX_RANKS: usize = 128;

/// An interned value.
pub(super) type Id = u32;

/// Memory that holds nothing yet.
pub(super) const NOTHING: Id = 0;

/// A value of more than one piece of input.
const MIXED: u32 = u32::MAX;

/// What there is to know of a value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Value {
    /// Ranks that contributed.
    pub(super) from: u128,
    /// Ranks that contributed more than once.
    pub(super) twice: u128,
    /// Which piece (chunk and slice) of their input.
    pub(super) piece: u32,
    /// Finished once, at the end.
    pub(super) finished: bool,
    /// Finished, and then combined or finished again.
    pub(super) spoiled: bool,
    /// Holds something that was never written.
    pub(super) nothing: bool,
    /// Lower ranks come before higher ones, all through.
    pub(super) ordered: bool,
    /// How many combinations lie upon each other; 0: a piece of input.
    pub(super) depth: u32,
}

/// All values of one run.
pub(super) struct Values {
    values: Vec<Value>,
    combined: HashMap<Box<[Id]>, Id>,
    pieces: u32,
}

impl Values {
    /// The inputs of `n` ranks of `pieces` pieces each.
    pub(super) fn new(n: usize, pieces: u32) -> Values {
        let blank = Value {
            from: 0,
            twice: 0,
            piece: 0,
            finished: false,
            spoiled: false,
            nothing: false,
            ordered: true,
            depth: 0,
        };
        let mut values = vec![Value { nothing: true, piece: MIXED, ..blank }];
        for rank in 0..n {
            values.extend((0..pieces).map(|piece| Value { from: 1 << rank, piece, ..blank }));
        }
        Values { values, combined: HashMap::new(), pieces }
    }

    /// A piece of a rank's input.
    pub(super) fn input(&self, rank: Rank, piece: u32) -> Id {
        1 + rank as u32 * self.pieces + piece
    }

    /// What is known of a value.
    pub(super) fn get(&self, id: Id) -> &Value {
        &self.values[id as usize]
    }

    /// Operands combined in this order, and finished or not.
    pub(super) fn combine(&mut self, operands: &[Id], finish: bool) -> Id {
        let id = match operands {
            [one] => *one,
            _ => self.intern(operands, |values| {
                let mut v = *values.get(operands[0]);
                v.spoiled |= v.finished;
                v.finished = false;
                for &id in &operands[1..] {
                    let other = values.get(id);
                    v.ordered &=
                        other.ordered && v.from.leading_zeros() + other.from.trailing_zeros() >= u128::BITS;
                    v.depth = v.depth.max(other.depth);
                    v.twice |= other.twice | (v.from & other.from);
                    v.from |= other.from;
                    v.piece = if v.piece == other.piece { v.piece } else { MIXED };
                    v.spoiled |= other.spoiled | other.finished;
                    v.nothing |= other.nothing;
                }
                v.depth += 1;
                v
            }),
        };
        if !finish {
            return id;
        }
        self.intern(&[id], |values| {
            let v = *values.get(id);
            Value { finished: true, spoiled: v.spoiled || v.finished, ..v }
        })
    }

    /// A combination has two operands or more; a key of one is a finishing.
    fn intern(&mut self, key: &[Id], make: impl FnOnce(&Values) -> Value) -> Id {
        if let Some(&id) = self.combined.get(key) {
            return id;
        }
        let value = make(self);
        let id = self.values.len() as Id;
        self.values.push(value);
        self.combined.insert(key.into(), id);
        id
    }
}
