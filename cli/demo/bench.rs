//! How long an all-reduce takes, by size.

use allstream::Comm;

use crate::error::BoxError;
use crate::perf::{self, Time};

/// Bytes of a vector.
const SIZES: [usize; 5] = [4, 4 << 10, 64 << 10, 1 << 20, 16 << 20];

/// One line of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    bytes: usize,
    time: Time,
}

/// Times `all_reduce` of `f32` sums as `allstream perf` does; all ranks call this together and get the same rows.
pub(crate) fn all_reduce_times(comm: &mut Comm) -> Result<Vec<Row>, BoxError> {
    let row = |bytes| {
        let time = perf::all_reduce_time(comm, bytes)?;
        match time.wrong {
            None | Some(0) => Ok(Row { bytes, time }),
            Some(wrong) => Err(format!("all-reduce of {bytes} bytes: {wrong} elements are wrong").into()),
        }
    };
    SIZES.into_iter().map(row).collect()
}

/// The rows as lines of text. `algbw` is size over time. `busbw` is `algbw` times 2(n-1)/n for n ranks: with the best algorithm,
/// each rank sends 2(n-1)/n times the vector's size.
pub(crate) fn table(rows: &[Row]) -> Vec<String> {
    let head = format!("{:>8} {:>12} {:>12} {:>12}", "size", "median us", "algbw GB/s", "busbw GB/s");
    let lines = rows.iter().map(|Row { bytes, time }| {
        let Time { median_us, algbw, busbw, .. } = time;
        format!("{:>8} {median_us:>12.1} {algbw:>12.3} {busbw:>12.3}", size_text(*bytes))
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
    fn the_table_is_measured_as_perf_measures() {
        let ranks = Comm::local(2).unwrap().into_iter().map(|mut comm| {
            std::thread::spawn(move || {
                // Like `allstream perf`, this times groups of operations back to back, and checks the results.
                let time = perf::all_reduce_time(&mut comm, 4).unwrap();
                assert!(
                    time.wrong == Some(0) && time.min_us > 0.0 && time.median_us >= time.min_us,
                    "{time:?}"
                );
                table(&[
                    Row { bytes: 4, time },
                    Row { bytes: 1 << 20, time: Time { median_us: 1000.0, ..time } },
                ])
            })
        });
        let tables: Vec<_> = ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect();
        assert_eq!(tables[0], tables[1], "the same on all ranks");
        assert_eq!(tables[0][0], "    size    median us   algbw GB/s   busbw GB/s");
        assert!(tables[0][2].starts_with("   1 MiB       1000.0 "), "{:?}", tables[0]);
    }
}
