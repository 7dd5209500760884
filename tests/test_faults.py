"""What a run and its evaluations leave behind after a kill, a failing disk or a damaged file."""

import contextlib
import errno
import json
import multiprocessing
import os
import shutil
import signal
import zipfile
from pathlib import Path

import pytest
import torch

import common
import crash
import eval as evaluation
import train
from common import UserError
from helpers import SMALL, read_log, train_alone, train_until, write_files

SPARC = SMALL["sparc"]
EVALUATED = [*SPARC, "--eval-every", "2"]
# what a checkpoint of revision 02e567a holds
OF_02E567A = {"boxes", "data", "method", "model", "optimizer", "order", "ranks", "samples",
              "scaler", "stage", "step", "words", "workers"}


def test_a_run_survives_faults_at_its_writes(tmp_path, monkeypatch):
    """The short form of tests/crash.py, with one task and one picture."""
    monkeypatch.setattr(evaluation, "default_tasks", lambda *_: ["knn"])
    monkeypatch.setattr(evaluation, "draw_pictures", lambda *_: {})
    counts = crash.campaign("bam", 1, 12, tmp_path)
    assert counts["survived"] == counts["trials"] == 12


class Killed(BaseException):
    """Ends a run at once, as SIGKILL does."""


def run_evaluated(monkeypatch, out, error=None):
    """Train with an evaluation after each second step; the first one ends by the error."""
    evaluate, errors = evaluation.evaluate, [error] * bool(error)

    def failing(*arguments):
        if errors:
            raise errors.pop()
        return evaluate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate", failing)
        train_alone([*EVALUATED, "--resume", "auto", "--out", out])


def evaluated(out):
    """Return the steps of the log, and those with metrics."""
    log = read_log(out)
    return [record["step"] for record in log], [r["step"] for r in log if "i2t/R@1" in r]


@pytest.mark.parametrize("error", [Killed, ValueError])
def test_an_evaluation_that_ends_the_run_is_made_up_and_costs_no_step(tmp_path, monkeypatch, error):
    with pytest.raises(error):
        run_evaluated(monkeypatch, tmp_path, error())
    assert evaluated(tmp_path) == ([1], [])
    assert common.load_checkpoint(tmp_path / "last.pt")["step"] == 2
    run_evaluated(monkeypatch, tmp_path)
    assert evaluated(tmp_path) == ([1, 2, 3, 4, 5, 6], [2, 4, 6])
    run_evaluated(monkeypatch, tmp_path / "whole")
    a, b = ([crash.timeless(record) for record in read_log(run)]
            for run in (tmp_path, tmp_path / "whole"))
    assert a == b
    train_until(2, [*EVALUATED, "--save-every", "1", "--out", tmp_path / "stopped"])
    assert evaluated(tmp_path / "stopped") == ([1], [])
    train_alone(["--resume", "--out", tmp_path / "stopped"])
    assert evaluated(tmp_path / "stopped") == evaluated(tmp_path)


