use std::collections::{BTreeMap, BTreeSet};

use super::*;

/// Every kernel of a module, and the bytes of its one parameter.
fn entries(module: Module) -> BTreeMap<&'static str, usize> {
    let mut lines = module.ptx().lines();
    let mut found = BTreeMap::new();
    while let Some(line) = lines.next() {
        if let Some(name) = line.strip_prefix(".visible .entry ").and_then(|line| line.strip_suffix('(')) {
            let param = lines.next().unwrap_or_default();
            let size = param.rsplit('[').next().and_then(|size| size.strip_suffix(']')).unwrap_or_default();
            assert!(param.starts_with(".param .align 8 .b8 "), "{name}: {param}");
            assert_eq!(lines.next(), Some(")"), "{name} has one parameter");
            found.insert(name, size.parse().unwrap_or(0));
        }
    }
    found
}

fn kinds() -> Vec<Kind> {
    let folds = ReduceOp::ALL.into_iter().flat_map(|op| [Kind::FoldTwo(op), Kind::Fold(op)]);
    let casts = DType::ALL.into_iter().map(Kind::PackTo);
    folds.chain(casts).chain([Kind::Scale, Kind::Copy, Kind::PackBytes]).collect()
}

#[test]
fn what_is_supported_has_a_kernel_of_the_right_parameter_and_nothing_else_has() {
    let modules: BTreeMap<&str, _> = Module::ALL.iter().map(|m| (m.name(), entries(*m))).collect();
    let mut used = BTreeSet::new();
    for dtype in DType::ALL {
        for kind in kinds() {
            let (supported, size) = match kind {
                Kind::FoldTwo(op) => {
                    let bytes = matches!(op, ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor)
                        && dtype.size() < 4;
                    (op.supports(dtype) && dtype.size() > 1 && !bytes, size_of::<Combine<2>>())
                }
                Kind::Fold(op) => (op.supports(dtype), size_of::<Combine<MAX_INS>>()),
                Kind::Scale => (dtype.scales(), size_of::<Scale>()),
                Kind::Copy => (true, size_of::<Copy>()),
                Kind::PackTo(to) => (dtype.is_float() && to.is_float(), size_of::<Pack>()),
                Kind::PackBytes => (true, size_of::<Pack>()),
            };
            let found = kernel(dtype, kind);
            assert_eq!(found.is_some(), supported, "{dtype} {kind:?}");
            if let Some(kernel) = found {
                let (module, name, unit) = (kernel.module, kernel.name(), kernel.unit);
                assert_eq!(
                    modules[module.name()].get(name.as_str()),
                    Some(&size),
                    "{dtype} {kind:?}: {name}"
                );
                assert_eq!(dtype.size() as u64 % unit, 0, "{name}");
                used.insert(name);
            }
        }
    }
    let there: BTreeSet<String> =
        modules.values().flat_map(|m| m.keys().map(|name| name.to_string())).collect();
    assert_eq!(used, there, "every kernel is for something");
}

#[test]
fn ptx_is_for_old_drivers_and_devices_and_plain() {
    for module in Module::ALL {
        let ptx = module.ptx();
        assert!(ptx.starts_with(".version 8.1\n.target sm_70\n.address_size 64\n"), "{module:?}");
        for word in [".local", ".shared", "call", ".global .align", "fma.", "mad.", ".ftz", ".approx"] {
            assert!(!ptx.contains(word), "{module:?} has `{word}`");
        }
    }
}

/// What runs this PTX elsewhere has to know all of it.
#[test]
fn the_instructions_in_use_are_those_written_down() {
    let page = include_str!("../README.md");
    let list = page.split_once("## Instructions in use").and_then(|(_, rest)| rest.split("```").nth(1));
    let list = list.and_then(|list| list.strip_prefix("text")).unwrap_or_default();
    let listed: BTreeSet<&str> = list.split_whitespace().collect();
    let mut used = BTreeSet::new();
    for line in Module::ALL.iter().flat_map(|module| module.ptx().lines()) {
        let mut words = line.trim_end_matches(';').split(' ').skip_while(|word| word.starts_with('@'));
        let first = words.next().unwrap_or_default();
        if first.starts_with(|char: char| char.is_ascii_lowercase()) {
            used.insert(first);
        }
    }
    assert_eq!(used, listed);
}

#[test]
fn spans_see_how_addresses_lie() {
    let span = |addresses: &[u64], len, unit| {
        let span = Span::new(len, unit, 1, addresses.iter().copied());
        (span.head, span.vectors, span.bytewise)
    };
    assert_eq!(span(&[256, 512], 10, 4), (0, 2, 0));
    assert_eq!(span(&[264, 520], 10, 4), (2, 2, 0));
    assert_eq!(span(&[264, 520], 1, 4), (1, 0, 0));
    assert_eq!(span(&[264, 512], 10, 4), (10, 0, 0));
    assert_eq!(span(&[264, 514], 10, 4), (10, 0, 1));
    assert_eq!(span(&[257, 513], 10, 4), (10, 0, 1));
    assert_eq!(span(&[257, 513], 100, 1), (15, 5, 0));
    assert_eq!(span(&[8], 5, 8), (1, 2, 0));
    assert_eq!(span(&[0], 0, 8), (0, 0, 0));
}

