//! Makes nodes for tests, and compares the result of every call of a node with one computed sequentially.

use std::net::TcpListener;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use allstream::plan::algorithms;
use allstream::{Algo, Comm, Function, Kind, LinkChoice, Node, NodeWork, ReduceOp, Rendezvous, Several};
use futures::executor::block_on;

use crate::MEET;

/// Makes `p` nodes of `k` devices each, all in this process.
pub fn local_nodes(k: usize, p: usize) -> Vec<Node> {
    let mut comms = Comm::local(p * k).unwrap().into_iter();
    (0..p).map(|_| Node::from_comms(comms.by_ref().take(k).collect()).unwrap()).collect()
}

/// The rendezvous of `p` processes, which are threads here. Links: `inproc`, `shm`, `tcp`, `auto`, and `hosts`: each process pretends a host of its own.
pub fn places(p: usize, link: &str) -> Vec<Rendezvous> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = format!("tcp://{}", listener.local_addr().unwrap());
    let choice = match link {
        "hosts" => LinkChoice::AUTO,
        class => class.parse().unwrap(),
    };
    let place = |process| {
        let place = Rendezvous::tcp(&at, process, p).unwrap().token("a test's").timeout(MEET).link(choice);
        let place = if link == "hosts" { place.host_id(format!("host {process}")) } else { place };
        if process == 0 { place.listener(listener.try_clone().unwrap()) } else { place }
    };
    (0..p).map(place).collect()
}

/// Makes `p` nodes of `k` devices each that connect through a rendezvous, as separate processes do.
pub fn connect(k: usize, p: usize, link: &str) -> Vec<Node> {
    let joined = places(p, link).into_iter().map(|place| Node::connect(place, k));
    block_on(futures::future::join_all(joined)).into_iter().collect::<Result<_, _>>().unwrap()
}

/// Runs `f(process, node)` on a thread for each node; panics if one of them panics, or is not done within `limit`.
pub fn play(nodes: Vec<Node>, limit: Duration, f: impl Fn(usize, Node) + Send + Sync + 'static) {
    let f = std::sync::Arc::new(f);
    let (p, (tell, results)) = (nodes.len(), mpsc::channel());
    for (process, node) in nodes.into_iter().enumerate() {
        let (f, tell) = (f.clone(), tell.clone());
        let run = move || {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| f(process, node))).is_ok();
            let _ = tell.send((process, done));
        };
        thread::Builder::new().name(format!("process {process}")).spawn(run).unwrap();
    }
    let end = Instant::now() + limit;
    for _ in 0..p {
        match results.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok((_, true)) => {}
            Ok((process, false)) => panic!("process {process} panicked"),
            Err(_) => panic!("not all of {p} processes were done after {limit:?}"),
        }
    }
}

/// Element `i` of rank `r`'s buffer in call number `salt`.
fn element(r: usize, i: usize, salt: usize) -> i64 {
    ((r + 1) * 1_000_003 + i * 31 + salt * 7) as i64 % 10_007
}

fn data(r: usize, len: usize, salt: usize) -> Vec<i64> {
    (0..len).map(|i| element(r, i, salt)).collect()
}

/// The sum over `ranks` of their buffers.
fn sum(ranks: std::ops::Range<usize>, len: usize, salt: usize) -> Vec<i64> {
    (0..len).map(|i| ranks.clone().map(|r| element(r, i, salt)).sum()).collect()
}

/// A node under test: `k` devices, whose ranks begin at `first`, of `n` ranks in all. `salt` is the number of the latest call.
struct Under<'a> {
    node: &'a mut Node,
    first: usize,
    k: usize,
    n: usize,
    salt: usize,
}

