//! Makes the pack's archive of a folder, and unpacks the archive of results: `archive FOLDER FILE`, `archive -x FILE FOLDER`.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;

use gpu_pack::archive;

fn unpack(file: &Path, folder: &Path) -> io::Result<()> {
    for entry in archive::read(file)? {
        let to = folder.join(&entry.name);
        fs::create_dir_all(to.parent().unwrap_or(folder))?;
        fs::write(&to, &entry.content)?;
        fs::set_permissions(
            &to,
            fs::Permissions::from_mode(if entry.is_executable { 0o755 } else { 0o644 }),
        )?;
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["-x", file, folder] => unpack(file.as_ref(), folder.as_ref()),
        [folder, file] => archive::entries(folder.as_ref())
            .and_then(|entries| archive::write(&entries, file.as_ref(), archive::SMALL))
            .map(|_| ()),
        _ => Err(io::Error::other("expected FOLDER FILE, or -x FILE FOLDER")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("archive: {}: {error}", words.join(" "));
            ExitCode::FAILURE
        }
    }
}
