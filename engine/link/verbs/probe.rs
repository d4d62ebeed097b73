//! Tests whether two ports reach each other, while the world forms: each of two ranks writes one full packet into the other's memory.

use std::ptr;
use std::sync::Arc;

use allstream_sys::verbs::{Access, IbvSge, IbvWc, WcStatus};

use super::broken::problem_of;
use super::card::Card;
use super::domain::Registered;
use super::first_packet;
use super::hello::{Area, BYTES, Hello};
use super::offers::Reads;
use super::queue_pair::{QueuePair, RECEIVED, Room, Tells, Write};
use crate::error::Error;
use crate::forked;

/// No packet carries more bytes.
const MOST: usize = 4096;
/// The number that comes with the message ("ALST").
const NUMBER: u32 = 0x5453_4c41;

/// One end of a trial. The two ends exchange [`hello`](Probe::hello)s, [`connect`](Probe::connect), tell each other that they have, and
/// only then [`send`](Probe::send): a message that came before the receiver is ready would be lost, and sent again only after a timeout.
pub(crate) struct Probe {
    card: Arc<Card>,
    pair: QueuePair,
    /// The other end writes to the first half; this end sends the second half.
    memory: Option<Registered>,
    first_packet: u32,
    other: Option<Hello>,
    /// Whether the other end has acknowledged this end's message (`sent`), and whether its message has come (`received`).
    sent: bool,
    received: bool,
}

impl Probe {
    /// # Errors
    /// What the device refuses.
    pub(crate) fn new(card: &Arc<Card>) -> Result<Probe, Error> {
        let room = Room { send: 1, receive: 1, other_may: Access::REMOTE_WRITE };
        let mut pair = QueuePair::without_descriptor(card, room)?;
        let doing = || format!("try the way to another host through {}", card.place());
        pair.post_receives(1).map_err(|error| Error::system(doing(), error))?;
        let access = [Access::LOCAL_WRITE, Access::REMOTE_WRITE];
        let memory = Registered::new(card.domain(), 2 * MOST, &access)?;
        let first_packet = first_packet()?;
        for at in 0..MOST {
            // SAFETY: inside memory that was just mapped. No request names it yet, and no peer knows its key.
            unsafe { memory.at(MOST + at).write(byte(first_packet, at)) };
        }
        let (card, memory) = (card.clone(), Some(memory));
        Ok(Probe { card, pair, memory, first_packet, other: None, sent: false, received: false })
    }

    /// What the other end has to know.
    pub(crate) fn hello(&self) -> Vec<u8> {
        let area =
            self.memory.as_ref().map(|memory| Area { at: memory.at(0) as u64, key: memory.remote_key() });
        self.card.hello(self.pair.number(), self.first_packet, 1, area).encode().to_vec()
    }

    /// Takes the other end's hello.
    ///
    /// # Errors
    /// What is wrong with it, or why the device cannot connect to that port.
    pub(crate) fn connect(&mut self, bytes: &[u8]) -> Result<(), String> {
        let bytes: &[u8; BYTES] =
            bytes.try_into().map_err(|_| format!("a hello of {} bytes, expected {BYTES}", bytes.len()))?;
        let other = Hello::decode(bytes)?;
        self.pair
            .connect(&self.card, self.first_packet, &other, Reads::NONE)
            .map_err(|error| error.to_string())?;
        self.other = Some(other);
        Ok(())
    }

    /// Sends the message. To be called once both ends have connected.
    ///
    /// # Errors
    /// What the device refuses.
    pub(crate) fn send(&mut self) -> Result<(), String> {
        let bytes = self.bytes();
        let (Some(memory), Some(to)) = (&self.memory, self.other.and_then(|other| other.area)) else {
            return Err("the other end names no memory to write to".into());
        };
        let from = IbvSge { addr: memory.at(MOST) as u64, length: bytes as u32, lkey: memory.local_key() };
        let write = Write { id: 0, from: &[from], to: to.at, key: to.key, tells: Tells::Both(NUMBER) };
        // SAFETY: `new` registered the memory, and nobody writes to that half any more. It stays registered until the pair is destroyed (`drop`).
        unsafe { self.pair.post_write(write) }.map_err(|error| error.to_string())
    }

    /// Whether the other end's message has come here, and this end's has arrived there.
    ///
    /// # Errors
    /// What the device says of a message that did not get through, or what is wrong with the one that came.
    pub(crate) fn is_over(&mut self) -> Result<bool, String> {
        let mut told = [IbvWc::default(); 2];
        let count = self.pair.poll(&mut told).map_err(|error| error.to_string())?;
        for completion in &told[..count] {
            if WcStatus(completion.status) != WcStatus::SUCCESS {
                return Err(problem_of(&self.card, completion));
            }
            if completion.wr_id == RECEIVED {
                self.check(completion)?;
                self.received = true;
            } else {
                self.sent = true;
            }
        }
        Ok(self.sent && self.received)
    }

    /// What has not happened yet.
    pub(crate) fn missing(&self) -> &'static str {
        if self.received { "the message was not acknowledged" } else { "no message came from the other end" }
    }

    /// Bytes of a message: as many as a packet between the two ports carries.
    fn bytes(&self) -> usize {
        let own = self.card.mtu().bytes().unwrap_or(0);
        let other = self.other.and_then(|other| other.mtu.bytes()).unwrap_or(own);
        (own.min(other) as usize).min(MOST)
    }

    fn check(&self, completion: &IbvWc) -> Result<(), String> {
        let (number, bytes) = (u32::from_be(completion.imm_data), self.bytes());
        if (number, completion.byte_len as usize) != (NUMBER, bytes) {
            return Err(format!(
                "the other end's message has {} bytes and number {number:#x}, expected {bytes} and {NUMBER:#x}",
                completion.byte_len
            ));
        }
        let (Some(memory), Some(other)) = (&self.memory, self.other) else { return Ok(()) };
        // SAFETY: inside the mapping. The other end can write there as long as the queue pair exists: so each byte is read by itself, as volatile,
        // and any byte is a valid value.
        let wrong =
            |at: &usize| unsafe { ptr::read_volatile(memory.at(*at)) } != byte(other.first_packet, *at);
        match (0..bytes).find(wrong) {
            Some(at) => Err(format!("byte {at} of {bytes} of the other end's message is not what was sent")),
            None => Ok(()),
        }
    }
}

/// The byte at this place of a message. It depends on the sender's first packet number, so that the two ends' messages differ.
fn byte(first_packet: u32, at: usize) -> u8 {
    (first_packet as usize).wrapping_add(at.wrapping_mul(31)).to_le_bytes()[0]
}

impl Drop for Probe {
    fn drop(&mut self) {
        // In a forked child all of this is the parent's. If the pair cannot be destroyed, the device may still use the memory, so it is never freed.
        if !forked::is_forked() && !self.pair.destroy() {
            std::mem::forget(self.memory.take());
        }
    }
}
