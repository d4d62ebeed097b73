//! The half of a queue pair that receives: it carries out a peer's requests in the order of their packets, and answers them.

use std::time::Instant;

use allstream_sys::verbs::IbvWc;

use crate::codes::*;
use crate::memory::{Refused, part, total};
use crate::queue_pair::{Answer, Dying, Message, QueuePair};
use crate::shared::Shared;
use crate::wire::*;

/// How a request is refused: the status of the requester's completion, and the asynchronous event here.
struct Fault {
    status: u32,
    event: u32,
}

const INVALID: Fault = Fault { status: REM_INV_REQ_ERR, event: QP_REQ_ERR };
const FORBIDDEN: Fault = Fault { status: REM_ACCESS_ERR, event: QP_ACCESS_ERR };
const FAILED: Fault = Fault { status: REM_OP_ERR, event: QP_FATAL };

/// Where a packet's data goes.
enum Place {
    Here(Vec<Piece>),
    /// No receive is posted.
    NoReceive,
    Refused(Fault),
}

fn takes_receive(header: &Header) -> bool {
    match u32::from(header.opcode) {
        SEND | SEND_WITH_IMM => header.flags & FIRST != 0,
        WRITE_WITH_IMM => header.flags & LAST != 0,
        _ => false,
    }
}

impl QueuePair {
    /// Receives at most `most` packets. Returns whether there may be more.
    pub(crate) fn take(&mut self, most: usize, shared: &mut Shared) -> bool {
        for _ in 0..most {
            let Some(header) = self.socket.peek() else { return false };
            self.packet(&header, shared);
        }
        true
    }

    fn packet(&mut self, header: &Header, shared: &mut Shared) {
        let is_request = matches!(header.kind, REQUEST | PROBE);
        if !self.is_heard(header, shared) {
            self.socket.take(&[]);
            if is_request {
                let to = Header { kind: DROPPED, psn: header.psn, dest: header.source, ..Header::default() };
                let route = header.route.back();
                self.socket.send(Header { route, ..to }, &[]);
            }
            return;
        }
        match header.kind {
            REQUEST => self.request(header, shared),
            PROBE => {
                self.socket.take(&[]);
                self.receiving.owes_ack = true;
            }
            READ_RESPONSE => match self.wanted(header, shared) {
                None => {
                    self.socket.take(&[]);
                }
                Some(Err(Refused)) => {
                    self.socket.take(&[]);
                    self.came(header, false, shared);
                }
                Some(Ok(pieces)) => {
                    let is_placed = self.socket.take(&pieces) == Taken::Done;
                    shared.report.unmapped += u64::from(!is_placed);
                    self.came(header, is_placed, shared);
                }
            },
            _ => {
                self.socket.take(&[]);
                self.answered(header, shared);
            }
        }
        if is_request {
            self.respond(shared);
        }
    }

    /// Whether this pair accepts a packet: it comes from the connected pair by the connected route, and the port is active.
    fn is_heard(&self, header: &Header, shared: &Shared) -> bool {
        let is_ready = matches!(self.state, READY_TO_RECEIVE | READY_TO_SEND);
        // A pair that sends DROPPED need not be connected, so it need not know the route.
        let is_route = header.route == self.route.back() || header.kind == DROPPED;
        is_ready
            && header.source == self.set.dest_qp_num
            && is_route
            && shared.is_active(self.context, self.set.port_num)
    }

    fn request(&mut self, header: &Header, shared: &mut Shared) {
        let receiving = &mut self.receiving;
        if !std::mem::replace(&mut receiving.has_heard, true) && self.state == READY_TO_RECEIVE {
            shared.event(self.context, COMM_EST, self.key);
        }
        let ahead = behind(header.psn, receiving.expected);
        if receiving.dying.is_some() || ahead > 0 {
            self.socket.take(&[]);
            if receiving.dying.is_none() && !std::mem::replace(&mut receiving.has_complained, true) {
                let psn = receiving.expected;
                self.owe(Header { kind: NAK_SEQUENCE, psn, ..self.header() });
            }
            return;
        }
        if ahead < 0 {
            self.socket.take(&[]);
            return self.repeated(header, shared);
        }
        receiving.has_complained = false;
        if header.opcode == READ as u8 {
            self.socket.take(&[]);
            return self.read(header, shared);
        }
        match self.place(header, shared) {
            Place::NoReceive => {
                self.socket.take(&[]);
                shared.report.no_receive += 1;
                let status = self.set.min_rnr_timer.into();
                self.owe(Header { kind: NAK_RNR, psn: header.psn, status, ..self.header() });
            }
            Place::Refused(fault) => {
                self.socket.take(&[]);
                self.refuse(header.psn, fault);
            }
            Place::Here(pieces) => {
                if self.socket.take(&pieces) == Taken::Unmapped {
                    shared.report.unmapped += 1;
                    return self.refuse(header.psn, FAILED);
                }
                self.receiving.expected = further(header.psn, 1);
                self.receiving.owes_ack = true;
                if header.flags & LAST != 0 {
                    self.finish(header, shared);
                }
            }
        }
    }

