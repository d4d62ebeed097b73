//! What the tests of the library for tests (a stand-in for libibverbs) share: one end of a connection, made with the functions that any
//! program calls.
#![allow(dead_code, reason = "each test takes what it needs")]
#![allow(missing_docs, reason = "the functions are those of the real library")]

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Output, Stdio};
use std::ptr;
use std::time::{Duration, Instant};

use allstream_sys::verbs::*;
use test_support::verbs::{HOST, LIBRARY, library};

pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) const WRITE: c_uint = 0;
pub(crate) const WRITE_WITH_IMM: c_uint = 1;
pub(crate) const SEND: c_uint = 2;
pub(crate) const READ: c_uint = 4;
pub(crate) const LOCAL_INV: c_uint = 7;
pub(crate) const BIND_MW: c_uint = 8;
pub(crate) const FENCE: c_uint = 1;
pub(crate) const SIGNALED: c_uint = 2;
pub(crate) const SOLICITED: c_uint = 4;
pub(crate) const INLINE: c_uint = 8;
pub(crate) const ALL: c_int = 1 | 2 | 4 | 16;
pub(crate) const RECEIVED_WITH_IMM: c_uint = 129;

/// The status codes of completions.
pub(crate) const FLUSHED: c_uint = 5;
pub(crate) const REMOTE_INVALID: c_uint = 9;
pub(crate) const REMOTE_ACCESS: c_uint = 10;
pub(crate) const RETRIES_EXCEEDED: c_uint = 12;
pub(crate) const RNR_EXCEEDED: c_uint = 13;

/// The attribute masks of the three changes of state that connect a queue pair.
pub(crate) const TO_INIT: c_int = 1 | 1 << 3 | 1 << 4 | 1 << 5;
pub(crate) const TO_RECEIVE: c_int = 1 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 15 | 1 << 17 | 1 << 20;
pub(crate) const TO_SEND: c_int = 1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16;

/// A device with one port.
pub(crate) const ONE: &str =
    r#"{"devices": [{"name": "test_0", "ports": [{"gids": [{"index": 1, "address": "127.0.0.1"}]}]}]}"#;

const CHILD: &str = "ALLSTREAM_TEST_VERBS_OF";
/// If this variable is set, the tests of `agrees.rs` run with the system's library and its devices.
pub(crate) const REAL: &str = "ALLSTREAM_TEST_VERBS_REAL";

pub(crate) fn is_real() -> bool {
    std::env::var_os(REAL).is_some()
}

/// A command that runs the test of this name in this program again.
fn again(test: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, test);
    // A process that a test has started inherits these variables already, and passes them on.
    if !is_real() && std::env::var_os(CHILD).is_none() {
        command.env(LIBRARY, library()).env(HOST, ONE);
    }
    command.envs(variables.iter().copied());
    command
}

/// Runs a test in a process of its own, with these variables; returns its output. `None` in that process, when `body` is done.
pub(crate) fn alone_says(test: &str, variables: &[(&str, &str)], body: impl FnOnce()) -> Option<Output> {
    if std::env::var(CHILD).as_deref() == Ok(test) {
        body();
        return None;
    }
    let mut command = again(test, variables);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Some(finished(command.spawn().unwrap()))
}

/// Like [`alone_says`], and asserts that the process succeeds and that the library prints no complaint.
pub(crate) fn alone(test: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    if let Some(output) = alone_says(test, variables, body) {
        let text = said(&output);
        assert!(output.status.success() && !text.contains("verbs for tests:"), "{}: {text}", output.status);
    }
}

pub(crate) fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned()).concat()
}

/// Waits for a process; kills it and panics after a minute.
pub(crate) fn finished(mut child: Child) -> Output {
    let end = Instant::now() + 3 * DEADLINE;
    // The output is short enough for the pipes, so the process does not wait for a reader.
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("a process did not end: {}", said(&child.wait_with_output().unwrap()));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    child.wait_with_output().unwrap()
}

