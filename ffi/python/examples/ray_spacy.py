"""Several Ray actors train one spaCy pipeline, and send their gradients in one of four ways: a study of Ray's design document, repeated.

    python examples/ray_spacy.py config config.cfg                                    # writes spaCy's configuration of tok2vec and ner
    python examples/ray_spacy.py train config.cfg --n-workers 2 --way allstream       # with --n-workers as spacy-ray's command has it
    python examples/ray_spacy.py study config.cfg --workers 1 2 4 --updates 1000 --trials 3

The ways:

- `server`: as spacy-ray does. Each parameter belongs to one worker. The other workers send this owner their gradients by Ray calls
  (`inc_grad.remote`). The owner makes the optimizer's step and sends everyone the new weights.
- `gloo`: each worker calls `ray.util.collective.allreduce` for a gradient as soon as it has it, with Ray's own backend Gloo. Every worker
  makes the optimizer's step for all parameters.
- `allstream`: the same calls, with the backend "allstream".
- `buckets`: each worker hands its gradients to `allstream.Buckets`, which reduces them in a few pieces while the backward pass goes on.

All workers take part in each update, each with a batch of its own. The text is the example sentences of spaCy's languages. Every capitalised
word but the first of a sentence counts as an entity, which is enough to learn something. spaCy's parser runs some layers once for each of its
own steps, so their parameters get their gradients in many pieces. A worker adds these up, and sends the sum after the backward pass.
"""

import argparse
import importlib
import pkgutil
import random
import statistics
import threading
import time

import numpy
import ray

WAYS = ["server", "gloo", "allstream", "buckets"]
BATCH = 16


def pipeline(config):
    """Makes the pipeline of a configuration file, with the same weights in every worker. Returns it and the examples to train it on."""
    import spacy.lang
    from spacy.training import Example
    from spacy.util import fix_random_seed, load_config, load_model_from_config

    fix_random_seed(7)
    nlp = load_model_from_config(load_config(config), auto_fill=True)
    examples = []
    for language in sorted(module.name for module in pkgutil.iter_modules(spacy.lang.__path__)):
        try:
            sentences = importlib.import_module(f"spacy.lang.{language}.examples").sentences
        except ImportError:
            continue
        for sentence in sentences:
            doc = nlp.make_doc(sentence)
            names = [(word.idx, word.idx + len(word), "NAME") for word in doc[1:] if word.text[:1].isupper()]
            if names:
                examples.append(Example.from_dict(doc, {"entities": names}))
    nlp.initialize(lambda: examples)
    return nlp, examples


class Parameters:
    """Stands in for thinc's own store of parameters: thinc asks it for weights, and hands it gradients."""

    def __init__(self, nlp):
        self.keys = []
        self.weights = {}
        self.grads = {}
        nodes = [node for _, pipe in nlp.pipeline for node in pipe.model.walk()]
        for node in nodes:
            for name in node.param_names:
                if node.has_param(name):
                    self.keys.append((node.id, name))
                    self.weights[node.id, name] = node.get_param(name).copy()
        self.number = {key: i for i, key in enumerate(self.keys)}
        # The number of pieces in which each parameter's gradient comes. The first update counts them, and all workers count the same. What came in one
        # piece is sent as soon as it comes.
        self.pieces = dict.fromkeys(self.keys, 0)
        self.send = None
        for node in nodes:
            node._params.proxy = self

    def get_param(self, model, name):
        return self.weights[model, name]

    def set_param(self, model, name, value):
        self.weights[model, name] = value

    def set_grad(self, model, name, value):
        self.grads[model, name] = value

    def inc_grad(self, model, name, value):
        key = (model, name)
        if key in self.grads:
            if self.send is not None and self.pieces[key] == 1:
                # What is under way must not change, and the other workers send it once.
                raise RuntimeError(
                    f"parameter {name} of node {model}: its gradient came in one piece in the first update, and now in two; the first is sent already. "
                    "Begin with a batch of longer texts"
                )
            self.grads[key] += value
        else:
            self.grads[key] = numpy.ascontiguousarray(value).copy()
        if self.send is None:
            self.pieces[key] += 1
        elif self.pieces[key] == 1:
            self.send(key)

    def flush(self):
        """Sends what `inc_grad` has not sent: gradients that come in several pieces, and zeros for parameters without a gradient."""
        for key in self.keys:
            if key not in self.grads:
                self.grads[key] = numpy.zeros_like(self.weights[key])
                if self.pieces[key] == 1:
                    self.send(key)
            if self.pieces[key] != 1:
                self.send(key)


