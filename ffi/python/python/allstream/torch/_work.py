"""What torch waits for: one or several of allstream's operations, and the copies that are left to do after them."""

import threading

import torch
from torch import distributed as dist


class Work(dist._Work):
    """Operations in flight. `after`, if given, copies their results into the user's tensors. `wait`, `is_completed` or the future runs it, once.

    On host tensors it runs when all operations have succeeded. On tensors of a CUDA `device` the current stream first waits for the
    operations, and `after` puts its copies on that stream. The host waits only for operations that no device runs.
    """

    def __init__(self, works, result, after=None, device=None):
        super().__init__()
        # The call's name in the profiler, if the profiler was on at the call.
        self.name = None
        self._device = device
        # An event behind the copies of `after`, on the stream that runs them.
        self._copied = None
        self._works = works
        self._result = result
        self._after = after
        # What `after` has raised, if it has.
        self._uncopied = None
        self._lock = threading.Lock()
        self._future = None

    def _finish(self):
        with self._lock:
            if self._after is not None:
                try:
                    self._after()
                except Exception as error:
                    # If a copy fails, it is tried again, and so fails again, for whoever asks next.
                    self._uncopied = error
                    raise
                if self._device is not None:
                    self._copied = torch.cuda.current_stream(self._device).record_event()
                self._after = None

    def _order(self):
        """Runs `after`. On a device, makes the current stream wait for the operations and for the copies of `after`."""
        if self._device is None:
            return self._finish()
        stream = torch.cuda.current_stream(self._device)
        for work in self._works:
            work.join(stream)
        self._finish()
        if self._copied is not None:
            stream.wait_event(self._copied)

    def wait(self, timeout=None):
        """Blocks until all operations are over and raises the first failure.

        On a CUDA device without a `timeout`, makes the current stream wait instead, and raises what has failed by then.
        """
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
        """Whether all operations are over, and their results are in the user's tensors (or something has failed). Never waits for an operation.

        On a CUDA device this puts the copies of `after` on the current stream, if nobody has done so yet, and asks whether they are done, too.
        """
        if not all(work.done() for work in self._works):
            return False
        if self.exception() is None:
            try:
                self._order()
            except Exception:  # noqa: BLE001: `exception` has it, and whoever waits gets it.
                return True
        return self._copied is None or self._copied.query()

    def is_success(self):
        return self.is_completed() and self.exception() is None

    def exception(self):
        errors = [work.exception() for work in self._works]
        return next((error for error in errors if error is not None), self._uncopied)

    def result(self):
        return self._result

    def synchronize(self):
        self.wait()

    def get_future(self):
        """A future of the tensors. Its error is a RuntimeError with the text of allstream's error.

        If the operations are not over yet, a thread of the group completes the future. The future's callbacks are allowed to wait."""
        with self._lock:
            if self._future is not None:
                return self._future
            ended = torch.futures.Future(devices=None if self._device is None else [self._device])
            # torch's `set_exception` tells only Python code of the error. C++ code, as that of DistributedDataParallel, would take the
            # exception for the tensors, and the process would die. What a `then` callback raises is an error to both.
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
