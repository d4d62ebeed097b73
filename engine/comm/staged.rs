//! Operations on device buffers: on the rank's device, or staged on the host.

use std::sync::Arc;

use allstream_cuda_kernels::MAX_INS;

use super::call::Call;
use super::memory::Memory;
use super::ordered::Start;
use super::work::Submitted;
use crate::commands::Commands;
use crate::device::carriers::{OnDevice, OnHost, bound_to};
use crate::device::copied::Copied;
use crate::device::current::keep;
use crate::device::operation::{Binding, DeviceOp, Folds, Needs};
use crate::device::whole::{BoundWhole, MessagePath};
use crate::device::workspace::Workspace;
use crate::device::{Device, DevicePlace, DeviceStream, Item, Staged, refused_in_capture};
use crate::error::Error;
use crate::exec::carrier::{Carried, Carrier};
use crate::exec::{Direction, EAGER, Operation, Reduction, STRIPE, StagedBuf, cut};
use crate::mem::{ALL, DeviceMemory, ErasedBufs, Event, RawBuf, Stripe, Where};
use crate::plan::{INPUT, OUTPUT, Slot};
use crate::types::{ON_DEVICES, Rank};

impl Call<'_> {
    /// Makes an operation on device memory start after what the call names (`on`, `after`): makes the buffers' streams wait for
    /// that, too.
    fn start_on_devices<'m>(
        &self,
        call: &str,
        places: impl Iterator<Item = &'m DeviceMemory> + Clone,
    ) -> Result<(), Error> {
        // An error if it is known already that a buffer's contents are invalid, as a collective that was to write them has failed.
        places.clone().try_for_each(DeviceMemory::check)?;
        match &self.after {
            None => Ok(()),
            Some(Start::Host(_)) => {
                let problem = "after(..), and on(..) with a host stream, are for host buffers only: an operation on a device buffer \
                               starts after what its own stream holds, and on(..) with a device stream adds to that";
                Err(Error::invalid(call, problem))
            }
            Some(Start::Failed(error)) => Err(error.clone()),
            Some(Start::Device(event)) => {
                // A captured stream that waits for something outside the capture breaks the capture. A refusal leaves it whole.
                places.clone().try_for_each(|place| refused_in_capture(&place.stream(), call))?;
                for place in places {
                    place.stream().wait_event(event)?;
                }
                Ok(())
            }
        }
    }

    /// Submits a collective on `memory`, some of which is on devices.
    #[cold]
    pub(super) fn hand_in_staged(
        &self,
        prepared: Result<Operation, Error>,
        varied: bool,
        memory: Vec<Memory>,
        held: ErasedBufs,
    ) -> Submitted {
        let unfit = memory.iter().find_map(Memory::unfit);
        let mut prepared = prepared.and_then(|operation| match unfit {
            None => Ok(operation),
            Some(why) => Err(Error::invalid(operation.call, why)),
        });
        if let Some((binding, whole)) = self.binding(&mut prepared) {
            return self.hand_in_on_device((binding, whole), prepared, varied, memory, held);
        }
        let staged = prepared.and_then(|mut operation| {
            self.start_on_devices(operation.call, places(&memory))?;
            let staged = stage(&mut operation, varied, &memory, &self.side.0.commands)?;
            let carrier = Some(Arc::new(OnHost(staged.clone())) as _);
            Ok((Carried { operation, carrier }, staged))
        });
        match staged {
            Ok((carried, staged)) => self.hand_in(Ok(carried), staged.ready(), held.with(staged.memory())),
            Err(error) => self.hand_in(Err(error), None, held),
        }
    }

    /// The binding whose device is to run an operation, and the library that is to take the operation whole, if one is. `None`: the operation
    /// is staged, or refused already. The answer is the same on all ranks.
    fn binding(&self, prepared: &mut Result<Operation, Error>) -> Option<(Arc<Binding>, Option<BoundWhole>)> {
        let binding = bound_to(self.side.0)?.binding.as_ref()?;
        let operation = prepared.as_mut().ok()?;
        if let Some(whole) = binding.whole.as_ref().filter(|whole| self.goes_whole(operation, whole)) {
            return Some((binding.clone(), Some(whole.clone())));
        }
        let runs = matches!(operation.reduction, Reduction::Op(_)) && self.size() <= MAX_INS;
        (runs && binding.reaches).then(|| (binding.clone(), None))
    }

    /// Submits a collective on memory of this rank's device. The device runs it, or a library takes it whole.
    fn hand_in_on_device(
        &self,
        (binding, whole): (Arc<Binding>, Option<BoundWhole>),
        prepared: Result<Operation, Error>,
        varied: bool,
        memory: Vec<Memory>,
        held: ErasedBufs,
    ) -> Submitted {
        let (endpoint, mut held_up) = (self.side.0, None);
        let prepare = |mut operation: Operation| {
            if operation.then.is_some() {
                // The memory that the parts need is got at the call, so all parts must be known by then.
                let problem = "an operation of two halves does not run on devices (a bug)";
                return Err(Error::system(operation.call, problem));
            }
            self.start_on_devices(operation.call, places(&memory))?;
            let placed = place(&mut operation, &binding, (whole.is_none(), varied), &memory)?;
            let outputs = memory.iter().filter_map(|memory| memory.output.fate().cloned()).collect();
            for memory in &memory {
                if let (Some(input), Some(output)) =
                    (memory.input.as_ref().and_then(RawBuf::fate), memory.output.fate())
                {
                    output.depend_like(input);
                }
            }
            // If there is no memory, say, the error waits until the operation begins: then it ends the communicator, and all ranks hear of it.
            let workspace = match &whole {
                None => binding.get_ready(&mut operation),
                Some(bound) => {
                    if let Err(error) = self.get_ready_whole(&mut operation, bound, &binding.ours.stream) {
                        tracing::debug!("an operation was not made ready at its call: {error}");
                    }
                    Workspace::new(&binding.ours.stream, std::iter::empty(), 0)
                }
            };
            let (copied, workspace) = match placed.copied {
                Ok(copied) => (copied, workspace.map(Arc::new)),
                Err(error) => (Vec::new(), Err(error)),
            };
            operation.signature.kind |= ON_DEVICES;
            let library = whole.as_ref().map(|bound| bound.whole.clone());
            let folds = if whole.is_some() { Folds::default() } else { binding.folds(&mut operation) };
            let needs = Needs { workspace, copied, folds };
            binding.find_held_up(&placed.streams, endpoint.config.rank).inspect_err(|error| {
                held_up = Some(error.clone());
            })?;
            let device = Arc::new(DeviceOp::new(binding, placed.streams, outputs, library, needs)?);
            let weak = Arc::downgrade(endpoint);
            device.watch_inputs(endpoint.config.rank, move |error| {
                if let Some(endpoint) = weak.upgrade() {
                    endpoint.fail(error);
                    endpoint.tell();
                }
            });
            if let Some(bound) = whole {
                return self.made_whole(operation, &bound, Some(device));
            }
            Ok(Carried { operation, carrier: Some(Arc::new(OnDevice(device))) })
        };
        // `prepare` calls the driver several times: the device's context stays current from one call to the next.
        let prepared = prepared.and_then(|operation| keep(|| prepare(operation)));
        if let Some(error) = held_up {
            endpoint.fail(error);
            endpoint.tell();
        }
        self.hand_in(prepared, None, held)
    }

    /// What moves a message between this buffer on a device and another rank, if a library does that. `None`: the message is staged, if it is
    /// on a device at all.
    pub(super) fn message_path(&self, peer: Rank, buf: &RawBuf) -> Option<Result<Arc<MessagePath>, Error>> {
        let (endpoint, bound) = (self.side.0, bound_to(self.side.0)?);
        // Messages of up to `EAGER` bytes are sent before their receive is posted. If a library moved them, they would wait for the receive.
        let place = buf.device_memory().filter(|_| buf.bytes() > EAGER && peer != self.rank())?;
        let moves = bound.binding.is_some() && bound.whole.as_ref()?.whole.moves_messages();
        moves.then(|| bound.message_path(endpoint, &place.stream()))
    }

    /// The event that a message which a library moves starts after: the buffer's stream has done all that it holds at this call. The host waits for
    /// that event, as it waits for the copies of a staged message.
    pub(super) fn launched_message(
        &self,
        direction: Direction,
        memory: &DeviceMemory,
        path: &MessagePath,
    ) -> Result<Event, Error> {
        let call = direction.name();
        self.start_on_devices(call, [memory].into_iter())?;
        let stream = memory.stream();
        check_device(call, &stream, &path.stream.device())?;
        refused_in_capture(&stream, call)?;
        Ok(stream.point()?.on_host())
    }

    /// Stages a message: begins the copies of a send to the host, or gets the host memory of a receive. Also returns the carrier, which copies
    /// the results of a receive back.
    #[cold]
    pub(super) fn stage_message(
        &self,
        direction: Direction,
        memory: &DeviceMemory,
        bytes: usize,
    ) -> Result<(Arc<Staged>, Arc<dyn Carrier>), Error> {
        self.start_on_devices(direction.name(), [memory].into_iter())?;
        let (fill, back) = (direction == Direction::Send, direction == Direction::Recv);
        let stripe = |from: usize| {
            let to = bytes.min(from + STRIPE);
            Stripe { pieces: vec![(0, from..to)], reach: if to == bytes { ALL } else { (0, to) } }
        };
        let stripes = (0..bytes.max(1)).step_by(STRIPE).map(stripe).collect();
        let items = vec![Item { place: memory.into(), bytes, fill, back }];
        let staged = Staged::begin(items, stripes, &self.side.0.commands)?;
        Ok((staged.clone(), Arc::new(OnHost(staged))))
    }
}

