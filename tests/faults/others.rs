//! Disagreements over the collectives with a count for each rank, lists, bytes, scans and functions.

use allstream::{Algo, Comm, Error, Failed, Function, Kind, Signature};

use crate::mismatches::Came;

/// What one rank calls.
#[derive(Clone, Debug)]
pub(crate) enum Other {
    /// An ordinary collective, out of place. `len`: the elements of a buffer, or of one block if a buffer has several.
    Plain {
        kind: Kind,
        len: usize,
        root: usize,
    },
    /// An all_gather or a reduce_scatter with a count for each rank.
    Counts {
        kind: Kind,
        counts: Vec<usize>,
    },
    /// A gather with a count for each rank: this rank sends `gives` elements, and the root expects `counts`.
    GatherV {
        gives: usize,
        counts: Vec<usize>,
        root: usize,
    },
    /// A scatter with a count for each rank: this rank expects `gets` elements, and the root sends `counts`.
    ScatterV {
        gets: usize,
        counts: Vec<usize>,
        root: usize,
    },
    AllToAllV {
        sends: Vec<usize>,
        recvs: Vec<usize>,
    },
    /// An all_reduce by the function of this name.
    Named {
        name: &'static str,
        len: usize,
    },
    /// An all_reduce of a list of `f32` buffers of these lengths and a list of `i32` buffers. `turned`: the `i32` list comes first.
    List {
        floats: Vec<usize>,
        integers: Vec<usize>,
        turned: bool,
    },
    /// `all_gather_bytes`, or `broadcast_bytes` from rank 0.
    Bytes {
        all: bool,
        len: usize,
    },
}

/// The bit in [`Signature::kind`] of a form with a count for each rank.
const VARIED: u8 = 0x80;

