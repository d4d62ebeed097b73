//! The collectives with one count for all ranks. What they mean is documented on [`Comm`](super::Comm).

use super::Work;
use super::call::{Call, Spec};
use super::memory::Memory;
use super::restore::{both, made, nothing, one};
use crate::error::Error;
use crate::mem::device::DeviceBuf;
use crate::mem::{Buf, ErasedBufs, Parts, zeroes};
use crate::types::{DType, Element, Kind, Rank};

fn no_memory(len: usize, dtype: DType) -> String {
    let bytes = len as u128 * dtype.size() as u128;
    format!("the result has {len} x {dtype}, {bytes} bytes, and this process cannot have so much memory")
}

/// How long buffers are for a collective: what each rank's `count` is, and what length that asks of the other buffer.
impl Call<'_> {
    /// A block of `count` elements for each rank. What is too many to be counted is more than any buffer has, too.
    fn times_size(&self, count: usize) -> usize {
        count.saturating_mul(self.size())
    }

    /// `len` elements as a block for each rank.
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

    /// A collective in one buffer of this length.
    fn spec_in_place(&self, kind: Kind, root: Rank, len: usize) -> Result<Spec, String> {
        let count = match kind {
            Kind::AllGather | Kind::ReduceScatter | Kind::AllToAll => self.blocks(len)?,
            Kind::Gather | Kind::Scatter if self.is_root(root) => self.blocks(len)?,
            _ => len,
        };
        Ok(Spec::of(kind, root, count, true))
    }

    /// A collective on an input of this length, and the length of its output on this rank (in a gather of a rank that is
    /// not the root, 0).
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

    /// A collective that gives every rank an output of this length.
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

    /// A collective from a buffer of one length into a buffer of another.
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

/// Whether an output has the length that it must have.
pub(super) fn expects(output: usize, expected: usize) -> Result<(), String> {
    if output == expected {
        return Ok(());
    }
    Err(format!("the output has {output} elements, expected {expected}"))
}

/// The typed faces of [`Call::submit`], of three forms: in place, from one buffer into another, and into a new vector.
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

    /// Into a new vector, whose length comes with the spec. It may be the caller's number alone, so whether there is
    /// memory for it is asked here.
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

