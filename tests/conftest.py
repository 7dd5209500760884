import functools
import os
import signal
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # threads that share so little work wait for each other

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import common
import eval as evaluation
import train
from helpers import SMALL

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGCHLD


def pytest_configure(config):
    config.addinivalue_line("markers", 'ranks: starts several processes; pytest -m "not ranks" is '
                                       "the fast part, for between two changes")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def signals():
    """A run that ends by an error leaves its handlers of signals behind."""
    handlers = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, handlers):
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def short_runs():
    """Tasks on the world take 24 scenes; a vocabulary of the same captions is trained once."""
    evaluation.WORLD_N = 24
    vocabulary = functools.cache(common.train_wordpiece)
    common.train_wordpiece = lambda captions, size: list(vocabulary(tuple(captions), size))


@pytest.fixture(scope="session")
def run_of(tmp_path_factory, short_runs):
    """run_of("sparc"): the directory of a run with SMALL["sparc"], made once.
    Copy it to change it."""

    @functools.cache
    def make(name):
        run = tmp_path_factory.mktemp("runs") / name
        train.main([*SMALL[name], "--out", str(run)])
        return run

    return make
