"""Times a message, an all-reduce, and two all-reduces built from messages (BDE, MST) between Ray actors, on Ray's Gloo and on allstream.

    python examples/ray_notebook.py [--actors 8] [--megabytes 32] [--trials 10]

- BDE (bidirectional exchange): in each of log2(n) rounds every actor exchanges its whole message with a partner, and adds.
- MST (minimum spanning tree): the range of ranks is halved again and again. A reduce up this tree to rank 0, then a broadcast down it.

Each backend has its own actors, and the two take turns, trial by trial. The result of each trial is checked. Each actor logs what it sent and
received: every send must have its receive, and their number must be that of the algorithm. Each actor times its call between two barriers; the
slowest actor counts; the table has medians over the trials.
"""

import argparse
import statistics
import time

import ray
import ray.util.collective as col
import torch

import allstream.ray

GROUP = "notebook"


@ray.remote(num_cpus=0)
class Worker:
    """One rank: its message, a buffer for what comes, and a log of what it has sent and received."""

    def __init__(self, size, rank, backend):
        torch.set_num_threads(1)
        self.size, self.rank, self.backend = size, rank, backend
        self.comm_log = []
        col.init_collective_group(size, rank, backend, GROUP)

    def set_message(self, elements, lies):
        """Makes the message, filled with `rank + 1`. `lies` is "shared" for memory that other processes read, else the actor's own memory."""
        if lies == "shared":
            self.message, self.buffer = (allstream.ray.empty((elements,), torch.float32, GROUP) for _ in range(2))
        else:
            self.message, self.buffer = torch.empty(elements), torch.zeros(elements)
        self.fill()

    def fill(self):
        self.message.fill_(self.rank + 1)

    def send(self, to):
        col.send(self.message, to, GROUP)
        self.comm_log.append(("send", self.rank, to))

    def recv(self, source):
        col.recv(self.buffer, source, GROUP)
        self.comm_log.append(("recv", self.rank, source))

    def p2p(self):
        """Rank 0's message goes to rank 1."""
        if self.rank == 0:
            self.send(1)
        elif self.rank == 1:
            self.recv(0)
            self.message.copy_(self.buffer)

    def builtin(self):
        col.allreduce(self.message, GROUP)

    def bde(self):
        left, right = 0, self.size - 1
        while left < right:
            half = (right - left + 1) // 2
            middle = left + half - 1
            lower = self.rank <= middle
            partner = self.rank + half if lower else self.rank - half
            # A send may block until it is received. If both partners sent first, they could deadlock: so the lower rank sends first.
            for step in (self.send, self.recv) if lower else (self.recv, self.send):
                step(partner)
            self.message += self.buffer
            left, right = (left, middle) if lower else (middle + 1, right)

    def mst(self):
        halves, left, right, root = [], 0, self.size - 1, 0
        while left < right:
            middle = (left + right) // 2
            other = right if root <= middle else left
            halves.append((root, other))
            mine = root if (self.rank <= middle) == (root <= middle) else other
            left, right, root = (left, middle, mine) if self.rank <= middle else (middle + 1, right, mine)
        for root, other in reversed(halves):
            if self.rank == other:
                self.send(root)
            elif self.rank == root:
                self.recv(other)
                self.message += self.buffer
        for root, other in halves:
            if self.rank == root:
                self.send(other)
            elif self.rank == other:
                self.recv(root)
                self.message.copy_(self.buffer)

    def profile(self, way, calls):
        """The median of the seconds of `calls` calls of the method `way`, and the log of the last one, whose result is checked."""
        took = []
        for _ in range(calls):
            self.fill()
            self.comm_log.clear()
            col.barrier(GROUP)
            start = time.perf_counter()
            getattr(self, way)()
            took.append(time.perf_counter() - start)
            col.barrier(GROUP)
        expected = 1 if way == "p2p" else sum(range(1, self.size + 1))
        concerned = way != "p2p" or self.rank < 2
        assert not concerned or bool((self.message == expected).all()), f"{self.backend}, rank {self.rank}, {way}: found {self.message[0]}"
        return statistics.median(took), list(self.comm_log)


def check_logs(way, size, logs):
    """Checks that every send has its receive, and that there are as many messages as the algorithm needs."""
    sends = sorted((source, to) for log in logs for kind, source, to in log if kind == "send")
    recvs = sorted((source, to) for log in logs for kind, to, source in log if kind == "recv")
    assert sends == recvs, f"{way}: sends {sends}, receives {recvs}"
    expected = {"p2p": 1, "builtin": 0, "bde": size * (size.bit_length() - 1), "mst": 2 * (size - 1)}[way]
    assert len(sends) == expected, f"{way}: {len(sends)} messages, expected {expected}"


def profile(workers, way, calls=1):
    """The slowest actor's time for one call, in microseconds."""
    results = ray.get([worker.profile.remote(way, calls) for worker in workers], timeout=600)
    check_logs(way, len(workers), [log for _, log in results])
    return max(took for took, _ in results) * 1e6


def measure(rows, size, megabytes, trials, calls=1):
    """Prints a row for each way: by Gloo, by allstream, and their ratio."""
    elements = max(1, int(megabytes * (1 << 20)) // 4)
    teams = {backend: [Worker.remote(size, rank, backend) for rank in range(size)] for backend in ("gloo", "allstream")}
    for way, lies in rows:
        for backend, workers in teams.items():
            kind = lies if backend == "allstream" else "own"
            ray.get([worker.set_message.remote(elements, kind) for worker in workers], timeout=300)
        times = {backend: [] for backend in teams}
        for trial in range(-1, trials):
            for backend, workers in teams.items():
                took = profile(workers, way, calls)
                if trial >= 0:
                    times[backend].append(took)
        gloo, ours = statistics.median(times["gloo"]), statistics.median(times["allstream"])
        name = way if lies == "own" else f"{way}, allstream.ray.empty"
        print(f"| {name} | {size} | {elements * 4} | {gloo:.1f} | {ours:.1f} | {ours / gloo:.2f} |", flush=True)
    for workers in teams.values():
        for worker in workers:
            ray.kill(worker)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actors", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=32)
    parser.add_argument("--trials", type=int, default=10)
    options = parser.parse_args()
    if options.actors & (options.actors - 1):
        parser.error("BDE wants a number of actors that is a power of two")
    allstream.ray.register()
    ray.init(num_cpus=options.actors, include_dashboard=False, log_to_driver=False, logging_level="warning")
    print(f"# Ray {ray.__version__}, {options.trials} trials in turns, medians, us")
    print("| all-reduce | actors | bytes | Ray GLOO | allstream | ratio |\n|---|---|---|---|---|---|", flush=True)
    rows = [("p2p", "own"), ("builtin", "own"), ("builtin", "shared"), ("bde", "own"), ("mst", "own")]
    measure(rows, options.actors, options.megabytes, options.trials)
    measure([("builtin", "own")], 2, 4 / 1024, options.trials, calls=50)
    ray.shutdown()


if __name__ == "__main__":
    main()
