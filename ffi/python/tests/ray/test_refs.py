"""ObjectRefs of tensors that stay in their actors: passed from actor to actor, and reduced by one call of the driver."""

import os
import signal
import time

import pytest
import ray
import torch

import allstream.ray
from allstream import errors


class Holder:
    """An actor with a buffer."""

    def __init__(self, rank):
        self.rank = rank
        self.buffer = torch.full((3,), rank + 1.0)

    @ray.method(tensor_transport="ALLSTREAM")
    def get_buffer(self):
        return self.buffer

    @ray.method(tensor_transport="ALLSTREAM")
    def make(self, *values):
        return torch.tensor(values, dtype=torch.float32)

    @ray.method(tensor_transport="ALLSTREAM")
    def make_list(self, values):
        return [torch.tensor([float(value)]) for value in values]

    @ray.method(tensor_transport="ALLSTREAM")
    def large(self, count):
        return {"a": torch.full((count,), float(self.rank)), "b": [torch.arange(5), "text"]}

    def plain(self):
        return torch.zeros(1)

    def values(self, x):
        return [t.tolist() for t in x] if isinstance(x, list) else x.tolist()

    def look(self, x):
        return float(x["a"].sum()), x["b"][0].tolist(), x["b"][1]

    def held(self):
        return self.buffer.tolist()

    def pid(self):
        return os.getpid()

    def join(self, world, name, timeout=30_000):
        ray.util.collective.init_collective_group(world, self.rank, "allstream", name, timeout)

    def sum(self, name):
        x = torch.ones(1)
        ray.util.collective.allreduce(x, name)
        return float(x)

    def busy(self, seconds):
        time.sleep(seconds)


def get(refs):
    return ray.get(refs, timeout=90)


@pytest.fixture(scope="module")
def holders(cluster):
    actors = [ray.remote(num_cpus=0)(Holder).remote(rank) for rank in range(3)]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def three(holders, name):
    allstream.ray.create_collective_group(holders, 3, range(3), group_name=name)
    yield holders
    allstream.ray.destroy_collective_group(name)


def test_passed_from_actor_to_actor(three):
    a, b, c = three
    ref = a.make.remote(1, 2, 3)
    assert get([b.values.remote(ref), c.values.remote(ref), a.values.remote(ref)]) == [[1.0, 2.0, 3.0]] * 3
    ref = b.large.remote(1 << 20)
    assert get([a.look.remote(ref), c.look.remote(ref)]) == [(float(1 << 20), [0, 1, 2, 3, 4], "text")] * 2


def test_many_transfers_and_collectives_beside_them(three, name):
    a, b, c = three
    found = []
    for number in range(20):
        ref = three[number % 3].make.remote(number)
        found.append(three[(number + 1) % 3].values.remote(ref))
        sums = [actor.sum.remote(name) for actor in three]
    assert get(found) == [[float(number)] for number in range(20)]
    assert get(sums) == [3.0] * 3


def buffers(actors):
    return [actor.get_buffer.remote() for actor in actors]


def test_allreduce_refs_as_in_the_design_document(three, name):
    a, b, c = three
    refs = [actor.make.remote(actor_number) for actor_number, actor in enumerate([c, a, b])]
    results = allstream.ray.allreduce_refs(refs, name)
    assert get([actor.values.remote(ref) for actor, ref in zip([c, a, b], results)]) == [[3.0]] * 3
    # In place: the refs that were passed in stand for the sums, too. And a result can be passed to another actor.
    assert get([actor.values.remote(ref) for actor, ref in zip([c, a, b], refs)]) == [[3.0]] * 3
    assert get(a.values.remote(results[0])) == [3.0]


def test_a_buffer_of_the_actor_is_reduced_where_it_is(three, name):
    before = get([actor.held.remote() for actor in three])
    refs = buffers(three)
    allstream.ray.allreduce_refs(refs, name)
    total = [sum(values) for values in zip(*before)]
    assert get([actor.held.remote() for actor in three]) == [total] * 3


