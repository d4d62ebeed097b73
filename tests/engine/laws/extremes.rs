//! Every count and every duration of the public interface, at its extremes: what is possible is done, what is impossible is
//! an error. Nothing panics or aborts, and nothing takes gigabytes to find that out: this test program's allocator refuses
//! allocations of 1 GiB or more.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use allstream::plan::{self, Shape, choose};
use allstream::sim::{Network, simulate};
use allstream::{
    Algo, Comm, Element, Error, Failed, HostBuf, HostMemory, Kind, Message, Node, Rendezvous, Work, bf16,
    dlpack, split, split_at,
};
use futures::executor::block_on;
use proptest::prelude::*;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::house::*;

/// Allocations of this many bytes or more are refused here.
const ROOM: usize = 1 << 30;

/// The system's allocator, which refuses [`ROOM`] bytes or more, as if memory were short.
struct Short;

/// Bytes of the largest allocation that was refused.
static REFUSED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: each call goes to the system's allocator, or returns null, as an allocator without memory does, and changes nothing.
unsafe impl GlobalAlloc for Short {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        if refuses(layout.size()) { std::ptr::null_mut() } else { unsafe { System.alloc(layout) } }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        if refuses(layout.size()) { std::ptr::null_mut() } else { unsafe { System.alloc_zeroed(layout) } }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as the caller promises.
        if refuses(size) { std::ptr::null_mut() } else { unsafe { System.realloc(at, layout, size) } }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

fn refuses(size: usize) -> bool {
    if size >= ROOM {
        REFUSED.fetch_max(size, Ordering::Relaxed);
    }
    size >= ROOM
}

#[global_allocator]
static MEMORY: Short = Short;

/// A count far too large for any program: at the limits of what a `usize`, an `isize`, an address or memory can hold, for
/// elements of 1 to 8 bytes.
fn too_many() -> impl Strategy<Value = usize> {
    let ends =
        [usize::MAX, usize::MAX / 2, isize::MAX as usize, 1 << 62, 1 << 61, 1 << 60, 1 << 48, 1 << 40, ROOM];
    let sizes = [1usize, 2, 4, 8];
    (prop::sample::select(ends.to_vec()), prop::sample::select(sizes.to_vec()), 0usize..3).prop_map(
        |(end, size, more)| match end {
            ROOM => ROOM + more,
            end => (end / size).saturating_sub(more).max(ROOM),
        },
    )
}

fn length_of_time() -> impl Strategy<Value = Duration> {
    prop::sample::select(vec![
        Duration::ZERO,
        Duration::from_nanos(1),
        Duration::from_secs(u64::from(u32::MAX)),
        Duration::from_secs(i64::MAX as u64),
        Duration::from_secs(u64::MAX),
        Duration::MAX - Duration::from_nanos(1),
        Duration::MAX,
    ])
}

fn few() -> ProptestConfig {
    ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() }
}

fn is_invalid(error: &Error) -> bool {
    matches!(error, Error::Invalid { .. })
}

/// Checks that the call was refused as invalid and gave its buffer back; returns the error's text.
#[track_caller]
fn invalid<O, F>(work: Work<O, F>) -> String {
    let Err(Failed { buf, error }) = work.wait() else { panic!("it was not refused") };
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    assert!(buf.is_some(), "the buffer comes back: {error}");
    error.to_string()
}

/// A mapping of zeroes (32 TiB), of which no page is touched: so large that a buffer four times as large cannot be.
#[derive(Debug)]
struct Wide(*mut u8);

const WIDE: usize = 1 << 45;

impl Wide {
    /// `None`: the system does not give so much.
    fn new() -> Option<Wide> {
        let (read, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping where the system chooses touches nothing of ours.
        unsafe { mmap_anonymous(std::ptr::null_mut(), WIDE, read, flags) }.ok().map(|at| Wide(at.cast()))
    }
}

impl Drop for Wide {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and owned by this value alone.
        let _ = unsafe { munmap(self.0.cast(), WIDE) };
    }
}

// SAFETY: a `Wide` is the only owner of its mapping, which any thread may use.
unsafe impl Send for Wide {}
// SAFETY: the mapping is readable and writable, zeroed, aligned to pages, and does not move.
unsafe impl HostMemory for Wide {
    type Elem = u8;
    fn ptr(&self) -> *const u8 {
        self.0
    }
    fn ptr_mut(&mut self) -> *mut u8 {
        self.0
    }
    fn count(&self) -> usize {
        WIDE
    }
}