impl Under<'_> {
    /// One value for each device, made from its rank.
    fn each<T>(&self, f: impl Fn(usize) -> T) -> Vec<T> {
        (self.first..self.first + self.k).map(f).collect()
    }

    /// Counts a call, and makes each device's buffer for it.
    fn mine(&mut self, len: usize) -> Vec<Vec<i64>> {
        self.salt += 1;
        self.each(|r| data(r, len, self.salt))
    }

    fn sum(&self, len: usize) -> Vec<i64> {
        sum(0..self.n, len, self.salt)
    }

    /// The result of a call, awaited by `wait` in calls with an even number, and as a future in the others.
    #[track_caller]
    fn end<S: Several, O>(&self, work: NodeWork<S, O>) -> S::Of<O> {
        let result = if self.salt.is_multiple_of(2) { work.wait() } else { crate::cases::ended(work) };
        result.unwrap_or_else(|failed| panic!("call {}: {}", self.salt, failed.error))
    }

    #[track_caller]
    /// Awaits a call with pairs of input and output, checks that the inputs are unchanged, and returns the outputs.
    fn outputs<S: Several<Of<(Vec<i64>, Vec<i64>)> = Vec<(Vec<i64>, Vec<i64>)>>>(
        &self,
        inputs: &[Vec<i64>],
        work: NodeWork<S, (Vec<i64>, Vec<i64>)>,
    ) -> Vec<Vec<i64>> {
        let (ins, outs): (Vec<_>, Vec<_>) = self.end(work).into_iter().unzip();
        assert_eq!(ins, inputs, "inputs are unchanged");
        outs
    }

    fn places(&self) -> Vec<(usize, usize)> {
        (0..self.n).map(|r| self.node.place_of(r)).collect()
    }
}

fn pairs<T: Clone>(inputs: &[Vec<T>], output: &[T]) -> Vec<(Vec<T>, Vec<T>)> {
    inputs.iter().map(|input| (input.clone(), output.to_vec())).collect()
}

/// Block `r` of several.
fn block(all: &[i64], r: usize, len: usize) -> &[i64] {
    &all[r * len..(r + 1) * len]
}

/// Makes every call of a node, in its form with several buffers, and with every rank as root.
pub fn every_call(node: &mut Node) {
    let (k, n) = (node.devices(), node.size());
    let first = node.rank_of(node.process(), 0).unwrap();
    let mut under = Under { node, first, k, n, salt: 0 };
    for len in [0, 1, 1000, 70_001] {
        for_all(&mut under, len);
        blocks(&mut under, len.min(20_001));
        if len <= 1000 || n <= 4 {
            rooted(&mut under, len);
        }
        if !algorithms(Kind::AllToAll).is_empty() {
            exchanges(&mut under, len.min(20_001));
        }
    }
    varied(&mut under);
    lists_and_bytes(&mut under);
    options(&mut under);
    messages(&mut under);
}

fn for_all(u: &mut Under<'_>, len: usize) {
    let mine = u.mine(len);
    let work = u.node.all_reduce(mine);
    assert_eq!(u.end(work), vec![u.sum(len); u.k]);

    let mine = u.mine(len);
    let work = u.node.all_reduce_into(pairs(&mine, &vec![0; len]));
    assert_eq!(u.outputs(&mine, work), vec![u.sum(len); u.k]);

    let mine = u.mine(len);
    let work = u.node.all_reduce_new(mine);
    assert_eq!(u.end(work), vec![u.sum(len); u.k]);

    let work = u.node.barrier();
    assert_eq!(u.end(work).len(), u.k);

    if !algorithms(Kind::Scan).is_empty() {
        let scans = |u: &Under<'_>, more| u.each(|r| sum(0..r + more, len, u.salt));
        let mine = u.mine(len);
        let work = u.node.scan(mine);
        assert_eq!(u.end(work), scans(u, 1));
        let mine = u.mine(len);
        let work = u.node.scan_into(pairs(&mine, &vec![0; len]));
        assert_eq!(u.outputs(&mine, work), scans(u, 1));
        let mine = u.mine(len);
        let work = u.node.exscan(mine.clone());
        let mut expected = scans(u, 0);
        if u.first == 0 {
            expected[0] = mine[0].clone();
        }
        assert_eq!(u.end(work), expected);
        let mine = u.mine(len);
        let work = u.node.exscan_into(pairs(&mine, &vec![0; len]));
        assert_eq!(u.outputs(&mine, work), scans(u, 0));
    }
}

