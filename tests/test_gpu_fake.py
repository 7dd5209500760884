"""What a GPU computes, tested without a GPU, by fake CUDA tensors and a fake group of 8 ranks.

Fake tensors have shapes but no values. An operation on a fake tensor and a tensor that was left on
the CPU raises an error. The fake group exchanges nothing. Without a driver torch has no backward
pass for fake CUDA tensors, so tests of an update set all gradients to 0.

`python tests/test_gpu_fake.py` prints how much memory each preset needs per image, and on how many
GPUs of 80 GB the paper's batch fits.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1]))

import common
import eval as evaluation
import gpu_bench
import stair
import train
from helpers import LiveMemory, make_batch, make_views, shapes_alone, tiny_model
from test_memory import OBJECTIVES

CASES = OBJECTIVES | {  # {name: (model in helpers.MODELS, settings of its Config)}
    "softmax": ("sparc", dict(align="softmax", h_v="residual")),
    "attpool": ("sparo", dict(readout="attpool")), "dino-cls": ("dino", dict(readout="cls")),
    "bam-blocks": ("bam", dict(normalization="block", mask="zero", readout="gap")),
    "classifier": ("classifier", {})}
# The names since torch 2.14, or the older names.
ALL_GATHER, SCATTER = (new if hasattr(dist, new) else old for new, old in (
    ("all_gather_single", "all_gather_into_tensor"),
    ("reduce_scatter_single", "reduce_scatter_tensor")))
COLLECTIVES = ALL_GATHER, SCATTER, "all_reduce", "all_gather_object"
RAGGED = "filip", "clip+filip", "gloria"  # ranks exchange the lengths of their longest captions
pytestmark = pytest.mark.skipif(
    torch.__version__ < (2, 11), reason="before torch 2.11 fake CUDA tensors need a driver, and "
                                        "collectives have no fake form")


@pytest.fixture
def waits():
    """Names of the operations in which the host reads a value of the GPU, and waits for the GPU."""
    return []


@pytest.fixture
def fake(monkeypatch, waits):
    """The mode in which tensors are fake. Reads of values are noted in `waits`."""
    return fake_cuda(monkeypatch, waits)


@pytest.fixture
def ranks(monkeypatch):
    """A fake group of 8 ranks: a list of its collectives, [(name, tensor)]."""
    yield group_of_8(monkeypatch)
    dist.destroy_process_group()


def fake_cuda(monkeypatch, waits):
    """Return the mode in which tensors are fake, and let autocast work as on a GPU.

    A read of a value is noted in `waits` and returns 2.
    """
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)

    def read(name):
        return lambda self: self.is_cuda and waits.append(name) or 2

    for name in ("item", "__int__", "__bool__"):
        monkeypatch.setattr(FakeTensor, name, read(name), raising=False)
    return FakeTensorMode(allow_non_fake_inputs=True)


def group_of_8(monkeypatch):
    """Join a fake group of 8 ranks as rank 2, and return the list of its collectives."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    calls = []

    def record(name, collective):
        def call(*args, **kwargs):
            tensors = [x for x in args if torch.is_tensor(x)]
            calls.append((name, tensors[-1] if tensors else None))
            return collective(*args, **kwargs)
        return call

    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=8)
    for name in COLLECTIVES:
        monkeypatch.setattr(dist, name, record(name, getattr(dist, name)))
    # ranks compare a new shape once, on the CPU
    monkeypatch.setattr(dist, "all_gather_object", lambda found, mine: found.__init__([mine] * 8))
    monkeypatch.setattr(common, "SyncBatchNorm", FakeSyncBatchNorm)
    return calls


class FakeSyncBatchNorm:
    """torch's SyncBatchNorm, whose kernels have no fake form.

    The kernel of one process keeps the same tensors. Ranks exchange mean, deviation and count.
    """

    @staticmethod
    def apply(x, weight, bias, running_mean, running_var, eps, momentum, group, world):
        statistics = x.new_empty(1, 2 * x.shape[1] + 1, dtype=torch.float32)
        getattr(dist, ALL_GATHER)(statistics.new_empty(world, *statistics.shape[1:]), statistics)
        return torch.nn.functional.batch_norm(x, running_mean, running_var, weight, bias, True,
                                              momentum, eps)


class Calls(TorchDispatchMode):
    """Notes the names of all operators. `waits` gets those that copy from the CPU to the GPU."""

    def __init__(self, waits):
        super().__init__()
        self.names, self.waits = [], waits

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        on_gpu = any(torch.is_tensor(x) and x.is_cuda for x in tree_leaves(out))
        if on_gpu and inputs and not any(x.is_cuda for x in inputs):
            self.waits.append(str(function))
        self.names.append(str(function))
        return out