def test_the_other_functions(three, name):
    op = ray.util.collective.types.ReduceOp.MAX
    refs = [actor.make.remote(rank, -rank) for rank, actor in enumerate(three)]
    assert get(three[1].values.remote(allstream.ray.reduce_refs(refs, 1, name, op))) == [2.0, 0.0]
    refs = [actor.make.remote(rank) for rank, actor in enumerate(three)]
    results = allstream.ray.broadcast_refs(refs, 2, name)
    assert get([actor.values.remote(ref) for actor, ref in zip(three, results)]) == [[2.0]] * 3
    refs = [actor.make.remote(rank) for rank, actor in enumerate(three)]
    for lists in [None, [actor.make_list.remote([0, 0, 0]) for actor in three]]:
        results = allstream.ray.allgather_refs(lists, refs, name)
        assert get([actor.values.remote(ref) for actor, ref in zip(three, results)]) == [[[0.0], [1.0], [2.0]]] * 3
    refs = [actor.make.remote(0) for actor in three]
    results = allstream.ray.reducescatter_refs(refs, [actor.make_list.remote([1, 2, 3]) for actor in three], name)
    assert get([actor.values.remote(ref) for actor, ref in zip(three, results)]) == [[3.0], [6.0], [9.0]]


def test_send_ref_and_recv_ref(three, name):
    a, b, _ = three
    target = b.make.remote(0, 0)
    assert get(b.values.remote(allstream.ray.send_ref(a.make.remote(4, 5), target, name))) == [4.0, 5.0]
    assert get(b.values.remote(target)) == [4.0, 5.0]
    assert get(a.values.remote(allstream.ray.recv_ref(a.make.remote(0), b.make.remote(6), name))) == [6.0]
    with pytest.raises(RuntimeError, match="is self"):
        allstream.ray.send_ref(a.make.remote(1), a.make.remote(2), name)


def test_what_is_refused_and_what_to_write_instead(three, name):
    a, b, c = three
    good = [actor.make.remote(1) for actor in three]
    reduce = allstream.ray.allreduce_refs
    for refs, kind, text in [
        ([a.plain.remote(), *good[1:]], ValueError, '@ray.method\\(tensor_transport="ALLSTREAM"\\)'),
        ([ray.put(torch.zeros(1)), *good[1:]], ValueError, '@ray.method\\(tensor_transport="ALLSTREAM"\\)'),
        ([torch.zeros(1), *good[1:]], TypeError, "expected an ObjectRef"),
        (good[:2], RuntimeError, "no tensor of rank 2"),
        ([*good, a.make.remote(1)], RuntimeError, "2 tensors of rank 0"),
    ]:
        with pytest.raises(kind, match=text):
            reduce(refs, name)
    with pytest.raises(RuntimeError, match="create_collective_group"):
        reduce(good, "nobody")
    with pytest.raises(ValueError, match="rank '3' must be from 0 to 2"):
        allstream.ray.broadcast_refs(good, 3, name)
    with pytest.raises(ValueError, match="the list of"):
        allstream.ray.reducescatter_refs(good, [b.make_list.remote([1]), a.make_list.remote([1]), c.make_list.remote([1])], name)
    assert get([actor.values.remote(ref) for actor, ref in zip(three, reduce(good, name))]) == [[3.0]] * 3


def test_tensors_that_do_not_match_are_an_error_of_the_refs(three, name):
    results = allstream.ray.allreduce_refs([three[0].make.remote(1), three[1].make.remote(1, 2), three[2].make.remote(1)], name)
    for actor, ref in zip(three, results):
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            get(actor.values.remote(ref))
        assert "allreduce" in str(caught.value)


def test_a_receiver_outside_the_group_is_an_error(three):
    outsider = ray.remote(num_cpus=0)(Holder).remote(9)
    get(outsider.pid.remote())
    ref = three[0].make.remote(1)
    began = time.monotonic()
    with pytest.raises(Exception, match="create_collective_group"):
        get(outsider.values.remote(ref))
    # Ray itself would give up the transfer after 60 s.
    assert time.monotonic() - began < 30
    ray.kill(outsider)


