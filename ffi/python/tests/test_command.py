"""`python -m allstream`: the `allstream` command inside the interpreter."""

import os
import signal
import subprocess
import sys
import time

from helpers import DEADLINE

SUM = """
import allstream, numpy
comm = allstream.connect()
sums = numpy.full(3, comm.rank + 1.0)
comm.all_reduce(sums).wait()
print(sums[0])
comm.close()
"""


def start(*arguments, **options):
    command = [sys.executable, "-m", "allstream", *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def run(*arguments, **options):
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=DEADLINE)
    return process.returncode, out, err


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def until(condition):
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_starts_ranks_and_ends_as_they_do():
    code, out, err = run("run", "-n", "2", "--", sys.executable, "-c", SUM)
    assert (code, sorted(out.splitlines())) == (0, ["[0] 3.0", "[1] 3.0"]), err
    code, out, err = run("run", "-n", "1", "--", "sh", "-c", "exit 7")
    assert code == 7, err


def test_it_starts_itself_again_in_another_directory(tmp_path):
    # The directory has a module of the package's name, which is not meant.
    (tmp_path / "allstream.py").write_text("raise SystemExit(99)")
    script = os.path.join(os.path.dirname(__import__("allstream").__file__), "__main__.py")
    command = [sys.executable, script, "perf", "all_reduce", "-N", "2", "-b", "4", "-e", "4", "-n", "1", "-w", "0"]
    ended = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "# Out of bounds values : 0 OK" in ended.stdout


def test_what_cannot_be_understood_is_said_and_fails():
    code, out, err = run("walk")
    assert (code, out) == (2, "") and "unrecognized subcommand 'walk'" in err


def test_an_interrupt_reaches_the_ranks_and_no_traceback_the_user():
    process = start("run", "-n", "1", "--", "sh", "-c", "trap 'echo told; exit 3' INT; echo ready; while :; do sleep 0.01; done")
    assert process.stdout.readline() == "[0] ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE)
    assert "[0] told" in out and "Traceback" not in err, err
    assert process.returncode == 128 + signal.SIGINT, err


def test_a_launcher_that_is_killed_leaves_nothing_of_what_its_ranks_have_started():
    process = start("run", "-n", "1", "--", "sh", "-c", "sleep 1000 & echo $!; wait")
    pid = int(process.stdout.readline().removeprefix("[0] "))
    assert is_alive(pid)
    process.kill()
    process.communicate(timeout=DEADLINE)
    until(lambda: not is_alive(pid))
