"""Groups are made and ended by the driver, by actors, or by both; again after a failure; and with a missing, killed or stopped rank."""

import os
import signal
import time

import numpy as np
import pytest
import ray
import ray.util.collective as col
import torch

import allstream.ray
from allstream import errors


def summed(rank, name):
    import ray.util.collective as col

    x = np.full(3, rank + 1.0)
    col.allreduce(x, name)
    return x.tolist()


def facts(rank, name):
    import ray.util.collective as col

    return col.get_rank(name), col.get_collective_group_size(name), col.is_group_initialized(name)


def test_made_by_the_driver_with_rays_function(pool, name, helpers):
    col.create_collective_group(pool.actors[:3], 3, [2, 0, 1], "allstream", name)
    members = helpers.Members(pool.actors[:3])
    assert members.all(summed, name) == [[6.0] * 3] * 3
    assert members.all(facts, name) == [(2, 3, True), (0, 3, True), (1, 3, True)]
    with pytest.raises(RuntimeError, match="twice"):
        col.create_collective_group(pool.actors[:3], 3, [2, 0, 1], "allstream", name)
    members.all(helpers.leave, name)
    assert members.all(facts, name) == [(-1, -1, False)] * 3


def test_made_by_both_as_the_notebook_does(pool, name, helpers):
    pool.all(helpers.join, 4, name)
    col.create_collective_group(pool.actors, 4, range(4), "allstream", name)
    assert pool.all(summed, name) == [[10.0] * 3] * 4
    pool.all(helpers.leave, name)


class InInit:
    def __init__(self, rank, name):
        col.init_collective_group(2, rank, "allstream", name)

    def sum(self):
        x = torch.ones(2)
        col.allreduce(x, col_name(self))
        return x.tolist()


def col_name(_actor):
    return ray.util.collective.collective._group_mgr._name_group_map.copy().popitem()[0]


def test_made_in_init(name):
    actors = [ray.remote(num_cpus=0)(InInit).remote(rank, name) for rank in range(2)]
    assert ray.get([actor.sum.remote() for actor in actors], timeout=90) == [[2.0, 2.0]] * 2
    for actor in actors:
        ray.kill(actor)


def test_made_by_rays_experimental_function(pool, name):
    from ray.experimental.collective import create_collective_group, destroy_collective_group

    create_collective_group(pool.actors, "allstream", name)
    assert pool.all(summed, name) == [[10.0] * 3] * 4
    destroy_collective_group_with_ray_system(destroy_collective_group, pool, name)


def destroy_collective_group_with_ray_system(destroy, pool, name):
    """Ray destroys a group in a concurrency group of its actors, which only actors with tensor transports have. Others refuse: ask each actor."""
    try:
        destroy(name)
    except Exception:
        pool.all(lambda rank: col.destroy_collective_group(name))


def test_made_by_ours(pool, name):
    for _ in range(2):
        allstream.ray.create_collective_group(pool.actors, 4, range(4), group_name=name)
        assert pool.all(summed, name) == [[10.0] * 3] * 4
        allstream.ray.destroy_collective_group(name)
        assert pool.all(facts, name) == [(-1, -1, False)] * 4
    with pytest.raises(ValueError, match="No group"):
        allstream.ray.destroy_collective_group(name)


def test_declared_by_the_older_name(pool, name):
    allstream.ray.declare_collective_group(pool.actors[:2], {"group_name": name, "world_size": 2, "ranks": [1, 0], "backend": "allstream"})
    assert ray.get([actor.do.remote(facts, 0, name) for actor in pool.actors[:2]], timeout=90) == [(1, 2, True), (0, 2, True)]
    allstream.ray.destroy_collective_group(name)
    allstream.ray.declare_collective_group(pool.actors[:2], group_name=name, rank=[0, 1])
    allstream.ray.destroy_collective_group(name)


def test_again_and_again(pool, name, helpers):
    for _ in range(5):
        pool.all(helpers.join, 4, name)
        assert pool.all(summed, name) == [[10.0] * 3] * 4
        pool.all(helpers.leave, name)


