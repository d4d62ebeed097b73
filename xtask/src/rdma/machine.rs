//! A virtual machine for `cargo xtask rdma`: a kernel of Debian's that has Soft-RoCE, with this host's files as its root.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::runner::output;

/// Loaded in this order. `rdma_rxe` asks for `crc32` by name when a device is made, and does not load it.
const MODULES: [&str; 10] = [
    "virtio_pci",
    "virtio_net",
    "9pnet_virtio",
    "9p",
    "dummy",
    "veth",
    "sch_netem",
    "crc32_generic",
    "ib_uverbs",
    "rdma_rxe",
];
const INIT: &str = include_str!("init.sh");

/// Each of these packages of Debian's depends on the newest kernel of its series. Both kernels have `rdma_rxe` as a module; `-cloud-` kernels do not.
/// On the first a message to this machine itself has mostly arrived when the call that posts it returns, on the second it arrives later.
pub(super) const KERNELS: [&str; 2] = ["linux-image-amd64", "linux-image-6.12-amd64"];

fn at(path: &Path) -> impl Fn(std::io::Error) -> String + '_ {
    move |error| format!("{}: {error}", path.display())
}

/// A kernel and what it starts with, in a folder that is kept.
pub(super) struct Machine {
    folder: PathBuf,
}

/// A machine that runs a script. It is switched off when this is dropped.
pub(super) struct Running {
    qemu: Child,
    /// What the machine sees as /mnt.
    shared: PathBuf,
    console: PathBuf,
}

/// One of the two ends of a network cable between two machines: 0 or 1, and the folder of the cable's two sockets.
pub(super) type CableEnd<'a> = (usize, &'a Path);

impl Machine {
    fn kernel(&self) -> PathBuf {
        self.folder.join("vmlinuz")
    }

    fn initrd(&self) -> PathBuf {
        self.folder.join("initrd")
    }

    /// Fetches the kernel that `package` depends on, and unpacks it, where that is not done yet.
    pub(super) fn prepare(folder: &Path, package: &str) -> Result<Machine, String> {
        let folder = &folder.join(package);
        let machine = Machine { folder: folder.clone() };
        // Written last: what the initial RAM disk was made of.
        let (ready, made_of) = (folder.join("ready"), format!("{}\n{INIT}", MODULES.join(" ")));
        if fs::read_to_string(&ready).is_ok_and(|text| text == made_of) {
            return Ok(machine);
        }
        let _ = fs::remove_dir_all(folder);
        let (packages, unpacked) = (folder.join("packages"), folder.join("unpacked"));
        fs::create_dir_all(&packages).map_err(at(&packages))?;
        let image = kernel_package(package)?;
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

    /// Takes the kernel and its modules out of the unpacked packages, and makes the initial RAM disk of them.
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

    /// Starts the machine, has it run a script, and waits until it is off. Returns what the script printed. The script has to end well.
    pub(super) fn run(&self, script: &str, limit: Duration) -> Result<String, String> {
        self.start("one", script, None)?.output(limit)
    }

    /// Starts the machine, which runs the script and is off after that. Machines that run at the same time have different names.
    pub(super) fn start(
        &self,
        name: &str,
        script: &str,
        cable: Option<CableEnd<'_>>,
    ) -> Result<Running, String> {
        let shared = self.folder.join(format!("shared-{name}"));
        let _ = fs::remove_dir_all(&shared);
        fs::create_dir_all(&shared).map_err(at(&shared))?;
        let command = shared.join("command");
        fs::write(&command, script).map_err(at(&command))?;
        let console = self.folder.join(format!("console-{name}"));
        let log = fs::File::create(&console).map_err(at(&console))?;
        let mut qemu = Command::new("qemu-system-x86_64");
        // It takes the system's libraries, and none that lies beside what cargo has built.
        qemu.env_remove("LD_LIBRARY_PATH");
        // A stock kernel needs a processor with one of these flags, even where there is a /dev/kvm.
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
        if let Some((end, folder)) = cable {
            let socket = |end: usize| folder.join(end.to_string()).display().to_string();
            let (local, remote) = (socket(end), socket(1 - end));
            let kind = "dgram,id=cable,local.type=unix,remote.type=unix";
            qemu.args(["-netdev", &format!("{kind},local.path={local},remote.path={remote}")]);
            let card = format!("virtio-net-pci,netdev=cable,mac=52:54:00:00:09:0{end}");
            qemu.args(["-device", &card]);
        }
        let errors = log.try_clone().map_err(at(&console))?;
        qemu.stdin(Stdio::null()).stdout(log).stderr(errors);
        let qemu = qemu.spawn().map_err(|error| format!("qemu-system-x86_64: {error}"))?;
        Ok(Running { qemu, shared, console })
    }
}

impl Running {
    /// Waits until the machine is off. Returns what its script printed. The script has to end well.
    pub(super) fn output(self, limit: Duration) -> Result<String, String> {
        let console = self.console.display().to_string();
        match self.ended(limit)? {
            (Some(0), said) => Ok(said),
            (Some(status), said) => Err(format!("the script ended with {status}: {}", said.trim())),
            (None, _) => Err(format!("the machine ended before its script did; see {console}")),
        }
    }

    /// Waits until the machine is off. Returns the status with which its script ended, if it did, and what the script printed.
    pub(super) fn ended(mut self, limit: Duration) -> Result<(Option<i32>, String), String> {
        let end = Instant::now() + limit;
        while self.qemu.try_wait().map_err(|error| error.to_string())?.is_none() {
            if Instant::now() > end {
                let (limit, console) = (limit.as_secs(), self.console.display());
                return Err(format!("the machine did not end in {limit} s; see {console}"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let read = |name: &str| fs::read_to_string(self.shared.join(name)).unwrap_or_default();
        Ok((read("status").trim().parse().ok(), read("output")))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// The package of the kernel itself.
fn kernel_package(series: &str) -> Result<String, String> {
    let ask = || output(Command::new("apt-cache").args(["depends", "--important", series]));
    let named = |said: String| {
        let mut names =
            said.lines().filter_map(|line| line.trim().strip_prefix("Depends: ").map(String::from));
        names.find(|name| name.starts_with("linux-image-"))
    };
    if let Some(name) = ask().ok().and_then(named) {
        return Ok(name);
    }
    output(Command::new("apt-get").args(["-q", "update"]))?;
    ask().map(named)?.ok_or_else(|| format!("apt knows no kernel by {series}"))
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
}
