//! Stories: ranks that take turns on one thread, in virtual time, over links that a seed delays. The same seed tells the same
//! story, with real memory and the engine as it is: only the links, the clock and the threads are others.

mod stage;
mod survive;
mod told;
