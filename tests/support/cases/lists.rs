//! Many buffers in one operation, and bytes of unknown lengths.

use allstream::{HostBuf, Kind};

use super::counts;
use super::{Case, Combine, Run, Seen, Wrong, boxed, compare, hash};
use crate::values::{Value, mix};

/// The longest buffer of a list. It is limited because each rank computes the expected results of a list by itself.
const LONGEST: usize = 60_001;

/// The lengths of a list's buffers: several of the case's type, three of another type, and one more of the case's type.
struct Lengths {
    first: Vec<usize>,
    second: [usize; 3],
    last: usize,
}

impl Lengths {
    fn of(case: &Case) -> Lengths {
        let len = case.len.min(LONGEST);
        let h = mix(&[case.seed, 17]);
        // Sometimes there are more buffers than are in flight together (16), sometimes none.
        let many = [0, 1, 3, 24][(h % 4) as usize];
        let first = (0..many).map(|j| [len / 7, 0, 1, 13, len % 31][(j + h as usize / 8) % 5]).collect();
        Lengths { first, second: [0, len, 5], last: len / 3 }
    }
}

impl<T: Value> Run<'_, T> {
    pub(super) fn list(&mut self) -> Result<Seen, Wrong> {
        // The reduction must be defined on the other type too: each `ReduceOp` is on `i32`.
        match self.case.op {
            Combine::Op(_) => self.of_types::<i32>(),
            _ => self.of_types::<T>(),
        }
    }

    fn of_types<U: Value>(&mut self) -> Result<Seen, Wrong> {
        match self.kind {
            Kind::AllGather => self.gathered_list::<U>(),
            Kind::ReduceScatter => self.scattered_list::<U>(),
            _ => self.list_in_place::<U>(),
        }
    }

    /// The input of a rank in buffer `j` of a list.
    fn nth<U: Value>(&self, j: usize, rank: usize, len: usize) -> Vec<U> {
        self.case.nth(j).input(rank, len)
    }

    fn list_in_place<U: Value>(&mut self) -> Result<Seen, Wrong> {
        let (rank, root, lengths) = (self.rank(), self.case.root, Lengths::of(self.case));
        let many = lengths.first.len();
        let second: [Box<[U]>; 3] =
            std::array::from_fn(|j| boxed(&self.nth::<U>(many + j, rank, lengths.second[j])));
        let first: Vec<Vec<T>> =
            lengths.first.iter().enumerate().map(|(j, len)| self.nth(j, rank, *len)).collect();
        let last = vec![HostBuf::from(&self.nth::<T>(many + 3, rank, lengths.last)[..])];
        let list = (first, second, last);
        let kind = self.kind;
        let (first, second, last) = call!(
            self,
            c,
            match kind {
                Kind::AllReduce => c.all_reduce_list(list),
                Kind::Broadcast => c.broadcast_list(list, root),
                _ => c.reduce_list(list, root),
            }
        )?;
        let mut seen = Vec::new();
        for (j, buf) in first.iter().enumerate() {
            seen.push(self.judge(j, buf)?);
        }
        for (j, buf) in second.iter().enumerate() {
            seen.push(self.judge(many + j, buf)?);
        }
        seen.push(self.judge(many + 3, &last[0])?);
        Ok(together(&seen))
    }

    /// Checks buffer `j` of a list that was worked on in place.
    fn judge<U: Value>(&self, j: usize, buf: &[U]) -> Result<Seen, Wrong> {
        let (n, len, case, root) = (self.n(), buf.len(), self.case.nth(j), self.case.root);
        let name = format!("buffer {j}");
        match self.kind {
            Kind::Broadcast => compare(&name, buf, &case.input(root, len), &[])?,
            Kind::Reduce if !self.is_root() => {
                compare(&name, buf, &case.input(self.rank(), len), &[])?;
                return Ok(Seen::Nothing);
            }
            _ => {
                let expected = case.reduced::<U>(n, len);
                compare(&name, buf, &expected.values, &expected.near)?;
            }
        }
        Ok(if self.kind == Kind::Reduce { Seen::Nothing } else { hash(buf) })
    }

    fn gathered_list<U: Value>(&mut self) -> Result<Seen, Wrong> {
        let (n, rank, lengths) = (self.n(), self.rank(), Lengths::of(self.case));
        let many = lengths.first.len();
        let first: Vec<Vec<T>> =
            lengths.first.iter().enumerate().map(|(j, len)| self.nth(j, rank, *len)).collect();
        let second: [Box<[U]>; 3] =
            std::array::from_fn(|j| boxed(&self.nth::<U>(many + j, rank, lengths.second[j])));
        let outputs: (Vec<Vec<T>>, [Vec<U>; 3]) = (
            lengths.first.iter().map(|len| self.blank(n * len)).collect(),
            lengths.second.map(|len| vec![U::default(); n * len]),
        );
        let inputs = (first.clone(), second.clone());
        let (kept, outputs) = call!(self, c, c.all_gather_list(inputs, outputs))?;
        let mut seen = Vec::new();
        for (j, out) in outputs.0.iter().enumerate() {
            compare("an input", &kept.0[j], &first[j], &[])?;
            seen.push(self.judge_gathered(j, out)?);
        }
        for (j, out) in outputs.1.iter().enumerate() {
            compare("an input", &kept.1[j], &second[j], &[])?;
            seen.push(self.judge_gathered(many + j, out)?);
        }
        Ok(together(&seen))
    }

    fn judge_gathered<U: Value>(&self, j: usize, out: &[U]) -> Result<Seen, Wrong> {
        let n = self.n();
        let right: Vec<U> = (0..n).flat_map(|r| self.nth::<U>(j, r, out.len() / n)).collect();
        compare(&format!("output {j}"), out, &right, &[])?;
        Ok(hash(out))
    }

    fn scattered_list<U: Value>(&mut self) -> Result<Seen, Wrong> {
        let (n, rank, lengths) = (self.n(), self.rank(), Lengths::of(self.case));
        let many = lengths.first.len();
        let first: Vec<Vec<T>> =
            lengths.first.iter().enumerate().map(|(j, len)| self.nth(j, rank, n * len)).collect();
        let second: [Box<[U]>; 3] =
            std::array::from_fn(|j| boxed(&self.nth::<U>(many + j, rank, n * lengths.second[j])));
        let outputs: (Vec<Vec<T>>, [Vec<U>; 3]) = (
            lengths.first.iter().map(|len| self.blank(*len)).collect(),
            lengths.second.map(|len| vec![U::default(); len]),
        );
        let inputs = (first.clone(), second.clone());
        let (kept, outputs) = call!(self, c, c.reduce_scatter_list(inputs, outputs))?;
        for (j, out) in outputs.0.iter().enumerate() {
            compare("an input", &kept.0[j], &first[j], &[])?;
            self.judge_scattered(j, out)?;
        }
        for (j, out) in outputs.1.iter().enumerate() {
            compare("an input", &kept.1[j], &second[j], &[])?;
            self.judge_scattered(many + j, out)?;
        }
        Ok(Seen::Nothing)
    }

    fn judge_scattered<U: Value>(&self, j: usize, out: &[U]) -> Result<(), Wrong> {
        let (n, len) = (self.n(), out.len());
        let expected = self.case.nth(j).reduced::<U>(n, n * len);
        let mine = self.rank() * len..(self.rank() + 1) * len;
        let near = expected.near.get(mine.clone()).unwrap_or_default();
        compare(&format!("output {j}"), out, &expected.values[mine], near)
    }

    pub(super) fn bytes(&mut self) -> Result<Seen, Wrong> {
        let (n, rank, root, case) = (self.n(), self.rank(), self.case.root, self.case);
        let lengths = counts(case.seed, n, case.len);
        if self.kind == Kind::Broadcast {
            let right = case.input::<u8>(root, case.len);
            let given = if self.is_root() { right.clone() } else { vec![9; lengths[rank] % 50] };
            let got = call!(self, c, c.broadcast_bytes(given, root))?;
            compare("the bytes", &got, &right, &[])?;
            return Ok(hash(&got));
        }
        let all = call!(self, c, c.all_gather_bytes(case.input::<u8>(rank, lengths[rank])))?;
        if all.len() != n {
            return Err(Wrong::Values(format!("bytes of {} ranks, expected {n}", all.len())));
        }
        for (r, got) in all.iter().enumerate() {
            compare(&format!("the bytes of rank {r}"), got, &case.input::<u8>(r, lengths[r]), &[])?;
        }
        Ok(together(&all.iter().map(|b| hash(b)).collect::<Vec<_>>()))
    }
}

/// Combines what a rank saw of several buffers; `Nothing` if one of them has no hash.
fn together(seen: &[Seen]) -> Seen {
    let mut hashes = Vec::new();
    for one in seen {
        match one {
            Seen::Hash(h) => hashes.push(*h),
            _ => return Seen::Nothing,
        }
    }
    hash(&hashes)
}
