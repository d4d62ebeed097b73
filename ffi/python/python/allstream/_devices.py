"""Chooses how collectives on CUDA tensors run when a library, such as the backend of torch.distributed, calls them for its user."""

import os
import warnings

from .errors import Error


def bind(comm, device, stacklevel=2):
    """Binds a communicator to the ranks' devices by the best way that there is, and returns that way in words. All ranks call it.

    NCCL runs the collectives that it can. Where NCCL is missing or does not work (two ranks on one device, say), allstream's kernels run them
    and read the other devices' memory. Where the devices cannot do that, all data goes through the host's memory. A warning tells when NCCL was
    refused, or when all data goes through the host. All ranks take the same way: what one rank cannot use, no rank uses.
    """
    try:
        return _told(comm.bind_nccl(device), None, stacklevel)
    except Error as why:
        # Raises if the communicator itself has failed: then no other way works either.
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
    """Returns `path`, and warns if all data goes through the host or NCCL was refused. `refused`: the error of NCCL, or None."""
    way, _, why = path.partition(": ")
    if way == "staged":
        text = f"allstream: CUDA tensors go through the host's memory: {why}"
    elif refused is not None:
        text = "allstream: allstream's own kernels take the collectives on CUDA tensors"
    else:
        return path
    warnings.warn(text if refused is None else f"{text}; NCCL: {refused}", stacklevel=stacklevel + 2)
    return path
