"""train.py: settings, what a run writes, signals, resuming, ranks and costs."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import common
import eval as evaluation
import gpu_bench
import sparc
import train
from common import UserError
from helpers import (ROOT, SMALL, assert_same_weights, picture, read_log, run_ranks, shapes_alone,
                     start_program, tiny_model, train_alone, train_on_rank, weights, write_files,
                     write_shards, write_table)
from test_eval import opened

SPARC = SMALL["sparc"]


def wait_for_steps(ended, run, n):
    """Wait until the run of another process has logged n steps. ended(): its exit code or None."""
    while not (run / "log.jsonl").exists() or len(read_log(run)) < n:
        assert ended() is None
        time.sleep(0.02)


def test_flags_override_presets_and_presets_override_defaults_and_help_has_both(capsys):
    args = train.parse_args(["--method", "sparc", "--preset", "l14", "--lambda-f=5"])
    assert (args.lambda_f, args.steps, args.beta2) == (5.0, 250_000, 0.98)  # flag, preset, default
    with pytest.raises(SystemExit):
        train.main(["--method", "sparo", "--preset", "cc3m-b32", "--help"])
    assert "(default: clip-b32)" in capsys.readouterr().out


def test_a_run_writes_its_log_settings_vocabulary_and_pictures(run_of):
    run = run_of("sparc")
    log = read_log(run)
    assert [record["step"] for record in log] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "global", "local", "local_wrong_image", "scale", "lr", "grad_norm",
            "images_per_s", "data_share", "chance_loss"} <= set(log[0])
    for name in ("config.json", "vocab.txt", "first-batch.png", "alignment.png"):
        assert (run / name).exists()
    results = json.loads((run / "eval.json").read_text())
    assert 0 <= results["zeroshot"] <= 1 and results["settings"]["step"] == 6


def test_another_seed_gives_other_weights_and_another_seed_or_order_gives_other_data():
    """A checkpoint that changed data cannot continue has another order (see Progress.restore)."""
    found = []
    for seed, order in ("0", 0), ("1", 0), ("0", 7):
        args = train.parse_args([*SPARC, "--seed", seed])
        data = train.open_training_data(args, train.METHODS["sparc"])
        model = train.new_model(args, train.METHODS["sparc"], range(50))
        batches = train.open_loader(args, data, None, None, model, train.Progress(order=order),
                                    "cpu", None)
        found.append((model.g_v.weight, next(batches)["images"]))
    weights, images = zip(*found)
    assert not torch.equal(*weights[:2])
    assert not any(torch.equal(*pair) for pair in itertools.combinations(images, 2))


@pytest.mark.parametrize("name, flags", [
    *[("sparc", flags) for flags in (
        "--amp bf16", "--token-mean batch", "--align softmax", "--objective clip",
        "--objective filip --filip-keep 1", "--objective clip+filip", "--objective pacl",
        "--objective gloria --amp bf16", "--objective mgca --mgca-prototypes 7", "--sigma 0.3",
        "--h-v plain", "--clip-grad 0")],
    *[("sparo", f"--readout {flags}") for flags in (
        "sparo --no-replace-block", "cls", "gap", "bottleneck",
        "attpool --heads separate --slot-norm --slot-projection", "fdt --codes 50 --amp bf16")]])
def test_flags_of_a_method_change_its_training(tmp_path, run_of, name, flags):
    train_alone([*SMALL[name], *flags.split(), "--steps", 2, "--out", tmp_path])
    a, b = (read_log(run)[1]["loss"] for run in (tmp_path, run_of(name)))
    assert a != b
    embedder, _ = evaluation.load_run(tmp_path)
    tasks = "zeroshot" if name == "sparc" else None  # read-outs change all tasks
    data, options = opened("shapes:size=16,objects=2", task=tasks)
    assert 0 <= evaluation.evaluate(embedder, data, options)["zeroshot"] <= 1
    evaluation.draw_pictures(embedder, data, {"alignment", "slots", "segmentation"})


@pytest.mark.parametrize("name, metric", [
    ("sparc", "i2t/R@1"), ("stair", "textfree/zeroshot"), ("bam", "knn")])
def test_evaluation_during_training_changes_only_the_log(tmp_path, monkeypatch, name, metric):
    """The statistics of BatchNorm and the random numbers of stochastic depth must not change."""
    evaluate, runs = evaluation.evaluate, [tmp_path / "without", tmp_path / "with"]
    monkeypatch.setattr(evaluation, "evaluate", lambda *a: torch.rand(5) is None or evaluate(*a))
    flags = [*SMALL[name]]
    flags[flags.index("--image-encoder") + 1] += ",drop_path=0.3"
    for run, more in zip(runs, (["--log-every", "1"], ["--log-every", "4", "--eval-every", "2"])):
        train_alone([*flags, "--steps", "4", *more, "--out", run])
    states = [common.load_checkpoint(run / "last.pt") for run in runs]
    for key in ("model", "optimizer", "ranks"):
        torch.testing.assert_close(*[state[key] for state in states], rtol=0, atol=0)
    log, watched = map(read_log, runs)
    assert [record["step"] for record in watched if metric in record] == [2, 4]
    assert all(0 <= record[metric] <= 1 for record in watched[1:])
    for record in watched:
        other = log[record["step"] - 1]
        other |= {key: 0 for key in ("images_per_s", "data_share", "peak_memory_bytes")}
        assert other == {key: other[key] and record[key] for key in other}
        assert metric not in other


def test_settings_are_checked_again_if_a_resume_changes_the_steps(tmp_path):
    """After one step of 16 images, 3 epochs have 8 steps of 4 images more, not 12 steps in all."""
    write_files(tmp_path, {f"data/a/{i}.png": picture() for i in range(16)})
    flags = [*SMALL["bam"], "--data", tmp_path / "data", "--image-size", 16, "--out"]
    flags += [tmp_path / "run"]
    train_alone([*flags, "--batch", 16, "--epochs", 1])
    more = ["--resume", "--batch", 4, "--epochs", 3, "--contrastive-crop", "--crop-start", 10]
    with pytest.raises(UserError, match="--crop-start 10 must be below --steps 9"):
        train_alone([*flags, *more])


@pytest.fixture(scope="session")
def three_epochs(tmp_path_factory, short_runs):
    """The flags and the directory of a run of three epochs of 15 images, with 6 steps of 8."""
    place = tmp_path_factory.mktemp("epochs")
    flags = [*SPARC, "--data", write_table(place, 15), "--image-size", "16"]
    train_alone([*flags, "--epochs", "3", "--out", place / "run"])
    assert read_log(place / "run")[-1]["lr"] == pytest.approx(common.cosine_lr(5, 6, 50, 2e-3))
    return flags, place / "run"


@pytest.mark.parametrize("batch, epochs, steps", [
    (16, 4, 6 + 1), (4, 4, 6 + 3), (4, 3, 6), (8, 5, 6 + 4), (16, 2, None)])
def test_epochs_count_the_images_of_all_batch_sizes(tmp_path, three_epochs, batch, epochs, steps):
    """After three epochs of 15 images the batch changes. --steps then replaces --epochs."""
    flags, run = three_epochs
    flags = [*flags, "--out", shutil.copytree(run, tmp_path / "run"), "--resume"]
    if steps is None:
        with pytest.raises(UserError, match="made 6 steps, .*--epochs.* omit them"):
            train_alone([*flags, "--batch", batch, "--epochs", epochs])
        return
    for more, expected in ((["--batch", batch, "--epochs", epochs], steps),
                           (["--batch", 8, "--epochs", epochs + 1], steps + 2),
                           (["--steps", steps + 3], steps + 3)):
        train_alone([*flags, *more])
        assert read_log(tmp_path / "run")[-1]["step"] == expected


@pytest.mark.parametrize("amp", ["bf16", "off"])
def test_tf32_is_used_only_in_updates_of_half_precision(tmp_path, monkeypatch, amp):
    seen, encode, matmul = [], sparc.Model.patch_outputs, torch.backends.cuda.matmul

    def spy(model, images):  # a logged step computes another loss in evaluation mode
        seen.append((model.training, matmul.allow_tf32))
        return encode(model, images)

    monkeypatch.setattr(sparc.Model, "patch_outputs", spy)
    monkeypatch.setattr(evaluation, "evaluate_and_show", lambda embedder, *_: seen.append(
        ("end", embedder.model.training, matmul.allow_tf32)))
    matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # as in NVIDIA's containers
    train.main([*SPARC, "--amp", amp, "--steps", "2", "--out", str(tmp_path)])
    assert set(seen) == {(True, amp == "bf16"), (False, False), ("end", False, False)}
    assert matmul.allow_tf32 and torch.backends.cudnn.allow_tf32            # as before


def test_main_is_a_function_in_any_thread_and_leaves_nothing_changed(tmp_path):
    def state():
        handlers = [signal.getsignal(number) for number in train.SIGNALS]
        return handlers, os.getcwd(), torch.get_num_threads(), torch.get_default_dtype()

    before = state()
    with ThreadPool(1) as pool:  # Python handles signals in the main thread alone
        pool.apply(train.main, ([*SPARC, "--steps", "1", "--out", str(tmp_path / "run")],))
        pool.apply(evaluation.main, ([str(tmp_path / "run"), "--task", "zeroshot"],))
    with pytest.raises(UserError, match="already has a"):
        train.main([*SPARC, "--out", str(tmp_path / "run")])
    assert state() == before


@pytest.mark.parametrize("build, graphs", [
    (lambda: common.ViT(16, 8, width=8, depth=3, heads=2, drop_path=0.1), 3),
    (lambda: common.ResNet(32, (1, 1, 1, 1)), 1)])
def test_an_encoder_is_compiled_completely(monkeypatch, build, graphs):
    """Each block of a ViT has a stochastic depth and so a graph of its own. torch's limit is 8
    graphs, here 2.
    """
    compile, compiled, encoder = torch.compile, [], build()
    count = lambda graph, inputs: compiled.append(graph) or graph
    monkeypatch.setattr(torch, "compile", lambda block: compile(block, backend=count))
    with torch._dynamo.config.patch(cache_size_limit=2):
        train.wrap(SimpleNamespace(compile=True), encoder, 1)
        encoder(torch.randn(2, 3, encoder.image_size, encoder.image_size)).sum().backward()
        assert len(compiled) == graphs
        assert torch._dynamo.config.cache_size_limit > 2 * 24  # blocks in a CLIP of ViT-L/14


@pytest.mark.parametrize("name, flags, first", [
    ("sparc", "", "trained"), ("bam", "", "trained"), ("sparc", "--eval-every 5", "opened"),
    ("sparc", "--eval-every 5 --bench 2", "trained"), ("sparc", "--eval-data x.csv", "opened")])
def test_only_an_evaluation_that_is_asked_for_opens_its_data_early(monkeypatch, tmp_path, name,
                                                                   flags, first):
    for function, message in (("open_evaluation", "opened"), ("open_loader", "trained")):
        error = UserError(message)
        monkeypatch.setattr(train, function, mock.Mock(side_effect=error))
    with pytest.raises(UserError, match=first):
        train_alone([*SMALL[name], *flags.split(), "--out", tmp_path])


@pytest.mark.parametrize("flags, steps", [
    (["--log-every", "4"], [1, 4, 6]),
    (["--log-every", "99", "--save-every", "5"], [1, 5, 6])])
def test_the_log_begins_at_step_1_and_has_each_step_that_is_saved(tmp_path, flags, steps):
    train_alone([*SPARC, *flags, "--out", tmp_path])
    assert [record["step"] for record in read_log(tmp_path)] == steps


@pytest.mark.ranks
def test_a_run_keeps_others_out_and_is_saved_by_a_signal_to_all_processes(tmp_path):
    """torchrun and Slurm send a signal to all processes, also to the workers that load data."""
    run = tmp_path / "a run"
    flags = [*SPARC, "--steps", "9999", "--save-every", 1, "--workers", "2", "--out", run]
    process = start_program(tmp_path / "printed", "train.py", flags)
    wait_for_steps(lambda: process.exitcode, run, 5)
    with pytest.raises(UserError, match="a run is in use by a run: stop it"):
        train_alone(["--resume", "--out", run])
    evaluation.main([str(run), "--task", "zeroshot"])
    os.killpg(process.pid, signal.SIGTERM)
    process.join()
    message = f"start the same command again with --resume --out '{run}'"
    assert message in (tmp_path / "printed").read_text()
    assert process.exitcode == -signal.SIGTERM
    assert common.load_checkpoint(run / "last.pt")["step"] == read_log(run)[-1]["step"] >= 5


@pytest.mark.ranks
def test_an_error_ends_the_program_and_its_workers(tmp_path):
    """Workers ignore SIGTERM, which ends other processes."""
    write_files(tmp_path, {"gone.csv": "filepath,title\na.jpg,n\n"})
    flags = [*SPARC, "--data", str(tmp_path / "gone.csv"), "--image-size", "16", "--workers", "1"]
    process = start_program(tmp_path / "printed", "train.py", [*flags, "--out", tmp_path / "run"])
    process.join(150)
    printed = (tmp_path / "printed").read_text()
    assert process.exitcode == 1 and f"\n{printed}".count("\nerror: ") == 1
    assert "Traceback" not in printed


@pytest.mark.parametrize("sent, step", [
    ("INT", 2), ("TERM", 2), ("TERM TERM", 2), ("INT TERM", 2), ("USR1", 2), ("USR2", 2),
    ("XCPU", 2), ("HUP", 2), ("TERM INT", None), ("IGN HUP", 6)])
def test_the_first_signal_saves_and_a_second_ctrl_c_ends_at_once(tmp_path, monkeypatch, sent, step):
    """IGN: the signal is ignored, as SIGHUP under nohup."""
    clip, steps, names = train.clip_grad_norm_, itertools.count(1), sent.split()

    def clip_and_send(*arguments):
        if next(steps) == 2:
            for name in names:
                if name != "IGN":
                    signal.raise_signal(signal.Signals[f"SIG{name}"])
        return clip(*arguments)

    monkeypatch.setattr(train, "clip_grad_norm_", clip_and_send)
    for number in train.SIGNALS:  # a shell may have some of them ignored
        signal.signal(number, signal.SIG_IGN if "IGN" in names else signal.SIG_DFL)
    monkeypatch.setattr(evaluation, "evaluate_and_show", lambda *_: None)
    if step is None:
        with pytest.raises(KeyboardInterrupt):
            train.main([*SPARC, "--out", str(tmp_path)])
        return
    largest = max(signal.Signals[f"SIG{name}"] for name in names if name != "IGN")
    assert train.main([*SPARC, "--out", str(tmp_path)]) == (largest if step == 2 else None)
    assert common.load_checkpoint(tmp_path / "last.pt")["step"] == step


def fail():
    raise RuntimeError("the mistake of a user's own code")


@pytest.mark.parametrize("patience, act, message", [
    (1800, lambda: os.kill(os.getpid(), signal.SIGKILL), "DataLoader worker .pid.*(killed|exited)"),
    (0.4, lambda: time.sleep(0.8), "DataLoader timed out"),
    (1800, fail, "in DataLoader worker(.|\\n)*of a user's own code")])
def test_a_worker_that_fails_gives_an_error(tmp_path, monkeypatch, patience, act, message):
    """If /dev/shm is full, torch's thread that sends a batch dies, but the worker lives on."""
    monkeypatch.setattr(train, "PATIENCE", patience)
    monkeypatch.setattr(train, "LOOK", 0.2)
    monkeypatch.setattr(common.WorldStream, "collate", lambda self, samples: act())
    with pytest.raises(RuntimeError, match=message) as found:
        train.main([*SPARC, "--workers", "1", "--out", str(tmp_path)])
    found.value.__traceback__ = found.value.__context__ = None  # they would keep the workers alive


