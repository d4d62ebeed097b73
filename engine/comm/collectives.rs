//! The collectives with one count for all ranks.

use super::Work;
use super::call::{Call, Spec};
use super::calls::calls;
use super::memory::Memory;
use super::node::calls::collectives;
use super::restore::{both, made, made_of_value, nothing, one, one_value};
use crate::device::DeviceBuf;
use crate::error::Error;
#[cfg(doc)]
use crate::error::Failed;
use crate::mem::{Buf, ErasedBufs, Parts, zeroes};
use crate::types::{DType, Element, Kind, Rank};

fn no_memory(len: usize, dtype: DType) -> String {
    let bytes = len as u128 * dtype.size() as u128;
    format!("the result has {len} x {dtype}, {bytes} bytes, for which this process has no memory")
}

/// The lengths of buffers: the `count` that the length of one buffer gives, and the length that the other buffer must then have.
impl Call<'_> {
    /// The length of a buffer with a block of `count` elements for each rank. If it overflows, it is a length that no buffer has.
    fn times_size(&self, count: usize) -> usize {
        count.saturating_mul(self.size())
    }

    /// The length of a block, if `len` elements are a block for each rank.
    fn blocks(&self, len: usize) -> Result<usize, String> {
        let n = self.size();
        if !len.is_multiple_of(n) {
            return Err(format!(
                "the buffer has {len} elements, expected a multiple of the group's size, {n}"
            ));
        }
        Ok(len / n)
    }

    fn is_root(&self, root: Rank) -> bool {
        self.rank() == root
    }

    /// A collective in place, in a buffer of `len` elements.
    fn spec_in_place(&self, kind: Kind, root: Rank, len: usize) -> Result<Spec, String> {
        let count = match kind {
            Kind::AllGather | Kind::ReduceScatter | Kind::AllToAll => self.blocks(len)?,
            Kind::Gather | Kind::Scatter if self.is_root(root) => self.blocks(len)?,
            _ => len,
        };
        Ok(Spec::of(kind, root, count, true))
    }

    /// A collective on an input of `input` elements, and the length of its output on this rank (0 in a gather, except on
    /// the root).
    fn spec_of_input(&self, kind: Kind, root: Rank, input: usize) -> Result<(Spec, usize), String> {
        let count = match kind {
            Kind::ReduceScatter | Kind::AllToAll => self.blocks(input)?,
            _ => input,
        };
        let output = match kind {
            Kind::AllGather | Kind::AllToAll => self.times_size(count),
            Kind::Gather => self.times_size(if self.is_root(root) { count } else { 0 }),
            _ => count,
        };
        Ok((Spec::of(kind, root, count, false), output))
    }

    /// A collective that gives every rank an output of `count` elements.
    fn spec_of_output(&self, kind: Kind, root: Rank, input: usize, count: usize) -> Result<Spec, String> {
        let n = self.size();
        if self.is_root(root) {
            if kind == Kind::Scatter && Some(input) != count.checked_mul(n) {
                return Err(format!("the root's input has {input} elements, expected {n} blocks of {count}"));
            }
            if kind == Kind::Broadcast && input != count {
                return Err(format!("the root's input has {input} elements, its output {count}"));
            }
        }
        Ok(Spec::of(kind, root, count, false))
    }

    /// A collective on an input of `input` elements into an output of `output` elements.
    fn spec_into(&self, kind: Kind, root: Rank, input: usize, output: usize) -> Result<Spec, String> {
        if matches!(kind, Kind::Broadcast | Kind::Scatter) {
            return self.spec_of_output(kind, root, input, output);
        }
        let (spec, expected) = self.spec_of_input(kind, root, input)?;
        // Only the root's output is written.
        let is_idle = matches!(kind, Kind::Reduce | Kind::Gather) && !self.is_root(root);
        if is_idle { Ok(spec) } else { expects(output, expected).map(|()| spec) }
    }
}

/// An error if an output does not have the expected length.
pub(super) fn expects(output: usize, expected: usize) -> Result<(), String> {
    if output == expected {
        return Ok(());
    }
    Err(format!("the output has {output} elements, expected {expected}"))
}

