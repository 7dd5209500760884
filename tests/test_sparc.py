"""SPARC's equations against literal float64 loops, its model, and two ranks against one process."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import common
import sparc

ROOT = Path(__file__).parents[1]


# Literal references --------------------------------------------------------------------------------------------------


def literal_weights(tokens, patches, sigma=None):
    """Eq. 2-4, one number at a time: tokens (L, E), patches (P, E) -> list of L lists of P scalars."""
    P = len(patches)
    rows = []
    for t in tokens:
        s = [sum(a * b for a, b in zip(t, v)) for v in patches]
        low, high = min(s, key=lambda x: x.item()), max(s, key=lambda x: x.item())
        hat = [(x - low) / (high - low) for x in s]
        tilde = [x if x.item() >= (1 / P if sigma is None else sigma) else 0 * x for x in hat]
        rows.append([x / sum(tilde) for x in tilde])
    return rows


def literal_softmax_weights(tokens, patches):
    rows = []
    for t in tokens:
        e = [sum(a * b for a, b in zip(t, v)).exp() for v in patches]
        rows.append([x / sum(e) for x in e])
    return rows


def cos(a, b):
    return sum(x * y for x, y in zip(a, b)) / (sum(x * x for x in a).sqrt() * sum(y * y for y in b).sqrt())


def infonce(row, positive):
    return -(row[positive] - sum(x.exp() for x in row).log())


def literal_fine_grained(tokens, patches, mask, scale, weights=literal_weights):
    """Eq. 5, 6 -> list of each caption's list of per-token losses (both directions, halved)."""
    losses = []
    for i in range(len(tokens)):
        t = [tokens[i, l] for l in range(tokens.shape[1]) if mask[i, l]]
        a = weights(t, list(patches[i])) if t else []
        c = [sum(a[l][p] * patches[i, p] for p in range(patches.shape[1])) for l in range(len(t))]
        losses.append([(infonce([scale * cos(c[j], t[k]) for k in range(len(t))], j)
                        + infonce([scale * cos(t[j], c[k]) for k in range(len(t))], j)) / 2 for j in range(len(t))])
    return losses


def ragged(B=3, L=5, P=6, E=4, lengths=(5, 2, 3)):
    tokens = torch.randn(B, L, E, dtype=torch.float64, requires_grad=True)
    patches = torch.randn(B, P, E, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(L) < torch.tensor(lengths)[:, None]
    return tokens, patches, mask


def assert_same_with_gradients(value, expected, inputs):
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(value)
    got = torch.autograd.grad((value * weight).sum(), inputs, allow_unused=True)
    want = torch.autograd.grad((expected * weight).sum(), inputs, allow_unused=True)
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-10)


# Equations -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [None, 0.0, 0.5, 1.0])
def test_alignment_weights_are_equations_2_to_4(sigma):
    tokens, patches, _ = ragged()
    expected = torch.stack([torch.stack([torch.stack(row) for row in literal_weights(t, v, sigma)])
                            for t, v in zip(tokens, patches)])
    assert_same_with_gradients(sparc.alignment_weights(tokens, patches, sigma), expected, (tokens, patches))


def test_alignment_weights_are_sparse_and_sum_to_one():
    tokens, patches, _ = ragged(P=50, lengths=(5, 5, 5))
    weights = sparc.alignment_weights(tokens, patches, 0.5)
    assert (weights == 0).float().mean() > 0.3
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 5, dtype=torch.float64))
    assert (sparc.alignment_weights(tokens, patches, 1.0).amax(-1) == 1).all()


def test_default_threshold_is_one_over_the_number_of_patches():
    tokens = torch.ones(1, 1, 1)
    patches = torch.tensor([0.0, 0.19, 0.21, 0.5, 1.0]).view(1, 5, 1)   # min-max leaves them as they are; 1 / P = 0.2
    assert (sparc.alignment_weights(tokens, patches)[0, 0] > 0).tolist() == [False, False, True, True, True]


