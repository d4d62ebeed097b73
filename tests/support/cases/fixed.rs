//! The collectives with one count for all ranks.

use std::sync::atomic::Ordering;
use std::time::Duration;

use allstream::{Algo, Kind};

use super::place::Place;
use super::{Combine, Expected, Form, Run, Seen, Wrong, compare, hash, now};
use crate::values::Value;

impl<T: Value, P: Place> Run<'_, T, P> {
    pub(super) fn fixed(&mut self) -> Result<Seen, Wrong> {
        match self.kind {
            Kind::AllReduce | Kind::Reduce => self.reduce(),
            Kind::Broadcast => self.broadcast(),
            Kind::AllGather => self.all_gather(),
            Kind::ReduceScatter => self.reduce_scatter(),
            Kind::Gather => self.gather(),
            Kind::Scatter => self.scatter(),
            Kind::AllToAll => self.all_to_all(),
            Kind::Scan | Kind::ExScan => self.scan(),
            Kind::Barrier => self.barrier(),
        }
    }

    fn block(&self, count: usize) -> std::ops::Range<usize> {
        self.rank() * count..(self.rank() + 1) * count
    }

    fn reduce(&mut self) -> Result<Seen, Wrong> {
        let (n, len, root, is_root) = (self.n(), self.case.len, self.case.root, self.is_root());
        let input = self.case.input::<T>(self.rank(), len);
        let (kept, output) = match (self.kind, self.form) {
            (Kind::AllReduce, Form::InPlace) => {
                let buf = self.put(&input)?;
                let buf = call!(self, c, c.all_reduce(buf))?;
                (None, self.got(buf)?)
            }
            (Kind::AllReduce, Form::Into) => {
                let out = self.put_out(&self.blank(len))?;
                let from = self.put(&input)?;
                let (kept, out) = call!(self, c, c.all_reduce_into(from, out))?;
                (Some(kept), self.got_out(out)?)
            }
            (Kind::AllReduce, _) => {
                let from = self.put_new(&input)?;
                (None, call!(self, c, c.all_reduce_new(from))?)
            }
            (_, Form::InPlace) => {
                let buf = self.put_out(&input)?;
                let buf = call!(self, c, c.reduce(buf, root))?;
                (None, self.got_out(buf)?)
            }
            _ => {
                // The call looks at the root's output only: the others' may have any length.
                let out = self.put_out(&self.blank(if is_root { len } else { len / 2 }))?;
                let from = self.put(&input)?;
                let (kept, out) = call!(self, c, c.reduce_into(from, out, root))?;
                (Some(kept), self.got_out(out)?)
            }
        };
        if let Some(kept) = kept {
            compare("the input", &self.got(kept)?, &input, &[])?;
        }
        let expected = self.expected(|| self.case.reduced(n, len));
        if self.kind == Kind::AllReduce || is_root {
            compare("the result", &output, &expected.values, &expected.near)?;
        } else {
            let before = if self.form == Form::InPlace { input } else { self.blank(len / 2) };
            compare("a buffer that is not the root's", &output, &before, &[])?;
        }
        Ok(if self.kind == Kind::AllReduce { hash(&output) } else { Seen::Nothing })
    }

    fn broadcast(&mut self) -> Result<Seen, Wrong> {
        let (len, root, is_root) = (self.case.len, self.case.root, self.is_root());
        let right = self.case.input::<T>(root, len);
        let output = if self.form == Form::InPlace {
            let buf = self.put(&if is_root { right.clone() } else { self.blank(len) })?;
            let buf = call!(self, c, c.broadcast(buf, root))?;
            self.got(buf)?
        } else {
            let input = if is_root { right.clone() } else { self.blank(len / 3) };
            let out = self.put_out(&self.blank(len))?;
            let from = self.put(&input)?;
            let (kept, out) = call!(self, c, c.broadcast_into(from, out, root))?;
            compare("the input", &self.got(kept)?, &input, &[])?;
            self.got_out(out)?
        };
        compare("the result", &output, &right, &[])?;
        Ok(hash(&output))
    }

    /// The inputs of all ranks, in rank order.
    fn whole(&self, len: usize) -> Expected<T> {
        let values = (0..self.n()).flat_map(|r| self.case.input::<T>(r, len)).collect();
        Expected { values, near: Vec::new() }
    }

    fn all_gather(&mut self) -> Result<Seen, Wrong> {
        let (n, len) = (self.n(), self.case.len);
        let input = self.case.input::<T>(self.rank(), len);
        let output = match self.form {
            Form::New => {
                let from = self.put_new(&input)?;
                call!(self, c, c.all_gather(from))?
            }
            Form::Into => {
                let out = self.put_out(&self.blank(n * len))?;
                let from = self.put(&input)?;
                let (kept, out) = call!(self, c, c.all_gather_into(from, out))?;
                compare("the input", &self.got(kept)?, &input, &[])?;
                self.got_out(out)?
            }
            _ => {
                let mut buf = self.blank(n * len);
                buf[self.block(len)].copy_from_slice(&input);
                let buf = self.put(&buf)?;
                let buf = call!(self, c, c.all_gather_in_place(buf))?;
                self.got(buf)?
            }
        };
        let expected = self.expected(|| self.whole(len));
        compare("the result", &output, &expected.values, &[])?;
        Ok(hash(&output))
    }

    fn reduce_scatter(&mut self) -> Result<Seen, Wrong> {
        let (n, len) = (self.n(), self.case.len);
        let (mine, input) = (self.block(len), self.case.input::<T>(self.rank(), n * len));
        let output = match self.form {
            Form::New => {
                let from = self.put_new(&input)?;
                call!(self, c, c.reduce_scatter(from))?
            }
            Form::Into => {
                let out = self.put_out(&self.blank(len))?;
                let from = self.put(&input)?;
                let (kept, out) = call!(self, c, c.reduce_scatter_into(from, out))?;
                compare("the input", &self.got(kept)?, &input, &[])?;
                self.got_out(out)?
            }
            _ => {
                let buf = self.put(&input)?;
                let buf = call!(self, c, c.reduce_scatter_in_place(buf))?;
                let mut output = self.got(buf)?;
                let result = output[mine.clone()].to_vec();
                if self.algo == Algo::Direct && self.case.op != Combine::Scaled {
                    output[mine.clone()].copy_from_slice(&input[mine.clone()]);
                    compare("the other blocks", &output, &input, &[])?;
                }
                result
            }
        };
        let expected = self.expected(|| self.case.reduced(n, n * len));
        let near = expected.near.get(mine.clone()).unwrap_or_default();
        compare("the result", &output, &expected.values[mine], near)?;
        Ok(Seen::Nothing)
    }

    fn gather(&mut self) -> Result<Seen, Wrong> {
        let (n, len, root, is_root) = (self.n(), self.case.len, self.case.root, self.is_root());
        let input = self.case.input::<T>(self.rank(), len);
        let (output, before) = match self.form {
            Form::New => {
                let from = self.put_new(&input)?;
                (call!(self, c, c.gather(from, root))?, Vec::new())
            }
            Form::Into => {
                // The call looks at the root's output only: the others' may have any length.
                let before = self.blank(if is_root { n * len } else { len / 2 });
                let out = self.put_out(&before)?;
                let from = self.put(&input)?;
                let (kept, out) = call!(self, c, c.gather_into(from, out, root))?;
                compare("the input", &self.got(kept)?, &input, &[])?;
                (self.got_out(out)?, before)
            }
            _ => {
                let mut buf = input.clone();
                if is_root {
                    buf = self.blank(n * len);
                    buf[self.block(len)].copy_from_slice(&input);
                }
                let buf = self.put(&buf)?;
                let buf = call!(self, c, c.gather_in_place(buf, root))?;
                (self.got(buf)?, input)
            }
        };
        if is_root {
            compare("the result", &output, &self.whole(len).values, &[])?;
        } else {
            compare("a buffer that is not the root's", &output, &before, &[])?;
        }
        Ok(Seen::Nothing)
    }

    fn scatter(&mut self) -> Result<Seen, Wrong> {
        let (n, len, root, is_root) = (self.n(), self.case.len, self.case.root, self.is_root());
        let right = self.case.input::<T>(root, n * len);
        // The call looks at the root's input only: the others' may have any length.
        let input = if is_root { right.clone() } else { self.blank(len / 3) };
        let output = match self.form {
            Form::New => {
                let from = self.put_new(&input)?;
                call!(self, c, c.scatter(from, len, root))?
            }
            Form::Into => {
                let out = self.put_out(&self.blank(len))?;
                let from = self.put(&input)?;
                let (kept, out) = call!(self, c, c.scatter_into(from, out, root))?;
                compare("the input", &self.got(kept)?, &input, &[])?;
                self.got_out(out)?
            }
            _ => {
                let buf = if is_root { input } else { self.blank(len) };
                let buf = self.put(&buf)?;
                let buf = call!(self, c, c.scatter_in_place(buf, root))?;
                let buf = self.got(buf)?;
                if is_root {
                    compare("the root's buffer", &buf, &right, &[])?;
                    return Ok(Seen::Nothing);
                }
                buf
            }
        };
        compare("the result", &output, &right[self.block(len)], &[])?;
        Ok(Seen::Nothing)
    }

    fn all_to_all(&mut self) -> Result<Seen, Wrong> {
        let (n, len) = (self.n(), self.case.len);
        let input = self.case.input::<T>(self.rank(), n * len);
        let output = match self.form {
            Form::New => {
                let from = self.put_new(&input)?;
                call!(self, c, c.all_to_all(from))?
            }
            Form::Into => {
                let out = self.put_out(&self.blank(n * len))?;
                let from = self.put(&input)?;
                let (kept, out) = call!(self, c, c.all_to_all_into(from, out))?;
                compare("the input", &self.got(kept)?, &input, &[])?;
                self.got_out(out)?
            }
            _ => {
                let buf = self.put(&input)?;
                let buf = call!(self, c, c.all_to_all_in_place(buf))?;
                self.got(buf)?
            }
        };
        let (of, mine) = (self.expected(|| self.whole(n * len)), self.block(len));
        let right: Vec<T> =
            (0..n).flat_map(|r| of.values[r * n * len..][mine.clone()].iter().copied()).collect();
        compare("the result", &output, &right, &[])?;
        Ok(Seen::Nothing)
    }

    fn scan(&mut self) -> Result<Seen, Wrong> {
        let (n, rank, len) = (self.n(), self.rank(), self.case.len);
        let inclusive = self.kind == Kind::Scan;
        let input = self.case.input::<T>(rank, len);
        let (before, output) = if self.form == Form::InPlace {
            let buf = self.put_out(&input)?;
            let done = call!(self, c, if inclusive { c.scan(buf) } else { c.exscan(buf) })?;
            (input, self.got_out(done)?)
        } else {
            let before = self.blank(len);
            let (own, out) = (self.put(&input)?, self.put_out(&before)?);
            let done =
                call!(self, c, if inclusive { c.scan_into(own, out) } else { c.exscan_into(own, out) });
            let (kept, out) = done?;
            compare("the input", &self.got(kept)?, &input, &[])?;
            (before, self.got_out(out)?)
        };
        if !inclusive && rank == 0 {
            self.expected(|| self.prefixes(n, len, inclusive));
            compare("rank 0's buffer", &output, &before, &[])?;
            return Ok(Seen::Nothing);
        }
        let expected = self.expected(|| self.prefixes(n, len, inclusive));
        let mine = self.block(len);
        let near = expected.near.get(mine.clone()).unwrap_or_default();
        compare("the result", &output, &expected.values[mine], near)?;
        Ok(Seen::Nothing)
    }

    fn prefixes(&self, n: usize, len: usize, inclusive: bool) -> Expected<T> {
        // (Rank 0 of an exclusive scan has no result: what is computed here in its place is never compared.)
        let of = |rank: usize| 0..if inclusive { rank + 1 } else { rank.max(1) };
        self.case.folded(n, len, &(0..n).map(of).collect::<Vec<_>>())
    }

    fn barrier(&mut self) -> Result<Seen, Wrong> {
        let (n, case) = (self.n(), self.case);
        let stay = &self.oracle.stays[self.i];
        if n > 1 && case.seed as usize % n == self.rank() {
            match case.special {
                true => stay.come_late(self.oracle.users),
                false => std::thread::sleep(Duration::from_millis(2)),
            }
        }
        let enter = now();
        stay.called.fetch_add(1, Ordering::AcqRel);
        call!(self, c, c.barrier())?;
        let leave = now();
        stay.left.fetch_add(1, Ordering::AcqRel);
        Ok(Seen::Stay(enter, leave))
    }
}
