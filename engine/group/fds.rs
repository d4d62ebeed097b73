//! Descriptors handed over a unix socket, and one inherited from the process that started this one.

use std::net::TcpListener;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use tokio::net::UnixStream;

/// The most descriptors that are sent or taken at once.
pub(crate) const MAX_FDS: usize = 4;

/// What another process of this host handed over.
#[derive(Debug, Default)]
pub(crate) struct Handed {
    /// The descriptors it offered.
    pub(crate) fds: Vec<OwnedFd>,
    /// A pidfd of the process, if it is not this one and the system gives a pidfd.
    pub(crate) process: Option<OwnedFd>,
    /// The connection over which the descriptors came.
    pub(crate) line: Option<UnixStream>,
}

impl Handed {
    pub(crate) fn over(self, line: UnixStream) -> Handed {
        Handed { line: Some(line), ..self }
    }
}

/// A listening TCP socket at an inherited descriptor. The descriptor stays open (a later world may meet
/// there again) but is no longer passed on to processes that this one starts.
#[allow(unsafe_code)]
pub(crate) fn inherited_listener(fd: RawFd) -> Result<TcpListener, String> {
    let problem =
        |what: &str| format!("descriptor {fd} {what}; it must be an inherited listening TCP socket");
    if fd < 0 {
        return Err(problem("does not exist"));
    }
    // SAFETY: `borrow_raw` wants a descriptor other than -1 (checked above) that stays open while the
    // borrow lives. The launcher opened it for this process and named its number in ALLSTREAM_RENDEZVOUS_FD; nothing
    // else in this process knows the number, and no other code here closes it. The borrow ends with this function, which
    // only duplicates it and has it closed on exec: a number that is not open gives EBADF, one that is no listening
    // socket is refused below, and either way nothing is read, written or closed through it.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let copy = fcntl_dupfd_cloexec(borrowed, 3).map_err(|e| problem(&format!("cannot be used ({e})")))?;
    if !rustix::net::sockopt::socket_acceptconn(&copy).unwrap_or(false) {
        return Err(problem("is not a listening socket"));
    }
    fcntl_setfd(borrowed, FdFlags::CLOEXEC).map_err(|e| problem(&format!("cannot be used ({e})")))?;
    Ok(TcpListener::from(copy))
}

#[cfg(target_os = "linux")]
mod unix {
    use std::io::{self, IoSlice, IoSliceMut};
    use std::mem::MaybeUninit;
    use std::os::fd::AsFd;
    use std::os::linux::net::SocketAddrExt;

