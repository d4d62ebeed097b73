//! [`Node`]: several ranks of one process, one for each of its devices, called together.

use std::fmt;
use std::sync::Arc;

use super::handle::{MOST_LOCAL, Stats};
use super::{Call, Comm, DevicePath, Verdict, all_of, until};
use crate::device::Device;
use crate::error::Error;
use crate::exec::Endpoint;
use crate::group::{LinkChoice, Rendezvous};
use crate::mem::HostStream;
use crate::types::{MOST_RANKS, Rank};
use crate::{forked, tuning};

pub(super) mod call;
pub(super) mod calls;
mod several;
mod work;

pub use call::NodeCall;
pub use several::Several;
pub use work::{NodeWork, Outcomes};

/// A device in a world of nodes: (process, device of that process). Its rank is `process * devices + device`.
pub type Place = (usize, usize);

/// Several ranks of one process, called together: device i of process r is rank `r * k + i` of a world of p processes
/// with k devices each.
///
/// A collective takes one buffer for each device, `[B; K]` or `Vec<B>`, and gives the same shape back; roots are
/// [`Place`]s. Each device's part is the collective of its own [`Comm`]: a node is a view of k `Comm`s. All parts are
/// checked before the first is submitted, so an invalid call submits nothing and gives all buffers back. One thread
/// that awaits or waits drives all parts.
///
/// ```
/// # use allstream::Node;
/// # async fn step(mut node: Node, g0: Vec<f32>, g1: Vec<f32>) -> Result<(), allstream::Error> {
/// let [g0, g1] = node.all_reduce([g0, g1]).await?;
/// # drop((g0, g1)); Ok(()) }
/// # let step = step(Node::local(2)?, vec![1.0], vec![2.0]);
/// # futures::executor::block_on(step)?; Ok::<(), allstream::Error>(())
/// ```
///
/// On a CPU a device is a [`HostStream`]: [`on_streams`](Self::on_streams) starts each device's part after what its
/// stream holds, and [`NodeWork::join`] makes each stream wait for its part.
pub struct Node {
    comms: Vec<Comm>,
    streams: Arc<[HostStream]>,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (process, processes, devices) = (self.process(), self.processes(), self.devices());
        write!(f, "Node({}, process {process} of {processes}, {devices} devices)", self.name())
    }
}

impl Node {
    /// Joins the world in which every process has `devices` ranks. The rendezvous counts processes: its rank is this
    /// process's number, its size the number of processes, as a launcher that starts one process for each host sets
    /// them. Returns when all ranks of all processes are there.
    ///
    /// # Errors
    /// As [`Comm::connect`]; [`Error::Invalid`] for no device, or more than a world can have; [`Error::Rendezvous`] where processes give different
    /// numbers of devices.
    pub async fn connect(rendezvous: Rendezvous, devices: usize) -> Result<Node, Error> {
        let (process, processes) = (rendezvous.rank, rendezvous.size);
        let invalid = |problem: String| Err(Error::invalid("Node::connect", problem));
        if devices == 0 {
            return invalid("a node has at least one device, found 0".into());
        }
        let (first, size) = (process.saturating_mul(devices), processes.saturating_mul(devices));
        if size > MOST_RANKS || devices > MOST_LOCAL {
            return invalid(format!(
                "{processes} processes of {devices} devices are no world: it has at most {MOST_RANKS} ranks, and a \
                 process at most {MOST_LOCAL} of them"
            ));
        }
        if processes == 1 && matches!(rendezvous.link, LinkChoice::AUTO | LinkChoice::INPROC) {
            let choices = if rendezvous.chosen { rendezvous.choices } else { tuning::choices_from_env()? };
            return Node::from_comms(Comm::local_by(devices, choices)?);
        }
        let rendezvous = if processes == 1 { rendezvous.of_one_process()? } else { rendezvous };
        let join = |rank| Comm::connect(Rendezvous { rank, size, ..rendezvous.clone() });
        let joined = until((first..first + devices).map(join), Result::is_err).await;
        match joined.into_iter().collect() {
            Err(Error::Rendezvous { address, rank, problem }) => {
                let last = first + devices - 1;
                let problem = format!(
                    "{problem}. This is process {process} of {processes}, a node of {devices} devices: ranks {first} to \
                     {last} of {size}. Every process must give the same number of devices"
                );
                Err(Error::Rendezvous { address, rank, problem })
            }
            comms => Node::from_comms(comms?),
        }
    }

    /// A node whose devices are a world of their own.
    ///
    /// # Errors
    /// As [`Comm::local`].
    pub fn local(devices: usize) -> Result<Node, Error> {
        Node::from_comms(Comm::local(devices)?)
    }

    /// Makes a node of k communicators of this process: ranks `r * k..(r + 1) * k` of one group, in order. The group's size
    /// must be a multiple of k. The other ranks may be in nodes of k devices, or be used one by one.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the communicators are not such ranks; [`Error::System`] when the system has no threads to give for the
    /// devices' streams.
    pub fn from_comms(comms: Vec<Comm>) -> Result<Node, Error> {
        let each = (0..comms.len()).map(|device| HostStream::new(&format!("device {device}")));
        Node::with_streams("Node::from_comms", comms, each.collect::<Result<_, _>>()?)
    }

