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
/// The array for the result, if the caller gives one: else the result is in the input or in a new array.
type Out<'py> = Option<Array<'py>>;
/// The number of elements of each rank, where ranks have different numbers.
type Counts = Option<Vec<usize>>;

/// A call from Python: its name, communicator and options, and what it has taken so far.
struct Calling<'a, 'py> {
    py: Python<'py>,
    name: &'static str,
    comm: SharedComm,
    takes: Takes,
    options: Option<Options<'a, 'py>>,
    /// The streams in whose order the call uses its arrays on devices; empty if all arrays are on the host.
    streams: RefCell<CallStreams>,
    /// The memory that the call takes, so that another operation waits for it or is refused.
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

    /// The engine's call with its options. Called after all memory was taken: if earlier operations have a part of that memory, the call starts
    /// after them.
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
        self.group.after(&self.comm, call, wait).map_err(|error| errors::of(self.py, &error))
    }

    fn memory(&self, array: &Array<'py>, how: Use) -> PyResult<Memory> {
        // Asking a library for its array may run Python code that makes another call: that call borrows the cells of its own `Calling`, not these.
        Memory::of(array, how, self.name, &mut self.streams.borrow_mut(), &mut self.claim.borrow_mut())
    }

    fn all_memory(&self, arrays: &[Array<'py>], how: Use) -> PyResult<Vec<Memory>> {
        arrays.iter().map(|array| self.memory(array, how)).collect()
    }

    /// Runs `submit`, without the GIL if an array is on a device: the driver may wait for host functions that need the GIL.
    fn submit<T: Send>(&self, submit: impl FnOnce() -> T + Send) -> T {
        if self.streams.borrow().is_empty() { submit() } else { self.py.detach(submit) }
    }

    /// The `Work` of a submitted operation. `result`: what its `wait` returns.
    fn work(&self, flight: impl Flight + 'static, result: Py<PyAny>) -> PyResult<Work> {
        let on_devices = !self.streams.borrow().is_empty();
        let is_message = self.takes == Takes::Tag || self.name == "batch";
        let place = self.group.place(is_message);
        let work = Work::new(self.py, flight, result, place, on_devices.then(|| self.comm.clone()))?;
        self.claim.borrow().submitted(&work.0);
        Ok(work)
    }

    /// A call on one array, which is also its result. `how`: whether this rank's part of the operation reads or writes the array.
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

    /// A call from the array `buf` into the array `out`, which is its result. Without `out` this rank receives nothing, and the result is None.
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

    /// A call whose result every rank gets: into `out` if that is given, else in place, into `buf`.
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

    /// A call on many arrays; its result is the list of these arrays.
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

    /// A call from many input arrays into as many outputs; its result is the list of the outputs.
    fn list_into<'s, F: Flight + 'static>(
        &'s self,
        bufs: &[Array<'py>],
        outs: Vec<Array<'py>>,
        submit: impl FnOnce(&Call<'s>, Vec<Memory>, Vec<Memory>) -> F + Send,
    ) -> PyResult<Work> {
        let inputs = self.all_memory(bufs, Use::Read)?;
        self.list(outs, Use::Write, |call, outputs| submit(call, inputs, outputs))
    }

    /// `out`, or a new array of the library and element type of `like`. Without `counts` the new array is made by the function of `_arrays.py` that
    /// `new` names; the number in `new` (of ranks) is its argument. With `counts` the new array is flat, and `flat` computes its length from them.
    ///
    /// # Errors
    /// `like` is no array, or its library is not one whose arrays `_arrays.py` can make; the errors of `flat`.
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

    /// The output of `all_gather`, and of `gather` on its root.
    fn gathered(&self, buf: &Array<'py>, out: Out<'py>, counts: &Counts) -> PyResult<Array<'py>> {
        self.out_or_new((buf, out), ("gathered", self.comm.size()), counts, |counts| Ok(counts.iter().sum()))
    }

    /// Whether this rank's number is `rank`.
    fn is(&self, rank: usize) -> bool {
        self.comm.rank() == rank
    }

    fn refuse(&self, problem: &str) -> PyErr {
        errors::invalid(self.py, self.name, problem)
    }
}

/// How this rank uses an array that some ranks only read and others write. `only`: this rank only reads it.
fn reads(only: bool) -> Use {
    if only { Use::Read } else { Use::Write }
}

/// Defines methods of [`Comm`] for Python: each entry gives the documentation, name and arguments of a method as in Python, which options it
/// takes, and its body.
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
    /// Every rank ends with the reduction of all ranks' arrays: in `buf`, or in `out` (of the same length) if that is given.
    fn all_reduce(buf: Array<'py>, *, out: Out<'py> = None) takes Reduction
        = |calling| calling.in_place_or_into(buf, out, Call::all_reduce, Call::all_reduce_into);

    /// Every rank ends with the root's array: in `buf`, or in `out` if that is given.
    fn broadcast(buf: Array<'py>, root: usize = 0, *, out: Out<'py> = None) takes Plain = |calling| {
        match out {
            // The root's buffer is only read, the others' are written.
            None => calling.in_place(buf, reads(calling.is(root)), |call, buf| call.broadcast(buf, root)),
            Some(out) => calling.out_of_place(&buf, out, |call, buf, out| call.broadcast_into(buf, out, root)),
        }
    };

    /// The root ends with the reduction of all ranks' arrays: in `buf`, or in `out` if that is given. The other ranks' arrays are unchanged.
    fn reduce(buf: Array<'py>, root: usize = 0, *, out: Out<'py> = None) takes Reduction = |calling| {
        match out {
            // Only the root's buffer is written.
            None => calling.in_place(buf, reads(!calling.is(root)), |call, buf| call.reduce(buf, root)),
            Some(out) => calling.out_of_place(&buf, out, |call, buf, out| call.reduce_into(buf, out, root)),
        }
    };

    /// Every rank ends with all ranks' arrays, one after another in rank order: in `out`, or in a new array. `counts` has the number of elements
    /// of each rank, if these differ.
    fn all_gather(buf: Array<'py>, *, out: Out<'py> = None, counts: Counts = None) takes Plain = |calling| {
        let out = calling.gathered(&buf, out, &counts)?;
        calling.out_of_place(&buf, out, |call, buf, out| match &counts {
            None => call.all_gather_into(buf, out),
            Some(counts) => call.all_gather_v_into(buf, out, counts),
        })
    };

    /// As `all_gather`, in place: `buf` has a part for each rank, and this rank's input is in its own part.
    fn all_gather_in_place(buf: Array<'py>, *, counts: Counts = None) takes Plain = |calling| {
        calling.in_place(buf, Use::Write, |call, buf| match &counts {
            None => call.all_gather_in_place(buf),
            Some(counts) => call.all_gather_v_in_place(buf, counts),
        })
    };

    /// Rank r ends with part r of the reduction of all ranks' arrays: in `out`, or in a new array. `counts` has the number of elements of
    /// each part, if these differ.
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

    /// As `reduce_scatter`, in place: the result is in this rank's part of `buf`, and the other parts are unspecified.
    fn reduce_scatter_in_place(buf: Array<'py>, *, counts: Counts = None) takes Reduction = |calling| {
        calling.in_place(buf, Use::Write, |call, buf| match &counts {
            None => call.reduce_scatter_in_place(buf),
            Some(counts) => call.reduce_scatter_v_in_place(buf, counts),
        })
    };

    /// The root ends with all ranks' arrays, one after another in rank order, in its `out` or in a new array; on the other ranks the result is
    /// None. If the ranks' numbers of elements differ, all ranks give `counts`, of which only the root's numbers are used.
    fn gather(buf: Array<'py>, root: usize = 0, *, out: Out<'py> = None, counts: Counts = None) takes Plain = |calling| {
        let out = if calling.is(root) { Some(calling.gathered(&buf, out, &counts)?) } else { None };
        calling.out_of_place(&buf, out, |call, buf, out| match &counts {
            None => call.gather_into(buf, out, root),
            Some(counts) => call.gather_v_into(buf, out, counts, root),
        })
    };

    /// As `gather`, in place: the root's array has a part for each rank, and its own input is in its own part; the other ranks' arrays are their
    /// inputs.
    fn gather_in_place(buf: Array<'py>, root: usize = 0) takes Plain
        = |calling| calling.in_place(buf, reads(!calling.is(root)), |call, buf| call.gather_in_place(buf, root));

    /// Rank r ends with part r of the root's `buf`, in its `out`. On ranks other than the root `buf` is ignored and may be None. If the parts'
    /// numbers of elements differ, all ranks give `counts`, of which only the root's numbers are used.
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

    /// As `scatter`, in place: the root's array has a part for each rank, and is unchanged; the other ranks end with their parts in `buf`.
    fn scatter_in_place(buf: Array<'py>, root: usize = 0) takes Plain
        = |calling| calling.in_place(buf, reads(calling.is(root)), |call, buf| call.scatter_in_place(buf, root));

    /// Sends part r of this rank's array to rank r, and receives part r of the result from rank r, in `out` or in a new array.
    /// `send_counts` and `recv_counts` have the number of elements of each part, if these differ.
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

    /// As `all_to_all`, in place: what this rank receives replaces what it sends.
    fn all_to_all_in_place(buf: Array<'py>) takes Plain
        = |calling| calling.in_place(buf, Use::Write, Call::all_to_all_in_place);

    /// Rank r ends with the reduction of the arrays of ranks 0 to r, in `buf`, or in `out` if that is given.
    fn scan(buf: Array<'py>, *, out: Out<'py> = None) takes Reduction
        = |calling| calling.in_place_or_into(buf, out, Call::scan, Call::scan_into);

    /// Rank r ends with the reduction of the arrays of ranks 0 to r - 1, in `buf` or `out`; on rank 0 that array is unchanged.
    fn exscan(buf: Array<'py>, *, out: Out<'py> = None) takes Reduction
        = |calling| calling.in_place_or_into(buf, out, Call::exscan, Call::exscan_into);

    /// A barrier: it is over on no rank before every rank has called it.
    fn barrier() takes Plain = |calling| calling.work(calling.call()?.barrier(), calling.py.None());

    /// Sends an array to rank `dst`, which must receive with the same length, element type and tag.
    fn send(buf: Array<'py>, dst: usize) takes Tag
        = |calling| calling.in_place(buf, Use::Read, |call, buf| call.send(buf, dst));

    /// Receives into an array what rank `src` sends.
    fn recv(buf: Array<'py>, src: usize) takes Tag
        = |calling| calling.in_place(buf, Use::Write, |call, buf| call.recv(buf, src));

    /// Sends one array to rank `dst` and at the same time receives another from rank `src`; the result is the received array.
    fn send_recv(send: Array<'py>, dst: usize, recv: Array<'py>, src: usize) takes Tag
        = |calling| calling.out_of_place(&send, recv, |call, sent, received| call.send_recv(sent, dst, received, src));

    /// Sends and receives several messages at the same time: `("send" or "recv", array, peer, tag)` for each. The result is the list of the arrays.
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

    /// `all_reduce` of many arrays in one operation; their element types may differ.
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

    /// The result is the root's bytes, on every rank; the other ranks need not know how many there are, and their `data` is ignored.
    fn broadcast_bytes(data: Option<Vec<u8>>, root: usize = 0) takes Plain = |calling| {
        let work = calling.call()?.broadcast_bytes(data.unwrap_or_default(), root);
        calling.work(work, calling.py.None())
    };

    /// The result is the list of all ranks' bytes, in rank order; their lengths may differ.
    fn all_gather_bytes(data: Vec<u8>) takes Plain
        = |calling| calling.work(calling.call()?.all_gather_bytes(data), calling.py.None());
}
