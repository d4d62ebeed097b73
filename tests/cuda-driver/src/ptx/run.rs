//! Running a kernel: block after block, thread after thread.

use std::sync::Arc;

use super::{Entry, LANE, LOCAL, SPECIAL, Slot, Space, Step, alu};
use crate::codes::{Code, Done};
use crate::space::Memory;

/// Memory that a kernel may use.
pub(crate) struct View {
    pub(crate) base: u64,
    pub(crate) size: u64,
    /// The address at which this process can access it.
    pub(crate) real: usize,
    /// Keeps the memory mapped, and tells whether it was freed.
    pub(crate) memory: Option<Arc<Memory>>,
}

/// A launch.
pub(crate) struct Launch<'a> {
    pub(crate) entry: &'a Entry,
    /// Addresses of the module's variables.
    pub(crate) globals: &'a [u64],
    pub(crate) params: &'a [u8],
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    /// How many instructions the launch may take.
    pub(crate) budget: u64,
    /// Whether the lowest bit of every value that it stores is flipped.
    pub(crate) spoiled: bool,
    /// The memory at an address, if the context reaches it.
    pub(crate) find: &'a dyn Fn(u64) -> Option<View>,
    /// Whether somebody still wants the result.
    pub(crate) wanted: &'a dyn Fn() -> bool,
}

/// After so many instructions `Launch::wanted` is asked whether to go on.
const LOOK: u64 = 1 << 16;

struct Machine<'a> {
    launch: &'a Launch<'a>,
    slots: Vec<u64>,
    local: Vec<u64>,
    views: Vec<View>,
    /// For each step, the index of the view that it used last.
    hints: Vec<usize>,
    left: u64,
    /// Bytes that were read and written, without parameters and local memory.
    moved: u64,
}

/// Runs a launch to its end; gives how many bytes of memory it has read and written together.
pub(crate) fn run(launch: &Launch<'_>) -> Done<u64> {
    let entry = launch.entry;
    let mut machine = Machine {
        launch,
        slots: vec![0x5eed_5eed_5eed_5eed; entry.slots],
        local: vec![u64::MAX; entry.local.div_ceil(8)],
        views: Vec::new(),
        hints: vec![0; entry.steps.len()],
        left: launch.budget,
        moved: 0,
    };
    for (slot, constant) in &entry.constants {
        machine.slots[*slot as usize] = match constant {
            super::Constant::Value(value) => *value,
            super::Constant::Global(index) => launch.globals.get(*index).copied().unwrap_or(0),
        };
    }
    for axis in 0..3 {
        machine.special(1, axis, launch.block[axis]);
        machine.special(3, axis, launch.grid[axis]);
    }
    each(
        launch.grid,
        |machine, block| {
            (0..3).for_each(|axis| machine.special(2, axis, block[axis]));
            each(launch.block, Machine::thread, machine)
        },
        &mut machine,
    )?;
    Ok(machine.moved)
}

/// All points of a box, the first axis fastest.
fn each<'a>(
    size: [u32; 3],
    mut visit: impl FnMut(&mut Machine<'a>, [u32; 3]) -> Done,
    machine: &mut Machine<'a>,
) -> Done {
    for z in 0..size[2] {
        for y in 0..size[1] {
            for x in 0..size[0] {
                visit(machine, [x, y, z])?;
            }
        }
    }
    Ok(())
}

