//! Compares the kernels of every instruction level with the oracle ([`scalar`]), bit for bit.

use half::{bf16, f16};
use proptest::prelude::*;

use super::simd::Level;
use super::{copy, copy_streaming, reduce_at, reduce_streaming, scalar, scale_at};
use crate::{DType, Finish, ReduceOp, f8e4m3, f8e5m2};

const COUNTS: [usize; 5] = [1, 2, 3, 4, 8];
const LENGTHS: [usize; 17] = [0, 1, 3, 7, 8, 15, 16, 17, 31, 63, 64, 65, 511, 512, 513, 1025, 4099];
/// Offsets of inputs and of outputs from an aligned start. An output in place has the offset of its input.
const SHIFTS: [(usize, usize); 6] = [(0, 0), (1, 1), (7, 7), (4, 4), (0, 3), (5, 0)];
/// The value of the guard bytes before and after each buffer: no kernel may change it.
const GUARD: u8 = 0xA5;

/// A buffer at an offset from an aligned start, between guard bytes.
struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    fn new(content: &[u8], shift: usize) -> Buffer {
        let len = content.len();
        let mut bytes = vec![GUARD; len + 192];
        let start = bytes.as_ptr().align_offset(64) + 64 + shift;
        bytes[start..start + len].copy_from_slice(content);
        Buffer { bytes, start, len }
    }

    fn pointer(&mut self) -> *mut u8 {
        self.bytes[self.start..].as_mut_ptr()
    }

    fn content(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    fn guarded(&self) -> bool {
        let (before, after) = (&self.bytes[..self.start], &self.bytes[self.start + self.len..]);
        before.iter().chain(after).all(|&b| b == GUARD)
    }
}

/// A reduction and its operands.
#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    op: ReduceOp,
    finish: Option<Finish>,
    len: usize,
    ins: Vec<Vec<u8>>,
}

/// Where the buffers of a [`Case`] lie.
#[derive(Clone, Copy, Debug)]
struct Place {
    shift: (usize, usize),
    outs: usize,
    /// The input that the last output is equal to.
    in_place: Option<usize>,
}

impl Case {
    fn new(rng: &mut Rng, dtype: DType, op: ReduceOp, count: usize, len: usize) -> Case {
        let ins = (0..count).map(|_| (0..len).flat_map(|_| rng.element(dtype)).collect());
        let ins = ins.collect();
        let halved = if dtype.is_float() { rng.below(10) as u8 } else { 0 };
        let finish = [None, Some(count as u32), Some(7), Some(300)][rng.below(4)];
        let finish = finish.map(|ranks| Finish { ranks, halved });
        Case { dtype, op, finish, len, ins }
    }

    fn expected(&self) -> Vec<u8> {
        let mut out = vec![0; self.len * self.dtype.size()];
        let ins: Vec<_> = self.ins.iter().map(|b| b.as_ptr()).collect();
        let outs = [out.as_mut_ptr()];
        // SAFETY: all are vectors of `len` elements.
        unsafe { scalar::reduce(self.dtype, self.op, &ins, &outs, self.len, self.finish) };
        out
    }

    fn check(&self, level: Level, place: Place, expected: &[u8]) {
        let (shift_in, shift_out) = place.shift;
        let new = |content: &Vec<u8>| Buffer::new(content, shift_in);
        let mut ins: Vec<Buffer> = self.ins.iter().map(new).collect();
        let separate = place.outs - usize::from(place.in_place.is_some());
        let blank = vec![0xEE; expected.len()];
        let mut outs: Vec<Buffer> = (0..separate).map(|i| Buffer::new(&blank, shift_out + i)).collect();
        let mut to: Vec<*mut u8> = outs.iter_mut().map(Buffer::pointer).collect();
        let from: Vec<*const u8> = ins.iter_mut().map(|b| b.pointer().cast_const()).collect();
        to.extend(place.in_place.map(|i| from[i].cast_mut()));
        // SAFETY: each buffer holds `len` elements; an output is equal to an input or overlaps nothing; the CPU
        // has the level. Every pointer comes from `as_mut_ptr`, so it may be written through.
        unsafe { reduce_at(level, self.dtype, self.op, &from, &to, self.len, self.finish) };
        let what = || {
            let Case { dtype, op, finish, len, ins } = self;
            format!("{dtype} {op} {finish:?}, {} of {len}, {level:?}, {place:?}", ins.len())
        };
        for out in &outs {
            self.compare(out.content(), expected, what);
            assert!(out.guarded(), "{}", what());
        }
        for (i, (now, before)) in ins.iter().zip(&self.ins).enumerate() {
            let in_place = place.in_place == Some(i);
            self.compare(now.content(), if in_place { expected } else { before }, what);
            assert!(now.guarded(), "{}", what());
        }
    }

