//! The processes: this one is rank 0 and starts the others, each in a network namespace of its own if there are any.

use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use allstream::{Comm, LinkChoice, Rendezvous};
use futures::executor::block_on;

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

/// Runs `rank` as rank 0 of `ranks`, after starting the others, which run this program with the same options. They meet over TCP, also
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
    // In namespaces each rank is a host of its own.
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
    others.wait()?;
    Ok(result)
}

/// What only our own processes know.
fn secret() -> Result<String> {
    let mut bytes = [0_u8; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The processes of the other ranks. Those that have not ended when this goes are killed.
struct Others(Vec<(usize, Child)>);

impl Others {
    fn wait(mut self) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        for (rank, child) in &mut self.0 {
            let status = loop {
                match child.try_wait()? {
                    Some(status) => break status,
                    None if Instant::now() > end => return Err(format!("rank {rank} does not end").into()),
                    None => thread::sleep(Duration::from_millis(1)),
                }
            };
            if !status.success() {
                return Err(format!("rank {rank} failed: {status}").into());
            }
        }
        Ok(())
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        // A rank that has failed too may still be about to say why.
        let end = Instant::now() + Duration::from_secs(2);
        for (_, child) in &mut self.0 {
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
                thread::sleep(Duration::from_millis(1));
            }
            // Fails only for those that have ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
