"""The group that `ray.util.collective` calls for the backend "allstream"."""

import logging
import sys
import threading
import time
from typing import Any, Callable, Dict, Generator, List, Optional

from ray.util.collective.backend_registry import _global_registry, register_collective_backend
from ray.util.collective.collective import get_group_handle
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import ReduceOp

from allstream import HostStream, errors
from allstream.ray import arrays
from allstream.ray.hook import BACKEND, backend_here, register_here
from allstream.ray.meet import meet

logger = logging.getLogger(__name__)

OPS = {ReduceOp.SUM: "sum", ReduceOp.PRODUCT: "prod", ReduceOp.MIN: "min", ReduceOp.MAX: "max"}
_DEFAULT_TIMEOUT_MS = 30_000


class Pending:
    """An operation in flight, as the `_async` functions return it.

    It runs whether or not anybody waits for it, and its tensors must not be touched before it is done. If the result is a list of
    tensors, these have their new values only after `wait`, `result` or `await`.
    """

    def __init__(self, group: "AllstreamGroup", what: str, work: Any, result: Any, finish: Optional[Callable[[], None]] = None) -> None:
        self._group, self._what, self._work, self._result, self._finish = group, what, work, result, finish
        self._lock = threading.Lock()

    def wait(self, timeout: Optional[float] = None) -> Any:
        """Blocks until it is done, and returns the tensor, or list of tensors, that was given for the result.

        Raises:
            TimeoutError: `timeout` seconds have passed; the operation goes on.
            allstream.Error: it has failed; the message names the group and the rank.
        """
        try:
            self._work.wait(timeout)
        except errors.Error as error:
            raise self._group.told(error, self._what)
        return self._done()

    def result(self) -> Any:
        """As `wait()`."""
        return self.wait()

    def done(self) -> bool:
        """Whether it is over: `wait` would return, or raise, at once."""
        return self._work.done()

    def exception(self) -> Optional[BaseException]:
        """Why it failed; None where it has succeeded, or is not over."""
        return self._work.exception()

    def add_done_callback(self, callback: Callable[["Pending"], None]) -> None:
        """Calls `callback(self)` when the operation is over, on a thread of allstream's; at once, if it is over already."""
        self._work.add_done_callback(lambda _: callback(self))

    def join(self, stream: Any) -> None:
        """Whatever is put on `stream` after this call starts after this operation. For a `HostStream` the caller does not wait; for a CUDA stream
        it may wait, as `Work.join` does.

        Raises:
            Invalid: `stream` is a CUDA stream, and the results must be copied into separate tensors of a list. Call `wait()` instead.
        """
        is_host = isinstance(stream, HostStream)
        if self._finish is not None and not is_host:
            what = f"{self._what}: results are copied into the tensors of a list that do not lie one behind the other; call wait() before the stream goes on"
            raise errors.Invalid(self._group.says(what))
        try:
            self._work.join(stream)
        except errors.Error as error:
            raise self._group.told(error, self._what)
        if self._finish is not None:
            stream.launch(self._done)

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            yield from self._work.__await__()
        except errors.Error as error:
            raise self._group.told(error, self._what)
        return self._done()

    def _done(self) -> Any:
        with self._lock:
            if self._finish is not None:
                # If it raises, a later call copies again, and does not return as if all were well.
                self._finish()
                self._finish = None
        return self._result


