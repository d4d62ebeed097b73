//! A call on all devices of a node: its options, its checks, its submission. The collectives are in [`super::calls`].

use super::super::call::{Desk, Prepared, Side};
use super::super::restore::one;
use super::super::work::{Part, Restore, Submitted};
use super::super::{Call, Work};
use super::{Node, NodeWork, Place, Several};
use crate::error::{Error, Failed};
use crate::mem::{Buf, ErasedBufs, Event, HostStream, Parts};
use crate::types::Rank;

/// A node with options for the next call: those of [`Call`], and [`on`](NodeCall::on) with a stream for each device.
#[derive(Debug)]
#[must_use = "options do nothing without a call"]
pub struct NodeCall<'a> {
    pub(super) node: &'a Node,
    /// The options, as those of the first device's call.
    pub(in crate::comm) call: Call<'a>,
    /// Where each device's part waits for a point of its own.
    after: Option<Vec<Event>>,
}

/// A part that was looked at, before any is submitted.
#[allow(clippy::large_enum_variant)] // moved once
enum Staged<O, F> {
    Ready(Prepared, Restore<O, F>),
    Refused(Failed<F>),
}

impl Node {
    /// A call with the default options.
    pub fn call(&mut self) -> NodeCall<'_> {
        let me: &Node = self;
        // A node has a device: its makers see to it, and only its end takes them.
        let first = &me.comms[0];
        let default_algo = first.handle().membership.world.common.defaults.algo;
        NodeCall { node: me, call: Call::new(&first.handle().endpoint, default_algo), after: None }
    }

    /// Each device's part of the next call starts only after what its stream holds now: `streams` are one for each
    /// device, in order.
    pub fn on<'s>(&mut self, streams: impl IntoIterator<Item = &'s HostStream>) -> NodeCall<'_> {
        self.call().on(streams)
    }

    /// The same with the node's own [`streams`](Self::streams).
    pub fn on_streams(&mut self) -> NodeCall<'_> {
        self.call().on_streams()
    }

    /// All parts of the next call start only after `event`.
    pub fn after(&mut self, event: Event) -> NodeCall<'_> {
        self.call().after(event)
    }

    /// Sends a device's `buf` to a [`Place`], which receives with the same length, type and tag. See
    /// [`Comm::send`](crate::Comm::send). To the device itself: [`comm(device)`](Node::comm) has `send_recv` and `batch`.
    pub fn send<B: Buf>(&mut self, device: usize, buf: B, to: Place) -> Work<B> {
        self.call().send(device, buf, to)
    }

    /// Receives into a device's `buf` what a [`Place`] sends.
    pub fn recv<B: Buf>(&mut self, device: usize, buf: B, from: Place) -> Work<B> {
        self.call().recv(device, buf, from)
    }

    /// Finishes on no rank before every rank has called.
    pub fn barrier(&mut self) -> NodeWork<Vec<()>> {
        self.call().barrier()
    }
}

