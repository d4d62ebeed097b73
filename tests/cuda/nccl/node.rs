//! A node's ranks by NCCL; and what the environment says of NCCL: whether to take it, and which.

use allstream::cuda::{Device, DeviceBuf, DevicePath, DeviceStream};
use allstream::{Comm, Error, Failed, Node};

use super::{LEN, all_is_gone, told, with_nccl};
use crate::support::{down, ranks, soon, up, values};

/// One thread makes all calls, and waits for all of them.
#[test]
fn one_thread_serves_all_ranks_of_a_node() {
    with_nccl("nccl::node::one_thread_serves_all_ranks_of_a_node", 4, &[], || {
        let devices: Vec<Device> = (0..4).map(|device| Device::new(device).unwrap()).collect();
        let mut node = Node::local(4).unwrap();
        let error = soon(node.bind_nccl(&devices[..3])).unwrap_err().to_string();
        assert!(error.contains("3 devices for a node of 4 ranks"), "{error}");
        let path = soon(node.bind_nccl(&devices)).unwrap();
        assert_eq!(path, DevicePath::Nccl { library: "NCCL 2.27.3".into(), staged: None });
        let streams: Vec<_> = devices.iter().map(|device| DeviceStream::new(device).unwrap()).collect();
        let all = |first: usize| -> Vec<DeviceBuf<f32>> {
            streams.iter().enumerate().map(|(i, stream)| up(stream, values(first + i, LEN))).collect()
        };
        let sum: Vec<f32> = (0..LEN).map(|i| (0..4).map(|rank| values(rank, LEN)[i]).sum()).collect();
        for _ in 0..5 {
            for buf in soon(node.all_reduce(all(0))).unwrap() {
                assert!(down(buf) == sum);
            }
            for (rank, buf) in soon(node.scan(all(0))).unwrap().into_iter().enumerate() {
                let scan: Vec<f32> = (0..LEN).map(|i| (0..=rank).map(|r| values(r, LEN)[i]).sum()).collect();
                assert!(down(buf) == scan, "NCCL has no scan, so devices run it by a plan");
            }
            // Round the ring, all sends before the first receive.
            let mut sends = Vec::new();
            for (device, buf) in all(0).into_iter().enumerate() {
                sends.push(node.send(device, buf, (0, (device + 1) % 4)));
            }
            for (device, buf) in all(9).into_iter().enumerate() {
                let got = soon(node.recv(device, buf, (0, (device + 3) % 4))).unwrap();
                assert!(down(got) == values((device + 3) % 4, LEN));
            }
            sends.into_iter().for_each(|send| drop(soon(send).unwrap()));
        }
        assert!(told().kernels >= 5 * (4 + 4), "{:?}", told());
        soon(node.close()).unwrap();
        drop((streams, devices));
        all_is_gone();
    });
}

fn path_by(bind: impl Fn(&mut Comm) -> Result<DevicePath, Error> + Sync) -> Vec<DevicePath> {
    ranks(2, |mut comm| {
        let path = bind(&mut comm).unwrap();
        let stream = DeviceStream::new(&Device::new(comm.rank()).unwrap()).unwrap();
        let sum = down(soon(comm.all_reduce(up(&stream, vec![1.0_f32; LEN]))).unwrap());
        assert_eq!(sum, vec![2.0; LEN]);
        soon(comm.close()).unwrap();
        path
    })
}

#[test]
fn the_environment_forbids_nccl() {
    let off = [("ALLSTREAM_NCCL", "off")];
    with_nccl("nccl::node::the_environment_forbids_nccl", 2, &off, || {
        let paths = path_by(|comm| soon(comm.bind_nccl(&Device::new(comm.rank()).unwrap())));
        assert_eq!(paths, [DevicePath::Peer, DevicePath::Peer]);
        all_is_gone();
        assert_eq!(told().inits, 0);
    });
}