def move(model):
    """Move a model to the fake GPU."""
    for module in model.modules():  # model.to would move a shared embedding twice
        module._apply(lambda x: torch.zeros_like(x, device="cuda"), recurse=False)
    return model


def batch_of(method, name="", **sizes):
    """Return a batch for the case `name` of tiny_model(method). sizes: arguments of make_batch."""
    if method in ("dino", "bam"):
        return make_views(sizes=(16, 16)) if name == "moco" else make_views()
    if method == "classifier":
        return {"images": torch.randn(4, 3, 16, 16), "labels": torch.arange(4) % 3}
    return make_batch(**sizes)


def assert_computed_on_the_gpu(model, batch, waits, expected=0):
    """Run the forward pass in bf16. It must leave no tensor on the CPU, and wait so many times."""
    waits.clear()
    with torch.autocast("cuda", torch.bfloat16):
        layer = torch.nn.Linear(2, 2, device="cuda")
        assert layer(layer.weight).dtype == torch.bfloat16
        with Calls(waits):
            outputs = model(batch)
    assert len(waits) == expected, waits
    assert {x.device.type for x in outputs.values()} == {"cuda"}
    assert outputs["loss"].dtype == torch.float32


@pytest.mark.parametrize("name", ["sparc", "sparo", "dino", "stair3", "bam", "classifier"])
def test_methods_without_ranks_leave_no_tensor_on_the_cpu_and_never_wait(fake, waits, name):
    method, settings = CASES[name]
    model, batch = tiny_model(method, **settings), batch_of(method, name)
    with fake:
        move(model)
        assert_computed_on_the_gpu(model, train.to_device(batch, "cuda"), waits)


@pytest.mark.parametrize("name", CASES)
def test_ranks_exchange_tensors_of_the_gpu_in_the_same_order(fake, waits, ranks, name):
    """Two batches stand for two ranks, whose longest captions differ.

    Ranks whose collectives had different orders or types would wait for each other forever. A step
    waits once, for the length of the longest caption on all ranks, or never.
    """
    method, settings = CASES[name]
    model, orders = tiny_model(method, **settings), []
    with fake:
        move(model)
        for L in (9, 6) if getattr(model, "text_encoder", None) else (9,):
            batch = train.to_device(batch_of(method, name, L=L), "cuda")
            ranks.clear()
            assert_computed_on_the_gpu(model, batch, waits, expected=RAGGED.count(name))
            assert {x.device.type for _, x in ranks} <= {"cuda"}
            orders.append([(call, x.dtype, x.ndim, x.shape[:1]) for call, x in ranks])
        waits.clear()
        with torch.autocast("cuda", torch.bfloat16):
            assert {x.device.type for x in model.diagnose(batch).values()} <= {"cuda"}
        assert waits == []
    assert {call for order in orders for call, *_ in order} <= {ALL_GATHER}
    assert {dtype for order in orders for _, dtype, *_ in order} <= {torch.float32, torch.int64}
    if name not in RAGGED:
        assert orders[0] == orders[-1]


@pytest.mark.parametrize("name, optimizer, amp", [
    *((name, "adamw", "fp16") for name in ("sparc", "sparo", "dino", "bam")),
    *(("stair", optimizer, amp) for optimizer in train.OPTIMIZERS for amp in ("bf16", "fp16"))])
def test_an_update_does_not_wait_for_the_gpu(fake, waits, name, optimizer, amp):
    """An update is all that follows the backward pass.

    With fp16 the scaler reads once whether the gradient is finite. AdamW alone needs no such read.
    """
    model = tiny_model(name)
    with fake:
        move(model)
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        groups = common.param_groups(model, 0.1)
        optimizer_of_run = train.OPTIMIZERS[optimizer](groups, betas=(0.9, 0.98), eps=1e-6)
        scaler = torch.amp.GradScaler("cuda", enabled=amp == "fp16")
        scaler.scale(torch.zeros((), device="cuda"))
        for _ in range(2):  # the first update creates the optimizer's state
            waits.clear()
            with Calls(waits):
                model.before_update(0)
                scaler.unscale_(optimizer_of_run)
                norm = train.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer_of_run)
                scaler.update()
                model.after_update(0, 4)
            assert norm.is_cuda
        state = [x for values in optimizer_of_run.state.values() for x in values.values()]
        assert {x.device.type for x in state if torch.is_tensor(x) and x.ndim} <= {"cuda"}
    expected = ["item"] if amp == "fp16" and optimizer != "adamw" else []
    assert waits == expected


