"""Bad input is refused by name, at once, with nothing submitted."""

import numpy
import pytest

import allstream
from allstream import _native, errors


@pytest.fixture
def comm():
    made = allstream.local(1)[0]
    yield made
    assert made.all_reduce(numpy.ones(2)).wait(10)[0] == 1, "nothing was submitted, so the communicator lives"
    assert _native._in_flight() == 0
    made.close()


@pytest.mark.parametrize("thing", [[1.0, 2.0], None, 3, "text", numpy.float32(1), b"bytes", object()])
def test_what_is_no_array(comm, thing):
    with pytest.raises(TypeError, match="expected a numpy array, a torch tensor") as raised:
        comm.all_reduce(thing)
    assert isinstance(raised.value, errors.NotAnArray) and raised.value.call == "all_reduce"


@pytest.mark.parametrize(
    "array, words",
    [
        (numpy.ones((4, 4))[:, 1], "numpy.ascontiguousarray"),
        (numpy.asfortranarray(numpy.ones((3, 4))), "numpy.ascontiguousarray"),
        (numpy.ones(4)[::-1], "numpy.ascontiguousarray"),
        (numpy.ones(4).astype(">f8"), "newbyteorder"),
        (numpy.ones(4, dtype="complex64"), "array.view"),
        (numpy.array(["a", "b"]), "allstream has bool, int8"),
        (numpy.array([None, 1]), "allstream has bool, int8"),
        (numpy.zeros(3, dtype="datetime64[s]"), "allstream has bool, int8"),
        (numpy.zeros(3, dtype=[("a", "f4")]), "allstream has bool, int8"),
        (numpy.frombuffer(b"\0" * 33, dtype="u1")[1:].view("f4"), "read-only|begins at"),
    ],
)
def test_arrays_that_cannot_be_used(comm, array, words):
    with pytest.raises(ValueError, match=words):
        comm.all_reduce(array)


def test_read_only_arrays(comm):
    array = numpy.ones(4)
    array.flags.writeable = False
    with pytest.raises(errors.Invalid, match="read-only, as what ray.get gives is, and the result is written there: array.copy"):
        comm.all_reduce(array)


def test_memory_that_another_communicator_has_also_a_part():
    first, second = allstream.local(2)
    other = allstream.local(1)[0]
    array = numpy.zeros(1000)
    work = first.all_reduce(array)
    for again in (array, array[10:20], array[999:]):
        with pytest.raises(errors.Invalid, match=r"another operation has this memory, or a part of it: wait\(\) for that one"):
            other.all_reduce(again)
    with pytest.raises(errors.Invalid, match="another operation"):
        other.send(array[5:7], 0)
    second.all_reduce(numpy.zeros(1000)).wait(10)
    work.wait(10)
    assert other.all_reduce(array).wait(10) is array


def test_outputs_that_share_memory():
    zeros = numpy.zeros(2)
    (comm,) = allstream.local(1)
    with pytest.raises(errors.Invalid, match="two arrays of this call have the same memory"):
        comm.all_gather_list([numpy.ones(2), numpy.ones(2)], [zeros] * 2)
    with pytest.raises(errors.Invalid, match="two arrays of this call have the same memory"):
        comm.all_reduce(zeros, out=zeros)
    assert _native._in_flight() == 0


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda c, a: c.all_reduce(a, op="median"), "unknown reduction"),
        (lambda c, a: c.all_reduce(a, algo="magic"), "unknown algorithm"),
        (lambda c, a: c.all_reduce(a, timeout=-1), "not negative"),
        (lambda c, a: c.all_reduce(a, timeout=float("nan")), "timeout is NaN, expected a number of seconds"),
        (lambda c, a: c.all_reduce(a, speed="fast"), "there is no option \"speed\"; options are timeout"),
        (lambda c, a: c.broadcast(a, op="sum"), "there is no option \"op\""),
        (lambda c, a: c.broadcast(a, 7), "root 7 is not in this group of 1"),
        (lambda c, a: c.all_reduce(a, out=numpy.zeros(3)), "the output has 3 elements, expected 4"),
        (lambda c, a: c.all_reduce(a, out=numpy.zeros(4, "float32")), "f32"),
        (lambda c, a: c.all_gather(a, out=numpy.zeros(9)), "the output has 9 elements"),
        (lambda c, a: c.all_gather(a, counts=[1, 2]), "one for each rank|counts"),
        (lambda c, a: c.scatter(None, out=a), "this rank is the root, and its buf is None"),
        (lambda c, a: c.all_to_all(a, send_counts=[4]), "go together"),
        (lambda c, a: c.send(a, 3), "3"),
        (lambda c, a: c.send(a, 0), "send_recv"),
        (lambda c, a: c.batch([("give", a, 0, 0)]), "\"send\" or \"recv\", found \"give\""),
        (lambda c, a: c.all_reduce(numpy.zeros(2, "int32"), scale=2.0), "a scale"),
        (lambda c, a: c.all_reduce(a, op="bxor"), "bxor is not defined on f64"),
    ],
)
def test_calls_that_cannot_be(comm, call, words):
    array = numpy.ones(4)
    with pytest.raises(errors.Invalid, match=words):
        call(comm, array)
    assert list(array) == [1.0] * 4


def test_closed_communicators():
    (comm,) = allstream.local(1)
    comm.close()
    comm.close()
    with pytest.raises(errors.Invalid, match="this communicator was closed on this rank"):
        comm.all_reduce(numpy.ones(2))


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(address="nowhere", rank=0, size=2), "connect: expected tcp://HOST:PORT"),
        (dict(address="127.0.0.1:1", rank=2, size=2), "rank 2"),
        (dict(address="127.0.0.1:1", rank=0), "go together"),
        (dict(rank=1, size=2), "go together"),
        (dict(address="127.0.0.1:1", rank=0, size=2, colour="red"), "there is no option \"colour\""),
        (dict(address="127.0.0.1:1", rank=0, size=2, token=b"x", link="smoke"), "link is \"smoke\""),
        (dict(address="127.0.0.1:1", rank=0, size=2, token=b"x", timeout=-3), "not negative"),
    ],
)
def test_worlds_that_cannot_be(options, words):
    with pytest.raises(errors.Invalid, match=words):
        allstream.connect(**options)


def test_sizes_of_local_and_empty():
    with pytest.raises(errors.Invalid, match="at least one rank"):
        allstream.local(0)
    (comm,) = allstream.local(1)
    for shape, dtype, words in [((2, -1), "float32", "not negative"), (3, "bool", "no bools"), ((1 << 40,), "float32", "4 GB")]:
        with pytest.raises(errors.Error, match=words):
            comm.empty(shape, dtype)
