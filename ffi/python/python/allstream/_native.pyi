"""What the compiled module has. `allstream` itself exports all of it."""

from os import PathLike
from typing import Any, Callable, Generator, Generic, Literal, Optional, Sequence, TypeVar, Union

# A numpy array, a torch tensor, or whatever else speaks DLPack, in the host's memory or on a CUDA device: contiguous, of a type that allstream
# has, and writable where the result is written there.
Array = Any
# A CUDA stream of torch's (`torch.cuda.Stream`), of cupy's, or of another library whose streams have `__cuda_stream__` and `device_id`.
CudaStream = Any
R = TypeVar("R")
Op = Literal["sum", "prod", "min", "max", "avg", "band", "bor", "bxor"]

class Work(Generic[R]):
    """An operation in flight. It runs whether or not anybody waits for it; its buffers must not be touched before it is done."""

    def wait(self, timeout: Optional[float] = None) -> R:
        """Blocks until the operation is done, without the GIL, and returns its result; again, if it is called again.

        Ctrl-C is heard. `timeout`, in seconds, is of this wait alone: when it passes, `TimeoutError` is raised and the operation goes on.
        An operation that has failed raises its `Error`.
        """
    def done(self) -> bool:
        """Whether it is over: `wait` would return, or raise, at once."""
    def exception(self) -> Optional[BaseException]:
        """Why it failed; None where it has succeeded, or is not over."""
    def result(self) -> R:
        """As `wait()`."""
    def add_done_callback(self, callback: Callable[["Work[R]"], None]) -> None:
        """Calls `callback` with this work when it is over; at once, if it is.

        Else a thread of the communicator's calls it, after the callbacks of its earlier collectives. It may wait, also for operations that it
        submits, whose own callbacks come beside it.
        """
    def join(self, stream: Union["HostStream", CudaStream]) -> None:
        """What is put on `stream` from here on starts after this operation, and the caller does not wait. On a `HostStream` a failure is
        raised by `wait`.

        On a CUDA stream that is so for collectives that a device runs (`Comm.bind_device`), once all ranks have called them: the arrays are free
        for what comes in the order of that stream, and a failure is raised by `wait`, by the communicator's next call, or by `check`. An
        operation that no device runs is waited for here, and so is one that another CUDA stream waits for already.
        """
    def __await__(self) -> Generator[Any, None, R]: ...

class HostStream:
    """Python functions that run in order, one after another, on a thread beside the caller's."""

    def __init__(self, name: str = "python") -> None: ...
    def launch(self, function: Callable[..., Any], *args: Any) -> None:
        """Runs `function(*args)` after all that was put on the stream before. What it raises is told by `synchronize`."""
    def synchronize(self) -> None:
        """Waits until all that was put on the stream is done; raises the first exception of a function that ran there."""

class Verdict:
    """What `agree` and `shrink` came to, the same on all survivors."""

    flag: bool
    survivors: list[int]
    lost: list[int]