impl Machine<'_> {
    fn special(&mut self, group: usize, axis: usize, value: u32) {
        self.slots[SPECIAL as usize + group * 3 + axis] = value.into();
    }

    fn get(&self, slot: Slot) -> u64 {
        self.slots[slot as usize]
    }

    fn set(&mut self, slot: Slot, value: u64) {
        self.slots[slot as usize] = value;
    }

    fn thread(&mut self, thread: [u32; 3]) -> Done {
        (0..3).for_each(|axis| self.special(0, axis, thread[axis]));
        let [width, height, _] = self.launch.block;
        self.set(LANE, u64::from((thread[2] * height + thread[1]) * width + thread[0]) % 32);
        let steps = &self.launch.entry.steps[..];
        let mut at = 0;
        loop {
            let here = at;
            let inst = &steps[here];
            at += 1;
            if self.left.is_multiple_of(LOOK) && !(self.launch.wanted)() {
                // The context has failed or ended before; that error stays the context's, not this one.
                return Err(Code::CONTEXT_IS_DESTROYED);
            }
            self.left = self.left.checked_sub(1).ok_or(Code::LAUNCH_TIMEOUT)?;
            if self.get(inst.guard) & 1 != inst.wanted {
                continue;
            }
            match &inst.step {
                Step::Alu { run, to, from } => {
                    let value = run(self.get(from[0]), self.get(from[1]), self.get(from[2]));
                    self.set(*to, value);
                }
                Step::Compare { run, to, contrary, from, combine, with, with_not } => {
                    let result = run(self.get(from[0]), self.get(from[1]), 0);
                    let with = self.get(*with) ^ with_not;
                    self.set(*to, combine(result, with, 0) & 1);
                    self.set(*contrary, combine(result ^ 1, with, 0) & 1);
                }
                Step::Load { space, size, count, extend, to, base, offset } => {
                    let address = self.get(*base).wrapping_add_signed(*offset);
                    let values = match space {
                        Space::Param => self.param(address, *size, *count)?,
                        Space::Memory => {
                            let place = self.place(here, address, size * count)?;
                            read(place, *size, *count)
                        }
                    };
                    for (slot, value) in to.iter().zip(values).take((*count).into()) {
                        self.set(*slot, extend(value, 0, 0));
                    }
                }
                Step::Store { size, count, from, base, offset } => {
                    let address = self.get(*base).wrapping_add_signed(*offset);
                    let place = self.place(here, address, size * count)?;
                    let spoil = u64::from(self.launch.spoiled);
                    write(place, *size, *count, from.map(|slot| self.get(slot) ^ spoil));
                }
                Step::Pack { bits, count, to, from } => {
                    let mask = u64::MAX >> (64 - bits);
                    let parts = from.iter().take((*count).into()).zip((0..).step_by((*bits).into()));
                    let value =
                        parts.fold(0, |value, (slot, shift)| value | (self.get(*slot) & mask) << shift);
                    self.set(*to, value);
                }
                Step::Unpack { bits, count, to, from } => {
                    let (mask, value) = (u64::MAX >> (64 - bits), self.get(*from));
                    for (slot, shift) in to.iter().take((*count).into()).zip((0..).step_by((*bits).into())) {
                        self.set(*slot, value >> shift & mask);
                    }
                }
                Step::Lookup { table, to, from } => {
                    let [a, b, c] = from.map(|slot| self.get(slot));
                    self.set(*to, alu::lookup(a, b, c, *table));
                }
                Step::Convert { how, to, from } => self.set(*to, how.run(self.get(*from))),
                Step::Branch(target) => at = *target as usize,
                Step::Exit => return Ok(()),
                Step::Trap => return Err(Code::ILLEGAL_INSTRUCTION),
            }
        }
    }

    fn param(&self, address: u64, size: u8, count: u8) -> Done<[u64; 4]> {
        let at = usize::try_from(address).ok().filter(|at| at.checked_add(16).is_some());
        let bytes = at.and_then(|at| self.launch.params.get(at..at + usize::from(size * count)));
        let mut values = [0; 4];
        for (value, bytes) in
            values.iter_mut().zip(bytes.ok_or(Code::ILLEGAL_ADDRESS)?.chunks_exact(size.into()))
        {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            *value = u64::from_le_bytes(word);
        }
        Ok(values)
    }

    /// Where this process can access the `size` bytes at an address, if a thread may use them.
    fn place(&mut self, step: usize, address: u64, size: u8) -> Done<*mut u8> {
        let size = u64::from(size);
        if address & (size - 1) != 0 {
            return Err(Code::MISALIGNED_ADDRESS);
        }
        self.moved += size;
        let hint = self.hints[step];
        if let Some(place) = self.views.get(hint).and_then(|view| view.place(address, size)) {
            return place;
        }
        if let Some((hint, place)) =
            self.views.iter().enumerate().find_map(|(hint, view)| Some((hint, view.place(address, size)?)))
        {
            self.hints[step] = hint;
            return place;
        }
        let inside = address.wrapping_sub(LOCAL);
        if inside.saturating_add(size) <= self.local.len() as u64 * 8 {
            self.moved -= size;
            return Ok(self.local.as_mut_ptr().cast::<u8>().wrapping_add(inside as usize));
        }
        let view = (self.launch.find)(address).ok_or(Code::ILLEGAL_ADDRESS)?;
        let place = view.place(address, size).ok_or(Code::ILLEGAL_ADDRESS)?;
        self.hints[step] = self.views.len();
        self.views.push(view);
        place
    }
}

impl View {
    /// `None` if the view does not hold the bytes; an error if its memory was freed.
    fn place(&self, address: u64, size: u64) -> Option<Done<*mut u8>> {
        let inside = address.wrapping_sub(self.base);
        if inside >= self.size || self.size - inside < size {
            return None;
        }
        if self.memory.as_ref().is_some_and(|memory| memory.is_freed()) {
            return Some(Err(Code::ILLEGAL_ADDRESS));
        }
        Some(Ok((self.real + inside as usize) as *mut u8))
    }
}

macro_rules! access {
    ($size:expr, |$type:ident| $run:expr) => {
        match $size {
            1 => {
                type $type = u8;
                $run
            }
            2 => {
                type $type = u16;
                $run
            }
            4 => {
                type $type = u32;
                $run
            }
            _ => {
                type $type = u64;
                $run
            }
        }
    };
}

#[allow(clippy::unnecessary_cast, reason = "one text for all widths")]
fn read(place: *mut u8, size: u8, count: u8) -> [u64; 4] {
    let mut values = [0; 4];
    access!(size, |T| for (index, value) in values.iter_mut().take(count.into()).enumerate() {
        // SAFETY: `Machine::place` gave a place of `size * count` bytes, aligned for the type, in local memory or in memory that
        // its view keeps mapped; volatile, as others may write it at any time.
        *value = unsafe { place.cast::<T>().add(index).read_volatile() } as u64;
    });
    values
}

fn write(place: *mut u8, size: u8, count: u8, values: [u64; 4]) {
    access!(size, |T| for (index, value) in values.iter().take(count.into()).enumerate() {
        // SAFETY: as for `read`.
        unsafe { place.cast::<T>().add(index).write_volatile(*value as T) };
    });
}
