//! Names by which a rank tells a rank in another process where device memory lies ([`Exported`]), as bytes.

use crate::device::blocks::Exported;

/// Bytes of the driver's handle of a block (`CUipcMemHandle`).
const HANDLE: usize = 64;
/// Bytes of a name: number, offset and handle; then the address and the length of the whole block.
pub(super) const NAME: usize = 16 + HANDLE + 16;

/// The name as bytes, which are written beside a frame's descriptor or on a card (`links/ipc.rs`, `links/offer.rs`).
pub(super) fn written(name: &Exported) -> [u8; NAME] {
    let mut bytes = [0; NAME];
    bytes[..8].copy_from_slice(&name.number.to_le_bytes());
    bytes[8..16].copy_from_slice(&name.offset.to_le_bytes());
    bytes[16..16 + HANDLE].copy_from_slice(&name.handle);
    bytes[16 + HANDLE..][..8].copy_from_slice(&name.base.to_le_bytes());
    bytes[24 + HANDLE..].copy_from_slice(&name.bytes.to_le_bytes());
    bytes
}

/// The name that these bytes stand for.
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
