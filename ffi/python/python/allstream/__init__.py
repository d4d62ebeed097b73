"""Collective communication for training: numpy arrays and torch tensors are reduced, gathered and sent where they lie.

    import allstream, numpy
    comm = allstream.connect()                  # under `allstream run -n 2 -- python this.py`, torchrun, mpirun or srun
    grads = numpy.ones(1000, dtype="float32")
    comm.all_reduce(grads).wait()               # or `await comm.all_reduce(grads)`: `grads` has the sum of all ranks

A call submits its operation at once and returns a `Work`. The arrays must be neither read nor written before that work is done. Every rank makes
the same calls in the same order. `allstream.ray` has Ray's collectives, `allstream.torch` the backend of torch.distributed.

Importing this package starts no thread, and imports neither numpy nor torch. It needs the GIL: a free-threaded Python switches it on at the import.
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

# The live communicators that `connect`, `connect_node` and `local` have made. When the interpreter ends, `_end` makes them leave their groups.
_comms = _weakref.WeakSet()
_latest = None


def _keep(comm):
    global _latest
    _comms.add(comm)
    _latest = _weakref.ref(comm)
    return comm


def connect(**options):
    """Joins a world, and returns this rank's `Comm` when all ranks are there.

    Without arguments, the environment of a launcher (`allstream run`, torchrun, mpirun, srun) says which rank this is; without a launcher the
    world has this rank alone. With arguments:

    - `address`, `rank`, `size`: where rank 0 listens (`"10.0.0.1:4242"`), and which rank this is, of how many;
    - `token`: the secret that all ranks share, text or bytes; `b""` for none;
    - `timeout`: how many seconds ranks wait for each other (60); `heartbeat`: after how many seconds of silence a rank counts as lost (10);
    - `link`: `"auto"`, `"inproc"`, `"shm"`, `"tcp"` or `"rdma"`; `host_id`: ranks that give the same label count as on one host;
    - `listener`, on rank 0: the descriptor of a socket that listens at `address` already; it is duplicated.

    Raises `Rendezvous` naming the ranks that did not come, `Refused` where tokens or versions differ, `Invalid` for bad arguments.
    """
    return _keep(_native.connect(**options))


def connect_node(devices, **options):
    """Joins a world with `devices` ranks in this process, and returns their `Comm`s. `rank` and `size` count processes."""
    return [_keep(comm) for comm in _native.connect_node(devices, **options)]


def local(size):
    """Makes a group of `size` ranks in this process, and returns their `Comm`s; each is meant for a thread of its own."""
    return [_keep(comm) for comm in _native.local(size)]


def empty(shape, dtype="float32", *, comm=None):
    """An array of zeros in memory that the other ranks of this host read in place, so that a collective on it copies nothing.

    The memory belongs to the world of `comm` (default: the `Comm` that was made last), and the array may outlive that world. A `dtype` of torch
    gives a torch tensor; one of numpy, or its name, gives a numpy array. A rank has room for 4 GB of such memory at a time.
    """
    if comm is None:
        # If the one that was made last is gone, any that lives will do.
        comm = _latest and _latest() or next(iter(_comms), None)
    if comm is None:
        raise errors.Invalid("empty: this process is in no world yet; connect first, or name a comm")
    return comm.empty(shape, dtype)


def _end():
    for comm in list(_comms):
        comm._leave()
    _native._interpreter_ends()


_atexit.register(_end)
_os.register_at_fork(after_in_child=_native._forked)
