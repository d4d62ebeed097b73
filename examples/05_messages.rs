//! Messages between two ranks.
//!
//! Teaches: a `send` is matched with a `recv` of the same length, type and tag, in order for each tag; the call itself
//! submits either, so submit both before waiting for one; tags are independent of each other; a batch puts
//! several messages in flight together and gives the buffers back in the order given.
//!
//! `cargo run --release --example 05_messages`

use std::thread;

use allstream::{Comm, Message};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Passes a number once round the ring; each rank adds itself.
fn token(comm: &mut Comm) -> Result<u64> {
    let (rank, size) = (comm.rank(), comm.size());
    let (left, right) = ((rank + size - 1) % size, (rank + 1) % size);
    if rank == 0 {
        let _ = comm.send(vec![0_u64], right).wait()?;
        Ok(comm.recv(vec![0], left).wait()?[0])
    } else {
        let heard = comm.recv(vec![0_u64], left).wait()?[0] + rank as u64;
        // Dropping the work does not cancel the send, which runs on.
        drop(comm.send(vec![heard], right));
        Ok(heard)
    }
}

/// Everyone sends a large block to the right and gets one from the left.
fn shift(comm: &mut Comm) -> Result<f32> {
    let (rank, size) = (comm.rank(), comm.size());
    let block = vec![rank as f32; 1 << 20];
    let sent = comm.send(block, (rank + 1) % size);
    // The receive is submitted while the send is in flight. Waiting for the send first would hang: a large message moves
    // only once its receive is submitted, and all ranks would wait for each other.
    let received = comm.recv(vec![0.0_f32; 1 << 20], (rank + size - 1) % size).wait()?;
    let block = sent.wait()?; // ours again
    Ok(received[block.len() - 1])
}

/// Two streams of messages, one of which overtakes the other.
fn tags(comm: &mut Comm) -> Result<Option<(u8, u8)>> {
    const DATA: u32 = 1;
    const URGENT: u32 = 2;
    match comm.rank() {
        0 => {
            let data = comm.tag(DATA).send(vec![1_u8], 1);
            let urgent = comm.tag(URGENT).send(vec![2_u8], 1);
            data.wait()?;
            urgent.wait()?;
            Ok(None)
        }
        1 => {
            // The urgent message was sent second, and is received first.
            let urgent = comm.tag(URGENT).recv(vec![0_u8], 0).wait()?[0];
            let data = comm.tag(DATA).recv(vec![0_u8], 0).wait()?[0];
            Ok(Some((urgent, data)))
        }
        _ => Ok(None),
    }
}

/// Rank 0 swaps with all others at once.
fn batch(comm: &mut Comm) -> Result<Vec<i32>> {
    let peers: Vec<usize> = if comm.rank() == 0 { (1..comm.size()).collect() } else { vec![0] };
    let mine = 10 * comm.rank() as i32;
    let sends = peers.iter().map(|&to| Message::Send { buf: vec![mine], to, tag: 3 });
    let recvs = peers.iter().map(|&from| Message::Recv { buf: vec![0], from, tag: 3 });
    let bufs = comm.batch(sends.chain(recvs)).wait()?;
    Ok(bufs[peers.len()..].iter().map(|b| b[0]).collect())
}

fn rank(mut comm: Comm) -> Result<String> {
    let (token, shift) = (token(&mut comm)?, shift(&mut comm)?);
    let (tags, batch) = (tags(&mut comm)?, batch(&mut comm)?);
    let tags = tags.map_or(String::new(), |(urgent, data)| format!(", urgent {urgent} before data {data}"));
    Ok(format!("rank {}: token {token}, from the left {shift}, batch {batch:?}{tags}", comm.rank()))
}

fn main() -> Result<()> {
    let threads: Vec<_> = Comm::local(3)?.into_iter().map(|comm| thread::spawn(|| rank(comm))).collect();
    for thread in threads {
        println!("{}", thread.join().map_err(|_| "a rank panicked")??);
    }
    Ok(())
}
