"""Gradients in buckets: the mean over ranks, in the arrays that were pushed."""

import numpy
import pytest
from helpers import ranks

import allstream
from allstream import errors

SHAPES = [(300, 4), (4,), (1000,), (7, 7)]


def grads(rank, step):
    generator = numpy.random.default_rng(100 * step + rank)
    return [generator.standard_normal(shape).astype("float32") for shape in SHAPES]


def test_the_mean_of_every_gradient_in_its_own_array():
    def call(comm):
        buckets = allstream.Buckets(comm, [numpy.zeros(shape, "float32") for shape in SHAPES], bucket_mb=0.003, first_bucket_mb=0.003)
        for step in range(3):
            mine = grads(comm.rank, step)
            for i in reversed(range(len(mine))):
                buckets.push(i, mine[i])
            done = buckets.finish()
            assert all(a is b for a, b in zip(done, mine, strict=True))
            both = [grads(rank, step) for rank in range(2)]
            for i, result in enumerate(done):
                assert numpy.allclose(result, (both[0][i] + both[1][i]) / 2, atol=1e-6)
        report = buckets.report()
        buckets.close()
        return report["step"], len(report["buckets"]) > 1, report["communication_us"] > 0

    assert ranks(2, call) == [(2, True, True)] * 2


def test_micro_batches_samples_sums_and_sixteen_bits():
    def call(comm):
        sums = allstream.Buckets(comm, [numpy.zeros(5)], op="sum")
        first = numpy.ones(5)
        sums.accumulate(0, first)
        sums.accumulate(0, numpy.full(5, 2.0))
        sums.push(0, numpy.full(5, 3.0))
        (total,) = sums.finish()
        weighed = allstream.Buckets(comm, [numpy.zeros(5)])
        weighed.weigh(1 + 2 * comm.rank)
        weighed.push(0, numpy.full(5, float(comm.rank)))
        (mean,) = weighed.finish()
        rounded = allstream.Buckets(comm, [numpy.zeros(5, "float32")], compress="bf16")
        rounded.push(0, numpy.full(5, 1.25, "float32"))
        return total[0], mean[0], rounded.finish()[0][0]

    assert ranks(2, call) == [(12.0, 0.75, 1.25)] * 2


def test_what_cannot_be_is_refused_and_changes_nothing():
    def call(comm):
        buckets = allstream.Buckets(comm, [numpy.zeros(3), numpy.zeros(4, "float32")])
        for i, grad, words in [
            (2, numpy.zeros(3), "there is no parameter 2"),
            (0, numpy.zeros(4), "3 x f64"),
            (0, numpy.zeros(3, "float32"), "3 x f64"),
        ]:
            with pytest.raises(errors.Invalid, match=words):
                buckets.push(i, grad)
        buckets.push(0, numpy.ones(3))
        with pytest.raises(errors.Invalid, match="pushed before"):
            buckets.push(0, numpy.ones(3))
        with pytest.raises(errors.Invalid, match="1 of 2 parameters have no gradient in this step: 1"):
            buckets.finish()
        buckets.push(1, numpy.ones(4, "float32"))
        return [grad[0] for grad in buckets.finish()]

    assert ranks(2, call) == [[1.0, 1.0]] * 2
    with pytest.raises(errors.Invalid, match="compress is \"f8\""):
        allstream.Buckets(allstream.local(1)[0], [numpy.zeros(3)], compress="f8")


def test_layouts_that_differ_are_told_on_all_ranks():
    results = ranks(2, lambda comm: allstream.Buckets(comm, [numpy.zeros(3 + comm.rank)]))
    assert all(isinstance(result, errors.Error) for result in results), results


def test_sharded_buckets_train_to_the_weights_of_plain_ones():
    """ZeRO stage 1: each rank updates what it owns by momentum, and the weights come together."""

    def call(comm):
        likes = [numpy.zeros(shape, "float32") for shape in SHAPES]
        plain = allstream.Buckets(comm, likes, bucket_mb=0.003)
        sharded = allstream.Buckets(comm, likes, bucket_mb=0.003, sharded=True)
        weights, own = [numpy.ones(shape, "float32") for shape in SHAPES], [numpy.ones(shape, "float32") for shape in SHAPES]
        moments, parts = [numpy.zeros_like(like) for like in likes], [numpy.zeros(len(sharded.owned(i)), "float32") for i in range(4)]
        for step in range(4):
            for i, grad in reversed(list(enumerate(grads(comm.rank, step)))):
                plain.push(i, grad)
            for i, grad in enumerate(plain.finish()):
                moments[i] = 0.5 * moments[i] + grad
                weights[i] -= 0.25 * moments[i]
            for i, grad in enumerate(grads(comm.rank, step)):
                sharded.push(i, grad)
            for i, grad in enumerate(sharded.finish()):
                mine = slice(sharded.owned(i).start, sharded.owned(i).stop)
                parts[i] = 0.5 * parts[i] + grad.reshape(-1)[mine]
                own[i].reshape(-1)[mine] -= 0.25 * parts[i]
            sharded.gather(own)
            assert all((a == b).all() for a, b in zip(own, weights, strict=True))
        assert plain.owned(0) == range(1200)
        with pytest.raises(errors.Invalid, match="not sharded"):
            plain.gather(own)
        with pytest.raises(errors.Invalid, match="there is no parameter 4"):
            plain.owned(4)
        with pytest.raises(errors.Invalid, match="3 weights were given, and the layout has 4"):
            sharded.gather(own[:3])
        plain.close()
        sharded.close()
        return sum(len(part) for part in parts)

    owned = ranks(2, call)
    assert sum(owned) == sum(int(numpy.prod(shape)) for shape in SHAPES) and abs(owned[0] - owned[1]) <= 4


def test_parameters_that_some_ranks_did_not_use():
    def call(comm):
        buckets = allstream.Buckets(comm, [numpy.zeros(3), numpy.zeros((2, 2), "float32"), numpy.zeros(1)])
        for step in range(2):
            first = numpy.full(3, 2.0)
            buckets.push(0, first)
            if comm.rank == 1:
                buckets.push(1, numpy.full((2, 2), 6.0, "float32"))
            a, b, c = buckets.finish_some()
            assert a is first and (a == 2).all()
            assert b.shape == (2, 2) and b.dtype == numpy.float32 and (b == 3).all()
            assert c is None
        buckets.close()
        return True

    assert ranks(2, call) == [True, True]