def test_equal_similarities_give_uniform_weights_and_finite_gradients():
    tokens, patches, _ = ragged()
    tokens = torch.cat([tokens[:, :2], torch.zeros(3, 1, 4)], dim=1).detach().requires_grad_()
    weights = sparc.alignment_weights(tokens, patches)
    torch.testing.assert_close(weights[:, 2], torch.full((3, 6), 1 / 6, dtype=torch.float64))
    assert not torch.allclose(weights[:, 0], weights[:, 2])
    for gradient in torch.autograd.grad(weights.square().sum(), (tokens, patches)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("align, literal", [
    (sparc.ALIGN["sparse"], literal_weights), (sparc.ALIGN["dense"], lambda t, v: literal_weights(t, v, 0.0)),
    (sparc.ALIGN["softmax"], literal_softmax_weights)])
def test_fine_grained_loss_is_equation_6(align, literal):
    tokens, patches, mask = ragged()
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    per_token = literal_fine_grained(tokens, patches, mask, scale, literal)
    expected = sum(sum(row) / len(row) for row in per_token) / len(per_token)
    assert_same_with_gradients(sparc.fine_grained_loss(tokens, patches, mask, scale, align), expected,
                               (tokens, patches, scale))


def test_token_mean_batch_divides_by_all_tokens():
    tokens, patches, mask = ragged()
    per_token = [x for row in literal_fine_grained(tokens, patches, mask, 7.0) for x in row]
    value = sparc.fine_grained_loss(tokens, patches, mask, 7.0, token_mean="batch")
    assert_same_with_gradients(value, sum(per_token) / len(per_token), (tokens, patches))
    assert abs(value - sparc.fine_grained_loss(tokens, patches, mask, 7.0)) > 1e-3


def test_gradients_flow_through_the_alignment_weights():
    tokens, patches, mask = ragged()
    frozen = lambda t, v: sparc.alignment_weights(t, v).detach()
    through, = torch.autograd.grad(sparc.fine_grained_loss(tokens, patches, mask, 7.0), patches)
    around, = torch.autograd.grad(sparc.fine_grained_loss(tokens, patches, mask, 7.0, frozen), patches)
    assert (through - around).abs().max() > 1e-3


def test_padding_is_neither_anchor_nor_negative():
    tokens, patches, mask = ragged()
    loss = sparc.fine_grained_loss(tokens, patches, mask, 7.0)
    other = torch.where(mask[..., None], tokens, 100 * torch.randn_like(tokens))
    torch.testing.assert_close(sparc.fine_grained_loss(other, patches, mask, 7.0), loss)
    assert (torch.autograd.grad(loss, tokens)[0][~mask] == 0).all()


def test_limits_of_the_fine_grained_loss():
    eye = torch.eye(6, dtype=torch.float64)[None]
    mask = torch.ones(1, 6, dtype=torch.bool)
    assert sparc.fine_grained_loss(eye, eye, mask, 100.0) < 1e-6                        # each word has its own patch
    same = torch.ones(1, 6, 4, dtype=torch.float64)
    torch.testing.assert_close(sparc.fine_grained_loss(same, torch.randn(1, 9, 4).double(), mask, 100.0).item(), math.log(6))
    one = torch.tensor([[True] + [False] * 5])
    assert sparc.fine_grained_loss(eye, eye, one, 100.0) == 0                           # a single word has no negative


def test_a_caption_without_words_adds_zero():
    tokens, patches, mask = ragged(lengths=(5, 0, 3))
    loss = sparc.fine_grained_loss(tokens, patches, mask, 7.0)
    both = sparc.fine_grained_loss(tokens[[0, 2]], patches[[0, 2]], mask[[0, 2]], 7.0)
    torch.testing.assert_close(loss * 3, both * 2)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (tokens, patches)))


def test_global_loss_is_equation_1():
    v = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    t = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    expected = sum(infonce([scale * cos(v[i], t[j]) for j in range(4)], i) + infonce([scale * cos(t[i], v[j]) for j in range(4)], i)
                   for i in range(4)) / 8
    assert_same_with_gradients(sparc.global_loss(v, t, scale), expected, (v, t, scale))
    same = torch.ones(4, 3)
    assert sparc.global_loss(same, same, 100.0).item() == pytest.approx(math.log(4), abs=1e-5)


def test_losses_are_fp32_inside_autocast():
    tokens, patches, mask = (x.float() if x.is_floating_point() else x for x in ragged(E=64, P=30))
    expected = sparc.fine_grained_loss(tokens, patches, mask, 100.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sparc.fine_grained_loss(tokens, patches, mask, 100.0), expected)
        assert sparc.global_loss(tokens[:, 0].bfloat16(), patches[:, 0].bfloat16(), torch.tensor(10.0)).dtype == torch.float32


# Model ---------------------------------------------------------------------------------------------------------------


def tiny_model(**settings):
    image = common.ViT(image_size=16, patch_size=4, width=16, depth=1, heads=2, stem=((8, 2), (8, 2)))
    text = common.TextTransformer(vocab_size=30, context=12, width=16, depth=1, heads=2)
    return sparc.Model(sparc.Config(embed_dim=8, **settings), image, text, 16, 16)


def make_batch(B=4, L=9):
    lengths = torch.tensor([9, 4, 6, 3, 5, 8, 7, 4])[:B]
    return {"images": torch.randn(B, 3, 16, 16), "tokens": torch.randint(4, 30, (B, L)),
            "mask": torch.arange(L) < lengths[:, None]}


def test_words_only_drops_the_first_and_the_last_token():
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    assert sparc.words_only(mask).int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 0]]


