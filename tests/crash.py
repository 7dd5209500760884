"""Break a run at each write, resume it, and compare every file: python tests/crash.py [--method M].
A write is a file that is opened to write, an fsync or a rename. There the run is killed (SIGKILL),
or the write fails (EIO). The same command then continues the run. The files must be those of an
uninterrupted run: weights and optimizer bit for bit, lines, metrics, pixels, but not the times. A
trial is survived if they are, lost if a file is missing, differs or is too much, and refused if the
run does not continue. The exit code is 1 if a trial is lost or refused."""

import argparse
import builtins
import errno
import json
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch
from PIL import Image
from torch.utils._pytree import tree_map_only

import common
import eval as evaluation
import train
from helpers import SMALL

# A save, a milestone, a stage and an evaluation fall on the same step and on different steps.
OFTEN = "--steps 4 --save-every 1 --keep-every 2 --eval-every 3".split()
# times and memory of the log, and settings that tell how the run was continued
MAY_DIFFER = {"images_per_s", "data_share", "peak_memory_bytes", "resume", "checkpoint"}
QUICK = {"zeroshot", "retrieval", "knn"}  # tasks of short evaluations: a trial is about writes
FORK = multiprocessing.get_context("fork")


def break_at(number, kill, counter):
    """Kill this process at the write with this number, or let the write fail. counter: shared."""
    def broken(real, is_write):
        def call(*arguments, **more):
            if is_write(*arguments, **more):
                counter.value += 1
                if counter.value == number:
                    kill and os.kill(os.getpid(), 9)
                    raise OSError(errno.EIO, "Input/output error")
            return real(*arguments, **more)
        return call

    time.sleep = lambda seconds, real=time.sleep: real(min(seconds, 0.01))  # before a second try
    builtins.open = broken(open, lambda file, mode="r", *_, **more: mode[0] in "wax")
    os.replace = broken(os.replace, lambda *_: True)
    os.fsync = broken(lambda file: None, lambda *_: True)  # no trial cuts the power


def one_rank(rank, ranks, port, flags, log, *fault):
    """Train as a rank that torchrun started. An error ends the process with exit code 1."""
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                       "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost",
                       "MASTER_PORT": str(port)}
    with open(log, "a") as sys.stdout:
        if rank == 0:  # the other ranks write nothing
            break_at(*fault)
        try:
            train.main(flags)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(1)


def start(flags, ranks, log, *fault):
    """Train until the end, or until rank 0 has died -> its exit code."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [FORK.Process(target=one_rank, args=(rank, ranks, port, flags, log, *fault))
                 for rank in range(ranks)]
    for process in processes:
        process.start()
    processes[0].join(300)
    for process in processes:  # as torchrun does
        process.join(10 if processes[0].exitcode == 0 else 0)
        process.kill()
        process.join()
    return processes[0].exitcode


def timeless(x):  # a value of a file without what may differ
    if isinstance(x, dict):
        return {name: timeless(value) for name, value in x.items() if name not in MAY_DIFFER}
    return [*map(timeless, x)] if isinstance(x, (list, tuple)) else x


def content(path):
    """Return what must be equal in a file, as text."""
    if path.suffix == ".pt":
        state = torch.load(path, weights_only=True)
        return repr(timeless(tree_map_only(torch.Tensor, lambda x: x.numpy().tobytes(), state)))
    if path.suffix == ".json":
        return repr(timeless(json.loads(path.read_text())))
    if path.suffix == ".jsonl":
        return repr([timeless(json.loads(line)) for line in path.read_text().splitlines()])
    return repr(Image.open(path).tobytes() if path.suffix == ".png" else path.read_bytes())


def campaign(method, ranks, trials, directory):
    """Return {"trials": number, "survived": ...} of a method, and print what is not survived."""
    run, log = Path(directory, method), str(Path(directory, f"{method}.log"))
    flags = [*SMALL[method], *OFTEN, "--resume", "auto", "--out", str(run)]
    files = lambda: {path.name: content(path) for path in run.iterdir()}
    shutil.rmtree(run, ignore_errors=True)
    counter = FORK.Value("i", 0)
    assert start(flags, ranks, log, 0, False, counter) == 0, Path(log).read_text()
    expected, writes, vocabulary = files(), counter.value, common.train_wordpiece
    if (run / "vocab.txt").exists():  # trained once, not in each trial
        words = (run / "vocab.txt").read_text().splitlines()
        common.train_wordpiece = lambda captions, size: list(words)
    faults = [(number, kill) for number in range(1, writes + 1) for kill in (True, False)]
    trials = min(trials or len(faults), len(faults))  # evenly among all
    counts = {"writes": writes, "trials": trials, "survived": 0, "refused": 0, "lost": 0}
    for number, kill in [faults[i * len(faults) // trials] for i in range(trials)]:
        shutil.rmtree(run)
        counter.value = 0
        code = start(flags, ranks, log, number, kill, counter)
        for _ in range(3):
            code = code and start(flags, ranks, log, 0, False, counter)
        found = files()
        wrong = [name for name in expected | found if expected.get(name) != found.get(name)]
        verdict = "refused" if code else "lost" if wrong else "survived"
        counts[verdict] += 1
        if verdict != "survived":
            print(method, ranks, number, "killed" if kill else "failed", verdict, wrong,
                  Path(log).read_text().splitlines()[-1], flush=True)
    common.train_wordpiece = vocabulary
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", choices=SMALL, help="one method; without it all")
    parser.add_argument("--ranks", type=int, help="number of ranks; without it 1, then 2")
    parser.add_argument("--trials", type=int, default=0, help="number for each method; 0: all")
    args, wrong, usual = parser.parse_args(), 0, evaluation.default_tasks
    evaluation.WORLD_N, train.CHECKED = 8, 50
    evaluation.default_tasks = lambda *more: [name for name in usual(*more) if name in QUICK]
    with tempfile.TemporaryDirectory() as directory:
        for ranks in [args.ranks] if args.ranks else (1, 2):
            for method in [args.method] if args.method else ("sparo", "stair", "sparc", "bam"):
                counts = campaign(method, ranks, args.trials, directory)
                print(f"{method}, {ranks} ranks: {counts}", flush=True)
                wrong += counts["refused"] + counts["lost"]
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
