"""--accum-freq: towers that take their rows in parts give the gradients of whole ones."""

import contextlib
import functools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import common
import train
from helpers import (SMALL, LiveMemory, make_batch, make_views, run_ranks, tiny_model, train_alone,
                     weights)

OBJECTIVES = {  # name: model of helpers.MODELS, its settings
    **{name: ("sparc", dict(objective=name, filip_keep=0.5, mgca_prototypes=7))
       for name in ("sparc", "clip", "filip", "clip+filip", "pacl", "gloria", "mgca")},
    "listing": ("sparc", dict(token_mean="batch")),
    "sparo": ("sparo", {}), "gap": ("sparo", dict(readout="gap")),
    "fdt": ("sparo", dict(readout="fdt")), "dino": ("dino", {}),
    **{f"stair{stage}": ("stair", dict(stage=stage)) for stage in (1, 2, 3)},
    "bam": ("bam", {}), "bam-student": ("bam", dict(teacher=False, batch_norm=True)),
    "simclr": ("bam", dict(target="onehot", teacher=False)),
}
FP32 = {"dino": 1e-6}  # learned positions are interpolated for small views in fp32
TOWER = "tiny-patch:width=16,heads=2,depth="  # without BatchNorm
SPARC = [*SMALL["sparc"], "--image-encoder", TOWER + "1", "--steps", "2", "--image-size", "16"]


def build(name, **vit):
    """The model of "sparc 4": objective sparc, in float64, with towers of 4 parts."""
    objective, K = name.split()
    method, settings = OBJECTIVES[objective]
    model = tiny_model(method, vit=dict(stem=None) | vit, **settings).double()
    switch(model, int(K))
    return model


def switch(model, K):
    for module in model.modules():
        if isinstance(module, common.Tower):
            module.accum_freq = K


def batch_of(name, B=8):
    batch = make_views(B) if OBJECTIVES[name][0] in ("dino", "bam") else make_batch(B)
    return tree_map(lambda x: x.double() if x.is_floating_point() else x, batch)


def gradients(model, batch, parallel=None):
    """Loss and gradients, once more from the same state; of all ranks if parallel is DDP's."""
    state = tree_map(torch.clone, model.state_dict())
    model.zero_grad()
    loss = (parallel or model)(batch, common.gather)["loss"]
    loss.backward()
    model.load_state_dict(state)  # DINO's centre moves in the forward pass
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()
                         if p.grad is not None}


def assert_equal(result, expected, tolerance=1e-12):
    (loss, grads), (expected_loss, expected_grads) = result, expected
    assert loss == pytest.approx(expected_loss, abs=tolerance)
    assert grads.keys() == expected_grads.keys()
    for name, gradient in grads.items():
        error = (gradient - expected_grads[name]).abs().max()
        assert error <= tolerance * (1 + expected_grads[name].abs().max()), name


@pytest.mark.parametrize("name", OBJECTIVES)
def test_parts_give_the_gradients_of_the_whole(name):
    """With 3 parts the last one is smaller; no tower sees more rows than a part has."""
    model, batch, seen = build(f"{name} 1"), batch_of(name), []

    def spy(module, inputs):
        if isinstance(module, common.Blocks):
            seen.append(len(inputs[0]))

    expected = gradients(model, batch)
    with register_module_forward_pre_hook(spy):
        for K in (2, 3, 4, 100):
            switch(model, K)
            seen.clear()
            assert_equal(gradients(model, batch), expected, FP32.get(name, 1e-12))
            together = 2 if "views" in batch else 1  # views that enter the tower in one call
            assert max(seen) == math.ceil(8 * together / K)


def parts_on_a_rank(rank):
    """This rank's half of each batch: parts under DDP against whole towers under DDP."""
    for name in OBJECTIVES:
        torch.manual_seed(0)
        model = build(f"{name} 1")
        batch = tree_map(lambda x: x.chunk(2)[rank], batch_of(name))
        parallel = DistributedDataParallel(model)
        expected = gradients(model, batch, parallel)
        for K in (2, 4):
            switch(model, K)
            assert_equal(gradients(model, batch, parallel), expected, FP32.get(name, 1e-12))
    return len(OBJECTIVES)


