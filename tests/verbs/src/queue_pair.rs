//! A reliable queue pair: its parts, its states, and how it fails.

use std::collections::VecDeque;
use std::ffi::{c_int, c_uint};
use std::time::Instant;

use allstream_sys::verbs::{IbvGidEntry, IbvQpAttr, IbvQpCap, IbvSge, IbvWc};

use crate::codes::*;
use crate::completion::Entry;
use crate::memory::Binding;
use crate::shared::Shared;
use crate::told::{self, entry};
use crate::wire::{Header, NUMBERS, Route, Socket};

/// Fills the fields of a failed completion that the manual leaves undefined, so that a program that reads them gets a useless value.
const NOTHING: c_uint = 0xbad;

/// A request to send, as it was posted.
pub(crate) struct Request {
    pub(crate) id: u64,
    pub(crate) opcode: c_uint,
    pub(crate) flags: c_uint,
    pub(crate) pieces: Vec<IbvSge>,
    /// The data of an inline request, copied when the request was posted.
    pub(crate) inline: Option<Vec<u8>>,
    pub(crate) bytes: u32,
    pub(crate) at: u64,
    pub(crate) rkey: u32,
    pub(crate) imm: u32,
    pub(crate) binding: Option<Binding>,
    /// The request is held back, because a test has asked for that.
    pub(crate) is_stalled: bool,
    /// The number of the request's first packet, once the request has begun.
    pub(crate) first: Option<u32>,
    /// For a READ: how many bytes have arrived.
    pub(crate) got: u32,
    pub(crate) end: End,
}

/// How a request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    NotYet,
    Done,
    Failed(c_uint),
}

/// The half that sends. `queue` has the requests that have not completed.
#[derive(Default)]
pub(crate) struct Sending {
    pub(crate) queue: VecDeque<Request>,
    /// How many requests take room. Their room is free once their completion, or that of a later request, is polled.
    pub(crate) used: u32,
    /// How many of these have ended without a completion of their own.
    pub(crate) silent: u32,
    /// The index of the request that is sent next, and (`packet`) which of its packets.
    pub(crate) cursor: usize,
    pub(crate) packet: u32,
    /// The number for the next new packet, and (`acked`) that of the first packet that is not acknowledged.
    pub(crate) next: u32,
    pub(crate) acked: u32,
    pub(crate) retries: u8,
    pub(crate) rnr_retries: u8,
    /// A packet is known to be lost.
    pub(crate) has_lost: bool,
    /// When the time-out is over, at which the pair looks whether the peer is still there.
    pub(crate) look: Option<Instant>,
    /// The peer had no receive: nothing is sent before this time.
    pub(crate) pause: Option<Instant>,
}

pub(crate) struct Receive {
    pub(crate) id: u64,
    pub(crate) pieces: Vec<IbvSge>,
}

/// A message of which some packets have arrived, and not the last.
pub(crate) struct Message {
    pub(crate) receive: Option<Receive>,
    pub(crate) at: u64,
    pub(crate) rkey: u32,
}

/// A READ of the peer that is being answered.
pub(crate) struct Answer {
    pub(crate) psn: u32,
    pub(crate) at: u64,
    pub(crate) rkey: u32,
    pub(crate) total: u32,
    pub(crate) sent: u32,
    /// The answer is not sent before this time.
    pub(crate) from: Option<Instant>,
}

/// A pair that has refused a peer's request fails once it has answered what came before it: with this packet to the peer, and this event here.
pub(crate) struct Dying {
    pub(crate) nak: Header,
    pub(crate) event: c_uint,
}

/// The half that receives and answers.
#[derive(Default)]
pub(crate) struct Receiving {
    pub(crate) queue: VecDeque<Receive>,
    /// How many receives take room. Their room is free once their completion is polled.
    pub(crate) used: u32,
    pub(crate) expected: u32,
    pub(crate) message: Option<Message>,
    pub(crate) answers: VecDeque<Answer>,
    pub(crate) owes_ack: bool,
    /// Other packets that the peer must get, once there is room.
    pub(crate) owed: VecDeque<Header>,
    /// The peer was already told that a packet is missing.
    pub(crate) has_complained: bool,
    pub(crate) has_heard: bool,
    pub(crate) dying: Option<Dying>,
}

