//! Messages between two ranks, of which one may send what no correct rank sends.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::*;
use crate::exec::Inflight;
use crate::link::Opener;
use crate::link::layout::RING_BYTES;
use crate::link::local::{Doorbell, LocalRx, LocalTx};
use crate::link::region::Region;
use crate::link::{LinkRx, LinkTx};
use crate::types::{DType, KIND_P2P, NO_OP};

/// Rings between this rank, 0, and its peer, 1.
struct Rings {
    regions: [Arc<Region>; 2],
    at: [usize; 2],
    doorbell: Doorbell,
}

impl Opener for Rings {
    fn open_tx(&self, _: Rank, _: u8) -> Result<Box<dyn LinkTx>, Error> {
        Ok(Box::new(LocalTx::new(self.regions[0].clone(), self.at[0], self.doorbell.clone(), None)?))
    }
    fn open_rx(&self, _: Rank, _: u8) -> Result<Box<dyn LinkRx>, Error> {
        Ok(Box::new(LocalRx::new(
            self.regions[1].clone(),
            self.at[1] as u64,
            self.doorbell.clone(),
            1,
            false,
        )?))
    }
}

/// The messages of rank 0, and the peer's ends of both rings.
fn pair() -> (Messages, LocalTx, LocalRx) {
    let regions = [(); 2].map(|()| Arc::new(Region::shared().unwrap()));
    let at = [0, 1].map(|i| regions[i].alloc(RING_BYTES).unwrap());
    let (fd, _) = rustix::pipe::pipe().unwrap();
    let doorbell = Doorbell::new(regions[0].clone(), Arc::<OwnedFd>::new(fd));
    let tx = LocalTx::new(regions[1].clone(), at[1], doorbell.clone(), None).unwrap();
    let rx = LocalRx::new(regions[0].clone(), at[0] as u64, doorbell.clone(), 0, false).unwrap();
    let port = Port::new((0, 2), 1, regions[0].clone(), Arc::new(Rings { regions, at, doorbell }));
    let mut messages = Messages::new(5, 0, 0, 2, port);
    messages.peers[1].touched = true;
    (messages, tx, rx)
}

fn signature(dtype: DType, count: usize) -> Signature {
    let (kind, dtype, count) = (KIND_P2P, dtype as u8, count as u64);
    Signature { kind, dtype, op: NO_OP, count, ..Signature::default() }
}

fn send_eagerly(tx: &mut LocalTx, number: u64, dtype: DType, bytes: &[u8]) {
    assert!(tx.room().unwrap());
    let (len, signature) = (bytes.len() as u32, signature(dtype, bytes.len()));
    let header = Header { comm: 5, op: number, offset: 0, len, message: Type::Eager as u32, signature };
    // SAFETY: so few bytes are copied by `post` itself.
    unsafe { tx.post(header, bytes.as_ptr()).unwrap() };
}

fn key() -> Key {
    Inflight::<(), ()>::with_capacity(1).submit(())
}

fn receive(number: u64, dtype: DType, into: &mut [u8]) -> Message {
    Message {
        direction: Direction::Recv,
        peer: 1,
        tag: 0,
        number,
        half: None,
        record: 0,
        memory: into.as_mut_ptr(),
        bytes: into.len(),
        unit: 1,
        signature: signature(dtype, into.len()),
        timeout: Duration::from_secs(10),
        staged: None,
        back: None,
        whole: None,
    }
}

#[test]
fn a_peer_that_sends_more_eager_messages_than_it_has_credit_for_is_an_error_that_names_it() {
    let (mut messages, mut tx, _rx) = pair();
    for number in 0..u64::from(CREDITS) {
        send_eagerly(&mut tx, number, DType::U8, &[1; 100]);
        messages.pass(|_, _| ()).unwrap();
    }
    assert_eq!(messages.peers[1].unclaimed.len(), CREDITS as usize);
    send_eagerly(&mut tx, CREDITS.into(), DType::U8, &[1; 100]);
    let error = messages.pass(|_, _| ()).unwrap_err();
    assert!(
        matches!(&error, Error::Protocol { peer: 1, problem, .. } if problem.contains("credit")),
        "{error}"
    );
    assert_eq!(messages.peers[1].unclaimed.len(), CREDITS as usize, "and no more is kept");
}

#[test]
fn a_peer_that_keeps_to_its_credit_may_send_for_ever() {
    let (mut messages, mut tx, mut rx) = pair();
    let (mut credits, mut finished, mut out) = (CREDITS, 0, vec![0u8; 10]);
    for number in 0..1000 {
        assert!(credits > 0, "credit comes back, message {number}");
        // Some messages come before their receive is posted, some after.
        if number % 3 == 0 {
            messages.add(key(), receive(number, DType::U8, &mut out), Instant::now());
        }
        send_eagerly(&mut tx, number, DType::U8, &[number as u8; 10]);
        credits -= 1;
        messages.pass(|_, _| finished += 1).unwrap();
        if number % 3 != 0 {
            messages.add(key(), receive(number, DType::U8, &mut out), Instant::now());
            messages.pass(|_, _| finished += 1).unwrap();
        }
        assert_eq!(out, [number as u8; 10]);
        while let Some(frame) = rx.peek(0).unwrap() {
            assert_eq!(frame.header.message, Type::Credit as u32);
            credits += frame.header.offset as u32;
            rx.release(0);
        }
    }
    assert_eq!(finished, 1000);
}

#[test]
fn a_received_bool_of_two_is_an_error_that_names_the_sender() {
    for early in [true, false] {
        let (mut messages, mut tx, _rx) = pair();
        let mut out = vec![0u8; 5];
        if !early {
            messages.add(key(), receive(0, DType::Bool, &mut out), Instant::now());
        }
        send_eagerly(&mut tx, 0, DType::Bool, &[1, 0, 1, 2, 0]);
        let mut ended = messages.pass(|_, _| panic!("finished"));
        if early {
            ended.unwrap();
            messages.add(key(), receive(0, DType::Bool, &mut out), Instant::now());
            ended = messages.pass(|_, _| panic!("finished"));
        }
        let error = ended.unwrap_err();
        assert!(
            matches!(&error, Error::Protocol { peer: 1, problem, .. } if problem.contains("element 3")),
            "{error}"
        );
    }
}

/// What frames say of a message on a device must fit what was called here: else a hostile peer's bytes would be written to an address that is
/// not the host's.
#[test]
fn a_peer_that_speaks_of_a_launch_that_there_is_not_is_an_error_that_names_it() {
    let whole = |dtype, count| Signature { kind: KIND_P2P | WHOLE, ..signature(dtype, count) };
    for (kind, len, said) in [
        (Type::Agree, 0, "a launch time for a message"),
        (Type::Clear, 0, "was not announced"),
        (Type::Eager, 5, "of a device's memory"),
    ] {
        let (mut messages, mut tx, _rx) = pair();
        let mut out = vec![0u8; 5];
        messages.add(key(), receive(0, DType::U8, &mut out), Instant::now());
        let header =
            Header { comm: 5, op: 0, offset: 9, len, message: kind as u32, signature: whole(DType::U8, 5) };
        assert!(tx.room().unwrap());
        // SAFETY: so few bytes are copied by `post` itself.
        unsafe { tx.post(header, [7_u8; 5].as_ptr()).unwrap() };
        let error = messages.pass(|_, _| panic!("finished")).unwrap_err();
        assert!(
            matches!(&error, Error::Protocol { peer: 1, problem, .. } if problem.contains(said)),
            "{error}"
        );
        assert_eq!(out, [0; 5]);
    }
}