class Comm:
    """A rank's handle on a group. Every rank makes the same calls in the same order; a call submits at once and returns a `Work`.

    Options that all collectives take, by keyword: `timeout` (seconds that this may take when all earlier operations are over; then
    the group fails), `algo` (`"ring"`, `"tree"`, ...), `key` (a number that all ranks must give alike), `after` (a `HostStream`, or
    for arrays on devices a CUDA stream: the operation starts after what is on it). Those that reduce: `op`, `scale` (each input is multiplied by it), `deterministic`.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def hosts(self) -> int: ...
    def all_reduce(self, buf: Array, *, out: Optional[Array] = None, op: Op = "sum", scale: Optional[float] = None, algo: Optional[str] = None, deterministic: Optional[bool] = None, timeout: Optional[float] = None, key: int = 0, after: Union[HostStream, CudaStream, None] = None) -> Work[Array]: ...
    def broadcast(self, buf: Array, root: int = 0, *, out: Optional[Array] = None, **options: Any) -> Work[Array]: ...
    def reduce(self, buf: Array, root: int = 0, *, out: Optional[Array] = None, op: Op = "sum", **options: Any) -> Work[Array]: ...
    def all_gather(self, buf: Array, *, out: Optional[Array] = None, counts: Optional[Sequence[int]] = None, **options: Any) -> Work[Array]: ...
    def reduce_scatter(self, buf: Array, *, out: Optional[Array] = None, counts: Optional[Sequence[int]] = None, op: Op = "sum", **options: Any) -> Work[Array]: ...
    def gather(self, buf: Array, root: int = 0, *, out: Optional[Array] = None, counts: Optional[Sequence[int]] = None, **options: Any) -> Work[Optional[Array]]: ...
    def scatter(self, buf: Optional[Array], root: int = 0, *, out: Array, counts: Optional[Sequence[int]] = None, **options: Any) -> Work[Array]: ...
    def all_to_all(self, buf: Array, *, out: Optional[Array] = None, send_counts: Optional[Sequence[int]] = None, recv_counts: Optional[Sequence[int]] = None, **options: Any) -> Work[Array]: ...
    def all_gather_in_place(self, buf: Array, *, counts: Optional[Sequence[int]] = None, **options: Any) -> Work[Array]: ...
    def reduce_scatter_in_place(self, buf: Array, *, counts: Optional[Sequence[int]] = None, op: Op = "sum", **options: Any) -> Work[Array]: ...
    def gather_in_place(self, buf: Array, root: int = 0, **options: Any) -> Work[Array]: ...
    def scatter_in_place(self, buf: Array, root: int = 0, **options: Any) -> Work[Array]: ...
    def all_to_all_in_place(self, buf: Array, **options: Any) -> Work[Array]: ...
    def scan(self, buf: Array, *, out: Optional[Array] = None, op: Op = "sum", **options: Any) -> Work[Array]: ...
    def exscan(self, buf: Array, *, out: Optional[Array] = None, op: Op = "sum", **options: Any) -> Work[Array]: ...
    def barrier(self, **options: Any) -> Work[None]: ...
    def send(self, buf: Array, dst: int, *, tag: int = 0, **options: Any) -> Work[Array]: ...
    def recv(self, buf: Array, src: int, *, tag: int = 0, **options: Any) -> Work[Array]: ...
    def send_recv(self, send: Array, dst: int, recv: Array, src: int, *, tag: int = 0, **options: Any) -> Work[Array]: ...
    def batch(self, messages: Sequence[tuple[Literal["send", "recv"], Array, int, int]], **options: Any) -> Work[list[Array]]:
        """Several messages in flight together: direction, array, peer and tag of each."""
    def all_reduce_list(self, bufs: Sequence[Array], *, op: Op = "sum", **options: Any) -> Work[list[Array]]: ...
    def broadcast_list(self, bufs: Sequence[Array], root: int = 0, **options: Any) -> Work[list[Array]]: ...
    def reduce_list(self, bufs: Sequence[Array], root: int = 0, *, op: Op = "sum", **options: Any) -> Work[list[Array]]: ...
    def all_gather_list(self, bufs: Sequence[Array], outs: Sequence[Array], **options: Any) -> Work[list[Array]]: ...
    def reduce_scatter_list(self, bufs: Sequence[Array], outs: Sequence[Array], *, op: Op = "sum", **options: Any) -> Work[list[Array]]: ...
    def broadcast_bytes(self, data: Optional[bytes], root: int = 0, **options: Any) -> Work[bytes]:
        """Every rank ends with the root's bytes; the others need not know how many."""
    def all_gather_bytes(self, data: bytes, **options: Any) -> Work[list[bytes]]:
        """Every rank's bytes, of whatever lengths, by rank."""
    def empty(self, shape: Union[int, Sequence[int]], dtype: Any = None) -> Array:
        """An array of zeros in memory that the other ranks of this host read in place: a collective on it copies nothing.

        `dtype` of torch gives a torch tensor; of numpy, or its name, a numpy array. Without, it is `float32` of numpy.
        """
    def bind_device(self, device: int) -> str:
        """Collectives on arrays of CUDA devices run on the devices from here on: without, their numbers go through the host's memory.

        All ranks call it, each with its device. Returns how they run: `"peer"`, by kernels that read the other devices' memory, or `"staged: "`
        and why that cannot be. Memory that those cannot be given where it lies is copied on its device first: `device_copies` says why.
        """
    def device_copies(self) -> Optional[dict[str, Any]]:
        """Of which arrays the other ranks' devices could not read the memory where it lies, since `bind_device`: `buffers` and `bytes`, of all calls, and
        `why`, of the last. Collectives worked on copies of them, on the same device. None where there was none."""
    def bind_nccl(self, device: int) -> str:
        """As `bind_device`, and NCCL takes what it can. Returns its name and version; where what it does not take goes through the host's memory,
        also `"; what it does not take is staged: "` and why. Ranks may share a device only from NCCL 2.30 on, if `NCCL_MULTI_RANK_GPU_ENABLE=1` is
        set for all of them. Raises `Unavailable` where there is no NCCL: it is looked for beside this Python's packages, where pip and torch have
        it, and where the system has libraries; `ALLSTREAM_NCCL_LIBRARY` names another file."""
    def split(self, color: Optional[int], key: int = 0) -> Optional["Comm"]: ...
    def subset(self, ranks: Sequence[int]) -> Optional["Comm"]: ...
    def dup(self) -> "Comm": ...
    def agree(self, flag: bool, timeout: Optional[float] = None) -> Verdict: ...
    def shrink(self, timeout: Optional[float] = None) -> tuple["Comm", Verdict]: ...
    def abort(self, reason: str) -> None: ...
    def check(self) -> None:
        """Raises the cause for which this communicator is dead, if it is."""
    def close(self) -> None:
        """Waits until all that was submitted is done and has left, and says goodbye. Raises what went wrong unnoticed."""
    def stats(self) -> dict[str, int]: ...
    def record(self) -> str: ...
    def set_deterministic(self, on: bool) -> None: ...

