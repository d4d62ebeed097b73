//! Reads rank, size and the ranks' meeting place from the variables that launchers set.

use std::net::Ipv6Addr;
use std::path::PathBuf;

use super::address::{Address, host_name, port_number};
use super::addresses;
use crate::types::{MOST_RANKS, Rank};

/// Launchers, with their variables for rank and size. The first one whose two variables are set is believed, unless a later one contradicts it
/// ([`contradiction`]). Slurm comes last: if another launcher runs in a Slurm allocation, its ranks inherit Slurm's variables, which there describe
/// the launcher's own process.
const LAUNCHERS: [(&str, &str, &str); 5] = [
    ("torchrun, allstream run", "RANK", "WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
];

/// From this number on, a Slurm step id names no step, but a process outside of all steps, such as a batch script.
const FIRST_SLURM_STEP_THAT_IS_NONE: u32 = 0xffff_fff0;

/// Unless the user names ports, those that [`derived`] makes up lie in `FIRST_PORT..FIRST_PORT + PORTS`, below those that the
/// system gives out by itself.
const FIRST_PORT: u16 = 10_000;
const PORTS: u64 = 20_000;

/// Reads one variable of the environment. The functions of this file are given one that returns `None` for an empty variable, too.
pub(super) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Where the ranks of a world meet.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Meeting {
    /// Rank 0 listens at this address. The caller gets the secret separately.
    At(Address),
    /// All ranks are on one host. Rank 0 writes its address and a secret into this file, in a directory that belongs to
    /// this job and user alone.
    Note(PathBuf),
}

/// The variables by which a process knows that a launcher has started it. Slurm's variables for the size are left out: they are also
/// set in the shell of an allocation.
pub(super) fn marks() -> impl Iterator<Item = &'static str> {
    let of = |(launcher, rank, size)| [Some(rank), (launcher != "Slurm").then_some(size)];
    LAUNCHERS.into_iter().flat_map(of).flatten().chain(["PMIX_RANK"])
}

pub(super) fn check_place(rank: Rank, size: usize) -> Result<(), String> {
    if size == 0 {
        return Err("a world has at least 1 rank; the size given is 0".into());
    }
    if size > MOST_RANKS {
        return Err(format!("a world has at most {MOST_RANKS} ranks; the size given is {size}"));
    }
    if rank >= size {
        return Err(format!("rank {rank} does not exist in a world of {size}: ranks are 0 to {}", size - 1));
    }
    Ok(())
}

/// Rank and size, from the first launcher that says both.
pub(super) fn place(get: Lookup<'_>) -> Result<(Rank, usize), String> {
    let mut half = Vec::new();
    for (which, (launcher, rank_name, size_name)) in LAUNCHERS.into_iter().enumerate() {
        let (rank, size) = match (get(rank_name), get(size_name)) {
            (Some(rank), Some(size)) => (rank, size),
            (None, None) => continue,
            (Some(rank), None) => {
                half.push(format!("{rank_name}={rank} is set, but {size_name} is not"));
                continue;
            }
            (None, Some(size)) => {
                half.push(format!("{size_name}={size} is set, but {rank_name} is not"));
                continue;
            }
        };
        let number = |name: &str, text: &str| {
            text.trim().parse::<usize>().map_err(|_| format!("{name} is `{text}`; expected a whole number"))
        };
        let (rank, size) = (number(rank_name, &rank)?, number(size_name, &size)?);
        check_place(rank, size)
            .map_err(|e| format!("{rank_name}={rank}, {size_name}={size} ({launcher}): {e}"))?;
        if launcher == "Slurm" && size > 1 && !is_slurm_step(get) {
            return Err(format!(
                "{rank_name}={rank} and {size_name}={size} are those of a batch script, and not of a step: nothing has started the \
                 other ranks. Start them all by srun in the script (`srun python train.py`, or `srun PROGRAM`); to run alone, \
                 say so by RANK=0 WORLD_SIZE=1"
            ));
        }
        return match contradiction(get, which, (rank, size)) {
            Some((_, problem)) => Err(problem),
            None => Ok((rank, size)),
        };
    }
    if let Some(rank) = get("PMIX_RANK") {
        half.push(format!(
            "PMIX_RANK={rank} is set, but PMIx has no variable for the size: set RANK and WORLD_SIZE"
        ));
    }
    let wanted = LAUNCHERS.map(|(launcher, rank, size)| format!("{rank} and {size} ({launcher})")).join(", ");
    let found = if half.is_empty() { "none of them is set".into() } else { half.join("; ") };
    Err(format!(
        "no rank: looked for {wanted}; {found}. Start the ranks with `allstream run -n 4 PROGRAM`, or with torchrun, \
         mpirun or srun, or set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and ALLSTREAM_TOKEN yourself; a program that \
         should also run without a launcher, as a world of one rank, calls Rendezvous::from_env_or_alone"
    ))
}

