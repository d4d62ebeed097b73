"""Callbacks of futures may wait for other collectives, as communication hooks of DistributedDataParallel do; and failures reach futures and callbacks."""

import pytest
from test_training import both


def test_hooks_that_wait_in_callbacks_train_to_gloos_weights(torch_job):
    program = """
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
for name, state, hook in (
    ("powerSGD", lambda: powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
    ("per tensor", lambda: None, quantization_hooks.quantization_pertensor_hook),
    ("per channel", lambda: None, quantization_hooks.quantization_perchannel_hook),
    ("bf16", lambda: None, default_hooks.bf16_compress_hook),
):
    net = DistributedDataParallel(model())
    net.register_comm_hook(state(), hook)
    train(net, 6)
    print(f"{name}: {weights(net).double().sum().item():.6f}")
"""
    results = both(torch_job, 2, program)
    for rank in range(2):
        assert len(results["gloo"][rank]) == 4
        for ours, gloos in zip(results["allstream"][rank], results["gloo"][rank], strict=True):
            (name, value), (also, expected) = ours.split(": "), gloos.split(": ")
            assert name == also and float(value) == pytest.approx(float(expected), abs=1e-4), name


def test_callbacks_wait_for_what_they_call_and_for_what_others_call(torch_job):
    outputs = torch_job(
        2,
        """
        start()
        call = lambda value: dist.all_reduce(torch.full((3,), float(value)), async_op=True).get_future()
        # What it calls itself, three levels deep. Rank 1 is late, so that rank 0's callbacks come on another thread.
        time.sleep(0.3 * rank)
        deep = call(1).then(lambda f: call(f.value()[0][0]).then(lambda f: call(f.value()[0][0]).wait()).wait())
        print(deep.wait()[0].tolist())
        # The first call's callback waits for the second call, which was made before the callback runs.
        time.sleep(0.3 * rank)
        first, second = call(1), call(10)
        late = first.then(lambda f: (f.value()[0] + second.wait()[0]).tolist())
        print(late.wait())
        # Callbacks come in the order of the calls. Rank 1 calls only when rank 0 has made all its calls and attached all its callbacks.
        order = []
        if rank == 1:
            dist.recv(torch.zeros(1), 0)
        futures = [call(i) for i in range(20)]
        if rank == 0:
            futures = [f.then(lambda f, i=i: order.append(i)) for i, f in reversed(list(enumerate(futures)))]
            dist.send(torch.zeros(1), 1)
        torch.futures.wait_all(futures)
        print(order == list(range(20)) or rank == 1)
        end()
        """,
    ).outputs()
    assert outputs == [["[8.0, 8.0, 8.0]", "[22.0, 22.0, 22.0]", "True"]] * 2


def test_a_failure_in_a_backward_pass_is_an_error_that_says_why(torch_job):
    job = torch_job(
        2,
        """
        start(seconds=30)
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        net(torch.ones(2, 3)).sum().backward()
        out = net(torch.ones(2, 3)).sum()
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        if rank == 1:
            os._exit(0)
        for wait in (out.backward, future.wait, lambda: future.then(lambda f: f.value()).wait()):
            try:
                wait()
                # It may have ended before the other rank did.
                assert wait != out.backward
            except RuntimeError as error:
                assert "rank 1" in str(error), error
                print("raised")
        try:
            dist.all_reduce(torch.ones(1))
        except allstream.PeerLost as error:
            print(error.rank)
        sys.stdout.flush()
        dist.destroy_process_group()
        """,
    )
    code, out, err = job.ends()[0]
    assert code == 0 and out.split()[0] == "raised" and out.split()[-1] == "1", (code, out, err)
