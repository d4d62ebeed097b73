//! The options of a call, given by keyword.

use std::time::Duration;

use allstream::{Call, SharedComm};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::errors;
use crate::memory::stream_of_others;
use crate::stream::HostStream;

/// Which options a call takes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Takes {
    /// Only the options that every call takes.
    Plain,
    /// Also the options of a reduction.
    Reduction,
    /// Also a message's tag.
    Tag,
}

/// A number of seconds as a duration. `call` and `name` are the Python names of the call and its option, for the error's text.
///
/// # Errors
/// The number is negative or a NaN.
pub(crate) fn seconds(py: Python<'_>, call: &str, name: &str, value: f64) -> PyResult<Duration> {
    // 1e9 seconds are longer than anybody waits. A larger number, such as infinity, need not fit a `Duration`.
    Duration::try_from_secs_f64(value.clamp(f64::MIN, 1e9)).map_err(|_| {
        errors::invalid(py, call, &format!("{name} is {value}, expected a number of seconds, not negative"))
    })
}

/// A call on `comm` with these options. `name` is the Python name of the call, for errors.
///
/// # Errors
/// The call does not take one of the options, or not with this value.
pub(crate) fn with_options<'a>(
    comm: &'a SharedComm,
    name: &str,
    takes: Takes,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<Call<'a>> {
    let mut call = comm.call();
    let Some(options) = options else { return Ok(call) };
    let py = options.py();
    for (key, value) in options {
        let key = key.cast::<PyString>()?.to_str()?.to_owned();
        // An option that is None counts as not given.
        if value.is_none() {
            continue;
        }
        let text = || value.str().map(|text| text.to_string());
        call = match key.as_str() {
            "timeout" => call.timeout(seconds(py, name, "timeout", value.extract()?)?),
            "algo" => {
                let algo = text()?.parse().map_err(|problem: String| errors::invalid(py, name, &problem))?;
                call.algo(algo)
            }
            "key" => call.key(value.extract()?),
            "after" => match value.cast::<HostStream>() {
                Ok(stream) => stream.get().before(call),
                Err(_) => call.on(&stream_of_others(&value, name)?),
            },
            "op" if takes == Takes::Reduction => {
                let text = operator(&value)?;
                let op = text.parse().map_err(|error| errors::invalid(py, name, &format!("{error}")))?;
                call.op(op)
            }
            "scale" if takes == Takes::Reduction => call.scale(value.extract()?),
            "deterministic" if takes == Takes::Reduction => call.deterministic(value.extract()?),
            "tag" if takes == Takes::Tag => call.tag(value.extract()?),
            _ => {
                let more = match takes {
                    Takes::Plain => "",
                    Takes::Reduction => ", op, scale, deterministic",
                    Takes::Tag => ", tag",
                };
                let problem =
                    format!("there is no option {key:?}; options are timeout, algo, key, after{more}");
                return Err(errors::invalid(py, name, &problem));
            }
        };
    }
    Ok(call)
}

/// The name of a reduction, which the caller gives as a string or as a member of another library's enumeration (such as Ray's `ReduceOp.SUM`).
/// Names that other libraries have for some reductions are translated to allstream's.
fn operator(value: &Bound<'_, PyAny>) -> PyResult<String> {
    let name = match value.cast::<PyString>() {
        // Its text, not its `str()`: a member of a string enumeration is a string, too, whose `str()` may give its class and name instead.
        Ok(text) => text.to_str()?.to_lowercase(),
        Err(_) => value.getattr_opt("name")?.unwrap_or_else(|| value.clone()).str()?.to_str()?.to_lowercase(),
    };
    Ok(match name.as_str() {
        "product" => "prod".into(),
        "average" | "mean" => "avg".into(),
        other => other.into(),
    })
}
