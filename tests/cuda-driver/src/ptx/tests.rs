//! Every function against Rust's own arithmetic, and texts that are no modules.

use super::convert::{Convert, Kind, Round, narrow};
use super::{Launch, Refused, View, alu, parse, run};
use crate::codes::Code;

/// Values to compute with: corner cases first, then random ones.
fn values() -> Vec<u64> {
    let mut values = vec![0, 1, 2, 3, 7, 15, 16, 31, 32, 33, 63, 64, 255];
    for bits in [8, 15, 16, 31, 32, 63] {
        values.extend([(1 << bits) - 1, 1 << bits, (1 << bits) + 1]);
    }
    for value in [0.0_f32, 0.5, 1.5, -2.5, 1e-40, f32::MAX, f32::INFINITY, f32::NAN, 65504.0, 65520.0] {
        values.extend([
            u64::from(value.to_bits()),
            u64::from((-value).to_bits()),
            f64::from(value).to_bits(),
        ]);
    }
    let mut state = 0x1234_5678_9abc_def1_u64;
    for _ in 0..30 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        values.push(state);
    }
    values
}

/// Compares a function with one of Rust's on all pairs, in the low bits that the type has.
fn check(name: &str, bits: u32, expected: impl Fn(u64, u64, u64) -> u64) {
    let parts: Vec<&str> = name.split('.').collect();
    let run = alu::function(&parts).unwrap_or_else(|| panic!("{name} is not there"));
    let mask = u64::MAX >> (64 - bits);
    for a in values() {
        for b in values() {
            let c = a.rotate_left(17) ^ b;
            let (found, expected) = (run(a, b, c) & mask, expected(a, b, c) & mask);
            assert_eq!(found, expected, "{name} {a:#x} {b:#x} {c:#x}");
        }
    }
}

macro_rules! integers {
    ($name:literal, $($kind:literal $type:ident),*; |$a:ident, $b:ident, $c:ident| $run:expr) => {$(
        check(concat!($name, ".", $kind), $type::BITS, |$a, $b, $c| {
            let ($a, $b, $c) = ($a as $type, $b as $type, $c as $type);
            let _ = ($b, $c);
            ($run) as u64
        });
    )*};
}

#[test]
fn whole_numbers_are_rusts() {
    macro_rules! all {
        ($name:literal, |$a:ident, $b:ident, $c:ident| $run:expr) => {
            integers!($name, "u16" u16, "s16" i16, "u32" u32, "s32" i32, "u64" u64, "s64" i64; |$a, $b, $c| $run)
        };
    }
    all!("add", |a, b, c| a.wrapping_add(b));
    all!("sub", |a, b, c| a.wrapping_sub(b));
    all!("mul.lo", |a, b, c| a.wrapping_mul(b));
    all!("mad.lo", |a, b, c| a.wrapping_mul(b).wrapping_add(c));
    all!("min", |a, b, c| a.min(b));
    all!("max", |a, b, c| a.max(b));
    all!("rem", |a, b, c| if b == 0 { a } else { a.wrapping_rem(b) });
    integers!("div", "u16" u16, "u32" u32, "u64" u64; |a, b, c| a.checked_div(b).unwrap_or(!0));
    integers!("div", "s16" i16, "s32" i32, "s64" i64; |a, b, c| if b == 0 { -1 } else { a.wrapping_div(b) });
    integers!("neg", "s16" i16, "s32" i32, "s64" i64; |a, b, c| a.wrapping_neg());
    integers!("abs", "s16" i16, "s32" i32, "s64" i64; |a, b, c| a.wrapping_abs());
    integers!("and", "b16" u16, "b32" u32, "b64" u64; |a, b, c| a & b);
    integers!("or", "b16" u16, "b32" u32, "b64" u64; |a, b, c| a | b);
    integers!("xor", "b16" u16, "b32" u32, "b64" u64; |a, b, c| a ^ b);
    integers!("not", "b16" u16, "b32" u32, "b64" u64; |a, b, c| !a);
    integers!("popc", "b32" u32, "b64" u64; |a, b, c| a.count_ones());
    integers!("clz", "b32" u32, "b64" u64; |a, b, c| a.leading_zeros());
    integers!("brev", "b32" u32, "b64" u64; |a, b, c| a.reverse_bits());
    check("mul.wide.u32", 64, |a, b, _| u64::from(a as u32) * u64::from(b as u32));
    check("mul.wide.s32", 64, |a, b, _| (i64::from(a as i32) * i64::from(b as i32)) as u64);
    check("mul.hi.u64", 64, |a, b, _| ((u128::from(a) * u128::from(b)) >> 64) as u64);
    check("mul.hi.s32", 32, |a, b, _| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u64);
    // The low 32 bits of the second operand say how far; from the width of the type on, nothing is left, or only the sign.
    check("shl.b32", 32, |a, b, _| if b as u32 > 31 { 0 } else { a << (b & 31) });
    check("shl.b64", 64, |a, b, _| if b as u32 > 63 { 0 } else { a << (b & 63) });
    check("shr.u32", 32, |a, b, _| if b as u32 > 31 { 0 } else { u64::from(a as u32 >> (b & 31)) });
    check("shr.s32", 32, |a, b, _| i64::from(a as i32 >> (b as u32).min(31)) as u64);
    check("selp.b32", 32, |a, b, c| if c & 1 == 1 { a } else { b });
    check("mov.b64", 64, |a, _, _| a);
    check("bfe.u32", 32, |a, b, c| {
        let (from, length) = (b & 255, c & 255);
        (0..length.min(32)).filter(|bit| from + bit < 32).map(|bit| (a >> (from + bit) & 1) << bit).sum()
    });
    assert_eq!(alu::lookup(0b1100, 0b1010, 0b1111, 0xc0) & 15, 0b1000, "and");
}

