//! A reliable queue pair with a completion queue of its own, and a descriptor that wakes a sleeping thread when a completion comes.

use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::Arc;

use allstream_sys::verbs::{
    Access, IbvAhAttr, IbvCompChannel, IbvCq, IbvGid, IbvGlobalRoute, IbvMr, IbvMw, IbvMwBindInfo, IbvQp,
    IbvQpAttr, IbvQpCap, IbvQpInitAttr, IbvRecvWr, IbvSendWr, IbvSge, IbvWc, QpMask, QpState, QpType,
    SendFlags, Verbs, VerbsError, WrOpcode,
};
use rustix::io::{Errno, ioctl_fionbio};

use super::card::Card;
use super::choose::RdmaLayer;
use super::credits::MOST_SLOTS;
use super::domain::{Domain, is_not_yet};
use super::events::Events;
use super::hello::Hello;
use super::offers::Reads;
use crate::error::Error;
use crate::forked;

/// Bytes that a request may carry inline, so that the device need not fetch them from memory: as many as a cell has.
const INLINE: u32 = 256;
/// Pieces of memory that a request gathers, at most: a header and a payload.
const PIECES: usize = 2;
/// If the receiver has no receive request, the sender waits 0.64 ms (code 12) and tries again, for ever (code 7). A receiver always has one: this is for a
/// device that is slow to see it.
const NOT_READY: (u8, u8) = (12, 7);
const HOPS: u8 = 64;
/// Bytes of the subnet's prefix in a GID. On InfiniBand, ports whose prefixes differ are in different subnets, and need a global route.
const SUBNET: usize = 8;

/// How many requests a queue pair takes, and what the other end may do through it with the memory whose keys it knows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) send: u32,
    pub(super) receive: u32,
    pub(super) other_may: Access,
}

/// A request to write to the other end's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Write<'a> {
    /// Comes back in the request's completion, if there is one.
    pub(super) id: u64,
    pub(super) from: &'a [IbvSge],
    pub(super) to: u64,
    pub(super) key: u32,
    pub(super) tells: Tells,
}

/// Who gets a completion of a write. If the request fails, this end does in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tells {
    Nobody,
    This,
    /// The other end, too, and this number with it.
    Both(u32),
}

/// A request to bind a window to a part of a registered buffer, for the other end to read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bind {
    pub(super) window: *mut IbvMw,
    /// The key that the window gets.
    pub(super) key: u32,
    pub(super) registration: *mut IbvMr,
    pub(super) at: u64,
    pub(super) bytes: u64,
}

/// A request to read the other end's memory.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Read {
    /// Comes back in the request's completion.
    pub(super) id: u64,
    pub(super) into: IbvSge,
    pub(super) from: u64,
    pub(super) key: u32,
}

pub(super) struct QueuePair {
    domain: Arc<Domain>,
    events: Arc<Events>,
    /// Null once the pair is destroyed.
    pair: *mut IbvQp,
    queue: *mut IbvCq,
    /// Null for a pair without a descriptor.
    channel: *mut IbvCompChannel,
    /// Bytes that the pair's requests may carry inline.
    inline: u32,
    /// The channel was asked to report the next completion, and that event was not taken yet.
    armed: bool,
}

