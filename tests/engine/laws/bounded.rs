//! Law 10: bounded.

use std::time::Instant;

use allstream::{Comm, Error, Message};
use futures::executor::block_on;

use super::house::*;

/// A rank that is far ahead of the others: what it calls waits for them, and its calls return at once.
#[test]
fn law_10_thousands_of_calls_are_queued_and_none_blocks() {
    const CALLS: usize = 3000;
    let mut comms = Comm::local(2).unwrap();
    within(LIMIT, move || {
        let mut one = comms.pop().unwrap();
        let mut zero = comms.pop().unwrap();
        let start = Instant::now();
        // A call's deadline begins when all calls before it have ended, so all together may take longer than one deadline.
        let works: Vec<_> =
            (0..CALLS).map(|i| zero.timeout(LIMIT / 2).all_reduce(vec![i as u32; 16])).collect();
        assert!(start.elapsed() < SOON, "submissions do not block");
        assert!(works.iter().all(|work| work.refused().is_none()) && zero.check().is_ok());
        assert_eq!(zero.stats().in_flight, CALLS);
        let other = std::thread::spawn(move || {
            for i in 0..CALLS as u32 {
                assert_eq!(one.all_reduce(vec![i; 16]).wait().unwrap(), [2 * i; 16]);
            }
            one
        });
        for (i, work) in works.into_iter().enumerate() {
            assert_eq!(work.wait().unwrap(), [2 * i as u32; 16]);
        }
        close(vec![zero, other.join().unwrap()]);
    });
}

/// More messages than may be in progress at a time, called in another order of tags on each rank: a message may wait for earlier
/// ones of its tag, but never for one that the peer cannot begin.
#[test]
fn law_10_thousands_of_messages_are_queued_whatever_the_order_of_their_tags() {
    const EACH: u32 = 1300;
    // Eager ones, and longer ones that move after their receive is posted.
    let len = |i: u32| if i.is_multiple_of(100) { 2000 } else { 2 };
    threads(Comm::local(2).unwrap(), move |mut comm| {
        let (rank, peer) = (comm.rank() as u32, 1 - comm.rank());
        let tags: [u32; 3] = if rank == 0 { [0, 1, 2] } else { [2, 0, 1] };
        let all = |tags: [u32; 3]| tags.into_iter().flat_map(|tag| (0..EACH).map(move |i| (tag, i)));
        let mut recvs = Vec::new();
        if rank == 0 {
            recvs.extend(all(tags).map(|(tag, i)| (tag, i, comm.tag(tag).recv(vec![0u32; len(i)], peer))));
        }
        let sends: Vec<_> =
            all(tags).map(|(tag, i)| comm.tag(tag).send(vec![tag * EACH + i; len(i)], peer)).collect();
        if rank == 1 {
            recvs.extend(all(tags).map(|(tag, i)| (tag, i, comm.tag(tag).recv(vec![0u32; len(i)], peer))));
        }
        for (tag, i, recv) in recvs.into_iter().rev() {
            assert_eq!(recv.wait().unwrap(), vec![tag * EACH + i; len(i)]);
        }
        sends.into_iter().for_each(|send| drop(send.wait().unwrap()));
        block_on(comm.close()).unwrap();
    });
}

#[cfg(feature = "testing")]
/// The queue of calls has a limit, lowered here: a call beyond it is refused, gives its buffer back, and takes no place in the order of calls.
#[test]
fn law_10_a_call_beyond_what_is_kept_is_refused_and_may_be_made_again() {
    const LIMIT_OF_QUEUE: usize = 1500;
    let mut comms = allstream::testing::with_queue_limit(LIMIT_OF_QUEUE, || Comm::local(2).unwrap());
    within(LIMIT, move || {
        let mut one = comms.pop().unwrap();
        let mut zero = comms.pop().unwrap();
        let mut works: Vec<_> = (0..LIMIT_OF_QUEUE - 1).map(|i| zero.all_reduce(vec![i as u32])).collect();
        // Messages and collectives share the limit.
        let message = zero.recv(vec![0u32], 1);
        for _ in 0..2 {
            let failed = zero.all_reduce(vec![7u32]).wait().unwrap_err();
            assert_eq!(failed.buf, Some(vec![7u32]));
            let text = failed.error.to_string();
            assert!(matches!(failed.error, Error::QueueFull { limit: LIMIT_OF_QUEUE, .. }), "{text}");
            assert!(text.contains("all_reduce") && text.contains("1500"), "{text}");
        }
        assert!(matches!(zero.send(vec![0u8], 1).wait().unwrap_err().error, Error::QueueFull { .. }));
        assert!(zero.check().is_ok(), "a full queue is no failure of the group");
        // One finishes: exactly one more finds room.
        assert_eq!(one.all_reduce(vec![0u32]).wait().unwrap(), [0]);
        assert_eq!(works.remove(0).wait().unwrap(), [0]);
        // There is no room for two messages: neither is submitted, and both buffers come back.
        let full = |error: &Error| matches!(error, Error::QueueFull { .. });
        let both = zero.send_recv(vec![1u8], 1, vec![2u8], 1).wait().unwrap_err();
        assert!(full(&both.error) && both.buf == Some((Some(vec![1]), Some(vec![2]))), "{both:?}");
        works.push(zero.all_reduce(vec![LIMIT_OF_QUEUE as u32 - 1]));
        // Dropped works keep their place until they are done.
        drop(works.pop());
        assert!(matches!(zero.all_reduce(vec![7u32]).wait().unwrap_err().error, Error::QueueFull { .. }));
        for i in 1..LIMIT_OF_QUEUE as u32 {
            assert_eq!(one.all_reduce(vec![i]).wait().unwrap(), [2 * i]);
        }
        one.send(vec![5u32], 0).wait().unwrap();
        assert_eq!(message.wait().unwrap(), [5]);
        for (i, work) in works.into_iter().enumerate() {
            assert_eq!(work.wait().unwrap(), [2 * (i as u32 + 1)]);
        }
        close(vec![zero, one]);
    });
}

