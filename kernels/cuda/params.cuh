// What kernels take: one of these structs each, by value. `src/params.rs`, in this crate's folder, holds the same and tells what they mean.
// A test compares the sizes with those of the kernels' parameters.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

enum : u32 { MAX_OUTS = 8, MAX_INS = 64 };

// Where the work of one launch lies. The host sees how the pointers are aligned.
struct Span {
    // Elements before the first vector; all elements if there are no vectors.
    u64 head;
    // Vectors of 16 bytes from there on. What is left is the tail.
    u64 vectors;
    // Elements in all.
    u64 len;
    // Some pointer is not aligned for its elements: they are read and written byte by byte.
    u32 bytewise;
    u32 n_outs;
};

template <u32 INS>
struct Combine {
    Span span;
    // How many inputs there are: 2 if `INS` is 2, else 2 to `INS`, or 1 for an average that is divided.
    u32 n_ins;
    // What a sum is divided by at the end, if above 1. Other operators ignore it. Of f16 the lower 24 bits are the number of ranks, and the
    // upper 8 the exponent, as in an f32, of the power of two that operands were multiplied by: the sum is divided by the product of both.
    u32 divisor;
    u8* outs[MAX_OUTS];
    const u8* ins[INS];
};

struct Scale {
    Span span;
    double factor;
    u8* outs[MAX_OUTS];
    const u8* in;
};

// `span` counts bytes.
struct Copy {
    Span span;
    u8* outs[MAX_OUTS];
    const u8* in;
};

// A part of a contiguous buffer, and the tensor that it is packed from or unpacked to.
struct Segment {
    u8* tensor;
    // In elements, from the start of the contiguous buffer.
    u64 first;
    u64 len;
};

struct Pack {
    // In order of `first`; none overlap.
    const Segment* segments;
    u8* contiguous;
    // Elements of the contiguous buffer: no segment reaches beyond.
    u64 len;
    double factor;
    u32 count;
    // 0: tensors to the contiguous buffer; 1: back.
    u32 unpack;
};
