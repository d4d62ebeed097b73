"""A ring all-reduce built from messages of torch.distributed: a reduce-scatter around the ring, then an all-gather around it.

    python examples/torch_ring.py [--backend allstream|gloo] [--ranks 4] [--elements 1000003] [--rounds 5]

Each rank cuts its tensor into one chunk for each rank; the length need not be divisible by the number of ranks. The program checks that the
result is equal to that of `all_reduce`, and prints how long both took.
"""

import argparse
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def ring_all_reduce(tensor):
    """Every rank ends with the sum of all ranks' tensors, in place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = torch.tensor_split(tensor.view(-1), size)
    # The first `size - 1` steps add: after them this rank has the complete sum of chunk `rank + 1`. The last `size - 1` steps pass the sums on.
    for step in range(2 * (size - 1)):
        adds = step < size - 1
        shift = 0 if adds else 1
        step %= size - 1
        outgoing = chunks[(rank + shift - step) % size]
        incoming = chunks[(rank + shift - step - 1) % size]
        box = torch.empty_like(incoming) if adds else incoming
        works = [dist.isend(outgoing, right), dist.irecv(box, left)]
        for work in works:
            work.wait()
        if adds:
            incoming += box
    return tensor


def run(rank, options, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group(options.backend, rank=rank, world_size=options.ranks)
    start = torch.arange(options.elements, dtype=torch.float32) % 7 + rank
    expected = start.clone()
    dist.all_reduce(expected)
    times = {"by hand": [], "all_reduce": []}
    for _ in range(options.rounds):
        for name, function in (("by hand", ring_all_reduce), ("all_reduce", dist.all_reduce)):
            tensor = start.clone()
            dist.barrier()
            began = time.perf_counter()
            function(tensor)
            times[name].append(time.perf_counter() - began)
            assert torch.equal(tensor, expected), f"rank {rank}: the result of {name} is not the sum"
    if rank == 0:
        shown = ", ".join(f"{name} {sorted(took)[len(took) // 2] * 1e3:.2f} ms" for name, took in times.items())
        print(f"{options.backend}, {options.ranks} ranks, {options.elements} elements: equal; {shown}", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="allstream")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--elements", type=int, default=1_000_003)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    mp.spawn(run, args=(options, port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
