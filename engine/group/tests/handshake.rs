//! The handshake over a pipe in memory: who gets in, who does not, and what each side is told.

use proptest::prelude::*;
use tokio::io::duplex;

use super::*;
use crate::group::message::CommId;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(5)
}

fn purpose() -> Purpose {
    Purpose::Data { world: [7; 16], to: 0, hello: DataHello { comm: CommId(3), from: 1, channel: 0 } }
}

async fn meet(
    dialer: &str,
    acceptor: &str,
    admit: impl FnOnce(Purpose) -> Result<Purpose, String>,
) -> (Result<(), Refusal>, Result<Purpose, Refusal>) {
    let (mut a, mut b) = duplex(64);
    let (ours, theirs) = (Token::new(dialer.as_bytes()), Token::new(acceptor.as_bytes()));
    let purpose = purpose();
    tokio::join!(
        async {
            let end = dial(&mut a, &ours, &purpose, soon()).await;
            drop(a);
            end
        },
        async {
            let end = accept(&mut b, &theirs, soon(), &Progress::default(), admit).await;
            drop(b);
            end
        }
    )
}

#[tokio::test]
async fn the_same_secret_gets_in() {
    assert_eq!(meet("x", "x", Ok).await, (Ok(()), Ok(purpose())));
    assert_eq!(meet("", "", Ok).await, (Ok(()), Ok(purpose())));
}

#[tokio::test]
async fn another_secret_is_refused_and_both_sides_know_why() {
    let (dialer, acceptor) = meet("x", "y", |_| panic!("an unproven purpose was looked at")).await;
    assert!(matches!(&dialer, Err(Refusal::Denied(why)) if why.contains("ALLSTREAM_TOKEN")), "{dialer:?}");
    assert!(matches!(&acceptor, Err(Refusal::Stranger(why)) if why.contains("secret")), "{acceptor:?}");
}

#[tokio::test]
async fn an_unwelcome_purpose_hears_the_reason() {
    let long = format!("no: {}", "ä".repeat(MAX_HELLO));
    let (dialer, acceptor) = meet("x", "x", |_| Err(long.clone())).await;
    assert!(matches!(dialer, Err(Refusal::Denied(why)) if why.starts_with("no: ä")));
    assert_eq!(acceptor, Err(Refusal::Denied(long)));
}

/// Sends these bytes to an acceptor; its verdict, and what it answered.
async fn send(bytes: &[u8]) -> (Refusal, Vec<u8>) {
    let (mut a, mut b) = duplex(1 << 17);
    a.write_all(bytes).await.unwrap();
    a.shutdown().await.unwrap();
    let end = accept(&mut b, &Token::new(b"x"), soon(), &Progress::default(), Ok).await.unwrap_err();
    drop(b);
    let mut answer = Vec::new();
    a.read_to_end(&mut answer).await.unwrap();
    (end, answer)
}

#[tokio::test]
async fn another_version_or_byte_order_is_refused_with_the_reason_and_told_ours() {
    for (at, bytes, word) in [(6, [9, 0], "version 9"), (4, ORDER.swap_bytes().to_ne_bytes(), "byte order")] {
        let mut theirs = preamble(&[1; 32]);
        theirs[at..at + 2].copy_from_slice(&bytes);
        let (refusal, answer) = send(&theirs).await;
        assert!(matches!(&refusal, Refusal::Stranger(why) if why.contains(word)), "{refusal:?}");
        assert!(parse_preamble(&answer).is_ok());

        let (mut a, mut b) = duplex(1 << 10);
        b.write_all(&theirs).await.unwrap();
        let refusal = dial(&mut a, &Token::new(b"x"), &purpose(), soon()).await.unwrap_err();
        assert!(matches!(&refusal, Refusal::Stranger(why) if why.contains(word)), "{refusal:?}");
    }
}

#[tokio::test]
async fn strangers_get_no_answer_and_no_memory() {
    let (refusal, answer) = send(&[b'G'; 100]).await;
    assert!(
        matches!(&refusal, Refusal::Stranger(why) if why.contains("does not speak allstream")),
        "{refusal:?}"
    );
    assert!(answer.is_empty());
    let mut huge = preamble(&[1; 32]).to_vec();
    huge.extend((u32::MAX).to_le_bytes());
    assert!(matches!(send(&huge).await.0, Refusal::Stranger(why) if why.contains("4294967295")));
    assert!(matches!(send(b"").await.0, Refusal::Broken(_)));
}

#[tokio::test]
async fn silence_ends_at_the_deadline() {
    let (mut a, mut b) = duplex(1 << 10);
    let (until, progress) = (Instant::now() + Duration::from_millis(50), Progress::default());
    let end = accept(&mut b, &Token::new(b"x"), until, &progress, Ok).await;
    assert!(matches!(end, Err(Refusal::Broken(_))), "{end:?}");
    let end = dial(&mut a, &Token::new(b"x"), &purpose(), Instant::now() + Duration::from_millis(50)).await;
    assert!(matches!(end, Err(Refusal::Broken(_))), "{end:?}");
}

#[test]
fn a_proof_holds_for_one_role_both_nonces_and_every_part_only() {
    let (token, nonces) = (Token::new(b"x"), [[1; 32], [2; 32]]);
    let proof = prove(&token, Role::Dialer, &nonces, &[b"ab", b"c"]);
    assert!(proven(&token, Role::Dialer, &nonces, &[b"ab", b"c"], &proof));
    assert!(!proven(&token, Role::Acceptor, &nonces, &[b"ab", b"c"], &proof));
    assert!(!proven(&token, Role::Dialer, &[[2; 32], [1; 32]], &[b"ab", b"c"], &proof));
    assert!(!proven(&token, Role::Dialer, &nonces, &[b"a", b"bc"], &proof));
    assert!(!proven(&Token::new(b"y"), Role::Dialer, &nonces, &[b"ab", b"c"], &proof));
    assert!(!proven(&token, Role::Dialer, &nonces, &[b"ab", b"c"], &proof[..31]));
}

#[tokio::test]
async fn an_acceptor_that_reflects_the_dialers_proof_is_found_out() {
    let (mut a, mut b) = duplex(1 << 10);
    let forger = async {
        let mut first = [0; PREAMBLE];
        b.read_exact(&mut first).await.unwrap();
        b.write_all(&first).await.unwrap();
        let hello = read_bounded(&mut b).await.unwrap();
        let mut proof = [0; PROOF];
        b.read_exact(&mut proof).await.unwrap();
        assert!(!hello.is_empty());
        write_verdict(&mut b, ACCEPTED, "", Some(proof)).await.unwrap();
    };
    let (token, purpose) = (Token::new(b"x"), purpose());
    let (end, ()) = tokio::join!(dial(&mut a, &token, &purpose, soon()), forger);
    assert!(matches!(end, Err(Refusal::Stranger(_))), "{end:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn garbage_is_an_error_never_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), valid in any::<bool>()) {
        let _ = parse_preamble(&bytes);
        let _ = parse_purpose(&bytes);
        if let Some(four) = bytes.first_chunk::<4>() {
            prop_assert_eq!(parse_length(*four).is_ok(), u32::from_le_bytes(*four) as usize <= MAX_HELLO);
        }
        let mut sent = if valid { preamble(&[3; 32]).to_vec() } else { Vec::new() };
        sent.extend(&bytes);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(send(&sent));
    }
}
