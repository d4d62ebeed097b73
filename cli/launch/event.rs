//! What other threads tell the launcher while a job runs.

/// An event that the threads which wait for members, read output or take signals send to the thread that supervises.
pub(super) enum Event {
    /// The member with this number has ended, or can no longer be waited for. It stays a zombie until `reap`.
    Ended(usize),
    /// An agent's greeting came: it is about to start its ranks. In that of rank 0's agent, `port` is the port of the rendezvous.
    Greeted { member: usize, port: u16 },
    /// A signal came to this process; in an agent also: the launcher hands this signal to the ranks.
    Signal(i32),
    /// In an agent: the connection to the launcher has ended.
    Cut,
    /// All output has been relayed.
    Relayed,
}
