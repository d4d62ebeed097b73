//! Libraries (such as NCCL) that take a communicator's operations whole: how the ranks open one together, and which calls it gets.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use super::SharedComm;
use super::call::{Call, Spec, program};
use super::runtime::{LOOK, Ticks};
use crate::device::DeviceStream;
use crate::device::carriers::WholeOp;
#[cfg(any(test, feature = "testing"))]
use crate::device::carriers::bound_to;
use crate::device::operation::DeviceOp;
use crate::device::whole::{
    BoundWhole, ID, LaunchOrder, Library, Piece, Sharing, Standing, Whole, WholeCall,
};
use crate::error::Error;
use crate::exec::carrier::Carried;
use crate::exec::{Operation, Part, PartList, Reduction};
use crate::types::{Algo, DType, KEY_BITS, Kind, ReduceOp, WHOLE, mix};

impl SharedComm {
    /// Opens the library for this communicator, together with all other ranks. Returns this rank's end. `call`: the user's call, for errors.
    ///
    /// # Errors
    /// On all ranks, if one of them cannot open it.
    pub(crate) async fn open_whole(
        &self,
        call: &str,
        library: &dyn Library,
        stream: Option<&DeviceStream>,
    ) -> Result<BoundWhole, Error> {
        let (rank, size, timeout) = (self.rank(), self.size(), self.handle().endpoint.config.timeout);
        let name = library.name();
        self.same(call, name.bytes().map(u64::from), &name, None).await?;
        let device = stream.map(|stream| stream.device().uuid());
        let members = self.handle().endpoint.config.members.clone();
        let idle = self.handle().membership.world.pool.wholes.take(&members, &name, device);
        let idle = idle.filter(|idle| idle.whole.check().is_ok());
        let number = idle.as_ref().map_or(0, |idle| idle.number);
        let numbers = self.step().all_gather(vec![number]).await?;
        if let Some(idle) = idle.filter(|_| numbers.iter().all(|other| *other == number)) {
            return Ok(idle);
        }
        // The id by which the library's ends find each other. Rank 0 makes and broadcasts it. The last byte says whether rank 0 could make one.
        let mut told = vec![0; ID + 1];
        let mut failed = None;
        if rank == 0 {
            match library.id() {
                Ok(id) => {
                    told[..ID].copy_from_slice(&id);
                    told[ID] = 1;
                }
                Err(error) => failed = Some(error),
            }
        }
        let told = self.step().broadcast(told, 0).await?;
        if let Some(error) = failed {
            return Err(error);
        }
        let id = told.first_chunk::<ID>().filter(|_| told.get(ID) == Some(&1));
        let id = *id.ok_or_else(|| {
            Error::invalid(call, format!("rank 0 could not start {name}; its own error says why"))
        })?;
        // A rank that fails here waits for the others in `all_of`. These wait for the library for half of the timeout at most.
        let opened = match library.open(&id, (rank, size), stream) {
            Ok(whole) => ready(&*whole, timeout / 2, self).await.map(|()| whole),
            Err(error) => Err(error),
        };
        let opened =
            opened.map_err(|error| error.among(&self.handle().endpoint.config.named().recorded_in(None)));
        let whole = self.all_of(call, opened.map(Ok)).await?.map_err(|why| Error::invalid(call, why))?;
        // Never 0, which stands for "this rank keeps no idle end".
        let number = id.chunks_exact(8).fold(0, |number, word| {
            mix(number, u64::from_le_bytes(word.try_into().unwrap_or_default())).max(1)
        });
        // If the library lets ranks share a device, each rank has its own order of launches, as if it had a device of its own.
        let sharer = (library.sharing() == Sharing::Yes).then(|| self.handle().membership.world.rank);
        let order = device.map(|device| LaunchOrder::of(device, sharer));
        Ok(BoundWhole { whole, order, device, number })
    }
}

/// Waits until this rank's end of a library is made. Aborts it if it fails, takes longer than `timeout`, or the communicator dies.
async fn ready(whole: &dyn Whole, timeout: Duration, comm: &SharedComm) -> Result<(), Error> {
    let (endpoint, runtime) = (&comm.handle().endpoint, &comm.handle().membership.world.runtime);
    let (end, mut ticks) = (runtime.now() + timeout, Ticks::new(runtime, LOOK)?);
    let problem = loop {
        match whole.poll() {
            Ok(Standing::InProgress) => {}
            Ok(_) => return Ok(()),
            Err(error) => break error,
        }
        if let Some(cause) = endpoint.health.cause() {
            break cause.clone();
        }
        if runtime.now() >= end {
            let problem =
                format!("it was not ready after {timeout:?}; another rank may have failed to open it");
            break Error::library(whole.name(), endpoint.config.rank, problem);
        }
        if let Err(error) = ticks.next().await {
            break error;
        }
    };
    whole.abort();
    Err(problem)
}

