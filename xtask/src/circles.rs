//! Files that import each other in a circle: none of them can be understood, tested or replaced alone.

use std::collections::{BTreeMap, BTreeSet};

use crate::modules::Named;

/// Circles that are allowed: the files of each, and the reason.
pub(crate) const ALLOWED: [(&[&str], &str); 0] = [];

/// For each file: the other files whose items it names, and for each of these files the names, each with the first line that has it.
type Imports<'a> = BTreeMap<&'a str, BTreeMap<&'a str, BTreeMap<&'a str, usize>>>;

/// All files that can be reached from the file `from` by imports.
fn reached<'a>(imports: &Imports<'a>, from: &'a str) -> BTreeSet<&'a str> {
    let (mut all, mut rest) = (BTreeSet::new(), vec![from]);
    while let Some(next) = rest.pop() {
        for to in imports.get(next).into_iter().flat_map(BTreeMap::keys) {
            if all.insert(*to) {
                rest.push(to);
            }
        }
    }
    all
}

/// Complaints: the circles that are not allowed, each with the names that its files import, and the allowed circles that no longer exist.
pub(crate) fn circles(named: &[Named<'_>], allowed: &[(&[&str], &str)]) -> Vec<String> {
    let mut imports = Imports::new();
    for Named { from, line, name, to, .. } in named.iter().filter(|named| !named.for_tests) {
        imports.entry(from).or_default().entry(to).or_default().entry(name).or_insert(*line);
    }
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        imports.keys().map(|from| (*from, reached(&imports, from))).collect();
    let circle = |file: &&str| -> BTreeSet<&str> {
        let back = |other: &&&str| reached.get(**other).is_some_and(|all| all.contains(file));
        reached[*file].iter().filter(back).copied().collect()
    };
    let all: BTreeSet<BTreeSet<&str>> =
        imports.keys().map(circle).filter(|files| !files.is_empty()).collect();
    let mut complaints = Vec::new();
    for files in &all {
        if allowed.iter().any(|(may, _)| files.iter().all(|file| may.contains(file))) {
            continue;
        }
        let mut text = format!("{} files import each other in a circle:", files.len());
        for (from, all) in imports.iter().filter(|(from, _)| files.contains(*from)) {
            for (to, names) in all.iter().filter(|(to, _)| files.contains(*to)) {
                text += &format!("\n    {from} from {to}:");
                names.iter().for_each(|(name, line)| text += &format!(" {name} ({line})"));
            }
        }
        complaints.push(text);
    }
    let is_there = |may: &[&str]| all.iter().any(|files| files.iter().all(|file| may.contains(file)));
    for (may, _) in allowed.iter().filter(|(may, _)| !is_there(may)) {
        complaints
            .push(format!("no circle any more, so take it out of xtask/src/circles.rs: {}", may.join(", ")));
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::{SourceFile, syntax};

    fn found(all: &[(&str, &str)], allowed: &[(&[&str], &str)]) -> Vec<String> {
        let file = |(path, text): &(&str, &str)| SourceFile { path: (*path).into(), text: (*text).into() };
        let mut files: Vec<SourceFile> = all.iter().map(file).collect();
        files.push(file(&("a/Cargo.toml", "[lib]\npath = \"lib.rs\"\n")));
        let mut unread = Vec::new();
        let syntax = syntax(&files, &mut unread);
        assert_eq!(unread, [""; 0]);
        circles(&crate::modules::named(&files, &syntax), allowed)
    }

    /// `x/deep.rs` needs `z.rs`, `z.rs` needs `y.rs`, and `x` re-exports `X` of `x/deep.rs`. The test gives the text of `y.rs`.
    fn with(y: &str) -> [(&str, &str); 5] {
        [
            (
                "a/lib.rs",
                "mod x; mod y; mod z; #[cfg(test)] mod tests; pub use x::X as Handed; pub use z::Z;",
            ),
            ("a/x/mod.rs", "mod deep; pub(crate) use deep::X; pub(crate) struct Own;"),
            ("a/x/deep.rs", "use crate::Z; pub(crate) struct X;"),
            ("a/z.rs", "mod inner { use crate::y::Y; } pub(crate) use crate::x::*; pub struct Z;"),
            ("a/y.rs", y),
        ]
    }

    #[test]
    fn a_circle_is_found_whatever_way_it_takes() {
        let ways = [
            "use super::x::X;",
            "use crate::{x::{self, X as _}, z};",
            "use super::x; fn f() { x::X::new() }",
            "fn f(x: &crate::x::X) {}",
            "fn f() { println!(\"{}\", 1 + super::x::X::new()) }",
            "macro_rules! x { () => { $crate::x::X } }",
            "mod inner { fn f() { super::super::x::X } }",
            "use crate::Handed;",
            "use crate::z::X;",
            "#[cfg(not(test))] use super::x::X;",
        ];
        for way in ways {
            let complaints = found(&with(way), &[]);
            let [complaint] = complaints.as_slice() else { panic!("{way}: {complaints:?}") };
            assert!(complaint.starts_with("3 files import each other"), "{way}: {complaint}");
            assert!(complaint.contains("a/x/deep.rs from a/z.rs: crate::Z (1)"), "{way}: {complaint}");
        }
        assert_eq!(found(&with("use super::z::Z;"), &[]).len(), 1, "two files alone");
    }

    #[test]
    fn a_module_and_those_below_it_may_know_each_other_and_so_may_tests() {
        let fine = [
            "use super::x::Own;",
            "pub(in crate::x) struct Y; // crate::x::X",
            "use std::mem; fn f() { mem::take(); x::X }",
            "#[cfg(test)] mod tests { use crate::x::X; }",
            "impl Y { #[cfg(any(test, feature = \"testing\"))] fn f() -> crate::x::X {} }",
        ];
        for way in fine {
            assert_eq!(found(&with(way), &[]), [""; 0], "{way}");
        }
        let kin = [
            ("a/lib.rs", "mod x; pub(crate) struct Root;"),
            ("a/x/mod.rs", "mod deep; use deep::X; use crate::Root;"),
            ("a/x/deep.rs", "use super::Own; use crate::Root; #[cfg(test)] mod tests;"),
            ("a/x/deep/tests.rs", "use crate::x::Own;"),
        ];
        assert_eq!(found(&kin, &[]), [""; 0]);
    }

    #[test]
    fn a_circle_may_be_allowed_as_long_as_there_is_one() {
        let files = with("use super::z::Z;");
        assert_eq!(found(&files, &[(&["a/y.rs", "a/z.rs"], "it has a reason")]), [""; 0]);
        assert_eq!(found(&files, &[(&["a/z.rs", "a/x/deep.rs"], "others")]).len(), 2);
        let stale = found(&with(""), &[(&["a/y.rs", "a/z.rs"], "it had a reason")]);
        assert!(stale[0].starts_with("no circle any more"), "{stale:?}");
    }
}
