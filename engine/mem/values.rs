//! Checks values of types for which not every bit pattern is valid: what comes from a peer, or from a device, is checked before the
//! user gets it.
//!
//! The only such element type is `bool`, a byte of 0 or 1. A buffer is checked once, when the operation or the copy that filled it is
//! complete, and in place: no peer can write to its memory (`Comm::alloc` gives none for `bool`).

/// Checks that all bytes are valid bools. Sets those that are not to `false`, so that the buffer can be given back, and describes the first.
///
/// # Safety
/// `at` is valid for reads and writes of `len` bytes, all initialised, which nobody else reads or writes meanwhile.
pub(crate) unsafe fn check_bools(at: *mut u8, len: usize) -> Option<String> {
    if len == 0 {
        return None; // `at` may be null
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { std::slice::from_raw_parts_mut(at, len) };
    // In pieces, without a branch for each byte.
    let is_wrong = |piece: &[u8]| piece.iter().fold(0, |all, byte| all | byte) > 1;
    let mut first = None;
    for (number, piece) in bytes.chunks_mut(PIECE).enumerate().filter(|(_, piece)| is_wrong(piece)) {
        for (i, byte) in piece.iter_mut().enumerate().filter(|(_, byte)| **byte > 1) {
            first.get_or_insert((number * PIECE + i, *byte));
            *byte = 0;
        }
    }
    let (i, value) = first?;
    Some(format!("element {i} of a buffer of bools is {value}, neither 0 nor 1"))
}

const PIECE: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_byte_that_is_no_bool_is_found_wherever_it_is_and_all_are_false_then() {
        for len in [1usize, 7, 4096, 4097, 10_000] {
            let good: Vec<u8> = (0..len).map(|i| (i % 3 == 0) as u8).collect();
            let mut bytes = good.clone();
            // SAFETY: the vector's own bytes, all `len` of them, which nobody else uses meanwhile.
            assert_eq!(unsafe { check_bools(bytes.as_mut_ptr(), len) }, None);
            assert_eq!(bytes, good);
            for at in [0, len / 2, len - 1] {
                (bytes[at], bytes[len - 1]) = (2, 255);
                // SAFETY: as above.
                let problem = unsafe { check_bools(bytes.as_mut_ptr(), len) }.unwrap();
                assert!(problem.contains(&format!("element {at} ")), "{problem}");
                let expected = |i: usize| if i == at || i == len - 1 { 0 } else { good[i] };
                assert!((0..len).all(|i| bytes[i] == expected(i)));
                bytes.clone_from(&good);
            }
        }
        // SAFETY: with a length of 0 nothing is read or written.
        assert_eq!(unsafe { check_bools(std::ptr::null_mut(), 0) }, None);
    }
}
