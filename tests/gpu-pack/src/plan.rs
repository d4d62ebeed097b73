//! The steps, what tells most first.
//!
//! A stage has a time by which it is to be over, counted from the beginning of the pack. A step that would begin later than that
//! is put off, and comes after the last stage if there is time left: so a stage that takes too long does not take it all.

use std::path::PathBuf;
use std::time::Duration;

use crate::machine::{LIBRARY, Machine};

/// A group of steps, and by which second it is to be over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    pub name: &'static str,
    pub until: u64,
    pub what: &'static str,
}

const fn stage(name: &'static str, until: u64, what: &'static str) -> Stage {
    Stage { name, until, what }
}

const DOCTOR: Stage =
    stage("doctor", 45, "`allstream doctor --device`: what the driver does where it was in doubt");
const SHORT: Stage = stage(
    "short",
    110,
    "conformance, every seventh case: 2 threads, 2 processes; each must take the path of peers",
);
const TABLES: Stage = stage(
    "tables",
    230,
    "nccl-tests' tables: 2, 4 and 8 threads, 2 threads joined, 2 processes; above each, how fast the device copies",
);
const OTHERS: Stage = stage(
    "others",
    310,
    "the machine's NCCL with one rank; torch's and cupy's arrays in Python; cudarc's memory; the examples",
);
const COUNTERS: Stage = stage("counters", 355, "ncu on one fold: bytes, bandwidth");
const FULL: Stage =
    stage("full", 480, "conformance, every case: 1, 2, 4 and 8 threads and processes, and 3 threads staged");
const MORE: Stage =
    stage("more", 560, "under MPS, staged, with fewer blocks, other collectives, 16 bits, compute-sanitizer");
const NCCL: Stage = stage("nccl", 400, "two ranks of NCCL on the one GPU, by the library in the pack");

/// All stages of the pack, and of the one that brings NCCL along.
pub const STAGES: [Stage; 7] = [DOCTOR, SHORT, TABLES, OTHERS, COUNTERS, FULL, MORE];
pub const STAGES_NCCL: [Stage; 2] = [DOCTOR, NCCL];

/// When a step counts as passed, beside an exit code of 0.
#[derive(Clone, Debug)]
pub enum Proof {
    /// Its log has these texts.
    Says(Vec<&'static str>),
    /// A tool of NVIDIA's that does not work on every machine: it is skipped where it ends otherwise, but with this exit
    /// code, by which it says that it has found something.
    Tool { finds: Option<i32> },
}

/// A program to run.
#[derive(Clone, Debug)]
pub struct Step {
    pub name: String,
    pub stage: Stage,
    pub limit: Duration,
    pub program: PathBuf,
    pub arguments: Vec<String>,
    pub variables: Vec<(String, String)>,
    pub proof: Proof,
    /// Its log is a table, and it writes the figures to a file by `-J`.
    pub is_table: bool,
    /// It runs under NVIDIA's Multi-Process Service.
    pub by_mps: bool,
    /// Why it cannot run here, if it cannot.
    pub lacks: Option<String>,
}

impl Step {
    fn new(name: &str, stage: Stage, seconds: u64, program: PathBuf, arguments: &[&str]) -> Step {
        Step {
            name: name.into(),
            stage,
            limit: Duration::from_secs(seconds),
            program,
            arguments: arguments.iter().map(|text| (*text).to_owned()).collect(),
            variables: Vec::new(),
            proof: Proof::Says(Vec::new()),
            is_table: false,
            by_mps: false,
            lacks: None,
        }
    }

    fn with(mut self, name: &str, value: impl Into<String>) -> Step {
        self.variables.push((name.into(), value.into()));
        self
    }

    fn says(mut self, text: &'static str) -> Step {
        match &mut self.proof {
            Proof::Says(texts) => texts.push(text),
            proof => *proof = Proof::Says(vec![text]),
        }
        self
    }

    fn lacks(mut self, why: Option<String>) -> Step {
        self.lacks = self.lacks.or(why);
        self
    }
}

/// What every table ends with, if no element of a result was wrong.
const RIGHT: &str = "# Out of bounds values : 0 OK";
/// How operations ran, which stands above a table.
const BY_PEERS: &str = "# path: peer";
const BY_NCCL: &str = "# path: NCCL";

struct Plan<'a> {
    machine: &'a Machine,
    steps: Vec<Step>,
}

