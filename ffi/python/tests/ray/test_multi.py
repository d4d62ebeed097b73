"""Several tensors for each process: two actors, three tensors each."""

import pytest
import torch

from allstream import errors

DEVICES, RANKS = 3, 2
ALL = DEVICES * RANKS


@pytest.fixture
def two(pool, name, helpers):
    members = helpers.Members(pool.actors[:RANKS])
    members.all(helpers.join, RANKS, name)
    yield members
    members.all(helpers.leave, name)


def parts(rank, value):
    return [value(rank * DEVICES + index) for index in range(DEVICES)]


def everything(rank, name):
    import allstream.ray as ar

    x = parts(rank, lambda g: torch.full((4,), float(g)))
    ar.allreduce_multigpu(x, name)
    y = parts(rank, lambda g: torch.full((2,), float(g)))
    ar.broadcast_multigpu(y, 1, 2, name)
    z = parts(rank, lambda g: torch.full((2,), float(g)))
    ar.reduce_multigpu(z, 0, 1, name)
    outs = [[torch.zeros(1) for _ in range(ALL)] for _ in range(DEVICES)]
    ar.allgather_multigpu(outs, parts(rank, lambda g: torch.full((1,), float(g))), name)
    got = [torch.zeros(1) for _ in range(DEVICES)]
    ar.reducescatter_multigpu(got, [[torch.full((1,), float(g)) for g in range(ALL)] for _ in range(DEVICES)], name)
    message = torch.full((4,), float(rank))
    if rank == 0:
        ar.send_multigpu(message + 7, 1, 2, name, n_elements=3, gpu_index=1)
    else:
        ar.recv_multigpu(message, 0, 1, name, n_elements=3, gpu_index=2)
    return [[t.tolist() for t in ts] for ts in (x, y, z, *outs, got, [message])]


def test_everything(two, name):
    for rank, results in enumerate(two.all(everything, name)):
        x, y, z, *outs, got, (message,) = results
        assert x == [[15.0] * 4] * DEVICES and y == [[5.0] * 2] * DEVICES
        expected = [[float(rank * DEVICES + index)] * 2 for index in range(DEVICES)]
        if rank == 0:
            expected[1] = [15.0] * 2
        assert z == expected
        assert outs == [[[float(g)] for g in range(ALL)]] * DEVICES
        assert got == [[float(ALL * (rank * DEVICES + index))] for index in range(DEVICES)]
        assert message == ([0.0] * 4 if rank == 0 else [7.0, 7.0, 7.0, 1.0])


def test_numbers_that_differ(two, name):
    def differ(rank, name):
        import allstream.ray as ar

        ar.allreduce_multigpu([torch.zeros(1)] * (rank + 1) if rank == 0 else [torch.zeros(1), torch.zeros(1)], name)

    for rank, error in enumerate(two.errors(differ, name)):
        assert isinstance(error, errors.Invalid) and f"rank {1 - rank} gives {2 - rank}" in str(error)


def test_a_list_that_rays_own_function_gives(two, name):
    """With cupy, Ray's `allreduce_multigpu` gives the group a list; so it is called here without cupy."""

    def call(rank, name):
        from ray.util.collective import types

        import allstream.ray as ar

        x = [torch.ones(2), torch.ones(2)]
        ar.get_group(name).allreduce(x, types.AllReduceOptions())
        return [t.tolist() for t in x]

    assert two.all(call, name) == [[[4.0, 4.0]] * 2] * RANKS


def twice(rank, name):
    import allstream.ray as ar

    x = torch.ones(2)
    try:
        ar.allreduce_multigpu([x, x, torch.ones(2)], name)
    except errors.Invalid as error:
        refused = str(error)
    y = parts(rank, lambda _: torch.ones(2))
    ar.allreduce_multigpu(y, name)
    return refused, y[0].tolist()


def test_one_tensor_twice_is_refused_and_the_group_goes_on(two, name):
    for refused, result in two.all(twice, name):
        assert "share memory" in refused
        assert result == [float(ALL)] * 2
