"""More that torch builds on a backend: checkpoints, functional collectives, Join, split groups, torchrun's restarts, ways to meet."""

import os
import subprocess
import sys

import pytest

PRELUDE = """
import datetime, os, sys, time
import torch
import torch.distributed as dist
torch.set_num_threads(1)
import allstream, allstream.torch
allstream.torch.register()
"""


def test_checkpoints_functional_collectives_join_and_split_groups(torch_job, tmp_path):
    outputs = torch_job(
        2,
        f"folder = {str(tmp_path)!r}\n"
        + """
import torch.distributed._functional_collectives as fc
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
start()
world = dist.group.WORLD

mesh = init_device_mesh("cpu", (size,))
halves = lambda whole: distribute_tensor(whole, mesh, [Shard(0)])
dcp.save({"w": halves(torch.arange(32.0).view(8, 4)), "n": torch.full((3,), 5.0)}, checkpoint_id=folder + "/saved")
state = {"w": halves(torch.zeros(8, 4)), "n": torch.zeros(3)}
dcp.load(state, checkpoint_id=folder + "/saved")
assert torch.equal(state["w"].full_tensor(), torch.arange(32.0).view(8, 4)) and state["n"].tolist() == [5.0] * 3

# Beside training, in a group of its own: two threads that call in one group would come in different orders on the ranks.
net = DistributedDataParallel(torch.nn.Linear(8, 8))
saving = dcp.async_save({"net": net.state_dict()}, checkpoint_id=folder + "/async", process_group=dist.new_group())
for _ in range(5):
    net(torch.ones(2, 8)).sum().backward()
saving.result()
saved = {"net": {name: torch.zeros_like(value) for name, value in net.state_dict().items()}}
dcp.load(saved, checkpoint_id=folder + "/async")
assert all(torch.equal(saved["net"][name], value) for name, value in net.state_dict().items())

assert fc.all_reduce(torch.ones(4), "sum", world).tolist() == [2.0] * 4
assert fc.all_gather_tensor(torch.full((2,), float(rank)), 0, world).tolist() == [0.0, 0.0, 1.0, 1.0]
assert fc.reduce_scatter_tensor(torch.ones(4), "sum", 0, world).tolist() == [2.0] * 2
assert fc.all_to_all_single(torch.arange(4.0), None, None, world).tolist() == [2.0 * rank, 2.0 * rank + 1] * 2
compiled = torch.compile(lambda x: fc.all_reduce(x * 2, "sum", world) + 1, backend="aot_eager", fullgraph=True)
assert compiled(torch.ones(4)).tolist() == [5.0] * 4

net = DistributedDataParallel(torch.nn.Linear(1, 1))
with Join([net]):
    for i in range(3 + 2 * rank):
        net(torch.ones(1, 1) * i).sum().backward()

x = torch.ones(2)
dist.all_reduce(x, group=dist.split_group(split_ranks=[[0, 1]]))
dist.all_reduce(x, group=dist.new_group([0, 1]))
assert x.tolist() == [4.0] * 2
print("done", flush=True)
# Never waited for, and the groups are not destroyed: the process ends as it should.
never = fc.all_reduce(torch.ones(4), "sum", world)
""",
    ).outputs()
    assert outputs == [["done"]] * 2


def torchrun(tmp_path, program, *options, first=""):
    """Runs a program by torchrun. `first` is code that runs before the program imports torch, which takes long."""
    path = tmp_path / "program.py"
    path.write_text(first + PRELUDE + program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_one_torchrun_makes_and_destroys_twenty_worlds(tmp_path):
    ended = torchrun(
        tmp_path,
        """
for i in range(20):
    dist.init_process_group("allstream")
    dist.all_reduce(x := torch.full((3,), i + 1.0))
    assert x.tolist() == [2.0 * (i + 1)] * 3
    dist.destroy_process_group()
threads = len(os.listdir("/proc/self/task"))
sys.stdout.write(f"{threads} done\\n")
""",
    )
    assert ended.returncode == 0 and ended.stdout.count("done") == 2, ended.stderr


@pytest.mark.timeout(240)  # torch is imported in three rounds of processes, one after another.
def test_torchruns_restarts_after_deaths_before_between_and_after_the_meeting(tmp_path):
    ended = torchrun(
        tmp_path,
        """
if rank == 1 and attempt == 1:
    # Rank 0 has told the store where it listens, and this one dies on its way there.
    allstream.connect = lambda **options: os._exit(1)
dist.init_process_group("allstream", timeout=datetime.timedelta(seconds=60))
dist.all_reduce(x := torch.ones(3))
if rank == 1 and attempt == 2:
    os._exit(1)
dist.all_reduce(x)
sys.stdout.write(f"{attempt} {x.tolist()}\\n")
dist.destroy_process_group()
""",
        "--max-restarts=3",
        "--monitor-interval=0.1",
        first="""
import os
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if rank == 1 and attempt == 0:
    os._exit(1)
""",
    )
    assert ended.returncode == 0 and ended.stdout.split("\n")[:-1] == ["3 [4.0, 4.0, 4.0]"] * 2, (ended.stdout, ended.stderr)


def test_ranks_meet_by_a_file_and_by_a_name(torch_job, tmp_path):
    outputs = torch_job(
        2,
        f"file = {str(tmp_path / 'store')!r}\n"
        + """
dist.init_process_group("allstream", init_method="file://" + file, rank=rank, world_size=size)
dist.all_reduce(x := torch.ones(3))
dist.destroy_process_group()
# A port that was free, told through the store of the test.
store = dist.TCPStore("localhost", int(os.environ["TEST_PORT"]), is_master=False)
if rank == 0:
    import socket
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
    store.set("port", str(port))
dist.init_process_group("allstream", init_method="tcp://localhost:" + store.get("port").decode(), rank=rank, world_size=size)
dist.all_reduce(x)
dist.destroy_process_group()
print(x.tolist())
""",
    ).outputs()
    assert outputs == [["[4.0, 4.0, 4.0]"]] * 2
