"""`ProcessGroup`s of allstream's: torch dispatches its collectives to the methods here, whose names and arguments are torch's."""

import os
import warnings

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Backend, ReduceOp

from ..errors import Error
from ._meeting import meet
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


def _plain(tensor):
    """The memory of a tensor, as elements that allstream has: without its gradient, complex numbers as pairs."""
    if tensor.is_sparse:
        raise ValueError("allstream: sparse tensors are not reduced; give tensor.to_dense()")
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _all_plain(tensors):
    return [_plain(tensor) for tensor in tensors]


def _one(call, tensors):
    """The one tensor that torch's calls for a single device have."""
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


def _flat_like(tensor, count):
    return tensor.new_empty((count,))


class AllstreamBackend(Backend):
    """The backend of one group."""

    def __init__(self, comm, timeout, options):
        super().__init__(comm.rank, comm.size)
        self._comm = comm
        self._timeout = timeout.total_seconds()
        self._options = options
        self._coalesced = None
        # The CUDA device whose tensors the first collective on one had.
        self._device = None
        # Messages have a communicator of their own that is bound to no device: binding is a call of all ranks, and messages are not.
        self._messages = comm.dup() if torch.cuda.is_available() else comm

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

    def set_timeout(self, timeout):
        self._timeout = timeout.total_seconds()

    def _seconds(self, opts):
        """The deadline of a call: its own, or the group's."""
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
            # As torch's own backends: a sum of truths is whether any is.
            name = {"sum": "max", "prod": "min"}.get(name, name)
        options["op"] = name
        return options

    def _on(self, tensor):
        """The communicator, for a collective on tensors of this one's device.

        NCCL takes those on CUDA devices from the first one on, which all ranks call. Where NCCL is not there or cannot, and where `ALLSTREAM_NCCL` is
        "off", they go through the host's memory.
        """
        if tensor.is_cuda and self._device is None:
            self._device = tensor.device
            if os.environ.get("ALLSTREAM_NCCL") != "off":
                self._bind(tensor.device.index)
        return self._comm

    def _bind(self, device):
        # Where one rank cannot, all are told so, and none is bound.
        try:
            self._comm.bind_nccl(device)
        except Error as why:
            self._comm.check()
            warnings.warn(f"allstream: CUDA tensors go through the host's memory: {why}", stacklevel=4)

    def _work(self, works, result, after=None):
        """Of one call, or, between `start_coalescing` and `end_coalescing`, of what is waited for at the end."""
        works = works if isinstance(works, list) else [works]
        work = Work(works, result, after, _cuda_device(result))
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # Collectives on one tensor.

    def allreduce(self, tensors, opts):
        tensor = _one("all_reduce", tensors)
        return self._work(self._on(tensor).all_reduce(_plain(tensor), **self._reduction(opts, tensor)), tensors)

    def allreduce_coalesced(self, tensors, opts):
        options = self._reduction(opts, tensors[0])
        return self._work(self._on(tensors[0]).all_reduce_list(_all_plain(tensors), **options), tensors)

    def broadcast(self, tensors, opts):
        tensor = _one("broadcast", tensors)
        return self._work(self._on(tensor).broadcast(_plain(tensor), opts.rootRank, timeout=self._seconds(opts)), tensors)

    def reduce(self, tensors, opts):
        tensor = _one("reduce", tensors)
        return self._work(self._on(tensor).reduce(_plain(tensor), opts.rootRank, **self._reduction(opts, tensor)), tensors)

    def barrier(self, opts):
        return self._work(self._comm.barrier(timeout=self._seconds(opts)), [])

    # All ranks' tensors.

    def all_gather_single(self, output, input, opts):
        own, to = _plain(input), _plain(output)
        if self._is_own_part(own, to):
            work = self._on(own).all_gather_in_place(to, timeout=self._seconds(opts))
        else:
            work = self._on(own).all_gather(own, out=to, timeout=self._seconds(opts))
        return self._work(work, [output])

    def _is_own_part(self, part, whole):
        """Whether a tensor is this rank's part of the other one, as FSDP gathers: the call is in place then."""
        at = whole.data_ptr() + self.rank() * part.numel() * part.element_size()
        return part.numel() > 0 and part.data_ptr() == at and whole.numel() == self.size() * part.numel()

    def all_gather_single_coalesced(self, outputs, inputs, opts):
        work = self._on(inputs[0]).all_gather_list(_all_plain(inputs), _all_plain(outputs), timeout=self._seconds(opts))
        return self._work(work, outputs)

    def allgather(self, output_tensors, input_tensors, opts):
        outputs, own = _one("all_gather", output_tensors), _one("all_gather", input_tensors)
        work, after = self._gathered(outputs, own, opts)
        return self._work(work, [outputs], after)

    def allgather_coalesced(self, output_lists, input_list, opts):
        works, copies = [], []
        # `output_lists[r][i]` is tensor `i` of rank `r`.
        for i, own in enumerate(input_list):
            work, after = self._gathered([outputs[i] for outputs in output_lists], own, opts)
            works.append(work)
            copies.append(after)
        return self._work(works, output_lists, lambda: [copy() for copy in copies])

    def _gathered(self, outputs, own, opts):
        """Gathers into a list of tensors, whose sizes may differ, by way of one."""
        own, outputs = _plain(own), _all_plain(outputs)
        counts = [output.numel() for output in outputs]
        flat = _flat_like(own, sum(counts))
        work = self._on(own).all_gather(own, out=flat, counts=self._uneven(counts), timeout=self._seconds(opts))
        return work, lambda: _unpack(flat, outputs)

    def _uneven(self, counts):
        return counts if any(count != counts[0] for count in counts) else None

    def reduce_scatter_single(self, output, input, opts):
        own, to, options = _plain(input), _plain(output), self._reduction(opts, output)
        if self._is_own_part(to, own):
            work = self._on(own).reduce_scatter_in_place(own, **options)
        else:
            work = self._on(own).reduce_scatter(own, out=to, **options)
        return self._work(work, [output])

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        options = self._reduction(opts, outputs[0])
        return self._work(self._on(inputs[0]).reduce_scatter_list(_all_plain(inputs), _all_plain(outputs), **options), outputs)

    def reduce_scatter(self, output_tensors, input_tensors, opts):
        output, inputs = _one("reduce_scatter", output_tensors), _one("reduce_scatter", input_tensors)
        plain = _all_plain(inputs)
        counts = self._uneven([tensor.numel() for tensor in plain])
        work = self._on(output).reduce_scatter(_pack(plain), out=_plain(output), counts=counts, **self._reduction(opts, output))
        return self._work(work, output_tensors)

    # One root.

    def gather(self, output_tensors, input_tensors, opts):
        own, root = _plain(_one("gather", input_tensors)), opts.rootRank
        if self.rank() != root:
            return self._work(self._on(own).gather(own, root, timeout=self._seconds(opts)), [])
        outputs = _all_plain(_one("gather", output_tensors))
        flat = _flat_like(own, own.numel() * self.size())
        work = self._on(own).gather(own, root, out=flat, timeout=self._seconds(opts))
        return self._work(work, output_tensors, lambda: _unpack(flat, outputs))

    def scatter(self, output_tensors, input_tensors, opts):
        output, root = _one("scatter", output_tensors), opts.rootRank
        flat = _pack(_all_plain(_one("scatter", input_tensors))) if self.rank() == root else None
        return self._work(self._on(output).scatter(flat, root, out=_plain(output), timeout=self._seconds(opts)), output_tensors)

    # Everyone to everyone.

    def all_to_all_single(self, output, input, output_split_sizes, input_split_sizes, opts):
        to, own = _plain(output), _plain(input)
        counts = {}
        if output_split_sizes or input_split_sizes:
            counts["send_counts"] = _in_elements(own, input_split_sizes, self.size())
            counts["recv_counts"] = _in_elements(to, output_split_sizes, self.size())
        return self._work(self._on(own).all_to_all(own, out=to, **counts, timeout=self._seconds(opts)), [output])

    def alltoall(self, output_tensors, input_tensors, opts):
        outputs, inputs = _all_plain(output_tensors), _all_plain(input_tensors)
        sends, recvs = [tensor.numel() for tensor in inputs], [tensor.numel() for tensor in outputs]
        flat = _flat_like(outputs[0], sum(recvs))
        work = self._on(outputs[0]).all_to_all(_pack(inputs), out=flat, send_counts=sends, recv_counts=recvs, timeout=self._seconds(opts))
        return self._work(work, output_tensors, lambda: _unpack(flat, outputs))

    # Messages.

    def send(self, tensors, dst, tag=0):
        return self._work(self._messages.send(_plain(_one("send", tensors)), dst, tag=tag, timeout=self._timeout), tensors)

    def recv(self, tensors, src, tag=0):
        return self._work(self._messages.recv(_plain(_one("recv", tensors)), src, tag=tag, timeout=self._timeout), tensors)

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

    # Groups of groups, and the end.

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
        for comm in {self._comm, self._messages}:
            comm.abort("torch.distributed was told to abort this group")

    def shutdown(self):
        comms, self._comm, self._messages = (self._messages, self._comm), None, None
        for comm in dict.fromkeys(comms):
            if comm is not None:
                comm.close()