impl<'a> NodeCall<'a> {
    /// Each device's part starts only after what its stream holds now: `streams` are one for each device, in order.
    pub fn on<'s>(mut self, streams: impl IntoIterator<Item = &'s HostStream>) -> Self {
        self.after = Some(streams.into_iter().map(HostStream::record).collect());
        self
    }

    /// The same with the node's own [`streams`](Node::streams).
    pub fn on_streams(self) -> Self {
        let node = self.node;
        self.on(node.streams())
    }

    /// All parts start only after `event`.
    pub fn after(mut self, event: Event) -> Self {
        self.call = self.call.after(event);
        self.after = None;
        self
    }

    pub(super) fn rank_at(&self, name: &str, (process, device): Place) -> Result<Rank, Error> {
        self.node.rank_of(process, device).map_err(|error| match error {
            Error::Invalid { problem, .. } => Error::invalid(name, problem),
            error => error,
        })
    }

    /// What keeps all parts from being submitted.
    fn obstacle(&self, name: &str, bufs: usize) -> Option<Error> {
        let k = self.node.devices();
        let invalid = |what: &str, found: usize| {
            let problem = format!("{found} {what} for a node of {k} devices: one for each is needed");
            Some(Error::invalid(name, problem))
        };
        if bufs != k {
            return invalid("buffers", bufs);
        }
        if let Some(events) = self.after.as_ref().filter(|events| events.len() != k) {
            return invalid("streams", events.len());
        }
        let each = |device| {
            let endpoint = self.node.endpoint(device)?;
            let limit = endpoint.config.queue_limit;
            let full = || Error::QueueFull { call: name.to_owned(), limit };
            endpoint.health.cause().cloned().or_else(|| (endpoint.submitted.running() >= limit).then(full))
        };
        let obstacle = (0..k).find_map(each)?;
        // All devices are refused for the one.
        (0..k).filter_map(|device| self.node.endpoint(device)).for_each(|endpoint| _ = endpoint.tell());
        Some(obstacle)
    }

    /// Makes `part` of each device's buffer, and submits all parts if none is refused.
    pub(super) fn each<S: Several, O>(
        &self,
        name: &'static str,
        bufs: S,
        part: impl Fn(&Call<'_>, usize, S::Item) -> Work<O, S::Item>,
    ) -> NodeWork<S, O> {
        if let Some(error) = self.obstacle(name, bufs.count()) {
            return NodeWork::refused(bufs, &error);
        }
        let (desk, mut device, mut refused) = (Desk::default(), 0, None);
        let staged: S::Of<Staged<O, S::Item>> = bufs.each(|buf| {
            let staged = self.stage(&desk, device, |call| part(call, device, buf));
            if let Staged::Refused(failed) = &staged {
                refused.get_or_insert_with(|| at(device, failed.error.clone()));
            }
            device += 1;
            staged
        });
        if let Some(error) = refused {
            return NodeWork::new(S::map(staged, |staged| Part::Done(Err(staged.give_back(&error)))));
        }
        let mut devices = self.node.comms.iter().map(|comm| &comm.handle().endpoint);
        let mut parts: S::Of<Part<O, S::Item>> = S::map(staged, |staged| match (staged, devices.next()) {
            (Staged::Ready(prepared, restore), Some(endpoint)) => {
                Part::new(Work::new(prepared.submit(endpoint), restore))
            }
            (staged, _) => Part::Done(Err(staged.give_back(&bug(name)))),
        });
        // They were looked at, but a handle of another thread's may have come between: what was submitted cannot finish.
        let slice = S::slice(&mut parts);
        if slice.iter().any(|part| matches!(part, Part::Running(_)))
            && let Some(error) = slice.iter().find_map(Part::error)
        {
            self.node.fail(error);
        }
        NodeWork::new(parts)
    }

    /// Looks at one device's part.
    fn stage<'d, O, F>(
        &'d self,
        desk: &'d Desk,
        device: usize,
        part: impl FnOnce(&Call<'d>) -> Work<O, F>,
    ) -> Staged<O, F> {
        let mut call: Call<'d> = self.call.clone();
        if let Some(endpoint) = self.node.endpoint(device) {
            call.side = Side(endpoint);
        }
        if let Some(event) = self.after.as_ref().and_then(|events| events.get(device)) {
            call = call.after(event.clone());
        }
        call.desk = Some(desk);
        let work = part(&call);
        match desk.take() {
            Some(prepared) => Staged::Ready(prepared, work.restore()),
            None => {
                let bug = |_| Failed { buf: None, error: bug("submit") };
                Staged::Refused(work.wait().map_or_else(|failed| failed, bug))
            }
        }
    }

    /// Whether a list has one for each device.
    pub(super) fn check_list(&self, name: &str, what: &str, len: usize) -> Result<(), Error> {
        let k = self.node.devices();
        if len == k {
            return Ok(());
        }
        let problem = format!("`{what}` has {len} entries for a node of {k} devices: one for each is needed");
        Err(Error::invalid(name, problem))
    }

    /// See [`Node::send`].
    pub fn send<B: Buf>(&self, device: usize, buf: B, to: Place) -> Work<B> {
        match self.message("send", device, to) {
            Ok((call, to)) => call.send(buf, to),
            Err(error) => refused(buf, error),
        }
    }

    /// See [`Node::recv`].
    pub fn recv<B: Buf>(&self, device: usize, buf: B, from: Place) -> Work<B> {
        match self.message("recv", device, from) {
            Ok((call, from)) => call.recv(buf, from),
            Err(error) => refused(buf, error),
        }
    }

    fn message(&self, name: &str, device: usize, peer: Place) -> Result<(Call<'a>, Rank), Error> {
        let peer = self.rank_at(name, peer)?;
        let mut call = self.call.clone();
        call.side = Side(self.node.endpoint(device).ok_or_else(|| self.node.no_device(name, device))?);
        if let Some(events) = &self.after {
            let event = events.get(device).ok_or_else(|| {
                let problem =
                    format!("no stream is given for device {device}: one for each device is needed");
                Error::invalid(name, problem)
            })?;
            call = call.after(event.clone());
        }
        Ok((call, peer))
    }

    /// See [`Node::barrier`].
    pub fn barrier(&self) -> NodeWork<Vec<()>> {
        self.each("barrier", vec![(); self.node.devices()], |call, _, ()| call.barrier())
    }
}

impl<O, F> Staged<O, F> {
    /// Nothing is submitted.
    fn give_back(self, error: &Error) -> Failed<F> {
        match self {
            Staged::Ready(prepared, restore) => {
                let none = |_| Failed { buf: None, error: error.clone() };
                let given_back = restore(Err(Box::new(error.clone())), Some(prepared.into_bufs()));
                given_back.map_or_else(|failed| failed, none)
            }
            Staged::Refused(failed) => Failed { buf: failed.buf, error: error.clone() },
        }
    }
}

/// A message that cannot be sent: its buffer comes back.
fn refused<B: Buf>(buf: B, error: Error) -> Work<B> {
    let held = ErasedBufs::new(Parts { input: (), output: buf });
    Work::new(Submitted::refused(error, held), one::<B>)
}

/// Says which device's part it is that cannot be carried out.
fn at(device: usize, error: Error) -> Error {
    match error {
        Error::Invalid { call, problem } => Error::invalid(call, format!("device {device}: {problem}")),
        error => error,
    }
}

fn bug(name: &str) -> Error {
    Error::system(format!("submit {name}"), "a part was neither submitted nor refused (a bug)")
}
