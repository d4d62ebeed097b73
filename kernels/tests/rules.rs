//! The rules of the crate's documentation, as values written out by hand. Each holds for
//! the fast kernels and for the oracle.

use ReduceOp::{Avg, BitAnd, BitOr, BitXor, Max, Min, Prod, Sum};
use allstream_kernels::{DType, Element, Finish, ReduceOp, bf16, f8e4m3, f8e5m2, f16, reduce, scalar, scale};

/// Long enough for vectors and for a remainder.
const LEN: usize = 67;

/// Folds operands, each given as the bytes of one element. Asserts that the fast kernel and the oracle
/// give the same, in every lane of a vector.
fn fold_bytes(dtype: DType, op: ReduceOp, operands: &[&[u8]], finish: Option<Finish>) -> Vec<u8> {
    let size = dtype.size();
    let buffers: Vec<Vec<u8>> = operands.iter().map(|x| x.repeat(LEN)).collect();
    let ins: Vec<*const u8> = buffers.iter().map(|b| b.as_ptr()).collect();
    let mut fast = vec![0xEE; LEN * size];
    let mut slow = vec![0xEE; LEN * size];
    // SAFETY: all buffers are LEN elements and distinct.
    unsafe { reduce(dtype, op, &ins, &[fast.as_mut_ptr()], LEN, finish) };
    // SAFETY: as above.
    unsafe { scalar::reduce(dtype, op, &ins, &[slow.as_mut_ptr()], LEN, finish) };
    assert_eq!(fast, slow, "{dtype} {op}");
    let result = fast[..size].to_vec();
    assert_eq!(fast, result.repeat(LEN), "{dtype} {op}");
    result
}

/// The bytes of an element.
trait Bytes: Element {
    fn bytes(self) -> Vec<u8>;
    fn back(bytes: &[u8]) -> Self;
}

macro_rules! bytes {
    ($($t:ty)*) => {$(
        impl Bytes for $t {
            fn bytes(self) -> Vec<u8> {
                self.to_ne_bytes().to_vec()
            }
            fn back(bytes: &[u8]) -> Self {
                Self::from_ne_bytes(bytes.try_into().unwrap())
            }
        }
    )*};
}

bytes!(i8 i16 i32 i64 u8 u16 u32 u64 f16 bf16 f32 f64);

macro_rules! byte {
    ($($t:ty)*) => {$(
        impl Bytes for $t {
            fn bytes(self) -> Vec<u8> {
                vec![self.to_bits()]
            }
            fn back(bytes: &[u8]) -> Self {
                Self::from_bits(bytes[0])
            }
        }
    )*};
}

byte!(f8e4m3 f8e5m2);

fn finish<T: Bytes>(op: ReduceOp, operands: &[T], ranks: Option<u32>) -> T {
    let operands: Vec<Vec<u8>> = operands.iter().map(|x| x.bytes()).collect();
    let operands: Vec<&[u8]> = operands.iter().map(Vec::as_slice).collect();
    T::back(&fold_bytes(T::DTYPE, op, &operands, ranks.map(Finish::from)))
}

fn fold<T: Bytes>(op: ReduceOp, operands: &[T]) -> T {
    finish(op, operands, None)
}

fn fold_f16(op: ReduceOp, operands: &[u16]) -> u16 {
    let operands: Vec<_> = operands.iter().map(|&x| f16::from_bits(x)).collect();
    fold(op, &operands).to_bits()
}

fn fold_bf16(op: ReduceOp, operands: &[u16]) -> u16 {
    let operands: Vec<_> = operands.iter().map(|&x| bf16::from_bits(x)).collect();
    fold(op, &operands).to_bits()
}

fn fold_e4m3(op: ReduceOp, operands: &[u8]) -> u8 {
    let operands: Vec<_> = operands.iter().map(|&x| f8e4m3::from_bits(x)).collect();
    fold(op, &operands).to_bits()
}

fn fold_e5m2(op: ReduceOp, operands: &[u8]) -> u8 {
    let operands: Vec<_> = operands.iter().map(|&x| f8e5m2::from_bits(x)).collect();
    fold(op, &operands).to_bits()
}

