"""After any failure, every live rank gets an exception within the deadline, and the exception names the rank that failed."""

import os
import signal
import socket

import numpy
import pytest
from helpers import DEADLINE, ranks

import allstream
from allstream import errors


def test_ranks_that_call_different_things():
    def call(comm):
        if comm.rank == 0:
            comm.all_reduce(numpy.ones(4)).wait(DEADLINE)
        else:
            comm.all_gather(numpy.ones(4)).wait(DEADLINE)

    for rank, error in enumerate(ranks(2, call)):
        assert isinstance(error, errors.Mismatch) and {error.rank, error.peer} == {0, 1}, rank
        assert "all_reduce" in error.ours + error.theirs and "all_gather" in str(error)


def test_a_rank_that_does_not_call():
    first, _second = allstream.local(2)
    work = first.all_reduce(numpy.ones(4), timeout=0.2)
    with pytest.raises(TimeoutError) as raised:
        work.wait(DEADLINE)
    error = raised.value
    assert isinstance(error, errors.Timeout) and error.after == 0.2 and list(error.missing) == [1]
    assert "rank 1 has not called it" in str(error)
    with pytest.raises(errors.Timeout):
        first.all_reduce(numpy.ones(4))
    with pytest.raises(errors.Timeout):
        first.check()


def test_abort_reaches_all():
    first, second = allstream.local(2)
    work = second.all_reduce(numpy.ones(4))
    first.abort("enough of it")
    with pytest.raises(errors.Aborted, match="enough of it") as raised:
        work.wait(DEADLINE)
    assert (raised.value.by, raised.value.reason) == (0, "enough of it")


def test_a_killed_rank_is_named_and_the_others_go_on(job):
    made = job(
        3,
        """
        comm.all_reduce(numpy.ones(1000)).wait()
        if rank == 2:
            print("ready", flush=True)
            time.sleep(60)
        try:
            comm.all_reduce(numpy.ones(1000)).wait(50)
        except allstream.PeerLost as error:
            print(error.rank, isinstance(error, ConnectionError))
        comm, verdict = comm.shrink()
        print(verdict.lost, verdict.survivors, comm.size, comm.all_reduce(numpy.ones(3)).wait(50)[0])
        """,
    )
    assert made.processes[2].stdout.readline() == "ready\n"
    made.processes[2].send_signal(signal.SIGKILL)
    ends = made.ends()
    for code, out, err in ends[:2]:
        assert code == 0, err
        assert out.splitlines() == ["2 True", "[2] [0, 1] 2 2.0"]


def test_a_rank_that_never_comes():
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError, match="rank 1") as raised:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        allstream.connect(address=address, rank=0, size=2, token="secret", timeout=0.3, listener=listener.fileno())
    assert isinstance(raised.value, errors.Rendezvous) and raised.value.rank == 0


def test_an_interpreter_that_ends_says_goodbye(job):
    outputs = job(
        2,
        """
        if rank == 1:
            work = comm.all_reduce(numpy.ones(10))   # in flight when this interpreter ends
            sys.exit()
        comm.all_reduce(numpy.ones(10)).wait(50)
        try:
            comm.all_reduce(numpy.ones(10)).wait(50)
        except allstream.PeerLost as error:
            print(error.how)
        """,
    ).outputs()
    assert "left the group" in outputs[0]


def test_a_forked_child_touches_nothing(job):
    outputs = job(
        2,
        """
        work = comm.all_reduce(numpy.ones(100_000), key=1)
        child = os.fork()
        if child == 0:
            # What it inherited does nothing: calls are refused, and its end is nobody's goodbye.
            try:
                comm.all_reduce(numpy.ones(3))
            except allstream.errors.Unavailable as error:
                code = 7 if "forked" in str(error) else 8
            del work, comm
            sys.exit(code)
        print(work.wait(50)[0])
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status))
        print(comm.all_reduce(numpy.ones(10)).wait(50)[0])
        comm.close()
        """,
    ).outputs()
    assert [text.split() for text in outputs] == [["2.0", "7", "2.0"]] * 2


def test_workers_of_multiprocessing_beside_a_live_group(job):
    outputs = job(
        2,
        """
        import multiprocessing
        pool = multiprocessing.get_context("fork").Pool(2)
        for step in range(20):
            batches = pool.map_async(abs, [-1, -2, -3])
            total = comm.all_reduce(numpy.ones(1000)).wait(50)
            assert batches.get(50) == [1, 2, 3] and total[0] == 2
        pool.close(); pool.join()
        comm.close()
        print("done")
        """,
    ).outputs()
    assert [text.strip() for text in outputs] == ["done"] * 2


def test_a_rank_that_holds_the_gil_does_not_hold_up_the_others(job):
    """The operations that this rank has called go on, on threads that do not need the GIL."""
    outputs = job(
        2,
        """
        array = numpy.ones(1000, "float32")
        held, slept = [], []
        def hold(seconds):
            # Python code that keeps the GIL: it gives it up only after the switch interval, 10 s.
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                sum(range(1000))
        sys.setswitchinterval(10)
        for times, pause in ((held, hold), (slept, time.sleep)) * 10:
            comm.barrier().wait()
            start = time.monotonic()
            work = comm.all_reduce(array, op="avg")
            if rank == 1:
                pause(0.1)
            work.wait()
            times.append(time.monotonic() - start)
        print(sorted(held)[5], sorted(slept)[5])
        """,
    ).outputs()
    held, slept = (float(word) for word in outputs[0].split())
    # How long rank 0 waited: far below the 0.1 s for which rank 1 held the GIL, or slept.
    assert held < 0.05 and slept < 0.05, (held, slept)


