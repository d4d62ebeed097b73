"""The examples with Ray, with small numbers, and the program of docs/python.md."""

import subprocess
import sys

import apart
import pytest
from programs import REPOSITORY, program
from test_jobs import DESIGN

EXAMPLES = REPOSITORY / "ffi/python/examples"


def run(path, *arguments):
    with apart.environment() as env:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        ended = subprocess.run([sys.executable, path, *arguments], capture_output=True, text=True, timeout=140, env=env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [line for line in ended.stdout.splitlines() if "(raylet)" not in line]


def test_the_program_with_ray(tmp_path):
    lines = run(program("ray_program.py", tmp_path))
    assert lines[-1].replace("np.float64(3.0)", "3.0") == "[3.0, 3.0]"


def test_the_notebook():
    lines = run(EXAMPLES / "ray_notebook.py", "--actors", "4", "--megabytes", "0.25", "--trials", "2")
    rows = [line.split(" | ")[0].strip("| ") for line in lines if line.startswith("| ")]
    assert rows == ["all-reduce", "p2p", "builtin", "builtin, allstream.ray.empty", "bde", "mst", "builtin"]


def test_the_design_document():
    assert run(EXAMPLES / "ray_design.py") == DESIGN


def test_the_spacy_study(tmp_path):
    pytest.importorskip("spacy", reason="spaCy is not installed")
    config = tmp_path / "config.cfg"
    run(EXAMPLES / "ray_spacy.py", "config", config)
    lines = run(EXAMPLES / "ray_spacy.py", "study", config, "--workers", "2", "--ways", "allstream", "buckets", "--updates", "50", "--trials", "1")
    assert [line[:3] for line in lines if line.startswith("| 2")] == ["| 2"] * 2
