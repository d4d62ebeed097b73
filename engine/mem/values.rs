//! Values that not every pattern of bits is: what comes from a peer, or from a device, is looked at before it becomes one of the
//! user's.
//!
//! Of the element types that is `bool`, a byte of 0 or 1. All that has come is looked at once, when the operation or the copy has
//! ended, where it lies then: in memory that no peer can write (`Comm::alloc` gives none for `bool`).

/// What is wrong with values that are to be bools. Those that are none are `false` from here on: their buffer may be given back.
///
/// # Safety
/// `at` is valid for reads and writes of `len` bytes, all initialised, which nobody else reads or writes meanwhile.
pub(crate) unsafe fn check_bools(at: *mut u8, len: usize) -> Option<String> {
    if len == 0 {
        return None; // it may be null
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
            // SAFETY: as long as the vector.
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
        // SAFETY: of no length.
        assert_eq!(unsafe { check_bools(std::ptr::null_mut(), 0) }, None);
    }
}