/// Passes `count` to every call that takes a count or a rank. Only one rank of two makes each call: rank 0, as the root, or rank 1.
fn counts_of<T: Element>(comms: &mut [Comm], count: usize) {
    let none = Vec::<T>::new;
    let one = || vec![T::default(); 1];
    let [root, other] = comms else { panic!("two ranks") };
    let text = invalid(other.scatter(none(), count, 0));
    assert!(
        text.contains("scatter") && text.contains(&count.to_string()) && text.contains("memory"),
        "{text}"
    );
    invalid(root.scatter(one(), count, 0));
    invalid(other.scatter_v(none(), &[], count, 0));
    invalid(root.scatter_v(one(), &[1, count], 1, 0));
    invalid(root.scatter_v(one(), &[count, count], count, 0));
    invalid(root.scatter_v_into(one(), one(), &[count, 1], 0));
    invalid(root.gather_v(one(), &[1, count], 0));
    invalid(root.gather_v_into(one(), one(), &[1, count], 0));
    invalid(other.all_gather_v(one(), &[count, 1]));
    invalid(other.all_gather_v(one(), &[count, count]));
    invalid(other.all_gather_v_into(one(), one(), &[count, 1]));
    invalid(other.all_gather_v_in_place(one(), &[count, 1]));
    invalid(other.reduce_scatter_v(one(), &[count, 1]));
    invalid(other.reduce_scatter_v_into(one(), one(), &[count, 1]));
    invalid(other.reduce_scatter_v_in_place(one(), &[count, count]));
    invalid(other.all_to_all_v(one(), &[0, 1], &[count, 1]));
    invalid(other.all_to_all_v(one(), &[count, 1], &[0, 1]));
    invalid(other.all_to_all_v_into(one(), one(), &[0, 1], &[count, 1]));
    // `count` as a rank.
    invalid(other.broadcast(one(), count));
    invalid(other.broadcast_into(one(), one(), count));
    invalid(other.reduce(one(), count));
    invalid(other.reduce_into(one(), one(), count));
    invalid(other.gather(one(), count));
    invalid(other.gather_into(one(), one(), count));
    invalid(other.gather_in_place(one(), count));
    invalid(other.scatter(none(), 1, count));
    invalid(other.scatter_in_place(one(), count));
    invalid(other.broadcast_list([one()], count));
    invalid(other.reduce_list([one()], count));
    invalid(other.broadcast_bytes(vec![1], count));
    invalid(other.tag(u32::MAX).send(one(), count));
    invalid(other.tag(u32::MAX).recv(one(), count));
    assert!(other.send_recv(one(), count, one(), count).wait().is_err());
    // The half that could be carried out is refused, too: nobody waits for the deadline, and the error is about the other half.
    for (to, from) in [(count, 0), (0, count)] {
        let Failed { buf, error } = other.send_recv(one(), to, one(), from).wait().unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{error}");
        let (sent, received) = buf.unwrap();
        assert!(sent.is_some() && received.is_some());
    }
    let message = Message::Send { buf: one(), to: count, tag: u32::MAX };
    assert!(other.batch([message]).wait().is_err());
}

/// Some calls ask for memory before they are refused: that the system does not give it is an error, too.
#[test]
fn memory_that_the_system_does_not_give_is_an_error() {
    let mut comms = Comm::local(2).unwrap();
    counts_of::<u8>(&mut comms, ROOM);
    assert!(REFUSED.load(Ordering::Relaxed) >= ROOM);
}