#[test]
fn the_environment_asks_for_nccl() {
    let require = [("ALLSTREAM_NCCL", "require")];
    with_nccl("nccl::node::the_environment_asks_for_nccl", 2, &require, || {
        let paths = path_by(|comm| soon(comm.bind_device(&Device::new(comm.rank()).unwrap())));
        assert!(paths.iter().all(|path| matches!(path, DevicePath::Nccl { .. })), "{paths:?}");
        all_is_gone();
        assert!(told().kernels > 0);
    });
}

#[test]
fn the_environment_asks_for_nccl_where_there_is_none() {
    let none = [("ALLSTREAM_NCCL", "require"), (super::LIBRARY, "/no/such/libnccl.so")];
    with_nccl("nccl::node::the_environment_asks_for_nccl_where_there_is_none", 1, &none, || {
        ranks(1, |mut comm| {
            let error = soon(comm.bind_device(&Device::new(0).unwrap())).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, Error::Unavailable { .. }), "{text}");
            assert!(text.contains("/no/such/libnccl.so"), "{text}");
        });
    });
}

#[test]
fn a_bad_word_in_the_environment_is_an_error_that_says_which_are_good() {
    let bad = [("ALLSTREAM_NCCL", "always")];
    let test = "nccl::node::a_bad_word_in_the_environment_is_an_error_that_says_which_are_good";
    with_nccl(test, 1, &bad, || {
        let text = Comm::local(1).unwrap_err().to_string();
        let wanted = ["ALLSTREAM_NCCL", "\"always\"", "auto", "off", "require"];
        assert!(wanted.iter().all(|word| text.contains(word)), "{text}");
    });
}

/// A call that one device's buffer does not suit is submitted on none.
#[test]
fn a_node_s_call_is_made_on_all_devices_or_none() {
    with_nccl("nccl::node::a_node_s_call_is_made_on_all_devices_or_none", 2, &[], || {
        let devices: Vec<Device> = (0..2).map(|device| Device::new(device).unwrap()).collect();
        let mut node = Node::local(2).unwrap();
        soon(node.bind_nccl(&devices)).unwrap();
        let stream = DeviceStream::new(&devices[0]).unwrap();
        let both = [up(&stream, values(0, LEN)), up(&stream, values(1, LEN))];
        let Err(Failed { buf, error }) = soon(node.all_reduce(both)) else { panic!("it did not fail") };
        assert!(error.to_string().contains("device 1: a buffer is on"), "{error}");
        for (device, part) in buf.unwrap().into_iter().enumerate() {
            assert!(down(part.unwrap_err().buf.unwrap()) == values(device, LEN));
        }
        assert_eq!(told().kernels, 0);
        soon(node.close()).unwrap();
        drop((stream, devices));
        all_is_gone();
    });
}

#[test]
fn no_library_or_an_old_one_is_an_error_that_says_what_to_do() {
    let test = "nccl::node::no_library_or_an_old_one_is_an_error_that_says_what_to_do";
    let cases = [
        ([(super::LIBRARY, "/no/such/libnccl.so"), ("", "")], "/no/such/libnccl.so"),
        (
            [("ALLSTREAM_TEST_NCCL_VERSION", "21300"), ("", "")],
            "is version 2.13.0, and 2.14 or newer is needed",
        ),
    ];
    for (i, (variables, wanted)) in cases.into_iter().enumerate() {
        let which = i.to_string();
        let mut more: Vec<_> = variables.into_iter().filter(|(name, _)| !name.is_empty()).collect();
        if std::env::var("WHICH_CASE").is_ok_and(|case| case != which) {
            continue;
        }
        more.push(("WHICH_CASE", &which));
        with_nccl(test, 1, &more, || {
            ranks(1, |mut comm| {
                let error = soon(comm.bind_nccl(&Device::new(0).unwrap())).unwrap_err();
                assert!(matches!(error, Error::Unavailable { .. }), "{error}");
                assert!(error.to_string().contains(wanted), "{error}");
                assert!(error.to_string().contains("ALLSTREAM_NCCL_LIBRARY"), "{error}");
            });
        });
    }
}
