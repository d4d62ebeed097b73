"""Ray's collectives on allstream.

`import allstream.ray as col` in place of `import ray.util.collective as col` is all that a program changes: every name of Ray's module
is here, and those of the document that it was designed by. "nccl" and "gloo" as the name of a backend make a group of allstream's, too.

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

A program that keeps `ray.util.collective`, or that uses a library which does, calls `register()` on the driver before `ray.init()`: then
Ray's module takes the backend "allstream" in every actor and task of the job.

Here, and not in Ray's module, are `gather`, `scatter`, `all_to_all`, every function with `_async` behind its name (it returns a work
with `wait`), `empty`, the `*_multigpu` forms for tensors of any kind, `gang`, and the `*_refs` functions that a driver calls on
ObjectRefs.

Importing this module starts nothing and imports neither torch nor `ray.util.collective`, so that workers which never communicate
do not pay for them: names are loaded when they are first used.
"""

import importlib
import sys
from typing import Any

from allstream.ray.hook import register, register_here

# Where each name is.
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
# What is Ray's own.
_OF_RAY = [
    "get_rank", "get_collective_group_size", "is_group_initialized", "get_group_handle", "nccl_available", "gloo_available",
    "is_backend_available", "register_collective_backend", "types", "util", "backend_registry", "collective_group", "synchronize",
    "get_address_and_port",
]

__all__ = ["register", "collective", *_MODULE_OF, *_OF_RAY]


def __getattr__(name: str) -> Any:
    if name == "collective":
        # Ray has all its functions a second time in `ray.util.collective.collective`.
        return sys.modules[__name__]
    if name not in _OF_RAY and name not in _MODULE_OF:
        raise AttributeError(f"module 'allstream.ray' has no attribute {name!r}")
    # Ray's module first, as where a program imports that: two threads that took the two in different orders would wait for each other.
    register_here()
    if name in _OF_RAY:
        of_ray = importlib.import_module("ray.util.collective")
        if not hasattr(of_ray, name) and not hasattr(of_ray.collective, name):
            # A module of Ray's that nobody has imported yet.
            importlib.import_module(f"ray.util.collective.{name}")
        value = getattr(of_ray if hasattr(of_ray, name) else of_ray.collective, name)
    else:
        value = getattr(importlib.import_module(f"allstream.ray.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list:
    return sorted(__all__)
