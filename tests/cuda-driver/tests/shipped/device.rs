//! Launches on a device of the driver, and the comparison of its memory with what is expected.

use std::collections::HashMap;
use std::ffi::{CString, c_void};

use allstream_cuda_kernels::{Kernel, Launch, Module};
use allstream_kernels::DType;

use crate::support::*;
use crate::values::{Random, fill};
use crate::{code, ok};

/// Bytes before the elements, and bytes after them, each in half of all buffers. Where there are none, the driver finds accesses beyond the
/// buffer.
const GUARD: usize = 48;
/// The most instructions that a launch may take: about a second's.
const BUDGET: u64 = 1 << 28;

/// What is wrong in a module: one instruction, which occurrence of it, and what it becomes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mistake {
    pub(crate) module: Module,
    pub(crate) from: &'static str,
    pub(crate) nth: usize,
    pub(crate) to: &'static str,
}

impl Mistake {
    fn text(self) -> String {
        let text = self.module.ptx();
        let (at, _) = text.match_indices(self.from).nth(self.nth).unwrap();
        [&text[..at], self.to, &text[at + self.from.len()..]].concat()
    }
}

/// A device with the modules that were needed so far.
pub(crate) struct Device {
    stream: u64,
    mistake: Option<Mistake>,
    modules: HashMap<Module, u64>,
    functions: HashMap<Kernel, u64>,
    pub(crate) launches: u64,
    _driver: Driver,
}

impl Device {
    pub(crate) fn new(mistake: Option<Mistake>) -> Self {
        let driver = Driver::new(1);
        ok!(allstream_test_cuda_set_budget(BUDGET));
        let (modules, functions) = (HashMap::new(), HashMap::new());
        Device { stream: stream(), mistake, modules, functions, launches: 0, _driver: driver }
    }

    fn function(&mut self, kernel: Kernel) -> u64 {
        let mistake = self.mistake.filter(|mistake| mistake.module == kernel.module);
        let module = *self.modules.entry(kernel.module).or_insert_with(|| {
            let text = mistake.map_or_else(|| kernel.module.ptx().to_owned(), Mistake::text);
            let (mut module, text) = (0, CString::new(text).unwrap());
            ok!(cuModuleLoadData(&mut module, text.as_ptr().cast()));
            module
        });
        *self.functions.entry(kernel).or_insert_with(|| {
            let (mut function, name) = (0, CString::new(kernel.name()).unwrap());
            ok!(cuModuleGetFunction(&mut function, module, name.as_ptr()));
            function
        })
    }

    /// Launches, compares every byte of the buffers with what is expected, and frees them (unless the launch fails). Results of
    /// kernels do not depend on the number of threads, so that number is random.
    pub(crate) fn check(
        &mut self,
        random: &mut Random,
        launch: &Launch,
        buffers: Vec<Buffer>,
        expected: &[Vec<u8>],
    ) -> Result<(), String> {
        let name = launch.kernel.name();
        if launch.blocks > 0 {
            let function = self.function(launch.kernel);
            let threads = random.pick(&[launch.threads, 32, 7, 1]);
            let place: *const c_void = launch.arguments.address().cast();
            ok!(cuLaunchKernel(
                function,
                launch.blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                self.stream,
                &place,
                std::ptr::null()
            ));
            self.launches += 1;
            let code = finish(self.stream);
            if code != 0 {
                return Err(format!("{name}: code {code}"));
            }
        }
        let mut complaint = Ok(());
        for (index, (buffer, expected)) in buffers.into_iter().zip(expected).enumerate() {
            let (start, end) = (buffer.start, buffer.end);
            let found = buffer.back();
            let differs = (0..found.len()).find(|&at| found[at] != expected[at]);
            if let (Ok(()), Some(at)) = (&complaint, differs) {
                let guard = if (start..end).contains(&at) { "" } else { ", which is guarded," };
                let (at_start, is, was) = (at as i64 - start as i64, found[at], expected[at]);
                complaint = Err(format!(
                    "{name}: byte {at_start} of buffer {index}{guard} is {is:#04x}, not {was:#04x}"
                ));
            }
        }
        complaint
    }

    /// Ends the primary context with all that is in it, and retains a new one: for what comes after a failure that was wanted.
    pub(crate) fn reset(&self) {
        ok!(cuDevicePrimaryCtxReset_v2(0));
        retain(0);
    }
}

impl Drop for Device {
    /// Errors are ignored: what is left, `Driver` complains of when it is dropped.
    fn drop(&mut self) {
        for module in self.modules.values() {
            code!(cuModuleUnload(*module));
        }
        code!(cuStreamDestroy_v2(self.stream));
        code!(allstream_test_cuda_set_budget(1 << 32));
    }
}

/// How addresses lie: the path that a kernel takes depends on it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Lie {
    /// All at the same offset from a multiple of 16 bytes.
    Alike(usize),
    /// Each aligned for its elements.
    Elements,
    /// Anywhere.
    Bytes,
}

impl Lie {
    /// Every way, for elements of this type.
    pub(crate) fn all(random: &mut Random, dtype: DType) -> [Lie; 3] {
        [Lie::Alike(random.below(16 / dtype.size()) * dtype.size()), Lie::Elements, Lie::Bytes]
    }
}

/// Memory of the device, and what it was filled with.
pub(crate) struct Buffer {
    base: u64,
    bytes: Vec<u8>,
    /// Where the elements start and end.
    start: usize,
    end: usize,
}

impl Buffer {
    pub(crate) fn new(random: &mut Random, dtype: DType, len: usize, lie: Lie) -> Self {
        let offset = match lie {
            Lie::Alike(offset) => offset,
            Lie::Elements => random.below(16 / dtype.size()) * dtype.size(),
            Lie::Bytes => random.below(16),
        };
        let start = random.pick(&[0, GUARD]) + offset;
        let end = start + len * dtype.size();
        // An allocation cannot have 0 bytes.
        let mut bytes = vec![0; (end + random.pick(&[0, GUARD])).max(1)];
        bytes.fill_with(|| random.bits() as u8);
        fill(random, dtype, &mut bytes[start..end]);
        let base = upload(&bytes);
        assert_eq!(base % 16, 0);
        Buffer { base, bytes, start, end }
    }

    /// Where the elements are on the device.
    pub(crate) fn address(&self) -> u64 {
        self.base + self.start as u64
    }

    fn back(self) -> Vec<u8> {
        let found = download(self.base, self.bytes.len());
        ok!(cuMemFree_v2(self.base));
        found
    }
}

/// Copies of the buffers for the oracle, and where their elements are.
pub(crate) fn copies(buffers: &[Buffer]) -> (Vec<Vec<u8>>, Vec<*mut u8>) {
    let mut copies: Vec<Vec<u8>> = buffers.iter().map(|buffer| buffer.bytes.clone()).collect();
    let at = copies.iter_mut().zip(buffers).map(|(copy, buffer)| copy[buffer.start..].as_mut_ptr()).collect();
    (copies, at)
}
