"""SPARO: slots, losses and baselines against literal references in float64, and Table 6."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import common
import sparo
import train
from helpers import (assert_same_with_gradients, cos, infonce, make_batch, mean, padded,
                     shapes_alone, softmax, tiny_model)


def literal_slots(module, H, last=None):
    """Eq. 1 for one input H (n, d), slot by slot -> slots (L, V) and attention (L, n).

    last: the last position that is attended to.
    """
    H = list(H) if last is None else list(H[: last + 1])
    weight = module.KVproj.weight.view(module.nkeys, module.D, -1)
    bias = module.KVproj.bias.view(module.nkeys, module.D)
    slots, maps = [], []
    for l in range(module.nkeys * module.grp_size):
        key, shared = l // module.grp_size, l % module.grp_size
        q = module.q[0, key, shared, 0]
        k = [weight[key] @ h + bias[key] for h in H]
        a = softmax([(q * x).sum() / math.sqrt(module.D) for x in k])
        slots.append(module.Wproj.weight @ sum(p * x for p, x in zip(a, k)) + module.Wproj.bias)
        maps.append(torch.stack(a))
    return torch.stack(slots), torch.stack(maps)


def listing(self, x, eos_idx=None):
    """Sparo.forward as the paper's listing has it (App. A)."""
    batch_size, n, d = x.shape
    kv = self.KVproj(x).view(batch_size, n, self.nkeys, 1, self.D)
    kv = kv.expand(-1, -1, -1, self.grp_size, -1).permute(0, 2, 3, 1, 4)
    attn = (self.q * self.D**-0.5) @ kv.transpose(-2, -1)
    if eos_idx is not None:
        positions = torch.arange(n, device=eos_idx.device)[None, None, None, None, :]
        attn_mask = positions > eos_idx[:, None, None, None, None]
        zeros = torch.zeros_like(attn_mask, dtype=attn.dtype)
        attn = attn + torch.where(attn_mask, -torch.inf, zeros)
    attn = attn.softmax(dim=-1)
    return self.Wproj((attn @ kv).view(batch_size, self.nkeys * self.grp_size, self.D))


@pytest.mark.parametrize("grp_size", [1, 2, 4])
@pytest.mark.parametrize("ends", [None, [4, 0, 2]])
def test_slots_equal_equation_1_and_the_papers_listing(grp_size, ends):
    with pytest.raises(RuntimeError, match="invalid for input"):  # no slot is lost without a word
        sparo.Sparo(d=6, L=5, V=3, D=5, grp_size=3)
    module = sparo.Sparo(d=6, L=4, V=3, D=5, grp_size=grp_size).double()
    for p in module.parameters():
        nn.init.normal_(p)  # biases, too
    x = torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)
    rows = [literal_slots(module, h, ends and ends[i]) for i, h in enumerate(x)]
    ends = None if ends is None else torch.tensor(ends)
    slots, attn = module(x, ends, return_attn=True)
    for expected in (torch.stack([slots for slots, _ in rows]), listing(module, x, ends)):
        assert_same_with_gradients(slots, expected, [x, *module.parameters()])
    for i, (_, maps) in enumerate(rows):
        torch.testing.assert_close(attn[i, :, : maps.shape[1]], maps)
        assert (attn[i, :, maps.shape[1] :] == 0).all()
    assert torch.equal(slots, module(x, ends))


def test_an_empty_caption_is_read_at_its_first_position():
    """The index of its last token is -1."""
    pool, x, ends = sparo.Pool(nn.Identity()), torch.randn(2, 5, 8), torch.tensor([-1, 2])
    assert torch.equal(pool(x, ends)[:, 0], torch.stack([x[0, 0], x[1, 2]]))
    slots = sparo.Sparo(8, 4, 4, 4)
    assert torch.equal(slots(x, ends), slots(x, ends.clamp(min=0)))


def test_parameters_have_the_names_and_shapes_of_the_papers_listing():
    module = sparo.Sparo(d=768, L=64, V=32, D=16, grp_size=2)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes == {"q": (1, 32, 2, 1, 16), "KVproj.weight": (512, 768), "KVproj.bias": (512,),
                      "Wproj.weight": (32, 16), "Wproj.bias": (32,)}
    assert not module.KVproj.bias.any() and not module.Wproj.bias.any()
    assert module.KVproj.weight.abs().max() <= math.sqrt(6 / (768 + 512))  # Xavier uniform


def test_similarity_of_encodings_is_the_mean_cosine_of_the_slots():
    a, b = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    v, t = sparo.normalize_slots(a), sparo.normalize_slots(b)
    expected = [sum(cos(a[i, l], b[i, l]) for l in range(4)) / 4 for i in range(3)]
    torch.testing.assert_close((v * t).sum(1), torch.stack(expected))
    torch.testing.assert_close(v.norm(dim=1), torch.ones(3, dtype=torch.float64))


