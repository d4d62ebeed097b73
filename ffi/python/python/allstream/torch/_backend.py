"""The backend of a torch `ProcessGroup`: torch dispatches its collectives to the methods here, whose names and arguments are torch's."""

import functools
import warnings

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Backend, ReduceOp

from .._devices import bind
from ..errors import Error
from ._meeting import meet
from ._tensors import in_place, keyed, lists, pack, read, unpack, written
from ._work import Work

_OPS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}


def _one(call, tensors):
    """The only tensor of a list; torch gives lists, although a rank has a single device."""
    if len(tensors) != 1:
        raise ValueError(f"allstream: {call} takes one tensor for each rank, found {len(tensors)}")
    return tensors[0]


def _cuda_device(result):
    """The CUDA device of the tensors of a result, which may be lists; None where they are on the host."""
    while isinstance(result, (list, tuple)):
        if not result:
            return None
        result = result[0]
    return result.device if result.is_cuda else None


def _flat(memory, count):
    """A new flat tensor of `count` elements, like `memory`."""
    return memory.new_empty((count,))


def _alike(name, tensors):
    """The tensors, which must all have as many elements."""
    counts = [tensor.numel() for tensor in tensors]
    if any(count != counts[0] for count in counts):
        raise ValueError(f"allstream: {name} takes tensors of one size, found {counts} elements")
    return tensors


def _all(tensors):
    """The tensors in a list, or in lists in a list."""
    return [inner for tensor in tensors for inner in _all(tensor)] if isinstance(tensors, (list, tuple)) else [tensors]


def _shown(name):
    """Shows a call to torch's profiler under the name `allstream:<name>`, with the sizes of its tensors."""

    def around(method):
        @functools.wraps(method)
        def call(self, *args):
            if not torch.autograd._profiler_enabled():
                return method(self, *args)
            tensors = [tensor for arg in args for tensor in _all(arg) if isinstance(tensor, torch.Tensor)]
            with torch._C._profiler._RecordFunctionFast(f"allstream:{name}", tensors):
                work = method(self, *args)
            if work is not None:
                work.name = name
            return work

        return call

    return around


# Keeps Python objects alive: the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL keeps only the C++ half of a backend.
_kept = set()


