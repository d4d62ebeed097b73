"""Ray Train: `TorchTrainer` with allstream as torch's backend."""

import json

import pytest
import torch

for library in ("pyarrow", "pandas"):
    pytest.importorskip(library, reason=f"Ray Train needs {library}: pip install 'ray[train]'")

WORKERS, STEPS = 2, 3


def model():
    torch.manual_seed(5)
    return torch.nn.Linear(4, 2)


def batch(rank, step):
    return torch.arange(12, dtype=torch.float32).reshape(3, 4) * (rank + 1) / (step + 2)


def train(config):
    """What each worker runs: some steps of DDP, on data of its own."""
    import torch.distributed as dist
    from ray import train
    from ray.train.torch import prepare_model

    rank = train.get_context().get_world_rank()
    ddp = prepare_model(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
    found = {"backend": dist.get_backend(), "size": dist.get_world_size(), "weights": ddp.module.weight.flatten().tolist()}
    # Metrics without a checkpoint do not come back by the result.
    (config["folder"] / f"{rank}.json").write_text(json.dumps(found))


def alone():
    """The same steps in one process: the mean of the gradients that the ranks have."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(WORKERS):
            (net(batch(rank, step)).square().mean() / WORKERS).backward()
        optimizer.step()
    return net.weight.flatten().tolist()


def test_torch_trainer(cluster, tmp_path):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    TorchTrainer(
        train,
        train_loop_config={"folder": tmp_path},
        torch_config=TorchConfig(backend="allstream", timeout_s=60),
        scaling_config=ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 0.1}),
        run_config=RunConfig(storage_path=str(tmp_path)),
    ).fit()
    for rank in range(WORKERS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["backend"] == "allstream" and found["size"] == WORKERS
        assert found["weights"] == pytest.approx(alone(), rel=1e-6)
