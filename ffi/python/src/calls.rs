//! The collectives and messages of [`Comm`]: each takes its arrays, submits, and returns a [`Work`].

use std::cell::RefCell;

use allstream::{Call, Message, SharedComm};
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
/// Where a result goes, if not into the input or a new array.
type Out<'py> = Option<Array<'py>>;
/// Elements of each rank, where they differ.
type Counts = Option<Vec<usize>>;

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
    fn call(&self) -> PyResult<Call<'_>> {
        let call = with_options(&self.comm, self.name, self.takes, self.options)?;
        let Some(wait) = self.claim.borrow_mut().waits(&self.comm) else { return Ok(call) };
        if let Some(options) = self.options
            && options.get_item("after")?.is_some_and(|after| !after.is_none())
        {
            return Err(self.refuse(
                "an earlier operation has this memory, or a part of it, and this call is to start after a stream, too: wait() for that \
                 operation first",
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

    /// A call on one array, which is its result. `how`: what this rank's part of it does there.
    fn in_place<'s, F: Flight + 'static>(
        &'s self,
        buf: Array<'py>,
        how: Use,
        submit: impl FnOnce(&Call<'s>, Memory) -> F + Send,
    ) -> PyResult<Work> {
        let memory = self.memory(&buf, how)?;
        let call = self.call()?;
        self.work(self.submit(|| submit(&call, memory)), buf.unbind())
    }

    /// A call from one array into another, which is its result. Without another, this rank's part of it gets nothing, and its result is None.
    fn out_of_place<'s, F: Flight + 'static>(
        &'s self,
        buf: &Array<'py>,
        out: impl Into<Out<'py>>,
        submit: impl FnOnce(&Call<'s>, Memory, Memory) -> F + Send,
    ) -> PyResult<Work> {
        let (input, out) = (self.memory(buf, Use::Read)?, out.into());
        let output = match &out {
            Some(out) => self.memory(out, Use::Write)?,
            None => input.nothing_like(),
        };
        let call = self.call()?;
        let work = self.submit(|| submit(&call, input, output));
        self.work(work, out.map_or_else(|| self.py.None(), Bound::unbind))
    }

    /// A call in one array of which all ranks' are written, or, where there is `out`, from that into `out`.
    fn in_place_or_into<'s, F: Flight + 'static, G: Flight + 'static>(
        &'s self,
        buf: Array<'py>,
        out: Out<'py>,
        in_place: impl FnOnce(&Call<'s>, Memory) -> F + Send,
        into: impl FnOnce(&Call<'s>, Memory, Memory) -> G + Send,
    ) -> PyResult<Work> {
        match out {
            None => self.in_place(buf, Use::Write, in_place),
            Some(out) => self.out_of_place(&buf, out, into),
        }
    }

    /// A call on many arrays, whose result is their list.
    fn list<'s, F: Flight + 'static>(
        &'s self,
        bufs: Vec<Array<'py>>,
        how: Use,
        submit: impl FnOnce(&Call<'s>, Vec<Memory>) -> F + Send,
    ) -> PyResult<Work> {
        let memory = self.all_memory(&bufs, how)?;
        let call = self.call()?;
        let result = bufs.into_pyobject(self.py)?.into_any().unbind();
        self.work(self.submit(|| submit(&call, memory)), result)
    }

    /// A call from many arrays into as many, whose result is the list of the outputs.
    fn list_into<'s, F: Flight + 'static>(
        &'s self,
        bufs: &[Array<'py>],
        outs: Vec<Array<'py>>,
        submit: impl FnOnce(&Call<'s>, Vec<Memory>, Vec<Memory>) -> F + Send,
    ) -> PyResult<Work> {
        let inputs = self.all_memory(bufs, Use::Read)?;
        self.list(outs, Use::Write, |call, outputs| submit(call, inputs, outputs))
    }

    /// `out`, or a new array of the kind and type of `like`: by `new`, which names the function that makes it and the ranks that it is for, or flat,
    /// for as many elements as `flat` finds in `counts`.
    ///
    /// # Errors
    /// `like` is no array, or of a library whose arrays are not made here; those of `flat`.
    fn out_or_new<T>(
        &self,
        (like, out): (&Array<'py>, Out<'py>),
        new: (&str, usize),
        counts: &Option<T>,
        flat: impl FnOnce(&T) -> PyResult<usize>,
    ) -> PyResult<Array<'py>> {
        let (how, n) = match (out, counts) {
            (Some(out), _) => return Ok(out),
            (None, None) => new,
            (None, Some(counts)) => ("flat", flat(counts)?),
        };
        if !Memory::is_of(like)? {
            return Err(errors::not_an_array(like, self.name));
        }
        self.py.import("allstream._arrays")?.call_method1(how, (like, n, self.name))
    }

    /// The `out` of `all_gather`, and of the root of `gather`.
    fn gathered(&self, buf: &Array<'py>, out: Out<'py>, counts: &Counts) -> PyResult<Array<'py>> {
        self.out_or_new((buf, out), ("gathered", self.comm.size()), counts, |counts| Ok(counts.iter().sum()))
    }

    /// Whether this rank is that one.
    fn is(&self, rank: usize) -> bool {
        self.comm.rank() == rank
    }

    fn refuse(&self, problem: &str) -> PyErr {
        errors::invalid(self.py, self.name, problem)
    }
}

/// What a rank does with an array that some ranks only read.
fn reads(only: bool) -> Use {
    if only { Use::Read } else { Use::Write }
}

/// The methods of [`Comm`] that Python sees: for each its documentation, name and arguments as Python has them, which options it takes, and what it
/// does.
macro_rules! calls {
    ($(
        $(#[$doc:meta])*
        fn $name:ident(
            $($arg:ident: $type:ty $(= $default:tt)?),* $(, *, $($keyword:ident: $kind:ty $(= $value:tt)?),+)?
        ) takes $takes:ident = |$calling:ident| $body:expr;
    )*) => {
        #[pymethods]
        impl Comm {
            $(
                $(#[$doc])*
                #[pyo3(signature = ($($arg $(= $default)?,)* $(*, $($keyword $(= $value)?,)+)? **options))]
                fn $name<'py>(
                    &self,
                    py: Python<'py>,
                    $($arg: $type,)*
                    $($($keyword: $kind,)+)?
                    options: Option<Options<'_, 'py>>,
                ) -> PyResult<Work> {
                    let $calling = Calling::new(self, py, stringify!($name), Takes::$takes, options)?;
                    $body
                }
            )*
        }
    };
}

calls! {
    /// Every rank ends with the reduction of all ranks' arrays: in `buf`, or in `out`, of the same length.
    fn all_reduce(buf: Array<'py>, *, out: Out<'py> = None) takes Reduction
        = |calling| calling.in_place_or_into(buf, out, Call::all_reduce, Call::all_reduce_into);

    /// Every rank ends with the root's array: in `buf`, or the root's `buf` in every rank's `out`.
    fn broadcast(buf: Array<'py>, root: usize = 0, *, out: Out<'py> = None) takes Plain = |calling| {
        match out {
            // The root's is only read.
            None => calling.in_place(buf, reads(calling.is(root)), |call, buf| call.broadcast(buf, root)),
            Some(out) => calling.out_of_place(&buf, out, |call, buf, out| call.broadcast_into(buf, out, root)),
        }
    };

    /// The root ends with the reduction of all ranks' arrays: in `buf`, or in its `out`. The others' are unchanged.
    fn reduce(buf: Array<'py>, root: usize = 0, *, out: Out<'py> = None) takes Reduction = |calling| {
        match out {
            // Only the root's is written.
            None => calling.in_place(buf, reads(!calling.is(root)), |call, buf| call.reduce(buf, root)),
            Some(out) => calling.out_of_place(&buf, out, |call, buf, out| call.reduce_into(buf, out, root)),
        }
    };

    /// All ranks' arrays one after another, by rank: in `out`, or in a new array. `counts` has the number of elements of each rank
    /// where they differ.
    fn all_gather(buf: Array<'py>, *, out: Out<'py> = None, counts: Counts = None) takes Plain = |calling| {
        let out = calling.gathered(&buf, out, &counts)?;
        calling.out_of_place(&buf, out, |call, buf, out| match &counts {
            None => call.all_gather_into(buf, out),
            Some(counts) => call.all_gather_v_into(buf, out, counts),
        })
    };

    /// As `all_gather`, in one array in which this rank's part is at its place.
    fn all_gather_in_place(buf: Array<'py>, *, counts: Counts = None) takes Plain = |calling| {
        calling.in_place(buf, Use::Write, |call, buf| match &counts {
            None => call.all_gather_in_place(buf),
            Some(counts) => call.all_gather_v_in_place(buf, counts),
        })
    };

    /// Rank r ends with part r of the reduction of all ranks' arrays: in `out`, or in a new array. `counts` has the number of elements of
    /// each part where they differ.
    fn reduce_scatter(buf: Array<'py>, *, out: Out<'py> = None, counts: Counts = None) takes Reduction = |calling| {
        let out = calling.out_or_new((&buf, out), ("scattered", calling.comm.size()), &counts, |counts| {
            let problem = || format!("counts has {} numbers, expected one for each rank", counts.len());
            counts.get(calling.comm.rank()).copied().ok_or_else(|| calling.refuse(&problem()))
        })?;
        calling.out_of_place(&buf, out, |call, buf, out| match &counts {
            None => call.reduce_scatter_into(buf, out),
            Some(counts) => call.reduce_scatter_v_into(buf, out, counts),
        })
    };

    /// As `reduce_scatter`, in one array: the result is in this rank's part, and the other parts are unspecified.
    fn reduce_scatter_in_place(buf: Array<'py>, *, counts: Counts = None) takes Reduction = |calling| {
        calling.in_place(buf, Use::Write, |call, buf| match &counts {
            None => call.reduce_scatter_in_place(buf),
            Some(counts) => call.reduce_scatter_v_in_place(buf, counts),
        })
    };

    /// The root ends with all ranks' arrays one after another, in its `out` or in a new array; the others with None. `counts`, of the
    /// root, has the number of elements of each rank where they differ.
    fn gather(buf: Array<'py>, root: usize = 0, *, out: Out<'py> = None, counts: Counts = None) takes Plain = |calling| {
        let out = if calling.is(root) { Some(calling.gathered(&buf, out, &counts)?) } else { None };
        calling.out_of_place(&buf, out, |call, buf, out| match &counts {
            None => call.gather_into(buf, out, root),
            Some(counts) => call.gather_v_into(buf, out, counts, root),
        })
    };

    /// As `gather`, in place: the root's array has a part for each rank, with its own at its place; the others' arrays are their parts.
    fn gather_in_place(buf: Array<'py>, root: usize = 0) takes Plain
        = |calling| calling.in_place(buf, reads(!calling.is(root)), |call, buf| call.gather_in_place(buf, root));

    /// Rank r ends with part r of the root's `buf`, in its `out`. The others' `buf` is not looked at: None will do.
    fn scatter(buf: Option<Array<'py>>, root: usize = 0, *, out: Array<'py>, counts: Counts = None) takes Plain = |calling| {
        let output = calling.memory(&out, Use::Write)?;
        let input = match buf {
            Some(buf) if calling.is(root) => calling.memory(&buf, Use::Read)?,
            None if calling.is(root) => return Err(calling.refuse("this rank is the root, and its buf is None")),
            _ => output.nothing_like(),
        };
        let call = calling.call()?;
        let work = calling.submit(|| match &counts {
            None => call.scatter_into(input, output, root),
            Some(counts) => call.scatter_v_into(input, output, counts, root),
        });
        calling.work(work, out.unbind())
    };

    /// As `scatter`, in place: the root's array has a part for each rank, and keeps all; the others end with theirs in `buf`.
    fn scatter_in_place(buf: Array<'py>, root: usize = 0) takes Plain
        = |calling| calling.in_place(buf, reads(calling.is(root)), |call, buf| call.scatter_in_place(buf, root));

    /// Part r of this rank's array goes to rank r, and what comes from rank r is part r of the result: `out`, or a new array.
    /// `send_counts` and `recv_counts` have the number of elements of each part where they differ.
    fn all_to_all(
        buf: Array<'py>, *, out: Out<'py> = None, send_counts: Counts = None, recv_counts: Counts = None
    ) takes Plain = |calling| {
        let counts = match (send_counts, recv_counts) {
            (None, None) => None,
            (Some(sends), Some(recvs)) => Some((sends, recvs)),
            _ => return Err(calling.refuse("send_counts and recv_counts go together")),
        };
        let out = calling.out_or_new((&buf, out), ("alike", 0), &counts, |(_, recvs)| Ok(recvs.iter().sum()))?;
        calling.out_of_place(&buf, out, |call, buf, out| match &counts {
            None => call.all_to_all_into(buf, out),
            Some((sends, recvs)) => call.all_to_all_v_into(buf, out, sends, recvs),
        })
    };

    /// As `all_to_all`, in one array.
    fn all_to_all_in_place(buf: Array<'py>) takes Plain
        = |calling| calling.in_place(buf, Use::Write, Call::all_to_all_in_place);

    /// Rank r ends with the reduction of the arrays of ranks 0 to r.
    fn scan(buf: Array<'py>, *, out: Out<'py> = None) takes Reduction
        = |calling| calling.in_place_or_into(buf, out, Call::scan, Call::scan_into);

    /// Rank r ends with the reduction of the arrays of ranks 0 to r - 1; rank 0's is unchanged.
    fn exscan(buf: Array<'py>, *, out: Out<'py> = None) takes Reduction
        = |calling| calling.in_place_or_into(buf, out, Call::exscan, Call::exscan_into);

    /// Ends on no rank before every rank has called it.
    fn barrier() takes Plain = |calling| calling.work(calling.call()?.barrier(), calling.py.None());

    /// Sends an array to a rank, which receives with the same length, type and tag.
    fn send(buf: Array<'py>, dst: usize) takes Tag
        = |calling| calling.in_place(buf, Use::Read, |call, buf| call.send(buf, dst));

    /// Receives into an array what a rank sends.
    fn recv(buf: Array<'py>, src: usize) takes Tag
        = |calling| calling.in_place(buf, Use::Write, |call, buf| call.recv(buf, src));

    /// Sends one array to a rank and receives another from a rank at once; the result is the one received.
    fn send_recv(send: Array<'py>, dst: usize, recv: Array<'py>, src: usize) takes Tag
        = |calling| calling.out_of_place(&send, recv, |call, sent, received| call.send_recv(sent, dst, received, src));

    /// Several messages in flight together: `("send" or "recv", array, peer, tag)` for each. The result is the list of the arrays.
    fn batch(messages: Vec<(String, Array<'py>, usize, u32)>) takes Plain = |calling| {
        let (mut all, mut arrays) = (Vec::new(), Vec::new());
        for (direction, array, peer, tag) in messages {
            all.push(match direction.as_str() {
                "send" => Message::Send { buf: calling.memory(&array, Use::Read)?, to: peer, tag },
                "recv" => Message::Recv { buf: calling.memory(&array, Use::Write)?, from: peer, tag },
                other => return Err(calling.refuse(&format!("a message is \"send\" or \"recv\", found {other:?}"))),
            });
            arrays.push(array);
        }
        let result = arrays.into_pyobject(calling.py)?.into_any().unbind();
        let call = calling.call()?;
        calling.work(calling.submit(|| call.batch(all)), result)
    };

    /// `all_reduce` of many arrays, of several types if need be, in one operation.
    fn all_reduce_list(bufs: Vec<Array<'py>>) takes Reduction
        = |calling| calling.list(bufs, Use::Write, Call::all_reduce_list);

    /// `broadcast` of many arrays in one operation.
    fn broadcast_list(bufs: Vec<Array<'py>>, root: usize = 0) takes Plain
        = |calling| calling.list(bufs, reads(calling.is(root)), |call, bufs| call.broadcast_list(bufs, root));

    /// `reduce` of many arrays in one operation.
    fn reduce_list(bufs: Vec<Array<'py>>, root: usize = 0) takes Reduction
        = |calling| calling.list(bufs, reads(!calling.is(root)), |call, bufs| call.reduce_list(bufs, root));

    /// `all_gather` of many pairs of arrays in one operation; the result is the list of the outputs.
    fn all_gather_list(bufs: Vec<Array<'py>>, outs: Vec<Array<'py>>) takes Plain
        = |calling| calling.list_into(&bufs, outs, Call::all_gather_list);

    /// `reduce_scatter` of many pairs of arrays in one operation; the result is the list of the outputs.
    fn reduce_scatter_list(bufs: Vec<Array<'py>>, outs: Vec<Array<'py>>) takes Reduction
        = |calling| calling.list_into(&bufs, outs, Call::reduce_scatter_list);

    /// Every rank ends with the root's bytes; the others need not know how many.
    fn broadcast_bytes(data: Option<Vec<u8>>, root: usize = 0) takes Plain = |calling| {
        let work = calling.call()?.broadcast_bytes(data.unwrap_or_default(), root);
        calling.work(work, calling.py.None())
    };

    /// Every rank's bytes, of whatever lengths, in a list by rank.
    fn all_gather_bytes(data: Vec<u8>) takes Plain
        = |calling| calling.work(calling.call()?.all_gather_bytes(data), calling.py.None());
}
