"""The functions that an actor or a task calls: those of Ray, some that Ray lacks, and an `_async` form of each operation that does not wait.

All take the name of the group, work in place, and check first: a wrong argument raises at once, and nothing is submitted. A tensor is a
numpy array, a torch tensor or a cupy array; the ranks of one group may use different kinds. The functions with `_async` return a
`Pending` and do not wait for the operation (but a group's first call waits until its ranks have met); the others block, and return None.

All functions raise:
    RuntimeError: outside an actor or task; an absent group; an unknown type of tensor; a list whose length is not
        the number of ranks; a message to this rank itself.
    ValueError: a rank outside the group; tensors of different types or lengths, read-only ones, outputs that share memory.
    TimeoutError: ranks that did not come, or an operation that did not end, within the group's timeout.
    allstream.Error: everything else, such as `PeerLost` (a ConnectionError) with the rank that was lost.
"""

from typing import Any, List, Optional, Sequence, Union

from ray.util.collective.types import ReduceOp

from allstream.ray import arrays
from allstream.ray.group import AllstreamGroup, Pending, get_group, op_name


def allreduce_async(tensor: Any, group_name: str = "default", op: ReduceOp = ReduceOp.SUM) -> Pending:
    """Every rank's `tensor` becomes the reduction of all ranks' tensors."""
    arrays.check_one(tensor)
    return get_group(group_name).start_allreduce(tensor, op_name(op))


def allreduce(tensor: Any, group_name: str = "default", op: ReduceOp = ReduceOp.SUM) -> None:
    """Every rank's `tensor` becomes the reduction of all ranks' tensors."""
    allreduce_async(tensor, group_name, op).wait()


def reduce_async(tensor: Any, dst_rank: int = 0, group_name: str = "default", op: ReduceOp = ReduceOp.SUM) -> Pending:
    """The `tensor` of rank `dst_rank` becomes the reduction of all ranks' tensors; the other tensors do not change."""
    arrays.check_one(tensor)
    group = get_group(group_name)
    check_rank(group, dst_rank)
    return group.start_reduce(tensor, dst_rank, op_name(op))


def reduce(tensor: Any, dst_rank: int = 0, group_name: str = "default", op: ReduceOp = ReduceOp.SUM) -> None:
    """The `tensor` of rank `dst_rank` becomes the reduction of all ranks' tensors; the other tensors do not change."""
    reduce_async(tensor, dst_rank, group_name, op).wait()


def broadcast_async(tensor: Any, src_rank: int = 0, group_name: str = "default") -> Pending:
    """Every rank's `tensor` becomes that of rank `src_rank`."""
    arrays.check_one(tensor)
    group = get_group(group_name)
    check_rank(group, src_rank)
    return group.start_broadcast(tensor, src_rank)


def broadcast(tensor: Any, src_rank: int = 0, group_name: str = "default") -> None:
    """Every rank's `tensor` becomes that of rank `src_rank`."""
    broadcast_async(tensor, src_rank, group_name).wait()


def allgather_async(tensor_list: List[Any], tensor: Any, group_name: str = "default") -> Pending:
    """`tensor_list[r]` becomes the `tensor` of rank r, on every rank."""
    arrays.check_one(tensor)
    arrays.check_list(tensor_list)
    return get_group(group_name).start_allgather(tensor_list, tensor)


def allgather(tensor_list: List[Any], tensor: Any, group_name: str = "default") -> None:
    """`tensor_list[r]` becomes the `tensor` of rank r, on every rank."""
    allgather_async(tensor_list, tensor, group_name).wait()


def reducescatter_async(tensor: Any, tensor_list: List[Any], group_name: str = "default", op: ReduceOp = ReduceOp.SUM) -> Pending:
    """The `tensor` of rank r becomes the reduction of all ranks' `tensor_list[r]`; the lists stay as they are."""
    arrays.check_one(tensor)
    arrays.check_list(tensor_list)
    return get_group(group_name).start_reducescatter(tensor, tensor_list, op_name(op))


def reducescatter(tensor: Any, tensor_list: List[Any], group_name: str = "default", op: ReduceOp = ReduceOp.SUM) -> None:
    """The `tensor` of rank r becomes the reduction of all ranks' `tensor_list[r]`; the lists stay as they are."""
    reducescatter_async(tensor, tensor_list, group_name, op).wait()


def send_async(tensor: Any, dst_rank: int, group_name: str = "default") -> Pending:
    """Sends `tensor` to rank `dst_rank`, which calls `recv`."""
    arrays.check_one(tensor)
    group = get_group(group_name)
    check_peer(group, dst_rank, "destination")
    return group.start_send(tensor, dst_rank)