class AllstreamGroup(BaseGroup):
    """One rank's part in a group.

    The constructor returns at once, because Ray calls it under a lock that all groups of the process need. The ranks meet on a thread,
    and the first call waits until they have met. `gloo_timeout`, in milliseconds, is how long they wait for each other, and then how
    long an operation may be the oldest unfinished one before the group fails.
    """

    def __init__(self, world_size: int, rank: int, group_name: str, gloo_timeout: Optional[int] = None) -> None:
        super().__init__(world_size, rank, group_name)
        if gloo_timeout is None:
            gloo_timeout = _timeout_of_caller()
        self.timeout = gloo_timeout / 1000
        # The `Node`: one communicator for each device of this process, made at the first use; see multi.py.
        self.node: Any = None
        # Whether a transfer of an ObjectRef was given up. Its messages stay in flight, and closing the communicator would wait for them.
        self.given_up = False
        # The `Letters` that announce messages between devices, by the rank of the peer process; see multi.py.
        self._letters: Dict[int, Any] = {}
        # The random name of the driver's call that made this group, if a driver made it; see driver.py.
        self.made_by: Optional[str] = None
        # The transfers of ObjectRefs in flight, by tag; see refs.py.
        self.transfers: Dict[int, Any] = {}
        self._comm: Any = None
        self._failure: Optional[BaseException] = None
        self._met, self._cancel, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._destroyed = False
        self._until = time.monotonic() + self.timeout
        threading.Thread(target=self._meet, name=f"allstream-meet-{group_name}", daemon=True).start()

    def _meet(self) -> None:
        try:
            comm = meet(self._group_name, self._world_size, self._rank, self.timeout, self._cancel)
            with self._lock:
                self._comm = comm
                late = self._destroyed
            if late:
                _leave(comm, orderly=False)
        except BaseException as error:
            self._failure = error
        finally:
            self._met.set()

    def comm(self) -> Any:
        """The communicator; the first call waits until the ranks have met.

        Raises:
            Rendezvous: a TimeoutError that says which ranks did not come.
        """
        comm = self._comm
        if comm is not None and not self._destroyed:
            return comm
        # The meeting thread ends at the deadline; the 5 seconds more are for a store that is slow to answer.
        if not self._met.wait(max(0.0, self._until - time.monotonic()) + 5.0):
            raise errors.Rendezvous(self.says(f"the ranks did not meet within {self.timeout:g} s: Ray's key-value store does not answer"))
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._destroyed:
            raise RuntimeError(self.says("it has been destroyed"))
        return self._comm

    def says(self, what: str) -> str:
        return f"group '{self._group_name}', rank {self._rank} of {self._world_size}: {what}"

    def told(self, error: BaseException, what: str) -> BaseException:
        """The error with the group, the rank and the operation in front of its message."""
        message = str(error)
        if not message.startswith("group '"):
            error.args = (self.says(f"{what}: {message}"), *error.args[1:])
        return error

    def start(self, what: str, call: Callable[[Any], Any], result: Any = None, finish: Optional[Callable[[], None]] = None) -> Pending:
        """Submits `call(comm)`, which returns a work."""
        try:
            return Pending(self, what, call(self.comm()), result, finish)
        except errors.Error as error:
            raise self.told(error, what)

    # What Ray calls. Tensors come in lists, one for each device of this process.

    def allreduce(self, tensor: List[Any], allreduce_options: Any = None) -> None:
        op = self.op_of(allreduce_options)
        if len(tensor) > 1:
            return self._multi().allreduce(self, tensor, op)
        try:
            self.comm().all_reduce(tensor[0], op=op, timeout=self.timeout).wait()
        except errors.Error as error:
            raise self.told(error, "allreduce")

    def barrier(self, barrier_options: Any = None) -> None:
        self.start_barrier().wait()

    def reduce(self, tensor: List[Any], reduce_options: Any = None) -> None:
        root, op = getattr(reduce_options, "root_rank", 0), self.op_of(reduce_options)
        if len(tensor) > 1:
            return self._multi().reduce(self, tensor, root, reduce_options.root_tensor, op)
        self.start_reduce(tensor[0], root, op).wait()

    def broadcast(self, tensor: List[Any], broadcast_options: Any = None) -> None:
        root = getattr(broadcast_options, "root_rank", 0)
        if len(tensor) > 1:
            return self._multi().broadcast(self, tensor, root, broadcast_options.root_tensor)
        self.start_broadcast(tensor[0], root).wait()

    def allgather(self, tensor_list: List[List[Any]], tensor: List[Any], allgather_options: Any = None) -> None:
        if len(tensor) > 1:
            return self._multi().allgather(self, tensor_list, tensor)
        self.start_allgather(tensor_list[0], tensor[0]).wait()

    def reducescatter(self, tensor: List[Any], tensor_list: List[List[Any]], reducescatter_options: Any = None) -> None:
        op = self.op_of(reducescatter_options)
        if len(tensor) > 1:
            return self._multi().reducescatter(self, tensor, tensor_list, op)
        self.start_reducescatter(tensor[0], tensor_list[0], op).wait()

    def send(self, tensor: List[Any], send_options: Any) -> None:
        # Ray sets a device's index only where a program names one.
        if "dst_gpu_index" in vars(send_options):
            return self._multi().send(self, tensor[0], send_options.dst_rank, send_options.dst_gpu_index, send_options.n_elements)
        try:
            self.comm().send(tensor[0], send_options.dst_rank, timeout=self.timeout).wait()
        except errors.Error as error:
            raise self.told(error, f"send to rank {send_options.dst_rank}")

    def recv(self, tensor: List[Any], recv_options: Any) -> None:
        if "src_gpu_index" in vars(recv_options):
            return self._multi().recv(self, tensor[0], recv_options.src_rank, recv_options.src_gpu_index, recv_options.n_elements)
        try:
            self.comm().recv(tensor[0], recv_options.src_rank, timeout=self.timeout).wait()
        except errors.Error as error:
            raise self.told(error, f"recv from rank {recv_options.src_rank}")

    def destroy_group(self) -> None:
        """Leaves the group; never raises. Waits for this rank's operations, then up to 2 s for the others to leave; their later calls fail."""
        self._cancel.set()
        with self._lock:
            self._destroyed = True
            comm = self._comm
        # The messages of a transfer that is aborted here stay with the engine, and closing the communicator would wait for them.
        aborted = list(self.transfers.values())
        for transfer in aborted:
            transfer.abort()
        if self.node is not None:
            # Closing one communicator waits for the other ranks to close theirs, and some of those are in this process: so close all at once.
            leaving = [threading.Thread(target=_leave, args=(part, True), daemon=True) for part in self.node.comms]
            for thread in leaving:
                thread.start()
            for thread in leaving:
                thread.join()
            self.node = None
        if comm is not None:
            _leave(comm, orderly=not (self.given_up or aborted))
            self._comm = None

    @classmethod
    def backend(cls) -> str:
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        try:
            import allstream._native  # noqa: F401
        except ImportError:
            return False
        return True

    # What the functions of allstream.ray call: each submits an operation, and returns its `Pending`.

    def start_allreduce(self, x: Any, op: str) -> Pending:
        return self.start("allreduce", lambda comm: comm.all_reduce(x, op=op, timeout=self.timeout), x)

    def start_barrier(self) -> Pending:
        return self.start("barrier", lambda comm: comm.barrier(timeout=self.timeout))

    def start_reduce(self, x: Any, root: int, op: str) -> Pending:
        return self.start("reduce", lambda comm: comm.reduce(x, root, op=op, timeout=self.timeout), x)

    def start_broadcast(self, x: Any, root: int) -> Pending:
        return self.start("broadcast", lambda comm: comm.broadcast(x, root, timeout=self.timeout), x)

    def start_send(self, x: Any, to: int) -> Pending:
        return self.start(f"send to rank {to}", lambda comm: comm.send(x, to, timeout=self.timeout), x)

    def start_recv(self, x: Any, source: int) -> Pending:
        return self.start(f"recv from rank {source}", lambda comm: comm.recv(x, source, timeout=self.timeout), x)

    def start_allgather(self, outs: List[Any], x: Any) -> Pending:
        self._check_length("allgather", outs)
        flat, finish = self._into("allgather", outs, x, [x])
        return self.start("allgather", lambda comm: comm.all_gather(x, out=flat, timeout=self.timeout), outs, finish)

    def start_reducescatter(self, out: Any, parts: List[Any], op: str) -> Pending:
        self._check_length("reducescatter", parts)
        self._checked("reducescatter", lambda: arrays.check_alike(parts, out, "tensor_list"))
        flat = self._from(parts, [out])
        return self.start("reducescatter", lambda comm: comm.reduce_scatter(flat, out=out, op=op, timeout=self.timeout), out)

    def start_gather(self, x: Any, outs: Optional[List[Any]], root: int) -> Pending:
        if self._rank != root:
            return self.start("gather", lambda comm: comm.gather(x, root, timeout=self.timeout), None)
        if outs is None:
            raise RuntimeError(self.says("gather: the destination rank needs a list of tensors for the result"))
        self._check_length("gather", outs)
        flat, finish = self._into("gather", outs, x, [x])
        return self.start("gather", lambda comm: comm.gather(x, root, out=flat, timeout=self.timeout), outs, finish)

    def start_scatter(self, out: Any, parts: Optional[List[Any]], root: int) -> Pending:
        flat = None
        if self._rank == root:
            if parts is None:
                raise RuntimeError(self.says("scatter: the source rank needs a list of tensors to scatter"))
            self._check_length("scatter", parts)
            self._checked("scatter", lambda: arrays.check_alike(parts, out, "tensor_list"))
            flat = self._from(parts, [out])
        return self.start("scatter", lambda comm: comm.scatter(flat, root, out=out, timeout=self.timeout), out)

    def start_all_to_all(self, outs: List[Any], parts: List[Any]) -> Pending:
        self._check_length("all_to_all", outs)
        self._check_length("all_to_all", parts)
        self._checked("all_to_all", lambda: arrays.check_alike(parts, parts[0], "the input list", same_count=False))
        send, receive = [arrays.count(part) for part in parts], [arrays.count(out) for out in outs]
        # A rank whose parts have equal lengths cannot know whether those of another rank do: so every rank always gives the lengths.
        counts = {"send_counts": send, "recv_counts": receive}
        flat_out, finish = self._into("all_to_all", outs, parts[0], parts, same_count=False)
        flat = self._from(parts, [])
        return self.start(
            "all_to_all", lambda comm: comm.all_to_all(flat, out=flat_out, timeout=self.timeout, **counts), outs, finish
        )

    def op_of(self, options: Any) -> str:
        return op_name(getattr(options, "reduceOp", ReduceOp.SUM))

    def _into(self, what: str, outs: List[Any], like: Any, inputs: List[Any], same_count: bool = True) -> "tuple[Any, Any]":
        """One flat array for the results of all ranks, and the function that copies it into the list; None if `outs` itself is that array."""

        def check() -> None:
            arrays.check_alike(outs, like, "the list of outputs", same_count)
            arrays.check_outputs(outs, "the list of outputs")

        self._checked(what, check)
        flat = arrays.joined(outs, written=True)
        if flat is not None and not arrays.overlap([flat, *inputs]):
            return flat, None
        temporary = arrays.flat_like(like, sum(map(arrays.count, outs)))
        return temporary, lambda: arrays.spread(temporary, outs)

    def _from(self, parts: List[Any], outs: List[Any]) -> Any:
        """One flat array with all parts: over their own memory, or a copy."""
        flat = arrays.joined(parts, written=False)
        if flat is not None and not arrays.overlap([flat, *outs]):
            return flat
        return arrays.together(parts)

    def _check_length(self, what: str, tensors: List[Any]) -> None:
        if len(tensors) != self._world_size:
            raise RuntimeError(
                self.says(f"{what}: the length of the tensor list ({len(tensors)}) must be equal to world_size ({self._world_size})")
            )

    def _checked(self, what: str, check: Callable[[], None]) -> None:
        try:
            check()
        except errors.Error as error:
            raise self.told(error, what)

    def letters_with(self, peer: int) -> Any:
        with self._lock:
            if peer not in self._letters:
                self._letters[peer] = self._multi().Letters()
            return self._letters[peer]

    def _multi(self) -> Any:
        from allstream.ray import multi

        return multi


