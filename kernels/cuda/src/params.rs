//! What kernels take: one of these structs, by value. `params.cuh`, in this crate's folder, holds the same.

/// Most outputs of one launch.
pub const MAX_OUTS: usize = 8;
/// Most operands of one launch. More than these can be folded in two launches, the result of the first being the first
/// operand of the second; but the 8- and 16-bit floats are then rounded in between, which the CPU does not do.
pub const MAX_INS: usize = 64;

/// Where the work of a launch lies. Elements are counted in the unit of the [kernel](super::Kernel::unit).
///
/// 32 bytes, aligned to 8.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Offset 0. Elements before the first vector of 16 bytes.
    pub head: u64,
    /// Offset 8. Vectors from there on. What is left is done element by element, as the head is.
    pub vectors: u64,
    /// Offset 16. Elements in all.
    pub len: u64,
    /// Offset 24. 1 if some pointer is not aligned for elements of the unit: they are then moved byte by byte.
    pub bytewise: u32,
    /// Offset 28. How many outputs there are, 1 to [`MAX_OUTS`].
    pub n_outs: u32,
}

impl Span {
    /// The span for `len` elements of `unit` bytes (a power of two up to 8) that lie at all of these addresses.
    ///
    /// Vectors need addresses that agree in their last four bits, and are aligned for the elements.
    pub fn new(len: u64, unit: u64, n_outs: u32, addresses: impl IntoIterator<Item = u64>) -> Span {
        let mut addresses = addresses.into_iter();
        let first = addresses.next().unwrap_or(0);
        let (mut low, mut differ) = (first, 0);
        for address in addresses {
            low |= address;
            differ |= address ^ first;
        }
        let bytewise = u32::from(low % unit != 0);
        let (head, vectors) = if bytewise == 1 || differ % 16 != 0 {
            (len, 0)
        } else {
            let head = (first.wrapping_neg() % 16 / unit).min(len);
            (head, (len - head) / (16 / unit))
        };
        Span { head, vectors, len, bytewise, n_outs }
    }
}

/// What `combine2_*` (`INS` 2, 120 bytes) and `combinen_*` (`INS` [`MAX_INS`], 616 bytes) take: they fold the inputs in
/// order, and write the result to every output. An output may be an input, or another output; otherwise none overlap.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Combine<const INS: usize> {
    /// Offset 0.
    pub span: Span,
    /// Offset 32. How many inputs there are, from 2 (or 1, for an average that is divided) to `INS`. `combine2_*` take
    /// 2.
    pub n_ins: u32,
    /// Offset 36. What a sum is divided by when it is complete, if above 1. Other operators ignore it. Of `f16` the lower 24 bits are the number
    /// of ranks, and the upper 8 the exponent, as in an `f32`, of the power of two that operands were multiplied by: the sum is divided by
    /// the product of both.
    pub divisor: u32,
    /// Offset 40. Device addresses; those from `n_outs` on are not looked at.
    pub outs: [u64; MAX_OUTS],
    /// Offset 104. Device addresses; those from `n_ins` on are not looked at.
    pub ins: [u64; INS],
}

/// What `scale_*` take, 112 bytes: every element is multiplied by the factor, and written to every output. In place is
/// fine.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Offset 0.
    pub span: Span,
    /// Offset 32. Rounded to `f32` first, but for `f64`.
    pub factor: f64,
    /// Offset 40. Device addresses; those from `n_outs` on are not looked at.
    pub outs: [u64; MAX_OUTS],
    /// Offset 104. A device address.
    pub input: u64,
}

/// What `copy_*` take, 104 bytes: the input goes to every output. Elements are bytes (`copy_bytes`) or words of 4
/// bytes (`copy_words`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Offset 0.
    pub span: Span,
    /// Offset 32. Device addresses; those from `n_outs` on are not looked at.
    pub outs: [u64; MAX_OUTS],
    /// Offset 96. A device address.
    pub input: u64,
}

/// A part of a contiguous buffer, and the tensor that it is packed from or unpacked to. 24 bytes, aligned to 8; tables
/// of them lie in device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Offset 0. The device address of the tensor.
    pub tensor: u64,
    /// Offset 8. Where its part of the contiguous buffer starts, in elements (bytes for `pack_bytes`).
    pub first: u64,
    /// Offset 16. How many elements it has.
    pub len: u64,
}

/// What `pack_*` take, 40 bytes: tensors go to their parts of a contiguous buffer, or back. What lies between the parts
/// stays as it is.
///
/// The kernel's name tells from which type to which: a kernel that unpacks is named from the contiguous buffer's type
/// to the tensors'.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pack {
    /// Offset 0. The device address of `count` [`Segment`]s, in order of `first`; none overlap, in the buffer or
    /// anywhere else.
    pub segments: u64,
    /// Offset 8. The device address of the contiguous buffer.
    pub contiguous: u64,
    /// Offset 16. Elements (bytes for `pack_bytes`) of the contiguous buffer: no segment reaches beyond.
    pub len: u64,
    /// Offset 24. What elements are multiplied by, in `f64` if either type is `f64`, otherwise in `f32` and rounded to
    /// that first; then they are rounded once. `pack_bytes` ignores it.
    pub factor: f64,
    /// Offset 32. How many segments there are.
    pub count: u32,
    /// Offset 36. 0: from tensors to the contiguous buffer; 1: back.
    pub unpack: u32,
}

/// A parameter struct as what a launch takes.
///
/// # Safety
///
/// An implementor is `repr(C)`, without padding, and is what the kernels that are given it declare.
pub unsafe trait Params: std::marker::Copy {
    /// The address of the one parameter, for `cuLaunchKernel`'s `kernelParams`.
    fn address(&self) -> *const u8 {
        std::ptr::from_ref(self).cast()
    }
}

macro_rules! params {
    ($($t:ty: $size:expr;)*) => {$(
        const _: () = assert!(size_of::<$t>() == $size && align_of::<$t>() == 8);
        // SAFETY: `repr(C)`, of fields without padding between them, which the size shows; a test compares that size
        // with the size of the kernels' parameter.
        unsafe impl Params for $t {}
    )*};
}

params! {
    Combine<2>: 32 + 8 + 8 * MAX_OUTS + 8 * 2;
    Combine<MAX_INS>: 32 + 8 + 8 * MAX_OUTS + 8 * MAX_INS;
    Scale: 32 + 8 + 8 * MAX_OUTS + 8;
    Copy: 32 + 8 * MAX_OUTS + 8;
    Pack: 40;
}
