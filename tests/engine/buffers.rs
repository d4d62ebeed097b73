//! Parts of one buffer in operations at the same time, and what becomes of the buffer. Every wait has a deadline.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use allstream::{Buf, Comm, Error, Failed, HostBuf, Message, ReduceOp, View, split, split_at};
use futures::executor::block_on;
use proptest::prelude::*;

use crate::counted::Counted;
use crate::support::{on_threads, worlds};

const LIMIT: Duration = Duration::from_secs(60);
const LINKS: [&str; 3] = ["local", "shm", "tcp"];

/// Runs `rank` on `n` ranks of each link.
fn on_links(n: usize, rank: fn(&str, Comm)) {
    for link in LINKS {
        for (r, ended) in
            on_threads(worlds(n, link), LIMIT, move |_, comm| rank(link, comm)).iter().enumerate()
        {
            assert_eq!(ended, &Ok(()), "rank {r} of {n} over {link}");
        }
    }
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < end, "not within {LIMIT:?}: {what}");
        std::thread::yield_now();
    }
}

fn value(rank: usize, i: usize) -> f32 {
    (rank + 1 + i % 1021) as f32
}

fn sum(n: usize, i: usize) -> f32 {
    (n * (n + 1) / 2 + n * (i % 1021)) as f32
}

fn mine(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| value(rank, i)).collect()
}

#[test]
fn halves_of_one_buffer_are_reduced_at_the_same_time_and_join_where_they_were() {
    on_links(3, |link, mut comm| {
        let (rank, n) = (comm.rank(), comm.size());
        // The collectives of one communicator run one after another; with a second one they run side by side.
        let mut second = block_on(comm.dup()).unwrap();
        for len in [0, 1, 2, 7, 1000, 300_001] {
            let buf = mine(rank, len);
            let at = buf.as_ptr();
            let [low, high] = split_at(buf, len / 2).unwrap();
            let (low, high) = (comm.all_reduce(low), second.all_reduce(high));
            let views = [high.wait().unwrap(), low.wait().unwrap()];
            let back: Vec<f32> = View::join(views).unwrap();
            assert_eq!((back.as_ptr(), back.len()), (at, len), "{link}: the same memory");
            assert!((0..len).all(|i| back[i] == sum(n, i)), "{link}: {len} elements");
        }
    });
}

#[test]
fn many_parts_of_one_buffer_are_in_different_operations_while_others_are_written() {
    on_links(3, |link, mut comm| {
        let (rank, n, len) = (comm.rank(), comm.size(), 50_000);
        let views = split(HostBuf::from(&mine(rank, 4 * len)[..]), &[len, 0, len, len, len]).unwrap();
        let [summed, empty, sent, received, local] = <[_; 5]>::try_from(views).unwrap();
        let summed = comm.all_reduce(summed);
        let empty = comm.op(ReduceOp::Max).all_reduce(empty);
        let messages = [
            Message::Send { buf: sent, to: (rank + 1) % n, tag: 1 },
            Message::Recv { buf: received, from: (rank + n - 1) % n, tag: 1 },
        ];
        let messages = comm.batch(messages);
        let mut local = local;
        local.fill(-1.0);
        let mut views = messages.wait().unwrap();
        views.extend([summed.wait().unwrap(), empty.wait().unwrap(), local]);
        let back = View::join(views).unwrap();
        let left = (rank + n - 1) % n;
        for i in 0..len {
            assert_eq!(back[i], sum(n, i), "{link}: {i} is summed");
            assert_eq!(back[len + i], value(rank, len + i), "{link}: what was sent is unchanged");
            assert_eq!(back[2 * len + i], value(left, len + i), "{link}: what was received");
            assert_eq!(back[3 * len + i], -1.0, "{link}: what was written meanwhile");
        }
    });
}

#[test]
fn a_view_can_be_what_an_operation_reads_and_another_what_it_writes() {
    on_links(2, |link, mut comm| {
        let (rank, n, len) = (comm.rank(), comm.size(), 10_000);
        let [input, output] = split_at(mine(rank, 3 * len), len).unwrap();
        let (input, output) = comm.all_gather_into(input, output).wait().unwrap();
        let back = View::join([input, output]).unwrap();
        assert_eq!(back[..len], mine(rank, len), "{link}");
        for r in 0..n {
            assert_eq!(back[(1 + r) * len..][..len], mine(r, len), "{link}: rank {r}'s");
        }
    });
}

#[test]
fn failed_operations_give_their_views_back_and_the_buffer_is_whole_again() {
    on_links(2, |link, mut comm| {
        let (buf, drops) = Counted::new(mine(comm.rank(), 400_000));
        let views = split(buf, &[100_000; 4]).unwrap();
        let works: Vec<_> = views.into_iter().map(|view| comm.all_reduce(view)).collect();
        if comm.rank() == 0 {
            comm.abort("planted");
        }
        let mut views = Vec::new();
        for work in works {
            views.push(match work.wait() {
                Ok(view) => view,
                Err(Failed { buf, error }) => {
                    assert!(matches!(error, Error::Aborted { by: 0, .. }), "{link}: {error}");
                    buf.expect("nothing can touch it any more")
                }
            });
        }
        let back = View::join(views).unwrap();
        assert_eq!((back.0.len(), drops.load(Ordering::SeqCst)), (400_000, 0), "{link}");
    });
}