/// Where ranks are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ranks {
    Threads(usize),
    Processes(usize),
}

impl Plan<'_> {
    /// A test of `tests/gpu`.
    fn conformance(&self, name: &str, test: &str, stage: Stage, seconds: u64) -> Step {
        let arguments = [test, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"];
        let sizes = if self.machine.is_measured() { "real" } else { "rehearsal" };
        Step::new(name, stage, seconds, self.machine.program("bin/gpu"), &arguments)
            .with("ALLSTREAM_TEST_DRIVER", sizes)
            .with("RUST_BACKTRACE", "0")
            .says("test result: ok. 1 passed")
    }

    fn conformances(&mut self, stage: Stage, seconds: u64, tests: &[&str]) {
        let steps =
            tests.iter().map(|test| self.conformance(&format!("conformance-{test}"), test, stage, seconds));
        let steps: Vec<_> = steps.collect();
        self.steps.extend(steps);
    }

    /// A table of `allstream perf`.
    fn table(&self, name: &str, what: &str, ranks: Ranks, stage: Stage, more: &[&str]) -> Step {
        let mut step = Step::new(name, stage, 40, self.machine.program("bin/allstream"), &["perf", what]);
        let (count, places) = match ranks {
            Ranks::Threads(count) => (count, Some("--threads")),
            Ranks::Processes(count) => (count, None),
        };
        step.arguments.extend(["-N".into(), count.to_string()]);
        step.arguments.extend(places.into_iter().chain(more.iter().copied()).map(String::from));
        let sizes: &[&str] = match (self.machine.is_measured(), more.contains(&"--sizes")) {
            (true, true) => &[],
            (true, false) => &["--sizes", "4K,64K,16M,256M"],
            (false, true) => &["-n", "2", "-w", "1"],
            (false, false) => &["--sizes", "4K,16K", "-n", "4", "-w", "1"],
        };
        step.arguments.extend(sizes.iter().map(|text| (*text).to_owned()));
        step.is_table = true;
        step.says(RIGHT)
    }

    /// Likewise, of buffers on the device, each operation awaited.
    fn awaited(&self, name: &str, what: &str, ranks: Ranks, stage: Stage) -> Step {
        self.table(name, what, ranks, stage, &["--device", "--await"]).says(BY_PEERS)
    }

    fn doctor(&mut self) {
        let doctor =
            Step::new("doctor", DOCTOR, 45, self.machine.program("bin/allstream"), &["doctor", "--device"]);
        self.steps.push(Step { is_table: true, ..doctor });
    }

    fn tables(&mut self) {
        use Ranks::{Processes, Threads};
        let all = [
            self.awaited("all_reduce-2-threads", "all_reduce", Threads(2), TABLES),
            self.table(
                "joined-all_reduce-2-threads",
                "all_reduce",
                Threads(2),
                TABLES,
                &["--device", "--join"],
            ),
            self.awaited("all_reduce-2-processes", "all_reduce", Processes(2), TABLES),
            self.awaited("all_reduce-4-threads", "all_reduce", Threads(4), TABLES),
            self.awaited("all_reduce-8-threads", "all_reduce", Threads(8), TABLES),
        ];
        self.steps.extend(all);
    }

    fn others(&mut self) {
        let machine = self.machine;
        let nccl = machine.nccl.as_ref().map(|file| file.display().to_string());
        let no_nccl = nccl.is_none().then(|| "no libnccl.so.2 beside python3's packages".to_owned());
        let one = self.conformance("nccl-one-rank", "nccl_one", OTHERS, 60);
        self.steps.push(nccl_variables(one, nccl).lacks(no_nccl));
        for (arrays, device, package) in
            [("torch", "cuda:0", "torch"), ("cupy", "cuda:0", "cupy"), ("numpy", "cpu", "numpy")]
        {
            let step = self.python(&format!("python-{arrays}"), &[arrays, device]);
            let missing = (!machine.python.has(package)).then(|| format!("python3 has no {package}"));
            let bare = (!machine.is_measured() && device != "cpu")
                .then(|| format!("{package} has memory on a device only, and there is none"));
            self.steps.push(step.lacks(missing).lacks(bare));
        }
        let cudarc = self.conformance("cudarc", "cudarc::memory", OTHERS, 40);
        self.steps.push(cudarc.with("LD_LIBRARY_PATH", self.driver_path()));
        let example = machine.program("examples/12_gpu");
        self.steps.push(Step::new("example-12_gpu", OTHERS, 30, example, &[]).says("the mean is 1.5"));
        let sizes: &[&str] = if machine.is_measured() { &["64", "1024"] } else { &["0.1", "16"] };
        let overlap = machine.program("examples/13_gpu_overlap");
        let overlap = Step::new("example-13_gpu_overlap", OTHERS, 40, overlap, sizes)
            .with("LD_LIBRARY_PATH", self.driver_path())
            .says("by kernels on the GPUs");
        self.steps.push(overlap);
    }

    /// Where cudarc, which knows nothing of our variable, finds the driver.
    fn driver_path(&self) -> String {
        let folder = self.machine.library.as_ref().and_then(|file| file.parent());
        let before = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
        folder.map_or(before.clone(), |folder| format!("{}:{before}", folder.display()))
    }

    /// Two processes of Python with the package that the pack has.
    fn python(&self, name: &str, arguments: &[&str]) -> Step {
        let (machine, python) = (self.machine, self.machine.python.program.unwrap_or("python3"));
        let script = machine.program("python/arrays.py").display().to_string();
        let mut all = vec!["run", "-n", "2", "--", python, &script];
        all.extend(arguments);
        let lacks = (machine.python.program.is_none()).then(|| "there is no python3".to_owned());
        let package = (!machine.program("python/allstream").is_dir())
            .then(|| "the pack was made without Python".to_owned());
        Step::new(name, OTHERS, 60, machine.program("bin/allstream"), &all)
            .with("PYTHONPATH", machine.program("python").display().to_string())
            .with("PYTHONFAULTHANDLER", "1")
            .says("all is as expected")
            .lacks(lacks)
            .lacks(package)
    }

    /// ncu reads the device's counters while one kernel of an all_reduce runs.
    fn counters(&mut self) {
        let machine = self.machine;
        let perf = machine.program("bin/allstream").display().to_string();
        let mut arguments = vec![
            "--clock-control",
            "none",
            "--kernel-name",
            "regex:combine2",
            "--launch-skip",
            "1",
            "--launch-count",
            "1",
            "--metrics",
            METRICS,
            &perf,
        ];
        arguments.extend("perf all_reduce --device --threads -N 2 --sizes 256M -n 2 -w 1 -c 0".split(' '));
        let program = machine.ncu.clone().unwrap_or_else(|| "ncu".into());
        let mut step = Step::new("ncu-one-fold", COUNTERS, 45, program.into(), &arguments);
        step.proof = Proof::Tool { finds: None };
        let missing = machine.ncu.is_none().then(|| "ncu is not installed".to_owned());
        self.steps.push(step.lacks(missing).lacks(self.needs_device("it reads a device's counters")));
    }

    /// Why a step has no meaning on a driver for tests.
    fn needs_device(&self, why: &str) -> Option<String> {
        (!self.machine.is_measured()).then(|| format!("{why}, and there is none"))
    }

    fn more(&mut self) {
        use Ranks::{Processes, Threads};
        let (no_mps, no_device) = (
            self.machine.mps.is_none().then(|| "nvidia-cuda-mps-control is not installed".to_owned()),
            self.needs_device("it serves a device"),
        );
        let mut mps = vec![
            self.awaited("mps-all_reduce-2-processes", "all_reduce", Processes(2), MORE),
            self.awaited("mps-all_reduce-4-processes", "all_reduce", Processes(4), MORE),
            self.conformance("mps-conformance-short_processes", "short_processes", MORE, 60),
        ];
        for step in &mut mps {
            (step.by_mps, step.lacks) = (true, no_mps.clone().or(no_device.clone()));
        }
        self.steps.extend(mps);
        let of = |what: &str, ranks: Ranks, name: String| self.awaited(&name, what, ranks, MORE);
        let mut all = vec![self.table(
            "staged-all_reduce-2-processes",
            "all_reduce",
            Processes(2),
            MORE,
            &["--device", "--staged", "--link", "shm"],
        )];
        all.push(self.table(
            "host-all_reduce-2-processes",
            "all_reduce",
            Processes(2),
            MORE,
            &["--link", "shm"],
        ));
        if self.machine.is_measured() {
            for what in ["reduce_scatter", "all_gather", "broadcast", "all_to_all"] {
                all.push(of(what, Threads(4), format!("{what}-4-threads")));
            }
            all.push(self.table(
                "bf16-all_reduce-4-threads",
                "all_reduce",
                Threads(4),
                MORE,
                &["--device", "--await", "-d", "bf16"],
            ));
            for ctas in ["264", "132", "64", "32", "16"] {
                let name = format!("ctas-{ctas}-all_reduce-4-threads");
                let sizes = ["--device", "--await", "--sizes", "16M,256M"];
                all.push(
                    self.table(&name, "all_reduce", Threads(4), MORE, &sizes)
                        .with("ALLSTREAM_MAX_CTAS", ctas),
                );
            }
            all.push(of("all_reduce", Processes(4), "all_reduce-4-processes".into()));
        }
        self.steps.extend(all);
        let gpu = self.machine.program("bin/gpu").display().to_string();
        let arguments = [
            "--tool",
            "memcheck",
            "--error-exitcode",
            "9",
            &gpu,
            "short",
            "--exact",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ];
        let program = self.machine.sanitizer.clone().unwrap_or_else(|| "compute-sanitizer".into());
        let mut sanitizer = Step::new("compute-sanitizer", MORE, 90, program.into(), &arguments);
        sanitizer.proof = Proof::Tool { finds: Some(9) };
        let missing =
            self.machine.sanitizer.is_none().then(|| "compute-sanitizer is not installed".to_owned());
        self.steps.push(sanitizer.lacks(missing).lacks(self.needs_device("it watches a device")));
    }

    fn nccl(&mut self) {
        let file = self.machine.nccl.as_ref().map(|file| file.display().to_string());
        let mut steps = vec![
            self.conformance("nccl-one-rank", "nccl_one", NCCL, 60),
            self.conformance("nccl-two-ranks", "nccl_two", NCCL, 90),
        ];
        for what in ["all_reduce", "all_gather", "reduce_scatter", "broadcast"] {
            let name = format!("nccl-{what}-2-processes");
            let options = ["--device", "--await", "--nccl"];
            steps.push(self.table(&name, what, Ranks::Processes(2), NCCL, &options).says(BY_NCCL));
        }
        steps.push(self.awaited("all_reduce-2-processes", "all_reduce", Ranks::Processes(2), NCCL));
        let several = [("NCCL_MULTI_RANK_GPU_ENABLE", "1"), ("NCCL_MAX_CTAS", "8")];
        for step in steps {
            let step = several
                .iter()
                .fold(nccl_variables(step, file.clone()), |step, (name, value)| step.with(name, *value));
            self.steps.push(step);
        }
    }
}