/// Typed forms of [`Call::submit`]: in place, from one buffer into another, and into a new vector.
impl Call<'_> {
    pub(super) fn submit_in_place<B: Buf>(
        &self,
        kind: Kind,
        spec: Result<Spec, String>,
        mut buf: B,
    ) -> Work<B> {
        let memory = Memory::one(&mut buf);
        let held = ErasedBufs::new(Parts { input: (), output: buf });
        Work::new(self.submit(kind, spec, memory, held), one::<B>)
    }

    pub(super) fn submit_into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        kind: Kind,
        spec: Result<Spec, String>,
        mut input: I,
        mut output: O,
    ) -> Work<(I, O)> {
        let memory = Memory::two(&mut input, &mut output);
        let held = ErasedBufs::new(Parts { input, output });
        Work::new(self.submit(kind, spec, memory, held), both::<I, O>)
    }

    /// Into a new vector, whose length comes with the spec. The length may be any number that the caller has given: if
    /// there is no memory for the vector, the call is refused.
    pub(super) fn submit_new<I: Buf<Elem: Element>>(
        &self,
        kind: Kind,
        spec: Result<(Spec, usize), String>,
        mut input: I,
    ) -> Work<Vec<I::Elem>, I> {
        let made_room = spec.and_then(|(spec, len)| {
            let output = zeroes::<I::Elem>(len).ok_or_else(|| no_memory(len, I::Elem::DTYPE))?;
            Ok((spec, output))
        });
        let (spec, mut output) = match made_room {
            Ok((spec, output)) => (Ok(spec), output),
            Err(problem) => (Err(problem), Vec::new()),
        };
        let memory = Memory::two(&mut input, &mut output);
        let held = ErasedBufs::new(Parts { input, output });
        Work::new(self.submit(kind, spec, memory, held), made::<I>)
    }

    /// A collective on one value, in place in a new buffer of one element.
    fn of_value<T: Element>(&self, kind: Kind, root: Rank, value: T) -> Work<T> {
        let mut buf = vec![value];
        let memory = Memory::one(&mut buf);
        let held = ErasedBufs::new(Parts { input: (), output: buf });
        Work::new(self.submit(kind, self.spec_in_place(kind, root, 1), memory, held), one_value::<T>)
    }

    fn in_place<B: Buf>(&self, kind: Kind, root: Rank, buf: B) -> Work<B> {
        self.submit_in_place(kind, self.spec_in_place(kind, root, buf.len()), buf)
    }

    fn into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        kind: Kind,
        root: Rank,
        input: I,
        output: O,
    ) -> Work<(I, O)> {
        self.submit_into(kind, self.spec_into(kind, root, input.len(), output.len()), input, output)
    }

    fn new_output<I: Buf<Elem: Element>>(&self, kind: Kind, root: Rank, input: I) -> Work<Vec<I::Elem>, I> {
        self.submit_new(kind, self.spec_of_input(kind, root, input.len()), input)
    }
}