/// Scales a value. Asserts that the fast kernel and the oracle give the same, in every lane of a vector.
fn scaled<T: Bytes>(x: T, factor: f64) -> T {
    let mut fast = x.bytes().repeat(LEN);
    let mut slow = fast.clone();
    // SAFETY: LEN elements.
    unsafe { scale(T::DTYPE, fast.as_mut_ptr(), LEN, factor) };
    // SAFETY: as above.
    unsafe { scalar::scale(T::DTYPE, slow.as_mut_ptr(), LEN, factor) };
    assert_eq!(fast, slow, "{x:?} by {factor}");
    let result = fast[..size_of::<T>()].to_vec();
    assert_eq!(fast, result.repeat(LEN), "{x:?} by {factor}");
    T::back(&result)
}

#[test]
fn integers_wrap() {
    assert_eq!(fold(Sum, &[i8::MAX, 1]), i8::MIN);
    assert_eq!(fold(Sum, &[100i8, 100, 100]), 44);
    assert_eq!(fold(Sum, &[u16::MAX, 3]), 2);
    assert_eq!(fold(Sum, &[i32::MIN, -1]), i32::MAX);
    assert_eq!(fold(Sum, &[u64::MAX, 1]), 0);
    assert_eq!(fold(Prod, &[16i8, 16]), 0);
    assert_eq!(fold(Prod, &[-128i8, -1]), -128);
    assert_eq!(fold(Prod, &[300i16, 300]), 24_464);
    assert_eq!(fold(Prod, &[0x1_0001u32, 0x1_0001]), 0x2_0001);
    assert_eq!(fold(Prod, &[i64::MIN, 3]), i64::MIN);
}

#[test]
fn integers_order_by_sign() {
    assert_eq!(fold(Min, &[1i8, -1, 0]), -1);
    assert_eq!(fold(Max, &[1u8, 255, 0]), 255);
    assert_eq!(fold(Max, &[1i64, -1, i64::MIN]), 1);
    assert_eq!(fold(Min, &[1u64, u64::MAX, 2]), 1);
    assert_eq!(fold(BitAnd, &[0b1100i32, -2]), 0b1100);
    assert_eq!(fold(BitOr, &[0b1100u16, 0b1010, 1]), 0b1111);
    assert_eq!(fold(BitXor, &[0b1100u64, 0b1010, 1]), 0b0111);
}

#[test]
fn integer_averages_truncate_after_wrapping() {
    assert_eq!(finish(Avg, &[-3i32, -4], Some(2)), -3);
    assert_eq!(finish(Avg, &[3i8, 4], Some(2)), 3);
    assert_eq!(finish(Avg, &[100i8, 100], Some(2)), -28);
    assert_eq!(finish(Avg, &[200u8, 100], Some(2)), 22);
    assert_eq!(finish(Avg, &[i32::MIN, 0], Some(3)), -715_827_882);
    assert_eq!(finish(Avg, &[u32::MAX, 0], Some(u32::MAX)), 1);
    assert_eq!(finish(Avg, &[u32::MAX - 1, 0], Some(u32::MAX)), 0);
    assert_eq!(finish(Avg, &[i64::MIN + 1, 0], Some(2)), -(1 << 62) + 1);
    assert_eq!(finish(Avg, &[u64::MAX, 0], Some(2)), u64::MAX / 2);
    assert_eq!(finish(Avg, &[-7i16], Some(2)), -3);
    assert_eq!(finish(Avg, &[5i16, 6], None), 11);
    assert_eq!(finish(Sum, &[5i16, 6], Some(2)), 11);
}

#[test]
fn bools_are_truth_values() {
    let fold = |op, operands: &[u8]| {
        let operands: Vec<&[u8]> = operands.chunks(1).collect();
        fold_bytes(DType::Bool, op, &operands, None)[0]
    };
    for op in [Sum, Max, BitOr] {
        let got = [fold(op, &[0, 0]), fold(op, &[0, 4]), fold(op, &[2, 1]), fold(op, &[0, 0, 9])];
        assert_eq!(got, [0, 1, 1, 1], "{op}");
    }
    for op in [Prod, Min, BitAnd] {
        let got = [fold(op, &[0, 0]), fold(op, &[0, 4]), fold(op, &[2, 1]), fold(op, &[2, 4, 9])];
        assert_eq!(got, [0, 0, 1, 1], "{op}");
    }
    let got = [fold(BitXor, &[0, 4]), fold(BitXor, &[2, 1]), fold(BitXor, &[2, 4, 9])];
    assert_eq!(got, [1, 0, 1]);
    assert_eq!(fold(Sum, &[7]), 7, "one input is copied");
}

