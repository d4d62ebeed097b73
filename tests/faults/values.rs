//! Invalid values, which no correct rank sends.

use std::time::Duration;

use allstream::{Comm, Error, HostMemory};

use crate::harness::{Link, alone, on_threads, world};

/// Bytes that pose as bools. Nothing on this rank reads them as bools.
struct Lies(Vec<u8>);

// SAFETY: the memory is that of a vector, which keeps its address and length as long as the vector is not changed. The promise that its elements
// are valid bools is broken on purpose: the sender's engine only copies the bytes, and reads none of them as a `bool`.
unsafe impl HostMemory for Lies {
    type Elem = bool;
    fn ptr(&self) -> *const bool {
        self.0.as_ptr().cast()
    }
    fn ptr_mut(&mut self) -> *mut bool {
        self.0.as_mut_ptr().cast()
    }
    fn count(&self) -> usize {
        self.0.len()
    }
}

/// Calls that copy values. (Reductions accept any byte as a bool, and their results are valid bools.)
const CALLS: [&str; 4] = ["broadcast", "gather", "all_to_all", "message"];

/// Rank 0 sends bytes that are no bools, and rank 1 receives them. Returns this rank's error.
async fn call(comm: &mut Comm, what: &str, count: usize) -> Option<Error> {
    let rank = comm.rank();
    let (lies, truth) = (|| Lies(vec![2; count]), || vec![true; count]);
    let soon = comm.timeout(Duration::from_secs(5));
    match (what, rank) {
        ("broadcast", 0) => soon.broadcast(lies(), 0).await.map(drop).err().map(Error::from),
        ("broadcast", _) => soon.broadcast(truth(), 0).await.map(drop).err().map(Error::from),
        ("gather", 0) => soon.gather(lies(), 1).await.map(drop).err().map(Error::from),
        ("gather", _) => soon.gather(truth(), 1).await.map(drop).err().map(Error::from),
        ("all_to_all", 0) => {
            // Rank 0's block for itself is valid: else rank 0 could be the first to find an invalid byte, and blame rank 1.
            let sent = Lies([vec![1; count], vec![2; count]].concat());
            let into = Lies(vec![0; 2 * count]);
            soon.all_to_all_into(sent, into).await.map(drop).err().map(Error::from)
        }
        ("all_to_all", _) => soon.all_to_all(vec![true; 2 * count]).await.map(drop).err().map(Error::from),
        (_, 0) => soon.send(lies(), 1).await.map(drop).err().map(Error::from),
        _ => soon.recv(truth(), 0).await.map(drop).err().map(Error::from),
    }
}

#[test]
fn a_bool_that_is_neither_true_nor_false_never_reaches_the_user() {
    let _alone = alone();
    for link in [Link::Local, Link::Shm, Link::Tcp] {
        let ends = on_threads(world(link, 2), move |mut world| async move {
            let mut ends = Vec::new();
            for what in CALLS {
                for count in [5, 100_000] {
                    let mut comm = world.dup().await.unwrap();
                    ends.push((what, count, call(&mut comm, what, count).await));
                    drop(comm);
                }
            }
            ends
        });
        for (what, count, end) in &ends[1] {
            let told = end.as_ref().map(Error::to_string).unwrap_or_else(|| "nothing".into());
            assert!(told.contains("neither 0 nor 1"), "{link:?}, {what} of {count}: {told}");
            assert!(told.contains("rank 0 (world rank 0) sent"), "{link:?}, {what} of {count}: {told}");
        }
    }
}
