//! A Python object that lends arena memory to numpy. The other ranks of this host read this memory in place.

use allstream::ArenaBuf;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Bytes in memory that the other ranks of this host read in place. A numpy array over these bytes keeps the `Block` alive.
#[pyclass(frozen, module = "allstream._native")]
pub(crate) struct Block {
    /// Address and length, for numpy. `Block` never reads or writes the memory: `_memory` only keeps it allocated.
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
    /// numpy reads this attribute: `numpy.asarray(block)` is an array over these bytes, not a copy.
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