/// An error unless a buffer, whose own stream is `stream`, is on the device that this rank is bound to (`ours`).
fn check_device(call: &str, stream: &DeviceStream, ours: &Device) -> Result<(), Error> {
    let device = stream.device();
    if device == *ours {
        return Ok(());
    }
    Err(Error::invalid(call, format!("a buffer is on {device:?}, and this rank is bound to {ours:?}")))
}

/// The memory of each buffer that is on a device.
fn places(memory: &[Memory]) -> impl Iterator<Item = &DeviceMemory> + Clone {
    memory
        .iter()
        .flat_map(|memory| memory.input.iter().chain([&memory.output]))
        .filter_map(RawBuf::device_memory)
}

/// What [`place`] finds out about the buffers of an operation on this rank's device.
struct Placed {
    /// The streams of the buffers, each once.
    streams: Vec<DeviceStream>,
    /// Copies of the buffers that the devices of other ranks cannot touch. An error: there was no memory for one of them.
    copied: Result<Vec<Copied>, Error>,
}

/// Gives the parts their addresses on the device. `is_lent`: the devices of other ranks touch the buffers, so the parts get a copy of each
/// buffer that those cannot touch. `varied`: an output may have elements between its blocks, which must keep their values.
fn place(
    operation: &mut Operation,
    binding: &Binding,
    (is_lent, varied): (bool, bool),
    memory: &[Memory],
) -> Result<Placed, Error> {
    let (call, device) = (operation.call, binding.ours.stream.device());
    let mut placed = Placed { streams: Vec::new(), copied: Ok(Vec::new()) };
    let mut at = |end: &RawBuf, used: (bool, bool)| {
        let place = match &end.place.0 {
            // A buffer without elements may be on the host: that of a rank whose input or output is not used.
            Where::Host(start) if end.bytes() == 0 => return Ok(*start),
            Where::Host(_) => {
                let problem = format!(
                    "one buffer is on a device and another on the host; this communicator is bound to {device:?}, and a \
                     call on it has buffers of one kind"
                );
                return Err(Error::invalid(call, problem));
            }
            Where::Device(memory) => DevicePlace::from(memory),
            Where::Unfit(why) => return Err(Error::invalid(call, *why)),
        };
        check_device(call, &place.stream, &device)?;
        let mut address = place.address;
        if is_lent
            && end.bytes() > 0
            && let Some(why) = binding.cannot_lend(&place, end.bytes())?
        {
            binding.copies(end.bytes(), why);
            if let Ok(all) = &mut placed.copied {
                match Copied::new(&binding.ours.stream, place.address, end.bytes(), used) {
                    Ok(copied) => {
                        address = copied.address();
                        all.push(copied);
                    }
                    Err(error) => placed.copied = Err(error),
                }
            }
        }
        if !placed.streams.contains(&place.stream) {
            refused_in_capture(&place.stream, call)?;
            placed.streams.push(place.stream.clone());
        }
        Ok(std::ptr::without_provenance_mut(address as usize))
    };
    let (signature, scale, reduction) = (operation.signature, operation.scale, operation.reduction.clone());
    for (part, memory) in operation.parts.all().iter_mut().zip(memory) {
        let writes = part.leaves_result(&signature, part.factor(scale, &reduction).is_some());
        let fills = memory.input.is_none() || varied;
        part.output = at(&memory.output, (fills, writes))?;
        part.input = match &memory.input {
            Some(input) => at(input, (true, false))?,
            None => part.output,
        };
    }
    Ok(placed)
}

