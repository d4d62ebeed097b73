//! What two ranks in two processes tell each other before there are links between their devices ([`super::ipc`]).

use std::sync::Arc;

use super::names::{NAME, read, written};
use super::words::{Inbox, TheirPage};
use crate::device::blocks::Exported;
use crate::device::stream::DeviceStream;
use crate::error::Error;
use crate::link::exit::Exit;
use crate::link::region::Region;
use crate::types::Rank;

/// Bytes of the card that a rank gives to each rank in another process: where its inbox for that rank is, and the name of memory to open as a test.
pub(crate) const CARD: usize = 8 + NAME;

/// What a rank has made for a rank in another process, which gets the card.
pub(crate) struct Offer {
    pub(super) inbox: Arc<Inbox>,
    pub(crate) card: Vec<u8>,
}

impl Offer {
    /// `probe`: the name of some memory of our pool. `region`: our own. `exit`: of the other rank's process.
    pub(crate) fn new(
        stream: &DeviceStream,
        region: &Arc<Region>,
        probe: &Exported,
        exit: Option<Exit>,
    ) -> Result<Offer, Error> {
        let inbox = Arc::new(Inbox::new(stream, region, exit)?);
        let mut card = inbox.offset().to_le_bytes().to_vec();
        card.extend_from_slice(&written(probe));
        Ok(Offer { inbox, card })
    }

    /// Called before the other rank gets the card.
    pub(crate) fn is_told(&self) {
        self.inbox.is_told();
    }
}

/// What a rank in another process has offered on its card.
pub(crate) struct Offered {
    pub(super) rank: Rank,
    /// The name of memory to open as a test.
    pub(super) name: Exported,
    pub(super) page: TheirPage,
}

impl Offered {
    /// Reads the card of rank `rank`, whose region this is. When the result is dropped, that rank sees that its offer is not used any more.
    pub(crate) fn new(rank: Rank, region: Arc<Region>, card: &[u8]) -> Result<Offered, Error> {
        let short = || Error::protocol(rank, format!("a card of {} bytes, not {CARD}", card.len()));
        let (at, name) = card.split_first_chunk::<8>().ok_or_else(short)?;
        let name = read(name.try_into().map_err(|_| short())?);
        Ok(Offered { rank, name, page: TheirPage::new(rank, region, u64::from_le_bytes(*at))? })
    }
}