/// Whether srun has started this process. srun sets the variables that are read here; in a batch script's own process they are
/// missing, or the step id names no step.
fn is_slurm_step(get: Lookup<'_>) -> bool {
    let number =
        get("SLURM_STEP_ID").or_else(|| get("SLURM_STEPID")).and_then(|text| text.trim().parse().ok());
    let is_one = number.is_some_and(|step: u32| step < FIRST_SLURM_STEP_THAT_IS_NONE);
    is_one || ["SLURM_STEP_NUM_TASKS", "SLURM_LAUNCH_NODE_IPADDR"].into_iter().any(|name| get(name).is_some())
}

/// Two launchers may have started this process, one inside the other, so that the outer one's variables are still set. Returns
/// another launcher's rank and size, and an error text, if they differ from the believed ones and may be the inner launcher's.
fn contradiction(get: Lookup<'_>, which: usize, believed: (Rank, usize)) -> Option<((Rank, usize), String)> {
    let (launcher, rank_name, size_name) = LAUNCHERS[which];
    let (rank, size) = believed;
    // torchrun numbers its own ranks, so it is the inner launcher where mpirun or srun has started it.
    if launcher == "Slurm" || (which == 0 && get("TORCHELASTIC_RUN_ID").is_some()) {
        return None;
    }
    for (other, other_rank_name, other_size_name) in LAUNCHERS.into_iter().skip(which + 1) {
        let Some((other_rank, other_size)) = pair(get, other_rank_name, other_size_name) else { continue };
        let is_inner = match other {
            // Slurm's variables are also set where another launcher runs in an allocation, and srun may set PMI's itself. They
            // contradict RANK and WORLD_SIZE only in a step of the same size, which then numbers the same world's ranks otherwise.
            "Slurm" => which > 0 || size != other_size || !is_slurm_step(get),
            "MPICH" if get("SLURM_PROCID").is_some() => true,
            // A user may start several ranks in each rank of another launcher, and number them by LOCAL_RANK.
            _ => which == 0 && size > other_size && get("LOCAL_RANK").is_some(),
        };
        if (other_rank, other_size) != believed && !is_inner {
            let problem = format!(
                "two launchers say who this is: by {rank_name}={rank} and {size_name}={size} ({launcher}) rank {rank} of {size}, by \
                 {other_rank_name}={other_rank} and {other_size_name}={other_size} ({other}) rank {other_rank} of {other_size}. \
                 Take those away that are not of the launcher that starts the ranks: `env -u {rank_name} -u {size_name} PROGRAM` \
                 leaves those of {other}"
            );
            return Some(((other_rank, other_size), problem));
        }
    }
    None
}

fn pair(get: Lookup<'_>, rank_name: &str, size_name: &str) -> Option<(Rank, usize)> {
    let number = |name: &str| get(name)?.trim().parse::<usize>().ok();
    Some((number(rank_name)?, number(size_name)?))
}

