//! The house's own checks: what no compiler and no linter knows.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::circles::circles;
use crate::source::{Token, import_tree, tokens};

/// The floors of `engine/`: a module imports only from its own floor and from floors below it.
const FLOORS: [(&str, u32); 14] = [
    ("error", 0),
    ("forked", 0),
    ("types", 0),
    ("trace", 0),
    ("mem", 1),
    ("plan", 2),
    ("testing", 3),
    ("link", 3),
    ("exec", 4),
    ("group", 5),
    ("comm", 6),
    ("tuning", 3),
    ("sim", 5),
    ("fuzzing", 6),
];
/// The floor above all others.
const ROOF: (&str, u32) = ("train", 7);

/// Where `unsafe` may stand, and why it has to.
const UNSAFE: [(&str, &str); 49] = [
    ("benches/limits.rs", "times the stores that the kernels have"),
    ("ffi/", "foreign libraries"),
    ("kernels/", "vector instructions; typed views of bytes"),
    ("engine/forked.rs", "a page that a fork clears"),
    ("engine/trace/ticks.rs", "reads the processor's counter"),
    ("engine/mem/", "memory that operations own while it is in flight"),
    ("engine/train/pack.rs", "gradients that a device copies while buckets own them"),
    ("engine/link/mod.rs", "the contract of a link: it borrows memory by pointer"),
    ("engine/link/region.rs", "a mapping shared by processes"),
    ("engine/link/arena.rs", "buffers in that mapping"),
    ("engine/link/ring.rs", "queues in that mapping"),
    ("engine/link/cells.rs", "queues in that mapping"),
    ("engine/link/local.rs", "queues in that mapping"),
    ("engine/link/peer.rs", "implements the contract of a link"),
    ("engine/link/ipc.rs", "implements the contract of a link"),
    ("engine/link/tcp.rs", "sends from memory that is in flight"),
    ("engine/link/virtual_link.rs", "implements the contract of a link"),
    ("engine/link/pipe.rs", "the same, an example for tests"),
    ("engine/link/late.rs", "writes to memory in flight, for tests, as a device does"),
    ("engine/exec/inflight.rs", "the table that owns buffers in flight"),
    ("engine/exec/filling.rs", "copies to staging slots"),
    ("engine/exec/port.rs", "calls links"),
    ("engine/exec/backend.rs", "says what copies to staging slots rely on"),
    ("engine/exec/lends.rs", "says what copies to and from slots that are lent rely on"),
    ("engine/exec/cuda.rs", "puts kernels on memory in flight"),
    ("engine/exec/host.rs", "scales and copies memory in flight"),
    ("engine/exec/host/loans.rs", "copies to and from slots that are lent"),
    ("engine/exec/host/kernel.rs", "runs kernels on memory in flight, and on what peers lend"),
    ("engine/exec/run/plan_run/gather.rs", "receives into memory in flight"),
    ("engine/exec/run/loan_run.rs", "names slots that are lent"),
    ("engine/exec/run/tests.rs", "lends as the host does"),
    ("engine/exec/timed.rs", "takes the place of copies, and makes none"),
    ("engine/exec/operation.rs", "names memory in flight"),
    ("engine/exec/whole.rs", "says what libraries that take collectives whole rely on"),
    ("engine/exec/whole/slow.rs", "computes in memory in flight, for tests"),
    ("engine/exec/nccl.rs", "calls NCCL on memory in flight"),
    ("engine/exec/p2p.rs", "copies messages to and from memory in flight"),
    ("engine/exec/p2p/moving.rs", "names the memory of messages"),
    ("engine/exec/p2p/whole.rs", "gives messages in flight to a library"),
    ("engine/exec/p2p/tests.rs", "posts frames as a peer would"),
    ("engine/sim/net.rs", "implements the contract of a link"),
    ("engine/group/fds.rs", "the descriptor inherited from the launcher"),
    ("engine/fuzzing.rs", "hostile memory, for the fuzz targets"),
    ("cli/launch.rs", "between fork and exec"),
    ("cli/launch/signals.rs", "the mask of signals of a thread, and who has the terminal"),
    ("cli/perf/device.rs", "records events with the device's time, which the engine's have not"),
    ("cli/doctor/", "asks the CUDA driver directly"),
    ("examples/13_gpu_overlap.rs", "launches a kernel of its own"),
    ("tests/", "buffers of their own; models of the queues; signals"),
];

