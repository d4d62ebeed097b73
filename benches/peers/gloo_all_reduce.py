"""Times torch.distributed's Gloo all_reduce as `allstream perf` times ours: f32, sum, in place; two rounds that do not
count; buffers filled, a barrier, then operations back to back; the slowest rank's time of each round, the median.

Usage: gloo_all_reduce.py RANKS PORT BYTES,BYTES,...
A line for each size: "time all_reduce in_place RANKS BYTES MICROSECONDS". At most 400 operations of a size, where ours
are up to 2000: most of Gloo's time is waiting."""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, ranks, port, sizes):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for size in sizes:
        data = torch.empty(max(1, size // 4))
        iterations = max(5, min(400, 200_000_000 // (size + 20_000)))
        group = 20 if size <= 65536 else 1
        rounds = -(-iterations // group)
        times = []
        for i in range(-2, rounds):
            data.fill_(rank + 1)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(group):
                dist.all_reduce(data)
            if i >= 0:
                times.append((time.perf_counter() - start) / group)
            # Who is through does not take the core, to fill its buffer, from who is not.
            dist.barrier()
        data.fill_(rank + 1)
        dist.all_reduce(data)
        if not bool((data == ranks * (ranks + 1) / 2).all()):
            sys.exit(f"rank {rank}: all_reduce of {size} bytes is wrong")
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if rank == 0:
            median = slowest.sort().values[len(times) // 2].item()
            print(f"time all_reduce in_place {ranks} {data.numel() * 4} {median * 1e6:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, port, sizes = int(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3].split(",")]
    mp.spawn(run, args=(ranks, port, sizes), nprocs=ranks, join=True)
