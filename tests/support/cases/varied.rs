//! The collectives with a count for each rank.

use allstream::{Algo, Kind};

use super::counts;
use super::place::Place;
use super::{Combine, Expected, Form, Run, Seen, Wrong, compare, hash};
use crate::values::{Value, mix};

/// What is given where nobody looks.
const NOBODYS: [usize; 1] = [usize::MAX];

impl<T: Value, P: Place> Run<'_, T, P> {
    pub(super) fn varied(&mut self) -> Result<Seen, Wrong> {
        match self.kind {
            Kind::AllGather => self.all_gather_v(),
            Kind::ReduceScatter => self.reduce_scatter_v(),
            Kind::Gather => self.gather_v(),
            Kind::Scatter => self.scatter_v(),
            _ => self.all_to_all_v(),
        }
    }

    fn counts(&self) -> Vec<usize> {
        counts(self.case.seed, self.n(), self.case.len)
    }

    fn own(&self, counts: &[usize]) -> std::ops::Range<usize> {
        let start = counts[..self.rank()].iter().sum();
        start..start + counts[self.rank()]
    }

    /// What all ranks give, in their order.
    fn all_of(&self, counts: &[usize]) -> Vec<T> {
        counts.iter().enumerate().flat_map(|(r, count)| self.case.input::<T>(r, *count)).collect()
    }

    fn all_gather_v(&mut self) -> Result<Seen, Wrong> {
        let counts = self.counts();
        let total = counts.iter().sum();
        let input = self.case.input::<T>(self.rank(), counts[self.rank()]);
        let output = match self.form {
            Form::NewV => {
                let from = self.put_new(&input)?;
                call!(self, c, c.all_gather_v(from, &counts))?
            }
            Form::IntoV => {
                let out = self.put_out(&self.blank(total))?;
                let from = self.put(&input)?;
                let (kept, out) = call!(self, c, c.all_gather_v_into(from, out, &counts))?;
                compare("the input", &self.got(kept)?, &input, &[])?;
                self.got_out(out)?
            }
            _ => {
                let mut buf = self.blank(total);
                buf[self.own(&counts)].copy_from_slice(&input);
                let buf = self.put(&buf)?;
                let buf = call!(self, c, c.all_gather_v_in_place(buf, &counts))?;
                self.got(buf)?
            }
        };
        let expected = self.expected(|| Expected { values: self.all_of(&counts), near: Vec::new() });
        compare("the result", &output, &expected.values, &[])?;
        Ok(hash(&output))
    }

    fn reduce_scatter_v(&mut self) -> Result<Seen, Wrong> {
        let counts = self.counts();
        let (n, mine, total) = (self.n(), self.own(&counts), counts.iter().sum());
        let input = self.case.input::<T>(self.rank(), total);
        let output = match self.form {
            Form::NewV => {
                let from = self.put_new(&input)?;
                call!(self, c, c.reduce_scatter_v(from, &counts))?
            }
            Form::IntoV => {
                let out = self.put_out(&self.blank(mine.len()))?;
                let from = self.put(&input)?;
                let (kept, out) = call!(self, c, c.reduce_scatter_v_into(from, out, &counts))?;
                compare("the input", &self.got(kept)?, &input, &[])?;
                self.got_out(out)?
            }
            _ => {
                let buf = self.put(&input)?;
                let buf = call!(self, c, c.reduce_scatter_v_in_place(buf, &counts))?;
                let mut output = self.got(buf)?;
                let result = output[mine.clone()].to_vec();
                let keeps = self.algo == Algo::Direct;
                if keeps && self.case.op != Combine::Scaled {
                    output[mine.clone()].copy_from_slice(&input[mine.clone()]);
                    compare("the other blocks", &output, &input, &[])?;
                }
                result
            }
        };
        let expected = self.expected(|| self.case.reduced(n, total));
        let near = expected.near.get(mine.clone()).unwrap_or_default();
        compare("the result", &output, &expected.values[mine], near)?;
        Ok(Seen::Nothing)
    }

    fn gather_v(&mut self) -> Result<Seen, Wrong> {
        let (counts, root, is_root) = (self.counts(), self.case.root, self.is_root());
        let input = self.case.input::<T>(self.rank(), counts[self.rank()]);
        let total = counts.iter().sum();
        let given = if is_root { &counts[..] } else { &NOBODYS };
        let (output, before) = if self.form == Form::NewV {
            let from = self.put_new(&input)?;
            (call!(self, c, c.gather_v(from, given, root))?, Vec::new())
        } else {
            let before = self.blank(if is_root { total } else { 5 });
            let out = self.put_out(&before)?;
            let from = self.put(&input)?;
            let (kept, out) = call!(self, c, c.gather_v_into(from, out, given, root))?;
            compare("the input", &self.got(kept)?, &input, &[])?;
            (self.got_out(out)?, before)
        };
        if is_root {
            compare("the result", &output, &self.all_of(&counts), &[])?;
        } else {
            compare("a buffer that is not the root's", &output, &before, &[])?;
        }
        Ok(Seen::Nothing)
    }

    fn scatter_v(&mut self) -> Result<Seen, Wrong> {
        let (counts, root, is_root) = (self.counts(), self.case.root, self.is_root());
        let (own, total) = (self.own(&counts), counts.iter().sum());
        let right = self.case.input::<T>(root, total);
        let input = if is_root { right.clone() } else { self.blank(3) };
        let given = if is_root { &counts[..] } else { &NOBODYS };
        let output = if self.form == Form::NewV {
            let from = self.put_new(&input)?;
            call!(self, c, c.scatter_v(from, given, own.len(), root))?
        } else {
            let out = self.put_out(&self.blank(own.len()))?;
            let from = self.put(&input)?;
            let (kept, out) = call!(self, c, c.scatter_v_into(from, out, given, root))?;
            compare("the input", &self.got(kept)?, &input, &[])?;
            self.got_out(out)?
        };
        compare("the result", &output, &right[own], &[])?;
        Ok(Seen::Nothing)
    }

    fn all_to_all_v(&mut self) -> Result<Seen, Wrong> {
        let (n, rank, case) = (self.n(), self.rank(), self.case);
        // What each rank sends to each.
        let table: Vec<Vec<usize>> =
            (0..n).map(|from| counts(mix(&[case.seed, from as u64]), n, case.len)).collect();
        let sends = &table[rank];
        let recvs: Vec<usize> = table.iter().map(|sends| sends[rank]).collect();
        let input = case.input::<T>(rank, sends.iter().sum());
        let output = if self.form == Form::NewV {
            let from = self.put_new(&input)?;
            call!(self, c, c.all_to_all_v(from, sends, &recvs))?
        } else {
            let out = self.put_out(&self.blank(recvs.iter().sum()))?;
            let from = self.put(&input)?;
            let (kept, out) = call!(self, c, c.all_to_all_v_into(from, out, sends, &recvs))?;
            compare("the input", &self.got(kept)?, &input, &[])?;
            self.got_out(out)?
        };
        let from = |(r, sends): (usize, &Vec<usize>)| {
            let start: usize = sends[..rank].iter().sum();
            case.input::<T>(r, start + sends[rank]).split_off(start)
        };
        let right: Vec<T> = table.iter().enumerate().flat_map(from).collect();
        compare("the result", &output, &right, &[])?;
        Ok(Seen::Nothing)
    }
}
