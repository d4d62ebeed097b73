//! Whoever wants to see the flight recorders of a running process connects to a socket that is named after it, and is sent them: a line
//! of JSON for each rank's world (`allstream trace --pid`). The process is not stopped, and nothing waits for it.
//!
//! The socket has no file; it is there as long as the process is in a world. Only the same user and root are answered.

#[cfg(target_os = "linux")]
pub(in crate::comm) use self::linux::{leave, listen};

#[cfg(target_os = "linux")]
mod linux {
    use std::sync::Weak;
    use std::time::Duration;

    use parking_lot::Mutex;
    use tokio::io::AsyncWriteExt;
    use tokio::net::{UnixListener, UnixStream};
    use tokio::task::AbortHandle;
    use tokio::time::timeout;

    use crate::comm::world::World;
    use crate::error::Error;
    use crate::forked;
    use crate::group::{fds, runtime};
    use crate::trace::socket_of;
    use crate::trace::writer::Recorded;

    /// How long whoever asks may take to read the answer.
    const PATIENCE: Duration = Duration::from_secs(10);

    struct Listening {
        worlds: Vec<Weak<World>>,
        task: Option<AbortHandle>,
    }

    static LISTENING: Mutex<Listening> = Mutex::new(Listening { worlds: Vec::new(), task: None });

    /// From now on, a request to this process is one to this rank, too.
    ///
    /// # Errors
    /// There is no control thread.
    pub(in crate::comm) fn listen(world: Weak<World>) -> Result<(), Error> {
        let mut listening = LISTENING.lock();
        listening.worlds.push(world);
        if listening.task.is_none() {
            let task = runtime::spawn(async {
                match fds::listen(&socket_of(std::process::id())) {
                    Ok(socket) => serve(socket).await,
                    // Another network namespace may be entered later, or the name be another program's.
                    Err(error) => tracing::debug!(%error, "requests for flight recorders are not heard"),
                }
            })?;
            listening.task = Some(task.abort_handle());
        }
        Ok(())
    }

    /// A rank leaves its world. The last one takes the socket with it.
    pub(in crate::comm) fn leave(world: &World) {
        // A lock that another thread may have held at the fork.
        if forked::is_forked() {
            return;
        }
        let mut listening = LISTENING.lock();
        listening.worlds.retain(|other| !std::ptr::eq(other.as_ptr(), world));
        if listening.worlds.is_empty()
            && let Some(task) = listening.task.take()
        {
            task.abort();
        }
    }

    async fn serve(socket: UnixListener) {
        loop {
            match socket.accept().await {
                Ok((visitor, _)) => _ = timeout(PATIENCE, answer(visitor)).await,
                // No descriptor is left, say.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    async fn answer(mut visitor: UnixStream) -> std::io::Result<()> {
        let (theirs, ours) = (visitor.peer_cred()?.uid(), rustix::process::geteuid().as_raw());
        if theirs != ours && theirs != 0 {
            return Ok(());
        }
        let worlds = LISTENING.lock().worlds.clone();
        for world in worlds {
            let Some(recording) = world.upgrade().map(|world| world.recording(None)) else { continue };
            let mut line = serde_json::to_vec(&recording)?;
            line.push(b'\n');
            visitor.write_all(&line).await?;
        }
        visitor.shutdown().await
    }
}

/// There are no sockets without a file here.
#[cfg(not(target_os = "linux"))]
pub(in crate::comm) fn listen(_: std::sync::Weak<super::World>) -> Result<(), crate::error::Error> {
    Ok(())
}

/// There are no sockets without a file here.
#[cfg(not(target_os = "linux"))]
pub(in crate::comm) fn leave(_: &super::World) {}
