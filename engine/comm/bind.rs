//! Binds a communicator to devices: its operations on device buffers then run on the devices.

use std::sync::Arc;

use super::SharedComm;
use super::made_together::made_together;
use super::reach::{Group, Heard, ROW, Reached, heard};
use super::world::NcclUse;
use crate::device::carriers::{self, BoundTo};
use crate::device::links::ipc::Far;
use crate::device::links::offer::Offer;
use crate::device::links::peer::PeerDevice;
use crate::device::nccl::NcclLibrary;
use crate::device::operation::Binding;
use crate::device::whole::Library;
use crate::device::{Device, DeviceStream};
use crate::error::{Error, Members};
use crate::exec::Endpoint;
use crate::group::nonce;
use crate::types::{Rank, mix};

const CALL: &str = "bind_device";

/// How a communicator's operations on device buffers run.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DevicePath {
    /// By kernels on the ranks' devices, which read each other's memory: in one process, or between processes of one host
    /// (CUDA IPC).
    Peer,
    /// By the host, through pinned memory.
    Staged {
        /// Why the devices cannot do it themselves.
        why: String,
    },
    /// By NVIDIA's library (NCCL), if it takes the operation; else by kernels or staged, as in the other two variants.
    Nccl {
        /// The library and its version.
        library: String,
        /// If operations that NCCL does not take are staged: why they are. `None`: kernels run them.
        staged: Option<String>,
    },
}

/// What a rank has found out about the other ranks' devices: how to reach them, or why it cannot.
type Reaching = Result<(Vec<Option<Arc<PeerDevice>>>, Option<Arc<Far>>), String>;

made_together! {
    /// Binds this rank to a device, and makes a stream of the highest priority for it. Collectives on device buffers then run
    /// on the devices, by kernels that read the memory of the other ranks' devices (several ranks may also share one
    /// device). Collective: all ranks call it, each with its device.
    ///
    /// If the devices cannot reach each other, all ranks are told why, and stay as they were: device buffers go through
    /// the host's memory. Device buffers of messages, of collectives with a reduction function of yours, and of collectives
    /// of more than 64 ranks always go through the host's memory.
    ///
    /// The other ranks read memory of other libraries ([`DeviceBuf::from_foreign`], DLPack) in place, if it can be shared with their devices.
    /// Between processes this needs memory from `cudaMalloc` (the default of torch and cupy), in allocations of 2 MiB or more. Else the
    /// operation works on a copy in allstream's own memory, on the same device; [`device_copies`](Self::device_copies) says why.
    ///
    /// With `ALLSTREAM_NCCL=require` this is [`bind_nccl`](Self::bind_nccl).
    ///
    /// From then on every device buffer of a collective must be on this rank's device, and in one call all ranks must pass
    /// device buffers, or all host buffers (else it is an [`Error::Mismatch`]). The call of a collective does not
    /// block: its kernels are put on the stream when all ranks have called. A communicator stays bound until it ends;
    /// communicators that are made from it begin unbound.
    ///
    /// [`DeviceBuf::from_foreign`]: crate::cuda::DeviceBuf::from_foreign
    ///
    /// # Errors
    /// All ranks get an error, and the communicator stays as it was: [`Error::Invalid`] if a rank is bound already;
    /// [`Error::Cuda`] if the driver refuses. Also the errors of any collective.
    async fn bind_device [] (device: &Device) -> Result<DevicePath, Error> = |comm| async {
        match comm.handle().membership.world.common.defaults.nccl {
            NcclUse::Require => comm.bind_by_nccl(device).await,
            NcclUse::Auto | NcclUse::Off => comm.bind(DeviceStream::of_a_rank(device), None).await,
        }
    };

    /// Like [`bind_device`](Self::bind_device), but this rank's part of operations runs on the caller's stream.
    ///
    /// A buffer whose own stream is this one needs no events to be ordered with the collectives. But a stream cannot wait for work that
    /// is put on this same stream later. So [`Work::join`](super::Work::join) blocks until all ranks have called, if it joins this
    /// stream or if this is the stream of one of the operation's buffers. To overlap computing and communicating, use two streams.
    ///
    /// # Errors
    /// Those of [`bind_device`](Self::bind_device).
    async fn bind_stream [] (stream: &DeviceStream) -> Result<DevicePath, Error>
        = |comm| comm.bind(Ok(stream.clone()), None);

    /// Like [`bind_device`](Self::bind_device), but NVIDIA's library (NCCL, 2.14 or newer) runs those collectives on device buffers that it
    /// supports: sums and products; minima and maxima of integers; averages of floats; broadcasts, gathers, scatters and exchanges,
    /// also with a count for each rank, as long as a call names no algorithm and need not be deterministic. The call alone decides whether
    /// NCCL runs it. All others (scans, say) run as they would without NCCL: through the host's memory where the devices cannot reach each
    /// other, as on several hosts.
    ///
    /// Messages of more than 4 KB go by NCCL, too, with their tags, in whatever order they are called. Both ends of such a message must be
    /// on a device, or neither: else it is an [`Error::Mismatch`].
    ///
    /// Each rank needs its own device. Ranks may share one if `NCCL_MULTI_RANK_GPU_ENABLE=1` is set for all ranks and NCCL is 2.30 or newer
    /// (if they are threads of one process, set `CUDA_DEVICE_MAX_CONNECTIONS=32`, too). The ranks compare a call over the host's links
    /// before NCCL gets it: if they disagree, the call is an error, and a rank that does not call is named at the deadline, as without NCCL.
    /// Rounding is NCCL's.
    ///
    /// All ranks must call the collectives on all communicators of one device in the same order: NCCL's operations are launched in that
    /// order. Messages may be called at any time.
    ///
    /// The library is looked for when it is first needed: the file that `ALLSTREAM_NCCL_LIBRARY` names, and no other; else `libnccl.so.2`, conda's
    /// in `CONDA_PREFIX`, or pip's (`nvidia-nccl-cu12`, `-cu13`) in the environments that `VIRTUAL_ENV` and `CONDA_PREFIX` name. In Python the
    /// interpreter's own packages come first. [`cuda::nccl`](crate::cuda::nccl) and `allstream info` tell which file it is. NCCL's own documentation
    /// says what it needs to find the other ranks (`NCCL_SOCKET_IFNAME` and others); allstream's token does not protect NCCL's
    /// connections. With `ALLSTREAM_NCCL=off` this call does what [`bind_device`](Self::bind_device) does, and with `ALLSTREAM_NCCL=require`
    /// `bind_device` does what this call does; all ranks must set the same.
    ///
    /// # Errors
    /// Those of [`bind_device`](Self::bind_device); [`Error::Unavailable`] if no such library is found; [`Error::Library`] if it fails.
    async fn bind_nccl [] (device: &Device) -> Result<DevicePath, Error> = |comm| async {
        match comm.handle().membership.world.common.defaults.nccl {
            NcclUse::Off => comm.bind(DeviceStream::of_a_rank(device), None).await,
            NcclUse::Auto | NcclUse::Require => comm.bind_by_nccl(device).await,
        }
    };
}

