"""Tensors in every order of memory and of every type, and several operations on one tensor."""


def test_orders_of_memory_holes_and_lazy_bits(torch_job):
    outputs = torch_job(
        2,
        """
        start()
        def fresh(*shape):
            return (torch.arange(float(torch.Size(shape).numel())) + 100 * rank).view(shape)

        both = lambda *shape: fresh(*shape) - 100 * rank + (fresh(*shape) - 100 * rank) + 100
        layouts = {
            "rows": lambda t: t.clone(),
            "columns": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
            "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
            "holes": lambda t: torch.stack([t, t], dim=-1)[..., 0],
            "flipped": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        }
        shape = (2, 3, 4, 5)
        for name, laid in layouts.items():
            t = laid(fresh(*shape))
            strides = t.stride()
            dist.all_reduce(t)
            assert torch.equal(t, both(*shape)) and t.stride() == strides, name
            t = laid(fresh(*shape))
            dist.broadcast(t, 1)
            assert torch.equal(t, fresh(*shape) + 100 * (1 - rank)), name
            t = laid(fresh(*shape))
            dist.reduce(t, 0)
            assert torch.equal(t, both(*shape) if rank == 0 else fresh(*shape)), name
            # By value, whatever the order: the ranks' inputs need not lie alike.
            box = laid(torch.zeros(4, 3, 4, 5))
            dist.all_gather_into_tensor(box, (laid if rank else torch.clone)(fresh(*shape)))
            assert box[3, 2, 3, 4] == 219 and box[0, 1, 0, 0] == 20, name
            boxes = [laid(torch.zeros(shape)) for _ in range(2)]
            dist.all_gather(boxes, laid(fresh(*shape)))
            assert boxes[1][1, 2, 3, 4] == 219 and boxes[0][0, 1, 0, 0] == 20, name
            box = laid(torch.zeros(1, 3, 4, 5))
            dist.reduce_scatter_tensor(box, laid(fresh(*shape)))
            assert torch.equal(box, both(*shape)[rank : rank + 1]), name
            box = laid(torch.zeros(shape))
            dist.all_to_all_single(box, laid(fresh(*shape)))
            assert box[1, 0, 0, 0] == 100 + 60 * rank, name
            box = laid(torch.zeros(shape))
            dist.scatter(box, [laid(fresh(*shape)) + i for i in range(2)] if rank == 0 else None)
            assert box[1, 2, 3, 4] == 119 + rank, name
            boxes = [laid(torch.zeros(shape)) for _ in range(2)] if rank == 1 else None
            dist.gather(laid(fresh(*shape)), boxes, dst=1)
            assert rank == 0 or boxes[0][1, 2, 3, 4] == 119, name
            if rank == 0:
                dist.send(laid(fresh(*shape)), 1)
            else:
                box = laid(torch.zeros(shape))
                dist.recv(box, 0)
                assert torch.equal(box, fresh(*shape) - 100), name
        # Inputs that are only read may be expanded.
        dist.broadcast(torch.ones(1).expand(4) if rank == 0 else torch.zeros(4), 0)
        pair = torch.complex(fresh(3), fresh(3))
        # (torch.distributed itself refuses conjugates and negatives in most calls, and where the result is in place it puts it into a copy.)
        boxes = [torch.zeros(3, dtype=torch.complex64) for _ in range(2)] if rank == 0 else None
        dist.gather(pair.conj(), boxes)
        assert rank or boxes[1].imag.tolist() == [-100.0, -101.0, -102.0]
        boxes = [torch.zeros(3) for _ in range(2)]
        negative = torch.complex(torch.zeros(3), fresh(3)).conj().imag
        assert negative.is_neg()
        dist.all_gather(boxes, negative)
        assert boxes[1].tolist() == [-100.0, -101.0, -102.0]
        # An all_reduce works in the order of memory: ranks whose tensors have different orders get an error.
        order = dist.new_group()
        try:
            dist.all_reduce(layouts["rows" if rank else "channels_last"](fresh(*shape)), group=order)
        except allstream.Mismatch as error:
            assert "key 1342" in str(error), error
            print("told")
        end()
        """,
    ).outputs()
    assert outputs == [["told"]] * 2