/// The second process of a test with two processes: it runs the same test, and [`is_other`] is true there.
pub(crate) struct Other {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

const OTHER: &str = "ALLSTREAM_TEST_VERBS_OTHER";

pub(crate) fn is_other() -> bool {
    std::env::var_os(OTHER).is_some()
}

impl Other {
    pub(crate) fn start(test: &str) -> Other {
        let mut command = again(test, &[(OTHER, "1")]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Other { child, lines }
    }

    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// The next line that the second process has sent with [`tell`]; lines of the test harness are skipped.
    pub(crate) fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "the other process has ended");
            if let Some((_, told)) = line.split_once("> ") {
                return told.trim().to_owned();
            }
        }
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        assert!(self.child.wait().unwrap().signal().is_some());
    }

    pub(crate) fn succeeds(mut self) {
        drop(self.child.stdin.take());
        let mut rest = String::new();
        self.lines.read_to_string(&mut rest).unwrap();
        assert!(finished(self.child).status.success(), "the other process: {rest}");
    }
}

/// Called in the second process: sends a line to the first.
pub(crate) fn tell(line: &str) {
    println!("> {line}");
    std::io::stdout().flush().unwrap();
}

/// Called in the second process: waits for a line from the first.
pub(crate) fn hear() -> String {
    let mut line = String::new();
    assert!(std::io::stdin().read_line(&mut line).unwrap() > 0, "the first process has ended");
    line.trim().to_owned()
}

pub(crate) fn verbs() -> &'static Verbs {
    Verbs::get().unwrap_or_else(|missing| panic!("{missing}"))
}

/// A function that only the library for tests has.
///
/// # Safety
/// `F` is the type of a pointer to this function.
unsafe fn knob<F: Copy>(name: &str) -> F {
    let path = CString::new(std::env::var(LIBRARY).unwrap()).unwrap();
    let name = CString::new(name).unwrap();
    // SAFETY: the library is loaded already and never closed; `F` is a function pointer, by the caller's promise, and so as large as an address.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        let address = libc::dlsym(handle, name.as_ptr());
        assert!(!address.is_null(), "{name:?}");
        std::mem::transmute_copy(&address)
    }
}

pub(crate) fn calls(name: &str) -> u64 {
    let name = CString::new(name).unwrap();
    // SAFETY: the function has this type in `calls/knobs.rs`, and every pointer that is passed is valid during the call.
    unsafe { knob::<unsafe extern "C" fn(*const c_char) -> u64>("allstream_test_verbs_calls")(name.as_ptr()) }
}

pub(crate) fn fail(name: &str, nth: u64, code: c_int) -> c_int {
    let name = CString::new(name).unwrap();
    // SAFETY: as above.
    unsafe {
        knob::<unsafe extern "C" fn(*const c_char, u64, c_int) -> c_int>("allstream_test_verbs_fail")(
            name.as_ptr(),
            nth,
            code,
        )
    }
}

pub(crate) fn stall(nth: u64) {
    // SAFETY: as above.
    assert_eq!(unsafe { knob::<extern "C" fn(u64) -> c_int>("allstream_test_verbs_stall")(nth) }, 0);
}

pub(crate) fn set_delays(longest_us: u64, seed: u64) {
    // SAFETY: as above.
    unsafe { knob::<extern "C" fn(u64, u64)>("allstream_test_verbs_set_delays")(longest_us, seed) };
}

pub(crate) fn set_loss(of_a_thousand: u64) {
    // SAFETY: as above.
    unsafe { knob::<extern "C" fn(u64)>("allstream_test_verbs_set_loss")(of_a_thousand) };
}

pub(crate) fn break_pair(number: u32) {
    // SAFETY: as above.
    assert_eq!(unsafe { knob::<extern "C" fn(u32) -> c_int>("allstream_test_verbs_break")(number) }, 0);
}

pub(crate) fn set_port(device: &str, port: u8, state: c_uint) {
    let name = CString::new(device).unwrap();
    // SAFETY: as above.
    let code = unsafe {
        knob::<unsafe extern "C" fn(*const c_char, u8, c_uint) -> c_int>("allstream_test_verbs_set_port")(
            name.as_ptr(),
            port,
            state,
        )
    };
    assert_eq!(code, 0);
}

