//! A call on all devices of a node: its options, its checks, its submission. The collectives are in tables, from which
//! [`super::calls`] makes the calls of a node, too.

use std::fmt;
use std::sync::Arc;

use super::super::call::{Desk, Side, no_room};
use super::super::{Call, Work};
use super::{Node, NodeWork, Place, Several};
use crate::error::Error;
use crate::exec::Endpoint;
use crate::mem::{Buf, Event, HostStream};
use crate::types::Rank;

/// What else of a call's arguments must be checked, beside the buffers: the name and the length of each list, and the root.
type Given<'a> = (&'a [(&'a str, usize)], Option<Place>);

/// A node with options for the next call: those of [`Call`], and [`on`](NodeCall::on) with a stream for each device.
#[derive(Debug)]
#[must_use = "options do nothing without a call"]
pub struct NodeCall<'a> {
    pub(super) node: &'a Node,
    /// The options, kept in a call of the first device.
    pub(in crate::comm) call: Call<'a>,
    /// The event that each device's part waits for, by device, if `on` was given streams.
    pub(super) after: Option<Vec<Event>>,
}

/// Methods of [`NodeCall`] that `Node` has, too, with the default options.
macro_rules! on_node {
    ($($(#[$doc:meta])* fn $name:ident [$($generics:tt)*] ($($arg:ident: $ty:ty),*) -> $out:ty;)*) => {
        impl $crate::comm::Node {
            $(
                $(#[$doc])*
                pub fn $name<$($generics)*>(&mut self, $($arg: $ty),*) -> $out {
                    self.call().$name($($arg),*)
                }
            )*
        }
    };
}
pub(in crate::comm) use on_node;

on_node! {
    /// Each device's part of the next call starts only after what its stream holds now: `streams` are one for each
    /// device, in order.
    fn on ['s] (streams: impl IntoIterator<Item = &'s HostStream>) -> NodeCall<'_>;

    /// [`on`](Self::on) with the node's own [`streams`](Self::streams).
    fn on_streams [] () -> NodeCall<'_>;

    /// All parts of the next call start only after `event`.
    fn after [] (event: Event) -> NodeCall<'_>;

    /// Sends a device's `buf` to a [`Place`], which receives with the same length, type and tag. See
    /// [`Comm::send`](crate::Comm::send). From a device to itself: `send_recv` and `batch` of [`comm(device)`](Node::comm).
    fn send [B: Buf] (device: usize, buf: B, to: Place) -> Work<B>;

    /// Receives into a device's `buf` what a [`Place`] sends.
    fn recv [B: Buf] (device: usize, buf: B, from: Place) -> Work<B>;

    /// Finishes on no rank before every rank has called.
    fn barrier [] () -> NodeWork<Vec<()>>;
}

impl<'a> NodeCall<'a> {
    /// Each device's part starts only after what its stream holds now: `streams` are one for each device, in order.
    pub fn on<'s>(self, streams: impl IntoIterator<Item = &'s HostStream>) -> Self {
        NodeCall { after: Some(streams.into_iter().map(HostStream::record).collect()), ..self }
    }

    /// [`on`](Self::on) with the node's own [`streams`](Node::streams).
    pub fn on_streams(self) -> Self {
        let node = self.node;
        self.on(node.streams())
    }

    /// All parts start only after `event`.
    pub fn after(self, event: Event) -> Self {
        NodeCall { call: self.call.after(event), after: None, ..self }
    }

    /// The call of one device. An error if the node has no such device, or `on` was given no stream for it.
    fn of_device(&self, name: &str, device: usize) -> Result<Call<'a>, Error> {
        let comm = self.node.comms.get(device).ok_or_else(|| self.node.no_device(name, device))?;
        let mut call = self.call.clone();
        call.side = Side(comm.place().0);
        let Some(events) = &self.after else { return Ok(call) };
        let none = || format!("no stream is given for device {device}: one for each device is needed");
        let event = events.get(device).ok_or_else(|| Error::invalid(name, none()))?;
        Ok(call.after(event.clone()))
    }

    /// Returns the root's rank (0 in a call without a root), or the error because of which no part may be submitted.
    fn check(&self, name: &str, bufs: usize, (lists, root): Given<'_>) -> Result<Rank, Error> {
        let k = self.node.devices();
        let one_each = |found: usize, what: fmt::Arguments<'_>| {
            let problem = || format!("{what} for a node of {k} devices: one for each is needed");
            if found == k { Ok(()) } else { Err(Error::invalid(name, problem())) }
        };
        let root = root.map_or(Ok(0), |root| self.node.rank_in(name, root))?;
        lists.iter().try_for_each(|(list, n)| one_each(*n, format_args!("`{list}` has {n} entries")))?;
        one_each(bufs, format_args!("{bufs} buffers"))?;
        let streams = self.after.as_ref().map_or(k, Vec::len);
        one_each(streams, format_args!("{streams} streams"))?;
        let obstacle = |e: &Arc<Endpoint>| e.health.cause().cloned().or_else(|| no_room(e, name, 1));
        let Some(obstacle) = self.node.endpoints().find_map(obstacle) else { return Ok(root) };
        // The obstacle of one device is the error of all: no later call need return it.
        self.node.endpoints().for_each(|endpoint| _ = endpoint.tell());
        Err(obstacle)
    }

    /// Prepares each device's part: `part` gets the device's call, the device's number, the root's rank and the device's buffers. Submits
    /// all parts if none is refused.
    pub(in crate::comm) fn each<S: Several<Item: Send + 'static>, O>(
        &self,
        name: &'static str,
        bufs: S,
        given: Given<'_>,
        part: impl Fn(&Call<'_>, usize, Rank, S::Item) -> Work<O, S::Item>,
    ) -> NodeWork<S, O> {
        let mut bufs = bufs.items();
        let root = match self.check(name, bufs.as_mut().len(), given) {
            Ok(root) => root,
            Err(error) => return NodeWork::new(S::map(bufs, |buf| Work::unsubmitted(buf, error.clone()))),
        };
        let (desk, mut devices) = (Desk::default(), 0..);
        let mut staged = S::map(bufs, |buf| {
            let device = devices.next().unwrap_or(0);
            let mut call = match self.of_device(name, device) {
                Ok(call) => call,
                Err(error) => return (None, Work::unsubmitted(buf, error)),
            };
            call.desk = Some(&desk);
            let work = part(&call, device, root, buf);
            (desk.take().map(|prepared| (prepared, call.side.0)), work)
        });
        let mut looked_at = staged.as_mut().iter().map(|(_, work)| work).enumerate();
        let refused = looked_at.find_map(|(device, work)| Some(at(device, work.refused()?.clone())));
        let mut works = S::map(staged, |(prepared, work)| match prepared {
            Some((prepared, endpoint)) => Work::new(prepared.end(endpoint, refused.as_ref()), work.restore()),
            None => work.with_cause(refused.as_ref()),
        });
        // All parts were checked, but another thread may have called meanwhile. If a part is refused now, those submitted cannot finish.
        let has_begun = works.as_mut().iter().any(|work| work.at().is_some());
        if has_begun && let Some(error) = works.as_mut().iter().find_map(Work::refused) {
            self.node.fail(error);
        }
        NodeWork::new(works)
    }

    /// A message of a device; where it cannot be sent or received, its buffer comes back.
    fn message<B: Buf>(
        &self,
        name: &str,
        (device, peer): (usize, Place),
        buf: B,
        submit: impl FnOnce(&Call<'a>, B, Rank) -> Work<B>,
    ) -> Work<B> {
        match self.node.rank_in(name, peer).and_then(|peer| Ok((self.of_device(name, device)?, peer))) {
            Ok((call, peer)) => submit(&call, buf, peer),
            Err(error) => Work::unsubmitted(buf, error),
        }
    }

    /// See [`Node::send`].
    pub fn send<B: Buf>(&self, device: usize, buf: B, to: Place) -> Work<B> {
        self.message("send", (device, to), buf, Call::send)
    }

    /// See [`Node::recv`].
    pub fn recv<B: Buf>(&self, device: usize, buf: B, from: Place) -> Work<B> {
        self.message("recv", (device, from), buf, Call::recv)
    }

    /// See [`Node::barrier`].
    pub fn barrier(&self) -> NodeWork<Vec<()>> {
        self.each("barrier", vec![(); self.node.devices()], (&[], None), |call, _, _, ()| call.barrier())
    }
}

/// Adds to an error the device whose part cannot be carried out.
fn at(device: usize, error: Error) -> Error {
    match error {
        Error::Invalid { call, problem } => Error::invalid(call, format!("device {device}: {problem}")),
        error => error,
    }
}
