//! NVIDIA's library of collectives, `libnccl`: [`Nccl`].

mod types;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::OnceLock;

pub use types::*;

use crate::cuda::CuStream;
use crate::library::{Library, Unavailable};

/// The environment variable that names the library, before the usual name.
pub const LIBRARY_VARIABLE: &str = "ALLSTREAM_NCCL_LIBRARY";
/// The first version whose communicators need not block their caller, as a person writes it and as the library does.
const NEEDED: (&str, c_int) = ("2.14", 21400);

type Result<T = ()> = std::result::Result<T, NcclError>;

macro_rules! functions {
    ($($name:ident($($type:ty),*) = $symbol:literal;)*) => {
        /// Addresses, looked up once.
        struct Table {
            $($name: unsafe extern "C" fn($($type),*) -> NcclResult,)*
            error_string: unsafe extern "C" fn(NcclResult) -> *const c_char,
        }

        impl Table {
            fn load(library: &Library) -> std::result::Result<Table, Unavailable> {
                let lacks = |symbol| Unavailable::Symbol { file: library.file.clone(), symbol };
                Ok(Table {
                    $($name: match library.symbol($symbol) {
                        // SAFETY: the library exports this name as a function of this type (nccl.h), and it is not null.
                        Some(address) => unsafe { std::mem::transmute_copy(&address) },
                        None => return Err(lacks($symbol.to_str().unwrap_or_default())),
                    },)*
                    error_string: match library.symbol(c"ncclGetErrorString") {
                        // SAFETY: as above.
                        Some(address) => unsafe { std::mem::transmute_copy(&address) },
                        None => return Err(lacks("ncclGetErrorString")),
                    },
                })
            }
        }
    };
}

functions! {
    get_version(*mut c_int) = c"ncclGetVersion";
    get_unique_id(*mut NcclUniqueId) = c"ncclGetUniqueId";
    comm_init_rank_config(*mut NcclComm, c_int, NcclUniqueId, c_int, *mut Config) = c"ncclCommInitRankConfig";
    comm_get_async_error(NcclComm, *mut NcclResult) = c"ncclCommGetAsyncError";
    comm_finalize(NcclComm) = c"ncclCommFinalize";
    comm_destroy(NcclComm) = c"ncclCommDestroy";
    comm_abort(NcclComm) = c"ncclCommAbort";
    all_reduce(*const c_void, *mut c_void, usize, NcclDataType, NcclRedOp, NcclComm, CuStream) = c"ncclAllReduce";
    broadcast(*const c_void, *mut c_void, usize, NcclDataType, c_int, NcclComm, CuStream) = c"ncclBroadcast";
    reduce(*const c_void, *mut c_void, usize, NcclDataType, NcclRedOp, c_int, NcclComm, CuStream) = c"ncclReduce";
    all_gather(*const c_void, *mut c_void, usize, NcclDataType, NcclComm, CuStream) = c"ncclAllGather";
    reduce_scatter(*const c_void, *mut c_void, usize, NcclDataType, NcclRedOp, NcclComm, CuStream) = c"ncclReduceScatter";
    send(*const c_void, usize, NcclDataType, c_int, NcclComm, CuStream) = c"ncclSend";
    recv(*mut c_void, usize, NcclDataType, c_int, NcclComm, CuStream) = c"ncclRecv";
    group_start() = c"ncclGroupStart";
    group_end() = c"ncclGroupEnd";
}

/// `ncclConfig_t` as version 2.14 had it. Newer versions take it, and use what they would without for all that it lacks.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

const CONFIG: Config = Config {
    size: size_of::<Config>(),
    magic: 0xcafe_beef,
    version: NEEDED.1.unsigned_abs(),
    // Communicators never block their caller.
    blocking: 0,
};

