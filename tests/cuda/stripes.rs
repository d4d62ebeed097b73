//! Long staged operations of ranks with and without devices: each stripe is reduced once it has come, and copied back once it is done.

use std::time::Duration;

use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream};
use allstream::{Buf, Comm, Error, Failed, ReduceOp};

use crate::support::{calls, child, down, fail, is_ours, nothing_left, pass, ranks, report, soon, until, up};

const SLOW: &[(&str, &str)] = &[("ALLSTREAM_TEST_CUDA_DELAY_US", "300")];

/// The elements of 28 MiB, and some more that do not fill a stripe.
const LEN: usize = (7 << 20) + 1001;

/// Ranks 0 and 1 have a device each, rank 2 has none.
fn stream(comm: &Comm) -> Option<DeviceStream> {
    (comm.rank() < 2).then(|| DeviceStream::new(&Device::new(comm.rank()).unwrap()).unwrap())
}

fn value(rank: usize, at: usize) -> i32 {
    (at % 1009 + 7 * rank) as i32
}

fn values(rank: usize, len: usize) -> Vec<i32> {
    (0..len).map(|at| value(rank, at)).collect()
}

fn is(found: &[i32], len: usize, expected: impl Fn(usize) -> i32) {
    assert_eq!(found.len(), len);
    let wrong = (0..len).find(|at| found[*at] != expected(*at));
    assert_eq!(wrong, None, "the first that is wrong");
}

fn sum(at: usize) -> i32 {
    (0..3).map(|rank| value(rank, at)).sum()
}

/// Runs long collectives, a list and a message, and checks what they leave on every rank.
fn collectives<B: Buf<Elem = i32>>(
    comm: &mut Comm,
    up: impl Fn(Vec<i32>) -> B,
    down: impl Fn(B) -> Vec<i32>,
) {
    let (rank, block) = (comm.rank(), LEN / 3);
    let mine = || up(values(rank, LEN));
    is(&down(soon(comm.all_reduce(mine())).unwrap()), LEN, sum);
    let (input, sums) = soon(comm.all_reduce_into(mine(), up(vec![0; LEN]))).unwrap();
    is(&down(sums), LEN, sum);
    is(&down(input), LEN, |at| value(rank, at));
    is(&down(soon(comm.broadcast(mine(), 1)).unwrap()), LEN, |at| value(1, at));
    let kept = soon(comm.op(ReduceOp::Max).reduce(mine(), 0)).unwrap();
    if rank == 0 {
        is(&down(kept), LEN, |at| value(2, at));
    }
    let input = up(values(rank, 3 * block));
    let (_, sums) = soon(comm.reduce_scatter_into(input, up(vec![0; block]))).unwrap();
    is(&down(sums), block, |at| sum(rank * block + at));
    let (_, all) = soon(comm.all_gather_into(up(values(rank, block)), up(vec![0; 3 * block]))).unwrap();
    is(&down(all), 3 * block, |at| value(at / block, at % block));
    let input = up(values(rank, 3 * block));
    let (_, all) = soon(comm.all_to_all_into(input, up(vec![0; 3 * block]))).unwrap();
    is(&down(all), 3 * block, |at| value(at / block, rank * block + at % block));
    // Small buffers, one that is cut into stripes, an empty one, and one of another length.
    let lens = [1000, LEN, 0, LEN / 5, 7];
    let list: Vec<B> = lens.iter().map(|len| up(values(rank, *len))).collect();
    let list = soon(comm.all_reduce_list(list)).unwrap();
    for (buf, len) in list.into_iter().zip(lens) {
        is(&down(buf), len, sum);
    }
    let (to, from) = ((rank + 1) % 3, (rank + 2) % 3);
    let (_, got) = soon(comm.send_recv(mine(), to, up(vec![0; LEN]), from)).unwrap();
    is(&down(got), LEN, |at| value(from, at));
}

