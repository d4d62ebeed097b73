//! Frames of control connections: a 4-byte little-endian length (at most 1 MiB), then JSON.

use std::io;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt};

/// The longest frame that is sent or taken, without its length.
pub(crate) const MAX_FRAME: usize = 1 << 20;
/// Bytes asked from a socket at once. The buffer grows with what has come, not with what is announced.
const READ: usize = 16 << 10;

/// The frame that carries `value`, or why there cannot be one.
pub(crate) fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, String> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, value).map_err(|e| e.to_string())?;
    let len = frame.len() - 4;
    if len > MAX_FRAME {
        return Err(format!("a control message of {len} bytes exceeds the limit of {MAX_FRAME}"));
    }
    frame[..4].copy_from_slice(&(len as u32).to_le_bytes());
    Ok(frame)
}

/// The payload of the first frame in `bytes`, and the frame's length with its prefix; `None` while the frame is not complete.
pub(crate) fn split(bytes: &[u8]) -> Result<Option<(&[u8], usize)>, String> {
    let Some((prefix, rest)) = bytes.split_first_chunk::<4>() else { return Ok(None) };
    let len = u32::from_le_bytes(*prefix) as usize;
    if len > MAX_FRAME {
        return Err(format!("a frame of {len} bytes was announced; the limit is {MAX_FRAME}"));
    }
    Ok(rest.get(..len).map(|payload| (payload, 4 + len)))
}

/// The value in a frame's payload.
pub(crate) fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T, String> {
    serde_json::from_slice(payload)
        .map_err(|e| format!("a frame of {} bytes does not parse: {e}", payload.len()))
}

/// Cuts a stream of bytes into frames.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    bytes: Vec<u8>,
}

impl Frames {
    /// The next complete frame among the bytes that have come.
    pub(crate) fn pop<T: DeserializeOwned>(&mut self) -> Result<Option<T>, String> {
        let Some((payload, len)) = split(&self.bytes)? else { return Ok(None) };
        let value = decode(payload);
        self.bytes.drain(..len);
        value.map(Some)
    }

    /// Reads from the stream once. Returns how many bytes came: 0 at the stream's end. Cancelling this loses nothing.
    pub(crate) async fn fill<R: AsyncRead + Unpin>(&mut self, stream: &mut R) -> io::Result<usize> {
        self.bytes.reserve(READ);
        stream.read_buf(&mut self.bytes).await
    }