def test_a_sender_that_is_killed(three, name, helpers):
    """The receiver gets an error, lives, and goes on in its other group."""
    doomed = ray.remote(num_cpus=0)(Holder).remote(1)
    pair = f"{name}-pair"
    a = three[0]
    # The actor runs before the two wait for each other in the group.
    pid = get(doomed.pid.remote())
    allstream.ray.create_collective_group([a, doomed], 2, [0, 1], group_name=pair, gloo_timeout=10_000)
    ref = doomed.large.remote(1 << 16)
    assert get(a.look.remote(ref))[1] == [0, 1, 2, 3, 4]
    ref = doomed.large.remote(1 << 20)
    ray.wait([ref], timeout=30, fetch_local=False)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    looked = a.look.remote(ref)
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Exception) as caught:
        get(looked)
    assert time.monotonic() - began < 15, caught.value
    assert get(a.pid.remote()) > 0
    ray.kill(doomed)
    allstream.ray.destroy_collective_group(pair)
    assert get([actor.sum.remote(name) for actor in three]) == [3.0] * 3


def on_system_thread(actor, function, group="_ray_system"):
    """Runs `function(actor)` on the thread where Ray moves the tensors of refs ("_ray_system") or aborts that ("_ray_system_error")."""
    return actor.__ray_call__.options(concurrency_group=group).remote(function)


def test_a_sender_that_fails_while_the_receiver_is_busy(three, name):
    """Ray aborts the transfer before it has begun at the receiver. There it fails as soon as it begins."""

    def lose(actor):
        ray._private.worker.global_worker.rdt_manager.rdt_store._rdt_store.clear()

    def busy_until_aborted(actor):
        from allstream.ray import transport

        until = time.monotonic() + 30
        while not transport._transfers._aborted and time.monotonic() < until:
            time.sleep(0.01)
        return time.monotonic()

    sender, receiver, _ = three
    ref = sender.make.remote(1)
    get(sender.__ray_call__.remote(lose))
    busy = on_system_thread(receiver, busy_until_aborted)
    taken = receiver.values.remote(ref)
    free = get(busy)
    with pytest.raises(Exception, match="Ray aborted it before it began here"):
        get(taken)
    assert time.monotonic() - free < 10
    assert get([actor.sum.remote(name) for actor in three]) == [3.0] * 3
    assert get(receiver.values.remote(sender.make.remote(8))) == [8.0]


def test_a_receiver_that_fails_while_the_sender_is_busy(three, name):
    from allstream.ray.transport import AllstreamMetadata, AllstreamRoute, AllstreamTransport

    route = AllstreamRoute(group=name, source=1, target=0, tag=(1 << 31) | 6)

    def abort(actor):
        AllstreamTransport().abort_transport("object", route)

    def send(actor):
        began = time.monotonic()
        try:
            AllstreamTransport().send_multiple_tensors([torch.ones(3)], AllstreamMetadata([((3,), torch.float32)], "cpu"), route)
        except errors.Aborted as error:
            return time.monotonic() - began, str(error)

    get(on_system_thread(three[1], abort, "_ray_system_error"))
    took, said = get(on_system_thread(three[1], send))
    assert took < 5 and f"group '{name}', rank 1 of 3: send of" in said and "Ray aborted it before" in said


def test_a_transfer_that_is_aborted(three, name):
    """Ray does this at its own deadline: the waiting receiver fails at once, and the group goes on."""
    from allstream.ray.transport import AllstreamMetadata, AllstreamRoute, AllstreamTransport

    route = AllstreamRoute(group=name, source=1, target=0, tag=(1 << 31) | 5)

    def wait(actor):
        began = time.monotonic()
        try:
            AllstreamTransport().recv_multiple_tensors("object", AllstreamMetadata([((3,), torch.float32)], "cpu"), route)
        except errors.Aborted as error:
            return time.monotonic() - began, str(error)

    def abort(actor):
        transfers = allstream.ray.get_group(name).transfers
        until = time.monotonic() + 30
        while not transfers and time.monotonic() < until:
            time.sleep(0.01)
        AllstreamTransport().abort_transport("object", route)

    waits = on_system_thread(three[0], wait)
    get(on_system_thread(three[0], abort, "_ray_system_error"))
    took, said = get(waits)
    assert took < 5 and f"group '{name}', rank 0 of 3" in said and "Ray aborted it" in said
    assert get([actor.sum.remote(name) for actor in three]) == [3.0] * 3
    assert get(three[0].values.remote(three[1].make.remote(8))) == [8.0]