impl Other {
    /// Whether this is the call that `s` describes.
    pub(crate) fn is(&self, s: &Signature) -> bool {
        match self {
            Other::Plain { kind, len, root } => {
                s.kind == *kind as u8 && s.count == *len as u64 && s.detail == 0 && s.root == *root as u32
            }
            Other::Counts { kind, counts } => {
                let sum: usize = counts.iter().sum();
                s.kind == *kind as u8 | VARIED && s.count == sum as u64 && s.detail != 0
            }
            // A rank knows only its own counts, so the signature in a frame has the count of that one message.
            Other::GatherV { root, .. } => s.kind == Kind::Gather as u8 | VARIED && s.root == *root as u32,
            Other::ScatterV { root, .. } => s.kind == Kind::Scatter as u8 | VARIED && s.root == *root as u32,
            Other::AllToAllV { .. } => s.kind == Kind::AllToAll as u8 | VARIED,
            Other::Named { len, .. } => {
                s.kind == Kind::AllReduce as u8 && s.op == 254 && s.count == *len as u64 && s.detail != 0
            }
            Other::List { floats, integers, .. } => {
                let count = floats.len() + integers.len();
                s.kind == Kind::AllReduce as u8 && s.dtype == 255 && s.count == count as u64
            }
            Other::Bytes { all, .. } => {
                s.kind == if *all { Kind::AllGather } else { Kind::Broadcast } as u8 && s.detail != 0
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Other::Plain { len, .. } | Other::Named { len, .. } | Other::Bytes { len, .. } => *len,
            Other::Counts { counts, .. } => counts[0],
            Other::GatherV { gives: len, .. } | Other::ScatterV { gets: len, .. } => *len,
            Other::AllToAllV { sends, .. } => sends[0],
            Other::List { floats, .. } => floats[0],
        }
    }

    /// Makes the call, and says what came of it.
    pub(crate) async fn make(self, comm: &mut Comm) -> Came {
        let n = comm.size();
        let full = |len: usize| vec![7f32; len];
        let rank = comm.rank();
        match self {
            Other::Plain { kind, len, root } => {
                let (i, o) = match kind {
                    Kind::ReduceScatter => (n * len, len),
                    Kind::AllGather | Kind::Gather => (len, n * len),
                    Kind::AllToAll => (n * len, n * len),
                    Kind::Scatter => (if rank == root { n * len } else { 0 }, len),
                    _ => (len, len),
                };
                let (i, o) = (full(i), full(o));
                match kind {
                    Kind::AllReduce => pair(comm.all_reduce_into(i, o).await),
                    Kind::Broadcast => pair(comm.broadcast_into(i, o, root).await),
                    Kind::Reduce => pair(comm.reduce_into(i, o, root).await),
                    Kind::AllGather => pair(comm.all_gather_into(i, o).await),
                    Kind::ReduceScatter => pair(comm.reduce_scatter_into(i, o).await),
                    Kind::Gather => pair(comm.gather_into(i, o, root).await),
                    Kind::Scatter => pair(comm.scatter_into(i, o, root).await),
                    Kind::AllToAll => pair(comm.all_to_all_into(i, o).await),
                    Kind::Scan => pair(comm.scan_into(i, o).await),
                    Kind::ExScan => pair(comm.exscan_into(i, o).await),
                    Kind::Barrier => Came(comm.barrier().await.err().map(|f| f.error), true, true),
                }
            }
            Other::Counts { kind, counts } => {
                let (own, all) = (full(counts[rank]), full(counts.iter().sum()));
                match kind {
                    Kind::AllGather => pair(comm.all_gather_v_into(own, all, &counts).await),
                    _ => pair(comm.reduce_scatter_v_into(all, own, &counts).await),
                }
            }
            Other::GatherV { gives, counts, root } => {
                let out = full(counts.iter().sum());
                pair(comm.gather_v_into(full(gives), out, &counts, root).await)
            }
            Other::ScatterV { gets, counts, root } => {
                let input = full(if rank == root { counts.iter().sum() } else { 0 });
                pair(comm.scatter_v_into(input, full(gets), &counts, root).await)
            }
            Other::AllToAllV { sends, recvs } => {
                let (i, o) = (full(sends.iter().sum()), full(recvs.iter().sum()));
                pair(comm.all_to_all_v_into(i, o, &sends, &recvs).await)
            }
            Other::Named { name, len } => {
                let add = |l: &mut [f32], r: &[f32]| l.iter_mut().zip(r).for_each(|(l, r)| *l += r);
                let function = Function::commutative(name, add);
                pair(comm.function(&function).algo(Algo::Direct).all_reduce_into(full(len), full(len)).await)
            }
            Other::List { floats, integers, turned } => {
                let floats: Vec<_> = floats.into_iter().map(full).collect();
                let integers: Vec<_> = integers.into_iter().map(|len| vec![7i32; len]).collect();
                if turned {
                    one(comm.all_reduce_list((integers, floats)).await)
                } else {
                    one(comm.all_reduce_list((floats, integers)).await)
                }
            }
            Other::Bytes { all, len } => {
                let bytes = vec![7u8; len];
                let whole = |buf: Option<&Vec<u8>>| buf.is_some_and(|b| *b == vec![7u8; len]);
                if all {
                    match comm.all_gather_bytes(bytes).await {
                        Ok(_) => Came(None, true, true),
                        Err(f) => Came(Some(f.error), f.buf.is_some(), whole(f.buf.as_ref())),
                    }
                } else {
                    // (On ranks other than the root, the contents of the buffer may have changed.)
                    match comm.broadcast_bytes(bytes, 0).await {
                        Ok(_) => Came(None, true, true),
                        Err(f) => Came(Some(f.error), f.buf.is_some(), rank != 0 || whole(f.buf.as_ref())),
                    }
                }
            }
        }
    }
}

fn one<B>(result: Result<B, Failed<B>>) -> Came {
    match result {
        Ok(_) => Came(None, true, true),
        Err(failed) => Came(Some(failed.error), failed.buf.is_some(), true),
    }
}

type Both = (Vec<f32>, Vec<f32>);

/// How an out-of-place call ended; also checks whether the input is unchanged.
fn pair(result: Result<Both, Failed<Both>>) -> Came {
    let (error, buffers): (Option<Error>, _) = match result {
        Ok(buffers) => (None, Some(buffers)),
        Err(failed) => (Some(failed.error), failed.buf),
    };
    let whole = buffers.as_ref().is_some_and(|(input, _)| input.iter().all(|x| *x == 7.0));
    Came(error, buffers.is_some(), whole)
}

/// The disagreements to be tried: for each, its name, and what each rank calls. Rank `odd` calls something other than the rest.
pub(crate) fn disagreements(n: usize, odd: usize, len: usize) -> Vec<(&'static str, Vec<Other>)> {
    let plain = |kind| Other::Plain { kind, len, root: 0 };
    let mut all: Vec<(&'static str, Vec<Other>)> = Vec::new();
    let mut field = |name, common: Other, other: Other| {
        let of = |r| if r == odd { other.clone() } else { common.clone() };
        all.push((name, (0..n).map(of).collect()));
    };
    for (name, a, b) in [
        ("gather and scatter", Kind::Gather, Kind::Scatter),
        ("scan and exscan", Kind::Scan, Kind::ExScan),
        ("all_to_all and all_reduce", Kind::AllToAll, Kind::AllReduce),
        ("gather and reduce", Kind::Gather, Kind::Reduce),
        ("scatter and broadcast", Kind::Scatter, Kind::Broadcast),
    ] {
        field(name, plain(a), plain(b));
    }
    for (name, kind) in [("gather's root", Kind::Gather), ("scatter's root", Kind::Scatter)] {
        field(name, plain(kind), Other::Plain { kind, len, root: 1 });
    }
    for (name, kind) in [
        ("gather's count", Kind::Gather),
        ("scatter's count", Kind::Scatter),
        ("all_to_all's count", Kind::AllToAll),
        ("scan's count", Kind::Scan),
        ("exscan's count", Kind::ExScan),
    ] {
        field(name, plain(kind), Other::Plain { kind, len: len + 1, root: 0 });
    }
    // Disagreements over counts: another sum, the same counts in another order, and a call without counts. Each rank's own buffer has
    // the length that its own list of counts says.
    let counts: Vec<usize> = (0..n).map(|r| len + r).collect();
    let more: Vec<usize> = counts.iter().enumerate().map(|(r, c)| c + usize::from(r == 0)).collect();
    let turned: Vec<usize> = counts.iter().rev().copied().collect();
    for (name, kind) in
        [("all_gather_v's counts", Kind::AllGather), ("reduce_scatter_v's counts", Kind::ReduceScatter)]
    {
        let of = |counts: &Vec<usize>| Other::Counts { kind, counts: counts.clone() };
        field(name, of(&counts), of(&more));
        field(name, of(&counts), of(&turned));
        field(name, of(&vec![len; n]), plain(kind));
    }
    field("functions", Other::Named { name: "one", len }, Other::Named { name: "another", len });
    field("a function and a sum", Other::Named { name: "one", len }, plain(Kind::AllReduce));
    let list = |floats: &[usize], integers: &[usize], turned| Other::List {
        floats: floats.to_vec(),
        integers: integers.to_vec(),
        turned,
    };
    let common = list(&[len, 3], &[5], false);
    field("a list's lengths", common.clone(), list(&[len, 4], &[5], false));
    field("a list's order", common.clone(), list(&[3, len], &[5], false));
    field("a list's types", list(&[len], &[len], false), list(&[len], &[len], true));
    field("a longer list", common.clone(), list(&[len, 3], &[5, 6], false));
    field("a list and one buffer", common, plain(Kind::AllReduce));
    field("bytes and a broadcast", Other::Bytes { all: false, len }, plain(Kind::Broadcast));
    field("both sorts of bytes", Other::Bytes { all: true, len }, Other::Bytes { all: false, len });
    // Disagreements that only two ranks can notice: the odd one, and the root, which is rank 0 (or the last rank, if the odd one is rank 0).
    let root = if odd == 0 { n - 1 } else { 0 };
    let expected = vec![len; n];
    let gives = |r| Other::GatherV { gives: len + usize::from(r == odd), counts: expected.clone(), root };
    all.push(("gather_v's count", (0..n).map(gives).collect()));
    let gets = |r| Other::ScatterV { gets: len + usize::from(r == odd), counts: expected.clone(), root };
    all.push(("scatter_v's count", (0..n).map(gets).collect()));
    let sends = |r: usize| {
        let more = |to: usize| len + usize::from(r == odd && to == root);
        Other::AllToAllV { sends: (0..n).map(more).collect(), recvs: expected.clone() }
    };
    all.push(("all_to_all_v's counts", (0..n).map(sends).collect()));
    all
}
