"""Makes new arrays of the same library as a given array. Uses libraries that the program has imported; only `empty` imports one, numpy."""

from __future__ import annotations

import math
import sys

from .errors import Invalid


def kind(array):
    """The library of an array: "numpy", "torch" or "cupy"; None for any other object."""
    for name, type_name in (("numpy", "ndarray"), ("torch", "Tensor"), ("cupy", "ndarray")):
        library = sys.modules.get(name)
        if library is not None and isinstance(array, getattr(library, type_name)):
            return name
    return None


def _new(like, shape, call):
    whose = kind(like)
    if whose == "numpy":
        return sys.modules["numpy"].empty(shape, dtype=like.dtype)
    if whose == "torch":
        return like.new_empty(shape, requires_grad=False)
    if whose == "cupy":
        with like.device:
            return sys.modules["cupy"].empty(shape, dtype=like.dtype)
    raise Invalid(f"{call}: a result is made for arrays of numpy, torch and cupy, found {type(like).__name__}; give one as out=")


def capsule(array, options):
    """`array.__dlpack__(**options)` of an array on a CUDA device. torch exports a tensor only while the tensor's device is current."""
    if kind(array) != "torch":
        return array.__dlpack__(**options)
    with sys.modules["torch"].cuda.device(array.device):
        return array.__dlpack__(**options)


def gathered(like, ranks, call):
    """A new array for `ranks` arrays like `like`, one after another along the first dimension."""
    shape = tuple(getattr(like, "shape", ()))
    return _new(like, (ranks * shape[0], *shape[1:]) if shape else (ranks,), call)


def scattered(like, ranks, call):
    """A new array for one of `ranks` equal parts of `like`: some of its rows if `ranks` divides their number, else a flat array of elements."""
    shape = tuple(getattr(like, "shape", ()))
    if shape and shape[0] % ranks == 0:
        return _new(like, (shape[0] // ranks, *shape[1:]), call)
    return _new(like, (math.prod(shape) // ranks,), call)


def flat(like, count, call):
    """A new flat array of `count` elements, of the kind of `like`."""
    return _new(like, (count,), call)


def alike(like, _, call):
    """A new array of the kind and shape of `like`."""
    return _new(like, tuple(getattr(like, "shape", ())), call)


_NO_BOOLS = "empty: memory that other ranks can write holds no bools; use uint8"


def empty(comm, shape, dtype):
    """See `allstream.empty`."""
    try:
        shape = tuple(int(n) for n in shape)
    except TypeError:
        shape = (int(shape),)
    if any(n < 0 for n in shape):
        raise Invalid(f"empty: the shape is {shape}, expected lengths that are not negative")
    try:
        import numpy
    except ImportError:
        raise Invalid("empty: numpy is needed to make an array, and is not installed: pip install numpy") from None
    dtype = "float32" if dtype is None else dtype
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        if dtype == torch.bool:
            raise Invalid(_NO_BOOLS)
        size = dtype.itemsize
        block = comm._block(math.prod(shape) * size)
        return torch.from_numpy(numpy.asarray(block)).view(dtype).view(shape)
    kind = numpy.dtype(dtype)
    if kind == numpy.bool_:
        raise Invalid(_NO_BOOLS)
    block = comm._block(math.prod(shape) * kind.itemsize)
    return numpy.asarray(block).view(kind).reshape(shape)