/// What exists now, and what has happened, with the layout of `Report` in the library's `counts.rs`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Report {
    pub(crate) contexts: u64,
    pub(crate) domains: u64,
    pub(crate) regions: u64,
    pub(crate) pinned_bytes: u64,
    pub(crate) windows: u64,
    pub(crate) channels: u64,
    pub(crate) completion_queues: u64,
    pub(crate) queue_pairs: u64,
    pub(crate) refused_accesses: u64,
    pub(crate) unmapped: u64,
    pub(crate) no_receive: u64,
    pub(crate) retransmissions: u64,
    pub(crate) overflows: u64,
    pub(crate) flushed: u64,
    pub(crate) requests: u64,
    pub(crate) completions: u64,
    pub(crate) wakeups: u64,
    pub(crate) most_pinned_bytes: u64,
}

pub(crate) fn report() -> Report {
    let mut report = Report::default();
    // SAFETY: as above.
    let code = unsafe {
        knob::<unsafe extern "C" fn(*mut Report) -> c_int>("allstream_test_verbs_report")(&raw mut report)
    };
    assert_eq!(code, 0);
    report
}

/// The options with which an end of a connection is made.
#[derive(Clone, Copy)]
pub(crate) struct Wishes {
    pub(crate) device: usize,
    pub(crate) port: u8,
    pub(crate) memory: usize,
    pub(crate) access: c_int,
    pub(crate) entries: c_int,
    pub(crate) cap: IbvQpCap,
    pub(crate) reads: u8,
    pub(crate) answered_reads: u8,
    pub(crate) timeout: u8,
    pub(crate) retries: u8,
    pub(crate) rnr_retries: u8,
}

impl Default for Wishes {
    fn default() -> Self {
        let (max_send_wr, max_recv_wr, max_send_sge, max_recv_sge) = (32, 32, 4, 4);
        Wishes {
            device: 0,
            port: 1,
            memory: 8 << 20,
            access: ALL,
            entries: 256,
            cap: IbvQpCap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data: 64 },
            reads: 4,
            answered_reads: 4,
            timeout: 14,
            retries: 6,
            rnr_retries: 3,
        }
    }
}

/// What an end must know about its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) number: u32,
    pub(crate) gid: u128,
    pub(crate) at: u64,
    pub(crate) rkey: u32,
}

impl Address {
    pub(crate) fn line(&self) -> String {
        format!("{} {} {} {}", self.number, self.gid, self.at, self.rkey)
    }

    pub(crate) fn of_line(line: &str) -> Address {
        let parts: Vec<u128> = line.split(' ').map(|part| part.parse().unwrap()).collect();
        Address { number: parts[0] as u32, gid: parts[1], at: parts[2] as u64, rkey: parts[3] as u32 }
    }
}

/// One end of a connection: a queue pair with all that it needs.
pub(crate) struct End {
    pub(crate) wishes: Wishes,
    pub(crate) context: *mut IbvContext,
    pub(crate) domain: *mut IbvPd,
    pub(crate) channel: *mut IbvCompChannel,
    pub(crate) queue: *mut IbvCq,
    pub(crate) pair: *mut IbvQp,
    pub(crate) region: *mut IbvMr,
    pub(crate) memory: *mut u8,
    gid: IbvGidEntry,
    mtu: c_uint,
    pub(crate) peer: Option<Address>,
}

// SAFETY: the library may be called from any thread, and nobody else uses this end's objects and memory.
unsafe impl Send for End {}

