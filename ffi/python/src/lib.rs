//! The compiled module of the Python package `allstream`.
//!
//! No thread of the engine ever waits for the interpreter's lock (the GIL). One thread of this module ([`keeper`]) waits for it in their place:
//! it drops Python objects, and polls operations whose end somebody in Python waits for, to record how they ended. Users' callbacks may wait
//! for anything, and run on threads of their own ([`callbacks`]).

use pyo3::prelude::*;

mod block;
mod buckets;
mod callbacks;
mod calls;
mod comm;
mod command;
mod errors;
mod flight;
mod in_flight;
mod interpreter;
mod join;
mod keeper;
mod memory;
mod operation;
mod options;
mod packages;
mod stream;
mod wait;
mod work;

#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<comm::Comm>()?;
    module.add_class::<comm::Verdict>()?;
    module.add_class::<work::Work>()?;
    module.add_class::<stream::HostStream>()?;
    module.add_class::<block::Block>()?;
    module.add_class::<buckets::Buckets>()?;
    module.add_function(wrap_pyfunction!(join::connect, module)?)?;
    module.add_function(wrap_pyfunction!(join::connect_node, module)?)?;
    module.add_function(wrap_pyfunction!(join::listen_for_ranks, module)?)?;
    module.add_function(wrap_pyfunction!(join::local, module)?)?;
    module.add_function(wrap_pyfunction!(keeper::forked, module)?)?;
    module.add_function(wrap_pyfunction!(interpreter::interpreter_ends, module)?)?;
    module.add_function(wrap_pyfunction!(in_flight::in_flight, module)?)?;
    module.add_function(wrap_pyfunction!(command::run_command, module)?)?;
    packages::tell_of_nccl(module.py());
    Ok(())
}