/// If two launchers give this process different ranks in worlds of the same size: the higher rank, and the size. Under that rank the process tells
/// rank 0 of the contradiction: both launchers may agree on rank 0's process, which would wait for the others in vain.
pub(super) fn disputed(get: Lookup<'_>) -> Option<(Rank, usize)> {
    let said = LAUNCHERS
        .iter()
        .enumerate()
        .find_map(|(which, (_, rank, size))| Some((which, pair(get, rank, size)?)));
    let (which, believed) = said?;
    let ((rank, size), _) = contradiction(get, which, believed)?;
    let place = (believed.0.max(rank), size);
    (size == believed.1 && check_place(place.0, place.1).is_ok()).then_some(place)
}

/// Where the ranks meet: at the address that the user has set, or at one that follows from the launcher's variables.
pub(super) fn meeting(get: Lookup<'_>) -> Result<Meeting, String> {
    let said = ["MASTER_ADDR", "MASTER_PORT", "ALLSTREAM_PORT"].into_iter().any(|name| get(name).is_some());
    if let (false, Some(path)) = (said, note(get)) {
        return Ok(Meeting::Note(path));
    }
    let host = host(get)?;
    let port = port(get)?;
    Ok(Meeting::At(Address { host, port }))
}

fn host(get: Lookup<'_>) -> Result<String, String> {
    let (name, host) = match get("MASTER_ADDR") {
        Some(host) => ("MASTER_ADDR", host),
        None => slurm_host(get)?.ok_or_else(|| no_address(get))?,
    };
    let trimmed = host.trim();
    let bare = trimmed.split('%').next().unwrap_or(trimmed).parse::<Ipv6Addr>().is_ok();
    let host = if bare { Ok(trimmed.into()) } else { host_name(trimmed) };
    host.map_err(|e| format!("{name} is `{trimmed}`; expected a host name or an address: {e}"))
}

fn no_address(get: Lookup<'_>) -> String {
    let set = |name: &str| get(name).is_some();
    let why = if set("OMPI_COMM_WORLD_RANK") {
        " Open MPI does not say where rank 0 runs (where all ranks run on one host, and neither MASTER_PORT nor \
         ALLSTREAM_PORT is set, they find each other through PMIX_SERVER_TMPDIR): add -x MASTER_ADDR=HOST -x \
         MASTER_PORT=29600 -x ALLSTREAM_TOKEN to mpirun"
    } else if set("PMI_RANK") {
        " MPICH's launcher does not say where rank 0 runs: add -genv MASTER_ADDR HOST -genv MASTER_PORT 29600 to it"
    } else {
        ""
    };
    format!(
        "no address: MASTER_ADDR is not set (nor, which counts under Slurm, SLURM_STEP_NODELIST, SLURM_JOB_NODELIST or \
         SLURM_LAUNCH_NODE_IPADDR); set it to the name or address of rank 0's host, 127.0.0.1 if all ranks run on \
         one.{why}"
    )
}

fn port(get: Lookup<'_>) -> Result<u16, String> {
    let number = |name: &str, text: &str| port_number(text.trim()).map_err(|e| format!("{name}: {e}"));
    if let Some(port) = get("ALLSTREAM_PORT") {
        return number("ALLSTREAM_PORT", &port);
    }
    if let Some(port) = get("MASTER_PORT") {
        let port = number("MASTER_PORT", &port)?;
        // torchrun's own store listens at this port. All ranks derive the same other port from it.
        let taken =
            get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v.trim().eq_ignore_ascii_case("true"));
        return Ok(if taken { derived(get, port.into())? } else { port });
    }
    slurm_port(get)?.ok_or_else(|| {
        String::from(
            "no port: MASTER_PORT is not set (nor ALLSTREAM_PORT); set it to a free port of rank 0's host, the same on \
             all ranks",
        )
    })
}

/// Computes a port from a number. Equal numbers give equal ports, numbers that follow each other give different ones, and no number gives itself.
/// If the user has said which ports ranks may take, the result is one of those; if they are a single port, every number gives that port.
fn derived(get: Lookup<'_>, from: u64) -> Result<u16, String> {
    let Some(text) = get(addresses::PORTS) else {
        return Ok(FIRST_PORT + u16::try_from(from % PORTS).unwrap_or_default());
    };
    let ports = addresses::ports(&text)?;
    let (first, count) = (u64::from(*ports.start()), u64::from(ports.end() - ports.start()) + 1);
    // A number among these ports gives the port after it, and the last of them gives the first.
    let place = (from % count + count - first % count + 1) % count;
    Ok(u16::try_from(first + place).unwrap_or(*ports.start()))
}

