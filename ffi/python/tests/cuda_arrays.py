"""Arrays on the devices of the CUDA driver for tests (tests/cuda-driver). They are exported by DLPack, as a CUDA library exports its own.

The tests' processes import this module. It uses the driver that `ALLSTREAM_CUDA_LIBRARY` names, as the engine does.
"""

import ctypes
import itertools
import os
import time
from ctypes import byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

import numpy

CUDA, KINDS = 2, {"i": 0, "u": 1, "f": 2, "b": 6}
_driver = ctypes.CDLL(os.environ["ALLSTREAM_CUDA_LIBRARY"])


def cuda(name, *args):
    """Calls a function of the driver, and asserts that it succeeds."""
    code = getattr(_driver, name)(*args)
    assert code == 0, f"{name} answered {code}"


_contexts = {}


def enter(device):
    """Makes the primary context of a device current on this thread."""
    if device not in _contexts:
        cuda("cuInit", 0)
        context = c_void_p()
        cuda("cuDevicePrimaryCtxRetain", byref(context), c_int(device))
        _contexts[device] = context
    cuda("cuCtxSetCurrent", _contexts[device])


class Stream:
    """A CUDA stream, with the attributes of a stream of torch's."""

    def __init__(self, device=0):
        enter(device)
        handle = c_void_p()
        cuda("cuStreamCreate", byref(handle), 1)
        self.cuda_stream, self.device_index = handle.value, device

    def synchronize(self):
        enter(self.device_index)
        cuda("cuStreamSynchronize", c_void_p(self.cuda_stream))

    def launch(self, function):
        """Runs a Python function on the host, in the stream's order."""
        made = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: function())
        _alive.append(made)
        enter(self.device_index)
        cuda("cuLaunchHostFunc", c_void_p(self.cuda_stream), made, None)

    def wait_for(self, other):
        """Whatever is put on this stream from now on runs after what is on `other` now."""
        enter(self.device_index)
        event = c_void_p()
        cuda("cuEventCreate", byref(event), 2)
        cuda("cuEventRecord", event, c_void_p(other.cuda_stream))
        cuda("cuStreamWaitEvent", c_void_p(self.cuda_stream), event, 0)


class _OfConsumer(Stream):
    """An existing stream of a consumer of DLPack, known by its handle."""

    def __init__(self, handle, device):
        self.cuda_stream, self.device_index = handle, device


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _Managed(ctypes.Structure):
    """`DLManagedTensorVersioned`."""

    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("manager", c_void_p), ("deleter", c_void_p), ("flags", c_uint64), ("tensor", _DLTensor)]


_alive = []
# `_given`: the tensors that consumers hold, by address. `deleted`: how often a deleter was called. `_numbers` is not used.
_given, _numbers = {}, itertools.count()
deleted = 0


def on_delete():
    """Called by each deleter; a test may replace it."""


@ctypes.CFUNCTYPE(None, c_void_p)
def _delete(at):
    global deleted
    on_delete()
    del _given[at]
    deleted += 1


def all_came_back(count, deadline=20):
    """Waits until consumers have given back `count` tensors in all, and hold none."""
    end = time.monotonic() + deadline
    while (deleted, len(_given)) != (count, 0):
        assert time.monotonic() < end, f"{deleted} of {count} tensors were given back, and {len(_given)} are away"
        time.sleep(0.001)


class Array:
    """An array on a device. If it has a `stream`, a consumer's work runs after the work that is on that stream."""

    def __init__(self, values, device=0, stream=None, pool=False, room=1):
        values = numpy.ascontiguousarray(values)
        self.shape, self.dtype, self.device, self.stream = values.shape, values.dtype, device, stream
        self.strides = None
        self.device_type = CUDA
        enter(device)
        at = c_uint64()
        # Memory of the driver's own pool, as of `cudaMallocAsync`, or memory as of `cudaMalloc`.
        size = c_size_t(max(values.nbytes, room))
        cuda("cuMemAllocAsync", byref(at), size, c_void_p()) if pool else cuda("cuMemAlloc_v2", byref(at), size)
        self.at = at.value
        cuda("cuMemcpyHtoD_v2", c_uint64(self.at), c_void_p(values.ctypes.data), c_size_t(values.nbytes))

    def put(self, values):
        """Copies new values into the array, in the order of its stream."""
        values = numpy.ascontiguousarray(values)
        _alive.append(values)
        enter(self.device)
        cuda("cuMemcpyHtoDAsync_v2", c_uint64(self.at), c_void_p(values.ctypes.data), c_size_t(values.nbytes), c_void_p(self.stream.cuda_stream))

    def get(self, stream=None):
        """Returns the values: in the order of `stream`, or at once if there is none."""
        values = numpy.empty(self.shape, self.dtype)
        enter(self.device)
        about = (c_void_p(values.ctypes.data), c_uint64(self.at), c_size_t(values.nbytes))
        if stream is None:
            cuda("cuMemcpyDtoH_v2", *about)
        else:
            cuda("cuMemcpyDtoHAsync_v2", *about, c_void_p(stream.cuda_stream))
            stream.synchronize()
        return values

    def __dlpack_device__(self):
        return self.device_type, self.device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        assert max_version is not None and max_version[0] >= 1
        if self.device_type == CUDA:
            assert stream not in (None, 0, 2), "the consumer names a stream that can be waited on"
            if self.stream is not None:
                _OfConsumer(stream, self.device).wait_for(self.stream)
        managed = _Managed(1, 1, None, ctypes.cast(_delete, c_void_p), 0)
        shape = (c_int64 * len(self.shape))(*self.shape)
        strides = (c_int64 * len(self.shape))(*self.strides) if self.strides else None
        tensor = managed.tensor
        tensor.data, tensor.device_type, tensor.device_id = self.at, self.device_type, self.device
        tensor.ndim, tensor.shape = len(self.shape), shape
        if strides is not None:
            tensor.strides = strides
        tensor.code, tensor.bits, tensor.lanes = KINDS[self.dtype.kind], self.dtype.itemsize * 8, 1
        at = ctypes.addressof(managed)
        _given[at] = (managed, shape, strides, self)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [c_void_p, c_char_p, c_void_p]
        return new(at, b"dltensor_versioned", None)
