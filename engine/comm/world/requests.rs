//! The socket at which a running process is asked for its flight recorders (`allstream trace --pid`). Its name has the process's number
//! in it. Whoever connects is sent a line of JSON for each rank of the process; the operations of the process go on meanwhile.
//!
//! The socket's name is an abstract one of Linux, so there is no file. The socket is open as long as the process is in a world, and answers
//! only the same user and root.

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

    /// How long a visitor may take to read the answer. Until then the next visitor waits.
    const PATIENCE: Duration = Duration::from_secs(10);

    struct Listening {
        worlds: Vec<Weak<World>>,
        task: Option<AbortHandle>,
    }

    static LISTENING: Mutex<Listening> = Mutex::new(Listening { worlds: Vec::new(), task: None });

    /// Adds the world of a rank of this process to what visitors are sent. The first world opens the socket.
    ///
    /// # Errors
    /// The control thread, which serves the socket, cannot be started.
    pub(in crate::comm) fn listen(world: Weak<World>) -> Result<(), Error> {
        let mut listening = LISTENING.lock();
        listening.worlds.push(world);
        if listening.task.is_none() {
            let task = runtime::spawn(async {
                match fds::listen(&socket_of(std::process::id())) {
                    Ok(socket) => serve(socket).await,
                    // Another program has the name, or a process of the same number in a container that shares this one's
                    // network namespace. The ranks work without the socket.
                    Err(error) => tracing::debug!(%error, "requests for flight recorders are not heard"),
                }
            })?;
            listening.task = Some(task.abort_handle());
        }
        Ok(())
    }

    /// Removes a world that its rank leaves. With the last one the socket is closed.
    pub(in crate::comm) fn leave(world: &World) {
        // In a forked child the lock may be locked for ever, as another thread may have held it at the fork.
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
                // For example, the process has no descriptor left for the visitor.
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

/// Does nothing: only Linux has sockets without a file.
#[cfg(not(target_os = "linux"))]
pub(in crate::comm) fn listen(_: std::sync::Weak<super::World>) -> Result<(), crate::error::Error> {
    Ok(())
}

/// Does nothing, as [`listen`].
#[cfg(not(target_os = "linux"))]
pub(in crate::comm) fn leave(_: &super::World) {}