def test_a_group_of_one(pool, name, helpers):
    ray.get(pool.actors[0].do.remote(helpers.join, 0, 1, name), timeout=90)
    assert ray.get(pool.actors[0].do.remote(summed, 0, name), timeout=90) == [1.0] * 3
    ray.get(pool.actors[0].do.remote(helpers.leave, 0, name), timeout=90)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_never_comes(pool, name, helpers, missing):
    there = [rank for rank in range(3) if rank != missing]
    actors = {rank: pool.actors[rank] for rank in there}
    # Long enough for the two ranks to find each other on a busy machine: a rank that is found too late is named as missing, too.
    ray.get([actor.do.remote(helpers.join, rank, 3, name, 6000) for rank, actor in actors.items()], timeout=90)
    began = time.monotonic()
    for rank, actor in actors.items():
        with pytest.raises(TimeoutError) as caught:
            ray.get(actor.do.remote(summed, rank, name), timeout=90)
        assert f"rank {missing} did not come" in str(caught.value) and f"'{name}'" in str(caught.value)
        assert isinstance(caught.value.cause, errors.Rendezvous)
    # Within the timeout that the group was given, and not the default of 30 s.
    assert time.monotonic() - began < 20
    wait_until_nothing_is_left(helpers, name)
    # The same actors can make the group again, together with the missing one.
    ray.get([actor.do.remote(helpers.leave, 0, name) for actor in actors.values()], timeout=90)
    three = helpers.Members(pool.actors[:3])
    three.all(helpers.join, 3, name)
    assert three.all(summed, name) == [[6.0] * 3] * 3
    three.all(helpers.leave, name)


def test_a_rank_that_gave_up_before_rank_0_is_not_named_as_missing(pool, name, helpers):
    """Rank 2 comes, does not find rank 1, and gives up before the deadline of rank 0."""
    zero, two = pool.actors[0], pool.actors[2]
    ray.get(zero.do.remote(helpers.join, 0, 3, name, 12_000), timeout=90)
    ray.get(two.do.remote(helpers.join, 2, 3, name, 4000), timeout=90)
    for rank, actor in [(2, two), (0, zero)]:
        with pytest.raises(TimeoutError, match="rank 1 did not come"):
            ray.get(actor.do.remote(summed, rank, name), timeout=90)
    ray.get([actor.do.remote(helpers.leave, 0, name) for actor in [zero, two]], timeout=90)
    # Ranks 1 and 2 both come, but rank 1 only after rank 2 has gone: rank 0 says so.
    ray.get(zero.do.remote(helpers.join, 0, 3, name, 14_000), timeout=90)
    ray.get(two.do.remote(helpers.join, 2, 3, name, 3000), timeout=90)
    with pytest.raises(TimeoutError, match="rank 1 did not come"):
        ray.get(two.do.remote(summed, 2, name), timeout=90)
    ray.get(pool.actors[1].do.remote(helpers.join, 1, 3, name, 3000), timeout=90)
    with pytest.raises(TimeoutError, match="rank 2 did not come"):
        ray.get(pool.actors[1].do.remote(summed, 1, name), timeout=90)
    with pytest.raises(TimeoutError, match="all ranks came within 14 s, but ranks 1, 2 gave up or ended before the others were there"):
        ray.get(zero.do.remote(summed, 0, name), timeout=90)
    ray.get([actor.do.remote(helpers.leave, 0, name) for actor in pool.actors[:3]], timeout=90)


def wait_until_nothing_is_left(helpers, name):
    until = time.monotonic() + 10
    while helpers.left(name) and time.monotonic() < until:
        time.sleep(0.05)
    assert helpers.left(name) == []


