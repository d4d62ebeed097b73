//! Folders as one file: `.tar.xz`, which `tar` and Python unpack.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use liblzma::read::XzDecoder;
use liblzma::write::XzEncoder;

/// How hard the pack is compressed: it is made once, and has to be small.
pub const SMALL: u32 = 9;
/// How hard results are compressed: they are written anew after every step.
pub const QUICK: u32 = 0;

/// A file in an archive, with what the archive keeps of it.
#[derive(Debug)]
pub struct Entry {
    /// Its path in the archive.
    pub name: String,
    pub content: Vec<u8>,
    pub is_executable: bool,
}

/// All regular files below a folder, by their paths from there, in order.
pub fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let (mut found, mut folders) = (Vec::new(), vec![PathBuf::new()]);
    while let Some(within) = folders.pop() {
        for entry in fs::read_dir(folder.join(&within))? {
            let entry = entry?;
            let path = within.join(entry.file_name());
            match entry.file_type()? {
                kind if kind.is_dir() => folders.push(path),
                kind if kind.is_file() => found.push(path),
                _ => {}
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The files of a folder, whole.
pub fn entries(folder: &Path) -> io::Result<Vec<Entry>> {
    let entry = |path: PathBuf| {
        let file = folder.join(&path);
        let is_executable = fs::metadata(&file)?.permissions().mode() & 0o111 != 0;
        Ok(Entry { name: path.display().to_string(), content: fs::read(file)?, is_executable })
    };
    files(folder)?.into_iter().map(entry).collect()
}

/// Writes an archive beside its place and then moves it there, so that whoever stops this finds the old one or the new one.
/// Its size in bytes.
pub fn write(entries: &[Entry], to: &Path, preset: u32) -> io::Result<u64> {
    let unfinished = to.with_extension("unfinished");
    let file = BufWriter::new(File::create(&unfinished)?);
    let mut archive = tar::Builder::new(XzEncoder::new(file, preset));
    for entry in entries {
        let mut header = tar::Header::new_gnu();
        header.set_size(entry.content.len() as u64);
        header.set_mode(if entry.is_executable { 0o755 } else { 0o644 });
        archive.append_data(&mut header, &entry.name, entry.content.as_slice())?;
    }
    let file = archive.into_inner()?.finish()?;
    file.into_inner()?.flush()?;
    fs::rename(&unfinished, to)?;
    Ok(fs::metadata(to)?.len())
}

/// The files of an archive.
pub fn read(from: &Path) -> io::Result<Vec<Entry>> {
    let mut archive = tar::Archive::new(XzDecoder::new(File::open(from)?));
    let mut entries = Vec::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = entry.path()?.display().to_string();
        let is_executable = entry.header().mode()? & 0o111 != 0;
        let mut content = Vec::new();
        entry.read_to_end(&mut content)?;
        entries.push(Entry { name, content, is_executable });
    }
    Ok(entries)
}
