//! When an operation is overdue.

use std::time::Duration;

/// How long a rank that stood still itself goes on after a deadline: first it hears what it missed, and asks its peers, before
/// it blames them.
pub(super) fn grace(timeout: Duration) -> Duration {
    Duration::from_millis(200).min(timeout / 4)
}