#[test]
fn reductions_become_launches() {
    let name = |launch: Option<Launch>| launch.map(|l| (l.kernel.name(), l.blocks));
    let reduce = |dtype, op, ins: &[u64], outs: &[u64], len, finish: Option<u32>| {
        name(reduce(dtype, op, ins, outs, len, finish.map(Finish::from), 8))
    };
    let named = |text: &str, blocks| Some((text.to_string(), blocks));
    let (a, b, c) = (4096, 8192, 12288);
    assert_eq!(reduce(DType::F32, ReduceOp::Sum, &[a, b], &[a, c], 1024, None), named("combine2_f32_sum", 1));
    assert_eq!(
        reduce(DType::F32, ReduceOp::Avg, &[a, b, c], &[a], 1 << 20, Some(3)),
        named("combinen_f32_sum", 8)
    );
    assert_eq!(reduce(DType::F32, ReduceOp::Avg, &[a], &[a], 4, Some(3)), named("combinen_f32_sum", 1));
    assert_eq!(reduce(DType::F8E5M2, ReduceOp::Max, &[a, b], &[a], 4, None), named("combinen_f8e5m2_max", 1));
    assert_eq!(reduce(DType::I64, ReduceOp::Prod, &[a, b], &[a], 4, None), named("combine2_u64_prod", 1));
    assert_eq!(reduce(DType::I64, ReduceOp::BitXor, &[a, b], &[a], 4, None), named("combine2_words_bxor", 1));
    assert_eq!(reduce(DType::I16, ReduceOp::BitXor, &[a, b], &[a], 4, None), named("combinen_bytes_bxor", 1));
    assert_eq!(reduce(DType::Bool, ReduceOp::Max, &[a, b], &[a], 4, None), named("combinen_bool_bor", 1));
    // One input is copied, to what is not itself.
    assert_eq!(reduce(DType::F16, ReduceOp::Sum, &[a], &[b, a], 4, None), named("copy_bytes", 1));
    assert_eq!(reduce(DType::F32, ReduceOp::Avg, &[a], &[a], 4, Some(1)), named("copy_words", 0));
    // Nothing to do, and what cannot be done.
    assert_eq!(reduce(DType::F32, ReduceOp::Sum, &[a, b], &[a], 0, None), named("combine2_f32_sum", 0));
    assert_eq!(reduce(DType::F32, ReduceOp::BitOr, &[a, b], &[a], 4, None), None);
    assert_eq!(reduce(DType::F32, ReduceOp::Avg, &[a, b], &[a], 4, Some(0)), None);
    assert_eq!(reduce(DType::F32, ReduceOp::Sum, &[], &[a], 4, None), None);
    assert_eq!(reduce(DType::F32, ReduceOp::Sum, &[a, b], &[], 4, None), None);
    assert_eq!(reduce(DType::F32, ReduceOp::Sum, &[a, b], &[c; 9], 4, None), None);
    assert_eq!(reduce(DType::F32, ReduceOp::Sum, &[a; 65], &[c], 4, None), None);
    assert!(reduce(DType::F32, ReduceOp::Sum, &[a; 64], &[c; 8], 4, None).is_some());
}

#[test]
fn units_are_counted() {
    let launch = reduce(DType::I64, ReduceOp::BitAnd, &[4096, 8192], &[4096], 10, None, 8);
    let Some(Launch { arguments: Arguments::Two(params), .. }) = launch else { panic!("two") };
    assert_eq!((params.span.len, params.span.vectors, params.span.n_outs), (20, 5, 1));
}

#[test]
fn packing_becomes_a_launch() {
    let mut job = Packed {
        tensors: DType::F32,
        buffer: DType::BF16,
        segments: 256,
        count: 3,
        contiguous: 4096,
        len: 10_000,
        factor: 0.5,
    };
    let name = |job: &Packed, direction| pack(job, direction, 100).map(|l| (l.kernel.name(), l.blocks));
    assert_eq!(name(&job, Direction::Pack), Some(("pack_f32_bf16".into(), 2)));
    assert_eq!(name(&job, Direction::Unpack), Some(("pack_bf16_f32".into(), 2)));
    job.buffer = DType::F32;
    assert_eq!((name(&job, Direction::Pack), job.unit()), (Some(("pack_f32_f32".into(), 2)), 1));
    job.factor = 1.0;
    assert_eq!((name(&job, Direction::Pack), job.unit()), (Some(("pack_bytes".into(), 5)), 4));
    job.tensors = DType::I32;
    assert_eq!(name(&job, Direction::Pack), None);
}

#[test]
fn every_module_has_machine_code_for_the_usual_devices_and_only_for_them() {
    for module in Module::ALL {
        for major in [8, 9, 10] {
            let code = module.machine_code(major).unwrap_or_default();
            assert!(code.starts_with(b"\x7fELF"), "{} for {major}.x", module.name());
            assert_eq!(code.as_ptr().addr() % 64, 0, "a driver reads words of it");
            // The names of all its kernels are in its table of strings.
            for name in entries(*module).into_keys() {
                let name = format!("\0{name}\0");
                let found = code.windows(name.len()).any(|bytes| bytes == name.as_bytes());
                assert!(found, "{} for {major}.x has no kernel{name}", module.name());
            }
        }
        assert!([7, 11, 12].into_iter().all(|major| module.machine_code(major).is_none()));
    }
}