pub(crate) struct QueuePair {
    /// The address of the `IbvQp` that the program has.
    pub(crate) key: usize,
    pub(crate) context: usize,
    pub(crate) domain: usize,
    pub(crate) send_cq: usize,
    pub(crate) recv_cq: usize,
    pub(crate) cap: IbvQpCap,
    pub(crate) signals_all: bool,
    pub(crate) socket: Socket,
    pub(crate) state: c_uint,
    /// The attributes that were set last.
    pub(crate) set: IbvQpAttr,
    pub(crate) route: Route,
    /// The most bytes of a message that the pair's port allows.
    pub(crate) most: u32,
    pub(crate) seven_is_for_ever: bool,
    /// Bytes of requests to send that were posted.
    pub(crate) posted: u64,
    pub(crate) sending: Sending,
    pub(crate) receiving: Receiving,
    /// There was no room for a packet: sending is tried again at this time, or when the socket has room.
    pub(crate) blocked: Option<Instant>,
}

/// The attributes that a change of state requires, and those that it also allows; `None`: there is no such change. (IBTA 1.4, 11.2.5.2, and the
/// kernel's `ib_modify_qp_is_ok`.)
fn masks(from: c_uint, to: c_uint) -> Option<(c_int, c_int)> {
    let path = M_ACCESS | M_ALT_PATH;
    Some(match (from, to) {
        (_, RESET | IN_ERROR) => (0, 0),
        (RESET, INIT) => (M_PKEY | M_PORT | M_ACCESS, 0),
        (INIT, INIT) => (0, M_PKEY | M_PORT | M_ACCESS),
        (INIT, READY_TO_RECEIVE) => {
            (M_AV | M_PATH_MTU | M_DEST | M_RQ_PSN | M_MAX_DEST_READS | M_RNR_TIMER, path | M_PKEY)
        }
        (READY_TO_RECEIVE, READY_TO_SEND) => (
            M_TIMEOUT | M_RETRY | M_RNR_RETRY | M_SQ_PSN | M_MAX_READS,
            path | M_CUR_STATE | M_RNR_TIMER | M_PATH_MIG,
        ),
        (READY_TO_SEND, READY_TO_SEND) => (0, path | M_CUR_STATE | M_RNR_TIMER | M_PATH_MIG),
        _ => return None,
    })
}

impl QueuePair {
    pub(crate) fn number(&self) -> u32 {
        self.socket.number()
    }

    /// Changes the pair's state and attributes; changes nothing if one of them is invalid.
    pub(crate) fn modify(&mut self, to: &IbvQpAttr, mask: c_int, shared: &mut Shared) -> Result<(), c_int> {
        let state = if mask & M_STATE == 0 { self.state } else { to.qp_state };
        let (needed, allowed) = masks(self.state, state).ok_or(libc::EINVAL)?;
        let given = mask & !M_STATE;
        if given & needed != needed || given & !(needed | allowed) != 0 {
            return Err(libc::EINVAL);
        }
        if given & M_CUR_STATE != 0 && to.cur_qp_state != self.state {
            return Err(libc::EINVAL);
        }
        let next = self.changed(to, given, shared)?;
        match state {
            RESET => self.reset(shared),
            IN_ERROR => self.fail(None, shared),
            _ => {
                self.set = next;
                if state == READY_TO_RECEIVE && self.state != state {
                    self.receiving.expected = next.rq_psn & NUMBERS;
                    self.route = self.route_of(&next, shared).ok_or(libc::EINVAL)?;
                }
                if state == READY_TO_SEND && self.state != state {
                    let sending = &mut self.sending;
                    (sending.next, sending.acked) = (next.sq_psn & NUMBERS, next.sq_psn & NUMBERS);
                    (sending.retries, sending.rnr_retries) = (next.retry_cnt, next.rnr_retry);
                }
                self.state = state;
            }
        }
        Ok(())
    }