proptest! {
    #![proptest_config(few())]

    #[test]
    fn a_count_that_no_memory_has_room_for_is_refused_with_the_buffer(count in too_many()) {
        let mut comms = Comm::local(2).unwrap();
        counts_of::<u8>(&mut comms, count);
        counts_of::<bf16>(&mut comms, count);
        counts_of::<f64>(&mut comms, count);
        for comm in &mut comms {
            comm.set_pool_capacity(count);
            prop_assert!(comm.alloc::<f64>(count.max(1 << 30)).is_err());
        }
        prop_assert!(Comm::local(count).is_err());
        // Nothing was submitted.
        threads(comms, |mut comm| works(&mut comm));
    }

    #[test]
    fn buffers_of_impossible_lengths_are_errors(count in too_many()) {
        prop_assert!(is_invalid(&HostBuf::<bf16>::try_zeroed(count).unwrap_err()));
        prop_assert!(HostBuf::<f64>::try_zeroed(count).unwrap_err().to_string().contains("f64"));
        let four = || vec![1f32; 4];
        prop_assert_eq!(split(four(), &[count, 4]).unwrap_err().buf, Some(four()));
        prop_assert_eq!(split(four(), &[count; 9]).unwrap_err().buf, Some(four()));
        prop_assert_eq!(split_at(four(), count).unwrap_err().buf, Some(four()));
        let [_, view] = split_at(four(), 1).unwrap();
        prop_assert!(view.split_at(count).is_err());
        let shapes: [&[usize]; 5] = [&[count], &[count, count], &[0, count], &[count, 0, count], &[4, 1, count]];
        for shape in shapes {
            prop_assert!(dlpack::export(four(), shape).is_err());
        }
    }

    #[test]
    fn worlds_of_impossible_sizes_are_refused(count in too_many(), other in too_many()) {
        let tcp = |rank, size| Rendezvous::tcp("tcp://127.0.0.1:9", rank, size);
        for (rank, size) in [(0, count), (count, 2), (other, count), (count, count), (1, 0)] {
            prop_assert!(matches!(tcp(rank, size), Err(Error::Invalid { .. })), "{} of {}", rank, size);
        }
        prop_assert!(is_invalid(&Node::local(count).unwrap_err()));
        for place in [Rendezvous::alone(), tcp(0, 3).unwrap().insecure()] {
            let error = block_on(Node::connect(place, count)).unwrap_err();
            prop_assert!(matches!(error, Error::Invalid { .. }), "{}", error);
        }
        let mut node = Node::local(2).unwrap();
        prop_assert!(node.rank_of(count, other).is_err() && node.rank_of(0, count).is_err());
        prop_assert_eq!(node.place_of(count), (count / 2, count % 2));
        prop_assert!(node.comm(count).is_err() && node.stream(count).is_err());
        prop_assert!(node.send(count, vec![1u8], (0, 0)).wait().is_err());
        prop_assert!(node.recv(0, vec![1u8], (count, other)).wait().is_err());
        let scattered = node.scatter([vec![1u8], vec![]], count, (0, 0)).wait();
        prop_assert!(is_invalid(&scattered.unwrap_err().error));
        let own = [count, other];
        let scattered = node.scatter_v([vec![1u8], vec![]], &[count, other], &own, (0, 0)).wait();
        prop_assert!(is_invalid(&scattered.unwrap_err().error));
        prop_assert!(node.broadcast([vec![1u8], vec![1]], (count, other)).wait().is_err());
    }

    #[test]
    fn plans_and_simulations_of_impossible_sizes_are_refused_or_end(count in too_many(), time in length_of_time()) {
        for kind in [Kind::AllReduce, Kind::AllToAll, Kind::Barrier] {
            for algo in plan::algorithms(kind) {
                for (n, rank) in [(count, 0), (count, count - 1), (2, count)] {
                    let shape = Shape { n, rank, root: 0, ..Shape::default() };
                    prop_assert!(plan::plan(kind, *algo, &shape).is_err(), "{kind} by {algo}, {rank} of {n}");
                }
            }
            for n in [0, 1, 2, count] {
                let _ = choose(kind, count, &plan::Env { n, hosts: count, ..plan::Env::default() });
            }
        }
        let network = |latency| Network::new(latency, 1e9);
        let all_reduce = |n, bytes, network: &Network| simulate(Kind::AllReduce, Algo::Ring, n, bytes, network);
        prop_assert!(all_reduce(count, 8, &network(Duration::ZERO)).is_err());
        prop_assert!(all_reduce(2, count.max(1 << 51), &network(Duration::ZERO)).is_err());
        // A latency that is too long is an error, any other is simulated.
        let slow = all_reduce(3, 64, &network(time));
        prop_assert_eq!(slow.is_err(), time > Duration::from_secs(1 << 20), "{:?}", slow);
        let mut odd = network(time);
        (odd.frame, odd.retry, odd.loss) = (time, time, 0.5);
        let _ = all_reduce(3, 64, &odd);
        let mut odd = network(Duration::ZERO);
        (odd.cores, odd.per_host) = (Some(count), Some(count));
        prop_assert!(all_reduce(3, 64, &odd).is_ok());
        odd.slice = Some(1);
        prop_assert!(all_reduce(3, 1 << 40, &odd).is_err());
        odd.slice = Some(count);
        let _ = all_reduce(3, 64, &odd);
    }

    #[test]
    fn a_deadline_of_any_length_is_kept_or_told(time in length_of_time()) {
        let comms = Comm::local(2).unwrap();
        let long = time > Duration::from_secs(1);
        let ends = threads(comms, move |mut comm| {
            let peer = 1 - comm.rank();
            let sum = comm.timeout(time).all_reduce(vec![1u32; 10]).wait();
            let sent = comm.timeout(time).send_recv(vec![1u8; 9000], peer, vec![0u8; 9000], peer).wait();
            let verdict = comm.agree_within(true, time).wait();
            (sum.map(drop).map_err(|f| f.error), sent.map(drop).map_err(|f| f.error), verdict.map(drop))
        });
        for (sum, sent, verdict) in ends {
            let done = sum.is_ok() && sent.is_ok() && verdict.is_ok();
            prop_assert!(done || !long, "{:?}: {:?} {:?} {:?}", time, sum, sent, verdict);
        }
    }
}

