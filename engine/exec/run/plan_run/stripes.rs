//! Operations on device memory that is staged, which means copied to the host and back stripe by stripe ([`crate::device::Staged`]): how
//! buffers are cut into stripes, how much input has come, and how much output can leave.
//!
//! In each round the whole plan runs, on one part of every chunk. So the steps can work on the rounds whose input has come while the rest is
//! still being copied, and the rounds whose output is stored can be copied back before the others are done.

use std::ops::Range;

use crate::exec::backend::Slicing;
use crate::exec::operation::Part;
use crate::mem::{ALL, Stripe};
use crate::plan::{Layout, Slot};

/// Bytes of a stripe: so many that copying them takes long compared with starting the copies (tens of microseconds each way), and few
/// compared with an operation that is worth cutting. The best value is still to be measured.
pub(crate) const STRIPE: usize = 8 << 20;

/// A buffer that is staged.
#[derive(Clone, Copy)]
pub(crate) struct StagedBuf {
    /// The part of the operation that it belongs to.
    pub(crate) part: usize,
    /// Its slot in that part's plan.
    pub(crate) slot: Slot,
    pub(crate) bytes: usize,
}

/// Cuts the parts of an operation into stripes; the staged buffers are in the order of their parts.
pub(crate) fn cut(parts: &[Part], items: &[StagedBuf]) -> Vec<Stripe> {
    let (mut stripes, mut pieces, mut bytes) = (Vec::new(), Vec::new(), 0);
    let mut items = items.iter().enumerate().peekable();
    for (p, part) in parts.iter().enumerate() {
        let ours: Vec<_> = std::iter::from_fn(|| items.next_if(|(_, item)| item.part == p)).collect();
        let unit = part.dtype.size();
        let layout = |slot: Slot| part.program.plan.slots[usize::from(slot)];
        let in_one =
            part.pairwise || ours.iter().any(|(_, item)| matches!(layout(item.slot), Layout::Table { .. }));
        if in_one {
            for (i, item) in ours {
                pieces.push((i, 0..item.bytes));
                bytes += item.bytes;
            }
            continue;
        }
        // The byte range of each chunk of each buffer, cut off where the buffer ends.
        let mut chunks = Vec::new();
        for (i, &StagedBuf { slot, bytes: len, .. }) in ours {
            let ranges = (0..layout(slot).chunks()).map(|chunk| part.range(slot, chunk));
            chunks
                .extend(ranges.map(|range| (i, (range.start * unit).min(len)..(range.end * unit).min(len))));
            // No step touches the bytes behind the last chunk.
            pieces.push((i, (part.total(slot) * unit).min(len)..len));
        }
        let round = Slicing::on_host(&part.program).round_of(unit) * unit;
        let longest = chunks.iter().map(|(_, range)| range.len()).max().unwrap_or(0);
        let each: usize = chunks.iter().map(|(_, range)| range.len().min(round)).sum();
        let (rounds, mut from) = (longest.div_ceil(round), 0);
        while from < rounds {
            let fit = STRIPE.saturating_sub(bytes).checked_div(each).unwrap_or(rounds);
            let to = (from + fit.max(1)).min(rounds);
            for (i, range) in &chunks {
                let at = |rounds: usize| (range.start + rounds * round).min(range.end);
                pieces.push((*i, at(from)..at(to)));
                bytes += at(to) - at(from);
            }
            from = to;
            if from < rounds || bytes >= STRIPE {
                let reach = if from == rounds { (p + 1, 0) } else { (p, from) };
                stripes.push(Stripe { pieces: merged(&mut pieces), reach });
                bytes = 0;
            }
        }
    }
    if !pieces.is_empty() || stripes.is_empty() {
        stripes.push(Stripe { pieces: merged(&mut pieces), reach: ALL });
    }
    if let Some(last) = stripes.last_mut() {
        last.reach = ALL;
    }
    stripes
}

