//! The project's own checks (`cargo xtask house`): rules that no compiler and no linter checks.

use std::collections::BTreeMap;
use std::path::Path;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use crate::circles::{ALLOWED, circles};
use crate::documents;
use crate::files::{self, SourceFile, is_rust, syntax};
use crate::modules::{Named, named};

/// The floors of `engine/`: a module imports only from its own floor and from floors below it. `testing/`, which only tests
/// use, is on no floor: it may import from every module, and no user's build contains it.
const FLOORS: [(&str, u32); 14] = [
    ("error", 0),
    ("commands", 0),
    ("forked", 0),
    ("types", 0),
    ("trace", 0),
    ("mem", 1),
    ("link", 3),
    ("device", 3),
    ("exec", 4),
    ("device/carriers", 5),
    ("group", 5),
    ("comm", 6),
    ("tuning", 3),
    ("sim", 5),
];
/// The floor above all others.
const ROOF: (&str, u32) = ("train", 7);

/// Where `unsafe` may stand, and why it has to.
const UNSAFE: [(&str, &str); 47] = [
    ("benches/limits.rs", "times the stores that the kernels have"),
    ("ffi/", "foreign libraries"),
    ("kernels/", "vector instructions; typed views of bytes"),
    ("engine/forked.rs", "a page that a fork clears"),
    ("engine/trace/ticks.rs", "reads the processor's counter"),
    ("engine/mem/", "memory that operations own while it is in flight"),
    (
        "engine/device/",
        "calls the CUDA driver; memory that operations own while it is in flight; implements the contract of a link; calls NCCL",
    ),
    ("engine/train/pack.rs", "gradients that a device copies while buckets own them"),
    ("engine/link/mod.rs", "the contract of a link: it borrows memory by pointer"),
    ("engine/link/region.rs", "a mapping shared by processes"),
    ("engine/link/arena.rs", "buffers in that mapping"),
    ("engine/link/ring.rs", "queues in that mapping"),
    ("engine/link/cells.rs", "queues in that mapping"),
    ("engine/link/local.rs", "queues in that mapping"),
    ("engine/link/tcp.rs", "sends from memory that is in flight"),
    ("engine/link/verbs/", "calls libibverbs; memory that network cards read and write"),
    ("engine/exec/inflight.rs", "the table that owns buffers in flight"),
    ("engine/exec/filling.rs", "copies to staging slots"),
    ("engine/exec/port.rs", "calls links"),
    (
        "engine/exec/backend.rs",
        "says what copies to staging slots, and to and from those that are lent, rely on",
    ),
    ("engine/exec/host.rs", "scales and copies memory in flight, and to and from slots that are lent"),
    ("engine/exec/host/kernel.rs", "runs kernels on memory in flight, and on what peers lend"),
    ("engine/exec/run/plan_run/gather.rs", "receives into memory in flight"),
    ("engine/exec/run/small_run.rs", "copies memory in flight to a staging slot"),
    ("engine/exec/run/loan_run.rs", "names slots that are lent"),
    ("engine/exec/run/tests.rs", "lends as the host does"),
    ("engine/exec/timed.rs", "takes the place of copies, and makes none"),
    ("engine/exec/operation.rs", "names memory in flight"),
    ("engine/exec/p2p.rs", "copies messages to and from memory in flight"),
    ("engine/exec/p2p/moving.rs", "names the memory of messages"),
    ("engine/exec/p2p/whole.rs", "gives messages in flight to a library"),
    ("engine/exec/p2p/tests.rs", "posts frames as a peer would"),
    ("engine/sim/net.rs", "implements the contract of a link"),
    ("engine/group/fds.rs", "the descriptor inherited from the launcher"),
    ("engine/testing/fuzzing.rs", "hostile memory, for the fuzz targets"),
    ("engine/testing/late.rs", "writes to memory in flight, for tests, as a device does"),
    ("engine/testing/pipe.rs", "implements the contract of a link, as an example for tests"),
    ("engine/testing/slow.rs", "computes in memory in flight, for tests"),
    ("engine/testing/worker.rs", "copies memory in flight, for tests"),
    ("engine/testing/virtual_link.rs", "implements the contract of a link, for tests in virtual time"),
    ("cli/launch.rs", "between fork and exec"),
    ("cli/launch/signals.rs", "the mask of signals of a thread, and who has the terminal"),
    ("cli/perf/clock.rs", "records events with the device's time, which the engine's have not"),
    ("cli/tests/", "signals; limits of processes"),
    ("cli/doctor/", "asks the CUDA driver directly"),
    ("examples/13_gpu_overlap.rs", "launches a kernel of its own"),
    ("tests/", "buffers of their own; models of the queues; signals"),
];

