"""How the ranks of a group find each other through Ray's key-value store.

The ranks share nothing but the job, the group's name and its size. Each rank may have tried before and failed, or may be a new process
in the place of a dead one. So the ranks cannot number their attempts: the count of a rank's own tries says nothing about the other
ranks. Instead, rank 0 makes a fresh random name for each attempt, and the others answer under that name:

    <job>/<group>/call               rank 0: the attempt's name and the size. A new attempt replaces the older one.
    <job>/<group>/<attempt>/here/<r> rank r: a nonce, fresh for each try of rank r, and the size that rank r was given.
    <job>/<group>/<attempt>/go       rank 0, when all are here: address, secret, and the nonces that it found; or why it gave up.

1. Rank 0 deletes what is left under the group's name, opens a socket that listens, and puts `call`.
2. Rank r reads `call`. If that attempt has a `go` already, the attempt is old: it went ahead without this try of rank r, or is over.
   Then rank r waits for `call` to change. Else rank r puts `here/<r>`.
3. When all ranks are here, rank 0 puts `go`, and all connect. Each attempt has a fresh secret, so the engine also turns away a process
   that has the address of another attempt.
4. Rank r connects only if `go` has the nonce of its own try. So the keys of a rank that has failed or died mislead nobody: its
   `here` is under the name of another attempt, or no living try has its nonce.
5. When rank 0 has connected, all ranks have, and rank 0 deletes every key of the group. If rank 0 gives up (its deadline has passed, or
   a rank disagrees on the size), it puts the reason into `go`, so that all others fail at once with that reason. It deletes the keys
   when the others have deleted theirs, or after 2 s. If rank 0 has died, each other rank deletes its `here` at its own deadline, and the
   last one deletes `call`.

If `call` changes while rank r waits for `go`, rank 0 has started a new attempt, and rank r answers that one. If rank 0 finds another
attempt in `call`, or rank r another nonce in its own `here`, two processes have joined as the same rank: an error at once.

Every wait ends at the deadline, which is the group's timeout from the start of the rank's own try.
"""

import os
import secrets
import socket
import threading
import time
from typing import Any, Dict, List, Optional, Set

import ray

import allstream
from allstream import _native, errors
from allstream.ray.store import Store

# After rank 0 has given up: how many seconds it waits for the others to read the reason.
_FAREWELL = 2.0


class Try:
    """One try of one rank to meet the others."""

    def __init__(self, group: str, world: int, rank: int, timeout: float, cancel: threading.Event) -> None:
        self.group, self.world, self.rank, self.timeout, self.cancel = group, world, rank, timeout, cancel
        self.deadline = time.monotonic() + timeout
        self.store = Store(group)
        self.pause = 0.002

    def left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def wait(self) -> bool:
        """Waits a little, longer each time; returns False when the deadline has passed. A cancelled try raises."""
        self.pause = min(self.pause * 1.5, max(0.05, self.world / 1000))
        if self.cancel.wait(min(self.pause, self.left())):
            raise errors.Aborted(self.told("the group was destroyed while its ranks were meeting"))
        return self.left() > 0

    def told(self, what: str) -> str:
        return f"group '{self.group}', rank {self.rank} of {self.world}: {what}"


def meet(group: str, world: int, rank: int, timeout: float, cancel: threading.Event) -> Any:
    """Waits for all ranks of the group, connects, and returns the communicator.

    Raises:
        Rendezvous: not all ranks came within `timeout` seconds; it says which ones are missing.
        Invalid: the ranks do not agree on the group's size, or two processes joined as one rank.
        Aborted: `cancel` was set.
    """
    if world == 1:
        return allstream.local(1)[0]
    attempt = Try(group, world, rank, timeout, cancel)
    return _call(attempt) if rank == 0 else _answer(attempt)


def listen() -> "tuple[socket.socket, str]":
    """A socket that listens on this node's address, at a free port, and its address in the form that `connect` takes."""
    descriptor, address = _native.listen_for_ranks((ray.util.get_node_ip_address(), 1))
    return socket.socket(fileno=descriptor), address


