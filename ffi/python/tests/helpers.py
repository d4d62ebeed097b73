"""What the tests have in common: ranks as threads, and ranks as processes. Everything that waits has a deadline."""

import os
import secrets
import socket
import subprocess
import sys
import textwrap
import threading

import allstream

DEADLINE = 60


def ranks(size, function):
    """Runs `function(comm)` on `size` ranks, a thread for each. Returns their results by rank; what a rank raises is its result."""
    comms = allstream.local(size)
    results = [None] * size

    def run(comm):
        try:
            results[comm.rank] = function(comm)
        except BaseException as raised:  # noqa: BLE001: the test looks at it.
            results[comm.rank] = raised

    threads = [threading.Thread(target=run, args=(comm,), daemon=True) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive(), "a rank has not returned within the deadline"
    return results


class Processes:
    """Processes that are ranks: `self.processes`, by rank."""

    def outputs(self, timeout=DEADLINE):
        """Waits until all ranks have ended, and returns what each has printed. Fails if a rank has failed."""
        texts = []
        for rank, (code, out, err) in enumerate(self.ends(timeout)):
            assert code == 0, f"rank {rank} ended with {code}:\n{out}\n{err}"
            texts.append(out)
        return texts

    def ends(self, timeout=DEADLINE):
        """Waits until all ranks have ended, and returns the exit code, stdout and stderr of each."""
        ends = []
        try:
            for process in self.processes:
                out, err = process.communicate(timeout=timeout)
                ends.append((process.returncode, out, err))
        finally:
            self.kill()
        return ends

    def kill(self):
        """Kills the processes that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


class Job(Processes):
    """Processes that are the ranks of a world; each runs the same program, in which `comm` is its communicator."""

    def __init__(self, size, program, connect="", python=(sys.executable,), env=None):
        self.processes = []
        token = secrets.token_hex(8)
        prelude = textwrap.dedent(
            f"""
            import os, signal, sys, threading, time
            import numpy
            import allstream
            rank = int(os.environ["TEST_RANK"])
            listener = int(os.environ["TEST_LISTENER"]) if rank == 0 else None
            comm = allstream.connect(address=os.environ["TEST_ADDRESS"], rank=rank, size={size}, token="{token}", timeout=30,
                                     listener=listener, {connect})
            """
        )
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            for rank in range(size):
                about = {"TEST_RANK": str(rank), "TEST_ADDRESS": address, "TEST_LISTENER": str(listener.fileno())}
                self.processes.append(
                    subprocess.Popen(
                        [*python, "-c", prelude + textwrap.dedent(program)],
                        env={**os.environ, **(env or {}), **about},
                        pass_fds=[listener.fileno()] if rank == 0 else [],
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
