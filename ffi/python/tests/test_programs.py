"""The first program of docs/python.md, as a stranger would run it."""

import subprocess
import sys

from helpers import DEADLINE
from programs import program


def test_the_program_with_numpy_under_the_launcher(tmp_path):
    path = program("numpy_program.py", tmp_path)
    command = [sys.executable, "-m", "allstream", "run", "-n", "2", "--", sys.executable, path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert ended.returncode == 0, ended.stderr
    assert sorted(line.split("] ")[-1] for line in ended.stdout.splitlines()) == ["rank 0 of 2: 3.0", "rank 1 of 2: 3.0"]


def test_the_program_with_numpy_by_itself(tmp_path):
    path = program("numpy_program.py", tmp_path)
    ended = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=DEADLINE)
    assert (ended.returncode, ended.stdout) == (0, "rank 0 of 1: 1.0\n"), ended.stderr
