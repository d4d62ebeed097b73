//! The collectives and messages of [`Comm`]: each takes its arrays, submits, and returns a [`Work`].

use std::cell::RefCell;

use allstream::{Message, SharedComm};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::comm::Comm;
use crate::errors;
use crate::flight::Flight;
use crate::in_flight::{Claim, Use};
use crate::memory::{CallStreams, Memory};
use crate::options::{Takes, with_options};
use crate::work::Work;

type Options<'a, 'py> = &'a Bound<'py, PyDict>;
type Array<'py> = Bound<'py, PyAny>;

/// A call's name, its communicator, and its options.
struct Calling<'a, 'py> {
    py: Python<'py>,
    name: &'static str,
    comm: SharedComm,
    takes: Takes,
    options: Option<Options<'a, 'py>>,
    /// In whose order its arrays on devices are.
    streams: RefCell<CallStreams>,
    /// What it takes of memory.
    claim: RefCell<Claim>,
    group: &'a Comm,
}

impl<'a, 'py> Calling<'a, 'py> {
    fn new(
        group: &'a Comm,
        py: Python<'py>,
        name: &'static str,
        takes: Takes,
        options: Option<Options<'a, 'py>>,
    ) -> PyResult<Self> {
        let (comm, claim) = (group.shared(py, name)?, RefCell::new(group.claim()));
        Ok(Calling { py, name, comm, takes, options, streams: RefCell::default(), claim, group })
    }

