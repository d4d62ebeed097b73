//! The protocol of a single-producer, single-consumer ring of frames, over any memory.
//!
//! A cell carries a *lap* number beside its frame: the consumer finds a cell ready when it shows the lap it
//! expects, so one cache line carries both the news and the frame. The consumer counts the frames it has
//! released on a line of its own. `tests/loom` runs this very file under loom.

/// Cells of a ring: frames posted and not yet released.
pub(crate) const CELLS: u64 = 16;

/// The released count of a consumer that will not read again.
pub(crate) const CLOSED: u64 = u64::MAX;

/// The memory of a ring. Implementations give the orderings that the names say.
pub(crate) trait RingMemory {
    /// What a cell carries.
    type Frame;
    /// Cells of the ring; fewer only for models.
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

/// Never 0, which is what fresh memory shows.
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

    /// Frames whose cells (and payloads) the consumer is done with.
    pub(crate) fn released(&mut self) -> u64 {
        let seen = self.memory.released_acquire();
        if seen == CLOSED {
            self.released = self.next;
            return self.next;
        }
        // A count that no correct consumer writes is not believed: memory stays lent.
        if seen >= self.released && seen <= self.next {
            self.released = seen;
        }
        self.released
    }

    /// Whether the consumer has said that it will not read again.
    pub(crate) fn is_closed(&self) -> bool {
        self.memory.released_acquire() == CLOSED
    }

    /// Writes and publishes a frame. Only after `room`.
    pub(crate) fn post(&mut self, frame: M::Frame) {
        let number = self.claim();
        publish(&self.memory, number, frame);
    }

    /// Takes the next cell for a frame that is [published](publish) later: frames are published in the order in which their cells were
    /// taken. Only after `room`. Returns the frame's number.
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

    /// Index of the cell at the head, if a frame is there.
    pub(crate) fn head(&self) -> Option<usize> {
        let at = cell::<M>(self.next);
        (self.memory.lap_acquire(at) == lap::<M>(self.next)).then_some(at)
    }

    /// The frame at the head, if one is there.
    pub(crate) fn peek(&self) -> Option<M::Frame> {
        self.head().map(|at| self.memory.read(at))
    }

    /// Gives everything back, also what is still to come: this consumer reads no more.
    pub(crate) fn close(&mut self) {
        self.memory.release(CLOSED);
    }

    /// Gives the head's cell back. Only after `peek` showed a frame.
    pub(crate) fn release(&mut self) {
        let count = self.pass();
        self.memory.release(count);
    }

    /// Goes on to the next cell, while the head's is given back later. Only after `peek` showed a frame. Returns the number of frames that have
    /// been released when it is given back, for [`RingMemory::release`].
    pub(crate) fn pass(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}
