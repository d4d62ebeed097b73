"""How the ranks of a torch process group meet: rank 0 puts its address and a secret into the group's store, and the others read them."""

import secrets
import socket
import time

import allstream
from allstream import _native

_KEY = "allstream/meeting"


def _near(store):
    """The host and the port of the store's server, which all ranks reach; None if the store has no server (a file)."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (host, port or 1) if host else None


def _refuses(address):
    """Whether the host of this address answers that nobody listens there."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass  # Whatever is wrong, `allstream.connect` will say it better.
    return False


def _read(store, end):
    """Reads from the store where rank 0 listens, and the secret. torchrun gives restarted ranks the store of those that died, so the
    address may be that of a dead rank 0. While nobody listens there, this reads again, until a new rank 0 has replaced it, or until `end`."""
    while True:
        address, token = store.get(_KEY).decode().split(" ")
        if not _refuses(address) or time.monotonic() >= end:
            return address, token
        time.sleep(0.05)


def meet(store, rank, size, timeout):
    """Connects this rank to its group, and returns the communicator. `timeout` is how long ranks wait for each other, in seconds."""
    if size == 1:
        return allstream.connect(rank=0, size=1)
    if rank != 0:
        end = time.monotonic() + timeout
        address, token = _read(store, end)
        left = max(end - time.monotonic(), 1)
        return allstream.connect(address=address, rank=rank, size=size, token=token, timeout=left)
    descriptor, at = _native.listen_for_ranks(_near(store))
    with socket.socket(fileno=descriptor) as listener:
        token = secrets.token_hex(16)
        store.set(_KEY, f"{at} {token}")
        try:
            return allstream.connect(address=at, rank=0, size=size, token=token, timeout=timeout, listener=listener.fileno())
        finally:
            # Either all ranks have met, or no rank will: nobody needs the address any more.
            try:
                store.delete_key(_KEY)
            except RuntimeError:
                pass  # The store does not delete keys (a file).
