// What happens to one element: how each type is computed in, and how two values fold. The rules are those of the CPU
// kernels (src/lib.rs), to the bit. Conversions are written out where an instruction would need a newer PTX or give
// other bits.
#pragma once
#include "params.cuh"

#define DEVICE static __device__ __forceinline__

DEVICE u32 bits(float x) { return __float_as_uint(x); }
DEVICE float from_bits(u32 x) { return __uint_as_float(x); }
DEVICE u64 bits(double x) { return (u64)__double_as_longlong(x); }
DEVICE double from_bits(u64 x) { return __longlong_as_double((i64)x); }

enum : u32 { CANONICAL = 0x7FC00000 };

// A lane has: `Elem`, the stored bits of an element; `Step`, the part of a vector that is computed at once (an element,
// or several in a word); `Acc`, what it is computed in.

struct LaneF32 {
    typedef u32 Elem;
    typedef u32 Step;
    typedef float Acc;
    DEVICE float widen(u32 x) { return from_bits(x); }
    DEVICE u32 narrow(float x) { return x != x ? CANONICAL : bits(x); }
    DEVICE float divide(float x, u32 n) { return __fdiv_rn(x, __uint2float_rn(n)); }
    DEVICE float factor(double x) { return __double2float_rn(x); }
    DEVICE float times(float x, float factor) { return __fmul_rn(x, factor); }
};

struct LaneF64 {
    typedef u64 Elem;
    typedef u64 Step;
    typedef double Acc;
    DEVICE double widen(u64 x) { return from_bits(x); }
    DEVICE u64 narrow(double x) { return x != x ? 0x7FF8000000000000ull : bits(x); }
    DEVICE double divide(double x, u32 n) { return __ddiv_rn(x, __uint2double_rn(n)); }
    DEVICE double factor(double x) { return x; }
    DEVICE double times(double x, double factor) { return __dmul_rn(x, factor); }
};

struct LaneF16 : LaneF32 {
    typedef u16 Elem;
    typedef u16 Step;
    // One instruction each way, the same bits as by hand but for NaN, where by hand would take ten.
    DEVICE float widen(u32 x) {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"((u16)x));
        return wide;
    }
    DEVICE u16 narrow(float x) {
        u16 small;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(small) : "f"(x));
        return x != x ? (u16)0x7E00 : small;
    }
    DEVICE float divide(float x, u32 n) {
        float power = from_bits(n >> 1 & 0x7F800000);
        return __fdiv_rn(x, __fmul_rn(__uint2float_rn(n & 0xFFFFFF), power));
    }
};

struct LaneBF16 : LaneF32 {
    typedef u16 Elem;
    typedef u16 Step;
    DEVICE float widen(u32 x) { return from_bits(x << 16); }
    DEVICE u16 narrow(float x) {
        u32 b = bits(x);
        // Half of the last place, less one where that is even, carries.
        u32 rounded = (b + 0x7FFF + (b >> 16 & 1)) >> 16;
        return (u16)(x != x ? 0x7FC0 : rounded);
    }
};

// The 8-bit floats. `MANTISSA` bits of it; 2^-`LEAST` is the least normal number.
template <u32 MANTISSA, u32 LEAST>
struct LaneF8 : LaneF32 {
    typedef u8 Elem;
    typedef u8 Step;
    enum : u32 { SHIFT = 23 - MANTISSA };
    // But for what the topmost exponent means. With its bits where those of an f32 are, the number is too small by a
    // power of two, subnormal or not; to multiply by that is exact.
    DEVICE float widen_number(u32 x) {
        u32 number = (x & 0x80) << 24 | (x & 0x7F) << SHIFT;
        return from_bits(number) * from_bits((253 - LEAST) << 23);
    }
    DEVICE u32 narrow_magnitude(u32 magnitude) {
        u32 normal = magnitude - ((126 - LEAST) << 23) + ((1u << (SHIFT - 1)) - 1) + (magnitude >> SHIFT & 1);
        // The last place of `unit` is that of a subnormal: the addition rounds to it.
        u32 unit = (127 + SHIFT - LEAST) << 23;
        u32 subnormal = bits(from_bits(magnitude) + from_bits(unit)) - unit;
        return magnitude < (127 - LEAST) << 23 ? subnormal : normal >> SHIFT;
    }
};

struct LaneF8E4M3 : LaneF8<3, 6> {
    DEVICE float widen(u32 x) {
        float number = widen_number(x);
        return (x & 0x7F) == 0x7F ? from_bits(CANONICAL) : number;
    }
    DEVICE u8 narrow(float x) {
        u32 magnitude = bits(x) & 0x7FFFFFFF;
        u32 number = (bits(x) >> 24 & 0x80) | narrow_magnitude(magnitude);
        // 464, half way to what would come after the largest, and to even. Above are infinity and NaN too.
        return (u8)(magnitude > 0x43E80000 ? 0x7F : number);
    }
};

struct LaneF8E5M2 : LaneF8<2, 14> {
    // The upper half of an f16.
    DEVICE float widen(u32 x) { return LaneF16::widen(x << 8); }
    DEVICE u8 narrow(float x) {
        u32 magnitude = bits(x) & 0x7FFFFFFF;
        u32 number = magnitude >= 143 << 23 ? 0x7C : narrow_magnitude(magnitude);
        return (u8)(x != x ? 0x7E : (bits(x) >> 24 & 0x80) | number);
    }
};