@pytest.mark.parametrize("length, workers, refused", [(71, 1, True), (71, 0, False), (70, 1, False)])
def test_a_long_tmpdir_is_refused(monkeypatch, length, workers, refused):
    """Workers send batches by sockets below TMPDIR, and the name of a socket is short."""
    monkeypatch.setattr(train.tempfile, "gettempdir", lambda: f"/tmp/{'x' * (length - 5)}")
    monkeypatch.setattr(torch.utils.data, "DataLoader", lambda dataset, **settings: dataset)
    error = pytest.raises(UserError, match="TMPDIR /tmp/x+ is too long: export TMPDIR=/tmp")
    with error if refused else contextlib.nullcontext():
        assert list(train.read_in_workers([7], workers)) == [7]


class Silent:
    """A loader whose workers send one batch and then nothing. Each wait is a timeout at once."""

    def __init__(self, *arguments, **settings):
        self.left, self._workers = [1], [SimpleNamespace(pid=n) for n in (111, 222)]

    __iter__ = lambda self: self

    def __next__(self):
        if self.left:
            return self.left.pop()
        raise RuntimeError("DataLoader timed out after 10 seconds")


def test_a_run_without_a_batch_says_what_it_waits_for_every_5_minutes(monkeypatch, capsys):
    monkeypatch.setattr(torch.utils.data, "DataLoader", Silent)
    batches = train.read_in_workers(None, 2)
    next(batches)
    with pytest.raises(RuntimeError, match="timed out"):
        next(batches)
    notes = re.findall(r"no batch for (\d+) s. .*/proc/222/fd", capsys.readouterr().err)
    assert notes == ["300", "600", "900", "1200", "1500"]


