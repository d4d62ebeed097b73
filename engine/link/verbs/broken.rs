//! What completions tell: messages that came, and why a link over RDMA broke.

use std::ffi::CStr;

use allstream_sys::verbs::{IbvWc, WcStatus};

use super::card::Card;
use super::queue_pair::RECEIVED;
use crate::link::Break;

/// How many completions a link takes from its queue with one call, at most.
pub(super) const BATCH: usize = 16;

pub(super) fn report(at: &str, peer_at: &str, problem: String) -> Break {
    Break { kind: "RDMA".into(), at: at.to_owned(), peer_at: peer_at.to_owned(), problem }
}

/// What a completion that failed says, in words.
pub(super) fn problem_of(card: &Card, completion: &IbvWc) -> String {
    let verbs = card.domain().verbs;
    // SAFETY: takes any number.
    let text = unsafe { verbs.wc_status_str(completion.status) };
    let text = match text {
        // SAFETY: a text of the library's, which ends in a null byte and lives as long as the library.
        Ok(text) => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        Err(_) => "a failure that the library has no words for".into(),
    };
    let tuning = card.tuning();
    let why = match WcStatus(completion.status) {
        WcStatus::RETRY_EXC_ERR => format!(
            ", as packets were not acknowledged{} (ALLSTREAM_RDMA_TIMEOUT {}, ALLSTREAM_RDMA_RETRY {})",
            if card.events().is_port_down() { " while its port was down" } else { "" },
            tuning.timeout,
            tuning.retry
        ),
        _ => String::new(),
    };
    format!(
        "the network card says `{text}` (status {}, {:#x}){why}",
        completion.status, completion.vendor_err
    )
}

/// How many of these completions were of receive requests that took a message. As many receive requests are to be posted again.
pub(super) fn received(told: &[IbvWc]) -> usize {
    let is_message = |completion: &&IbvWc| {
        completion.wr_id == RECEIVED && WcStatus(completion.status) == WcStatus::SUCCESS
    };
    told.iter().filter(is_message).count()
}
