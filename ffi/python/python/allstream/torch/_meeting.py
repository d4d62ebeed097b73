"""How the ranks of a group of torch's meet: by an address and a secret in torch's store, under the group's own prefix."""

import secrets
import socket
import time

import allstream
from allstream import _native

_KEY = "allstream/meeting"


def _near(store):
    """The host and the port of the store, which all ranks reach; None for one that is a file."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (host, port or 1) if host else None


def _refuses(address):
    """Whether nobody listens at an address of a host that answers."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass  # Whatever is wrong, `connect` says it better.
    return False


def _read(store, end):
    """Where rank 0 listens, and the secret. torchrun gives the ranks that it starts again the store of those that died: what a dead rank 0 has left there is
    read again until the new one has written over it."""
    while True:
        address, token = store.get(_KEY).decode().split(" ")
        if not _refuses(address) or time.monotonic() >= end:
            return address, token
        time.sleep(0.05)


def meet(store, rank, size, timeout):
    """Joins the group's world. `timeout`, in seconds, is how long ranks wait for each other."""
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
            # All have read it, or nobody will meet there any more.
            try:
                store.delete_key(_KEY)
            except RuntimeError:
                pass  # A store that cannot delete (a file).
