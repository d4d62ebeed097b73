//! [`Node`]: several ranks of one process, one for each of its devices, called together.

use std::convert::Infallible;
use std::fmt;
use std::future::{Future, poll_fn};
use std::net::TcpListener;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

#[cfg(doc)]
use super::Call;
use super::Comm;
use super::Verdict;
use super::handle::{MOST_LOCAL, Stats};
use crate::error::Error;
use crate::exec::Endpoint;
use crate::forked;
use crate::group::{LinkChoice, Rendezvous, host};
use crate::mem::HostStream;
use crate::types::{MOST_RANKS, Rank};

mod bind;
mod call;
mod calls;
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
/// [`Place`]s. Each device's part is the collective of its own [`Comm`]: a node is a view of k of them. All parts are
/// looked at before the first is submitted, so that an invalid call submits nothing and gives all buffers back; one
/// thread that awaits or waits drives all parts.
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

/// Runs futures side by side; their results, in order.
pub(crate) async fn together<T>(futures: impl IntoIterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let unfailing = futures.into_iter().map(|f| async { Ok::<T, Infallible>(f.await) });
    match all_or_first_error(unfailing).await {
        Ok(results) => results,
        Err(never) => match never {},
    }
}

/// Runs futures side by side until one fails, whose error it is, or all have succeeded.
async fn all_or_first_error<T, E>(
    futures: impl IntoIterator<Item = impl Future<Output = Result<T, E>>>,
) -> Result<Vec<T>, E> {
    type Running<F, T> = (Pin<Box<F>>, Option<T>);
    let mut futures: Vec<Running<_, T>> = futures.into_iter().map(|f| (Box::pin(f), None)).collect();
    poll_fn(|cx| {
        let mut pending = false;
        for (future, result) in futures.iter_mut().filter(|(_, result)| result.is_none()) {
            match future.as_mut().poll(cx) {
                Poll::Ready(Ok(done)) => *result = Some(done),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => pending = true,
            }
        }
        if pending { Poll::Pending } else { Poll::Ready(Ok(())) }
    })
    .await?;
    Ok(futures.into_iter().filter_map(|(_, result)| result).collect())
}

/// Drops communicators of one process side by side: each waits for the others to leave, too.
fn drop_together(comms: Vec<Comm>) {
    // In a child of a fork nobody is waited for.
    if forked::is_forked() {
        return drop(comms);
    }
    std::thread::scope(|scope| {
        let mut comms = comms.into_iter();
        let first = comms.next();
        for comm in comms {
            // Where the system has no thread to give, it is dropped here.
            let _ = std::thread::Builder::new().spawn_scoped(scope, move || drop(comm));
        }
        drop(first);
    });
}

/// One process that joins a world of its own devices meets nobody else: where no address was given, any will do.
fn alone(mut place: Rendezvous) -> Result<Rendezvous, Error> {
    let doing = |e| Error::system("open a port at which the devices of this process meet", e);
    if place.address.is_none() {
        let listener = TcpListener::bind("127.0.0.1:0").map_err(doing)?;
        let at = listener.local_addr().map_err(doing)?;
        place.address = Rendezvous::tcp(&format!("tcp://{at}"), 0, 1)?.address;
        place = place.listener(listener);
    }
    if place.token.is_none() {
        place = place.token(host::random::<16>()?);
    }
    Ok(place)
}

impl Node {
    /// Joins the world in which every process has `devices` ranks. The rendezvous is that of the processes: its rank is
    /// this process's number, its size the number of processes, as a launcher that starts one process for each host
    /// gives them. Returns when all ranks of all processes are there.
    ///
    /// # Errors
    /// As [`Comm::connect`]; [`Error::Invalid`] for no device, or more than a world can have; [`Error::Rendezvous`] where processes give different
    /// numbers of devices.
    pub async fn connect(rendezvous: Rendezvous, devices: usize) -> Result<Node, Error> {
        let (process, processes) = (rendezvous.rank, rendezvous.size);
        if devices == 0 {
            return Err(Error::invalid("Node::connect", "a node has at least one device, found 0"));
        }
        let size = processes.checked_mul(devices).filter(|size| *size <= MOST_RANKS && devices <= MOST_LOCAL);
        let Some(size) = size else {
            let problem = format!(
                "{processes} processes of {devices} devices are no world: it has at most {MOST_RANKS} ranks, and a \
                 process at most {MOST_LOCAL} of them"
            );
            return Err(Error::invalid("Node::connect", problem));
        };
        if processes == 1 && matches!(rendezvous.link, LinkChoice::AUTO | LinkChoice::INPROC) {
            return match rendezvous.chosen {
                true => Node::from_comms(Comm::local_by(devices, rendezvous.choices)?),
                false => Node::local(devices),
            };
        }
        let rendezvous = if processes == 1 { alone(rendezvous)? } else { rendezvous };
        let place = |device| {
            let mut place = rendezvous.clone();
            (place.rank, place.size) = (process * devices + device, size);
            place
        };
        let joined = all_or_first_error((0..devices).map(|d| Comm::connect(place(d)))).await;
        let comms = joined.map_err(|error| match error {
            Error::Rendezvous { address, rank, problem } => {
                let (first, last) = (process * devices, process * devices + devices - 1);
                let problem = format!(
                    "{problem}. This is process {process} of {processes}, a node of {devices} devices: ranks {first} to \
                     {last} of {size}. Every process must give the same number of devices"
                );
                Error::Rendezvous { address, rank, problem }
            }
            error => error,
        })?;
        Node::from_comms(comms)
    }