/// No file is longer than this.
const LONGEST_FILE: usize = 700;
/// Where everything attaches: nobody changes what does not fit in the head at once. Files and functions are shorter there.
const HEART: [&str; 3] = ["engine/exec/", "engine/link/", "engine/comm/"];
const LONGEST_FILE_OF_HEART: usize = 600;
const LONGEST_FUNCTION_OF_HEART: usize = 80;
/// Files with these endings are read.
const TEXT: [&str; 11] = ["rs", "toml", "md", "py", "sh", "cu", "cuh", "yml", "yaml", "json", "run"];
/// Directories that are not the repository's.
const FOREIGN: [&str; 5] = ["target", "shared", "artifacts", "corpus", "node_modules"];
/// Hidden directories that are.
const HIDDEN: [&str; 2] = [".ci", ".cargo"];

/// A file of the repository: its path from the root, with slashes, and its text.
pub(crate) struct SourceFile {
    pub(crate) path: String,
    pub(crate) text: String,
}

/// A check: its name, and what it complains about.
pub(crate) type Check = (&'static str, Vec<String>);

/// Makes all checks.
pub(crate) fn all(root: &Path) -> Vec<Check> {
    let mut files = Vec::new();
    let mut unread = Vec::new();
    collect(root, root, &mut files, &mut unread);
    files.sort_by(|a, b| a.path.cmp(&b.path));
    if !files.iter().any(|file| file.path == "engine/lib.rs") {
        unread.push("engine/lib.rs is not there".into());
    }
    vec![
        ("every file can be read", unread),
        ("no floor imports one above it", floors(&files)),
        ("no files of a folder import each other in a circle", circles(&files)),
        ("unsafe stands only where it may", unsafe_places(&files)),
        (
            "no file is longer than 700 lines, none of exec, link and comm than 600, and no function there than 80",
            sizes(&files),
        ),
        ("no path into somebody's home", homes(&files)),
    ]
}

fn collect(root: &Path, at: &Path, files: &mut Vec<SourceFile>, unread: &mut Vec<String>) {
    let entries = match at.read_dir() {
        Ok(entries) => entries,
        Err(error) => return unread.push(format!("{}: {error}", at.display())),
    };
    for entry in entries.flatten() {
        let path: PathBuf = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        // Of the entry itself: links are not followed.
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            let hidden = name.starts_with('.') && !HIDDEN.contains(&name.as_str());
            if !hidden && !FOREIGN.contains(&name.as_str()) {
                collect(root, &path, files, unread);
            }
        } else if kind.is_file() && TEXT.contains(&name.rsplit('.').next().unwrap_or_default()) {
            match fs::read_to_string(&path) {
                Ok(text) => {
                    let path = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().replace('\\', "/");
                    files.push(SourceFile { path, text });
                }
                Err(error) => unread.push(format!("{}: {error}", path.display())),
            }
        }
    }
}

fn is_rust(file: &&SourceFile) -> bool {
    file.path.ends_with(".rs")
}

/// The module of the engine's root that a file belongs to; `None` if the file is no part of the engine.
fn module(path: &str) -> Option<&str> {
    let path = path.strip_prefix("engine/")?;
    Some(path.split('/').next().unwrap_or(path).trim_end_matches(".rs"))
}

fn floor(module: &str) -> Option<u32> {
    FLOORS.into_iter().chain([ROOF]).find(|(name, _)| *name == module).map(|(_, floor)| floor)
}

fn floors(files: &[SourceFile]) -> Vec<String> {
    let mut complaints = Vec::new();
    let root_names = files.iter().find(|file| file.path == "engine/lib.rs");
    let root_names = root_names.map(|file| re_exports(&tokens(&file.text))).unwrap_or_default();
    for file in files.iter().filter(is_rust) {
        let Some(module) = module(&file.path).filter(|module| *module != "lib") else { continue };
        let Some(here) = floor(module) else {
            complaints
                .push(format!("{}: `{module}` is on no floor; give it one in xtask/src/house.rs", file.path));
            continue;
        };
        for (name, line) in root_imports(&tokens(&file.text)) {
            // A name that the root only hands on counts as what it is.
            let from =
                if floor(name).is_some() { Some(name) } else { root_names.get(name).map(String::as_str) };
            let Some(from) = from.filter(|from| *from != module) else { continue };
            let alone = module == "trace" && !["error", "types"].contains(&from);
            if floor(from).is_some_and(|there| there > here) || alone {
                let via = if from == name { String::new() } else { format!(" (`crate::{name}`)") };
                complaints
                    .push(format!("{}:{line}: `{module}` imports from `{from}`{via}, above it", file.path));
            }
        }
    }
    complaints
}

