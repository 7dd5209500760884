"""What a GPU computes, tested without a GPU, by fake CUDA tensors and a fake group of 8 ranks.

Fake tensors have shapes but no values, and no backward pass. An operation on a fake tensor and a
tensor that was left on the CPU raises an error. The fake group exchanges nothing.
"""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common
import eval as evaluation
import stair
import train
from helpers import SMALL, batch_of, tiny_model
from test_memory import OBJECTIVES

CASES = OBJECTIVES | {  # {name: (model in helpers.MODELS, settings of its Config)}
    "softmax": ("sparc", dict(align="softmax", h_v="residual")),
    "attpool": ("sparo", dict(readout="attpool")), "dino-cls": ("dino", dict(readout="cls")),
    "bam-blocks": ("bam", dict(normalization="block", mask="zero", readout="gap")),
    "classifier": ("classifier", {})}
COLLECTIVES = "all_gather", "all_reduce"
RAGGED = "filip", "clip+filip", "gloria"  # ranks exchange the lengths of their longest captions
pytestmark = pytest.mark.skipif(
    torch.__version__ < (2, 11), reason="before torch 2.11 fake CUDA tensors need a driver, and "
                                        "collectives have no fake form")


@pytest.fixture
def waits():
    """Names of the operations in which the host waits for the GPU."""
    return []


@pytest.fixture
def fake(monkeypatch, waits):
    """The mode in which tensors are fake, and autocast works as on a GPU. A read of a value returns
    2 and is noted in `waits`."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)

    def read(name):
        return lambda self: self.is_cuda and waits.append(name) or 2

    for name in ("item", "__int__", "__bool__"):
        monkeypatch.setattr(FakeTensor, name, read(name), raising=False)
    return FakeTensorMode(allow_non_fake_inputs=True)


@pytest.fixture
def ranks(monkeypatch):
    """A fake group of 8 ranks, this one is rank 2: a list of its collectives, [(name, tensor)]."""
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
    monkeypatch.setattr(common, "SyncBatchNorm", FakeSyncBatchNorm)
    yield calls
    dist.destroy_process_group()


class FakeSyncBatchNorm:
    """torch's kernels have no fake form. Ranks exchange mean, deviation and count."""

    @staticmethod
    def apply(x, weight, bias, running_mean, running_var, eps, momentum, group, world):
        statistics = x.new_empty(1, 2 * x.shape[1] + 1, dtype=torch.float32)
        dist.all_gather([torch.empty_like(statistics) for _ in range(world)], statistics)
        return torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True)


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
    """Move a model to the fake GPU. model.to would move a shared embedding twice."""
    for module in model.modules():
        module._apply(lambda x: torch.zeros_like(x, device="cuda"), recurse=False)


@pytest.mark.parametrize("name", CASES)
def test_ranks_leave_no_tensor_on_the_cpu_and_exchange_in_the_same_order(fake, waits, ranks, name):
    """Two batches stand for two ranks, whose longest captions differ. Ranks whose collectives had
    other orders or types would wait for each other forever. A step waits once, for the length of
    the longest caption on all ranks, or never."""
    method, settings = CASES[name]
    model, orders = tiny_model(method, **settings), []
    with fake:
        move(model)
        for L in (9, 6) if getattr(model, "text_encoder", None) else (9,):
            batch = train.to_device(batch_of(method, name, L=L), "cuda")
            ranks.clear()
            waits.clear()
            with torch.autocast("cuda", torch.bfloat16):
                layer = torch.nn.Linear(2, 2, device="cuda")
                assert layer(layer.weight).dtype == torch.bfloat16
                with Calls(waits):
                    outputs = model(batch)
            assert len(waits) == RAGGED.count(name), waits
            assert {x.device.type for x in outputs.values()} == {"cuda"}
            assert outputs["loss"].dtype == torch.float32
            assert {x.device.type for _, x in ranks} <= {"cuda"}
            orders.append([(call, x.dtype, x.ndim, x.shape[:1]) for call, x in ranks])
        waits.clear()
        with torch.autocast("cuda", torch.bfloat16):
            assert {x.device.type for x in model.diagnose(batch).values()} <= {"cuda"}
        assert waits == []
    assert {call for order in orders for call, *_ in order} <= {"all_gather"}
    assert {dtype for order in orders for _, dtype, *_ in order} <= {torch.float32, torch.int64}
    if name not in RAGGED:
        assert orders[0] == orders[-1]


@pytest.mark.parametrize("name, optimizer, amp", [
    *((name, "adamw", "fp16") for name in ("sparc", "sparo", "dino", "bam")),
    *(("stair", optimizer, amp) for optimizer in train.OPTIMIZERS for amp in ("bf16", "fp16"))])
def test_an_update_does_not_wait_for_the_gpu(fake, waits, name, optimizer, amp):
    """With fp16 the scaler reads once whether the gradient is finite. AdamW needs no such read."""
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
    """The backward pass of STAIR's encoding waits once, for the number of entries with a gradient,
    one in `share`. It sums over a few entries, and multiplies with all words if there are many."""
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
    assert [(call, x.is_contiguous()) for call, x in ranks] == [
        ("all_reduce", True), ("all_gather", True)]


def test_distortions_and_metrics_leave_no_tensor_on_the_cpu(fake):
    views = common.Views([common.View(8, (0.5, 1), blur=0.5, solarize=0.5)], 8)
    crops, labels = [views(torch.rand(3, 8, 8))[0] for _ in range(64)], torch.arange(64)
    batch = {"views": [torch.stack(crops)], "draws": views.draws(64)}
    with fake:
        batch, labels = train.to_device((batch, labels), "cuda")
        x = common.distort(batch)["views"][0].flatten(1)
        evaluation.knn_accuracy(x, labels, x, labels)


@pytest.mark.parametrize("name", ["sparc", "bam"])
def test_a_dry_run_on_ranks_exchanges_nothing(ranks, monkeypatch, name):
    """Rank 0 computes on the CPU, and NCCL has no collectives for tensors of the CPU."""
    monkeypatch.setattr(train.dist, "get_rank", lambda: 0)
    args, method = train.parse_args([*SMALL[name], "--dry-run"]), train.METHODS[name]
    train.open_training_data(args, method)
    train.dry_run(args, method, train.new_model(args, method, range(30)))
    assert ranks == []
