"""Arrays of another library through allstream, two processes on one device: `arrays.py torch|cupy|numpy DEVICE`.

Part of the GPU pack, under `allstream run -n 2`. It says "all is as expected" on every rank, or raises what is not. What a later
version of torch is needed for, or what is known to be refused, is printed as it was found and is no failure.
"""

import datetime
import os
import sys

import allstream

# A file in which torch's ranks meet, of this job alone.
MEETING = f"/tmp/gpu-pack-arrays-{os.getppid()}"
LIBRARY, DEVICE = sys.argv[1:3]
LENGTHS = (1, 1001, 1_000_003)


class Numpy:
    types = ("float32", "float64", "int64")

    def full(self, length, value, kind):
        import numpy

        return numpy.full(length, value, dtype=kind)

    def host(self, array):
        return array

    def stream(self):
        return None

    def busy(self):
        """The device has something to do before what comes next."""

    def all_are(self, array, value):
        return bool((self.host(array) == value).all())


class Cupy(Numpy):
    def full(self, length, value, kind):
        import cupy

        return cupy.full(length, value, dtype=kind)

    def host(self, array):
        return array.get()

    def stream(self):
        import cupy

        # Not the default one, which is another on every device.
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.use()
        return stream


class Torch(Numpy):
    types = ("float32", "bfloat16", "float16", "int64")

    def full(self, length, value, kind):
        import torch

        return torch.full((length,), value, dtype=getattr(torch, kind), device=DEVICE)

    def host(self, array):
        return array.cpu()

    def stream(self):
        import torch

        if DEVICE == "cpu":
            return None
        torch.cuda.set_stream(torch.cuda.Stream())
        return torch.cuda.current_stream()

    def busy(self):
        import torch

        if DEVICE != "cpu":
            torch.cuda._sleep(20_000_000)


def expect(what, holds):
    if not holds:
        raise SystemExit(f"rank {comm.rank}: {what}: not as expected")


def tried(what, call):
    """Says what became of a call that may be refused."""
    try:
        print(f"{what}: {call()}", flush=True)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is what is asked for)
        print(f"{what}: {type(error).__name__}: {error}", flush=True)


def calls(library, comm):
    size, rank = comm.size, comm.rank
    total = sum(range(1, size + 1))
    for kind in library.types:
        for length in LENGTHS:
            # In the order of the library's stream: the device is busy, then the array is made, then changed.
            library.busy()
            array = library.full(length, rank, kind)
            array += 1
            comm.all_reduce(array).wait()
            array *= 2
            expect(f"all_reduce of {length} {kind}", library.all_are(array, 2 * total))
        array = library.full(1001, rank + 1, kind)
        array = comm.broadcast(array, 1).wait()
        expect(f"broadcast of {kind}", library.all_are(array, 2))
        gathered = comm.all_gather(library.full(7, rank + 1, kind)).wait()
        flat = library.host(gathered).reshape(-1)
        expect(f"all_gather of {kind}", all(bool((flat[7 * r : 7 * r + 7] == r + 1).all()) for r in range(size)))
    stream = library.stream()
    if stream is None:
        return
    array = library.full(1_000_003, rank + 1, "float32")
    for _ in range(10):
        library.busy()
        comm.all_reduce(array).join(stream)
        array /= size
    expect("ten that the stream waits for", library.all_are(array, total / size))


comm = allstream.connect()
rank, size = comm.rank, comm.size
library = {"numpy": Numpy, "cupy": Cupy, "torch": Torch}[LIBRARY]()
if LIBRARY == "torch":
    import torch

    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version() if DEVICE != 'cpu' else 'not asked'}")
calls(library, comm)
if DEVICE != "cpu":
    # Known to be refused at present: memory of another library cannot be given to another process.
    bound = comm.dup()
    tried("bind_device", lambda: bound.bind_device(0))
    tried("all_reduce of an array of this library on the bound communicator", lambda: bound.all_reduce(library.full(1001, 1, "float32")).wait() is not None)
    bound.close()
comm.close()
if LIBRARY == "torch":

    def by_torch():
        import torch.distributed as dist

        # Not by the launcher's address, at which the ranks of this world have met.
        dist.init_process_group("allstream", init_method=f"file://{MEETING}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=20))
        x = torch.full((1001,), rank + 1.0, device=DEVICE)
        dist.all_reduce(x)
        expect("torch.distributed", library.all_are(x, 3))
        dist.destroy_process_group()
        return "all_reduce is right"

    tried("torch.distributed", by_torch)
print("all is as expected", flush=True)
