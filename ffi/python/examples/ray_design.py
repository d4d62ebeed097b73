"""The examples of the design document of Ray's collectives, on allstream.

    python examples/ray_design.py

Imperative and declared groups, declarative calls on ObjectRefs, messages, and several tensors for each process. The module is
`allstream.ray` where the document has `ray.util.collective`.
"""

import numpy
import ray
import torch

import allstream.ray as col


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self):
        self.sent, self.received = numpy.ones(4, "float32"), numpy.zeros(4, "float32")

    def setup(self, size, rank):
        col.init_collective_group(size, rank, "nccl", "default")

    def compute(self, group="default"):
        col.allreduce(self.sent, group)
        return self.sent.tolist()

    @ray.method(tensor_transport="ALLSTREAM")
    def get_buffer(self, value):
        return torch.full((4,), float(value))

    def first(self, tensor):
        return tensor[0].item()

    def exchange(self, rank, group):
        """Rank 0 sends, rank 1 receives."""
        if rank == 0:
            col.send(numpy.arange(4, dtype="float32"), 1, group)
        else:
            col.recv(self.received, 0, group)
        return self.received.tolist()

    def many(self, size, rank, devices, group):
        """Several tensors of this process, one for each of its devices: each counts as a rank."""
        col.init_collective_group(size, rank, "nccl", group)
        tensors = [torch.full((2,), float(rank * devices + device)) for device in range(devices)]
        col.allreduce_multigpu(tensors, group)
        return [tensor.tolist() for tensor in tensors]

    def exchange_multigpu(self, rank, group):
        """Rank 0 sends from its device 0 to device 1 of rank 1."""
        sent, received = torch.ones(4), torch.zeros(4)
        if rank == 0:
            col.send_multigpu(sent * 2, 1, 1, group)
        else:
            col.recv_multigpu(received, 0, 0, group)
        return received.tolist()


def main():
    # No `num_cpus` here: Ray refuses it in a cluster that runs already (`ray job submit`), and the actors take no CPU anyway.
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")

    workers = [Worker.remote() for _ in range(2)]
    ray.get([worker.setup.remote(2, rank) for rank, worker in enumerate(workers)])
    print("imperative:", ray.get([worker.compute.remote() for worker in workers]))

    workers = [Worker.remote() for _ in range(2)]
    col.declare_collective_group(workers, group_name="177", world_size=2, ranks=[0, 1], backend="nccl")
    print("declared:", ray.get([worker.compute.remote("177") for worker in workers]))

    refs = [worker.get_buffer.remote(value) for value, worker in enumerate(workers, 1)]
    sums = col.allreduce_refs(refs, "177")
    print("by refs:", ray.get([worker.first.remote(ref) for worker, ref in zip(workers, sums, strict=True)]))

    print("messages:", ray.get([worker.exchange.remote(rank, "177") for rank, worker in enumerate(workers)])[1])

    print("two tensors for each process:", ray.get([worker.many.remote(2, rank, 2, "multi") for rank, worker in enumerate(workers)]))
    print("from device to device:", ray.get([worker.exchange_multigpu.remote(rank, "multi") for rank, worker in enumerate(workers)])[1])
    ray.shutdown()


if __name__ == "__main__":
    main()