    fn owe(&mut self, header: Header) {
        self.receiving.owed.push_back(header);
    }

    /// Refuses a request. What came before it is still answered first.
    fn refuse(&mut self, psn: u32, fault: Fault) {
        let nak = Header { kind: NAK, psn, status: fault.status, ..self.header() };
        self.receiving.dying = Some(Dying { nak, event: fault.event });
    }

    /// Handles a packet that was received before. A READ is answered again; anything else is only acknowledged again.
    fn repeated(&mut self, header: &Header, shared: &mut Shared) {
        if header.opcode != READ as u8 {
            self.receiving.owes_ack = true;
            return;
        }
        let mut answers = self.receiving.answers.iter_mut();
        if let Some(answer) = answers.find(|answer| answer.psn == header.psn) {
            // The requester has started the READ again, and waits for its first byte.
            answer.sent = 0;
        } else if self.receiving.answers.len() < usize::from(self.set.max_dest_rd_atomic) {
            self.answer(header, shared);
        }
    }

    fn read(&mut self, header: &Header, shared: &mut Shared) {
        let may = self.set.qp_access_flags & REMOTE_READ != 0;
        let at_once = usize::from(self.set.max_dest_rd_atomic);
        if header.mtu != self.set.path_mtu as u8 || !may || self.receiving.answers.len() >= at_once {
            return self.refuse(header.psn, INVALID);
        }
        let (who, what) = ((self.domain, self.number()), (header.rkey, header.at, header.total));
        if header.total > 0 && shared.memory.remote(who, what, REMOTE_READ, &mut shared.report).is_err() {
            return self.refuse(header.psn, FORBIDDEN);
        }
        self.receiving.expected = further(header.psn, 1);
        self.answer(header, shared);
    }

    fn answer(&mut self, header: &Header, shared: &mut Shared) {
        let Header { psn, at, rkey, total, .. } = *header;
        // Until the delay is over, requests that follow the READ are carried out before it is answered.
        let from = shared.draws.delay().map(|delay| Instant::now() + delay);
        from.into_iter().for_each(|at| shared.timer.wake_at(at));
        self.receiving.answers.push_back(Answer { psn, at, rkey, total, sent: 0, from });
    }

    /// Where a packet's data belongs. Keys, bounds and permissions are checked for each packet.
    fn place(&mut self, header: &Header, shared: &mut Shared) -> Place {
        let (opcode, is_first) = (u32::from(header.opcode), header.flags & FIRST != 0);
        let is_write = matches!(opcode, WRITE | WRITE_WITH_IMM);
        if header.mtu != self.set.path_mtu as u8 || self.receiving.message.is_none() != is_first {
            return Place::Refused(INVALID);
        }
        if is_write && self.set.qp_access_flags & REMOTE_WRITE == 0 {
            return Place::Refused(INVALID);
        }
        let (who, Header { rkey, at, total: all, .. }) = ((self.domain, self.number()), *header);
        if is_write && is_first && all > 0 {
            let whole = (rkey, at, all);
            if shared.memory.remote(who, whole, REMOTE_WRITE, &mut shared.report).is_err() {
                return Place::Refused(FORBIDDEN);
            }
        }
        if takes_receive(header) && self.receiving.queue.is_empty() {
            return Place::NoReceive;
        }
        if is_first {
            self.receiving.message = Some(Message { receive: None, at, rkey });
        }
        let Some(message) = self.receiving.message.as_mut() else { return Place::Refused(INVALID) };
        if takes_receive(header) {
            message.receive = self.receiving.queue.pop_front();
        }
        if header.bytes == 0 {
            return Place::Here(Vec::new());
        }
        if is_write {
            let at = message.at + u64::from(header.offset);
            let what = (message.rkey, at, header.bytes);
            return match shared.memory.remote(who, what, REMOTE_WRITE, &mut shared.report) {
                Ok(piece) => Place::Here(vec![piece]),
                Err(Refused) => Place::Refused(FORBIDDEN),
            };
        }
        let Some(receive) = &message.receive else { return Place::Refused(INVALID) };
        let id = receive.id;
        let (wc, fault) = if all > total(&receive.pieces).unwrap_or(0) {
            (LOC_LEN_ERR, INVALID)
        } else {
            let (domain, memory, report) = (self.domain, &shared.memory, &mut shared.report);
            let pieces = part(&receive.pieces, header.offset, header.bytes);
            let own = pieces.iter().map(|piece| memory.own(domain, piece, LOCAL_WRITE, report));
            match own.collect() {
                Ok(pieces) => return Place::Here(pieces),
                Err(Refused) => (LOC_PROT_ERR, FAILED),
            }
        };
        self.receiving.message = None;
        self.received(IbvWc { wr_id: id, status: wc, ..IbvWc::default() }, false, shared);
        Place::Refused(fault)
    }