#[test]
fn long_operations_of_a_mixed_group_give_what_hosts_get() {
    child("stripes::long_operations_of_a_mixed_group_give_what_hosts_get", SLOW, || {
        ranks(3, |mut comm| {
            match stream(&comm) {
                Some(stream) => collectives(&mut comm, |values| up(&stream, values), down),
                None => collectives(&mut comm, |values| values, |buf| buf),
            }
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// Averages and scaled sums, for which the whole input is touched first.
#[test]
fn what_is_scaled_or_averaged_is_so_once() {
    child("stripes::what_is_scaled_or_averaged_is_so_once", SLOW, || {
        let expected = |at: usize| (0..3).map(|rank| value(rank, at) as f32).sum::<f32>();
        let mine = |rank: usize| values(rank, LEN).into_iter().map(|x| x as f32).collect::<Vec<_>>();
        let check = |found: Vec<f32>, factor: f32| {
            let wrong = (0..LEN).find(|at| (found[*at] - factor * expected(*at)).abs() > 0.01);
            assert_eq!(wrong, None);
        };
        ranks(3, |mut comm| {
            let rank = comm.rank();
            if let Some(stream) = stream(&comm) {
                let buf = soon(comm.op(ReduceOp::Avg).all_reduce(up(&stream, mine(rank)))).unwrap();
                check(down(buf), 1.0 / 3.0);
                let buf = soon(comm.scale(0.5).all_reduce(up(&stream, mine(rank)))).unwrap();
                check(down(buf), 0.5);
                // A group of one rank, where no step touches the data.
                let mut alone = Comm::local(1).unwrap().remove(0);
                let mut own = down(soon(alone.scale(0.5).scan(up(&stream, mine(rank)))).unwrap());
                own.iter_mut().for_each(|x| *x *= 2.0);
                assert!(own == mine(rank));
                let (input, output) = (up(&stream, mine(rank)), up(&stream, vec![0f32; LEN]));
                let (input, output) = soon(comm.scale(0.5).all_reduce_into(input, output)).unwrap();
                check(down(output), 0.5);
                assert!(down(input) == mine(rank));
            } else {
                check(soon(comm.op(ReduceOp::Avg).all_reduce(mine(rank))).unwrap(), 1.0 / 3.0);
                check(soon(comm.scale(0.5).all_reduce(mine(rank))).unwrap(), 0.5);
                soon(comm.scale(0.5).all_reduce_into(mine(rank), vec![0f32; LEN])).unwrap();
            }
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// For [`pass`]: lets all copies pass.
const ALL: u64 = u64::MAX;

fn copied() -> (u64, u64) {
    (calls("cuMemcpyDtoHAsync_v2"), calls("cuMemcpyHtoDAsync_v2"))
}

/// Rank 0 has a device. The last of its copies to the host is held up: meanwhile all stripes but the last are reduced, and are on
/// their way back.
#[test]
fn what_has_come_is_reduced_and_goes_back_before_the_rest_has_come() {
    child("stripes::what_has_come_is_reduced_and_goes_back_before_the_rest_has_come", &[], || {
        let expected = |at: usize| 2 * value(0, at) + 7;
        ranks(2, |mut comm| {
            if comm.rank() == 1 {
                for _ in 0..2 {
                    is(&soon(comm.all_reduce(values(1, LEN))).unwrap(), LEN, expected);
                }
                return soon(comm.close()).unwrap();
            }
            let stream = DeviceStream::new(&Device::new(0).unwrap()).unwrap();
            let (buf, before) = (up(&stream, values(0, LEN)), copied());
            let buf = soon(comm.all_reduce(buf)).unwrap();
            let (ins, outs) = (copied().0 - before.0, copied().1 - before.1);
            is(&down(buf), LEN, expected);
            // One copy for each chunk in a stripe.
            assert!(ins == outs && ins >= 6, "{ins} copies in, {outs} out");
            let (buf, before) = (up(&stream, values(0, LEN)), copied());
            pass(false, ins - 1);
            let work = comm.all_reduce(buf);
            until("all but the last stripe goes back", || copied().1 - before.1 == outs - 2);
            pass(false, ALL);
            is(&down(soon(work).unwrap()), LEN, expected);
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// The same for a message between two devices.
#[test]
fn a_message_goes_on_as_it_comes() {
    child("stripes::a_message_goes_on_as_it_comes", &[], || {
        let (before, ends) = (copied(), (4 * LEN as u64).div_ceil(8 << 20));
        ranks(2, |mut comm| {
            let stream = stream(&comm).unwrap();
            let buf = up(&stream, values(comm.rank(), LEN));
            soon(comm.barrier()).unwrap();
            let before = copied();
            soon(comm.barrier()).unwrap();
            if comm.rank() == 0 {
                pass(false, ends - 1);
                let work = comm.send(buf, 1);
                until("all but the last goes to the other device", || copied().1 - before.1 == ends - 1);
                pass(false, ALL);
                is(&down(soon(work).unwrap()), LEN, |at| value(0, at));
                soon(comm.barrier()).unwrap();
            } else {
                let got = soon(comm.recv(buf, 0)).unwrap();
                soon(comm.barrier()).unwrap();
                is(&down(got), LEN, |at| value(0, at));
            }
            soon(comm.close()).unwrap();
        });
        assert!(copied().0 - before.0 > ends);
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// Rank 0's copies in one direction are held up after the first `copies`: at the deadline the error names its device.
fn held(to_device: bool, copies: u64) {
    // Long compared to what the ranks do before copies go back to the device.
    let deadline = Duration::from_millis(if to_device { 3000 } else { 300 });
    let errors = ranks(2, |mut comm| {
        if comm.rank() == 1 {
            let ended = soon(comm.all_reduce(vec![1f32; LEN]));
            until("the other rank has given up", || comm.check().is_err());
            return ended.err().map(|failed| failed.error.to_string());
        }
        let stream = DeviceStream::new(&Device::new(0).unwrap()).unwrap();
        let buf = up(&stream, vec![1f32; LEN]);
        pass(to_device, copies);
        let Failed { buf, error } = soon(comm.timeout(deadline).all_reduce(buf)).unwrap_err();
        let Error::Timeout { missing, .. } = &error else { panic!("{error}") };
        assert_eq!(missing[0].rank, 0, "{error}");
        assert!(comm.check().is_err());
        pass(to_device, ALL);
        is_ours(buf.unwrap());
        Some(error.to_string())
    });
    let text = errors[0].as_ref().unwrap();
    assert!(text.contains("its device has not come to it"), "{text}");
    nothing_left("all ranks have ended");
    assert_eq!(report().freed_in_use, 0);
}

/// The same for a message that is sent.
fn held_message() {
    ranks(2, |mut comm| {
        if comm.rank() == 1 {
            let ended = soon(comm.recv(vec![0f32; LEN], 0));
            assert!(ended.is_err());
            return;
        }
        let stream = DeviceStream::new(&Device::new(0).unwrap()).unwrap();
        let buf = up(&stream, vec![1f32; LEN]);
        pass(false, 1);
        let Failed { buf, error } = soon(comm.timeout(Duration::from_millis(300)).send(buf, 1)).unwrap_err();
        assert!(error.to_string().contains("rank 0 has called it, and its device has not come"), "{error}");
        pass(false, ALL);
        is_ours(buf.unwrap());
    });
    nothing_left("all ranks have ended");
}

/// A receive is posted at once, whatever its buffer's stream waits for: the peer may have to send before it does what the stream needs.
#[test]
fn a_receive_does_not_wait_for_its_stream() {
    child("stripes::a_receive_does_not_wait_for_its_stream", &[], || {
        ranks(2, |mut comm| {
            let (rank, stream) = (comm.rank(), stream(&comm).unwrap());
            let device = stream.device();
            assert_eq!(soon(comm.bind_device(&device)).unwrap(), DevicePath::Peer);
            let (grads, other) = (up(&stream, vec![1f32; 100]), up(&stream, values(rank, LEN)));
            if rank == 0 {
                let sent = soon(comm.send(other, 1)).unwrap();
                assert_eq!(down(soon(comm.all_reduce(grads)).unwrap()), [2.0; 100]);
                drop(sent);
            } else {
                // The stream waits for the other rank, which has to send before.
                let joined = comm.all_reduce(grads).join(&stream).unwrap();
                is(&down(soon(comm.recv(other, 0)).unwrap()), LEN, |at| value(0, at));
                assert_eq!(down(soon(joined).unwrap()), [2.0; 100]);
            }
            soon(comm.close()).unwrap();
        });
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}

/// Law 4: a device whose copies to the host or from the host do not end is named at the deadline.
#[test]
fn law_4_a_device_that_does_not_copy_is_named() {
    child("stripes::law_4_a_device_that_does_not_copy_is_named", &[], || {
        held(false, 3);
        held(true, 0);
        held(true, 3);
        held_message();
    });
}

/// An abort, by a rank without a device, or when a part of a buffer has come back and another has not been copied in.
#[test]
fn law_3_what_failed_half_way_is_the_callers_again() {
    child("stripes::law_3_what_failed_half_way_is_the_callers_again", SLOW, || {
        for aborts in [false, true] {
            ranks(3, |mut comm| {
                if comm.rank() == 2 {
                    soon(comm.barrier()).unwrap();
                    // It takes part for a while.
                    let work = comm.all_reduce(vec![1f32; LEN]);
                    if aborts {
                        comm.abort("planted");
                    }
                    drop(soon(work));
                    return;
                }
                let stream = stream(&comm).unwrap();
                let buf = up(&stream, vec![1f32; LEN]);
                soon(comm.barrier()).unwrap();
                let (before, work) = (calls("cuMemcpyHtoDAsync_v2"), comm.all_reduce(buf));
                if !aborts && comm.rank() == 0 {
                    until("some of it goes back", || calls("cuMemcpyHtoDAsync_v2") > before);
                    comm.abort("planted");
                }
                match soon(work) {
                    Ok(buf) => drop(buf),
                    Err(Failed { buf, .. }) => is_ours(buf.unwrap()),
                }
            });
            nothing_left("all ranks have ended");
        }
        assert_eq!(report().freed_in_use, 0);
    });
}

#[test]
fn every_call_of_stripes_fails_in_turn() {
    child("stripes::every_call_of_stripes_fails_in_turn", &[], || {
        let program = || {
            ranks(2, |mut comm| {
                let device = (comm.rank() == 0)
                    .then(|| Device::new(0).and_then(|device| DeviceStream::new(&device)))
                    .transpose()?;
                let Some(stream) = device else {
                    let _ = soon(comm.all_reduce(vec![1f32; LEN]));
                    return Ok(());
                };
                let buf = DeviceBuf::<f32>::zeroed(&stream, LEN)?;
                let buf = soon(comm.all_reduce(buf)).map_err(|failed| failed.error)?;
                let ones = soon(buf.to_host(vec![0f32; LEN])).map_err(|failed| failed.error)?.1;
                assert!(ones.iter().all(|one| *one == 1.0), "no error, and a wrong result");
                Ok::<_, Error>(())
            })
            .swap_remove(0)
        };
        let names = ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuStreamWaitEvent", "cuEventRecord"];
        for name in names.into_iter().chain(["cuStreamIsCapturing", "cuMemHostAlloc"]) {
            let before = calls(name);
            program().unwrap();
            let times = calls(name) - before;
            nothing_left("nothing fails");
            assert!(times > 0, "{name}");
            for nth in 1..=times {
                fail(Some(name), nth, 999);
                let result = program();
                fail(None, 0, 0);
                // These are also called where nobody gets an error: when memory is dropped, and by a thread that waits.
                let others = matches!(
                    name,
                    "cuStreamWaitEvent" | "cuMemHostAlloc" | "cuEventRecord" | "cuStreamIsCapturing"
                );
                assert!(result.is_err() || others, "call {nth} of {name} failed, and nobody heard");
                nothing_left(&format!("call {nth} of {name} failed, {result:?}"));
            }
        }
        assert_eq!(report().freed_in_use, 0);
    });
}
