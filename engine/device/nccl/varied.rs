//! Collectives with a count for each rank. NCCL has no functions for these, so each is a group of its broadcasts, reductions or messages.

use allstream_sys::cuda::CuStream;
use allstream_sys::nccl::{NcclComm, NcclDataType, NcclError};

use super::{NcclEnd, data_type, red_op};
use crate::device::whole::{Piece, WholeCall};
use crate::types::{Kind, Rank, Tables};

impl NcclEnd {
    /// Calls NCCL for a piece with a count for each rank. The caller has begun a group. An empty block gets no call: the ranks concerned (both
    /// ends of a message, all ranks of a broadcast or a reduction) have compared its length before, so all of them leave it out.
    ///
    /// # Safety
    /// As for [`Whole::submit`](crate::device::whole::Whole::submit). The communicator is there, and the caller holds its lock.
    pub(super) unsafe fn enqueue_varied(
        &self,
        call: &WholeCall,
        piece: &Piece,
        tables: &Tables,
        at: (NcclComm, CuStream),
    ) -> Result<(), NcclError> {
        let (nccl, (rank, size), root) = (self.library.0, self.place, call.root);
        let bytes = NcclDataType::UINT8;
        let send = |peer: Rank, (from, len): (*mut u8, usize)| match len {
            0 => Ok(()),
            // SAFETY: the caller's promise; the memory is a block of the operation's, or of a copy of the input.
            _ => unsafe { nccl.send((from.cast_const().cast(), len), bytes, peer as i32, at) },
        };
        let recv = |peer: Rank, (to, len): (*mut u8, usize)| match len {
            0 => Ok(()),
            // SAFETY: as above.
            _ => unsafe { nccl.recv((to.cast(), len), bytes, peer as i32, at) },
        };
        let input = |block: Rank| piece.input_block(tables, block);
        let output = |block: Rank| piece.output_block(tables, block);
        // The index of this rank's own block in an all_gather's input or a reduce_scatter's output: only a call in place has other blocks there.
        let own = if piece.is_in_place() { rank } else { 0 };
        match call.kind {
            Kind::AllGather => (0..size).try_for_each(|from| {
                let (to, len) = output(from);
                // NCCL reads the input only on the rank whose block it is.
                let (given, _) = if from == rank { input(own) } else { (to, len) };
                match len {
                    0 => Ok(()),
                    // SAFETY: as above.
                    _ => unsafe {
                        nccl.broadcast((given.cast_const().cast(), to.cast(), len), bytes, from as i32, at)
                    },
                }
            }),
            Kind::ReduceScatter => {
                let (dtype, op) = (data_type(piece.dtype), red_op(call.op, piece.dtype));
                // `takes` has refused types and reductions that NCCL does not have.
                let (Some(dtype), Some(op)) = (dtype, op) else { return Ok(()) };
                (0..size).try_for_each(|to| {
                    let (given, len) = input(to);
                    // NCCL writes the output only on the rank that gets the result.
                    let (result, _) = if to == rank { output(own) } else { (given, len) };
                    let ends = (given.cast_const().cast(), result.cast(), len / piece.dtype.size());
                    match len {
                        0 => Ok(()),
                        // SAFETY: as above.
                        _ => unsafe { nccl.reduce(ends, dtype, (op, to as i32), at) },
                    }
                })
            }
            Kind::Gather => {
                send(root, input(0))?;
                (0..size).filter(|_| rank == root).try_for_each(|from| recv(from, output(from)))
            }
            Kind::Scatter => {
                (0..size).filter(|_| rank == root).try_for_each(|to| send(to, input(to)))?;
                recv(root, output(0))
            }
            Kind::AllToAll => (0..size).try_for_each(|peer| {
                send(peer, input(peer))?;
                recv(peer, output(peer))
            }),
            // `takes` has refused all other collectives.
            _ => Ok(()),
        }
    }
}