    fn compare(&self, got: &[u8], expected: &[u8], what: impl Fn() -> String) {
        if got != expected {
            let size = self.dtype.size();
            let differs = |i: &usize| got[*i..*i + size] != expected[*i..*i + size];
            let i = (0..got.len()).step_by(size).find(differs).unwrap();
            let operands: Vec<_> = self.ins.iter().map(|b| &b[i..i + size]).collect();
            let (got, expected) = (&got[i..i + size], &expected[i..i + size]);
            let at = i / size;
            panic!("{}: element {at} of {operands:x?}: {got:x?}, not {expected:x?}", what());
        }
    }
}

/// A small random number generator (xorshift64*) with a fixed seed, so that every run tests the same cases.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, n: usize) -> usize {
        (((self.next() >> 32) * n as u64) >> 32) as usize
    }

    /// The bytes of an element: random bits, a float of moderate size, or a special float (infinity, NaN, ...).
    fn element(&mut self, dtype: DType) -> Vec<u8> {
        const SPECIAL: [f64; 12] =
            [0.0, -0.0, 1.0, -1.0, f64::INFINITY, -f64::INFINITY, f64::NAN, 6e-8, 65504.0, 3e38, 448.0, 2e-3];
        let random = self.next();
        let x = match (dtype, random % 4) {
            (DType::Bool, 0 | 1) => return vec![0],
            (_, 1) if dtype.is_float() => SPECIAL[self.below(SPECIAL.len())],
            (_, 2 | 3) if dtype.is_float() => (random >> 11) as f64 / 2f64.powi(50) - 4.0,
            _ => {
                let bytes = (random >> 2).wrapping_mul(5).to_le_bytes();
                return bytes[..dtype.size()].to_vec();
            }
        };
        match dtype {
            DType::F16 => f16::from_f64(x).to_le_bytes().to_vec(),
            DType::BF16 => bf16::from_f64(x).to_le_bytes().to_vec(),
            DType::F8E4M3 => vec![f8e4m3::from_f32(x as f32).to_bits()],
            DType::F8E5M2 => vec![f8e5m2::from_f32(x as f32).to_bits()],
            DType::F32 => (x as f32).to_le_bytes().to_vec(),
            _ => x.to_le_bytes().to_vec(),
        }
    }
}

fn supported() -> impl Iterator<Item = (DType, ReduceOp)> {
    let all = DType::ALL.into_iter().flat_map(|d| ReduceOp::ALL.map(|op| (d, op)));
    all.filter(|(d, op)| op.supports(*d))
}

/// Tests every length; offsets, number of outputs and in place vary from case to case.
#[test]
fn every_length_agrees() {
    let levels = Level::available();
    let mut rng = Rng(1);
    let mut turn = 0;
    for (dtype, op) in supported() {
        for count in COUNTS {
            for len in LENGTHS {
                let case = Case::new(&mut rng, dtype, op, count, len);
                let expected = case.expected();
                for &level in &levels {
                    turn += 1;
                    let in_place = (turn % 2 == 0).then_some(turn / 2 % count);
                    let shift = SHIFTS[turn % SHIFTS.len()];
                    let outs = 1 + usize::from(turn % 3 == 0);
                    case.check(level, Place { shift, outs, in_place }, &expected);
                }
            }
        }
    }
}

