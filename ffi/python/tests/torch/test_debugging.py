"""torch's tools for debugging (TORCH_DISTRIBUTED_DEBUG=DETAIL, the profiler, monitored_barrier), and groups that are destroyed and made again."""


def test_detail_names_what_ranks_disagree_on(torch_job):
    outputs = torch_job(
        2,
        """
        start()
        boxes, found = [torch.zeros(2) for _ in range(2)], [None, None]
        for group in (None, dist.new_group([0, 1]), dist.split_group(split_ranks=[[0, 1]])):
            dist.all_reduce(x := torch.ones(4), group=group)
            dist.all_gather(boxes, torch.full((2,), float(rank)), group=group)
            dist.all_gather_object(found, rank, group=group)
            dist.barrier(group=group)
            work = dist.broadcast(x, 0, group=group, async_op=True)
            work.get_future().wait()
            assert x.tolist() == [2.0] * 4 and boxes[1].tolist() == [1.0] * 2 and found == [0, 1]
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        net(torch.ones(2, 3)).sum().backward()
        try:
            dist.all_reduce(torch.ones(4 + rank))
        except RuntimeError as error:
            text = str(error)
            assert "Detected mismatch between collectives on ranks" in text and "TensorShape=[4]" in text and "SequenceNumber" in text, text
            print("told")
        # The planted call was not made.
        dist.all_reduce(x)
        print(x.tolist())
        end()
        """,
        {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    ).outputs()
    assert outputs == [["told", "[4.0, 4.0, 4.0, 4.0]"]] * 2


def test_the_profiler_and_monitored_barrier(torch_job):
    outputs = torch_job(
        2,
        """
        from torch.profiler import ProfilerActivity, profile
        start()
        x, box = torch.ones(10, 20), torch.ones(20, 20)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            dist.all_reduce(x)
            dist.broadcast(x, 0)
            dist.all_gather_into_tensor(box, x)
            dist.barrier()
            (dist.send if rank == 0 else dist.recv)(x, 1 - rank)
            dist.all_reduce(x, async_op=True).wait()
        shown = {event.name: event.input_shapes for event in seen.events() if event.name.startswith("allstream:")}
        assert shown["allstream:all_reduce"] == [[10, 20]], shown
        assert sorted(shown["allstream:all_gather"]) == [[10, 20], [20, 20]], shown
        assert {"allstream:broadcast", "allstream:barrier", "allstream:all_reduce.wait", "allstream:" + ("send", "recv")[rank]} <= set(shown), shown
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=30))
        group = dist.new_group()
        if rank == 0:
            try:
                dist.monitored_barrier(group, timeout=datetime.timedelta(seconds=0.5), wait_all_ranks=True)
            except RuntimeError as error:
                assert "rank 1 has not called it" in str(error), error
                print("told")
        dist.barrier()
        end()
        """,
    ).outputs()
    assert outputs == [["told"], []]


def test_a_group_that_has_failed_is_destroyed_and_made_again(torch_job):
    outputs = torch_job(
        2,
        """
        import warnings
        warnings.simplefilter("ignore")
        start(seconds=30)
        late = dist.new_group(timeout=datetime.timedelta(seconds=0.3))
        if rank == 0:
            try:
                dist.all_reduce(torch.ones(3), group=late)
            except TimeoutError:
                print("failed")
        dist.barrier()
        world = dist.group.WORLD
        dist.destroy_process_group()
        print(dist.is_initialized())
        try:
            dist.all_reduce(torch.ones(3), group=world)
        except (RuntimeError, ValueError) as error:
            print("destroyed")
        # Another life of the job in the same store: it needs keys of its own, hence the prefix.
        store = dist.PrefixStore("again", dist.TCPStore("127.0.0.1", int(os.environ["TEST_PORT"]), is_master=False))
        dist.init_process_group("allstream", store=store, rank=rank, world_size=size)
        dist.all_reduce(x := torch.ones(3))
        print(x.tolist())
        if rank == 1:
            sys.stdout.flush()
            os._exit(0)
        try:
            dist.all_reduce(x)
        except ConnectionError:
            print("lost")
        dist.destroy_process_group()
        dist.init_process_group("allstream", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(x := torch.ones(3))
        print(x.tolist())
        dist.destroy_process_group()
        """,
    ).outputs()
    again = ["False", "destroyed", "[2.0, 2.0, 2.0]"]
    assert outputs == [["failed", *again, "lost", "[1.0, 1.0, 1.0]"], again]
