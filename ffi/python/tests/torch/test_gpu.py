"""torch's own CUDA tensors: only where there is a GPU."""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

PROGRAM = """
device = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(device)
start()

def mine(count=6):
    return torch.arange(count, dtype=torch.float32, device=device) + 10 * rank

x = mine(1_000_000)
torch.cuda._sleep(50_000_000)
x += 1
dist.all_reduce(x)
x *= 2                              # in the order of the current stream
expected = sum(torch.arange(1_000_000, dtype=torch.float32) + 10 * r + 1 for r in range(size)) * 2
assert torch.equal(x.cpu(), expected)
work = dist.all_reduce(mine(), async_op=True)
work.wait()
boxes = [torch.zeros(6, device=device) for _ in range(size)]
dist.all_gather(boxes, mine())
assert [box[0].item() for box in boxes] == [10 * r for r in range(size)]
box = torch.zeros(3, device=device)
dist.reduce_scatter_tensor(box, torch.ones(3 * size, device=device))
assert (box == size).all()
if rank == 0:
    dist.send(mine(), 1)
if rank == 1:
    box = mine()
    dist.recv(box, 0)
    assert box.tolist() == list(range(6))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).to(device), device_ids=[device.index])
model(torch.ones(2, 4, device=device) * rank).sum().backward()
grads = [torch.zeros_like(model.module.weight.grad) for _ in range(size)]
dist.all_gather(grads, model.module.weight.grad)
assert all(torch.equal(grad, grads[0]) for grad in grads)
dist.destroy_process_group()
"""

PEER = """
path = dist.group.WORLD._get_backend(device).device_path
assert path == "peer", path
"""


def test_allstreams_kernels_take_cuda_tensors_where_nccl_is_off(torch_job):
    torch_job(2, 'os.environ["ALLSTREAM_NCCL"] = "off"\n' + PROGRAM.replace("dist.destroy", PEER + "dist.destroy")).outputs()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
def test_nccl_takes_cuda_tensors(torch_job):
    torch_job(2, PROGRAM).outputs()
