// Every kernel, compiled once for each module: `MODULE` is the number of one, as below. Names are those that
// `src/cuda/mod.rs` makes.
#include "combine.cuh"

#define KERNEL extern "C" __global__ void
// Parameters stay where they are and are read by index there; a copy would be in local memory.
#define PARAM(T) const __grid_constant__ T c

#define COMBINE(NAME, LANE, OP) \
    KERNEL combine2_##NAME(PARAM(Combine<2>)) { combine_two<LANE, OP, 4>(c); } \
    KERNEL combinen_##NAME(PARAM(Combine<MAX_INS>)) { combine_many<LANE, OP, 4>(c); }

#define FLOATS(NAME, LANE) \
    COMBINE(NAME##_sum, LANE, Sum) \
    COMBINE(NAME##_prod, LANE, Prod) \
    COMBINE(NAME##_min, LANE, Min) \
    COMBINE(NAME##_max, LANE, Max) \
    KERNEL scale_##NAME(PARAM(Scale)) { scale_one<LANE>(c); }

#define INTEGERS(NAME, LANE) \
    COMBINE(NAME##_sum, LANE, Sum) \
    COMBINE(NAME##_min, LANE, Min) \
    COMBINE(NAME##_max, LANE, Max)

#if defined(MODULE_f32)
FLOATS(f32, LaneF32)
#elif defined(MODULE_f64)
FLOATS(f64, LaneF64)
#elif defined(MODULE_f16)
FLOATS(f16, LaneF16)
#elif defined(MODULE_bf16)
FLOATS(bf16, LaneBF16)
#elif defined(MODULE_f8e4m3)
FLOATS(f8e4m3, LaneF8E4M3)
#elif defined(MODULE_f8e5m2)
FLOATS(f8e5m2, LaneF8E5M2)
#elif defined(MODULE_i8)
typedef LaneInt<i8, i32, u8> Signed;
typedef LaneInt<u8, u32, u8> Unsigned;
INTEGERS(i8, Signed)
INTEGERS(u8, Unsigned)
COMBINE(u8_prod, Unsigned, Prod)
#elif defined(MODULE_i16)
typedef LaneInt<i16, i32, u16> Signed;
typedef LaneInt<u16, u32, u16> Unsigned;
INTEGERS(i16, Signed)
INTEGERS(u16, Unsigned)
COMBINE(u16_prod, Unsigned, Prod)
#elif defined(MODULE_i32)
typedef LaneInt<i32, i32, u32> Signed;
typedef LaneInt<u32, u32, u32> Unsigned;
INTEGERS(i32, Signed)
INTEGERS(u32, Unsigned)
COMBINE(u32_prod, Unsigned, Prod)
#elif defined(MODULE_i64)
typedef LaneInt<i64, i64, u64> Signed;
typedef LaneInt<u64, u64, u64> Unsigned;
INTEGERS(i64, Signed)
INTEGERS(u64, Unsigned)
COMBINE(u64_prod, Unsigned, Prod)
#elif defined(MODULE_bits)
COMBINE(bytes_band, LaneBits, And)
COMBINE(bytes_bor, LaneBits, Or)
COMBINE(bytes_bxor, LaneBits, Xor)
COMBINE(words_band, LaneWords, And)
COMBINE(words_bor, LaneWords, Or)
COMBINE(words_bxor, LaneWords, Xor)
COMBINE(bool_band, LaneBool, And)
COMBINE(bool_bor, LaneBool, Or)
COMBINE(bool_bxor, LaneBool, Xor)
#else
#error "no such module"
#endif