    /// The pair's attributes after this change; an error if the device does not accept one of the values.
    fn changed(&self, to: &IbvQpAttr, given: c_int, shared: &Shared) -> Result<IbvQpAttr, c_int> {
        let mut set = self.set;
        let device = shared.device(self.context).ok_or(libc::EINVAL)?;
        let mut take = |bit: c_int, change: &mut dyn FnMut(&mut IbvQpAttr), is_valid: bool| {
            if given & bit == 0 {
                return Ok(());
            }
            change(&mut set);
            if is_valid { Ok(()) } else { Err(libc::EINVAL) }
        };
        let remote = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC | MW_BIND;
        take(
            M_ACCESS,
            &mut |set| set.qp_access_flags = to.qp_access_flags,
            to.qp_access_flags & !remote == 0,
        )?;
        take(M_PKEY, &mut |set| set.pkey_index = to.pkey_index, to.pkey_index == 0)?;
        let port = |number: u8| shared.port(self.context, number);
        take(M_PORT, &mut |set| set.port_num = to.port_num, port(to.port_num).is_some())?;
        take(M_RQ_PSN, &mut |set| set.rq_psn = to.rq_psn, true)?;
        take(M_SQ_PSN, &mut |set| set.sq_psn = to.sq_psn, true)?;
        take(M_DEST, &mut |set| set.dest_qp_num = to.dest_qp_num, to.dest_qp_num <= NUMBERS)?;
        take(M_RNR_TIMER, &mut |set| set.min_rnr_timer = to.min_rnr_timer, to.min_rnr_timer < 32)?;
        take(M_TIMEOUT, &mut |set| set.timeout = to.timeout, to.timeout < 32)?;
        take(M_RETRY, &mut |set| set.retry_cnt = to.retry_cnt, to.retry_cnt < 8)?;
        take(M_RNR_RETRY, &mut |set| set.rnr_retry = to.rnr_retry, to.rnr_retry < 8)?;
        let most = device.max_init_rd_atomic;
        take(M_MAX_READS, &mut |set| set.max_rd_atomic = to.max_rd_atomic, to.max_rd_atomic <= most)?;
        let (most, asked) = (device.max_rd_atomic, to.max_dest_rd_atomic);
        take(M_MAX_DEST_READS, &mut |set| set.max_dest_rd_atomic = asked, asked <= most)?;
        let own = port(self.set.port_num);
        let largest = own.map_or(0, |port| told::mtu(port.mtu));
        let fits = (1..=largest).contains(&to.path_mtu);
        take(M_PATH_MTU, &mut |set| set.path_mtu = to.path_mtu, fits)?;
        let way = &to.ah_attr;
        // The route must use the pair's own port, and on Ethernet it must be global.
        let is_way = way.port_num == self.set.port_num
            && (way.is_global != 0 || own.is_some_and(|port| port.layer == 1))
            && (way.is_global == 0 || self.gid(way.grh.sgid_index, shared).is_some());
        take(M_AV, &mut |set| set.ah_attr = to.ah_attr, is_way)?;
        Ok(set)
    }

    /// The address of the pair's port with this index.
    fn gid(&self, index: u8, shared: &Shared) -> Option<IbvGidEntry> {
        let port = shared.port(self.context, self.set.port_num)?;
        let told = port.gids.iter().find(|gid| gid.index == u32::from(index))?;
        Some(entry(self.set.port_num.into(), told))
    }

    fn route_of(&mut self, set: &IbvQpAttr, shared: &Shared) -> Option<Route> {
        let port = shared.port(self.context, set.port_num)?;
        self.most = port.max_message;
        let way = &set.ah_attr;
        if way.is_global == 0 {
            // Within an InfiniBand subnet a route needs no global addresses; here the numbers of the pairs are enough then.
            return Some(Route { rail: port.rail, ..Route::default() });
        }
        let from = self.gid(way.grh.sgid_index, shared)?;
        let (to, kind) = (way.grh.dgid.raw, from.gid_type);
        Some(Route { from: from.gid.raw, to, kind, rail: port.rail })
    }

    /// Makes the pair as if it had just been created. Its completions are dropped too.
    fn reset(&mut self, shared: &mut Shared) {
        shared.completions.forget_pair(self.number());
        shared.memory.forget_pair(self.number());
        self.state = RESET;
        (self.sending, self.receiving) = (Sending::default(), Receiving::default());
        (self.set, self.blocked) = (IbvQpAttr::default(), None);
    }