/// No file is longer than this.
const LONGEST_FILE: usize = 700;
/// The folders that all other code builds on. Their files and functions have stricter limits, so that a reader can understand one as a whole.
const HEART: [&str; 4] = ["engine/exec/", "engine/link/", "engine/device/", "engine/comm/"];
const LONGEST_FILE_OF_HEART: usize = 600;
const LONGEST_FUNCTION_OF_HEART: usize = 80;
/// A check: its name, and its complaints. It passed if there are none.
pub(crate) type Check = (&'static str, Vec<String>);

/// Makes all checks.
pub(crate) fn all(root: &Path) -> Vec<Check> {
    let mut unread = Vec::new();
    let files = files::all(root, &mut unread);
    let syntax = syntax(&files, &mut unread);
    let named = named(&files, &syntax);
    let documents = documents::all(&files);
    if !named.iter().any(|named| named.from.starts_with("engine/")) {
        unread.push("engine/: no file names anything of another".into());
    }
    vec![
        ("every file can be read", unread),
        ("no floor imports one above it", floors(&files, &named)),
        ("no files import each other in a circle", circles(&named, &ALLOWED)),
        ("unsafe stands only where it may", unsafe_places(&files)),
        (
            "no file is longer than 700 lines, none of exec, link, device and comm than 600, and no function there than 80",
            sizes(&files, &syntax),
        ),
        ("no path into somebody's home", homes(&files)),
        ("links of documents lead somewhere", documents::links(root, &documents)),
        ("tests and functions that documents name are there", documents::names(&files, &documents)),
    ]
}

/// The top-level module of `engine/` that a file belongs to (or `device/carriers`); `None` if the file is not in `engine/`.
fn module(path: &str) -> Option<&str> {
    let path = path.strip_prefix("engine/")?;
    // Carriers of operations implement a trait of the executor, so they are above it; the rest of `device` is below it.
    let carriers = "device/carriers";
    if path.starts_with(carriers) {
        return Some(carriers);
    }
    Some(path.split('/').next().unwrap_or(path).trim_end_matches(".rs"))
}

fn floor(module: &str) -> Option<u32> {
    FLOORS.into_iter().chain([ROOF]).find(|(name, _)| *name == module).map(|(_, floor)| floor)
}

fn floors(files: &[SourceFile], named: &[Named<'_>]) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in files.iter().filter(is_rust) {
        let Some(module) = module(&file.path).filter(|module| !["lib", "testing"].contains(module)) else {
            continue;
        };
        if floor(module).is_none() {
            complaints
                .push(format!("{}: `{module}` is on no floor; give it one in xtask/src/house.rs", file.path));
        }
    }
    for Named { from, line, name, to, .. } in named {
        let (Some(here), Some(there)) = (module(from), module(to)) else { continue };
        let alone = here == "trace" && !["error", "trace", "types"].contains(&there);
        let above = floor(here).zip(floor(there)).is_some_and(|(here, there)| there > here);
        if above || alone && floor(there).is_some() {
            complaints.push(format!("{from}:{line}: `{here}` imports from `{there}` (`{name}`), above it"));
        }
    }
    complaints
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
        let mut lines = Vec::new();
        unsafe_lines(file.text.parse().unwrap_or_default(), &mut lines);
        complaints.extend(lines.into_iter().map(|line| {
            format!("{}:{line}: `unsafe` outside of the places for it (xtask/src/house.rs)", file.path)
        }));
    }
    complaints
}

