//! [`Rendezvous::from_env`], and what a process does if two launchers have set variables that contradict each other.

use std::sync::mpsc;
use std::time::Duration;

use super::env::Rendezvous;
use super::gather::decline;
use super::launchers::Lookup;
use super::runtime;
use crate::error::Error;

/// How long a process whose launchers contradict each other tries to tell rank 0 of that.
const TELLING: Duration = Duration::from_secs(5);

impl Rendezvous {
    /// Reads rank, size, address, secret and options from the environment.
    ///
    /// - Rank and size: `RANK` and `WORLD_SIZE` (torchrun, `allstream run`), `OMPI_COMM_WORLD_RANK` and `OMPI_COMM_WORLD_SIZE` (Open MPI), `PMI_RANK`
    ///   and `PMI_SIZE` (MPICH), or `SLURM_PROCID` and `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS` (Slurm). Two launchers that contradict each other are
    ///   an error, unless one is known to run inside the other; so is a Slurm batch script, which is no rank of a step. If two launchers give this
    ///   process different ranks, in worlds of the same size, it also tells rank 0 of that, which takes some seconds at most: both launchers may
    ///   agree on which process is rank 0, and that process would wait for the others in vain.
    /// - Address: `MASTER_ADDR`. Unset under Slurm: the first node of `SLURM_STEP_NODELIST` (or
    ///   `SLURM_JOB_NODELIST`), or else `SLURM_LAUNCH_NODE_IPADDR`.
    /// - Port: `ALLSTREAM_PORT`, or `MASTER_PORT`. Where torchrun's own store listens at the latter
    ///   (`TORCHELASTIC_USE_AGENT_STORE`), `10000 + MASTER_PORT % 20000` instead. Unset under Slurm: the first of
    ///   `SLURM_STEP_RESV_PORTS`, or one from 10000 to 29999 that follows from `SLURM_JOB_ID` and `SLURM_STEP_ID`. If `ALLSTREAM_PORTS` is
    ///   set, a port that is computed so is one of those ports.
    /// - Under Open MPI, if all ranks run on one host and no variable for address or port is set, ranks find each other by a note in
    ///   the job's own directory (`PMIX_SERVER_TMPDIR`), which also holds a secret.
    /// - Secret: `ALLSTREAM_TOKEN`, or `ALLSTREAM_TOKEN_FILE`, or `ALLSTREAM_INSECURE=1` for none.
    /// - Options: `ALLSTREAM_RENDEZVOUS_TIMEOUT` and `ALLSTREAM_HEARTBEAT_TIMEOUT` (seconds),
    ///   `ALLSTREAM_LINK` (`auto`, `shm`, `tcp`, `rdma`, `inproc`), `ALLSTREAM_HOST_ID` (ranks that say the same
    ///   count as on one host), `ALLSTREAM_RENDEZVOUS_FD` (rank 0's listening socket, inherited).
    /// - `ALLSTREAM_INTERFACE` (at which of this host's addresses the others reach this rank) and `ALLSTREAM_PORTS` (at which of its
    ///   ports) are read when the rank connects, even if everything else is given in code.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the variables that were looked for and what was found.
    pub fn from_env() -> Result<Rendezvous, Error> {
        Self::from_lookup(&variable).inspect_err(tell_rank_0)
    }

    /// Like [`from_env`](Self::from_env), but gives a world of one rank if no launcher has started this process, so that the program also runs by
    /// itself.
    ///
    /// # Errors
    /// The errors of `from_env`, if any of its variables for a rank or a size is set, even if that is only half of what a launcher sets. Slurm's
    /// variables for the size do not count: they are also set where nothing was launched.
    pub fn from_env_or_alone() -> Result<Rendezvous, Error> {
        Self::from_lookup_or_alone(&variable).inspect_err(tell_rank_0)
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

fn tell_rank_0(error: &Error) {
    let get: Lookup<'_> = &variable;
    if let Some(rendezvous) = Rendezvous::disputed(get) {
        decline_blocking(rendezvous, error);
    }
}

/// Tells rank 0 that this process cannot take part, and waits until that is done, but for `TELLING` at most.
pub(super) fn decline_blocking(rendezvous: Rendezvous, error: &Error) {
    if runtime::is_control_thread() {
        return;
    }
    let (tell, told) = mpsc::channel();
    let declining = decline(rendezvous.timeout(TELLING), error.to_string());
    let task = runtime::spawn(async move {
        let _ = tell.send(declining.await);
    });
    if let Ok(task) = task {
        let end = told.recv_timeout(TELLING);
        task.abort();
        match end {
            Ok(Ok(_)) => tracing::debug!("rank 0 was told that this process cannot take part"),
            Ok(Err(problem)) => {
                tracing::debug!("rank 0 could not be told that this process cannot take part: {problem}")
            }
            Err(_) => {
                tracing::debug!("rank 0 was not told within {TELLING:?} that this process cannot take part")
            }
        }
    }
}
