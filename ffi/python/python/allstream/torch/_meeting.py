"""How the ranks of a group of torch's meet: by an address and a secret in torch's store, under the group's own prefix."""

import secrets
import socket

import allstream

_KEY = "allstream/meeting"


def _own_address(store):
    """The address of this host by which the others reach it: the one from which it reaches the store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if host:
        try:
            for family, kind, _, _, address in socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind) as probe:
                    # Nothing is sent: the system only chooses the way.
                    probe.connect(address)
                    return probe.getsockname()[0]
        except OSError:
            pass
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _written(address, port):
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def meet(store, rank, size, timeout):
    """Joins the group's world. `timeout`, in seconds, is how long ranks wait for each other."""
    if size == 1:
        return allstream.connect(rank=0, size=1)
    if rank != 0:
        address, token = store.get(_KEY).decode().split(" ")
        return allstream.connect(address=address, rank=rank, size=size, token=token, timeout=timeout)
    address = _own_address(store)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen(4096)
        at, token = _written(address, listener.getsockname()[1]), secrets.token_hex(16)
        store.set(_KEY, f"{at} {token}")
        try:
            return allstream.connect(address=at, rank=0, size=size, token=token, timeout=timeout, listener=listener.fileno())
        finally:
            # All have read it, or nobody will meet there any more.
            try:
                store.delete_key(_KEY)
            except RuntimeError:
                pass  # A store that cannot delete (a file).
