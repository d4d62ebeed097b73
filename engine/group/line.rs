//! The socket under a control connection: TCP; or, between processes of one host that share memory, the unix socket over which they
//! exchanged descriptors. No firewall rule and no interface that goes down can cut a unix socket.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::{TcpStream, UnixStream, tcp, unix};

/// A control connection.
pub(super) enum Line {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// The reading half of a [`Line`].
pub(super) enum LineIn {
    Tcp(tcp::OwnedReadHalf),
    Unix(unix::OwnedReadHalf),
}

/// The writing half of a [`Line`]. Dropping it shuts the socket down for writing.
pub(super) enum LineOut {
    Tcp(tcp::OwnedWriteHalf),
    Unix(unix::OwnedWriteHalf),
}

impl Line {
    pub(super) fn into_split(self) -> (LineIn, LineOut) {
        match self {
            Line::Tcp(stream) => {
                let (read, write) = stream.into_split();
                (LineIn::Tcp(read), LineOut::Tcp(write))
            }
            Line::Unix(stream) => {
                let (read, write) = stream.into_split();
                (LineIn::Unix(read), LineOut::Unix(write))
            }
        }
    }
}

impl LineOut {
    /// Writes as many bytes as the socket takes at once, and returns their number. Any thread may call this.
    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            LineOut::Tcp(half) => half.try_write(bytes),
            LineOut::Unix(half) => half.try_write(bytes),
        }
    }

    pub(super) async fn writable(&self) -> io::Result<()> {
        match self {
            LineOut::Tcp(half) => half.writable().await,
            LineOut::Unix(half) => half.writable().await,
        }
    }
}

impl AsyncRead for LineIn {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            LineIn::Tcp(half) => Pin::new(half).poll_read(cx, into),
            LineIn::Unix(half) => Pin::new(half).poll_read(cx, into),
        }
    }
}