/// Names that the root of the engine re-exports, and the module each is from.
pub(crate) fn re_exports(tokens: &[Token<'_>]) -> BTreeMap<String, String> {
    let mut names = BTreeMap::new();
    for at in (0..tokens.len()).filter(|at| tokens[*at].text == "use") {
        let (paths, end) = import_tree(tokens, at + 1);
        for path in paths {
            let path: Vec<&str> =
                path.into_iter().skip_while(|part| matches!(*part, "crate" | "self")).collect();
            if let (Some(from), Some(name)) = (path.first(), path.last()) {
                names.insert((*name).to_string(), (*from).to_string());
            }
        }
        // `use a::b as c;`: inside braces the old name is good enough, for a type seldom gets another one.
        if let (Some("as"), Some(alias)) = (tokens.get(end).map(|token| token.text), tokens.get(end + 1)) {
            let last = tokens.get(end - 1).and_then(|last| names.get(last.text).cloned());
            names.extend(last.map(|from| (alias.text.to_string(), from)));
        }
    }
    names
}

/// What is imported from the crate's root: the first name behind `crate::` or behind two and more `super::`, in imports
/// and in the middle of code, and the line.
fn root_imports<'a>(tokens: &[Token<'a>]) -> Vec<(&'a str, usize)> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let start = at;
        let text = |at: usize| tokens.get(at).map_or("", |token| token.text);
        let supers =
            (0..).take_while(|step| text(start + 2 * step) == "super" && text(start + 2 * step + 1) == "::");
        at += 2 * supers.count();
        let from_root = if at == start {
            // `pub(crate)` and `$crate` are no paths of ours.
            let from_root = text(at) == "crate" && text(at + 1) == "::";
            at += if from_root { 2 } else { 1 };
            from_root
        } else {
            at - start >= 4
        };
        if from_root {
            let line = tokens[start].line;
            let (paths, _) = import_tree(tokens, at);
            found.extend(paths.into_iter().filter_map(|path| Some((*path.first()?, line))));
        }
    }
    found.dedup();
    found
}

fn unsafe_places(files: &[SourceFile]) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in files.iter().filter(is_rust) {
        if UNSAFE
            .iter()
            .any(|(place, _)| file.path == *place || place.ends_with('/') && file.path.starts_with(place))
        {
            continue;
        }
        let found = tokens(&file.text).into_iter().filter(|token| token.text == "unsafe");
        complaints.extend(found.map(|token| {
            format!(
                "{}:{}: `unsafe` outside of the places for it (xtask/src/house.rs)",
                file.path, token.line
            )
        }));
    }
    complaints
}

fn sizes(files: &[SourceFile]) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in files {
        let is_heart = HEART.iter().any(|folder| file.path.starts_with(folder)) && file.path.ends_with(".rs");
        let longest = if is_heart { LONGEST_FILE_OF_HEART } else { LONGEST_FILE };
        let lines = file.text.lines().count();
        if lines > longest {
            complaints.push(format!("{}: {lines} lines", file.path));
        }
        for (first, lines) in functions(&file.text).into_iter().filter(|_| is_heart) {
            if lines > LONGEST_FUNCTION_OF_HEART {
                complaints.push(format!("{}:{first}: a function of {lines} lines", file.path));
            }
        }
    }
    complaints
}

/// The functions with a body of more than one line: where each begins, and how many lines it has. Of files as rustfmt leaves them.
fn functions(text: &str) -> Vec<(usize, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (i, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let before = ["pub", "const ", "async ", "unsafe ", "extern "];
        let is_function = code.starts_with("fn ")
            || (code.contains(" fn ") && before.iter().any(|word| code.starts_with(word)));
        if !is_function || code.ends_with(['}', ';']) {
            continue;
        }
        let indent = &line[..line.len() - code.len()];
        // A declaration ends with a semicolon, a body with a brace, below where it began.
        let ends = |line: &&str| {
            line.strip_prefix(indent).is_some_and(|rest| {
                rest == "}" || rest.starts_with(") -> ") && rest.ends_with(';') || rest == ");"
            })
        };
        if let Some(length) = lines[i + 1..].iter().position(ends) {
            found.push((i + 1, length + 2));
        }
    }
    found
}

