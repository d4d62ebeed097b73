//! `cargo xtask rdma`: runs what finds RDMA devices, and the link over them, on the Soft-RoCE (`rdma_rxe`) of a Linux kernel, which needs no card.
//!
//! The kernel is one of Debian's, fetched once. It runs in a virtual machine whose root is this host's, so that the machine runs the programs
//! that were built here with the libraries that are installed here. Where the processor cannot run a virtual machine, the machine is emulated:
//! then it shows what is right, and not how fast it is.

mod machine;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::house::Check;
use crate::packages::install;
use crate::part::{PACKAGES, TOOLS};
use crate::runner::{self, output, target};
use machine::{KERNELS, Machine};

const DISCOVER: &str = include_str!("rdma/discover.sh");
const LINK: &str = concat!(
    include_str!("rdma/soft_roce.sh"),
    include_str!("rdma/signalled.sh"),
    include_str!("rdma/link.sh")
);
const HOSTS: &str = include_str!("rdma/hosts.sh");
const LONG: &str = concat!(
    include_str!("rdma/soft_roce.sh"),
    include_str!("rdma/signalled.sh"),
    include_str!("rdma/long.sh")
);
const MACHINES: &str = include_str!("rdma/machines.sh");
const BARS: &str = concat!(include_str!("rdma/soft_roce.sh"), include_str!("rdma/bars.sh"));
/// A machine that takes longer hangs. Where it is emulated it takes ten seconds to find devices, and two minutes for the link.
const LIMIT: Duration = Duration::from_secs(480);
/// The same for the script of many operations and a hundred kills, which takes some ten minutes, and for the one that measures, which takes seven.
const LONG_LIMIT: Duration = Duration::from_secs(40 * 60);
/// One that does nothing is off after some five seconds.
const START: Duration = Duration::from_secs(120);

/// What has to be here, and the package that has it.
const PROGRAMS: [(&str, &str); 6] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("rdma", "iproute2"),
    ("setpriv", "util-linux"),
    ("dpkg-deb", "dpkg"),
    ("unxz", "xz-utils"),
    ("ibv_devices", "ibverbs-utils"),
];

fn is_there(program: &str) -> bool {
    ["/usr/bin", "/usr/sbin", "/bin", "/sbin"].iter().any(|folder| Path::new(folder).join(program).is_file())
}

/// Why it cannot run here, if it cannot. Installs what is missing, where it may, and starts the machine once.
pub(crate) fn needs(root: &Path) -> Result<(), String> {
    if cfg!(not(all(target_arch = "x86_64", target_os = "linux"))) {
        return Err("the virtual machine is one of x86-64".into());
    }
    let missing: Vec<&str> =
        PROGRAMS.iter().filter(|(program, _)| !is_there(program)).map(|(_, package)| *package).collect();
    let drivers = Path::new("/usr/lib/x86_64-linux-gnu/libibverbs");
    let mut wanted = missing;
    if !drivers.is_dir() {
        wanted.push("ibverbs-providers");
    }
    if !wanted.is_empty() {
        install(&wanted, |mut command| output(&mut command).map(drop))?;
    }
    let machine = Machine::prepare(&folder(root), KERNELS[0])
        .map_err(|error| format!("its kernel is not to be had: {error}"))?;
    machine
        .run("true", START)
        .map(drop)
        .map_err(|error| format!("a virtual machine does not start here: {error}"))
}

/// Where the machines are kept.
fn folder(root: &Path) -> PathBuf {
    target(root).join("rdma")
}

/// The checks of every full run, on one kernel.
pub(crate) fn check(root: &Path) -> Vec<Check> {
    checks(root, &KERNELS[..1])
}

/// The same checks on all kernels, and those that take long.
pub(crate) fn check_all(root: &Path) -> Vec<Check> {
    let mut all = checks(root, &KERNELS);
    let long = run(root, KERNELS[1], LONG, LONG_LIMIT);
    all.push(("10,000 operations and 100 kills over Soft-RoCE", judged(long, &long_complaints)));
    let machines = two_machines(root, KERNELS[1]);
    all.push((
        "ranks on two machines talk by RDMA, and tell of a machine that is switched off",
        judged(machines, &|cases| missing(&ON_TWO_MACHINES, cases)),
    ));
    all
}

/// What the cases of a script, where it ran, do not have as they should.
fn judged(ran: Result<Vec<Case>, String>, judge: &dyn Fn(&[Case]) -> Vec<String>) -> Vec<String> {
    ran.map_or_else(|error| vec![error], |cases| judge(&cases))
}

