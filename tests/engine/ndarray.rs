//! Arrays of the crate ndarray as buffers.

use allstream::{AnyBuf, Error, HostMemory, Message, dlpack, split};
use futures::executor::block_on;
use ndarray::{Array1, Array2, Axis, Slice, arr2};

use crate::laws::house::*;

/// The same matrix, two rows by three columns, in two layouts that are not standard: transposed, and every second column of a larger one.
fn scattered() -> [Array2<f32>; 2] {
    let transposed = arr2(&[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]).reversed_axes();
    let mut columns = Array2::from_shape_fn((2, 6), |(row, column)| (row * 3 + column / 2) as f32);
    columns.slice_axis_inplace(Axis(1), Slice::new(0, None, 2));
    [transposed, columns]
}

#[test]
fn arrays_go_into_calls_and_come_back_with_their_shape() {
    for link in LINKS {
        threads(within(LIMIT, move || world(2, link)), |mut comm| {
            let (rank, peer) = (comm.rank(), 1 - comm.rank());
            let ours = Array2::from_shape_fn((2, 3), |(row, column)| (row * 3 + column + rank) as f32);
            let sum = comm.all_reduce(ours.clone()).wait().unwrap();
            assert_eq!(sum, arr2(&[[1.0, 3.0, 5.0], [7.0, 9.0, 11.0]]));
            let (_, all) = comm.all_gather_into(ours, Array2::zeros((4, 3))).wait().unwrap();
            assert_eq!(all.row(3).to_vec(), [4.0, 5.0, 6.0]);
            let (sent, got) = comm
                .send_recv(Array1::from_elem(3, rank as u8), peer, Array1::zeros(3), peer)
                .wait()
                .unwrap();
            assert_eq!((sent[0], got), (rank as u8, Array1::from_elem(3, peer as u8)));
            let (matrix, [bias]) =
                comm.all_reduce_list((vec![sum], [Array1::from_elem(2, 1.0f64)])).wait().unwrap();
            assert_eq!((matrix[0][[1, 2]], bias.to_vec()), (22.0, vec![2.0, 2.0]));
            // A slice that is one piece is in standard layout wherever it begins.
            let mut tail = Array1::from_vec(vec![0, 1, 2, 3, 4]);
            tail.slice_axis_inplace(Axis(0), Slice::from(3..));
            assert_eq!(comm.all_reduce(tail).wait().unwrap().to_vec(), [6, 8]);
            block_on(comm.close()).unwrap();
        });
    }
}

#[test]
fn an_array_in_another_layout_is_refused_and_comes_back() {
    threads(within(LIMIT, || world(2, Link::Local)), |mut comm| {
        let peer = 1 - comm.rank();
        for array in scattered() {
            assert_eq!(array, arr2(&[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]));
            assert_eq!(array.count(), 0, "nobody looks at its memory");
            let refused = |text: String| assert!(text.contains("standard layout"), "{text}");
            let back = |failed: allstream::Failed<Array2<f32>>| {
                assert!(matches!(failed.error, Error::Invalid { .. }), "{failed}");
                refused(failed.to_string());
                failed.buf.unwrap()
            };
            let array = back(comm.all_reduce(array).wait().unwrap_err());
            let array = back(comm.send(array, peer).wait().unwrap_err());
            let array = back(comm.reduce_scatter_in_place(array).wait().unwrap_err());
            let into = comm.all_reduce_into(array, vec![0f32; 6]).wait().unwrap_err();
            refused(into.to_string());
            let array = into.buf.unwrap().0;
            let list = comm.all_reduce_list((vec![vec![1f32]], [array])).wait().unwrap_err();
            refused(list.to_string());
            let (_, [array]) = list.buf.unwrap();
            let pairs = comm.all_gather_list([array], [vec![0f32; 12]]).wait().unwrap_err();
            refused(pairs.to_string());
            let ([array], _) = pairs.buf.unwrap();
            let messages = comm.batch([Message::Send { buf: array, to: peer, tag: 0 }]).wait().unwrap_err();
            let array = messages.buf.unwrap().remove(0).unwrap();
            let array = split(array, &[6]).map(drop).map_err(back).unwrap_err();
            let array = dlpack::export(array, &[6]).map(drop).map_err(back).unwrap_err();
            let any = comm.all_reduce(AnyBuf::new(array)).wait().unwrap_err();
            refused(any.to_string());
            let array = any.buf.unwrap().into_inner::<Array2<f32>>().unwrap();
            assert_eq!(array, arr2(&[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]), "as it was");
        }
        // Nothing of all that was submitted.
        works(&mut comm);
        block_on(comm.close()).unwrap();
    });
}