def damage(path, change):
    """Change the middle of the largest record of a file of torch.save."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
    place = largest.header_offset + 30 + largest.file_size // 2
    data[place:place + 64] = change(data[place:place + 64])
    path.write_bytes(data)


@pytest.mark.parametrize("change", [lambda old: bytes([old[0] ^ 1, *old[1:]]),
                                    lambda old: bytes(64)])
def test_a_damaged_checkpoint_is_refused_and_another_one_named(run, run_of, change):
    damage(run / "last.pt", change)
    for command in (lambda: evaluation.main([str(run), "--task", "zeroshot"]),
                    lambda: train_alone(["--resume", "--out", run])):
        with pytest.raises(UserError, match="last.pt cannot be read: its part .* is damaged.*"
                                            "Remedy: begin a new run"):
            command()
    for i, name in enumerate(("stage-1.pt", "step-4.pt", "step-20.pt.tmp")):
        shutil.copy(run_of("sparc") / "last.pt", run / name)
        os.utime(run / name, (i, i))
    with pytest.raises(UserError, match="Remedy: give --checkpoint step-4.pt"):
        train_alone(["--resume", "--out", run])
    train_alone(["--resume", "--checkpoint", "step-4.pt", "--out", run])


def test_a_new_run_continues_from_the_milestone_if_it_has_no_last_pt_yet(run):
    """The run was killed between the two. The next start removes temporary files."""
    left = "last.pt.12.tmp", "eval.json.7.tmp", "last.pt.tmp", "my.tmp"
    write_files(run, dict.fromkeys(left, ""))
    (run / "last.pt").rename(run / "step-6.pt")
    train_alone([*SPARC, "--steps", "7", "--resume", "auto", "--out", run])
    assert [record["step"] for record in read_log(run)] == [1, 2, 3, 4, 5, 6, 7]
    assert [path.name for path in run.glob("*.tmp")] == ["my.tmp"]


def test_a_signal_before_the_training_leaves_no_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "train_wordpiece", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt) as ended:
        train_alone([*SPARC, "--out", tmp_path / "run"])
    assert ended.value.args == (signal.SIGTERM,) and not (tmp_path / "run").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@contextlib.contextmanager
def unwritable(monkeypatch, *names):
    """A context in which these files cannot be written."""
    def failing(old, new):
        if Path(new).name in names:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        yield


def test_what_cannot_be_written_at_the_end_is_not_claimed(tmp_path, monkeypatch, capsys):
    message = "eval.json cannot be written: No space left on device. Step 6 is saved: start the same"
    with unwritable(monkeypatch, "eval.json"), pytest.raises(UserError, match=message):
        train.main([*SPARC, "--out", str(tmp_path)])
    written = "written: " + str(tmp_path / "eval.json")
    assert written not in capsys.readouterr().out and (tmp_path / "alignment.png").exists()
    train.main(["--resume", "--out", str(tmp_path)])
    assert written in capsys.readouterr().out
    assert len((tmp_path / "evals.jsonl").read_text().splitlines()) == 1  # one evaluation


def test_a_file_that_cannot_be_written_fails_alone(run, monkeypatch, capsys):
    for path in run.glob("*.png"):
        path.unlink()
    with unwritable(monkeypatch, "evals.jsonl", "alignment.png"):
        with pytest.raises(UserError, match="evals.jsonl cannot.*alignment.png cannot be written"):
            evaluation.main([str(run)])
    assert f"written: {run}/eval.json" in capsys.readouterr().out
    assert (run / "segmentation.png").exists()


def test_a_full_disk_leaves_the_lines_of_finished_tasks(tmp_path, monkeypatch):
    """The last line replaces the line of the tasks so far, which says that it is not complete."""
    record, path = {"settings": {"step": 3}, "knn": 0.5}, tmp_path / "evals.jsonl"
    evaluation.write_line(tmp_path, record, is_complete=False)
    assert json.loads(path.read_bytes()) == {"complete": False} | record
    with unwritable(monkeypatch, "evals.jsonl"), pytest.raises(UserError, match="cannot be written"):
        evaluation.write_line(tmp_path, record | {"zeroshot": 0.25})
    assert json.loads(path.read_bytes()) == {"complete": False} | record
    evaluation.write_line(tmp_path, record | {"zeroshot": 0.25})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        record | {"zeroshot": 0.25}]


def write_lines(run, writer):
    for number in range(50):
        evaluation.write_line(run, {"settings": {"writer": writer}, "number": number})


def test_two_writers_lose_no_line(tmp_path):
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write_lines, args=(tmp_path, i)) for i in range(2)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    lines = (tmp_path / "evals.jsonl").read_text().splitlines()
    assert len({*lines}) == len(lines) == 100


def test_an_earlier_evaluation_that_ends_later_is_written_beside(run, capsys):
    before = {path.name: path.read_bytes() for path in run.glob("*.*n*") if path.suffix != ".jsonl"}
    state = common.load_checkpoint(run / "last.pt")
    torch.save(state | {"step": 3}, run / "last.pt")
    evaluation.main([str(run)])
    assert evaluation.step_of(run) == 6
    assert {name: (run / name).read_bytes() for name in before} == before
    assert json.loads((run / "step-3-eval.json").read_text())["settings"]["step"] == 3
    assert f"{run}/step-3-alignment.png" in capsys.readouterr().out
    train.main(["--resume", "--steps", "4", "--out", str(run)])  # begins again after step 3
    assert evaluation.step_of(run) == 4


def test_a_run_of_sparc_of_an_older_revision_is_evaluated_and_resumed(run):
    state = common.load_checkpoint(run / "last.pt")
    torch.save({name: state[name] for name in OF_02E567A}, run / "last.pt")
    evaluation.main([str(run), "--task", "retrieval"])
    train_alone(["--resume", "--steps", "7", "--out", run])
    assert [record["step"] for record in read_log(run)] == [1, 2, 3, 4, 5, 6, 7]
