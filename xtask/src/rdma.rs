//! `cargo xtask rdma`: what finds RDMA devices, and the link over them, tried on a real kernel's. A virtual machine has Soft-RoCE (`rdma_rxe`), which needs no card.
//!
//! The kernel is one of Debian's, fetched once. The machine's root is this host's, so that it runs the programs that were built here with the
//! libraries that are installed here. Where the processor cannot run it, it is emulated: it shows what is right, and not how fast.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::house::Check;
use crate::packages::install;
use crate::part::{PACKAGES, TOOLS};
use crate::runner::{self, output, target};

/// The package that depends on the newest kernel of its kind, which has `rdma_rxe` as a module (`-cloud-` kernels do not).
const KERNEL: &str = "linux-image-amd64";
/// Loaded in this order. `rdma_rxe` asks for `crc32` by name when a device is made, and does not load it.
const MODULES: [&str; 9] = [
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "dummy",
    "veth",
    "sch_netem",
    "crc32_generic",
    "ib_uverbs",
    "rdma_rxe",
];
const INIT: &str = include_str!("rdma/init.sh");
const DISCOVER: &str = include_str!("rdma/discover.sh");
const LINK: &str = include_str!("rdma/link.sh");
const HOSTS: &str = include_str!("rdma/hosts.sh");
const BARS: &str = include_str!("rdma/bars.sh");
/// A machine that takes longer hangs. Where it is emulated it takes ten seconds to find devices, and two minutes for the link.
const LIMIT: Duration = Duration::from_secs(480);
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

fn at(path: &Path) -> impl Fn(std::io::Error) -> String + '_ {
    move |error| format!("{}: {error}", path.display())
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
    let machine =
        Machine::prepare(&folder(root)).map_err(|error| format!("its kernel is not to be had: {error}"))?;
    machine
        .run("true", START)
        .map(drop)
        .map_err(|error| format!("a virtual machine does not start here: {error}"))
}

/// Where the machine is kept.
fn folder(root: &Path) -> PathBuf {
    target(root).join("rdma")
}

/// All checks, on one machine that is started once.
pub(crate) fn check(root: &Path) -> Vec<Check> {
    let finds = "`allstream info` names what Soft-RoCE has";
    let links =
        "collectives between processes over Soft-RoCE, and what is said of a rank that is killed or stopped";
    let hosts = "hosts find RDMA by themselves, and take TCP where no message gets through";
    let check = |script: &str, judge: &dyn Fn(&[Case]) -> Vec<String>| match run(root, script) {
        Ok(cases) => judge(&cases),
        Err(error) => vec![error],
    };
    vec![
        (finds, check(DISCOVER, &complaints)),
        (links, check(LINK, &link_complaints)),
        (hosts, check(HOSTS, &|cases| missing(&BETWEEN, cases))),
    ]
}

/// The name of a case, and what it printed.
type Case = (String, String);

/// Builds the command, and runs a script with it in the machine: what it printed.
fn run(root: &Path, script: &str) -> Result<Vec<Case>, String> {
    // As the full run has it, so that it is not built once more.
    let said = run_with("debug", &format!("--bins {PACKAGES} {TOOLS}"), root, script)?;
    let cases = said.split("case: ").skip(1).filter_map(|case| case.split_once('\n'));
    Ok(cases.map(|(name, text)| (name.to_owned(), text.to_owned())).collect())
}

/// Builds the command so, and runs a script with it in the machine: all that the script printed.
fn run_with(profile: &str, build: &str, root: &Path, script: &str) -> Result<String, String> {
    let mut cargo = Command::new(runner::cargo());
    output(cargo.args(["build", "--quiet"]).args(build.split_whitespace()).current_dir(root))?;
    let program = target(root).join(profile).join("allstream");
    let machine = Machine::prepare(&folder(root))?;
    machine.run(&format!("ALLSTREAM='{}'\n{script}", program.display()), LIMIT)
}