/// What NCCL needs to be told where nobody else is.
fn nccl_variables(step: Step, file: Option<String>) -> Step {
    let step = step.with("NCCL_SOCKET_IFNAME", "lo").with("NCCL_DEBUG", "WARN");
    match file {
        Some(file) => step.with("ALLSTREAM_NCCL_LIBRARY", file),
        None => step,
    }
}

/// Bytes that the fold moved in the device's memory, how much of the memory's bandwidth that was, and its time.
const METRICS: &str = "dram__bytes_read.sum,dram__bytes_write.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,gpu__time_duration.sum,\
sm__warps_active.avg.pct_of_peak_sustained_active,launch__registers_per_thread";

/// What is run on this machine, in order.
pub fn steps(machine: &Machine) -> Vec<Step> {
    let mut plan = Plan { machine, steps: Vec::new() };
    plan.doctor();
    if machine.brings_nccl {
        plan.nccl();
    } else {
        plan.conformances(SHORT, 45, &["short_threads", "short_processes"]);
        plan.tables();
        plan.others();
        plan.counters();
        let full =
            ["two_threads", "two_processes", "four_threads", "four_processes", "one_thread", "one_process"];
        plan.conformances(FULL, 90, &full);
        plan.conformances(FULL, 90, &["eight_threads", "eight_processes", "three_threads_staged"]);
        plan.more();
    }
    if let Some(library) = &machine.library {
        let library = library.display().to_string();
        plan.steps.iter_mut().for_each(|step| step.variables.push((LIBRARY.into(), library.clone())));
    }
    plan.steps
}
