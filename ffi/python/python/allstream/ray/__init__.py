"""Ray's collectives on allstream.

A program only replaces `import ray.util.collective as col` by `import allstream.ray as col`: this module has every name of Ray's module,
and the further names of its design document. The backend names "nccl" and "gloo" make a group of allstream's, too.

    import ray, allstream.ray as col

    ray.init()

    @ray.remote
    class Worker:
        def __init__(self, rank):
            col.init_collective_group(2, rank, group_name="g")
        def sum(self):
            x = numpy.ones(4, dtype="float32")
            col.allreduce(x, "g")
            return x

A program that still imports `ray.util.collective`, itself or through a library, calls `register()` on the driver before `ray.init()`: then
Ray's module accepts the backend "allstream" in every actor and task of the job.

This module has more than Ray's: `gather`, `scatter`, `all_to_all`, an `_async` form of every operation (it returns an object
with `wait`), `empty`, the `*_multigpu` forms for tensors of any kind, `gang`, and the `*_refs` functions that a driver calls on
ObjectRefs.

Importing this module starts nothing and imports neither torch nor `ray.util.collective`, so that workers which never communicate
do not pay for them: names are loaded when they are first used.
"""

import importlib
import sys
from typing import Any

from allstream.ray.hook import register, register_here

# The submodule that defines each name.
_PLACES = {
    "group": ["AllstreamGroup", "get_group", "init_collective_group", "destroy"],
    "calls": [
        "allreduce", "allreduce_async", "reduce", "reduce_async", "broadcast", "broadcast_async", "allgather", "allgather_async",
        "reducescatter", "reducescatter_async", "send", "send_async", "recv", "recv_async", "barrier", "barrier_async",
        "gather", "gather_async", "scatter", "scatter_async", "all_to_all", "all_to_all_async", "alltoall", "alltoall_async", "empty",
    ],
    "multi": [
        "init_multigpu", "allreduce_multigpu", "reduce_multigpu", "broadcast_multigpu", "allgather_multigpu",
        "reducescatter_multigpu", "send_multigpu", "recv_multigpu",
    ],
    "driver": [
        "create_collective_group", "declare_collective_group", "destroy_collective_group", "destroy_group", "gang", "Gang",
    ],
    "refs": [
        "AllstreamTransport", "allreduce_refs", "reduce_refs", "broadcast_refs", "allgather_refs", "reducescatter_refs", "send_ref",
        "recv_ref",
    ],
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}
# The names that are taken from Ray's module as they are.
_OF_RAY = [
    "get_rank", "get_collective_group_size", "is_group_initialized", "get_group_handle", "nccl_available", "gloo_available",
    "is_backend_available", "register_collective_backend", "types", "util", "backend_registry", "collective_group", "synchronize",
    "get_address_and_port",
]

__all__ = ["register", "collective", *_MODULE_OF, *_OF_RAY]


def __getattr__(name: str) -> Any:
    if name == "collective":
        # Ray's functions are also in the submodule `ray.util.collective.collective`; here, `collective` is this module itself.
        return sys.modules[__name__]
    if name not in _OF_RAY and name not in _MODULE_OF:
        raise AttributeError(f"module 'allstream.ray' has no attribute {name!r}")
    # Import Ray's module first, as a program that uses it does: two threads that import the two packages in different orders can deadlock.
    register_here()
    if name in _OF_RAY:
        of_ray = importlib.import_module("ray.util.collective")
        if not hasattr(of_ray, name) and not hasattr(of_ray.collective, name):
            # A submodule of Ray's that is not imported yet.
            importlib.import_module(f"ray.util.collective.{name}")
        value = getattr(of_ray if hasattr(of_ray, name) else of_ray.collective, name)
    else:
        value = getattr(importlib.import_module(f"allstream.ray.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list:
    return sorted(__all__)
