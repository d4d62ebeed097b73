//! The collectives with a count for each rank. What they mean is documented on [`Comm`](super::Comm).

use std::ops::Range;

use super::Work;
use super::call::{Call, Spec};
use super::collectives::expects;
use crate::exec::Tables;
use crate::mem::Buf;
use crate::types::{Element, Kind, Rank, digest};

/// Blocks of these lengths, one after another.
fn packed(counts: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0usize;
    counts
        .iter()
        .map(|count| {
            let start = end;
            end += count;
            start..end
        })
        .collect()
}

/// All of so many elements, as one chunk.
fn whole(count: usize) -> Vec<Range<usize>> {
    std::iter::once(0..count).collect()
}

fn counts_digest(counts: &[usize]) -> u32 {
    digest(0, counts.iter().flat_map(|c| (*c as u64).to_le_bytes()))
}

/// What a call with these counts is, and how long its buffers must be.
impl Call<'_> {
    /// One count for each rank, whose sum is a length.
    fn check_counts(&self, what: &str, counts: &[usize]) -> Result<usize, String> {
        let n = self.size();
        if counts.len() != n {
            return Err(format!("{} {what} for a group of {n}: one for each rank is needed", counts.len()));
        }
        let sum = counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
        sum.filter(|s| *s <= isize::MAX as usize).ok_or_else(|| format!("the {what} add up to no length"))
    }

    /// A call whose counts all ranks know.
    fn known(&self, kind: Kind, counts: &[usize], in_place: bool) -> Result<(Spec, usize), String> {
        let total = self.check_counts("counts", counts)?;
        let (blocks, own) = (packed(counts), whole(counts[self.rank()]));
        let slots = match (kind, in_place) {
            (_, true) => [Vec::new(), blocks.clone(), blocks],
            (Kind::AllGather, false) => [own, blocks.clone(), blocks],
            (_, false) => [blocks.clone(), own, blocks],
        };
        let detail = counts_digest(counts);
        let tables = Some(Tables { slots });
        Ok((Spec { tables, detail, ..Spec::of(kind, 0, total, in_place) }, total))
    }

    fn check_own(&self, what: &str, len: usize, counts: &[usize]) -> Result<(), String> {
        let rank = self.rank();
        if len == counts[rank] {
            return Ok(());
        }
        Err(format!("{what} has {len} elements, expected the count of this rank ({rank}), {}", counts[rank]))
    }

    /// An all_gather of an input of this length, and what all ranks get.
    fn all_gathered(&self, len: usize, counts: &[usize]) -> Result<(Spec, usize), String> {
        let known = self.known(Kind::AllGather, counts, false)?;
        self.check_own("the input", len, counts)?;
        Ok(known)
    }

    fn known_in_place(&self, kind: Kind, len: usize, counts: &[usize]) -> Result<Spec, String> {
        let (spec, total) = self.known(kind, counts, true)?;
        if len != total {
            return Err(format!("the buffer has {len} elements, the counts add up to {total}"));
        }
        Ok(spec)
    }

    /// A reduce_scatter of an input of this length, and what this rank gets of it.
    fn reduce_scattered(&self, len: usize, counts: &[usize]) -> Result<(Spec, usize), String> {
        let (spec, total) = self.known(Kind::ReduceScatter, counts, false)?;
        if len != total {
            return Err(format!("the input has {len} elements, the counts add up to {total}"));
        }
        Ok((spec, counts[self.rank()]))
    }

    /// A call in which a rank knows its own counts alone. What moves between two ranks they compare, message by
    /// message.
    fn own(kind: Kind, root: Rank, slots: [Vec<Range<usize>>; 2], in_place: bool) -> Spec {
        let [input, output] = slots;
        let tables = Some(Tables { slots: [input, output, Vec::new()] });
        Spec { tables, pairwise: true, ..Spec::of(kind, root, 0, in_place) }
    }

    fn gathered(&self, own: usize, counts: &[usize], root: Rank) -> Result<(Spec, usize), String> {
        if self.rank() != root {
            return Ok((Self::own(Kind::Gather, root, [whole(own), whole(0)], false), 0));
        }
        let total = self.check_counts("counts", counts)?;
        self.check_own("the root's input", own, counts)?;
        Ok((Self::own(Kind::Gather, root, [whole(own), packed(counts)], false), total))
    }

    fn scattered(&self, len: usize, own: usize, counts: &[usize], root: Rank) -> Result<Spec, String> {
        if self.rank() != root {
            return Ok(Self::own(Kind::Scatter, root, [Vec::new(), whole(own)], false));
        }
        let total = self.check_counts("counts", counts)?;
        if len != total {
            return Err(format!("the root's input has {len} elements, the counts add up to {total}"));
        }
        self.check_own("the root's part", own, counts)?;
        Ok(Self::own(Kind::Scatter, root, [packed(counts), whole(own)], false))
    }

    fn exchanged(&self, len: usize, sends: &[usize], recvs: &[usize]) -> Result<(Spec, usize), String> {
        let (out, into) =
            (self.check_counts("counts to send", sends)?, self.check_counts("counts to receive", recvs)?);
        if len != out {
            return Err(format!("the input has {len} elements, the counts to send add up to {out}"));
        }
        let rank = self.rank();
        if sends[rank] != recvs[rank] {
            return Err(format!(
                "this rank ({rank}) sends itself {} elements and receives {} from itself",
                sends[rank], recvs[rank]
            ));
        }
        Ok((Self::own(Kind::AllToAll, 0, [packed(sends), packed(recvs)], false), into))
    }

    /// The spec, if the output is as long as it says.
    fn fits(spec: Result<(Spec, usize), String>, output: usize) -> Result<Spec, String> {
        let (spec, expected) = spec?;
        expects(output, expected).map(|()| spec)
    }
}