@pytest.mark.parametrize("late", [0, 1])
def test_attempts_that_do_not_overlap_and_then_do(pool, name, helpers, late):
    """The early rank gives up before the late one comes, then tries again while the late rank's first try waits: now they meet."""
    early = 1 - late
    first, second = pool.actors[early], pool.actors[late]
    ray.get(first.do.remote(helpers.join, early, 2, name, 600), timeout=90)
    with pytest.raises(TimeoutError):
        ray.get(first.do.remote(summed, early, name), timeout=90)
    ray.get(first.do.remote(helpers.leave, early, name), timeout=90)
    ray.get(second.do.remote(helpers.join, late, 2, name, 20_000), timeout=90)
    waits = second.do.remote(summed, late, name)
    ray.get(first.do.remote(helpers.join, early, 2, name, 20_000), timeout=90)
    assert ray.get([waits, first.do.remote(summed, early, name)], timeout=90) == [[3.0] * 3] * 2
    ray.get([actor.do.remote(helpers.leave, 0, name) for actor in (first, second)], timeout=90)


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_while_meeting_and_replaced(pool, fresh, name, helpers, killed):
    """The keys that a killed process has left in the store mislead nobody: the others meet the new process that takes its place."""
    victim, other = fresh(1).actors[0], 1 - killed
    ray.get(victim.do.remote(helpers.join, killed, 3, name), timeout=90)
    wait_for_keys(name, killed, victim, pool.actors[other], other, helpers)
    kill_and_wait(victim)
    ray.get(pool.actors[3].do.remote(helpers.join, killed, 3, name), timeout=90)
    ray.get(pool.actors[2].do.remote(helpers.join, 2, 3, name), timeout=90)
    refs = [pool.actors[3].do.remote(summed, killed, name), pool.actors[other].do.remote(summed, other, name), pool.actors[2].do.remote(summed, 2, name)]
    assert ray.get(refs, timeout=90) == [[6.0] * 3] * 3
    ray.get([actor.do.remote(helpers.leave, 0, name) for actor in pool.actors], timeout=90)


def kill_and_wait(victim):
    """Kills an actor, and waits for the end of its process: `ray.kill` does not, and until then two processes are one rank."""
    pid = ray.get(victim.pid.remote(), timeout=90)
    ray.kill(victim)
    until = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")


def wait_for_keys(name, killed, victim, other_actor, other, helpers):
    """Joins the rank that stays, and waits until it and the rank that is to be killed have put their keys."""
    ray.get(other_actor.do.remote(helpers.join, other, 3, name), timeout=90)
    until = time.monotonic() + 30
    while len(helpers.left(name)) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    assert len(helpers.left(name)) == 2


def slow_sums(rank, name, how_many):
    import ray.util.collective as col

    x = np.zeros(1 << 18)
    for _ in range(how_many):
        col.allreduce(x, name)


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_in_the_middle(pool, fresh, name, helpers, victim):
    doomed = fresh(1).actors[0]
    members = helpers.Members([doomed if rank == victim else pool.actors[rank] for rank in range(3)])
    members.all(helpers.join, 3, name)
    assert members.all(summed, name) == [[6.0] * 3] * 3
    refs = members.start(slow_sums, name, 1_000_000)
    ready, _ = ray.wait(refs, timeout=0.5)
    assert ready == []
    began = time.monotonic()
    ray.kill(doomed)
    for rank in range(3):
        if rank != victim:
            with pytest.raises(errors.PeerLost) as caught:
                ray.get(refs[rank], timeout=90)
            assert caught.value.cause.rank == victim and f"group '{name}', rank {rank} of 3" in str(caught.value)
    assert time.monotonic() - began < 10
    survivors = [rank for rank in range(3) if rank != victim]
    ray.get([pool.actors[rank].do.remote(helpers.leave, rank, name) for rank in survivors], timeout=90)
    # The survivors and a new actor make the group again.
    members.actors[victim] = pool.actors[3]
    members.all(helpers.join, 3, name)
    assert members.all(summed, name) == [[6.0] * 3] * 3
    members.all(helpers.leave, name)


def test_stopped_in_the_middle(pool, fresh, name, helpers):
    doomed = fresh(1).actors[0]
    pid = ray.get(doomed.pid.remote(), timeout=90)
    # Import first: the group's deadline below is short, and the imports of a new process would use it up.
    ray.get(doomed.do.remote(helpers.warm), timeout=90)
    members = helpers.Members([pool.actors[0], doomed])
    members.all(helpers.join, 2, name, 8000)
    assert members.all(summed, name) == [[3.0] * 3] * 2
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(errors.Error) as caught:
            ray.get(pool.actors[0].do.remote(summed, 0, name), timeout=90)
        assert time.monotonic() - began < 30 and "rank 1" in str(caught.value)
    finally:
        os.kill(pid, signal.SIGCONT)
    ray.get(pool.actors[0].do.remote(helpers.leave, 0, name), timeout=90)


