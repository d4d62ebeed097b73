//! Builds the verbs library for tests, and makes the variables of processes that use it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The variable that names the library.
pub const LIBRARY: &str = "ALLSTREAM_VERBS_LIBRARY";
/// The variable that describes the library's devices.
pub const HOST: &str = "ALLSTREAM_TEST_VERBS";

/// One device with one port, over which ranks of this host reach each other.
pub const PORT: &str =
    r#"{"devices": [{"name": "test_0", "ports": [{"gids": [{"index": 1, "address": "127.0.0.1"}]}]}]}"#;

/// Two devices with one port each, on networks of their own: links go by both.
pub const TWO_PORTS: &str = r#"{"devices": [
    {"name": "test_0", "ports": [{"gids": [{"index": 1, "address": "127.0.0.1"}]}]},
    {"name": "test_1", "ports": [{"rail": 1, "gids": [{"index": 1, "address": "127.0.0.1"}]}]}]}"#;

/// The variables of a process that uses this library with the devices of `host`. They override what the environment says of RDMA devices.
pub fn on_host<'a>(library: &'a str, host: &'a str) -> Vec<(&'static str, &'a str)> {
    vec![
        (LIBRARY, library),
        (HOST, host),
        ("ALLSTREAM_INTERFACE", "=lo"),
        ("ALLSTREAM_RDMA_DEVICE", ""),
        ("ALLSTREAM_RDMA_GID", ""),
    ]
}

/// The variables of a rank whose links use RDMA, through the library for tests, on a host such as [`PORT`].
pub fn env(host: &str) -> Vec<(String, String)> {
    let variables = on_host(library().to_str().unwrap(), host);
    let all = variables.into_iter().chain([("ALLSTREAM_LINK", "rdma")]);
    all.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// The linker's version script, which gives the library's symbols their versions.
const VERSIONS: &str = include_str!("../verbs/versions.map");

/// The path of the library.
pub fn library() -> &'static Path {
    static LINKED: OnceLock<PathBuf> = OnceLock::new();
    LINKED.get_or_init(|| linked("verbs-for-tests.so", VERSIONS))
}

/// The path of the library as it was before rdma-core 32: without the symbols of version 1.11.
pub fn old_library() -> &'static Path {
    static LINKED: OnceLock<PathBuf> = OnceLock::new();
    LINKED.get_or_init(|| {
        linked("verbs-for-tests-old.so", VERSIONS.split("IBVERBS_1.11").next().unwrap_or_default())
    })
}

/// Links the archive that cargo builds into a shared library. It calls the C compiler, with which Rust links as well, because rustc passes a version
/// script of its own, which gives symbols no versions. The file is never called `libibverbs.so.1`, because cargo puts its folder into
/// `LD_LIBRARY_PATH`, where every program that cargo starts would load it.
fn linked(name: &str, versions: &str) -> PathBuf {
    let archive = crate::cuda::built("verbs-for-tests", "libibverbs.a");
    let file = archive.with_file_name(name);
    // Made under another name first, as other processes may load the library meanwhile.
    let made = archive.with_file_name(format!("{name}.{}", std::process::id()));
    let map = archive.with_file_name(format!("{name}.{}.map", std::process::id()));
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
