"""A step of DistributedDataParallel by allstream and by Gloo, whose backward pass sleeps as long as Gloo communicates.

    python ffi/python/bench/ddp.py [--ranks 2] [--rounds 15]

A model of 10 million parameters in 8 layers. Where two busy processes share two cores, computing and communicating would take from each
other; so each layer's backward sleeps instead, an eighth of what Gloo needs to reduce all gradients alone, and what is measured is how much
of communication is hidden behind that. Medians over rounds in turns in the same processes; the slowest rank counts.
"""

import argparse
import datetime
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH = 8, 1118  # 8 x (1118 x 1118 + 1118) is 10 million.


class Sleeps(torch.autograd.Function):
    """Nothing forwards; backwards it takes as long as it was told."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.seconds = 0.0

    def forward(self, x):
        for layer in self.layers:
            x = Sleeps.apply(layer(x).relu(), self.seconds)
        return x.sum()


def slowest(seconds):
    mine = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return mine.item()


def timed(function):
    dist.barrier()
    start = time.perf_counter()
    function()
    return slowest(time.perf_counter() - start)


def run(rank, options, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    import allstream.torch

    allstream.torch.register()
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks, timeout=limit)
    groups = {"gloo": dist.group.WORLD, "allstream": dist.new_group(backend="allstream", timeout=limit)}
    torch.manual_seed(1)
    models = {name: DistributedDataParallel(Model(), process_group=group) for name, group in groups.items()}
    flat = torch.zeros(sum(p.numel() for p in models["gloo"].parameters()))
    alone = statistics.median(timed(lambda: dist.all_reduce(flat)) for _ in range(7))
    x = torch.randn(1, WIDTH)

    def step(model):
        model.zero_grad(set_to_none=False)
        model(x).backward()

    for model in models.values():
        model.module.seconds = alone / LAYERS
        for _ in range(3):
            timed(lambda: step(model))
    times = {name: [] for name in models}
    for _ in range(options.rounds):
        for name, model in models.items():
            times[name].append(timed(lambda: step(model)))
    if rank == 0:
        gloo, ours = (statistics.median(times[name]) * 1e3 for name in ("gloo", "allstream"))
        print(f"# {options.ranks} processes, {flat.numel()} parameters, backward sleeps {alone * 1e3:.1f} ms, {options.rounds} rounds")
        print(f"| gloo ms | allstream ms | allstream / gloo |\n|---|---|---|\n| {gloo:.1f} | {ours:.1f} | {ours / gloo:.2f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    mp.spawn(run, args=(options, port), nprocs=options.ranks)