@pytest.mark.parametrize("share, sums", [(1, 0), (8, 4)])
def test_our_own_backward_passes_stay_on_the_gpu(fake, waits, ranks, monkeypatch, share, sums):
    """The backward pass of STAIR's encoding waits once, for the number of entries with a gradient.

    One in `share` entries has a gradient. The pass computes 2^26 numbers at a time. It sums over a
    few entries, and multiplies with all words if many have a gradient.
    """
    B, V, E = 64, 30_522, 512
    context = torch.autograd.function.FunctionCtx()
    context.save_for_backward = lambda *saved: vars(context).update(saved_tensors=saved)

    def all_of(x, as_tuple):
        """torch.nonzero of a fake tensor, as if one in `share` of its values were not zero."""
        waits.append("nonzero")
        return tuple(torch.zeros(2, x.numel() // share, dtype=torch.int64, device=x.device))

    monkeypatch.setattr(torch.Tensor, "nonzero", all_of)
    with fake:
        inputs = [torch.zeros(*shape, device="cuda") for shape in ((B, 9, E), (V, E), (V,))]
        with torch.autocast("cuda", torch.bfloat16):
            enc = stair.StreamedEncoding.forward(context, *inputs)
        assert enc.dtype == torch.float32 and enc.is_cuda
        with Calls(waits) as calls:
            gradients = stair.StreamedEncoding.backward(context, enc)
        for x, gradient in zip(inputs, gradients):
            assert gradient.is_cuda and gradient.dtype == x.dtype and gradient.shape == x.shape
        turned = torch.zeros(5, 16, device="cuda").t()  # NCCL takes contiguous tensors alone
        rows = stair.Gather.backward(None, turned)
        assert rows.shape == (2, 5) and rows.is_cuda
        stair.all_ranks(turned)
    assert waits == ["nonzero"]
    assert sum("index_add" in name for name in calls.names) == sums
    assert [(call, x.is_contiguous()) for call, x in ranks] == [(SCATTER, True), (ALL_GATHER, True)]


class FusedAttention(torch.autograd.Function):
    """What a GPU's attention keeps: q, k, v, the result, and one fp32 number for each query.

    Without a driver torch takes the plain products in place of the fused kernel, which keep the
    weights (B, heads, N, N), too.
    """

    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out


def attention(q, k, v, attn_mask=None, is_causal=False):
    """scaled_dot_product_attention of fake tensors in bf16."""
    return FusedAttention.apply(*(x.bfloat16() for x in (q, k, v)))


def cost_of_a_step(fake, calls, waits, method, preset, *flags):
    """Return what an update of a preset costs one of 8 ranks in bf16, as a dict.

    kept: MiB per image or pair that the forward pass keeps. gathers: collectives of the forward
    pass; the backward pass of each sums as many bytes. sent: KiB per image or pair that the rank
    sends in them. once: KiB that it sends whatever the batch. gradients: MiB that DDP sums.
    waits: how often the host waits for the GPU in the forward pass.
    """
    args = train.parse_args(["--method", method, "--preset", preset, *flags])
    method = train.METHODS[method]
    _, encoder = common.encoder_settings(args.image_encoder, common.IMAGE_ENCODERS)
    args.image_size = args.image_size or encoder["image_size"]
    with shapes_alone():  # a fake teacher cannot be copied
        model, kept, sent = train.new_model(args, method, range(4)), [], []
    with fake, torch.device("cuda"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
        move(model)
        for n in (2, 4):
            batch = train.made_up_batch(args, method, model, n)
            calls.clear()
            waits.clear()
            with LiveMemory() as memory, torch.autocast("cuda", torch.bfloat16):
                outputs = model(batch)
            kept.append(memory.bytes)
            sent.append(sum(x.numel() * x.element_size() for _, x in calls))
            del outputs
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {"kept": (kept[1] - kept[0]) / 2 / 2**20, "gathers": len(calls),
            "sent": (sent[1] - sent[0]) / 2 / 2**10, "once": (2 * sent[0] - sent[1]) / 2**10,
            "gradients": 4 * trained / 2**20, "waits": len(waits)}


@pytest.mark.parametrize("row, kept, gathers, sent, once, waited", [
    (("sparc", "b32"), 34.5, 2, 4, 0, 0),
    (("bam", "vit-s16", "--grad-checkpoint"), 13.4, 6, 33.7, 0, 0),
    (("sparo", "cc15m-r50"), 59.4, 55, 32, 207.7, 0)])
def test_presets_cost_a_rank_what_is_expected(fake, ranks, waits, row, kept, gathers, sent, once,
                                              waited):
    """An H100 keeps as much memory, within 15 % (test_gpu.py)."""
    cost = cost_of_a_step(fake, ranks, waits, *row)
    assert (cost["gathers"], cost["waits"]) == (gathers, waited)
    assert [cost[name] for name in ("kept", "sent", "once")] == pytest.approx(
        [kept, sent, once], rel=0.02, abs=0.1)


def test_distortions_and_metrics_leave_no_tensor_on_the_cpu(fake):
    views = common.Views([common.View(8, (0.5, 1), blur=0.5, solarize=0.5)], 8)
    crops, labels = [views(torch.rand(3, 8, 8))[0] for _ in range(64)], torch.arange(64)
    batch = {"views": [torch.stack(crops)], "draws": views.draws(64)}
    with fake:
        batch, labels = train.to_device((batch, labels), "cuda")
        x = common.distort(batch)["views"][0].flatten(1)
        evaluation.knn_accuracy(x, labels, x, labels)


def print_costs(fake, calls, waits):
    """Print what cost_of_a_step says of each preset, and the number of GPUs that its batch needs.

    The number is the smallest 2^n for which a GPU holds at most 64 GiB.
    """
    print("method, preset: no flag, --grad-checkpoint, --grad-checkpoint --accum-freq 4")
    for name, method in train.METHODS.items():
        for preset in method.PRESETS:
            if preset.startswith("tiny") or name in ("classifier", "detector"):
                continue
            args, row, plain = train.parse_args(["--method", name, "--preset", preset]), [], 0
            for flags in ((), ("--grad-checkpoint",), ("--grad-checkpoint", "--accum-freq", "4")):
                if flags and "ResNet" in args.image_encoder:
                    continue
                cost = cost_of_a_step(fake, calls, waits, name, preset, *flags)
                mib = cost["kept"]
                plain = plain or mib
                again = plain / 12 if flags else 0  # activations of a recomputed block
                if "4" in flags:
                    again = (row[1][0] + again) / 4  # activations of one part
                gpus = 1
                while args.batch / gpus * (mib + again) > 62 * 1024:  # 2 GiB are for the weights
                    gpus *= 2
                row.append((mib, gpus))
            print(f"{name}, {preset}:", *(f"{mib:.1f} MiB {gpus} GPUs," for mib, gpus in row),
                  f"{cost['gathers']} gathers of {cost['sent']:.1f} KiB an image and "
                  f"{cost['once']:.1f} KiB, gradients {cost['gradients']:.0f} MiB, "
                  f"{cost['waits']} waits")


@pytest.mark.parametrize("name", ["sparc", "bam"])
def test_a_dry_run_on_ranks_exchanges_nothing(ranks, monkeypatch, name):
    """Rank 0 computes on the CPU, and NCCL has no collectives for tensors of the CPU."""
    monkeypatch.setattr(train.dist, "get_rank", lambda: 0)
    flags = ["--method", name, "--dry-run", "--data", "shapes:size=32", "--batch", "8"]
    args = train.parse_args(flags)
    method = train.METHODS[args.method]
    tokenizer = None
    data = train.open_training_data(args, method)
    if method.uses_text(args):
        tokenizer = common.WordPiece(common.train_wordpiece(data.sample_captions(50), 200))
    model = train.new_model(args, method, tokenizer)
    train.dry_run(args, method, model)
    assert ranks == []


def test_a_streamed_encoding_computes_more_images_at_a_time_on_a_gpu(fake):
    """2,048 images with 197 tokens each and 30,522 words in bf16: 11 images at a time.

    The embedding e is cast once, not in each part.
    """
    with fake, torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        t, e = torch.zeros(2048, 197, 64, device="cuda"), torch.zeros(30_522, 64, device="cuda")
        with Calls([]) as calls:
            stair.StreamedEncoding.apply(t, e, torch.zeros(30_522, device="cuda"))
    products = [name for name in calls.names if "mm" in name]
    casts = [name for name in calls.names if "_to_copy" in name]
    assert len(products) <= 2048 / 11 + 2 and len(casts) < 2.2 * len(products)


def test_the_bench_for_a_gpu_runs_on_a_cpu(tmp_path, monkeypatch, capsys):
    """Small presets: the figures mean nothing, but each kind of row runs."""
    monkeypatch.setattr(gpu_bench, "FIRST", 4)
    monkeypatch.setattr(gpu_bench, "SECONDS", 0)
    monkeypatch.setattr(gpu_bench, "TOY", [("sparc", "tiny", "--image-encoder tiny-patch", source)
                                           for source in ("tensors", "world", "shards")]
                        + [("lightly", "", "", "tensors")])
    gpu_bench.main(["--toy", "--out", str(tmp_path / "gpu.json")])
    *rows, lightly = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [row["source"] for row in rows] == ["tensors", "world", "shards"]
    assert lightly.get("images_per_s", 0) > 0 or lightly["error"] == "not installed"
    assert all(row["images_per_s"] > 0 for row in rows)
    assert rows[0]["flops_per_image"] > 0
    assert capsys.readouterr().out.count("| `sparc`, `tiny`") == 3


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        noted = []
        print_costs(fake_cuda(patch, noted), group_of_8(patch), noted)