#[test]
fn a_view_that_was_let_go_is_missing_and_the_buffer_goes_with_the_last() {
    on_links(2, |link, mut comm| {
        let (buf, drops) = Counted::new(mine(comm.rank(), 3000));
        let views = split(buf, &[1000; 3]).unwrap();
        let [first, second, third] = <[_; 3]>::try_from(views).unwrap();
        // The operation runs on, and the engine drops its view at the end.
        drop(comm.all_reduce(second));
        let Failed { buf, error } = View::join([first, third]).unwrap_err();
        assert!(error.to_string().contains("of the buffer's 3000 elements 1000..2000"), "{link}: {error}");
        let mut views = buf.unwrap();
        comm.barrier().wait().unwrap();
        wait_until("the operation that was let go is done", || comm.stats().in_flight == 0);
        let sum = comm.all_reduce(views.pop().unwrap()).wait().unwrap();
        assert_eq!(drops.load(Ordering::SeqCst), 0, "{link}: views live");
        drop(views);
        assert_eq!(drops.load(Ordering::SeqCst), 0, "{link}: a view lives");
        let elsewhere = std::thread::spawn(move || drop(sum));
        elsewhere.join().unwrap();
        assert_eq!(drops.load(Ordering::SeqCst), 1, "{link}: freed once, on whatever thread");
    });
}

/// The lengths of the parts into which `cuts` divide `len` elements.
fn lens(len: usize, mut cuts: Vec<usize>) -> Vec<usize> {
    cuts.sort_unstable();
    let ends = cuts.iter().copied().chain([len]);
    let starts = [0].into_iter().chain(cuts.iter().copied());
    ends.zip(starts).map(|(end, start)| end - start).collect()
}

fn cuts() -> impl Strategy<Value = (usize, Vec<usize>)> {
    (0..200_usize).prop_flat_map(|len| (Just(len), prop::collection::vec(0..=len, 0..12)))
}

proptest! {
    #[test]
    fn any_cut_covers_every_element_once_and_joins_in_any_order(
        (len, at) in cuts(),
        further in 0..12_usize,
        middle in 0..200_usize,
        order in prop::collection::vec(any::<u32>(), 14),
        away in 0..14_usize,
    ) {
        let (buf, drops) = Counted::new(vec![0.0; len]);
        let lens = lens(len, at);
        let mut views = split(buf, &lens).unwrap();
        prop_assert_eq!(views.iter().map(|view| view.len()).collect::<Vec<_>>(), lens);
        // Splits one of the views once more.
        let view = views.remove(further % views.len());
        let middle = middle % (view.len() + 1);
        views.extend(view.split_at(middle).unwrap());

        // Each element is written through exactly one view, at the place that its view says.
        for view in &mut views {
            let offset = view.offset();
            view.iter_mut().enumerate().for_each(|(i, x)| *x += (offset + i + 1) as f32);
        }
        let mut shuffled: Vec<_> = order.iter().zip(views).collect();
        shuffled.sort_by_key(|(key, _)| **key);
        let mut views: Vec<_> = shuffled.into_iter().map(|(_, view)| view).collect();

        // With one view missing, `join` fails and gives the others back in their order.
        let missing = views.remove(away % views.len());
        let ranges: Vec<_> = views.iter().map(View::range).collect();
        let failed = View::join(views).unwrap_err();
        let refused = matches!(failed.error, Error::Invalid { .. });
        prop_assert!(refused, "{}", failed.error);
        let mut views = failed.buf.unwrap();
        prop_assert_eq!(views.iter().map(View::range).collect::<Vec<_>>(), ranges);

        views.push(missing);
        let back = View::join(views).unwrap();
        prop_assert_eq!(drops.load(Ordering::SeqCst), 0);
        prop_assert!(back.0.iter().enumerate().all(|(i, x)| *x == (i + 1) as f32));
        drop(back);
        prop_assert_eq!(drops.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn the_parts_of_any_cut_are_summed_as_the_whole(
        (len, at) in cuts(),
        order in prop::collection::vec(any::<u32>(), 13),
    ) {
        let lens = lens(len, at);
        let ended = on_threads(Comm::local(2).unwrap(), LIMIT, move |rank, mut comm| {
            let views = split(mine(rank, len), &lens).unwrap();
            // All ranks submit in the same order, which is not that of the parts.
            let mut shuffled: Vec<_> = order.iter().zip(views).collect();
            shuffled.sort_by_key(|(key, _)| **key);
            let works: Vec<_> = shuffled.into_iter().map(|(_, view)| comm.all_reduce(view)).collect();
            let views = works.into_iter().map(|work| work.wait()).collect::<Result<Vec<_>, _>>().unwrap();
            View::join(views).unwrap()
        });
        for back in ended {
            let expected: Vec<f32> = (0..len).map(|i| sum(2, i)).collect();
            prop_assert_eq!(back.unwrap(), expected);
        }
    }
}

#[test]
fn a_list_without_buffers_names_a_root_of_the_group_too() {
    let mut comm = Comm::local(1).unwrap().remove(0);
    for root in [0, 1] {
        let ended = comm.broadcast_list(Vec::<Vec<f32>>::new(), root).wait();
        let problem = ended.map_err(|failed| failed.error.to_string());
        match root {
            0 => assert_eq!(problem, Ok(Vec::new())),
            _ => assert!(problem.unwrap_err().contains("root 1 is not in this group of 1")),
        }
    }
}
