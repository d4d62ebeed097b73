"""What Ray's functions call tensors: one interface for numpy arrays, torch tensors and cupy arrays.

Ray's functions take lists of separate tensors, and the engine takes one contiguous buffer. If the tensors of a list lie one behind the
other in memory (as those of `list(torch.zeros(n, k))` do), they are used in place; else they are copied into, or from, one buffer.
"""

import sys
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np

from allstream import _arrays, errors
from allstream._arrays import kind

NUMPY, TORCH, CUPY = "numpy", "torch", "cupy"


def check_one(array: Any) -> None:
    """Raises what Ray raises for whatever is not a tensor."""
    if kind(array) is None:
        raise RuntimeError(f"Unrecognized tensor type '{type(array)}'. Supported types are: np.ndarray, torch.Tensor, cupy.ndarray.")


def check_list(arrays: Any) -> None:
    """Raises what Ray raises unless `arrays` is a list of at least one tensor."""
    if not isinstance(arrays, list):
        raise RuntimeError(f"The input must be a list of tensors. Got '{type(arrays)}'.")
    if not arrays:
        raise RuntimeError("Got an empty list of tensors.")
    for array in arrays:
        check_one(array)


def dtype(array: Any) -> str:
    """The name of the type of the elements, the same for all three libraries."""
    return str(array.dtype).rsplit(".", 1)[-1]


def count(array: Any) -> int:
    return array.numel() if kind(array) == TORCH else array.size


def itemsize(array: Any) -> int:
    return array.element_size() if kind(array) == TORCH else array.itemsize


def address(array: Any) -> int:
    whose = kind(array)
    if whose == TORCH:
        return array.data_ptr()
    return array.ctypes.data if whose == NUMPY else array.data.ptr


def span(array: Any) -> Tuple[int, int]:
    """The addresses where the memory of a contiguous array begins and ends."""
    begin = address(array)
    return begin, begin + count(array) * itemsize(array)


def contiguous(array: Any) -> bool:
    return array.is_contiguous() if kind(array) == TORCH else bool(array.flags.c_contiguous)


def device(array: Any) -> str:
    whose = kind(array)
    if whose == TORCH:
        return str(array.device)
    return "cpu" if whose == NUMPY else f"cuda:{array.device.id}"


def overlap(arrays: Sequence[Any]) -> bool:
    """Whether two of the arrays share memory. Right only if all are contiguous: others count as if they had no gaps."""
    spans = sorted(span(array) for array in arrays if count(array))
    return any(first[1] > second[0] for first, second in zip(spans, spans[1:]))


def check_alike(arrays: Sequence[Any], like: Any, what: str, same_count: bool = True) -> None:
    """Raises `Invalid` (a ValueError and a RuntimeError) unless all have the type of `like` and, with `same_count`, its length."""
    for index, array in enumerate(arrays):
        if dtype(array) != dtype(like):
            raise errors.Invalid(f"{what}[{index}] has type {dtype(array)}, and the tensor has {dtype(like)}: they must be the same")
        if same_count and count(array) != count(like):
            raise errors.Invalid(
                f"{what}[{index}] has wrong shape {tuple(array.shape)}, expected {tuple(like.shape)}: as many elements as the tensor"
            )


def check_outputs(arrays: Sequence[Any], what: str) -> None:
    """Raises `Invalid` unless each output can be written to, and no two share memory (as the two of `[zeros] * 2` do)."""
    for index, array in enumerate(arrays):
        if kind(array) == NUMPY and not array.flags.writeable:
            raise errors.Invalid(f"{what}[{index}] is read-only, as what ray.get gives is: use a copy of it")
        if kind(array) == TORCH and array.requires_grad:
            raise errors.Invalid(f"{what}[{index}] needs a gradient: use tensor.detach()")
    if overlap(arrays):
        raise errors.Invalid(f"{what} has tensors that share memory: each rank's part needs memory of its own")


def joined(arrays: Sequence[Any], written: bool) -> Optional[Any]:
    """One flat array over the memory of all arrays, if they lie one behind the other in order; else None.

    If one of them is read-only, the flat array is read-only, too; or None, if the operation writes there (`written`).
    """
    first = arrays[0]
    at = address(first)
    for array in arrays:
        if kind(array) != kind(first) or device(array) != device(first) or not contiguous(array) or address(array) != at:
            return None
        at = span(array)[1]
    total = sum(count(array) for array in arrays)
    if kind(first) == TORCH:
        return _joined_torch(first, total, at - address(first))
    if kind(first) != NUMPY or any(_root(array) is not _root(first) for array in arrays):
        return None
    writeable = all(array.flags.writeable for array in arrays)
    if written and not writeable:
        return None
    return np.lib.stride_tricks.as_strided(first, (total,), (first.itemsize,), writeable=writeable)


def _joined_torch(first: Any, total: int, size: int) -> Optional[Any]:
    storage = first.untyped_storage()
    if first.requires_grad or first.data_ptr() - storage.data_ptr() + size > storage.nbytes():
        return None
    return first.as_strided((total,), (1,))


def _root(array: Any) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array if array.base is None else array.base


def flat_like(like: Any, length: int) -> Any:
    """A new flat array of the kind, type and device of `like`."""
    return _arrays.flat(like, length, "a result")


def copy(into: Any, source: Any) -> None:
    """Copies one array into another of the same type and count. numpy and torch mix; cupy arrays are copied only into cupy arrays."""
    if kind(into) == TORCH and kind(source) == TORCH:
        with sys.modules["torch"].no_grad():
            into.copy_(source.reshape(into.shape))
    elif kind(into) == NUMPY and kind(source) == NUMPY:
        np.copyto(into, source.reshape(into.shape))
    elif CUPY in (kind(into), kind(source)):
        into[...] = sys.modules["cupy"].asarray(source).reshape(into.shape)
    elif kind(into) == NUMPY:
        np.copyto(into, _as_numpy(source, into.dtype).reshape(into.shape))
    else:
        torch = sys.modules["torch"]
        as_bytes = torch.from_numpy(np.ascontiguousarray(source).reshape(-1).view(np.uint8))
        into.copy_(as_bytes.view(into.dtype).reshape(into.shape))


def _as_numpy(tensor: Any, as_type: Any) -> Any:
    torch = sys.modules["torch"]
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().view(as_type)


def together(arrays: Sequence[Any]) -> Any:
    """A new flat array with the elements of all arrays, in order."""
    flat = flat_like(arrays[0], sum(count(array) for array in arrays))
    at = 0
    for array in arrays:
        copy(flat[at:at + count(array)], array)
        at += count(array)
    return flat


def spread(flat: Any, arrays: List[Any]) -> None:
    """Copies the parts of a flat array into the arrays, in order."""
    at = 0
    for array in arrays:
        copy(array, flat[at:at + count(array)])
        at += count(array)