fn checks(root: &Path, kernels: &[&str]) -> Vec<Check> {
    let check = |script: &str, judge: &dyn Fn(&[Case]) -> Vec<String>| {
        let on = |kernel: &&str| {
            let complaints = judged(run(root, kernel, script, LIMIT), judge);
            complaints.into_iter().map(|text| format!("{kernel}: {text}")).collect::<Vec<_>>()
        };
        kernels.iter().flat_map(on).collect::<Vec<_>>()
    };
    vec![
        ("`allstream info` names what Soft-RoCE has", check(DISCOVER, &complaints)),
        (
            "collectives between processes over Soft-RoCE, and what is said of a rank that is killed or stopped",
            check(LINK, &link_complaints),
        ),
        (
            "hosts find RDMA by themselves, and take TCP where no message gets through",
            check(HOSTS, &|cases| missing(&BETWEEN, cases)),
        ),
    ]
}

/// The name of a case, and what it printed.
type Case = (String, String);

fn cases(said: &str) -> Vec<Case> {
    let cases = said.split("case: ").skip(1).filter_map(|case| case.split_once('\n'));
    cases.map(|(name, text)| (name.to_owned(), text.to_owned())).collect()
}

/// Builds the command as the full run has it, so that it is not built once more; the line that tells a script where it is.
fn debug_build(root: &Path) -> Result<String, String> {
    build(root, "debug", &format!("--bins {PACKAGES} {TOOLS}"))
}

fn build(root: &Path, profile: &str, arguments: &str) -> Result<String, String> {
    let mut cargo = Command::new(runner::cargo());
    output(cargo.args(["build", "--quiet"]).args(arguments.split_whitespace()).current_dir(root))?;
    Ok(format!("ALLSTREAM='{}'\n", target(root).join(profile).join("allstream").display()))
}

/// Builds the command, and runs a script with it in a machine: what the script's cases printed.
fn run(root: &Path, kernel: &str, script: &str, limit: Duration) -> Result<Vec<Case>, String> {
    let command = debug_build(root)?;
    let machine = Machine::prepare(&folder(root), kernel)?;
    machine.run(&(command + script), limit).map(|said| cases(&said))
}

/// Runs ranks on two machines that are connected by a cable; the second one is switched off in the middle. What the first one's cases printed.
fn two_machines(root: &Path, kernel: &str) -> Result<Vec<Case>, String> {
    let command = debug_build(root)?;
    let machine = Machine::prepare(&folder(root), kernel)?;
    // Not below `target`, as names of sockets are short.
    let cable = tempfile::tempdir().map_err(|error| format!("a folder for sockets: {error}"))?;
    let start = |end: usize| {
        let script = format!("MACHINE={end}\n{command}{MACHINES}");
        machine.start(&end.to_string(), &script, Some((end, cable.path())))
    };
    let (first, second) = (start(0)?, start(1)?);
    let said = first.output(LIMIT);
    let of_second = match second.ended(LIMIT) {
        Ok((None, said)) => Ok(said),
        Ok((Some(_), said)) => Err(format!("it was not switched off within its script: {said}")),
        Err(error) => Err(error),
    };
    match (said, of_second) {
        (Ok(said), Ok(_)) => Ok(cases(&said)),
        (Ok(_), Err(second)) => Err(format!("the second machine: {second}")),
        (Err(first), Ok(second) | Err(second)) => Err(format!("{first}; the second machine: {second}")),
    }
}

/// What the link costs, as a table for each kernel: figures of each round, and their medians.
///
/// # Errors
/// Why it cannot be measured here.
pub(crate) fn bars(root: &Path) -> Result<String, String> {
    needs(root)?;
    if !is_there("ib_write_bw") {
        install(&["perftest"], |mut command| output(&mut command).map(drop))?;
    }
    let command = build(root, "release", "--release --package allstream-cli")?;
    let of = |kernel: &&str| -> Result<String, String> {
        let said = Machine::prepare(&folder(root), kernel)?.run(&(command.clone() + BARS), LONG_LIMIT)?;
        Ok(format!("{kernel}\n\n{}", table(&said)))
    };
    Ok(KERNELS.iter().map(of).collect::<Result<Vec<_>, _>>()?.join("\n"))
}

