"""Turns torch tensors into what allstream takes: memory without holes, of an element type that allstream has.

A dense tensor may lie in memory in another order of dimensions than row by row (`channels_last`, `x.t()`). Calls that work in place take it as it
lies, and that order is the call's `key`: ranks whose tensors lie in different orders get `Mismatch`. Calls that only move data move elements of a
type that allstream does not have as bytes, and the type is part of the key. Any other tensor is copied into a packed one.
"""

import zlib

import torch

_HELD = {
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}


def _is_as_it_is(tensor):
    """Whether allstream takes the tensor unchanged, as it does most: it lies row by row, and allstream has its type."""
    return tensor.layout is torch.strided and tensor.dtype in _HELD and tensor.is_contiguous() and not tensor.is_neg()


def plain(tensor):
    """The same tensor without its gradient. Raises for sparse and quantized tensors."""
    if tensor.layout is not torch.strided:
        raise ValueError("allstream: sparse tensors are not taken; give tensor.to_dense()")
    if tensor.is_quantized:
        raise ValueError(f"allstream: quantized tensors ({tensor.dtype}) are not taken; give tensor.int_repr(), and its scale apart")
    return tensor.detach()


def _is_lazy(tensor):
    """Whether the tensor's values are the conjugates or negatives of what its memory holds."""
    return tensor.is_conj() or tensor.is_neg()


def _in_elements(tensor, moved):
    """A view of a dense tensor with elements of a type that allstream has, and the key of its own type: 0 unless it is moved as bytes."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype in _HELD:
        return tensor, 0
    if not moved:
        raise ValueError(
            f"allstream: {tensor.dtype} is moved (broadcast, gathers, scatter, all_to_all, send), and not reduced: cast it first, tensor.to(torch.float32)"
        )
    return tensor.reshape(-1).view(torch.uint8), zlib.crc32(str(tensor.dtype).encode())


def as_it_lies(tensor):
    """A view of a dense tensor with its dimensions in the order of memory, and the key of that order: 0 for row by row, else the dimensions' numbers,
    counted from 1, outermost first (1342: channels_last); a hash from 10 dimensions on. None for a tensor with holes."""
    if tensor.is_contiguous():
        return tensor, 0
    order = sorted(range(tensor.dim()), key=lambda i: (tensor.size(i) == 1, -tensor.stride(i)))
    lying = tensor.permute(order)
    if not lying.is_contiguous():
        return None
    numbers = [i + 1 for i in order if tensor.size(i) != 1]
    return lying, int("".join(map(str, numbers))) if tensor.dim() < 10 else zlib.crc32(repr(numbers).encode())


def read(tensor, moved=True):
    """For an input: memory that has its elements row by row, and its key."""
    if _is_as_it_is(tensor):
        return tensor.detach(), 0
    tensor = plain(tensor)
    if _is_lazy(tensor):
        tensor = tensor.resolve_conj().resolve_neg()
    return _in_elements(tensor.contiguous(), moved)


def written(tensor, moved=True):
    """For an output: memory for its elements row by row, its key, and the function that copies the result into the tensor (None: not needed)."""
    if _is_as_it_is(tensor):
        return tensor.detach(), 0, None
    tensor = plain(tensor)
    if tensor.is_contiguous() and not _is_lazy(tensor):
        return *_in_elements(tensor, moved), None
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError("allstream: several elements of the tensor are one in memory (it was expanded), and the result is written there; give tensor.contiguous()")
    packed = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return *_in_elements(packed, moved), lambda: tensor.copy_(_read_here(packed))


def _read_here(packed):
    """Returns `packed`, which the current stream reads next. Its memory may be of another stream; torch must not reuse it before that read."""
    if packed.is_cuda:
        packed.record_stream(torch.cuda.current_stream(packed.device))
    return packed


def in_place(tensor, moved=False, writes=True):
    """For a tensor that is read and, if this rank `writes`, written: its memory, its key, and the function that copies the result back (None: not
    needed)."""
    if _is_as_it_is(tensor):
        return tensor.detach(), 0, None
    tensor = plain(tensor)
    lies = None if _is_lazy(tensor) else as_it_lies(tensor)
    if lies is not None:
        memory, key = _in_elements(lies[0], moved)
        return memory, key ^ lies[1], None
    if not writes:
        return *read(tensor, moved), None
    memory, key, back = written(tensor, moved)
    memory.copy_(read(tensor, moved)[0])
    return memory, key, back


def lists(held):
    """For several tensors: the list of their memories, one key for all, and the function that copies all results back, or None."""
    keys = [one[1] for one in held]
    backs = [one[2] for one in held if len(one) > 2 and one[2] is not None]
    key = zlib.crc32(repr(keys).encode()) if any(keys) else 0
    return [one[0] for one in held], key, (lambda: [back() for back in backs]) if backs else None


def pack(held):
    """One flat tensor with all inputs, one after another."""
    return torch.cat([memory.reshape(-1) for memory, _ in held])


def unpack(flat, held):
    """Copies the results, which lie one after another in `flat`, into the outputs."""
    at = 0
    if flat.is_cuda:
        # The copies may run on another stream than the one on which `flat` was allocated.
        flat.record_stream(torch.cuda.current_stream(flat.device))
    for memory, _, back in held:
        memory.copy_(flat[at : at + memory.numel()].view_as(memory))
        at += memory.numel()
        if back is not None:
            back()


def keyed(key):
    """The option `key` of a call; nothing if the key is 0."""
    return {"key": key} if key else {}
