"""Fixtures of all tests: a fixed seed, short evaluations, and one small run of each method.

Every test begins with torch's seed 0. Tests that need a trained model share the runs of run_of.
"""

import dataclasses
import functools
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # models are so small that more threads only slow them down

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import common
import eval as evaluation
import train
from helpers import SMALL, rank_process

SIGNALS = *train.SIGNALS, signal.SIGCHLD
# All tests but those of test_gpu.py run on the CPU, where results are exact. There a test may also
# fork, which a process that has used a GPU cannot.
HAS_GPU, torch.cuda.is_available = torch.cuda.is_available, lambda: False
if not HAS_GPU():  # then a seed of the CPU would keep a stack for each other kind of device
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.manual_seed_all = lambda seed: None


# `pytest` without arguments runs these files, half of the work, in a second process.
SECOND = [f"{Path(__file__).parent}/test_{x}.py" for x in "contract gpu_fake memory train".split()]


def pytest_configure(config):
    config.addinivalue_line("markers", "ranks: the test starts several processes. While you change "
                                       'a file, run the fast tests alone: pytest -m "not ranks"')
    config.second = None
    if not config.invocation_params.args:
        config.option.ignore, command = SECOND, [sys.executable, "-m", "pytest", "-q", *SECOND]
        config.second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def pytest_sessionfinish(session):
    if second := session.config.second:
        output, _ = second.communicate()
        ended = f"\nThe second process ended with status {second.returncode}:\n{output}"
        session.config.get_terminal_writer().write(ended)
        session.exitstatus = session.exitstatus or second.returncode


def pytest_collection_finish(session):
    gc.freeze()  # else each collection looks again at all that was imported, 5 % of the time
    gc.set_threshold(10_000)
    if any(item.get_closest_marker("ranks") for item in session.items):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
            for rank in range(3):
                rank_process(rank)


@pytest.fixture(autouse=True)
def seed():
    """Begin each test with the seed 0."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def signals():
    """Restore the signal handlers, which a run that ends by an error leaves behind."""
    handlers = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, handlers):
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def short_runs():
    """Shorten all runs: a task on the world has 24 scenes, only runs with --workers have workers.

    Runs with the same captions share one vocabulary, and equal worlds their captions. No file waits
    for the disk. At the end, workers of failed tests are killed: Python would end them by SIGTERM,
    which they ignore, and wait for ever.
    """
    evaluation.WORLD_N, train.CHECKED, train.MOST_WORKERS = 24, 50, 0
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5  # seconds to wait for a failed worker
    vocabulary = functools.cache(common.train_wordpiece)
    common.train_wordpiece = lambda captions, size: list(vocabulary(tuple(captions), size))
    draw = common.World.sample_captions
    captions = functools.cache(lambda world, limit: draw(common.World(*world), limit))
    common.World.sample_captions = lambda world, limit: list(
        captions(dataclasses.astuple(world), limit))
    evaluation.draw_text = functools.cache(evaluation.draw_text)
    os.fsync = lambda file: None
    yield
    rank_process.cache_clear()  # ends the pools, which would print errors at Python's end
    for child in multiprocessing.active_children():
        child.kill()


@pytest.fixture(scope="session")
def run_of(tmp_path_factory, short_runs):
    """Return a function: run_of("sparc") is the directory of a run with the flags SMALL["sparc"].

    The run is made once. A test that changes the directory must copy it first.
    """

    @functools.cache
    def make(name):
        run = tmp_path_factory.mktemp("runs") / name
        train.main([*SMALL[name], "--out", str(run)])
        return run

    return make


@pytest.fixture
def run(run_of, tmp_path):
    """A copy of run_of("sparc"), which a test may change."""
    return shutil.copytree(run_of("sparc"), tmp_path / "run")
