"""Callbacks of operations may wait for anything, and are called in the order of the operations."""

import threading

import numpy
import pytest
from helpers import DEADLINE, ranks

import allstream


def test_a_callback_may_wait_for_what_it_calls_however_deep():
    def step(comm):
        done = threading.Event()
        sums = []

        def again(work):
            sums.append(work.result()[0])
            if len(sums) == 4:
                done.set()
                return
            inner, told = comm.all_reduce(numpy.full(3, sums[-1])), threading.Event()
            inner.add_done_callback(lambda work: (again(work), told.set()))
            # As a communication hook of torch waits for a future.
            assert told.wait(DEADLINE)

        comm.all_reduce(numpy.ones(3)).add_done_callback(again)
        assert done.wait(DEADLINE)
        return sums

    assert ranks(2, step) == [[2.0, 4.0, 8.0, 16.0]] * 2


def test_callbacks_come_in_the_order_of_the_operations_and_not_of_their_ends():
    first, second = allstream.local(2)
    order, done = [], threading.Event()
    large, small = numpy.ones(300_000), numpy.ones(1)
    works = [first.all_reduce(array) for array in (large, small)]
    # The callbacks are added in the opposite order.
    works[1].add_done_callback(lambda _: (order.append("second"), done.set()))
    works[0].add_done_callback(lambda _: order.append("first"))
    ended = [second.all_reduce(numpy.ones(array.shape)) for array in (large, small)]
    assert done.wait(DEADLINE)
    assert order == ["first", "second"]
    assert [work.wait(DEADLINE)[0] for work in ended] == [2.0, 2.0]


def test_a_message_that_has_not_come_holds_up_no_callback():
    first, second = allstream.local(2)
    told, received = threading.Event(), threading.Event()
    message = first.recv(numpy.zeros(2), 1)
    message.add_done_callback(lambda _: received.set())
    first.all_reduce(numpy.ones(2)).add_done_callback(lambda _: told.set())
    second.all_reduce(numpy.ones(2)).wait(DEADLINE)
    assert told.wait(DEADLINE) and not received.is_set()
    second.send(numpy.ones(2), 0).wait(DEADLINE)
    assert received.wait(DEADLINE)


def test_a_callback_that_waits_for_a_later_ones_does_not_wait_for_ever():
    first, second = allstream.local(2)
    later, done = threading.Event(), threading.Event()
    first.all_reduce(numpy.ones(1)).add_done_callback(lambda _: later.wait(DEADLINE) and done.set())
    first.all_reduce(numpy.ones(1)).add_done_callback(lambda _: later.set())
    for _ in range(2):
        second.all_reduce(numpy.ones(1)).wait(DEADLINE)
    assert done.wait(DEADLINE)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_callback_that_fails_does_not_keep_the_next_from_coming():
    first, second = allstream.local(2)
    told = threading.Event()
    work = first.all_reduce(numpy.ones(1))
    work.add_done_callback(lambda _: 1 / 0)
    work.add_done_callback(lambda _: told.set())
    second.all_reduce(numpy.ones(1)).wait(DEADLINE)
    assert told.wait(DEADLINE)


def test_a_process_ends_while_a_callback_waits(job):
    outputs = job(
        2,
        """
        def then(_):
            print("in", flush=True)
            comm.all_reduce(numpy.ones(4)).wait()
            inner = comm.all_reduce(numpy.ones(4))
            told = threading.Event()
            inner.add_done_callback(lambda work: told.set())
            assert told.wait(30)
            print("out", flush=True)

        comm.all_reduce(numpy.ones(4)).add_done_callback(then)
        """,
    ).ends()
    # When a rank leaves, the operations that only the other rank has called fail, and the wait in its callback raises. No process may hang
    # or be killed.
    assert [code for code, _, _ in outputs] == [0, 0], outputs