#[test]
fn floats_fold_from_the_left() {
    assert_eq!(fold(Sum, &[1e8f32, -1e8, 1.0]), 1.0);
    assert_eq!(fold(Sum, &[1.0f32, 1e8, -1e8]), 0.0);
    assert_eq!(fold(Sum, &[1e16f64, 1.0, -1e16]), 0.0);
    assert_eq!(fold(Prod, &[1e30f32, 1e30, 1e-30]), f32::INFINITY);
    assert_eq!(finish(Avg, &[1.0f32, 0.0], Some(3)), 1.0 / 3.0);
    assert_eq!(finish(Avg, &[1.0f64], Some(3)), 1.0 / 3.0);
    assert_eq!(finish(Avg, &[1.0f64, 2.0], None), 3.0);
}

#[test]
fn halves_round_once() {
    // 2048 + 1 + 1: rounded to f16 after each addition it would stay 2048.
    assert_eq!(fold_f16(Sum, &[0x6800, 0x3C00, 0x3C00]), 0x6801);
    // 256 + 1 + 1 likewise in bf16.
    assert_eq!(fold_bf16(Sum, &[0x4380, 0x3F80, 0x3F80]), 0x4381);
    // 2048 + 1 and 2050 + 1 are half way: to even.
    assert_eq!(fold_f16(Sum, &[0x6800, 0x3C00]), 0x6800);
    assert_eq!(fold_f16(Sum, &[0x6801, 0x3C00]), 0x6802);
    assert_eq!(fold_bf16(Sum, &[0x4380, 0x3F80]), 0x4380);
    assert_eq!(fold_bf16(Sum, &[0x4381, 0x3F80]), 0x4382);
    // 60000 + 60000 does not fit f16, but their average does.
    let big = f16::from_f32(60_000.0);
    assert_eq!(finish(Avg, &[big, big], Some(2)), big);
    assert_eq!(fold(Sum, &[big, big]), f16::INFINITY);
    // 60000 five times: each is halved three times before, so that the sum fits. The sum is divided by 5 / 8.
    let eighths = [big, big, big, big, big].map(|x| f16::from_f32(x.to_f32() / 8.0).to_ne_bytes());
    let of_five = Finish { ranks: 5, halved: 3 };
    let partly = fold_bytes(DType::F16, Avg, &[&eighths[0], &eighths[1], &eighths[2], &eighths[3]], None);
    assert_eq!(
        fold_bytes(DType::F16, Avg, &[&partly, &eighths[4]], Some(of_five)),
        big.to_ne_bytes(),
        "no sum on the way is out of range"
    );
    // Subnormals survive.
    assert_eq!(fold_f16(Sum, &[0x0001, 0x0001]), 0x0002);
    assert_eq!(fold_bf16(Sum, &[0x0001, 0x0001]), 0x0002);
}

