//! Which libraries and versions of symbols a program needs on the machine where it will run.

use std::collections::BTreeSet;
use std::path::Path;

use object::Endianness;
use object::elf::{DT_NEEDED, FileHeader64, SHT_DYNSYM, STB_WEAK, VER_FLG_WEAK};
use object::read::elf::{FileHeader, SectionTable};

/// The newest version of glibc whose symbols a program of the pack may need.
pub(super) const GLIBC: (u32, u32) = (2, 35);
/// Libraries that every machine with glibc has. (libgcc_s comes with the C++ runtime; the versions of its symbols are not glibc's.)
const LIBRARIES: [&str; 6] =
    ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1"];

/// Complaints about a program that is to run with nothing but glibc [`GLIBC`]: other libraries, and newer symbols.
pub(super) fn complaints(file: &Path) -> Result<Vec<String>, String> {
    let data = std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let needs = Needs::of(&data).map_err(|error| format!("{}: {error}", file.display()))?;
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    Ok(needs.complaints().into_iter().map(|complaint| format!("{name} {complaint}")).collect())
}

/// The shared libraries that a program needs, and its symbols, each with the version it needs. A weak symbol may be missing, but its version may not:
/// a program does not start where a library lacks a version that it names, unless the linker has marked the version as weak, too. Weak symbols
/// are left out if that is so.
#[derive(Debug, Default, PartialEq, Eq)]
struct Needs {
    libraries: Vec<String>,
    symbols: Vec<(String, String)>,
}

impl Needs {
    fn of(data: &[u8]) -> object::Result<Needs> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let elf = FileHeader64::<Endianness>::parse(data)?;
        let endian = elf.endian()?;
        let sections = elf.sections(endian, data)?;
        let mut needs = Needs::default();
        let entries = sections.dynamic_table(endian, data)?;
        for entry in entries.iter().filter(|entry| entry.tag == DT_NEEDED) {
            needs.libraries.push(text(entries.string(entry)?));
        }
        if let Some(versions) = sections.versions(endian, data)? {
            let symbols = sections.symbols(endian, data, SHT_DYNSYM)?;
            let may_lack = weak_versions(&sections, endian, data)?;
            for (index, symbol) in symbols.enumerate() {
                let index = versions.version_index(endian, index).index();
                let may_be_missing = symbol.st_bind() == STB_WEAK && may_lack.contains(&index.0);
                let version = versions.version(index)?;
                if let Some(version) = version.filter(|version| version.file().is_some() && !may_be_missing) {
                    let name = symbols.symbol_name(endian, symbol)?;
                    needs.symbols.push((text(name), text(version.name())));
                }
            }
        }
        Ok(needs)
    }

    fn complaints(&self) -> Vec<String> {
        let known = |name: &str| LIBRARIES.contains(&name) || name.starts_with("ld-linux");
        let libraries = self.libraries.iter().filter(|name| !known(name));
        let mut complaints: Vec<String> =
            libraries.map(|name| format!("needs {name}, which a machine may not have")).collect();
        let newer = self.symbols.iter().filter(|(_, version)| glibc(version).is_some_and(|v| v > GLIBC));
        let (major, minor) = GLIBC;
        complaints.extend(
            newer.map(|(name, version)| {
                format!("needs {name} of {version}, newer than glibc {major}.{minor}")
            }),
        );
        complaints
    }
}

/// The numbers of the versions that a library may lack: those that the linker has marked as weak, as no symbol needs them but weak ones. (Many
/// linkers mark none.)
fn weak_versions(
    sections: &SectionTable<'_, FileHeader64<Endianness>>,
    endian: Endianness,
    data: &[u8],
) -> object::Result<BTreeSet<u16>> {
    let mut weak = BTreeSet::new();
    let Some((mut libraries, _)) = sections.gnu_verneed(endian, data)? else { return Ok(weak) };
    while let Some((_, mut versions)) = libraries.next()? {
        while let Some(version) = versions.next()? {
            if version.vna_flags.get(endian).contains(VER_FLG_WEAK) {
                weak.insert(version.vna_other(endian).index().0);
            }
        }
    }
    Ok(weak)
}

/// Reads (2, 35) from `GLIBC_2.35` and `GLIBC_2.35.1`. `None`: another library's version. `GLIBC_PRIVATE` counts as the newest.
fn glibc(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.strip_prefix("GLIBC_")?.split('.');
    let mut number = || numbers.next()?.parse().ok();
    Some(number().zip(number()).unwrap_or((u32::MAX, 0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_symbols_and_other_libraries_are_named() {
        let needs = Needs {
            libraries: ["libc.so.6", "libssl.so.3", "ld-linux-x86-64.so.2"].map(Into::into).to_vec(),
            symbols: [
                ("memcpy", "GLIBC_2.14"),
                ("fine", "GLIBC_2.35"),
                ("strlcpy", "GLIBC_2.38"),
                ("inside", "GLIBC_PRIVATE"),
                ("_Unwind_Resume", "GCC_3.0"),
            ]
            .map(|(name, version)| (name.into(), version.into()))
            .to_vec(),
        };
        assert_eq!(
            needs.complaints(),
            [
                "needs libssl.so.3, which a machine may not have",
                "needs strlcpy of GLIBC_2.38, newer than glibc 2.35",
                "needs inside of GLIBC_PRIVATE, newer than glibc 2.35",
            ]
        );
    }

    /// Reads this test program itself, which needs the C library and symbols with versions.
    #[test]
    fn what_a_program_needs_is_read_from_it() {
        let needs = Needs::of(&std::fs::read(std::env::current_exe().unwrap()).unwrap()).unwrap();
        assert!(needs.libraries.iter().any(|name| name == "libc.so.6"), "{needs:?}");
        let start = needs.symbols.iter().find(|(name, _)| name == "__libc_start_main");
        assert!(start.is_some_and(|(_, version)| glibc(version).is_some()), "{needs:?}");
        assert!(Needs::of(b"#!/bin/sh\n").is_err());
        // Rust's standard library names this symbol weakly, and does without it. Its version has to be there, unless the linker says otherwise.
        let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let elf = FileHeader64::<Endianness>::parse(&program[..]).unwrap();
        let endian = elf.endian().unwrap();
        let marked = weak_versions(&elf.sections(endian, &program[..]).unwrap(), endian, &program).unwrap();
        let is_listed = needs.symbols.iter().any(|(name, _)| name == "__cxa_thread_atexit_impl");
        assert!(is_listed || !marked.is_empty(), "{needs:?}");
    }
}
