"""What goes wrong, as exceptions: each says what was being done, on which rank, what was expected and found, and what to do.

All derive from `Error`, a `RuntimeError`. Their fields are those of the engine's error; `rank` and the like are ranks of the failed communicator.
"""

from __future__ import annotations

import builtins as _builtins


class Error(RuntimeError):
    """Why an operation, a connection or a call failed."""

    #: The file of this rank's flight recorder, where the error has ended a communicator: `allstream trace` reads it.
    record: str | None = None


class Invalid(Error, ValueError):
    """A call that cannot be carried out as it is: `call`, `problem`. Nothing was submitted."""


class NotAnArray(Invalid, TypeError):
    """An object that is no array was given where one belongs."""


class QueueFull(Error):
    """This communicator has 1,048,576 unfinished operations, which is the limit; wait for some, then call again."""


class Timeout(Error, _builtins.TimeoutError):
    """An operation was the oldest unfinished one for longer than its deadline.

    `operation`, `rank` (whose deadline passed), `after` (seconds), `missing` (ranks that it waited for, and what is known of each).
    """


class NoVerdict(Error, _builtins.TimeoutError):
    """An `agree` or `shrink` came to no verdict in time: `call`, `rank`, `missing`."""


class PeerLost(Error, ConnectionError):
    """A rank died, fell silent or left: `rank`, `world_rank`, `how`, `operation`."""


class Link(Error, ConnectionError):
    """A connection that carries data broke, although both of its ranks are alive: `kind`, `rank`, `peer`, `problem`."""


class Mismatch(Error):
    """Two ranks called different operations: `number`, `rank` and `ours`, `peer` and `theirs`."""


class Aborted(Error):
    """A rank called `abort`: `by`, `reason`."""


class Rendezvous(Error, _builtins.TimeoutError):
    """The ranks of a world did not meet: `address`, `rank` (that gave up), `problem` (with the ranks that are missing)."""


class Refused(Error, ConnectionError):
    """A peer could not prove that it belongs to the job, or speaks another version: `peer`, `problem`."""


class Unavailable(Error):
    """The call needs something that this machine does not have: `what`, `problem`."""


class System(Error):
    """The system refused a call: `doing`, `problem`."""


class Cuda(Error):
    """The CUDA driver refused a call: `doing`, `device`, `call`, `code`, `name`."""


class Library(Error):
    """A library that runs whole collectives, such as NCCL, has failed: `library`, `rank`, `problem`."""


class Protocol(Error):
    """A peer sent something that breaks the protocol: `peer`, `problem`."""


def made(kind: str, text: str, fields: dict) -> Error:
    """Makes an exception of the class named `kind`, with `fields` as its attributes. The compiled module calls this."""
    exception = globals()[kind](text)
    for name, value in fields.items():
        setattr(exception, name, value)
    return exception