/// The collectives.
impl Call<'_> {
    /// See [`Comm::all_reduce`](super::Comm::all_reduce).
    pub fn all_reduce<B: Buf>(&self, buf: B) -> Work<B> {
        self.in_place(Kind::AllReduce, 0, buf)
    }

    /// See [`Comm::all_reduce_into`](super::Comm::all_reduce_into).
    pub fn all_reduce_into<I: Buf, O: Buf<Elem = I::Elem>>(&self, input: I, output: O) -> Work<(I, O)> {
        self.into(Kind::AllReduce, 0, input, output)
    }

    /// See [`Comm::all_reduce_ordered`](super::Comm::all_reduce_ordered).
    ///
    /// # Errors
    /// As there.
    pub fn all_reduce_ordered<T: Element>(
        &self,
        input: &DeviceBuf<T>,
        output: &mut DeviceBuf<T>,
    ) -> Result<(), Error> {
        let stream = output.stream().clone();
        // The operation has the same memory once more, for as long as it needs it.
        let work = self.all_reduce_into(input.alias(), output.alias());
        work.join(&stream).map_err(|failed| failed.error)?.leave()
    }

    /// See [`Comm::all_reduce_new`](super::Comm::all_reduce_new).
    pub fn all_reduce_new<I: Buf<Elem: Element>>(&self, input: I) -> Work<Vec<I::Elem>, I> {
        self.new_output(Kind::AllReduce, 0, input)
    }

    /// See [`Comm::broadcast`](super::Comm::broadcast).
    pub fn broadcast<B: Buf>(&self, buf: B, root: Rank) -> Work<B> {
        self.in_place(Kind::Broadcast, root, buf)
    }

    /// See [`Comm::broadcast_into`](super::Comm::broadcast_into).
    pub fn broadcast_into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        input: I,
        output: O,
        root: Rank,
    ) -> Work<(I, O)> {
        self.into(Kind::Broadcast, root, input, output)
    }

    /// See [`Comm::reduce`](super::Comm::reduce).
    pub fn reduce<B: Buf>(&self, buf: B, root: Rank) -> Work<B> {
        self.in_place(Kind::Reduce, root, buf)
    }

    /// See [`Comm::reduce_into`](super::Comm::reduce_into).
    pub fn reduce_into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        input: I,
        output: O,
        root: Rank,
    ) -> Work<(I, O)> {
        self.into(Kind::Reduce, root, input, output)
    }

    /// See [`Comm::all_gather`](super::Comm::all_gather).
    pub fn all_gather<I: Buf<Elem: Element>>(&self, input: I) -> Work<Vec<I::Elem>, I> {
        self.new_output(Kind::AllGather, 0, input)
    }

    /// See [`Comm::all_gather_into`](super::Comm::all_gather_into).
    pub fn all_gather_into<I: Buf, O: Buf<Elem = I::Elem>>(&self, input: I, output: O) -> Work<(I, O)> {
        self.into(Kind::AllGather, 0, input, output)
    }

    /// See [`Comm::all_gather_in_place`](super::Comm::all_gather_in_place).
    pub fn all_gather_in_place<B: Buf>(&self, buf: B) -> Work<B> {
        self.in_place(Kind::AllGather, 0, buf)
    }

    /// See [`Comm::reduce_scatter`](super::Comm::reduce_scatter).
    pub fn reduce_scatter<I: Buf<Elem: Element>>(&self, input: I) -> Work<Vec<I::Elem>, I> {
        self.new_output(Kind::ReduceScatter, 0, input)
    }

    /// See [`Comm::reduce_scatter_into`](super::Comm::reduce_scatter_into).
    pub fn reduce_scatter_into<I: Buf, O: Buf<Elem = I::Elem>>(&self, input: I, output: O) -> Work<(I, O)> {
        self.into(Kind::ReduceScatter, 0, input, output)
    }

    /// See [`Comm::reduce_scatter_in_place`](super::Comm::reduce_scatter_in_place).
    pub fn reduce_scatter_in_place<B: Buf>(&self, buf: B) -> Work<B> {
        self.in_place(Kind::ReduceScatter, 0, buf)
    }

    /// See [`Comm::gather`](super::Comm::gather).
    pub fn gather<I: Buf<Elem: Element>>(&self, input: I, root: Rank) -> Work<Vec<I::Elem>, I> {
        self.new_output(Kind::Gather, root, input)
    }

    /// See [`Comm::gather_into`](super::Comm::gather_into).
    pub fn gather_into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        input: I,
        output: O,
        root: Rank,
    ) -> Work<(I, O)> {
        self.into(Kind::Gather, root, input, output)
    }

    /// See [`Comm::gather_in_place`](super::Comm::gather_in_place).
    pub fn gather_in_place<B: Buf>(&self, buf: B, root: Rank) -> Work<B> {
        self.in_place(Kind::Gather, root, buf)
    }

    /// See [`Comm::scatter`](super::Comm::scatter).
    pub fn scatter<I: Buf<Elem: Element>>(
        &self,
        input: I,
        count: usize,
        root: Rank,
    ) -> Work<Vec<I::Elem>, I> {
        let spec = self.spec_of_output(Kind::Scatter, root, input.len(), count);
        self.submit_new(Kind::Scatter, spec.map(|spec| (spec, count)), input)
    }

    /// See [`Comm::scatter_into`](super::Comm::scatter_into).
    pub fn scatter_into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        input: I,
        output: O,
        root: Rank,
    ) -> Work<(I, O)> {
        self.into(Kind::Scatter, root, input, output)
    }

    /// See [`Comm::scatter_in_place`](super::Comm::scatter_in_place).
    pub fn scatter_in_place<B: Buf>(&self, buf: B, root: Rank) -> Work<B> {
        self.in_place(Kind::Scatter, root, buf)
    }

    /// See [`Comm::all_to_all`](super::Comm::all_to_all).
    pub fn all_to_all<I: Buf<Elem: Element>>(&self, input: I) -> Work<Vec<I::Elem>, I> {
        self.new_output(Kind::AllToAll, 0, input)
    }

    /// See [`Comm::all_to_all_into`](super::Comm::all_to_all_into).
    pub fn all_to_all_into<I: Buf, O: Buf<Elem = I::Elem>>(&self, input: I, output: O) -> Work<(I, O)> {
        self.into(Kind::AllToAll, 0, input, output)
    }

    /// See [`Comm::all_to_all_in_place`](super::Comm::all_to_all_in_place).
    pub fn all_to_all_in_place<B: Buf>(&self, buf: B) -> Work<B> {
        self.in_place(Kind::AllToAll, 0, buf)
    }

    /// See [`Comm::scan`](super::Comm::scan).
    pub fn scan<B: Buf>(&self, buf: B) -> Work<B> {
        self.in_place(Kind::Scan, 0, buf)
    }

    /// See [`Comm::scan_into`](super::Comm::scan_into).
    pub fn scan_into<I: Buf, O: Buf<Elem = I::Elem>>(&self, input: I, output: O) -> Work<(I, O)> {
        self.into(Kind::Scan, 0, input, output)
    }

    /// See [`Comm::exscan`](super::Comm::exscan).
    pub fn exscan<B: Buf>(&self, buf: B) -> Work<B> {
        self.in_place(Kind::ExScan, 0, buf)
    }

    /// See [`Comm::exscan_into`](super::Comm::exscan_into).
    pub fn exscan_into<I: Buf, O: Buf<Elem = I::Elem>>(&self, input: I, output: O) -> Work<(I, O)> {
        self.into(Kind::ExScan, 0, input, output)
    }

    /// See [`Comm::barrier`](super::Comm::barrier).
    pub fn barrier(&self) -> Work<()> {
        let (spec, memory) = (Spec::of(Kind::Barrier, 0, 1, true), Memory::host(self.side.0.token(), 1));
        Work::new(self.submit(Kind::Barrier, Ok(spec), memory, ErasedBufs::new(())), nothing)
    }
}
