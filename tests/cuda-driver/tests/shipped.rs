//! Runs the PTX that ships: its results are to the bit those of the scalar oracle in the kernels' package, and all memory around
//! them stays as it was.
//!
//! A round tries every case once, with new random numbers. `ALLSTREAM_TEST_FULL=1`: 3 times as many rounds.
//! `ALLSTREAM_TEST_SEED=n`: the seed of the first round; a failure names the seed of its round.
#![allow(clippy::macro_metavars_in_unsafe, reason = "tests call a whole library of unsafe functions")]

#[path = "shipped/device.rs"]
mod device;
mod support;
#[path = "shipped/values.rs"]
mod values;

use std::time::Instant;

use allstream_cuda_kernels::{self as cuda, Direction, MAX_INS, MAX_OUTS, Module, Packed, Segment};
use allstream_kernels::{DType, Finish, ReduceOp, scalar};
use device::{Buffer, Device, Lie, Mistake, copies};
use support::*;
use values::Random;

/// Whether `ALLSTREAM_TEST_FULL` asks for more rounds.
fn full() -> bool {
    std::env::var("ALLSTREAM_TEST_FULL").is_ok_and(|v| !v.is_empty() && v != "0")
}

/// Makes rounds, each on a driver of its own.
fn rounds(count: u64, round: impl Fn(&mut Device, &mut Random) -> Result<(), String>) {
    let given = std::env::var("ALLSTREAM_TEST_SEED").ok().map(|seed| seed.parse::<u64>().expect("a number"));
    let (begun, mut launches) = (Instant::now(), 0);
    for index in 0..if full() { 3 * count } else { count } {
        let seed = given.unwrap_or(1).wrapping_add(index);
        let mut device = Device::new(None);
        if let Err(complaint) = round(&mut device, &mut Random::new(seed)) {
            panic!("{complaint}\nALLSTREAM_TEST_SEED={seed} repeats it");
        }
        launches += device.launches;
    }
    println!("{launches} launches in {:.1?}", begun.elapsed());
}

/// How many elements: few, so that there are only heads and tails, or enough for some vectors.
fn length(random: &mut Random, buffers: usize) -> usize {
    let most = random.pick(&[20, 200, 1000]);
    random.below(if buffers > 16 { most / 4 } else { most })
}

/// How many operands and outputs there are, and whether an output is one of the operands.
#[derive(Clone, Copy, Debug)]
struct Shape {
    ins: usize,
    outs: usize,
    in_place: bool,
}

impl Shape {
    /// Indices of operands, of outputs, and how many buffers that takes.
    fn places(self, random: &mut Random) -> (Vec<usize>, Vec<usize>, usize) {
        let mut ins: Vec<usize> = (0..self.ins).collect();
        let mut outs: Vec<usize> = (self.ins..self.ins + self.outs).collect();
        if self.in_place {
            outs[random.below(self.outs)] = random.below(self.ins);
        }
        if random.one_in(4) {
            outs[self.outs - 1] = outs[0];
        }
        if random.one_in(8) {
            ins[self.ins - 1] = 0;
        }
        (ins, outs, self.ins + self.outs)
    }

    /// Two operands and more, one output and more, in place and not; and one shape with a single operand.
    fn all(random: &mut Random) -> Vec<Shape> {
        let mut shapes = Vec::new();
        for two in [true, false] {
            for one in [true, false] {
                for in_place in [true, false] {
                    let many =
                        if random.one_in(12) { 9 + random.below(MAX_INS - 8) } else { 3 + random.below(6) };
                    let ins = if two { 2 } else { many };
                    let outs = if one { 1 } else { 2 + random.below(MAX_OUTS - 1) };
                    shapes.push(Shape { ins, outs, in_place });
                }
            }
        }
        let (in_place, outs) = (random.one_in(2), 1 + random.below(MAX_OUTS));
        shapes.push(Shape { ins: 1, outs, in_place });
        shapes
    }
}

fn addresses(buffers: &[Buffer], which: &[usize]) -> Vec<u64> {
    which.iter().map(|&index| buffers[index].address()).collect()
}

fn reduce(
    device: &mut Device,
    random: &mut Random,
    (dtype, op): (DType, ReduceOp),
    shape: Shape,
    lie: Lie,
) -> Result<(), String> {
    let (ins, outs, count) = shape.places(random);
    let len = length(random, count);
    let any = random.bits() as u32 | 1;
    let ranks = if dtype == DType::F16 { any >> 8 } else { any };
    let halved = if dtype == DType::F16 { (random.below(20)) as u8 } else { 0 };
    let finish =
        random.pick(&[None, Some(1 + any % 9), Some(ranks.max(1))]).map(|ranks| Finish { ranks, halved });
    let buffers: Vec<Buffer> = (0..count).map(|_| Buffer::new(random, dtype, len, lie)).collect();
    let (expected, at) = copies(&buffers);
    let sources: Vec<*const u8> = ins.iter().map(|&index| at[index].cast_const()).collect();
    let targets: Vec<*mut u8> = outs.iter().map(|&index| at[index]).collect();
    // SAFETY: each copy holds `len` elements from its pointer on; all are ours alone, and any two are the same or do not overlap.
    unsafe { scalar::reduce(dtype, op, &sources, &targets, len, finish) };
    let (ins, outs) = (addresses(&buffers, &ins), addresses(&buffers, &outs));
    let blocks = 1 + random.below(5) as u32;
    let launch = cuda::reduce(dtype, op, &ins, &outs, len as u64, finish, blocks).unwrap();
    let case = |e| format!("{dtype} {op}, {shape:?}, {len} elements, {lie:?}, finish {finish:?}: {e}");
    device.check(random, &launch, buffers, &expected).map_err(case)
}