@pytest.mark.parametrize("data, batch, cores, ranks, local, expected", [
    ("table", 4, 64, 1, 1, 8), ("table", 4, 12, 2, 2, 6),       # 40 images; at most 8
    ("table", 16, 64, 1, 1, 2), ("table", 64, 64, 1, 1, 0),     # batches in an epoch
    ("table", 4, 12, 4, 2, 6), ("table", 4, 1, 4, 2, 0),        # ranks on each of two machines
    ("shards", 4, 64, 1, 1, 5), ("shards", 4, 64, 2, 2, 2), ("shapes", 4, 64, 1, 1, 0)])
def test_the_default_of_workers(tmp_path, monkeypatch, data, batch, cores, ranks, local, expected):
    monkeypatch.setattr(train, "MOST_WORKERS", 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(train, "this_rank", lambda: (0, ranks))
    monkeypatch.setattr(common, "local_rank", lambda: (0, local))
    table = common.CaptionTable([(f"{i}.jpg", "n") for i in range(40)], "x")
    source = {"table": table, "shapes": common.World(),
              "shards": common.TarShards(write_shards(tmp_path, [1] * 5))}[data]
    args = SimpleNamespace(batch=batch)
    assert train.usual_workers(args, source) == expected
    monkeypatch.setattr(common, "gather_objects", lambda own: [own, 1, 3])
    assert train.usual_workers(args, source) == min(1, expected)  # of all machines, the least
    monkeypatch.setattr(sys, "platform", "darwin")
    assert train.usual_workers(args, source) == 0


def test_a_run_shows_and_keeps_the_number_of_its_workers(tmp_path, monkeypatch, capsys, run_of):
    assert common.read_config(run_of("sparc"))["workers"] == 0
    monkeypatch.setattr(train, "MOST_WORKERS", 1)
    flags = [*SPARC, "--data", write_table(tmp_path, 16), "--image-size", 16, "--out"]
    train_alone([*flags, tmp_path / "run", "--steps", 1])
    printed = capsys.readouterr().out
    assert "ranks: 1; threads of a rank: 1; --workers 1;" in printed
    assert "is shorter than --warmup" in printed  # 50 steps, here and in the preset
    monkeypatch.setattr(train, "MOST_WORKERS", 0)
    for more in ([], ["--workers", 0]):
        train_alone([*flags, tmp_path / "run", "--steps", 2, "--resume", "--warmup", 2, *more])
        assert common.read_config(tmp_path / "run")["workers"] == 1 - len(more) / 2
        printed = capsys.readouterr().out
        assert ("workers or the version have changed" in printed) == (more != [])
        assert "shorter than --warmup" not in printed


def leave_after_rank_0(rank, run):
    """Train -> when this rank leaves train(), [when rank 0 has drawn], and the most waits that the
    rank's clock had before another one. All ranks have the clock of this machine."""
    kept, drawn, wait_for = [], [], train.Clock.wait_for

    def draw(*arguments):
        time.sleep(0.2)
        drawn.append(time.monotonic())
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Clock, "wait_for", lambda clock, batches: (
            kept.append(len(clock.waits)), wait_for(clock, batches))[1])
        patch.setattr(evaluation, "evaluate_and_show", draw if rank == 0 else lambda *_: None)
        args = train.parse_args([*SMALL["sparc"], "--log-every", "2", "--out", run])
        os.makedirs(run, exist_ok=True)
        train.train(args, None if rank else Path(run), torch.device("cpu"))
    return time.monotonic(), drawn, max(kept)


