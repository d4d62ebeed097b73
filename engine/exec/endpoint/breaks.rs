//! What becomes of a data connection that broke.
//!
//! The rank that notices cannot know why the connection broke. Its peer may have died, which often breaks data connections
//! before the control connection tells of the death. The peer may have ended the communicator, in peace or for a cause that
//! is on its way. Or the peer lives and waits, and the network is at fault. So the rank that notices asks its peer over the
//! control connection ([`Message::Broke`](crate::group::message::Message::Broke)), and decides nothing itself. A dead peer
//! does not answer; then the control connection tells of its death. A peer that has ended the communicator answers with the cause,
//! if there is one. Only a peer that is still a member declares the link broken: it aborts the communicator, so all members hear of it.

use std::sync::Arc;

use super::Endpoint;
use super::progress::Run;
use crate::error::{Error, Members};
use crate::link::Break;
use crate::types::Rank;

impl Run {
    /// Asks peers about the connections that broke. Links between devices have no connections that could break.
    pub(super) fn ask_about_breaks(&mut self, of: &Endpoint) {
        let control = &of.config.control;
        for (peer, what) in self.port.breaks().chain(self.messages.port().breaks()) {
            control.broke(of, peer, what);
        }
    }
}

impl Endpoint {
    /// A peer found a connection with this rank broken. If this rank is still a member, it aborts the communicator. Returns
    /// the cause by which the communicator ended, now or before, if there is one.
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
