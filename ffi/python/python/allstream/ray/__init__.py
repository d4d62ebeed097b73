"""Ray's collectives on allstream.

Call `register()` on the driver before `ray.init()`; then `ray.util.collective` takes the backend "allstream" in every actor and task
of the job, with all its functions as they are:

    import ray, allstream.ray
    import ray.util.collective as col

    allstream.ray.register()
    ray.init()

    @ray.remote
    class Worker:
        def __init__(self, rank):
            col.init_collective_group(2, rank, "allstream", "g")
        def sum(self):
            x = numpy.ones(4, dtype="float32")
            col.allreduce(x, "g")
            return x

What Ray's module lacks is here, with the same names and the same errors: `gather`, `scatter`, `all_to_all`, every function with
`_async` behind its name (it returns a work with `wait`), `empty`, the `*_multigpu` forms for tensors of any kind, `gang`, and
the `*_refs` functions that a driver calls on ObjectRefs.

Importing this module starts nothing and imports neither torch nor `ray.util.collective`, so that workers which never communicate
do not pay for them: names are loaded when they are first used.
"""

import importlib
from typing import Any

from allstream.ray.hook import register

# Where each name is.
_PLACES = {
    "group": ["AllstreamGroup", "get_group", "destroy"],
    "calls": [
        "allreduce", "allreduce_async", "reduce", "reduce_async", "broadcast", "broadcast_async", "allgather", "allgather_async",
        "reducescatter", "reducescatter_async", "send", "send_async", "recv", "recv_async", "barrier", "barrier_async",
        "gather", "gather_async", "scatter", "scatter_async", "all_to_all", "all_to_all_async", "alltoall", "alltoall_async", "empty",
    ],
    "multi": [
        "init_multigpu", "allreduce_multigpu", "reduce_multigpu", "broadcast_multigpu", "allgather_multigpu",
        "reducescatter_multigpu", "send_multigpu", "recv_multigpu",
    ],
    "driver": ["create_collective_group", "declare_collective_group", "destroy_collective_group", "gang", "Gang"],
    "refs": [
        "AllstreamTransport", "allreduce_refs", "reduce_refs", "broadcast_refs", "allgather_refs", "reducescatter_refs", "send_ref",
        "recv_ref",
    ],
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}

__all__ = ["register", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'allstream.ray' has no attribute {name!r}")
    return getattr(importlib.import_module(f"allstream.ray.{module}"), name)


def __dir__() -> list:
    return sorted(__all__)