collectives! {
    /// Every rank ends with the reduction of all ranks' buffers, in place. All ranks get the same bits.
    ///
    /// # Errors
    /// [`Failed`], with the buffer unless something may still access it; the contents are unspecified if a peer's data had begun to arrive.
    /// The errors: [`Error::Mismatch`] if lengths, types, reductions or algorithms differ, [`Error::Timeout`], [`Error::PeerLost`],
    /// [`Error::Aborted`], [`Error::Invalid`] where the reduction is not defined on the type. The same holds for every collective.
    fn all_reduce [B: Buf] (buf: B) -> Work<B>
        = |call| call.in_place(Kind::AllReduce, 0, buf);

    /// [`all_reduce`](Self::all_reduce) of `input` into `output`, of the same length. The input is unchanged.
    fn all_reduce_into [I: Buf, O: Buf<Elem = I::Elem>] (input: I, output: O) -> Work<(I, O)>
        = |call| call.into(Kind::AllReduce, 0, input, output);

    /// [`all_reduce`](Self::all_reduce) into a new vector. The input comes back only on failure.
    fn all_reduce_new [I: Buf<Elem: Element>] (input: I) -> Work<Vec<I::Elem>, I>
        = |call| call.new_output(Kind::AllReduce, 0, input);

    /// Every rank ends with the root's buffer. Lengths and types are the same on all ranks.
    fn broadcast [B: Buf] (buf: B) root(root) -> Work<B>
        = |call| call.in_place(Kind::Broadcast, root, buf);

    /// [`broadcast`](Self::broadcast) of the root's `input` into every rank's `output`. The others' inputs are
    /// not looked at.
    fn broadcast_into [I: Buf, O: Buf<Elem = I::Elem>] (input: I, output: O) root(root) -> Work<(I, O)>
        = |call| call.into(Kind::Broadcast, root, input, output);

    /// The root ends with the reduction of all ranks' buffers; the others' are unchanged.
    fn reduce [B: Buf] (buf: B) root(root) -> Work<B>
        = |call| call.in_place(Kind::Reduce, root, buf);

    /// [`reduce`](Self::reduce) into the root's `output`, of its input's length. The others' outputs are not
    /// looked at.
    fn reduce_into [I: Buf, O: Buf<Elem = I::Elem>] (input: I, output: O) root(root) -> Work<(I, O)>
        = |call| call.into(Kind::Reduce, root, input, output);

    /// All ranks' buffers, `size() * input.len()` elements in rank order, in a new vector on every rank.
    fn all_gather [I: Buf<Elem: Element>] (input: I) -> Work<Vec<I::Elem>, I>
        = |call| call.new_output(Kind::AllGather, 0, input);

    /// [`all_gather`](Self::all_gather) into `output`, of `size() * input.len()` elements.
    fn all_gather_into [I: Buf, O: Buf<Elem = I::Elem>] (input: I, output: O) -> Work<(I, O)>
        = |call| call.into(Kind::AllGather, 0, input, output);

    /// [`all_gather`](Self::all_gather) in place: this rank's block, at `rank() * len / size()`, is its input.
    fn all_gather_in_place [B: Buf] (buf: B) -> Work<B>
        = |call| call.in_place(Kind::AllGather, 0, buf);

    /// The reduction of all ranks' `input`, of which rank r gets block r: `input.len() / size()` elements, in a
    /// new vector. The length is a multiple of `size()`.
    fn reduce_scatter [I: Buf<Elem: Element>] (input: I) -> Work<Vec<I::Elem>, I>
        = |call| call.new_output(Kind::ReduceScatter, 0, input);

    /// [`reduce_scatter`](Self::reduce_scatter) into `output`, of `input.len() / size()` elements.
    fn reduce_scatter_into [I: Buf, O: Buf<Elem = I::Elem>] (input: I, output: O) -> Work<(I, O)>
        = |call| call.into(Kind::ReduceScatter, 0, input, output);

    /// [`reduce_scatter`](Self::reduce_scatter) in place: the result is in this rank's block, at
    /// `rank() * len / size()`; the other blocks are unspecified.
    fn reduce_scatter_in_place [B: Buf] (buf: B) -> Work<B>
        = |call| call.in_place(Kind::ReduceScatter, 0, buf);

    /// The root ends with all ranks' buffers, `size() * input.len()` elements in rank order, in a new vector; the
    /// others with an empty one.
    fn gather [I: Buf<Elem: Element>] (input: I) root(root) -> Work<Vec<I::Elem>, I>
        = |call| call.new_output(Kind::Gather, root, input);

    /// [`gather`](Self::gather) into the root's `output`, of `size() * input.len()` elements. The others' outputs
    /// are not looked at.
    fn gather_into [I: Buf, O: Buf<Elem = I::Elem>] (input: I, output: O) root(root) -> Work<(I, O)>
        = |call| call.into(Kind::Gather, root, input, output);

    /// [`gather`](Self::gather) in place: the root's buffer has `size()` blocks, and its input in block `root`; the
    /// others' buffers are their inputs.
    fn gather_in_place [B: Buf] (buf: B) root(root) -> Work<B>
        = |call| call.in_place(Kind::Gather, root, buf);

    /// Rank r ends with block r of the root's input, in a new vector of `count` elements; the root's input has
    /// `size() * count`. The others' inputs are not looked at: an empty vector will do.
    fn scatter [I: Buf<Elem: Element>] (input: I; count: usize) root(root) -> Work<Vec<I::Elem>, I> = |call| {
        let spec = call.spec_of_output(Kind::Scatter, root, input.len(), count);
        call.submit_new(Kind::Scatter, spec.map(|spec| (spec, count)), input)
    };

    /// [`scatter`](Self::scatter) into `output`, whose length is the count.
    fn scatter_into [I: Buf, O: Buf<Elem = I::Elem>] (input: I, output: O) root(root) -> Work<(I, O)>
        = |call| call.into(Kind::Scatter, root, input, output);

    /// [`scatter`](Self::scatter) in place: the root's buffer has `size()` blocks, and keeps all of them; each other
    /// rank ends with its block in a buffer of one block.
    fn scatter_in_place [B: Buf] (buf: B) root(root) -> Work<B>
        = |call| call.in_place(Kind::Scatter, root, buf);

    /// Block r of this rank's input goes to rank r, and what comes from rank r is block r of the result. The
    /// result is a new vector as long as the input, whose length is a multiple of `size()`.
    fn all_to_all [I: Buf<Elem: Element>] (input: I) -> Work<Vec<I::Elem>, I>
        = |call| call.new_output(Kind::AllToAll, 0, input);

    /// [`all_to_all`](Self::all_to_all) into `output`, of the input's length.
    fn all_to_all_into [I: Buf, O: Buf<Elem = I::Elem>] (input: I, output: O) -> Work<(I, O)>
        = |call| call.into(Kind::AllToAll, 0, input, output);

    /// [`all_to_all`](Self::all_to_all) in place.
    fn all_to_all_in_place [B: Buf] (buf: B) -> Work<B>
        = |call| call.in_place(Kind::AllToAll, 0, buf);

    /// Rank r ends with the reduction of the buffers of ranks `0..=r`, in place, combined in rank order. Averages are refused.
    fn scan [B: Buf] (buf: B) -> Work<B>
        = |call| call.in_place(Kind::Scan, 0, buf);

    /// [`scan`](Self::scan) of `input` into `output`, of the same length.
    fn scan_into [I: Buf, O: Buf<Elem = I::Elem>] (input: I, output: O) -> Work<(I, O)>
        = |call| call.into(Kind::Scan, 0, input, output);

    /// Rank r ends with the reduction of the buffers of ranks `0..r`, in place: an exclusive scan. Rank 0's buffer is
    /// unchanged.
    fn exscan [B: Buf] (buf: B) -> Work<B>
        = |call| call.in_place(Kind::ExScan, 0, buf);

    /// [`exscan`](Self::exscan) of `input` into `output`, of the same length. Rank 0's output is unchanged.
    fn exscan_into [I: Buf, O: Buf<Elem = I::Elem>] (input: I, output: O) -> Work<(I, O)>
        = |call| call.into(Kind::ExScan, 0, input, output);
}