impl End {
    pub(crate) fn new(wishes: Wishes) -> End {
        let v = verbs();
        // SAFETY: the list is valid until it is freed; it ends with a null, and no test asks for a device behind that. All other objects that
        // are passed were just made, and live until this end is dropped.
        unsafe {
            let mut count = 0;
            let list = v.get_device_list(&raw mut count).unwrap();
            let device = *list.add(wishes.device);
            assert!(!device.is_null(), "no device");
            let context = v.open_device(device).unwrap();
            v.free_device_list(list).unwrap();
            let mut port = IbvPortAttr::default();
            v.query_port(context, wishes.port, &raw mut port).unwrap();
            let mut table = [IbvGidEntry::default(); 64];
            let entry = size_of::<IbvGidEntry>();
            let found = v.query_gid_table(context, table.as_mut_ptr(), 64, 0, entry).unwrap();
            let is_v4 = |gid: &&IbvGidEntry| {
                gid.gid_type == 2 && gid.gid.raw[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255]
            };
            let own = |gid: &&IbvGidEntry| gid.port_num == u32::from(wishes.port);
            let gid = *table[..found as usize].iter().filter(own).find(is_v4).expect("an IPv4 address");
            let domain = v.alloc_pd(context).unwrap();
            let channel = v.create_comp_channel(context).unwrap();
            libc::fcntl((*channel).fd, libc::F_SETFL, libc::O_NONBLOCK);
            let queue = v.create_cq(context, wishes.entries, ptr::null_mut(), channel, 0).unwrap();
            let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let memory = libc::mmap(ptr::null_mut(), wishes.memory, prot, flags, -1, 0);
            assert_ne!(memory, libc::MAP_FAILED);
            let region = v.reg_mr(domain, memory, wishes.memory, wishes.access).unwrap();
            let mut end = End {
                wishes,
                context,
                domain,
                channel,
                queue,
                pair: ptr::null_mut(),
                region,
                memory: memory.cast(),
                gid,
                mtu: port.active_mtu,
                peer: None,
            };
            end.pair = end.new_pair().unwrap();
            end
        }
    }

    pub(crate) fn attributes(&self) -> IbvQpInitAttr {
        let (queue, cap) = (self.queue, self.wishes.cap);
        let (qp_context, srq) = (ptr::null_mut(), ptr::null_mut());
        IbvQpInitAttr { qp_context, send_cq: queue, recv_cq: queue, srq, cap, qp_type: 2, sq_sig_all: 0 }
    }

    pub(crate) fn new_pair(&self) -> Result<*mut IbvQp, VerbsError> {
        let mut attributes = self.attributes();
        // SAFETY: the domain and the queue exist.
        unsafe { verbs().create_qp(self.domain, &raw mut attributes) }
    }

    pub(crate) fn address(&self) -> Address {
        // SAFETY: the queue pair and the region exist.
        let (number, rkey) = unsafe { ((*self.pair).qp_num, (*self.region).rkey) };
        Address { number, gid: u128::from_be_bytes(self.gid.gid.raw), at: self.memory as u64, rkey }
    }

    pub(crate) fn modify(&self, mut to: IbvQpAttr, mask: c_int) -> Result<(), VerbsError> {
        // SAFETY: the queue pair exists.
        unsafe { verbs().modify_qp(self.pair, &raw mut to, mask) }
    }

    pub(crate) fn initial(&self) -> IbvQpAttr {
        let access = (self.wishes.access & 7) as c_uint;
        IbvQpAttr { qp_state: 1, port_num: self.wishes.port, qp_access_flags: access, ..IbvQpAttr::default() }
    }

    pub(crate) fn receiving(&self, peer: &Address) -> IbvQpAttr {
        let mut to = IbvQpAttr {
            qp_state: 2,
            path_mtu: self.mtu,
            dest_qp_num: peer.number,
            rq_psn: 0xff_fffe,
            max_dest_rd_atomic: self.wishes.answered_reads,
            min_rnr_timer: 12,
            ..IbvQpAttr::default()
        };
        to.ah_attr.grh.dgid.raw = peer.gid.to_be_bytes();
        to.ah_attr.grh.sgid_index = self.gid.gid_index as u8;
        to.ah_attr.grh.hop_limit = 64;
        (to.ah_attr.is_global, to.ah_attr.port_num) = (1, self.wishes.port);
        to
    }

    pub(crate) fn sending(&self) -> IbvQpAttr {
        IbvQpAttr {
            qp_state: 3,
            sq_psn: 0xff_fffe,
            timeout: self.wishes.timeout,
            retry_cnt: self.wishes.retries,
            rnr_retry: self.wishes.rnr_retries,
            max_rd_atomic: self.wishes.reads,
            ..IbvQpAttr::default()
        }
    }