@pytest.mark.ranks
def test_ranks_wait_for_rank_0s_pictures_and_reset_their_clocks(tmp_path):
    (first, drawn, kept), other = run_ranks(tmp_path, leave_after_rank_0, 2, str(tmp_path / "run"))
    assert first >= drawn[0] and other[0] >= drawn[0] and not other[1]
    assert kept == other[2] == 1


@pytest.mark.parametrize("stderr", [None, object()])  # closed, of a notebook
def test_neither_characters_that_a_terminal_lacks_nor_a_dead_stream_end_a_run(monkeypatch, stderr):
    """Names of files may have any characters. Nobody reads after `| head`."""
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stderr", stderr)
    with open(writer, "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        common.prepare_output()
        print("\u00e9\udcff")
        assert os.read(reader, 99) == b"\\xe9\\udcff\n"
        os.close(reader)
        print("not read")
        print("nor this", flush=True)


def test_resume_notices_changed_words_and_changed_data_of_equal_size(tmp_path, capsys):
    rows = Path(write_table(tmp_path, 9)).read_text().splitlines()
    write_files(tmp_path, {"b.csv": "\n".join([rows[0], *rows[:0:-1]])})
    run, notice = tmp_path / "run", "note: the data, --seed, ranks, workers or the version"
    flags = [*SPARC, "--image-size", "16", "--out", run, "--data"]
    train_alone([*flags, tmp_path / "table.csv", "--steps", "1"])
    for steps, (name, expected) in enumerate((("table.csv", 0), ("b.csv", 1)), 2):
        capsys.readouterr()
        train_alone([*flags, tmp_path / name, "--steps", steps, "--resume"])
        assert capsys.readouterr().out.count(notice) == expected
    words = (run / "vocab.txt").read_text().split("\n")
    words[-3:-1] = words[-2], words[-3]
    (run / "vocab.txt").write_text("\n".join(words))
    for command in (lambda run: train_alone(["--resume", "--out", run]), evaluation.load_run):
        with pytest.raises(UserError, match="vocab.txt has other words than"):
            command(run)


def test_a_resumed_run_names_its_own_command_and_directory(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--resume", "--out", "run"])
    train_alone(["--resume", "--out", "run"])
    assert "step 6 of 6" in capsys.readouterr().out
    config = common.read_config(run)
    assert (config["argv"], config["directory"]) == (sys.argv, str(tmp_path))
    assert config["steps"] == 6


def test_resume_drops_an_incomplete_line_of_the_log_and_names_a_damaged_one(run):
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (run / "log.jsonl").write_text("".join([*lines, '{"step": 7}\n', '{"st']))
    train_alone(["--resume", "--out", run])
    assert (run / "log.jsonl").read_text() == "".join(lines)
    for bad in (b"garbage\n", b"{}\n", b"7\n", b"\xff\n"):
        damaged = [*map(str.encode, lines[:2]), bad, *map(str.encode, lines[3:])]
        (run / "log.jsonl").write_bytes(b"".join(damaged))
        with pytest.raises(UserError, match="Line 3 of .*log.jsonl is damaged, delete it: "):
            train_alone(["--resume", "--out", run])
        assert (run / "log.jsonl").read_bytes() == b"".join(damaged)


@pytest.mark.parametrize("stopped, flags, message", [
    (6, "--steps 40", "contradict"),                       # stages of 10, 10, 20 steps
    (6, "--steps 12", "contradict"),                       # of 3, 3, 6: step 6 ends stage 2
    (6, "--steps 5", "--steps, .*contradict"),
    (2, "--stages single", "contradict"), (6, "--steps 9", None)])
def test_resume_never_goes_back_a_stage(tmp_path, with_milestones, stopped, flags, message):
    """The stages have 2, 2 and 4 steps."""
    run = shutil.copytree(with_milestones, tmp_path / "run")
    flags = ["--checkpoint", f"step-{stopped}.pt", *flags.split()]
    message = f"has made {stopped} steps, up to stage .*{message}" if message else None
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        train_alone(["--resume", *flags, "--out", run])


@pytest.mark.ranks
def test_a_signal_has_its_usual_effect_in_the_final_evaluation(tmp_path, monkeypatch):
    usual = [signal.getsignal(number) for number in train.SIGNALS]
    monkeypatch.setattr(train, "finish", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt) as ended:
        train.main([*SPARC, "--steps", "1", "--out", str(tmp_path)])
    assert ended.value.args == (signal.SIGTERM,)
    assert [signal.getsignal(number) for number in train.SIGNALS] == usual


def test_workers_do_not_hold_the_lock_of_a_killed_run(tmp_path):
    flags = [*SPARC, "--steps", "9999", "--workers", "2", "--save-every", "1", "--out", tmp_path]
    process = start_program(os.devnull, "train.py", flags)
    wait_for_steps(lambda: process.exitcode, tmp_path, 2)
    process.kill()
    process.join()
    train.lock_run(tmp_path).close()


def test_a_run_without_out_gets_a_new_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, {"runs/mine/slurm-1.out": "no obstacle"})
    train_alone([*SPARC, "--steps", "1", "--out", "runs/mine"])
    assert sorted(os.listdir("runs/mine")) == [
        "config.json", "first-batch.png", "last.pt", "lock", "log.jsonl", "slurm-1.out", "vocab.txt"]
    shutil.rmtree("runs")
    for _ in range(2):
        train_alone([*SPARC, "--steps", "1"])
    assert sorted(os.listdir("runs")) == ["sparc", "sparc-2"]


def die_twice():
    """Join the group. Rank 1 is killed until torchrun has restarted the ranks twice."""
    common.init_distributed()
    dist.barrier()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "2" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    common.wait_for_rank_0()
    dist.destroy_process_group()


@pytest.mark.ranks
def test_ranks_that_torchrun_restarts_find_each_other():
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="test",
                          max_restarts=2, rdzv_backend="c10d", start_method="fork",
                          rdzv_endpoint="localhost:0")
    elastic_launch(config, die_twice)()


