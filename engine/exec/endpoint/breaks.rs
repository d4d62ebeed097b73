//! What becomes of a data connection that broke.
//!
//! The end that notices cannot know why. Its peer may have died, which breaks its data connections often before the control
//! connection tells of the death; it may have ended the communicator, in peace or for a cause that is on its way; or it
//! lives and waits, and the network is at fault. So the end that notices asks its peer over the control connection
//! ([`Message::Broke`](crate::group::message::Message::Broke)), and judges nothing itself. A dead peer does not answer: its
//! death is told instead. One that has ended the communicator says the cause, or nothing if there is none. Only one that is
//! still a member declares the link broken; it aborts the communicator, and so all members hear of it.

use std::sync::Arc;

use super::Endpoint;
use super::run::Run;
use crate::error::{Error, Members};
use crate::link::Break;
use crate::types::Rank;

impl Run {
    /// Asks peers about the connections that broke. Links for devices have none.
    pub(super) fn ask_about_breaks(&mut self, of: &Endpoint) {
        let control = &of.config.control;
        for (peer, what) in self.port.breaks().chain(self.messages.port().breaks()) {
            control.broke(of, peer, what);
        }
    }
}

impl Endpoint {
    /// A peer found a connection with this rank broken. If this rank is a member as before, that is the end of the
    /// communicator. Returns by what it ended, then or before.
    pub(crate) fn peer_broke(self: &Arc<Self>, peer: Rank, what: Break) -> Option<Error> {
        if !self.health.has_ended() {
            let Break { kind, at, peer_at, problem } = what;
            let members = Members::default();
            self.fail(Error::Link {
                kind,
                rank: peer,
                at,
                peer: self.config.rank,
                peer_at,
                problem,
                members,
            });
        }
        self.health.first_cause().cloned()
    }
}