/// Scales by `factor`; `None`: a copy.
fn scale(
    device: &mut Device,
    random: &mut Random,
    dtype: DType,
    factor: Option<f64>,
    shape: Shape,
    lie: Lie,
) -> Result<(), String> {
    let (_, outs, count) = shape.places(random);
    let len = length(random, count);
    let buffers: Vec<Buffer> = (0..count).map(|_| Buffer::new(random, dtype, len, lie)).collect();
    let (expected, at) = copies(&buffers);
    for &out in outs.iter().filter(|&&out| out != 0) {
        // SAFETY: each copy holds `len` elements from its pointer on, and two copies do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(at[0], at[out], len * dtype.size()) };
    }
    let mut distinct = outs.clone();
    distinct.sort_unstable();
    distinct.dedup();
    for (out, factor) in distinct.into_iter().filter_map(|out| Some((out, factor?))) {
        // SAFETY: as above; nobody else uses the copies.
        unsafe { scalar::scale(dtype, at[out], len, factor) };
    }
    let (input, outs) = (buffers[0].address(), addresses(&buffers, &outs));
    let (len, blocks) = (len as u64, 1 + random.below(5) as u32);
    let launch = match factor {
        Some(factor) => cuda::scale(dtype, input, &outs, len, factor, blocks),
        None => cuda::copy(dtype, input, &outs, len, blocks),
    };
    let case = |e| format!("{dtype} times {factor:?}, {shape:?}, {len} elements, {lie:?}: {e}");
    device.check(random, &launch.unwrap(), buffers, &expected).map_err(case)
}

/// Packs or unpacks some tensors, with gaps between them in the buffer. With `Lie::Alike` each tensor's part of the buffer also begins at a
/// multiple of 16 elements.
fn pack(
    device: &mut Device,
    random: &mut Random,
    (tensors, buffer): (DType, DType),
    direction: Direction,
    factor: f64,
    lie: Lie,
) -> Result<(), String> {
    let mut end = random.below(5);
    let mut parts = Vec::new();
    let count = if random.one_in(20) { 0 } else { 2 + random.below(8) };
    for _ in 0..count {
        let most = if random.one_in(16) { 20_000 } else { random.pick(&[2, 20, 300, 300]) };
        let aligned = matches!(lie, Lie::Alike(_));
        let (first, len) = (if aligned { end.next_multiple_of(16) } else { end }, random.below(most));
        parts.push((first, len));
        end = first + len + random.pick(&[0, 0, 3]);
    }
    let mut buffers = vec![Buffer::new(random, buffer, end, lie)];
    buffers.extend(parts.iter().map(|&(_, len)| Buffer::new(random, tensors, len, lie)));
    let (expected, at) = copies(&buffers);
    let plain = tensors == buffer && factor == 1.0;
    for (&(first, len), &tensor) in parts.iter().zip(&at[1..]) {
        // SAFETY: the buffer's copy has `end` elements, of which these are `len`, as many as the tensor's; all are ours
        // alone and apart.
        unsafe {
            let part = at[0].add(first * buffer.size());
            let ((from, source), (to, target)) = match direction {
                Direction::Pack => ((tensors, tensor), (buffer, part)),
                Direction::Unpack => ((buffer, part), (tensors, tensor)),
            };
            if plain {
                std::ptr::copy_nonoverlapping(source, target, len * to.size());
            } else {
                scalar::convert((from, source), (to, target), len, factor);
            }
        }
    }
    let (contiguous, count) = (buffers[0].address(), parts.len() as u32);
    let mut job = Packed { tensors, buffer, segments: 0, count, contiguous, len: end as u64, factor };
    let unit = job.unit();
    let table: Vec<Segment> = parts
        .iter()
        .zip(&buffers[1..])
        .map(|(&(first, len), buffer)| Segment {
            tensor: buffer.address(),
            first: first as u64 * unit,
            len: len as u64 * unit,
        })
        .collect();
    job.segments = if table.is_empty() { 0 } else { upload(&table) };
    let launch = cuda::pack(&job, direction, 1 + random.below(5) as u32).unwrap();
    let case =
        |e| format!("{direction:?}, {tensors} and {buffer}, times {factor}, {lie:?}, parts {parts:?}: {e}");
    let checked = device.check(random, &launch, buffers, &expected).map_err(case);
    if checked.is_ok() && !table.is_empty() {
        ok!(cuMemFree_v2(job.segments));
    }
    checked
}

