//! Symbolic values: which contributions were combined, and in which order. Equal values have equal ids.

use std::collections::HashMap;

use crate::Rank;

/// The most ranks that can be checked: a set of contributing ranks is the bits of a `u128`.
pub(super) const MAX_RANKS: usize = 128;

/// An interned value.
pub(super) type Id = u32;

/// The value of memory that holds nothing yet.
pub(super) const NOTHING: Id = 0;

/// The `piece` of a value that was combined from different pieces of input, or from memory that held nothing.
const MIXED: u32 = u32::MAX;

/// What the checker knows of a value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Value {
    /// Ranks that contributed.
    pub(super) from: u128,
    /// Ranks that contributed more than once.
    pub(super) twice: u128,
    /// Which piece (chunk and slice) of their input they contributed, or [`MIXED`].
    pub(super) piece: u32,
    /// Whether the step that made it finished it ([`crate::Step::finish`]).
    pub(super) finished: bool,
    /// Whether it, or one of its operands, was finished and then combined or finished again.
    pub(super) spoiled: bool,
    /// Whether it was made of memory that held nothing.
    pub(super) nothing: bool,
    /// Whether all contributions were combined in rank order, lower ranks first.
    pub(super) ordered: bool,
    /// How deep combinations are nested; 0: a piece of input.
    pub(super) depth: u32,
}

/// All values of one run.
pub(super) struct Values {
    values: Vec<Value>,
    combined: HashMap<Box<[Id]>, Id>,
    pieces: u32,
}

impl Values {
    /// The inputs of `n` ranks, of `pieces` pieces each.
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

    /// The id of a piece of a rank's input.
    pub(super) fn input(&self, rank: Rank, piece: u32) -> Id {
        1 + rank as u32 * self.pieces + piece
    }

    /// What is known of a value.
    pub(super) fn get(&self, id: Id) -> &Value {
        &self.values[id as usize]
    }

    /// The value of these operands combined in this order, and then finished if `finish` says so.
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

    /// The id of the value with this key, which `make` makes if it is new. The key of a combination is its operands, two or
    /// more; the key of a finished value is the one value that was finished.
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
