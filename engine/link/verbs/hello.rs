//! [`Greeting`]: what the two ends of a link tell each other before they can talk by RDMA, over a TCP connection that the sender has dialled.
//! By the handshake of that connection both ends have proved that they belong to the job. Each end sends one greeting, and then the connection
//! is closed. A greeting has a [`Hello`] for each port by which the link can go.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv6Addr, TcpStream};

use allstream_sys::verbs::Mtu;

use super::choose::RdmaLayer;
use super::credits::MOST_SLOTS;
use super::layout::area_bytes;

/// Bytes of a hello.
pub(super) const BYTES: usize = 64;
/// Bytes of a greeting.
pub(super) const GREETING: usize = 2 * BYTES;
/// "ALSR": the first bytes of a hello.
const MAGIC: u32 = 0x5253_4c41;
const VERSION: u16 = 4;

/// Numbers of queue pairs and of packets have 24 bits.
const BITS: u32 = 24;

/// Where the receiver's area is. With the key, a peer whose queue pair is connected to one of the receiver's can write to the area, and to
/// no other memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Area {
    pub(super) at: u64,
    pub(super) key: u32,
}

/// What one end of a link tells the other of itself and one of its ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) layer: RdmaLayer,
    pub(super) mtu: Mtu,
    /// The number of the queue pair.
    pub(super) pair: u32,
    /// The number of the first packet that this end sends.
    pub(super) first_packet: u32,
    /// On InfiniBand: the port's address in its subnet.
    pub(super) lid: u16,
    pub(super) gid: [u8; 16],
    /// Bytes of the largest message that the port takes.
    pub(super) max_message: u32,
    /// From the sender: how many slots it can use. From the receiver: how many it grants; 0 makes the link narrow (`pieces.rs`).
    pub(super) slots: u32,
    /// From the sender: how many READs its port answers at once. From the receiver: how many it asks for at once; 0: it takes no offers
    /// (`offers.rs`).
    pub(super) reads: u8,
    /// From the sender: how many requests its queue takes. If the receiver's ports take smaller messages than the sender's, a frame
    /// takes more of these requests, so the receiver may have to grant fewer slots.
    pub(super) requests: u32,
    /// The receiver names its area, a sender none.
    pub(super) area: Option<Area>,
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        let layer = match self.layer {
            RdmaLayer::InfiniBand => 1,
            RdmaLayer::RoceV2 => 2,
        };
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6] = layer;
        bytes[7] = self.mtu.0 as u8;
        bytes[8..12].copy_from_slice(&self.pair.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.first_packet.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.gid);
        bytes[32..36].copy_from_slice(&self.max_message.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.slots.to_le_bytes());
        bytes[40..42].copy_from_slice(&self.lid.to_le_bytes());
        bytes[43] = self.reads;
        bytes[56..60].copy_from_slice(&self.requests.to_le_bytes());
        if let Some(Area { at, key }) = self.area {
            bytes[42] = 1;
            bytes[44..48].copy_from_slice(&key.to_le_bytes());
            bytes[48..56].copy_from_slice(&at.to_le_bytes());
        }
        bytes
    }

    /// Reads a hello that came from the other end, or says what is wrong with it.
    pub(super) fn decode(bytes: &[u8; BYTES]) -> Result<Hello, String> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        if u32_at(0) != MAGIC || u16_at(4) != VERSION {
            return Err(format!(
                "it begins to talk by RDMA with {:#010x}, version {}, expected {MAGIC:#010x}, version {VERSION}",
                u32_at(0),
                u16_at(4)
            ));
        }
        let layer = match bytes[6] {
            1 => RdmaLayer::InfiniBand,
            2 => RdmaLayer::RoceV2,
            other => return Err(format!("it names an unknown kind of network ({other})")),
        };
        let mtu = Mtu(bytes[7].into());
        if mtu.bytes().is_none() {
            return Err(format!("it names an MTU code that does not exist ({})", bytes[7]));
        }
        let (pair, first_packet, max_message, slots) = (u32_at(8), u32_at(12), u32_at(32), u32_at(36));
        if pair >> BITS != 0 || first_packet >> BITS != 0 {
            return Err(format!(
                "it names queue pair {pair} and packet {first_packet}, both of which must fit in {BITS} bits"
            ));
        }
        if max_message == 0 {
            return Err("it names 0 bytes as its port's largest message".into());
        }
        if slots > MOST_SLOTS {
            return Err(format!("it names {slots} slots, expected {MOST_SLOTS} at most"));
        }
        let (at, key) = (u64::from(u32_at(48)) | u64::from(u32_at(52)) << 32, u32_at(44));
        let area = match bytes[42] {
            0 if at == 0 && key == 0 => None,
            1 if at != 0 && at.checked_add(area_bytes(slots) as u64).is_some() => Some(Area { at, key }),
            _ => {
                return Err(format!(
                    "it names an impossible receive area (flag {}, address {at:#x})",
                    bytes[42]
                ));
            }
        };
        let reads = bytes[43];
        if u32::from(reads) > MOST_SLOTS {
            return Err(format!("it names {reads} READs at once, expected {MOST_SLOTS} at most"));
        }
        if bytes[60..].iter().any(|byte| *byte != 0) {
            return Err("bytes are set that this version does not use".into());
        }
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[16..32]);
        let (lid, requests) = (u16_at(40), u32_at(56));
        Ok(Hello { layer, mtu, pair, first_packet, lid, gid, max_message, slots, reads, requests, area })
    }

    /// The port's `gid`, read as an IP address.
    pub(super) fn address(&self) -> IpAddr {
        let address = Ipv6Addr::from(self.gid);
        address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4)
    }
}

