//! Operations that one launch folds for all ranks of a communicator. The ranks are all in this process, and share a device.
//!
//! Each rank arrives at the operation (`arrivals.rs`). The last rank to arrive puts three things on rank 0's stream: waits for the inputs
//! of all ranks, a kernel that folds all of their inputs into all of their outputs, and a write of one of each rank's words, which says
//! that the operation is over. All such launches of a communicator go to rank 0's stream, whichever rank puts them there. So none needs a
//! wait for the one before, and a stream that joins an operation before all ranks have called it knows which word will tell it of the end.
//! The ranks' own streams do two things at most for the operation: each scales its rank's input first, if the operation scales inputs, and it
//! writes [`Word::Begun`] behind the events of the buffers' streams, if no [`Word::Input`] stands for these.
//!
//! Whatever ends the communicator cuts the commands of all its ranks in this process, and waits for a command that is being carried out. So
//! once a rank's buffers have come back, no rank launches anything more on them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use allstream_cuda_kernels::Launch;
use allstream_sys::cuda::CuStreamMemOp;

use super::{Binding, DeviceOp, Folds};
use crate::device::arrivals::Arrival;
use crate::device::links::peer::PeerDevice;
use crate::device::links::starts::value;
use crate::device::signal::Word;
use crate::device::stream::{DeviceEvent, DeviceStream};
use crate::error::Error;
use crate::link::waits::{Wait, kept};
use crate::types::Signature;

const DOING: &str = "fold what all ranks lend";

impl PeerDevice {
    /// Whether the launch for all ranks of this operation has come to its end. Costs one load from memory, and no call of the driver.
    pub(super) fn has_ended_for_all(&self, number: u64) -> bool {
        self.words.as_ref().is_ok_and(|words| words.shows(Word::OverForAll, value(number)))
    }

    /// Makes `stream` wait until that launch has come to its end.
    pub(super) fn await_end_for_all(&self, stream: &DeviceStream, number: u64) -> Result<(), Error> {
        let words = self.words.as_ref().map_err(Error::clone)?;
        words.is_awaited_by(stream, [Word::OverForAll].into_iter(), value(number))
    }
}

impl Binding {
    /// Whether all ranks are in this process and share a device, so that one launch may fold for all of them.
    pub(crate) fn has_leader(&self) -> bool {
        self.leader.is_some()
    }

    /// Those of rank 0's stream and this rank's own that will wait for this rank's inputs of an operation: rank 0's if one launch may fold the
    /// operation for all ranks, and this rank's own if that launch is impossible, if the own stream scales the input first, or if no word of the
    /// caller's stream stands for the inputs (`has_input`): then the own stream waits for the inputs, and writes [`Word::Begun`].
    pub(super) fn work_on(&self, folds: &Folds, has_input: bool) -> Vec<DeviceStream> {
        let leader = self.leader.as_ref().filter(|_| folds.may_be_for_all).map(|leader| &leader.stream);
        let waits_first = folds.own_work_is_lent || !has_input;
        let ours =
            Some(&self.ours.stream).filter(|ours| leader.is_none() || waits_first && leader != Some(ours));
        leader.into_iter().chain(ours).cloned().collect()
    }

    /// For rank 0's stream: the writes of a word of each rank, which say that all launches for all ranks up to this operation are over. `None`:
    /// this is another rank, or the communicator has no such launches.
    pub(super) fn over_for_all(&self, number: u64) -> Option<impl Iterator<Item = CuStreamMemOp>> {
        let is_ours = self.leader.as_ref().is_some_and(|leader| Arc::ptr_eq(leader, &self.ours));
        is_ours.then(|| self.ends_for_all(number))
    }

    fn ends_for_all(&self, number: u64) -> impl Iterator<Item = CuStreamMemOp> {
        let pages = self.all.iter().flatten().filter_map(|device| device.words.as_ref().ok());
        pages.map(move |words| words.write(Word::OverForAll, value(number)))
    }

    /// Makes the host write the words that rank 0's stream writes behind the launch for all ranks of this operation. The driver has said that
    /// the stream is past the launch, though no word says so.
    pub(super) fn tell_over_for_all(&self, number: u64) {
        for words in self.all.iter().flatten().filter_map(|device| device.words.as_ref().ok()) {
            words.set(Word::OverForAll, value(number));
        }
        self.ours.commands.wake();
    }
}

impl DeviceOp {
    /// Whether one launch folds the operation for all ranks. Its submission decides that.
    pub(crate) fn is_for_all(&self) -> bool {
        self.is_for_all.get().copied().unwrap_or_default()
    }

