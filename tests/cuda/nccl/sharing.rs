//! Ranks that share a device where NCCL allows it, and the error where it does not.

use allstream::cuda::{Device, DevicePath, DeviceStream};

use super::{LEN, all_is_gone, told, with_nccl};
use crate::support::{down, ranks, soon, up, values};

/// The errors of two ranks that ask for one device. Their communicator goes on.
fn refused(test: &str, version: &str, leave: &str) -> Vec<String> {
    let mut said = Vec::new();
    let variables = [("ALLSTREAM_TEST_NCCL_VERSION", version), ("NCCL_MULTI_RANK_GPU_ENABLE", leave)];
    with_nccl(test, 1, &variables, || {
        said = ranks(2, |mut comm| {
            let device = Device::new(0).unwrap();
            let error = soon(comm.bind_nccl(&device)).unwrap_err().to_string();
            assert_eq!(soon(comm.all_reduce(vec![1])).unwrap(), [2]);
            error
        });
        assert_eq!(told().inits, 0);
    });
    said
}

#[test]
fn an_older_nccl_shares_no_device_whatever_it_is_told() {
    let test = "nccl::sharing::an_older_nccl_shares_no_device_whatever_it_is_told";
    for error in refused(test, "22907", "1") {
        for part in [
            "rank 0 and rank 1 have one device",
            "from 2.30 on",
            "that of rank 0 is older",
            "this rank has NCCL 2.29.7, and NCCL_MULTI_RANK_GPU_ENABLE is \"1\"",
            "call bind_device instead",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
}

#[test]
fn without_leave_nccl_shares_no_device() {
    for error in refused("nccl::sharing::without_leave_nccl_shares_no_device", "23007", "0") {
        for part in [
            "rank 0 has not set NCCL_MULTI_RANK_GPU_ENABLE=1",
            "this rank has NCCL 2.30.7, and NCCL_MULTI_RANK_GPU_ENABLE is \"0\"",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
}

/// Both ranks are in one process. Each rank's kernel waits on the device for the other's, so no rank may hold up the other's launch.
#[test]
fn ranks_share_a_device_where_nccl_has_leave_and_is_new_enough() {
    let variables = [
        ("ALLSTREAM_TEST_NCCL_VERSION", "23007"),
        ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
        // The device has room for a kernel of each rank at a time.
        ("ALLSTREAM_TEST_NCCL_ROOM", "2"),
        // With 8 hardware queues the streams of both ranks share some, and half of the runs end by the deadline.
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
        ("ALLSTREAM_TIMEOUT", "10"),
    ];
    let test = "nccl::sharing::ranks_share_a_device_where_nccl_has_leave_and_is_new_enough";
    with_nccl(test, 1, &variables, || {
        ranks(2, |mut comm| {
            let (rank, device) = (comm.rank(), Device::new(0).unwrap());
            let stream = DeviceStream::new(&device).unwrap();
            let mut other = soon(comm.dup()).unwrap();
            for comm in [&mut comm, &mut other] {
                let path = soon(comm.bind_nccl(&device)).unwrap();
                assert!(matches!(path, DevicePath::Nccl { library, .. } if library == "NCCL 2.30.7"));
            }
            let sums: Vec<f32> = values(0, LEN).iter().zip(values(1, LEN)).map(|(a, b)| a + b).collect();
            for round in 0..10 {
                let [a, b] = [(); 2].map(|()| up(&stream, values(rank, LEN)));
                let work = [comm.all_reduce(a), other.all_reduce(b)];
                for work in work {
                    assert!(down(soon(work).unwrap()) == sums, "round {round}");
                }
                // Longer than messages that go without NCCL.
                let (given, into) = (up(&stream, values(rank, LEN)), up(&stream, vec![0.0; LEN]));
                let peer = 1 - rank;
                let (_, got) = soon(comm.send_recv(given, peer, into, peer)).unwrap();
                assert!(down(got) == values(peer, LEN), "round {round}");
            }
            soon(other.close()).unwrap();
            soon(comm.close()).unwrap();
        });
        all_is_gone();
        assert!(told().kernels >= 60, "{:?}", told());
    });
}