/// Takes the pieces, drops the empty ones, and joins those that touch, so that one copy moves them.
fn merged(pieces: &mut Vec<(usize, Range<usize>)>) -> Vec<(usize, Range<usize>)> {
    let mut all = std::mem::take(pieces);
    all.retain(|(_, range)| !range.is_empty());
    all.sort_by_key(|(item, range)| (*item, range.start));
    all.dedup_by(|(item, range), (before, longer)| {
        let touch = item == before && range.start == longer.end;
        if touch {
            longer.end = range.end;
        }
        touch
    });
    all
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::plan::{self, Algo, INPUT, Kind, OUTPUT, Program, Shape};
    use crate::types::DType;

    /// Each byte of each buffer is in exactly one stripe, which comes no later than the first round that touches the byte.
    #[test]
    fn stripes_cover_all_once_and_in_order() {
        let part = |kind, algo, n, count, dtype| {
            let shape = Shape { n, rank: n - 1, ..Shape::default() };
            let program = Program::compile(&plan::plan(kind, algo, &shape).unwrap());
            let program = Arc::new(Program { whole: plan::goes_whole(kind, algo, &shape), ..program });
            let (input, output) = (std::ptr::null(), std::ptr::null_mut());
            Part { program, input, output, count, dtype, tables: None, pairwise: false, stated: None }
        };
        let mib = 1 << 20;
        for (kind, algo) in [
            (Kind::AllReduce, Algo::Ring),
            (Kind::AllReduce, Algo::Direct),
            (Kind::AllGather, Algo::Ring),
            (Kind::ReduceScatter, Algo::Ring),
        ] {
            for n in [2, 3, 8] {
                for counts in
                    [vec![5 * mib + 13], vec![7, 0, 9 * mib, mib / 3, 3 * mib + 1], vec![0], vec![mib; 40]]
                {
                    let of = |count: &usize| part(kind, algo, n, *count, DType::F32);
                    let parts: Vec<Part> = counts.iter().map(of).collect();
                    let total = |p: usize, slot| parts[p].total(slot) * 4;
                    // The last output buffer has a tail that belongs to no chunk.
                    let tail = |p: usize| if p + 1 == parts.len() { 100 } else { 0 };
                    let buf = |part, slot, bytes| StagedBuf { part, slot, bytes };
                    let items: Vec<_> = (0..parts.len())
                        .flat_map(|p| {
                            [buf(p, INPUT, total(p, INPUT)), buf(p, OUTPUT, total(p, OUTPUT) + tail(p))]
                        })
                        .collect();
                    let stripes = cut(&parts, &items);
                    assert_eq!(stripes.last().unwrap().reach, ALL);
                    assert!(stripes.windows(2).all(|pair| pair[0].reach < pair[1].reach));
                    let mut seen: Vec<Vec<Range<usize>>> = vec![Vec::new(); items.len()];
                    for stripe in &stripes {
                        for (i, range) in &stripe.pieces {
                            seen[*i].push(range.clone());
                        }
                        let (all, rounds) = stripe.reach;
                        let round = Slicing::on_host(&parts[0].program).round / 4;
                        for (item, seen) in items.iter().zip(&seen) {
                            let part = &parts[item.part];
                            let layout = part.program.plan.slots[usize::from(item.slot)];
                            for chunk in 0..layout.chunks() {
                                let range = part.range(item.slot, chunk);
                                let come = match item.part.cmp(&all) {
                                    std::cmp::Ordering::Less => range.len(),
                                    std::cmp::Ordering::Equal => range.len().min(rounds * round),
                                    std::cmp::Ordering::Greater => 0,
                                };
                                let (start, end) = (range.start * 4, (range.start + come) * 4);
                                let within =
                                    |r: &Range<usize>| r.end.min(end).saturating_sub(r.start.max(start));
                                let covered: usize = seen.iter().map(within).sum();
                                assert_eq!(covered, end - start, "{kind:?} {n} {counts:?}");
                            }
                        }
                    }
                    for (item, mut seen) in items.iter().zip(seen) {
                        seen.retain(|range| !range.is_empty());
                        seen.sort_by_key(|range| range.start);
                        let end =
                            seen.iter().try_fold(0, |at, range| (range.start == at).then_some(range.end));
                        assert_eq!(end, Some(item.bytes), "{kind:?} {n} {counts:?}");
                    }
                }
            }
        }
    }
}
