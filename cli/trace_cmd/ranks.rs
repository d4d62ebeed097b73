//! How ranks are named in texts.

pub(super) fn it(ranks: &[usize]) -> &'static str {
    if ranks.len() == 1 { "it" } else { "them" }
}

pub(super) fn name_ranks(ranks: &[usize]) -> String {
    let list = list(ranks);
    if ranks.len() == 1 { format!("rank {list}") } else { format!("ranks {list}") }
}

/// `0-3,7`: runs of three and more are shortened.
pub(super) fn list(ranks: &[usize]) -> String {
    let mut parts: Vec<String> = Vec::new();
    for run in ranks.chunk_by(|a, b| *b == *a + 1) {
        match run {
            [first, .., last] if run.len() > 2 => parts.push(format!("{first}-{last}")),
            _ => parts.extend(run.iter().map(usize::to_string)),
        }
    }
    parts.join(",")
}
