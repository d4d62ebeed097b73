"""Actors placed together, with their group; and what is said when they cannot be."""

import time

import numpy as np
import pytest
import ray

import allstream.ray
from allstream import errors


class Member:
    def __init__(self, rank, group):
        self.rank, self.group = rank, group

    def sum(self):
        import ray.util.collective as col

        x = np.full(2, self.rank + 1.0)
        col.allreduce(x, self.group)
        return x.tolist()


def test_a_gang(name):
    with allstream.ray.gang(
        ray.remote(Member), 3, lambda rank: (rank, name), group_name=name, resources={"CPU": 0.5}, timeout=60
    ) as gang:
        assert len(gang) == 3 and list(gang)[1] is gang[1]
        assert ray.get([member.sum.remote() for member in gang], timeout=90) == [[6.0, 6.0]] * 3
        placement = gang.placement_group
    until = time.monotonic() + 10
    while ray.util.placement_group_table(placement)["state"] != "REMOVED" and time.monotonic() < until:
        time.sleep(0.05)
    assert ray.util.placement_group_table(placement)["state"] == "REMOVED"


def test_more_than_the_cluster_has(name):
    with pytest.raises(errors.Unavailable) as caught:
        allstream.ray.gang(ray.remote(Member), 3, group_name=name, resources={"CPU": 4, "GPU": 1}, timeout=1)
    said = str(caught.value)
    for part in [f"group '{name}'", "3 actors of 4 CPU, 1 GPU", "CPU: 12 needed in all, 8 in the cluster", "GPU: 3 needed in all, 0 in the cluster"]:
        assert part in said
    assert all(placement["state"] == "REMOVED" for placement in ray.util.placement_group_table().values())


class Broken:
    def __init__(self):
        raise KeyError("a constructor that fails")


def test_a_constructor_that_fails(name):
    with pytest.raises(errors.Rendezvous, match="died before it had joined"):
        allstream.ray.gang(ray.remote(Broken), 2, group_name=name, resources={"CPU": 0.1}, timeout=30, gloo_timeout=5000)
