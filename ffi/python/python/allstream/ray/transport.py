"""How the tensors of an ObjectRef go from actor to actor: the tensor transport "ALLSTREAM" of Ray Direct Transport, which is alpha in Ray.

Ray registers the transport in each actor on a thread of its own, while the program's thread may be importing `ray.util.collective`. So importing
this module imports neither that nor torch: if two threads import the same modules in different orders, each may see half-imported ones.
"""

import secrets
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Deque, Dict, Iterator, List, Optional, Sequence

from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
)

from allstream import errors
from allstream.ray.hook import BACKEND

# The tags of transfers have this bit; a program's `send` has tag 0.
_TAGS = 1 << 31
# How many aborts are kept for transfers that have not begun in this actor. Ray gives up a transfer after about a minute.
_KEPT = 4096
# The engine's deadline of a transfer's messages, in seconds. The group's timeout comes first: it ends the transfer, and not the group.
_NEVER = 1e6


@dataclass
class AllstreamMetadata(TensorTransportMetadata):
    """What the tensors of a ref look like."""


@dataclass
class AllstreamRoute(CommunicatorMetadata):
    """One transfer: the group of both actors, their ranks in it, and the tag of the messages; or, in `problem`, why there is no such group."""

    problem: str = ""
    group: str = ""
    source: int = 0
    target: int = 0
    tag: int = 0


class _Transfer:
    """A transfer in flight in this actor, which can be given up."""

    def __init__(self) -> None:
        self.changed, self.aborted = threading.Event(), False

    def abort(self) -> None:
        self.aborted = True
        self.changed.set()


class _Transfers:
    """The transfers of this actor, by tag, which is different for each: those in flight, and those that Ray has aborted already.

    If this actor is busy while the other one fails, Ray's abort may come before the transfer has begun here. The abort is kept, and ends
    the transfer as soon as it begins.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Dict[int, _Transfer] = {}
        self._aborted: Deque[int] = deque(maxlen=_KEPT)

    @contextmanager
    def running(self, tag: int) -> Iterator[_Transfer]:
        transfer = _Transfer()
        with self._lock:
            self._running[tag] = transfer
            if tag in self._aborted:
                self._aborted.remove(tag)
                transfer.abort()
        try:
            yield transfer
        finally:
            with self._lock:
                del self._running[tag]

    def abort(self, tag: int) -> None:
        with self._lock:
            transfer = self._running.get(tag)
            if transfer is None:
                self._aborted.append(tag)
            else:
                transfer.abort()


_transfers = _Transfers()


class AllstreamTransport(TensorTransportManager):
    """Moves the tensors of a ref from one actor to another, as messages of a group that both actors are in."""

    def tensor_transport_backend(self) -> str:
        return BACKEND

    @staticmethod
    def is_one_sided() -> bool:
        return False

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return bool(groups_of([actor]))

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: List[Any]) -> AllstreamMetadata:
        kinds = {tensor.device.type for tensor in rdt_object}
        if len(kinds) > 1:
            raise ValueError(f"All tensors of an object must be on the same kind of device; got {sorted(kinds)}.")
        return AllstreamMetadata(
            tensor_meta=[(tensor.shape, tensor.dtype) for tensor in rdt_object],
            tensor_device=next(iter(kinds), None),
        )

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: Optional[str] = None) -> AllstreamRoute:
        groups = groups_of([src_actor, dst_actor])
        if not groups:
            # Ray may call this on a thread of its own, where nobody would see an exception. So the receiver raises the problem.
            return AllstreamRoute(
                problem=f"No group of the backend {BACKEND} has both {src_actor} and {dst_actor}, so tensors cannot go from one to the "
                "other. Make one with allstream.ray.create_collective_group([...]) that has all actors which the ref is passed to."
            )
        group = groups[-1]
        return AllstreamRoute(
            group=group.name,
            source=group.get_rank(src_actor),
            target=group.get_rank(dst_actor),
            tag=_TAGS | secrets.randbits(31),
        )

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: Optional[List[Any]] = None,
    ) -> List[Any]:
        from ray.experimental.rdt.util import create_empty_tensors_from_metadata

        if communicator_metadata.problem:
            raise ValueError(communicator_metadata.problem)
        tensors = target_buffers or create_empty_tensors_from_metadata(tensor_transport_metadata)
        _exchange("recv", tensors, communicator_metadata, communicator_metadata.source)
        return tensors

    def send_multiple_tensors(
        self,
        tensors: List[Any],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        # The receiver raises the problem.
        if communicator_metadata.problem:
            return
        _exchange("send", tensors, communicator_metadata, communicator_metadata.target)

    def garbage_collect(self, obj_id: str, tensor_transport_meta: TensorTransportMetadata, tensors: List[Any]) -> None:
        """The tensors are the actor's own memory: there is nothing to give back."""

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Ends this transfer in this actor, even before it has begun here. The group and all other transfers go on."""
        if not communicator_metadata.problem:
            _transfers.abort(communicator_metadata.tag)


def _exchange(direction: str, tensors: List[Any], route: Any, peer: int) -> None:
    """Sends or receives all tensors of a transfer, and waits for them: until the group's timeout, or an abort."""
    from allstream.ray.group import get_group

    what = f"{direction} of an ObjectRef's tensors, with rank {peer}"
    # Register the transfer before waiting for the group, whose ranks may still be meeting: an abort may come in the meantime.
    with _transfers.running(route.tag) as transfer:
        group = get_group(route.group)
        group.transfers[route.tag] = transfer
        try:
            _move(group, what, transfer, [(direction, tensor.detach(), peer, route.tag) for tensor in tensors])
        except errors.Error as error:
            raise group.told(error, what)
        finally:
            group.transfers.pop(route.tag, None)


def _move(group: Any, what: str, transfer: _Transfer, messages: List[Any]) -> None:
    comm = None if transfer.aborted else group.comm()
    if transfer.aborted:
        raise errors.Aborted(group.says(f"{what}: Ray aborted it before it began here, as the other actor has failed"))
    if not messages:
        return
    work = comm.batch(messages, timeout=_NEVER)
    work.add_done_callback(lambda _: transfer.changed.set())
    if not transfer.changed.wait(group.timeout) or (transfer.aborted and not work.done()):
        # The engine keeps the messages, and their memory, until the group ends. Nobody else uses their tag.
        group.given_up = True
        why = "Ray aborted it" if transfer.aborted else f"it did not end within {group.timeout:g} s"
        raise (errors.Aborted if transfer.aborted else errors.Timeout)(group.says(f"{what}: {why}"))
    work.wait()


def groups_of(actors: Sequence[Any]) -> List[Any]:
    """The groups of this backend, made by this process, that have all these actors; the latest comes last."""
    from ray.experimental.collective import get_collective_groups

    return get_collective_groups(list(actors), backend=BACKEND)


def register() -> None:
    """Makes "ALLSTREAM" a tensor transport in this process. Ray does the same in the actors that this process makes."""
    from ray.experimental.rdt.util import register_tensor_transport, transport_manager_info

    try:
        import torch
    except ImportError:
        return
    if BACKEND not in transport_manager_info:
        register_tensor_transport(BACKEND, ["cpu", "cuda"], AllstreamTransport, torch.Tensor)