/// Tests every place at two lengths: a short one that leaves a remainder in each kernel, and one block
/// and a remainder.
#[test]
fn every_place_agrees() {
    let levels = Level::available();
    let mut rng = Rng(2);
    for (dtype, op) in supported() {
        for count in COUNTS {
            for len in [31, 4096 / dtype.size() + 3] {
                let case = Case::new(&mut rng, dtype, op, count, len);
                let expected = case.expected();
                // The long cases are slow, and add only the loop over blocks to what the short ones test.
                let shifts = if len == 31 { &SHIFTS[..] } else { &SHIFTS[1..2] };
                for &shift in shifts {
                    for in_place in (0..count).map(Some).chain([None]) {
                        for outs in [1, 3] {
                            for &level in &levels {
                                case.check(level, Place { shift, outs, in_place }, &expected);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// As when ranks fold in each other's memory: every input is also an output.
#[test]
fn all_inputs_are_outputs() {
    let mut rng = Rng(40);
    for level in Level::available() {
        for (dtype, op) in DType::ALL.iter().flat_map(|dtype| ReduceOp::ALL.map(|op| (*dtype, op))) {
            for count in [2, 3, 4, 8].into_iter().filter(|_| op.supports(dtype)) {
                for len in [0, 1, 15, 65, 1025] {
                    let case = Case::new(&mut rng, dtype, op, count, len);
                    let expected = case.expected();
                    let mut all: Vec<Buffer> = case.ins.iter().map(|b| Buffer::new(b, len % 3)).collect();
                    let outs: Vec<*mut u8> = all.iter_mut().map(Buffer::pointer).collect();
                    let ins: Vec<*const u8> = outs.iter().map(|out| out.cast_const()).collect();
                    // SAFETY: each buffer holds `len` elements, and each output is equal to one input; the CPU has the level.
                    unsafe { reduce_at(level, dtype, op, &ins, &outs, len, case.finish) };
                    for out in &all {
                        case.compare(out.content(), &expected, || {
                            format!("{level:?} {count} x {dtype} {op}, {len}")
                        });
                        assert!(out.guarded());
                    }
                }
            }
        }
    }
}

/// Results that are written past the caches, with and without ordinary outputs, also in place of an input.
#[test]
fn streamed_results_agree() {
    let mut rng = Rng(41);
    let mut turn = 0;
    for (dtype, op) in supported() {
        for len in LENGTHS.into_iter().chain([16_411 / dtype.size()]) {
            let case = Case::new(&mut rng, dtype, op, 1 + turn % 3, len);
            let expected = case.expected();
            let (shift_in, shift_out) = SHIFTS[turn % SHIFTS.len()];
            let mut ins: Vec<Buffer> = case.ins.iter().map(|b| Buffer::new(b, shift_in)).collect();
            let blank = vec![0xEE; expected.len()];
            let mut buffers: Vec<Buffer> = (0..3).map(|i| Buffer::new(&blank, shift_out + 8 * i)).collect();
            let mut all: Vec<*mut u8> = buffers.iter_mut().map(Buffer::pointer).collect();
            let to: Vec<*mut u8> = ins.iter_mut().map(Buffer::pointer).collect();
            let from: Vec<*const u8> = to.iter().map(|p| p.cast_const()).collect();
            let in_place = turn % 2 == 0;
            all.extend(in_place.then(|| to[turn % to.len()]));
            let (outs, streamed) = all.split_at(turn % 3);
            // SAFETY: each buffer holds `len` elements; one output may be equal to an input, and nothing else overlaps.
            unsafe { reduce_streaming(dtype, op, &from, outs, streamed, len, case.finish) };
            let what = || format!("{dtype} {op}, {len}, turn {turn}");
            for out in &buffers {
                case.compare(out.content(), &expected, what);
                assert!(out.guarded(), "{}", what());
            }
            for (i, (now, before)) in ins.iter().zip(&case.ins).enumerate() {
                let written = in_place && i == turn % ins.len();
                case.compare(now.content(), if written { &expected } else { before }, what);
                assert!(now.guarded(), "{}", what());
            }
            turn += 1;
        }
    }
}

#[test]
fn streamed_copies_agree() {
    for len in LENGTHS.into_iter().chain([8191, 8192, 20_001]) {
        for (turn, (shift_in, shift_out)) in SHIFTS.into_iter().enumerate() {
            let content: Vec<u8> = (0..len).map(|i| (i * 7 + turn) as u8).collect();
            let mut src = Buffer::new(&content, shift_in);
            let mut outs: Vec<Buffer> = (0..3).map(|i| Buffer::new(&vec![0; len], shift_out + i)).collect();
            let to: Vec<*mut u8> = outs.iter_mut().map(Buffer::pointer).collect();
            // SAFETY: source and output are two separate buffers of `len` bytes.
            to.into_iter().for_each(|out| unsafe { copy_streaming(src.pointer(), out, len) });
            assert!(outs.iter().all(|out| out.content() == content && out.guarded()), "{len}, {turn}");
        }
    }
}

/// Inputs may be equal to each other, also if they are equal to the output.
#[test]
fn an_input_twice() {
    for level in Level::available() {
        let mut buffer: Vec<u32> = (0..100).collect();
        let p = buffer.as_mut_ptr().cast::<u8>();
        for ins in [vec![p.cast_const(); 2], vec![p.cast_const(); 3]] {
            // SAFETY: all pointers are equal: one vector of 100 elements, reduced in place; the CPU has the level.
            unsafe { reduce_at(level, DType::U32, ReduceOp::Sum, &ins, &[p, p], 100, None) };
        }
        assert!(buffer.iter().zip(0..).all(|(&x, i)| x == 6 * i), "{level:?}");
    }
}

/// Combines every `f16` and `bf16` with operands that cause rounding, carries, subnormals, overflow and NaN:
/// this tests the kernels' own conversions.
#[test]
fn every_half_agrees() {
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let place = Place { shift: (0, 0), outs: 1, in_place: None };
    for dtype in [DType::F16, DType::BF16] {
        let mut others: Vec<u16> = vec![0x0000, 0x8000, 0x0001, 0x3C01, 0x3F81, 0x7BFF, 0x7F7F];
        others.extend([0x7C00, 0xFF80, 0x7C01, 0x1234, 0xA9CB]);
        for other in others {
            let other = other.to_le_bytes().repeat(1 << 16);
            for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg] {
                let ins = vec![all.clone(), other.clone()];
                let case = Case { dtype, op, finish: Some(3.into()), len: 1 << 16, ins };
                let expected = case.expected();
                for level in Level::available() {
                    case.check(level, place, &expected);
                }
            }
        }
    }
}

/// Combines every pair of 8-bit floats with every operator that floats have.
#[test]
fn every_pair_of_eights_agrees() {
    let a: Vec<u8> = (0..=u8::MAX).flat_map(|x| [x; 256]).collect();
    let b: Vec<u8> = (0..256).flat_map(|_| 0..=u8::MAX).collect();
    let place = Place { shift: (0, 0), outs: 1, in_place: None };
    for dtype in [DType::F8E4M3, DType::F8E5M2] {
        let sum = [(ReduceOp::Sum, None), (ReduceOp::Avg, Some(2.into())), (ReduceOp::Avg, Some(3.into()))];
        let rest = [ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max].map(|op| (op, None));
        for (op, finish) in sum.into_iter().chain(rest) {
            let case = Case { dtype, op, finish, len: 1 << 16, ins: vec![a.clone(), b.clone()] };
            let expected = case.expected();
            for level in Level::available() {
                case.check(level, place, &expected);
            }
        }
    }
}

/// Scales a buffer that starts `shift` bytes from an aligned address, and compares it with what the oracle gives.
fn check_scale(level: Level, dtype: DType, content: &[u8], shift: usize, factor: f64) {
    let (len, size) = (content.len() / dtype.size(), dtype.size());
    let mut buffer = Buffer::new(content, shift);
    // SAFETY: a buffer of `len` elements; the CPU has the level.
    unsafe { scale_at(level, dtype, buffer.pointer(), len, factor) };
    let mut expected = content.to_vec();
    // SAFETY: a vector of `len` elements.
    unsafe { scalar::scale(dtype, expected.as_mut_ptr(), len, factor) };
    let elements = buffer.content().chunks(size).zip(expected.chunks(size));
    for (i, (got, expected)) in elements.enumerate() {
        let before = &content[i * size..][..size];
        assert!(
            got == expected,
            "{dtype} by {factor:e}, {level:?}, element {i} of {len}, {before:x?}: {got:x?}, not {expected:x?}",
        );
    }
    assert!(buffer.guarded(), "{dtype}, {level:?}, {len} elements at {shift}");
}

const FACTORS: [f64; 9] = [1.0, 0.5, 1.0 / 3.0, -0.1, 0.0, 1e-9, 3e4, 1e300, f64::NAN];

/// Tests every float type, at every offset below 16 bytes, with every remainder.
#[test]
fn every_scale_agrees() {
    let mut rng = Rng(3);
    for dtype in DType::ALL.into_iter().filter(|d| d.scales()) {
        for (turn, len) in LENGTHS.into_iter().chain(0..40).enumerate() {
            let content: Vec<u8> = (0..len).flat_map(|_| rng.element(dtype)).collect();
            let shifts = if len < 40 { 0..16 } else { turn % 16..turn % 16 + 1 };
            for (shift, factor) in shifts.flat_map(|s| FACTORS.map(|f| (s, f))) {
                for level in Level::available() {
                    check_scale(level, dtype, &content, shift, factor);
                }
            }
        }
    }
}

/// Scales every value of the small float types, also infinities, subnormals and every NaN.
#[test]
fn every_small_float_scales() {
    for dtype in [DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2] {
        let all: Vec<u8> = match dtype.size() {
            1 => (0..=u8::MAX).collect(),
            _ => (0..=u16::MAX).flat_map(u16::to_le_bytes).collect(),
        };
        for factor in FACTORS.into_iter().chain([f64::INFINITY, 1.0 / 7.0, 3.0, 1.0 + 1e-7]) {
            for level in Level::available() {
                check_scale(level, dtype, &all, 0, factor);
            }
        }
    }
}

#[test]
fn copies() {
    for bytes in [0, 1, 100, 8192, 8193, 20_000] {
        let content: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
        for outs in 0..4 {
            let mut src = Buffer::new(&content, 1);
            let blank = vec![0; bytes];
            let mut to: Vec<Buffer> = (0..outs).map(|i| Buffer::new(&blank, i)).collect();
            let mut pointers: Vec<_> = to.iter_mut().map(Buffer::pointer).collect();
            let from = src.pointer();
            pointers.push(from);
            // SAFETY: each buffer has `bytes` bytes; the last output is equal to the source, the others overlap nothing.
            unsafe { copy(from, &pointers, bytes) };
            // SAFETY: as above, without the output that is equal to the source.
            unsafe { copy(from, &pointers[..outs], bytes) };
            to.push(src);
            assert!(to.iter().all(|b| b.content() == content && b.guarded()));
        }
    }
}

fn any_case() -> impl Strategy<Value = Case> {
    let types: Vec<_> = supported().collect();
    let shape = (prop::sample::select(types), 1usize..10, 0usize..700);
    let shape = shape.prop_flat_map(|((dtype, op), count, len)| {
        let input = prop::collection::vec(any::<u8>(), len * dtype.size());
        let ins = prop::collection::vec(input, count);
        (Just((dtype, op, len)), ins, prop::option::of(1u32..))
    });
    shape.prop_map(|((dtype, op, len), ins, finish)| Case {
        dtype,
        op,
        finish: finish.map(Finish::from),
        len,
        ins,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn anything_agrees(
        case in any_case(),
        shift in (0usize..16, 0usize..16),
        outs in 1usize..4,
        in_place in prop::option::of(0usize..10),
    ) {
        let in_place = in_place.filter(|&i| i < case.ins.len());
        let expected = case.expected();
        for level in Level::available() {
            case.check(level, Place { shift, outs, in_place }, &expected);
        }
    }
}