    pub(crate) fn connect(&mut self, peer: &Address) {
        self.peer = Some(*peer);
        self.modify(self.initial(), TO_INIT).unwrap();
        self.modify(self.receiving(peer), TO_RECEIVE).unwrap();
        self.modify(self.sending(), TO_SEND).unwrap();
    }

    /// Makes two ends in this process that are connected with each other.
    pub(crate) fn two(wishes: Wishes) -> (End, End) {
        Self::both(wishes, wishes)
    }

    pub(crate) fn both(one: Wishes, other: Wishes) -> (End, End) {
        let (mut a, mut b) = (End::new(one), End::new(other));
        let (to_a, to_b) = (a.address(), b.address());
        // `b` can receive before `a` can send: in most tests, `a` sends first.
        b.connect(&to_a);
        a.connect(&to_b);
        (a, b)
    }

    pub(crate) fn bytes(&mut self, at: usize, bytes: usize) -> &mut [u8] {
        assert!(at + bytes <= self.wishes.memory);
        // SAFETY: the range is in this end's memory; tests use it only while no request writes to it.
        unsafe { std::slice::from_raw_parts_mut(self.memory.add(at), bytes) }
    }

    pub(crate) fn piece(&self, at: usize, bytes: usize) -> IbvSge {
        // SAFETY: the region exists.
        let lkey = unsafe { (*self.region).lkey };
        IbvSge { addr: self.memory as u64 + at as u64, length: bytes as u32, lkey }
    }

    /// A request on the peer's memory at offset `to`.
    pub(crate) fn request(&self, opcode: c_uint, flags: c_uint, to: usize) -> IbvSendWr {
        let peer = self.peer.unwrap_or(Address { number: 0, gid: 0, at: 0, rkey: 0 });
        // SAFETY: the request consists of numbers and raw pointers, for which all zeros are valid.
        let zero: IbvSendWr = unsafe { std::mem::zeroed() };
        IbvSendWr { opcode, send_flags: flags, remote_addr: peer.at + to as u64, rkey: peer.rkey, ..zero }
    }

    pub(crate) fn post(&self, mut request: IbvSendWr, id: u64, pieces: &mut [IbvSge]) -> c_int {
        (request.wr_id, request.sg_list, request.num_sge) = (id, pieces.as_mut_ptr(), pieces.len() as c_int);
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair exists, and the request, its pieces and `bad` live during the call.
        unsafe { (*self.context).ops.post_send.unwrap()(self.pair, &raw mut request, &raw mut bad) }
    }

    /// Posts a request with one piece of this end's memory, and asks for a completion.
    pub(crate) fn put(&self, opcode: c_uint, id: u64, (from, bytes): (usize, usize), to: usize) -> c_int {
        let request = IbvSendWr { imm_data: (id as u32).to_be(), ..self.request(opcode, SIGNALED, to) };
        self.post(request, id, &mut [self.piece(from, bytes)])
    }

    pub(crate) fn receive(&self, id: u64, pieces: &mut [IbvSge]) -> c_int {
        let (sg_list, num_sge) = (pieces.as_mut_ptr(), pieces.len() as c_int);
        let mut request = IbvRecvWr { wr_id: id, next: ptr::null_mut(), sg_list, num_sge };
        let mut bad = ptr::null_mut();
        // SAFETY: as above.
        unsafe { (*self.context).ops.post_recv.unwrap()(self.pair, &raw mut request, &raw mut bad) }
    }

    pub(crate) fn poll(&self) -> Option<IbvWc> {
        let mut wc = IbvWc::default();
        // SAFETY: the queue exists, and there is room for one completion.
        match unsafe { (*self.context).ops.poll_cq.unwrap()(self.queue, 1, &raw mut wc) } {
            0 => None,
            1 => Some(wc),
            code => panic!("poll_cq: {code}"),
        }
    }

    pub(crate) fn arm(&self, only_solicited: bool) {
        // SAFETY: the queue exists.
        let code = unsafe { (*self.context).ops.req_notify_cq.unwrap()(self.queue, only_solicited.into()) };
        assert_eq!(code, 0);
    }