/// Collectives whose buffers have `n` blocks of `len` elements.
fn blocks(u: &mut Under<'_>, len: usize) {
    let (n, k) = (u.n, u.k);
    let gathered = |u: &Under<'_>| (0..n).flat_map(|r| data(r, len, u.salt)).collect::<Vec<_>>();
    let mine = u.mine(len);
    let work = u.node.all_gather(mine);
    assert_eq!(u.end(work), vec![gathered(u); k]);

    let mine = u.mine(len);
    let work = u.node.all_gather_into(pairs(&mine, &vec![0; len * n]));
    assert_eq!(u.outputs(&mine, work), vec![gathered(u); k]);

    let mine = u.mine(len);
    let mut bufs = vec![vec![-1; len * n]; k];
    for (device, buf) in bufs.iter_mut().enumerate() {
        let at = (u.first + device) * len;
        buf[at..at + len].copy_from_slice(&mine[device]);
    }
    let work = u.node.all_gather_in_place(bufs);
    assert_eq!(u.end(work), vec![gathered(u); k]);

    let reduced = |u: &Under<'_>| u.each(|r| block(&u.sum(len * n), r, len).to_vec());
    let mine = u.mine(len * n);
    let work = u.node.reduce_scatter(mine);
    assert_eq!(u.end(work), reduced(u));

    let mine = u.mine(len * n);
    let work = u.node.reduce_scatter_into(pairs(&mine, &vec![0; len]));
    assert_eq!(u.outputs(&mine, work), reduced(u));

    let mine = u.mine(len * n);
    let work = u.node.reduce_scatter_in_place(mine);
    let all = u.end(work);
    let ended: Vec<_> =
        all.iter().enumerate().map(|(d, all)| block(all, u.first + d, len).to_vec()).collect();
    assert_eq!(ended, reduced(u));
}

fn rooted(u: &mut Under<'_>, len: usize) {
    let (n, k) = (u.n, u.k);
    for (root, place) in u.places().into_iter().enumerate() {
        let of_root = |u: &Under<'_>| vec![data(root, len, u.salt); k];
        let mine = u.mine(len);
        let work = u.node.broadcast(mine, place);
        assert_eq!(u.end(work), of_root(u), "{place:?}");

        let mine = u.mine(len);
        let work = u.node.broadcast_into(pairs(&mine, &vec![0; len]), place);
        assert_eq!(u.outputs(&mine, work), of_root(u), "{place:?}");

        let mine = u.mine(len);
        let work = u.node.reduce(mine.clone(), place);
        let expected = u.each(|r| if r == root { u.sum(len) } else { mine[r - u.first].clone() });
        assert_eq!(u.end(work), expected, "{place:?}");

        let mine = u.mine(len);
        let work = u.node.reduce_into(pairs(&mine, &vec![0; len]), place);
        let expected = u.each(|r| if r == root { u.sum(len) } else { vec![0; len] });
        assert_eq!(u.outputs(&mine, work), expected, "{place:?}");
        if algorithms(Kind::Gather).is_empty() {
            continue;
        }
        let len = len.min(20_001);
        let gathered = |u: &Under<'_>| (0..n).flat_map(|r| data(r, len, u.salt)).collect::<Vec<_>>();
        let at_root = |u: &Under<'_>, other: &dyn Fn(usize) -> Vec<i64>| {
            u.each(|r| if r == root { gathered(u) } else { other(r) })
        };
        let mine = u.mine(len);
        let work = u.node.gather(mine, place);
        assert_eq!(u.end(work), at_root(u, &|_| Vec::new()), "{place:?}");

        let mine = u.mine(len);
        let room = u.each(|r| if r == root { vec![0; len * n] } else { Vec::new() });
        let work = u.node.gather_into(mine.iter().cloned().zip(room).collect::<Vec<_>>(), place);
        assert_eq!(u.outputs(&mine, work), at_root(u, &|_| Vec::new()), "{place:?}");

        let mine = u.mine(len);
        let bufs = u.each(|r| {
            if r != root {
                return mine[r - u.first].clone();
            }
            let mut buf = vec![0; len * n];
            buf[r * len..(r + 1) * len].copy_from_slice(&mine[r - u.first]);
            buf
        });
        let work = u.node.gather_in_place(bufs, place);
        assert_eq!(u.end(work), at_root(u, &|r| mine[r - u.first].clone()), "{place:?}");

        let scattered = |u: &Under<'_>| u.each(|r| block(&data(root, len * n, u.salt), r, len).to_vec());
        let mine = u.mine(len * n);
        let inputs = u.each(|r| if r == root { mine[r - u.first].clone() } else { Vec::new() });
        let work = u.node.scatter(inputs, len, place);
        assert_eq!(u.end(work), scattered(u), "{place:?}");

        let mine = u.mine(len * n);
        let work = u.node.scatter_into(pairs(&mine, &vec![0; len]), place);
        assert_eq!(u.outputs(&mine, work), scattered(u), "{place:?}");

        let mine = u.mine(len * n);
        let bufs = u.each(|r| if r == root { mine[r - u.first].clone() } else { vec![0; len] });
        let work = u.node.scatter_in_place(bufs, place);
        let expected: Vec<_> = (scattered(u).into_iter().zip(&mine).enumerate())
            .map(|(d, (block, all))| if u.first + d == root { all.clone() } else { block })
            .collect();
        assert_eq!(u.end(work), expected, "{place:?}");
    }
}

