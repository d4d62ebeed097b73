//! The header of a frame. It has the same fields on every link. Links over a network (TCP, RDMA) send it as 64 bytes.

use crate::types::Signature;

/// Bytes of a header on the wire.
pub(crate) const HEADER_BYTES: usize = 64;
/// First bytes of a frame on the wire.
const MAGIC: u32 = 0x4d53_4c41; // "ALSM"

/// Says which operation a frame belongs to, which piece of that operation's data it carries, and what the sender called.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// The low half of the communicator's number. The receiver only checks it, as each link belongs to one communicator.
    pub(crate) comm: u32,
    /// Operation number (message number for send/recv).
    pub(crate) op: u64,
    /// First element of this slice in its chunk (of a loan: its first byte in the chunk). For send/recv: the first byte of this frame
    /// in the message, or, in a frame without payload, a number that the frame tells (how many credits, say).
    pub(crate) offset: u64,
    /// Payload bytes.
    pub(crate) len: u32,
    /// The number of the part in the high 16 bits, and in the low ones which of the plan's messages on this link it is (0xffff: a loan).
    /// For send/recv: the type of the frame.
    pub(crate) message: u32,
    /// What the sender called.
    pub(crate) signature: Signature,
}

impl Header {
    /// The header as it goes over the wire, little-endian.
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let s = &self.signature;
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.len.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.comm.to_le_bytes());
        bytes[12..16].copy_from_slice(&s.detail.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.op.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.offset.to_le_bytes());
        bytes[32..40].copy_from_slice(&s.count.to_le_bytes());
        bytes[40..44].copy_from_slice(&s.root.to_le_bytes());
        bytes[44..48].copy_from_slice(&s.generation.to_le_bytes());
        bytes[48..52].copy_from_slice(&self.message.to_le_bytes());
        bytes[52..56].copy_from_slice(&[s.kind, s.dtype, s.op, s.algo]);
        bytes
    }

    /// Reads a header that came from outside, of a frame with at most `max_len` bytes of payload. The error says what is wrong with it.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES], max_len: usize) -> Result<Header, String> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        if u32_at(0) != MAGIC {
            return Err(format!("a frame begins with {:#010x}, expected {MAGIC:#010x}", u32_at(0)));
        }
        let len = u32_at(4);
        if len as usize > max_len {
            return Err(format!("a frame of {len} bytes, at most {max_len} are allowed"));
        }
        if bytes[56..].iter().any(|b| *b != 0) {
            return Err("a frame header with bytes set that this version does not use".into());
        }
        Ok(Header {
            comm: u32_at(8),
            op: u64_at(16),
            offset: u64_at(24),
            len,
            message: u32_at(48),
            signature: Signature {
                kind: bytes[52],
                dtype: bytes[53],
                op: bytes[54],
                algo: bytes[55],
                root: u32_at(40),
                count: u64_at(32),
                generation: u32_at(44),
                detail: u32_at(12),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_header_survives_the_wire(comm: u32, op: u64, offset: u64, len in 0u32..=1 << 20, message: u32,
                                      b: [u8; 4], root: u32, count: u64, generation: u32, detail: u32) {
            let signature = Signature { kind: b[0], dtype: b[1], op: b[2], algo: b[3], root, count, generation, detail };
            let header = Header { comm, op, offset, len, message, signature };
            prop_assert_eq!(Header::decode(&header.encode(), 1 << 20), Ok(header));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), HEADER_BYTES)) {
            let bytes: [u8; HEADER_BYTES] = bytes.try_into().unwrap();
            if let Ok(header) = Header::decode(&bytes, 4096) {
                prop_assert!(header.len <= 4096);
                prop_assert_eq!(header.encode(), bytes);
            }
        }
    }
}
