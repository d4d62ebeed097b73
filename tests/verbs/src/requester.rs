//! The half of a queue pair that sends: it sends the packets of the requests in order, and handles the peer's answers.

use std::time::{Duration, Instant};

use crate::codes::*;
use crate::memory::{Refused, part};
use crate::queue_pair::{End, QueuePair, Request};
use crate::shared::Shared;
use crate::wire::*;

/// How long a pair that found no room for a packet waits before it tries again, unless its socket reports room earlier.
const AGAIN: Duration = Duration::from_millis(1);

/// The times that `min_rnr_timer` stands for, in units of ten microseconds (IBTA 1.4, table 45).
const RNR_TIMES: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
    3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// How many packet numbers a request uses.
fn packets(request: &Request) -> u32 {
    match request.opcode {
        LOCAL_INV | BIND_MW => 0,
        READ => 1,
        _ => request.bytes.div_ceil(PACKET).max(1),
    }
}

fn is_open(request: &Request) -> bool {
    request.first.is_some() && request.end == End::NotYet
}

/// What to do after a step.
enum Step {
    Again,
    Stop,
    Fail(u32),
}

impl QueuePair {
    /// Sends what may be sent now.
    pub(crate) fn advance(&mut self, shared: &mut Shared) {
        while self.state == READY_TO_SEND && self.sending.pause.is_none() {
            match self.step(shared) {
                Step::Again => {}
                Step::Stop => break,
                Step::Fail(status) => {
                    if let Some(request) = self.sending.queue.get_mut(self.sending.cursor) {
                        request.end = End::Failed(status);
                    }
                    self.complete(shared);
                    break;
                }
            }
        }
    }

    fn step(&mut self, shared: &mut Shared) -> Step {
        let sending = &mut self.sending;
        let Some(request) = sending.queue.get(sending.cursor) else { return Step::Stop };
        match request.end {
            End::Done => {
                (sending.cursor, sending.packet) = (sending.cursor + 1, 0);
                return Step::Again;
            }
            // The requests before it must complete first.
            End::Failed(_) => return Step::Stop,
            End::NotYet if request.is_stalled => return Step::Stop,
            End::NotYet => {}
        }
        if sending.packet == 0 {
            let before = sending.queue.iter().take(sending.cursor);
            let reads = before.filter(|request| request.opcode == READ && is_open(request)).count();
            if request.flags & FENCE != 0 && reads > 0 {
                return Step::Stop;
            }
            if matches!(request.opcode, LOCAL_INV | BIND_MW) {
                return self.here(shared);
            }
            if request.bytes > self.most {
                return Step::Fail(LOC_LEN_ERR);
            }
            if request.opcode == READ {
                if self.set.max_rd_atomic == 0 {
                    return Step::Fail(LOC_QP_OP_ERR);
                }
                if reads >= usize::from(self.set.max_rd_atomic) {
                    return Step::Stop;
                }
                let (domain, report) = (self.domain, &mut shared.report);
                let mut pieces = request.pieces.iter();
                if pieces.any(|piece| shared.memory.own(domain, piece, LOCAL_WRITE, report).is_err()) {
                    return Step::Fail(LOC_PROT_ERR);
                }
            }
        }
        self.send_packet(shared)
    }

    /// Carries out a request that involves no peer: one that binds or invalidates a window.
    fn here(&mut self, shared: &mut Shared) -> Step {
        let (domain, pair) = (self.domain, self.number());
        let Some(request) = self.sending.queue.get_mut(self.sending.cursor) else { return Step::Stop };
        let done = match request.binding {
            Some(binding) => shared.memory.bind(domain, pair, binding),
            None => shared.memory.invalidate(request.rkey, pair),
        };
        if done == Err(Refused) {
            return Step::Fail(if request.binding.is_some() { MW_BIND_ERR } else { LOC_QP_OP_ERR });
        }
        request.end = End::Done;
        self.sending.cursor += 1;
        self.complete(shared);
        Step::Again
    }