/// The file for rank 0's note, if Open MPI runs all ranks on one host. It lies in the directory of Open MPI's server, which
/// only this user may enter, and which is removed with the job.
fn note(get: Lookup<'_>) -> Option<PathBuf> {
    get("OMPI_COMM_WORLD_RANK")?;
    if get("OMPI_COMM_WORLD_LOCAL_SIZE")?.trim() != get("OMPI_COMM_WORLD_SIZE")?.trim() {
        return None;
    }
    let (dir, job) = (get("PMIX_SERVER_TMPDIR")?, get("PMIX_NAMESPACE")?);
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let job: String = job.trim().chars().map(plain).take(100).collect();
    let dir = PathBuf::from(dir);
    dir.is_absolute().then(|| dir.join(format!("allstream-{job}")))
}

/// The host of Slurm's task 0, which is the first node of the step, and the variable that names it. If the step has only
/// one node, the host is 127.0.0.1, as the ranks need no network. Where no list of nodes is set: the host on which srun was called.
///
/// If the first list that is set cannot be read, that is an error: the first node of another list may have no rank of the step, and the ranks would
/// wait there.
fn slurm_host(get: Lookup<'_>) -> Result<Option<(&'static str, String)>, String> {
    if get("SLURM_PROCID").is_none() {
        return Ok(None);
    }
    for name in ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"] {
        let Some(list) = get(name) else { continue };
        let (first, only) = first_node(&list).ok_or_else(|| {
            format!(
                "{name} is `{list}`; expected a list of nodes such as `node[01-04,7]`. Set MASTER_ADDR to the name or address of \
                 rank 0's host instead"
            )
        })?;
        return Ok(Some((name, if only { "127.0.0.1".into() } else { first })));
    }
    Ok(get("SLURM_LAUNCH_NODE_IPADDR").map(|address| ("SLURM_LAUNCH_NODE_IPADDR", address)))
}

/// The first of a list such as `gpu7,node[01-04,7],rack[1-2]n[3,5]`, and whether it is the only one.
fn first_node(list: &str) -> Option<(String, bool)> {
    let mut first = String::new();
    let mut only = true;
    let mut rest = list.trim();
    while let Some(at) = rest.find([',', '[']) {
        first.push_str(&rest[..at]);
        if rest[at..].starts_with(',') {
            return (!first.is_empty()).then_some((first, false));
        }
        let (inside, after) = rest[at + 1..].split_once(']')?;
        let number = inside.split([',', '-']).next()?;
        only &= number.len() == inside.len();
        first.push_str(number);
        rest = after;
    }
    first.push_str(rest);
    (!first.is_empty() && !first.contains(']')).then_some((first, only))
}

/// A port that Slurm reserved for the step, or one derived from job and step.
fn slurm_port(get: Lookup<'_>) -> Result<Option<u16>, String> {
    if get("SLURM_PROCID").is_none() {
        return Ok(None);
    }
    let name = "SLURM_STEP_RESV_PORTS";
    if let Some(ports) = get(name) {
        let first = ports.split([',', '-']).next().unwrap_or_default();
        return port_number(first.trim()).map(Some).map_err(|e| format!("{name} is `{ports}`: {e}"));
    }
    let number = |name: &str| get(name).and_then(|text| text.trim().parse::<u64>().ok());
    let Some(job) = number("SLURM_JOB_ID").or_else(|| number("SLURM_JOBID")) else { return Ok(None) };
    // Jobs that run at the same time have numbers near each other, and so have the steps of a job. With a prime factor for the step, a step of one
    // job seldom gets the port of a step of another job.
    let step = number("SLURM_STEP_ID").or_else(|| number("SLURM_STEPID")).unwrap_or(0) % PORTS;
    derived(get, job % PORTS + 613 * step).map(Some)
}

#[cfg(test)]
#[path = "tests/launchers.rs"]
mod tests;