def _connect(attempt: Try, address: str, token: str, timeout: float, listener: Optional[int] = None) -> Any:
    return allstream.connect(
        address=address, rank=attempt.rank, size=attempt.world, token=token, timeout=max(timeout, 0.001), listener=listener
    )


def _call(attempt: Try) -> Any:
    """Rank 0's part."""
    name, store = secrets.token_hex(8), attempt.store
    store.delete_all()
    listener, address = listen()
    try:
        store.put("call", {"attempt": name, "world": attempt.world, "pid": os.getpid()})
        nonces = _gather_nonces(attempt, name)
        token = secrets.token_hex(16)
        left = attempt.left()
        store.put(f"{name}/go", {"address": address, "token": token, "nonces": nonces, "left": left})
        return _connect(attempt, address, token, left, listener.fileno())
    except BaseException as error:
        _say_why(attempt, name, str(error))
        raise
    finally:
        listener.close()
        # If no newer attempt has begun, delete all keys of the group, also those that killed processes left in older attempts. A missing
        # `call` means no newer attempt: the last rank that gave up has deleted it. If a new rank 0 puts its `call` just now, and it is
        # deleted here, that rank 0 puts it again.
        latest = (store.get("call") or {}).get("attempt", name) == name
        store.delete_all("" if latest else f"{name}/")


def _is_latest(store: Store, name: str) -> bool:
    return (store.get("call") or {}).get("attempt") == name


def _gather_nonces(attempt: Try, name: str) -> List[str]:
    """Waits until all other ranks are here, and returns their nonces by rank."""
    store, here = attempt.store, f"{name}/here/"
    seen: Set[int] = set()
    while True:
        call = store.get("call")
        if call is None:
            store.put("call", {"attempt": name, "world": attempt.world, "pid": os.getpid()})
        elif call["attempt"] != name:
            raise errors.Invalid(attempt.told(f"another process (pid {call['pid']}) has joined as rank 0, too"))
        nonces: Dict[int, str] = {}
        for key in store.keys(here):
            answer, rank = store.get(key), int(key[len(here):])
            if answer is None:
                continue
            if answer["world"] != attempt.world:
                raise errors.Invalid(
                    attempt.told(f"rank {rank} says that the group has {answer['world']} ranks, and rank 0 that it has {attempt.world}")
                )
            nonces[rank] = answer["nonce"]
        if len(nonces) == attempt.world - 1:
            return [nonces.get(rank, "") for rank in range(attempt.world)]
        seen |= nonces.keys()
        if not attempt.wait():
            missing = [rank for rank in range(1, attempt.world) if rank not in seen]
            raise _missing(attempt, missing) if missing else _gone(attempt, sorted(seen - nonces.keys()))


def _missing(attempt: Try, ranks: List[int]) -> BaseException:
    return errors.Rendezvous(
        attempt.told(
            f"{_who(ranks)} did not come within {attempt.timeout:g} s. Does each of its {attempt.world} actors or tasks run, "
            "and join the group under the same name? (gloo_timeout is how long they wait for each other, in ms)"
        )
    )


def _gone(attempt: Try, ranks: List[int]) -> BaseException:
    """The error if every rank has come, but `ranks` gave up or ended before the last one came."""
    return errors.Rendezvous(
        attempt.told(
            f"all ranks came within {attempt.timeout:g} s, but {_who(ranks)} gave up or ended before the others were there. "
            "Do all join at about the same time, with the same gloo_timeout (how long they wait for each other, in ms)?"
        )
    )


