//! What there is to run, as data.

use std::path::Path;
use std::time::Duration;

use crate::fuzz;
use crate::house;
use crate::kernels;
use crate::pack;
use crate::packages;
use crate::part::{OURS_ALONE, PACKAGES, Part, TOOLS, When, Work};
use crate::published;
use crate::python;
use crate::rdma;

/// Programs of tests that the core has. The full run has all: also those of devices, of the allocator, and of what tests are made of.
const CORE: [&str; 5] = ["command", "conformance", "engine", "faults", "rules"];
/// Examples that tests start.
const EXAMPLES: [&str; 4] = ["by_hand", "14_study", "15_mesh_train", "16_survive"];
/// Tests that the core leaves out, by parts of their names: each takes many seconds of two cores, or what it wants takes long to build.
const LEFT_TO_THE_FULL_RUN: [&str; 34] = [
    "agreements::tests::three_members_agree_and_one",
    "agreements::tests::three_members_agree_also",
    "crowd::a_thousand_idle_connections",
    "node::every_call_of_nodes_that_met",
    "node::every_call_of_nodes_in_processes",
    "processes::two_are_killed_one_after_the_other",
    "processes::the_coordinator_is_killed_at_any_moment",
    "processes::a_stopped_rank_is_lost_by_heartbeat",
    "train::ten_thousand_steps",
    "groups::ends::five_thousand_splits",
    "groups::many::a_hundred_groups",
    "groups::full::",
    "guests::garbage_and_wrong_tokens",
    "late::a_message_that",
    "late::memory_of_a_run",
    "kills::survivors_of_any_collective",
    "losses::a_file_system_that_hangs",
    "mismatches::every_rank_hears_of_a_mismatch_over_shared_memory",
    "links::a_data_connection",
    "links::connections_that",
    "silence::a_stopped_rank_that_wakes",
    "silence::a_job_that_is_stopped",
    "silence::a_rank_that_wakes_asks",
    "survive::",
    "examples::",
    "training::",
    "launcher::tune::",
    "launcher::ssh::",
    "launcher::others::",
    "doctor::",
    "calls::parts_from_afar",
    "costs::two_levels_on_any_hosts",
    "costs::all_reduce_is_right",
    "mutations::nothing_planted",
];

/// The option, before each of these.
fn each(option: &str, names: &[&str]) -> String {
    names.iter().map(|name| format!("{option} {name} ")).collect()
}

fn nothing(_: &Path) -> Result<(), String> {
    Ok(())
}

/// `cargo test` with `arguments`. Its programs get `of_programs`, and tell how long each test took; libtest does that only where unstable
/// features are allowed. So the programs alone get the variable that allows them, by what cargo starts them with: with the
/// variable in cargo's own environment everything would be built anew.
fn tests_of(name: &str, arguments: &str, of_programs: &str) -> Part {
    let mut part =
        cargo(name, &format!("test {arguments} -- -Zunstable-options --report-time {of_programs}"));
    if let Work::Cargo(arguments, _) = &mut part.work {
        let runner = "target.'cfg(all())'.runner = ['env', 'RUSTC_BOOTSTRAP=1']";
        arguments.splice(0..0, ["--config".into(), runner.into()]);
    }
    part
}

fn cargo(name: &str, arguments: &str) -> Part {
    Part {
        name: name.into(),
        work: Work::Cargo(arguments.split_whitespace().map(String::from).collect(), Vec::new()),
        when: When::Always,
        beside: false,
        needs: nothing,
        limit: Duration::from_secs(20 * 60),
    }
}

impl Part {
    fn core(self) -> Self {
        Self { when: When::Core, ..self }
    }

    fn beside(self) -> Self {
        Self { beside: true, ..self }
    }

    fn full(self) -> Self {
        Self { when: When::Full, ..self }
    }

    /// Four tests at a time: half of their time most of them wait for a deadline or for a process, and two cores have nothing to do.
    fn many(self) -> Self {
        self.env("RUST_TEST_THREADS", "4")
    }

    /// Everything that knows of the variable tries many more combinations in the full run: plans, agreements, conformance, faults.
    fn many_combinations(self, is_full: bool) -> Self {
        if is_full { self.env("ALLSTREAM_TEST_FULL", "1") } else { self }
    }

    fn needs(self, needs: fn(&Path) -> Result<(), String>) -> Self {
        Self { needs, ..self }
    }

    fn minutes(self, minutes: u64) -> Self {
        Self { limit: Duration::from_secs(minutes * 60), ..self }
    }

    fn env(mut self, name: &'static str, value: &str) -> Self {
        if let Work::Cargo(_, env) = &mut self.work {
            env.push((name, value.into()));
        }
        self
    }

    fn not_yet(name: &str, reason: &'static str) -> Self {
        Self { work: Work::NotYet(reason), ..cargo(name, "") }.full()
    }
}

/// The checks of the house.
pub(crate) fn house() -> Part {
    Part { work: Work::Checks(house::all), ..cargo("house", "") }
}

/// RDMA over devices of the kernel's that need no card. `is_full`: on more kernels, and what takes long.
pub(crate) fn rdma(is_full: bool) -> Part {
    let check = if is_full { rdma::check_all } else { rdma::check };
    Part { work: Work::Checks(check), ..cargo("RDMA", "") }.needs(rdma::needs)
}

/// The PTX of the CUDA kernels against their sources. Missing tools fail it.
pub(crate) fn cuda_kernels() -> Part {
    Part { work: Work::Checks(kernels::check), ..cargo("CUDA kernels", "") }
}