/// What one end of a link tells the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Greeting {
    pub(super) first: Hello,
    /// From the sender: its second port, if it can be used. From the receiver: its second port, if the link is to have a second lane (`lane.rs`).
    pub(super) second: Option<Hello>,
}

impl Greeting {
    pub(super) fn encode(&self) -> [u8; GREETING] {
        let mut bytes = [0; GREETING];
        bytes[..BYTES].copy_from_slice(&self.first.encode());
        if let Some(second) = &self.second {
            bytes[BYTES..].copy_from_slice(&second.encode());
        }
        bytes
    }

    /// Reads a greeting that came from the other end, or says what is wrong with it.
    pub(super) fn decode(bytes: &[u8; GREETING]) -> Result<Greeting, String> {
        let part = |from: usize| -> [u8; BYTES] { std::array::from_fn(|at| bytes[from + at]) };
        let (first, second) = (Hello::decode(&part(0))?, part(BYTES));
        if second == [0; BYTES] {
            return Ok(Greeting { first, second: None });
        }
        let second = Hello::decode(&second).map_err(|problem| format!("of its second port {problem}"))?;
        let is_alike = (first.layer, first.slots, first.area.is_some())
            == (second.layer, second.slots, second.area.is_some());
        if !is_alike {
            return Err(format!(
                "it describes two ports that cannot carry one link: {} with {} slots, and {} with {}",
                first.layer, first.slots, second.layer, second.slots
            ));
        }
        Ok(Greeting { first, second: Some(second) })
    }
}

/// A connection on which one greeting goes each way. It does not block.
pub(super) struct Talk {
    socket: TcpStream,
    out: [u8; GREETING],
    sent: usize,
    read: [u8; GREETING],
    have: usize,
}

impl Talk {
    pub(super) fn new(socket: TcpStream) -> Talk {
        Talk { socket, out: [0; GREETING], sent: GREETING, read: [0; GREETING], have: 0 }
    }

    /// Takes the greeting that [`has_said`](Self::has_said) is to send.
    pub(super) fn say(&mut self, greeting: &Greeting) {
        (self.out, self.sent) = (greeting.encode(), 0);
    }