/// The collectives.
impl Call<'_> {
    /// See [`Comm::all_gather_v`](super::Comm::all_gather_v).
    pub fn all_gather_v<I: Buf<Elem: Element>>(&self, input: I, counts: &[usize]) -> Work<Vec<I::Elem>, I> {
        self.submit_new(Kind::AllGather, self.all_gathered(input.len(), counts), input)
    }

    /// See [`Comm::all_gather_v_into`](super::Comm::all_gather_v_into).
    pub fn all_gather_v_into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        input: I,
        output: O,
        counts: &[usize],
    ) -> Work<(I, O)> {
        let spec = Self::fits(self.all_gathered(input.len(), counts), output.len());
        self.submit_into(Kind::AllGather, spec, input, output)
    }

    /// See [`Comm::all_gather_v_in_place`](super::Comm::all_gather_v_in_place).
    pub fn all_gather_v_in_place<B: Buf>(&self, buf: B, counts: &[usize]) -> Work<B> {
        self.submit_in_place(Kind::AllGather, self.known_in_place(Kind::AllGather, buf.len(), counts), buf)
    }

    /// See [`Comm::reduce_scatter_v`](super::Comm::reduce_scatter_v).
    pub fn reduce_scatter_v<I: Buf<Elem: Element>>(
        &self,
        input: I,
        counts: &[usize],
    ) -> Work<Vec<I::Elem>, I> {
        self.submit_new(Kind::ReduceScatter, self.reduce_scattered(input.len(), counts), input)
    }

    /// See [`Comm::reduce_scatter_v_into`](super::Comm::reduce_scatter_v_into).
    pub fn reduce_scatter_v_into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        input: I,
        output: O,
        counts: &[usize],
    ) -> Work<(I, O)> {
        let spec = Self::fits(self.reduce_scattered(input.len(), counts), output.len());
        self.submit_into(Kind::ReduceScatter, spec, input, output)
    }

    /// See [`Comm::reduce_scatter_v_in_place`](super::Comm::reduce_scatter_v_in_place).
    pub fn reduce_scatter_v_in_place<B: Buf>(&self, buf: B, counts: &[usize]) -> Work<B> {
        self.submit_in_place(
            Kind::ReduceScatter,
            self.known_in_place(Kind::ReduceScatter, buf.len(), counts),
            buf,
        )
    }

    /// See [`Comm::gather_v`](super::Comm::gather_v).
    pub fn gather_v<I: Buf<Elem: Element>>(
        &self,
        input: I,
        counts: &[usize],
        root: Rank,
    ) -> Work<Vec<I::Elem>, I> {
        self.submit_new(Kind::Gather, self.gathered(input.len(), counts, root), input)
    }

    /// See [`Comm::gather_v_into`](super::Comm::gather_v_into).
    pub fn gather_v_into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        input: I,
        output: O,
        counts: &[usize],
        root: Rank,
    ) -> Work<(I, O)> {
        let spec = match self.gathered(input.len(), counts, root) {
            // Only the root's output is written.
            Ok((spec, _)) if self.rank() != root => Ok(spec),
            spec => Self::fits(spec, output.len()),
        };
        self.submit_into(Kind::Gather, spec, input, output)
    }

    /// See [`Comm::scatter_v`](super::Comm::scatter_v).
    pub fn scatter_v<I: Buf<Elem: Element>>(
        &self,
        input: I,
        counts: &[usize],
        count: usize,
        root: Rank,
    ) -> Work<Vec<I::Elem>, I> {
        self.submit_new(
            Kind::Scatter,
            self.scattered(input.len(), count, counts, root).map(|spec| (spec, count)),
            input,
        )
    }

    /// See [`Comm::scatter_v_into`](super::Comm::scatter_v_into).
    pub fn scatter_v_into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        input: I,
        output: O,
        counts: &[usize],
        root: Rank,
    ) -> Work<(I, O)> {
        let spec = self.scattered(input.len(), output.len(), counts, root);
        self.submit_into(Kind::Scatter, spec, input, output)
    }

    /// See [`Comm::all_to_all_v`](super::Comm::all_to_all_v).
    pub fn all_to_all_v<I: Buf<Elem: Element>>(
        &self,
        input: I,
        sends: &[usize],
        recvs: &[usize],
    ) -> Work<Vec<I::Elem>, I> {
        self.submit_new(Kind::AllToAll, self.exchanged(input.len(), sends, recvs), input)
    }

    /// See [`Comm::all_to_all_v_into`](super::Comm::all_to_all_v_into).
    pub fn all_to_all_v_into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        input: I,
        output: O,
        sends: &[usize],
        recvs: &[usize],
    ) -> Work<(I, O)> {
        let spec = Self::fits(self.exchanged(input.len(), sends, recvs), output.len());
        self.submit_into(Kind::AllToAll, spec, input, output)
    }
}
