"""Arrays on the devices of the CUDA driver for tests, passed by DLPack. With a GPU, arrays of torch and cupy take the same path."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

DRIVER, NCCL = os.environ.get("ALLSTREAM_TEST_CUDA"), os.environ.get("ALLSTREAM_TEST_NCCL")
pytestmark = pytest.mark.skipif(not (DRIVER and NCCL), reason="the CUDA driver and the NCCL for tests were not built: cargo xtask test builds them")

PRELUDE = f"""
import faulthandler, sys
faulthandler.dump_traceback_later(40, exit=True)
sys.path.insert(0, {str(Path(__file__).parent)!r})
import cuda_arrays
from cuda_arrays import Array, Stream
from helpers import ranks

def values(rank, n=1000):
    return numpy.arange(n, dtype="float32") % 7 + rank

def both(function):
    "Runs `function(comm)` on two ranks of this process, and raises what one of them has raised."
    results = ranks(2, function)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results

SUM = values(0) + values(1)
"""


@pytest.fixture
def devices(job):
    """Runs a program in `size` processes that have two devices, and returns what each has printed."""

    def run(program, size=1, env=None):
        about = {"ALLSTREAM_CUDA_LIBRARY": DRIVER, "ALLSTREAM_NCCL_LIBRARY": NCCL, "ALLSTREAM_TEST_CUDA_DEVICES": "2", **(env or {})}
        return job(size, PRELUDE + textwrap.dedent(program), env=about).outputs()

    return run


def test_arrays_are_reduced_on_their_devices_and_come_back(devices):
    devices(
        """
        def run(comm):
            assert comm.bind_device(comm.rank) == "peer"
            x, y = Array(values(comm.rank), comm.rank), Array(values(9), comm.rank)
            assert comm.all_reduce(x).wait() is x
            assert (x.get() == SUM).all()
            assert comm.all_reduce(x, out=y, op="max").wait() is y
            assert (y.get() == SUM).all() and (x.get() == SUM).all()
            comm.broadcast_list([x, y], 0, timeout=20).wait()
            all = Array(numpy.zeros(2000, "float32"), comm.rank)
            comm.all_gather(Array(values(comm.rank), comm.rank), out=all).wait()
            assert (all.get() == numpy.concatenate([values(0), values(1)])).all()
            half = Array(numpy.zeros(500, "float32"), comm.rank)
            comm.reduce_scatter(x, out=half, op="avg").wait()
            assert (half.get() == SUM[500 * comm.rank:500 * (comm.rank + 1)]).all()
            parts = Array(numpy.zeros(1000, "float32"), comm.rank) if comm.rank == 1 else None
            assert comm.gather(half, 1, out=parts).wait() is parts
            part = Array(numpy.zeros(500, "float32"), comm.rank)
            comm.scatter(parts, 1, out=part).wait()
            assert (part.get() == half.get()).all()
            peer = 1 - comm.rank
            comm.send_recv(x, peer, y, peer).wait()
            whole = Array(numpy.array([2**60 + comm.rank]), comm.rank)
            assert comm.all_reduce(whole).wait().get()[0] == 2**61 + 1

        both(run)
        assert allstream._native._in_flight() == 0
        cuda_arrays.all_came_back(14 + 16)
        """
    )


def test_processes_exchange_device_arrays_by_the_host_where_they_are_not_bound(devices):
    devices(
        """
        x = Array(values(rank), rank)
        comm.all_reduce(x).wait()
        assert (x.get() == SUM).all()
        comm.broadcast(x, 1).wait()
        if rank == 0:
            comm.send(Array(values(3), 0), 1).wait()
        else:
            assert (comm.recv(x, 0).wait().get() == values(3)).all()
        comm.close()
        """,
        size=2,
    )


def test_processes_read_each_others_arrays_where_they_lie(devices):
    devices(
        """
        assert comm.bind_device(rank) == "peer"
        x, y = (Array(numbers, rank, room=2 << 20) for numbers in (values(rank), values(9)))
        for _ in range(3):
            comm.all_reduce(x, out=y).wait()
            assert (y.get() == SUM).all() and (x.get() == values(rank)).all()
        comm.broadcast(x, 1).wait()
        assert (x.get() == values(1)).all()
        assert comm.device_copies() is None
        comm.close()
        cuda_arrays.all_came_back(7)
        """,
        size=2,
    )


def test_memory_that_other_processes_cannot_be_given_is_copied_and_the_reason_is_told(devices):
    devices(
        """
        assert comm.bind_device(rank) == "peer"
        x = Array(values(rank), rank, pool=rank == 0, room=2 << 20)
        comm.all_reduce(x).wait()
        assert (x.get() == SUM).all()
        copies = comm.device_copies()
        if rank == 0:
            assert (copies["buffers"], copies["bytes"]) == (1, 4000) and "cudaMallocAsync" in copies["why"], copies
        else:
            assert copies is None
        comm.close()
        """,
        size=2,
    )


WAYS = {
    "two ranks on one device": ("0", {}, "peer", ["allstream's own kernels", "NCCL"]),
    "no NCCL": ("rank", {"ALLSTREAM_NCCL_LIBRARY": "/nowhere/libnccl.so.2"}, "peer", ["allstream's own kernels", "/nowhere/libnccl.so.2"]),
    "NCCL off": ("rank", {"ALLSTREAM_NCCL": "off"}, "peer", []),
    "no way": (
        "rank",
        {"ALLSTREAM_NCCL": "off", "ALLSTREAM_TEST_CUDA_NO_PEER": "0-1"},
        "staged: ",
        ["through the host's memory", "cannot reach"],
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_library_is_bound_by_the_best_way_that_there_is(devices, way):
    device, env, path, words = WAYS[way]
    devices(
        f"""
        import warnings
        from allstream._devices import bind

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            path = bind(comm, {device})
        text = " ".join(str(warning.message) for warning in told)
        assert path.startswith({path!r}), path
        assert len(told) == {int(bool(words))} and all(word in text for word in {words!r}), text
        x = Array(values(rank), {device})
        comm.all_reduce(x).wait()
        assert (x.get() == SUM).all()
        comm.close()
        """,
        size=2,
        env=env,
    )


def test_a_library_is_bound_to_nccl_where_that_is_there(devices):
    devices(
        """
        import warnings
        from allstream._devices import bind

        def run(comm):
            warnings.simplefilter("error")
            path = bind(comm, comm.rank)
            assert path.startswith("NCCL 2."), path
            x = Array(values(comm.rank), comm.rank)
            comm.all_reduce(x).wait()
            assert (x.get() == SUM).all()

        both(run)
        """
    )


def test_a_library_is_refused_where_nccl_is_required_and_cannot(devices):
    devices(
        """
        from allstream._devices import bind

        try:
            print(bind(comm, 0))
        except allstream.Error as error:
            assert "NCCL" in str(error), error
        else:
            raise AssertionError("not refused")
        comm.check()
        """,
        size=2,
        env={"ALLSTREAM_NCCL": "require"},
    )


def test_nccl_takes_arrays_of_devices(devices):
    devices(
        """
        def run(comm):
            path = comm.bind_nccl(comm.rank)
            assert path.startswith("NCCL 2."), path
            x = Array(values(comm.rank), comm.rank)
            for _ in range(3):
                comm.all_reduce(x, op="max").wait()
            assert (x.get() == values(1)).all()

        both(run)
        """
    )


def test_nccl_is_found_beside_the_packages_of_the_python_that_runs(tmp_path):
    file = tmp_path / "nvidia/nccl/lib/libnccl.so.2"
    file.parent.mkdir(parents=True)
    file.symlink_to(NCCL)
    env = {name: value for name, value in os.environ.items() if name != "ALLSTREAM_NCCL_LIBRARY"}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, [env.get("PYTHONPATH")])])
    said = subprocess.run([sys.executable, "-m", "allstream", "info"], env=env, check=True, capture_output=True, text=True, timeout=40).stdout
    assert f"yes: NCCL 2.27.3 by {file}" in said, said


def test_an_operation_starts_after_what_its_library_has_put_on_its_stream(devices):
    devices(
        """
        def run(comm):
            comm.bind_device(comm.rank)
            stream, may, opened = Stream(comm.rank), threading.Event(), []
            x = Array(values(8), comm.rank, stream)
            stream.launch(lambda: opened.append(may.wait(20)))
            x.put(values(comm.rank))
            work = comm.all_reduce(x)
            assert not work.done(), "the array's numbers are not there"
            may.set()
            work.wait(20)
            assert (x.get() == SUM).all() and opened == [True], "nobody waited for the gate's own end"

        both(run)
        """
    )


def test_a_stream_of_cuda_waits_for_an_operation_and_the_caller_does_not(devices):
    devices(
        """
        def run(comm):
            comm.bind_device(comm.rank)
            stream, other, may, opened = Stream(comm.rank), Stream(comm.rank), threading.Event(), []
            x = Array(values(comm.rank), comm.rank, stream)
            other.launch(lambda: opened.append(may.wait(20)))
            work = comm.all_reduce(x, after=other)
            work.join(stream)
            # In the order of its stream the array is free for the next call.
            again = comm.all_reduce(x, scale=0.5)
            assert not again.done()
            may.set()
            again.join(stream)
            assert (x.get(stream) == SUM).all() and opened == [True]
            assert work.wait() is x and again.wait() is x
            host = numpy.ones(3)
            after = comm.all_reduce(host)
            after.join(stream)
            assert after.done() and (host == 2).all(), "what no device runs is waited for"

        both(run)
        cuda_arrays.all_came_back(4)
        """
    )


def test_what_cannot_be_is_refused_at_once_and_nothing_is_lost(devices):
    devices(
        """
        def refused(call, text, error=allstream.Invalid):
            try:
                call()
            except error as raised:
                assert text in str(raised), f"{raised}"
                return
            raise AssertionError(f"not refused: {text}")

        comm = allstream.local(1)[0]
        refused(lambda: comm.bind_device(7), "7")
        x = Array(values(0))
        twice = Array(values(0))
        twice.at = x.at
        refused(lambda: comm.all_reduce(x, out=twice), "two arrays of this call have the same memory")
        far = Array(values(0))
        far.device = 5
        refused(lambda: comm.all_reduce(far), "device 5")
        columns = Array(numpy.zeros((10, 100), "float32"))
        columns.strides = (1, 10)
        refused(lambda: comm.all_reduce(columns), "row-major")
        metal = Array(values(0))
        metal.device_type = 8
        refused(lambda: comm.all_reduce(metal), "DLPack's type 8")
        nowhere = Array(values(0))
        nowhere.at = 64
        refused(lambda: comm.all_reduce(nowhere), "the driver does not know the address")
        work = comm.all_reduce(Array(values(0)))
        refused(lambda: work.join(3), "found an object of type int", TypeError)
        refused(lambda: comm.all_reduce(x, after="now"), "found an object of type str", TypeError)
        work.wait()
        comm.all_reduce(x).wait()
        assert allstream._native._in_flight() == 0

        def run(comm):
            comm.bind_device(comm.rank)
            own = Array(values(comm.rank), comm.rank) if comm.rank == 0 else values(1)
            try:
                comm.all_reduce(own, timeout=20).wait()
            except allstream.Mismatch as error:
                return str(error)

        assert all("devices" in text for text in both(run))
        """
    )


def test_without_a_driver_the_error_says_what_was_looked_for(job):
    texts = job(
        1,
        """
        class Array:
            def __dlpack__(self, **options): ...

            def __dlpack_device__(self):
                return 2, 0

        try:
            comm.all_reduce(Array())
        except allstream.Invalid as error:
            print(error)
        """,
        # Under cargo the library search path has the folder of the driver for tests, which must not be found.
        env={"ALLSTREAM_CUDA_LIBRARY": "/nowhere/libcuda.so", "LD_LIBRARY_PATH": ""},
    ).outputs()
    assert "it is on CUDA device 0" in texts[0] and "/nowhere/libcuda.so" in texts[0], texts


def test_gradients_on_devices_go_in_buckets(devices):
    devices(
        """
        def run(comm):
            comm.bind_device(comm.rank)
            parameters = [Array(values(0, n), comm.rank) for n in (10, 300, 2000)]
            buckets = allstream.Buckets(comm, parameters, bucket_mb=0.002, first_bucket_mb=0.001)
            for step in range(3):
                for i in reversed(range(3)):
                    buckets.push(i, Array(values(comm.rank + step, len(values(0, parameters[i].shape[0]))), comm.rank))
                for grad, parameter in zip(buckets.finish(), parameters):
                    n = parameter.shape[0]
                    assert (grad.get() == (values(step, n) + values(1 + step, n)) / 2).all()
            buckets.close()

        both(run)
        """
    )


def test_gradients_that_are_handed_in_at_once_are_all_there_at_the_end_of_a_step(devices):
    """While a library exports one gradient, it hands in others, as another thread may. Each bucket is unpacked in the order of another stream."""
    devices(
        """
        class Late(Array):
            meanwhile = None

            def __dlpack__(self, **about):
                meanwhile, self.meanwhile = self.meanwhile, None
                if meanwhile:
                    meanwhile()
                return super().__dlpack__(**about)

        def run(comm):
            comm.bind_device(comm.rank)
            parameters = [Array(values(0, 300), comm.rank) for _ in range(4)]
            buckets = allstream.Buckets(comm, parameters, bucket_mb=0.002, first_bucket_mb=0.002)
            for step in range(5):
                grads = [Late(values(comm.rank + step, 300), comm.rank) for _ in range(4)]
                grads[3].meanwhile = lambda: [buckets.push(i, grads[i]) for i in (1, 0)]
                buckets.push(3, grads[3])
                buckets.push(2, grads[2])
                got = [grad.get() for grad in buckets.finish()]
                for values_of_all in got:
                    assert (values_of_all == (values(step, 300) + values(1 + step, 300)) / 2).all()
            buckets.close()

        both(run)
        """,
        env={"ALLSTREAM_TEST_CUDA_DELAY_US": "5000"},
    )


def test_a_second_stream_and_the_host_wait_for_what_a_first_one_waits_for(devices):
    devices(
        """
        def run(comm):
            comm.bind_device(comm.rank)
            first, second, gate, may = Stream(comm.rank), Stream(comm.rank), Stream(comm.rank), threading.Event()
            x, opened, told = Array(values(comm.rank), comm.rank), [], []
            gate.launch(lambda: opened.append(may.wait(20)))
            work = comm.all_reduce(x, after=gate)
            work.join(first)
            assert not work.done(), "it still runs on the device"
            try:
                work.wait(0.05)
            except TimeoutError:
                pass
            else:
                raise AssertionError("it is not over")
            work.add_done_callback(lambda _: told.append(may.is_set()))
            seen = []
            stream = allstream.HostStream()
            work.join(stream)
            stream.launch(lambda: seen.append(may.is_set()))
            threading.Timer(0.1, may.set).start()
            work.join(second)
            assert opened == [True] and (x.get(second) == SUM).all()
            stream.synchronize()
            assert seen == [True] and work.done() and work.wait() is x
            end = time.monotonic() + 20
            while not told:
                assert time.monotonic() < end, "the callback was not called"
                time.sleep(0.001)
            assert told == [True]

        both(run)
        """
    )


def test_a_deleter_that_wants_the_lock_of_python_holds_up_no_device(devices):
    """Deleters run on the package's own thread, never on the thread that reports when work on devices has ended."""
    devices(
        """
        names = set()
        cuda_arrays.on_delete = lambda: names.add(open("/proc/thread-self/comm").read().strip())

        def run(comm):
            comm.bind_device(comm.rank)
            for _ in range(5):
                comm.all_reduce(Array(values(comm.rank), comm.rank)).wait()

        both(run)
        cuda_arrays.all_came_back(10)
        assert names == {"allstream-pytho"}, names
        """
    )
