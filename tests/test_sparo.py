"""SPARO's equations against literal float64 loops, Table 6's sizes, its model, and two ranks against one process."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import common
import sparo
import train
from ranks import on_ranks

ROOT = Path(__file__).parents[1]
READOUTS = ["sparo", "cls", "gap", "attpool", "bottleneck", "fdt"]


# Literal references --------------------------------------------------------------------------------------------------


def softmax(values):
    e = [x.exp() for x in values]
    return [x / sum(e) for x in e]


def literal_slots(module, H, last=None):
    """Eq. 1, slot by slot and position by position, of one input H (n, d): (L, V) and the attention, L lists of n."""
    H = list(H) if last is None else list(H[: last + 1])
    weight, bias = module.KVproj.weight.view(module.nkeys, module.D, -1), module.KVproj.bias.view(module.nkeys, module.D)
    slots, maps = [], []
    for l in range(module.L):
        key, shared = l // module.grp_size, l % module.grp_size
        k = [weight[key] @ h + bias[key] for h in H]
        a = softmax([(module.q[0, key, shared, 0] * x).sum() / math.sqrt(module.D) for x in k])
        slots.append(module.Wproj.weight @ sum(weight * x for weight, x in zip(a, k)) + module.Wproj.bias)
        maps.append(a)
    return torch.stack(slots), maps


def cos(a, b):
    return (a * b).sum() / (a.norm() * b.norm())


def build(**settings):
    module = sparo.Sparo(**{"d": 6, "L": 4, "V": 3, "D": 5, **settings}).double()
    for p in module.parameters():
        nn.init.normal_(p)  # biases too
    return module


# The read-out --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listing", [False, True])
@pytest.mark.parametrize("grp_size", [1, 2, 4])
@pytest.mark.parametrize("ends", [None, [4, 0, 2]])
def test_slots_are_equation_1_in_values_and_gradients(grp_size, ends, listing):
    module, x = build(grp_size=grp_size, listing=listing), torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)
    expected = torch.stack([literal_slots(module, h, ends and ends[i])[0] for i, h in enumerate(x)])
    slots = module(x, None if ends is None else torch.tensor(ends))
    torch.testing.assert_close(slots, expected)
    weight, inputs = torch.randn_like(slots), [x, *module.parameters()]
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    for got, want in zip(torch.autograd.grad((slots * weight).sum(), inputs), wanted):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("listing", [False, True])
def test_attention_maps_are_those_of_the_slots(listing):
    module, x = build(listing=listing), torch.randn(2, 5, 6, dtype=torch.float64)
    slots, attn = module(x, torch.tensor([4, 2]), return_attn=True)
    assert torch.equal(slots, module(x, torch.tensor([4, 2]))) and attn.shape == (2, 4, 5)
    torch.testing.assert_close(attn[0], torch.stack([torch.stack(row) for row in literal_slots(module, x[0])[1]]))
    assert (attn[1, :, 3:] == 0).all() and torch.allclose(attn.sum(-1), torch.ones(2, 4).double())


def test_what_stands_behind_the_end_of_a_caption_changes_nothing():
    module, x = build(), torch.randn(2, 5, 6, dtype=torch.float64)
    other = x.clone()
    other[0, 3:], other[1, 1:] = 100.0, -100.0
    assert torch.equal(module(x, torch.tensor([2, 0])), module(other, torch.tensor([2, 0])))


def test_parameters_have_the_names_and_shapes_of_the_papers_listing():
    module = sparo.Sparo(d=768, L=64, V=32, D=16, grp_size=2)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        "q": (1, 32, 2, 1, 16), "KVproj.weight": (512, 768), "KVproj.bias": (512,), "Wproj.weight": (32, 16), "Wproj.bias": (32,)}
    assert not module.KVproj.bias.any() and not module.Wproj.bias.any()
    bound = math.sqrt(6 / (768 + 512))                                   # Xavier uniform
    assert module.KVproj.weight.abs().max() <= bound
    assert module.KVproj.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    with pytest.raises(ValueError, match="give a divisor of L"):
        sparo.Sparo(d=8, L=4, V=2, D=2, grp_size=3)


def test_the_absorbed_form_never_builds_the_keys():
    """At (n, d, L, D) = (197, 768, 64, 64) no tensor of the absorbed form is as large as the listing's keys (B, n, L * D)."""
    largest = {}
    for listing in (False, True):
        class Largest(torch.utils._python_dispatch.TorchDispatchMode):
            size = 0

            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                out = function(*args, **(kwargs or {}))
                for x in torch.utils._pytree.tree_leaves(out):
                    self.size = max(self.size, x.numel() if torch.is_tensor(x) else 0)
                return out

        with FakeTensorMode(), Largest() as mode:
            sparo.Sparo(768, 64, 64, 64, listing=listing)(torch.empty(8, 197, 768, requires_grad=True)).sum().backward()
        largest[listing] = mode.size
    assert largest[True] >= 8 * 197 * 64 * 64 and largest[False] <= max(8 * 64 * 768, 64 * 64 * 768, 8 * 197 * 768)