def test_clip_loss_equals_a_literal_loop():
    v, t = torch.randn(2, 4, 3, dtype=torch.float64)
    scale = torch.tensor(5.0, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (v, t, scale)]
    logits = [[scale * cos(x, y) for y in t] for x in v]
    terms = [infonce(row, i) for rows in (logits, zip(*logits)) for i, row in enumerate(rows)]
    assert_same_with_gradients(sparo.clip_loss(v, t, scale), mean(terms), inputs)


@pytest.mark.parametrize("heads", ["separate", "multi"])
@pytest.mark.parametrize("slot_norm", [False, True])
@pytest.mark.parametrize("slot_projection", [False, True])
def test_cross_attention_equals_a_literal_loop(heads, slot_norm, slot_projection):
    module = sparo.CrossAttention(6, 3, 2, 4, heads, slot_norm, slot_projection).double()
    x, ends = torch.randn(2, 5, 6, dtype=torch.float64), [4, 1]
    rows = []
    for h, end in zip(x, ends):
        heads_out = []
        for l in range(3):
            part = slice(4 * l, 4 * l + 4)
            q, k = module.q[l, 0], [module.k(position)[part] for position in h[: end + 1]]
            a = softmax([(q * x).sum() / 2 for x in k])
            heads_out.append(sum(p * module.v(position)[part] for p, position in zip(a, h)))
        y = module.mix(torch.cat(heads_out))
        y = torch.cat([module.norm(s) for s in y.split(4)]) if slot_norm else module.norm(y)
        slots = y.split(4) if slot_projection else [y]
        rows.append(torch.cat([module.proj(s) for s in slots]))
    torch.testing.assert_close(module(x, torch.tensor(ends)), torch.stack(rows)[:, None])
    assert rows[0].shape == (6,)


def test_sparsemax_is_the_projection_onto_the_simplex():
    z = torch.randn(50, 6, dtype=torch.float64, requires_grad=True)
    p = sparo.sparsemax(z)
    torch.testing.assert_close(p.sum(-1), torch.ones(50, dtype=torch.float64))
    assert (p >= 0).all() and 0.1 < (p == 0).double().mean() < 0.9
    for row, projected in zip(z.detach(), p.detach()):  # all lose one threshold, or fall to 0
        threshold = (row - projected)[projected > 0].mean()
        torch.testing.assert_close(projected, (row - threshold).clamp(min=0))
    assert torch.autograd.gradcheck(sparo.sparsemax, z[:3])


def test_fdt_mixes_codes_by_their_best_position():
    """The reference follows FDTQueryModel in transformer.py of ankitkv/sparo-clip f013384.

    A code's score is its best product with a position, divided by sqrt(E) and by 1000.
    """
    codebook = nn.Parameter(1000 * torch.randn(7, 4, dtype=torch.float64))  # some weights are 0
    module = sparo.FDT(6, codebook).double()
    norm, first, _, norm_2, second = module.query
    x, ends = torch.randn(2, 5, 6, dtype=torch.float64), torch.tensor([4, 1])
    for h, end, y in zip(x, ends, module(x, ends)):
        shown = [second(norm_2(F.gelu(first(norm(position))))) for position in h[: end + 1]]
        scores = torch.stack([max(e @ code / 2 / 1000 for e in shown) for code in codebook])
        p = sparo.sparsemax(scores)
        assert 0 < (p > 0).sum() < 7
        torch.testing.assert_close(y, sum(w * code for w, code in zip(p, codebook))[None])


def test_attention_pool_equals_clips():
    """The reference follows AttentionPool2d in clip/model.py of openai/CLIP ea41722.

    The mean of the outputs is the query. Positions are added to the mean and to the outputs.
    """
    x, pool = torch.randn(2, 9, 128).double(), sparo.AttentionPool(128, 9, 5).double()
    for p in pool.parameters():
        nn.init.normal_(p)
    tokens = torch.cat([x.mean(1, keepdim=True), x], 1).transpose(0, 1) + pool.pos[:, None]
    expected, _ = F.multi_head_attention_forward(
        tokens[:1], tokens, tokens, embed_dim_to_check=128, num_heads=2, in_proj_weight=None,
        in_proj_bias=torch.cat([pool.q.bias, pool.k.bias, pool.v.bias]), bias_k=None, bias_v=None,
        add_zero_attn=False, dropout_p=0.0, out_proj_weight=pool.proj.weight,
        out_proj_bias=pool.proj.bias, use_separate_proj_weight=True, training=False,
        need_weights=False, q_proj_weight=pool.q.weight, k_proj_weight=pool.k.weight,
        v_proj_weight=pool.v.weight)
    assert_same_with_gradients(pool(x), expected.transpose(0, 1), [*pool.parameters()])


