//! The processes: this one is rank 0 and starts the others, each in a network namespace of its own if `--netns` names them.

#[path = "../shared/others.rs"]
mod others;

use std::net::{IpAddr, TcpListener};
use std::process::{Command, Stdio};
use std::time::Duration;

use allstream::{Comm, LinkChoice, Rendezvous};
use futures::executor::block_on;

use self::others::{Others, secret};
use super::Result;

/// How long ranks wait for each other to come, and rank 0 for the others to end.
const PATIENCE: Duration = Duration::from_secs(30);

/// Whether this process is a rank that another has started.
pub(crate) fn is_started() -> bool {
    std::env::var_os("RANK").is_some()
}

/// Runs `rank` as the rank that the environment names.
pub(crate) fn join(rank: impl AsyncFnOnce(&mut Comm) -> Result<()>) -> Result<()> {
    block_on(async {
        let mut comm = Comm::connect(Rendezvous::from_env()?.timeout(PATIENCE)).await?;
        rank(&mut comm).await?;
        Ok(comm.close().await?)
    })
}

/// Runs `rank` as rank 0 of `ranks`, after starting the others, which run this program with the same options. All links are TCP, also
/// on one host.
pub(crate) fn start<T>(
    ranks: usize,
    listen: IpAddr,
    netns: Option<&str>,
    rank: impl AsyncFnOnce(&mut Comm) -> Result<T>,
) -> Result<T> {
    // The socket is ours before anyone is told of its port.
    let listener = TcpListener::bind((listen, 0)).map_err(|e| {
        format!("listen at {listen}: {e}; --listen takes an address of the namespace that this runs in")
    })?;
    let at = listener.local_addr()?;
    let token = secret()?;
    // In network namespaces each rank counts as a host of its own.
    let host_id = |rank: usize| if netns.is_some() { format!("study-{rank}") } else { "study".into() };
    let mut others = Others(Vec::new());
    for rank in 1..ranks {
        let program = std::env::current_exe()?;
        let mut command = match netns {
            None => Command::new(program),
            Some(prefix) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", &format!("{prefix}{rank}")]).arg(program);
                command
            }
        };
        command
            .args(std::env::args_os().skip(1))
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", at.ip().to_string())
            .env("MASTER_PORT", at.port().to_string())
            .env("ALLSTREAM_TOKEN", &token)
            .env("ALLSTREAM_LINK", "tcp")
            .env("ALLSTREAM_HOST_ID", host_id(rank))
            .stdin(Stdio::null());
        let child = command.spawn().map_err(|e| format!("start rank {rank}: {e}"))?;
        others.0.push((rank, child));
    }
    let result = block_on(async {
        let meeting = Rendezvous::tcp(&format!("tcp://{at}"), 0, ranks)?;
        let meeting = meeting.token(token).link(LinkChoice::TCP).host_id(host_id(0));
        let mut comm = Comm::connect(meeting.timeout(PATIENCE).listener(listener)).await?;
        let result = rank(&mut comm).await?;
        comm.close().await?;
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(result)
    })?;
    others.wait(PATIENCE, |code| code == 0)?;
    Ok(result)
}
