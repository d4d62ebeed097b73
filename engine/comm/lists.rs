//! Many buffers in one operation. What the calls mean is documented on [`Comm`](super::Comm).

use super::Work;
use super::call::{Call, Spec};
use super::memory::Memory;
use super::restore::{refused, settle};
use crate::error::{Failed, Outcome};
use crate::mem::{BufList, Held, Parts, memory};
use crate::types::{Kind, Rank};

fn list<L: BufList>(result: Outcome, held: Option<Held>) -> Result<L, Failed<L>> {
    settle(result, held.and_then(Held::take::<Parts<(), L>>).map(|p| p.output))
}

fn pair<I: BufList, O: BufList>(result: Outcome, held: Option<Held>) -> Result<(I, O), Failed<(I, O)>> {
    settle(result, held.and_then(Held::take::<Parts<I, O>>).map(|p| (p.input, p.output)))
}

impl Call<'_> {
    fn list_in_place<L: BufList>(&self, kind: Kind, root: Rank, mut bufs: L) -> Work<L> {
        let ends = memory(&mut bufs).into_iter().map(|m| (m.dtype, m.len, Memory::in_place(m))).collect();
        self.submit_parts(Spec::of(kind, root, 0, true), ends, Parts { input: (), output: bufs }, list::<L>)
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
        let (ins, outs) = (memory(&mut inputs), memory(&mut outputs));
        let mut ends = Vec::with_capacity(ins.len());
        let mut problem = (ins.len() != outs.len())
            .then(|| format!("{} inputs and {} outputs: each input needs one", ins.len(), outs.len()));
        for (i, (input, output)) in ins.into_iter().zip(outs).enumerate() {
            let count = input.len / times.0;
            if input.dtype != output.dtype
                || input.len != count * times.0
                || Some(output.len) != count.checked_mul(times.1)
            {
                problem.get_or_insert_with(|| {
                    format!(
                        "pair {i}: an input of {} x {} and an output of {} x {}, expected one type, and {} elements \
                         of output for every {} of input",
                        input.len, input.dtype, output.len, output.dtype, times.1, times.0
                    )
                });
            }
            ends.push((input.dtype, count, Memory::apart(input, output)));
        }
        if let Some(problem) = problem {
            return refused(kind, problem, (inputs, outputs), pair::<I, O>);
        }
        let parts = Parts { input: inputs, output: outputs };
        self.submit_parts(Spec::of(kind, 0, 0, false), ends, parts, pair::<I, O>)
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
