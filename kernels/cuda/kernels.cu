// Every kernel, compiled once for each module named below: with `MODULE_f32` defined it gives `ptx/f32.ptx`. Names are
// those that `src/cuda/` makes.
#include "pack.cuh"

#define KERNEL extern "C" __global__ void
// Parameters stay where they are and are read by index there; a copy would be in local memory.
#define PARAM(T) const __grid_constant__ T c

#define COMBINE_N(NAME, LANE, OP) \
    KERNEL combinen_##NAME(PARAM(Combine<MAX_INS>)) { combine_many<LANE, OP, 4>(c); }

// A kernel for two operands reads several vectors of each at a time. Types of 8 bits have none: they have enough to do
// with one vector.
#define COMBINE(NAME, LANE, OP) \
    KERNEL combine2_##NAME(PARAM(Combine<2>)) { combine_two<LANE, OP, 4>(c); } \
    COMBINE_N(NAME, LANE, OP)

#define FLOATS(NAME, LANE, COMBINE) \
    COMBINE(NAME##_sum, LANE, Sum) \
    COMBINE(NAME##_prod, LANE, Prod) \
    COMBINE(NAME##_min, LANE, Min) \
    COMBINE(NAME##_max, LANE, Max) \
    KERNEL scale_##NAME(PARAM(Scale)) { scale_one<LANE>(c); }

#define INTEGERS(NAME, LANE, COMBINE) \
    COMBINE(NAME##_sum, LANE, Sum) \
    COMBINE(NAME##_min, LANE, Min) \
    COMBINE(NAME##_max, LANE, Max)

#if defined(MODULE_f32)
FLOATS(f32, LaneF32, COMBINE)
#elif defined(MODULE_f64)
FLOATS(f64, LaneF64, COMBINE)
#elif defined(MODULE_f16)
FLOATS(f16, LaneF16, COMBINE)
#elif defined(MODULE_bf16)
FLOATS(bf16, LaneBF16, COMBINE)
#elif defined(MODULE_f8e4m3)
FLOATS(f8e4m3, LaneF8E4M3, COMBINE_N)
#elif defined(MODULE_f8e5m2)
FLOATS(f8e5m2, LaneF8E5M2, COMBINE_N)
#elif defined(MODULE_i8)
typedef LaneInt<i8, i32, u8> Signed;
typedef LaneInt<u8, u32, u8> Unsigned;
INTEGERS(i8, Signed, COMBINE_N)
INTEGERS(u8, Unsigned, COMBINE_N)
COMBINE_N(u8_prod, Unsigned, Prod)
#elif defined(MODULE_i16)
typedef LaneInt<i16, i32, u16> Signed;
typedef LaneInt<u16, u32, u16> Unsigned;
INTEGERS(i16, Signed, COMBINE)
INTEGERS(u16, Unsigned, COMBINE)
COMBINE(u16_prod, Unsigned, Prod)
#elif defined(MODULE_i32)
typedef LaneInt<i32, i32, u32> Signed;
typedef LaneInt<u32, u32, u32> Unsigned;
INTEGERS(i32, Signed, COMBINE)
INTEGERS(u32, Unsigned, COMBINE)
COMBINE(u32_prod, Unsigned, Prod)
#elif defined(MODULE_i64)
typedef LaneInt<i64, i64, u64> Signed;
typedef LaneInt<u64, u64, u64> Unsigned;
INTEGERS(i64, Signed, COMBINE)
INTEGERS(u64, Unsigned, COMBINE)
COMBINE(u64_prod, Unsigned, Prod)
#elif defined(MODULE_bits)
COMBINE_N(bytes_band, LaneBits, And)
COMBINE_N(bytes_bor, LaneBits, Or)
COMBINE_N(bytes_bxor, LaneBits, Xor)
COMBINE(words_band, LaneWords, And)
COMBINE(words_bor, LaneWords, Or)
COMBINE(words_bxor, LaneWords, Xor)
COMBINE_N(bool_band, LaneBool, And)
COMBINE_N(bool_bor, LaneBool, Or)
COMBINE_N(bool_bxor, LaneBool, Xor)
#elif defined(MODULE_bytes)
KERNEL copy_bytes(PARAM(Copy)) { copy_all<u8, 4>(c); }
KERNEL copy_words(PARAM(Copy)) { copy_all<u32, 4>(c); }
KERNEL pack_bytes(PARAM(Pack)) { pack_all(c); }
#elif defined(MODULE_cast)
#define CAST(FROM, A, TO, B) KERNEL pack_##FROM##_##TO(PARAM(Pack)) { pack_cast<Lane##A, Lane##B>(c); }
#define CASTS(FROM, A)          \
    CAST(FROM, A, f16, F16)     \
    CAST(FROM, A, bf16, BF16)   \
    CAST(FROM, A, f32, F32)     \
    CAST(FROM, A, f64, F64)     \
    CAST(FROM, A, f8e4m3, F8E4M3) \
    CAST(FROM, A, f8e5m2, F8E5M2)
CASTS(f16, F16)
CASTS(bf16, BF16)
CASTS(f32, F32)
CASTS(f64, F64)
CASTS(f8e4m3, F8E4M3)
CASTS(f8e5m2, F8E5M2)
#else
#error "no such module"
#endif