    use rustix::net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    };
    use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};
    use tokio::io::Interest;
    use tokio::net::{UnixListener, UnixStream};
    use tokio::time::Instant;

    use super::{Handed, MAX_FDS, OwnedFd};

    /// The bytes that come with the descriptors: these, and one more byte that says how many descriptors there are.
    const MARK: [u8; 7] = *b"ALLSFDS";

    /// Listens at a name in the abstract namespace, which is no file and is gone with the process.
    pub(crate) fn listen(name: &str) -> io::Result<UnixListener> {
        let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
        let listener = std::os::unix::net::UnixListener::bind_addr(&address)?;
        listener.set_nonblocking(true)?;
        UnixListener::from_std(listener)
    }

    /// Connects to the socket of that name; waits while its queue is full.
    pub(crate) async fn connect(name: &str, deadline: Instant) -> io::Result<UnixStream> {
        loop {
            match UnixStream::connect(format!("\0{name}")).await {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                    tokio::time::sleep(std::time::Duration::from_millis(5)).await;
                }
                end => return end,
            }
        }
    }

    /// Gives the other side duplicates of `ours` and takes as many as it offers.
    pub(crate) async fn exchange(stream: &UnixStream, ours: &[OwnedFd]) -> Result<Handed, String> {
        if ours.len() > MAX_FDS {
            return Err(format!("{} descriptors were to be sent; the limit is {MAX_FDS}", ours.len()));
        }
        send(stream, ours).await.map_err(|e| format!("sending descriptors: {e}"))?;
        // The pidfd is opened while the connection stands. If the process has exited all the same, and its number already belongs to another process,
        // the pidfd is of that one, and the exit is seen too late. But a process that still runs is never thought to have exited.
        let process = process_of(stream);
        let fds = receive(stream).await.map_err(|e| format!("receiving descriptors: {e}"))?;
        Ok(Handed { fds, process, line: None })
    }

    /// A pidfd of the process at the other end, whose number the system knows.
    fn process_of(stream: &UnixStream) -> Option<OwnedFd> {
        let pid = Pid::from_raw(stream.peer_cred().ok()?.pid()?)?;
        if pid == getpid() {
            return None;
        }
        let opened = pidfd_open(pid, PidfdFlags::empty());
        opened.inspect_err(|e| tracing::debug!("the exit of process {pid:?} will not be seen: {e}")).ok()
    }

    async fn send(stream: &UnixStream, fds: &[OwnedFd]) -> io::Result<()> {
        let mut text = [0; MARK.len() + 1];
        text[..MARK.len()].copy_from_slice(&MARK);
        text[MARK.len()] = fds.len() as u8;
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let sent = stream
            .async_io(Interest::WRITABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                if !borrowed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
                    return Err(io::Error::other("too many descriptors"));
                }
                Ok(sendmsg(stream, &[IoSlice::new(&text)], &mut control, SendFlags::NOSIGNAL)?)
            })
            .await?;
        // The kernel puts a message of 8 bytes into the unix socket's buffer whole, or lets it wait; it is not cut.
        if sent == text.len() { Ok(()) } else { Err(io::Error::other(format!("only {sent} bytes went"))) }
    }

    async fn receive(stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
        let mut fds = Vec::new();
        let mut text = Vec::with_capacity(MARK.len() + 1);
        while text.len() <= MARK.len() {
            let mut piece = [0; MARK.len() + 1];
            let room = piece.len() - text.len();
            let (bytes, flags) = stream
                .async_io(Interest::READABLE, || {
                    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
                    let mut control = RecvAncillaryBuffer::new(&mut space);
                    let into = &mut [IoSliceMut::new(&mut piece[..room])];
                    let got = recvmsg(stream, into, &mut control, RecvFlags::CMSG_CLOEXEC)?;
                    for message in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(received) = message {
                            fds.extend(received);
                        }
                    }
                    Ok((got.bytes, got.flags))
                })
                .await?;
            if bytes == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
                return Err(io::Error::other(
                    "descriptors were lost (more than allowed, or this process may open no more: see `ulimit -n`)",
                ));
            }
            text.extend_from_slice(&piece[..bytes]);
        }
        check(&text, fds.len()).map_err(io::Error::other)?;
        Ok(fds)
    }

    /// Whether the bytes that came with `count` descriptors are right.
    pub(super) fn check(text: &[u8], count: usize) -> Result<(), String> {
        match text.split_last() {
            Some((announced, mark)) if mark == MARK => {
                if usize::from(*announced) == count {
                    Ok(())
                } else {
                    Err(format!("{announced} descriptors were announced, {count} came"))
                }
            }
            _ => Err("the bytes do not announce descriptors".into()),
        }
    }
}

#[cfg(target_os = "linux")]
pub(crate) use unix::{connect, exchange, listen};

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn descriptors_arrive_usable_and_close_on_exec() {
        let (a, b) = tokio::net::UnixStream::pair().unwrap();
        let (read, write) = rustix::pipe::pipe().unwrap();
        let ours = [write];
        let both = async { tokio::join!(exchange(&a, &ours), exchange(&b, &[])) };
        let (none, got) = tokio::time::timeout(Duration::from_secs(10), both).await.unwrap();
        assert_eq!(none.unwrap().fds.len(), 0);
        let Handed { fds: mut got, process, .. } = got.unwrap();
        assert!(process.is_none(), "it is this process");
        let fd = got.pop().unwrap();
        assert!(got.is_empty() && fd.as_raw_fd() != ours[0].as_raw_fd());
        assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(FdFlags::CLOEXEC));
        std::fs::File::from(fd).write_all(b"hello").unwrap();
        drop(ours);
        let mut text = String::new();
        std::fs::File::from(read).read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello");
    }

    #[tokio::test]
    async fn too_many_or_none_or_garbage_is_an_error() {
        let (a, b) = tokio::net::UnixStream::pair().unwrap();
        let many: Vec<OwnedFd> = (0..5).map(|_| std::fs::File::open("/dev/null").unwrap().into()).collect();
        assert!(exchange(&a, &many).await.unwrap_err().contains("limit is 4"));
        b.try_write(b"GARBAGE!").unwrap();
        assert!(exchange(&a, &[]).await.is_err());
        drop(b);
        assert!(exchange(&a, &[]).await.is_err());
        assert!(unix::check(b"ALLSFDS\x02", 1).unwrap_err().contains("2 descriptors were announced, 1 came"));
        assert!(unix::check(b"", 0).is_err());
    }

    #[test]
    fn an_inherited_descriptor_must_be_a_listening_socket() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let copy = inherited_listener(listener.as_raw_fd()).unwrap();
        assert_eq!(copy.local_addr().unwrap(), listener.local_addr().unwrap());
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(inherited_listener(file.as_raw_fd()).unwrap_err().contains("not a listening socket"));
        assert!(inherited_listener(-1).is_err());
        assert!(inherited_listener(1 << 20).unwrap_err().contains("cannot be used"));
    }
}