/// Lines of a name and a figure as rows with the median, one for each name, in the order in which they came first.
fn table(said: &str) -> String {
    let mut rows: Vec<(&str, Vec<f64>)> = Vec::new();
    for line in said.lines() {
        let Some((name, figure)) = line.rsplit_once(' ') else { continue };
        let Ok(figure) = figure.parse::<f64>() else { continue };
        match rows.iter_mut().find(|(known, _)| *known == name) {
            Some((_, figures)) => figures.push(figure),
            None => rows.push((name, vec![figure])),
        }
    }
    let mut text = String::from("| what | median | least | most |\n|---|---|---|---|\n");
    for (name, mut figures) in rows {
        figures.sort_by(f64::total_cmp);
        let (least, median, most) = (figures[0], figures[figures.len() / 2], figures[figures.len() - 1]);
        text += &format!("| {name} | {median} | {least} | {most} |\n");
    }
    text
}

/// What is wrong with what the link's script printed.
fn link_complaints(cases: &[Case]) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut perfs = 0;
    for (name, text) in cases {
        let mut has = |part: &str, wanted: bool| {
            if text.contains(part) != wanted {
                let is = if wanted { "is not" } else { "is" };
                complaints.push(format!("{name}: `{}` {is} in: {}", part.trim(), text.trim()));
            }
        };
        match name.as_str() {
            "missing" => {
                has("which the link rdma needs on all of them, is not available: there is no device", true);
                has("[1] allstream: RDMA on host", true);
                has("[0] allstream: RDMA on host", true);
            }
            "counters" => {
                for none in ["rcvd_rnr_err 0\n", "send_rnr_err 0\n", "retry_rnr_exceeded_err 0\n"] {
                    has(none, true);
                }
                // The pair that the device itself has.
                has(" qp 1 cm_id 0 mr 0 ", true);
            }
            "second port" => {
                has("rdma_recvs ", true);
                has("rdma_recvs 0\n", false);
                has(" rxe1: pd 1 cq 1 qp 1 cm_id 0 mr 0 ", true);
            }
            "killed" | "killed in alloc" | "stopped" => {
                // A death is told by the end of its connections, at once; silence after as long as a heartbeat may take.
                let how = if name != "stopped" {
                    "its connection ended without a goodbye"
                } else {
                    "nothing was heard from it for 4s"
                };
                for rank in [0, 1, 3] {
                    has(&format!("[{rank}] allstream: rank 2 was lost ({how})"), true);
                }
                has(" qp 1 cm_id 0 mr 0 ", true);
            }
            _ => {
                perfs += 1;
                has("# Out of bounds values : 0 OK", true);
                has("ended with", false);
            }
        }
    }
    if perfs != PERFS || cases.len() != PERFS + OTHERS {
        complaints.push(format!(
            "{} cases, {perfs} of them of perf, expected {} and {PERFS}",
            cases.len(),
            PERFS + OTHERS
        ));
    }
    complaints
}

/// Runs of `perf` in the link's script.
const PERFS: usize = 31;
/// The script's other cases.
const OTHERS: usize = 6;
/// Ranks that the long script kills, each in a job of its own.
const KILLS: usize = 100;

/// What is wrong with what the script of many operations and kills printed. It tells what was measured, too.
fn long_complaints(cases: &[Case]) -> Vec<String> {
    let mut complaints = Vec::new();
    let operations = said(cases, "operations");
    for wanted in ["# Out of bounds values : 0 OK", "rcvd_rnr_err 0\n", "send_rnr_err 0\n"] {
        if !operations.contains(wanted) {
            complaints.push(format!("operations: `{}` is not in: {operations}", wanted.trim()));
        }
    }
    let counts = operations.lines().filter(|line| line.contains("_err "));
    runner::say(&format!("10,000 operations: {}", counts.collect::<Vec<_>>().join(", ")));
    let mut times = Vec::new();
    for (name, text) in cases.iter().filter(|(name, _)| name.starts_with("kill ")) {
        let of = |rank: usize| {
            format!("[{rank}] allstream: rank 2 was lost (its connection ended without a goodbye)")
        };
        if !(text.contains(&of(0))
            && text.contains(&of(1))
            && text.matches(" qp 1 cm_id 0 mr 0 ").count() == 2)
        {
            complaints.push(format!("{name}: {}", text.trim()));
        }
        let told = text.split_once("told after ").and_then(|(_, rest)| rest.split(' ').next());
        times.extend(told.and_then(|told| told.parse::<u32>().ok()));
    }
    times.sort_unstable();
    match (times.get(times.len() / 2), times.last()) {
        (Some(median), Some(last)) => runner::say(&format!(
            "{} kills: all survivors had named the rank after {median} ms (median), {last} ms (at most)",
            times.len()
        )),
        _ => complaints.push("no kill was told of".into()),
    }
    if times.len() != KILLS {
        complaints.push(format!("{} kills were told of, expected {KILLS}", times.len()));
    }
    complaints
}

