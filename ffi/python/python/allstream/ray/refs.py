"""ObjectRefs: tensors that stay in the actor that made them, moved and reduced by allstream.

A method with `@ray.method(tensor_transport="ALLSTREAM")` leaves its tensors in its actor; its ObjectRef carries only their shapes
and types. If the ref is passed to another actor of the same group, the tensors go there as messages of that group (`allstream.ray.transport`). The
functions below reduce, copy or collect the tensors of several refs by one call of the driver:

    a, b = Worker.remote(), Worker.remote()
    allstream.ray.create_collective_group([a, b], 2, [0, 1], group_name="g")
    sums = allstream.ray.allreduce_refs([a.get_buffer.remote(), b.get_buffer.remote()], "g")
    b.use.remote(sums[1])

They work in place, as the functions that an actor calls do: `allreduce_refs` changes the tensors that the refs stand for. They return
refs of the results at once; if the operation fails, `ray.get` of those refs raises. Each actor takes part after the calls that were made
on it before.
"""

from typing import Any, Dict, List, Optional, Sequence

import ray
from ray.util.collective.types import ReduceOp

from allstream.ray.hook import BACKEND
from allstream.ray.transport import groups_of

# What the driver calls.


def allreduce_refs(tensor_refs: Sequence[Any], group_name: str = "default", op: ReduceOp = ReduceOp.SUM) -> List[Any]:
    """Each ref's tensor becomes the reduction of all. Takes one ref of each actor, in any order; returns refs of the results in that order."""
    call = _Call("allreduce_refs", group_name)
    return call.everywhere(tensor_refs, lambda ref: (_allreduce, (op, ref)))


def reduce_refs(tensor_refs: Sequence[Any], dst_rank: int = 0, group_name: str = "default", op: ReduceOp = ReduceOp.SUM) -> Any:
    """The tensor of rank `dst_rank` becomes the reduction of all, and is what the returned ref stands for."""
    call = _Call("reduce_refs", group_name)
    call.check_rank(dst_rank)
    results = call.everywhere(tensor_refs, lambda ref: (_reduce, (dst_rank, op, ref)))
    return results[call.ranks(tensor_refs).index(dst_rank)]


def broadcast_refs(tensor_refs: Sequence[Any], src_rank: int = 0, group_name: str = "default") -> List[Any]:
    """Each ref's tensor becomes that of rank `src_rank`."""
    call = _Call("broadcast_refs", group_name)
    call.check_rank(src_rank)
    return call.everywhere(tensor_refs, lambda ref: (_broadcast, (src_rank, ref)))


def allgather_refs(tensor_list_refs: Optional[Sequence[Any]], tensor_refs: Sequence[Any], group_name: str = "default") -> List[Any]:
    """Each actor's list becomes the tensors of all ranks.

    Args:
        tensor_list_refs: for each of `tensor_refs`, in the same order, a ref of a list of tensors in the same actor; None makes new lists.
    """
    call = _Call("allgather_refs", group_name)
    lists = call.paired(tensor_refs, tensor_list_refs)
    return call.everywhere(tensor_refs, lambda ref: (_allgather, (lists[ref.hex()], ref)))


def reducescatter_refs(
    tensor_refs: Sequence[Any], tensor_list_refs: Sequence[Any], group_name: str = "default", op: ReduceOp = ReduceOp.SUM
) -> List[Any]:
    """The tensor of rank r becomes the reduction of the r-th tensors of all ranks' lists."""
    call = _Call("reducescatter_refs", group_name)
    lists = call.paired(tensor_refs, tensor_list_refs)
    return call.everywhere(tensor_refs, lambda ref: (_reducescatter, (op, lists[ref.hex()], ref)))


def send_ref(src_tensor_ref: Any, dst_tensor_ref: Any, group_name: str = "default") -> Any:
    """The tensor of `dst_tensor_ref` becomes that of `src_tensor_ref`. Returns a ref of the result."""
    call = _Call("send_ref", group_name)
    source, target = call.ranks([src_tensor_ref, dst_tensor_ref])
    if source == target:
        raise RuntimeError(call.says(f"both refs are of the actor with rank {source}: the destination is self."))
    call.run(source, _send, (target, src_tensor_ref))
    return call.run(target, _recv, (source, dst_tensor_ref))


def recv_ref(dst_tensor_ref: Any, src_tensor_ref: Any, group_name: str = "default") -> Any:
    """As `send_ref`, with the destination first."""
    return send_ref(src_tensor_ref, dst_tensor_ref, group_name)