fn unsafe_lines(tokens: TokenStream, lines: &mut Vec<usize>) {
    for token in tokens {
        match token {
            TokenTree::Ident(word) if word == "unsafe" => lines.push(word.span().start().line),
            TokenTree::Group(group) => unsafe_lines(group.stream(), lines),
            _ => {}
        }
    }
}

fn sizes(files: &[SourceFile], syntax: &BTreeMap<&str, syn::File>) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in files {
        let is_heart = HEART.iter().any(|folder| file.path.starts_with(folder)) && file.path.ends_with(".rs");
        let longest = if is_heart { LONGEST_FILE_OF_HEART } else { LONGEST_FILE };
        let lines = file.text.lines().count();
        if lines > longest {
            complaints.push(format!("{}: {lines} lines", file.path));
        }
        let mut functions = Functions::default();
        syntax
            .get(file.path.as_str())
            .filter(|_| is_heart)
            .into_iter()
            .for_each(|file| functions.visit_file(file));
        for (first, lines) in functions.0.into_iter().filter(|(_, lines)| *lines > LONGEST_FUNCTION_OF_HEART)
        {
            complaints.push(format!("{}:{first}: a function of {lines} lines", file.path));
        }
    }
    complaints
}

/// Where each function begins, and how many lines it has.
#[derive(Default)]
struct Functions(Vec<(usize, usize)>);

impl Functions {
    fn push(&mut self, signature: &syn::Signature, body: &syn::Block) {
        let first = signature.fn_token.span.start().line;
        self.0.push((first, body.brace_token.span.close().end().line - first + 1));
    }
}

impl Visit<'_> for Functions {
    fn visit_item_fn(&mut self, function: &syn::ItemFn) {
        self.push(&function.sig, &function.block);
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &syn::ImplItemFn) {
        self.push(&function.sig, &function.block);
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &syn::TraitItemFn) {
        function.default.iter().for_each(|body| self.push(&function.sig, body));
        visit::visit_trait_item_fn(self, function);
    }
}