/// The library: the functions that are used, each as a method.
///
/// Methods that are `unsafe` are so because the library believes what it is given. An answer but success, or in some cases
/// [`NcclResult::IN_PROGRESS`], is a [`NcclError`].
pub struct Nccl {
    table: Table,
    file: String,
    version: c_int,
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl({} of {})", self.version(), self.file)
    }
}

impl Nccl {
    /// The library of this process: found and looked through by the first call.
    ///
    /// Files tried: the one that `ALLSTREAM_NCCL_LIBRARY` names, `libnccl.so.2`. Version 2.14 or newer.
    ///
    /// # Errors
    /// No such file, a file without a function that is used, or an older version. The answer is kept: later calls get the same.
    pub fn get() -> std::result::Result<&'static Nccl, &'static Unavailable> {
        static NCCL: OnceLock<std::result::Result<Nccl, Unavailable>> = OnceLock::new();
        NCCL.get_or_init(|| Nccl::open(&Nccl::files())).as_ref()
    }

    fn files() -> Vec<String> {
        let named = std::env::var(LIBRARY_VARIABLE).ok().filter(|file| !file.is_empty());
        named.into_iter().chain(["libnccl.so.2".into()]).collect()
    }

    fn open(files: &[String]) -> std::result::Result<Nccl, Unavailable> {
        let library = Library::open(files)?;
        let table = Table::load(&library)?;
        let mut version = 0;
        // SAFETY: `ncclGetVersion` may be called at any time, and writes a number.
        let answer = unsafe { (table.get_version)(&raw mut version) };
        let nccl = Nccl { table, file: library.file, version };
        if answer != NcclResult::SUCCESS || version < NEEDED.1 {
            let (file, found) = (nccl.file.clone(), nccl.version());
            return Err(Unavailable::Version { file, found, needed: NEEDED.0 });
        }
        Ok(nccl)
    }

    /// The file that it was loaded from, as it was given to the system's loader.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Its version, such as `2.27.3`.
    pub fn version(&self) -> String {
        // Up to 2.8 with two digits less.
        let (major, rest) = match self.version {
            old if old < 10_000 => (old / 1000, old % 1000),
            new => (new / 10_000, new % 10_000),
        };
        format!("{major}.{}.{}", rest / 100, rest % 100)
    }

    /// Its version as the library numbers it: 22703 is 2.27.3.
    pub fn version_code(&self) -> c_int {
        self.version
    }

    fn check(&self, call: &'static str, code: NcclResult) -> Result {
        if code == NcclResult::SUCCESS { Ok(()) } else { Err(self.error(call, code)) }
    }

    /// The same where the library may go on with it behind the call.
    fn begun(&self, call: &'static str, code: NcclResult) -> Result {
        if code == NcclResult::IN_PROGRESS { Ok(()) } else { self.check(call, code) }
    }