/// Whether a communicator's ranks are bound to devices.
pub(super) fn is_on_devices(endpoint: &Endpoint) -> bool {
    binding_of(endpoint).is_some()
}

/// The devices that a communicator's ranks are bound to.
pub(super) fn binding_of(endpoint: &Endpoint) -> Option<&Arc<Binding>> {
    carriers::bound_to(endpoint)?.binding.as_ref()
}

impl SharedComm {
    async fn bind_by_nccl(&self, device: &Device) -> Result<DevicePath, Error> {
        let library = NcclLibrary::find();
        // NCCL keeps the driver's handle of the stream. So the engine must not replace that handle by another, as it may in a stream that
        // `of_a_rank` has made.
        let stream = library.as_ref().map_err(Clone::clone).and_then(|_| DeviceStream::of_the_engine(device));
        self.bind(stream, library.as_ref().ok().map(|library| library as &dyn Library)).await
    }

    /// If `other`, a communicator of the same ranks, is bound, binds this one to the same device and in the same way. Collective.
    pub(crate) async fn bind_like(&self, other: &SharedComm) -> Result<(), Error> {
        let Some(binding) = binding_of(&other.handle().endpoint) else { return Ok(()) };
        let device = binding.ours.stream.device();
        match binding.whole {
            Some(_) => self.bind_by_nccl(&device).await,
            None => self.bind(DeviceStream::of_a_rank(&device), None).await,
        }
        .map(drop)
    }

    async fn bind(
        &self,
        stream: Result<DeviceStream, Error>,
        library: Option<&dyn Library>,
    ) -> Result<DevicePath, Error> {
        let (device, reaching) = self.reach_devices(stream, library).await?;
        let Some(library) = library else {
            let reached = match reaching {
                Ok(reached) => reached,
                Err(why) => return Ok(DevicePath::Staged { why }),
            };
            let binding = Some(Arc::new(Binding::new(device, reached, true, None)));
            carriers::bind(&self.handle().endpoint, BoundTo { binding, whole: None });
            return Ok(DevicePath::Peer);
        };
        let whole = self.open_whole(CALL, library, Some(&device.stream)).await?;
        let staged = reaching.as_ref().err().cloned();
        let alone = || {
            let ours = |rank| (rank == self.rank()).then(|| device.clone());
            ((0..self.size()).map(ours).collect(), None)
        };
        let reached = reaching.unwrap_or_else(|_| alone());
        let binding = Binding::new(device.clone(), reached, staged.is_none(), Some(whole.clone()));
        let to = BoundTo { binding: Some(Arc::new(binding)), whole: Some(whole) };
        carriers::bind(&self.handle().endpoint, to);
        Ok(DevicePath::Nccl { library: library.name(), staged })
    }

