"""A group whose actors are on two nodes of Ray's, and count as on two hosts: data goes over TCP."""

import subprocess
import sys

import apart

PROGRAM = """
import os
import numpy, ray
import ray.util.collective as col
from ray.cluster_utils import Cluster
import allstream.ray

allstream.ray.register()
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"node0": 1}, "include_dashboard": False})
cluster.add_node(num_cpus=1, resources={"node1": 1})
ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")

@ray.remote(num_cpus=0)
class Worker:
    def work(self, rank):
        os.environ["ALLSTREAM_HOST_ID"] = f"host {rank}"
        col.init_collective_group(2, rank, "allstream", "far")
        x = numpy.full(200_000, rank + 1.0)
        col.allreduce(x, "far")
        hosts = allstream.ray.get_group("far").comm().hosts
        col.destroy_collective_group("far")
        return float(x[-1]), hosts, ray.get_runtime_context().get_node_id()

workers = [Worker.options(resources={f"node{rank}": 1}).remote() for rank in range(2)]
(first, hosts, node), (second, _, other) = ray.get([w.work.remote(r) for r, w in enumerate(workers)], timeout=100)
print(first, second, hosts, node != other)
ray.shutdown()
cluster.shutdown()
"""


def test_actors_on_two_nodes_that_count_as_two_hosts():
    with apart.environment() as env:
        ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=140, env=env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "3.0 3.0 2 True"
