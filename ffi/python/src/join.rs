//! The functions with which a process joins a world, or makes one of its own.

use std::net::TcpListener;
use std::os::fd::{BorrowedFd, IntoRawFd, RawFd};

use allstream::{Error, Node, Rendezvous};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use crate::comm::Comm;
use crate::errors;
use crate::keeper;
use crate::options::seconds;
use crate::wait::block_on;

/// The rendezvous, from the options of `connect` and the environment. `call`: the Python call's name, for errors.
fn rendezvous(call: &str, options: Option<&Bound<'_, PyDict>>, py: Python<'_>) -> PyResult<Rendezvous> {
    let refuse = |problem: &str| errors::invalid(py, call, problem);
    // Errors name the Python call, as its caller does not know the engine's.
    let engine = |error: Error| match error {
        Error::Invalid { problem, .. } => refuse(&problem),
        error => errors::of(py, &error),
    };
    let get = |name: &str| -> PyResult<Option<Bound<'_, PyAny>>> {
        let value = options.map(|options| options.get_item(name)).transpose()?.flatten();
        Ok(value.filter(|value| !value.is_none()))
    };
    let known = ["address", "rank", "size", "token", "timeout", "heartbeat", "link", "host_id", "listener"];
    for key in options.into_iter().flat_map(|options| options.keys()) {
        let key = key.cast::<PyString>()?.to_str()?.to_owned();
        if !known.contains(&key.as_str()) {
            return Err(refuse(&format!("there is no option {key:?}; options are {}", known.join(", "))));
        }
    }
    let mut meeting = match (get("address")?, get("rank")?, get("size")?) {
        (None, None, None) => Rendezvous::from_env_or_alone().map_err(engine)?,
        (Some(address), Some(rank), Some(size)) => {
            let address = address.extract::<String>()?;
            Rendezvous::tcp(&address, rank.extract()?, size.extract()?).map_err(engine)?
        }
        (None, Some(rank), Some(size)) if (rank.extract::<usize>()?, size.extract::<usize>()?) == (0, 1) => {
            Rendezvous::alone()
        }
        _ => {
            return Err(refuse(
                "address, rank and size go together: give all three, or none where a launcher has set the environment",
            ));
        }
    };
    // These two environment variables also count if the address was given. (`from_env_or_alone` reads them itself.)
    if get("address")?.is_some() {
        if let Ok(label) = std::env::var("ALLSTREAM_HOST_ID") {
            meeting = meeting.host_id(label);
        }
        if let Ok(link) = std::env::var("ALLSTREAM_LINK") {
            meeting = meeting.link(
                link.parse().map_err(|wanted| refuse(&format!("ALLSTREAM_LINK is {link:?}; {wanted}")))?,
            );
        }
    }
    if let Some(token) = get("token")? {
        meeting = match token.cast::<PyBytes>() {
            Ok(bytes) => meeting.token(bytes.as_bytes()),
            Err(_) => meeting.token(token.extract::<String>()?.as_bytes()),
        };
    }
    if let Some(timeout) = get("timeout")? {
        meeting = meeting.timeout(seconds(py, call, "timeout", timeout.extract()?)?);
    }
    if let Some(silent) = get("heartbeat")? {
        meeting = meeting.heartbeat(seconds(py, call, "heartbeat", silent.extract()?)?);
    }
    if let Some(link) = get("link")? {
        let link = link.extract::<String>()?;
        meeting =
            meeting.link(link.parse().map_err(|wanted| refuse(&format!("link is {link:?}; {wanted}")))?);
    }
    if let Some(label) = get("host_id")? {
        meeting = meeting.host_id(label.extract::<String>()?);
    }
    if let Some(fd) = get("listener")? {
        let fd = fd.extract::<RawFd>()?;
        meeting = meeting.listener(listener(fd).map_err(|problem| refuse(&problem))?);
    }
    Ok(meeting)
}

/// A duplicate of the socket that a Python program has open as this descriptor.
fn listener(fd: RawFd) -> Result<TcpListener, String> {
    if fd < 0 {
        return Err(format!("listener is {fd}, expected the descriptor of a listening socket"));
    }
    // SAFETY: the descriptor is not negative. It is used only to duplicate it, right here, while the caller has it open and this thread holds
    // the GIL; a number that is no open descriptor makes that fail, and touches nothing.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let owned = borrowed.try_clone_to_owned();
    owned.map(TcpListener::from).map_err(|error| format!("listener {fd} cannot be duplicated: {error}"))
}

/// Joins a world, and returns when all its ranks have joined. The stub file `_native.pyi` describes the arguments.
#[pyfunction]
#[pyo3(signature = (**options))]
pub(crate) fn connect(py: Python<'_>, options: Option<&Bound<'_, PyDict>>) -> PyResult<Comm> {
    let meeting = rendezvous("connect", options, py)?;
    keeper::start()?;
    let comm = block_on(py, allstream::Comm::connect(meeting))?.map_err(|error| errors::of(py, &error))?;
    Ok(Comm::new(comm))
}

/// As `connect`, but with `devices` ranks in this process; `rank` and `size` then count processes.
#[pyfunction]
#[pyo3(signature = (devices, **options))]
pub(crate) fn connect_node(
    py: Python<'_>,
    devices: usize,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<Vec<Comm>> {
    let meeting = rendezvous("connect_node", options, py)?;
    keeper::start()?;
    let node = block_on(py, Node::connect(meeting, devices))?.map_err(|error| errors::of(py, &error))?;
    Ok(node.into_comms().into_iter().map(Comm::new).collect())
}

/// A group of `size` ranks in this process, one for each thread.
#[pyfunction]
pub(crate) fn local(py: Python<'_>, size: usize) -> PyResult<Vec<Comm>> {
    keeper::start()?;
    let comms = allstream::Comm::local(size).map_err(|error| errors::of(py, &error))?;
    Ok(comms.into_iter().map(Comm::new).collect())
}

/// Opens a socket where rank 0 may listen. Returns its descriptor, which the caller closes, and its address in the form that `connect` takes.
/// See the stub file `_native.pyi`.
#[pyfunction]
#[pyo3(signature = (near=None))]
pub(crate) fn listen_for_ranks(py: Python<'_>, near: Option<(String, u16)>) -> PyResult<(RawFd, String)> {
    // Without the GIL, as resolving a host name may take a while.
    let opened =
        py.detach(|| Rendezvous::listen_for_ranks(near.as_ref().map(|(host, port)| (host.as_str(), *port))));
    let (listener, at) = opened.map_err(|error| errors::of(py, &error))?;
    Ok((listener.into_raw_fd(), at.to_string()))
}
