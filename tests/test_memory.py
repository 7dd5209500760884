"""--accum-freq K: encoding the batch in K parts gives the gradients of the full batch.

More tests measure the rounding of TF32 and of bf16, what a run keeps, and FLOPs.
"""

import contextlib
import functools
import io
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

import common
import gpu_bench
import helpers
import train
from helpers import SMALL, LiveMemory, assert_one_process, on_ranks, tiny_model

OBJECTIVES = {  # {name: (model in helpers.MODELS, settings of its Config)}
    **{name: ("sparc", dict(objective=name, filip_keep=0.5, mgca_prototypes=7))
       for name in ("sparc", "clip", "filip", "clip+filip", "pacl", "gloria", "mgca")},
    "listing": ("sparc", dict(token_mean="batch")),
    "sparo": ("sparo", {}), "gap": ("sparo", dict(readout="gap")),
    "fdt": ("sparo", dict(readout="fdt")), "dino": ("dino", {}),
    **{f"stair{stage}": ("stair", dict(stage=stage)) for stage in (1, 2, 3)},
    "bam": ("bam", {}), "bam-student": ("bam", dict(teacher=False, batch_norm=True)),
    "simclr": ("bam", dict(target="onehot", teacher=False)), "moco": ("bam", dict(target="moco")),
}
FP32 = {"dino": 1e-5}  # tolerance: positions are interpolated in fp32 for small views


def build(name, **vit):
    """build("sparc 4") returns the float64 model of the objective sparc with accum_freq 4."""
    objective, K = name.split()
    method, settings = OBJECTIVES[objective]
    model = tiny_model(method, vit=dict(stem=None) | vit, **settings).double()
    switch(model, int(K))
    return model


def switch(model, K):
    """Set accum_freq of the model's encoders to K."""
    for module in model.modules():
        if isinstance(module, common.Encoder):
            module.accum_freq = K


def batch_of(name):
    """Return a float64 batch of 8 samples for an objective."""
    batch = helpers.batch_of(OBJECTIVES[name][0], name, B=8)
    return tree_map(lambda x: x.double() if x.is_floating_point() else x, batch)


def gradients(model, batch, parallel=None):
    """Return the loss and {name: gradient}, and restore the state that the forward pass changed.

    parallel: the model inside DDP.
    """
    state = tree_map(torch.clone, model.state_dict())
    model.zero_grad()
    loss = (parallel or model)(batch)["loss"]
    loss.backward()
    model.load_state_dict(state)  # DINO's centre moves in the forward pass
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()
                         if p.grad is not None}


def assert_equal(result, expected, tolerance=1e-9):
    """Two results of gradients() have the same loss and the same gradients."""
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=1e-3 * tolerance)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_parts_give_the_gradients_of_the_full_batch(name):
    """No block sees more rows than a part has. The last of 3 parts is smaller than the others."""
    model, batch, seen = build(f"{name} 1"), batch_of(name), []

    def spy(module, inputs):
        if isinstance(module, common.Blocks):
            seen.append(len(inputs[0]))

    expected = gradients(model, batch)
    with register_module_forward_pre_hook(spy):
        for K in (3, 100):
            switch(model, K)
            seen.clear()
            assert_equal(gradients(model, batch), expected, FP32.get(name, 1e-9))
            # two views enter the encoder in one call, but not MoCo-v3's
            together = 2 if "views" in batch and name != "moco" else 1
            assert max(seen) == math.ceil(8 * together / K)


def test_compiled_encoders_in_ddp_give_the_gradients_of_plain_encoders(monkeypatch):
    """DDP collects gradients in buckets of 25 MB. Here a bucket has 4 KB, so that even the small
    model fills several: a graph that DDP splits between two buckets would fail here."""
    compile = functools.partial(torch.compile, backend="aot_eager")
    parallel = functools.partial(DistributedDataParallel, bucket_cap_mb=0.004)
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1024)
    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(train, "DistributedDataParallel", parallel)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    batch, results = batch_of("sparc"), []
    try:
        for compiled in (False, True):
            torch.manual_seed(0)
            model = build("sparc 2")
            model.image_encoder.blocks.grad_checkpoint = True
            wrapped = train.wrap(SimpleNamespace(compile=compiled), model, 2)
            results.append(gradients(model, batch, wrapped))
    finally:
        dist.destroy_process_group()
    assert_equal(*results)


@pytest.mark.ranks
def test_parts_on_two_ranks_give_the_gradients_of_one_process(tmp_path):
    """FILIP drops tokens of the own pairs of a rank: see test_baselines.py."""
    names = [name for name in OBJECTIVES if "filip" not in name and name != "moco"]
    for some, batch in ((names, batch_of("sparc") | batch_of("bam")), (["moco"], batch_of("moco"))):
        models = {f"{name} 2": build(f"{name} 2") for name in some}
        for name, ranks in on_ranks(tmp_path, build, models, batch).items():
            loss = models[name](batch)["loss"]
            assert_one_process(ranks, models[name], loss, FP32.get(name[:-2], 1e-9))


@pytest.mark.parametrize("name", ["sparc", "stair3", "bam"])
def test_peak_memory_falls_with_the_number_of_parts(name):
    model, batch, peaks = build(f"{name} 1", depth=6), batch_of(name), []
    for K in (1, 2, 4):
        switch(model, K)
        with LiveMemory() as memory:
            model(batch)["loss"].backward()
        model.zero_grad()
        peaks.append(memory.peak)
    assert peaks[1] < 0.8 * peaks[0] and peaks[2] < 0.8 * peaks[1]


