//! Stories: ranks that take turns on one thread, in virtual time, over links that a seed delays. The same seed tells the same
//! story. The memory is real, and the engine is the one that users have; only its links, clock and threads are replaced.

mod stage;
mod survive;
mod told;
