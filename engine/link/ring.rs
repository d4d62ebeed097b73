//! The protocol of a single-producer, single-consumer ring of frames, over any memory.
//!
//! Beside its frame a cell carries a *lap* number, which counts how often the producer has gone round the ring. A cell is ready when
//! it shows the lap that the consumer has reached, so one cache line carries a frame and the news of it. On another cache line the
//! consumer publishes how many frames it has released. `tests/loom` runs this very file under loom.

/// Cells of a ring: at most this many frames are posted and not yet released.
pub(crate) const CELLS: u64 = 16;

/// What a consumer that will not read again publishes in place of its count of released frames.
pub(crate) const CLOSED: u64 = u64::MAX;

/// The memory of a ring. An implementation uses the memory ordering that the doc of a method names in parentheses.
pub(crate) trait RingMemory {
    /// What a cell carries.
    type Frame;
    /// Cells of the ring. Only the rings that `tests/loom` models have fewer than 16.
    const CELLS: u64 = CELLS;
    /// Lap of a cell (acquire).
    fn lap_acquire(&self, cell: usize) -> u32;
    /// Publishes a cell (release).
    fn publish(&self, cell: usize, lap: u32);
    /// Frames released by the consumer (acquire).
    fn released_acquire(&self) -> u64;
    /// Publishes the count of released frames (release).
    fn release(&self, count: u64);
    /// Writes a frame to a cell that the protocol says is the producer's.
    fn write(&self, cell: usize, frame: Self::Frame);
    /// Reads the frame of a cell that the protocol says is the consumer's.
    fn read(&self, cell: usize) -> Self::Frame;
}

fn cell<M: RingMemory>(index: u64) -> usize {
    (index % M::CELLS) as usize
}

/// The lap number of a frame. It is never 0, because 0 is what a cell of fresh memory shows.
fn lap<M: RingMemory>(index: u64) -> u32 {
    ((index / M::CELLS) % u64::from(u32::MAX)) as u32 + 1
}

/// The sending end.
pub(crate) struct Producer<M> {
    memory: M,
    next: u64,
    released: u64,
}

impl<M: RingMemory> Producer<M> {
    pub(crate) fn new(memory: M) -> Self {
        Producer { memory, next: 0, released: 0 }
    }

    pub(crate) fn memory(&self) -> &M {
        &self.memory
    }

    /// Frames posted so far.
    pub(crate) fn posted(&self) -> u64 {
        self.next
    }

    /// Whether a cell is free.
    pub(crate) fn room(&mut self) -> bool {
        if self.next - self.released < M::CELLS {
            return true;
        }
        self.released() > self.next - M::CELLS
    }

    /// How many frames the consumer is done with, their cells and their payloads.
    pub(crate) fn released(&mut self) -> u64 {
        let seen = self.memory.released_acquire();
        if seen == CLOSED {
            self.released = self.next;
            return self.next;
        }
        // A count that no correct consumer writes is ignored, and what the frames lend stays lent.
        if seen >= self.released && seen <= self.next {
            self.released = seen;
        }
        self.released
    }

    /// Whether the consumer has said that it will not read again.
    pub(crate) fn is_closed(&self) -> bool {
        self.memory.released_acquire() == CLOSED
    }

    /// Writes and publishes a frame. To be called only after `room` has said that a cell is free.
    pub(crate) fn post(&mut self, frame: M::Frame) {
        let number = self.claim();
        publish(&self.memory, number, frame);
    }

    /// Takes the next cell for a frame that the caller [publishes](publish) later, and returns the frame's number. The caller publishes
    /// frames in the order of their numbers. To be called only after `room` has said that a cell is free.
    pub(crate) fn claim(&mut self) -> u64 {
        debug_assert!(self.next - self.released < M::CELLS);
        self.next += 1;
        self.next - 1
    }
}

/// Writes and publishes a frame in the cell that its producer has [claimed](Producer::claim) for it.
pub(crate) fn publish<M: RingMemory>(memory: &M, number: u64, frame: M::Frame) {
    let at = cell::<M>(number);
    memory.write(at, frame);
    memory.publish(at, lap::<M>(number));
}

/// The receiving end.
pub(crate) struct Consumer<M> {
    memory: M,
    next: u64,
}

impl<M: RingMemory> Consumer<M> {
    pub(crate) fn new(memory: M) -> Self {
        Consumer { memory, next: 0 }
    }

    pub(crate) fn memory(&self) -> &M {
        &self.memory
    }

    /// Index of the head, the cell that is to be read next, if a frame is in it.
    pub(crate) fn head(&self) -> Option<usize> {
        let at = cell::<M>(self.next);
        (self.memory.lap_acquire(at) == lap::<M>(self.next)).then_some(at)
    }

    /// The frame in the head, if one is there.
    pub(crate) fn peek(&self) -> Option<M::Frame> {
        self.head().map(|at| self.memory.read(at))
    }

    /// Gives all frames back, also those that are posted later: this consumer reads no more.
    pub(crate) fn close(&mut self) {
        self.memory.release(CLOSED);
    }

    /// Gives the head back, and goes on to the next cell. To be called only after `peek` showed a frame.
    pub(crate) fn release(&mut self) {
        let count = self.pass();
        self.memory.release(count);
    }

    /// Goes on to the next cell without giving the head back. To be called only after `peek` showed a frame. Returns the count that the
    /// caller later passes to [`RingMemory::release`] to give the cell back.
    pub(crate) fn pass(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}