fn exchanges(u: &mut Under<'_>, len: usize) {
    let n = u.n;
    let expected = |u: &Under<'_>| {
        u.each(|r| {
            (0..n).flat_map(|from| block(&data(from, len * n, u.salt), r, len).to_vec()).collect::<Vec<_>>()
        })
    };
    let mine = u.mine(len * n);
    let work = u.node.all_to_all(mine);
    assert_eq!(u.end(work), expected(u));
    let mine = u.mine(len * n);
    let work = u.node.all_to_all_into(pairs(&mine, &vec![0; len * n]));
    assert_eq!(u.outputs(&mine, work), expected(u));
    let mine = u.mine(len * n);
    let work = u.node.all_to_all_in_place(mine);
    assert_eq!(u.end(work), expected(u));
}

/// The calls with counts: the count of rank r is `3 * r + 1`, but 0 for every third rank.
fn varied(u: &mut Under<'_>) {
    let (n, k) = (u.n, u.k);
    let counts: Vec<usize> = (0..n).map(|r| if r % 3 == 2 { 0 } else { 3 * r + 1 }).collect();
    let total: usize = counts.iter().sum();
    let begin = |r: usize| counts[..r].iter().sum::<usize>();
    let gathered = |u: &Under<'_>| (0..n).flat_map(|r| data(r, counts[r], u.salt)).collect::<Vec<_>>();
    let own = |u: &mut Under<'_>| {
        u.salt += 1;
        u.each(|r| data(r, counts[r], u.salt))
    };
    let mine = own(u);
    let work = u.node.all_gather_v(mine, &counts);
    assert_eq!(u.end(work), vec![gathered(u); k]);
    let mine = own(u);
    let work = u.node.all_gather_v_into(pairs(&mine, &vec![0; total]), &counts);
    assert_eq!(u.outputs(&mine, work), vec![gathered(u); k]);
    let mine = own(u);
    let bufs = u.each(|r| {
        let mut buf = vec![0; total];
        buf[begin(r)..begin(r) + counts[r]].copy_from_slice(&mine[r - u.first]);
        buf
    });
    let work = u.node.all_gather_v_in_place(bufs, &counts);
    assert_eq!(u.end(work), vec![gathered(u); k]);

    let part = |all: &[i64], r: usize| all[begin(r)..begin(r) + counts[r]].to_vec();
    let mine = u.mine(total);
    let work = u.node.reduce_scatter_v(mine, &counts);
    assert_eq!(u.end(work), u.each(|r| part(&u.sum(total), r)));
    let mine = u.mine(total);
    let room = u.each(|r| vec![0; counts[r]]);
    let work = u.node.reduce_scatter_v_into(mine.iter().cloned().zip(room).collect::<Vec<_>>(), &counts);
    assert_eq!(u.outputs(&mine, work), u.each(|r| part(&u.sum(total), r)));
    let mine = u.mine(total);
    let work = u.node.reduce_scatter_v_in_place(mine, &counts);
    let all = u.end(work);
    assert_eq!(u.each(|r| part(&all[r - u.first], r)), u.each(|r| part(&u.sum(total), r)));

    if algorithms(Kind::Gather).is_empty() {
        return;
    }
    for (root, place) in u.places().into_iter().enumerate() {
        let at_root = |u: &Under<'_>| u.each(|r| if r == root { gathered(u) } else { Vec::new() });
        let mine = own(u);
        let work = u.node.gather_v(mine, &counts, place);
        assert_eq!(u.end(work), at_root(u), "{place:?}");
        let mine = own(u);
        let room = u.each(|r| vec![0; if r == root { total } else { 0 }]);
        let work = u.node.gather_v_into(mine.iter().cloned().zip(room).collect::<Vec<_>>(), &counts, place);
        assert_eq!(u.outputs(&mine, work), at_root(u), "{place:?}");

        let mine = u.mine(total);
        let work = u.node.scatter_v(mine, &counts, &counts[u.first..][..k], place);
        assert_eq!(u.end(work), u.each(|r| part(&data(root, total, u.salt), r)), "{place:?}");
        let mine = u.mine(total);
        let room = u.each(|r| vec![0; counts[r]]);
        let work = u.node.scatter_v_into(mine.iter().cloned().zip(room).collect::<Vec<_>>(), &counts, place);
        assert_eq!(u.outputs(&mine, work), u.each(|r| part(&data(root, total, u.salt), r)), "{place:?}");
    }
    all_to_all_v(u);
}

