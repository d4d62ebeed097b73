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


def messages(rank, name):
    """Rank 0 sends to the devices 2 and 1 of rank 1 without naming its own device, and from its device 1 to device 0. Rank 1 receives."""
    import threading

    import allstream.ray as ar

    if rank == 0:
        # A thread for each message, because rank 1 takes them in another order.
        sends = [
            threading.Thread(target=ar.send_multigpu, args=(torch.full((4,), 1.0), 1, 2, name)),
            threading.Thread(target=ar.send_multigpu, args=(torch.full((4,), 2.0), 1, 1, name)),
            threading.Thread(target=ar.send_multigpu, args=(torch.full((4,), 3.0), 1, 0, name), kwargs={"gpu_index": 1}),
        ]
        for send in sends:
            send.start()
        for send in sends:
            send.join()
        ar.send_multigpu(torch.full((4,), 4.0), 1, 1, name)
        return []
    got = []
    for source, more in [(1, {"gpu_index": 0}), (0, {"gpu_index": 1}), (0, {"gpu_index": 2}), (0, {})]:
        x = torch.zeros(4)
        ar.recv_multigpu(x, 0, source, name, **more)
        got.append(x[0].item())
    return got


def test_messages_find_their_devices_without_a_set_of_ranks(two, name):
    """As in the design document, on CPU tensors. Either side may name its own device, or not."""
    assert two.all(messages, name)[1] == [3.0, 2.0, 1.0, 4.0]


def two_receivers(rank, name):
    import threading

    import allstream.ray as ar

    if rank == 0:
        for device in (1, 0):
            ar.send_multigpu(torch.full((1,), float(device)), 1, device, name)
        return []
    outs = [torch.zeros(1) - 1 for _ in range(2)]
    threads = [
        threading.Thread(target=ar.recv_multigpu, args=(out, 0, 0, name), kwargs={"gpu_index": device}) for device, out in enumerate(outs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [out.item() for out in outs]


def test_two_threads_that_receive_for_two_devices(two, name):
    assert two.all(two_receivers, name)[1] == [0.0, 1.0]


def refused_then_received(rank, name):
    import allstream.ray as ar

    if rank == 0:
        ar.send_multigpu(torch.ones(3), 1, 0, name)
        return None
    with pytest.raises(errors.Invalid, match="contiguous"):
        ar.recv_multigpu(torch.zeros(3, 2)[:, 0], 0, 0, name)
    x = torch.zeros(3)
    ar.recv_multigpu(x, 0, 0, name)
    return x.tolist()


def test_a_message_whose_tensor_is_refused_is_there_for_the_next_call(two, name):
    assert two.all(refused_then_received, name)[1] == [1.0] * 3


def test_numbers_that_differ(two, name):
    def differ(rank, name):
        import allstream.ray as ar

        ar.allreduce_multigpu([torch.zeros(1)] * (rank + 1) if rank == 0 else [torch.zeros(1), torch.zeros(1)], name)

    for rank, error in enumerate(two.errors(differ, name)):
        assert isinstance(error, errors.Invalid) and f"rank {1 - rank} gives {2 - rank}" in str(error)


def test_a_list_that_rays_own_function_gives(two, name):
    """Ray's `allreduce_multigpu`, which needs cupy, gives the group a list of tensors. Here the group gets such a list without cupy."""

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