    /// Sends what the socket takes now. `true`: all has been sent.
    pub(super) fn has_said(&mut self) -> io::Result<bool> {
        while self.sent < GREETING {
            match self.socket.write(&self.out[self.sent..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(more) => self.sent += more,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }

    /// Reads what has come. Gives the other end's greeting once it is whole.
    pub(super) fn heard(&mut self) -> io::Result<Option<[u8; GREETING]>> {
        while self.have < GREETING {
            match self.socket.read(&mut self.read[self.have..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(more) => self.have += more,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) => return Err(e),
            }
        }
        Ok(Some(self.read))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello(area: Option<Area>) -> Hello {
        let gid = Ipv6Addr::from([0, 0, 0, 0, 0, 0xffff, 0x0a09, 1]).octets();
        let (layer, mtu) = (RdmaLayer::RoceV2, Mtu(3));
        Hello {
            layer,
            mtu,
            pair: 17,
            first_packet: 99,
            lid: 0,
            gid,
            max_message: 1 << 23,
            slots: 4,
            reads: 3,
            requests: 40,
            area,
        }
    }

    #[test]
    fn a_hello_survives_the_wire() {
        for area in [None, Some(Area { at: 0x7f00_0000_1000, key: 0x1234 })] {
            let hello = hello(area);
            assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
            assert_eq!(hello.address().to_string(), "10.9.0.1");
        }
    }

    #[test]
    fn a_greeting_has_a_second_port_of_the_same_kind_or_none() {
        let first = hello(Some(Area { at: 0x1000, key: 1 }));
        for second in [None, Some(Hello { pair: 18, ..first })] {
            let greeting = Greeting { first, second };
            assert_eq!(Greeting::decode(&greeting.encode()), Ok(greeting));
        }
        for second in [
            Hello { layer: RdmaLayer::InfiniBand, ..first },
            Hello { slots: 3, ..first },
            Hello { area: None, ..first },
        ] {
            let greeting = Greeting { first, second: Some(second) };
            assert!(Greeting::decode(&greeting.encode()).unwrap_err().contains("cannot carry one link"));
        }
        let mut spoiled = Greeting { first, second: Some(first) }.encode();
        spoiled[BYTES + 7] = 9;
        assert!(Greeting::decode(&spoiled).unwrap_err().starts_with("of its second port it names an MTU"));
    }

    #[test]
    fn what_no_correct_rank_says_is_refused_in_words() {
        let good = hello(Some(Area { at: 0x1000, key: 1 })).encode();
        let spoiled = |at: usize, byte: u8| {
            let mut bytes = good;
            bytes[at] = byte;
            Hello::decode(&bytes).unwrap_err()
        };
        for (at, byte, wanted) in [
            (0, 0, "it begins to talk by RDMA with"),
            (4, 3, "version 3"),
            (6, 3, "an unknown kind of network (3)"),
            (7, 0, "an MTU code that does not exist (0)"),
            (7, 6, "an MTU code that does not exist (6)"),
            (11, 1, "queue pair 16777233"),
            (15, 1, "packet 16777315"),
            (36, 9, "9 slots, expected 8 at most"),
            (42, 0, "an impossible receive area (flag 0, address 0x1000)"),
            (42, 2, "an impossible receive area (flag 2"),
            (43, 9, "9 READs at once, expected 8 at most"),
            (63, 1, "bytes are set"),
        ] {
            assert!(spoiled(at, byte).contains(wanted), "{wanted}: {}", spoiled(at, byte));
        }
        // The area would end beyond all addresses.
        let high = hello(Some(Area { at: u64::MAX - 100, key: 1 }));
        assert!(Hello::decode(&high.encode()).unwrap_err().contains("an impossible receive area"));
        let none = Hello { max_message: 0, ..high };
        assert!(Hello::decode(&none.encode()).unwrap_err().contains("0 bytes as its port"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), BYTES), good in 0usize..=BYTES) {
            // Bytes that begin like a correct hello reach the later checks.
            let mut spoiled = hello(Some(Area { at: 0x1000, key: 1 })).encode();
            spoiled[good..].copy_from_slice(&bytes[good..]);
            if let Ok(hello) = Hello::decode(&spoiled) {
                prop_assert_eq!(hello.encode(), spoiled);
            }
        }
    }
}
