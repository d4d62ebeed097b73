"""Collective communication for training: numpy arrays and torch tensors are reduced, gathered and sent where they lie.

    import allstream, numpy
    comm = allstream.connect()                  # under `allstream run -n 2 -- python this.py`, torchrun, mpirun or srun
    grads = numpy.ones(1000, dtype="float32")
    comm.all_reduce(grads).wait()               # or `await comm.all_reduce(grads)`: `grads` has the sum of all ranks

A call submits at once and returns a `Work`; its arrays must be neither read nor written before that is done. Every rank makes the same calls
in the same order. `allstream.ray` has Ray's collectives, `allstream.torch` the backend of torch.distributed.

Importing this starts no thread and imports no library of arrays. It needs the GIL: builds of Python without it switch it on.
"""

import atexit as _atexit
import os as _os
import weakref as _weakref

from . import _native, errors
from ._native import Buckets, Comm, HostStream, Verdict, Work
from .errors import (
    Aborted,
    Error,
    Invalid,
    Mismatch,
    NotAnArray,
    PeerLost,
    Rendezvous,
    Timeout,
    Unavailable,
)

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "Buckets",
    "Comm",
    "Error",
    "HostStream",
    "Invalid",
    "Mismatch",
    "NotAnArray",
    "PeerLost",
    "Rendezvous",
    "Timeout",
    "Unavailable",
    "Verdict",
    "Work",
    "connect",
    "connect_node",
    "empty",
    "errors",
    "local",
]

# The communicators that `connect` and the others have made and that are still there: they say goodbye when the interpreter ends.
_comms = _weakref.WeakSet()
_latest = None


def _keep(comm):
    global _latest
    _comms.add(comm)
    _latest = _weakref.ref(comm)
    return comm


def connect(**options):
    """Joins a world, and returns this rank's `Comm` when all ranks are there.

    Without arguments a launcher's environment says who this is (`allstream run`, torchrun, mpirun, srun); where there is none, it is a
    world of one rank. Else:

    - `address`, `rank`, `size`: where rank 0 listens (`"10.0.0.1:4242"`), and which rank this is, of how many;
    - `token`: the secret that all ranks share, text or bytes; `b""` for none;
    - `timeout`: how many seconds ranks wait for each other (60); `heartbeat`: after how many seconds of silence a rank counts as lost (10);
    - `link`: `"auto"`, `"shm"` or `"tcp"`; `host_id`: ranks that give the same label count as on one host;
    - `listener`: of rank 0, the descriptor of a socket that listens at `address` already.

    Raises `Rendezvous` naming the ranks that did not come, `Refused` where tokens or versions differ, `Invalid`.
    """
    return _keep(_native.connect(**options))


def connect_node(devices, **options):
    """Joins a world with `devices` ranks in this process, and returns their `Comm`s. `rank` and `size` count processes."""
    return [_keep(comm) for comm in _native.connect_node(devices, **options)]


def local(size):
    """A group of `size` ranks in this process: their `Comm`s, one for each thread."""
    return [_keep(comm) for comm in _native.local(size)]


def empty(shape, dtype="float32", *, comm=None):
    """An array of zeros in memory that the other ranks of this host read in place, so that a collective on it copies nothing.

    It belongs to `comm`'s world, or to the one that was joined last, and may outlive it. `dtype` of torch's gives a torch tensor; of
    numpy's, or its name, a numpy array. A rank has room for 4 GB of such memory.
    """
    comm = comm if comm is not None else _latest and _latest()
    if comm is None:
        raise errors.Invalid("empty: this process is in no world yet; connect first, or name a comm")
    return comm.empty(shape, dtype)


def _end():
    for comm in list(_comms):
        comm._leave()
    _native._interpreter_ends()


_atexit.register(_end)
_os.register_at_fork(after_in_child=_native._forked)