def test_limits_of_the_attention():
    module = build()
    nn.init.zeros_(module.q)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    mean = module.Wproj(module.KVproj(x.mean(1)).view(2, 4, 5))
    torch.testing.assert_close(module(x), mean)                          # no query: the mean of all positions
    torch.testing.assert_close(module(x[:, :1]), module.Wproj(module.KVproj(x[:, 0]).view(2, 4, 5)))  # one position: itself


def test_similarity_of_encodings_is_the_mean_cosine_of_the_slots():
    """Eq. 2."""
    a, b = torch.randn(3, 4, 5, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
    expected = torch.stack([sum(cos(x, y) for x, y in zip(*pair)) / 4 for pair in zip(a, b)])
    torch.testing.assert_close((sparo.normalize_slots(a) * sparo.normalize_slots(b)).sum(1), expected)
    torch.testing.assert_close(sparo.normalize_slots(a).norm(dim=1), torch.ones(3, dtype=torch.float64))


def test_clip_loss_is_the_literal_one():
    v, t = (nn.functional.normalize(torch.randn(4, 3, dtype=torch.float64), dim=-1).requires_grad_() for _ in range(2))
    scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    rows = [[scale * (x * y).sum() for y in t] for x in v]
    expected = sum(-softmax(rows[i])[i].log() - softmax([row[i] for row in rows])[i].log() for i in range(4)) / 8
    got = sparo.clip_loss(v, t, scale)
    torch.testing.assert_close(got, expected)
    for g, w in zip(torch.autograd.grad(got, (v, t, scale)), torch.autograd.grad(expected, (v, t, scale))):
        torch.testing.assert_close(g, w)


# The read-outs it is compared with -----------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", ["separate", "multi"])
@pytest.mark.parametrize("slot_norm", [False, True])
@pytest.mark.parametrize("slot_projection", [False, True])
def test_cross_attention_is_the_literal_one(heads, slot_norm, slot_projection):
    module = sparo.CrossAttention(6, L=3, V=2, D=4, heads=heads, slot_norm=slot_norm, slot_projection=slot_projection).double()
    x, ends = torch.randn(2, 5, 6, dtype=torch.float64), [4, 1]
    rows = []
    for h, end in zip(x, ends):
        parts = []
        for l in range(3):
            part = slice(4 * l, 4 * l + 4)
            a = softmax([(module.q[l, 0] * module.k(position)[part]).sum() / 2 for position in h[: end + 1]])
            parts.append(sum(weight * module.v(position)[part] for weight, position in zip(a, h)))
        y = module.mix(torch.cat(parts))
        y = torch.cat([module.norm(part) for part in y.split(4)]) if slot_norm else module.norm(y)
        rows.append(torch.cat([module.proj(part) for part in y.split(4)]) if slot_projection else module.proj(y))
    torch.testing.assert_close(module(x, torch.tensor(ends)), torch.stack(rows))
    assert rows[0].shape == (6,)


def test_sparsemax_is_the_projection_onto_the_simplex():
    z = torch.randn(50, 6, dtype=torch.float64, requires_grad=True)
    p = sparo.sparsemax(z)
    torch.testing.assert_close(p.sum(-1), torch.ones(50, dtype=torch.float64))
    assert (p >= 0).all() and 0.1 < (p == 0).double().mean() < 0.9
    for row, projected in zip(z.detach(), p.detach()):                   # bisection for the threshold
        low, high = row.min() - 1, row.max()
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if (row - middle).clamp(min=0).sum() > 1 else (low, middle)
        torch.testing.assert_close(projected, (row - low).clamp(min=0))
    assert torch.autograd.gradcheck(sparo.sparsemax, z[:3])


def test_fdt_mixes_the_codes_that_some_position_shows():
    codebook = nn.Parameter(torch.randn(7, 4, dtype=torch.float64))
    module = sparo.FDT(6, codebook).double()
    x, ends = torch.randn(2, 5, 6, dtype=torch.float64), torch.tensor([4, 1])
    for h, end, y in zip(x, ends, module(x, ends)):
        scores = torch.stack([max(module.proj(position) @ code / 2 for position in h[: end + 1]) for code in codebook])
        torch.testing.assert_close(y, sum(p * code for p, code in zip(sparo.sparsemax(scores), codebook)))


def test_pools_take_the_right_positions():
    x, ends = torch.randn(2, 5, 6), torch.tensor([4, 1])
    last, mean = sparo.Pool(nn.Identity(), mean=False), sparo.Pool(nn.Identity(), mean=True)
    assert torch.equal(last(x), x[:, 0]) and torch.equal(last(x, ends), torch.stack([x[0, 4], x[1, 1]]))
    torch.testing.assert_close(mean(x), x.mean(1))
    torch.testing.assert_close(mean(x, ends), torch.stack([x[0].mean(0), x[1, :2].mean(0)]))


TABLE_6 = [  # settings, millions of parameters, 10^9 multiplications (the paper's FLOPS)
    (dict(readout="cls"), 151, 7.4), (dict(readout="gap"), 151, 7.4),
    (dict(readout="attpool"), 440, 8.9),
    (dict(readout="attpool", slot_projection=True), 306, 8.8),
    (dict(readout="attpool", slot_norm=True), 440, 8.9),
    (dict(readout="attpool", slot_norm=True, slot_projection=True), 306, 8.8),
    (dict(readout="attpool", heads="separate"), 306, 8.8),
    (dict(readout="attpool", heads="separate", slot_projection=True), 172, 8.7),
    (dict(readout="attpool", heads="separate", slot_norm=True), 306, 8.8),
    (dict(readout="attpool", heads="separate", slot_norm=True, slot_projection=True), 172, 8.7),
    (dict(readout="sparo", replace_block=False, listing=True), 161, 8.0),
    (dict(readout="sparo", listing=True), 151, 7.4),
    (dict(readout="sparo"), 151, 6.8),                                   # not in the paper: the same function, absorbed
]


@pytest.mark.parametrize("settings, millions, billions", TABLE_6)
def test_parameters_and_flops_of_table_6(settings, millions, billions):
    config = sparo.Config(L=128, V=64, D=64, **settings)
    depth = 12 - sparo.replaced_blocks(vars(config))
    with FakeTensorMode():
        image = common.ViT(224, 32, 768, depth, 12, cls=True, pre_norm=True, patch_bias=False, eps=1e-5)
        text = common.TextTransformer(49408, 77, 512, depth, 8, causal=True)
        model = sparo.Model(config, image, text, 768, 512)
        batch = {"images": torch.empty(1, 3, 224, 224), "tokens": torch.zeros(1, 77, dtype=torch.long),
                 "mask": torch.ones(1, 77, dtype=torch.bool)}
        with FlopCounterMode(display=False) as counter:
            model(batch)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions
    assert round(counter.get_total_flops() / 2e9, 1) == billions


# Analyses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("D, millions", [(32, 97), (64, 108)])
def test_parameters_of_resnet_towers(D, millions, capsys):
    """Table B.2; they come out if the text tower keeps its last block."""
    train.main(["--method", "sparo", "--preset", "cc15m-r50", "--data", "shapes", "--dry-run", "--D", str(D), "--text-encoder",
                "12x512:causal=1,vocab_size=49408"])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert round(record["params"] / 1e6) == millions


def test_slot_accuracies_count_each_slot_alone():
    classes = torch.randn(5, 3, 4)
    labels = torch.randint(5, (40,))
    images = classes[labels] * torch.rand(40, 3, 1)                      # the length of a slot does not matter
    images[:, 1] = torch.randn(40, 4)                                    # this slot knows nothing
    images[:10, 2] = classes[(labels[:10] + 1) % 5, 2]                   # this one is wrong for ten
    accuracies = sparo.slot_accuracies(images, classes, labels)
    assert accuracies[[0, 2]].tolist() == [1.0, 0.75] and accuracies[1] < 0.6


@pytest.mark.parametrize("parts", [4, 12])
def test_a_mask_learns_which_parts_tell_captions_from_negatives(parts):
    """Of four slots one says the truth, one always the contrary, louder, and two say nothing."""
    n = 200
    y_i, y_p, y_n = (torch.randn(n, 4, 3) for _ in range(3))
    y_p[:, 0], y_n[:, 0] = y_i[:, 0], -y_i[:, 0]
    y_p[:, 1], y_n[:, 1] = -2 * y_i[:, 1], 2 * y_i[:, 1]
    y_n[:, 2:] = y_p[:, 2:]
    mask, before, after = sparo.train_mask(y_i.flatten(1), y_p.flatten(1), y_n.flatten(1), parts, epochs=30)
    mask = mask.view(4, 3)
    assert before < 0.4 and after > 0.95
    assert (mask[0] > 0.9).all() and (mask[1] < 0.1).all() and ((0 <= mask) & (mask <= 1)).all()
    if parts == 4:
        assert (mask == mask[:, :1]).all()


# Model ---------------------------------------------------------------------------------------------------------------


def tiny_model(**settings):
    image = common.ViT(image_size=16, patch_size=4, width=16, depth=1, heads=2, stem=((8, 2), (8, 2)), cls=True)
    text = common.TextTransformer(vocab_size=30, context=12, width=16, depth=1, heads=2, causal=True)
    config = sparo.Config(**{"L": 4, "V": 3, "D": 5, "embed_dim": 8, "bottleneck": 3, "codes": 20, **settings})
    return sparo.Model(config, image, text, 16, 16)


def make_batch(B=4, L=9):
    lengths = torch.tensor([9, 4, 6, 3, 5, 8, 7, 4])[:B]
    return {"images": torch.randn(B, 3, 16, 16), "tokens": torch.randint(4, 30, (B, L)),
            "mask": torch.arange(L) < lengths[:, None]}


@pytest.mark.parametrize("readout", READOUTS)
def test_the_model_trains_on_clips_loss_of_its_encodings(readout):
    model, batch = tiny_model(readout=readout), make_batch()
    out = model(batch)
    v, t = model.encode_image(batch["images"]), model.encode_text(batch["tokens"], batch["mask"])
    torch.testing.assert_close(out["loss"], sparo.clip_loss(v, t, 1 / 0.07))
    torch.testing.assert_close(v.norm(dim=1), torch.ones(4))
    torch.testing.assert_close(t.norm(dim=1), torch.ones(4))
    assert v.shape == t.shape == (4, 12 if readout in ("sparo", "attpool") else 8)
    out["loss"].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-8] == []


