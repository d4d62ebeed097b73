//! Collectives on lists: many buffers in one operation.

use super::Work;
use super::call::{Call, Spec};
use super::memory::Memory;
use super::node::calls::collectives;
use super::restore::{both, one};
use crate::mem::{BufList, ErasedBufs, Parts, RawBuf, raw_bufs};
use crate::types::{Kind, Rank};

/// The count and the memory of each pair of an input and its output. `times` as in [`Call::list_into`].
fn pairs(
    times: (usize, usize),
    inputs: Vec<RawBuf>,
    outputs: Vec<RawBuf>,
) -> Result<Vec<(usize, Memory)>, String> {
    if inputs.len() != outputs.len() {
        return Err(format!("{} inputs and {} outputs: each input needs one", inputs.len(), outputs.len()));
    }
    let pair = |(i, (input, output)): (usize, (RawBuf, RawBuf))| {
        if let Some(why) = input.unfit().or_else(|| output.unfit()) {
            return Err(format!("pair {i}: {why}"));
        }
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

    /// `times`: the length of an input is `times.0` times the count of its part, and the length of an output `times.1` times.
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
}

collectives! {
    /// [`all_reduce`](Self::all_reduce) of many buffers, which may be of several types, in one operation: they count as one
    /// call and share one future. No buffer waits until those before it are done.
    ///
    /// ```
    /// # use allstream::{Comm, bf16};
    /// # fn main() -> Result<(), allstream::Error> {
    /// # let mut comm = Comm::local(1)?.remove(0);
    /// let (weights, biases) = (vec![vec![bf16::ONE; 512], vec![bf16::ZERO; 64]], [vec![0.5f32; 64]]);
    /// let (weights, biases) = comm.all_reduce_list((weights, biases)).wait()?;
    /// # assert_eq!((weights[0].len(), biases[0].len()), (512, 64)); Ok(()) }
    /// ```
    fn all_reduce_list [L: BufList] (bufs: L) -> Work<L>
        = |call| call.list_in_place(Kind::AllReduce, 0, bufs);

    /// [`broadcast`](Self::broadcast) of many buffers in one operation.
    fn broadcast_list [L: BufList] (bufs: L) root(root) -> Work<L>
        = |call| call.list_in_place(Kind::Broadcast, root, bufs);

    /// [`reduce`](Self::reduce) of many buffers in one operation.
    fn reduce_list [L: BufList] (bufs: L) root(root) -> Work<L>
        = |call| call.list_in_place(Kind::Reduce, root, bufs);

    /// [`all_gather_into`](Self::all_gather_into) of many pairs of buffers in one operation.
    fn all_gather_list [I: BufList, O: BufList] (inputs: I, outputs: O) -> Work<(I, O)>
        = |call| call.list_into(Kind::AllGather, (1, call.size()), inputs, outputs);

    /// [`reduce_scatter_into`](Self::reduce_scatter_into) of many pairs of buffers in one operation.
    fn reduce_scatter_list [I: BufList, O: BufList] (inputs: I, outputs: O) -> Work<(I, O)>
        = |call| call.list_into(Kind::ReduceScatter, (call.size(), 1), inputs, outputs);
}
