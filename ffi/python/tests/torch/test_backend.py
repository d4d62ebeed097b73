"""Every call of torch.distributed has the same result on the backend "allstream" as on "gloo"."""

import importlib.metadata
import subprocess
import sys

import pytest

# This program runs on both backends, and every line that it prints is compared.
CALLS = """
def show(name, *tensors):
    print(name, [tensor.tolist() for tensor in tensors])

def mine(count=6, dtype=torch.float32):
    return (torch.arange(count) + 10 * rank).to(dtype)

def run():
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            tensor = torch.full((5,), rank + 1).to(dtype)
            dist.all_reduce(tensor, op=op)
            show(f"all_reduce {dtype} {op}", tensor.float())
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        tensor = mine(dtype=torch.int32)
        dist.all_reduce(tensor, op=op)
        show(f"bits {op}", tensor)
    tensor = torch.complex(mine(), -mine())
    dist.all_reduce(tensor)
    show("complex", torch.view_as_real(tensor))
    tensor = mine()
    dist.broadcast(tensor, 1)
    show("broadcast", tensor)
    tensor = mine()
    dist.reduce(tensor, 2)
    if rank == 2:
        show("reduce", tensor)
    boxes = [torch.zeros(6) for _ in range(size)]
    dist.all_gather(boxes, mine())
    show("all_gather", *boxes)
    box = torch.zeros(6 * size)
    dist.all_gather_into_tensor(box, mine())
    show("all_gather_into_tensor", box)
    boxes = [torch.zeros(2, 3) for _ in range(size)] if rank == 1 else None
    dist.gather(mine().view(2, 3), boxes, dst=1)
    show("gather", *(boxes or []))
    box = torch.zeros(6)
    dist.scatter(box, [mine() + i for i in range(size)] if rank == 2 else None, src=2)
    show("scatter", box)
    box = torch.zeros(2)
    dist.reduce_scatter_tensor(box, mine())
    show("reduce_scatter_tensor", box)
    box = torch.zeros(4)
    dist.reduce_scatter(box, [torch.full((4,), float(rank + i)) for i in range(size)])
    show("reduce_scatter", box)
    box = torch.zeros(6)
    dist.all_to_all_single(box, mine())
    show("all_to_all_single", box)
    sends = [rank + 1] * size
    recvs = [i + 1 for i in range(size)]
    box = torch.zeros(sum(recvs), 2)
    dist.all_to_all_single(box, torch.full((sum(sends), 2), float(rank)), recvs, sends)
    show("uneven all_to_all_single", box)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    print("objects", objects)
    objects = [{"weights": [1, 2]}, 3] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, src=0)
    print("from the root", objects)
    found = [None]
    dist.scatter_object_list(found, ["a", "bb", "ccc"] if rank == 0 else None, src=0)
    print("scattered", found)
    if rank == 0:
        dist.send(mine(), 1, tag=7)
        dist.send(mine() + 1, 1, tag=8)
    elif rank == 1:
        second, first = torch.zeros(6), torch.zeros(6)
        works = [dist.irecv(second, 0, tag=8), dist.irecv(first, 0, tag=7)]
        for work in works:
            work.wait()
        show("tags", first, second)
    box = torch.zeros(6)
    messages = [dist.P2POp(dist.isend, mine(), (rank + 1) % size), dist.P2POp(dist.irecv, box, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    show("batch", box)
    evens = dist.new_group([0, 2])
    if rank in (0, 2):
        tensor = mine()
        dist.all_reduce(tensor, group=evens)
        show("sub-group", tensor)
    tensor = mine()
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    show("future", *future.wait())
    work.wait()
    dist.barrier()
"""


def test_calls_give_what_gloo_gives(torch_job):
    results = {}
    for backend in ("gloo", "allstream"):
        results[backend] = torch_job(3, CALLS + f"\nstart({backend!r})\nrun()\nend()\n").outputs()
    for rank in range(3):
        assert results["allstream"][rank] == results["gloo"][rank]
        assert len(results["gloo"][rank]) > 50


