//! The verbs library for tests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The variable that names the library.
pub const LIBRARY: &str = "ALLSTREAM_VERBS_LIBRARY";
/// The variable that describes its devices.
pub const HOST: &str = "ALLSTREAM_TEST_VERBS";

/// One port, over which ranks of this host reach each other.
pub const PORT: &str =
    r#"{"devices": [{"name": "test_0", "ports": [{"gids": [{"index": 1, "address": "127.0.0.1"}]}]}]}"#;

/// The variables of a process on a host that this library pretends, and that the environment says no more of.
pub fn on_host<'a>(library: &'a str, host: &'a str) -> Vec<(&'static str, &'a str)> {
    vec![
        (LIBRARY, library),
        (HOST, host),
        ("ALLSTREAM_INTERFACE", "=lo"),
        ("ALLSTREAM_RDMA_DEVICE", ""),
        ("ALLSTREAM_RDMA_GID", ""),
    ]
}

/// The variables of a rank whose links go over RDMA, by the library for tests.
pub fn env() -> Vec<(String, String)> {
    let variables = on_host(library().to_str().unwrap(), PORT);
    let all = variables.into_iter().chain([("ALLSTREAM_LINK", "rdma")]);
    all.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// The versions that the library's symbols have.
const VERSIONS: &str = include_str!("../verbs/versions.map");

/// The library.
pub fn library() -> &'static Path {
    static LINKED: OnceLock<PathBuf> = OnceLock::new();
    LINKED.get_or_init(|| linked("verbs-for-tests.so", VERSIONS))
}

/// The library as it was before rdma-core 32: without what came with version 1.11 of its symbols.
pub fn old_library() -> &'static Path {
    static LINKED: OnceLock<PathBuf> = OnceLock::new();
    LINKED.get_or_init(|| {
        linked("verbs-for-tests-old.so", VERSIONS.split("IBVERBS_1.11").next().unwrap_or_default())
    })
}

/// Links the shared library of the archive that cargo builds. By the C compiler, which Rust links with as well: rustc has a table of
/// symbols of its own for shared libraries, in which they have no versions. The file is never called `libibverbs.so.1`: cargo names its folder in
/// `LD_LIBRARY_PATH`, where every program that it starts would pick that up.
fn linked(name: &str, versions: &str) -> PathBuf {
    let archive = crate::cuda::built("verbs-for-tests", "libibverbs.a");
    let file = archive.with_file_name(name);
    // Other processes may load the library while this one makes it anew.
    let made = archive.with_file_name(format!("{name}.{}", std::process::id()));
    let map = made.with_extension("map");
    std::fs::write(&map, versions).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-Wl,-soname,libibverbs.so.1", "-Wl,--gc-sections", "-o"]).arg(&made);
    cc.arg(format!("-Wl,--version-script={}", map.display()));
    cc.arg("-Wl,--whole-archive").arg(&archive).args([
        "-Wl,--no-whole-archive",
        "-lgcc_s",
        "-lpthread",
        "-ldl",
        "-lm",
    ]);
    assert!(cc.status().unwrap().success(), "{name} does not link");
    std::fs::remove_file(&map).unwrap();
    std::fs::rename(&made, &file).unwrap();
    file
}
