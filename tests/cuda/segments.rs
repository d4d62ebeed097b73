//! Ranks with and without devices in one group: long operations go in segments, through little pinned memory.

use std::time::Duration;

use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream};
use allstream::{Comm, Error, Failed, ReduceOp};

use crate::support::{child, down, fail, nothing_left, ranks, report, soon, up};

const SLOW: &[(&str, &str)] = &[("ALLSTREAM_TEST_CUDA_DELAY_US", "300")];

/// Elements of seven segments of 16 MiB, and a part of an eighth: more than there are blocks.
const LEN: usize = (7 << 22) + 1001;

/// Ranks 0 and 1 have a device, rank 2 has none.
fn bound(comm: &mut Comm) -> Option<DeviceStream> {
    let (path, stream) = match comm.rank() {
        2 => (soon(comm.bind_host()).unwrap(), None),
        rank => {
            let device = Device::new(rank).unwrap();
            (soon(comm.bind_device(&device)).unwrap(), Some(DeviceStream::new(&device).unwrap()))
        }
    };
    assert_eq!(path, DevicePath::Staged { why: "rank 2 has no device".into() });
    stream
}

fn value(rank: usize, at: usize) -> i32 {
    (at % 1009 + 7 * rank) as i32
}

fn values(rank: usize) -> Vec<i32> {
    (0..LEN).map(|at| value(rank, at)).collect()
}

fn is(found: &[i32], expected: impl Fn(usize) -> i32) {
    assert_eq!(found.len(), LEN);
    let wrong = (0..LEN).find(|at| found[*at] != expected(*at));
    assert_eq!(wrong, None, "the first that is wrong");
}

fn sum(at: usize) -> i32 {
    (0..3).map(|rank| value(rank, at)).sum()
}

/// For each of two devices three segments of 32 MiB (a reduce into another buffer), and 64 MiB that it keeps of earlier
/// operations. As a whole, the buffers of the two would take 470 MB.
const TIGHT: &[(&str, &str)] =
    &[("ALLSTREAM_TEST_CUDA_DELAY_US", "300"), ("ALLSTREAM_TEST_CUDA_PINNED", "320M")];

#[test]
fn long_operations_of_a_mixed_group_go_in_segments() {
    child("segments::long_operations_of_a_mixed_group_go_in_segments", TIGHT, || {
        ranks(3, |mut comm| {
            let rank = comm.rank();
            match bound(&mut comm) {
                Some(stream) => {
                    let buf = soon(comm.all_reduce(up(&stream, values(rank)))).unwrap();
                    let buf = soon(comm.broadcast(buf, 2)).unwrap();
                    let (host, mine) = soon(DeviceBuf::from_host(&stream, values(rank))).unwrap();
                    is(&host, |at| value(rank, at));
                    let (mine, most) = soon(comm.op(ReduceOp::Max).reduce_into(mine, buf, 0)).unwrap();
                    is(&down(mine), |at| value(rank, at));
                    is(&down(most), |at| if rank == 0 { value(2, at) } else { -sum(at) });
                }
                None => {
                    let mut buf = soon(comm.all_reduce(values(rank))).unwrap();
                    is(&buf, sum);
                    buf.iter_mut().for_each(|x| *x = -*x);
                    let buf = soon(comm.broadcast(buf, 2)).unwrap();
                    let buf = soon(comm.op(ReduceOp::Max).reduce_into(values(rank), buf, 0)).unwrap().1;
                    is(&buf, |at| -sum(at));
                }
            }
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// A rank that does not come, and a driver that refuses a copy in the middle: all ranks hear, and buffers come back.
#[test]
fn what_fails_in_a_segment_fails_the_operation() {
    child("segments::what_fails_in_a_segment_fails_the_operation", SLOW, || {
        ranks(3, |mut comm| {
            let stream = bound(&mut comm);
            let limited = comm.timeout(Duration::from_millis(300));
            let error = match &stream {
                Some(stream) => {
                    let Failed { buf, error } = soon(limited.all_reduce(up(stream, values(0)))).unwrap_err();
                    drop(buf.unwrap());
                    error
                }
                _ => soon(comm.recv(vec![0u8], 0)).unwrap_err().error,
            };
            let known =
                matches!(error, Error::Timeout { .. } | Error::Aborted { .. } | Error::PeerLost { .. });
            assert!(known, "{error}");
        });
        nothing_left("all ranks have ended");
        for (copy, nth) in [("cuMemcpyDtoHAsync_v2", 9), ("cuMemcpyHtoDAsync_v2", 15)] {
            let errors = ranks(3, |mut comm| {
                let stream = bound(&mut comm);
                let buf = stream.as_ref().map(|stream| up(stream, values(0)));
                soon(comm.barrier()).unwrap();
                if comm.rank() == 0 {
                    fail(Some(copy), nth, 2);
                }
                soon(comm.barrier()).unwrap();
                match buf {
                    Some(buf) => soon(comm.all_reduce(buf)).map(drop).map_err(|failed| failed.error),
                    None => soon(comm.all_reduce(values(0))).map(drop).map_err(|failed| failed.error),
                }
                .err()
            });
            fail(None, 0, 0);
            assert!(errors.iter().any(Option::is_some), "{copy}: nobody was told");
            nothing_left("all ranks have ended");
        }
        assert_eq!(report().freed_in_use, 0);
    });
}