def test_what_is_completed_is_in_the_tensors(torch_job):
    # Nobody waits: a program that calls the backend itself may ask until the work is completed, and then reads. Gathers end with a copy into the
    # user's tensors. (torch wraps the work of `dist.all_gather`, and its wrapper does not ask: `get_future().done()` does.)
    outputs = torch_job(
        2,
        """
        start()
        def completed(work):
            end = time.monotonic() + 60
            while not work.is_completed():
                assert time.monotonic() < end, "not completed"
                time.sleep(0.001)
            assert work.is_success() and work.exception() is None
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        boxes = [torch.zeros(3), torch.zeros(3)]
        completed(backend.allgather([boxes], [torch.full((3,), rank + 1.0)], dist.distributed_c10d.AllgatherOptions()))
        assert [box.tolist() for box in boxes] == [[1.0] * 3, [2.0] * 3], boxes
        # A view that does not lie row by row, so that the result is copied back.
        plane = torch.full((4, 4), rank + 1.0)
        completed(backend.allreduce([plane[:, 1]], dist.AllreduceOptions()))
        assert plane[:, 1].tolist() == [3.0] * 4 and plane[0, 0] == rank + 1, plane
        boxes = [torch.zeros(3), torch.zeros(3)]
        future = dist.all_gather(boxes, torch.full((3,), rank + 1.0), async_op=True).get_future()
        end_of_wait = time.monotonic() + 60
        while not future.done():
            assert time.monotonic() < end_of_wait, "not done"
            time.sleep(0.001)
        assert [box.tolist() for box in boxes] == [[1.0] * 3, [2.0] * 3], boxes
        print("done")
        end()
        """,
    ).outputs()
    assert outputs == [["done"]] * 2


def test_calls_that_gloo_has_not(torch_job):
    outputs = torch_job(
        3,
        """
        start()
        tensor = torch.full((4,), float(rank))
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        assert tensor.tolist() == [1.0] * 4
        tensor = torch.tensor([rank == 0, False])
        dist.all_reduce(tensor)
        assert tensor.tolist() == [True, False]
        boxes = [torch.zeros(i + 1) for i in range(size)]
        dist.all_gather(boxes, torch.full((rank + 1,), float(rank)))
        assert [box.tolist() for box in boxes] == [[0.0], [1.0] * 2, [2.0] * 3]
        boxes = [torch.zeros(i + 1) for i in range(size)]
        dist.all_to_all(boxes, [torch.full((rank + 1,), float(rank)) for _ in range(size)])
        assert [box.tolist() for box in boxes] == [[0.0], [1.0] * 2, [2.0] * 3]
        with dist._coalescing_manager(async_ops=True) as several:
            first, second = torch.ones(2), torch.ones(3)
            dist.all_reduce(first)
            dist.all_reduce(second)
        several.wait()
        assert first.tolist() == [3.0] * 2 and second.tolist() == [3.0] * 3
        with dist._coalescing_manager(async_ops=True) as several:
            boxes = [torch.zeros(3), torch.zeros(6)]
            dist.all_gather_into_tensor(boxes[0], torch.full((1,), float(rank)))
            dist.all_gather_into_tensor(boxes[1], torch.full((2,), float(rank)))
        several.wait()
        assert boxes[0].tolist() == [0.0, 1.0, 2.0] and boxes[1].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        with dist._coalescing_manager(async_ops=True) as several:
            boxes = [torch.zeros(1), torch.zeros(2)]
            dist.reduce_scatter_tensor(boxes[0], torch.arange(3.0))
            dist.reduce_scatter_tensor(boxes[1], torch.ones(6))
        several.wait()
        assert boxes[0].tolist() == [3.0 * rank] and boxes[1].tolist() == [3.0] * 2
        whole = torch.zeros(6)
        whole[2 * rank : 2 * rank + 2] = rank + 1
        dist.all_gather_into_tensor(whole, whole[2 * rank : 2 * rank + 2])
        assert whole.tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
        dist.reduce_scatter_tensor(whole[2 * rank : 2 * rank + 2], whole)
        scattered = [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
        scattered[2 * rank : 2 * rank + 2] = [3.0 * (rank + 1)] * 2
        assert whole.tolist() == scattered, "the other ranks' parts of the input stay"
        parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
        dist.broadcast(parameter, 2)
        assert parameter.tolist() == [2.0] * 3
        memory = allstream.empty(1000, torch.float32)
        memory.fill_(rank)
        dist.all_reduce(memory)
        assert memory[0] == 3
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("all",))
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=mesh.get_group("all"))
        assert tensor.item() == 3
        dist.destroy_process_group()
        print("done")
        """,
    ).outputs()
    assert outputs == [["done"]] * 3