#[test]
fn floats_are_rusts() {
    fn single(run: impl Fn(f32, f32, f32) -> f32) -> impl Fn(u64, u64, u64) -> u64 {
        move |a, b, c| {
            let value = run(f32::from_bits(a as u32), f32::from_bits(b as u32), f32::from_bits(c as u32));
            if value.is_nan() { 0x7fff_ffff } else { value.to_bits().into() }
        }
    }
    check("add.f32", 32, single(|a, b, _| a + b));
    check("add.rn.f32", 32, single(|a, b, _| a + b));
    check("sub.rn.f32", 32, single(|a, b, _| a - b));
    check("mul.rn.f32", 32, single(|a, b, _| a * b));
    check("div.rn.f32", 32, single(|a, b, _| a / b));
    check("fma.rn.f32", 32, single(f32::mul_add));
    check("sqrt.rn.f32", 32, single(|a, _, _| a.sqrt()));
    check("neg.f32", 32, |a, _, _| a ^ 0x8000_0000);
    check("abs.f32", 32, |a, _, _| a & 0x7fff_ffff);
    let flush = |a: f32| if a.is_subnormal() { 0_f32.copysign(a) } else { a };
    check("add.ftz.f32", 32, single(move |a, b, _| flush(flush(a) + flush(b))));
    check("mul.rn.ftz.f32", 32, single(move |a, b, _| flush(flush(a) * flush(b))));
    check(
        "min.f32",
        32,
        single(|a, b, _| {
            if a == b && a.is_sign_negative() {
                a
            } else if a == b {
                b
            } else {
                a.min(b)
            }
        }),
    );
    check(
        "max.f32",
        32,
        single(|a, b, _| {
            if a == b && a.is_sign_positive() {
                a
            } else if a == b {
                b
            } else {
                a.max(b)
            }
        }),
    );
    let double = |run: fn(f64, f64, f64) -> f64| {
        move |a, b, c| run(f64::from_bits(a), f64::from_bits(b), f64::from_bits(c))
    };
    for (name, expected) in [
        ("add.rn.f64", double(|a, b, _| a + b)),
        ("mul.rn.f64", double(|a, b, _| a * b)),
        ("div.rn.f64", double(|a, b, _| a / b)),
        ("fma.rn.f64", double(f64::mul_add)),
    ] {
        let run = alu::function(&name.split('.').collect::<Vec<_>>()).unwrap();
        for a in values() {
            for b in values() {
                let (found, expected) = (f64::from_bits(run(a, b, !a)), expected(a, b, !a));
                assert!(
                    found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(),
                    "{name}"
                );
            }
        }
    }
    for approximate in ["div.approx.f32", "div.f32", "sqrt.approx.ftz.f32", "add.rz.f32", "ex2.approx.f32"] {
        assert!(alu::function(&approximate.split('.').collect::<Vec<_>>()).is_none(), "{approximate}");
    }
}