def op_name(op: ReduceOp) -> str:
    """The engine's name of Ray's operation."""
    try:
        return OPS[op]
    except (KeyError, TypeError):
        raise RuntimeError(f"Unknown reduce operation {op!r}. Supported are: {', '.join(str(known) for known in OPS)}.") from None


def get_group(group_name: str = "default") -> AllstreamGroup:
    """The group of that name in this actor or task.

    Raises:
        RuntimeError: outside an actor or task; there is no group of that name, or it is of another backend.
    """
    group = get_group_handle(group_name)
    if not isinstance(group, AllstreamGroup):
        raise RuntimeError(f"The collective group '{group_name}' is of the backend {group.backend()}; make it with backend='allstream'.")
    return group


def init_collective_group(
    world_size: int, rank: int, backend: str = BACKEND, group_name: str = "default", gloo_timeout: int = _DEFAULT_TIMEOUT_MS
) -> None:
    """Ray's function of this name; "nccl" and "gloo", which programs for Ray's own backends give, make a group of allstream's, too.

    Raises:
        RuntimeError: outside an actor or task; this process has a group of that name.
        ValueError: a name that is empty; a backend that nobody has registered.
        AssertionError: a world size or a rank that cannot be.
    """
    from ray.util.collective import init_collective_group as of_ray

    register_here()
    of_ray(world_size, rank, backend_here(backend), group_name, gloo_timeout)


def destroy(group_name: str = "default") -> None:
    """As `ray.util.collective.destroy_collective_group`."""
    from ray.util.collective import destroy_collective_group

    destroy_collective_group(group_name)


def _leave(comm: Any, orderly: bool) -> None:
    try:
        comm.check()
        if orderly:
            comm.close()
        else:
            comm.abort("the group was destroyed")
    except Exception as error:
        logger.debug("allstream: leaving a group that has failed: %s", error)


def _timeout_of_caller() -> int:
    """The `gloo_timeout` of the program. Ray passes it to the backend GLOO alone, so this reads a local variable of Ray's calling function."""
    frame = sys._getframe(2)
    value = frame.f_locals.get("gloo_timeout") if frame.f_code.co_name == "create_collective_group" else None
    return _DEFAULT_TIMEOUT_MS if value is None else value


if not _global_registry.is_registered(BACKEND):
    register_collective_backend(BACKEND, AllstreamGroup)