def test_bad_input_is_refused_by_name_and_nothing_is_submitted(torch_job):
    outputs = torch_job(
        2,
        """
        start()
        def refused(call, kind, words):
            try:
                call()
            except kind as error:
                assert words in str(error), error
            else:
                raise AssertionError(f"not refused: {words}")
        ones = torch.ones(4)
        refused(lambda: dist.all_reduce(torch.ones(1).expand(4)), ValueError, "tensor.contiguous()")
        refused(lambda: dist.all_reduce(torch.zeros(4, dtype=torch.float8_e8m0fnu)), ValueError, "float8_e8m0fnu is moved")
        refused(lambda: dist.all_reduce(torch.ones(3).to_sparse()), (ValueError, NotImplementedError, RuntimeError), "parse")
        refused(lambda: dist.recv(ones), NotImplementedError, "from any rank")
        refused(lambda: dist.all_reduce(torch.zeros(2, dtype=torch.complex64), op=dist.ReduceOp.MAX), Exception, "complex")
        refused(lambda: dist.reduce_scatter_tensor(torch.zeros(3), ones), ValueError, "expected")
        refused(lambda: dist.send(ones, rank), ValueError, "")
        elsewhere = dist.new_group()
        if rank == 0:
            work = dist.all_reduce(ones, async_op=True)
            # The other rank has not called it yet.
            refused(lambda: dist.all_reduce(ones, group=elsewhere), ValueError, "wait() for that one first")
            dist.barrier(group=elsewhere)
            work.wait()
        else:
            dist.barrier(group=elsewhere)
            dist.all_reduce(ones)
        dist.barrier()
        dist.destroy_process_group()
        print("done")
        """,
    ).outputs()
    assert outputs == [["done"]] * 2


def test_a_killed_rank_is_named_within_the_deadline(torch_job):
    job = torch_job(
        3,
        """
        start(seconds=30)
        dist.barrier()
        if rank == 1:
            print("ready", flush=True)
            time.sleep(90)
        began = time.monotonic()
        try:
            dist.all_reduce(torch.ones(10))
        except allstream.PeerLost as error:
            print(error.rank, time.monotonic() - began < 30)
        sys.stdout.flush()
        os._exit(0)
        """,
    )
    assert job.processes[1].stdout.readline() == "ready\n"
    job.processes[1].kill()
    ends = job.ends()
    for rank in (0, 2):
        code, out, err = ends[rank]
        assert (code, out.split()) == (0, ["1", "True"]), err


def test_timeouts_and_abort(torch_job):
    outputs = torch_job(
        2,
        """
        start(seconds=60)
        late = dist.new_group(timeout=datetime.timedelta(seconds=0.5))
        if rank == 0:
            try:
                dist.all_reduce(torch.ones(3), group=late)
            except TimeoutError as error:
                assert "rank 1 has not called it" in str(error), error
                print("timeout")
        dist.barrier()
        other = dist.new_group()
        if rank == 0:
            work = dist.all_reduce(torch.ones(3), group=other, async_op=True)
            dist.barrier()
            try:
                work.wait()
            except allstream.Aborted as error:
                print("aborted")
        else:
            dist.barrier()
            other._get_backend(torch.device("cpu")).abort()
            print("aborts")
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)
        """,
    ).outputs()
    assert outputs == [["timeout", "aborted"], ["aborts"]]


def test_older_versions_of_torch_are_refused_by_name():
    import allstream.torch

    allstream.torch._check_version("2.15.0+cpu")
    allstream.torch._check_version("3.0.1")
    with pytest.raises(ImportError, match=r"needs torch 2.15 or newer.*found torch 2.9.1"):
        allstream.torch._check_version("2.9.1+cu128")


def is_installed():
    points = importlib.metadata.entry_points(group="torch.distributed.backends")
    return any(point.name == "allstream" for point in points)


@pytest.mark.skipif(not is_installed(), reason="the package is not installed, so torch cannot find it by its entry point")
def test_torch_finds_the_backend_by_itself():
    program = (
        "import torch.distributed as dist, torch, tempfile\n"
        "dist.init_process_group('allstream', init_method='file://' + tempfile.mktemp(), rank=0, world_size=1)\n"
        "t = torch.ones(3); dist.all_reduce(t); print(t.tolist(), dist.get_backend())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert ended.stdout.split() == ["[1.0,", "1.0,", "1.0]", "allstream"]
