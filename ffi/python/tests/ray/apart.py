"""Clusters of Ray that know nothing of each other, nor of what other programs of this machine have left."""

import contextlib
import os
import shutil
import tempfile


@contextlib.contextmanager
def environment():
    """The variables for a program that starts a cluster of its own.

    `ray.init()` joins the cluster that is named in a file of Ray's folder, and a program that is killed leaves that file behind. So each
    cluster has a folder of its own, which is removed at the end. Its name is short, as Ray makes sockets below it.
    """
    folder = tempfile.mkdtemp(prefix="ray-")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    try:
        yield {**kept, "RAY_TMPDIR": folder}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
