//! The collectives of a node: each device's part is the call of the same name on its own communicator.

use super::super::call::Call;
use super::{Node, NodeCall, NodeWork, Place, Several};
use crate::mem::{Buf, BufList};
use crate::types::Element;
#[cfg(doc)]
use crate::{Comm, error::Error};

/// Collectives, on `Node` through `&mut self` and on `NodeCall` through `&self`: name, type parameters, what each device
/// gives, what all give alike, (`each`) lists of one for each device, (`root`) the root; what each device gets; its call.
macro_rules! collectives {
    ($(
        $(#[$doc:meta])*
        fn $name:ident [$($generics:tt)*] ($bufs:ident $(, $arg:ident: $ty:ty)*)
            $(each($($list:ident: $item:ty),*))? $(root($root:ident))?
            -> $out:ty = |$call:ident, $device:pat_param, $buf:pat_param| $body:expr;
    )*) => {
        impl NodeCall<'_> {
            $(
                #[doc = concat!("See [`Node::", stringify!($name), "`].")]
                pub fn $name<$($generics)*>(
                    &self,
                    $bufs: S
                    $(, $arg: $ty)* $($(, $list: &[$item])*)? $(, $root: Place)?
                ) -> NodeWork<S, $out> {
                    const NAME: &str = stringify!($name);
                    $(
                        let $root = match self.rank_at(NAME, $root) {
                            Ok(rank) => rank,
                            Err(error) => return NodeWork::refused($bufs, &error),
                        };
                    )?
                    $($(
                        if let Err(error) = self.check_list(NAME, stringify!($list), $list.len()) {
                            return NodeWork::refused($bufs, &error);
                        }
                    )*)?
                    self.each(NAME, $bufs, |$call: &Call<'_>, $device, $buf| $body)
                }
            )*
        }

        impl Node {
            $(
                $(#[$doc])*
                pub fn $name<$($generics)*>(
                    &mut self,
                    $bufs: S
                    $(, $arg: $ty)* $($(, $list: &[$item])*)? $(, $root: Place)?
                ) -> NodeWork<S, $out> {
                    self.call().$name($bufs $(, $arg)* $($(, $list)*)? $(, $root)?)
                }
            )*
        }
    };
}

collectives! {
    /// Every device of every process ends with the reduction of all devices' buffers, in place. See
    /// [`Comm::all_reduce`].
    ///
    /// # Errors
    /// [`Failed`](crate::Failed) with each device's [`Outcomes`](super::Outcomes): [`Error::Invalid`] where the number of buffers is not
    /// that of devices, or one device's part cannot be carried out (nothing was submitted, and all buffers come back);
    /// otherwise those of the call on [`Comm`]. So for every collective.
    fn all_reduce [S: Several<Item = B>, B: Buf] (bufs) -> B
        = |call, _, buf| call.all_reduce(buf);

    /// [`all_reduce`](Self::all_reduce) of each pair's input into its output.
    fn all_reduce_into [S: Several<Item = (I, O)>, I: Buf, O: Buf<Elem = I::Elem>] (pairs) -> (I, O)
        = |call, _, (input, output)| call.all_reduce_into(input, output);

    /// [`all_reduce`](Self::all_reduce) into new vectors.
    fn all_reduce_new [S: Several<Item = I>, I: Buf<Elem: Element>] (inputs) -> Vec<I::Elem>
        = |call, _, input| call.all_reduce_new(input);

    /// Every device ends with the root's buffer. See [`Comm::broadcast`].
    fn broadcast [S: Several<Item = B>, B: Buf] (bufs) root(root) -> B
        = |call, _, buf| call.broadcast(buf, root);

    /// [`broadcast`](Self::broadcast) of the root's input into every pair's output.
    fn broadcast_into [S: Several<Item = (I, O)>, I: Buf, O: Buf<Elem = I::Elem>] (pairs) root(root) -> (I, O)
        = |call, _, (input, output)| call.broadcast_into(input, output, root);

    /// The root ends with the reduction of all devices' buffers; the others' are unchanged. See [`Comm::reduce`].
    fn reduce [S: Several<Item = B>, B: Buf] (bufs) root(root) -> B
        = |call, _, buf| call.reduce(buf, root);

    /// [`reduce`](Self::reduce) into the root's output.
    fn reduce_into [S: Several<Item = (I, O)>, I: Buf, O: Buf<Elem = I::Elem>] (pairs) root(root) -> (I, O)
        = |call, _, (input, output)| call.reduce_into(input, output, root);

    /// All devices' buffers in the order of ranks, in a new vector for every device. See [`Comm::all_gather`].
    fn all_gather [S: Several<Item = I>, I: Buf<Elem: Element>] (inputs) -> Vec<I::Elem>
        = |call, _, input| call.all_gather(input);

    /// [`all_gather`](Self::all_gather) into each pair's output, of `size()` times the input's length.
    fn all_gather_into [S: Several<Item = (I, O)>, I: Buf, O: Buf<Elem = I::Elem>] (pairs) -> (I, O)
        = |call, _, (input, output)| call.all_gather_into(input, output);

    /// [`all_gather`](Self::all_gather) in place: a device's block, at `rank * len / size()`, is its input.
    fn all_gather_in_place [S: Several<Item = B>, B: Buf] (bufs) -> B
        = |call, _, buf| call.all_gather_in_place(buf);

    /// The reduction of all devices' inputs, of which rank r gets block r, in a new vector. Lengths are multiples of
    /// `size()`. See [`Comm::reduce_scatter`].
    fn reduce_scatter [S: Several<Item = I>, I: Buf<Elem: Element>] (inputs) -> Vec<I::Elem>
        = |call, _, input| call.reduce_scatter(input);

    /// [`reduce_scatter`](Self::reduce_scatter) into each pair's output.
    fn reduce_scatter_into [S: Several<Item = (I, O)>, I: Buf, O: Buf<Elem = I::Elem>] (pairs) -> (I, O)
        = |call, _, (input, output)| call.reduce_scatter_into(input, output);

    /// [`reduce_scatter`](Self::reduce_scatter) in place: the result is in the device's block, at `rank * len / size()`;
    /// the other blocks are unspecified.
    fn reduce_scatter_in_place [S: Several<Item = B>, B: Buf] (bufs) -> B
        = |call, _, buf| call.reduce_scatter_in_place(buf);

    /// The root ends with all devices' buffers in the order of ranks, in a new vector; the others with an empty one. See
    /// [`Comm::gather`].
    fn gather [S: Several<Item = I>, I: Buf<Elem: Element>] (inputs) root(root) -> Vec<I::Elem>
        = |call, _, input| call.gather(input, root);

    /// [`gather`](Self::gather) into the root's output.
    fn gather_into [S: Several<Item = (I, O)>, I: Buf, O: Buf<Elem = I::Elem>] (pairs) root(root) -> (I, O)
        = |call, _, (input, output)| call.gather_into(input, output, root);

    /// [`gather`](Self::gather) in place: the root's buffer has `size()` blocks, and its input in its own; the others'
    /// buffers are their inputs.
    fn gather_in_place [S: Several<Item = B>, B: Buf] (bufs) root(root) -> B
        = |call, _, buf| call.gather_in_place(buf, root);

    /// Rank r ends with block r, `count` elements, of the root's input, in a new vector. The others' inputs are not looked
    /// at. See [`Comm::scatter`].
    fn scatter [S: Several<Item = I>, I: Buf<Elem: Element>] (inputs, count: usize) root(root) -> Vec<I::Elem>
        = |call, _, input| call.scatter(input, count, root);

    /// [`scatter`](Self::scatter) into each pair's output, whose length is the count.
    fn scatter_into [S: Several<Item = (I, O)>, I: Buf, O: Buf<Elem = I::Elem>] (pairs) root(root) -> (I, O)
        = |call, _, (input, output)| call.scatter_into(input, output, root);

    /// [`scatter`](Self::scatter) in place: the root's buffer has `size()` blocks, and keeps all of them; the others end
    /// with theirs in a buffer of one block.
    fn scatter_in_place [S: Several<Item = B>, B: Buf] (bufs) root(root) -> B
        = |call, _, buf| call.scatter_in_place(buf, root);

    /// Block r of a device's input goes to rank r, and what comes from rank r is block r of its result, in a new vector.
    /// See [`Comm::all_to_all`].
    fn all_to_all [S: Several<Item = I>, I: Buf<Elem: Element>] (inputs) -> Vec<I::Elem>
        = |call, _, input| call.all_to_all(input);

    /// [`all_to_all`](Self::all_to_all) into each pair's output, of the input's length.
    fn all_to_all_into [S: Several<Item = (I, O)>, I: Buf, O: Buf<Elem = I::Elem>] (pairs) -> (I, O)
        = |call, _, (input, output)| call.all_to_all_into(input, output);

    /// [`all_to_all`](Self::all_to_all) in place.
    fn all_to_all_in_place [S: Several<Item = B>, B: Buf] (bufs) -> B
        = |call, _, buf| call.all_to_all_in_place(buf);

    /// Rank r ends with the reduction of the buffers of ranks `0..=r`, in place. See [`Comm::scan`].
    fn scan [S: Several<Item = B>, B: Buf] (bufs) -> B
        = |call, _, buf| call.scan(buf);

    /// [`scan`](Self::scan) of each pair's input into its output.
    fn scan_into [S: Several<Item = (I, O)>, I: Buf, O: Buf<Elem = I::Elem>] (pairs) -> (I, O)
        = |call, _, (input, output)| call.scan_into(input, output);

    /// Rank r ends with the reduction of the buffers of ranks `0..r`, in place; rank 0's is unchanged. See
    /// [`Comm::exscan`].
    fn exscan [S: Several<Item = B>, B: Buf] (bufs) -> B
        = |call, _, buf| call.exscan(buf);

    /// [`exscan`](Self::exscan) of each pair's input into its output.
    fn exscan_into [S: Several<Item = (I, O)>, I: Buf, O: Buf<Elem = I::Elem>] (pairs) -> (I, O)
        = |call, _, (input, output)| call.exscan_into(input, output);

    /// [`all_gather`](Self::all_gather) with a count for each rank, the same on all ranks. See [`Comm::all_gather_v`].
    fn all_gather_v [S: Several<Item = I>, I: Buf<Elem: Element>] (inputs, counts: &[usize]) -> Vec<I::Elem>
        = |call, _, input| call.all_gather_v(input, counts);

    /// [`all_gather_v`](Self::all_gather_v) into each pair's output.
    fn all_gather_v_into [S: Several<Item = (I, O)>, I: Buf, O: Buf<Elem = I::Elem>] (pairs, counts: &[usize]) -> (I, O)
        = |call, _, (input, output)| call.all_gather_v_into(input, output, counts);

    /// [`all_gather_v`](Self::all_gather_v) in place.
    fn all_gather_v_in_place [S: Several<Item = B>, B: Buf] (bufs, counts: &[usize]) -> B
        = |call, _, buf| call.all_gather_v_in_place(buf, counts);

    /// [`reduce_scatter`](Self::reduce_scatter) with a count for each rank, the same on all ranks. See
    /// [`Comm::reduce_scatter_v`].
    fn reduce_scatter_v [S: Several<Item = I>, I: Buf<Elem: Element>] (inputs, counts: &[usize]) -> Vec<I::Elem>
        = |call, _, input| call.reduce_scatter_v(input, counts);

    /// [`reduce_scatter_v`](Self::reduce_scatter_v) into each pair's output.
    fn reduce_scatter_v_into [S: Several<Item = (I, O)>, I: Buf, O: Buf<Elem = I::Elem>] (pairs, counts: &[usize]) -> (I, O)
        = |call, _, (input, output)| call.reduce_scatter_v_into(input, output, counts);

    /// [`reduce_scatter_v`](Self::reduce_scatter_v) in place.
    fn reduce_scatter_v_in_place [S: Several<Item = B>, B: Buf] (bufs, counts: &[usize]) -> B
        = |call, _, buf| call.reduce_scatter_v_in_place(buf, counts);

    /// [`gather`](Self::gather) with a count for each rank, which the root's process gives (the others' are not looked
    /// at). See [`Comm::gather_v`].
    fn gather_v [S: Several<Item = I>, I: Buf<Elem: Element>] (inputs, counts: &[usize]) root(root) -> Vec<I::Elem>
        = |call, _, input| call.gather_v(input, counts, root);

    /// [`gather_v`](Self::gather_v) into the root's output.
    fn gather_v_into [S: Several<Item = (I, O)>, I: Buf, O: Buf<Elem = I::Elem>] (pairs, counts: &[usize]) root(root) -> (I, O)
        = |call, _, (input, output)| call.gather_v_into(input, output, counts, root);

    /// [`scatter`](Self::scatter) with a count for each rank, which the root's process gives in `counts` (the others' are
    /// not looked at); `own` are those of this node's devices. See [`Comm::scatter_v`].
    fn scatter_v [S: Several<Item = I>, I: Buf<Elem: Element>] (inputs, counts: &[usize]) each(own: usize) root(root) -> Vec<I::Elem>
        = |call, device, input| call.scatter_v(input, counts, own[device], root);

    /// [`scatter_v`](Self::scatter_v) into each pair's output, whose length is the device's count.
    fn scatter_v_into [S: Several<Item = (I, O)>, I: Buf, O: Buf<Elem = I::Elem>] (pairs, counts: &[usize]) root(root) -> (I, O)
        = |call, _, (input, output)| call.scatter_v_into(input, output, counts, root);

    /// [`all_to_all`](Self::all_to_all) with counts, for each device: `sends[device][r]` elements go to rank r,
    /// `recvs[device][r]` come from it. See [`Comm::all_to_all_v`].
    fn all_to_all_v [S: Several<Item = I>, I: Buf<Elem: Element>, C: AsRef<[usize]>] (inputs) each(sends: C, recvs: C) -> Vec<I::Elem>
        = |call, device, input| call.all_to_all_v(input, sends[device].as_ref(), recvs[device].as_ref());

    /// [`all_to_all_v`](Self::all_to_all_v) into each pair's output.
    fn all_to_all_v_into [S: Several<Item = (I, O)>, I: Buf, O: Buf<Elem = I::Elem>, C: AsRef<[usize]>] (pairs)
        each(sends: C, recvs: C) -> (I, O)
        = |call, device, (input, output)| {
            call.all_to_all_v_into(input, output, sends[device].as_ref(), recvs[device].as_ref())
        };

    /// [`all_reduce`](Self::all_reduce) of a list of buffers for each device, in one operation. See
    /// [`Comm::all_reduce_list`].
    fn all_reduce_list [S: Several<Item = L>, L: BufList] (lists) -> L
        = |call, _, list| call.all_reduce_list(list);

    /// [`broadcast`](Self::broadcast) of a list of buffers for each device, in one operation.
    fn broadcast_list [S: Several<Item = L>, L: BufList] (lists) root(root) -> L
        = |call, _, list| call.broadcast_list(list, root);

    /// [`reduce`](Self::reduce) of a list of buffers for each device, in one operation.
    fn reduce_list [S: Several<Item = L>, L: BufList] (lists) root(root) -> L
        = |call, _, list| call.reduce_list(list, root);

    /// [`all_gather_into`](Self::all_gather_into) of a pair of lists for each device, in one operation.
    fn all_gather_list [S: Several<Item = (I, O)>, I: BufList, O: BufList] (pairs) -> (I, O)
        = |call, _, (inputs, outputs)| call.all_gather_list(inputs, outputs);

    /// [`reduce_scatter_into`](Self::reduce_scatter_into) of a pair of lists for each device, in one operation.
    fn reduce_scatter_list [S: Several<Item = (I, O)>, I: BufList, O: BufList] (pairs) -> (I, O)
        = |call, _, (inputs, outputs)| call.reduce_scatter_list(inputs, outputs);

    /// Every device ends with the root's bytes; the others need not know how many. See [`Comm::broadcast_bytes`].
    fn broadcast_bytes [S: Several<Item = Vec<u8>>] (bytes) root(root) -> Vec<u8>
        = |call, _, bytes| call.broadcast_bytes(bytes, root);

    /// Every device's bytes, of whatever lengths, by rank, on every device. See [`Comm::all_gather_bytes`].
    fn all_gather_bytes [S: Several<Item = Vec<u8>>] (bytes) -> Vec<Vec<u8>>
        = |call, _, bytes| call.all_gather_bytes(bytes);
}