def signalled_rank(rank, out):
    """Train, and send rank 1 a signal in step 2. Steps are slow, so that ranks ask after each."""
    step = train.Progress.advance

    def advance(at, *arguments):
        step(at, *arguments)
        if (rank, at.step) == (1, 2):
            signal.raise_signal(signal.SIGUSR1)
        time.sleep(0 if rank else 0.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Progress, "advance", advance)
        patch.setattr(train, "ASK", 0.05)
        return train_on_rank(rank, [*SPARC, "--steps", "20", "--save-every", "7", "--out", out])


@pytest.mark.ranks
def test_a_signal_to_one_rank_stops_all_ranks_after_the_same_step(tmp_path):
    assert run_ranks(tmp_path, signalled_rank, 2, str(tmp_path)) == [signal.SIGUSR1] * 2
    assert common.load_checkpoint(tmp_path / "last.pt")["step"] in (2, 3)


@pytest.mark.parametrize("step, due", [(0.01, "1 11 21"), (0.5, "1 5 9 13 17 21"), (3, None)])
def test_ranks_ask_each_other_by_time_and_rarely(monkeypatch, step, due):
    """Ranks ask each other about every 2 seconds, but at the latest after 10 steps."""
    now, asked = [0.0], []
    monkeypatch.setattr(train.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(train.dist, "all_reduce", lambda *arguments: asked.append(number))
    monkeypatch.setattr(train.time, "monotonic", lambda: now[0])
    stop = train.Stop()
    for number in range(1, 22):
        now[0] += step
        assert stop.agreed("cpu", False) == 0
    assert asked == (list(map(int, due.split())) if due else list(range(1, 22)))
    for _ in range(2):  # torchrun or Slurm send a second signal for one Ctrl-C
        stop.note(signal.SIGINT, None)
    assert stop.agreed("cpu", True) == signal.SIGINT
    stop.fail("no disk")
    stop.note(signal.SIGTERM, None)
    assert stop.agreed("cpu", True) == stop.FAILED


def test_a_signal_ends_the_search_for_boxes_and_the_resumed_run_repeats_it(tmp_path, monkeypatch):
    write_files(tmp_path, {f"data/{name}/{i}.png": picture() for name in "ab" for i in range(8)})
    flags = [*SMALL["bam"], "--steps", "6", "--contrastive-crop", "--crop-start", "3",
             "--data", str(tmp_path / "data"), "--image-size", "16", "--out"]
    train_alone([*flags, tmp_path / "whole"])
    train_alone([*flags, tmp_path / "plain", "--no-contrastive-crop"])
    both = [weights(tmp_path / run)["projector.0.weight"] for run in ("whole", "plain")]
    assert not torch.equal(*both)
    boxes = common.load_checkpoint(tmp_path / "whole/last.pt")["boxes"]
    assert boxes.shape == (16, 4) and (boxes[:, :2] < boxes[:, 2:]).all()
    read = evaluation.read_images

    def each(*arguments):
        for pair in read(*arguments):
            signal.raise_signal(signal.SIGTERM)
            yield pair

    monkeypatch.setattr(evaluation, "read_images", each)
    assert train.main([*flags, str(tmp_path / "run")]) == signal.SIGTERM
    assert common.load_checkpoint(tmp_path / "run/last.pt")["step"] == 3
    monkeypatch.undo()
    train_alone([*flags, tmp_path / "run", "--resume"])
    assert_same_weights(tmp_path / "whole", tmp_path / "run")


def test_a_batch_that_ranks_cannot_divide_is_refused(monkeypatch):
    monkeypatch.setattr(train, "this_rank", lambda: (0, 2))
    with pytest.raises(UserError, match="--batch 7 must be a multiple of the 2 ranks"):
        train.main([*SPARC, "--batch", "7"])


def test_a_rank_with_another_flag_is_refused_before_the_run_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "gather_objects", lambda facts: [facts, facts | {"--lr": 9.0}])
    with pytest.raises(UserError, match="Rank 1 has --lr 9.0, rank 0 has 0.002"):
        train.main([*SPARC, "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change, message", [
    ({"data": "8 images"}, "data 8 images, rank 0 has 9 images"),
    ({"words": 6}, "vocabulary with the hash 6, rank 0 has 5"),
    ({"annotations": 9}, "captions, labels or boxes with the hash 9, rank 0 has 8"),
    ({"step": 4}, "last.pt after step 4, rank 0 has 3"), ({"fp16": True}, "fp16 True")])
def test_ranks_that_would_train_otherwise_are_refused(monkeypatch, change, message):
    facts = []
    monkeypatch.setattr(common, "gather_objects", lambda own: facts.append(own) or facts)
    for more in ({}, {"order": 7}, change):  # rank 0, a rank that trains alike, another rank
        settings = {"data": "9 images", "words": 5, "step": 3, "fp16": False} | more
        scaler = torch.amp.GradScaler("cpu", enabled=settings.pop("fp16"))
        refused = pytest.raises(UserError, match=message)
        with refused if more is change else contextlib.nullcontext():
            annotations = settings.pop("annotations", 8)
            train.Progress(**settings).check_ranks(annotations, scaler)


def test_a_rank_whose_checkpoint_is_of_another_step_is_refused(run, monkeypatch):
    """The first training stands for rank 0, the second one for rank 1."""
    train_alone(["--resume", "--out", run])  # in this directory; a run may come from another one
    facts, state = {}, common.load_checkpoint(run / "last.pt")
    monkeypatch.setattr(common, "gather_objects", lambda own: [
        facts.setdefault(str([*own]), own) if isinstance(own, dict) else own, own])
    train_alone(["--resume", "--out", run])
    torch.save(state | {"step": 3}, run / "last.pt")
    with pytest.raises(UserError, match="Rank 1 has a last.pt after step 3, rank 0 has 6"):
        train_alone(["--resume", "--out", run])


def test_other_ranks_have_the_words_of_rank_0(monkeypatch):
    monkeypatch.setattr(train, "this_rank", lambda: (1, 2))
    monkeypatch.setattr(common, "gather_objects", lambda own: [[*common.SPECIAL_TOKENS, "a"], own])
    assert train.build_tokenizer(train.parse_args(SPARC), None).vocab[-1] == "a"


WHOLE = ["--image-size", "16", "--crop-scale", "1", "--workers", "0"]


def train_on_ranks(rank, table, roots, out):
    """Train on one table, then on this rank's copy of the images, of which rank 1 lacks some."""
    flags = [*SPARC, *WHOLE, "--data", table, "--out"]
    train_on_rank(rank, [*flags, f"{out}/same", "--steps", 4])
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "check_first_batch", lambda *arguments: None)  # has images twice
        train_on_rank(rank, [*flags, f"{out}/part", "--image-root", roots[rank], "--steps", 3])
    return printed.getvalue()


