//! Methods that [`Comm`](super::Comm) and [`SharedComm`](super::SharedComm) both have, written once: calls take `&mut self` on `Comm`, and `&self` on
//! `SharedComm`. The calls themselves are in tables, beside the code that carries them out: `collectives.rs`, `varied.rs`, `lists.rs`, `bytes.rs`,
//! `messages.rs`. From the tables of collectives the calls of a [`Node`](super::Node) are made, too (`node/calls.rs`).

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::bind::binding_of;
use super::handle::Stats;
use super::node::call::on_node;
use super::world::World;
use super::{Call, NodeCall, Stream};
use crate::device::DeviceCopies;
use crate::error::Error;
use crate::exec::Endpoint;
use crate::forked;
use crate::link::arena::ArenaBuf;
use crate::link::kinds::KINDS;
use crate::link::{LinkKind, SLOT};
use crate::mem::Event;
use crate::types::{Algo, Element, Function, LinkClass, Rank, ReduceOp};

/// Methods that both handles have: on `Comm` through `&mut self`, on `SharedComm` through `&self`.
macro_rules! methods {
    ($(
        $(#[$doc:meta])*
        fn $name:ident [$($generics:tt)*] ($($arg:ident: $ty:ty),*) -> $out:ty = |$comm:ident| $body:expr;
    )*) => {
        impl $crate::comm::Comm {
            $(
                $(#[$doc])*
                pub fn $name<$($generics)*>(&mut self, $($arg: $ty),*) -> $out {
                    let $comm = self;
                    $body
                }
            )*
        }

        impl $crate::comm::SharedComm {
            $(
                $(#[$doc])*
                pub fn $name<$($generics)*>(&self, $($arg: $ty),*) -> $out {
                    let $comm = self;
                    $body
                }
            )*
        }
    };
}

/// A table of calls: documentation, name, type parameters, arguments, result, and what a [`Call`] does. Each row becomes a method
/// of `Call`, and a method of both handles, which makes the call with the default options.
macro_rules! calls {
    ($(
        $(#[$doc:meta])*
        fn $name:ident [$($generics:tt)*] ($($arg:ident: $ty:ty),*) -> $out:ty = |$call:ident| $body:expr;
    )*) => {
        impl $crate::comm::Call<'_> {
            $(
                #[doc = concat!("See [`Comm::", stringify!($name), "`](super::Comm::", stringify!($name), ").")]
                pub fn $name<$($generics)*>(&self, $($arg: $ty),*) -> $out {
                    let $call = self;
                    $body
                }
            )*
        }

        $crate::comm::calls::methods! {
            $($(#[$doc])* fn $name [$($generics)*] ($($arg: $ty),*) -> $out = |comm| comm.call().$name($($arg),*);)*
        }
    };
}
pub(super) use {calls, methods};

/// A table of [`Call`]'s options. Each row becomes a method of both handles and of `Node`, which begins a call with the option set, and a method
/// of `NodeCall`, which sets the option.
macro_rules! options {
    ($($(#[$doc:meta])* fn $name:ident [$($generics:tt)*] ($($arg:ident: $ty:ty),*);)*) => {
        methods! {
            $($(#[$doc])* fn $name [$($generics)*] ($($arg: $ty),*) -> Call<'_> = |comm| comm.call().$name($($arg),*);)*
        }

        on_node! {
            $($(#[$doc])* fn $name [$($generics)*] ($($arg: $ty),*) -> NodeCall<'_>;)*
        }

        impl NodeCall<'_> {
            $(
                #[doc = concat!("See [`Call::", stringify!($name), "`].")]
                pub fn $name<$($generics)*>(mut self, $($arg: $ty),*) -> Self {
                    self.call = self.call.$name($($arg),*);
                    self
                }
            )*
        }
    };
}

options! {
    /// The reduction of the next call (default: sum).
    fn op [] (op: ReduceOp);

    /// The reduction of the next call is a function of yours. See [`Call::function`].
    ///
    /// ```
    /// # use allstream::{Comm, Function};
    /// # fn main() -> Result<(), allstream::Error> {
    /// let larger = Function::ordered("by magnitude", |left: &mut [f32], right: &[f32]| {
    ///     for (l, r) in left.iter_mut().zip(right) {
    ///         if r.abs() > l.abs() {
    ///             *l = *r;
    ///         }
    ///     }
    /// });
    /// # let mut comm = Comm::local(1)?.remove(0);
    /// let most = comm.function(&larger).all_reduce(vec![1.0f32, -3.0]).wait()?;
    /// # assert_eq!(most, [1.0, -3.0]); Ok(()) }
    /// ```
    fn function [T: Element] (function: &Function<T>);

    /// The next call multiplies this rank's input by `factor` before it is summed. See [`Call::scale`].
    fn scale [] (factor: f64);

    /// Whether the next call is deterministic. See [`Call::deterministic`].
    fn deterministic [] (on: bool);

    /// The deadline of the next call. See [`Call::timeout`].
    fn timeout [] (timeout: Duration);

    /// The algorithm of the next call; the same on all ranks.
    fn algo [] (algo: Algo);

    /// The tag of the next message (default: 0).
    fn tag [] (tag: u32);

    /// The key of the next call, which must be the same on all ranks. See [`Call::key`].
    fn key [] (key: u64);
}

methods! {
    /// A call with the default options.
    fn call [] () -> Call<'_>
        = |comm| Call::new(&comm.handle().endpoint, comm.handle().membership.world.common.defaults.algo);

    /// Sets whether later calls of this communicator are deterministic; to be set alike on all ranks. See [`Call::deterministic`].
    fn set_deterministic [] (on: bool) -> () = |comm| comm.handle().endpoint.deterministic.store(on, Ordering::Relaxed);

    /// The next call starts only after what `stream` holds now.
    fn on [] (stream: &impl Stream) -> Call<'_> = |comm| comm.call().on(stream);

    /// The next call starts only after `event`.
    fn after [] (event: Event) -> Call<'_> = |comm| comm.call().after(event);
}

/// Pastes methods that take `&self` into both handles.
macro_rules! on_both {
    ($($methods:tt)*) => {
        impl $crate::comm::Comm {
            $($methods)*
        }
        impl $crate::comm::SharedComm {
            $($methods)*
        }
    };
}
pub(super) use on_both;

on_both! {
    /// This rank's endpoint in the group, and its world.
    pub(super) fn place(&self) -> (&Arc<Endpoint>, &Arc<World>) {
        (&self.handle().endpoint, &self.handle().membership.world)
    }

    /// This rank in the group, `0..size()`.
    pub fn rank(&self) -> Rank {
        self.handle().endpoint.config.rank
    }

    /// How many hosts the group's ranks are on.
    pub fn hosts(&self) -> usize {
        self.handle().endpoint.config.env.hosts
    }

    /// The classes of the links between this rank and the group's other ranks, each once, that of the farthest ranks last: `[shm, rdma]`, say.
    pub fn links(&self) -> Vec<LinkClass> {
        let (endpoint, world) = self.place();
        let used = world.links_to(&endpoint.config.members);
        let is_used = |kind: &&&LinkKind| used.iter().any(|link| link.class == kind.class);
        KINDS.iter().filter(is_used).map(|kind| kind.class).collect()
    }

    /// Ranks in the group.
    pub fn size(&self) -> usize {
        self.handle().endpoint.config.size()
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.handle().endpoint.config.name
    }

    /// What this rank holds for communication right now.
    pub fn stats(&self) -> Stats {
        let region = &self.handle().membership.world.topology.region;
        let (slots, limit) = region.slots();
        Stats {
            in_flight: self.handle().endpoint.submitted.running(),
            staging_bytes: slots * SLOT,
            staging_limit: limit * SLOT,
            scratch_bytes: region.scratch(),
            pinned_bytes: crate::mem::pinned_bytes(),
            registered_bytes: crate::link::verbs::registered_bytes(),
            quarantined: crate::exec::quarantine::buffers(region),
            pool: self.handle().membership.world.pool_stats(),
        }
    }

    /// How many buffers of other libraries the devices of other ranks could not read in place since this communicator was bound to
    /// devices ([`bind_device`](Self::bind_device)), and why: collectives worked on copies of them, on the same device. `None`: all
    /// buffers were read in place, or the communicator is not bound. Each rank counts the buffers of its own calls.
    pub fn device_copies(&self) -> Option<DeviceCopies> {
        binding_of(&self.handle().endpoint)?.device_copies()
    }

    /// Sets how many idle communicators this rank's world keeps to be used again (default: 64, or `ALLSTREAM_POOL`). If
    /// there are more, the least recently used ones end now. Ranks may set different numbers.
    pub fn set_pool_capacity(&self, idle: usize) {
        self.handle().membership.world.set_pool_capacity(idle);
    }

    /// Writes the flight recorder of this rank's world (the last 256 collectives and 256 messages of each communicator) to a file, and
    /// returns the file's path. Operations go on meanwhile. `allstream trace` reads the files of all ranks; with `--times` it tells
    /// which ranks the others wait for, and how long operations take. After a failure each rank writes its file by itself.
    ///
    /// # Errors
    /// [`Error::System`] where the file cannot be written; [`Error::Invalid`] where `ALLSTREAM_TRACE_DIR` is `off`.
    pub fn record(&self) -> Result<PathBuf, Error> {
        forked::check()?;
        self.handle().membership.world.record_now()
    }

    /// Tells whether this communicator is dead.
    ///
    /// # Errors
    /// The cause for which it is dead.
    pub fn check(&self) -> Result<(), Error> {
        forked::check()?;
        self.handle().endpoint.died_of().map_or(Ok(()), Err)
    }

    /// Ends this communicator on all ranks: operations in flight and later calls fail with
    /// [`Error::Aborted`]. Other communicators of the same ranks stay as they are. Of a `reason` beyond 64 KiB only the beginning is told.
    pub fn abort(&self, reason: impl Into<String>) {
        let endpoint = &self.handle().endpoint;
        endpoint.fail(Error::aborted(self.rank(), reason));
        endpoint.tell();
    }

    /// A zeroed buffer of `len` elements in memory that the other ranks of this host read and write in place: a
    /// collective on it copies nothing into staging slots. A network card that carries it over RDMA reads and writes it in place, too:
    /// the first operation over such a link registers the buffer, which pins all of it, until it is dropped. In all else it is an
    /// ordinary buffer.
    ///
    /// # Errors
    /// [`Error::System`] when no room is left: a rank has room for 4 GB of such buffers at a time.
    /// [`Error::Invalid`] for `bool`: memory that other ranks write may hold any bits, and a `bool` may not. Use `u8`.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<ArenaBuf<T>, Error> {
        ArenaBuf::zeroed(&self.handle().membership.world.topology.region, len)
    }
}
