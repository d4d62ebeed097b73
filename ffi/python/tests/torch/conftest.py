"""Ranks of torch.distributed as processes. The test's own process runs torch's store, so its port is known, and nobody else can take it."""

import os
import subprocess
import sys
import textwrap

import pytest
from helpers import Processes

torch = pytest.importorskip("torch", reason="torch is not installed")
dist = torch.distributed

DEADLINE = 100
PRELUDE = """
import datetime, os, signal, sys, time
import torch
import torch.distributed as dist
torch.set_num_threads(1)
import allstream
import allstream.torch
allstream.torch.register()
rank, size = int(os.environ["TEST_RANK"]), int(os.environ["TEST_SIZE"])
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

def start(backend="allstream", seconds=60):
    store = dist.TCPStore("127.0.0.1", int(os.environ["TEST_PORT"]), is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=seconds))

def end():
    backend = dist.get_backend()
    dist.destroy_process_group()
    if backend == "gloo":
        # A thread of Gloo's may only then drop its last operation, and with it Python objects. Where the interpreter ends meanwhile, Python ends that
        # thread within a destructor of C++, and the process dies: "terminate called without an active exception".
        sys.stdout.flush()
        os._exit(0)
"""


class TorchJob(Processes):
    def __init__(self, size, program, env=None):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        about = {"TEST_SIZE": str(size), "TEST_PORT": str(self.store.port)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", PRELUDE + textwrap.dedent(program)],
                env={**os.environ, **(env or {}), **about, "TEST_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def ends(self, timeout=DEADLINE):
        return super().ends(timeout)

    def outputs(self, timeout=DEADLINE):
        """Waits until all ranks have ended, and returns the lines that each has printed."""
        return [text.splitlines() for text in super().outputs(timeout)]


@pytest.fixture
def torch_job():
    jobs = []

    def make(size, program, env=None):
        jobs.append(TorchJob(size, program, env))
        return jobs[-1]

    yield make
    for job in jobs:
        job.kill()