@pytest.mark.ranks
def test_the_log_of_two_ranks_is_that_of_one_process(tmp_path):
    """Each step has the whole table, and no image is cropped. The log and its warning count what
    any rank skipped."""
    table = write_table(tmp_path, 8)
    train_alone([*SPARC, *WHOLE, "--data", table, "--steps", 4, "--out", tmp_path / "alone"])
    write_files(tmp_path / "copy", {f"{i}.jpg": picture() for i in (3, 5)})
    roots = [str(tmp_path), str(tmp_path / "copy")]
    printed, _ = run_ranks(tmp_path, train_on_ranks, 2, table, roots, str(tmp_path))
    alone, same, part = (read_log(tmp_path / name) for name in ("alone", "same", "part"))
    assert len(alone) == len(same) == 4
    names = {"loss", "global", "local", "scale", "grad_norm", "chance_loss", "lr", "step"}
    for one, two in zip(alone, same):
        assert one.keys() == two.keys() > names and "skipped" not in two
        for name in names:
            assert two[name] == pytest.approx(one[name], rel=1e-4)
    lost = [record.get("skipped", {}).get("image that does not exist", 0) for record in part]
    assert lost == sorted(lost) and lost[-1] >= 3
    assert "more than a tenth of the samples are skipped" in printed


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE",
                                  "PMI_SIZE"])
def test_several_tasks_without_torchrun_are_refused(monkeypatch, name):
    monkeypatch.setenv(name, "2")
    with pytest.raises(UserError, match="^2 tasks were .*srun --ntasks-per-node=1 torchrun"):
        train.main(SPARC)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(common.dist, "rendezvous", lambda *place, timeout: 1 / 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ZeroDivisionError):  # two ranks meet
        common.init_distributed()


@pytest.mark.parametrize("name", train.OPTIMIZERS)
def test_a_resumed_optimizer_has_the_settings_of_the_command_line(name):
    args, model = train.Config(optimizer=name, weight_decay=0.1), torch.nn.Linear(2, 1)
    optimizer = train.build_optimizer(args, model, None)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = {"optimizer": optimizer.state_dict()}
    args = dataclasses.replace(args, weight_decay=0.7, beta2=0.5)
    resumed = train.build_optimizer(args, model, saved)
    assert resumed.param_groups[0]["weight_decay"] == 0.7
    assert resumed.param_groups[0].get("betas", (0, 0.5))[1] == 0.5
    for p in model.parameters():
        for key, value in optimizer.state[p].items():
            torch.testing.assert_close(resumed.state[p][key], value, rtol=0, atol=0)


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_wait_for_torchrun_while_rank_0_prints_an_error(monkeypatch, rank):
    def ended(seconds):
        raise TimeoutError

    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setattr(time, "sleep", ended)
    monkeypatch.setattr("multiprocessing.active_children", list)  # spares run_ranks' processes
    monkeypatch.setattr(sys, "argv", ["train.py", *SPARC, "--preset", "none"])
    with pytest.raises(TimeoutError if rank else SystemExit):
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def test_a_full_disk_does_not_damage_the_old_checkpoint(run, monkeypatch):
    before = (run / "last.pt").read_bytes()

    def save(state, file):
        file.write(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:671]")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(UserError, match="last.pt cannot be written.*disk full"):
        train_alone(["--resume", "--steps", "7", "--out", run])
    assert (run / "last.pt").read_bytes() == before and not list(run.glob("*.tmp"))


@pytest.fixture(scope="session")
def with_milestones(tmp_path_factory, short_runs):
    """A run of STAIR that keeps the checkpoints of every second step. Its stages end at 2 and 4."""
    run = tmp_path_factory.mktemp("milestones") / "stair"
    train_alone([*SMALL["stair"], "--save-every", 99, "--keep-every", 2, "--out", run])
    return run


def test_a_checkpoint_to_continue_from_replaces_last_pt_at_once(
        tmp_path, with_milestones, monkeypatch):
    """The log is cut at once, too. So a run that is killed before its next save goes on."""
    run = shutil.copytree(with_milestones, tmp_path / "run")
    monkeypatch.setattr(train, "open_loader", lambda *_: fail())
    with pytest.raises(RuntimeError, match="own code"):
        train_alone(["--resume", "--checkpoint", "step-4.pt", "--out", run])
    assert torch.load(run / "last.pt")["step"] == read_log(run)[-1]["step"] == 4
    monkeypatch.undo()
    train_alone(["--resume", "--out", run])
    assert read_log(run)[-1]["step"] == torch.load(run / "last.pt")["step"] == 8


def test_the_last_line_of_a_training_is_a_command(tmp_path, capsys):
    """It names --data for a run that no data of its own can evaluate."""
    write_files(tmp_path, {f"photos/{i}.png": picture(format="PNG") for i in range(16)})
    run, files = str(tmp_path / "my run"), [*SMALL["bam"], "--data", tmp_path / "photos"]
    for small, given in (SPARC, {}), (files, {"data": ["DATA"]}):
        train_alone([*small, "--steps", 1, "--out", run])
        _, _, command = capsys.readouterr().out.rpartition("Next: python eval.py ")
        assert evaluation.parse_args(shlex.split(command)) == ([run], given)
        shutil.rmtree(run)


def test_files_that_stay_are_written_before_last_pt(tmp_path, monkeypatch):
    """A run that is killed between two files resumes from an older last.pt, and writes all again."""
    names, replacing = [], common.replacing
    monkeypatch.setattr(common, "replacing", lambda path: (
        names.append(Path(path).name) or replacing(path)))
    train_alone([*SMALL["stair"], "--steps", 4, "--keep-every", 2, "--out", tmp_path])
    # the stages end at 1, 2 and 4
    assert [name for name in names if name.endswith(".pt")] == [
        "stage-1.pt", "last.pt", "stage-2.pt", "step-2.pt", "last.pt", "step-4.pt", "last.pt"]


DIVERGE = ["--lr", "1e30", "--warmup", "1", "--clip-grad", "0"]


@pytest.mark.parametrize("every, step", [("--log-every 3 --save-every 99", 3),
                                         ("--log-every 99 --save-every 4", 4),
                                         ("--log-every 99 --save-every 99", 6)])