#[test]
fn comparisons_are_rusts() {
    for a in values() {
        for b in values() {
            let (x, y) = (f32::from_bits(a as u32), f32::from_bits(b as u32));
            let unordered = x.is_nan() || y.is_nan();
            for (how, expected) in [
                ("lt", x < y),
                ("ge", x >= y),
                ("eq", x == y),
                ("ne", !unordered && x != y),
                ("nan", unordered),
                ("num", !unordered),
                ("gtu", unordered || x > y),
                ("equ", unordered || x == y),
                ("neu", x != y),
            ] {
                let run = alu::comparison(how, "f32", false).unwrap();
                assert_eq!(run(a, b, 0), u64::from(expected), "{how} {x} {y}");
            }
            for (how, kind, expected) in [
                ("lt", "u32", (a as u32) < b as u32),
                ("lt", "s32", (a as i32) < b as i32),
                ("ge", "s64", a as i64 >= b as i64),
                ("hi", "u64", a > b),
                ("ne", "b16", a as u16 != b as u16),
                ("le", "s16", a as i16 <= b as i16),
            ] {
                assert_eq!(
                    alu::comparison(how, kind, false).unwrap()(a, b, 0),
                    u64::from(expected),
                    "{how}.{kind}"
                );
            }
        }
    }
}

fn convert(name: &str, bits: u64) -> u64 {
    let parts: Vec<&str> = name.split('.').skip(1).collect();
    Convert::new(&parts).unwrap_or_else(|| panic!("{name} is not there")).run(bits)
}

#[test]
fn conversions_are_rusts() {
    for a in values() {
        let (single, double) = (f32::from_bits(a as u32), f64::from_bits(a));
        assert_eq!(convert("cvt.s64.s8", a), a as i8 as u64);
        assert_eq!(convert("cvt.u32.u16", a), u64::from(a as u16));
        assert_eq!(convert("cvt.sat.u8.s32", a), (a as i32).clamp(0, 255) as u64);
        assert_eq!(convert("cvt.rn.f32.u64", a), u64::from((a as f32).to_bits()));
        assert_eq!(convert("cvt.rn.f32.s32", a), u64::from((a as i32 as f32).to_bits()));
        assert_eq!(convert("cvt.rn.f64.s64", a), (a as i64 as f64).to_bits());
        assert_eq!(convert("cvt.rzi.s32.f32", a) as i32, single as i32);
        if !single.is_nan() {
            assert_eq!(convert("cvt.rni.u32.f32", a) as u32, single.round_ties_even() as u32);
            assert_eq!(convert("cvt.rmi.s64.f32", a) as i64, single.floor() as i64);
            assert_eq!(convert("cvt.f64.f32", a), f64::from(single).to_bits());
        }
        if double.is_nan() {
            assert_eq!(convert("cvt.rn.f32.f64", a), 0x7fff_ffff);
        } else {
            assert_eq!(convert("cvt.rn.f32.f64", a), u64::from((double as f32).to_bits()), "{double:e}");
        }
    }
    for (name, wrong) in
        [("cvt.f32.f64", "no rounding"), ("cvt.rn.f64.f32", "nothing to round"), ("cvt.s32.f32", "how")]
    {
        assert!(Convert::new(&name.split('.').skip(1).collect::<Vec<_>>()).is_none(), "{name}: {wrong}");
    }
}