class AllstreamBackend(Backend):
    """The backend of one group."""

    def __init__(self, comm, timeout, options):
        super().__init__(comm.rank, comm.size)
        self._comm = comm
        self._timeout = timeout.total_seconds()
        self._options = options
        self._coalesced = None
        # The number of collectives that were called so far.
        self._calls = 0
        # The CUDA device of the first collective on CUDA tensors.
        self._device = None
        # How collectives on CUDA tensors run, in words; None before the first such collective.
        self.device_path = None
        # If there is CUDA, messages have their own communicator, bound to no device: binding takes a call of all ranks, a message only of two.
        self._messages = comm.dup() if torch.cuda.is_available() else comm
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            _kept.add(self)

    # What torch asks of a backend.

    def getBackendName(self):
        return "allstream"

    @property
    def options(self):
        return self._options

    @property
    def supports_splitting(self):
        return True

    @property
    def supports_coalescing(self):
        return True

    def _get_sequence_number_for_group(self):
        return self._calls

    def set_timeout(self, timeout):
        self._timeout = timeout.total_seconds()

    def _seconds(self, opts):
        """The timeout of a call, in seconds: its own, or the group's."""
        own = opts.timeout.total_seconds() if opts is not None else 0
        return own if own > 0 else self._timeout

    def _reduction(self, opts, tensor):
        """The options of a reduction."""
        op = opts.reduceOp
        kind = op.op
        options = {"timeout": self._seconds(opts)}
        if kind == ReduceOp.PREMUL_SUM:
            options["scale"] = float(op.factor)
            return options
        name = _OPS.get(kind)
        if name is None:
            raise ValueError(f"allstream: the reduction {op} is not known")
        if tensor.is_complex() and name not in ("sum", "avg"):
            raise ValueError(f"allstream: {name} is not defined on complex numbers")
        if tensor.dtype == torch.bool:
            # As in torch's own backends, a sum of booleans is true if any of them is, a product if all are.
            name = {"sum": "max", "prod": "min"}.get(name, name)
        options["op"] = name
        return options

    def _on(self, tensor):
        """The communicator for a collective on tensors of the device of `tensor`.

        The first collective on CUDA tensors, which all ranks call, binds the communicator to the ranks' devices (`allstream._devices.bind`): NCCL
        runs such collectives, or allstream's own kernels do, or the data goes through the host's memory.
        """
        if tensor.is_cuda and self._device is None:
            self.device_path = bind(self._comm, tensor.device.index, stacklevel=4)
            self._device = tensor.device
        return self._comm

    def _work(self, works, result, after=None):
        """The `Work` of a call. Between `start_coalescing` and `end_coalescing`, it becomes a part of the `Work` that the latter returns."""
        works = works if isinstance(works, list) else [works]
        work = Work(works, result, after, _cuda_device(result))
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _collective(self, works, result, after=None):
        self._calls += 1
        return self._work(works, result, after)

    # Collectives on one tensor.

    @_shown("all_reduce")
    def allreduce(self, tensors, opts):
        tensor = _one("all_reduce", tensors)
        memory, key, back = in_place(tensor)
        return self._collective(self._on(tensor).all_reduce(memory, **keyed(key), **self._reduction(opts, tensor)), tensors, back)

    @_shown("all_reduce")
    def allreduce_coalesced(self, tensors, opts):
        options = self._reduction(opts, tensors[0])
        memory, key, back = lists([in_place(tensor) for tensor in tensors])
        return self._collective(self._on(tensors[0]).all_reduce_list(memory, **keyed(key), **options), tensors, back)

    @_shown("broadcast")
    def broadcast(self, tensors, opts):
        tensor = _one("broadcast", tensors)
        memory, key, back = in_place(tensor, moved=True, writes=self.rank() != opts.rootRank)
        return self._collective(self._on(tensor).broadcast(memory, opts.rootRank, **keyed(key), timeout=self._seconds(opts)), tensors, back)

    @_shown("reduce")
    def reduce(self, tensors, opts):
        tensor = _one("reduce", tensors)
        memory, key, back = in_place(tensor, writes=self.rank() == opts.rootRank)
        work = self._on(tensor).reduce(memory, opts.rootRank, **keyed(key), **self._reduction(opts, tensor))
        return self._collective(work, tensors, back)

    @_shown("barrier")
    def barrier(self, opts):
        return self._collective(self._comm.barrier(timeout=self._seconds(opts)), [])

    @_shown("monitored_barrier")
    def monitored_barrier(self, opts, wait_all_ranks=False):
        """A barrier whose error names all ranks that have not come, whatever `wait_all_ranks` says."""
        self._collective(self._comm.barrier(timeout=self._seconds(opts)), []).wait()

    # All ranks' tensors.

    @_shown("all_gather")
    def all_gather_single(self, output, input, opts):
        (own, key), (to, _, back) = read(input), written(output)
        if back is None and self._is_own_part(own, to):
            work = self._on(own).all_gather_in_place(to, **keyed(key), timeout=self._seconds(opts))
        else:
            work = self._on(own).all_gather(own, out=to, **keyed(key), timeout=self._seconds(opts))
        return self._collective(work, [output], back)

    def _is_own_part(self, part, whole):
        """Whether `part` is this rank's part of the memory of `whole`, as in FSDP."""
        at = whole.data_ptr() + self.rank() * part.numel() * part.element_size()
        return part.numel() > 0 and part.data_ptr() == at and whole.numel() == self.size() * part.numel()

    @_shown("all_gather")
    def all_gather_single_coalesced(self, outputs, inputs, opts):
        own, key, _ = lists([read(input) for input in inputs])
        to, _, back = lists([written(output) for output in outputs])
        work = self._on(inputs[0]).all_gather_list(own, to, **keyed(key), timeout=self._seconds(opts))
        return self._collective(work, outputs, back)

    @_shown("all_gather")
    def allgather(self, output_tensors, input_tensors, opts):
        outputs, own = _one("all_gather", output_tensors), _one("all_gather", input_tensors)
        work, after = self._gathered(outputs, own, opts)
        return self._collective(work, [outputs], after)

    @_shown("all_gather")
    def allgather_coalesced(self, output_lists, input_list, opts):
        works, copies = [], []
        # `output_lists[r][i]` is tensor `i` of rank `r`.
        for i, own in enumerate(input_list):
            work, after = self._gathered([outputs[i] for outputs in output_lists], own, opts)
            works.append(work)
            copies.append(after)
        return self._collective(works, output_lists, lambda: [copy() for copy in copies])

    def _gathered(self, outputs, own, opts):
        """Gathers into one flat tensor, and returns the work, and the function that copies the parts into a list of tensors of any sizes."""
        (own, key), held = read(own), [written(output) for output in outputs]
        counts = [memory.numel() for memory, _, _ in held]
        flat = _flat(own, sum(counts))
        work = self._on(own).all_gather(own, out=flat, counts=self._uneven(counts), **keyed(key), timeout=self._seconds(opts))
        return work, lambda: unpack(flat, held)

    def _uneven(self, counts):
        return counts if any(count != counts[0] for count in counts) else None

    @_shown("reduce_scatter")
    def reduce_scatter_single(self, output, input, opts):
        (own, _), (to, _, back), options = read(input, moved=False), written(output, moved=False), self._reduction(opts, output)
        if back is None and self._is_own_part(to, own):
            # In place, an algorithm may write to the other ranks' parts of the input, which torch's callers expect to stay as they are.
            flat = _flat(own, to.numel())
            work = self._on(own).reduce_scatter(own, out=flat, **options)
            return self._collective(work, [output], lambda: unpack(flat, [(to, None, None)]))
        work = self._on(own).reduce_scatter(own, out=to, **options)
        return self._collective(work, [output], back)

    @_shown("reduce_scatter")
    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        options = self._reduction(opts, outputs[0])
        own, _, _ = lists([read(input, moved=False) for input in inputs])
        to, _, back = lists([written(output, moved=False) for output in outputs])
        return self._collective(self._on(inputs[0]).reduce_scatter_list(own, to, **options), outputs, back)

    @_shown("reduce_scatter")
    def reduce_scatter(self, output_tensors, input_tensors, opts):
        output, inputs = _one("reduce_scatter", output_tensors), _one("reduce_scatter", input_tensors)
        own, (to, _, back) = [read(input, moved=False) for input in inputs], written(output, moved=False)
        counts = self._uneven([memory.numel() for memory, _ in own])
        work = self._on(output).reduce_scatter(pack(own), out=to, counts=counts, **self._reduction(opts, output))
        return self._collective(work, output_tensors, back)

    # One root.

    @_shown("gather")
    def gather(self, output_tensors, input_tensors, opts):
        (own, key), root = read(_one("gather", input_tensors)), opts.rootRank
        if self.rank() != root:
            return self._collective(self._on(own).gather(own, root, **keyed(key), timeout=self._seconds(opts)), [])
        held = [written(output) for output in _alike("gather", _one("gather", output_tensors))]
        flat = _flat(own, own.numel() * self.size())
        work = self._on(own).gather(own, root, out=flat, **keyed(key), timeout=self._seconds(opts))
        return self._collective(work, output_tensors, lambda: unpack(flat, held))

    @_shown("scatter")
    def scatter(self, output_tensors, input_tensors, opts):
        output, root = _one("scatter", output_tensors), opts.rootRank
        to, key, back = written(output)
        inputs = _alike("scatter", _one("scatter", input_tensors)) if self.rank() == root else []
        flat = pack([read(input) for input in inputs]) if self.rank() == root else None
        work = self._on(output).scatter(flat, root, out=to, **keyed(key), timeout=self._seconds(opts))
        return self._collective(work, output_tensors, back)

    # Everyone to everyone.

    @_shown("all_to_all")
    def all_to_all_single(self, output, input, output_split_sizes, input_split_sizes, opts):
        (own, key), (to, _, back) = read(input), written(output)
        counts = {}
        if output_split_sizes or input_split_sizes:
            counts["send_counts"] = _in_elements(input, own, input_split_sizes, self.size())
            counts["recv_counts"] = _in_elements(output, to, output_split_sizes, self.size())
        return self._collective(self._on(own).all_to_all(own, out=to, **counts, **keyed(key), timeout=self._seconds(opts)), [output], back)

    @_shown("all_to_all")
    def alltoall(self, output_tensors, input_tensors, opts):
        held, own = [written(output) for output in output_tensors], [read(input) for input in input_tensors]
        sends, recvs = [memory.numel() for memory, _ in own], [memory.numel() for memory, _, _ in held]
        flat = _flat(held[0][0], sum(recvs))
        options = {"send_counts": sends, "recv_counts": recvs, **keyed(own[0][1]), "timeout": self._seconds(opts)}
        work = self._on(output_tensors[0]).all_to_all(pack(own), out=flat, **options)
        return self._collective(work, output_tensors, lambda: unpack(flat, held))

    # Messages.

    @_shown("send")
    def send(self, tensors, dst, tag=0):
        memory, key, _ = in_place(_one("send", tensors), moved=True, writes=False)
        return self._work(self._messages.send(memory, dst, tag=tag, **keyed(key), timeout=self._timeout), tensors)

    @_shown("recv")
    def recv(self, tensors, src, tag=0):
        memory, key, back = in_place(_one("recv", tensors), moved=True)
        return self._work(self._messages.recv(memory, src, tag=tag, **keyed(key), timeout=self._timeout), tensors, back)

    def recv_anysource(self, tensors, tag=0):
        raise NotImplementedError("allstream: receiving from any rank is not supported; name the rank with src=")

    def allreduce_sparse(self, tensors, opts):
        raise NotImplementedError("allstream: sparse tensors are not reduced; give tensor.to_dense()")

    # Several calls that are waited for together.

    def start_coalescing(self):
        self._coalesced = []

    def end_coalescing(self):
        works, self._coalesced = self._coalesced or [], None

        def after():
            for work in works:
                work._finish()

        device = next((work._device for work in works if work._device is not None), None)
        return Work([inner for work in works for inner in work._works], [], after, device)

    # Groups that are split off this one, and the end.

    def split(self, store, ranks, opts):
        ranks = list(ranks)
        is_member = self.rank() in ranks
        comm = self._comm.split(min(ranks) if is_member else None, ranks.index(self.rank()) if is_member else 0)
        if comm is None:
            return None
        options = opts if opts is not None else _options(self._options._timeout)
        above = self._options.global_ranks_in_group
        options.global_ranks_in_group = [above[rank] for rank in ranks] if len(above) == self.size() else ranks
        return AllstreamBackend(comm, options._timeout, options)

    def perform_nocolor_split(self, _device):
        self._comm.split(None)

    def abort(self):
        _kept.discard(self)
        for comm in {self._comm, self._messages}:
            comm.abort("torch.distributed was told to abort this group")

    def shutdown(self):
        """Closes the communicators. torch destroys the group only if this does not raise, so a failure not reported before becomes a warning."""
        _kept.discard(self)
        for comm in dict.fromkeys((self._messages, self._comm)):
            try:
                comm.close()
            except Error as why:
                warnings.warn(f"allstream: a group is destroyed that has failed: {why}", stacklevel=3)


def _in_elements(tensor, memory, rows, size):
    """The number of elements of each rank's part in a tensor's memory; torch counts in rows, and an empty `rows` means equal parts."""
    row = memory.numel() // tensor.size(0) if tensor.dim() and tensor.size(0) else 1
    if not rows:
        if tensor.size(0) % size:
            raise ValueError(f"allstream: {tensor.size(0)} rows cannot be divided among {size} ranks; give split sizes")
        rows = [tensor.size(0) // size] * size
    return [count * row for count in rows]


def _options(timeout):
    return Backend.Options("allstream", timeout=timeout)


def make(opts, backend_options):
    """Makes the backend of a group; torch calls this. For a group that is split off another one, ranks outside it get None."""
    options = backend_options if backend_options is not None else _options(opts.timeout)
    options._timeout = opts.timeout
    options.global_ranks_in_group = opts.global_ranks_in_group
    options.group_name = opts.group_id
    if opts.split_from:
        return opts.split_from.split(opts.store, opts.global_ranks_in_group, options)
    comm = meet(opts.store, opts.group_rank, opts.group_size, opts.timeout.total_seconds())
    return AllstreamBackend(comm, opts.timeout, options)
