"""A program need only replace `import ray.util.collective as col` by `import allstream.ray as col`."""

import inspect

import pytest
import ray.util.collective
from programs import REPOSITORY
from test_register import script

import allstream.ray

# The functions that the design document of Ray's collectives has, and that Ray's module does not have (yet, or any more).
OF_THE_DESIGN = [
    "declare_collective_group", "destroy_group", "gather", "scatter", "all_to_all", "allreduce_refs", "reduce_refs", "allgather_refs",
    "send_ref", "recv_ref",
]


def public(module):
    return {name for name in dir(module) if not name.startswith("_")}


def functions(module):
    """The names of the public functions that the module itself defines."""
    return {name for name, value in inspect.getmembers(module, inspect.isfunction) if value.__module__ == module.__name__ and name[0] != "_"}


def test_every_name_is_there():
    names = public(ray.util.collective) | functions(ray.util.collective.collective) | set(OF_THE_DESIGN)
    assert {"allreduce", "get_rank", "types", "synchronize"} <= names
    assert sorted(name for name in names if not hasattr(allstream.ray, name)) == []
    assert names <= set(dir(allstream.ray))
    with pytest.raises(AttributeError, match="no attribute 'all_reduce'"):
        allstream.ray.all_reduce  # noqa: B018: the name is looked up.


def parameters(function):
    return [(name, parameter.kind) for name, parameter in inspect.signature(function).parameters.items()]


def test_every_function_takes_what_rays_takes():
    """Our functions begin with the parameters of Ray's, of the same names and kinds; any more that ours have may be left out."""
    differ = []
    for name in sorted(functions(ray.util.collective.collective)):
        of_ray, ours = getattr(ray.util.collective.collective, name), getattr(allstream.ray, name)
        if parameters(ours)[: len(parameters(of_ray))] != parameters(of_ray):
            differ.append(name)
        extra = list(inspect.signature(ours).parameters.values())[len(parameters(of_ray)):]
        if any(parameter.default is inspect.Parameter.empty for parameter in extra):
            differ.append(name)
    assert differ == []


def test_programs_for_rays_backends_with_another_import():
    """In one job, without `register()`: a group that the actors make, and one that the driver declares, as in the design document."""
    done = script("""
        import torch
        import allstream.ray as col
        from allstream.ray import types
        ray.init(**OPTIONS)

        @ray.remote(num_cpus=0)
        class Worker:
            def __init__(self):
                self.buffer = torch.ones(4)
            def setup(self, size, rank, backend, name):
                col.collective.init_collective_group(size, rank, backend, name)
                return col.is_group_initialized(name), col.get_rank(name), col.get_collective_group_size(name)
            def compute(self, name):
                col.allreduce(self.buffer, name, types.ReduceOp.SUM)
                return self.buffer.tolist(), type(col.get_group_handle(name)).__name__
            @ray.method(tensor_transport="ALLSTREAM")
            def get_buffer(self):
                return self.buffer
            def first(self, x):
                return x[0].item()
            def destroy(self, name):
                col.destroy_group(name)
                return col.is_group_initialized(name), col.get_rank(name), col.get_collective_group_size(name)

        def get(refs):
            return ray.get(refs, timeout=90)

        workers = [Worker.remote() for _ in range(2)]
        print(get([w.setup.remote(2, rank, "gloo", "default") for rank, w in enumerate(workers)]))
        print(get([w.compute.remote("default") for w in workers]))
        print(get([w.destroy.remote("default") for w in workers]))
        col.declare_collective_group(workers, **{"group_name": "177", "world_size": 2, "ranks": [0, 1], "backend": "nccl"})
        print(get([w.compute.remote("177") for w in workers]))
        print(get([w.first.remote(ref) for w, ref in zip(workers, col.allreduce_refs([w.get_buffer.remote() for w in workers], "177"))]))
        col.destroy_group("177")
        print(get([w.destroy.remote("177") for w in workers]))
    """)
    assert done.stdout.splitlines() == [
        "[(True, 0, 2), (True, 1, 2)]",
        "[([2.0, 2.0, 2.0, 2.0], 'AllstreamGroup'), ([2.0, 2.0, 2.0, 2.0], 'AllstreamGroup')]",
        "[(False, -1, -1), (False, -1, -1)]",
        "[([4.0, 4.0, 4.0, 4.0], 'AllstreamGroup'), ([4.0, 4.0, 4.0, 4.0], 'AllstreamGroup')]",
        "[8.0, 8.0]",
        "[(False, -1, -1), (False, -1, -1)]",
    ], done.stderr[-2000:]
    assert "register" not in done.stderr


def test_the_example_needs_no_registration():
    assert ".register()" not in (REPOSITORY / "ffi/python/examples/ray_design.py").read_text()
