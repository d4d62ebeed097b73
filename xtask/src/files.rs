//! Reads the files of the repository that `cargo xtask house` checks, and parses those in Rust.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Files with these endings are read.
const TEXT: [&str; 11] = ["rs", "toml", "md", "py", "sh", "cu", "cuh", "yml", "yaml", "json", "run"];
/// Directories of these names are not read, wherever they are: builds, and inputs that were found by fuzzing.
const FOREIGN: [&str; 4] = ["target", "artifacts", "corpus", "node_modules"];
/// This directory of the root is not part of the repository.
const SHARED: &str = "shared";
/// Hidden directories that are read. All other hidden directories are left out.
const HIDDEN: [&str; 2] = [".ci", ".cargo"];

/// A file of the repository: its path from the root, with slashes, and its text.
pub(crate) struct SourceFile {
    pub(crate) path: String,
    pub(crate) text: String,
}

/// All files with the endings [`TEXT`], in the order of their paths. What cannot be read goes to `unread`.
pub(crate) fn all(root: &Path, unread: &mut Vec<String>) -> Vec<SourceFile> {
    let mut files = Vec::new();
    collect(root, root, &mut files, unread);
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

/// Reads all below a folder.
fn collect(root: &Path, at: &Path, files: &mut Vec<SourceFile>, unread: &mut Vec<String>) {
    let entries = match at.read_dir() {
        Ok(entries) => entries,
        Err(error) => return unread.push(format!("{}: {error}", at.display())),
    };
    for entry in entries {
        // The type of the entry itself: symbolic links are not followed.
        let (entry, kind) = match entry.and_then(|entry| entry.file_type().map(|kind| (entry, kind))) {
            Ok(both) => both,
            Err(error) => {
                unread.push(format!("{}: {error}", at.display()));
                continue;
            }
        };
        let path: PathBuf = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        if kind.is_dir() {
            let hidden = name.starts_with('.') && !HIDDEN.contains(&name.as_str());
            // cargo marks the folder that it builds in, whatever its name.
            let built = path.join("CACHEDIR.TAG").exists();
            let foreign = built || FOREIGN.contains(&name.as_str()) || at == root && name == SHARED;
            if !hidden && !foreign {
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

/// The syntax of every file in Rust, by path. Files that do not parse go to `unread`.
pub(crate) fn syntax<'a>(files: &'a [SourceFile], unread: &mut Vec<String>) -> BTreeMap<&'a str, syn::File> {
    let mut syntax = BTreeMap::new();
    for file in files.iter().filter(is_rust) {
        match syn::parse_file(&file.text) {
            Ok(parsed) => _ = syntax.insert(file.path.as_str(), parsed),
            Err(error) => unread.push(format!("{}:{}: {error}", file.path, error.span().start().line)),
        }
    }
    syntax
}

pub(crate) fn is_rust(file: &&SourceFile) -> bool {
    file.path.ends_with(".rs")
}
