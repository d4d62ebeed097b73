//! Counts the calls of threads that hold one of the program's locks, for programs that promise to call no driver under a lock.

use std::collections::BTreeMap;
use std::ffi::c_char;
use std::sync::{Mutex, PoisonError, RwLock};

use crate::abi::{In, lock};
use crate::codes::Code;

/// Says whether the calling thread holds one of the program's locks.
type Asked = extern "C" fn() -> bool;

static ASKED: RwLock<Option<Asked>> = RwLock::new(None);
static COUNTS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// Counts this call if the program has given a function to ask, and that function says that this thread holds a lock.
pub(crate) fn ask(name: &'static str) {
    let asked = *ASKED.read().unwrap_or_else(PoisonError::into_inner);
    if asked.is_some_and(|holds| holds()) {
        *lock(&COUNTS).entry(name).or_default() += 1;
    }
}

/// From now on each call asks this function whether its thread holds one of the program's locks; null: no call asks any more.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_cuda_ask_locks(holds: Option<Asked>) -> Code {
    *ASKED.write().unwrap_or_else(PoisonError::into_inner) = holds;
    Code::SUCCESS
}

/// How often functions were called by threads that held one of the program's locks.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn allstream_test_cuda_calls_under_locks() -> u64 {
    lock(&COUNTS).values().sum()
}

/// The same for one function, by its full name. Counts are never reset.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn allstream_test_cuda_calls_under_locks_of(name: In<c_char>) -> u64 {
    let Ok(Ok(wanted)) = name.text().map(|name| name.to_str()) else { return 0 };
    lock(&COUNTS).get(wanted).copied().unwrap_or(0)
}