/// What the link costs, as a table: figures of each round, and their medians.
///
/// # Errors
/// Why it cannot be measured here.
pub(crate) fn bars(root: &Path) -> Result<String, String> {
    needs(root)?;
    if !is_there("ib_write_bw") {
        install(&["perftest"], |mut command| output(&mut command).map(drop))?;
    }
    let said = run_with("release", "--release --package allstream-cli", root, BARS)?;
    Ok(table(&said))
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
            "killed" | "stopped" => {
                // A death is told by the end of its connections, at once; silence after as long as a heartbeat may take.
                let how = if name == "killed" {
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
    if perfs != PERFS || cases.len() != PERFS + 4 {
        complaints.push(format!(
            "{} cases, {perfs} of them of perf, expected {} and {PERFS}",
            cases.len(),
            PERFS + 4
        ));
    }
    complaints
}

/// Runs of `perf` in the link's script.
const PERFS: usize = 23;

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

/// A kernel and what it starts with, in a folder that is kept.
struct Machine {
    folder: PathBuf,
}

impl Machine {
    fn kernel(&self) -> PathBuf {
        self.folder.join("vmlinuz")
    }

    fn initrd(&self) -> PathBuf {
        self.folder.join("initrd")
    }

    /// Fetches and unpacks what is not there yet.
    fn prepare(folder: &Path) -> Result<Machine, String> {
        let machine = Machine { folder: folder.to_owned() };
        // Written last: what the first root was made of.
        let (ready, made_of) = (folder.join("ready"), format!("{}\n{INIT}", MODULES.join(" ")));
        if fs::read_to_string(&ready).is_ok_and(|text| text == made_of) {
            return Ok(machine);
        }
        let _ = fs::remove_dir_all(folder);
        let (packages, unpacked) = (folder.join("packages"), folder.join("unpacked"));
        fs::create_dir_all(&packages).map_err(at(&packages))?;
        let image = kernel_package()?;
        let mut download = Command::new("apt-get");
        // The folder need not be open to the user that apt fetches as.
        download.current_dir(&packages).args(["-q", "-o", "APT::Sandbox::User=root", "download"]);
        output(download.args([image.as_str(), "busybox-static"]))?;
        for package in packages.read_dir().map_err(at(&packages))?.flatten() {
            output(Command::new("dpkg-deb").arg("-x").arg(package.path()).arg(&unpacked))?;
        }
        machine.pack(&unpacked)?;
        fs::remove_dir_all(&packages).map_err(at(&packages))?;
        fs::remove_dir_all(&unpacked).map_err(at(&unpacked))?;
        fs::write(&ready, made_of).map_err(at(&ready))?;
        Ok(machine)
    }

    /// Takes the kernel and its modules out of the unpacked packages, and makes the first root of them.
    fn pack(&self, unpacked: &Path) -> Result<(), String> {
        let busybox = ["bin/busybox", "usr/bin/busybox"].map(|name| unpacked.join(name));
        let busybox = busybox.iter().find(|file| file.is_file()).ok_or("busybox-static has no busybox")?;
        let all = unpacked.join("lib/modules");
        let version =
            all.read_dir().map_err(at(&all))?.flatten().next().ok_or("the kernel has no modules")?;
        let version = version.file_name().to_string_lossy().into_owned();
        let image = unpacked.join("boot").join(format!("vmlinuz-{version}"));
        fs::copy(&image, self.kernel()).map_err(at(&image))?;
        output(Command::new("find").arg(&all).args(["-name", "*.ko.xz", "-exec", "unxz", "{}", "+"]))?;
        output(Command::new(busybox).args(["depmod", "-b"]).arg(unpacked).arg(&version))?;

        let (root, modules) = (self.folder.join("root"), format!("lib/modules/{version}"));
        for folder in ["bin", "proc", "sys", "dev", "host", modules.as_str()] {
            let folder = root.join(folder);
            fs::create_dir_all(&folder).map_err(at(&folder))?;
        }
        fs::copy(busybox, root.join("bin/busybox")).map_err(at(busybox))?;
        let list = unpacked.join(&modules).join("modules.dep");
        let dependencies = fs::read_to_string(&list).map_err(at(&list))?;
        for file in closure(&dependencies, &MODULES)? {
            let (from, to) = (unpacked.join(&modules).join(&file), root.join(&modules).join(&file));
            let parent = to.parent().unwrap_or(&root);
            fs::create_dir_all(parent).map_err(at(parent))?;
            fs::copy(&from, &to).map_err(at(&from))?;
        }
        for file in unpacked.join(&modules).read_dir().map_err(at(&all))?.flatten() {
            // The tables by which modules are found.
            if file.file_name().to_string_lossy().starts_with("modules.") {
                fs::copy(file.path(), root.join(&modules).join(file.file_name()))
                    .map_err(at(&file.path()))?;
            }
        }
        fs::write(root.join("modules"), MODULES.join("\n")).map_err(at(&root))?;
        let init = root.join("init");
        fs::write(&init, INIT).map_err(at(&init))?;
        fs::set_permissions(&init, fs::Permissions::from_mode(0o755)).map_err(at(&init))?;
        let pack = "cd \"$1\" && find . | \"$2\" cpio -o -H newc >\"$3\"";
        let initrd = self.initrd();
        output(Command::new("sh").args(["-c", pack, "sh"]).arg(&root).arg(busybox).arg(&initrd))?;
        fs::remove_dir_all(&root).map_err(at(&root))
    }

    /// Starts the machine, has it run a script, and waits until it is off: what the script printed. It has to end well.
    fn run(&self, script: &str, limit: Duration) -> Result<String, String> {
        let shared = self.folder.join("shared");
        let _ = fs::remove_dir_all(&shared);
        fs::create_dir_all(&shared).map_err(at(&shared))?;
        let command = shared.join("command");
        fs::write(&command, script).map_err(at(&command))?;
        let console = self.folder.join("console");
        let log = fs::File::create(&console).map_err(at(&console))?;
        let mut qemu = Command::new("qemu-system-x86_64");
        // It takes the system's libraries, and none that lies beside what cargo has built.
        qemu.env_remove("LD_LIBRARY_PATH");
        // Only a processor with these can run a stock kernel, whatever /dev/kvm is there.
        let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let is_able = cpus.split_whitespace().any(|flag| matches!(flag, "vmx" | "svm"));
        if is_able && fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok() {
            qemu.args(["-accel", "kvm", "-cpu", "host"]);
        } else {
            qemu.args(["-accel", "tcg,thread=multi", "-cpu", "max"]);
        }
        qemu.args([
            "-smp",
            "2",
            "-m",
            "1024",
            "-nodefaults",
            "-no-reboot",
            "-display",
            "none",
            "-monitor",
            "none",
        ]);
        qemu.args(["-serial", "stdio", "-append", "console=ttyS0 quiet panic=-1 mitigations=off"]);
        qemu.arg("-kernel").arg(self.kernel()).arg("-initrd").arg(self.initrd());
        let files = |name: &str, path: &Path, more: &str| {
            let folder = format!("local,id={name},path={},security_model=none{more}", path.display());
            [
                "-fsdev".into(),
                folder,
                "-device".into(),
                format!("virtio-9p-pci,fsdev={name},mount_tag={name}"),
            ]
        };
        qemu.args(files("root", Path::new("/"), ",readonly=on,multidevs=remap"));
        qemu.args(files("shared", &shared, ""));
        let errors = log.try_clone().map_err(at(&console))?;
        qemu.stdin(Stdio::null()).stdout(log).stderr(errors);
        self.wait(qemu, limit)?;
        let read = |name: &str| fs::read_to_string(shared.join(name)).unwrap_or_default();
        match read("status").trim() {
            "0" => Ok(read("output")),
            "" => Err(format!("the machine ended before its script did; see {}", console.display())),
            status => Err(format!("the script ended with {status}: {}", read("output").trim())),
        }
    }

    fn wait(&self, mut qemu: Command, limit: Duration) -> Result<(), String> {
        let mut child = qemu.spawn().map_err(|error| format!("qemu-system-x86_64: {error}"))?;
        let end = Instant::now() + limit;
        while child.try_wait().map_err(|error| error.to_string())?.is_none() {
            if Instant::now() > end {
                let _ = child.kill();
                let _ = child.wait();
                let console = self.folder.join("console");
                return Err(format!(
                    "the machine did not end in {} s; see {}",
                    limit.as_secs(),
                    console.display()
                ));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

/// The package of the kernel itself.
fn kernel_package() -> Result<String, String> {
    let ask = || output(Command::new("apt-cache").args(["depends", "--important", KERNEL]));
    let named = |said: String| {
        let mut names =
            said.lines().filter_map(|line| line.trim().strip_prefix("Depends: ").map(String::from));
        names.find(|name| name.starts_with("linux-image-"))
    };
    if let Some(name) = ask().ok().and_then(named) {
        return Ok(name);
    }
    output(Command::new("apt-get").args(["-q", "update"]))?;
    ask().map(named)?.ok_or_else(|| format!("apt knows no kernel by {KERNEL}"))
}

/// The files of these modules and of all that they need, as `modules.dep` lists them: `path: path path`.
fn closure(dependencies: &str, modules: &[&str]) -> Result<BTreeSet<String>, String> {
    let mut files = BTreeSet::new();
    for module in modules {
        // Files have `-` where names have `_`, or not.
        let is_named = |path: &str| {
            let file = path.rsplit('/').next().unwrap_or(path);
            file.split('.').next().is_some_and(|stem| stem.replace('-', "_") == *module)
        };
        let mut rows = dependencies.lines().filter_map(|line| line.split_once(':'));
        // What is built in has no file, and nothing to load.
        let Some((file, needed)) = rows.find(|(file, _)| is_named(file)) else { continue };
        files.insert(file.to_owned());
        files.extend(needed.split_whitespace().map(String::from));
    }
    if files.is_empty() { Err("the kernel has none of the modules".into()) } else { Ok(files) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_with_what_they_need() {
        let table = "kernel/a/rdma_rxe.ko: kernel/b/ib-core.ko kernel/b/udp.ko\nkernel/b/ib-core.ko:\nkernel/b/udp.ko:\n\
                     kernel/c/virtio-pci.ko: kernel/c/virtio.ko\nkernel/d/other.ko:\n";
        let files = closure(table, &["rdma_rxe", "virtio_pci", "built_in"]).unwrap();
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        let wanted = [
            "kernel/a/rdma_rxe.ko",
            "kernel/b/ib-core.ko",
            "kernel/b/udp.ko",
            "kernel/c/virtio-pci.ko",
            "kernel/c/virtio.ko",
        ];
        assert_eq!(files, wanted);
        assert!(closure(table, &["nothing"]).is_err());
    }

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
