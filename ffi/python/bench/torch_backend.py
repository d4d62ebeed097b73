"""torch.distributed's all_reduce by allstream and by Gloo, in turns in the same processes: medians, the slowest rank counts.

    python ffi/python/bench/torch_backend.py RANKS [BYTES ...]
"""

import datetime
import os
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

BYTES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 32 << 20, 128 << 20]
ROUNDS = 15


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def seconds(tensor, group, calls):
    """One call's time in this round, on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    mine = torch.tensor([(time.perf_counter() - start) / calls], dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return mine.item()


def run(rank, ranks, port, sizes):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    import allstream.torch

    allstream.torch.register()
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=limit)
    groups = {"gloo": dist.group.WORLD, "allstream": dist.new_group(backend="allstream", timeout=limit)}
    if rank == 0:
        print(f"# {ranks} processes, {ROUNDS} rounds in turns, torch {torch.__version__}")
        print("| bytes | gloo us | allstream us | allstream / gloo |\n|---|---|---|---|", flush=True)
    for size in sizes:
        tensor = torch.ones(size // 4)
        calls = max(1, min(50, (4 << 20) // size))
        times = {name: [] for name in groups}
        for round in range(-2, ROUNDS):
            for name, group in groups.items():
                tensor.fill_(1)
                took = seconds(tensor, group, calls)
                if round >= 0:
                    times[name].append(took * 1e6)
        if rank == 0:
            gloo, ours = statistics.median(times["gloo"]), statistics.median(times["allstream"])
            print(f"| {size} | {gloo:.1f} | {ours:.1f} | {ours / gloo:.2f} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    sizes = [int(text) for text in sys.argv[2:]] or BYTES
    mp.spawn(run, args=(ranks, free_port(), sizes), nprocs=ranks)
