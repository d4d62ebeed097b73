//! Which communicator an error is about: its members, as ranks of the world, and the file of this rank's flight recorder.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::types::Rank;

/// The members of the communicator that an error is about. In a group a rank is named twice, `rank 0 (world rank 3)`, so that
/// nobody takes it for another rank: the first number is its place in the group, the second its place in the world.
///
/// The members come with the name of the file in which this rank records what was under way ([`Error::record`](super::Error::record)).
///
/// An error has no members until a communicator takes it as its own. Any two values compare equal, so that errors are compared by their
/// other fields. The type is one pointer wide, because the result of every operation has room for an error, and is moved.
#[derive(Clone, Default)]
pub struct Members(Option<Arc<Known>>);

#[derive(Default)]
struct Known {
    /// Empty for the world's own communicator.
    world_ranks: Vec<Rank>,
    record: Option<Arc<RecordFile>>,
}

/// The file of a rank's flight recorder. Errors name the file unless writing it has failed.
#[derive(Debug)]
pub(crate) struct RecordFile {
    path: PathBuf,
    is_lost: AtomicBool,
}

impl RecordFile {
    pub(crate) fn new(path: PathBuf) -> RecordFile {
        RecordFile { path, is_lost: AtomicBool::new(false) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The file could not be written: from now on no error names it.
    pub(crate) fn lose(&self) {
        self.is_lost.store(true, Ordering::Relaxed);
    }
}

impl Members {
    /// The members of the world's own communicator: all ranks of the world, with the same numbers.
    pub(crate) fn world() -> Members {
        Members(Some(Arc::default()))
    }

    /// The members of a group that was made from another communicator.
    pub(crate) fn of_group(world_ranks: &[Rank]) -> Members {
        Members(Some(Arc::new(Known { world_ranks: world_ranks.to_vec(), record: None })))
    }

    /// The same members, with the file of this rank's flight recorder.
    pub(crate) fn recorded_in(self, record: Option<Arc<RecordFile>>) -> Members {
        let world_ranks = self.0.map_or(Vec::new(), |known| known.world_ranks.clone());
        Members(Some(Arc::new(Known { world_ranks, record })))
    }

    /// The file of this rank's flight recorder, if there is one or is to be one.
    pub(super) fn record(&self) -> Option<&Path> {
        let file = self.0.as_ref()?.record.as_deref()?;
        (!file.is_lost.load(Ordering::Relaxed)).then_some(file.path())
    }

    /// The end of an error's text, which says where the flight recorder's file is; empty if there is no file.
    pub(super) fn see_record(&self) -> String {
        self.record().map_or(String::new(), |path| format!(" (flight recorder: {})", path.display()))
    }

    /// Whether these are the members of a communicator, and not unknown.
    pub(super) fn are_known(&self) -> bool {
        self.0.is_some()
    }

    /// Becomes `members` if no communicator is known yet.
    pub(super) fn become_known(&mut self, members: &Members) {
        if self.0.is_none() {
            *self = members.clone();
        }
    }

    /// The world rank of a member. It differs from the member's own rank only in a group.
    pub(super) fn world_rank(&self, rank: Rank) -> Rank {
        self.in_world(rank).unwrap_or(rank)
    }

    /// The second number of a member of a group: its rank in the world. `None` outside groups, and for a number that no member has.
    fn in_world(&self, rank: Rank) -> Option<Rank> {
        self.0.as_ref()?.world_ranks.get(rank).copied()
    }

    /// A member as a text names it: `rank 0`, in a group `rank 0 (world rank 3)`.
    pub(crate) fn rank(&self, rank: Rank) -> NamedRank<'_> {
        NamedRank(self, rank)
    }
}

/// See [`Members::rank`].
pub(crate) struct NamedRank<'a>(&'a Members, Rank);

impl fmt::Display for NamedRank<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.1)?;
        self.0.in_world(self.1).map_or(Ok(()), |world| write!(f, " (world rank {world})"))
    }
}

impl PartialEq for Members {
    fn eq(&self, _: &Members) -> bool {
        true
    }
}

impl Eq for Members {}

impl fmt::Debug for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            None => f.write_str("members that are not known"),
            Some(known) if known.world_ranks.is_empty() => f.write_str("all ranks of the world"),
            Some(known) => write!(f, "world ranks {:?}", known.world_ranks),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, Failed, Lost};

    #[test]
    fn the_first_communicator_that_takes_an_error_names_its_ranks() {
        let group = Members::of_group(&[3, 2, 7]);
        let error = Error::lost(2, Lost::Died);
        let plain = "rank 2 was lost (its connection ended without a goodbye)";
        assert_eq!((error.to_string(), error.world_rank(2)), (plain.to_owned(), 2));
        let of_group = error.clone().among(&group).among(&Members::world());
        assert!(of_group.to_string().starts_with("rank 2 (world rank 7) was lost"), "{of_group}");
        assert_eq!(of_group.world_rank(0), 3);
        let of_world = error.clone().among(&Members::world()).among(&group);
        assert_eq!((of_world.to_string(), of_world.world_rank(2)), (plain.to_owned(), 2));
        assert_eq!(of_world, of_group, "errors are compared by what they say");
        // A number that no member has gets no second number.
        assert_eq!(group.rank(9).to_string(), "rank 9");
    }

    #[test]
    fn an_error_is_no_longer_than_what_is_copied_at_once() {
        // A copy of more than 128 bytes takes more instructions, and every operation makes such copies: an operation on 4 bytes spent 79 of its 5,506
        // instructions on this.
        assert!(size_of::<Error>() <= 128, "{}", size_of::<Error>());
    }

    #[test]
    fn a_failure_shows_itself_as_its_error_does() {
        let failed = Failed { buf: Some(()), error: Error::invalid("send", "no") };
        assert_eq!(
            (format!("{failed:?}"), failed.to_string()),
            ("send: no".to_owned(), "send: no".to_owned())
        );
    }
}
