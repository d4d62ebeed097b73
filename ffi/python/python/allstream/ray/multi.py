"""Several devices, or streams, for each process: Ray's `*_multigpu` functions, which Ray has for cupy and NCCL alone.

Every process gives a list of the same number n of tensors; the i-th tensor of the process with rank r belongs to the global rank
`r * n + i`. On a CPU each tensor of the list stands for a device, so tests can run programs that are written for several GPUs.

At the first call with a list, all processes together make a second set of communicators, one for each tensor (the engine's node): rank 0
sends the address and the secret over the group. `init_multigpu` makes the set without a call of a collective.

Messages between devices do not need this set: they go from process to process over the group, and `Letters` brings each to its device.
"""

import itertools
import json
import secrets
import threading
from typing import Any, Callable, List, Optional, Sequence

import numpy as np
from ray.util.collective.types import ReduceOp

import allstream
from allstream import errors
from allstream.ray import arrays
from allstream.ray.calls import check_peer, check_rank
from allstream.ray.group import AllstreamGroup, get_group, op_name
from allstream.ray.meet import listen

# The bytes of the message that brings the address and the secret of a node to all processes.
_ROOM = 512
# The tag of the letters that announce messages between devices, and the tag to which a message's number is added. Other messages have tag 0.
_LETTER = 1
_MESSAGE = 1 << 30


class Node:
    """The global ranks of this process: `comms[i]` is the communicator of the global rank `process * len(comms) + i`."""

    def __init__(self, comms: List[Any]) -> None:
        self.comms = comms

    @property
    def devices(self) -> int:
        return len(self.comms)


def node_of(group: AllstreamGroup, devices: int) -> Node:
    """The group's node. The first call makes it, in all processes of the group together."""
    if group.node is not None and group.node.devices == devices:
        return group.node
    if group.node is not None:
        raise errors.Invalid(group.says(f"it was made for {group.node.devices} tensors for each process, and now there are {devices}"))
    comm = group.comm()
    said = np.zeros(group.world_size, dtype=np.int64)
    try:
        comm.all_gather(np.array([devices], dtype=np.int64), out=said, timeout=group.timeout).wait()
        other = next((rank for rank in range(group.world_size) if said[rank] != devices), None)
        if other is not None:
            raise errors.Invalid(
                f"every process must give as many tensors: this one gives {devices}, and rank {other} gives {said[other]}"
            )
        group.node = Node(_connect(group, comm, devices))
    except errors.Error as error:
        raise group.told(error, "several tensors for each process")
    return group.node


def _connect(group: AllstreamGroup, comm: Any, devices: int) -> List[Any]:
    letter, listener = np.zeros(_ROOM, dtype=np.uint8), None
    try:
        if group.rank == 0:
            listener, address = listen()
            text = json.dumps({"address": address, "token": secrets.token_hex(16)}).encode()
            letter[: len(text)] = np.frombuffer(text, dtype=np.uint8)
        comm.broadcast(letter, 0, timeout=group.timeout).wait()
        told = json.loads(letter.tobytes().rstrip(b"\0"))
        return allstream.connect_node(
            devices,
            address=told["address"],
            token=told["token"],
            rank=group.rank,
            size=group.world_size,
            timeout=group.timeout,
            listener=listener.fileno() if listener else None,
        )
    finally:
        if listener is not None:
            listener.close()


def init_multigpu(devices: int, group_name: str = "default") -> None:
    """Prepares the group for `devices` tensors for each process; all processes of the group call it, with the same number."""
    node_of(get_group(group_name), devices)


