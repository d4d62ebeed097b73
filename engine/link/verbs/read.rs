//! Asks this host for its [`Facts`].

use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use allstream_sys::verbs::{
    Context, Devices, GidType, IbvGidEntry, IbvPortAttr, LIBRARY_VARIABLE, LinkLayer, Mtu, PortState, Verbs,
    VerbsError,
};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CpuSet, sched_getaffinity};

use super::facts::{Device, Facts, Found, Gid, Interface, Locked, Port};
use crate::error::Error;

/// Where the kernel lists its devices.
const IN_KERNEL: &str = "/sys/class/infiniband";
/// Where the files are through which programs reach the devices.
const DEVICE_FILES: &str = "/dev/infiniband";
/// The number of the capability to lock memory beyond the limit (`CAP_IPC_LOCK`, linux/capability.h).
const IPC_LOCK: u32 = 14;

fn missing(problem: String) -> Error {
    Error::Unavailable { what: "RDMA".into(), problem }
}

/// libibverbs, as this process has it.
///
/// # Errors
/// [`Error::Unavailable`]: there is no such library, or it lacks a function that is needed.
pub(crate) fn library() -> Result<&'static Verbs, Error> {
    Verbs::get().map_err(|unavailable| {
        missing(format!(
            "{unavailable}; install libibverbs of rdma-core 32 or newer and its drivers (Debian, Ubuntu: libibverbs1 and ibverbs-providers; \
             Fedora, RHEL: libibverbs), or set {LIBRARY_VARIABLE} to its path"
        ))
    })
}

/// What this host is like now.
///
/// # Errors
/// [`Error::Unavailable`]: the library does not list devices.
pub(crate) fn facts(verbs: &Verbs) -> Result<Facts, Error> {
    let devices = verbs.devices().map_err(|error| {
        // ENOSYS: the kernel's RDMA modules are not loaded, or cannot be seen from this container.
        let advice = match error.code == Errno::NOSYS.raw_os_error() {
            true => format!(
                ": the kernel has no support for RDMA; load the modules of the card's driver and ib_uverbs, or, in a container, start it with \
                 --device={DEVICE_FILES}"
            ),
            false => String::new(),
        };
        missing(format!("{error}{advice}"))
    })?;
    let devices: Vec<Device> = (0..devices.len()).map(|at| device(&devices, at)).collect();
    let is_listed = |name: &String| devices.iter().any(|device| device.name == *name);
    Ok(Facts {
        unlisted: in_kernel().into_iter().filter(|name| !is_listed(name)).collect(),
        has_device_files: Path::new(DEVICE_FILES).is_dir(),
        locked: locked(),
        interfaces: interfaces(),
        devices,
    })
}

/// The devices that the kernel has.
pub(super) fn in_kernel() -> Vec<String> {
    let entries = Path::new(IN_KERNEL).read_dir().into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Describes a device, which is open only while it is queried.
fn device(devices: &Devices<'_>, at: usize) -> Device {
    let ask = || {
        let context = devices.open(at)?;
        let count = context.attributes()?.phys_port_cnt;
        Ok(ports(&context, count))
    };
    let ports = ask().map_err(|error: VerbsError| error.to_string());
    let name = devices.name(at);
    let near = std::fs::read_to_string(format!("{IN_KERNEL}/{name}/device/local_cpulist"));
    let is_far = near.is_ok_and(|near| sched_getaffinity(None).is_ok_and(|own| !may_run_near(&near, &own)));
    Device { name, transport: devices.transport(at), is_far, ports }
}

/// Whether a process that may run on its `own` processors may run on one of those in a list of the kernel's, such as `0-3,8`. `true` also if the list
/// has no processor, or none that can be read.
pub(super) fn may_run_near(list: &str, own: &CpuSet) -> bool {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<usize>().ok()?..=last.trim().parse::<usize>().ok()?)
    };
    let mut near = list.split(',').filter_map(range).flatten().take(CpuSet::MAX_CPU).peekable();
    near.peek().is_none() || near.any(|cpu| cpu < CpuSet::MAX_CPU && own.is_set(cpu))
}

/// How many addresses a port may have; if the port cannot be asked, a number that no port of a usual card exceeds. The library gives the addresses of
/// all ports of a device, or an error if there are more than there is room for.
pub(super) fn addresses_of<E>(port: Result<&IbvPortAttr, E>) -> usize {
    const USUAL: usize = 256;
    port.map_or(USUAL, |port| usize::try_from(port.gid_tbl_len).unwrap_or(0))
}

fn ports(context: &Context<'_>, count: u8) -> Vec<Port> {
    let asked: Vec<_> = (1..=count).map(|number| (number, context.port(number))).collect();
    // Room for one entry more than there can be, in case the kernel wants room to spare.
    let room: usize = asked.iter().map(|(_, port)| addresses_of(port.as_ref())).sum();
    let gids = context.gids(room + 1);
    let of_port = |number: u8| match &gids {
        Ok(entries) => {
            let own = entries.iter().filter(|entry| entry.port_num == u32::from(number));
            Ok(own.map(gid).filter(|gid| !gid.address.is_unspecified()).collect())
        }
        Err(error) => Err(error.clone()),
    };
    let port = |(number, port): (u8, Result<IbvPortAttr, VerbsError>)| {
        let found = port.and_then(|port| {
            Ok(Found {
                state: PortState(port.state),
                layer: LinkLayer(port.link_layer),
                mtu: Mtu(port.active_mtu),
                max_mtu: Mtu(port.max_mtu),
                max_message: port.max_msg_sz,
                rate: (port.active_width, port.active_speed),
                gids: of_port(number)?,
            })
        });
        Port { number, found: found.map_err(|error| error.to_string()) }
    };
    asked.into_iter().map(port).collect()
}

fn gid(entry: &IbvGidEntry) -> Gid {
    Gid {
        index: entry.gid_index,
        kind: GidType(entry.gid_type),
        address: Ipv6Addr::from(entry.gid.raw),
        interface: entry.ndev_ifindex,
    }
}

/// How much memory this process may lock.
fn locked() -> Locked {
    let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    match getrlimit(Resource::Memlock).current {
        Some(most) if !may_lock(&read("/proc/self/status"), &read("/proc/self/uid_map")) => {
            Locked::UpTo(most)
        }
        _ => Locked::Unlimited,
    }
}

/// Whether the process that has this `/proc/PID/status` and this `/proc/PID/uid_map` may exceed the limit. For that, the kernel counts the capability
/// only in the initial user namespace, the one whose `uid_map` maps all numbers to themselves.
pub(super) fn may_lock(status: &str, uid_map: &str) -> bool {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    let is_of_all = uid_map.split_whitespace().eq(["0", "0", "4294967295"]);
    is_of_all && bits.is_some_and(|bits| bits & 1 << IPC_LOCK != 0)
}

/// The addresses of this host's network interfaces; none if they cannot be read.
fn interfaces() -> Vec<Interface> {
    let all = if_addrs::get_if_addrs().unwrap_or_default();
    let own = all.into_iter().map(|own| {
        let ip: IpAddr = own.ip();
        Interface { index: own.index.unwrap_or(0), name: own.name, ip }
    });
    own.collect()
}
