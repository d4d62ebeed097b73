//! Buckets of several devices of one process.

use std::sync::mpsc::channel;

use allstream::train::NodeBuckets;
use allstream::{HostStream, Node};

use super::*;

fn node(devices: usize) -> (Node, NodeBuckets<Vec<f32>>) {
    let mut node = Node::local(devices).unwrap();
    let buckets = block_on(NodeBuckets::with(&mut node, &layout(), small_buckets())).unwrap();
    (node, buckets)
}

#[test]
fn every_device_of_a_node_gets_the_mean_of_all() {
    on_one_thread(|| {
        let (node, mut buckets) = node(3);
        for number in 0..3 {
            for device in [2, 0, 1] {
                for i in [6, 4, 5, 3, 0, 2, 1] {
                    buckets.device(device).unwrap().push(i, grad(device, i, number)).unwrap();
                }
            }
            let all = block_on(buckets.finish()).unwrap();
            assert_eq!((all.len(), buckets.devices().len()), (3, 3));
            for (device, grads) in all.iter().enumerate() {
                for (i, found) in grads.iter().enumerate() {
                    let mean = |k| (0..3).map(|rank| value(rank, i, number, k)).sum::<f32>() / 3.0;
                    assert!(
                        *found == (0..LENS[i]).map(mean).collect::<Vec<_>>(),
                        "device {device}, parameter {i}"
                    );
                }
                assert_eq!(buckets.device(device).unwrap().report().unwrap().step, number as u64);
            }
        }
        block_on(buckets.close()).unwrap();
        block_on(node.close()).unwrap();
    });
}

#[test]
fn streams_of_the_devices_wait_for_a_step_and_the_thread_of_all_runs_ahead() {
    on_one_thread(|| {
        let (node, mut buckets) = node(3);
        let streams = [0, 1, 2].map(|_| HostStream::new("compute").unwrap());
        let (open, gate) = channel::<()>();
        streams[1].launch(move || gate.recv_timeout(LIMIT).unwrap());
        let mut steps = Vec::new();
        for number in 0..3 {
            for device in [2, 0, 1] {
                for i in [6, 4, 5, 3, 0, 2, 1] {
                    buckets.device(device).unwrap().push(i, grad(device, i, number)).unwrap();
                }
                if device == 0 && number == 0 {
                    invalid(buckets.join(&streams), &["on device 1 of the node, 7 of 7 parameters"]);
                    invalid(buckets.join(&streams[..2]), &["2 streams for the 3 devices of a node"]);
                }
            }
            steps.push(buckets.join(&streams).unwrap());
        }
        open.send(()).unwrap();
        for (number, all) in steps.into_iter().enumerate() {
            assert_eq!(all.len(), 3);
            for grads in all {
                for (i, found) in block_on(grads).unwrap().into_iter().enumerate() {
                    let mean = |k| (0..3).map(|rank| value(rank, i, number, k)).sum::<f32>() / 3.0;
                    assert!(
                        found == (0..LENS[i]).map(mean).collect::<Vec<_>>(),
                        "step {number}, parameter {i}"
                    );
                }
            }
        }
        block_on(buckets.close()).unwrap();
        block_on(node.close()).unwrap();
    });
}

#[test]
fn a_device_without_a_gradient_is_named_and_nobody_waits() {
    on_one_thread(|| {
        let (_node, mut buckets) = node(2);
        for i in 0..LENS.len() {
            buckets.device(0).unwrap().push(i, grad(0, i, 0)).unwrap();
        }
        buckets.device(1).unwrap().push(0, grad(1, 0, 0)).unwrap();
        let failed = block_on(buckets.finish()).unwrap_err();
        assert!(failed.buf.is_none(), "the step goes on");
        invalid(Err::<(), _>(failed), &["on device 1 of the node, 6 of 7 parameters have no gradient"]);
        invalid(buckets.device(2), &["no device 2: the node has 2"]);
        for i in 1..LENS.len() {
            buckets.device(1).unwrap().push(i, grad(1, i, 0)).unwrap();
        }
        assert_eq!(block_on(buckets.finish()).unwrap().len(), 2);
    });
}

/// One thread has all devices, so that a wait for another one of them would never end: within the limit.
fn on_one_thread(test: impl FnOnce() + Send + 'static) {
    let (tell, told) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        test();
        let _ = tell.send(());
    });
    match told.recv_timeout(LIMIT) {
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("not finished within {LIMIT:?}"),
        _ => thread.join().unwrap(),
    }
}

/// A device has a limited number of buckets in flight. Where there are more, one thread launches them in rounds over the devices: a bucket that one
/// device waits for ends only once the others have launched it, too.
#[test]
fn a_step_of_more_buckets_than_may_be_in_flight_is_joined() {
    on_one_thread(|| {
        let layout = vec![Param::of::<f32>(32); 1100];
        let mut node = Node::local(2).unwrap();
        let options = Options::default().first_bucket_bytes(128).bucket_bytes(128);
        let buckets = NodeBuckets::with(&mut node, &layout, options);
        let mut buckets: NodeBuckets<Vec<f32>> = block_on(buckets).unwrap();
        let streams = [0, 1].map(|_| HostStream::new("compute").unwrap());
        for step in 0..2 {
            for (device, buckets) in buckets.devices().iter_mut().enumerate() {
                for i in 0..layout.len() {
                    buckets.push(i, vec![(device + step) as f32; 32]).unwrap();
                }
            }
            for joined in buckets.join(&streams).unwrap() {
                let grads = joined.wait().unwrap();
                assert!(grads.iter().flatten().all(|x| *x == step as f32 + 0.5));
            }
        }
        block_on(buckets.close()).unwrap();
        block_on(node.close()).unwrap();
    });
}
