"""Memory that an operation only reads may be read-only: it is never written, not even with its own values. Operations on the same memory wait
for each other."""

import threading

import numpy
import pytest
from helpers import DEADLINE, ranks

import allstream
from allstream import _native, errors

# The arrays of `protected` are in memory that is mapped read-only: the system kills a process that writes there.
PROTECTED = """
import mmap, tempfile

def protected(values):
    values = numpy.asarray(values, "float32")
    file = tempfile.TemporaryFile()
    file.write(values.tobytes())
    file.flush()
    memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    array = numpy.frombuffer(memory, "float32")
    assert not array.flags.writeable
    return array
"""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_read_only_memory_is_only_read(job, size, link):
    outputs = job(
        size,
        PROTECTED
        + """
last = comm.size - 1
for n in (3 * comm.size, 60_000 * comm.size):
    own = protected(numpy.full(n, comm.rank + 1))
    parts, total = n // comm.size, sum(range(comm.size + 1))
    for algo in ("auto", "direct", "one_shot", "binomial", "mst", "chain", "scatter_all_gather"):
        root = own if comm.rank == last else numpy.empty(n, "float32")
        assert (comm.broadcast(root, last, algo=algo).wait() == comm.size).all(), algo
        # Reduced on rank 0 alone.
        target = numpy.full(n, 1, "float32") if comm.rank == 0 else own
        comm.reduce(target, 0, algo=algo).wait()
        assert (target == (total if comm.rank == 0 else comm.rank + 1)).all(), algo
    for algo in ("auto", "direct", "ring"):
        assert comm.all_gather(own, algo=algo).wait()[-1] == comm.size
        assert (comm.reduce_scatter(own, algo=algo).wait() == total).all()
        assert (comm.all_reduce(own, out=numpy.empty(n, "float32"), algo=algo).wait() == total).all()
    comm.gather(own, 0).wait()
    comm.gather_in_place(own if comm.rank else protected(own).copy().repeat(comm.size), 0).wait()
    comm.scatter(own if comm.rank == 0 else None, 0, out=numpy.empty(parts, "float32")).wait()
    comm.scatter_in_place(own if comm.rank == 0 else numpy.empty(parts, "float32"), 0).wait()
    comm.all_to_all(own, out=numpy.empty(n, "float32")).wait()
    comm.scan(own, out=numpy.empty(n, "float32")).wait()
    comm.all_gather_list([own], [numpy.empty(n * comm.size, "float32")]).wait()
    comm.broadcast_list([root], last).wait()
    if comm.rank == 0:
        comm.send(own, 1).wait()
    elif comm.rank == 1:
        assert comm.recv(numpy.empty(n, "float32"), 0).wait()[0] == 1
    assert (own == comm.rank + 1).all()
print("done")
comm.close()
""",
        connect=f"link={link!r}",
    ).outputs()
    assert outputs == ["done\n"] * size


def test_a_tensor_of_another_library_that_says_it_is_read_only():
    class Other:
        """Offers its memory by DLPack only, not by the buffer protocol."""

        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    array = numpy.arange(4.0)
    array.flags.writeable = False

    def step(comm):
        gathered = comm.all_gather(Other(array), out=numpy.empty(8)).wait(DEADLINE)
        with pytest.raises(errors.Invalid, match="it is read-only, and the result is written there"):
            comm.all_reduce(Other(array))
        return gathered.tolist()

    assert ranks(2, step) == [[0.0, 1.0, 2.0, 3.0] * 2] * 2


def test_a_second_operation_on_the_same_memory_starts_after_the_first():
    def step(comm):
        array = numpy.ones(50_000)
        # All these operations use the memory of `array`, and nobody waits before the last. One work is dropped at once.
        works = [comm.all_reduce(array) for _ in range(3)]
        comm.all_reduce(array[10:20])
        gathered = comm.all_gather(array, out=numpy.empty(100_000))
        again = comm.all_reduce(array)
        assert again.wait(DEADLINE) is array
        assert gathered.wait(DEADLINE)[[0, 15]].tolist() == [8.0, 16.0]
        assert all(work.done() for work in works)
        return array[[0, 15]].tolist()

    assert ranks(2, step) == [[16.0, 32.0]] * 2
    assert _native._in_flight() == 0


def test_messages_on_the_same_memory_keep_their_order():
    def step(comm):
        box, works = numpy.full(3, float(comm.rank)), []
        for i in range(5):
            if comm.rank == 0:
                works += [comm.send(box, 1), comm.recv(box, 1)]
            else:
                works += [comm.recv(box, 0), comm.all_reduce(numpy.ones(1)), comm.send(box, 0)]
        others = [comm.all_reduce(numpy.ones(1)) for _ in range(5)] if comm.rank == 0 else []
        for work in works + others:
            work.wait(DEADLINE)
        return box.tolist()

    assert ranks(2, step) == [[0.0] * 3] * 2


def test_what_waits_for_memory_fails_with_the_first_operation():
    first, _second = allstream.local(2)
    array = numpy.ones(4)
    works = [first.all_reduce(array, timeout=0.2), first.all_reduce(array), first.all_reduce(array)]
    for work in works:
        with pytest.raises(errors.Timeout):
            work.wait(DEADLINE)
    del works, work
    first._leave()
    assert _native._in_flight() == 0


def test_leaving_does_not_wait_for_an_operation_that_never_ends():
    first, _second = allstream.local(2)
    array = numpy.ones(4)
    # The other rank calls nothing, and the second call waits for the memory of the first.
    works = [first.all_reduce(array), first.all_reduce(array)]
    leaves = threading.Thread(target=first._leave, daemon=True)
    leaves.start()
    leaves.join(DEADLINE)
    assert not leaves.is_alive()
    for work in works:
        with pytest.raises(errors.Aborted, match="this rank leaves"):
            work.wait(DEADLINE)
    del works, work
    assert _native._in_flight() == 0


def test_a_call_within_a_call_that_has_the_same_memory_is_refused():
    class Calling:
        """Its memory is asked for within a call that has already taken that of `array`."""

        def __init__(self, comm, array):
            self.comm, self.array, self.out, self.said = comm, array, numpy.zeros(4), None

        def __dlpack__(self, **options):
            try:
                self.comm.all_reduce(self.array)
            except errors.Invalid as error:
                self.said = str(error)
            return self.out.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.out.__dlpack_device__()

    def step(comm):
        array = numpy.ones(4)
        out = Calling(comm, array)
        comm.all_reduce(array, out=out).wait(DEADLINE)
        assert "another call, which has not returned yet, has this memory" in out.said
        return out.out.tolist()

    assert ranks(2, step) == [[2.0] * 4] * 2


def test_a_call_that_waits_for_memory_and_for_a_stream_is_refused():
    first, second = allstream.local(2)
    array, stream = numpy.ones(4), allstream.HostStream()
    gate = threading.Event()
    stream.launch(gate.wait, DEADLINE)
    work = first.all_reduce(array)
    with pytest.raises(errors.Invalid, match="is to start after a stream, too"):
        first.all_reduce(array, after=stream)
    gate.set()
    second.all_reduce(numpy.ones(4)).wait(DEADLINE)
    work.wait(DEADLINE)