impl Call<'_> {
    /// Whether a library takes this operation whole: if neither the call nor the environment names an algorithm, the call needs no
    /// deterministic reduction, is no barrier, has no second half (`then`), and the library takes such calls. This follows from what is
    /// the same on all ranks of a call, so they decide alike.
    pub(super) fn goes_whole(&self, operation: &mut Operation, bound: &BoundWhole) -> bool {
        let Some(call) = whole_call(operation) else { return false };
        let is_free = self.is_free() && !(self.is_deterministic() && call.kind.reduces());
        is_free && operation.then.is_none() && call.kind != Kind::Barrier && bound.whole.takes(&call)
    }

    /// Has the library get from the device's driver what an operation that it takes whole will need.
    pub(super) fn get_ready_whole(
        &self,
        operation: &mut Operation,
        bound: &BoundWhole,
        stream: &DeviceStream,
    ) -> Result<(), Error> {
        whole_call(operation).map_or(Ok(()), |call| bound.whole.get_ready(&call, stream))
    }

    /// Turns an operation that a library takes whole into a barrier over the host's links, by which the ranks meet before the library gets the
    /// call. `device`: the operation on the device, if the memory is a device's.
    pub(super) fn made_whole(
        &self,
        mut operation: Operation,
        bound: &BoundWhole,
        device: Option<Arc<DeviceOp>>,
    ) -> Result<Carried, Error> {
        let Some(call) = whole_call(&mut operation) else { return Ok(operation.into()) };
        let mut signature = operation.signature;
        signature.kind |= WHOLE;
        // The library does not use the algorithm that was chosen, so the signature names none.
        signature.algo = Algo::Auto as u8 | signature.algo & KEY_BITS;
        let program = program(self.side.0, Algo::Dissemination, &Spec::of(Kind::Barrier, 0, 1, true))?;
        let token = &self.side.0.token;
        let output = token.as_ptr().cast::<u8>();
        let (input, dtype) = (output.cast_const(), DType::U64);
        let stated = None;
        let barrier = Part { program, input, output, count: 1, dtype, tables: None, pairwise: false, stated };
        let parts = match compared(operation.parts.all(), token) {
            Some(lengths) => PartList::Many(vec![lengths, barrier]),
            None => PartList::One(barrier),
        };
        let Operation { call: name, timeout, .. } = operation;
        let reduction = Reduction::Op(ReduceOp::Max);
        let meeting = Operation::new(name, signature, timeout, reduction, parts);
        let whole = WholeOp::new(call, bound, device, token.clone());
        Ok(Carried { operation: meeting, carrier: Some(Arc::new(whole)) })
    }

    /// Does [`made_whole`](Self::made_whole) for an operation on the host's memory, if the library takes it. Only a library for tests does.
    #[cfg(any(test, feature = "testing"))]
    #[cold]
    pub(super) fn taken_whole_on_host(&self, prepared: Result<Carried, Error>) -> Result<Carried, Error> {
        let mut carried = prepared?;
        let bound = bound_to(self.side.0).and_then(|bound| bound.whole.as_ref());
        let Some(bound) = bound else { return Ok(carried) };
        let is_on_host = carried.carrier.is_none() && bound.device.is_none();
        match is_on_host && self.goes_whole(&mut carried.operation, bound) {
            true => self.made_whole(carried.operation, bound, None),
            false => Ok(carried),
        }
    }
}

/// For a call in which each rank knows only its own counts: a part with the same messages, but without payload. By them every two ranks
/// compare how much is to move between them, before a library moves it. `memory`: any address; nobody reads or writes there.
fn compared(parts: &[Part], memory: &AtomicU64) -> Option<Part> {
    let [part] = parts else { return None };
    let stated = Some(part.tables.clone().filter(|_| part.pairwise)?);
    let output = memory.as_ptr().cast::<u8>();
    let tables = Some(Arc::default());
    Some(Part {
        input: output.cast_const(),
        output,
        count: 0,
        dtype: DType::U8,
        tables,
        stated,
        ..part.clone()
    })
}

/// The call, as a library gets it. `None`: no library takes it, as it reduces by a function of the user's or is no collective.
fn whole_call(operation: &mut Operation) -> Option<WholeCall> {
    let Reduction::Op(op) = operation.reduction else { return None };
    let (kind, root) = (operation.signature.collective()?, operation.signature.root as usize);
    let piece = |part: &Part| {
        let &Part { input, output, count, dtype, .. } = part;
        Piece { input, output, count, dtype, tables: part.tables.clone() }
    };
    let pieces = operation.parts.all().iter().map(piece).collect();
    Some(WholeCall { kind, root, op, scale: operation.scale, pieces })
}