def test_sizes_that_differ(pool, name, helpers):
    ray.get(pool.actors[0].do.remote(helpers.join, 0, 2, name), timeout=90)
    ray.get(pool.actors[1].do.remote(helpers.join, 1, 3, name), timeout=90)
    began = time.monotonic()
    for rank in range(2):
        with pytest.raises((ValueError, TimeoutError)) as caught:
            ray.get(pool.actors[rank].do.remote(summed, rank, name), timeout=90)
        assert "2" in str(caught.value) and "3" in str(caught.value)
    # Well before the 30 s that each rank would otherwise wait for the other.
    assert time.monotonic() - began < 20
    wait_until_nothing_is_left(helpers, name)
    pool.all(helpers.leave, name)


@pytest.mark.parametrize("twice", [0, 1])
def test_two_processes_of_one_rank(pool, name, helpers, twice):
    for actor in pool.actors[:2]:
        ray.get(actor.do.remote(helpers.join, twice, 3, name, 8000), timeout=90)
    other = 1 - twice
    ray.get(pool.actors[2].do.remote(helpers.join, other, 3, name, 8000), timeout=90)
    found = helpers.Members(pool.actors[:3]).errors(summed, name)
    assert all(isinstance(error, errors.Error) for error in found)
    assert any(f"joined as rank {twice}, too" in str(error) for error in found)
    pool.all(helpers.leave, name)
    wait_until_nothing_is_left(helpers, name)


def test_a_rank_that_answers_a_newer_attempt_leaves_nothing_in_the_older(pool, name, helpers):
    """The test plays two processes of rank 0, by their keys. The first has ended, and cannot delete what rank 1 answers too late."""
    from allstream.ray.store import Store

    store = Store(name)

    def wait_until(condition):
        until = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < until, store.keys()
            time.sleep(0.01)

    store.put("call", {"attempt": "first", "world": 2, "pid": 1})
    ray.get(pool.actors[1].do.remote(helpers.join, 1, 2, name), timeout=90)
    wait_until(lambda: store.keys("first/here/"))
    store.put("call", {"attempt": "second", "world": 2, "pid": 2})
    wait_until(lambda: store.keys("second/here/"))
    store.put("second/go", {"error": "a test gave up"})
    with pytest.raises(errors.Rendezvous, match="a test gave up"):
        ray.get(pool.actors[1].do.remote(summed, 1, name), timeout=90)
    ray.get(pool.actors[1].do.remote(helpers.leave, 1, name), timeout=90)
    wait_until_nothing_is_left(helpers, name)


def test_something_else_is_called(pool, group):
    def differ(rank, name):
        import ray.util.collective as col

        x = np.ones(4)
        if rank == 1:
            col.broadcast(x, 0, name)
        else:
            col.allreduce(x, name)

    found = pool.errors(differ, group)
    assert all(isinstance(error, errors.Error) for error in found)
    assert any(isinstance(error, errors.Mismatch) for error in found)


def test_destroyed_while_meeting(pool, name, helpers):
    actor = pool.actors[0]
    ray.get(actor.do.remote(helpers.join, 1, 2, name), timeout=90)
    began = time.monotonic()
    ray.get(actor.do.remote(helpers.leave, 1, name), timeout=90)
    # Well before the 30 s that rank 1 would otherwise wait for rank 0.
    assert time.monotonic() - began < 20
    wait_until_nothing_is_left(helpers, name)


def test_many_groups(pool, name, helpers):
    """Groups that were destroyed leave no descriptor and no thread behind."""

    def cost(rank):
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def once():
        pool.all(helpers.join, 4, name)
        pool.all(summed, name)
        pool.all(helpers.leave, name)

    once()
    before = pool.all(cost)
    for _ in range(8):
        once()
    after = pool.all(cost)
    for (fds, threads), (more_fds, more_threads) in zip(before, after):
        assert more_fds <= fds + 3 and more_threads <= threads + 3
