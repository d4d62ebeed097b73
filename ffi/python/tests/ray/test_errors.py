"""Bad calls raise at once, with the type of error that Ray raises, and submit nothing: the group works afterwards."""

import numpy as np
import pytest
import ray.util.collective as col
import torch

import allstream.ray
from allstream import errors

SIZE = 4


def raised(call):
    """What `call` raises: the names of its class and base classes, and its message."""
    try:
        call()
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return [], ""


def zeros(*shape):
    return torch.zeros(*shape)


def read_only():
    x = np.zeros(3)
    x.flags.writeable = False
    return x


# What all ranks call, and what that raises. `m` is the module: each case runs with Ray's and with ours, which must agree.
CASES = {
    "no tensor": (lambda m, g, rank: m.allreduce([1, 2], g), "RuntimeError", "Unrecognized tensor type"),
    "no tensor to send": (lambda m, g, rank: m.send(3, (rank + 1) % SIZE, g), "RuntimeError", "Unrecognized tensor type"),
    "no list": (lambda m, g, rank: m.allgather(zeros(3), zeros(3), g), "RuntimeError", "list of tensors"),
    "an empty list": (lambda m, g, rank: m.allgather([], zeros(3), g), "RuntimeError", "empty list"),
    "a short list": (lambda m, g, rank: m.allgather([zeros(3)], zeros(3), g), "RuntimeError", "world_size"),
    "a long list": (lambda m, g, rank: m.reducescatter(zeros(3), [zeros(3) for _ in range(5)], g), "RuntimeError", "world_size"),
    "a list of others": (lambda m, g, rank: m.allgather([zeros(3), 1, 2, 3], zeros(3), g), "RuntimeError", "Unrecognized"),
    "an absent group": (lambda m, g, rank: m.allreduce(zeros(3), "nobody"), "RuntimeError", "'nobody' is not initialized"),
    "a message to itself": (lambda m, g, rank: m.send(zeros(3), rank, g), "RuntimeError", "is self"),
    "a message from itself": (lambda m, g, rank: m.recv(zeros(3), rank, g), "RuntimeError", "is self"),
    "a rank below 0": (lambda m, g, rank: m.reduce(zeros(3), -1, g), "ValueError", "negative"),
    "a rank too high": (lambda m, g, rank: m.broadcast(zeros(3), SIZE, g), "ValueError", "must be less than world size"),
    "a peer too high": (lambda m, g, rank: m.send(zeros(3), 17, g), "ValueError", "'17' must be less than world size"),
    "a wrong shape": (lambda m, g, rank: m.reducescatter(zeros(2), [zeros(3) for _ in range(SIZE)], g), "ValueError", "wrong shape"),
    "another length": (lambda m, g, rank: m.allgather([zeros(3)] + [zeros(2) for _ in range(3)], zeros(3), g), "ValueError", "shape"),
    "another type": (
        lambda m, g, rank: m.allgather([zeros(3).double() for _ in range(SIZE)], zeros(3), g), "ValueError", "has type float64",
    ),
    "the same output": (lambda m, g, rank: m.allgather([zeros(3)] * SIZE, zeros(3), g), "ValueError", "share memory"),
    "read-only": (lambda m, g, rank: m.allreduce(read_only(), g), "ValueError", "read-only"),
    "read-only outputs": (lambda m, g, rank: m.allgather([read_only() for _ in range(4)], np.zeros(3), g), "ValueError", "read-only"),
    "not contiguous": (lambda m, g, rank: m.allreduce(zeros(4, 4).T[1:], g), "ValueError", "contiguous"),
    "not contiguous numpy": (lambda m, g, rank: m.allreduce(np.zeros((4, 4))[:, 1], g), "ValueError", "contiguous"),
    "needs a gradient": (lambda m, g, rank: m.allreduce(torch.zeros(3, requires_grad=True), g), "ValueError", "gradient"),
    "strings": (lambda m, g, rank: m.allreduce(np.array(["a"]), g), "RuntimeError", ""),
    "a second time": (lambda m, g, rank: col.init_collective_group(SIZE, rank, "allstream", g), "RuntimeError", "second time"),
    "rank of a group": (lambda m, g, rank: col.init_collective_group(SIZE, SIZE, "allstream", g + "x"), "AssertionError", ""),
    "size of a group": (lambda m, g, rank: col.init_collective_group(0, 0, "allstream", g + "x"), "AssertionError", ""),
    "no backend": (lambda m, g, rank: col.init_collective_group(SIZE, rank, "nobody", g + "x"), "ValueError", "not registered"),
}
OURS = {
    "a gather without room": (lambda m, g, rank: m.gather(zeros(1), None, rank, g), "RuntimeError", "needs a list"),
    "a short scatter": (lambda m, g, rank: m.scatter(zeros(1), [zeros(1)], rank, g), "RuntimeError", "world_size"),
    "no operation": (lambda m, g, rank: m.allreduce(zeros(1), g, "sum"), "RuntimeError", "Unknown reduce operation"),
    "short exchange": (lambda m, g, rank: m.all_to_all([zeros(1)], [zeros(1)], g), "RuntimeError", "world_size"),
    "a device below 0": (lambda m, g, rank: m.send_multigpu(zeros(1), (rank + 1) % SIZE, -1, g), "ValueError", "device '-1'"),
    "root tensor": (lambda m, g, rank: m.reduce_multigpu([zeros(1)], 0, 1, g), "ValueError", "root_tensor"),
    "root below 0": (lambda m, g, rank: m.broadcast_multigpu([zeros(1)], 0, -1, g), "ValueError", "root_tensor"),
    "no lists": (lambda m, g, rank: m.allgather_multigpu(zeros(1), [zeros(1)], g), "RuntimeError", "list of lists"),
}