class Server:
    """As spacy-ray does: whoever owns a parameter adds up its gradients and makes the optimizer's step."""

    def __init__(self, rank, peers, parameters, optimizer):
        self.rank, self.peers, self.parameters, self.optimizer = rank, peers, parameters, optimizer
        self.changed = threading.Condition()
        self.sums, self.counts = {}, dict.fromkeys(range(len(parameters.keys)), 0)
        self.versions = dict.fromkeys(range(len(parameters.keys)), 0)
        self.updates = 0

    def send(self, key):
        i = self.parameters.number[key]
        owner = i % len(self.peers)
        if owner == self.rank:
            self.inc_grad(i, self.parameters.grads[key])
        else:
            self.peers[owner].inc_grad.remote(i, self.parameters.grads[key])

    def inc_grad(self, i, grad):
        key = self.parameters.keys[i]
        with self.changed:
            self.sums[i] = grad.copy() if self.counts[i] == 0 else self.sums[i] + grad
            self.counts[i] += 1
            if self.counts[i] < len(self.peers):
                return
            self.counts[i] = 0
            weights, _ = self.optimizer(key, self.parameters.weights[key].copy(), self.sums.pop(i) / len(self.peers))
        for rank, peer in enumerate(self.peers):
            if rank != self.rank:
                peer.set_weights.remote(i, weights)
        self.set_weights(i, weights)

    def set_weights(self, i, weights):
        with self.changed:
            # Arrays that come with a Ray call are read-only.
            self.parameters.weights[self.parameters.keys[i]] = weights.copy()
            self.versions[i] += 1
            self.changed.notify_all()

    def step(self):
        self.updates += 1
        with self.changed:
            there = self.changed.wait_for(lambda: min(self.versions.values()) >= self.updates, timeout=120)
        assert there, f"worker {self.rank}: weights of update {self.updates} did not come within 120 s"


class AllReduce:
    """Ray's collectives sum the gradients, and every worker makes the optimizer's step for all parameters."""

    def __init__(self, size, parameters, optimizer):
        import ray.util.collective as col

        self.col, self.size, self.parameters, self.optimizer = col, size, parameters, optimizer

    def send(self, key):
        if self.size > 1:
            self.col.allreduce(self.parameters.grads[key], "spacy")

    def step(self):
        for key in self.parameters.keys:
            grad = self.parameters.grads[key] / self.size
            self.parameters.weights[key], _ = self.optimizer(key, self.parameters.weights[key], grad)


class InBuckets:
    """As `AllReduce`, but all gradients travel in a few pieces, while the backward pass still computes others."""

    def __init__(self, comm, parameters, optimizer):
        import allstream

        self.parameters, self.optimizer = parameters, optimizer
        self.buckets = allstream.Buckets(comm, [parameters.weights[key] for key in parameters.keys], bucket_mb=4)

    def send(self, key):
        self.buckets.push(self.parameters.number[key], self.parameters.grads[key])

    def step(self):
        for key, grad in zip(self.parameters.keys, self.buckets.finish(), strict=True):
            self.parameters.weights[key], _ = self.optimizer(key, self.parameters.weights[key], grad)


