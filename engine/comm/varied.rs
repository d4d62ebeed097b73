//! The collectives with a count for each rank.

use std::ops::Range;

use super::Work;
use super::call::{Call, Spec};
use super::collectives::expects;
use super::node::calls::collectives;
#[cfg(doc)]
use crate::error::Error;
use crate::mem::Buf;
use crate::types::{Element, Kind, Rank, Tables, digest};

/// The ranges of blocks of these lengths that lie one after another.
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

/// One block of all `count` elements.
fn whole(count: usize) -> Vec<Range<usize>> {
    std::iter::once(0..count).collect()
}

fn counts_digest(counts: &[usize]) -> u32 {
    digest(0, counts.iter().flat_map(|c| (*c as u64).to_le_bytes()))
}

/// For each call with counts: its spec, and the checks of its counts and of the lengths of its buffers.
impl Call<'_> {
    /// Checks that there is one count for each rank and that their sum can be a length. Returns the sum.
    fn check_counts(&self, what: &str, counts: &[usize]) -> Result<usize, String> {
        let n = self.size();
        if counts.len() != n {
            return Err(format!("{} {what} for a group of {n}: one for each rank is needed", counts.len()));
        }
        let sum = counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
        sum.filter(|s| *s <= isize::MAX as usize).ok_or_else(|| format!("the {what} add up to no length"))
    }

    /// The spec of a call whose counts all ranks know, and the sum of the counts.
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

    /// The spec of an all_gather of an input of `len` elements, and the length of the output.
    fn all_gathered(&self, len: usize, counts: &[usize]) -> Result<(Spec, usize), String> {
        let known = self.known(Kind::AllGather, counts, false)?;
        self.check_own("the input", len, counts)?;
        Ok(known)
    }

    fn known_in_place<B: Buf>(&self, kind: Kind, buf: B, counts: &[usize]) -> Work<B> {
        let spec = self.known(kind, counts, true).and_then(|(spec, total)| match buf.len() {
            len if len == total => Ok(spec),
            len => Err(format!("the buffer has {len} elements, the counts add up to {total}")),
        });
        self.submit_in_place(kind, spec, buf)
    }

    /// The spec of a reduce_scatter of an input of `len` elements, and the length of this rank's output.
    fn reduce_scattered(&self, len: usize, counts: &[usize]) -> Result<(Spec, usize), String> {
        let (spec, total) = self.known(Kind::ReduceScatter, counts, false)?;
        if len != total {
            return Err(format!("the input has {len} elements, the counts add up to {total}"));
        }
        Ok((spec, counts[self.rank()]))
    }

    /// The spec of a call in which each rank knows only its own counts. Sender and receiver compare the length of each
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

    /// Submits a call whose output must have the length that comes with the spec.
    fn fit_into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        kind: Kind,
        spec: Result<(Spec, usize), String>,
        input: I,
        output: O,
    ) -> Work<(I, O)> {
        let spec = spec.and_then(|(spec, expected)| expects(output.len(), expected).map(|()| spec));
        self.submit_into(kind, spec, input, output)
    }
}