calls! {
    /// [`all_reduce`](Self::all_reduce) of one device buffer into another, in the order of their streams: for a framework's
    /// operators, which have only a reference to their input. Both buffers' streams wait for the operation, the caller does not;
    /// on a communicator that is not [bound](super::Comm::bind_device) the caller waits.
    ///
    /// If the operation fails later, the communicator's next call and [`Comm::check`](super::Comm::check) return the
    /// error, and so does whatever copies or sends `output`.
    ///
    /// ```
    /// # use allstream::{Comm, Error, cuda::DeviceBuf};
    /// fn forward(comm: &mut Comm, x: &DeviceBuf<f32>) -> Result<DeviceBuf<f32>, Error> {
    ///     let mut sum = DeviceBuf::zeroed(x.stream(), x.len())?;
    ///     comm.all_reduce_ordered(x, &mut sum)?;
    ///     Ok(sum) // kernels on its stream may use it
    /// }
    /// ```
    ///
    /// # Errors
    /// Those known at once: [`Error::Invalid`], or the cause for which the communicator is dead; if it is not bound, all errors of an all_reduce.
    fn all_reduce_ordered [T: Element] (input: &DeviceBuf<T>, output: &mut DeviceBuf<T>) -> Result<(), Error> = |call| {
        let stream = output.stream().clone();
        // The operation owns aliases of the buffers, which keep their memory for as long as it needs them.
        let work = call.all_reduce_into(input.alias(), output.alias());
        work.join(&stream).map_err(|failed| failed.error)?.leave()
    };

    /// [`all_reduce`](Self::all_reduce) of one number. Each call allocates a buffer of one element: where that is too slow, keep a
    /// buffer, and call `all_reduce`.
    ///
    /// ```
    /// # use allstream::{Comm, ReduceOp};
    /// # fn main() -> Result<(), allstream::Error> {
    /// # let mut comm = Comm::local(1)?.remove(0); let my_loss = 0.25f32;
    /// let loss = comm.op(ReduceOp::Avg).all_reduce_value(my_loss).wait()?;
    /// # assert_eq!(loss, 0.25); Ok(()) }
    /// ```
    fn all_reduce_value [T: Element] (value: T) -> Work<T>
        = |call| call.of_value(Kind::AllReduce, 0, value);

    /// [`broadcast`](Self::broadcast) of one number; what the others give is not looked at.
    fn broadcast_value [T: Element] (value: T, root: Rank) -> Work<T>
        = |call| call.of_value(Kind::Broadcast, root, value);

    /// Every rank ends with one number of each rank, by rank.
    fn all_gather_value [T: Element] (value: T) -> Work<Vec<T>, T> = |call| {
        let (mut input, spec) = (vec![value], call.spec_of_input(Kind::AllGather, 0, 1));
        let mut output = vec![value; call.size()];
        let memory = Memory::two(&mut input, &mut output);
        let held = ErasedBufs::new(Parts { input, output });
        Work::new(call.submit(Kind::AllGather, spec.map(|(spec, _)| spec), memory, held), made_of_value::<T>)
    };

    /// Finishes on no rank before every rank has called.
    fn barrier [] () -> Work<()> = |call| {
        let (spec, memory) = (Spec::of(Kind::Barrier, 0, 1, true), Memory::host(call.side.0.token.as_ptr().cast(), 1));
        Work::new(call.submit(Kind::Barrier, Ok(spec), memory, ErasedBufs::new(())), nothing)
    };
}