    /// The next frame; `None` if the stream ends between two frames.
    pub(crate) async fn next<T, R>(&mut self, stream: &mut R) -> Result<Option<T>, String>
    where
        T: DeserializeOwned,
        R: AsyncRead + Unpin,
    {
        loop {
            if let Some(value) = self.pop()? {
                return Ok(Some(value));
            }
            if self.fill(stream).await.map_err(|e| e.to_string())? == 0 {
                if self.bytes.is_empty() {
                    return Ok(None);
                }
                return Err(format!("the connection ended {} bytes into a frame", self.bytes.len()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::{Error, Lost};
    use crate::group::message::{CommId, Message, Outcome, Step};
    use crate::link::Break;
    use crate::types::{Rank, Signature};

    fn lost_ranks() -> impl Strategy<Value = Vec<(Rank, Lost)>> {
        let how = prop_oneof![
            Just(Lost::Died),
            Just(Lost::Left),
            any::<u32>().prop_map(|ms| Lost::Silent(std::time::Duration::from_millis(ms.into())))
        ];
        prop::collection::vec((any::<Rank>(), how), 0..4)
    }

    fn step() -> impl Strategy<Value = Step> {
        let outcome = || (any::<bool>(), lost_ranks()).prop_map(|(flag, lost)| Outcome { flag, lost });
        let accepted = proptest::option::of((any::<Rank>(), outcome()));
        prop_oneof![
            (any::<u64>(), any::<bool>(), any::<Rank>(), accepted)
                .prop_map(|(number, flag, ballot, accepted)| Step::Vote { number, flag, ballot, accepted }),
            (any::<u64>(), outcome()).prop_map(|(number, outcome)| Step::Propose { number, outcome }),
            any::<u64>().prop_map(|number| Step::Accept { number }),
            (any::<u64>(), outcome()).prop_map(|(number, outcome)| Step::Decide { number, outcome }),
            Just(Step::Lost),
        ]
    }

    fn message() -> impl Strategy<Value = Message> {
        let cause = (any::<usize>(), ".*").prop_map(|(by, reason)| Error::aborted(by, reason));
        let lost = (any::<usize>(), any::<u32>()).prop_map(|(rank, ms)| {
            Error::lost(rank, Lost::Silent(std::time::Duration::from_millis(ms.into())))
        });
        let cause = prop_oneof![cause, lost];
        let signature = (any::<[u8; 4]>(), any::<u32>(), any::<u64>(), any::<[u32; 2]>()).prop_map(
            |([kind, dtype, op, algo], root, count, [generation, detail])| Signature {
                kind,
                dtype,
                op,
                algo,
                root,
                count,
                generation,
                detail,
            },
        );
        prop_oneof![
            Just(Message::Heartbeat),
            proptest::option::of(cause.clone()).prop_map(|cause| Message::Goodbye { cause }),
            (any::<u64>(), cause).prop_map(|(c, cause)| Message::Abort { comm: CommId(c), cause }),
            (any::<u64>(), any::<u64>(), signature.clone())
                .prop_map(|(c, number, signature)| Message::Stalled { comm: CommId(c), number, signature }),
            (
                any::<u64>(),
                any::<u64>(),
                any::<Option<u64>>(),
                proptest::option::of((any::<Rank>(), signature))
            )
                .prop_map(|(c, number, last, receives)| Message::Called {
                    comm: CommId(c),
                    number,
                    last,
                    receives
                }),
            (any::<u64>(), ".*").prop_map(|(c, problem)| Message::Broke {
                comm: CommId(c),
                what: Break { kind: "TCP".into(), at: problem.clone(), peer_at: String::new(), problem }
            }),
            any::<u64>().prop_map(|c| Message::Retired { comm: CommId(c) }),
            (any::<u64>(), lost_ranks(), step()).prop_map(|(c, lost, step)| Message::Agree {
                comm: CommId(c),
                lost,
                step
            }),
        ]
    }

    proptest! {
        #[test]
        fn messages_survive_any_fragmentation(messages in prop::collection::vec(message(), 0..6), cut in 1usize..40) {
            let mut bytes = Vec::new();
            for m in &messages {
                bytes.extend(encode(m).unwrap());
            }
            let (mut frames, mut got) = (Frames::default(), Vec::new());
            for piece in bytes.chunks(cut) {
                frames.bytes.extend_from_slice(piece);
                while let Some(m) = frames.pop::<Message>().unwrap() {
                    got.push(m);
                }
            }
            prop_assert_eq!(got, messages);
            prop_assert!(frames.bytes.is_empty());
        }

        #[test]
        fn garbage_is_an_error_or_incomplete_never_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode::<Message>(&bytes);
            let mut frames = Frames { bytes };
            for _ in 0..64 {
                match frames.pop::<Message>() {
                    Ok(Some(_)) => {}
                    Ok(None) | Err(_) => break,
                }
            }
        }
    }

    #[test]
    fn an_announced_length_beyond_the_limit_is_refused_before_its_bytes_come() {
        let bytes = (MAX_FRAME as u32 + 1).to_le_bytes();
        assert!(split(&bytes).unwrap_err().contains("1048577"));
        assert_eq!(split(&(MAX_FRAME as u32).to_le_bytes()), Ok(None));
        assert!(encode(&"x".repeat(MAX_FRAME)).is_err());
    }

    #[test]
    fn nested_json_is_refused_without_a_stack_overflow() {
        let deep = "[".repeat(MAX_FRAME);
        assert!(decode::<Message>(deep.as_bytes()).is_err());
        assert!(decode::<serde_json::Value>(deep.as_bytes()).is_err());
    }
}
