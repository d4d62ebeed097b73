//! The processes of the other ranks, for examples in which rank 0 starts them.

use std::fs::File;
use std::io::Read;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A random token that only our own processes know.
pub(super) fn secret() -> Result<String> {
    let mut bytes = [0_u8; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The processes of the other ranks. When this is dropped, those that have not ended within 2 s are killed.
pub(super) struct Others(pub(super) Vec<(usize, Child)>);

impl Others {
    /// Waits for all of them, at most for `patience`. `ends_well` says whether an exit code means success.
    pub(super) fn wait(mut self, patience: Duration, ends_well: impl Fn(i32) -> bool) -> Result<()> {
        let end = Instant::now() + patience;
        for (rank, child) in &mut self.0 {
            let status = loop {
                match child.try_wait()? {
                    Some(status) => break status,
                    None if Instant::now() > end => return Err(format!("rank {rank} does not end").into()),
                    None => thread::sleep(Duration::from_millis(1)),
                }
            };
            if !status.code().is_some_and(&ends_well) {
                return Err(format!("rank {rank} failed: {status}").into());
            }
        }
        Ok(())
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        // A rank that has failed too may still be about to say why.
        let end = Instant::now() + Duration::from_secs(2);
        for (_, child) in &mut self.0 {
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
                thread::sleep(Duration::from_millis(1));
            }
            // Has no effect on a rank that has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