#[test]
fn eights_round_once() {
    // 16 + 1 + 1: rounded to e4m3 after each addition it would stay 16.
    assert_eq!(fold_e4m3(Sum, &[0x58, 0x38, 0x38]), 0x59);
    // 8 + 1 + 1 likewise in e5m2.
    assert_eq!(fold_e5m2(Sum, &[0x48, 0x3C, 0x3C]), 0x49);
    // 16 + 1 and 18 + 1 are half way: to even. So are 8 + 1 and 10 + 1 in e5m2.
    assert_eq!(fold_e4m3(Sum, &[0x58, 0x38]), 0x58);
    assert_eq!(fold_e4m3(Sum, &[0x59, 0x38]), 0x5A);
    assert_eq!(fold_e5m2(Sum, &[0x48, 0x3C]), 0x48);
    assert_eq!(fold_e5m2(Sum, &[0x49, 0x3C]), 0x4A);
    // 416 + 416 does not fit e4m3, but their average does; likewise 49,152 + 49,152 in e5m2.
    let (four, five) = (f8e4m3::from_f32(416.0), f8e5m2::from_f32(49_152.0));
    assert_eq!(finish(Avg, &[four, four], Some(2)), four);
    assert_eq!(finish(Avg, &[five, five], Some(2)), five);
    // Subnormals survive.
    assert_eq!(fold_e4m3(Sum, &[0x01, 0x02]), 0x03);
    assert_eq!(fold_e5m2(Sum, &[0x01, 0x01]), 0x02);
    assert_eq!(fold_e4m3(Prod, &[0x01, 0x30]), 0x00, "half the least: to even");
}

#[test]
fn eights_out_of_range() {
    // 448 + 16 is half way from 448 to 480, which E4M3 does not have: it rounds to the even one, 448.
    // What is above becomes NaN, without a sign.
    assert_eq!(fold_e4m3(Sum, &[0x7E, 0x58]), 0x7E);
    assert_eq!(fold_e4m3(Sum, &[0xFE, 0xD8]), 0xFE);
    assert_eq!(fold_e4m3(Sum, &[0x7E, 0x59]), 0x7F);
    assert_eq!(fold_e4m3(Sum, &[0xFE, 0xD9]), 0x7F);
    assert_eq!(fold_e4m3(Prod, &[0x7E, 0xFE]), 0x7F);
    // Between the operands all is f32: 448 + 448 - 448 is 448.
    assert_eq!(fold_e4m3(Sum, &[0x7E, 0x7E, 0xFE]), 0x7E);
    // 57,344 + 4,096 is half way to 65,536: to even, infinity.
    assert_eq!(fold_e5m2(Sum, &[0x7B, 0x6C]), 0x7C);
    assert_eq!(fold_e5m2(Sum, &[0xFB, 0xEC]), 0xFC);
    assert_eq!(fold_e5m2(Sum, &[0x7B, 0x6B]), 0x7B);
    assert_eq!(fold_e5m2(Sum, &[0x7C, 0xFC]), 0x7E);
    assert_eq!(fold_e5m2(Min, &[0x7C, 0xFC]), 0xFC);
}

#[test]
fn eights_show_as_numbers() {
    let (four, five) = (f8e4m3::from_f32(-1.5), f8e5m2::from_f32(1e-3));
    assert_eq!(format!("{four} {four:?} {five}"), "-1.5 -1.5 0.0009765625");
    assert!(f8e4m3::MIN < four && four < f8e4m3::default() && f8e5m2::MAX < f8e5m2::INFINITY);
    assert_eq!(f8e4m3::from_bits(0x80), f8e4m3::default());
    assert!(f8e4m3::NAN != f8e4m3::NAN && f8e4m3::NAN.is_nan() && !f8e4m3::MAX.is_nan());
    assert!(f8e5m2::NAN.is_nan() && !f8e5m2::NEG_INFINITY.is_nan());
    assert_eq!((f32::from(f8e4m3::MAX), f64::from(f8e5m2::MIN)), (448.0, -57_344.0));
}