    #[cold]
    fn error(&self, call: &'static str, code: NcclResult) -> NcclError {
        // SAFETY: `ncclGetErrorString` takes any code, and gives a string of its own that lives as long as it is loaded, or null.
        let text = unsafe { (self.table.error_string)(code) };
        let text = match text.is_null() {
            true => "the library does not say more".into(),
            // SAFETY: not null, so a string that ends in a null byte.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        NcclError { call, code, text }
    }

    /// `ncclGetUniqueId`: what the ranks of a new communicator find each other by.
    ///
    /// # Errors
    /// The library's.
    pub fn unique_id(&self) -> Result<NcclUniqueId> {
        let mut id = NcclUniqueId([0; 128]);
        // SAFETY: room for an id.
        self.check("ncclGetUniqueId", unsafe { (self.table.get_unique_id)(&raw mut id) })?;
        Ok(id)
    }

    /// `ncclCommInitRankConfig`, without waiting: [`async_error`](Self::async_error) says when the communicator is there. For the device
    /// whose context is current.
    ///
    /// # Errors
    /// The library's.
    pub fn init(&self, size: c_int, id: &NcclUniqueId, rank: c_int) -> Result<NcclComm> {
        let (mut comm, mut config) = (NcclComm::NULL, CONFIG);
        // SAFETY: room for a handle, and a configuration that says how long it is; the library checks the numbers.
        let answer =
            unsafe { (self.table.comm_init_rank_config)(&raw mut comm, size, *id, rank, &raw mut config) };
        self.begun("ncclCommInitRankConfig", answer)?;
        Ok(comm)
    }

    /// `ncclCommGetAsyncError`: success, in progress, or what has failed since.
    ///
    /// # Safety
    /// The communicator exists.
    ///
    /// # Errors
    /// What has failed, or that it cannot be told.
    pub unsafe fn async_error(&self, comm: NcclComm) -> Result<NcclResult> {
        let mut state = NcclResult::SUCCESS;
        // SAFETY: the caller's promise; room for a code.
        self.check("ncclCommGetAsyncError", unsafe {
            (self.table.comm_get_async_error)(comm, &raw mut state)
        })?;
        self.begun("ncclCommGetAsyncError", state).map(|()| state)
    }

    /// `ncclCommFinalize`, without waiting.
    ///
    /// # Safety
    /// The communicator exists, and nothing of it is in progress.
    ///
    /// # Errors
    /// The library's.
    pub unsafe fn finalize(&self, comm: NcclComm) -> Result {
        // SAFETY: the caller's promise.
        self.begun("ncclCommFinalize", unsafe { (self.table.comm_finalize)(comm) })
    }

    /// `ncclCommDestroy`.
    ///
    /// # Safety
    /// The communicator exists, was finalized, and is not used again.
    ///
    /// # Errors
    /// The library's.
    pub unsafe fn destroy(&self, comm: NcclComm) -> Result {
        // SAFETY: the caller's promise.
        self.begun("ncclCommDestroy", unsafe { (self.table.comm_destroy)(comm) })
    }

    /// `ncclCommAbort`. Blocks until what it has on the device has ended.
    ///
    /// # Safety
    /// The communicator exists, and nobody uses it at the same time or again.
    ///
    /// # Errors
    /// The library's.
    pub unsafe fn abort(&self, comm: NcclComm) -> Result {
        // SAFETY: the caller's promise.
        self.check("ncclCommAbort", unsafe { (self.table.comm_abort)(comm) })
    }

    /// Calls what `calls` does between `ncclGroupStart` and `ncclGroupEnd`: nothing of it begins before the end. Of the errors of all
    /// calls, the first.
    ///
    /// # Errors
    /// The library's.
    pub fn group(&self, calls: impl FnOnce() -> Result) -> Result {
        // SAFETY: may be called at any time; the end follows on this thread.
        self.check("ncclGroupStart", unsafe { (self.table.group_start)() })?;
        let called = calls();
        // SAFETY: in the group that was begun above.
        let ended = unsafe { (self.table.group_end)() };
        called.and(self.begun("ncclGroupEnd", ended))
    }

    /// `ncclAllReduce`.
    ///
    /// # Safety
    /// The communicator exists; the memory is of its device, as long as said, and stays, used by nobody else out of the stream's
    /// order, until the stream has come past the work.
    ///
    /// # Errors
    /// The library's.
    pub unsafe fn all_reduce(
        &self,
        (input, output, count): (*const c_void, *mut c_void, usize),
        dtype: NcclDataType,
        op: NcclRedOp,
        (comm, stream): (NcclComm, CuStream),
    ) -> Result {
        // SAFETY: the caller's promise.
        let answer = unsafe { (self.table.all_reduce)(input, output, count, dtype, op, comm, stream) };
        self.begun("ncclAllReduce", answer)
    }

    /// `ncclBroadcast`.
    ///
    /// # Safety
    /// As of [`all_reduce`](Self::all_reduce).
    ///
    /// # Errors
    /// The library's.
    pub unsafe fn broadcast(
        &self,
        (input, output, count): (*const c_void, *mut c_void, usize),
        dtype: NcclDataType,
        root: c_int,
        (comm, stream): (NcclComm, CuStream),
    ) -> Result {
        // SAFETY: the caller's promise.
        let answer = unsafe { (self.table.broadcast)(input, output, count, dtype, root, comm, stream) };
        self.begun("ncclBroadcast", answer)
    }

    /// `ncclReduce`. The output is written on the root alone.
    ///
    /// # Safety
    /// As of [`all_reduce`](Self::all_reduce).
    ///
    /// # Errors
    /// The library's.
    pub unsafe fn reduce(
        &self,
        (input, output, count): (*const c_void, *mut c_void, usize),
        dtype: NcclDataType,
        (op, root): (NcclRedOp, c_int),
        (comm, stream): (NcclComm, CuStream),
    ) -> Result {
        // SAFETY: the caller's promise.
        let answer = unsafe { (self.table.reduce)(input, output, count, dtype, op, root, comm, stream) };
        self.begun("ncclReduce", answer)
    }

    /// `ncclAllGather`: `count` elements of each rank.
    ///
    /// # Safety
    /// As of [`all_reduce`](Self::all_reduce).
    ///
    /// # Errors
    /// The library's.
    pub unsafe fn all_gather(
        &self,
        (input, output, count): (*const c_void, *mut c_void, usize),
        dtype: NcclDataType,
        (comm, stream): (NcclComm, CuStream),
    ) -> Result {
        // SAFETY: the caller's promise.
        let answer = unsafe { (self.table.all_gather)(input, output, count, dtype, comm, stream) };
        self.begun("ncclAllGather", answer)
    }

    /// `ncclReduceScatter`: `count` elements for each rank.
    ///
    /// # Safety
    /// As of [`all_reduce`](Self::all_reduce).
    ///
    /// # Errors
    /// The library's.
    pub unsafe fn reduce_scatter(
        &self,
        (input, output, count): (*const c_void, *mut c_void, usize),
        dtype: NcclDataType,
        op: NcclRedOp,
        (comm, stream): (NcclComm, CuStream),
    ) -> Result {
        // SAFETY: the caller's promise.
        let answer = unsafe { (self.table.reduce_scatter)(input, output, count, dtype, op, comm, stream) };
        self.begun("ncclReduceScatter", answer)
    }

    /// `ncclSend`.
    ///
    /// # Safety
    /// As of [`all_reduce`](Self::all_reduce).
    ///
    /// # Errors
    /// The library's.
    pub unsafe fn send(
        &self,
        (from, count): (*const c_void, usize),
        dtype: NcclDataType,
        to: c_int,
        (comm, stream): (NcclComm, CuStream),
    ) -> Result {
        // SAFETY: the caller's promise.
        self.begun("ncclSend", unsafe { (self.table.send)(from, count, dtype, to, comm, stream) })
    }

    /// `ncclRecv`.
    ///
    /// # Safety
    /// As of [`all_reduce`](Self::all_reduce).
    ///
    /// # Errors
    /// The library's.
    pub unsafe fn recv(
        &self,
        (to, count): (*mut c_void, usize),
        dtype: NcclDataType,
        from: c_int,
        (comm, stream): (NcclComm, CuStream),
    ) -> Result {
        // SAFETY: the caller's promise.
        self.begun("ncclRecv", unsafe { (self.table.recv)(to, count, dtype, from, comm, stream) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_library_is_refused_by_the_first_function_that_it_lacks() {
        let error = Nccl::open(&["libc.so.6".into()]).unwrap_err();
        assert_eq!(error, Unavailable::Symbol { file: "libc.so.6".into(), symbol: "ncclGetVersion" });
    }

    #[test]
    fn the_configuration_is_that_of_the_first_version_that_is_used() {
        assert_eq!((size_of::<Config>(), std::mem::offset_of!(Config, blocking)), (24, 16));
        assert_eq!((CONFIG.size, CONFIG.version, CONFIG.blocking), (24, 21400, 0));
    }
}
