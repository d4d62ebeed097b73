"""Read-only arrays, as `ray.get` gives them, and as an actor's method gets its arguments: taken wherever an operation only reads."""

import numpy as np
import pytest

import allstream

SIZE = 4


def read_only(values):
    x = np.array(values, dtype="float32")
    x.flags.writeable = False
    return x


def call(rank, name, what):
    import allstream.ray as ar
    import ray.util.collective as col

    x, out = read_only([rank + 1] * 3), np.zeros(3, dtype="float32")
    outs, parts = [np.zeros(3, dtype="float32") for _ in range(SIZE)], [read_only([rank * 10 + r] * 3) for r in range(SIZE)]
    if what == "allgather":
        col.allgather(outs, x, name)
        return [o[0] for o in outs]
    if what == "send":
        if rank % 2:
            col.recv(out, rank - 1, name)
            return [out[0]]
        return col.send(x, rank + 1, name)
    if what == "broadcast":
        col.broadcast(x if rank == 1 else out, 1, name)
        return [out[0]]
    if what == "reduce":
        out += rank + 1
        col.reduce(out if rank == 2 else x, 2, name)
        return [out[0]] if rank == 2 else None
    if what == "reducescatter":
        col.reducescatter(out, parts, name)
        return [out[0]]
    if what == "reducescatter of rows":
        col.reducescatter(out, list(read_only([[rank * 10 + r] * 3 for r in range(SIZE)])), name)
        return [out[0]]
    if what == "gather":
        ar.gather(x, outs if rank == 0 else None, 0, name)
        return [o[0] for o in outs] if rank == 0 else None
    if what == "scatter":
        ar.scatter(out, parts if rank == 3 else None, 3, name)
        return [out[0]]
    ar.all_to_all(outs, parts, name)
    return [o[0] for o in outs]


RESULTS = {
    "allgather": [[1, 2, 3, 4]] * SIZE,
    "send": [None, [1], None, [3]],
    "broadcast": [[2], [0], [2], [2]],
    "reduce": [None, None, [10], None],
    "reducescatter": [[60], [64], [68], [72]],
    "reducescatter of rows": [[60], [64], [68], [72]],
    "gather": [[1, 2, 3, 4], None, None, None],
    "scatter": [[30], [31], [32], [33]],
    "all_to_all": [[r, 10 + r, 20 + r, 30 + r] for r in range(SIZE)],
}


@pytest.mark.parametrize("what", RESULTS)
def test_taken_where_it_is_only_read(pool, group, what):
    assert pool.all(call, group, what) == RESULTS[what]