def test_types_that_are_only_moved(torch_job):
    outputs = torch_job(
        2,
        """
        start()
        import warnings
        warnings.simplefilter("ignore")
        names = ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "complex32", "complex64", "complex128", "bits8", "bits16"]
        names += ["uint16", "uint32", "uint64", "float8_e4m3fn", "bool"]
        for name in names:
            dtype = getattr(torch, name)
            def made(value, count=4):
                size = torch.empty(1, dtype=dtype).element_size()
                return torch.full((count * size,), int(value), dtype=torch.uint8).view(dtype).view(2, count // 2)
            def holds(tensor, *values):
                found = tensor.contiguous().reshape(-1).view(torch.uint8)
                return found.view(len(values), -1).unique(dim=1).flatten().tolist() == list(values)
            x = made(rank)
            dist.broadcast(x, 1)
            assert holds(x, 1), name
            boxes = [made(9) for _ in range(2)]
            dist.all_gather(boxes, made(rank))
            assert holds(boxes[0], 0) and holds(boxes[1], 1), name
            box = made(9, 8)
            dist.all_gather_into_tensor(box, made(rank))
            assert holds(box, 0, 1), name
            box = made(9)
            dist.scatter(box, [made(0), made(1)] if rank == 0 else None)
            assert holds(box, rank), name
            boxes = [made(9) for _ in range(2)] if rank == 0 else None
            dist.gather(made(rank), boxes)
            assert rank or holds(boxes[1], 1), name
            box = made(9)
            dist.all_to_all_single(box, made(rank))
            assert holds(box, 0, 1), name
            box = made(9, 8)
            dist.all_to_all_single(box, made(rank, 8), [1, 1], [1, 1])
            assert holds(box, 0, 1), name
            boxes = [made(9) for _ in range(2)]
            dist.all_to_all(boxes, [made(rank), made(rank)])
            assert holds(boxes[0], 0) and holds(boxes[1], 1), name
            if rank == 0:
                dist.send(made(1), 1)
            else:
                dist.recv(box := made(9), 0)
                assert holds(box, 1), name
            if name in ("uint16", "uint32", "uint64"):
                dist.all_reduce(x := torch.full((3,), rank + 1).to(dtype))
                assert x.tolist() == [3, 3, 3]
            elif name not in ("complex32", "complex64", "complex128", "float8_e4m3fn", "bool"):
                try:
                    dist.all_reduce(made(1))
                except ValueError as error:
                    assert f"{name} is moved" in str(error)
                else:
                    raise AssertionError(name)
        box = torch.ones(3, dtype=torch.complex32)
        dist.all_reduce(box)
        assert torch.view_as_real(box).tolist() == [[2.0, 0.0]] * 3
        # Ranks that move different types of one size.
        types = dist.new_group()
        try:
            dist.broadcast(torch.empty(4, dtype=torch.bits8 if rank else torch.float8_e8m0fnu), 0, group=types)
            # A root may be through before the other one finds it out.
            dist.barrier(group=types)
        except allstream.Mismatch:
            print("told")
        end()
        """,
    ).outputs()
    assert outputs == [["told"]] * 2


def test_a_second_operation_on_one_tensor_waits_for_the_first(torch_job):
    outputs = torch_job(
        2,
        """
        start()
        shared = torch.ones(100_000)
        works = [dist.all_reduce(shared, async_op=True) for _ in range(3)]
        gathered = torch.zeros(200_000)
        works.append(dist.all_gather_into_tensor(gathered, shared, async_op=True))
        # Nobody keeps this one.
        dist.all_reduce(shared, async_op=True)
        works.append(dist.broadcast(shared[:10], 1, async_op=True))
        for work in reversed(works):
            work.wait()
        dist.barrier()
        print(shared.unique().tolist(), gathered.unique().tolist())
        end()
        """,
    ).outputs()
    assert outputs == [["[16.0] [8.0]"]] * 2
