"""Times torch.distributed's Gloo all_reduce as benches/all_reduce.rs times ours. Usage: gloo_all_reduce.py RANKS PORT"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = [4, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20, 128 << 20]


def run(rank, ranks, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for size in SIZES:
        data = torch.ones(size // 4)
        group = 10 if size <= 65536 else 1
        rounds = max(5, max(5, min(400, int(2e8 / (size + 20000)))) // group)
        times = []
        for i in range(-2, rounds):
            data.fill_(1)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(group):
                dist.all_reduce(data)
            mine = torch.tensor([(time.perf_counter() - start) / group], dtype=torch.float64)
            dist.all_reduce(mine, op=dist.ReduceOp.MAX)
            if i >= 0:
                times.append(mine.item())
        times.sort()
        if rank == 0:
            print(f"gloo allreduce n={ranks} bytes={size} med={times[len(times) // 2] * 1e6:.2f}us", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, args=(int(sys.argv[1]), sys.argv[2]), nprocs=int(sys.argv[1]), join=True)
