// Folds of several buffers into one, which is written to several.
#pragma once
#include "access.cuh"

template <class L>
struct Accs {
    typedef Vector<typename L::Step> V;
    typename L::Acc of[V::STEPS];

    __device__ __forceinline__ void widen(const V& v) {
#pragma unroll
        for (u32 s = 0; s < V::STEPS; ++s) of[s] = L::widen(v.get(s));
    }
    template <class O>
    __device__ __forceinline__ void start() {
#pragma unroll
        for (u32 s = 0; s < V::STEPS; ++s) of[s] = Identity<O, typename L::Acc>::get();
    }
    template <class O>
    __device__ __forceinline__ void fold(const V& v) {
#pragma unroll
        for (u32 s = 0; s < V::STEPS; ++s) of[s] = O::fold(of[s], L::widen(v.get(s)));
    }
    __device__ __forceinline__ void divide(u32 n) {
#pragma unroll
        for (u32 s = 0; s < V::STEPS; ++s) of[s] = L::divide(of[s], n);
    }
    __device__ __forceinline__ V narrow() const {
        V v = {};
#pragma unroll
        for (u32 s = 0; s < V::STEPS; ++s) v.put(s, L::narrow(of[s]));
        return v;
    }
};

template <class O>
struct Divides {
    enum : bool { YES = false };
};
template <>
struct Divides<Sum> {
    enum : bool { YES = true };
};

// Everything of an element is read before anything is written: an output may be an input.

template <class L, class O, u32 INS>
DEVICE void combine_ends(const Combine<INS>& c, u32 n_ins) {
    typedef typename L::Elem E;
    bool bytewise = c.span.bytewise != 0;
    ends<E>(c.span, [&](u64 at) {
        typename L::Acc acc = Identity<O, typename L::Acc>::get();
#pragma unroll 1
        for (u32 k = 0; k < n_ins; ++k) acc = O::fold(acc, L::widen(load<E>(c.ins[k] + at, bytewise)));
        if (Divides<O>::YES && c.divisor > 1) acc = L::divide(acc, c.divisor);
        E result = (E)L::narrow(acc);
#pragma unroll 1
        for (u32 o = 0; o < c.span.n_outs; ++o) store<E>(c.outs[o] + at, result, bytewise);
    });
}

// What is in flight stands in a queue that moves up: registers cannot be indexed, and so the code for an entry is there
// once.

// `DEPTH` vectors of each input are in flight at a time.
template <class L, class O, u32 DEPTH>
DEVICE void combine_two(const Combine<2>& c) {
    typedef typename Accs<L>::V V;
    combine_ends<L, O, 2>(c, 2);
    u64 first = c.span.head * sizeof(typename L::Elem), step = threads() * 16, end = first + c.span.vectors * 16;
    u64 at = first + thread() * 16;
    while (at < end) {
        V a[DEPTH], b[DEPTH];
#pragma unroll
        for (u32 d = 0; d < DEPTH; ++d) {
            if (d == 0 || at + step * d < end) {
                a[d] = V::load(c.ins[0] + at + step * d);
                b[d] = V::load(c.ins[1] + at + step * d);
            }
        }
#pragma unroll 1
        for (u32 d = 0; d < DEPTH && at < end; ++d, at += step) {
            Accs<L> acc;
            acc.widen(a[0]);
            acc.template fold<O>(b[0]);
            if (Divides<O>::YES && c.divisor > 1) acc.divide(c.divisor);
            V result = acc.narrow();
#pragma unroll 1
            for (u32 o = 0; o < c.span.n_outs; ++o) result.store(c.outs[o] + at);
#pragma unroll
            for (u32 q = 1; q < DEPTH; ++q) {
                a[q - 1] = a[q];
                b[q - 1] = b[q];
            }
        }
    }
}

// The vectors of `DEPTH` inputs are in flight at a time.
template <class L, class O, u32 DEPTH>
DEVICE void combine_many(const Combine<MAX_INS>& c) {
    typedef typename Accs<L>::V V;
    u32 n_ins = c.n_ins;
    combine_ends<L, O, MAX_INS>(c, n_ins);
    u64 first = c.span.head * sizeof(typename L::Elem), end = first + c.span.vectors * 16;
    for (u64 at = first + thread() * 16; at < end; at += threads() * 16) {
        V next[DEPTH];
#pragma unroll
        for (u32 d = 0; d < DEPTH; ++d) {
            if (d < n_ins) next[d] = V::load(c.ins[d] + at);
        }
        Accs<L> acc;
        acc.template start<O>();
#pragma unroll 1
        for (u32 k = 0; k < n_ins; ++k) {
            V v = next[0];
#pragma unroll
            for (u32 q = 1; q < DEPTH; ++q) next[q - 1] = next[q];
            if (k + DEPTH < n_ins) next[DEPTH - 1] = V::load(c.ins[k + DEPTH] + at);
            acc.template fold<O>(v);
        }
        if (Divides<O>::YES && c.divisor > 1) acc.divide(c.divisor);
        V result = acc.narrow();
#pragma unroll 1
        for (u32 o = 0; o < c.span.n_outs; ++o) result.store(c.outs[o] + at);
    }
}

template <class L>
DEVICE void scale_one(const Scale& c) {
    typedef typename L::Elem E;
    typedef typename Accs<L>::V V;
    typename L::Acc factor = L::factor(c.factor);
    bool bytewise = c.span.bytewise != 0;
    ends<E>(c.span, [&](u64 at) {
        E result = L::narrow(L::times(L::widen(load<E>(c.in + at, bytewise)), factor));
#pragma unroll 1
        for (u32 o = 0; o < c.span.n_outs; ++o) store<E>(c.outs[o] + at, result, bytewise);
    });
    u64 first = c.span.head * sizeof(E);
    for (u64 i = thread(); i < c.span.vectors; i += threads()) {
        u64 at = first + i * 16;
        Accs<L> acc;
        acc.widen(V::load(c.in + at));
#pragma unroll
        for (u32 s = 0; s < V::STEPS; ++s) acc.of[s] = L::times(acc.of[s], factor);
        V result = acc.narrow();
#pragma unroll 1
        for (u32 o = 0; o < c.span.n_outs; ++o) result.store(c.outs[o] + at);
    }
}