    /// The last packet of a message has arrived: completes the receive that the message used, if any.
    fn finish(&mut self, header: &Header, shared: &mut Shared) {
        let Some(receive) = self.receiving.message.take().and_then(|message| message.receive) else { return };
        let opcode = u32::from(header.opcode);
        let has_imm = matches!(opcode, SEND_WITH_IMM | WRITE_WITH_IMM);
        let wc = IbvWc {
            wr_id: receive.id,
            status: SUCCESS,
            opcode: if opcode == WRITE_WITH_IMM { WC_RECV_WITH_IMM } else { WC_RECV },
            byte_len: header.total,
            imm_data: if has_imm { header.imm } else { 0 },
            src_qp: header.source,
            wc_flags: if has_imm { WC_WITH_IMM } else { 0 },
            ..IbvWc::default()
        };
        self.received(wc, header.flags & IS_SOLICITED != 0, shared);
    }

    /// Sends what is owed to the peer, as far as there is room.
    pub(crate) fn respond(&mut self, shared: &mut Shared) {
        if !matches!(self.state, READY_TO_RECEIVE | READY_TO_SEND) {
            return;
        }
        if self.receiving.owes_ack {
            let psn = further(self.receiving.expected, NUMBERS);
            if self.transmit(Header { kind: ACK, psn, ..self.header() }, &[], shared) == Sent::Full {
                return;
            }
            self.receiving.owes_ack = false;
        }
        if !self.send_owed(shared) {
            return;
        }
        let now = Instant::now();
        while let Some(answer) = self.receiving.answers.front() {
            if answer.from.is_some_and(|from| from > now) || !self.answer_on(shared) {
                return;
            }
        }
        // Reports answers that were lost just now.
        if !self.send_owed(shared) {
            return;
        }
        if let Some(dying) = self.receiving.dying.take() {
            if self.transmit(dying.nak, &[], shared) == Sent::Full {
                self.receiving.dying = Some(dying);
                return;
            }
            self.fail(Some(dying.event), shared);
        }
    }

    /// Sends the packets in `owed`. Returns whether there was room for all.
    fn send_owed(&mut self, shared: &mut Shared) -> bool {
        while let Some(header) = self.receiving.owed.front().copied() {
            if self.transmit(header, &[], shared) == Sent::Full {
                return false;
            }
            self.receiving.owed.pop_front();
        }
        true
    }

    /// Sends the next packet of the oldest READ's answer, or gives the answer up. Returns whether there was room.
    fn answer_on(&mut self, shared: &mut Shared) -> bool {
        let Some(answer) = self.receiving.answers.front() else { return false };
        let (psn, offset, all) = (answer.psn, answer.sent, answer.total);
        let bytes = PACKET.min(all - offset);
        let (who, what) = ((self.domain, self.number()), (answer.rkey, answer.at + u64::from(offset), bytes));
        let piece = match bytes {
            0 => Ok(Piece { at: 0, bytes: 0 }),
            _ => shared.memory.remote(who, what, REMOTE_READ, &mut shared.report),
        };
        let Ok(piece) = piece else {
            self.receiving.answers.clear();
            self.refuse(psn, FORBIDDEN);
            return true;
        };
        let header = Header { kind: READ_RESPONSE, psn, total: all, offset, ..self.header() };
        match self.transmit(header, &[piece], shared) {
            Sent::Full => return false,
            Sent::Unmapped => {
                shared.report.unmapped += 1;
                self.receiving.answers.clear();
                self.refuse(psn, FAILED);
                return true;
            }
            // The packet is lost: the peer asks again after its time-out.
            Sent::Gone => {
                self.owe(Header { kind: DROPPED, psn, ..self.header() });
                self.receiving.answers.pop_front();
                return true;
            }
            Sent::Done => {}
        }
        if let Some(answer) = self.receiving.answers.front_mut() {
            answer.sent += bytes;
            if answer.sent >= answer.total {
                self.receiving.answers.pop_front();
            }
        }
        true
    }
}