def connect(*, address: Optional[str] = None, rank: Optional[int] = None, size: Optional[int] = None, token: Union[str, bytes, None] = None, timeout: Optional[float] = None, heartbeat: Optional[float] = None, link: Optional[str] = None, host_id: Optional[str] = None, listener: Optional[int] = None) -> Comm:
    """Joins a world, and returns when all its ranks are there.

    Without arguments a launcher's environment says who this is (`allstream run`, torchrun, mpirun, srun); where there is none, it is
    a world of one rank. Else `address` is where rank 0 listens, as `"10.0.0.1:4242"`; `token` the secret that all ranks share (`b""` for none),
    `timeout` how many seconds ranks wait for each other, `heartbeat` after how many seconds of silence a rank is lost, `link` one of
    `"auto"`, `"inproc"`, `"shm"`, `"tcp"`, `"rdma"`, `host_id` a label by which ranks count as on one host, `listener` the descriptor of a socket that
    listens there already (of rank 0; it is duplicated).
    """

def connect_node(devices: int, **options: Any) -> list[Comm]:
    """As `connect`, with `devices` ranks in this process: `rank` and `size` count processes."""

def listen_for_ranks(near: Optional[tuple[str, int]] = None) -> tuple[int, str]:
    """Opens a socket where rank 0 may listen, at an address of this host by which other hosts reach it: for a program that tells the other
    ranks by itself where to meet. The descriptor, which the caller closes, and the address are for `connect`. `near` is the host and the
    port of something that all ranks reach. `ALLSTREAM_INTERFACE` and `ALLSTREAM_PORTS` hold.
    """

def local(size: int) -> list[Comm]:
    """A group of `size` ranks in this process, one for each thread."""

def run_command(words: Sequence[str], arguments: Sequence[str]) -> int:
    """The command `allstream` with these arguments; its exit code. `words` start it again: an interpreter and a script, by absolute paths."""

class Buckets:
    """Gradients of one model, reduced over all ranks in buckets while the backward pass still computes.

    `parameters` are arrays as the gradients will be: their types and lengths count, the same on all ranks. A bucket is full when it has
    `bucket_mb` megabytes, by default an eighth of all gradients, at least 1 and at most 25. `op` is "avg" or "sum"; `compress`,
    "bf16" or "f16", halves the bytes of float32. `sharded` gives each rank the mean of those elements alone that it owns (ZeRO stage 1). All
    ranks make one, together.
    """

    def __init__(self, comm: Comm, parameters: Sequence[Array], *, bucket_mb: Optional[float] = None, first_bucket_mb: float = 1.0, op: Literal["avg", "sum"] = "avg", compress: Optional[Literal["bf16", "f16"]] = None, sharded: bool = False) -> None: ...
    def push(self, i: int, grad: Array) -> None:
        """Hands in the gradient of parameter `i`, the last or only one of this step; it must not be touched before `finish`."""
    def accumulate(self, i: int, grad: Array) -> None:
        """Adds a gradient of parameter `i` to those of earlier micro-batches of this step."""
    def weigh(self, samples: float) -> None:
        """The mean of this step is over samples, of which this rank has `samples`. All ranks call it, before the first push of a step."""
    def finish(self) -> list[Array]:
        """Waits until all buckets are reduced; the arrays that were pushed, by parameter."""
    def finish_some(self) -> list[Optional[Array]]:
        """As `finish`, where ranks may have no gradient for some parameters. Where any rank has one, the others reduce zeros and get the result in
        a new array; where no rank has any, the result is None. All ranks call it, also those that have all."""
    def owned(self, i: int) -> range:
        """The elements of parameter `i`, in row-major order, of which this rank gets the mean where buckets are sharded; all, where they are not."""
    def gather(self, weights: Sequence[Array]) -> None:
        """Brings weights together, in place, of which each rank has updated the elements that it owns. All ranks call it, between two steps of
        sharded buckets."""
    def report(self) -> Optional[dict[str, Any]]:
        """Where the time of the last step went, in microseconds, in all and by bucket. None before the first."""
    def close(self) -> None: ...
