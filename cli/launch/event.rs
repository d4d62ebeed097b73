//! What the launcher hears while a job runs.

/// From the threads that wait, read and take signals, to the one that supervises.
pub(super) enum Event {
    /// A member has ended, or it can no longer be waited for. It is a zombie until `reap`.
    Ended(usize),
    /// An agent is there, and is about to start its ranks. The agent of rank 0 says the port where the world meets.
    Greeted { member: usize, port: u16 },
    /// A signal to this process, or the launcher's to this agent.
    Signal(i32),
    /// The launcher of this agent is gone.
    Cut,
    /// All output has been relayed.
    Relayed,
}