class _Call:
    """A call that the driver makes on the actors of a group."""

    def __init__(self, function: str, group_name: str) -> None:
        self.function, self.name = function, group_name
        known = [group for group in groups_of([]) if group.name == group_name]
        if not known:
            raise RuntimeError(
                self.says(
                    "this driver has made no such group. Declare it first: "
                    f"allstream.ray.create_collective_group(actors, world_size, ranks, group_name={group_name!r})"
                )
            )
        self.group = known[0]

    def says(self, what: str) -> str:
        return f"{self.function}, group '{self.name}': {what}"

    def check_rank(self, rank: int) -> None:
        size = len(self.group.actors)
        if not 0 <= rank < size:
            raise ValueError(self.says(f"rank '{rank}' must be from 0 to {size - 1}, as the group has {size} actors"))

    def rank(self, ref: Any) -> int:
        """The rank of the actor that has the ref's tensor."""
        if not isinstance(ref, ray.ObjectRef):
            raise TypeError(self.says(f"expected an ObjectRef, got {type(ref)}. Pass what a method's .remote() returns, without ray.get."))
        meta = ray._private.worker.global_worker.rdt_manager.get_rdt_metadata(ref.hex())
        if meta is None or meta.tensor_transport_backend != BACKEND:
            how = "in Ray's object store" if meta is None else f"of the tensor transport {meta.tensor_transport_backend}"
            raise ValueError(
                self.says(
                    f"{ref} is {how}, and its tensor does not stay in its actor. Write @ray.method(tensor_transport=\"ALLSTREAM\") "
                    "above the method that returns the tensor, and call that method from this driver."
                )
            )
        rank = self.group.get_rank(meta.src_actor)
        if rank < 0:
            raise ValueError(self.says(f"{ref} is of {meta.src_actor}, which is not in the group"))
        return rank

    def ranks(self, refs: Sequence[Any]) -> List[int]:
        return [self.rank(ref) for ref in refs]

    def everywhere(self, refs: Sequence[Any], call: Any) -> List[Any]:
        """Runs the function and arguments that `call(ref)` returns on the actor of each ref. Every actor must have exactly one ref."""
        ranks, size = self.ranks(refs), len(self.group.actors)
        missing = sorted(set(range(size)) - set(ranks))
        if missing:
            raise RuntimeError(self.says(f"no tensor of rank {', '.join(map(str, missing))}: each of the {size} actors must take part"))
        if len(refs) != size:
            twice = next(rank for rank in ranks if ranks.count(rank) > 1)
            raise RuntimeError(self.says(f"{ranks.count(twice)} tensors of rank {twice}: each of the {size} actors takes part once"))
        return [self.run(rank, *call(ref)) for rank, ref in zip(ranks, refs)]

    def paired(self, refs: Sequence[Any], lists: Optional[Sequence[Any]]) -> Dict[str, Any]:
        """The list that goes with each ref, by the ref's hex name; both must be of the same actor."""
        if lists is None:
            return {ref.hex(): None for ref in refs}
        if len(lists) != len(refs):
            raise RuntimeError(self.says(f"{len(refs)} tensors and {len(lists)} lists: there must be one list for each"))
        for ref, of_list in zip(refs, lists):
            if self.rank(ref) != self.rank(of_list):
                raise ValueError(self.says(f"the list of {ref} is of rank {self.rank(of_list)}, and the tensor of rank {self.rank(ref)}"))
        return {ref.hex(): of_list for ref, of_list in zip(refs, lists)}

    def run(self, rank: int, function: Any, args: Sequence[Any]) -> Any:
        actor = self.group.actors[rank]
        return actor.__ray_call__.options(tensor_transport=BACKEND).remote(function, self.name, *args)


# What runs in the actors.


def _allreduce(actor: Any, group: str, op: ReduceOp, tensor: Any) -> Any:
    from allstream.ray import calls

    calls.allreduce(tensor, group, op)
    return tensor


def _reduce(actor: Any, group: str, root: int, op: ReduceOp, tensor: Any) -> Any:
    from allstream.ray import calls

    calls.reduce(tensor, root, group, op)
    return tensor


def _broadcast(actor: Any, group: str, root: int, tensor: Any) -> Any:
    from allstream.ray import calls

    calls.broadcast(tensor, root, group)
    return tensor


def _allgather(actor: Any, group: str, tensors: Optional[List[Any]], tensor: Any) -> Any:
    from allstream.ray import calls
    from allstream.ray.group import get_group

    if tensors is None:
        whole = tensor.new_empty((get_group(group).world_size, *tensor.shape))
        tensors = list(whole.unbind(0))
    calls.allgather(tensors, tensor, group)
    return tensors


def _reducescatter(actor: Any, group: str, op: ReduceOp, tensors: List[Any], tensor: Any) -> Any:
    from allstream.ray import calls

    calls.reducescatter(tensor, tensors, group, op)
    return tensor


def _send(actor: Any, group: str, target: int, tensor: Any) -> Any:
    from allstream.ray import calls

    calls.send(tensor, target, group)
    return tensor


def _recv(actor: Any, group: str, source: int, tensor: Any) -> Any:
    from allstream.ray import calls

    calls.recv(tensor, source, group)
    return tensor
