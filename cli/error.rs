//! What commands fail with.

/// Any error, for the user to read.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;