def _run(group: AllstreamGroup, what: str, submit: Callable[..., Any], *parts: Sequence[Any]) -> None:
    """Submits `submit(comm, ...)` for each device with its item of every list in `parts`. Waits for all, then raises the first error."""
    failure: Optional[BaseException] = None
    works = []
    try:
        for own in zip(*parts):
            works.append(submit(*own))
    except Exception as error:  # noqa: BLE001: an array's library may raise whatever it likes.
        failure = error
        # The other processes would wait for the operations that this one has not submitted.
        if works:
            parts[0][0].abort(group.says(f"{what}: {error}"))
    for work in works:
        try:
            work.wait()
        except errors.Error as error:
            failure = failure or error
    if failure is not None:
        raise group.told(failure, what)


def allreduce(group: AllstreamGroup, tensors: List[Any], op: str) -> None:
    arrays.check_outputs(tensors, "tensor_list")
    comms = node_of(group, len(tensors)).comms
    _run(group, "allreduce", lambda c, x: c.all_reduce(x, op=op, timeout=group.timeout), comms, tensors)


def reduce(group: AllstreamGroup, tensors: List[Any], root: int, root_tensor: int, op: str) -> None:
    arrays.check_outputs(tensors, "tensor_list")
    comms = node_of(group, len(tensors)).comms
    at = root * len(comms) + root_tensor
    _run(group, "reduce", lambda c, x: c.reduce(x, at, op=op, timeout=group.timeout), comms, tensors)


def broadcast(group: AllstreamGroup, tensors: List[Any], root: int, root_tensor: int) -> None:
    arrays.check_outputs(tensors, "tensor_list")
    comms = node_of(group, len(tensors)).comms
    at = root * len(comms) + root_tensor
    _run(group, "broadcast", lambda c, x: c.broadcast(x, at, timeout=group.timeout), comms, tensors)


def allgather(group: AllstreamGroup, outs: List[List[Any]], tensors: List[Any]) -> None:
    _check_lists(group, outs, len(tensors))
    for parts, x in zip(outs, tensors):
        arrays.check_alike(parts, x, "the list of outputs")
        arrays.check_outputs(parts, "the list of outputs")
    comms = node_of(group, len(tensors)).comms
    flats = [arrays.flat_like(x, len(parts) * arrays.count(x)) for parts, x in zip(outs, tensors)]
    _run(group, "allgather", lambda c, x, flat: c.all_gather(x, out=flat, timeout=group.timeout), comms, tensors, flats)
    for flat, parts in zip(flats, outs):
        arrays.spread(flat, parts)


def reducescatter(group: AllstreamGroup, outs: List[Any], parts: List[List[Any]], op: str) -> None:
    _check_lists(group, parts, len(outs))
    for part, out in zip(parts, outs):
        arrays.check_alike(part, out, "tensor_list")
    arrays.check_outputs(outs, "the list of outputs")
    comms = node_of(group, len(outs)).comms
    flats = [arrays.together(part) for part in parts]
    _run(group, "reducescatter", lambda c, flat, out: c.reduce_scatter(flat, out=out, op=op, timeout=group.timeout), comms, flats, outs)


def _check_lists(group: AllstreamGroup, lists: List[List[Any]], devices: int) -> None:
    if len(lists) != devices:
        raise RuntimeError(group.says(f"there must be a list for each of the {devices} tensors; got {len(lists)}"))
    for tensors in lists:
        if len(tensors) != group.world_size * devices:
            raise RuntimeError(
                group.says(
                    f"each list must have a tensor for each of the {group.world_size} x {devices} global ranks; got {len(tensors)}"
                )
            )


def send(group: AllstreamGroup, x: Any, to: int, to_device: int, elements: int = 0, device: Optional[int] = None) -> None:
    what = f"send to rank {to}"
    own = _own_device(group, x, device, to_device)
    letters, comm = group.letters_with(to), group.comm()
    try:
        number = letters.number()
        # The message comes before its letter: if the tensor is refused, nothing has been announced.
        message = comm.send(_part(x, elements), to, tag=_MESSAGE | number, timeout=group.timeout)
        letter = np.array([number, own, to_device], dtype=np.int64)
        announced = comm.send(letter, to, tag=_LETTER, timeout=group.timeout)
        message.wait()
        announced.wait()
    except errors.Error as error:
        raise group.told(error, what)


