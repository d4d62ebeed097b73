"""Every collective gives what its name says, on every type, in place and not."""

import numpy
import pytest
from helpers import ranks

import allstream

N = 3
FLOATS = ["float16", "float32", "float64"]
INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def own(comm, count=6, dtype="float32"):
    """This rank's array: all different, and small."""
    return (numpy.arange(count) + 10 * comm.rank).astype(dtype)


def each(count=6, dtype="float32"):
    return [(numpy.arange(count) + 10 * rank).astype(dtype) for rank in range(N)]


@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_all_reduce_of_every_type(dtype):
    for result in ranks(N, lambda comm: comm.all_reduce(own(comm, dtype=dtype)).wait()):
        assert result.dtype == dtype
        assert (result == sum(each(dtype=dtype))).all()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_types_of_ml_dtypes(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = getattr(ml_dtypes, name)
    for result in ranks(2, lambda comm: comm.all_reduce(numpy.full(5, 1 + comm.rank, dtype=dtype)).wait()):
        assert result.dtype == dtype and (result.astype("float32") == 3).all()


def test_bools_have_minimum_and_maximum():
    results = ranks(2, lambda comm: comm.all_reduce(numpy.array([comm.rank == 0, True, False]), op="max").wait())
    assert [list(result) for result in results] == [[True, True, False]] * 2


@pytest.mark.parametrize(
    "op, expected",
    [
        ("sum", lambda a: sum(a)),
        ("prod", lambda a: a[0] * a[1] * a[2]),
        ("min", lambda a: numpy.minimum.reduce(a)),
        ("max", lambda a: numpy.maximum.reduce(a)),
        ("avg", lambda a: sum(a) / 3),
    ],
)
def test_reductions(op, expected):
    for result in ranks(N, lambda comm: comm.all_reduce(own(comm, dtype="float64"), op=op).wait()):
        assert numpy.allclose(result, expected(each(dtype="float64")))


def test_bits():
    for op, function in [("band", numpy.bitwise_and), ("bor", numpy.bitwise_or), ("bxor", numpy.bitwise_xor)]:
        for result in ranks(N, lambda comm: comm.all_reduce(own(comm, dtype="int32"), op=op).wait()):
            assert (result == function.reduce(each(dtype="int32"))).all()


def test_the_result_is_the_array_that_was_given():
    def call(comm):
        array = own(comm)
        out = numpy.zeros_like(array)
        given = array.copy()
        assert comm.all_reduce(array, out=out).wait() is out
        assert (array == given).all()
        assert comm.all_reduce(array).wait() is array
        return (array == out).all()

    assert ranks(N, call) == [True] * N


def test_scale_and_options():
    for result in ranks(N, lambda comm: comm.all_reduce(own(comm), scale=0.5, algo="ring", key=7, timeout=30).wait()):
        assert numpy.allclose(result, sum(each()) * 0.5)


def test_broadcast_and_reduce():
    def call(comm):
        first = comm.broadcast(own(comm), 2).wait()
        second = comm.broadcast(own(comm), root=1, out=numpy.zeros(6, "float32")).wait()
        third = comm.reduce(own(comm), 1).wait()
        return first, second, third

    for rank, (first, second, third) in enumerate(ranks(N, call)):
        assert (first == each()[2]).all() and (second == each()[1]).all()
        assert (third == (sum(each()) if rank == 1 else each()[rank])).all()


def test_gathers_keep_the_shape_of_rows():
    def call(comm):
        rows = own(comm).reshape(2, 3)
        return comm.all_gather(rows).wait(), comm.gather(rows, 1).wait(), comm.all_gather(numpy.array(comm.rank)).wait()

    for rank, (all_rows, at_root, numbers) in enumerate(ranks(N, call)):
        expected = numpy.concatenate([a.reshape(2, 3) for a in each()])
        assert all_rows.shape == (6, 3) and (all_rows == expected).all()
        assert (at_root is None) if rank != 1 else (at_root == expected).all()
        assert list(numbers) == [0, 1, 2]


def test_parts():
    def call(comm):
        scattered = comm.reduce_scatter(own(comm)).wait()
        rows = comm.reduce_scatter(numpy.ones((3, 2))).wait()
        part = comm.scatter(own(comm) if comm.rank == 1 else None, 1, out=numpy.zeros(2, "float32")).wait()
        turned = comm.all_to_all(own(comm)).wait()
        return scattered, rows, part, turned

    for rank, (scattered, rows, part, turned) in enumerate(ranks(N, call)):
        assert (scattered == sum(each())[2 * rank : 2 * rank + 2]).all()
        assert rows.shape == (1, 2) and (rows == 3).all()
        assert (part == each()[1][2 * rank : 2 * rank + 2]).all()
        assert (turned == numpy.concatenate([a[2 * rank : 2 * rank + 2] for a in each()])).all()


def test_in_place_forms():
    def call(comm):
        gathered = numpy.zeros(6)
        gathered[2 * comm.rank : 2 * comm.rank + 2] = comm.rank + 1
        comm.all_gather_in_place(gathered).wait()
        reduced = comm.reduce_scatter_in_place(own(comm)).wait()[2 * comm.rank : 2 * comm.rank + 2].copy()
        at_root = numpy.full(6 if comm.rank == 0 else 2, comm.rank, dtype="int32")
        comm.gather_in_place(at_root, 0).wait()
        parts = numpy.arange(6) if comm.rank == 0 else numpy.zeros(2, dtype="int64")
        comm.scatter_in_place(parts, 0).wait()
        turned = comm.all_to_all_in_place(own(comm)).wait()
        return gathered, reduced, at_root, parts, turned

    for rank, (gathered, reduced, at_root, parts, turned) in enumerate(ranks(N, call)):
        assert list(gathered) == [1, 1, 2, 2, 3, 3]
        assert (reduced == sum(each())[2 * rank : 2 * rank + 2]).all()
        if rank == 0:
            assert list(at_root) == [0, 0, 1, 1, 2, 2]
        else:
            assert list(parts) == [2 * rank, 2 * rank + 1]
        assert (turned == numpy.concatenate([a[2 * rank : 2 * rank + 2] for a in each()])).all()


def test_counts_that_differ():
    counts = [1, 3, 2]

    def call(comm):
        mine = numpy.full(counts[comm.rank], float(comm.rank))
        gathered = comm.all_gather(mine, counts=counts).wait()
        at_root = comm.gather(mine, 0, counts=counts).wait()
        part = comm.reduce_scatter(own(comm), counts=counts).wait()
        from_root = comm.scatter(
            numpy.arange(6.0) if comm.rank == 0 else None, 0, out=numpy.zeros(counts[comm.rank]), counts=counts
        ).wait()
        sends = [comm.rank + 1] * N
        turned = comm.all_to_all(
            numpy.full(sum(sends), comm.rank), send_counts=sends, recv_counts=[1, 2, 3]
        ).wait()
        return gathered, at_root, part, from_root, turned

    starts = [0, 1, 4]
    for rank, (gathered, at_root, part, from_root, turned) in enumerate(ranks(N, call)):
        assert list(gathered) == [0, 1, 1, 1, 2, 2]
        assert rank != 0 or list(at_root) == [0, 1, 1, 1, 2, 2]
        mine = slice(starts[rank], starts[rank] + counts[rank])
        assert (part == sum(each())[mine]).all() and (from_root == numpy.arange(6.0)[mine]).all()
        assert list(turned) == [0, 1, 1, 2, 2, 2]


def test_scans():
    results = ranks(N, lambda comm: (comm.scan(own(comm)).wait(), comm.exscan(own(comm)).wait()))
    for rank, (scan, exscan) in enumerate(results):
        assert (scan == sum(each()[: rank + 1])).all()
        assert (exscan == (sum(each()[:rank]) if rank else each()[0])).all()


def test_messages():
    def call(comm):
        there, back = (comm.rank + 1) % N, (comm.rank - 1) % N
        received = comm.send_recv(own(comm), there, numpy.zeros(6, "float32"), back, tag=3).wait()
        boxes = [numpy.zeros(2), numpy.zeros(2)]
        messages = [("recv", boxes[0], back, 1), ("recv", boxes[1], back, 2)]
        messages += [("send", numpy.full(2, 10.0 * comm.rank), there, 1), ("send", numpy.full(2, -1.0), there, 2)]
        comm.batch(messages).wait()
        if comm.rank == 0:
            comm.send(numpy.arange(4), 1, tag=9).wait()
        elif comm.rank == 1:
            assert list(comm.recv(numpy.zeros(4, "int64"), 0, tag=9).wait()) == [0, 1, 2, 3]
        return received, boxes

    for rank, (received, boxes) in enumerate(ranks(N, call)):
        assert (received == each()[(rank - 1) % N]).all()
        assert list(boxes[0]) == [10.0 * ((rank - 1) % N)] * 2 and list(boxes[1]) == [-1.0] * 2


def test_one_array_is_sent_to_several_at_once():
    def call(comm):
        if comm.rank == 0:
            array = numpy.arange(5000.0)
            for work in [comm.send(array, 1), comm.send(array, 2)]:
                work.wait()
            return array
        return comm.recv(numpy.zeros(5000), 0).wait()

    assert all((result == numpy.arange(5000.0)).all() for result in ranks(N, call))


def test_lists():
    def call(comm):
        arrays = [numpy.full(3, comm.rank, "int64"), numpy.full(2, 0.5, "float32"), numpy.zeros(0)]
        comm.all_reduce_list(arrays).wait()
        weights = comm.broadcast_list([numpy.full(2, comm.rank), numpy.full(1, float(comm.rank))], 2).wait()
        reduced = comm.reduce_list([numpy.ones(2)], 0).wait()
        gathered = comm.all_gather_list([numpy.full(1, comm.rank)], [numpy.zeros(3, "int64")]).wait()
        parts = comm.reduce_scatter_list([numpy.ones(3)], [numpy.zeros(1)]).wait()
        return arrays, weights, reduced, gathered, parts

    for rank, (arrays, weights, reduced, gathered, parts) in enumerate(ranks(N, call)):
        assert list(arrays[0]) == [3, 3, 3] and list(arrays[1]) == [1.5, 1.5]
        assert list(weights[0]) == [2, 2] and list(weights[1]) == [2.0]
        assert list(reduced[0]) == [3.0, 3.0] if rank == 0 else [1.0, 1.0]
        assert list(gathered[0]) == [0, 1, 2] and list(parts[0]) == [3.0]


def test_bytes_of_any_length():
    def call(comm):
        mine = bytes([comm.rank]) * (comm.rank * 1000)
        return comm.all_gather_bytes(mine).wait(), comm.broadcast_bytes(mine, 2).wait()

    for all_bytes, from_root in ranks(N, call):
        assert [len(one) for one in all_bytes] == [0, 1000, 2000] and from_root == bytes([2]) * 2000


def test_memory_that_other_ranks_read_in_place():
    def call(comm):
        array = allstream.empty((100, 3), "float64", comm=comm)
        assert array.shape == (100, 3) and (array == 0).all()
        array += comm.rank
        del comm
        return array

    assert [result[0, 0] for result in ranks(2, call)] == [0, 1], "it outlives its communicator"
    sums = ranks(2, lambda comm: comm.all_reduce(comm.empty(1000) + 1).wait())
    assert all((result == 2).all() for result in sums)


def test_groups():
    def call(comm):
        half = comm.split(comm.rank % 2, key=-comm.rank)
        none = comm.split(None if comm.rank == 0 else 5)
        pair = comm.subset([2, 0])
        other = comm.dup()
        both = comm.agree(True)
        total = half.all_reduce(numpy.array([comm.rank])).wait()
        return half.rank, half.size, none and none.size, pair and pair.rank, other.size, both.flag, both.survivors, total[0]

    assert ranks(N, call) == [
        (1, 2, None, 1, 3, True, [0, 1, 2], 2),
        (0, 1, 2, None, 3, True, [0, 1, 2], 1),
        (0, 2, 2, 0, 3, True, [0, 1, 2], 2),
    ]


def test_processes_meet_by_an_address(job):
    outputs = job(
        2,
        """
        total = comm.all_reduce(numpy.full(1000, rank + 1.0)).wait()
        shared = allstream.empty(500)
        shared[:] = rank
        comm.all_reduce(shared).wait()
        print(comm.rank, comm.size, total[0], shared[0], comm.stats()["in_flight"])
        comm.close()
        """,
    ).outputs()
    assert [text.split() for text in outputs] == [["0", "2", "3.0", "1.0", "0"], ["1", "2", "3.0", "1.0", "0"]]


def test_a_world_of_one_needs_nothing():
    with pytest.MonkeyPatch.context() as env:
        for name in ("RANK", "WORLD_SIZE", "ALLSTREAM_RANK", "ALLSTREAM_SIZE"):
            env.delenv(name, raising=False)
        comm = allstream.connect()
        assert (comm.rank, comm.size) == (0, 1)
        assert list(comm.all_reduce(numpy.arange(3)).wait()) == [0, 1, 2]
        comm.close()
