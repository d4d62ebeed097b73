//! Connections that come while this process has no descriptor left.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{DuplexStream, duplex};

use super::*;
use crate::group::accept::{Listen, Porter, serve};
use crate::group::handshake::{Purpose, Refusal, Token, dial};

/// A listener that has no descriptor at first. When the reserve is closed, one connection comes, late.
struct Full {
    calls: AtomicUsize,
    late: Duration,
    visitor: Mutex<Option<DuplexStream>>,
}

impl Listen for Full {
    type Stream = DuplexStream;
    async fn next(&self) -> io::Result<(DuplexStream, String)> {
        if self.calls.fetch_add(1, Ordering::SeqCst) == 0 {
            return Err(rustix::io::Errno::MFILE.into());
        }
        tokio::time::sleep(self.late).await;
        let visitor = self.visitor.lock().take();
        match visitor {
            Some(visitor) => Ok((visitor, "a late rank".into())),
            None => std::future::pending().await,
        }
    }
}

/// A rank that comes at the last moment still has time to hear the reason, and this rank hears who came.
#[tokio::test]
async fn a_rank_that_comes_late_hears_why_it_is_turned_away() {
    let token = Token::new(b"a secret");
    let (mut theirs, ours) = duplex(4096);
    let late = Duration::from_millis(900);
    let full = Full { calls: AtomicUsize::new(0), late, visitor: Mutex::new(Some(ours)) };
    let (tell, told) = std::sync::mpsc::channel();
    let turned_away = move |why: &str, purpose: &Purpose| drop(tell.send((why.to_owned(), purpose.clone())));
    let porter = Porter { rank: 3, token: token.clone(), turned_away };
    let serving = tokio::spawn(serve(full, porter, |_: DuplexStream, _| async { Ok(()) }));
    // The rank says its first word when the second for which the listener waits for a connection is already over.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let purpose = Purpose::Local { world: [7; 16], from: 5 };
    let end = tokio::time::Instant::now() + LIMIT;
    match dial(&mut theirs, &token, &purpose, end).await {
        Err(Refusal::Denied(why)) => assert!(why.contains("rank 3 cannot take one more connection"), "{why}"),
        other => panic!("it was not told why: {other:?}"),
    }
    let (why, whose) = told.recv_timeout(LIMIT).unwrap();
    assert!(why.contains("rank 3") && whose == purpose, "{why}, {whose:?}");
    serving.abort();
}