#[test]
fn scaling() {
    assert_eq!(scaled(3.0f64, 0.1), 3.0 * 0.1);
    assert_eq!(scaled(3.0f32, 0.1), 3.0 * 0.1f32);
    // The factor is an f32 first: 1 + 2^-30 is 1.
    assert_eq!(scaled(1e8f32, 1.0 + 2f64.powi(-30)), 1e8);
    assert_eq!(scaled(f16::from_f32(2048.0), 1.0 + 1.0 / 2048.0).to_f32(), 2048.0, "half way: to even");
    assert_eq!(scaled(f16::from_f32(2050.0), 1.0 + 1.0 / 2050.0).to_f32(), 2052.0, "half way: to even");
    assert_eq!(scaled(bf16::from_f32(256.0), 0.5).to_f32(), 128.0);
    assert_eq!(scaled(f8e4m3::from_f32(448.0), 0.25).to_f32(), 112.0);
    assert_eq!(scaled(f8e4m3::from_f32(-448.0), 2.0).to_bits(), 0x7F, "out of range");
    assert_eq!(scaled(f8e5m2::from_f32(-57_344.0), 2.0).to_bits(), 0xFC);
    assert_eq!(scaled(-1.0f32, 0.0).to_bits(), 0x8000_0000);
    assert_eq!(scaled(f32::MAX, 2.0), f32::INFINITY);
    // A factor of 1 makes a NaN canonical, too.
    assert_eq!(scaled(f32::from_bits(0xFF80_0001), 1.0).to_bits(), 0x7FC0_0000);
    assert_eq!(scaled(f64::from_bits(0xFFF8_0000_0000_0001), 1.0).to_bits(), 0x7FF8_0000_0000_0000);
    assert_eq!(scaled(f64::INFINITY, 0.0).to_bits(), 0x7FF8_0000_0000_0000);
    assert_eq!(scaled(f16::from_bits(0xFC01), 1.0).to_bits(), 0x7E00);
    assert_eq!(scaled(bf16::from_bits(0xFF81), 1.0).to_bits(), 0x7FC0);
    assert_eq!(scaled(f8e4m3::from_bits(0xFF), 1.0).to_bits(), 0x7F);
    assert_eq!(scaled(f8e5m2::from_bits(0xFD), 1.0).to_bits(), 0x7E);
}

#[test]
fn infinities() {
    assert_eq!(fold(Sum, &[f32::INFINITY, 1.0]), f32::INFINITY);
    assert_eq!(fold(Sum, &[f32::INFINITY, -f32::INFINITY]).to_bits(), 0x7FC0_0000);
    assert_eq!(fold(Prod, &[f64::INFINITY, 0.0]).to_bits(), 0x7FF8_0000_0000_0000);
    assert_eq!(fold(Min, &[f32::INFINITY, -f32::INFINITY]), -f32::INFINITY);
    assert_eq!(fold_f16(Sum, &[0x7C00, 0xFC00]), 0x7E00);
    assert_eq!(fold_bf16(Sum, &[0x7F80, 0xFF80]), 0x7FC0);
    assert_eq!(fold(Sum, &[f32::MAX, f32::MAX]), f32::INFINITY);
}

#[test]
fn computed_nans_are_canonical() {
    for op in [Sum, Prod, Min, Max, Avg] {
        // Signalling, negative, with payload; in any position; also two of them.
        for nan in [0x7F80_0001, 0xFFC0_0000, 0x7FC1_2345] {
            let nan = f32::from_bits(nan);
            for operands in [[nan, 1.0, 2.0], [1.0, nan, -0.0], [1.0, 2.0, nan], [nan, 1.0, nan]] {
                assert_eq!(fold(op, &operands).to_bits(), 0x7FC0_0000, "{op}");
                assert_eq!(fold(op, &operands[..2]).is_nan(), operands[..2].iter().any(|x| x.is_nan()));
            }
        }
        for nan in [0x7FF0_0000_0000_0001, 0xFFF8_0000_0000_0000] {
            let nan = f64::from_bits(nan);
            for operands in [[nan, 1.0], [-0.0, nan], [nan, nan]] {
                assert_eq!(fold(op, &operands).to_bits(), 0x7FF8_0000_0000_0000, "{op}");
            }
        }
        for operands in [[0x7C01, 0x3C00], [0x8000, 0xFE12], [0xFFFF, 0x7C01]] {
            assert_eq!(fold_f16(op, &operands), 0x7E00, "{op}");
        }
        for operands in [[0x7F81, 0x3F80], [0x8000, 0xFFD2], [0xFFFF, 0x7F81]] {
            assert_eq!(fold_bf16(op, &operands), 0x7FC0, "{op}");
        }
        for operands in [[0x7F, 0x38], [0x80, 0xFF], [0xFF, 0x7F]] {
            assert_eq!(fold_e4m3(op, &operands), 0x7F, "{op}");
        }
        for operands in [[0x7D, 0x3C], [0x80, 0xFE], [0xFF, 0x7D]] {
            assert_eq!(fold_e5m2(op, &operands), 0x7E, "{op}");
        }
    }
    assert_eq!(finish(Avg, &[f32::from_bits(0xFF80_0001)], Some(2)).to_bits(), 0x7FC0_0000);
}

