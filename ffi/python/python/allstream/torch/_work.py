"""What torch waits for: one or several operations of allstream's, and what is left to do when they are over."""

import threading

import torch
from torch import distributed as dist


class Work(dist._Work):
    """Operations in flight. `after`, if given, runs once, when all have succeeded, before anybody is told.

    Those on tensors of a CUDA `device` are waited for by the current stream, as torch's users know it of NCCL, and not by the host.
    """

    def __init__(self, works, result, after=None, device=None):
        super().__init__()
        # Of a call that the profiler shows, its name there.
        self.name = None
        self._device = device
        # The point behind the copies of `after`, on the stream that they were put on.
        self._copied = None
        self._works = works
        self._result = result
        self._after = after
        self._lock = threading.Lock()
        self._future = None

    def _finish(self):
        with self._lock:
            after, self._after = self._after, None
            if after is not None:
                after()
                if self._device is not None:
                    self._copied = torch.cuda.current_stream(self._device).record_event()

    def _order(self):
        """Finishes; on a device its current stream waits for the operations, and for the copies behind them."""
        if self._device is None:
            return self._finish()
        stream = torch.cuda.current_stream(self._device)
        for work in self._works:
            work.join(stream)
        self._finish()
        if self._copied is not None:
            stream.wait_event(self._copied)

    def wait(self, timeout=None):
        """Blocks until all are over, or the current stream of their CUDA device waits for them. Raises the first failure."""
        if self.name is not None and torch.autograd._profiler_enabled():
            with torch._C._profiler._RecordFunctionFast(f"allstream:{self.name}.wait"):
                return self._wait(timeout)
        return self._wait(timeout)

    def _wait(self, timeout):
        seconds = timeout.total_seconds() if timeout is not None else 0
        if self._device is None or seconds > 0:
            for work in self._works:
                work.wait(seconds if seconds > 0 else None)
        self._order()
        return True

    def is_completed(self):
        return all(work.done() for work in self._works)

    def is_success(self):
        return self.is_completed() and self.exception() is None

    def exception(self):
        return next((error for error in (work.exception() for work in self._works) if error is not None), None)

    def result(self):
        return self._result

    def synchronize(self):
        self.wait()

    def get_future(self):
        """A future of the tensors, which a thread of the group's completes: what is called then may wait. Its error is a RuntimeError, with the text of
        allstream's."""
        with self._lock:
            if self._future is not None:
                return self._future
            ended = torch.futures.Future(devices=None if self._device is None else [self._device])
            # `set_exception` of torch's would only hand the exception to who asks from Python: C++, as DistributedDataParallel is, takes it for
            # the tensors, and the process dies. What a callback raises is an error to all.
            failure = []
            future = self._future = ended.then(lambda ended: _raised(failure) or ended.value())
        left = [len(self._works)]

        def over(_):
            with self._lock:
                left[0] -= 1
                if left[0] > 0:
                    return
            error = self.exception()
            if error is None:
                try:
                    self._order()
                except Exception as raised:  # noqa: BLE001: whatever it is, the future's owner is told.
                    error = raised
            if error is not None:
                failure.append(error)
            ended.set_result(self._result if error is None else [])

        if not self._works:
            ended.set_result(self._result)
        for work in self._works:
            work.add_done_callback(over)
        return future


def _raised(failure):
    for error in failure:
        raise error
