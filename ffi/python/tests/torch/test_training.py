"""Training with DistributedDataParallel and FSDP gives the same weights as with Gloo, and DTensor the same products. And two examples run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

TRAINING = """
import hashlib
from torch import nn

def model():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

def batch(step):
    torch.manual_seed(1000 + 10 * step + rank)
    return torch.randn(16, 20), torch.randint(0, 3, (16,))

def train(net, steps=20):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        inputs, labels = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()

def weights(net):
    return torch.cat([p.detach().full_tensor().reshape(-1) if hasattr(p, "full_tensor") else p.detach().reshape(-1) for p in net.parameters()])
"""


def both(torch_job, size, program):
    """Runs a program with Gloo and with allstream; returns what each rank prints, by backend."""
    return {
        backend: torch_job(size, TRAINING + f"\nstart({backend!r})\n" + program + "\nend()\n").outputs()
        for backend in ("gloo", "allstream")
    }


def test_distributed_data_parallel_trains_to_gloos_weights(torch_job):
    program = """
from torch.nn.parallel import DistributedDataParallel
net = DistributedDataParallel(model(), bucket_cap_mb=0.01)
train(net)
print(hashlib.sha256(weights(net).numpy().tobytes()).hexdigest())
"""
    # With two ranks, each sum has two terms, and their order does not change its bits.
    results = both(torch_job, 2, program)
    assert results["allstream"] == results["gloo"]
    assert results["gloo"][0] == results["gloo"][1]


def test_fully_sharded_data_parallel_and_dtensor(torch_job):
    program = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (size,))
net = model()
for layer in net:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(net, mesh=mesh)
train(net, 1)
print(weights(net).double().sum().item())
torch.manual_seed(3)
left, right = torch.randn(8, 6), torch.randn(6, 4)
product = distribute_tensor(left, mesh, [Shard(0)]) @ distribute_tensor(right, mesh, [Replicate()])
assert torch.allclose(product.full_tensor(), left @ right)
partial = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
print(partial.redistribute(mesh, [Replicate()]).to_local().double().sum().item())
"""
    results = both(torch_job, 2, program)
    for rank in range(2):
        for ours, gloos in zip(results["allstream"][rank], results["gloo"][rank], strict=True):
            assert float(ours) == pytest.approx(float(gloos), rel=1e-5)


@pytest.mark.parametrize("elements", [4, 10, 4099])
def test_the_example_of_three_all_reduces(elements):
    ended = run_example("torch_all_reduce.py", "--elements", str(elements))
    assert [line.split(":")[0] for line in ended.splitlines()] == ["all_reduce", "naive", "ring"]


def test_the_example_of_a_ring():
    ended = run_example("torch_ring.py", "--elements", "100003", "--rounds", "2")
    assert "allstream, 4 ranks, 100003 elements: equal" in ended


def run_example(name, *arguments):
    # If the package is not installed, torch does not find the backend by itself: `start` registers it.
    start = f"import sys, runpy, allstream.torch; allstream.torch.register(); sys.argv = {[name, *arguments]!r}"
    path = EXAMPLES / name
    if name == "torch_ring.py":
        # The example spawns its ranks, and these find the backend only by the entry point of an installed package.
        pytest.importorskip("importlib.metadata")
        from importlib.metadata import entry_points

        if not any(point.name == "allstream" for point in entry_points(group="torch.distributed.backends")):
            pytest.skip("the package is not installed")
        command = [sys.executable, str(path), *arguments]
    else:
        command = [sys.executable, "-c", f"{start}; runpy.run_path({str(path)!r}, run_name='__main__')"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
