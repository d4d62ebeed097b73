//! Files that import each other in a circle: none of them can be understood, tested or replaced alone.

use std::collections::{BTreeMap, BTreeSet};

use crate::house::{SourceFile, re_exports};
use crate::source::{Token, import_tree, tokens};

/// The folders of the engine whose files may not import each other in a circle; the first is the engine itself. A module and
/// its own children may know each other.
const FOLDERS: [&[&str]; 5] = [&[], &["device"], &["exec"], &["link"], &["comm"]];

/// Modules that only tests and fuzz targets have.
const FOR_TESTS: [&str; 3] = ["tests", "testing", "fuzzing"];

/// The module that a file of the engine is: `["exec", "lane"]`.
fn module(path: &str) -> Option<Vec<&str>> {
    let mut parts: Vec<&str> = path.strip_prefix("engine/")?.strip_suffix(".rs")?.split('/').collect();
    if let Some(&("mod" | "lib")) = parts.last() {
        parts.pop();
    }
    (!parts.iter().any(|part| FOR_TESTS.contains(part))).then_some(parts)
}

/// A file's tokens without the tests at its end.
fn product<'a>(tokens: &'a [Token<'a>]) -> &'a [Token<'a>] {
    let is_tests = |at: &[Token<'_>]| at[0].text == "mod" && at[1].text == "tests" && at[2].text == "{";
    let end = tokens.windows(3).position(is_tests).unwrap_or(tokens.len());
    &tokens[..end]
}

/// What a module names: paths from the engine's root, and the line.
fn named<'a>(here: &[&'a str], tokens: &[Token<'a>]) -> Vec<(Vec<&'a str>, usize)> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let text = |at: usize| tokens.get(at).map_or("", |token| token.text);
        let start = at;
        let mut base = match text(at) {
            "crate" => Vec::new(),
            "self" | "super" => here.to_vec(),
            _ => {
                at += 1;
                continue;
            }
        };
        while matches!(text(at), "crate" | "self" | "super") && text(at + 1) == "::" {
            if text(at) == "super" {
                base.pop();
            }
            at += 2;
        }
        if at == start {
            at += 1;
            continue;
        }
        let (paths, _) = import_tree(tokens, at);
        found.extend(paths.into_iter().map(|path| ([base.clone(), path].concat(), tokens[start].line)));
    }
    found
}

/// Which children of a folder import which others, and where.
type Imports = BTreeMap<String, BTreeMap<String, String>>;

fn imports(files: &[SourceFile], folder: &[&str]) -> Imports {
    let mut imports = Imports::new();
    let mut handed_on = BTreeMap::new();
    let mut children = BTreeSet::new();
    for file in files {
        match module(&file.path) {
            Some(here) if here == folder => handed_on = re_exports(&tokens(&file.text)),
            Some(here) if here.starts_with(folder) => {
                children.insert(here[folder.len()].to_string());
            }
            _ => {}
        }
    }
    for file in files {
        let Some(here) = module(&file.path).filter(|here| here.len() > folder.len()) else { continue };
        if !here.starts_with(folder) {
            continue;
        }
        let child = here[folder.len()].to_string();
        let tokens = tokens(&file.text);
        for (path, line) in named(&here, product(&tokens)) {
            let Some(name) = path.get(folder.len()).filter(|_| path.starts_with(folder)) else { continue };
            // A name that the folder only hands on counts as what it is.
            let to = children.get(*name).or_else(|| children.get(handed_on.get(*name)?));
            if let Some(to) = to.filter(|to| **to != child) {
                let place = format!("{}:{line}", file.path);
                imports.entry(child.clone()).or_default().entry(to.clone()).or_insert(place);
            }
        }
    }
    imports
}

/// All that can be reached from here by imports.
fn reached<'a>(imports: &'a Imports, from: &'a str) -> BTreeSet<&'a str> {
    let (mut all, mut rest) = (BTreeSet::new(), vec![from]);
    while let Some(next) = rest.pop() {
        if all.insert(next) {
            rest.extend(imports.get(next).into_iter().flat_map(BTreeMap::keys).map(String::as_str));
        }
    }
    all
}

/// The imports that are part of a circle.
pub(crate) fn circles(files: &[SourceFile]) -> Vec<String> {
    let mut complaints = Vec::new();
    for folder in FOLDERS {
        let imports = imports(files, folder);
        for (from, all) in &imports {
            for (to, place) in all.iter().filter(|(to, _)| reached(&imports, to).contains(from.as_str())) {
                complaints.push(format!(
                    "{place}: `{from}` imports from `{to}`, which by itself or by others imports from `{from}`"
                ));
            }
        }
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(all: &[(&str, &str)]) -> Vec<SourceFile> {
        let file = |(path, text): &(&str, &str)| SourceFile { path: (*path).into(), text: (*text).into() };
        all.iter().map(file).collect()
    }

    #[test]
    fn a_circle_is_found_whatever_way_it_takes() {
        let named = files(&[
            ("engine/exec/mod.rs", "mod a; mod b; mod c; pub(crate) use c::Last;"),
            ("engine/exec/a.rs", "use super::b::{First, Second};"),
            ("engine/exec/b/deep.rs", "fn f() { crate::exec::Last::new() }"),
            ("engine/exec/c.rs", "use super::a;"),
        ]);
        let found = circles(&named);
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[1].starts_with("engine/exec/b/deep.rs:1: `b` imports from `c`"), "{found:?}");
        let apart = files(&[
            ("engine/mem/mod.rs", "use crate::link::X;"),
            ("engine/link/mod.rs", "use crate::mem::Y;"),
        ]);
        assert_eq!(circles(&apart).len(), 2, "between folders");
    }

    #[test]
    fn children_and_tests_may_look_back() {
        let fine = files(&[
            ("engine/exec/a.rs", "mod inner; use super::b::B; use self::inner::I;"),
            ("engine/exec/a/inner.rs", "use super::A; use crate::exec::a::A;"),
            ("engine/exec/b.rs", "struct B; #[cfg(test)] mod tests { use crate::exec::a::A; }"),
            ("engine/exec/b/tests.rs", "use crate::exec::a::A;"),
        ]);
        assert_eq!(circles(&fine), [""; 0]);
    }
}
