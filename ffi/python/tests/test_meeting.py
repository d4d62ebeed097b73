"""Where rank 0 listens, for programs that tell the other ranks by themselves."""

import ipaddress
import socket
import threading

import allstream
from allstream import _native


def test_ranks_meet_at_a_socket_that_the_engine_opened():
    descriptor, address = _native.listen_for_ranks()
    with socket.socket(fileno=descriptor) as listener:
        host, port = listener.getsockname()[:2]
        assert address in (f"{host}:{port}", f"[{host}]:{port}")
        comms = [None, None]

        def join(rank):
            options = {"listener": listener.fileno()} if rank == 0 else {}
            comms[rank] = allstream.connect(address=address, rank=rank, size=2, token="t", timeout=30, **options)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
        [thread.start() for thread in threads]
        [thread.join(60) for thread in threads]
        assert [comm.size for comm in comms] == [2, 2]


def test_a_store_on_this_host_that_was_given_by_a_loopback_address_keeps_ranks_on_this_host():
    descriptor, address = _native.listen_for_ranks(("127.0.0.1", 1))
    socket.close(descriptor)
    assert ipaddress.ip_address(address.rsplit(":", 1)[0]).is_loopback


def test_variables_that_do_not_fit_are_refused_by_name(monkeypatch):
    for name, value in [("ALLSTREAM_PORTS", "9-8"), ("ALLSTREAM_INTERFACE", "no-such-interface")]:
        monkeypatch.setenv(name, value)
        try:
            socket.close(_native.listen_for_ranks()[0])
        except allstream.errors.Invalid as error:
            assert name in str(error) and value in str(error)
        else:
            raise AssertionError(f"{name}={value} was taken")
        monkeypatch.delenv(name)