    /// Finds out how the devices of all ranks reach each other. `library`: the library that is to run operations, if any. If there is one, each
    /// rank must have a device of its own, unless the library lets ranks share one.
    async fn reach_devices(
        &self,
        stream: Result<DeviceStream, Error>,
        library: Option<&dyn Library>,
    ) -> Result<(Arc<PeerDevice>, Reaching), Error> {
        let (endpoint, world) = (self.handle().endpoint.clone(), self.handle().membership.world.clone());
        let (config, n, members) = (&endpoint.config, self.size(), endpoint.config.named());
        let stream = match binding_of(&endpoint) {
            Some(bound) => {
                let problem =
                    format!("this communicator is bound already, to {:?}", bound.ours.stream.device());
                Err(Error::invalid(CALL, problem))
            }
            // Bound to a library alone or to workers: only tests do that.
            None if endpoint.bound().is_some() => {
                Err(Error::invalid(CALL, "this communicator is bound already"))
            }
            None => stream,
        };
        let ours = stream.and_then(|stream| {
            // The process may have communicators of the same number in several worlds.
            let worlds = u64::from_le_bytes(*world.topology.world.first_chunk().unwrap_or(&[0; 8]));
            let comm = mix(worlds, config.comm);
            let device = PeerDevice::new(stream, endpoint.commands.clone(), (self.rank(), n), comm);
            Ok((Arc::new(device), nonce()?))
        });
        let group = Group { config, topology: &world.topology };
        let row = ours.as_ref().ok().map(|(device, process)| group.row(device, *process, library));
        let rows = self.step().all_gather(row.unwrap_or([0; ROW]).to_vec()).await?;
        let (device, _) = ours?;
        let name = library.map(Library::name);
        let rows = heard(&rows, &members, name.as_deref());
        let rows = match rows.map_err(|rank| failed_elsewhere(CALL, &members, rank))? {
            Heard::Rows(rows) => rows,
            Heard::Staged(why) => return Ok((device, Err(why))),
            Heard::Refused(problem) => return Err(Error::invalid(CALL, problem)),
        };
        let keep = Arc::new(());
        let reached = match self.all_of(CALL, group.reach(&device, &keep, &rows)).await? {
            Ok(reached) => reached,
            Err(why) => return Ok((device, Err(why))),
        };
        let Reached { all, offers, cards } = reached;
        let mut far = None;
        if all.iter().any(Option::is_none) {
            offers.iter().flatten().for_each(Offer::is_told);
            let cards = self.step().all_to_all(cards).await?;
            // If the driver refuses to open a peer's memory (the processes may be in two containers), the devices cannot reach each other.
            let opened = group.open(&device, keep.clone(), &rows, (&offers, &cards));
            match self.all_of(CALL, Ok(opened)).await? {
                Ok(opened) => far = Some(Arc::new(opened)),
                Err(why) => return Ok((device, Err(why))),
            }
            // Offers must live until here, as the other ranks were opening them.
            drop((offers, keep));
        }
        Ok((device, Ok((all, far))))
    }

    /// Returns this rank's value if all ranks have succeeded so far. If a rank has an error, all ranks return an error. If none has, but one has a
    /// reason why it cannot go on, all ranks return a reason. Collective.
    pub(super) async fn all_of<T>(
        &self,
        call: &str,
        outcome: Result<Result<T, String>, Error>,
    ) -> Result<Result<T, String>, Error> {
        let told = match &outcome {
            Ok(Ok(_)) => 1,
            Ok(Err(_)) => 2,
            Err(_) => 0,
        };
        let told = self.step().all_gather(vec![told]).await?;
        let outcome = outcome?;
        let members = self.handle().endpoint.config.named();
        if let Some(rank) = told.iter().position(|told| *told == 0) {
            return Err(failed_elsewhere(call, &members, rank));
        }
        let refused = told.iter().position(|told| *told != 1);
        let why = |rank| {
            format!("the device of {} cannot reach that of another rank (it says why)", members.rank(rank))
        };
        Ok(outcome.and_then(|value| refused.map_or(Ok(value), |rank| Err(why(rank)))))
    }
}

fn failed_elsewhere(call: &str, members: &Members, rank: Rank) -> Error {
    Error::invalid(call, format!("{} could not be bound; its own error says why", members.rank(rank)))
}
