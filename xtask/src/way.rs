//! `cargo xtask way`: which files of ours the second `comm.all_reduce(buf).await` goes through from the call to its first post, as callgrind
//! sees it. The thread that calls also makes the first pass, and so posts. Callgrind writes down what it has counted whenever a link is about to
//! post or to lend; the first account with anything in it is the way.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::runner::{self, output, target};

/// The function in which callgrind counts (`benches/way.rs`).
const COUNTED: &str = "*second_call*";
/// The functions of a link before which callgrind writes its account. Callgrind would overlook the second pattern if both began alike.
const POSTS: [&str; 2] = ["*LinkTx>::post*", "*Tx*LinkTx>::lend"];

/// The files, over TCP and over shared memory.
///
/// # Errors
/// What does not run.
pub(crate) fn told(root: &Path) -> Result<String, String> {
    let program = built(root)?;
    let mut text = String::new();
    for link in ["tcp", "shm"] {
        let files = files_of(&counted(root, &program, link)?, root);
        text += &format!("{link}: {} files\n", files.len());
        files.iter().for_each(|file| text += &format!("    {file}\n"));
    }
    Ok(text)
}

/// Builds the program and the launcher. Returns the path of the program.
fn built(root: &Path) -> Result<PathBuf, String> {
    let mut launcher = Command::new(runner::cargo());
    output(launcher.args(["build", "--quiet", "--package", "allstream-cli"]).current_dir(root))?;
    let mut program = Command::new(runner::cargo());
    program.args(["bench", "--no-run", "--profile", "dev", "--bench", "way", "--message-format", "json"]);
    let messages = output(program.current_dir(root))?;
    let mut executables = messages.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        (message["target"]["name"] == "way").then(|| message["executable"].as_str().map(PathBuf::from))?
    });
    executables.next_back().ok_or_else(|| "cargo has built no program".into())
}

/// What callgrind counted of rank 0 over this link up to its first post, in its own format.
fn counted(root: &Path, program: &Path, link: &str) -> Result<String, String> {
    let target = target(root);
    let out = target.join(format!("way.{link}"));
    // Callgrind numbers its accounts from 1 on, and those of an earlier run may be there.
    let account = |number: usize| PathBuf::from(format!("{}.{number}", out.display()));
    (1..).map(account).take_while(|of_before| std::fs::remove_file(of_before).is_ok()).for_each(drop);
    let posts = POSTS.map(|function| format!("--dump-before='{function}'")).join(" ");
    let rank = format!(
        "if [ $RANK = 0 ]; then exec valgrind --quiet --tool=callgrind --toggle-collect='{COUNTED}' {posts} --callgrind-out-file='{}' '{program}'; else exec '{program}'; fi",
        out.display(),
        program = program.display()
    );
    let mut job = Command::new(target.join("debug").join("allstream"));
    job.args(["run", "-n", "2", "--", "sh", "-c", &rank]);
    output(job.envs([
        ("ALLSTREAM_LINK", link),
        ("ALLSTREAM_TUNING", "off"),
        ("ALLSTREAM_TRACE_DIR", "off"),
    ]))?;
    let accounts = (1..).map_while(|number| std::fs::read_to_string(account(number)).ok());
    accounts.into_iter().find(|counts| has_counts(counts)).ok_or_else(|| "callgrind has seen no post".into())
}

/// Whether anything was counted.
fn has_counts(counts: &str) -> bool {
    counts.lines().any(|line| line.strip_prefix("summary: ").is_some_and(|sum| sum.trim() != "0"))
}

/// The files of the repository in which instructions were counted, inlined ones, too.
fn files_of(counts: &str, root: &Path) -> BTreeSet<String> {
    let ours = |path: &str| {
        let path = Path::new(path).strip_prefix(root).unwrap_or(Path::new(path));
        let is_ours = ["engine", "plan", "kernels"].iter().any(|folder| path.starts_with(folder));
        is_ours.then(|| path.display().to_string())
    };
    // A file is named once, with a number, where it is first spoken of, and later by the number.
    let mut names = HashMap::new();
    let mut files = BTreeSet::new();
    let mut current = None;
    for line in counts.lines() {
        let named = line.split_once("=(").filter(|(key, _)| ["fl", "fi", "fe", "cfl", "cfi"].contains(key));
        if let Some((key, (number, name))) = named.and_then(|(key, rest)| Some((key, rest.split_once(')')?)))
        {
            if !name.is_empty() {
                names.insert(number, ours(name.trim()));
            }
            // Of a function that is called only the name is told: its own counts come under its file.
            if !key.starts_with('c') {
                current = names.get(number).cloned().flatten();
            }
        } else if line.starts_with(|c: char| c.is_ascii_digit() || "+-*".contains(c))
            && let Some(file) = &current
        {
            files.insert(file.clone());
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_counts_once_anything_is_in_it() {
        assert!(has_counts("events: Ir\nsummary: 4827\n"));
        assert!(!has_counts("events: Ir\nsummary: 0\n") && !has_counts(""));
    }

    #[test]
    fn files_are_those_with_counts_also_where_they_are_named_by_number() {
        let counts = "fl=(1) /r/engine/comm/call.rs\nfn=(1) call\n10 3\nfi=(2) /r/engine/mem/erased.rs\n+4 1\nfe=(1)\n12 5\n\
                      fl=(3) /usr/lib/rust/alloc.rs\n1 1\nfl=(4) /r/engine/unused.rs\ncfi=(5) /r/plan/src/step.rs\ncalls=1 7\nfl=(5)\n* 1\n";
        let files: Vec<_> = files_of(counts, Path::new("/r")).into_iter().collect();
        assert_eq!(files, ["engine/comm/call.rs", "engine/mem/erased.rs", "plan/src/step.rs"]);
    }
}