    /// Puts the pair into the error state: all posted requests complete as flushed. `event` is reported if the device itself found the error.
    pub(crate) fn fail(&mut self, event: Option<c_uint>, shared: &mut Shared) {
        if self.state == IN_ERROR {
            return;
        }
        self.state = IN_ERROR;
        shared.memory.forget_pair(self.number());
        if let Some(kind) = event {
            shared.event(self.context, kind, self.key);
        }
        (self.sending.look, self.sending.pause, self.blocked) = (None, None, None);
        self.receiving.answers.clear();
        self.receiving.dying = None;
        if let Some(receive) = self.receiving.message.take().and_then(|message| message.receive) {
            self.receiving.queue.push_front(receive);
        }
        self.flush(shared);
    }

    /// For a pair in the error state: completes as flushed all receives, and the requests to send up to the first stalled one.
    pub(crate) fn flush(&mut self, shared: &mut Shared) {
        self.report_done(shared);
        while self.sending.queue.front().is_some_and(|request| !request.is_stalled) {
            let Some(request) = self.sending.queue.pop_front() else { break };
            shared.report.flushed += 1;
            self.tell(&request, WR_FLUSH_ERR, shared);
        }
        (self.sending.cursor, self.sending.packet) = (0, 0);
        while let Some(receive) = self.receiving.queue.pop_front() {
            shared.report.flushed += 1;
            let wc = IbvWc { wr_id: receive.id, status: WR_FLUSH_ERR, opcode: NOTHING, ..IbvWc::default() };
            self.received(wc, false, shared);
        }
    }

    /// Goes on with requests that were stalled.
    pub(crate) fn go_on(&mut self, shared: &mut Shared) {
        match self.state {
            IN_ERROR => self.flush(shared),
            _ => self.advance(shared),
        }
    }

    /// Completes a receive.
    pub(crate) fn received(&mut self, wc: IbvWc, is_solicited: bool, shared: &mut Shared) {
        let pair = self.number();
        let (wc, is_receive) = (IbvWc { qp_num: pair, ..wc }, true);
        shared.complete(self.recv_cq, Entry { wc, pair, is_receive, slots: 1, is_solicited });
    }

    /// Ends a request to send, with a completion if one was asked for or the request has failed.
    fn tell(&mut self, request: &Request, status: c_uint, shared: &mut Shared) {
        let is_told = self.signals_all || request.flags & SIGNALED != 0 || status != SUCCESS;
        self.sending.silent += 1;
        if !is_told {
            return;
        }
        let (pair, is_good) = (self.number(), status == SUCCESS);
        let (slots, opcode) = (std::mem::take(&mut self.sending.silent), completed(request.opcode));
        let wc = IbvWc {
            wr_id: request.id,
            status,
            opcode: opcode.filter(|_| is_good).unwrap_or(NOTHING),
            byte_len: if is_good { request.bytes } else { NOTHING },
            qp_num: pair,
            ..IbvWc::default()
        };
        let entry = Entry { wc, pair, is_receive: false, slots, is_solicited: false };
        shared.complete(self.send_cq, entry);
    }

    /// Removes successful requests from the front of the queue, and completes them.
    fn report_done(&mut self, shared: &mut Shared) {
        while self.sending.queue.front().is_some_and(|request| request.end == End::Done) {
            let Some(request) = self.sending.queue.pop_front() else { break };
            self.sending.cursor = self.sending.cursor.saturating_sub(1);
            self.tell(&request, SUCCESS, shared);
        }
    }

    /// Completes requests that have ended, in the order in which they were posted. The first that has failed puts the pair into the error state.
    pub(crate) fn complete(&mut self, shared: &mut Shared) {
        self.report_done(shared);
        if let Some(End::Failed(status)) = self.sending.queue.front().map(|request| request.end) {
            if let Some(request) = self.sending.queue.pop_front() {
                self.tell(&request, status, shared);
            }
            self.fail(None, shared);
        }
    }
}
