//! Messages between all.

use allstream::{Comm, Message, Work};

use super::{Await, Case, Place, Seen, Talk, Wrong, compare, ended};
use crate::values::{Value, mix};

/// Longer messages go to fewer.
const LONG: usize = 10_000;

pub(super) fn messages<T: Value, P: Place>(
    comm: &mut Comm,
    case: &Case,
    talk: Talk,
    place: &P,
) -> Result<Seen, Wrong> {
    let (n, rank, len) = (comm.size(), comm.rank(), case.len);
    let say = |from: usize, to: usize, tag: u32, nth: usize| {
        let seed = mix(&[case.seed, to as u64, u64::from(tag), nth as u64]);
        Case { seed, ..*case }.input::<T>(from, len)
    };
    let put = |from, to, tag, nth| place.put(&say(from, to, tag, nth));
    let blank = || place.put(&vec![T::default(); len]);
    let heard = |from: usize, tag: u32, nth: usize, got: &[T]| {
        let name = format!("message {nth} of tag {tag} from rank {from}");
        compare(&name, got, &say(from, rank, tag, nth), &[])
    };
    let end = |work: Work<P::In<T>>| {
        let ended = match case.end {
            Await::Wait => work.wait(),
            _ => ended(work),
        };
        place.got(ended.map_err(|e| e.error.to_string())?)
    };
    let shifts: Vec<usize> = if len > LONG { vec![1, n - 1] } else { (1..n).collect() };
    let tags = [case.seed as u32 % 3, 5 + (case.seed >> 32) as u32 % 0x7fff_ffff];
    match talk {
        Talk::Shift => {
            for shift in shifts {
                let (to, from) = ((rank + shift) % n, (rank + n - shift) % n);
                let mut send = |tag, buf| comm.tag(tag).timeout(case.timeout).send(buf, to);
                let [a, b] = [put(rank, to, tags[0], 0)?, put(rank, to, tags[1], 0)?];
                let sends = [send(tags[0], a), send(tags[1], b)];
                let mut recv = |tag, buf| comm.tag(tag).timeout(case.timeout).recv(buf, from);
                let [b, a] = [recv(tags[1], blank()?), recv(tags[0], blank()?)];
                heard(from, tags[0], 0, &end(a)?)?;
                heard(from, tags[1], 0, &end(b)?)?;
                for (tag, work) in tags.into_iter().zip(sends) {
                    compare("what was sent", &end(work)?, &say(rank, to, tag, 0), &[])?;
                }
            }
        }
        Talk::Batch => {
            let mut all = Vec::new();
            for shift in shifts {
                let (to, from) = ((rank + shift) % n, (rank + n - shift) % n);
                for tag in tags {
                    all.push(Message::Send { buf: put(rank, to, tag, 0)?, to, tag });
                }
                for tag in tags {
                    all.push(Message::Recv { buf: blank()?, from, tag });
                }
            }
            let expected: Vec<(usize, u32, bool)> = all
                .iter()
                .map(|m| match m {
                    Message::Send { to, tag, .. } => (*to, *tag, true),
                    Message::Recv { from, tag, .. } => (*from, *tag, false),
                })
                .collect();
            let batch = comm.timeout(case.timeout).batch(all);
            let done = match case.end {
                Await::Wait => batch.wait(),
                _ => ended(batch),
            };
            let done = done.map_err(|e| e.error.to_string())?;
            for ((peer, tag, sent), buf) in expected.into_iter().zip(done) {
                let buf = place.got(buf)?;
                if sent {
                    compare("what was sent", &buf, &say(rank, peer, tag, 0), &[])?;
                } else {
                    heard(peer, tag, 0, &buf)?;
                }
            }
        }
        Talk::Both => {
            for shift in shifts {
                let (to, from) = ((rank + shift) % n, (rank + n - shift) % n);
                let (sent, buf) = (say(rank, to, tags[0], 0), place.put_out(&vec![T::default(); len])?);
                let both =
                    comm.tag(tags[0]).timeout(case.timeout).send_recv(place.put(&sent)?, to, buf, from);
                let done = match case.end {
                    Await::Wait => both.wait(),
                    _ => ended(both),
                };
                let (kept, got) = done.map_err(|e| e.error.to_string())?;
                compare("what was sent", &place.got(kept)?, &sent, &[])?;
                heard(from, tags[0], 0, &place.got_out(got)?)?;
            }
        }
        Talk::Queue => {
            let (to, from) = ((rank + 1) % n, (rank + n - 1) % n);
            let small = len * case.dtype.size() <= 4096;
            let mut sends = Vec::new();
            for nth in 0..5 {
                let work = comm.tag(tags[1]).timeout(case.timeout).send(put(rank, to, tags[1], nth)?, to);
                if small {
                    end(work)?;
                } else {
                    sends.push(work);
                }
            }
            for nth in 0..5 {
                let work = comm.tag(tags[1]).timeout(case.timeout).recv(blank()?, from);
                heard(from, tags[1], nth, &end(work)?)?;
            }
            for work in sends {
                end(work)?;
            }
        }
    }
    Ok(Seen::Nothing)
}
