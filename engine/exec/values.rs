//! Values that not every pattern of bits is: what comes from a peer is looked at before it becomes one of the user's.
//!
//! Of the element types that is `bool`, a byte of 0 or 1. All that has come is looked at once, at the end of the operation,
//! where it lies then: in memory that no peer can write (`Comm::alloc` gives none for `bool`).

/// What is wrong with values that are to be bools.
///
/// # Safety
/// `at` is valid for reads of `len` bytes, all initialised, which nobody writes meanwhile.
pub(super) unsafe fn not_bool(at: *const u8, len: usize) -> Option<String> {
    if len == 0 {
        return None; // it may be null
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { std::slice::from_raw_parts(at, len) };
    // In pieces, without a branch for each byte.
    let wrong = |piece: &&[u8]| piece.iter().fold(0, |all, byte| all | byte) > 1;
    let piece = bytes.chunks(4096).find(wrong)?;
    let offset = piece.as_ptr().addr() - at.addr();
    let (i, value) = piece.iter().enumerate().find(|(_, byte)| **byte > 1)?;
    Some(format!("element {} of a buffer of bools is {value}, neither 0 nor 1", offset + i))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_byte_that_is_no_bool_is_found_wherever_it_is() {
        for len in [1usize, 7, 4096, 4097, 10_000] {
            let mut bytes: Vec<u8> = (0..len).map(|i| (i % 3 == 0) as u8).collect();
            // SAFETY: as long as the vector.
            assert_eq!(unsafe { not_bool(bytes.as_ptr(), len) }, None);
            for at in [0, len / 2, len - 1] {
                let before = std::mem::replace(&mut bytes[at], 2);
                // SAFETY: as above.
                let problem = unsafe { not_bool(bytes.as_ptr(), len) }.unwrap();
                assert!(problem.contains(&format!("element {at} ")), "{problem}");
                bytes[at] = before;
            }
        }
        // SAFETY: of no length.
        assert_eq!(unsafe { not_bool(std::ptr::null(), 0) }, None);
    }
}
