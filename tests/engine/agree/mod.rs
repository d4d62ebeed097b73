//! `agree`: the same verdict on every survivor, on communicators that live and on dead ones.
//!
//! Ranks are real processes where they are killed or stopped: this binary starts itself again, once per rank. What each
//! rank got is compared here. `ALLSTREAM_TEST_FULL=1` kills coordinators 60 times instead of 30, `all` 200 times.

mod processes;
mod threads;