    fn with_streams(call: &'static str, comms: Vec<Comm>, streams: Arc<[HostStream]>) -> Result<Node, Error> {
        let invalid = |problem: String| Err(Error::invalid(call, problem));
        let Some(first) = comms.first() else { return invalid("a node has at least one device".into()) };
        let (k, rank, size) = (comms.len(), first.rank(), first.size());
        if !size.is_multiple_of(k) || !rank.is_multiple_of(k) {
            return invalid(format!(
                "{k} devices from rank {rank} of {size}: expected a size and a first rank that are multiples of {k}"
            ));
        }
        let group = |comm: &Comm| (comm.place().1.name(), comm.place().0.config.comm);
        let is_next = |at: &usize, comm| group(comm) == group(first) && comm.rank() == rank + at;
        if let Some((device, comm)) = comms.iter().enumerate().find(|(at, comm)| !is_next(at, comm)) {
            let expected = rank + device;
            return invalid(format!(
                "device {device} is {comm:?}: expected rank {expected} of the group of device 0, {first:?}"
            ));
        }
        Ok(Node { comms, streams })
    }

    /// This process's number, `0..processes()`.
    pub fn process(&self) -> usize {
        self.comms[0].rank() / self.devices()
    }

    /// Processes in the group.
    pub fn processes(&self) -> usize {
        self.size() / self.devices()
    }

    /// Devices of each process.
    pub fn devices(&self) -> usize {
        self.comms.len()
    }

    /// Ranks in the group: `processes() * devices()`.
    pub fn size(&self) -> usize {
        self.comms[0].size()
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        self.comms[0].name()
    }

    /// The rank of a device: `process * devices() + device`.
    ///
    /// # Errors
    /// [`Error::Invalid`] where there is no such device.
    pub fn rank_of(&self, process: usize, device: usize) -> Result<Rank, Error> {
        self.rank_in("Node::rank_of", (process, device))
    }

    /// [`rank_of`](Self::rank_of) for the call that the error names.
    pub(super) fn rank_in(&self, call: &str, (process, device): Place) -> Result<Rank, Error> {
        let (p, k) = (self.processes(), self.devices());
        if process < p && device < k {
            return Ok(process * k + device);
        }
        let none = format!("(process {process}, device {device}) is not among {p} processes of {k} devices");
        Err(Error::invalid(call, none))
    }

    /// The process and the device of a rank.
    pub fn place_of(&self, rank: Rank) -> Place {
        (rank / self.devices(), rank % self.devices())
    }

    fn endpoints(&self) -> impl Iterator<Item = &Arc<Endpoint>> {
        self.comms.iter().map(|comm| comm.place().0)
    }

    fn no_device(&self, call: &str, device: usize) -> Error {
        let k = self.devices();
        Error::invalid(call, format!("device {device} is not in this node of {k}; devices are 0..={}", k - 1))
    }