def test_a_loss_that_is_not_finite_is_never_saved(tmp_path, every, step):
    """The loss is checked when a step is logged and before each save, also at the end."""
    message = rf"(loss|norm) is (nan|inf).* at step {step}: lower --lr"
    with pytest.raises(UserError, match=message):
        train.main([*SPARC, *DIVERGE, *every.split(), "--out", str(tmp_path)])
    assert not (tmp_path / "last.pt").exists()


def test_only_fp16_saves_after_a_gradient_that_is_not_finite(tmp_path, monkeypatch):
    """The scaler of fp16 skips such an update, so the weights stay finite.

    The gradients that are clipped are those without the scale of the loss. A resumed run continues
    with the scale.
    """
    sizes, scaler = [], torch.amp.GradScaler

    def clip(parameters, most):
        sizes.append(sum(p.grad.abs().sum().item() for p in parameters if p.grad is not None))
        return torch.tensor(math.nan)

    monkeypatch.setattr(train, "clip_grad_norm_", clip)
    flags = [*SPARC, "--batch", 2, "--steps", 1, "--out"]
    with pytest.raises(UserError, match="gradient's norm is nan at step 1: lower --lr"):
        train_alone([*flags, tmp_path / "fp32"])
    assert not (tmp_path / "fp32/last.pt").exists()
    with monkeypatch.context() as patch:
        patch.setattr(torch.amp, "GradScaler", lambda device, enabled: scaler(device, 64.0))
        train_alone([*flags, tmp_path / "fp16", "--amp", "fp16", "--steps", 2])
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)
    train_alone(["--resume", "--steps", 3, "--out", tmp_path / "fp16"])
    assert common.load_checkpoint(tmp_path / "fp16/last.pt")["scaler"]["scale"] == 64


def test_fp16_that_skips_every_update_warns_and_then_ends():
    """A skipped update halves the scale of the loss. The gradient of such an update may overflow."""
    args, scale, one = SimpleNamespace(batch=8), [1.0], torch.tensor(1.0)
    scaler = SimpleNamespace(is_enabled=lambda: True, get_scale=lambda: scale[0])
    model = SimpleNamespace(warn=lambda record: None)
    assert train.warning(args, None, model, scaler, {"step": 6}) is None
    scale[0] = 2.0**-100
    assert "overflow in fp16" in train.warning(args, None, model, scaler, {"step": 6})
    train.check_finite(args, 6, one, one / 0, scaler)
    scale[0] /= 2
    with pytest.raises(UserError, match="fp16 skipped 100 updates before step 6: lower"):
        train.check_finite(args, 6, one, one / 0, scaler)


@pytest.mark.parametrize("amp, supported, dtype, noted", [
    (None, False, torch.float16, 1), (None, True, torch.bfloat16, 0),
    ("bf16", False, torch.bfloat16, 0), ("off", False, torch.float32, 0)])
def test_a_gpu_without_bf16_gets_fp16_and_a_note(monkeypatch, capsys, amp, supported, dtype, noted):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: enabled)
    args = SimpleNamespace(amp=amp)
    autocast, scales, _ = train.mixed_precision(args, torch.device("cuda"))
    assert args.amp == ("fp16" if noted else amp)  # config.json has it
    assert autocast.args[1] == dtype and scales == (dtype == torch.float16)
    assert capsys.readouterr().out.count("note: this GPU") == noted


@pytest.mark.parametrize("name", SMALL)
def test_a_dry_run_ends_with_json(tmp_path, capsys, name):
    """It needs no vocabulary file for the paper's number of tokens, and reads no weights."""
    has_text = name not in ("dino", "bam", "classifier")
    words = ["--text-encoder", "tiny:vocab_size=9000"] if has_text else []
    flags = [*SMALL[name], *words, "--init-weights", "gone.pt", "--dry-run", "--steps", "9999999999"]
    train.main([*flags, "--out", str(tmp_path / "look")])
    assert [path.name for path in (tmp_path / "look").iterdir()] == ["first-batch.png"]
    args = train.parse_args(flags)
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record.get("vocab_size") == (9000 if has_text else None)
    assert min(record["params"], record["flops_per_sample"]) > 1000 < 1000 * record["chance_loss"]
    of_two = gpu_bench.computed_flops(*gpu_bench.untrained([*flags, "--batch", "2"]), 1)
    assert record["flops_per_sample"] == int(of_two)
    flops = 3 * record["flops_per_sample"] * args.batch * args.steps
    assert record["h100_hours"] == pytest.approx(flops / 200e12 / 3600, rel=0.01) and flops > 1e17
    args = train.parse_args(["--method", "sparc", "--preset", "b32", "--dry-run"])  # has no data
    assert train.open_training_data(args, train.METHODS["sparc"]).size == args.image_size == 224


def test_bench_prints_rates_and_writes_nothing(tmp_path, capsys, monkeypatch):
    rates, counts = train.Clock.rates, []
    monkeypatch.setattr(train.Clock, "rates", lambda clock, size: (
        counts.append(len(clock.waits)) or rates(clock, size)))
    words = ["--text-encoder", "tiny:vocab_size=9000"]
    train.main([*SPARC, *words, "--bench", "2", "--out", str(tmp_path / "run")])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["images_per_s"] > 0 and record["peak_memory_bytes"] > 1e6
    assert 0 < record["data_share"] < 1
    assert not (tmp_path / "run").exists() and counts == [2]  # without the steps of the warm-up


@pytest.mark.parametrize("flags", [
    "--grad-checkpoint", "--accum-freq 4 --image-encoder tiny-patch"])
def test_encoders_get_grad_checkpoint_and_accum_freq_from_the_flags(flags):
    args = train.parse_args([*SPARC, *flags.split(), "--image-size", "16"])
    model = train.new_model(args, train.METHODS["sparc"], range(50))
    for encoder in (model.image_encoder, model.text_encoder):
        assert encoder.accum_freq == args.accum_freq
        assert encoder.blocks.grad_checkpoint == args.grad_checkpoint