    /// Whether the channel gets an event within this time, which is then fetched and acknowledged.
    pub(crate) fn is_told(&self, within: Duration) -> bool {
        // SAFETY: the channel exists.
        let fd = unsafe { (*self.channel).fd };
        if !is_readable(fd, within) {
            return false;
        }
        let (mut queue, mut data) = (ptr::null_mut(), ptr::null_mut::<c_void>());
        // SAFETY: the channel exists, there is room for two addresses, and the queue is this end's.
        unsafe {
            verbs().get_cq_event(self.channel, &raw mut queue, &raw mut data).unwrap();
            assert_eq!(queue, self.queue);
            verbs().ack_cq_events(queue, 1).unwrap();
        }
        true
    }

    /// Waits for the next completion, asleep on the channel.
    pub(crate) fn wait(&self) -> IbvWc {
        let end = Instant::now() + DEADLINE;
        loop {
            if let Some(wc) = self.poll() {
                return wc;
            }
            self.arm(false);
            if let Some(wc) = self.poll() {
                return wc;
            }
            let left = end.saturating_duration_since(Instant::now());
            assert!(self.is_told(left), "no completion came");
        }
    }

    /// Waits for the next completion, and asserts that it is a success.
    pub(crate) fn good(&self) -> IbvWc {
        let wc = self.wait();
        assert_eq!(wc.status, 0, "{wc:?}");
        wc
    }

    /// Waits for the next asynchronous event, and acknowledges it.
    pub(crate) fn event(&self) -> (c_uint, *mut c_void) {
        let mut event = IbvAsyncEvent { element: ptr::null_mut(), event_type: 0 };
        // SAFETY: the device is open, and there is room for an event.
        unsafe {
            assert!(is_readable((*self.context).async_fd, DEADLINE), "no event");
            verbs().get_async_event(self.context, &raw mut event).unwrap();
            verbs().ack_async_event(&raw mut event).unwrap();
        }
        (event.event_type, event.element)
    }

    pub(crate) fn has_event(&self) -> bool {
        // SAFETY: the device is open.
        is_readable(unsafe { (*self.context).async_fd }, Duration::ZERO)
    }

    pub(crate) fn to_error(&self) {
        self.modify(IbvQpAttr { qp_state: 6, ..IbvQpAttr::default() }, 1).unwrap();
    }

    /// Registers the memory again: the old keys are refused from now on.
    pub(crate) fn register_again(&mut self) {
        // SAFETY: the region exists, and is deregistered once; the memory is this end's.
        unsafe {
            verbs().dereg_mr(self.region).unwrap();
            let memory = self.memory.cast();
            self.region =
                verbs().reg_mr(self.domain, memory, self.wishes.memory, self.wishes.access).unwrap();
        }
    }

    pub(crate) fn destroy_pair(&mut self) {
        let pair = std::mem::replace(&mut self.pair, ptr::null_mut());
        // SAFETY: the queue pair exists, and nobody uses it from here on.
        unsafe { verbs().destroy_qp(pair).unwrap() };
    }
}

pub(crate) fn is_readable(fd: c_int, within: Duration) -> bool {
    let mut wanted = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer leads to one `pollfd`.
    unsafe { libc::poll(&raw mut wanted, 1, within.as_millis() as c_int) == 1 }
}

impl Drop for End {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let v = verbs();
        if !self.pair.is_null() {
            self.destroy_pair();
        }
        // SAFETY: `new` and `register_again` made these objects, and each is freed once, after those that use it.
        unsafe {
            v.dereg_mr(self.region).unwrap();
            v.destroy_cq(self.queue).unwrap();
            v.destroy_comp_channel(self.channel).unwrap();
            v.dealloc_pd(self.domain).unwrap();
            v.close_device(self.context).unwrap();
            libc::munmap(self.memory.cast(), self.wishes.memory);
        }
    }
}

/// A byte for position `at`, so that misplaced data is noticed.
pub(crate) fn pattern(at: usize) -> u8 {
    (at.wrapping_mul(2_654_435_761) >> 13) as u8
}
