"""The backend "allstream" of torch.distributed.

    torch.distributed.init_process_group("allstream")     # torch finds it by itself, where the package is installed

It supports torch.distributed's collectives, also on lists of tensors, coalesced, uneven and on objects; messages with tags; sub-groups,
`split_group` and `DeviceMesh`; and on top of these DistributedDataParallel, FSDP2 and DTensor. It refuses sparse tensors and receiving from any rank.
Collectives on CUDA tensors run in the order of the current stream, by NCCL where there is one. Ranks meet through torch's store, where rank 0 puts
the group's secret: whoever can read the store can join the group.
"""

import torch as _torch

_NEEDS = (2, 15)


def _check_version(text):
    numbers = []
    for part in text.split("+")[0].split(".")[:2]:
        digits = "".join(ch for ch in part if ch.isdigit())
        numbers.append(int(digits or 0))
    if tuple(numbers) < _NEEDS:
        raise ImportError(
            f"allstream.torch needs torch {_NEEDS[0]}.{_NEEDS[1]} or newer, whose backends can be written in Python, and found torch {text}: "
            f"pip install 'torch>={_NEEDS[0]}.{_NEEDS[1]}'"
        )


def register():
    """Makes the backend known to torch. torch calls it by itself when "allstream" is asked for and the package is installed."""
    _check_version(_torch.__version__)
    from torch import distributed as dist

    if not dist.is_available():
        raise RuntimeError("allstream.torch: this build of torch has no torch.distributed")
    if "ALLSTREAM" in dist.Backend._plugins:
        return
    from ._backend import make

    dist.Backend.register_backend("allstream", make, extended_api=True, devices=["cpu", "cuda"])