collectives! {
    /// [`all_gather`](Self::all_gather) with a count for each rank, the same on all ranks: rank r's block has
    /// `counts[r]` elements, and blocks follow each other without gaps. This rank's input has `counts[rank()]` elements.
    fn all_gather_v [I: Buf<Elem: Element>] (input: I; counts: &[usize]) -> Work<Vec<I::Elem>, I>
        = |call| call.submit_new(Kind::AllGather, call.all_gathered(input.len(), counts), input);

    /// [`all_gather_v`](Self::all_gather_v) into `output`, of as many elements as the counts add up to.
    fn all_gather_v_into [I: Buf, O: Buf<Elem = I::Elem>] (input: I, output: O; counts: &[usize]) -> Work<(I, O)>
        = |call| call.fit_into(Kind::AllGather, call.all_gathered(input.len(), counts), input, output);

    /// [`all_gather_v`](Self::all_gather_v) in place: this rank's block, which begins where the counts of the ranks
    /// before it end, is its input.
    fn all_gather_v_in_place [B: Buf] (buf: B; counts: &[usize]) -> Work<B>
        = |call| call.known_in_place(Kind::AllGather, buf, counts);

    /// [`reduce_scatter`](Self::reduce_scatter) with a count for each rank, the same on all ranks: block r, of
    /// `counts[r]` elements, goes to rank r. The input has as many elements as the counts add up to.
    fn reduce_scatter_v [I: Buf<Elem: Element>] (input: I; counts: &[usize]) -> Work<Vec<I::Elem>, I>
        = |call| call.submit_new(Kind::ReduceScatter, call.reduce_scattered(input.len(), counts), input);

    /// [`reduce_scatter_v`](Self::reduce_scatter_v) into `output`, of `counts[rank()]` elements.
    fn reduce_scatter_v_into [I: Buf, O: Buf<Elem = I::Elem>] (input: I, output: O; counts: &[usize]) -> Work<(I, O)>
        = |call| call.fit_into(Kind::ReduceScatter, call.reduce_scattered(input.len(), counts), input, output);

    /// [`reduce_scatter_v`](Self::reduce_scatter_v) in place: the result is in this rank's block, which begins where
    /// the counts of the ranks before it end; the other blocks are unspecified.
    fn reduce_scatter_v_in_place [B: Buf] (buf: B; counts: &[usize]) -> Work<B>
        = |call| call.known_in_place(Kind::ReduceScatter, buf, counts);

    /// [`gather`](Self::gather) with a count for each rank. Each rank gives an input of its own length; the root gives all
    /// `counts` (those of other ranks are ignored). If the length of a rank's input is not the one that the root expects, both
    /// ranks get an error ([`Error::Mismatch`]).
    fn gather_v [I: Buf<Elem: Element>] (input: I; counts: &[usize]) root(root) -> Work<Vec<I::Elem>, I>
        = |call| call.submit_new(Kind::Gather, call.gathered(input.len(), counts, root), input);

    /// [`gather_v`](Self::gather_v) into the root's `output`.
    fn gather_v_into [I: Buf, O: Buf<Elem = I::Elem>] (input: I, output: O; counts: &[usize]) root(root) -> Work<(I, O)>
        = |call| match call.gathered(input.len(), counts, root) {
            // Only the root's output is written: that of another rank may have any length.
            Ok((spec, _)) if call.rank() != root => call.submit_into(Kind::Gather, Ok(spec), input, output),
            spec => call.fit_into(Kind::Gather, spec, input, output),
        };

    /// [`scatter`](Self::scatter) with a count for each rank: this rank gets `own` elements; the root gives an input of as
    /// many elements as its `counts` add up to (inputs and counts of other ranks are ignored).
    fn scatter_v [I: Buf<Elem: Element>] (input: I; counts: &[usize]) each(own: usize) root(root) -> Work<Vec<I::Elem>, I>
        = |call| {
            let spec = call.scattered(input.len(), own, counts, root);
            call.submit_new(Kind::Scatter, spec.map(|spec| (spec, own)), input)
        };

    /// [`scatter_v`](Self::scatter_v) into `output`, whose length is this rank's count.
    fn scatter_v_into [I: Buf, O: Buf<Elem = I::Elem>] (input: I, output: O; counts: &[usize]) root(root) -> Work<(I, O)>
        = |call| {
            let spec = call.scattered(input.len(), output.len(), counts, root);
            call.submit_into(Kind::Scatter, spec, input, output)
        };

    /// [`all_to_all`](Self::all_to_all) with counts: `sends[r]` elements go to rank r, `recvs[r]` come from it, packed
    /// in rank order on both sides. If one rank sends another a different number of elements than that one expects, both get
    /// an error ([`Error::Mismatch`]).
    fn all_to_all_v [I: Buf<Elem: Element>] (input: I) counts[C](sends, recvs) -> Work<Vec<I::Elem>, I>
        = |call| call.submit_new(Kind::AllToAll, call.exchanged(input.len(), sends, recvs), input);

    /// [`all_to_all_v`](Self::all_to_all_v) into `output`, of as many elements as `recvs` add up to.
    fn all_to_all_v_into [I: Buf, O: Buf<Elem = I::Elem>] (input: I, output: O) counts[C](sends, recvs)
        -> Work<(I, O)>
        = |call| call.fit_into(Kind::AllToAll, call.exchanged(input.len(), sends, recvs), input, output);
}
