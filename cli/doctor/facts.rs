//! The facts about a device, its driver and this system that `allstream doctor` finds out before it asks the probes.

use allstream_sys::cuda::{
    CU_COMPUTEMODE_DEFAULT, CU_COMPUTEMODE_EXCLUSIVE_PROCESS, CU_COMPUTEMODE_PROHIBITED,
    CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY,
    CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
    CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
    CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE,
    CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, CU_DEVICE_ATTRIBUTE_INTEGRATED,
    CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
};
use serde::{Deserialize, Serialize};

use super::answer::{self, step};
use super::driver::{Problem, cuda, device};

/// The name by which the doctor starts the process that finds the facts, as it starts each probe by its name.
pub(crate) const NAME: &str = "facts";
/// Environment variables that change what the driver does, or which driver is loaded.
const VARIABLES: [&str; 6] = [
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_MPS_PIPE_DIRECTORY",
    "ALLSTREAM_CUDA_LIBRARY",
];

/// The facts, which are printed above the probes' answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Facts {
    pub(crate) ordinal: usize,
    pub(crate) name: String,
    pub(crate) uuid: String,
    pub(crate) compute_capability: String,
    pub(crate) multiprocessors: i32,
    pub(crate) copy_engines: i32,
    /// `None`: the driver does not say.
    pub(crate) memory_bytes: Option<usize>,
    pub(crate) is_mig: bool,
    pub(crate) integrated: bool,
    pub(crate) compute_mode: String,
    pub(crate) unified_addressing: bool,
    pub(crate) can_map_host_memory: bool,
    pub(crate) host_register_supported: bool,
    pub(crate) host_pointer_for_registered_memory: bool,
    /// Whether the driver has the functions by which streams wait for words of 32 bits and write them. The next three are attributes of the
    /// device.
    pub(crate) stream_wait_value: bool,
    pub(crate) stream_wait_value_64: bool,
    pub(crate) stream_wait_value_nor: bool,
    pub(crate) ipc_events: bool,
    /// The file of the driver's library.
    pub(crate) driver: String,
    /// The newest CUDA version that the driver supports.
    pub(crate) cuda: String,
    pub(crate) kernel: String,
    pub(crate) gvisor: bool,
    /// Whether an MPS daemon seems to run: its pipe is in the folder where programs look by default.
    pub(crate) mps_by_default: bool,
    pub(crate) variables: Vec<(String, String)>,
}

/// Finds the facts, and tells them to the process that has started this one.
pub(crate) fn tell(ordinal: usize) {
    if let Err(error) = allstream::cuda::driver() {
        return answer::tell("nothing", &error.to_string());
    }
    answer::tell("ready", "");
    match find(ordinal) {
        Ok(facts) => match serde_json::to_string(&facts) {
            Ok(text) => answer::tell("answer", &text),
            Err(error) => answer::tell("failed", &error.to_string()),
        },
        Err(Found::NoDevice(Problem(text))) => answer::tell("nothing", &text),
        Err(Found::Failed(Problem(text))) => answer::tell("failed", &text),
    }
}

enum Found {
    NoDevice(Problem),
    Failed(Problem),
}

fn find(ordinal: usize) -> Result<Facts, Found> {
    let cuda = cuda().map_err(Found::NoDevice)?;
    let device = device(cuda, ordinal).map_err(Found::NoDevice)?;
    let facts = || -> Result<Facts, Problem> {
        step("asking for attributes");
        // SAFETY: the driver gave the device.
        let attribute = |which| unsafe { cuda.device_get_attribute(which, device) };
        let is_set = |which| attribute(which).map(|value| value != 0);
        // A driver may not know an attribute that is newer than it.
        let may = |which| is_set(which).unwrap_or(false);
        let name = cuda.device_name(device)?;
        let uuid = match cuda.has_device_get_uuid_v2() {
            // SAFETY: as above.
            true => unsafe { cuda.device_get_uuid_v2(device) },
            // SAFETY: as above.
            false => unsafe { cuda.device_get_uuid(device) },
        }?;
        // SAFETY: as above.
        let memory_bytes = unsafe { cuda.device_total_mem(device) }.ok();
        // SAFETY: asks for a number.
        let version = unsafe { cuda.driver_get_version() }?;
        let kernel = rustix::system::uname();
        let version_of_kernel = std::fs::read_to_string("/proc/version").unwrap_or_default();
        let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
        Ok(Facts {
            ordinal,
            uuid: format!("GPU-{}", hex(&uuid.0)),
            compute_capability: format!(
                "{}.{}",
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?
            ),
            multiprocessors: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            copy_engines: attribute(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT).unwrap_or(0),
            memory_bytes,
            is_mig: name.contains("MIG"),
            name,
            integrated: may(CU_DEVICE_ATTRIBUTE_INTEGRATED),
            compute_mode: match attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)? {
                CU_COMPUTEMODE_DEFAULT => "default".into(),
                CU_COMPUTEMODE_PROHIBITED => "prohibited".into(),
                CU_COMPUTEMODE_EXCLUSIVE_PROCESS => "exclusive process".into(),
                other => format!("unknown ({other})"),
            },
            unified_addressing: is_set(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)?,
            can_map_host_memory: is_set(CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY)?,
            host_register_supported: may(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED),
            host_pointer_for_registered_memory: may(
                CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
            ),
            stream_wait_value: cuda.has_stream_wait_value32() && cuda.has_stream_write_value32(),
            stream_wait_value_64: may(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS),
            stream_wait_value_nor: may(CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR),
            ipc_events: may(CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED),
            driver: cuda.file().into(),
            cuda: format!("{}.{}", version / 1000, version % 1000 / 10),
            kernel: format!("{} {}", text(kernel.sysname()), text(kernel.release())),
            // In gVisor `/proc/version` has gVisor's name, or this build date of an old Linux kernel that gVisor claims to be.
            gvisor: ["gVisor", "Sun Jan 10 15:06:54 PST 2016"]
                .iter()
                .any(|it| version_of_kernel.contains(it)),
            mps_by_default: std::path::Path::new("/tmp/nvidia-mps/control").exists(),
            variables: VARIABLES
                .iter()
                .filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?)))
                .collect(),
        })
    };
    facts().map_err(Found::Failed)
}