    /// A node whose devices are a world of their own.
    ///
    /// # Errors
    /// As [`Comm::local`].
    pub fn local(devices: usize) -> Result<Node, Error> {
        Node::from_comms(Comm::local(devices)?)
    }

    /// Communicators of this process as a node: ranks `r * k..(r + 1) * k` of one group, in order, whose size is a
    /// multiple of k. The other ranks may be held in nodes of k devices, or one by one.
    ///
    /// # Errors
    /// [`Error::Invalid`] where they are not such; [`Error::System`] when the system has no threads to give for the
    /// devices' streams.
    pub fn from_comms(comms: Vec<Comm>) -> Result<Node, Error> {
        let streams = (0..comms.len()).map(|device| HostStream::new(&format!("device {device}")));
        let streams = streams.collect::<Result<Vec<_>, Error>>()?.into();
        Node::with_streams(comms, streams)
    }

    fn with_streams(comms: Vec<Comm>, streams: Arc<[HostStream]>) -> Result<Node, Error> {
        let invalid = |problem: String| Err(Error::invalid("Node::from_comms", problem));
        let Some(first) = comms.first() else { return invalid("a node has at least one device".into()) };
        let (k, rank, size) = (comms.len(), first.rank(), first.size());
        if !size.is_multiple_of(k) || !rank.is_multiple_of(k) {
            return invalid(format!(
                "{k} devices from rank {rank} of {size}: expected a size and a first rank that are multiples of {k}"
            ));
        }
        let id = |comm: &Comm| (comm.handle().membership.world.name(), comm.handle().endpoint.config.comm);
        let group = id(first);
        for (device, comm) in comms.iter().enumerate() {
            if id(comm) != group || comm.rank() != rank + device {
                return invalid(format!(
                    "device {device} is {comm:?}: expected rank {} of the group of device 0, {first:?}",
                    rank + device
                ));
            }
        }
        Ok(Node { comms, streams })
    }

    /// This process, `0..processes()`.
    pub fn process(&self) -> usize {
        self.endpoint(0).map_or(0, |endpoint| endpoint.config.rank / self.devices())
    }

    /// Processes in the group.
    pub fn processes(&self) -> usize {
        self.size() / self.devices().max(1)
    }

    /// Devices of each process.
    pub fn devices(&self) -> usize {
        self.comms.len()
    }

    /// Ranks in the group: `processes() * devices()`.
    pub fn size(&self) -> usize {
        self.endpoint(0).map_or(0, |endpoint| endpoint.config.size())
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        self.comms.first().map_or("", Comm::name)
    }

    /// The rank of a device: `process * devices() + device`.
    ///
    /// # Errors
    /// [`Error::Invalid`] where there is none.
    pub fn rank_of(&self, process: usize, device: usize) -> Result<Rank, Error> {
        let (p, k) = (self.processes(), self.devices());
        if process >= p || device >= k {
            let problem =
                format!("(process {process}, device {device}) is not among {p} processes of {k} devices");
            return Err(Error::invalid("Node::rank_of", problem));
        }
        Ok(process * k + device)
    }

    /// The process and the device of a rank.
    pub fn place_of(&self, rank: Rank) -> Place {
        (rank / self.devices().max(1), rank % self.devices().max(1))
    }

    fn endpoint(&self, device: usize) -> Option<&Arc<Endpoint>> {
        self.comms.get(device).map(|comm| &comm.handle().endpoint)
    }

    fn no_device(&self, call: &str, device: usize) -> Error {
        let k = self.devices();
        Error::invalid(call, format!("device {device} is not in this node of {k}; devices are 0..={}", k - 1))
    }

