"""What only a GPU can show, in about a minute. Without a GPU these tests are skipped.

The other tests compare the CPU with literal references. Here the CPU is the reference.
"""

import os
import subprocess

import pytest
import torch
from torch.utils._pytree import tree_map

import common
import conftest
import eval as evaluation
import gpu_bench
import train
from helpers import (ROOT, SMALL, assert_same_weights, batch_of, read_log, tiny_model, train_alone,
                     weights)
from test_gpu_fake import CASES
from test_memory import gradients

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ALONE = "tiny-patch:width=16,heads=2,depth=1"  # an image encoder without BatchNorm
# Only CUDA's sums in a fixed order give the same bits again; this is read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Show the GPU to train.py and eval.py, or skip the test."""
    monkeypatch.setattr(torch.cuda, "is_available", conftest.HAS_GPU)
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with common.without_tf32():
        yield


def losses_of(flags, out):
    """Train with the flags and return the loss of each step."""
    train_alone([*flags, "--out", out])
    return [record["loss"] for record in read_log(out)]


def gradient_of(model, batch, device="cpu", dtype=torch.float64, amp=None):
    """Return the loss and the gradient, one vector in float64, both on the CPU.

    The model and the batch are moved to the device and to `dtype`; amp: the dtype of autocast.
    """
    model.to(device, dtype)
    batch = tree_map(lambda x: x.to(dtype) if x.is_floating_point() else x, batch)
    with torch.autocast(device, amp, enabled=amp is not None):
        loss, found = gradients(model, train.to_device(batch, device))
    return loss, torch.cat([gradient.flatten() for gradient in found.values()]).double().cpu()


@pytest.mark.parametrize("amp", [None, "bf16", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_as_close_as_a_cpus(name, amp):
    """A GPU's errors, against float64, are at most 4 times the errors of a CPU of equal precision.

    A CPU rounds the same tensors, but adds in another order. One batch may be right by chance, so
    that the errors of three batches are added, and the loss is compared with the gradient.
    """
    method, settings = CASES[name]
    dtype, errors = DTYPES.get(amp), []
    for _ in range(3):
        model, batch = tiny_model(method, **settings), batch_of(method, name)
        right, expected = gradient_of(model, batch)
        _, of_cpu = gradient_of(model, batch, "cpu", torch.float32, dtype)
        loss, of_gpu = gradient_of(model, batch, "cuda", torch.float32, dtype)
        size = expected.norm()
        errors.append([(of_cpu - expected).norm() / size, (of_gpu - expected).norm() / size,
                       abs(loss - right) / abs(right)])
        assert not torch.equal(of_gpu, of_cpu)  # the GPU has computed
    of_cpu, of_gpu, of_loss = torch.tensor(errors).sum(0)
    assert of_gpu <= 4 * of_cpu and of_loss <= 4 * of_cpu


def test_fp16_skips_updates_that_overflow_and_goes_on(tmp_path, monkeypatch):
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: scaler(
        device, enabled=enabled, init_scale=2.0**40))
    losses = losses_of([*SMALL["sparc"], "--amp", "fp16", "--steps", 40], tmp_path / "run")
    state = common.load_checkpoint(tmp_path / "run" / "last.pt")
    skipped = 40 - state["optimizer"]["state"][0]["step"].item()
    assert skipped > 0 and state["scaler"]["scale"] == 2.0 ** (40 - skipped)
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize("name, flags", [
    ("sparc", "--grad-checkpoint"), ("classifier", "--compile"), ("sparo", "--grad-checkpoint"),
    ("sparc", "--accum-freq 2"), ("stair", "--accum-freq 2"), ("bam", "--grad-checkpoint")])
def test_flags_that_save_time_or_memory_give_the_plain_loss(tmp_path, name, flags):
    """The losses of four updates in fp32. Each sum of another order costs 2^-24 or so."""
    common_flags = [*SMALL[name], "--amp", "off", "--steps", 4]
    if "accum" in flags:
        common_flags += ["--image-encoder", ALONE, "--image-size", 16]
    plain = losses_of(common_flags, tmp_path / "plain")
    other = losses_of([*common_flags, *flags.split()], tmp_path / "other")
    assert other == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("name", ["sparc", "sparo", "stair", "dino", "bam"])
def test_a_resumed_run_has_the_same_weights(tmp_path, name):
    """Bit for bit, if torch adds in a fixed order. torch has no such order for the gradient of
    interpolated positions, so that the weights of DINO and BAM differ by rounding."""
    flags, views = [*SMALL[name], "--steps", 4], name in ("dino", "bam")
    torch.use_deterministic_algorithms(True, warn_only=views)
    try:
        train_alone([*flags, "--out", tmp_path / "whole"])
        train_alone([*flags, "--out", tmp_path / "parts", "--keep-every", 2])
        train_alone(["--resume", "--checkpoint", "step-2.pt", "--out", tmp_path / "parts"])
    finally:
        torch.use_deterministic_algorithms(False)
    if not views:
        return assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for key in whole:
        torch.testing.assert_close(parts[key], whole[key], rtol=1e-3, atol=1e-4)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["sparc", "bam"])