    fn send_packet(&mut self, shared: &mut Shared) -> Step {
        let sending = &mut self.sending;
        let Some(request) = sending.queue.get_mut(sending.cursor) else { return Step::Stop };
        let (count, packet) = (packets(request), sending.packet);
        let first = *request.first.get_or_insert_with(|| {
            let first = sending.next;
            sending.next = further(first, count);
            first
        });
        let psn = further(first, packet);
        if behind(psn, sending.acked) >= WINDOW as i32 {
            return Step::Stop;
        }
        let offset = packet * PACKET;
        let bytes = if request.opcode == READ { 0 } else { PACKET.min(request.bytes - offset) };
        let data = match &request.inline {
            Some(data) => {
                let at = data.as_ptr() as u64 + u64::from(offset);
                vec![Piece { at, bytes }]
            }
            None => {
                let mut pieces = Vec::with_capacity(request.pieces.len());
                for piece in part(&request.pieces, offset, bytes) {
                    match shared.memory.own(self.domain, &piece, 0, &mut shared.report) {
                        Ok(piece) => pieces.push(piece),
                        Err(Refused) => return Step::Fail(LOC_PROT_ERR),
                    }
                }
                pieces
            }
        };
        let is_last = packet + 1 == count;
        let mut flags = 0;
        for (bit, is_set) in
            [(FIRST, packet == 0), (LAST, is_last), (IS_SOLICITED, request.flags & SOLICITED != 0)]
        {
            flags |= if is_set { bit } else { 0 };
        }
        let header = Header {
            kind: REQUEST,
            flags,
            opcode: request.opcode as u8,
            mtu: self.set.path_mtu as u8,
            psn,
            total: request.bytes,
            offset,
            rkey: request.rkey,
            imm: request.imm,
            at: request.at,
            ..self.header()
        };
        match self.transmit(header, &data, shared) {
            Sent::Full => return Step::Stop,
            Sent::Unmapped => {
                shared.report.unmapped += 1;
                return Step::Fail(LOC_PROT_ERR);
            }
            Sent::Gone => self.sending.has_lost = true,
            Sent::Done => {}
        }
        let sending = &mut self.sending;
        (sending.cursor, sending.packet) =
            if is_last { (sending.cursor + 1, 0) } else { (sending.cursor, packet + 1) };
        if sending.look.is_none() {
            self.look_later(shared);
        }
        Step::Again
    }

    /// The header that all packets of this pair start from.
    pub(crate) fn header(&self) -> Header {
        Header { route: self.route, dest: self.set.dest_qp_num, ..Header::default() }
    }

    /// Sends a packet, unless it is drawn to be lost or the port is not active.
    pub(crate) fn transmit(&mut self, header: Header, data: &[Piece], shared: &mut Shared) -> Sent {
        // Packets that report a loss or a refusal are never drawn to be lost, as nobody would send them again.
        let can_be_lost = matches!(header.kind, REQUEST | READ_RESPONSE | ACK);
        if can_be_lost && shared.draws.loses() || !shared.is_active(self.context, self.set.port_num) {
            return Sent::Gone;
        }
        let sent = self.socket.send(header, data);
        if sent == Sent::Full {
            let again = Instant::now() + AGAIN;
            self.blocked = Some(again);
            shared.timer.wake_at(again);
        }
        sent
    }

    /// Sets the time-out at which `look` checks whether the packets in flight were answered.
    fn look_later(&mut self, shared: &mut Shared) {
        // A `timeout` of 0 means that there is none.
        self.sending.look = (self.set.timeout > 0).then(|| {
            let at = Instant::now() + Duration::from_nanos(4096 << self.set.timeout);
            shared.timer.wake_at(at);
            at
        });
    }

    /// The time-out is over. If no packet is known to be lost and the peer still exists, it will answer, however slow it is, so the pair only
    /// waits on. Otherwise a retry is used up, and the packets are sent again; without retries left, the request fails.
    pub(crate) fn look(&mut self, shared: &mut Shared) {
        self.sending.look = None;
        if !self.sending.queue.iter().any(is_open) {
            return;
        }
        if !self.sending.has_lost {
            let probe = Header { kind: PROBE, mtu: self.set.path_mtu as u8, ..self.header() };
            let probe = Header { psn: self.sending.acked, ..probe };
            let is_gone = !shared.is_active(self.context, self.set.port_num)
                || self.socket.send(probe, &[]) == Sent::Gone;
            if !is_gone {
                return self.look_later(shared);
            }
            self.sending.has_lost = true;
        }
        let for_ever = self.seven_is_for_ever && self.set.retry_cnt == 7;
        if !for_ever && self.sending.retries == 0 {
            if let Some(request) = self.sending.queue.iter_mut().find(|request| is_open(request)) {
                request.end = End::Failed(RETRY_EXC_ERR);
            }
            return self.complete(shared);
        }
        self.sending.retries = self.sending.retries.saturating_sub(1);
        self.go_back(shared);
        self.advance(shared);
        if self.sending.look.is_none() && self.state == READY_TO_SEND {
            self.look_later(shared);
        }
    }

    /// Goes back to the first packet that was not answered, to send again from there.
    fn go_back(&mut self, shared: &mut Shared) {
        shared.report.retransmissions += 1;
        let acked = self.sending.acked;
        let sending = &mut self.sending;
        sending.has_lost = false;
        for request in sending.queue.iter_mut().filter(|request| request.opcode == READ && is_open(request)) {
            request.got = 0;
        }
        let Some(at) = sending.queue.iter().position(is_open) else { return };
        let request = &sending.queue[at];
        let answered = request.first.map_or(0, |first| behind(acked, first).max(0) as u32);
        (sending.cursor, sending.packet) = (at, if request.opcode == READ { 0 } else { answered });
    }