def _pack(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unpack(flat, tensors):
    at = 0
    if flat.is_cuda:
        # Copies may run on another stream than that in whose order its memory was allocated.
        flat.record_stream(torch.cuda.current_stream(flat.device))
    for tensor in tensors:
        tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
        at += tensor.numel()


def _in_elements(tensor, rows, size):
    """How many elements each rank's part has, where torch counts rows."""
    row = tensor.numel() // tensor.size(0) if tensor.dim() and tensor.size(0) else 1
    if not rows:
        if tensor.size(0) % size:
            raise ValueError(f"allstream: {tensor.size(0)} rows cannot be divided among {size} ranks; give split sizes")
        rows = [tensor.size(0) // size] * size
    return [count * row for count in rows]


def _options(timeout):
    return Backend.Options("allstream", timeout=timeout)


def make(opts, backend_options):
    """Makes the backend of a group: torch calls it. Ranks that are not in the group that is split off get none."""
    options = backend_options if backend_options is not None else _options(opts.timeout)
    options._timeout = opts.timeout
    options.global_ranks_in_group = opts.global_ranks_in_group
    options.group_name = opts.group_id
    if opts.split_from:
        return opts.split_from.split(opts.store, opts.global_ranks_in_group, options)
    comm = meet(opts.store, opts.group_rank, opts.group_size, opts.timeout.total_seconds())
    return AllstreamBackend(comm, opts.timeout, options)