/// The parts of `cargo xtask test`, or of its full run.
pub(crate) fn tests(is_full: bool) -> Vec<Part> {
    let left_out = if is_full { When::Core } else { When::Full };
    all(is_full).into_iter().filter(|part| part.when != left_out).collect()
}

/// All parts, in order: what fails fast comes first. The full run has the programs of the core, and each of them tries more. They are not built as a release
/// is, which took almost twice as long (13 minutes of two cores in place of 7.5): what users build as a release is tested by Python's wheel and candle.
fn all(is_full: bool) -> Vec<Part> {
    let packages = PACKAGES;
    let (tested, integration, left) = match is_full {
        true => (format!("{packages} {TOOLS}"), "--test *".to_owned(), String::new()),
        false => (packages.to_owned(), each("--test", &CORE), each("--skip", &LEFT_TO_THE_FULL_RUN)),
    };
    // All in one, as most of the crates keep one core busy: so another is compiled beside each. Of the examples those that tests of the full run start; clippy
    // compiles the others.
    let build = match is_full {
        true => format!("build {tested} --lib --bins --tests {}", each("--example", &EXAMPLES)),
        false => format!("test --no-run {tested} --lib --bins {integration}"),
    };
    vec![
        house(),
        tests_of("xtask", "--package xtask --no-fail-fast --tests", "").full(),
        Part { work: Work::Steps(packages::for_tests), ..cargo("programs for tests", "") }.full(),
        cargo("build", &build).minutes(30),
        Part { work: Work::Steps(python::fetch_all), ..cargo("python's packages, with torch and Ray", "") }
            .needs(python::needs)
            .minutes(40)
            .beside()
            .full(),
        tests_of("unit", &format!("{tested} --no-fail-fast --lib --bins"), &left).many_combinations(is_full),
        tests_of("integration", &format!("{tested} --no-fail-fast {integration}"), &left)
            .many_combinations(is_full)
            .many()
            .needs(integration_tests)
            .minutes(if is_full { 60 } else { 20 }),
        cargo("doc tests", &format!("test {packages} --no-fail-fast --doc")),
        cuda_kernels().needs(kernels::needs).full(),
        Part { work: Work::Steps(python::all), ..cargo("python, with torch and Ray", "") }
            .needs(python::needs)
            .minutes(40)
            .full(),
        // Tests of Python mostly wait for programs that start: so what is mostly compiled runs beside them, each by one compiler at a time.
        Part { work: Work::Steps(fuzz::all), ..cargo("fuzz", "") }
            .needs(fuzz::needs)
            .minutes(60)
            .beside()
            .full(),
        // A workspace of its own, so that candle stays out of the engine's lock file.
        cargo("candle", "test --jobs 1 --manifest-path adapters/candle/Cargo.toml --no-fail-fast --release")
            .minutes(60)
            .beside()
            .full(),
        // After Python, whose torch has brought NVIDIA's NCCL along.
        tests_of("NCCL as pip has it", "--package allstream-sys --test real_nccl", "").full(),
        // After Python, from whose environment the pack's rehearsal takes its arrays of numpy and torch.
        tests_of("GPU pack's runner", "--package gpu-pack", "").full(),
        Part { work: Work::Steps(pack::prove), ..cargo("GPU pack", "") }.full(),
        Part { work: Work::Steps(pack::run), ..cargo("GPU", "") }
            .needs(pack::needs_device)
            .minutes(90)
            .full(),
        Part::not_yet(
            "devices, RDMA, Python, loom, candle, fuzzing, and tests that take long",
            "`cargo xtask test --full` has them",
        )
        .core(),
        rdma(false).full(),
    ]
}

/// What `cargo xtask ci` runs before the tests.
pub(crate) fn lints(root: &Path) -> Vec<Part> {
    vec![
        cargo("format", "fmt --all --check"),
        cargo("clippy", "clippy --workspace --all-targets --all-features -- -D warnings"),
        cargo("format, candle", "fmt --manifest-path adapters/candle/Cargo.toml --check"),
        cargo(
            "clippy, candle",
            "clippy --manifest-path adapters/candle/Cargo.toml --all-targets -- -D warnings",
        ),
        // Its types alone: with a stand-in for nvcc, which no machine of ours has.
        cargo(
            "clippy, candle on CUDA devices",
            "clippy --manifest-path adapters/candle/Cargo.toml --features cuda -- -D warnings",
        )
        .env("NVCC", &root.join("adapters/candle/nvcc-for-checks").display().to_string())
        .env("CUDARC_CUDA_VERSION", "13000")
        .env("CUDA_COMPUTE_CAP", "80"),
        cargo("format, python", "fmt --manifest-path ffi/python/Cargo.toml --check"),
        cargo(
            "clippy, python",
            "clippy --manifest-path ffi/python/Cargo.toml --all-targets --locked -- -D warnings",
        ),
        cargo("docs", &format!("doc --workspace {OURS_ALONE} --no-deps --all-features"))
            .env("RUSTDOCFLAGS", "-D warnings"),
        Part { work: Work::Steps(published::check), ..cargo("packages", "") },
    ]
}

fn integration_tests(root: &Path) -> Result<(), String> {
    let found = (root.join("tests").read_dir().into_iter().flatten().flatten())
        .any(|entry| entry.path().join("main.rs").is_file());
    if found { Ok(()) } else { Err("no tests/*/main.rs".into()) }
}