    /// The peer has received all packets before number `before`.
    fn acknowledged(&mut self, before: u32, shared: &mut Shared) {
        let sending = &mut self.sending;
        let ahead = behind(before, sending.acked);
        if ahead <= 0 || behind(before, sending.next) > 0 {
            return;
        }
        sending.acked = before;
        sending.rnr_retries = self.set.rnr_retry;
        for request in sending.queue.iter_mut().filter(|request| request.opcode != READ && is_open(request)) {
            let last = request.first.map_or(0, |first| behind(further(first, packets(request)), before));
            if last <= 0 {
                request.end = End::Done;
            }
        }
        self.progressed(shared);
    }

    /// The peer has answered something, so retries and the time-out start anew for what is still in flight.
    fn progressed(&mut self, shared: &mut Shared) {
        self.sending.retries = self.set.retry_cnt;
        self.complete(shared);
        self.sending.look = None;
        if self.state == READY_TO_SEND && self.sending.queue.iter().any(is_open) {
            self.look_later(shared);
        }
    }

    /// Handles an answer of the peer. The data of READs is handled by [`came`](QueuePair::came).
    pub(crate) fn answered(&mut self, header: &Header, shared: &mut Shared) {
        if self.state != READY_TO_SEND {
            return;
        }
        match header.kind {
            ACK => self.acknowledged(further(header.psn, 1), shared),
            DROPPED => {
                let is_read = |request: &Request| is_open(request) && request.first == Some(header.psn);
                let is_waited_for = behind(header.psn, self.sending.acked) >= 0;
                self.sending.has_lost |= is_waited_for || self.sending.queue.iter().any(is_read);
            }
            NAK_SEQUENCE => {
                self.acknowledged(header.psn, shared);
                if self.sending.queue.iter().any(is_open) {
                    self.go_back(shared);
                }
            }
            NAK_RNR => {
                self.acknowledged(header.psn, shared);
                self.no_receive(header, shared);
            }
            NAK => {
                self.acknowledged(header.psn, shared);
                let is_meant = |request: &&mut Request| {
                    is_open(request)
                        && request.first.is_some_and(|first| {
                            (0..packets(request) as i32).contains(&behind(header.psn, first))
                        })
                };
                if let Some(request) = self.sending.queue.iter_mut().find(is_meant) {
                    request.end = End::Failed(header.status);
                    self.complete(shared);
                }
            }
            _ => {}
        }
        self.advance(shared);
    }

    fn no_receive(&mut self, header: &Header, shared: &mut Shared) {
        // The pair pauses already, or the packet was acknowledged since.
        if self.state != READY_TO_SEND || self.sending.pause.is_some() || header.psn != self.sending.acked {
            return;
        }
        if self.set.rnr_retry < 7 {
            if self.sending.rnr_retries == 0 {
                if let Some(request) = self.sending.queue.iter_mut().find(|request| is_open(request)) {
                    request.end = End::Failed(RNR_RETRY_EXC_ERR);
                }
                return self.complete(shared);
            }
            self.sending.rnr_retries -= 1;
        }
        self.go_back(shared);
        let time = RNR_TIMES[header.status as usize & 31];
        let pause = Instant::now() + Duration::from_micros(u64::from(time) * 10);
        self.sending.pause = Some(pause);
        shared.timer.wake_at(pause);
    }

    /// Where the data of a READ's answer belongs; `None`: no READ waits for it (any more).
    pub(crate) fn wanted(
        &mut self,
        header: &Header,
        shared: &mut Shared,
    ) -> Option<Result<Vec<Piece>, Refused>> {
        if self.state != READY_TO_SEND {
            return None;
        }
        let is_meant = |request: &&Request| {
            is_open(request) && request.opcode == READ && request.first == Some(header.psn)
        };
        let request = self.sending.queue.iter().find(is_meant)?;
        if request.got != header.offset || request.bytes != header.total {
            return None;
        }
        let (domain, memory, report) = (self.domain, &shared.memory, &mut shared.report);
        let pieces = part(&request.pieces, header.offset, header.bytes);
        Some(pieces.iter().map(|piece| memory.own(domain, piece, LOCAL_WRITE, report)).collect())
    }

    /// The data of a READ's answer was stored (`is_placed`), or cannot be.
    pub(crate) fn came(&mut self, header: &Header, is_placed: bool, shared: &mut Shared) {
        let mut requests = self.sending.queue.iter_mut();
        let is_meant = |request: &&mut Request| request.opcode == READ && request.first == Some(header.psn);
        let Some(request) = requests.find(is_meant) else { return };
        request.got += header.bytes;
        if !is_placed {
            request.end = End::Failed(LOC_PROT_ERR);
        } else if request.got == request.bytes {
            request.end = End::Done;
        }
        self.acknowledged(further(header.psn, 1), shared);
        self.progressed(shared);
        self.advance(shared);
    }
}
