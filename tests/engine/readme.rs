//! What docs/rust.md says "in short": the very lines, compiled and run by four ranks, and nothing else there.

use std::time::Duration;

use crate::support::{on_threads, worlds};
use allstream::{Comm, Error, Failed, Function, Node, ReduceOp, Rendezvous, View, bf16};
use futures::executor::block_on;

const LIMIT: Duration = Duration::from_secs(60);
const N: usize = 4;

async fn options(comm: &mut Comm) -> Result<(), Error> {
    let (n, rank) = (comm.size(), comm.rank());
    let (values, grads, halves) = (vec![rank as u32], vec![rank as f32], vec![bf16::ONE; 3]);
    // Options come first; they are for one call.
    let largest = comm.op(ReduceOp::Max).timeout(Duration::from_secs(5)).all_reduce(values).await?;
    let exact = comm.call().deterministic(true).all_reduce(grads).await?; // bits that depend on nothing but the inputs
    let mean = comm.scale(1.0 / n as f64).all_reduce(halves).await?; // multiplied first: 8-bit floats stay in range
    assert_eq!((largest, exact, mean), (vec![3], vec![6.0], vec![bf16::ONE; 3]));
    Ok(())
}

async fn counts(comm: &mut Comm) -> Result<(), Error> {
    // A count for each rank: rank r gives r + 1 elements, everyone gets all.
    let counts: Vec<usize> = (1..=comm.size()).collect();
    let all = comm.all_gather_v(vec![comm.rank() as u32; comm.rank() + 1], &counts).await?;
    assert_eq!(all, [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]);
    Ok(())
}

async fn many(comm: &mut Comm) -> Result<(), Error> {
    let weights = vec![vec![bf16::ONE; 2], vec![bf16::ONE; 5]];
    let biases = [vec![1.0_f32; 3], vec![2.0; 1]];
    let config = if comm.rank() == 0 { b"lr = 0.1".to_vec() } else { Vec::new() };
    // Many buffers, of several types, in one operation; and bytes whose length only the root knows.
    let (weights, biases) = comm.all_reduce_list((weights, biases)).await?; // Vec<Vec<bf16>> and [Vec<f32>; 2], say
    let config: Vec<u8> = comm.broadcast_bytes(config, 0).await?;
    assert_eq!(weights, [vec![bf16::from_f32(4.0); 2], vec![bf16::from_f32(4.0); 5]]);
    assert_eq!((biases, &config[..]), ([vec![4.0; 3], vec![8.0]], &b"lr = 0.1"[..]));
    Ok(())
}

async fn ring(comm: &mut Comm) -> Result<(), Error> {
    let (rank, n) = (comm.rank(), comm.size());
    let (right, left) = ((rank + 1) % n, (rank + n - 1) % n);
    let (block, incoming) = (vec![rank as u64; 100], vec![0_u64; 100]);
    // Everyone to the right, from the left, at once.
    let (block, incoming) = comm.send_recv(block, right, incoming, left).await?;
    assert_eq!((block, incoming), (vec![rank as u64; 100], vec![left as u64; 100]));
    Ok(())
}

async fn function(comm: &mut Comm) -> Result<(), Error> {
    let values = vec![[1.0_f32, -3.0, 2.0, 3.0][comm.rank()]; 7];
    // A reduction of yours, compared between ranks by its name. In rank order: of two alike, the lower rank's stays.
    let larger = Function::ordered("by magnitude", |left: &mut [f32], right: &[f32]| {
        for (l, r) in left.iter_mut().zip(right) {
            if r.abs() > l.abs() {
                *l = *r;
            }
        }
    });
    let most = comm.function(&larger).all_reduce(values).await?;
    assert_eq!(most, vec![-3.0; 7]);
    Ok(())
}

async fn arena(comm: &mut Comm) -> Result<(), Error> {
    // Memory that other ranks of this host, and cards over RDMA, read where it lies.
    let mut grads = comm.alloc::<f32>(1 << 20)?;
    grads.fill(1.0);
    let grads = comm.all_reduce(grads).await?;
    assert!(grads.iter().all(|sum| *sum == N as f32));
    Ok(())
}

async fn halves(comm: &mut Comm) -> Result<(), Error> {
    let buffer = vec![comm.rank() as i32; 1000];
    // Two halves of one buffer in flight; no copy.
    let [low, high] = allstream::split_at(buffer, 400)?;
    let (first, second) = (comm.all_reduce(low), comm.broadcast(high, 0));
    let buffer = View::join([first.await?, second.await?])?;
    assert_eq!(buffer, [vec![6; 400], vec![0; 600]].concat());
    Ok(())
}

