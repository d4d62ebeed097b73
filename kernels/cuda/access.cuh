// How memory is read and written: vectors of 16 bytes where all pointers allow, else elements, else bytes.
#pragma once
#include "lanes.cuh"

DEVICE u64 thread() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE u64 threads() { return (u64)gridDim.x * blockDim.x; }

// A vector, as what it is made of; `x` and the like of `uint4` cannot be indexed.
template <class S>
struct Vector {
    enum : u32 { STEPS = 16 / sizeof(S) };
    u32 words[4];
    DEVICE Vector load(const u8* at) {
        uint4 v = *(const uint4*)at;
        Vector r = {{v.x, v.y, v.z, v.w}};
        return r;
    }
    __device__ __forceinline__ void store(u8* at) const {
        *(uint4*)at = make_uint4(words[0], words[1], words[2], words[3]);
    }
    // `k` is a constant once loops are unrolled.
    __device__ __forceinline__ u32 get(u32 k) const {
        const u32 bits = sizeof(S) * 8, at = k * bits % 32;
        // Shifted up before down: nothing is left to be masked.
        return words[k * bits / 32] << (32 - bits - at) >> (32 - bits);
    }
    // Steps are put in order: the first of a word finds it zero.
    __device__ __forceinline__ void put(u32 k, S s) { words[k * sizeof(S) / 4] |= (u32)s << (k * sizeof(S) % 4 * 8); }
};

template <>
struct Vector<u64> {
    enum : u32 { STEPS = 2 };
    u64 words[2];
    DEVICE Vector load(const u8* at) {
        ulonglong2 v = *(const ulonglong2*)at;
        Vector r = {{v.x, v.y}};
        return r;
    }
    __device__ __forceinline__ void store(u8* at) const { *(ulonglong2*)at = make_ulonglong2(words[0], words[1]); }
    __device__ __forceinline__ u64 get(u32 k) const { return words[k]; }
    __device__ __forceinline__ void put(u32 k, u64 s) { words[k] = s; }
};

template <class E>
DEVICE E load(const u8* at, bool bytewise) {
    if (!bytewise) return *(const E*)at;
    E e = 0;
#pragma unroll 1
    for (u32 b = 0; b < sizeof(E); ++b) e |= (E)at[b] << (8 * b);
    return e;
}

template <>
__device__ __forceinline__ u8 load<u8>(const u8* at, bool) {
    return *at;
}

template <class E>
DEVICE void store(u8* at, E e, bool bytewise) {
    if (!bytewise) {
        *(E*)at = e;
        return;
    }
#pragma unroll 1
    for (u32 b = 0; b < sizeof(E); ++b) at[b] = (u8)(e >> (8 * b));
}

template <>
__device__ __forceinline__ void store<u8>(u8* at, u8 e, bool) {
    *at = e;
}

// Calls `body(byte offset)` for the elements of the head and the tail that are this thread's.
template <class E, class F>
DEVICE void ends(const Span& span, F body) {
    u64 middle = span.vectors * (16 / sizeof(E));
    for (u64 i = thread(); i < span.len - middle; i += threads()) {
        body((i < span.head ? i : i + middle) * sizeof(E));
    }
}