    /// A device's own communicator, for what one device does alone: its calls count as its part of the order that all
    /// ranks keep.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a device that this node has not.
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
    /// [`Error::Invalid`] for a device that this node has not.
    pub fn stream(&self, device: usize) -> Result<&HostStream, Error> {
        self.streams.get(device).ok_or_else(|| self.no_device("Node::stream", device))
    }

    /// All devices' streams, by device. They are the devices', not the group's: nodes made by [`split`](Self::split) and
    /// [`dup`](Self::dup) have the same.
    pub fn streams(&self) -> &[HostStream] {
        &self.streams
    }

    /// A node of the processes that give the same `color`, with the same devices; processes are ordered by `key`, then by
    /// their number here. Collective: all processes of this group call it.
    ///
    /// # Errors
    /// As a collective.
    pub async fn split(&mut self, color: u64, key: i64) -> Result<Node, Error> {
        let streams = self.streams.clone();
        Node::with_streams(self.split_by(|_| (color, key)).await?, streams)
    }

    /// A second communicator of the same devices, independent of this one. Collective.
    ///
    /// # Errors
    /// As a collective.
    pub async fn dup(&mut self) -> Result<Node, Error> {
        self.split(0, 0).await
    }

    /// Each device's communicator with the devices that give the same color, ordered by key, then by rank: `by` says
    /// (color, key) of each device. For instance one group for each device number, `|device| (device as u64, 0)`, or one
    /// for each process. Collective: all processes of this group call it.
    ///
    /// # Errors
    /// As a collective.
    pub async fn split_by(&mut self, by: impl Fn(usize) -> (u64, i64)) -> Result<Vec<Comm>, Error> {
        let each = self.comms.iter_mut().enumerate().map(|(device, comm)| {
            let (color, key) = by(device);
            comm.split(color, key)
        });
        // To the end of each: peers depend on all of them.
        together(each).await.into_iter().collect()
    }

    /// Goes on without the ranks that are lost; see [`Comm::shrink`]. Processes keep their order, and this one its devices and
    /// streams. A process is lost with all of its devices.
    ///
    /// # Errors
    /// As [`Comm::shrink`]; [`Error::Invalid`] where the survivors are not whole processes.
    pub async fn shrink(mut self) -> Result<(Node, Verdict), Error> {
        let (comms, streams) = (std::mem::take(&mut self.comms), self.streams.clone());
        let shrunk = together(comms.into_iter().map(Comm::shrink)).await;
        let shrunk = shrunk.into_iter().collect::<Result<Vec<_>, Error>>()?;
        // All devices have the same verdict: they are ranks of one group.
        let Some(verdict) = shrunk.first().map(|(_, verdict)| verdict.clone()) else {
            return Err(Error::invalid("Node::shrink", "this node has no devices (a bug)"));
        };
        let node = Node::with_streams(shrunk.into_iter().map(|(comm, _)| comm).collect(), streams)?;
        Ok((node, verdict))
    }

    /// The first cause for which one of the devices' communicators is dead, if one is. They die together.
    ///
    /// # Errors
    /// That cause.
    pub fn check(&self) -> Result<(), Error> {
        self.comms.iter().try_for_each(Comm::check)
    }

    /// Ends this group on all ranks: operations in flight and later calls fail with [`Error::Aborted`], which names this
    /// node's first rank.
    pub fn abort(&self, reason: impl Into<String>) {
        let by = self.endpoint(0).map_or(0, |endpoint| endpoint.config.rank);
        self.fail(&Error::aborted(by, reason));
    }

    fn fail(&self, error: &Error) {
        for comm in &self.comms {
            let endpoint = &comm.handle().endpoint;
            endpoint.fail(error.clone());
            // The caller knows.
            endpoint.tell();
        }
    }

    /// What each device holds for communication right now.
    pub fn stats(&self) -> Vec<Stats> {
        self.comms.iter().map(Comm::stats).collect()
    }

    /// Whether calls of this group are deterministic (the same on all ranks). See [`Call::deterministic`].
    pub fn set_deterministic(&mut self, on: bool) {
        self.comms.iter_mut().for_each(|comm| comm.set_deterministic(on));
    }

    /// Closes all devices' communicators. See [`Comm::close`].
    ///
    /// # Errors
    /// The first of theirs, by device.
    pub async fn close(mut self) -> Result<(), Error> {
        let comms = std::mem::take(&mut self.comms);
        together(comms.into_iter().map(Comm::close)).await.into_iter().collect()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        drop_together(std::mem::take(&mut self.comms));
    }
}
