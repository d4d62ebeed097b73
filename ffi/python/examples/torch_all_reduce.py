"""Three all-reduces on torch.distributed: torch's own, a naive one (reduce, then broadcast), and a ring of sends and receives.

    python examples/torch_all_reduce.py [--backend allstream|gloo] [--ranks 4] [--elements 10]

The processes are forked, as `torch.multiprocessing.Process` does by default; the tensors hold integers.
"""

import argparse
import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def naive_all_reduce(tensor):
    """Rank 0 has the sum, and tells everyone."""
    dist.reduce(tensor, dst=0)
    dist.broadcast(tensor, src=0)


def ring_all_reduce(tensor):
    """Chunks go around the ring twice: first they add up, then their sums are handed on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = torch.tensor_split(tensor, size)
    for first, is_sum in ((rank, False), (rank + 1, True)):
        for step in range(size - 1):
            sent = dist.isend(chunks[(first - step) % size], dst=(rank + 1) % size)
            into = chunks[(first - step - 1) % size]
            box = into if is_sum else torch.zeros_like(into)
            dist.recv(box, src=(rank - 1) % size)
            if not is_sum:
                into += box
            sent.wait()


WAYS = {"all_reduce": dist.all_reduce, "naive": naive_all_reduce, "ring": ring_all_reduce}


def run(rank, options, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(options.backend, rank=rank, world_size=options.ranks)
    for name, way in WAYS.items():
        tensor = torch.arange(options.elements) + rank
        way(tensor)
        expected = options.ranks * torch.arange(options.elements) + sum(range(options.ranks))
        assert torch.equal(tensor, expected), f"rank {rank}: {name} gave {tensor}, expected {expected}"
        if rank == 0:
            print(f"{name}: {tensor.tolist()}", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="allstream")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--elements", type=int, default=10)
    options = parser.parse_args()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    context = mp.get_context("fork")
    processes = [context.Process(target=run, args=(rank, options, port)) for rank in range(options.ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
