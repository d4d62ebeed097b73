// Many tensors to one contiguous buffer, and back; also from one float to another, scaled.
#pragma once
#include "combine.cuh"

// Computed in f64 if either type is, else in f32.
template <class FROM, class TO>
struct Cast {
    DEVICE float factor(double x) { return __double2float_rn(x); }
    DEVICE typename TO::Elem one(typename FROM::Elem x, float factor) {
        return (typename TO::Elem)TO::narrow(__fmul_rn(FROM::widen(x), factor));
    }
};

template <class FROM>
struct Cast<FROM, LaneF64> {
    DEVICE double factor(double x) { return x; }
    DEVICE u64 one(typename FROM::Elem x, double factor) {
        return LaneF64::narrow(__dmul_rn((double)FROM::widen(x), factor));
    }
};

template <class TO>
struct Cast<LaneF64, TO> {
    DEVICE double factor(double x) { return x; }
    DEVICE typename TO::Elem one(u64 x, double factor) {
        double wide = __dmul_rn(from_bits(x), factor);
        // Toward zero, and odd if that was not exact: rounding that again is as rounding once. To f32 there is no
        // second time.
        float cut = __double2float_rz(wide);
        u32 odd = (double)cut != wide && wide == wide;
        float once = sizeof(typename TO::Elem) == 4 ? __double2float_rn(wide) : from_bits(bits(cut) | odd);
        return (typename TO::Elem)TO::narrow(once);
    }
};

template <>
struct Cast<LaneF64, LaneF64> {
    DEVICE double factor(double x) { return x; }
    DEVICE u64 one(u64 x, double factor) { return LaneF64::narrow(__dmul_rn(from_bits(x), factor)); }
};

// Elements that a block takes at a time.
enum : u32 { TILE = 8192 };

// Calls `body(from, to, n)` for each run of elements that the tiles of this block have in common with a segment.
template <class FROM, class TO, class F>
DEVICE void runs(const Pack& p, F body) {
    for (u64 tile = (u64)blockIdx.x * TILE; tile < p.len; tile += (u64)gridDim.x * TILE) {
        u64 end = tile + TILE < p.len ? tile + TILE : p.len;
        // The first segment that ends behind the tile's start.
        u32 low = 0, high = p.count;
        while (low < high) {
            u32 middle = (low + high) / 2;
            const Segment& s = p.segments[middle];
            if (s.first + s.len > tile) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        for (; low < p.count; ++low) {
            Segment s = p.segments[low];
            if (s.first >= end) break;
            u64 from = s.first > tile ? s.first : tile;
            u64 to = s.first + s.len < end ? s.first + s.len : end;
            // Chosen here, so that `body` is there once.
            const u8* source =
                p.unpack ? p.contiguous + from * sizeof(FROM) : s.tensor + (from - s.first) * sizeof(FROM);
            u8* target = p.unpack ? s.tensor + (from - s.first) * sizeof(TO) : p.contiguous + from * sizeof(TO);
            // Otherwise it reads and writes by what is slower, for memory of any kind.
            __builtin_assume(__isGlobal(source));
            __builtin_assume(__isGlobal(target));
            body(source, target, to - from);
        }
    }
}

template <class FROM, class TO>
DEVICE void pack_cast(const Pack& p) {
    typedef typename FROM::Elem A;
    typedef typename TO::Elem B;
    typedef Cast<FROM, TO> C;
    // Elements at a time: 16 bytes of 32-bit floats, and of f64. More of the smaller ones make long code, 36 times.
    const u32 STEPS = sizeof(A) == 8 || sizeof(B) == 8 ? 2 : 4;
    struct alignas(STEPS * sizeof(A)) As {
        A of[STEPS];
    };
    struct alignas(STEPS * sizeof(B)) Bs {
        B of[STEPS];
    };
    auto factor = C::factor(p.factor);
    runs<A, B>(p, [&](const u8* from, u8* to, u64 n) {
        bool vectors = (u64)from % sizeof(As) == 0 && (u64)to % sizeof(Bs) == 0;
        bool bytewise = (u64)from % sizeof(A) != 0 || (u64)to % sizeof(B) != 0;
        u64 done = vectors ? n / STEPS * STEPS : 0;
#pragma unroll 1
        for (u64 i = threadIdx.x * STEPS; i < done; i += blockDim.x * STEPS) {
            As a = *(const As*)(from + i * sizeof(A));
            Bs b;
#pragma unroll
            for (u32 s = 0; s < STEPS; ++s) b.of[s] = C::one(a.of[s], factor);
            *(Bs*)(to + i * sizeof(B)) = b;
        }
#pragma unroll 1
        for (u64 i = done + threadIdx.x; i < n; i += blockDim.x) {
            A x = load<A>(from + i * sizeof(A), bytewise);
            store<B>(to + i * sizeof(B), C::one(x, factor), bytewise);
        }
    });
}

// Unchanged: whole vectors where both sides are aligned alike.
DEVICE void pack_all(const Pack& p) {
    runs<u8, u8>(p, [&](const u8* from, u8* to, u64 n) {
        u64 head = (0 - (u64)to) % 16;
        if (((u64)from - (u64)to) % 16 != 0 || head > n) head = n;
        u64 middle = (n - head) / 16 * 16;
#pragma unroll 1
        for (u64 i = threadIdx.x; i < n - middle; i += blockDim.x) {
            u64 at = i < head ? i : i + middle;
            to[at] = from[at];
        }
#pragma unroll 2
        for (u64 i = threadIdx.x * 16; i < middle; i += blockDim.x * 16) {
            *(uint4*)(to + head + i) = *(const uint4*)(from + head + i);
        }
    });
}

// `E`: what is copied where vectors cannot be. `DEPTH` vectors are in flight at a time.
template <class E, u32 DEPTH>
DEVICE void copy_all(const Copy& c) {
    bool bytewise = c.span.bytewise != 0;
    ends<E>(c.span, [&](u64 at) {
        E e = load<E>(c.in + at, bytewise);
#pragma unroll 1
        for (u32 o = 0; o < c.span.n_outs; ++o) store<E>(c.outs[o] + at, e, bytewise);
    });
    typedef Vector<u32> V;
    u64 first = c.span.head * sizeof(E), step = threads() * 16, end = first + c.span.vectors * 16;
    for (u64 at = first + thread() * 16; at < end; at += step * DEPTH) {
        V v[DEPTH];
#pragma unroll
        for (u32 d = 0; d < DEPTH; ++d) {
            if (d == 0 || at + step * d < end) v[d] = V::load(c.in + at + step * d);
        }
#pragma unroll 1
        for (u32 o = 0; o < c.span.n_outs; ++o) {
            u8* out = c.outs[o] + at;
#pragma unroll
            for (u32 d = 0; d < DEPTH; ++d) {
                if (d == 0 || at + step * d < end) v[d].store(out + step * d);
            }
        }
    }
}
