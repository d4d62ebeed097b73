//! Memory that the other ranks of this host read in place, as an object whose memory numpy takes.

use allstream::ArenaBuf;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Bytes in memory that the other ranks of this host read where they lie. An array of numpy's on it keeps it.
#[pyclass(frozen, module = "allstream._native")]
pub(crate) struct Block {
    /// The address and the length: the memory itself is never read or written through `_memory`.
    start: usize,
    len: usize,
    _memory: ArenaBuf<u8>,
}

impl Block {
    pub(crate) fn new(mut memory: ArenaBuf<u8>) -> Block {
        let (start, len) = (memory.as_mut_ptr() as usize, memory.len());
        Block { start, len, _memory: memory }
    }
}

#[pymethods]
impl Block {
    /// What numpy asks for: `numpy.asarray(block)` is an array of bytes that lie here.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let about = PyDict::new(py);
        about.set_item("shape", (self.len,))?;
        about.set_item("typestr", "|u1")?;
        about.set_item("data", (self.start, false))?;
        about.set_item("version", 3)?;
        Ok(about)
    }
}
