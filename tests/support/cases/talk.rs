//! Messages between all.

use allstream::{Comm, HostBuf, Message, Work};

use super::{Await, Case, Seen, Talk, compare, ended};
use crate::values::{Value, mix};

/// Longer messages go to fewer.
const LONG: usize = 10_000;

pub(super) fn messages<T: Value>(comm: &mut Comm, case: &Case, talk: Talk) -> Result<Seen, String> {
    let (n, rank, len) = (comm.size(), comm.rank(), case.len);
    let say = |from: usize, to: usize, tag: u32, nth: usize| {
        let seed = mix(&[case.seed, to as u64, u64::from(tag), nth as u64]);
        Case { seed, ..*case }.input::<T>(from, len)
    };
    let blank = || vec![T::default(); len];
    let heard = |from: usize, tag: u32, nth: usize, got: &[T]| {
        let name = format!("message {nth} of tag {tag} from rank {from}");
        compare(&name, got, &say(from, rank, tag, nth), &[])
    };
    let end = |work: Work<Vec<T>>| match case.end {
        Await::Wait => work.wait().map_err(|e| e.error.to_string()),
        _ => ended(work).map_err(|e| e.error.to_string()),
    };
    let shifts: Vec<usize> = if len > LONG { vec![1, n - 1] } else { (1..n).collect() };
    let tags = [case.seed as u32 % 3, 5 + (case.seed >> 32) as u32 % 0x7fff_ffff];
    match talk {
        Talk::Shift => {
            for shift in shifts {
                let (to, from) = ((rank + shift) % n, (rank + n - shift) % n);
                let mut send = |tag| comm.tag(tag).timeout(case.timeout).send(say(rank, to, tag, 0), to);
                let sends = tags.map(&mut send);
                let mut recv = |tag| comm.tag(tag).timeout(case.timeout).recv(blank(), from);
                let [b, a] = [tags[1], tags[0]].map(&mut recv);
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
                all.extend(tags.map(|tag| Message::Send { buf: say(rank, to, tag, 0), to, tag }));
                all.extend(tags.map(|tag| Message::Recv { buf: blank(), from, tag }));
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
                let (sent, buf) = (say(rank, to, tags[0], 0), HostBuf::from(&blank()[..]));
                let both = comm.tag(tags[0]).timeout(case.timeout).send_recv(sent.clone(), to, buf, from);
                let done = match case.end {
                    Await::Wait => both.wait(),
                    _ => ended(both),
                };
                let (kept, got) = done.map_err(|e| e.error.to_string())?;
                compare("what was sent", &kept, &sent, &[])?;
                heard(from, tags[0], 0, &got)?;
            }
        }
        Talk::Queue => {
            let (to, from) = ((rank + 1) % n, (rank + n - 1) % n);
            let small = len * case.dtype.size() <= 4096;
            let mut sends = Vec::new();
            for nth in 0..5 {
                let work = comm.tag(tags[1]).timeout(case.timeout).send(say(rank, to, tags[1], nth), to);
                if small {
                    end(work)?;
                } else {
                    sends.push(work);
                }
            }
            for nth in 0..5 {
                let work = comm.tag(tags[1]).timeout(case.timeout).recv(blank(), from);
                heard(from, tags[1], nth, &end(work)?)?;
            }
            for work in sends {
                end(work)?;
            }
        }
    }
    Ok(Seen::Nothing)
}
