"""Every operation, on numpy and torch, in one group of four actors."""

import numpy as np
import pytest
import ray
import torch

SIZE = 4
KINDS = ["numpy", "torch", "mixed"]


def tensor(kind, rank, values, dtype="float32"):
    """A tensor of the kind; of a mixed group even ranks have numpy and odd ones torch."""
    if kind == "numpy" or (kind == "mixed" and rank % 2 == 0):
        return np.array(values, dtype=dtype)
    return torch.tensor(values, dtype=getattr(torch, dtype))


def plain(x):
    return x.tolist()


def reduced(rank, name, kind, dtype, op):
    import ray.util.collective as col

    x = tensor(kind, rank, [rank + 1, 2, 3 - rank], dtype)
    col.allreduce(x, name, getattr(col.types.ReduceOp, op))
    return plain(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8"])
def test_allreduce(pool, group, kind, dtype):
    inputs = np.array([[rank + 1, 2, 3 - rank] for rank in range(SIZE)], dtype=dtype)
    for op, function in [("SUM", np.sum), ("PRODUCT", np.prod), ("MIN", np.min), ("MAX", np.max)]:
        expected = function(inputs, axis=0).astype(dtype).tolist()
        assert pool.all(reduced, group, kind, dtype, op) == [expected] * SIZE


def half(rank, name):
    import ray.util.collective as col

    x = torch.full((5,), rank + 1, dtype=torch.bfloat16)
    col.allreduce(x, name)
    return x.tolist()


def test_allreduce_of_16_bits(pool, group):
    assert pool.all(half, group) == [[10.0] * 5] * SIZE


def reduce_to(rank, name, kind):
    import ray.util.collective as col

    x = tensor(kind, rank, [[rank, 1]])
    col.reduce(x, 2, name)
    return plain(x)


@pytest.mark.parametrize("kind", KINDS)
def test_reduce_leaves_the_others_as_they_are(pool, group, kind):
    results = pool.all(reduce_to, group, kind)
    assert results == [[[0, 1]], [[1, 1]], [[6, 4]], [[3, 1]]]


def cast(rank, name, kind):
    import ray.util.collective as col

    x = tensor(kind, rank, [rank] * 3)
    col.broadcast(x, 3, name)
    col.barrier(name)
    return plain(x)


@pytest.mark.parametrize("kind", KINDS)
def test_broadcast_and_barrier(pool, group, kind):
    assert pool.all(cast, group, kind) == [[3] * 3] * SIZE


def gathered(rank, name, kind, how):
    import ray.util.collective as col

    x = tensor(kind, rank, [rank, 10 * rank])
    if how == "apart":
        outs = [tensor(kind, rank + (kind == "mixed") * r, [0, 0]) for r in range(SIZE)]
    else:
        outs = list(tensor(kind, rank, [[0, 0]] * SIZE))
    if how == "own":
        outs[rank][:] = x
        x = outs[rank]
    col.allgather(outs, x, name)
    return [plain(out) for out in outs]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["apart", "views", "own"])
def test_allgather(pool, group, kind, how):
    assert pool.all(gathered, group, kind, how) == [[[r, 10 * r] for r in range(SIZE)]] * SIZE


def scattered(rank, name, kind, how):
    import ray.util.collective as col

    parts = [tensor(kind, rank, [rank, r]) for r in range(SIZE)]
    if how == "views":
        parts = list(tensor(kind, rank, [[rank, r] for r in range(SIZE)]))
    out = parts[rank] if how == "own" else tensor(kind, rank, [0, 0])
    col.reducescatter(out, parts, name)
    return plain(out), [plain(part) for part in parts]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["apart", "views", "own"])
def test_reducescatter_leaves_its_inputs_as_they_are(pool, group, kind, how):
    for rank, (out, parts) in enumerate(pool.all(scattered, group, kind, how)):
        assert out == [6, 4 * rank]
        expected = [[rank, r] for r in range(SIZE)]
        if how == "own":
            expected[rank] = out
        assert parts == expected


def pass_on(rank, name, kind):
    import ray.util.collective as col

    x, got = tensor(kind, rank, [rank] * 3000), tensor(kind, rank, [0] * 3000)
    if rank % 2:
        col.recv(got, rank - 1, name)
        col.send(x, (rank + 1) % SIZE, name)
    else:
        col.send(x, rank + 1, name)
        col.recv(got, (rank - 1) % SIZE, name)
    return plain(got)


@pytest.mark.parametrize("kind", KINDS)
def test_send_and_recv(pool, group, kind):
    assert pool.all(pass_on, group, kind) == [[(rank - 1) % SIZE] * 3000 for rank in range(SIZE)]