def test_a_group_of_nccl_equals_one_process(tmp_path, name):
    """One GPU is a group of one, which runs all collectives. The encoder's stem and BAM's projector
    have BatchNorm."""
    ranks = torch.cuda.device_count()
    flags = [*SMALL[name], "--amp", "off", "--steps", 4, "--batch", 8 * ranks]
    one = losses_of(flags, tmp_path / "one")
    if ranks == 1:
        torch.distributed.init_process_group(
            "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1,
            device_id=torch.device("cuda", 0))
        group = losses_of(flags, tmp_path / "group")  # its end leaves the group
    else:
        command = ["torchrun", "--standalone", f"--nproc_per_node={ranks}", ROOT / "train.py",
                   *flags, "--out", tmp_path / "group"]
        subprocess.run(list(map(str, command)), check=True)
        group = [record["loss"] for record in read_log(tmp_path / "group")]
    assert group == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("row", [
    ("sparc", "b32"), ("sparc", "b16", "--grad-checkpoint"), ("bam", "vit-s16")])
def test_the_forward_pass_keeps_the_computed_memory(row):
    method, preset, *flags = row
    args = train.parse_args(["--method", method, "--preset", preset, *flags])
    method = train.METHODS[method]
    args.image_size = args.image_size or 224
    model = train.new_model(args, method, range(4))
    batches = [train.made_up_batch(args, method, model, n) for n in (4, 8)]
    few, many = (gpu_bench.kept_bytes(model, batch) for batch in batches)
    model.cuda()
    kept = []
    for batch in batches:
        batch = train.to_device(batch, "cuda")
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            outputs = model(batch)
        kept.append(torch.cuda.memory_allocated() - before)
        del outputs
    assert kept[1] - kept[0] == pytest.approx(many - few, rel=0.15)


TASKS = {"sparc": "retrieval,zeroshot,alignment,segmentation,knn", "bam": "knn,kmeans,linear,video",
         "sparo": "retrieval,negatives,slot_alignment", "stair": "textfree,words,sparsity"}


@pytest.mark.parametrize("name", TASKS)
def test_an_evaluation_equals_the_cpus(run_of, name):
    """24 scenes: one that changes sides, by rounding, moves a figure by .04."""
    figures, encodings = [], []
    image, text = torch.rand(3, 16, 16), "a red ring"
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        embedder, args = evaluation.load_run(run_of(name), device)
        options = evaluation.options_of({"task": TASKS[name], "data": args.data}, args)
        content = evaluation.METHODS[args.method].content(args)
        data = evaluation.open_eval_set(options, args.image_size, content)
        figures.append(evaluation.evaluate(embedder, data, options))
        found = [embedder.images([image])]
        found += [] if name == "bam" else [embedder.texts([text])]
        found += [embedder.maps(image, text)["patches"]] if name in ("sparc", "sparo") else []
        encodings.append([torch.as_tensor(x).cpu().float() for x in found])
    of_cpu, of_gpu = figures
    assert of_cpu.keys() == of_gpu.keys() and of_cpu
    for metric in of_cpu:
        assert of_gpu[metric] == pytest.approx(of_cpu[metric], abs=0.05, nan_ok=True), metric
    torch.testing.assert_close(*encodings, atol=1e-4, rtol=1e-4)
