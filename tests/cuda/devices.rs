//! Communicators bound to devices: collectives that run there.

use allstream::cuda::{Device, DevicePath, DeviceStream};

use crate::collectives::{everything, ranks};
use crate::support::{calls, child, nothing_left, report, soon};

const SLOW: &[(&str, &str)] =
    &[("ALLSTREAM_TEST_CUDA_DELAY_US", "300"), ("ALLSTREAM_TEST_CUDA_DEVICES", "2")];

#[test]
fn devices_get_what_hosts_get() {
    child("devices::devices_get_what_hosts_get", SLOW, || {
        ranks(3, |mut comm| {
            // Two devices: one has two ranks.
            let device = Device::new(comm.rank() % 2).unwrap();
            assert_eq!(soon(comm.bind_device(&device)).unwrap(), DevicePath::Peer);
            let stream = &DeviceStream::new(&device).unwrap();
            everything(&mut comm, stream, &[0, 1, 1000, 5000]);
            soon(comm.close()).unwrap();
        });
        assert!(calls("cuLaunchKernel") > 100, "kernels do the work: {}", calls("cuLaunchKernel"));
        assert_eq!(calls("cuMemHostAlloc"), 0, "nothing goes through the host");
        nothing_left("all ranks have ended");
        assert_eq!(report().freed_in_use, 0);
    });
}