def test_clip_with_gap_normalises_the_mean_of_all_image_tokens():
    """The authors' scripts/train_vitb32_gap.sh sets only vision_cfg.global_average_pool. Their
    VisionTransformer.forward_output (f013384) then computes x.mean(dim=1), ln_post, @ proj."""
    vit = common.ViT(16, 4, 16, depth=1, heads=2, cls=True)
    text = common.TextTransformer(30, 12, 16, depth=1, heads=2, causal=True)
    nn.init.normal_(vit.norm.weight), nn.init.normal_(vit.norm.bias)
    norm, batch = vit.norm, make_batch()
    outputs = vit.blocks(vit.embed(batch["images"]))[-1]           # not normalised
    outputs[:, 3] *= 30  # so that the order of mean and LayerNorm matters
    vit.blocks.forward = lambda x, n=1: [outputs]
    model = sparo.Baseline(sparo.Settings(readout="gap", embed_dim=8), vit, text, 16, 16)
    v = [sum(x) / 17 for x in outputs]
    v = [model.image_readout.proj[1].weight @ norm(x) for x in v]
    expected = torch.stack([x / (x * x).sum().sqrt() for x in v])
    torch.testing.assert_close(model.encode_image(batch["images"]), expected)
    assert model.image_readout.proj[0] is norm  # --init-weights loads it from a CLIP


TABLE_6 = [  # flags, 10^6 parameters, 10^9 multiplications
    ("--readout cls", 151, 7.4), ("--readout gap", 151, 7.4), ("--no-replace-block", 161, 8.0),
    ("", 151, 7.4)]
for norm in ("", "--slot-norm "):
    flags = "--readout attpool " + norm
    TABLE_6 += [(flags, 440, 8.9), (flags + "--slot-projection", 306, 8.8),
                (flags + "--heads separate", 306, 8.8),
                (flags + "--heads separate --slot-projection", 172, 8.7)]


def cost_of(flags):
    """Return parameters / 10^6 and multiplications / 10^9 of CLIP ViT-B/32 without the loss."""
    args = train.parse_args(["--method", "sparo", "--preset", "l400m-b32", *flags.split()])
    method, tokens = train.METHODS["sparo"], torch.zeros(1, 77, dtype=torch.long, device="meta")
    with shapes_alone():
        model = common.build_model(method, args, *common.build_encoders(method, args, []))
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model.image_slots(torch.empty(1, 3, 224, 224))
            model.text_slots(tokens, tokens == 0)
    parameters = sum(p.numel() for p in model.parameters())
    return round(parameters / 1e6), round(counter.get_total_flops() / 2e9, 1)


@pytest.mark.parametrize("flags, parameters, flops", TABLE_6)
def test_parameters_and_flops_equal_table_6(flags, parameters, flops, monkeypatch):
    """Table 6 has the FLOPs of the listing. This project's order of operations needs fewer."""
    if not flags:  # SPARO as in sparo.py
        assert cost_of(flags) == (151, 6.8)
    monkeypatch.setattr(sparo.Sparo, "forward", listing)
    assert cost_of(flags) == (parameters, flops)


def test_slot_accuracies_classify_by_one_slot_each():
    classes = torch.randn(5, 3, 4)
    labels = torch.randint(5, (40,))
    images = classes[labels] * torch.rand(40, 3, 1)  # the length of a slot does not matter
    images[:, 1] = torch.randn(40, 4)  # this slot is random
    images[:10, 2] = classes[(labels[:10] + 1) % 5, 2]  # this slot is wrong for ten images
    accuracies = sparo.slot_accuracies(images, classes, labels)
    assert accuracies[[0, 2]].tolist() == [1.0, 0.75] and accuracies[1] < 0.6


def test_a_mask_learns_nothing_from_ties_and_has_equal_parts():
    """test_details.py compares the training of a mask with a literal loop."""
    y_i, y_p = torch.randn(2, 20, 12)
    kinds = ["add", "swap"] * 10
    _, *accuracies = sparo.train_mask(y_i, y_p, y_p, kinds, 4, epochs=1)
    assert accuracies == [0, 0]  # a tie is no right pair


@pytest.mark.parametrize("readout", ["sparo", "cls", "gap", "attpool", "bottleneck", "fdt"])
def test_model_loss_is_clips_loss_of_encodings_that_ignore_padding(readout):
    model, batch = tiny_model("sparo", readout=readout), make_batch()
    out = model(batch)
    v = model.encode_image(batch["images"])
    t = model.encode_text(batch["tokens"], batch["mask"])
    torch.testing.assert_close(out["loss"], sparo.clip_loss(v, t, 1 / 0.07))
    torch.testing.assert_close(model.encode_text(*padded(batch)), t)
    for x in (v, t):
        torch.testing.assert_close(x.norm(dim=1), torch.ones(4))
        assert x.shape == (4, 12 if readout in ("sparo", "attpool") else 8)
    out["loss"].backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert [name for name, g in gradients.items() if g is None or g.abs().max() < 1e-8] == []