/// All finite 16-bit floats, converted there and back; a value halfway between two neighbours goes to the even one.
#[test]
fn halves_are_exact() {
    for (to, from, name) in [(Kind::F16, "cvt.f32.f16", 0x7c00_u64), (Kind::Bf16, "cvt.f32.bf16", 0x7f80)]
        .map(|(k, n, t)| (k, n, t))
    {
        let value = |bits: u64| f64::from(f32::from_bits(convert(from, bits) as u32));
        for bits in 0..name {
            assert_eq!(narrow(value(bits), to, Round::Nearest), bits);
            assert_eq!(narrow(-value(bits), to, Round::Nearest), bits | 0x8000);
            if bits + 1 < name {
                let middle = f64::midpoint(value(bits), value(bits + 1));
                assert_eq!(narrow(middle, to, Round::Nearest), bits + (bits & 1), "{middle:e}");
                assert_eq!(narrow(middle, to, Round::Zero), bits);
                assert_eq!(narrow(middle, to, Round::Up), bits + 1);
                assert_eq!(narrow(-middle, to, Round::Down), (bits + 1) | 0x8000);
                assert_eq!(narrow(middle.next_up(), to, Round::Nearest), bits + 1);
            }
        }
        assert_eq!(narrow(f64::MAX, to, Round::Nearest), name);
        assert_eq!(narrow(f64::MAX, to, Round::Zero), name - 1);
        assert_eq!(narrow(f64::NAN, to, Round::Nearest), 0x7fff);
    }
    assert_eq!(convert("cvt.rn.f16.f32", u64::from(65520_f32.to_bits())), 0x7c00);
    assert_eq!(convert("cvt.rn.f16.f32", u64::from(65519_f32.to_bits())), 0x7bff);
    assert!(f32::from_bits(convert("cvt.f32.f16", 0x7e01) as u32).is_nan());
}

/// Runs a kernel with this body; its parameter `p` is the address of `words`. Gives how many bytes it has read and written.
fn run_on(body: &str, words: &mut [u32]) -> Result<u64, Code> {
    let text =
        format!(".version 8.1 .target sm_70 .address_size 64 .visible .entry k(.param .u64 p) {{ {body} }}");
    let module = parse(&text).unwrap_or_else(|refused| panic!("{refused:?}"));
    let (base, real, size) = (0x7000_0000_u64, words.as_mut_ptr() as usize, size_of_val(words) as u64);
    run(&Launch {
        entry: &module.entries[0],
        globals: &[],
        params: &base.to_le_bytes(),
        grid: [1, 1, 1],
        block: [1, 1, 1],
        budget: 1 << 26,
        spoiled: false,
        find: &|_| Some(View { base, size, real, memory: None }),
        wanted: &|| true,
    })
}

#[test]
fn steps_that_are_no_functions() {
    let mut words = [0x0403_0201, 5, 6, 7, 0, 0, 0, 0];
    run_on(
        "{ .reg .b64 %a; .reg .b32 %r<9>; .reg .b16 %h<3>; .reg .pred %p<4>; .local .align 4 .b8 spot[8];
           .reg .b64 %s;
           ld.param.u64 %a, [p];
           ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%a];
           mov.b32 {%h1, %h2}, %r1;
           mov.b32 %r5, {%h2, %h1};
           setp.lt.u32 %p1|%p2, %r2, %r3;
           setp.eq.and.u32 %p3, %r2, 5, !%p1;
           @%p1 add.u32 %r6, %r2, 100;
           @!%p1 add.u32 %r6, %r2, 200;
           selp.u32 %r7, 1, 2, %p3;
           mov.u64 %s, spot;
           st.local.u32 [%s+4], %r4;
           ld.local.s8 %r8, [spot+4];
           st.global.v4.u32 [%a+16], {%r5, %r6, %r7, %r8};
           ret; }",
        &mut words,
    )
    .unwrap();
    assert_eq!(words[4..], [0x0201_0403, 105, 2, 7]);
    assert_eq!(
        run_on(".reg .b64 %a; ld.param.u64 %a, [p]; st.global.u32 [%a+32], %a;", &mut words),
        Err(Code::ILLEGAL_ADDRESS)
    );
    assert_eq!(
        run_on(".reg .b64 %a; ld.param.u64 %a, [p]; st.global.u64 [%a+4], %a;", &mut words),
        Err(Code::MISALIGNED_ADDRESS)
    );
    assert_eq!(run_on(".reg .b64 %a; ld.param.u64 %a, [p+4];", &mut words), Err(Code::ILLEGAL_ADDRESS));
    assert_eq!(run_on("$l: bra $l;", &mut words), Err(Code::LAUNCH_TIMEOUT));
}

