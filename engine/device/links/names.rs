//! Names of memory, as ranks in two processes tell them each other.

use crate::device::blocks::Exported;

/// Bytes of a driver's handle.
const HANDLE: usize = 64;
/// A name of memory: number, offset, handle; where the whole block lies, and its length.
pub(super) const NAME: usize = 16 + HANDLE + 16;

/// As bytes, which lie beside a descriptor.
pub(super) fn written(name: &Exported) -> [u8; NAME] {
    let mut bytes = [0; NAME];
    bytes[..8].copy_from_slice(&name.number.to_le_bytes());
    bytes[8..16].copy_from_slice(&name.offset.to_le_bytes());
    bytes[16..16 + HANDLE].copy_from_slice(&name.handle);
    bytes[16 + HANDLE..][..8].copy_from_slice(&name.base.to_le_bytes());
    bytes[24 + HANDLE..].copy_from_slice(&name.bytes.to_le_bytes());
    bytes
}

/// From those bytes.
pub(super) fn read(bytes: &[u8; NAME]) -> Exported {
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(word)
    };
    let mut handle = [0; HANDLE];
    handle.copy_from_slice(&bytes[16..16 + HANDLE]);
    let (base, bytes) = (word(16 + HANDLE), word(24 + HANDLE));
    Exported { number: word(0), offset: word(8), handle, base, bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_names_fit_beside_a_descriptor_and_are_read_as_they_were_written() {
        let name = Exported {
            number: u64::MAX - 1,
            offset: 12,
            handle: std::array::from_fn(|i| i as u8),
            base: 1 << 40,
            bytes: 99,
        };
        let bytes = written(&name);
        assert!(2 * bytes.len() <= crate::link::INLINE, "a loan has two");
        assert_eq!(read(&bytes), name);
    }
}