    /// Whether this rank has arrived last, and is putting that launch on rank 0's stream now.
    pub(crate) fn is_launching(&self) -> bool {
        self.is_launching.load(Ordering::Relaxed)
    }

    /// The stream on which the operation ends: rank 0's if one launch folds it for all ranks, else this rank's.
    pub(super) fn line(&self) -> &DeviceStream {
        let leader = self.binding.leader.as_ref().filter(|_| self.is_for_all());
        leader.map_or(self.stream(), |leader| &leader.stream)
    }

    /// Appends the command by which this rank arrives at the operation. What multiplies the rank's input first must be among the commands
    /// already. The last rank to arrive calls `fold` with the addresses of all inputs, those of all outputs, and the most blocks that the
    /// kernel may have, and launches what it returns. `[input, output]`: this rank's addresses.
    pub(crate) fn arrives(
        self: &Arc<Self>,
        signature: Signature,
        [input, output]: [u64; 2],
        fold: impl FnOnce(&[u64], &[u64], u32) -> Result<Launch, Error> + Send + 'static,
    ) {
        let operation = self.clone();
        self.binding.ours.commands.put(move || {
            let Some(leader) = &operation.binding.leader else { return Ok(()) };
            let own_work =
                operation.folds.own_work_is_lent.then(|| operation.stream().point()).transpose()?;
            // Weak, as rank 0's `Arrivals` keep this closure until all ranks have arrived, and the operation keeps those `Arrivals`.
            let weak = Arc::downgrade(&operation);
            let is_put = move |end: Option<&DeviceEvent>| {
                let Some(operation) = weak.upgrade() else { return };
                operation.has_waits(operation.line());
                operation.state.lock().end = end.cloned();
            };
            let (rank, number) = (operation.binding.ours.rank(), operation.number());
            let is_put = Box::new(is_put);
            let arrival = Arrival { rank, number, signature, input, output, own_work, is_put };
            let Some(all) = leader.arrivals.arrives(arrival, operation.binding.all.len()) else {
                return Ok(());
            };
            operation.is_launching.store(true, Ordering::Relaxed);
            let launched = operation.launches(leader, all, fold);
            operation.is_launching.store(false, Ordering::Relaxed);
            launched
        });
    }

    /// In a command of the last rank to arrive: puts the operation on rank 0's stream, for all ranks.
    fn launches(
        &self,
        leader: &PeerDevice,
        all: Vec<Arrival>,
        fold: impl FnOnce(&[u64], &[u64], u32) -> Result<Launch, Error>,
    ) -> Result<(), Error> {
        let (stream, number, ours) = (&leader.stream, self.number(), self.binding.ours.rank());
        let mut words = Vec::with_capacity(all.len());
        for (device, arrival) in self.binding.all.iter().flatten().zip(&all) {
            if kept(if device.rank() == ours { Wait::After } else { Wait::Ready }) {
                let problem = "it lends memory for a collective that it has not begun (a bug)";
                let missing = || Error::system("wait for a rank's input", problem);
                words.push(device.wait_for_start(number).ok_or_else(missing)?);
            }
            arrival.own_work.as_ref().map_or(Ok(()), |work| stream.wait_event(work))?;
        }
        stream.put_words("make a stream wait for all ranks' inputs", &mut words)?;
        let ins: Vec<u64> = all.iter().map(|arrival| arrival.input).collect();
        let outs: Vec<u64> = all.iter().map(|arrival| arrival.output).collect();
        // At most as many blocks as the ranks could launch in all, if each launched a kernel for its own chunk.
        let launch = fold(&ins, &outs, stream.ctas().saturating_mul(all.len() as u32))?;
        // SAFETY: each rank's input and output are its buffers, or a region of its operation's workspace. They are memory of this one
        // device, and of the length on which all ranks' signatures agree. The in-flight tables own the buffers until the word says that the
        // operation has ended. The stream has been made to wait for the streams that used the buffers before: by the words, and by the
        // event behind what a rank's own stream writes to its input. Nobody else touches the memory meanwhile: a rank's own work on it
        // comes before the rank arrives, and no peer uses what the rank lends, as this launch folds for all. Once the communicator has
        // failed, either this command is not begun, or whoever gives buffers back waits until it has been carried out
        // (`Binding::is_touched`), and then for this stream.
        unsafe { stream.launch(DOING, &launch) }?;
        let mut words: Vec<_> = self.binding.ends_for_all(number).collect();
        stream.put_words("end a collective", &mut words)?;
        let end = if stream.is_alone() { None } else { Some(stream.point()?) };
        all.into_iter().for_each(|arrival| (arrival.is_put)(end.as_ref()));
        self.binding.has_put(number, self.binding.all.iter().flatten());
        Ok(())
    }
}