def send(tensor: Any, dst_rank: int, group_name: str = "default") -> None:
    """Sends `tensor` to rank `dst_rank`, which calls `recv`."""
    send_async(tensor, dst_rank, group_name).wait()


def recv_async(tensor: Any, src_rank: int, group_name: str = "default") -> Pending:
    """`tensor` becomes what rank `src_rank` sends."""
    arrays.check_one(tensor)
    group = get_group(group_name)
    check_peer(group, src_rank, "source")
    return group.start_recv(tensor, src_rank)


def recv(tensor: Any, src_rank: int, group_name: str = "default") -> None:
    """`tensor` becomes what rank `src_rank` sends."""
    recv_async(tensor, src_rank, group_name).wait()


def barrier_async(group_name: str = "default") -> Pending:
    """The returned work is done on no rank before every rank has called this."""
    return get_group(group_name).start_barrier()


def barrier(group_name: str = "default") -> None:
    """Returns on no rank before every rank has called this."""
    barrier_async(group_name).wait()


def gather_async(tensor: Any, gather_list: Optional[List[Any]] = None, dst_rank: int = 0, group_name: str = "default") -> Pending:
    """On rank `dst_rank`, `gather_list[r]` becomes the `tensor` of rank r. The others give no list."""
    arrays.check_one(tensor)
    if gather_list is not None:
        arrays.check_list(gather_list)
    group = get_group(group_name)
    check_rank(group, dst_rank)
    return group.start_gather(tensor, gather_list, dst_rank)


def gather(tensor: Any, gather_list: Optional[List[Any]] = None, dst_rank: int = 0, group_name: str = "default") -> None:
    """On rank `dst_rank`, `gather_list[r]` becomes the `tensor` of rank r. The others give no list."""
    gather_async(tensor, gather_list, dst_rank, group_name).wait()


def scatter_async(tensor: Any, scatter_list: Optional[List[Any]] = None, src_rank: int = 0, group_name: str = "default") -> Pending:
    """The `tensor` of rank r becomes `scatter_list[r]` of rank `src_rank`. The others give no list."""
    arrays.check_one(tensor)
    if scatter_list is not None:
        arrays.check_list(scatter_list)
    group = get_group(group_name)
    check_rank(group, src_rank)
    return group.start_scatter(tensor, scatter_list, src_rank)


def scatter(tensor: Any, scatter_list: Optional[List[Any]] = None, src_rank: int = 0, group_name: str = "default") -> None:
    """The `tensor` of rank r becomes `scatter_list[r]` of rank `src_rank`. The others give no list."""
    scatter_async(tensor, scatter_list, src_rank, group_name).wait()


def all_to_all_async(output_tensor_list: List[Any], input_tensor_list: List[Any], group_name: str = "default") -> Pending:
    """`output_tensor_list[r]` becomes what rank r has for this rank in its `input_tensor_list`.

    The tensors may differ in length: each output must be as long as the tensor that its rank sends.
    """
    arrays.check_list(output_tensor_list)
    arrays.check_list(input_tensor_list)
    return get_group(group_name).start_all_to_all(output_tensor_list, input_tensor_list)


def all_to_all(output_tensor_list: List[Any], input_tensor_list: List[Any], group_name: str = "default") -> None:
    """`output_tensor_list[r]` becomes what rank r has for this rank in its `input_tensor_list`."""
    all_to_all_async(output_tensor_list, input_tensor_list, group_name).wait()


alltoall, alltoall_async = all_to_all, all_to_all_async


def empty(shape: Union[int, Sequence[int]], dtype: Any = "float32", group_name: str = "default") -> Any:
    """An array of zeros in memory that the group's other ranks on this host read in place: collectives on it copy nothing.

    A `dtype` of torch gives a torch tensor; one of numpy, or its name, gives a numpy array.
    """
    return get_group(group_name).comm().empty(shape, dtype)


def check_rank(group: AllstreamGroup, rank: int) -> None:
    """Raises Ray's ValueError unless the group has that rank."""
    if rank < 0:
        raise ValueError(group.says(f"rank '{rank}' is negative."))
    if rank >= group.world_size:
        raise ValueError(group.says(f"rank '{rank}' must be less than world size '{group.world_size}'"))


def check_peer(group: AllstreamGroup, rank: int, what: str) -> None:
    """Raises Ray's errors unless the group has that rank and it is another one."""
    check_rank(group, rank)
    if rank == group.rank:
        raise RuntimeError(group.says(f"The {what} rank '{rank}' is self."))