#[test]
fn signed_zeros_are_ordered() {
    let bits = |op, operands: &[f32]| fold(op, operands).to_bits();
    for operands in [[0.0, -0.0], [-0.0, 0.0]] {
        assert_eq!(bits(Min, &operands), 0x8000_0000);
        assert_eq!(bits(Max, &operands), 0);
        assert_eq!(bits(Sum, &operands), 0);
        assert_eq!(fold(Min, &operands.map(f64::from)).to_bits(), 1 << 63);
        assert_eq!(fold(Max, &operands.map(f64::from)).to_bits(), 0);
    }
    assert_eq!(bits(Max, &[-0.0, -0.0]), 0x8000_0000);
    assert_eq!(bits(Sum, &[-0.0, -0.0]), 0x8000_0000);
    assert_eq!(bits(Min, &[0.0, 0.0]), 0);
    for operands in [[0x0000, 0x8000], [0x8000, 0x0000]] {
        assert_eq!(fold_f16(Min, &operands), 0x8000);
        assert_eq!(fold_f16(Max, &operands), 0x0000);
        assert_eq!(fold_bf16(Min, &operands), 0x8000);
        assert_eq!(fold_bf16(Max, &operands), 0x0000);
    }
    for operands in [[0x00, 0x80], [0x80, 0x00]] {
        assert_eq!((fold_e4m3(Min, &operands), fold_e4m3(Max, &operands)), (0x80, 0x00));
        assert_eq!((fold_e5m2(Min, &operands), fold_e5m2(Max, &operands)), (0x80, 0x00));
    }
}

#[test]
fn one_input_keeps_its_bits() {
    for op in [Sum, Prod, Min, Max, Avg] {
        assert_eq!(fold(op, &[f32::from_bits(0xFF80_0001)]).to_bits(), 0xFF80_0001);
        assert_eq!(fold_f16(op, &[0x7C01]), 0x7C01);
        assert_eq!(fold_bf16(op, &[0xFF81]), 0xFF81);
        assert_eq!(fold_e4m3(op, &[0xFF]), 0xFF);
        assert_eq!(fold_e5m2(op, &[0xFD]), 0xFD);
    }
    let nan = f64::from_bits(0x7FF0_0000_0000_0001);
    assert_eq!(finish(Avg, &[nan], Some(1)).to_bits(), nan.to_bits());
}

/// A call that is not defined changes no memory; with debug assertions it panics.
#[test]
fn misuse_is_defined() {
    let (a, b) = ([1u8; 16], [2u8; 16]);
    let ins = [a.as_ptr(), b.as_ptr()];
    let calls = [
        (DType::Bool, Avg, &ins[..], 1, None),
        (DType::F32, BitXor, &ins, 1, None),
        (DType::U8, Sum, &[], 1, None),
        (DType::U8, Sum, &ins, 0, None),
        (DType::U8, Avg, &ins, 1, Some(0.into())),
    ];
    for (dtype, op, ins, outs, finish) in calls {
        for reduce in [reduce, scalar::reduce] {
            let mut out = [7u8; 16];
            let outs = &[out.as_mut_ptr()][..outs];
            // SAFETY: all buffers are two elements of the largest type.
            let call = || unsafe { reduce(dtype, op, ins, outs, 2, finish) };
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err();
            assert_eq!(panicked, cfg!(debug_assertions), "{dtype} {op}");
            assert_eq!(out, [7; 16]);
        }
    }
    for dtype in DType::ALL.into_iter().filter(|d| !d.scales()) {
        for scale in [scale, scalar::scale] {
            let mut memory = [1u8; 16];
            let at = memory.as_mut_ptr();
            // SAFETY: two elements of the largest type.
            let call = || unsafe { scale(dtype, at, 2, 2.0) };
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err();
            assert_eq!(panicked, cfg!(debug_assertions), "{dtype}");
            assert_eq!(memory, [1; 16]);
        }
    }
}