def compiled_on_a_rank(rank):
    """With DDP's buckets of 4 KB, the first of 1: compiled blocks against plain ones."""
    compile = functools.partial(torch.compile, backend="aot_eager")
    parallel = functools.partial(DistributedDataParallel, bucket_cap_mb=0.004)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1024)
        patch.setattr(torch, "compile", compile)
        patch.setattr(train, "DistributedDataParallel", parallel)
        for recompute, K in ((False, 1), (True, 1), (False, 3)):
            results = []
            for compiled in (False, True):
                torch.manual_seed(0)
                model = build(f"sparc {K}", depth=2)
                model.image_encoder.blocks.grad_checkpoint = recompute
                batch = tree_map(lambda x: x.chunk(2)[rank], batch_of("sparc"))
                wrapped = train.wrap(SimpleNamespace(compile=compiled), model, 2)
                results.append(gradients(model, batch, wrapped))
            assert_equal(*results)
    return rank


@pytest.mark.ranks
def test_compiled_towers_of_two_ranks_give_the_gradients_of_plain_ones(tmp_path):
    assert run_ranks(tmp_path, compiled_on_a_rank) == [0, 1]


@pytest.mark.ranks
def test_parts_of_two_ranks_give_the_gradients_of_the_whole(tmp_path):
    assert run_ranks(tmp_path, parts_on_a_rank) == [len(OBJECTIVES)] * 2


@pytest.mark.parametrize("name", ["sparc", "dino", "stair3", "bam"])
def test_memory_falls_with_the_parts(name):
    model, batch, peaks = build(f"{name} 1", depth=6), batch_of(name), []
    for K in (1, 2, 4):
        switch(model, K)
        with LiveMemory() as memory:
            model(batch)["loss"].backward()
        model.zero_grad()
        peaks.append(memory.peak)
    assert peaks[1] < 0.8 * peaks[0] and peaks[2] < 0.8 * peaks[1]


def test_parts_draw_the_same_numbers_again_in_the_backward_pass():
    """Stochastic depth: gradients as of the parts one by one, with all that they compute kept."""
    tower = common.ViT(16, 4, width=16, depth=3, heads=2, drop_path=0.5).double()
    images, grads = torch.randn(6, 3, 16, 16).double(), []
    for K in (1, 3):
        tower.accum_freq = K
        torch.manual_seed(1)
        parts = images.split(6 if K == 3 else 2)
        torch.cat([tower(part) for part in parts]).square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in tower.parameters()]))
        tower.zero_grad()
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_the_flag_changes_no_training(tmp_path, monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile(model, backend="eager"))
    train_alone([*SPARC, "--out", tmp_path / "whole"])
    for flags in ([], ["--grad-checkpoint", "--compile"]):
        run = tmp_path / f"parts{len(flags)}"
        train_alone([*SPARC, "--accum-freq", 3, *flags, "--out", run])
        torch.testing.assert_close(weights(run), weights(tmp_path / "whole"), rtol=1e-3, atol=1e-5)


class TF32(TorchDispatchMode):
    """Rounds operands of products in fp32 to TF32's 10 bits, as GPUs do; their sums stay fp32."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if function in (aten.mm.default, aten.bmm.default, aten.addmm.default):
            args = [self.rounded(x) if x.dtype == torch.float32 else x for x in args]
        return function(*args, **(kwargs or {}))

    def rounded(self, x):
        return ((x.contiguous().view(torch.int32) + 2**12 >> 13) << 13).view(torch.float32)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_tf32_adds_little_to_the_error_of_bf16(name):
    """What autocast leaves in fp32, the losses, is in TF32 then: gradients at 1 / tau = 50."""
    def gradient(bf16, mode):
        torch.manual_seed(0)
        method, settings = OBJECTIVES[name]
        model = tiny_model(method, vit=dict(stem=None), **settings)
        if hasattr(model, "log_scale"):
            model.log_scale.data.fill_(math.log(50))
        batch = make_views(8) if method in ("dino", "bam") else make_batch(8)
        with mode, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            model(batch)["loss"].backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    exact, half = (gradient(bf16, contextlib.nullcontext()) for bf16 in (False, True))
    tf32 = gradient(True, TF32())
    assert 0 < (tf32 - half).norm() < (half - exact).norm() / 2


def test_half_precision_adds_the_parts_gradients_in_fp32():
    tower = common.ViT(image_size=16, patch_size=4, width=32, depth=2, heads=2)
    images, target = torch.randn(256, 3, 16, 16), torch.randn(256, 16, 32)

    def gradient(K, bf16):
        tower.accum_freq = K
        tower.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            out = tower(images)
        (out.float() * target).mean().backward()
        return tower.blocks[0].attn.qkv.weight.grad.clone()

    exact = gradient(1, False)
    once, parts = [(gradient(K, True) - exact).norm() for K in (1, 128)]
    assert parts < 1.3 * once
