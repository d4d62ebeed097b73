//! Long operations in segments, on a communicator some of whose ranks stage device buffers: while one segment is on its way
//! between ranks, the next is copied from the device, and the one before to it.
//!
//! Segments are operations one after another, as all ranks see them; the last one owns the buffers.

use std::sync::Arc;

use super::Work;
use super::call::{Call, Spec};
use super::staged::{Memory, NOWHERE, around, places, stage};
use super::work::Restore;
use crate::error::Error;
use crate::exec::{Collective, Reduction, When};
use crate::mem::Held;
use crate::mem::device::{Staged, Turns};
use crate::types::{DType, Kind};

/// Bytes of a segment: long beside what an operation costs, and three of them are all that is pinned.
const SEGMENT: usize = 16 << 20;
/// No operation has more: the queue has an end.
const MOST: usize = 256;

/// What is to be handed in for a segment.
struct Segment {
    collective: Collective,
    when: When,
    /// The memory that it works on.
    staged: Option<Arc<dyn std::any::Any + Send + Sync>>,
}

impl Call<'_> {
    /// Elements of a segment, where a call goes in several: the same answer on all ranks.
    pub(super) fn segment(&self, spec: &Spec, dtype: DType) -> Option<usize> {
        let endpoint = self.side.0;
        let whole = spec.tables.is_some() || spec.pairwise || spec.detail != 0 || self.desk.is_some();
        let kind = matches!(spec.kind, Kind::AllReduce | Kind::Reduce | Kind::Broadcast);
        if !endpoint.is_segmented()
            || endpoint.binding().is_some()
            || whole
            || !kind
            || !matches!(self.reduction, Reduction::Op(_))
        {
            return None;
        }
        let len = (SEGMENT / dtype.size()).max(spec.count.div_ceil(MOST));
        (spec.count > len).then_some(len)
    }

    /// Hands in a call in segments of so many elements.
    #[cold]
    pub(super) fn submit_segments<O, F>(
        &self,
        spec: &Spec,
        (dtype, len): (DType, usize),
        memory: &Memory,
        held: Held,
        restore: Restore<O, F>,
    ) -> Work<O, F> {
        let mut segments = match self.segments(spec, (dtype, len), memory) {
            Ok(segments) => segments,
            Err(error) => return self.hand_in(Err(error), When::default(), held, restore),
        };
        let with = |held: Held, staged| match staged {
            Some(memory) => held.with(memory),
            None => held,
        };
        let last = segments.pop();
        for Segment { collective, when, staged } in segments {
            let none = with(Held::new(()), staged);
            let work = self.hand_in(Ok(collective), when, none, super::restore::nothing);
            // The others' segments would wait for it: all are told that it does not come.
            if let Some(error) = work.refusal().cloned() {
                self.side.0.fail(error.clone());
                return self.hand_in(Err(error), When::default(), held, restore);
            }
        }
        match last {
            Some(Segment { collective, when, staged }) => {
                self.hand_in(Ok(collective), when, with(held, staged), restore)
            }
            None => self.hand_in(Err(no_segments()), When::default(), held, restore),
        }
    }

    /// All are looked at before the first is handed in.
    fn segments(
        &self,
        spec: &Spec,
        (dtype, len): (DType, usize),
        memory: &Memory,
    ) -> Result<Vec<Segment>, Error> {
        let starts = (0..spec.count).step_by(len);
        let (number, mut turns) = (starts.len(), None);
        let segment = |(i, start): (usize, usize)| {
            let count = len.min(spec.count - start);
            let memory = memory.part(start * dtype.size(), count * dtype.size());
            let spec = Spec::of(spec.kind, spec.root, count, spec.in_place);
            let mut collective = self.prepare(spec, dtype, memory.on_host().unwrap_or(NOWHERE))?;
            if memory.on_host().is_some() {
                return Ok(Segment { collective, when: self.when(), staged: None });
            }
            let all = std::slice::from_ref(&memory);
            let mut when = self.when_on_device(collective.call, places(all))?;
            let staged = stage(&mut collective, false, all, |items| {
                let turns = match &turns {
                    Some(turns) => turns,
                    None => turns.insert(Turns::new(&items, number)?),
                };
                Staged::begin_in_turn(turns, i, items)
            })?;
            let memory = staged.memory();
            around(staged, &mut when);
            Ok(Segment { collective, when, staged: Some(memory) })
        };
        starts.enumerate().map(segment).collect()
    }
}

fn no_segments() -> Error {
    Error::system("cut an operation", "it has no segments (a bug)")
}
