//! The collectives with one count for all ranks. What they mean is documented on [`Comm`](super::Comm).

use super::Work;
use super::call::{Call, Spec};
use super::memory::Memory;
use super::restore::{both, made, nothing, one, refused};
use crate::error::Error;
use crate::mem::device::DeviceBuf;
use crate::mem::{Buf, Parts, zeroes};
use crate::types::{Element, Kind, Rank};

fn no_memory<T: Element>(len: usize) -> String {
    let bytes = (len as u128) * size_of::<T>() as u128;
    format!("the result has {len} x {}, {bytes} bytes, and this process cannot have so much memory", T::DTYPE)
}

impl Call<'_> {
    pub(super) fn in_place<B: Buf>(&self, spec: Spec, mut buf: B) -> Work<B> {
        let memory = Memory::one(&mut buf);
        self.submit::<B::Elem, _, _, _>(spec, Parts { input: (), output: buf }, memory, one::<B>)
    }

    /// `expected`: the elements that the output must have.
    pub(super) fn into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        spec: Spec,
        expected: usize,
        mut input: I,
        mut output: O,
    ) -> Work<(I, O)> {
        if output.len() != expected {
            let problem = format!("the output has {} elements, expected {expected}", output.len());
            return refused(spec.kind, problem, (input, output), both::<I, O>);
        }
        let memory = Memory::two(&mut input, &mut output);
        self.submit::<I::Elem, _, _, _>(spec, Parts { input, output }, memory, both::<I, O>)
    }

    /// Into a new vector of `len` elements: a number that may be the caller's alone, so whether there is memory for them
    /// is asked here.
    pub(super) fn make<I: Buf>(&self, spec: Spec, len: usize, mut input: I) -> Work<Vec<I::Elem>, I> {
        let Some(mut output) = zeroes::<I::Elem>(len) else {
            return refused(spec.kind, no_memory::<I::Elem>(len), input, made::<I>);
        };
        let memory = Memory::two(&mut input, &mut output);
        self.submit::<I::Elem, _, _, _>(spec, Parts { input, output }, memory, made::<I>)
    }

    /// A block of `count` elements for each rank. What is too many to be counted is more than any buffer has, too.
    fn times_size(&self, count: usize) -> usize {
        count.saturating_mul(self.size())
    }

    /// `len` elements as `n` blocks.
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

    /// See [`Comm::all_reduce`](super::Comm::all_reduce).
    pub fn all_reduce<B: Buf>(&self, buf: B) -> Work<B> {
        self.in_place(Spec::of(Kind::AllReduce, 0, buf.len(), true), buf)
    }

    /// See [`Comm::all_reduce_into`](super::Comm::all_reduce_into).
    pub fn all_reduce_into<I: Buf, O: Buf<Elem = I::Elem>>(&self, input: I, output: O) -> Work<(I, O)> {
        let count = input.len();
        self.into(Spec::of(Kind::AllReduce, 0, count, false), count, input, output)
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
    pub fn all_reduce_new<I: Buf>(&self, input: I) -> Work<Vec<I::Elem>, I> {
        let count = input.len();
        self.make(Spec::of(Kind::AllReduce, 0, count, false), count, input)
    }

    /// See [`Comm::broadcast`](super::Comm::broadcast).
    pub fn broadcast<B: Buf>(&self, buf: B, root: Rank) -> Work<B> {
        self.in_place(Spec::of(Kind::Broadcast, root, buf.len(), true), buf)
    }

    /// See [`Comm::broadcast_into`](super::Comm::broadcast_into).
    pub fn broadcast_into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        input: I,
        output: O,
        root: Rank,
    ) -> Work<(I, O)> {
        let count = output.len();
        if self.is_root(root) && input.len() != count {
            let problem = format!("the root's input has {} elements, its output {count}", input.len());
            return refused(Kind::Broadcast, problem, (input, output), both::<I, O>);
        }
        self.into(Spec::of(Kind::Broadcast, root, count, false), count, input, output)
    }

    /// See [`Comm::reduce`](super::Comm::reduce).
    pub fn reduce<B: Buf>(&self, buf: B, root: Rank) -> Work<B> {
        self.in_place(Spec::of(Kind::Reduce, root, buf.len(), true), buf)
    }

    /// See [`Comm::reduce_into`](super::Comm::reduce_into).
    pub fn reduce_into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        input: I,
        output: O,
        root: Rank,
    ) -> Work<(I, O)> {
        let count = input.len();
        let expected = if self.is_root(root) { count } else { output.len() };
        self.into(Spec::of(Kind::Reduce, root, count, false), expected, input, output)
    }

    /// See [`Comm::all_gather`](super::Comm::all_gather).
    pub fn all_gather<I: Buf>(&self, input: I) -> Work<Vec<I::Elem>, I> {
        let count = input.len();
        self.make(Spec::of(Kind::AllGather, 0, count, false), self.times_size(count), input)
    }

    /// See [`Comm::all_gather_into`](super::Comm::all_gather_into).
    pub fn all_gather_into<I: Buf, O: Buf<Elem = I::Elem>>(&self, input: I, output: O) -> Work<(I, O)> {
        let count = input.len();
        self.into(Spec::of(Kind::AllGather, 0, count, false), self.times_size(count), input, output)
    }

    /// See [`Comm::all_gather_in_place`](super::Comm::all_gather_in_place).
    pub fn all_gather_in_place<B: Buf>(&self, buf: B) -> Work<B> {
        self.blocks_in_place(Kind::AllGather, buf)
    }

    fn blocks_in_place<B: Buf>(&self, kind: Kind, buf: B) -> Work<B> {
        match self.blocks(buf.len()) {
            Ok(count) => self.in_place(Spec::of(kind, 0, count, true), buf),
            Err(problem) => refused(kind, problem, buf, one::<B>),
        }
    }

    /// See [`Comm::reduce_scatter`](super::Comm::reduce_scatter).
    pub fn reduce_scatter<I: Buf>(&self, input: I) -> Work<Vec<I::Elem>, I> {
        match self.blocks(input.len()) {
            Ok(count) => self.make(Spec::of(Kind::ReduceScatter, 0, count, false), count, input),
            Err(problem) => refused(Kind::ReduceScatter, problem, input, made::<I>),
        }
    }

    /// See [`Comm::reduce_scatter_into`](super::Comm::reduce_scatter_into).
    pub fn reduce_scatter_into<I: Buf, O: Buf<Elem = I::Elem>>(&self, input: I, output: O) -> Work<(I, O)> {
        match self.blocks(input.len()) {
            Ok(count) => self.into(Spec::of(Kind::ReduceScatter, 0, count, false), count, input, output),
            Err(problem) => refused(Kind::ReduceScatter, problem, (input, output), both::<I, O>),
        }
    }

    /// See [`Comm::reduce_scatter_in_place`](super::Comm::reduce_scatter_in_place).
    pub fn reduce_scatter_in_place<B: Buf>(&self, buf: B) -> Work<B> {
        self.blocks_in_place(Kind::ReduceScatter, buf)
    }

    /// See [`Comm::gather`](super::Comm::gather).
    pub fn gather<I: Buf>(&self, input: I, root: Rank) -> Work<Vec<I::Elem>, I> {
        let count = input.len();
        let len = if self.is_root(root) { self.times_size(count) } else { 0 };
        self.make(Spec::of(Kind::Gather, root, count, false), len, input)
    }

    /// See [`Comm::gather_into`](super::Comm::gather_into).
    pub fn gather_into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        input: I,
        output: O,
        root: Rank,
    ) -> Work<(I, O)> {
        let count = input.len();
        let expected = if self.is_root(root) { self.times_size(count) } else { output.len() };
        self.into(Spec::of(Kind::Gather, root, count, false), expected, input, output)
    }

    /// See [`Comm::gather_in_place`](super::Comm::gather_in_place).
    pub fn gather_in_place<B: Buf>(&self, buf: B, root: Rank) -> Work<B> {
        self.at_root_in_place(Kind::Gather, buf, root)
    }

    fn at_root_in_place<B: Buf>(&self, kind: Kind, buf: B, root: Rank) -> Work<B> {
        match if self.is_root(root) { self.blocks(buf.len()) } else { Ok(buf.len()) } {
            Ok(count) => self.in_place(Spec::of(kind, root, count, true), buf),
            Err(problem) => refused(kind, problem, buf, one::<B>),
        }
    }

    /// See [`Comm::scatter`](super::Comm::scatter).
    pub fn scatter<I: Buf>(&self, input: I, count: usize, root: Rank) -> Work<Vec<I::Elem>, I> {
        if let Err(problem) = self.check_scatter(input.len(), count, root) {
            return refused(Kind::Scatter, problem, input, made::<I>);
        }
        self.make(Spec::of(Kind::Scatter, root, count, false), count, input)
    }

    fn check_scatter(&self, len: usize, count: usize, root: Rank) -> Result<(), String> {
        let n = self.size();
        if self.is_root(root) && Some(len) != count.checked_mul(n) {
            return Err(format!("the root's input has {len} elements, expected {n} blocks of {count}"));
        }
        Ok(())
    }

    /// See [`Comm::scatter_into`](super::Comm::scatter_into).
    pub fn scatter_into<I: Buf, O: Buf<Elem = I::Elem>>(
        &self,
        input: I,
        output: O,
        root: Rank,
    ) -> Work<(I, O)> {
        let count = output.len();
        if let Err(problem) = self.check_scatter(input.len(), count, root) {
            return refused(Kind::Scatter, problem, (input, output), both::<I, O>);
        }
        self.into(Spec::of(Kind::Scatter, root, count, false), count, input, output)
    }

    /// See [`Comm::scatter_in_place`](super::Comm::scatter_in_place).
    pub fn scatter_in_place<B: Buf>(&self, buf: B, root: Rank) -> Work<B> {
        self.at_root_in_place(Kind::Scatter, buf, root)
    }

    /// See [`Comm::all_to_all`](super::Comm::all_to_all).
    pub fn all_to_all<I: Buf>(&self, input: I) -> Work<Vec<I::Elem>, I> {
        match self.blocks(input.len()) {
            Ok(count) => {
                let len = input.len();
                self.make(Spec::of(Kind::AllToAll, 0, count, false), len, input)
            }
            Err(problem) => refused(Kind::AllToAll, problem, input, made::<I>),
        }
    }

    /// See [`Comm::all_to_all_into`](super::Comm::all_to_all_into).
    pub fn all_to_all_into<I: Buf, O: Buf<Elem = I::Elem>>(&self, input: I, output: O) -> Work<(I, O)> {
        match self.blocks(input.len()) {
            Ok(count) => {
                let len = input.len();
                self.into(Spec::of(Kind::AllToAll, 0, count, false), len, input, output)
            }
            Err(problem) => refused(Kind::AllToAll, problem, (input, output), both::<I, O>),
        }
    }

    /// See [`Comm::all_to_all_in_place`](super::Comm::all_to_all_in_place).
    pub fn all_to_all_in_place<B: Buf>(&self, buf: B) -> Work<B> {
        self.blocks_in_place(Kind::AllToAll, buf)
    }

    /// See [`Comm::scan`](super::Comm::scan).
    pub fn scan<B: Buf>(&self, buf: B) -> Work<B> {
        self.in_place(Spec::of(Kind::Scan, 0, buf.len(), true), buf)
    }

    /// See [`Comm::scan_into`](super::Comm::scan_into).
    pub fn scan_into<I: Buf, O: Buf<Elem = I::Elem>>(&self, input: I, output: O) -> Work<(I, O)> {
        let count = input.len();
        self.into(Spec::of(Kind::Scan, 0, count, false), count, input, output)
    }

    /// See [`Comm::exscan`](super::Comm::exscan).
    pub fn exscan<B: Buf>(&self, buf: B) -> Work<B> {
        self.in_place(Spec::of(Kind::ExScan, 0, buf.len(), true), buf)
    }

    /// See [`Comm::exscan_into`](super::Comm::exscan_into).
    pub fn exscan_into<I: Buf, O: Buf<Elem = I::Elem>>(&self, input: I, output: O) -> Work<(I, O)> {
        let count = input.len();
        self.into(Spec::of(Kind::ExScan, 0, count, false), count, input, output)
    }

    /// See [`Comm::barrier`](super::Comm::barrier).
    pub fn barrier(&self) -> Work<()> {
        let at = self.side.0.token();
        self.submit::<u8, _, _, _>(Spec::of(Kind::Barrier, 0, 1, true), (), Memory::host(at, 1), nothing)
    }
}
