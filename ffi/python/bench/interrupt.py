"""How soon `wait()` hears Ctrl-C: `python ffi/python/bench/interrupt.py [ROUNDS]`.

Rank 0 waits for an all_reduce that rank 1 does not call yet; a thread sends this process SIGINT, as a terminal does. Printed: from the signal to the
KeyboardInterrupt, the median and the longest. The operation is unharmed: rank 1 calls it at the end of each round, and the sum is right.
"""

import os
import random
import signal
import statistics
import sys
import threading
import time

import numpy

import allstream


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    first, second = allstream.local(2)
    heard = []
    for _ in range(rounds):
        x, y, sent = numpy.ones(1000), numpy.ones(1000), []

        def interrupt():
            time.sleep(0.1 + random.random() / 10)
            sent.append(time.perf_counter())
            os.kill(os.getpid(), signal.SIGINT)

        work = first.all_reduce(x)
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            work.wait()
        except KeyboardInterrupt:
            heard.append(time.perf_counter() - sent[0])
        thread.join()
        other = second.all_reduce(y)
        work.wait(10)
        other.wait(10)
        assert (x == 2).all() and (y == 2).all()
    assert len(heard) == rounds
    print(f"{rounds} rounds: median {statistics.median(heard) * 1e3:.1f} ms, longest {max(heard) * 1e3:.1f} ms")


main()
