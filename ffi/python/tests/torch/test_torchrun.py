"""The program of docs/python.md for torchrun, as a stranger would run it."""

import re
import subprocess
import sys

import pytest
from programs import program
from test_backend import is_installed


@pytest.mark.skipif(not is_installed(), reason="the package is not installed, so torch cannot find it by its entry point")
def test_the_program_with_torch_under_torchrun(tmp_path):
    path = program("torch_program.py", tmp_path)
    # As `torchrun`, which is this module; one host, so a free port of its own choice.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    # Both print to one pipe, so that lines may run together.
    assert sorted(re.findall(r"rank \d: 3\.0", ended.stdout)) == ["rank 0: 3.0", "rank 1: 3.0"]