async fn groups(world: &mut Comm) -> Result<(), Error> {
    let (rank, grads) = (world.rank(), vec![world.rank() as f64]);
    // Groups: four ranks as a grid, a communicator along each axis.
    let mut mesh = world.mesh([("dp", 2), ("tp", 2)]).await?;
    let grads = mesh.axis("dp")?.all_reduce(grads).await?;
    // Rank r is at row r / 2, column r % 2: the sum is over r and the rank of the other row in its column.
    assert_eq!(grads, [(2 * (rank % 2) + 2) as f64]);
    Ok(())
}

/// Needs a launcher; examples/10_devices.rs runs the same.
async fn devices([g0, g1]: [Vec<f32>; 2], [w0, w1]: [Vec<f32>; 2]) -> Result<[Vec<f32>; 4], Error> {
    // Several devices of this process; roots are (process, device).
    let mut node = Node::connect(Rendezvous::from_env()?, 2).await?;
    let [g0, g1] = node.all_reduce([g0, g1]).await?;
    let [w0, w1] = node.broadcast([w0, w1], (0, 0)).await?;
    Ok([g0, g1, w0, w1])
}

#[derive(Debug, PartialEq)]
enum Then {
    Used(Vec<f32>),
    StartedAgain(Vec<usize>),
    Reported(Option<Vec<f32>>, Vec<usize>),
}

async fn failure(comm: &mut Comm, grads: Vec<f32>) -> Result<Then, Error> {
    let use_it = Then::Used;
    let start_again = Then::StartedAgain;
    let report = |buf, _error: Error, survivors| Then::Reported(buf, survivors);
    // Failure: the buffer comes back, and the survivors find out together what they have.
    let sum = comm.all_reduce(grads).await;
    let verdict = comm.agree(sum.is_ok()).await?; // works on a dead communicator too
    let then = match sum {
        Ok(grads) if verdict.flag => use_it(grads),
        Ok(_) => start_again(verdict.survivors),
        Err(Failed { buf, error }) => report(buf, error, verdict.survivors),
    };
    Ok(then)
}

async fn all(mut comm: Comm) -> Result<(), Error> {
    options(&mut comm).await?;
    counts(&mut comm).await?;
    many(&mut comm).await?;
    ring(&mut comm).await?;
    function(&mut comm).await?;
    arena(&mut comm).await?;
    halves(&mut comm).await?;
    groups(&mut comm).await?;
    assert_eq!(failure(&mut comm, vec![1.0; 9]).await?, Then::Used(vec![4.0; 9]));
    // Rank 2 has one element more: everyone has its own back, and all know who is left.
    let grads = vec![1.0; if comm.rank() == 2 { 10 } else { 9 }];
    let (mine, everyone) = (grads.clone(), (0..N).collect());
    assert_eq!(failure(&mut comm, grads).await?, Then::Reported(Some(mine), everyone));
    Ok(())
}

#[test]
fn what_the_readme_says_in_short_runs() {
    let _needs_a_launcher = devices;
    for link in ["local", "shm"] {
        let ended = on_threads(worlds(N, link), LIMIT, |_, comm| block_on(all(comm)));
        for (rank, ended) in ended.iter().enumerate() {
            assert_eq!(ended, &Ok(Ok(())), "rank {rank} over {link}");
        }
    }
}

#[test]
fn and_it_says_nothing_else() {
    let readme = include_str!("../../docs/rust.md");
    let (_, short) = readme.split_once("\n## In short\n").expect("that chapter");
    let (_, block) = short.split_once("```rust,ignore\n").expect("its block");
    let (block, _) = block.split_once("\n```").expect("the end of its block");
    // Lines are compared without regard to spaces, which rustfmt changes.
    let even = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let lines = |text: &'static str| text.lines().map(even).filter(|line| !line.is_empty());
    let mut here = lines(include_str!("readme.rs"));
    for line in lines(block) {
        // Lines must come in the same order; the last `match` is bound to a name here, so a semicolon follows it.
        let bound = [line.clone(), format!("let then = {line}"), format!("{line};")];
        let is_there = here.any(|code| bound.contains(&code));
        assert!(is_there, "docs/rust.md, In short: `{line}` is not run by this test, or not at its place");
    }
}