fn homes(files: &[SourceFile]) -> Vec<String> {
    // Put together, so that this file does not complain about itself.
    let homes =
        [concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/Us", "ers/"), concat!("C:", "\\Users\\")];
    let mut complaints = Vec::new();
    for file in files {
        for (number, line) in file.text.lines().enumerate() {
            if let Some(home) = homes.iter().find(|home| absolute(line, home)) {
                complaints.push(format!("{}:{}: `{home}`", file.path, number + 1));
            }
        }
    }
    complaints
}

/// Whether the path stands there by itself, not as the middle of a longer one or of an address.
fn absolute(line: &str, home: &str) -> bool {
    line.match_indices(home).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        before.is_none_or(|char| !(char.is_alphanumeric() || matches!(char, '.' | '-' | '_' | '~' | '}')))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile { path: path.into(), text: text.into() }
    }

    #[test]
    fn functions_are_counted_from_their_first_line_to_their_last() {
        let text = "fn one() {}\nimpl X {\n    pub(in crate::a) fn two(\n        x: u8,\n    ) -> u8 {\n        x\n    }\n}\n\
                    trait T {\n    fn three(\n        x: u8,\n    ) -> u8;\n}\n";
        assert_eq!(functions(text), [(3, 5), (10, 3)]);
        let long = format!("fn long() {{\n{}}}\n", "    go();\n".repeat(79));
        assert_eq!(sizes(&[file("engine/exec/a.rs", &long)]).len(), 1);
        assert_eq!(sizes(&[file("engine/plan/a.rs", &long)]), [""; 0]);
        assert_eq!(sizes(&[file("engine/link/a.rs", &"x\n".repeat(601))]).len(), 1);
    }

    #[test]
    fn an_import_from_above_is_found_however_it_is_written() {
        let ways = [
            "use crate::exec::Progress thread;",
            "use crate::{error::Error, exec::{Progress thread, Table}};",
            "use crate::{\n    exec,\n};",
            "fn f() { crate::exec::go() }",
            "use super::super::exec::Progress thread;",
            "use crate::Progress thread;",
            "pub(crate) use crate::exec as e;",
        ];
        for way in ways {
            let files = [
                file("engine/lib.rs", "mod exec; pub use exec::{Progress thread, Table};"),
                file("engine/link/a.rs", way),
            ];
            let complaints = floors(&files);
            assert_eq!(complaints.len(), 1, "{way}: {complaints:?}");
            assert!(
                complaints[0].starts_with("engine/link/a.rs:1: `link` imports from `exec`"),
                "{complaints:?}"
            );
        }
    }

    #[test]
    fn imports_from_below_and_mentions_are_fine() {
        let text = "
            //! Like [`crate::comm::Comm`].
            use crate::{error::Error, link, plan::Step, types::*};
            use super::exec_like;
            pub(crate) fn f() -> &'static str { \"crate::comm::Comm\" }
            pub(in crate::exec) struct X;
        ";
        assert_eq!(floors(&[file("engine/exec/mod.rs", text)]), [""; 0]);
        assert_eq!(floors(&[file("engine/group/mod.rs", "use crate::exec::Progress thread;")]), [""; 0]);
        assert_eq!(floors(&[file("cli/demo/mod.rs", "use crate::launch;")]), [""; 0]);
    }

    #[test]
    fn an_alias_of_the_root_is_seen_through() {
        let files = [
            file("engine/lib.rs", "pub use comm::Comm as World;"),
            file("engine/plan/a.rs", "use crate::World;"),
        ];
        assert_eq!(floors(&files).len(), 1);
    }

    #[test]
    fn trace_stands_on_the_lowest_floor_alone() {
        assert_eq!(floors(&[file("engine/trace.rs", "use crate::{error::Error, types::Rank};")]), [""; 0]);
        assert_eq!(floors(&[file("engine/trace.rs", "use crate::mem::Buf;")]).len(), 1);
        assert_eq!(floors(&[file("engine/exec/mod.rs", "use crate::trace::Recorder;")]), [""; 0]);
    }

    #[test]
    fn a_module_without_a_floor_is_found() {
        assert_eq!(floors(&[file("engine/attic/mod.rs", "")]).len(), 1);
        assert_eq!(floors(&[file("engine/attic.rs", "")]).len(), 1);
    }

    #[test]
    fn unsafe_is_found_outside_of_its_places() {
        let text = "// unsafe\n#![deny(unsafe_code)]\nfn f() { unsafe { g() } }";
        let complaint = "engine/plan/a.rs:3: `unsafe` outside of the places for it (xtask/src/house.rs)";
        assert_eq!(unsafe_places(&[file("engine/plan/a.rs", text)]), [complaint]);
        assert_eq!(
            unsafe_places(&[file("engine/mem/a.rs", text), file("engine/link/mod.rs", text)]),
            [""; 0]
        );
        assert_eq!(unsafe_places(&[file("engine/link/mod.rs.rs", text)]).len(), 1);
    }

    #[test]
    fn long_files_and_homes_are_found() {
        assert_eq!(sizes(&[file("a.md", &"x\n".repeat(701))]).len(), 1);
        assert_eq!(sizes(&[file("a.md", &"x\n".repeat(700))]).len(), 0);
        let home = concat!("see /ho", "me/anna/x");
        assert_eq!(homes(&[file("a.md", home)]).len(), 1);
        assert_eq!(homes(&[file("a.md", concat!("https://example.org/ho", "me/x"))]), [""; 0]);
    }
}