#[test]
fn results_larger_than_all_addresses_are_refused_and_the_input_comes_back() {
    let Some(first) = Wide::new() else {
        // Written past the test's captured output, which is shown for failures only.
        let why = format!("\nskipped: this system gives no {WIDE} bytes of address space\n");
        let _ = std::io::stderr().write_all(why.as_bytes());
        return;
    };
    let mut comms = Comm::local(4).unwrap();
    let root = &mut comms[0];
    let again = |failed: Failed<Wide>| {
        assert!(matches!(failed.error, Error::Invalid { .. }), "{}", failed.error);
        failed.buf.unwrap()
    };
    let wide = again(root.all_gather(first).wait().map(drop).unwrap_err());
    let wide = again(root.gather(wide, 0).wait().map(drop).unwrap_err());
    let wide = again(root.all_reduce_new(wide).wait().map(drop).unwrap_err());
    let wide = again(root.reduce_scatter(wide).wait().map(drop).unwrap_err());
    let wide = again(root.all_to_all(wide).wait().map(drop).unwrap_err());
    let wide = again(root.scatter(wide, WIDE / 4, 0).wait().map(drop).unwrap_err());
    let pair = root.all_gather_into(wide, vec![0u8; 3]).wait().unwrap_err();
    assert!(pair.error.to_string().contains(&(4 * WIDE).to_string()), "{}", pair.error);
    threads(comms, |mut comm| works(&mut comm));
}

/// Connects two ranks with this `timeout` and `heartbeat`, and closes them; how that ended on each.
fn meet(timeout: Duration, heartbeat: Duration) -> Vec<Result<(), Error>> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let place = |rank: usize| {
        let place = Rendezvous::tcp(&at, rank, 2).unwrap().token("extremes");
        let place = place.timeout(timeout).heartbeat(heartbeat);
        if rank == 0 { place.listener(listener.try_clone().unwrap()) } else { place }
    };
    let rank = |place| {
        thread::spawn(move || {
            let mut comm = block_on(Comm::connect(place))?;
            comm.barrier().wait()?;
            block_on(comm.close())
        })
    };
    let ranks: Vec<_> = (0..2).map(place).map(rank).collect();
    ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
}

#[test]
fn ranks_meet_whatever_time_they_are_given_or_say_that_it_was_too_short() {
    let (second, ages) = (Duration::from_secs(30), Duration::MAX);
    for (timeout, heartbeat) in
        [(ages, second), (second, ages), (ages, ages), (Duration::from_secs(u64::MAX), second)]
    {
        let ends = within(LIMIT, move || meet(timeout, heartbeat));
        assert!(ends.iter().all(Result::is_ok), "{timeout:?}, {heartbeat:?}: {ends:?}");
    }
    for short in [Duration::ZERO, Duration::from_nanos(1)] {
        let begun = Instant::now();
        let ends = within(LIMIT, move || meet(short, second));
        for error in ends.into_iter().filter_map(Result::err) {
            let fair =
                matches!(error, Error::Rendezvous { .. } | Error::PeerLost { .. } | Error::Refused { .. });
            assert!(fair, "{short:?}: {error}");
        }
        // If one rank gives up after both have heard of each other, the other may still take the 10 seconds that connecting has
        // (`CONNECTING` in engine/group/gather.rs), whatever its own timeout is.
        assert!(begun.elapsed() < 2 * SOON, "{short:?}");
    }
}

#[test]
fn axes_subsets_and_colors_at_their_ends_are_told_to_all_ranks() {
    for count in [0, 1, usize::MAX, usize::MAX / 2, isize::MAX as usize] {
        threads(Comm::local(2).unwrap(), move |mut comm| {
            for axes in [vec![("a", count)], vec![("a", count), ("b", count)], vec![("a", 2), ("b", count)]] {
                let product = axes.iter().try_fold(1usize, |all, (_, size)| all.checked_mul(*size));
                let mesh = block_on(comm.mesh(axes));
                assert_eq!(mesh.is_ok(), product == Some(2), "{count}");
            }
            assert_eq!(block_on(comm.subset(&[count])).is_ok(), count < 2, "{count}");
            assert!(block_on(comm.subset(&[count, count])).is_err());
            let made = block_on(comm.split(count as u64, if comm.rank() == 0 { i64::MIN } else { i64::MAX }));
            assert_eq!(made.unwrap().size(), 2);
            comm.set_pool_capacity(count);
            works(&mut comm);
        });
    }
}