def gather_and_scatter(rank, name, kind):
    import allstream.ray as ar

    x = tensor(kind, rank, [rank])
    outs = [tensor(kind, rank, [0]) for _ in range(SIZE)] if rank == 1 else None
    ar.gather(x, outs, 1, name)
    got = tensor(kind, rank, [0])
    ar.scatter(got, [tensor(kind, rank, [10 * r]) for r in range(SIZE)] if rank == 2 else None, 2, name)
    return [plain(out) for out in outs or []], plain(got)


@pytest.mark.parametrize("kind", KINDS)
def test_gather_and_scatter(pool, group, kind):
    results = pool.all(gather_and_scatter, group, kind)
    assert [outs for outs, _ in results] == [[], [[0], [1], [2], [3]], [], []]
    assert [got for _, got in results] == [[0], [10], [20], [30]]


def exchanged(rank, name, kind, uneven):
    import allstream.ray as ar

    def length(source, target):
        return 1 + source * target if uneven else 2

    parts = [tensor(kind, rank, [10 * rank + r] * length(rank, r)) for r in range(SIZE)]
    outs = [tensor(kind, rank, [0] * length(r, rank)) for r in range(SIZE)]
    ar.alltoall(outs, parts, name)
    return [plain(out) for out in outs] == [[10 * r + rank] * length(r, rank) for r in range(SIZE)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("uneven", [False, True])
def test_all_to_all(pool, group, kind, uneven):
    assert all(pool.all(exchanged, group, kind, uneven))


def without_waiting(rank, name):
    import asyncio
    import threading

    import allstream.ray as ar

    x, y, z = np.ones(3, "float32"), torch.ones(3), np.full(2, rank)
    outs, called = [np.zeros(2, dtype=z.dtype) for _ in range(SIZE)], threading.Event()
    works = [ar.allreduce_async(x, name), ar.broadcast_async(y, 0, name), ar.allgather_async(outs, z, name), ar.barrier_async(name)]
    works[0].add_done_callback(lambda work: called.set())

    async def rest():
        return await works[1], await works[2]

    works[0].wait(30)
    assert works[0].done() and works[0].exception() is None and called.wait(30)
    awaited = asyncio.run(rest())
    assert awaited[0] is y and awaited[1] is outs
    works[3].result()
    return plain(x), [plain(out) for out in outs]


def test_without_waiting(pool, group):
    assert pool.all(without_waiting, group) == [([4.0] * 3, [[r, r] for r in range(SIZE)])] * SIZE


def in_shared_memory(rank, name):
    import allstream.ray as ar
    import ray.util.collective as col

    x, y = ar.empty((100, 3), torch.float32, name), ar.empty(7, "int64", name)
    assert isinstance(x, torch.Tensor) and isinstance(y, np.ndarray) and not y.any()
    x += rank
    y += rank
    col.allreduce(x, name)
    col.allreduce(y, name)
    return float(x.sum()), plain(y)


def test_empty(pool, group):
    assert pool.all(in_shared_memory, group) == [(1800.0, [6] * 7)] * SIZE


def on_host_stream(rank, name):
    import allstream
    import allstream.ray as ar

    stream, seen = allstream.HostStream(), []
    outs = [np.zeros(1) for _ in range(SIZE)]
    ar.allgather_async(outs, np.full(1, rank + 1.0), name).join(stream)
    stream.launch(lambda: seen.append([float(out[0]) for out in outs]))
    stream.synchronize()
    return seen[0]


def test_a_stream_goes_on_after_a_list_is_filled(pool, group):
    assert pool.all(on_host_stream, group) == [[1, 2, 3, 4]] * SIZE


def two_groups(rank, name):
    import ray.util.collective as col

    x = np.ones(1)
    if rank < 2:
        col.allreduce(x, f"{name}-low")
    else:
        col.allreduce(x, f"{name}-high")
    col.allreduce(x, name)
    return float(x[0])


def test_several_groups_of_the_same_actors(pool, group, helpers):
    def join(rank, name):
        import ray.util.collective as col

        low = rank < 2
        col.init_collective_group(2, rank % 2, "allstream", f"{name}-low" if low else f"{name}-high")

    pool.all(join, group)
    assert pool.all(two_groups, group) == [8.0] * SIZE
    pool.all(helpers.leave, f"{group}-low")
    pool.all(helpers.leave, f"{group}-high")


@ray.remote(num_cpus=0)
def task(rank, name):
    import ray.util.collective as col

    col.init_collective_group(2, rank, "allstream", name)
    x = torch.ones(2) * (rank + 1)
    col.allreduce(x, name)
    size = col.get_collective_group_size(name)
    col.destroy_collective_group(name)
    return x.tolist(), size


def test_in_tasks(pool, name):
    for _ in range(2):
        assert ray.get([task.remote(rank, name) for rank in range(2)], timeout=90) == [([3.0, 3.0], 2)] * 2
