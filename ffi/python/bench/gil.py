"""Whether a rank that holds the GIL holds up another one: rank 0's wait for a 4 KB all_reduce, medians.

    allstream run -n 2 -- python ffi/python/bench/gil.py [ROUNDS]

Rank 1 calls as well, and then, for 100 ms, either computes in Python without letting go of the GIL, or sleeps.
"""

import statistics
import sys
import time

import numpy

import allstream


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


comm = allstream.connect()
sys.setswitchinterval(10)  # No other Python thread gets the GIL meanwhile.
array = numpy.ones(1024, "float32")
waits = {"holds the GIL": [], "sleeps": []}
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 40):
    for how, pause in (("holds the GIL", compute), ("sleeps", time.sleep)):
        comm.barrier().wait()
        start = time.perf_counter()
        work = comm.all_reduce(array, op="avg")
        if comm.rank == 1:
            pause(0.1)
        work.wait()
        waits[how].append((time.perf_counter() - start) * 1e6)
if comm.rank == 0:
    held, slept = (statistics.median(times) for times in waits.values())
    print(f"rank 0 waits {held:.1f} us while rank 1 holds the GIL, {slept:.1f} us while it sleeps: {held / slept:.2f}")
comm.close()
