//! A world that meets by a note.

use std::os::unix::fs::PermissionsExt;

use super::*;

/// A directory of one test, with this mode.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, mode: u32) -> Scratch {
        let path = std::env::temp_dir().join(format!("allstream-note-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        Scratch(path)
    }

    fn rendezvous(&self, rank: usize, size: usize, timeout: Duration) -> (Rendezvous, PathBuf) {
        let path = self.0.join("allstream-1");
        let alone = Rendezvous::alone().timeout(timeout);
        (Rendezvous { rank, size, note: Some(path.clone()), ..alone }, path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const LONG: Duration = Duration::from_secs(20);

#[tokio::test]
async fn ranks_find_rank_0_by_its_note_which_goes_with_the_meeting() {
    let scratch = Scratch::new("meet", 0o700);
    let (visitor, path) = scratch.rendezvous(1, 2, LONG);
    // It comes first, and waits.
    let later = path.clone();
    let visitor = tokio::spawn(async move { settle(visitor, &later).await.map(|(found, _)| found) });
    let (own, path) = scratch.rendezvous(0, 2, LONG);
    let (own, left) = settle(own, &path).await.unwrap();
    let visitor = visitor.await.unwrap().unwrap();
    assert_eq!(visitor.address, own.address);
    assert_eq!(visitor.token, own.token);
    let Some(Listener::Given(listener)) = &own.listener else { panic!("rank 0 listens") };
    assert_eq!(listener.local_addr().unwrap().to_string(), own.place());
    assert!(visitor.listener.is_none());
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    drop(left);
    assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 0);
}

#[tokio::test]
async fn without_rank_0_the_path_is_named() {
    let scratch = Scratch::new("absent", 0o700);
    let (visitor, path) = scratch.rendezvous(1, 2, Duration::from_millis(100));
    let error = settle(visitor, &path).await.map(drop).unwrap_err().to_string();
    assert!(error.contains("allstream-1") && error.contains("rank 0 did not say"), "{error}");
}

#[tokio::test]
async fn a_directory_that_others_can_enter_is_refused() {
    let scratch = Scratch::new("open", 0o755);
    for rank in 0..2 {
        let (rendezvous, path) = scratch.rendezvous(rank, 2, LONG);
        let error = settle(rendezvous, &path).await.map(drop).unwrap_err().to_string();
        assert!(error.contains("open to others") && error.contains("MASTER_ADDR"), "{error}");
    }
    let (rendezvous, _) = scratch.rendezvous(0, 2, LONG);
    let nowhere = Path::new("/nowhere/dir/allstream-1");
    let error = settle(rendezvous, nowhere).await.map(drop).unwrap_err().to_string();
    assert!(error.contains("/nowhere/dir"), "{error}");
}

#[tokio::test]
async fn what_is_no_note_is_refused() {
    let scratch = Scratch::new("garbage", 0o700);
    for (garbage, length) in [("{", 1), ("x", 100_000)] {
        let (visitor, path) = scratch.rendezvous(1, 2, LONG);
        fs::write(&path, garbage.repeat(length)).unwrap();
        let error = settle(visitor, &path).await.map(drop).unwrap_err().to_string();
        assert!(error.contains("reading rank 0's note"), "{error}");
    }
}