    /// A call with the default options.
    pub fn call(&mut self) -> NodeCall<'_> {
        let me: &Node = self;
        let (endpoint, world) = me.comms[0].place();
        NodeCall { node: me, call: Call::new(endpoint, world.common.defaults.algo), after: None }
    }

    /// A device's own communicator, for calls of one device alone. They count in the order of calls that all ranks must
    /// keep.
    ///
    /// # Errors
    /// [`Error::Invalid`] if this node has no such device.
    pub fn comm(&mut self, device: usize) -> Result<&mut Comm, Error> {
        let error = self.no_device("Node::comm", device);
        self.comms.get_mut(device).ok_or(error)
    }

    /// All devices' communicators, by device.
    pub fn comms(&mut self) -> &mut [Comm] {
        &mut self.comms
    }

    /// The devices' communicators, by device, each to be used alone.
    pub fn into_comms(mut self) -> Vec<Comm> {
        std::mem::take(&mut self.comms)
    }

    /// A device's stream.
    ///
    /// # Errors
    /// [`Error::Invalid`] if this node has no such device.
    pub fn stream(&self, device: usize) -> Result<&HostStream, Error> {
        self.streams.get(device).ok_or_else(|| self.no_device("Node::stream", device))
    }

    /// All devices' streams, by device. They belong to the devices, not to the group: nodes made by
    /// [`split`](Self::split) and [`dup`](Self::dup) share them.
    pub fn streams(&self) -> &[HostStream] {
        &self.streams
    }

    /// A node of the processes that give the same `color`, with the same devices; processes are ordered by `key`, then by
    /// their number here. Collective: all processes of this group call it.
    ///
    /// # Errors
    /// As a collective.
    pub async fn split(&mut self, color: u64, key: i64) -> Result<Node, Error> {
        Node::with_streams("Node::split", self.split_by(|_| (color, key)).await?, self.streams.clone())
    }

    /// A second node of the same devices, with communicators of its own. Collective.
    ///
    /// # Errors
    /// As a collective.
    pub async fn dup(&mut self) -> Result<Node, Error> {
        self.split(0, 0).await
    }

    /// Splits the group by devices: `by` gives (color, key) of each device of this node, and each device gets a communicator
    /// of the devices with the same color, ordered by key, then by rank. For instance `|device| (device as u64, 0)` makes one
    /// group for each device number. Collective: all processes of this group call it.
    ///
    /// # Errors
    /// As a collective.
    pub async fn split_by(&mut self, by: impl Fn(usize) -> (u64, i64)) -> Result<Vec<Comm>, Error> {
        let each = self.comms.iter_mut().enumerate().map(|(device, comm)| {
            let (color, key) = by(device);
            comm.split(color, key)
        });
        all_of(each).await
    }

    /// Binds each rank of this node to a device, in order: [`Comm::bind_device`] of all of them. Collective: all processes call it.
    ///
    /// # Errors
    /// As of [`Comm::bind_device`]; [`Error::Invalid`] where there is not one device for each rank.
    pub async fn bind_devices(&mut self, devices: &[Device]) -> Result<DevicePath, Error> {
        self.bind("Node::bind_devices", devices, Comm::bind_device).await
    }

    /// Binds each rank of this node to a device by NCCL: [`Comm::bind_nccl`] of all of them. Calls on NCCL's communicators do not block,
    /// so one thread serves them all.
    ///
    /// # Errors
    /// As of [`Comm::bind_nccl`]; [`Error::Invalid`] where there is not one device for each rank.
    pub async fn bind_nccl(&mut self, devices: &[Device]) -> Result<DevicePath, Error> {
        self.bind("Node::bind_nccl", devices, Comm::bind_nccl).await
    }

    async fn bind(
        &mut self,
        call: &str,
        devices: &[Device],
        bind: impl AsyncFn(&mut Comm, &Device) -> Result<DevicePath, Error>,
    ) -> Result<DevicePath, Error> {
        let (found, ranks) = (devices.len(), self.devices());
        if found != ranks {
            let problem = format!("{found} devices for a node of {ranks} ranks: one for each is needed");
            return Err(Error::invalid(call, problem));
        }
        let bound = self.comms.iter_mut().zip(devices).map(|(comm, device)| bind(comm, device));
        // All ranks have found the same path.
        Ok(all_of::<_, Vec<_>>(bound).await?.swap_remove(0))
    }

    /// Goes on without the ranks that are lost; see [`Comm::shrink`]. Processes keep their order, and this process keeps its
    /// devices and streams. A process is lost with all of its devices.
    ///
    /// # Errors
    /// As [`Comm::shrink`]; [`Error::Invalid`] where the survivors are not whole processes.
    pub async fn shrink(self) -> Result<(Node, Verdict), Error> {
        let streams = self.streams.clone();
        // All devices have the same verdict: they are ranks of one group.
        let (comms, mut found): (_, Vec<_>) = all_of(self.into_comms().into_iter().map(Comm::shrink)).await?;
        Ok((Node::with_streams("Node::shrink", comms, streams)?, found.swap_remove(0)))
    }

    /// Tells whether the devices' communicators are dead. They die together.
    ///
    /// # Errors
    /// The cause for which the first dead one of them has died.
    pub fn check(&self) -> Result<(), Error> {
        self.comms.iter().try_for_each(Comm::check)
    }

    /// Ends this group on all ranks: operations in flight and later calls fail with [`Error::Aborted`], which names this
    /// node's first rank.
    pub fn abort(&self, reason: impl Into<String>) {
        self.fail(&Error::aborted(self.comms[0].rank(), reason));
    }

    fn fail(&self, error: &Error) {
        for endpoint in self.endpoints() {
            endpoint.fail(error.clone());
            // The caller knows the cause: no later call need return it.
            endpoint.tell();
        }
    }

    /// What each device holds for communication right now.
    pub fn stats(&self) -> Vec<Stats> {
        self.comms.iter().map(Comm::stats).collect()
    }

    /// Sets whether later calls of this group are deterministic; to be set alike on all ranks. See [`Call::deterministic`].
    pub fn set_deterministic(&mut self, on: bool) {
        self.comms.iter_mut().for_each(|comm| comm.set_deterministic(on));
    }

    /// Closes all devices' communicators. See [`Comm::close`].
    ///
    /// # Errors
    /// The error of the first device, in order, whose close failed.
    pub async fn close(self) -> Result<(), Error> {
        all_of(self.into_comms().into_iter().map(Comm::close)).await
    }
}

impl Drop for Node {
    /// Drops the communicators in parallel, as the drop of each may wait for the others.
    fn drop(&mut self) {
        // In a child of a fork nobody is waited for.
        if forked::is_forked() {
            return;
        }
        std::thread::scope(|scope| {
            let last = self.comms.pop();
            for comm in self.comms.drain(..) {
                // If the system has no thread to give, the communicator is dropped on this one.
                let _ = std::thread::Builder::new().spawn_scoped(scope, move || drop(comm));
            }
            drop(last);
        });
    }
}
