//! Messages of a rank to itself whose buffers are on a device: staged on the host, as messages to others are.

use allstream::cuda::DeviceBuf;
use allstream::{Comm, Message};

use crate::support::{child, device, nothing_left, numbers, soon};

#[test]
fn a_message_to_this_rank_itself_copies_between_device_and_host_buffers() {
    child("ourselves::a_message_to_this_rank_itself_copies_between_device_and_host_buffers", &[], || {
        let (device, stream) = device();
        // Several stripes, one, and none.
        for len in [(9 << 18) + 5, 1000, 0] {
            let mut comm = Comm::local(1).unwrap().remove(0);
            let (host, from) = soon(DeviceBuf::from_host(&stream, numbers(len))).unwrap();
            let to = DeviceBuf::<u32>::zeroed(&stream, len).unwrap();
            let (from, to) = soon(comm.send_recv(from, 0, to, 0)).unwrap();
            let (to, got) = soon(to.to_host(vec![0; len])).unwrap();
            assert!(got == host, "{len}: from device to device");
            let (from, got) = soon(comm.send_recv(from, 0, vec![0; len], 0)).unwrap();
            assert!(got == host, "{len}: from device to host");
            let (sent, to) = soon(comm.send_recv(vec![7; len], 0, to, 0)).unwrap();
            let (to, got) = soon(to.to_host(vec![0; len])).unwrap();
            assert!(got == sent, "{len}: from host to device");
            let batch =
                [Message::Recv { buf: to, from: 0, tag: 1 }, Message::Send { buf: from, to: 0, tag: 1 }];
            let to = comm.batch(batch).wait().unwrap().remove(0);
            let (_, got) = soon(to.to_host(vec![0; len])).unwrap();
            assert!(got == host, "{len}: in a batch");
            // Lengths that differ: nothing is submitted, and both come back.
            let short = DeviceBuf::<u32>::zeroed(&stream, len + 1).unwrap();
            let failed = comm.send_recv(short, 0, vec![0; len], 0).wait().unwrap_err();
            let (sent, received) = failed.buf.unwrap();
            assert!(sent.is_some() && received.is_some(), "{}", failed.error);
        }
        drop((stream, device));
        nothing_left("all was dropped");
    });
}
