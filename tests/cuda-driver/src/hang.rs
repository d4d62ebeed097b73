//! A call that never returns, if an environment variable asks for it: how a driver that hangs looks to its caller.

use std::sync::Mutex;

use crate::abi::lock;

/// A function, and which of its calls does not return.
struct Hang {
    name: String,
    left: u64,
}

/// `cuFunctionName:n`: the `n`th call of this function never returns. The name may be given without its suffix `_v2`.
fn asked() -> Option<Hang> {
    let text = std::env::var("ALLSTREAM_TEST_CUDA_HANG").ok().filter(|text| !text.is_empty())?;
    let parsed = text.split_once(':').and_then(|(name, nth)| Some((name.to_owned(), nth.parse().ok()?)));
    let Some((name, left)) = parsed else {
        // A knob that cannot be read must not let a test pass for the wrong reason.
        eprintln!("ALLSTREAM_TEST_CUDA_HANG: cannot read {text:?}");
        std::process::abort()
    };
    Some(Hang { name, left })
}

/// Does not return if this call was told not to.
pub(crate) fn perhaps(name: &str) {
    static HANG: std::sync::LazyLock<Option<Mutex<Hang>>> =
        std::sync::LazyLock::new(|| asked().map(Mutex::new));
    let Some(hang) = &*HANG else { return };
    {
        let mut hang = lock(hang);
        let plain = name.strip_suffix("_v2").unwrap_or(name);
        if hang.name != name && hang.name != plain {
            return;
        }
        hang.left = hang.left.saturating_sub(1);
        if hang.left > 0 {
            return;
        }
        // Only this call hangs; later ones return.
        hang.left = u64::MAX;
    }
    loop {
        std::thread::park();
    }
}