def test_flops_of_clip_and_sparc_agree_with_table_11():
    """FLOPs of an update for each of two pairs (B/16, Figure 4). CLIP's are within 8 % of the paper's.

    SPARC needs as many times the FLOPs of CLIP as in the paper. The backward pass counts twice the
    FLOPs of the forward pass. A single pair has no loss over a batch, which needs 50 of 133,000
    MFLOPs for each pair.
    """
    of_clip, of_sparc = 9.14, 9.19  # TFLOPs on each of 256 TPUs for a batch of 16,384 (Table 11)
    method, flops = train.METHODS["sparc"], {}
    for name in ("clip", "sparc"):
        args = train.parse_args(["--method", "sparc", "--preset", "b16", "--objective", name,
                                 "--image-size", "224"])
        with shapes_alone():
            encoders = common.build_encoders(method, args, range(args.vocab_size))
            model = common.build_model(method, args, *encoders)
            batch = train.made_up_batch(args, method, model, 2)
            math_kernel, counter = sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False)
            with torch.no_grad(), math_kernel, counter:
                model(batch)
        flops[name] = 3 * counter.get_total_flops() / 2 * 16_384 / 256 / 1e12
    assert flops["clip"] == pytest.approx(of_clip, rel=0.08)
    assert flops["sparc"] / flops["clip"] == pytest.approx(of_sparc / of_clip, abs=0.001)


@pytest.mark.parametrize("name, usual", [
    ("sparc", 0), ("stair", 0), ("sparo", 0), ("dino", 0.5), ("bam", 0.5), ("classifier", 0.5),
    ("detector", 0.5)])
def test_images_with_captions_are_not_mirrored_by_default(name, usual, monkeypatch):
    """A mirror makes a caption with "left" wrong. --flip replaces the default of each method."""
    def flip_of(transform):
        if isinstance(transform, common.Views):
            return transform.flip
        step = transform.transforms[0] if isinstance(transform, common.Augment) else transform
        return step.keywords["flip"]

    for given, flip in (([], usual), (["--flip", "1"], 1), (["--flip", "0"], 0)):
        args = train.parse_args([*SMALL.get(name, ["--method", name]), *given])
        method = evaluation.METHODS[args.method]
        train.open_training_data(args, method)
        encoder = SimpleNamespace(image_size=args.image_size, grid=args.image_size // 8)
        transform = train.build_transform(args, method, encoder)
        assert args.flip == flip_of(transform) == flip


@pytest.mark.parametrize("scale, side", [(0.9, 12), (0.25, 19), (0.01, 93)])
def test_images_have_enough_pixels_for_the_smallest_crop(monkeypatch, scale, side):
    found, args = [], train.parse_args([*SPARC, "--crop-scale", str(scale), "--workers", "0"])
    args.image_size = 8
    monkeypatch.setattr(train, "read_in_workers", lambda stream, *_: found.append(stream))
    with pytest.raises(TypeError):  # no messages
        next(train.open_loader(args, None, None, None, None, train.Progress(), "cpu", None))
    assert found[0].min_side == side


@pytest.mark.parametrize("name, record, words", [
    ("bam", dict(step=100, similarity=1.0, effective_rank=1.0), None),
    ("bam", dict(step=101, similarity=0.98, effective_rank=1.6), None),
    ("bam", dict(step=101, similarity=1.0, effective_rank=9.0), "network has collapsed"),
    ("bam", dict(step=101, similarity=0.0, effective_rank=1.4), "lower --tau-b or --lr"),
    ("sparc", dict(skipped={"no .txt": 3, "no image": 1}), None),  # 4 of 44
    ("sparc", dict(skipped={"no .txt": 5, "no image": 1}), r"this reason: no .txt \(")])
def test_a_warning_says_that_a_network_collapses_or_many_samples_are_skipped(name, record, words):
    model = tiny_model(name)
    scaler, args = SimpleNamespace(get_scale=lambda: 1.0), SimpleNamespace(batch=8)
    found = train.warning(args, None, model, scaler, {"step": 5} | record)
    assert found is None if words is None else re.search(words, found or "")


def test_data_share_is_the_fraction_of_time_that_waits_for_data(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(train.time, "perf_counter", lambda: now[0])

    def load():
        while True:
            now[0] += 0.03
            yield

    clock, batches = train.Clock(), load()
    clock.reset()
    for _ in range(10):
        clock.wait_for(batches)
        now[0] += 0.09  # the update
    rates = clock.rates(8)
    assert rates["data_share"] == pytest.approx(0.25)
    assert rates["images_per_s"] == pytest.approx(8 / 0.12) and rates["peak_memory_bytes"] > 1e6


@pytest.mark.parametrize("is_new", [True, False])
def test_a_run_that_fails_at_its_start_leaves_no_new_directory(tmp_path, monkeypatch, is_new):
    if not is_new:
        (tmp_path / "run").mkdir()
    table = write_table(tmp_path, 9, broken=range(9))
    monkeypatch.setattr(common.CaptionTable, "max_bad", 9)
    with pytest.raises(UserError, match="9 samples in a row could not be used"):
        train_alone([*SPARC, "--data", table, "--image-size", "16", "--out", tmp_path / "run"])
    assert (tmp_path / "run").exists() != is_new


def test_the_first_batch_shows_what_is_read_cut_and_unknown_and_names_of_labels():
    tokenizer = common.WordPiece([*common.SPECIAL_TOKENS, "a", "b"])
    captions = ["a b a b b", "a c", "a c"]
    batch = *tokenizer.batch(captions, 5), captions
    texts = evaluation.as_read(tokenizer, *batch)
    assert texts == [["[CLS] a b a [SEP]", "b b"], *2 * [["[CLS] a [UNK] [SEP]", ""]]]
    assert train.describe_captions(tokenizer, *batch, texts).startswith(
        ", captions of 2.3 tokens; 29% of the tokens are [UNK], 33% of the captions are cut, 33% "
        "repeat another.")
    assert train.label_texts(torch.tensor([1, 0]), ["ring", "star"]) == ["star", "ring"]
    assert train.label_texts(torch.tensor([[0.25, 0.75]]), ["ring", "star"]) == [
        "0.25 ring, 0.75 star"]


@pytest.mark.parametrize("kind", ["table", "shards"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_batch_is_refused_if_a_sample_is_in_it_twice(tmp_path, monkeypatch, kind, ranks):
    """12 samples are less than a batch of 16. A second rank, which has other samples, is made up."""
    data = write_table(tmp_path, 12) if kind == "table" else write_shards(tmp_path, [6, 6])
    gather = common.gather_objects

    def two_ranks(value):
        is_mine = isinstance(value, list) and len(value) > 4
        return gather(value) + [[1, 2]] * (is_mine and ranks == 2)

    monkeypatch.setattr(common, "gather_objects", two_ranks)
    flags = [*SMALL["sparc"], "--image-size", 16, "--data", data, "--workers", 0, "--steps", 2]
    with pytest.raises(UserError, match="^4 of the 16 samples of the first batch are in it twice"):
        train_alone([*flags, "--batch", 16, "--out", tmp_path / "run"])
    train_alone([*flags, "--batch", 12, "--out", tmp_path / "whole"])
    train_alone(["--resume", "--batch", 16, "--steps", 4, "--out", tmp_path / "whole"])  # epochs meet