/// As `nvidia-smi -L` writes it.
fn hex(uuid: &[u8; 16]) -> String {
    let part = |part: &[u8]| part.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let ends = [(0, 4), (4, 6), (6, 8), (8, 10), (10, 16)];
    ends.map(|(from, to)| part(&uuid[from..to])).join("-")
}

fn yes(is: bool) -> String {
    if is { "yes".into() } else { "no".into() }
}

impl Facts {
    /// What this environment variable was set to, if it was.
    pub(crate) fn variable(&self, name: &str) -> Option<&str> {
        self.variables.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The facts as lines to print: the name and the text of each.
    pub(crate) fn lines(&self) -> Vec<(&'static str, String)> {
        let mig = if self.is_mig { ", a part of a device that is divided (MIG)" } else { "" };
        let memory = match self.memory_bytes {
            Some(bytes) => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
            None => "unknown".into(),
        };
        let exclusive = match self.compute_mode.as_str() {
            "exclusive process" => {
                ": one process at a time, so ranks that are processes need MPS, and probes of two processes fail"
            }
            "prohibited" => ": no process may use the device (nvidia-smi -c 0 allows it)",
            _ => "",
        };
        let set: Vec<String> = self.variables.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let mps = match (self.variable("CUDA_MPS_PIPE_DIRECTORY"), self.mps_by_default) {
            (Some(_), _) => "asked for (CUDA_MPS_PIPE_DIRECTORY)",
            (None, true) => "likely in use: there is /tmp/nvidia-mps/control",
            (None, false) => "not in use",
        };
        let mut lines = vec![
            ("device", format!("{} {}{mig}, {}", self.ordinal, self.name, self.uuid)),
            (
                "hardware",
                format!(
                    "compute capability {}, {} multiprocessors, {} copy engines, {memory}{}",
                    self.compute_capability,
                    self.multiprocessors,
                    self.copy_engines,
                    if self.integrated { ", integrated with the host" } else { "" }
                ),
            ),
            ("driver", format!("CUDA {} by {}", self.cuda, self.driver)),
            ("compute mode", format!("{}{exclusive}", self.compute_mode)),
            (
                "host memory",
                format!(
                    "can be mapped: {}; one space of addresses: {}; can be registered: {}, under the host's addresses: {}",
                    yes(self.can_map_host_memory),
                    yes(self.unified_addressing),
                    yes(self.host_register_supported),
                    yes(self.host_pointer_for_registered_memory)
                ),
            ),
            (
                "words",
                format!(
                    "cuStreamWaitValue32: {}; of 64 bits: {}; NOR: {}; events between processes: {}",
                    yes(self.stream_wait_value),
                    yes(self.stream_wait_value_64),
                    yes(self.stream_wait_value_nor),
                    yes(self.ipc_events)
                ),
            ),
            ("system", format!("{}{}", self.kernel, if self.gvisor { ", within gVisor" } else { "" })),
            ("MPS", mps.into()),
        ];
        if !set.is_empty() {
            lines.push(("variables", set.join(" ")));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvidia_smi_writes_it() {
        let uuid: [u8; 16] = std::array::from_fn(|i| i as u8 * 0x11);
        assert_eq!(hex(&uuid), "00112233-4455-6677-8899-aabbccddeeff");
    }
}
