//! Many buffers in one operation. What the calls mean is documented on [`Comm`](super::Comm).

use super::Work;
use super::call::{Call, Spec};
use super::memory::Memory;
use super::restore::{both, one};
use crate::mem::{BufList, ErasedBufs, Parts, RawBuf, raw_bufs};
use crate::types::{Kind, Rank};

/// The count and the memory of each input with its output; `times` as in [`Call::list_into`].
fn pairs(
    times: (usize, usize),
    inputs: Vec<RawBuf>,
    outputs: Vec<RawBuf>,
) -> Result<Vec<(usize, Memory)>, String> {
    if inputs.len() != outputs.len() {
        return Err(format!("{} inputs and {} outputs: each input needs one", inputs.len(), outputs.len()));
    }
    let pair = |(i, (input, output)): (usize, (RawBuf, RawBuf))| {
        let count = input.len / times.0;
        if input.dtype != output.dtype
            || input.len != count * times.0
            || Some(output.len) != count.checked_mul(times.1)
        {
            return Err(format!(
                "pair {i}: an input of {} x {} and an output of {} x {}, expected one type, and {} elements of output for \
                 every {} of input",
                input.len, input.dtype, output.len, output.dtype, times.1, times.0
            ));
        }
        Ok((count, Memory { input: Some(input), output }))
    };
    inputs.into_iter().zip(outputs).enumerate().map(pair).collect()
}

impl Call<'_> {
    fn list_in_place<L: BufList>(&self, kind: Kind, root: Rank, mut bufs: L) -> Work<L> {
        let part = |output: RawBuf| (output.len, Memory { input: None, output });
        let parts = raw_bufs(&mut bufs).into_iter().map(part).collect();
        let held = ErasedBufs::new(Parts { input: (), output: bufs });
        Work::new(self.submit_parts(Spec::of(kind, root, 0, true), Ok(parts), held), one::<L>)
    }

    /// See [`Comm::all_reduce_list`](super::Comm::all_reduce_list).
    pub fn all_reduce_list<L: BufList>(&self, bufs: L) -> Work<L> {
        self.list_in_place(Kind::AllReduce, 0, bufs)
    }

    /// See [`Comm::broadcast_list`](super::Comm::broadcast_list).
    pub fn broadcast_list<L: BufList>(&self, bufs: L, root: Rank) -> Work<L> {
        self.list_in_place(Kind::Broadcast, root, bufs)
    }

    /// See [`Comm::reduce_list`](super::Comm::reduce_list).
    pub fn reduce_list<L: BufList>(&self, bufs: L, root: Rank) -> Work<L> {
        self.list_in_place(Kind::Reduce, root, bufs)
    }

    /// `times`: how many elements of input and of output there are for each of the count.
    fn list_into<I: BufList, O: BufList>(
        &self,
        kind: Kind,
        times: (usize, usize),
        mut inputs: I,
        mut outputs: O,
    ) -> Work<(I, O)> {
        let parts = pairs(times, raw_bufs(&mut inputs), raw_bufs(&mut outputs));
        let held = ErasedBufs::new(Parts { input: inputs, output: outputs });
        Work::new(self.submit_parts(Spec::of(kind, 0, 0, false), parts, held), both::<I, O>)
    }

    /// See [`Comm::all_gather_list`](super::Comm::all_gather_list).
    pub fn all_gather_list<I: BufList, O: BufList>(&self, inputs: I, outputs: O) -> Work<(I, O)> {
        self.list_into(Kind::AllGather, (1, self.size()), inputs, outputs)
    }

    /// See [`Comm::reduce_scatter_list`](super::Comm::reduce_scatter_list).
    pub fn reduce_scatter_list<I: BufList, O: BufList>(&self, inputs: I, outputs: O) -> Work<(I, O)> {
        self.list_into(Kind::ReduceScatter, (self.size(), 1), inputs, outputs)
    }
}