#[test]
fn a_refusal_names_the_line_and_the_word() {
    let parsed = |body: &str| {
        let text = format!(".version 8.1\n.target sm_70\n.address_size 64\n.entry k()\n{{\n{body}\n}}");
        parse(&text).err()
    };
    for (body, word) in [
        ("bar.sync 0;", "bar.sync"),
        (".reg .f32 %f<2>;\n\nex2.approx.f32 %f1, %f1;", "ex2.approx.f32"),
        ("call.uni foo;", "call.uni"),
        (".shared .align 4 .b8 s[4];", ".shared"),
        ("bra nowhere;", "nowhere"),
        ("mov.u32 %x, 1;", "%x"),
    ] {
        let Some(Refused { line, why }) = parsed(body) else { panic!("{body} is taken") };
        assert_eq!(line, 6 + body.matches('\n').count(), "{why}");
        assert!(why.contains(word), "{why}");
    }
}

/// Modules with a few bytes or words changed are taken or refused without a panic, and kernels of those that are taken come to an
/// end.
#[test]
fn garbage_is_an_error_and_never_a_panic() {
    let whole = ".version 8.1\n.target sm_70\n.global .u32 g[2] = {1, 2};\n.visible .entry k(.param .align 8 .b8 p[24])\n{\n\
        .reg .pred %p<3>;\n.reg .f32 %f<4>;\n.reg .b32 %r<5>;\n.reg .b64 %rd<5>;\nld.param.u64 %rd1, [p+8];\n\
        mov.b32 %f1, 0f3F800000;\n$l:\n@!%p1 bra $l;\nsetp.lt.and.s32 %p1|%p2, %r1, -5, !%p2;\nmov.u64 %rd2, g;\n\
        ld.global.v2.f32 {%f1, %f2}, [%rd2+-8];\nfma.rn.f32 %f3, %f1, %f2, %f1;\ncvt.rzi.s32.f32 %r2, %f3;\nret;\n}\n";
    assert!(parse(whole).is_ok());
    let words: Vec<&str> = whole.split_inclusive([' ', '\n', ',', '[', '{', '<']).collect();
    let mut state = 7_u64;
    let mut next = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % below
    };
    for round in 0..20_000 {
        let mut text = whole.to_owned();
        if round % 2 == 0 {
            let mut bytes = text.into_bytes();
            for _ in 0..=next(3) {
                let at = next(bytes.len());
                bytes[at] = next(128) as u8;
            }
            text = String::from_utf8(bytes).unwrap();
        } else {
            let mut words = words.clone();
            for _ in 0..=next(3) {
                let (a, b) = (next(words.len()), next(words.len()));
                match next(3) {
                    0 => words.swap(a, b),
                    1 => words[a] = words[b],
                    _ => words.truncate(a.max(1)),
                }
            }
            text = words.concat();
        }
        let Ok(module) = parse(&text) else { continue };
        for entry in &module.entries {
            let _ = run(&Launch {
                entry,
                globals: &[],
                params: &[],
                grid: [1, 1, 1],
                block: [2, 1, 1],
                budget: 500,
                spoiled: false,
                find: &|_| None,
                wanted: &|| true,
            });
        }
    }
}

/// Prints how fast it is: `cargo test -p cuda-driver-for-tests --release -- --nocapture speed`.
#[test]
fn speed() {
    let mut words = vec![1_u32; 8];
    let start = std::time::Instant::now();
    let steps = run_on(
        ".reg .b64 %a<3>; .reg .f32 %f<4>; .reg .b32 %r<4>; .reg .pred %p; ld.param.u64 %a1, [p]; mov.u32 %r1, 0;
         $l: ld.global.f32 %f1, [%a1]; ld.global.f32 %f2, [%a1+4]; add.rn.f32 %f3, %f1, %f2; add.s64 %a2, %a1, 8;
         st.global.f32 [%a2], %f3; add.s32 %r1, %r1, 1; setp.lt.u32 %p, %r1, 500000; @%p bra $l;",
        &mut words,
    )
    .unwrap();
    println!("{:.0} million instructions a second", steps as f64 / start.elapsed().as_secs_f64() / 1e6);
}