// Toward zero, as the CPU does.
DEVICE u32 divided(u32 x, u32 n) { return x / n; }
DEVICE u64 divided(u64 x, u32 n) { return x / n; }
DEVICE i32 divided(i32 x, u32 n) {
    u32 q = (x < 0 ? 0u - (u32)x : (u32)x) / n;
    return (i32)(x < 0 ? 0u - q : q);
}
DEVICE i64 divided(i64 x, u32 n) {
    u64 q = (x < 0 ? 0ull - (u64)x : (u64)x) / n;
    return (i64)(x < 0 ? 0ull - q : q);
}

// Integers: `T` as computed in, no narrower than 32 bits. `E` has the sign of `T`.
template <class E, class T, class B>
struct LaneInt {
    typedef B Elem;
    typedef B Step;
    typedef T Acc;
    template <class X>
    DEVICE T widen(X x) { return (T)(E)x; }
    DEVICE B narrow(T x) { return (B)x; }
    // What is divided is the sum as it would be stored.
    DEVICE T divide(T x, u32 n) { return divided((T)(E)x, n); }
};

// Bits, a word at a time.
struct LaneBits {
    typedef u8 Elem;
    typedef u32 Step;
    typedef u32 Acc;
    DEVICE u32 widen(u32 x) { return x; }
    DEVICE u32 narrow(u32 x) { return x; }
    DEVICE u32 divide(u32 x, u32) { return x; }
};

struct LaneWords : LaneBits {
    typedef u32 Elem;
};

// Four bytes at a time, each 0 or 1 once widened.
struct LaneBool : LaneBits {
    DEVICE u32 widen(u32 x) { return (((x & 0x7F7F7F7F) + 0x7F7F7F7F | x) >> 7) & 0x01010101; }
};

// What changes no operand it is folded with: loops start with it, so that what is done with an operand is there once.
// Whether NaN stays what it is does not matter.
template <class O, class A>
struct Identity;
#define IDENTITY(OP, ACC, VALUE)            \
    template <>                             \
    struct Identity<OP, ACC> {              \
        DEVICE ACC get() { return VALUE; } \
    };

// Signed sums and products are made of unsigned ones: to C++ those wrap, and the compiler knows it.
struct Sum {
    DEVICE float fold(float a, float b) { return __fadd_rn(a, b); }
    DEVICE double fold(double a, double b) { return __dadd_rn(a, b); }
    DEVICE u32 fold(u32 a, u32 b) { return a + b; }
    DEVICE u64 fold(u64 a, u64 b) { return a + b; }
    DEVICE i32 fold(i32 a, i32 b) { return (i32)((u32)a + (u32)b); }
    DEVICE i64 fold(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
};
IDENTITY(Sum, float, -0.0f)
IDENTITY(Sum, double, -0.0)
IDENTITY(Sum, u32, 0)
IDENTITY(Sum, u64, 0)
IDENTITY(Sum, i32, 0)
IDENTITY(Sum, i64, 0)

struct Prod {
    DEVICE float fold(float a, float b) { return __fmul_rn(a, b); }
    DEVICE double fold(double a, double b) { return __dmul_rn(a, b); }
    DEVICE u32 fold(u32 a, u32 b) { return a * b; }
    DEVICE u64 fold(u64 a, u64 b) { return a * b; }
};
IDENTITY(Prod, float, 1.0f)
IDENTITY(Prod, double, 1.0)
IDENTITY(Prod, u32, 1)
IDENTITY(Prod, u64, 1)

// Of floats: each choice yields its second operand for zeros and for NaN; or-ing both orders keeps the sign of -0 and
// keeps a NaN a NaN.
struct Min {
    DEVICE float fold(float a, float b) { return from_bits(bits(a < b ? a : b) | bits(b < a ? b : a)); }
    DEVICE double fold(double a, double b) { return from_bits(bits(a < b ? a : b) | bits(b < a ? b : a)); }
    template <class T>
    DEVICE T fold(T a, T b) { return a < b ? a : b; }
};
IDENTITY(Min, float, from_bits(0x7F800000u))
IDENTITY(Min, double, from_bits(0x7FF0000000000000ull))
IDENTITY(Min, u32, 0xFFFFFFFF)
IDENTITY(Min, u64, 0xFFFFFFFFFFFFFFFF)
IDENTITY(Min, i32, 0x7FFFFFFF)
IDENTITY(Min, i64, 0x7FFFFFFFFFFFFFFF)

struct Max {
    DEVICE float fold(float a, float b) { return -Min::fold(-a, -b); }
    DEVICE double fold(double a, double b) { return -Min::fold(-a, -b); }
    template <class T>
    DEVICE T fold(T a, T b) { return a > b ? a : b; }
};
IDENTITY(Max, float, from_bits(0xFF800000u))
IDENTITY(Max, double, from_bits(0xFFF0000000000000ull))
IDENTITY(Max, u32, 0)
IDENTITY(Max, u64, 0)
IDENTITY(Max, i32, -0x7FFFFFFF - 1)
IDENTITY(Max, i64, -0x7FFFFFFFFFFFFFFF - 1)

struct And {
    DEVICE u32 fold(u32 a, u32 b) { return a & b; }
};
struct Or {
    DEVICE u32 fold(u32 a, u32 b) { return a | b; }
};
struct Xor {
    DEVICE u32 fold(u32 a, u32 b) { return a ^ b; }
};
IDENTITY(And, u32, 0xFFFFFFFF)
IDENTITY(Or, u32, 0)
IDENTITY(Xor, u32, 0)
