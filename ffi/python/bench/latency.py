"""How long a call from Python takes beside the same from Rust: all_reduce in place, two processes, medians.

    allstream run -n 2 -- python ffi/python/bench/latency.py [BYTES ...]

Rust's own figure is `allstream perf all_reduce -N 2 --sizes BYTES -c 0` (the row "in place").
"""

import statistics
import sys
import time

import numpy

import allstream


def median(call, rounds=300, calls=20):
    """The median over rounds of one call, in microseconds; the slower rank counts."""
    times = []
    for _ in range(rounds):
        comm.barrier().wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    mine = numpy.array([statistics.median(times)])
    comm.all_reduce(mine, op="max").wait()
    return mine[0]


comm = allstream.connect()
try:
    import torch
except ImportError:
    torch = None
if comm.rank == 0:
    print(f"{'bytes':>10} {'numpy us':>10} {'torch us':>10}")
for size in [int(text) for text in sys.argv[1:]] or [4, 4096, 65536, 1 << 20]:
    array = numpy.zeros(size // 4, dtype="float32")
    row = [median(lambda: comm.all_reduce(array).wait())]
    if torch is not None:
        tensor = torch.zeros(size // 4)
        row.append(median(lambda: comm.all_reduce(tensor).wait()))
    if comm.rank == 0:
        print(f"{size:>10} " + " ".join(f"{figure:>10.2f}" for figure in row))
comm.close()