fn homes(files: &[SourceFile]) -> Vec<String> {
    // Each is put together from two parts, so that the check does not find it in this file.
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

/// Whether `home` begins a path in the line, and is not the middle of a longer path or of an address.
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

    /// The complaints about these files of the engine.
    fn floors_of(files: &[(&str, &str)]) -> Vec<String> {
        let root = "mod comm; mod error; mod exec; mod group; mod link; mod mem; mod plan; mod trace; mod types; \
                    pub use comm::Comm as World; pub use exec::{Progress, Table};";
        let mut all = vec![file("Cargo.toml", "path = \"engine/lib.rs\""), file("engine/lib.rs", root)];
        all.extend(files.iter().map(|(path, text)| file(path, text)));
        for name in ["comm", "exec", "mem", "link"] {
            let path = format!("engine/{name}/mod.rs");
            if !files.iter().any(|(given, _)| *given == path) {
                all.push(file(&path, "mod a;"));
            }
        }
        let mut unread = Vec::new();
        let syntax = syntax(&all, &mut unread);
        assert_eq!(unread, [""; 0]);
        floors(&all, &named(&all, &syntax))
    }

    fn sizes_of(path: &str, text: &str) -> Vec<String> {
        let files = [file(path, text)];
        sizes(&files, &syntax(&files, &mut Vec::new()))
    }

    #[test]
    fn functions_are_counted_from_their_first_line_to_their_last() {
        let text = "fn one() {}\nimpl X {\n    pub(in crate::a) fn two(\n        x: u8,\n    ) -> u8 {\n        x\n    }\n}\n\
                    trait T {\n    fn three(\n        x: u8,\n    ) -> u8;\n}\n";
        let mut functions = Functions::default();
        functions.visit_file(&syn::parse_file(text).unwrap());
        assert_eq!(functions.0, [(1, 1), (3, 5)]);
        let long = format!("fn long() {{\n{}}}\n", "    go();\n".repeat(79));
        assert_eq!(sizes_of("engine/exec/a.rs", &long).len(), 1);
        assert_eq!(sizes_of("engine/group/a.rs", &long), [""; 0]);
        assert_eq!(sizes_of("engine/link/a.rs", &"//\n".repeat(601)).len(), 1);
    }

    #[test]
    fn an_import_from_above_is_found_however_it_is_written() {
        let ways = [
            "use crate::exec::Progress;",
            "use crate::{error::Error, exec::{Progress, Table}};",
            "fn f() { crate::exec::go() }",
            "use super::super::exec::Progress;",
            "use crate::Progress;",
            "use crate::exec as e; fn f() { e::go!(x) }",
            "#[cfg(test)] use crate::exec::Progress;",
        ];
        for way in ways {
            let complaints = floors_of(&[("engine/link/a.rs", way)]);
            assert!(!complaints.is_empty(), "{way}");
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
            use crate::{error::Error, link, mem::Step, types::*};
            use super::exec_like;
            pub(crate) fn f() -> &'static str { \"crate::comm::Comm\" }
            pub(in crate::exec) struct X;
        ";
        assert_eq!(floors_of(&[("engine/exec/mod.rs", text)]), [""; 0]);
        assert_eq!(floors_of(&[("engine/group/mod.rs", "use crate::exec::Progress;")]), [""; 0]);
        assert_eq!(floors_of(&[("cli/demo/mod.rs", "use crate::launch;")]), [""; 0]);
    }

    #[test]
    fn an_alias_of_the_root_is_seen_through() {
        assert_eq!(floors_of(&[("engine/mem/a.rs", "use crate::World;")]).len(), 1);
    }

    #[test]
    fn trace_stands_on_the_lowest_floor_alone() {
        assert_eq!(floors_of(&[("engine/trace.rs", "use crate::{error::Error, types::Rank};")]), [""; 0]);
        assert_eq!(floors_of(&[("engine/trace.rs", "use crate::mem::Buf;")]).len(), 1);
        assert_eq!(floors_of(&[("engine/exec/mod.rs", "use crate::trace::Recorder;")]), [""; 0]);
    }

    #[test]
    fn a_module_without_a_floor_is_found() {
        assert_eq!(floors_of(&[("engine/attic/mod.rs", "")]).len(), 1);
        assert_eq!(floors_of(&[("engine/attic.rs", "")]).len(), 1);
    }

    #[test]
    fn unsafe_is_found_outside_of_its_places() {
        let text = "// unsafe\n#![deny(unsafe_code)]\nfn f() { unsafe { g() } }";
        let complaint = "engine/group/a.rs:3: `unsafe` outside of the places for it (xtask/src/house.rs)";
        assert_eq!(unsafe_places(&[file("engine/group/a.rs", text)]), [complaint]);
        assert_eq!(
            unsafe_places(&[file("engine/mem/a.rs", text), file("engine/link/mod.rs", text)]),
            [""; 0]
        );
        assert_eq!(unsafe_places(&[file("engine/link/mod.rs.rs", text)]).len(), 1);
    }

    #[test]
    fn long_files_and_homes_are_found() {
        assert_eq!(sizes_of("a.md", &"x\n".repeat(701)).len(), 1);
        assert_eq!(sizes_of("a.md", &"x\n".repeat(700)).len(), 0);
        let home = concat!("see /ho", "me/anna/x");
        assert_eq!(homes(&[file("a.md", home)]).len(), 1);
        assert_eq!(homes(&[file("a.md", concat!("https://example.org/ho", "me/x"))]), [""; 0]);
    }
}