def case(rank, name, module, title):
    import time

    import ray.util.collective as col

    import allstream.ray

    allstream.ray.get_group(name).comm()
    call = {**CASES, **OURS}[title][0]
    began = time.monotonic()
    found = raised(lambda: call(col if module == "ray" else allstream.ray, name, rank))
    return found, time.monotonic() - began


@pytest.mark.parametrize("module,title", [("ray", title) for title in CASES] + [("ours", title) for title in [*CASES, *OURS]])
def test_refused_at_once(pool, group, module, title):
    _, kind, text = {**CASES, **OURS}[title]
    for (kinds, message), took in pool.all(case, group, module, title):
        assert kind in kinds and text in message
        assert took < 1
    assert pool.all(works, group) == [10.0] * SIZE


def works(rank, name):
    import ray.util.collective as col

    x = np.full(1, rank + 1.0)
    col.allreduce(x, name)
    return float(x[0])


def test_outside_an_actor():
    for call in [
        lambda: col.init_collective_group(2, 0, "allstream", "g"),
        lambda: col.allreduce(zeros(1), "g"),
        lambda: allstream.ray.allreduce(zeros(1), "g"),
        lambda: allstream.ray.gather(zeros(1), None, 0, "g"),
        lambda: allstream.ray.allreduce_multigpu([zeros(1)], "g"),
        lambda: allstream.ray.empty(3, "float32", "g"),
    ]:
        with pytest.raises(RuntimeError, match="only used inside a Ray actor or task"):
            call()


def test_groups_that_the_driver_declares_wrongly(pool, name):
    create = allstream.ray.create_collective_group
    two = pool.actors[:2]
    for arguments, kind, text in [
        ((two, 2, [0]), RuntimeError, "Each actor"),
        ((two, 0, [0, 1]), RuntimeError, "greater than zero"),
        ((two, 3, [0, 1]), RuntimeError, "number of actors"),
        ((two, 2, [0, 2]), RuntimeError, "permutation"),
        ((two, 2, [1, 1]), RuntimeError, "permutation"),
        (([two[0], two[0]], 2, [0, 1]), ValueError, "unique"),
    ]:
        with pytest.raises(kind, match=text):
            create(*arguments, group_name=name)
    with pytest.raises(RuntimeError, match="not registered"):
        create(two, 2, [0, 1], "nobody", name)


def test_an_actor_that_is_elsewhere(pool, name, helpers):
    pool.all(helpers.join, 4, name)
    pool.all(works, name)
    with pytest.raises(RuntimeError, match="second time"):
        allstream.ray.create_collective_group(pool.actors, 4, [1, 0, 2, 3], group_name=name)
    assert pool.all(works, name) == [10.0] * SIZE
    pool.all(helpers.leave, name)


def test_a_group_of_another_backend(pool, name):
    def gloo(rank, name):
        import ray.util.collective as col

        import allstream.ray

        col.init_collective_group(1, 0, "gloo", name)
        try:
            allstream.ray.gather(zeros(1), [zeros(1)], 0, name)
        finally:
            col.destroy_collective_group(name)

    with pytest.raises(RuntimeError, match="backend GLOO"):
        import ray

        ray.get(pool.actors[0].do.remote(gloo, 0, name), timeout=90)


def ends(rank, name):
    import ray.util.collective as col

    x = np.zeros(1)
    if rank == 0:
        col.allreduce(x, name)


def test_an_operation_has_the_groups_deadline(pool, name, helpers):
    pool.all(helpers.join, SIZE, name, 6000)
    pool.all(works, name)
    found = pool.errors(ends, name)
    assert isinstance(found[0], errors.Timeout) and isinstance(found[0], TimeoutError)
    assert f"group '{name}', rank 0 of 4: allreduce" in str(found[0]) and "rank 1" in str(found[0])
    pool.all(helpers.leave, name)
    pool.all(helpers.join, SIZE, name)
    assert pool.all(works, name) == [10.0] * SIZE
    pool.all(helpers.leave, name)