/// What each case has to say: texts that are in it, in this order.
type Wanted = (&'static str, &'static [&'static str]);

/// Of hosts that find RDMA by themselves: four ranks, two on each.
const BETWEEN: [Wanted; 3] = [
    ("found", &["link auto (shm, rdma), ", "# Out of bounds values : 0 OK"]),
    ("lossy", &["link auto (shm, rdma), ", "# Out of bounds values : 0 OK"]),
    (
        "cut",
        &[
            "hosts talk by TCP and not by RDMA: between rank 0 and rank 2: ",
            "link auto (shm, tcp), ",
            "# Out of bounds values : 0 OK",
        ],
    ),
];

/// Of ranks on two machines, the second of which is switched off in the middle.
const ON_TWO_MACHINES: [Wanted; 2] = [
    ("found", &["link auto (shm, rdma), ", "# Out of bounds values : 0 OK"]),
    (
        "off",
        &[
            "rank 0: allstream: rank ",
            " was lost (nothing was heard from it for 4s)",
            "rank 1: allstream: rank ",
            " was lost (nothing was heard from it for 4s)",
            " qp 1 cm_id 0 mr 0 ",
        ],
    ),
];

/// Of `allstream info`.
const WANTED: [Wanted; 8] = [
    ("none", &["no: RDMA is not available: there is no device", "used between hosts if all have it"]),
    (
        "one",
        &[
            "yes: rxe0 port 1 active, RoCE v2, GID ",
            " (10.9.0.1 of rd0), MTU 4096\n",
            "link-local",
            "found by /",
            "used between hosts if all have it",
        ],
    ),
    ("forced", &["yes: rxe0 port 1 active, RoCE v2, GID 0 (fe80::", " of rd0), MTU 4096\n"]),
    (
        "absent",
        &[
            "no: RDMA is not available: ",
            "rxe0 port 1: it has no GID 77, which ALLSTREAM_RDMA_GID names; it has of RoCE v2: 0, ",
        ],
    ),
    (
        "unlocked",
        &["no: RDMA is not available: rxe0 port 1 could be used, but this process may lock 65536 bytes"],
    ),
    (
        "two",
        &[
            "yes: rxe1 port 1 active, RoCE v2, GID ",
            " (10.8.0.1 of rd1), MTU 1024 (the port can do 4096",
            "     rxe0 port 1 active",
            "used between hosts if all have it",
        ],
    ),
    ("named", &["yes: rxe0 port 1 active", "rxe1 port 1: left out: ALLSTREAM_RDMA_DEVICE is `rxe0`"]),
    ("down", &["no: RDMA is not available: no port can be used: ", "rxe0 port 1: it is down"]),
];

/// What a case printed.
fn said<'a>(cases: &'a [Case], name: &str) -> &'a str {
    cases.iter().find(|(case, _)| case == name).map_or("", |(_, text)| text.as_str())
}

fn missing(wanted: &[Wanted], cases: &[Case]) -> Vec<String> {
    let mut complaints = Vec::new();
    for (name, parts) in wanted {
        let mut rest = said(cases, name);
        for part in *parts {
            match rest.split_once(part) {
                Some((_, behind)) => rest = behind,
                None => {
                    complaints.push(format!(
                        "{name}: `{}` is not in: {}",
                        part.trim(),
                        said(cases, name).trim()
                    ));
                    break;
                }
            }
        }
    }
    complaints
}

fn complaints(cases: &[Case]) -> Vec<String> {
    let mut complaints = missing(&WANTED, cases);
    // The kernel's own table has that address of RoCE v2 at that index.
    let named = said(cases, "one")
        .split_once("GID ")
        .and_then(|(_, rest)| rest.split_once(' '))
        .map(|(index, _)| index);
    let row = format!("{} RoCE v2 0000:0000:0000:0000:0000:ffff:0a09:0001", named.unwrap_or("none"));
    if !said(cases, "table").lines().any(|line| line == row) {
        complaints.push(format!("the kernel's table has no row `{row}`: {}", said(cases, "table").trim()));
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_the_median_of_each_figure() {
        let rows = table("a 3\nnothing\nb x\na 1\nbefore errors 0\na 2\n");
        assert!(rows.ends_with("| a | 2 | 1 | 3 |\n| before errors | 0 | 0 | 0 |\n"), "{rows}");
    }

    #[test]
    fn what_is_not_said_is_complained_of() {
        let complaints = complaints(&[("down".into(), "RDMA  yes: rxe0 port 1 active\n".into())]);
        assert_eq!(complaints.len(), WANTED.len() + 1);
        assert!(complaints.iter().any(|text| text.starts_with("down: `no: RDMA")), "{complaints:?}");
    }
}
