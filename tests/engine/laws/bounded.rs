//! Law 10: bounded.

use std::time::Instant;

use allstream::{Comm, Error, Message};
use futures::executor::block_on;

use super::house::*;

#[test]
fn law_10_submissions_beyond_the_limit_are_refused_and_none_blocks() {
    const LIMIT_OF_QUEUE: usize = 1024;
    let mut comms = Comm::local(2).unwrap();
    within(LIMIT, move || {
        let mut one = comms.pop().unwrap();
        let mut zero = comms.pop().unwrap();
        for round in 0..2 {
            let start = Instant::now();
            let mut works: Vec<_> =
                (0..LIMIT_OF_QUEUE - 1).map(|i| zero.all_reduce(vec![i as u32])).collect();
            // Messages count with collectives.
            let message = zero.recv(vec![0u32], 1);
            assert!(start.elapsed() < SOON, "submissions do not block");
            for _ in 0..2 {
                let failed = zero.all_reduce(vec![7u32]).wait().unwrap_err();
                assert_eq!(failed.buf, Some(vec![7u32]));
                let text = failed.error.to_string();
                assert!(matches!(failed.error, Error::QueueFull { limit: LIMIT_OF_QUEUE, .. }), "{text}");
                assert!(text.contains("all_reduce") && text.contains("1024"), "{text}");
            }
            assert!(matches!(zero.send(vec![0u8], 1).wait().unwrap_err().error, Error::QueueFull { .. }));
            assert!(zero.check().is_ok(), "a full queue is no failure of the group");
            // One finishes: exactly one more finds room.
            assert_eq!(one.all_reduce(vec![0u32]).wait().unwrap(), [0]);
            assert_eq!(works.remove(0).wait().unwrap(), [0]);
            works.push(zero.all_reduce(vec![LIMIT_OF_QUEUE as u32 - 1]));
            assert!(matches!(zero.all_reduce(vec![7u32]).wait().unwrap_err().error, Error::QueueFull { .. }));
            // Dropped works keep their place until they are done.
            let last = works.pop().unwrap();
            drop(last);
            assert!(matches!(zero.all_reduce(vec![7u32]).wait().unwrap_err().error, Error::QueueFull { .. }));
            for i in 1..LIMIT_OF_QUEUE as u32 {
                assert_eq!(one.all_reduce(vec![i]).wait().unwrap(), [2 * i], "round {round}");
            }
            one.send(vec![5u32], 0).wait().unwrap();
            assert_eq!(message.wait().unwrap(), [5]);
            for (i, work) in works.into_iter().enumerate() {
                assert_eq!(work.wait().unwrap(), [2 * (i as u32 + 1)]);
            }
        }
        close(vec![zero, one]);
    });
}

/// Bytes that the shared regions of this process hold: pages of all its memfds, each counted once.
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
    /// Slots (32 x 128 KB) per rank.
    const CAP: u64 = 32 * (128 << 10);
    // Rings: two channels of 8 peers of 4 KB and a bit per communicator; and the first page.
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