/// Inode and bytes in memory of each shared region (memfd) of this process, each listed once, without those in `before`.
fn staged(before: &[u64]) -> Vec<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let mut files: Vec<(u64, u64)> = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let is_region =
            std::fs::read_link(entry.path()).is_ok_and(|p| p.to_string_lossy().contains("memfd:allstream"));
        if let (true, Ok(meta)) = (is_region, std::fs::metadata(entry.path()))
            && !before.contains(&meta.ino())
            && !files.iter().any(|(ino, _)| *ino == meta.ino())
        {
            files.push((meta.ino(), meta.blocks() * 512));
        }
    }
    files
}

#[test]
fn law_10_staging_has_a_cap_whatever_the_number_of_communicators() {
    const RANKS: usize = 8;
    const COMMS: usize = 6;
    /// Bytes of a rank's slots: 32 of 128 KB.
    const CAP: u64 = 32 * (128 << 10);
    // The first page, and for each communicator the rings of two channels (the third one, for devices, is not used): at most 4,352 bytes for
    // each channel and peer.
    const BESIDE: u64 = 4096 + (1 + COMMS as u64) * (2 * RANKS as u64 * 4352 + 4096);
    let before: Vec<_> = staged(&[]).into_iter().map(|(ino, _)| ino).collect();
    let comms = within(LIMIT, || world(RANKS, Link::Shm));
    let regions = staged(&before);
    let ours: Vec<_> = regions.iter().map(|(ino, _)| *ino).collect();
    threads(comms, move |mut comm| {
        let rank = comm.rank();
        let mut all: Vec<_> = (0..COMMS).map(|_| block_on(comm.dup()).unwrap()).collect();
        let mut works = Vec::new();
        for (i, child) in all.iter_mut().enumerate() {
            works.push(child.all_reduce(vec![comm_value(rank); 300_000 + i]));
            drop(child.broadcast(vec![1f32; 300_000], i));
        }
        let (to, from) = ((rank + 1) % RANKS, (rank + RANKS - 1) % RANKS);
        let moved = all[0].batch([
            Message::Send { buf: vec![comm_value(rank); 500_000], to, tag: 1 },
            Message::Recv { buf: vec![0f32; 500_000], from, tag: 1 },
        ]);
        for (i, work) in works.into_iter().enumerate() {
            let sum = work.wait().unwrap();
            assert!(sum.len() == 300_000 + i && sum.iter().all(|x| *x == total(RANKS)));
        }
        assert!(moved.wait().unwrap()[1].iter().all(|x| *x == comm_value(from)));
        comm.barrier().wait().unwrap();
        // Regions of tests that run beside this one may be among them: the cap is theirs too.
        let regions: Vec<_> = staged(&[]).into_iter().filter(|(ino, _)| ours.contains(ino)).collect();
        for (ino, bytes) in &regions {
            assert!(
                *bytes <= CAP + BESIDE,
                "region {ino} holds {bytes} bytes, the cap is {CAP} (and {BESIDE} for rings)"
            );
        }
        let used = regions.iter().filter(|(_, bytes)| *bytes > 128 << 10).count();
        assert!(used >= RANKS, "{used} regions were staged in: this test looks at the wrong thing");
        comm.barrier().wait().unwrap();
        for child in all {
            block_on(child.close()).unwrap();
        }
        block_on(comm.close()).unwrap();
    });
}
