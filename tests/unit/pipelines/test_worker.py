"""The thread behind every pipeline."""

import threading

import pytest

from sgl_tiered.pipelines.worker import Worker
from tests.unit.pipelines.pipeline_support import PATIENCE_S


@pytest.fixture
def gate():
    event = threading.Event()
    yield event
    event.set()


def test_jobs_run_in_order():
    """One thread does the jobs in the order in which they came."""
    done = []
    worker = Worker("t", done.append, lambda job, error: None)
    for job in range(50):
        assert worker.try_put(job)
    assert worker.drain(PATIENCE_S)
    assert done == list(range(50))
    worker.close()


def test_a_bad_job_is_settled_and_the_thread_lives_on(caplog):
    """An exception goes to ``on_error`` and to the log, and the next job runs."""
    done, failed = [], []

    def work(job):
        if job == 1:
            raise KeyError("lost")
        done.append(job)

    worker = Worker("t", work, lambda job, error: failed.append((job, error)))
    for job in range(3):
        worker.try_put(job)
    assert worker.drain(PATIENCE_S)
    assert done == [0, 2]
    assert failed == [(1, "KeyError: 'lost'")]
    assert sum("a job failed" in line for line in caplog.messages) == 1
    worker.close()


def test_full_queue_refuses(gate):
    """A bounded queue takes so many waiting jobs and no more."""
    started = threading.Event()

    def work(job):
        started.set()
        gate.wait()

    worker = Worker("t", work, lambda job, error: None, max_queued=2)
    assert worker.try_put(0)
    assert started.wait(PATIENCE_S)
    assert [worker.try_put(job) for job in (1, 2, 3)] == [True, True, False]
    assert not worker.drain(0.0)
    gate.set()
    assert worker.drain(PATIENCE_S)
    assert worker.try_put(4)
    worker.close()


def test_close_settles_waiting_jobs(gate):
    """At close the running job ends and the waiting ones are failed; twice is fine."""
    started, failed = threading.Event(), []

    def work(job):
        started.set()
        gate.wait()

    worker = Worker("t", work, lambda job, error: failed.append(job))
    for job in range(3):
        worker.try_put(job)
    assert started.wait(PATIENCE_S)
    assert not worker.close(0.0), "a job still runs"
    assert failed == [1, 2]
    assert not worker.try_put(9)
    gate.set()
    assert worker.close(PATIENCE_S)
    assert worker.close(PATIENCE_S)
    assert failed == [1, 2]


def test_several_threads_work_at_once(gate):
    """With two threads two jobs run at a time."""
    both = threading.Barrier(2)
    worker = Worker(
        "t", lambda job: both.wait(PATIENCE_S), lambda job, error: None, num_threads=2
    )
    worker.try_put(0)
    worker.try_put(1)
    assert worker.drain(PATIENCE_S)
    assert not both.broken
    worker.close()


def test_threads_are_named_daemons():
    """The threads can be found by name and never keep a process alive."""
    worker = Worker("tiered-named", lambda job: None, lambda job, error: None)
    (thread,) = [t for t in threading.enumerate() if t.name == "tiered-named-0"]
    assert thread.daemon
    worker.close()
    assert not thread.is_alive()
