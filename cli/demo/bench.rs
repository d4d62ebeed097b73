//! How long an all-reduce takes, by size.

use std::time::{Duration, Instant};

use allstream::{Comm, ReduceOp};

use super::BoxError;

/// Bytes of a vector, and how often to time its all-reduce.
const SIZES: [(usize, usize); 5] = [(4, 200), (4 << 10, 200), (64 << 10, 100), (1 << 20, 30), (16 << 20, 9)];

/// Untimed repetitions before the timed ones.
const WARM_UP: usize = 3;

/// One line of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    bytes: usize,
    median: Duration,
}

/// Times `all_reduce` of `f32` sums; all ranks call this together and get the same rows.
pub(crate) async fn all_reduce_times(comm: &mut Comm) -> Result<Vec<Row>, BoxError> {
    let mut rows = Vec::with_capacity(SIZES.len());
    for (bytes, repetitions) in SIZES {
        rows.push(Row { bytes, median: median_time(comm, bytes, repetitions).await? });
    }
    Ok(rows)
}

async fn median_time(comm: &mut Comm, bytes: usize, repetitions: usize) -> Result<Duration, BoxError> {
    let mut buffer = vec![0.0_f32; bytes / size_of::<f32>()];
    for _ in 0..WARM_UP {
        // Rank r gives r + 1, so that the sum is known.
        buffer.fill((comm.rank() + 1) as f32);
        buffer = comm.all_reduce(buffer).await?;
        let expected = (comm.size() * (comm.size() + 1) / 2) as f32;
        if let Some(at) = buffer.iter().position(|&sum| sum != expected) {
            let sum = buffer[at];
            let message = format!("all-reduce of {bytes} bytes: element {at} is {sum} instead of {expected}");
            return Err(message.into());
        }
    }
    // Zeros stay zeros however often they are summed.
    buffer.fill(0.0);
    comm.barrier().await?;
    let mut nanos = Vec::with_capacity(repetitions);
    for _ in 0..repetitions {
        let start = Instant::now();
        buffer = comm.all_reduce(buffer).await?;
        nanos.push(u64::try_from(start.elapsed().as_nanos())?);
    }
    // An all-reduce takes as long as it takes the slowest rank.
    let mut nanos = comm.op(ReduceOp::Max).all_reduce(nanos).await?;
    nanos.sort_unstable();
    Ok(Duration::from_nanos(nanos[nanos.len() / 2]))
}

/// The rows as lines of text. `algbw` is size over time; `busbw` scales it by 2(n-1)/n, the part
/// of a vector that each rank of the best algorithm has to send.
pub(crate) fn table(rows: &[Row], ranks: usize) -> Vec<String> {
    let head = format!("{:>8} {:>12} {:>12} {:>12}", "size", "median us", "algbw GB/s", "busbw GB/s");
    let lines = rows.iter().map(|row| {
        let micros = row.median.as_secs_f64() * 1e6;
        let algbw = row.bytes as f64 / row.median.as_secs_f64() / 1e9;
        let busbw = algbw * 2.0 * (ranks as f64 - 1.0) / ranks as f64;
        let size = size_text(row.bytes);
        format!("{size:>8} {micros:>12.1} {algbw:>12.3} {busbw:>12.3}")
    });
    std::iter::once(head).chain(lines).collect()
}

fn size_text(bytes: usize) -> String {
    match bytes {
        b if b >= 1 << 20 => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_scales_bandwidth() {
        let rows = [
            Row { bytes: 4, median: Duration::from_micros(20) },
            Row { bytes: 1 << 20, median: Duration::from_millis(1) },
        ];
        assert_eq!(
            table(&rows, 4),
            [
                "    size    median us   algbw GB/s   busbw GB/s",
                "     4 B         20.0        0.000        0.000",
                "   1 MiB       1000.0        1.049        1.573",
            ]
        );
    }
}