def recv(group: AllstreamGroup, x: Any, source: int, source_device: int, elements: int = 0, device: Optional[int] = None) -> None:
    what = f"recv from rank {source}"
    own = _own_device(group, x, device, source_device)
    letters, comm = group.letters_with(source), group.comm()

    def read() -> "tuple[int, int, int]":
        letter = np.zeros(3, dtype=np.int64)
        comm.recv(letter, source, tag=_LETTER, timeout=group.timeout).wait()
        number, sender, target = letter.tolist()
        return number, sender, target

    try:
        letter = letters.take(source_device, own, read)
        try:
            message = comm.recv(_part(x, elements), source, tag=_MESSAGE | letter[0], timeout=group.timeout)
        except BaseException:
            # The tensor was refused: leave the message to the next call.
            letters.put_back(letter)
            raise
        message.wait()
    except errors.Error as error:
        raise group.told(error, what)


class Letters:
    """The letters that announce messages between devices of this process and of one other, and bring each message to the right call.

    A tensor in host memory does not tell which device of its process it stands for. The sender's call names the receiving device, and the
    receiver's call names the sending device. So a letter announces each message: it has the message's number and both devices as far as
    the sender knows them. A receiver takes the first letter that agrees with what it knows. -1 is an unknown device.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._waiting: List[Any] = []
        self._is_read = False

    def number(self) -> int:
        return next(self._numbers) % _MESSAGE

    def take(self, sender: int, target: int, read: Callable[[], Any]) -> Any:
        """Takes the first letter that fits. One caller at a time receives letters, by `read`, which has a deadline; the others wait for these."""
        with self._changed:
            while True:
                for letter in self._waiting:
                    if letter[1] in (-1, sender) and target in (-1, letter[2]):
                        self._waiting.remove(letter)
                        return letter
                if self._is_read:
                    self._changed.wait()
                else:
                    self._read(read)

    def _read(self, read: Callable[[], Any]) -> None:
        self._is_read = True
        self._changed.release()
        letter = None
        try:
            letter = read()
        finally:
            self._changed.acquire()
            self._is_read = False
            if letter is not None:
                self._waiting.append(letter)
            # A waiting caller looks again, and may read next; if the group has failed, it then fails as this caller has.
            self._changed.notify_all()

    def put_back(self, letter: Any) -> None:
        with self._changed:
            self._waiting.insert(0, letter)
            self._changed.notify_all()


def _own_device(group: AllstreamGroup, x: Any, device: Optional[int], peer_device: int) -> int:
    """The device of this process that a tensor belongs to; -1 if it is unknown. Raises if an index is out of range."""
    if device is None:
        name = arrays.device(x)
        device = int(name.rsplit(":", 1)[1]) if ":" in name else None
    devices = group.node.devices if group.node is not None else None
    for index in (device, peer_device):
        if index is not None and (index < 0 or (devices is not None and index >= devices)):
            has = "counted from 0" if devices is None else f"each process has {devices}, from 0"
            raise ValueError(group.says(f"device '{index}': {has}"))
    return -1 if device is None else device


def _part(x: Any, elements: int) -> Any:
    return x.reshape(-1)[:elements] if elements else x


def allreduce_multigpu(tensor_list: List[Any], group_name: str = "default", op: ReduceOp = ReduceOp.SUM) -> None:
    """Every tensor of every process becomes the reduction of all tensors."""
    arrays.check_list(tensor_list)
    allreduce(get_group(group_name), tensor_list, op_name(op))


def reduce_multigpu(
    tensor_list: List[Any], dst_rank: int = 0, dst_tensor: int = 0, group_name: str = "default", op: ReduceOp = ReduceOp.SUM
) -> None:
    """The tensor `dst_tensor` of process `dst_rank` becomes the reduction of all tensors."""
    arrays.check_list(tensor_list)
    group = get_group(group_name)
    check_rank(group, dst_rank)
    _check_root(group, len(tensor_list), dst_tensor)
    reduce(group, tensor_list, dst_rank, dst_tensor, op_name(op))


def broadcast_multigpu(tensor_list: List[Any], src_rank: int = 0, src_tensor: int = 0, group_name: str = "default") -> None:
    """Every tensor becomes the tensor `src_tensor` of process `src_rank`."""
    arrays.check_list(tensor_list)
    group = get_group(group_name)
    check_rank(group, src_rank)
    _check_root(group, len(tensor_list), src_tensor)
    broadcast(group, tensor_list, src_rank, src_tensor)


def allgather_multigpu(output_tensor_lists: List[List[Any]], input_tensor_list: List[Any], group_name: str = "default") -> None:
    """`output_tensor_lists[i][g]` becomes the tensor of global rank g, for each tensor i of this process."""
    _check_lists_of_tensors(output_tensor_lists)
    arrays.check_list(input_tensor_list)
    allgather(get_group(group_name), output_tensor_lists, input_tensor_list)


def reducescatter_multigpu(
    output_tensor_list: List[Any], input_tensor_lists: List[List[Any]], group_name: str = "default", op: ReduceOp = ReduceOp.SUM
) -> None:
    """The i-th output belongs to a global rank g; it becomes the reduction of the g-th tensors of all lists of all processes."""
    _check_lists_of_tensors(input_tensor_lists)
    arrays.check_list(output_tensor_list)
    reducescatter(get_group(group_name), output_tensor_list, input_tensor_lists, op_name(op))


def send_multigpu(
    tensor: Any, dst_rank: int, dst_gpu_index: int, group_name: str = "default", n_elements: int = 0, gpu_index: Optional[int] = None
) -> None:
    """Sends a tensor, or its first `n_elements`, to a device of another process.

    `gpu_index` says which of this process's devices sends; by default it is the tensor's device. A tensor in host memory has no device: then
    any receiver that waits for a message from this process to the device `dst_gpu_index` takes it.
    """
    arrays.check_one(tensor)
    group = get_group(group_name)
    check_peer(group, dst_rank, "destination")
    if n_elements < 0:
        raise RuntimeError(group.says(f"The n_elements '{n_elements}' should >= 0."))
    send(group, tensor, dst_rank, dst_gpu_index, n_elements, gpu_index)


def recv_multigpu(
    tensor: Any, src_rank: int, src_gpu_index: int, group_name: str = "default", n_elements: int = 0, gpu_index: Optional[int] = None
) -> None:
    """Receives a tensor, or its first `n_elements`, from a device of another process.

    `gpu_index` says which of this process's devices receives; by default it is the tensor's device. A tensor in host memory has no device: then
    the sender's next message is taken, whichever receiving device it names.
    """
    arrays.check_one(tensor)
    group = get_group(group_name)
    check_peer(group, src_rank, "source")
    if n_elements < 0:
        raise RuntimeError(group.says(f"The n_elements '{n_elements}' should be >= 0."))
    recv(group, tensor, src_rank, src_gpu_index, n_elements, gpu_index)


def _check_root(group: AllstreamGroup, devices: int, root_tensor: int) -> None:
    if root_tensor < 0:
        raise ValueError(group.says(f"root_tensor '{root_tensor}' is negative."))
    if root_tensor >= devices:
        raise ValueError(group.says(f"root_tensor '{root_tensor}' is greater than the number of GPUs: '{devices}'"))


def _check_lists_of_tensors(lists: Any) -> None:
    if not isinstance(lists, list):
        raise RuntimeError(f"The input must be a list of lists of tensors. Got '{type(lists)}'.")
    if not lists:
        raise RuntimeError(f"Did not receive tensors. Got: {lists}")
    for tensors in lists:
        arrays.check_list(tensors)