// SAFETY: the pointers are handles of libibverbs, which any thread may use; the other fields change only through `&mut`.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// A queue pair that takes receive requests, and is not connected yet.
    pub(super) fn new(card: &Card, room: Room) -> Result<QueuePair, Error> {
        QueuePair::of(card, room, true)
    }

    /// A queue pair that can only be polled: it has no descriptor, as a process may run out of descriptors.
    pub(super) fn without_descriptor(card: &Card, room: Room) -> Result<QueuePair, Error> {
        QueuePair::of(card, room, false)
    }

    fn of(card: &Card, room: Room, has_channel: bool) -> Result<QueuePair, Error> {
        let made = QueuePair::make(card, room, has_channel);
        made.map_err(|error| {
            let doing = format!("open a link over RDMA on {}", card.place());
            Error::system(
                doing,
                format!(
                    "{error}; a queue pair for {} send and {} receive requests was asked for",
                    room.send, room.receive
                ),
            )
        })
    }

    fn make(card: &Card, room: Room, has_channel: bool) -> Result<QueuePair, VerbsError> {
        let domain = card.domain().clone();
        let verbs = domain.verbs;
        let none = QueuePair {
            domain,
            events: card.events().clone(),
            pair: ptr::null_mut(),
            queue: ptr::null_mut(),
            channel: ptr::null_mut(),
            inline: INLINE,
            armed: false,
        };
        // If a call below fails, dropping `new` destroys what was made before.
        let mut new = none;
        let context = new.domain.context();
        if has_channel {
            // SAFETY: the device is open.
            new.channel = unsafe { verbs.create_comp_channel(context) }?;
            let os = |errno: Errno| VerbsError { call: "ioctl", code: errno.raw_os_error() };
            ioctl_fionbio(new.descriptor(), true).map_err(os)?;
        }
        // Room for a completion of every request: after an error all requests complete, also those that did not ask for a completion.
        let entries = (room.send + room.receive + 1) as i32;
        // SAFETY: the device is open, and the channel was made on it, or is null.
        new.queue = unsafe { verbs.create_cq(context, entries, ptr::null_mut(), new.channel, 0) }?;
        new.pair = new.make_pair(room)?;
        let mut attributes = IbvQpAttr {
            qp_state: QpState::INIT.0,
            qp_access_flags: room.other_may.0,
            pkey_index: card.tuning().pkey,
            port_num: card.port().port,
            ..IbvQpAttr::default()
        };
        let mask = [QpMask::STATE, QpMask::PKEY_INDEX, QpMask::PORT, QpMask::ACCESS_FLAGS];
        new.modify(&mut attributes, &mask)?;
        Ok(new)
    }

    /// Makes the pair. If the device cannot carry `INLINE` bytes inline, asks it again for 0.
    fn make_pair(&mut self, room: Room) -> Result<*mut IbvQp, VerbsError> {
        let mut ask = |inline: u32| {
            let cap = IbvQpCap {
                max_send_wr: room.send,
                max_recv_wr: room.receive,
                max_send_sge: PIECES as u32,
                max_recv_sge: 1,
                max_inline_data: inline,
            };
            let mut attributes = IbvQpInitAttr {
                qp_context: ptr::null_mut(),
                send_cq: self.queue,
                recv_cq: self.queue,
                srq: ptr::null_mut(),
                cap,
                qp_type: QpType::RC.0,
                sq_sig_all: 0,
            };
            // SAFETY: the domain and the completion queue exist, on one device.
            let made = unsafe { self.domain.verbs.create_qp(self.domain.domain(), &raw mut attributes) };
            self.inline = if made.is_ok() { attributes.cap.max_inline_data } else { 0 };
            made
        };
        ask(INLINE).or_else(|_| ask(0))
    }

    /// Connects the queue pair to the other end's. This end makes up to `asked` READs at once, and the other end up to `answered`.
    pub(super) fn connect(
        &mut self,
        card: &Card,
        first_packet: u32,
        other: &Hello,
        Reads { asked, answered }: Reads,
    ) -> Result<(), Error> {
        // Some devices refuse 0.
        let connected = self
            .make_ready_to_receive(card, other, answered.max(1))
            .and_then(|()| self.make_ready_to_send(card, first_packet, asked.max(1)));
        connected.map_err(|error| {
            Error::system(
                format!("connect {} to {} by RDMA", card.place(), other.address()),
                format!("{error}; is there a route between the two addresses?"),
            )
        })
    }

    fn make_ready_to_receive(&mut self, card: &Card, other: &Hello, reads: u8) -> Result<(), VerbsError> {
        let tuning = card.tuning();
        let is_far = card.port().layer == RdmaLayer::RoceV2 || card.gid()[..SUBNET] != other.gid[..SUBNET];
        let route = IbvGlobalRoute {
            dgid: IbvGid { raw: other.gid },
            sgid_index: card.port().gid as u8,
            hop_limit: HOPS,
            traffic_class: tuning.traffic_class,
            ..IbvGlobalRoute::default()
        };
        let way = IbvAhAttr {
            grh: if is_far { route } else { IbvGlobalRoute::default() },
            dlid: other.lid,
            sl: tuning.service_level,
            is_global: is_far.into(),
            port_num: card.port().port,
            ..IbvAhAttr::default()
        };
        let mut attributes = IbvQpAttr {
            qp_state: QpState::RTR.0,
            path_mtu: card.mtu().0.min(other.mtu.0),
            dest_qp_num: other.pair,
            rq_psn: other.first_packet,
            max_dest_rd_atomic: reads,
            min_rnr_timer: NOT_READY.0,
            ah_attr: way,
            ..IbvQpAttr::default()
        };
        let mask = [
            QpMask::STATE,
            QpMask::AV,
            QpMask::PATH_MTU,
            QpMask::RQ_PSN,
            QpMask::MIN_RNR_TIMER,
            QpMask::MAX_DEST_RD_ATOMIC,
            QpMask::DEST_QPN,
        ];
        self.modify(&mut attributes, &mask)
    }

    fn make_ready_to_send(&mut self, card: &Card, first_packet: u32, reads: u8) -> Result<(), VerbsError> {
        let tuning = card.tuning();
        let mut attributes = IbvQpAttr {
            qp_state: QpState::RTS.0,
            sq_psn: first_packet,
            timeout: tuning.timeout,
            retry_cnt: tuning.retry,
            rnr_retry: NOT_READY.1,
            max_rd_atomic: reads,
            ..IbvQpAttr::default()
        };
        let mask = [
            QpMask::STATE,
            QpMask::TIMEOUT,
            QpMask::RETRY_CNT,
            QpMask::RNR_RETRY,
            QpMask::MAX_QP_RD_ATOMIC,
            QpMask::SQ_PSN,
        ];
        self.modify(&mut attributes, &mask)
    }

    fn modify(&mut self, attributes: &mut IbvQpAttr, mask: &[QpMask]) -> Result<(), VerbsError> {
        // SAFETY: the pair exists; the library reads only the fields that the mask names.
        unsafe { self.verbs().modify_qp(self.pair, attributes, QpMask::all(mask)) }
    }

    fn verbs(&self) -> &'static Verbs {
        self.domain.verbs
    }

    /// Why nothing more comes from this queue pair, if the device has reported a failure.
    pub(super) fn problem(&self) -> Option<String> {
        self.events.problem(self.number(), self.queue)
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: a pair that is not null exists: `destroy` sets the pointer to null.
        if self.pair.is_null() { 0 } else { unsafe { (*self.pair).qp_num } }
    }

    /// Readable when a completion has come that was [asked for](Self::arm).
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        debug_assert!(!self.channel.is_null(), "made without a descriptor");
        // SAFETY: the channel exists as long as `self`, and so does its descriptor.
        unsafe { BorrowedFd::borrow_raw((*self.channel).fd) }
    }

    /// Posts so many receive requests, but no more than [`RECEIVES`](super::RECEIVES). Each takes one number that the other end sends, and no bytes.
    pub(super) fn post_receives(&mut self, count: usize) -> Result<(), VerbsError> {
        const ONE: IbvRecvWr =
            IbvRecvWr { wr_id: RECEIVED, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 0 };
        let (mut one, mut all);
        let requests: &mut [IbvRecvWr] = match count {
            0 => return Ok(()),
            1 => {
                one = [ONE];
                &mut one
            }
            count => {
                all = [ONE; super::RECEIVES as usize];
                &mut all[..count.min(super::RECEIVES as usize)]
            }
        };
        self.exists("ibv_post_recv")?;
        let mut next = ptr::null_mut();
        for request in requests.iter_mut().rev() {
            request.next = next;
            next = &raw mut *request;
        }
        // SAFETY: the pair exists; the requests of the list live until the call returns, and name no memory.
        unsafe { self.verbs().post_recv(self.pair, next) }
    }

    /// Posts a request to write.
    ///
    /// # Safety
    /// The memory is registered in the card's domain under these keys, and valid for reads. It stays so, and unchanged, until the completion of this request,
    /// or of one posted later, was seen, or [`destroy`](Self::destroy) has returned `true`.
    pub(super) unsafe fn post_write(&mut self, write: Write<'_>) -> Result<(), VerbsError> {
        // SAFETY: the caller's promise.
        unsafe { self.post_bound_write(None, write) }
    }

    /// Posts a request to write, and before it a request to bind a window.
    ///
    /// # Safety
    /// As for [`post_write`](Self::post_write). The window exists, and is not bound. The registration exists, and the memory is valid for reads, until the
    /// completion of a later [`post_invalidates`](Self::post_invalidates) of the key was seen, or the window was given back.
    pub(super) unsafe fn post_bound_write(
        &mut self,
        bind: Option<Bind>,
        write: Write<'_>,
    ) -> Result<(), VerbsError> {
        let bytes: u32 = write.from.iter().map(|piece| piece.length).sum();
        let mut from = [IbvSge::default(); PIECES];
        let pieces = write.from.len().min(PIECES);
        from[..pieces].copy_from_slice(&write.from[..pieces]);
        let inline = if bytes <= self.inline { SendFlags::INLINE.0 } else { 0 };
        let (opcode, signaled, number) = match write.tells {
            Tells::Nobody => (WrOpcode::RDMA_WRITE, 0, 0),
            Tells::This => (WrOpcode::RDMA_WRITE, SendFlags::SIGNALED.0, 0),
            Tells::Both(number) => (WrOpcode::RDMA_WRITE_WITH_IMM, SendFlags::SIGNALED.0, number),
        };
        let request = IbvSendWr {
            wr_id: write.id,
            sg_list: from.as_mut_ptr(),
            num_sge: pieces as i32,
            opcode: opcode.0,
            send_flags: signaled | inline,
            imm_data: number.to_be(),
            remote_addr: write.to,
            rkey: write.key,
            ..NOTHING
        };
        let Some(bind) = bind else {
            // SAFETY: the caller's promise for the memory.
            return unsafe { self.post_list(&mut [request]) };
        };
        let binding = IbvSendWr {
            wr_id: write.id,
            opcode: WrOpcode::BIND_MW.0,
            bind_mw: bind.window,
            bind_rkey: bind.key,
            bind_info: IbvMwBindInfo {
                mr: bind.registration,
                addr: bind.at,
                length: bind.bytes,
                mw_access_flags: Access::REMOTE_READ.0,
            },
            ..NOTHING
        };
        // SAFETY: the caller's promise for the memory, the window and the registration.
        unsafe { self.post_list(&mut [binding, request]) }
    }

    /// Posts requests, each of an id and a key, after which the other end can read nothing more by these keys.
    pub(super) fn post_invalidates(
        &mut self,
        keys: impl IntoIterator<Item = (u64, u32)>,
    ) -> Result<(), VerbsError> {
        let (mut requests, mut count) = ([NOTHING; MOST_SLOTS as usize], 0);
        for ((id, key), request) in keys.into_iter().zip(&mut requests) {
            *request = IbvSendWr {
                wr_id: id,
                opcode: WrOpcode::LOCAL_INV.0,
                send_flags: SendFlags::SIGNALED.0,
                // In C a union: here it is the key to invalidate, in the host's byte order.
                imm_data: key,
                ..NOTHING
            };
            count += 1;
        }
        // SAFETY: the requests name no memory.
        unsafe { self.post_list(&mut requests[..count]) }
    }

    /// Posts requests to read.
    ///
    /// # Safety
    /// The memory at each `into` is registered in the card's domain, for the device to write to, and valid for writes. It stays so, and nobody else
    /// touches it, until the completion of that request was seen, or [`destroy`](Self::destroy) has returned `true`.
    pub(super) unsafe fn post_reads(&mut self, reads: &mut [Read]) -> Result<(), VerbsError> {
        let (mut requests, mut count) = ([NOTHING; MOST_SLOTS as usize], 0);
        for (read, request) in reads.iter_mut().zip(&mut requests) {
            *request = IbvSendWr {
                wr_id: read.id,
                sg_list: &raw mut read.into,
                num_sge: 1,
                opcode: WrOpcode::RDMA_READ.0,
                send_flags: SendFlags::SIGNALED.0,
                remote_addr: read.from,
                rkey: read.key,
                ..NOTHING
            };
            count += 1;
        }
        // SAFETY: the caller's promise for the memory.
        unsafe { self.post_list(&mut requests[..count]) }
    }

    /// Posts these requests by one call.
    ///
    /// # Safety
    /// What the requests name is as [`Verbs::post_send`] asks.
    unsafe fn post_list(&mut self, requests: &mut [IbvSendWr]) -> Result<(), VerbsError> {
        let mut next = ptr::null_mut();
        for request in requests.iter_mut().rev() {
            request.next = next;
            next = &raw mut *request;
        }
        if next.is_null() {
            return Ok(());
        }
        self.exists("ibv_post_send")?;
        // SAFETY: the pair exists; the requests of the list live until the call returns. The caller's promise for what they name.
        unsafe { self.verbs().post_send(self.pair, next) }
    }

    /// Sends a number, and no bytes.
    pub(super) fn post_number(&mut self, id: u64, number: u32) -> Result<(), VerbsError> {
        let request = IbvSendWr {
            wr_id: id,
            opcode: WrOpcode::SEND_WITH_IMM.0,
            send_flags: SendFlags::SIGNALED.0,
            imm_data: number.to_be(),
            ..NOTHING
        };
        // SAFETY: the request names no memory.
        unsafe { self.post_list(&mut [request]) }
    }

    fn exists(&self, call: &'static str) -> Result<(), VerbsError> {
        if self.pair.is_null() {
            Err(VerbsError { call, code: Errno::NOTCONN.raw_os_error() })
        } else {
            Ok(())
        }
    }

    /// Puts completions that have come in `into`, the oldest first, and returns how many. `None`: there are no more. If the progress thread is about to
    /// sleep (`wanted`), the descriptor is armed before that, and `Some(0)` means that the caller must look once more.
    pub(super) fn completions(
        &mut self,
        wanted: impl Fn() -> bool,
        into: &mut [IbvWc],
    ) -> Result<Option<usize>, VerbsError> {
        let count = self.poll(into)?;
        Ok((count > 0 || wanted() && self.arm()?).then_some(count))
    }

    /// Puts completions that have come in `into`, the oldest first, and returns how many.
    pub(super) fn poll(&mut self, into: &mut [IbvWc]) -> Result<usize, VerbsError> {
        // SAFETY: the queue exists as long as `self`.
        unsafe { self.verbs().poll_cq(self.queue, into) }
    }

    /// Arms the descriptor: it becomes readable when the next completion comes. `true`: it was not armed before, so a completion may have come since the
    /// last look, and whoever wants to sleep must look once more.
    pub(super) fn arm(&mut self) -> Result<bool, VerbsError> {
        if self.armed && !self.take_event()? {
            return Ok(false);
        }
        // SAFETY: the queue exists as long as `self`.
        unsafe { self.verbs().req_notify_cq(self.queue) }?;
        self.armed = true;
        Ok(true)
    }

    /// Takes the event that has come through the descriptor; `false`: none has come.
    fn take_event(&mut self) -> Result<bool, VerbsError> {
        let (mut queue, mut data) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel exists, and does not block; there is room for both pointers.
        match unsafe { self.verbs().get_cq_event(self.channel, &raw mut queue, &raw mut data) } {
            // SAFETY: the channel serves only this queue, which exists, so the event is the queue's; it is acknowledged once.
            Ok(()) => unsafe { self.verbs().ack_cq_events(self.queue, 1) }.map(|()| true),
            Err(error) if is_not_yet(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Ends all traffic: posted requests complete with an error, and nothing more is accepted from the other end. `false`: the device has refused to.
    pub(super) fn fail(&mut self) -> bool {
        if self.pair.is_null() {
            return true;
        }
        let mut attributes = IbvQpAttr { qp_state: QpState::ERR.0, ..IbvQpAttr::default() };
        let failed = self.modify(&mut attributes, &[QpMask::STATE]);
        if let Err(error) = &failed {
            tracing::debug!("a queue pair cannot be put to its error state: {error}");
        }
        failed.is_ok()
    }

    /// Destroys the queue pair, and its completions with it. `true`: the device no longer touches memory that the pair's requests named, or that the other
    /// end could name through it.
    pub(super) fn destroy(&mut self) -> bool {
        if self.pair.is_null() {
            return true;
        }
        let number = self.number();
        // SAFETY: the pair exists, and is not used any more.
        let destroyed = unsafe { self.verbs().destroy_qp(self.pair) };
        match destroyed {
            Ok(()) => {
                self.pair = ptr::null_mut();
                self.events.forget(number, self.queue);
            }
            Err(error) => tracing::error!("a queue pair cannot be destroyed: {error}"),
        }
        self.pair.is_null()
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // In a forked child the pair is the parent's. If the pair cannot be destroyed, its completion queue and channel stay, too.
        if forked::is_forked() || !self.destroy() {
            return;
        }
        // SAFETY: `make` made the queue and the channel, or they are null. Nobody uses them any more, as the pair is gone. Every event that was taken was
        // acknowledged, so that destroying the queue does not wait for that.
        unsafe {
            if !self.queue.is_null() {
                let _ = self.verbs().destroy_cq(self.queue);
            }
            if !self.channel.is_null() {
                let _ = self.verbs().destroy_comp_channel(self.channel);
            }
        }
    }
}

/// The id of all receive requests, which their completions carry.
pub(super) const RECEIVED: u64 = u64::MAX;

/// Set in the id of a request whose completion counts for no frame: a piece that is not a frame's last, the write of an offer, a lane's trial, a
/// receive request.
pub(super) const PIECE: u64 = 1 << 63;

/// A send request with nothing filled in.
const NOTHING: IbvSendWr = IbvSendWr {
    wr_id: 0,
    next: ptr::null_mut(),
    sg_list: ptr::null_mut(),
    num_sge: 0,
    opcode: 0,
    send_flags: 0,
    imm_data: 0,
    remote_addr: 0,
    rkey: 0,
    _rest_of_wr: [0; 5],
    _qp_type: 0,
    bind_mw: ptr::null_mut(),
    bind_rkey: 0,
    bind_info: IbvMwBindInfo { mr: ptr::null_mut(), addr: 0, length: 0, mw_access_flags: 0 },
};