fn all_to_all_v(u: &mut Under<'_>) {
    let n = u.n;
    // What rank a sends to rank b.
    let count = |a: usize, b: usize| (a * 5 + b * 3) % 7;
    let sends = u.each(|r| (0..n).map(|to| count(r, to)).collect::<Vec<_>>());
    let recvs = u.each(|r| (0..n).map(|from| count(from, r)).collect::<Vec<_>>());
    let input = |r: usize, salt| data(r, (0..n).map(|to| count(r, to)).sum(), salt);
    let expected = |u: &Under<'_>| {
        let from = |from: usize, r: usize| {
            let begin = (0..r).map(|to| count(from, to)).sum::<usize>();
            input(from, u.salt)[begin..begin + count(from, r)].to_vec()
        };
        u.each(|r| (0..n).flat_map(|f| from(f, r)).collect::<Vec<_>>())
    };
    u.salt += 1;
    let mine = u.each(|r| input(r, u.salt));
    let work = u.node.all_to_all_v(mine, &sends, &recvs);
    assert_eq!(u.end(work), expected(u));
    u.salt += 1;
    let mine = u.each(|r| input(r, u.salt));
    let room = recvs.iter().map(|recvs| vec![0; recvs.iter().sum()]);
    let work = u.node.all_to_all_v_into(mine.iter().cloned().zip(room).collect::<Vec<_>>(), &sends, &recvs);
    assert_eq!(u.outputs(&mine, work), expected(u));
    let few = u.node.all_to_all_v(mine, &sends[1..], &recvs).wait().unwrap_err();
    assert!(few.error.to_string().contains("`sends` has"), "{}", few.error);
}

