//! Collectives on bytes whose number the receivers need not know: each is one operation of two halves, first the lengths, then the bytes.

use std::ops::Range;
use std::sync::Arc;

use super::Work;
use super::call::{Call, Spec, program};
use super::node::calls::collectives;
use super::restore::{lost, settle};
use crate::error::{Error, Failed, Outcome};
use crate::exec::{Endpoint, Part, Then};
use crate::mem::{ErasedBufs, zeroes};
use crate::plan;
use crate::types::{DType, Kind, Rank, Tables, digest};

/// What a collective on bytes owns while it is in flight.
struct Bytes {
    /// The number of bytes of each rank, by rank; in a broadcast that of the root alone.
    lengths: Vec<u64>,
    mine: Vec<u8>,
    all: Vec<u8>,
}

fn broadcast(result: Outcome, held: Option<ErasedBufs>) -> Result<Vec<u8>, Failed<Vec<u8>>> {
    settle(result, held.and_then(ErasedBufs::take::<Bytes>).map(|bytes| bytes.mine))
}

fn gathered(result: Outcome, held: Option<ErasedBufs>) -> Result<Vec<Vec<u8>>, Failed<Vec<u8>>> {
    match (result, held.and_then(ErasedBufs::take::<Bytes>)) {
        (Ok(()), Some(bytes)) => {
            let mut rest = &bytes.all[..];
            let mut next = |len: &u64| {
                let (one, after) = rest.split_at((*len as usize).min(rest.len()));
                rest = after;
                one.to_vec()
            };
            Ok(bytes.lengths.iter().map(&mut next).collect())
        }
        (result, bytes) => Err(Failed { buf: bytes.map(|b| b.mine), error: lost(result) }),
    }
}

/// Makes the vector `len` bytes long, with unspecified contents. An error if there is no memory for so many bytes, or if `len` is `None`: the sum
/// of the lengths has overflowed.
fn make_room(call: Kind, buf: &mut Vec<u8>, len: Option<usize>) -> Result<(), Error> {
    let len = len.filter(|len| *len <= isize::MAX as usize);
    let doing = || format!("receive the bytes of {call}_bytes");
    let len = len.ok_or_else(|| {
        Error::system(doing(), "the announced lengths add up to more bytes than this process can address")
    })?;
    if len <= buf.capacity() {
        buf.resize(len, 0);
    } else {
        let none = || Error::system(doing(), format!("there is no memory for {len} bytes"));
        *buf = zeroes(len).ok_or_else(none)?;
    }
    Ok(())
}

fn part(endpoint: &Arc<Endpoint>, mut spec: Spec, input: *const u8, output: *mut u8) -> Result<Part, Error> {
    let bytes = if spec.tables.is_some() { spec.count / endpoint.config.size() } else { spec.count };
    let program = program(endpoint, plan::choose(spec.kind, bytes, &endpoint.config.env), &spec)?;
    let tables = spec.tables.take().map(Arc::new);
    Ok(Part {
        program,
        input,
        output,
        count: spec.count,
        dtype: DType::U8,
        tables,
        pairwise: false,
        stated: None,
    })
}

impl Call<'_> {
    fn lengths(&self, kind: Kind, root: Rank) -> Spec {
        Spec { detail: digest(0, *b"bytes"), ..Spec::of(kind, root, 1, true) }
    }

    fn bytes_of_root(&self, bytes: Vec<u8>, root: Rank) -> Work<Vec<u8>> {
        let is_root = self.rank() == root;
        let mut held = Bytes { lengths: vec![bytes.len() as u64], mine: bytes, all: Vec::new() };
        let at = held.lengths.as_mut_ptr().cast::<u8>();
        let endpoint = self.side.0.clone();
        let then: Then = Box::new(move |held| {
            let bytes = held.get_mut::<Bytes>().ok_or_else(|| lost(Ok(())))?;
            let len = bytes.lengths[0] as usize;
            if !is_root {
                make_room(Kind::Broadcast, &mut bytes.mine, Some(len))?;
            }
            let at = bytes.mine.as_mut_ptr();
            Ok(vec![part(&endpoint, Spec::of(Kind::Broadcast, root, len, true), at, at)?])
        });
        let (spec, held) = (self.lengths(Kind::Broadcast, root), ErasedBufs::new(held));
        Work::new(self.submit_then(spec, DType::U64, (at, at), then, held), broadcast)
    }

    fn bytes_of_all(&self, bytes: Vec<u8>) -> Work<Vec<Vec<u8>>, Vec<u8>> {
        let (n, rank) = (self.size(), self.rank());
        let mut held = Bytes { lengths: vec![0; n], mine: bytes, all: Vec::new() };
        held.lengths[rank] = held.mine.len() as u64;
        let at = held.lengths.as_mut_ptr().cast::<u8>();
        let endpoint = self.side.0.clone();
        let then: Then = Box::new(move |held| {
            let bytes = held.get_mut::<Bytes>().ok_or_else(|| lost(Ok(())))?;
            let mut end = Some(0usize);
            let mut block = |len: &u64| -> Option<Range<usize>> {
                let start = end?;
                end = start.checked_add(usize::try_from(*len).ok()?);
                Some(start..end?)
            };
            let blocks: Option<Vec<_>> = bytes.lengths.iter().map(&mut block).collect();
            let total = blocks.as_ref().and(end);
            make_room(Kind::AllGather, &mut bytes.all, total)?;
            let (blocks, count) = (blocks.unwrap_or_default(), bytes.all.len());
            let own = std::iter::once(0..bytes.mine.len()).collect();
            let tables = Some(Tables { slots: [own, blocks.clone(), blocks] });
            let spec = Spec { tables, ..Spec::of(Kind::AllGather, 0, count, false) };
            Ok(vec![part(&endpoint, spec, bytes.mine.as_ptr(), bytes.all.as_mut_ptr())?])
        });
        let (spec, held) = (self.lengths(Kind::AllGather, 0), ErasedBufs::new(held));
        Work::new(self.submit_then(spec, DType::U64, (at, at), then, held), gathered)
    }
}

collectives! {
    /// Every rank ends with the root's bytes. The other ranks need not know how many these are, and what they pass is overwritten: an empty
    /// vector will do. It is one operation, which sends the length first.
    fn broadcast_bytes [] (bytes: Vec<u8>) root(root) -> Work<Vec<u8>>
        = |call| call.bytes_of_root(bytes, root);

    /// All ranks' bytes, by rank. Their lengths may differ, and no rank needs to know those of the others.
    fn all_gather_bytes [] (bytes: Vec<u8>) -> Work<Vec<Vec<u8>>, Vec<u8>>
        = |call| call.bytes_of_all(bytes);
}