/// Starts the copies to the host, and gives the parts the addresses of these copies.
fn stage(
    operation: &mut Operation,
    varied: bool,
    memory: &[Memory],
    commands: &Arc<Commands>,
) -> Result<Arc<Staged>, Error> {
    let (mut items, mut slots) = (Vec::new(), Vec::new());
    let mut add = |(part, slot): (usize, Slot), end: &RawBuf, fill: bool, back: bool| match &end.place.0 {
        Where::Host(at) => Err(*at),
        // `hand_in_staged` has refused such memory before.
        Where::Unfit(_) => Err(std::ptr::null_mut()),
        Where::Device(memory) => {
            items.push(Item { place: memory.into(), bytes: end.bytes(), fill, back });
            slots.push(StagedBuf { part, slot, bytes: end.bytes() });
            Ok(items.len() - 1)
        }
    };
    let mut ends = Vec::with_capacity(memory.len());
    let signature = operation.signature;
    for (p, (part, memory)) in operation.parts.all().iter().zip(memory).enumerate() {
        let writes =
            part.leaves_result(&signature, part.factor(operation.scale, &operation.reduction).is_some());
        ends.push(match &memory.input {
            None => (None, add((p, OUTPUT), &memory.output, true, writes)),
            // A varied output may have elements between its blocks, which must keep their values: so it is copied to the host first.
            Some(input) => {
                (Some(add((p, INPUT), input, true, false)), add((p, OUTPUT), &memory.output, varied, writes))
            }
        });
    }
    let staged = Staged::begin(items, cut(operation.parts.all(), &slots), commands)?;
    let at = |end: Result<usize, *mut u8>| end.map_or_else(|host| host, |item| staged.at(item));
    for (part, (input, output)) in operation.parts.all().iter_mut().zip(ends) {
        part.output = at(output);
        part.input = input.map_or(part.output, at).cast_const();
    }
    Ok(staged)
}