@pytest.mark.parametrize("readout", READOUTS)
def test_encodings_ignore_padding(readout):
    model, batch = tiny_model(readout=readout).eval(), make_batch()
    longer = {"tokens": torch.cat([batch["tokens"], torch.randint(30, (4, 3))], 1),
              "mask": torch.cat([batch["mask"], torch.zeros(4, 3, dtype=torch.bool)], 1)}
    torch.testing.assert_close(model.encode_text(**longer), model.encode_text(batch["tokens"], batch["mask"]))


def test_a_mask_selects_slots_of_the_image_and_keeps_its_encoding_normalised():
    model, batch = tiny_model().eval(), make_batch()
    full, text = model.encode_image(batch["images"]), model.encode_text(batch["tokens"], batch["mask"])
    model.image_mask = torch.tensor([1.0, 0, 1, 0]).repeat_interleave(3)
    masked = model.encode_image(batch["images"])
    torch.testing.assert_close(masked, nn.functional.normalize(full * model.image_mask, dim=-1))
    assert torch.equal(model.encode_text(batch["tokens"], batch["mask"]), text)


def test_the_last_block_is_replaced_by_sparo_alone():
    settings = {"readout": "sparo", "replace_block": True}
    assert [sparo.replaced_blocks(settings | change) for change in ({}, {"replace_block": False}, {"readout": "gap"})] == [1, 0, 0]


def model_of(readout):
    return tiny_model(readout=readout)


def test_two_ranks_equal_one_process(tmp_path):
    batch, models = make_batch(B=8), {readout: model_of(readout) for readout in READOUTS}
    ranks = on_ranks(tmp_path, model_of, models, batch)
    for readout, model in models.items():
        loss = model(batch)["loss"]
        loss.backward()
        assert sum(out["loss"] for out, _, _ in ranks[readout]).item() / 2 == pytest.approx(loss.item(), abs=1e-6), readout
        for name, p in model.named_parameters():
            for _, gradients, _ in ranks[readout]:
                torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-5, msg=lambda m: f"{readout} {name}: {m}")


def test_the_file_works_alone_in_an_empty_directory(tmp_path):
    shutil.copy(ROOT / "sparo.py", tmp_path)
    shown = subprocess.run([sys.executable, "sparo.py"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "pairs found 100%" in shown.splitlines()[-2] and "times as long" in shown.splitlines()[-1]