const FACTORS: [f64; 6] = [1.0, 0.1, -2.5, 0.0, 1e10, f64::NAN];

fn reduce_all(device: &mut Device, random: &mut Random, dtypes: &[DType]) -> Result<(), String> {
    for &dtype in dtypes {
        for op in ReduceOp::ALL.into_iter().filter(|op| op.supports(dtype)) {
            for lie in Lie::all(random, dtype) {
                for shape in Shape::all(random) {
                    reduce(device, random, (dtype, op), shape, lie)?;
                }
            }
        }
    }
    Ok(())
}

/// One input: to one output and several, in place and not.
fn scale_all(
    device: &mut Device,
    random: &mut Random,
    dtypes: &[DType],
    factors: &[Option<f64>],
) -> Result<(), String> {
    for &dtype in dtypes {
        for lie in Lie::all(random, dtype) {
            for shape in Shape::all(random) {
                let shape = Shape { ins: 1, ..shape };
                let factor = random.pick(factors);
                if factor.is_none() || dtype.scales() {
                    scale(device, random, dtype, factor, shape, lie)?;
                }
            }
        }
    }
    Ok(())
}

fn pack_all(device: &mut Device, random: &mut Random, dtypes: &[DType]) -> Result<(), String> {
    for lie in [Lie::Alike(0), Lie::Elements, Lie::Bytes] {
        for direction in [Direction::Pack, Direction::Unpack] {
            for &tensors in dtypes {
                pack(device, random, (tensors, tensors), direction, 1.0, lie)?;
                for buffer in DType::ALL.into_iter().filter(|buffer| tensors.is_float() && buffer.is_float())
                {
                    let factor = random.pick(&FACTORS[usize::from(tensors == buffer)..]);
                    pack(device, random, (tensors, buffer), direction, factor, lie)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn every_reduction_is_the_oracles() {
    rounds(2, |device, random| reduce_all(device, random, &DType::ALL));
}

#[test]
fn scaling_is_the_oracles() {
    rounds(3, |device, random| scale_all(device, random, &DType::ALL, &FACTORS.map(Some)));
}

#[test]
fn copies_reach_every_output() {
    rounds(3, |device, random| scale_all(device, random, &DType::ALL, &[None]));
}

#[test]
fn packing_and_unpacking_are_the_oracles_for_every_pair_that_converts() {
    rounds(4, |device, random| pack_all(device, random, &DType::ALL));
}

/// One wrong instruction, wherever it is, makes these tests fail: tried at up to three places of each, or eight with
/// `ALLSTREAM_TEST_FULL=1`.
#[test]
fn a_wrong_instruction_is_noticed() {
    const FLOATS: &[DType] = &[DType::F16, DType::BF16, DType::F32, DType::F64, DType::F8E4M3, DType::F8E5M2];
    let mistakes: [(Module, &[DType], &str, &str); 10] = [
        (Module::F32, &[DType::F32], "add.rn.f32", "sub.rn.f32"),
        (Module::F32, &[DType::F32], "setp.lt.u64", "setp.le.u64"),
        (Module::F16, &[DType::F16], "add.rn.f32", "sub.rn.f32"),
        (Module::F64, &[DType::F64], "mul.rn.f64", "add.rn.f64"),
        (Module::I32, &[DType::I32], "min.s32", "max.s32"),
        (Module::I64, &[DType::I64, DType::U64], "div.u64", "rem.u64"),
        (Module::Bits, &[DType::Bool, DType::U8, DType::I32], "xor.b32", "or.b32"),
        (Module::Bytes, &[DType::U8, DType::I64], "st.global.u8", "st.global.u16"),
        (Module::Cast, FLOATS, "mul.rn.f32", "add.rn.f32"),
        (Module::Cast, FLOATS, "cvt.rn.f16.f32", "cvt.rz.f16.f32"),
    ];
    let (mut tried, mut missed) = (0, Vec::new());
    for (module, dtypes, from, to) in mistakes {
        let places = module.ptx().matches(from).count();
        for nth in (0..places).step_by(places.div_ceil(if full() { 8 } else { 3 })) {
            let mistake = Mistake { module, from, nth, to };
            let (mut device, mut random) = (Device::new(Some(mistake)), Random::new(1));
            let agrees = (0..4).try_for_each(|_| match module {
                Module::Cast => pack_all(&mut device, &mut random, dtypes),
                _ => reduce_all(&mut device, &mut random, dtypes)
                    .and_then(|()| scale_all(&mut device, &mut random, dtypes, &FACTORS.map(Some)))
                    .and_then(|()| scale_all(&mut device, &mut random, dtypes, &[None]))
                    .and_then(|()| pack_all(&mut device, &mut random, dtypes)),
            });
            tried += 1;
            missed.extend(agrees.is_ok().then_some(mistake));
            device.reset();
        }
    }
    println!("{tried} mistakes");
    assert!(tried >= 20 && missed.is_empty(), "{missed:#?}");
}
