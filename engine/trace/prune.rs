//! Removes the flight recorders of old worlds from the default directory, so that it does not fill up. No other directory that a user has
//! named (`ALLSTREAM_TRACE_DIR`) is touched.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use super::{default_directory, directory};

/// How many worlds' files are kept: those of the worlds that have written last.
const KEPT: usize = 64;

/// Removes the files of old worlds from the default directory, when this process has written its first file there.
pub(super) fn once() {
    static DONE: AtomicBool = AtomicBool::new(false);
    let default = default_directory();
    if directory().as_ref() == Some(&default)
        && !DONE.swap(true, Ordering::Relaxed)
        && let Err(error) = prune(&default, KEPT)
    {
        tracing::debug!(%error, "old flight recorders were not removed");
    }
}

/// Removes from a directory the files of all worlds but the `kept` that have written last. Another process may do the same at this
/// time, so a file that is found may be gone when it is looked at or removed: that is no error.
fn prune(dir: &Path, kept: usize) -> io::Result<()> {
    // By the world's name: when its last file was written, and all its files.
    let mut worlds: BTreeMap<String, (SystemTime, Vec<PathBuf>)> = BTreeMap::new();
    for entry in dir.read_dir()? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some((world, _)) = name.strip_suffix(".json").and_then(|stem| stem.split_once("-rank")) else {
            continue;
        };
        let Ok(written) = entry.metadata().and_then(|about| about.modified()) else { continue };
        let files = worlds.entry(world.to_owned()).or_insert((written, Vec::new()));
        files.0 = files.0.max(written);
        files.1.push(entry.path());
    }
    let mut by_age: Vec<_> = worlds.into_values().collect();
    by_age.sort_by_key(|(written, _)| std::cmp::Reverse(*written));
    for file in by_age.into_iter().skip(kept).flat_map(|(_, files)| files) {
        let _ = std::fs::remove_file(file);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_worlds_stay_whole_and_other_files_are_not_touched() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, age: u64| {
            let file = std::fs::File::create(dir.path().join(name)).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1000 - age)).unwrap();
        };
        for (world, age) in [("aa", 3), ("bb", 1), ("cc", 2)] {
            write(&format!("{world}-rank0.json"), age);
            // An early file of a world that has written again since.
            write(&format!("{world}-rank1.json"), 10 * age);
        }
        write("notes.json", 900);
        prune(dir.path(), 2).unwrap();
        let mut left: Vec<_> = dir
            .path()
            .read_dir()
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["bb-rank0.json", "bb-rank1.json", "cc-rank0.json", "cc-rank1.json", "notes.json"]);
    }
}