    /// The engine's call, when all its memory has been taken: it starts after earlier operations on some of that.
    fn call(&self) -> PyResult<allstream::Call<'_>> {
        let call = with_options(&self.comm, self.name, self.takes, self.options)?;
        let Some(wait) = self.claim.borrow_mut().waits(&self.comm) else { return Ok(call) };
        if let Some(options) = self.options
            && options.get_item("after")?.is_some_and(|after| !after.is_none())
        {
            return Err(self.refuse(
                "an earlier operation has this memory, or a part of it, and this call is to start after a stream, too: wait() for that                  operation first",
            ));
        }
        self.group.after(call, wait).map_err(|error| errors::of(self.py, &error))
    }

    fn memory(&self, array: &Array<'py>, how: Use) -> PyResult<Memory> {
        // Asking another library for its array may run Python, and so another call, but none that borrows these.
        Memory::of(array, how, self.name, &mut self.streams.borrow_mut(), &mut self.claim.borrow_mut())
    }

    fn all_memory(&self, arrays: &[Array<'py>], how: Use) -> PyResult<Vec<Memory>> {
        arrays.iter().map(|array| self.memory(array, how)).collect()
    }

    /// Submits, and without the GIL where arrays are on devices: their driver may wait for functions of the host's that want it.
    fn submit<T: Send>(&self, submit: impl FnOnce() -> T + Send) -> T {
        if self.streams.borrow().is_empty() { submit() } else { self.py.detach(submit) }
    }

    /// What was submitted, as Python gets it.
    fn work(&self, flight: impl Flight + 'static, result: Py<PyAny>) -> PyResult<Work> {
        let on_devices = !self.streams.borrow().is_empty();
        let is_message = self.takes == Takes::Tag || self.name == "batch";
        let place = self.group.place(is_message);
        let work = Work::new(self.py, flight, result, place, on_devices.then(|| self.comm.clone()))?;
        self.claim.borrow().submitted(&work.0);
        Ok(work)
    }

    /// A call in one array, which is its result. `how`: what this rank's part of it does there.
    fn in_place(
        &self,
        buf: Array<'py>,
        how: Use,
        submit: impl FnOnce(&allstream::Call<'_>, Memory) -> allstream::Work<Memory> + Send,
    ) -> PyResult<Work> {
        let memory = self.memory(&buf, how)?;
        let call = self.call()?;
        self.work(self.submit(|| submit(&call, memory)), buf.unbind())
    }

    /// A call from one array into another, which is its result.
    fn out_of_place(
        &self,
        buf: &Array<'py>,
        out: Array<'py>,
        submit: impl FnOnce(&allstream::Call<'_>, Memory, Memory) -> allstream::Work<(Memory, Memory)> + Send,
    ) -> PyResult<Work> {
        let input = self.memory(buf, Use::Read)?;
        let output = self.memory(&out, Use::Write)?;
        let call = self.call()?;
        self.work(self.submit(|| submit(&call, input, output)), out.unbind())
    }

    /// A call on many arrays, whose result is their list.
    fn list(
        &self,
        bufs: Vec<Array<'py>>,
        how: Use,
        submit: impl FnOnce(&allstream::Call<'_>, Vec<Memory>) -> allstream::Work<Vec<Memory>> + Send,
    ) -> PyResult<Work> {
        let memory = self.all_memory(&bufs, how)?;
        let call = self.call()?;
        let result = bufs.into_pyobject(self.py)?.into_any().unbind();
        self.work(self.submit(|| submit(&call, memory)), result)
    }

    /// A new array of the kind and type of `like`, with room for so many of its rows or elements.
    ///
    /// # Errors
    /// `like` is no array, or of a library whose arrays are not made here.
    fn new_array(&self, like: &Array<'py>, how: &str, n: usize) -> PyResult<Array<'py>> {
        if !Memory::is_of(like)? {
            return Err(errors::not_an_array(like, self.name));
        }
        self.py.import("allstream._arrays")?.call_method1(how, (like, n, self.name))
    }

    fn refuse(&self, problem: &str) -> PyErr {
        errors::invalid(self.py, self.name, problem)
    }
}

/// What a rank does with an array that some ranks only read.
fn reads(only: bool) -> Use {
    if only { Use::Read } else { Use::Write }
}

#[pymethods]
impl Comm {
    /// Every rank ends with the reduction of all ranks' arrays: in `buf`, or in `out`, of the same length.
    #[pyo3(signature = (buf, *, out=None, **options))]
    fn all_reduce<'py>(
        &self,
        py: Python<'py>,
        buf: Array<'py>,
        out: Option<Array<'py>>,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "all_reduce", Takes::Reduction, options)?;
        match out {
            None => calling.in_place(buf, Use::Write, |call, buf| call.all_reduce(buf)),
            Some(out) => calling.out_of_place(&buf, out, |call, buf, out| call.all_reduce_into(buf, out)),
        }
    }

    /// Every rank ends with the root's array: in `buf`, or the root's `buf` in every rank's `out`.
    #[pyo3(signature = (buf, root=0, *, out=None, **options))]
    fn broadcast<'py>(
        &self,
        py: Python<'py>,
        buf: Array<'py>,
        root: usize,
        out: Option<Array<'py>>,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "broadcast", Takes::Plain, options)?;
        match out {
            // The root's is only read.
            None => calling
                .in_place(buf, reads(calling.comm.rank() == root), |call, buf| call.broadcast(buf, root)),
            Some(out) => {
                calling.out_of_place(&buf, out, |call, buf, out| call.broadcast_into(buf, out, root))
            }
        }
    }

    /// The root ends with the reduction of all ranks' arrays: in `buf`, or in its `out`. The others' are unchanged.
    #[pyo3(signature = (buf, root=0, *, out=None, **options))]
    fn reduce<'py>(
        &self,
        py: Python<'py>,
        buf: Array<'py>,
        root: usize,
        out: Option<Array<'py>>,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "reduce", Takes::Reduction, options)?;
        match out {
            // Only the root's is written.
            None => {
                calling.in_place(buf, reads(calling.comm.rank() != root), |call, buf| call.reduce(buf, root))
            }
            Some(out) => calling.out_of_place(&buf, out, |call, buf, out| call.reduce_into(buf, out, root)),
        }
    }

    /// All ranks' arrays one after another, by rank: in `out`, or in a new array. `counts` has the number of elements of each rank
    /// where they differ.
    #[pyo3(signature = (buf, *, out=None, counts=None, **options))]
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        buf: Array<'py>,
        out: Option<Array<'py>>,
        counts: Option<Vec<usize>>,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "all_gather", Takes::Plain, options)?;
        let out = match (out, &counts) {
            (Some(out), _) => out,
            (None, None) => calling.new_array(&buf, "gathered", calling.comm.size())?,
            (None, Some(counts)) => calling.new_array(&buf, "flat", counts.iter().sum())?,
        };
        calling.out_of_place(&buf, out, |call, buf, out| match &counts {
            None => call.all_gather_into(buf, out),
            Some(counts) => call.all_gather_v_into(buf, out, counts),
        })
    }

    /// As `all_gather`, in one array in which this rank's part is at its place.
    #[pyo3(signature = (buf, *, counts=None, **options))]
    fn all_gather_in_place<'py>(
        &self,
        py: Python<'py>,
        buf: Array<'py>,
        counts: Option<Vec<usize>>,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "all_gather_in_place", Takes::Plain, options)?;
        calling.in_place(buf, Use::Write, |call, buf| match &counts {
            None => call.all_gather_in_place(buf),
            Some(counts) => call.all_gather_v_in_place(buf, counts),
        })
    }

    /// Rank r ends with part r of the reduction of all ranks' arrays: in `out`, or in a new array. `counts` has the number of elements of
    /// each part where they differ.
    #[pyo3(signature = (buf, *, out=None, counts=None, **options))]
    fn reduce_scatter<'py>(
        &self,
        py: Python<'py>,
        buf: Array<'py>,
        out: Option<Array<'py>>,
        counts: Option<Vec<usize>>,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "reduce_scatter", Takes::Reduction, options)?;
        let out = match (out, &counts) {
            (Some(out), _) => out,
            (None, None) => calling.new_array(&buf, "scattered", calling.comm.size())?,
            (None, Some(counts)) => {
                let own = counts.get(calling.comm.rank()).copied();
                let own = own.ok_or_else(|| {
                    calling
                        .refuse(&format!("counts has {} numbers, expected one for each rank", counts.len()))
                })?;
                calling.new_array(&buf, "flat", own)?
            }
        };
        calling.out_of_place(&buf, out, |call, buf, out| match &counts {
            None => call.reduce_scatter_into(buf, out),
            Some(counts) => call.reduce_scatter_v_into(buf, out, counts),
        })
    }

    /// As `reduce_scatter`, in one array: the result is in this rank's part, and the other parts are unspecified.
    #[pyo3(signature = (buf, *, counts=None, **options))]
    fn reduce_scatter_in_place<'py>(
        &self,
        py: Python<'py>,
        buf: Array<'py>,
        counts: Option<Vec<usize>>,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "reduce_scatter_in_place", Takes::Reduction, options)?;
        calling.in_place(buf, Use::Write, |call, buf| match &counts {
            None => call.reduce_scatter_in_place(buf),
            Some(counts) => call.reduce_scatter_v_in_place(buf, counts),
        })
    }

    /// The root ends with all ranks' arrays one after another, in its `out` or in a new array; the others with None. `counts`, of the
    /// root, has the number of elements of each rank where they differ.
    #[pyo3(signature = (buf, root=0, *, out=None, counts=None, **options))]
    fn gather<'py>(
        &self,
        py: Python<'py>,
        buf: Array<'py>,
        root: usize,
        out: Option<Array<'py>>,
        counts: Option<Vec<usize>>,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "gather", Takes::Plain, options)?;
        let is_root = calling.comm.rank() == root;
        let into = match (out, &counts) {
            _ if !is_root => None,
            (Some(out), _) => Some(out),
            (None, None) => Some(calling.new_array(&buf, "gathered", calling.comm.size())?),
            (None, Some(counts)) => Some(calling.new_array(&buf, "flat", counts.iter().sum())?),
        };
        let input = calling.memory(&buf, Use::Read)?;
        let output = match &into {
            Some(into) => calling.memory(into, Use::Write)?,
            None => input.nothing_like(),
        };
        let call = calling.call()?;
        let work = calling.submit(|| match &counts {
            None => call.gather_into(input, output, root),
            Some(counts) => call.gather_v_into(input, output, counts, root),
        });
        calling.work(work, into.map_or_else(|| py.None(), Bound::unbind))
    }

    /// As `gather`, in place: the root's array has a part for each rank, with its own at its place; the others' arrays are their parts.
    #[pyo3(signature = (buf, root=0, **options))]
    fn gather_in_place<'py>(
        &self,
        py: Python<'py>,
        buf: Array<'py>,
        root: usize,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "gather_in_place", Takes::Plain, options)?;
        calling.in_place(buf, reads(calling.comm.rank() != root), |call, buf| call.gather_in_place(buf, root))
    }

    /// Rank r ends with part r of the root's `buf`, in its `out`. The others' `buf` is not looked at: None will do.
    #[pyo3(signature = (buf, root=0, *, out, counts=None, **options))]
    fn scatter<'py>(
        &self,
        py: Python<'py>,
        buf: Option<Array<'py>>,
        root: usize,
        out: Array<'py>,
        counts: Option<Vec<usize>>,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "scatter", Takes::Plain, options)?;
        let is_root = calling.comm.rank() == root;
        let output = calling.memory(&out, Use::Write)?;
        let input = match buf {
            Some(buf) if is_root => calling.memory(&buf, Use::Read)?,
            None if is_root => return Err(calling.refuse("this rank is the root, and its buf is None")),
            _ => output.nothing_like(),
        };
        let call = calling.call()?;
        let work = calling.submit(|| match &counts {
            None => call.scatter_into(input, output, root),
            Some(counts) => call.scatter_v_into(input, output, counts, root),
        });
        calling.work(work, out.unbind())
    }

    /// As `scatter`, in place: the root's array has a part for each rank, and keeps all; the others end with theirs in `buf`.
    #[pyo3(signature = (buf, root=0, **options))]
    fn scatter_in_place<'py>(
        &self,
        py: Python<'py>,
        buf: Array<'py>,
        root: usize,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "scatter_in_place", Takes::Plain, options)?;
        calling
            .in_place(buf, reads(calling.comm.rank() == root), |call, buf| call.scatter_in_place(buf, root))
    }

    /// Part r of this rank's array goes to rank r, and what comes from rank r is part r of the result: `out`, or a new array.
    /// `send_counts` and `recv_counts` have the number of elements of each part where they differ.
    #[pyo3(signature = (buf, *, out=None, send_counts=None, recv_counts=None, **options))]
    fn all_to_all<'py>(
        &self,
        py: Python<'py>,
        buf: Array<'py>,
        out: Option<Array<'py>>,
        send_counts: Option<Vec<usize>>,
        recv_counts: Option<Vec<usize>>,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "all_to_all", Takes::Plain, options)?;
        let counts = match (send_counts, recv_counts) {
            (None, None) => None,
            (Some(sends), Some(recvs)) => Some((sends, recvs)),
            _ => return Err(calling.refuse("send_counts and recv_counts go together")),
        };
        let out = match (out, &counts) {
            (Some(out), _) => out,
            (None, None) => calling.new_array(&buf, "alike", 0)?,
            (None, Some((_, recvs))) => calling.new_array(&buf, "flat", recvs.iter().sum())?,
        };
        calling.out_of_place(&buf, out, |call, buf, out| match &counts {
            None => call.all_to_all_into(buf, out),
            Some((sends, recvs)) => call.all_to_all_v_into(buf, out, sends, recvs),
        })
    }

    /// As `all_to_all`, in one array.
    #[pyo3(signature = (buf, **options))]
    fn all_to_all_in_place<'py>(
        &self,
        py: Python<'py>,
        buf: Array<'py>,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "all_to_all_in_place", Takes::Plain, options)?;
        calling.in_place(buf, Use::Write, |call, buf| call.all_to_all_in_place(buf))
    }

    /// Rank r ends with the reduction of the arrays of ranks 0 to r.
    #[pyo3(signature = (buf, *, out=None, **options))]
    fn scan<'py>(
        &self,
        py: Python<'py>,
        buf: Array<'py>,
        out: Option<Array<'py>>,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "scan", Takes::Reduction, options)?;
        match out {
            None => calling.in_place(buf, Use::Write, |call, buf| call.scan(buf)),
            Some(out) => calling.out_of_place(&buf, out, |call, buf, out| call.scan_into(buf, out)),
        }
    }

    /// Rank r ends with the reduction of the arrays of ranks 0 to r - 1; rank 0's is unchanged.
    #[pyo3(signature = (buf, *, out=None, **options))]
    fn exscan<'py>(
        &self,
        py: Python<'py>,
        buf: Array<'py>,
        out: Option<Array<'py>>,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "exscan", Takes::Reduction, options)?;
        match out {
            None => calling.in_place(buf, Use::Write, |call, buf| call.exscan(buf)),
            Some(out) => calling.out_of_place(&buf, out, |call, buf, out| call.exscan_into(buf, out)),
        }
    }

    /// Ends on no rank before every rank has called it.
    #[pyo3(signature = (**options))]
    fn barrier(&self, py: Python<'_>, options: Option<Options<'_, '_>>) -> PyResult<Work> {
        let comm = self.shared(py, "barrier")?;
        let work = with_options(&comm, "barrier", Takes::Plain, options)?.barrier();
        Work::new(py, work, py.None(), self.place(false), None)
    }

    /// Sends an array to a rank, which receives with the same length, type and tag.
    #[pyo3(signature = (buf, dst, **options))]
    fn send<'py>(
        &self,
        py: Python<'py>,
        buf: Array<'py>,
        dst: usize,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "send", Takes::Tag, options)?;
        let memory = calling.memory(&buf, Use::Read)?;
        let call = calling.call()?;
        calling.work(calling.submit(|| call.send(memory, dst)), buf.unbind())
    }

    /// Receives into an array what a rank sends.
    #[pyo3(signature = (buf, src, **options))]
    fn recv<'py>(
        &self,
        py: Python<'py>,
        buf: Array<'py>,
        src: usize,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "recv", Takes::Tag, options)?;
        calling.in_place(buf, Use::Write, |call, buf| call.recv(buf, src))
    }

    /// Sends one array to a rank and receives another from a rank at once; the result is the one received.
    #[pyo3(signature = (send, dst, recv, src, **options))]
    fn send_recv<'py>(
        &self,
        py: Python<'py>,
        send: Array<'py>,
        dst: usize,
        recv: Array<'py>,
        src: usize,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "send_recv", Takes::Tag, options)?;
        let (sent, received) = (calling.memory(&send, Use::Read)?, calling.memory(&recv, Use::Write)?);
        let call = calling.call()?;
        calling.work(calling.submit(|| call.send_recv(sent, dst, received, src)), recv.unbind())
    }

    /// Several messages in flight together: `("send" or "recv", array, peer, tag)` for each. The result is the list of the arrays.
    #[pyo3(signature = (messages, **options))]
    fn batch<'py>(
        &self,
        py: Python<'py>,
        messages: Vec<(String, Array<'py>, usize, u32)>,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "batch", Takes::Plain, options)?;
        let (mut all, mut arrays) = (Vec::new(), Vec::new());
        for (direction, array, peer, tag) in messages {
            all.push(match direction.as_str() {
                "send" => Message::Send { buf: calling.memory(&array, Use::Read)?, to: peer, tag },
                "recv" => Message::Recv { buf: calling.memory(&array, Use::Write)?, from: peer, tag },
                other => {
                    return Err(
                        calling.refuse(&format!("a message is \"send\" or \"recv\", found {other:?}"))
                    );
                }
            });
            arrays.push(array);
        }
        let result = arrays.into_pyobject(py)?.into_any().unbind();
        let call = calling.call()?;
        calling.work(calling.submit(|| call.batch(all)), result)
    }

    /// `all_reduce` of many arrays, of several types if need be, in one operation.
    #[pyo3(signature = (bufs, **options))]
    fn all_reduce_list<'py>(
        &self,
        py: Python<'py>,
        bufs: Vec<Array<'py>>,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "all_reduce_list", Takes::Reduction, options)?;
        calling.list(bufs, Use::Write, |call, bufs| call.all_reduce_list(bufs))
    }

    /// `broadcast` of many arrays in one operation.
    #[pyo3(signature = (bufs, root=0, **options))]
    fn broadcast_list<'py>(
        &self,
        py: Python<'py>,
        bufs: Vec<Array<'py>>,
        root: usize,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "broadcast_list", Takes::Plain, options)?;
        calling.list(bufs, reads(calling.comm.rank() == root), |call, bufs| call.broadcast_list(bufs, root))
    }

    /// `reduce` of many arrays in one operation.
    #[pyo3(signature = (bufs, root=0, **options))]
    fn reduce_list<'py>(
        &self,
        py: Python<'py>,
        bufs: Vec<Array<'py>>,
        root: usize,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "reduce_list", Takes::Reduction, options)?;
        calling.list(bufs, reads(calling.comm.rank() != root), |call, bufs| call.reduce_list(bufs, root))
    }

    /// `all_gather` of many pairs of arrays in one operation; the result is the list of the outputs.
    #[pyo3(signature = (bufs, outs, **options))]
    fn all_gather_list<'py>(
        &self,
        py: Python<'py>,
        bufs: Vec<Array<'py>>,
        outs: Vec<Array<'py>>,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "all_gather_list", Takes::Plain, options)?;
        let (inputs, outputs) =
            (calling.all_memory(&bufs, Use::Read)?, calling.all_memory(&outs, Use::Write)?);
        let call = calling.call()?;
        let result = outs.into_pyobject(py)?.into_any().unbind();
        calling.work(calling.submit(|| call.all_gather_list(inputs, outputs)), result)
    }

    /// `reduce_scatter` of many pairs of arrays in one operation; the result is the list of the outputs.
    #[pyo3(signature = (bufs, outs, **options))]
    fn reduce_scatter_list<'py>(
        &self,
        py: Python<'py>,
        bufs: Vec<Array<'py>>,
        outs: Vec<Array<'py>>,
        options: Option<Options<'_, 'py>>,
    ) -> PyResult<Work> {
        let calling = Calling::new(self, py, "reduce_scatter_list", Takes::Reduction, options)?;
        let (inputs, outputs) =
            (calling.all_memory(&bufs, Use::Read)?, calling.all_memory(&outs, Use::Write)?);
        let call = calling.call()?;
        let result = outs.into_pyobject(py)?.into_any().unbind();
        calling.work(calling.submit(|| call.reduce_scatter_list(inputs, outputs)), result)
    }

    /// Every rank ends with the root's bytes; the others need not know how many.
    #[pyo3(signature = (data, root=0, **options))]
    fn broadcast_bytes(
        &self,
        py: Python<'_>,
        data: Option<Vec<u8>>,
        root: usize,
        options: Option<Options<'_, '_>>,
    ) -> PyResult<Work> {
        let comm = self.shared(py, "broadcast_bytes")?;
        let call = with_options(&comm, "broadcast_bytes", Takes::Plain, options)?;
        let work = call.broadcast_bytes(data.unwrap_or_default(), root);
        Work::new(py, work, py.None(), self.place(false), None)
    }

    /// Every rank's bytes, of whatever lengths, in a list by rank.
    #[pyo3(signature = (data, **options))]
    fn all_gather_bytes(
        &self,
        py: Python<'_>,
        data: Vec<u8>,
        options: Option<Options<'_, '_>>,
    ) -> PyResult<Work> {
        let comm = self.shared(py, "all_gather_bytes")?;
        let call = with_options(&comm, "all_gather_bytes", Takes::Plain, options)?;
        Work::new(py, call.all_gather_bytes(data), py.None(), self.place(false), None)
    }
}
