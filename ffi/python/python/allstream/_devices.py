"""Which way collectives on CUDA devices take, where a library calls them for its user: as the backend of torch.distributed does."""

import os
import warnings

from .errors import Error


def bind(comm, device, stacklevel=2):
    """Binds a communicator to the ranks' devices by the best way that there is, and returns that way in words. All ranks call it.

    NCCL takes what it can. Where it is not there, or cannot (two ranks on one device, say), allstream's kernels read the other devices' memory; where
    that cannot be, the numbers go through the host's memory. A warning says so. What one rank cannot do none does: all take the same way.
    """
    try:
        return _told(comm.bind_nccl(device), None, stacklevel)
    except Error as why:
        # Has the communicator failed, or is it the binding alone?
        comm.check()
        if os.environ.get("ALLSTREAM_NCCL") == "require":
            raise
        refused = why
    try:
        return _told(comm.bind_device(device), refused, stacklevel)
    except Error as why:
        comm.check()
        return _told(f"staged: {why}", refused, stacklevel)


def _told(path, refused, stacklevel):
    """Warns of a way that is not the best one. `refused`: why NCCL does not take part."""
    way, _, why = path.partition(": ")
    if way == "staged":
        text = f"allstream: CUDA tensors go through the host's memory: {why}"
    elif refused is not None:
        text = "allstream: allstream's own kernels take the collectives on CUDA tensors"
    else:
        return path
    warnings.warn(text if refused is None else f"{text}; NCCL: {refused}", stacklevel=stacklevel + 2)
    return path