@ray.remote(max_concurrency=4, num_cpus=0)
class Worker:
    def __init__(self, config, rank, size):
        self.rank, self.size = rank, size
        self.nlp, self.examples = pipeline(config)
        self.parameters = Parameters(self.nlp)
        self.nlp.update(self.examples[:BATCH], sgd=None)
        self.parameters.grads.clear()

    def join(self, way, peers):
        import ray.util.collective as col

        from thinc.api import Adam

        optimizer = Adam(0.001)
        if self.size > 1 and way != "server":
            backend = "gloo" if way == "gloo" else "allstream"
            col.init_collective_group(self.size, self.rank, backend, "spacy")
            col.barrier("spacy")
        if way == "server":
            self.way = Server(self.rank, peers, self.parameters, optimizer)
        elif way == "buckets":
            import allstream
            import allstream.ray

            comm = allstream.ray.get_group("spacy").comm() if self.size > 1 else allstream.local(1)[0]
            self.way = InBuckets(comm, self.parameters, optimizer)
        else:
            self.way = AllReduce(self.size, self.parameters, optimizer)
        self.parameters.send = self.way.send

    def train(self, updates):
        """Makes `updates` updates. Returns the seconds that they took, and the sum of the absolute values of all weights."""
        batches = random.Random(self.rank)
        start = time.perf_counter()
        for _ in range(updates):
            self.nlp.update(batches.sample(self.examples, BATCH), sgd=None, drop=0.1)
            self.parameters.flush()
            self.way.step()
            self.parameters.grads.clear()
        took = time.perf_counter() - start
        return took, float(sum(numpy.abs(weights).sum(dtype="float64") for weights in self.parameters.weights.values()))

    def inc_grad(self, i, grad):
        self.way.inc_grad(i, grad)

    def set_weights(self, i, weights):
        self.way.set_weights(i, weights)


def train(config, way, size, updates):
    """Returns the seconds that the slowest of `size` workers takes for `updates` updates. All must end with the same weights."""
    workers = [Worker.remote(config, rank, size) for rank in range(size)]
    ray.get([worker.join.remote(way, workers) for worker in workers], timeout=300)
    ray.get([worker.train.remote(2) for worker in workers], timeout=300)
    results = ray.get([worker.train.remote(updates) for worker in workers], timeout=3600)
    sums = [weights for _, weights in results]
    assert max(sums) - min(sums) <= 1e-6 * max(sums), f"{way}, {size} workers: weights differ: {sums}"
    for worker in workers:
        ray.kill(worker)
    return max(took for took, _ in results)


def study(options):
    times = {(way, size): [] for way in options.ways for size in options.workers}
    for trial in range(options.trials):
        for way, size in times:
            times[way, size].append(train(options.config, way, size, options.updates))
            print(f"# trial {trial + 1}, {way}, {size} workers: {times[way, size][-1]:.1f} s", flush=True)
    mean = {at: statistics.mean(took) for at, took in times.items()}
    print(f"\nSeconds for {options.updates} updates, mean and standard deviation of {options.trials} trials; how often faster than `server`\n")
    print("| workers | " + " | ".join(options.ways) + " |\n|" + "---|" * (1 + len(options.ways)))
    for size in options.workers:
        cells = []
        for way in options.ways:
            took = times[way, size]
            spread = statistics.stdev(took) if len(took) > 1 else 0.0
            faster = f", {mean['server', size] / mean[way, size]:.2f}x" if way != "server" and "server" in options.ways else ""
            cells.append(f"{mean[way, size]:.1f} ± {spread:.1f}{faster}")
        print(f"| {size} | " + " | ".join(cells) + " |")
    print("\nScalability: n times the runtime of one worker, by the runtime of n workers\n")
    print("| workers | " + " | ".join(options.ways) + " |\n|" + "---|" * (1 + len(options.ways)))
    for size in options.workers:
        cells = [f"{size * mean[way, options.workers[0]] / mean[way, size] / options.workers[0]:.2f}" for way in options.ways]
        print(f"| {size} | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("config", help="write spaCy's configuration of a pipeline with tok2vec and ner")
    one.add_argument("config")
    one = commands.add_parser("train", help="train once")
    one.add_argument("config")
    one.add_argument("--n-workers", type=int, default=2)
    one.add_argument("--way", choices=WAYS, default="allstream")
    one.add_argument("--updates", type=int, default=1000)
    one = commands.add_parser("study", help="compare the ways")
    one.add_argument("config")
    one.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    one.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS)
    one.add_argument("--updates", type=int, default=1000)
    one.add_argument("--trials", type=int, default=3)
    options = parser.parse_args()
    if options.command == "config":
        from spacy.cli.init_config import init_config

        init_config(lang="en", pipeline=["tok2vec", "ner"], optimize="efficiency", gpu=False).to_disk(options.config)
        return
    import allstream.ray

    allstream.ray.register()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="warning")
    if options.command == "train":
        took = train(options.config, options.way, options.n_workers, options.updates)
        print(f"{options.way}, {options.n_workers} workers: {options.updates} updates in {took:.1f} s, the same weights in all workers")
    else:
        study(options)
    ray.shutdown()


if __name__ == "__main__":
    main()