fn lists_and_bytes(u: &mut Under<'_>) {
    let (n, k) = (u.n, u.k);
    u.salt += 1;
    let lists =
        |u: &Under<'_>| u.each(|r| (vec![data(r, 100, u.salt), data(r, 7, u.salt)], [vec![r as f32; 3]]));
    let sums = |u: &Under<'_>| {
        let floats = [vec![(n * (n - 1) / 2) as f32; 3]];
        (vec![sum(0..n, 100, u.salt), sum(0..n, 7, u.salt)], floats)
    };
    let mine = lists(u);
    let work = u.node.all_reduce_list(mine);
    assert_eq!(u.end(work), vec![sums(u); k]);
    for (root, place) in [0, n - 1].map(|root| (root, u.node.place_of(root))) {
        let mine = lists(u);
        let work = u.node.broadcast_list(mine, place);
        let of_root = (vec![data(root, 100, u.salt), data(root, 7, u.salt)], [vec![root as f32; 3]]);
        assert_eq!(u.end(work), vec![of_root; k]);
        let mine = lists(u);
        let work = u.node.reduce_list(mine.clone(), place);
        let expected = u.each(|r| if r == root { sums(u) } else { mine[r - u.first].clone() });
        assert_eq!(u.end(work), expected);

        let text = |r: usize| format!("rank {r} says {}", "so ".repeat(r)).into_bytes();
        let bytes = u.each(|r| if r == root { text(r) } else { Vec::new() });
        let work = u.node.broadcast_bytes(bytes, place);
        assert_eq!(u.end(work), vec![text(root); k]);
        let bytes = u.each(text);
        let work = u.node.all_gather_bytes(bytes);
        assert_eq!(u.end(work), vec![(0..n).map(text).collect::<Vec<_>>(); k]);
    }
    let pair = u.each(|r| (vec![vec![r as u8; 2]], vec![vec![0; 2 * n]]));
    let work = u.node.all_gather_list(pair);
    let all: Vec<u8> = (0..n as u8).flat_map(|r| [r; 2]).collect();
    assert!(u.end(work).iter().all(|(_, outputs)| *outputs == [all.clone()]));
    let pair = u.each(|r| (vec![vec![r as u64; 2 * n]], vec![vec![0; 2]]));
    let work = u.node.reduce_scatter_list(pair);
    assert!(u.end(work).iter().all(|(_, outputs)| *outputs == [vec![(n * (n - 1) / 2) as u64; 2]]));
}

fn options(u: &mut Under<'_>) {
    let mine = u.mine(50);
    let work = u.node.op(ReduceOp::Max).algo(Algo::Ring).deterministic(false).all_reduce(mine);
    let max: Vec<i64> = (0..50).map(|i| (0..u.n).map(|r| element(r, i, u.salt)).max().unwrap()).collect();
    assert_eq!(u.end(work), vec![max; u.k]);
    let floats = u.each(|r| vec![r as f64; 9]);
    let work = u.node.scale(0.5).all_reduce(floats);
    assert_eq!(u.end(work), vec![vec![(u.n * (u.n - 1)) as f64 / 4.0; 9]; u.k]);
    let least = Function::commutative("least", |left: &mut [i64], right: &[i64]| {
        left.iter_mut().zip(right).for_each(|(l, r)| *l = (*l).min(*r));
    });
    let mine = u.mine(50);
    let work = u.node.function(&least).all_reduce(mine);
    let min: Vec<i64> = (0..50).map(|i| (0..u.n).map(|r| element(r, i, u.salt)).min().unwrap()).collect();
    assert_eq!(u.end(work), vec![min; u.k]);
}

/// Messages from every device to every other, addressed by place: small ones, and ones so large (24 KB) that they wait for their receive.
fn messages(u: &mut Under<'_>) {
    let (n, k) = (u.n, u.k);
    for len in [5, 3000] {
        u.salt += 1;
        let (mut recvs, mut sends) = (Vec::new(), Vec::new());
        for device in 0..k {
            for (peer, place) in
                u.places().into_iter().enumerate().filter(|(peer, _)| *peer != u.first + device)
            {
                recvs.push((peer, u.node.tag(9).recv(device, vec![0_i64; len], place)));
                sends.push(u.node.tag(9).send(device, data(u.first + device, len, u.salt), place));
            }
        }
        for (peer, recv) in recvs {
            assert_eq!(recv.wait().unwrap(), data(peer, len, u.salt));
        }
        sends.into_iter().for_each(|send| drop(send.wait().unwrap()));
    }
    assert!(n > 0);
}
