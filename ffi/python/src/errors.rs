//! The engine's errors as Python exceptions. Their classes are in `allstream/errors.py`; an exception has the fields of its error.

use allstream::{Error, Missing};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

fn module(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    let import = || Ok::<_, PyErr>(py.import("allstream.errors")?.unbind());
    Ok(MODULE.get_or_try_init(py, import)?.bind(py))
}

/// An exception of the class of this name, with its text and fields.
fn made(py: Python<'_>, class: &str, text: &str, fields: &Bound<'_, PyDict>) -> PyErr {
    let make = || module(py)?.getattr(intern!(py, "made"))?.call1((class, text, fields));
    match make() {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// The error of a call that cannot be carried out as it is; nothing was submitted.
pub(crate) fn invalid(py: Python<'_>, call: &str, problem: &str) -> PyErr {
    of(py, &Error::Invalid { call: call.into(), problem: problem.into() })
}

/// The error of a call that got an object which is no array.
pub(crate) fn not_an_array(object: &Bound<'_, PyAny>, call: &str) -> PyErr {
    let py = object.py();
    let class = object.get_type();
    let name = class.name().map_or_else(|_| "object".to_owned(), |name| name.to_string());
    let problem = format!(
        "expected a numpy array, a torch tensor, or another array that speaks DLPack, found {}; numpy.array(..) makes an array of numbers",
        match name.as_str() {
            "NoneType" => "None".to_owned(),
            name => format!("an object of type {name}"),
        }
    );
    let fields = PyDict::new(py);
    let set = || {
        fields.set_item("call", call)?;
        fields.set_item("problem", &problem)
    };
    match set() {
        Ok(()) => made(py, "NotAnArray", &format!("{call}: {problem}"), &fields),
        Err(error) => error,
    }
}

/// The error of a request that this module itself made of the system, and that the system refused.
pub(crate) fn system(doing: &str, error: &std::io::Error) -> PyErr {
    let error = Error::System { doing: doing.into(), problem: error.to_string() };
    Python::attach(|py| of(py, &error))
}

/// An error of the engine's as an exception.
pub(crate) fn of(py: Python<'_>, error: &Error) -> PyErr {
    match fields(py, error) {
        Ok((class, fields)) => made(py, class, &error.to_string(), &fields),
        Err(error) => error,
    }
}

fn by_rank<'py>(py: Python<'py>, missing: &[Missing]) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    for one in missing {
        all.set_item(one.rank, one.to_string())?;
    }
    Ok(all)
}

/// Puts the fields of an error into a dictionary under their names, and evaluates to the name of the error's class. Each row is a kind of
/// error; kinds without a row are of class `Error`. An expression behind a field's name is what Python gets in place of the field itself.
macro_rules! classes {
    ($error:expr, $into:ident; $($class:ident { $($field:ident $(: $value:expr)?),* })*) => {
        match $error {
            $(Error::$class { $($field,)* .. } => {
                $($into.set_item(stringify!($field), classes!(@value $field $(, $value)?))?;)*
                stringify!($class)
            })*
            _ => "Error",
        }
    };
    (@value $field:ident) => { $field };
    (@value $field:ident, $value:expr) => { $value };
}

/// The class of an error, and its fields.
fn fields<'py>(py: Python<'py>, error: &Error) -> PyResult<(&'static str, Bound<'py, PyDict>)> {
    let fields = PyDict::new(py);
    if let Some(record) = error.record() {
        fields.set_item("record", record.display().to_string())?;
    }
    if let Error::PeerLost { rank, .. } = error {
        fields.set_item("world_rank", error.world_rank(*rank))?;
    }
    let class = classes! { error, fields;
        Invalid { call, problem }
        Timeout { operation: operation.to_string(), rank, after: after.as_secs_f64(), missing: by_rank(py, missing)? }
        NoVerdict { call, rank, missing: by_rank(py, missing)? }
        PeerLost { rank, how: how.to_string(), operation: operation.as_ref().map(ToString::to_string) }
        Link { kind, rank, peer, problem }
        Mismatch { number, rank, ours: ours.to_string(), peer, theirs: theirs.to_string() }
        Aborted { by, reason }
        Rendezvous { address, rank, problem }
        Refused { peer, problem }
        Unavailable { what, problem }
        System { doing, problem }
        Library { library, rank, problem }
        Protocol { peer, problem }
        Cuda { doing, device, call, code, name }
        QueueFull {}
    };
    Ok((class, fields))
}