def test_model_loss_is_equation_7_on_words():
    model, batch = tiny_model(lambda_g=0.5, lambda_f=3.0), make_batch()
    out = model(batch)
    f_v = model.image_encoder(batch["images"])
    f_t = model.text_encoder(batch["tokens"], batch["mask"])
    words = [range(1, int(n) - 1) for n in batch["mask"].sum(1)]
    v = torch.stack([model.g_v(model.h_v(f.mean(0))) for f in f_v])
    t = torch.stack([model.g_t(f[list(w)].mean(0)) for f, w in zip(f_t, words)])
    loss_g = sparc.global_loss(v, t, 1 / 0.07)
    mask = torch.zeros_like(batch["mask"])
    for row, w in zip(mask, words):
        row[list(w)] = True
    loss_f = sparc.fine_grained_loss(model.g_t(f_t), model.g_v(f_v), mask, 1 / 0.07)
    torch.testing.assert_close(out["global"], loss_g)
    torch.testing.assert_close(out["local"], loss_f)
    torch.testing.assert_close(out["loss"], 0.5 * loss_g + 3.0 * loss_f)
    wrong = sparc.fine_grained_loss(model.g_t(f_t), model.g_v(f_v).roll(1, 0), mask, 1 / 0.07)
    torch.testing.assert_close(out["local_wrong_image"], wrong)


def test_clip_objective_is_the_global_loss_alone():
    model, batch = tiny_model(objective="clip"), make_batch()
    out = model(batch)
    assert "local" not in out and out["loss"] == out["global"]


def test_every_parameter_gets_a_gradient():
    for objective in ("sparc", "clip"):
        model = tiny_model(objective=objective)
        model(make_batch())["loss"].backward()
        unused = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert unused in ([], ["text_encoder.pos"]) or all("qkv.bias" in name for name in unused), unused


def test_embeddings_are_normalised_and_ignore_padding():
    model, batch = tiny_model().eval(), make_batch()
    text = model.encode_text(batch["tokens"], batch["mask"])
    longer = model.encode_text(torch.cat([batch["tokens"], torch.randint(30, (4, 3))], 1),
                               torch.cat([batch["mask"], torch.zeros(4, 3, dtype=torch.bool)], 1))
    torch.testing.assert_close(text, longer)
    for x in (text, model.encode_image(batch["images"]), model.encode_patches(batch["images"])):
        torch.testing.assert_close(x.norm(dim=-1), torch.ones(x.shape[:-1]))
    assert model.encode_patches(batch["images"]).shape == (4, 16, 8)


def test_chance_loss_is_the_loss_of_equal_similarities():
    model, batch = tiny_model(lambda_f=2.0), make_batch()
    nn.init.zeros_(model.g_t.weight)
    assert model(batch)["loss"].item() == pytest.approx(model.chance_loss(4, batch["mask"], 16), abs=1e-4)


def test_scale_stays_within_1_and_100():
    model = tiny_model()
    for value, kept in ((10.0, 100.0), (-3.0, 1.0), (2.0, math.exp(2.0))):
        nn.init.constant_(model.log_scale, value)
        model.after_step(0, 1)
        assert model.log_scale.exp().item() == pytest.approx(kept)


# Two ranks = one process ---------------------------------------------------------------------------------------------


def run_rank(rank, directory, settings):
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = tiny_model(**settings)
    model.load_state_dict(torch.load(f"{directory}/model.pt"))
    batch = torch.load(f"{directory}/batch.pt")
    batch = {key: value[4 * rank : 4 * rank + 4] for key, value in batch.items()}
    longest = int(batch["mask"].sum(1).max())  # each rank cuts to its own longest caption
    batch |= {key: batch[key][:, :longest] for key in ("tokens", "mask")}
    parallel = DistributedDataParallel(model)  # kept by name: its gradient hooks die with it
    loss = parallel(batch, common.gather)["loss"]
    loss.backward()
    torch.save((loss.detach(), {name: p.grad for name, p in model.named_parameters()}), f"{directory}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("settings", [dict(), dict(objective="clip"), dict(token_mean="batch", align="softmax")])
def test_two_ranks_equal_one_process(tmp_path, settings):
    model, batch = tiny_model(**settings), make_batch(B=8)
    batch["mask"][4:, 6:] = False  # the second rank's captions are shorter
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(batch, tmp_path / "batch.pt")
    torch.multiprocessing.spawn(run_rank, (str(tmp_path), settings), nprocs=2)
    loss = model(batch)["loss"]
    loss.backward()
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert sum(r[0] for r in ranks).item() / 2 == pytest.approx(loss.item(), abs=1e-6)
    for name, p in model.named_parameters():
        for _, gradients in ranks:
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")


# Copying the file ----------------------------------------------------------------------------------------------------


def test_the_file_works_alone_in_an_empty_directory(tmp_path):
    shutil.copy(ROOT / "sparc.py", tmp_path)
    subprocess.run([sys.executable, "-c", "import sparc"], cwd=tmp_path, check=True)
    shown = subprocess.run([sys.executable, "sparc.py"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert shown.splitlines()[-1].endswith("theirs 100%")