def test_the_backward_pass_drops_the_same_rows_as_the_forward_pass():
    """Stochastic depth draws random numbers, and the backward pass computes each part again. The
    reference encodes the parts one by one with accum_freq 1, which computes nothing again."""
    encoder = common.ViT(16, 4, width=16, depth=3, heads=2, drop_path=0.5).double()
    images, grads = torch.randn(6, 3, 16, 16).double(), []
    for K in (1, 3):
        encoder.accum_freq = K
        torch.manual_seed(1)
        parts = images.split(6 if K == 3 else 2)
        torch.cat([encoder(part) for part in parts]).square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in encoder.parameters()]))
        encoder.zero_grad()
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


class TF32(TorchDispatchMode):
    """Round the operands of fp32 products to the 10 bits of TF32, as a GPU does. Sums stay fp32."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if function in (aten.mm.default, aten.bmm.default, aten.addmm.default):
            args = [self.rounded(x) if x.dtype == torch.float32 else x for x in args]
        return function(*args, **(kwargs or {}))

    def rounded(self, x):
        return ((x.contiguous().view(torch.int32) + 2**12 >> 13) << 13).view(torch.float32)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_tf32_changes_gradients_less_than_half_as_much_as_bf16(name):
    """Under --amp bf16 a GPU computes in TF32 what autocast leaves in fp32: the losses. Logits are
    large at 1 / tau = 50. TF32 changes as many of FDT's best positions as bf16."""
    method, settings = OBJECTIVES[name]
    model = tiny_model(method, vit=dict(stem=None), **settings)
    if hasattr(model, "log_scale"):
        model.log_scale.data.fill_(math.log(50))
    batch = helpers.batch_of(method, name, B=8)

    def gradient(bf16, mode):
        with mode, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return torch.cat([x.flatten() for x in gradients(model, batch)[1].values()])

    exact, half = (gradient(bf16, contextlib.nullcontext()) for bf16 in (False, True))
    tf32 = gradient(True, TF32())
    limit = 1 if name == "fdt" else 0.5
    assert 0 < (tf32 - half).norm() < limit * (half - exact).norm()


def test_gradients_of_bf16_parts_are_summed_in_fp32():
    """A sum of 128 parts in bf16 would lose digits with each part."""
    encoder = common.ViT(image_size=16, patch_size=4, width=32, depth=2, heads=2)
    images, target = torch.randn(256, 3, 16, 16), torch.randn(256, 16, 32)

    def gradient(K, bf16):
        encoder.accum_freq = K
        encoder.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            out = encoder(images)
        (out.float() * target).mean().backward()
        return encoder.blocks[0].attn.qkv.weight.grad.clone()

    exact = gradient(1, False)
    once, parts = [(gradient(K, True) - exact).norm() for K in (1, 128)]
    assert parts < 1.3 * once


def test_what_a_forward_pass_keeps_for_the_backward_pass():
    """A layer keeps its input of 3 numbers in bf16, and the square keeps its two factors, which are
    one tensor of 5 numbers. The sum keeps nothing."""
    layer = torch.nn.Linear(3, 5)

    def model(x, gather):
        y = layer(x)
        return (y * y).sum()

    few, many = (gpu_bench.kept_bytes(model, torch.randn(n, 3)) for n in (2, 10))
    assert (many - few) / 8 == 2 * (3 + 5)
    one, two = (gpu_bench.computed_gib(*gpu_bench.untrained(SMALL["bam"]), n) for n in (1, 2))
    assert two < one < 1


@pytest.mark.parametrize("optimizer", train.OPTIMIZERS)
def test_the_state_of_a_run_is_its_checkpoint_and_the_gradients(optimizer, monkeypatch):
    monkeypatch.setattr(gpu_bench, "kept_bytes", lambda model, batch: 0)
    parts = gpu_bench.untrained([*SMALL["sparc"], "--image-encoder",
                                 "tiny:width=128,heads=2,depth=1", "--optimizer", optimizer])
    args, _, model = parts
    updates, file = train.build_optimizer(args, model, None), io.BytesIO()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    updates.step()
    gradients = [p.grad for p in model.parameters()]
    torch.save([model.state_dict(), updates.state_dict(), gradients], file)
    assert gpu_bench.computed_gib(*parts, 1) * 2**30 == pytest.approx(file.tell(), rel=0.05)


@pytest.mark.parametrize("flags, ranks", [
    (SMALL["bam"], 1), ([*SMALL["sparc"], "--objective", "filip"], 1),
    ([*SMALL["sparc"], "--objective", "filip"], 3), ([*SMALL["sparc"], "--objective", "gloria"], 1)])
def test_the_flops_count_the_pairs_of_the_whole_batch(flags, ranks, monkeypatch):
    """SPARC, Table 11: FLOPs of FILIP and GLoRIA grow with the batch. A rank of FILIP chooses tokens
    among its own pairs alone. Each rank of BAM computes the same effective rank, which is here a
    part in 1,000."""
    args, method, model = gpu_bench.untrained([*flags, "--batch", "24"])
    found = gpu_bench.computed_flops(args, method, model, ranks)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    batch = train.made_up_batch(args, method, model, 24 // ranks)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(batch, lambda x: torch.cat([x] * ranks))
    assert found == pytest.approx(counter.get_total_flops() / (24 // ranks), rel=1e-3)