def _who(ranks: List[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")


def _say_why(attempt: Try, name: str, why: str) -> None:
    """Tells the ranks that are here why the attempt has failed, and waits up to 2 s until they have read that."""
    store = attempt.store
    # A process that is being killed may come here after a new process has taken its place and has deleted these keys.
    if not _is_latest(store, name):
        return
    store.put(f"{name}/go", {"error": why})
    until = time.monotonic() + _FAREWELL
    while store.keys(f"{name}/here/") and time.monotonic() < until:
        time.sleep(0.02)


def _answer(attempt: Try) -> Any:
    """The part of the other ranks."""
    store, nonce = attempt.store, secrets.token_hex(8)
    name: Optional[str] = None
    rounds, seen = 0, set()
    try:
        while True:
            if rounds % 4 == 0 or name is None:
                name = _answer_call(attempt, nonce, name)
            if name and rounds % 8 == 0:
                seen |= _here(attempt, name)
            go = store.get(f"{name}/go") if name else None
            if go is not None:
                return _go(attempt, nonce, go)
            if not attempt.wait():
                raise _too_late(attempt, name, seen)
            rounds += 1
    except BaseException:
        if name is not None:
            _take_back(attempt, name, nonce)
        raise


def _here(attempt: Try, name: str) -> Set[int]:
    """The ranks that have answered to an attempt."""
    return {int(key.rsplit("/", 1)[1]) for key in attempt.store.keys(f"{name}/here/")}


def _too_late(attempt: Try, name: Optional[str], seen: Set[int]) -> BaseException:
    """The error with which this rank gives up at its deadline; `seen` are the ranks that were here in the meantime."""
    if name is None:
        return _missing(attempt, [0])
    missing = sorted(set(range(1, attempt.world)) - seen - _here(attempt, name))
    if missing:
        return _missing(attempt, missing)
    return errors.Rendezvous(
        attempt.told(f"all ranks came, but rank 0 did not let them in within {attempt.timeout:g} s: it has died, or its node is very slow")
    )


def _answer_call(attempt: Try, nonce: str, name: Optional[str]) -> Optional[str]:
    """Reads `call`, and answers if the attempt is new. Returns the name of the attempt in which this rank is here."""
    store, mine = attempt.store, f"here/{attempt.rank}"
    call = store.get("call")
    if call is not None and call["attempt"] != name:
        new = call["attempt"]
        if store.get(f"{new}/go") is not None:
            return name
        if name is not None:
            # Rank 0 of the older attempt may have deleted that attempt's keys before this rank answered: then nobody else deletes this rank's key.
            _delete_mine(attempt, name, nonce)
        store.put(f"{new}/{mine}", {"nonce": nonce, "world": attempt.world, "pid": os.getpid()})
        if call["world"] != attempt.world:
            # This rank's answer is not taken back: rank 0 is to find the other size in it, and then deletes it.
            raise errors.Invalid(
                attempt.told(f"rank 0 says that the group has {call['world']} ranks, and this rank that it has {attempt.world}")
            )
        return new
    if name is not None:
        there = store.get(f"{name}/{mine}")
        if there is None and call is not None and store.get(f"{name}/go") is None:
            # The last rank that gave up has deleted all keys of the attempt, and this rank's answer with them.
            store.put(f"{name}/{mine}", {"nonce": nonce, "world": attempt.world, "pid": os.getpid()})
        elif there is not None and there["nonce"] != nonce:
            raise errors.Invalid(attempt.told(f"another process (pid {there['pid']}) has joined as rank {attempt.rank}, too"))
    return name


def _delete_mine(attempt: Try, name: str, nonce: str) -> None:
    """Deletes this rank's key of an attempt, unless another process has put its own there."""
    mine = f"{name}/here/{attempt.rank}"
    if (attempt.store.get(mine) or {}).get("nonce") == nonce:
        attempt.store.delete(mine)


def _go(attempt: Try, nonce: str, go: Dict[str, Any]) -> Any:
    if "error" in go:
        raise errors.Rendezvous(attempt.told(f"rank 0 has given up: {go['error']}"))
    if go["nonces"][attempt.rank] != nonce:
        raise errors.Invalid(attempt.told(f"another process has joined as rank {attempt.rank}, too, and the group went on with that one"))
    return _connect(attempt, go["address"], go["token"], min(attempt.left(), go["left"] + 1.0))


def _take_back(attempt: Try, name: str, nonce: str) -> None:
    """Deletes this rank's key of an attempt; the last rank to do so also deletes the keys of rank 0, which may be dead.

    If rank 0 is alive, it puts its `call` again.
    """
    store = attempt.store
    _delete_mine(attempt, name, nonce)
    if not store.keys(f"{name}/here/"):
        if _is_latest(store, name):
            store.delete("call")
        store.delete_all(f"{name}/")
