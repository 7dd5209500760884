"""SPARC: every equation against a literal reference in float64, and the model."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import sparc
from helpers import (assert_same_with_gradients, cos, infonce, make_batch, mean, padded, softmax,
                     tiny_model)


def literal_weights(tokens, patches, sigma=None):
    """Eq. 2 to 4 for tokens (L, E) and patches (P, E) -> L lists of P scalars.

    Eq. 2 is 0 / 0 if a token is equally similar to all patches. Each weight is 1 / P then.
    """
    P = len(patches)
    sigma = 1 / P if sigma is None else sigma
    rows = []
    for t in tokens:
        s = [(t * v).sum() for v in patches]
        low, high = min(s, key=lambda x: x.item()), max(s, key=lambda x: x.item())
        if high == low:
            rows.append([torch.ones_like(x) / P for x in s])
            continue
        hat = [(x - low) / (high - low) for x in s]
        tilde = [x if x.item() >= sigma else 0 * x for x in hat]
        rows.append([x / sum(tilde) for x in tilde])
    return rows


def literal_sequence(c, t, scale):
    """Eq. 6 for one caption: c and t, L vectors each -> a list with the loss of each token."""
    losses = []
    for j in range(len(t)):
        c_to_t = infonce([scale * cos(c[j], x) for x in t], j)
        t_to_c = infonce([scale * cos(t[j], x) for x in c], j)
        losses.append((c_to_t + t_to_c) / 2)
    return losses


def literal_fine_grained(tokens, patches, mask, scale, weights=literal_weights):
    """Eq. 5 and 6 -> for each caption, the list of its tokens' losses."""
    losses = []
    for caption, image, words in zip(tokens, patches, mask):
        t = [x for x, word in zip(caption, words) if word]
        c = []
        for row in weights(t, image):
            c.append(sum(a * v for a, v in zip(row, image)))
        losses.append(literal_sequence(c, t, scale))
    return losses


def ragged(lengths=(5, 2, 3)):
    """Return tokens (B, 5, 4), patches (B, 6, 4) and the mask (B, 5). lengths: of the captions."""
    tokens, patches = (torch.randn(len(lengths), n, 4, dtype=torch.float64, requires_grad=True)
                       for n in (5, 6))
    return tokens, patches, torch.arange(5) < torch.tensor(lengths)[:, None]


def ragged_with_a_flat_word():
    """ragged(), but one word is equally similar to all patches of its image: 0 / 0 in Eq. 2."""
    tokens, patches, mask = ragged()
    with torch.no_grad():
        patches[0, :, 3], tokens[0, 1] = 0.0, torch.tensor([0.0, 0.0, 0.0, 2.0])
    return tokens, patches, mask


@pytest.mark.parametrize("sigma", [None, 0.0, 0.5, 1.0])
def test_alignment_weights_equal_equations_2_to_4(sigma):
    tokens, patches, _ = ragged_with_a_flat_word()
    rows = [row for t, v in zip(tokens, patches) for row in literal_weights(t, v, sigma)]
    expected = torch.stack([torch.stack(row) for row in rows]).view(3, 5, 6)
    weights = sparc.alignment_weights(tokens, patches, sigma)
    assert_same_with_gradients(weights, expected, (tokens, patches))


@pytest.mark.parametrize("align, literal", [
    ("sparse", literal_weights), ("dense", partial(literal_weights, sigma=0.0)),
    ("softmax", lambda tokens, patches: [softmax([(t * v).sum() for v in patches]) for t in tokens])])
def test_fine_grained_loss_equals_equation_6(align, literal):
    tokens, patches, mask = ragged_with_a_flat_word()
    scale = torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    per_token = literal_fine_grained(tokens, patches, mask, scale, literal)
    expected = mean([mean(row) for row in per_token])
    align = tiny_model("sparc", align=align).align
    loss = sparc.fine_grained_loss(tokens, patches, mask, scale, align=align)
    assert_same_with_gradients(loss, expected, (tokens, patches, scale))
    over_all = mean([x for row in per_token for x in row])
    loss = sparc.fine_grained_loss(tokens, patches, mask, scale, align=align, token_mean="batch")
    assert_same_with_gradients(loss, over_all, (tokens, patches, scale))
    assert abs(expected - over_all) > 1e-3


def test_fine_grained_loss_is_0_if_words_differ_and_log_L_if_they_are_equal():
    eye = torch.eye(6, dtype=torch.float64)[None]
    mask = torch.ones(1, 6, dtype=torch.bool)
    assert sparc.fine_grained_loss(eye, eye, mask, 100.0) < 1e-6  # each word has its own patch
    same = torch.ones(1, 6, 4, dtype=torch.float64)
    loss = sparc.fine_grained_loss(same, torch.randn(1, 9, 4).double(), mask, 100.0)
    assert loss.item() == pytest.approx(math.log(6))
    one = torch.tensor([[True] + [False] * 5])
    assert sparc.fine_grained_loss(eye, eye, one, 100.0) == 0  # a single word has no negative


def test_a_caption_without_words_adds_0_to_the_loss():
    tokens, patches, mask = ragged(lengths=(5, 0, 3))
    loss = sparc.fine_grained_loss(tokens, patches, mask, 7.0)
    both = sparc.fine_grained_loss(tokens[[0, 2]], patches[[0, 2]], mask[[0, 2]], 7.0)
    torch.testing.assert_close(loss * 3, both * 2)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (tokens, patches)))
    x, v = torch.cat([torch.zeros(1, 3), torch.randn(3, 3)]).requires_grad_(), torch.randn(4, 5, 3)
    for loss in (sparc.global_loss(v[:, 0], x, 7.0), sparc.pacl_loss(x, v, 7.0),
                 sparc.prototype_loss(v[:, 0], x, v[0], 7.0)):
        gradient, = torch.autograd.grad(loss, x)
        assert gradient[0].eq(0).all() and gradient[1:].ne(0).all()  # 1e12 would overflow in fp16


def test_global_loss_equals_equation_1():
    v, t = torch.randn(2, 4, 3, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (v, t, torch.tensor(5.0, dtype=torch.float64))]
    expected = mean(literal_sequence(*inputs))
    assert_same_with_gradients(sparc.global_loss(*inputs), expected, inputs)
    same = torch.ones(4, 3)
    assert sparc.global_loss(same, same, 100.0).item() == pytest.approx(math.log(4), abs=1e-5)


def test_the_mean_over_words_leaves_out_the_first_and_the_last_token_and_padding():
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    words = sparc.words_only(mask)
    assert words.int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 0]]
    x = torch.randn(3, 5, 3)
    expected = torch.stack([(x[0, 1] + x[0, 2]) / 2, torch.zeros(3), x[2, 1:4].mean(0)])
    torch.testing.assert_close(sparc.masked_mean(x, words), expected)


def test_model_loss_equals_equation_7_on_words():
    """The first and the last token of a caption are not words: both losses leave them out."""
    model, batch = tiny_model("sparc", lambda_g=0.5, lambda_f=3.0), make_batch()
    f_v = model.image_encoder(batch["images"])
    f_t = model.text_encoder(batch["tokens"], batch["mask"])
    mask = sparc.words_only(batch["mask"])
    v, t = model.g_v(model.h_v(f_v.mean(1))), model.g_t(sparc.masked_mean(f_t, mask))
    loss_g = sparc.global_loss(v, t, 1 / 0.07)
    loss_f = sparc.fine_grained_loss(model.g_t(f_t), model.g_v(f_v), mask, 1 / 0.07)
    out = model(batch)
    torch.testing.assert_close(out["global"], loss_g.detach())
    torch.testing.assert_close(out["local"], loss_f.detach())
    torch.testing.assert_close(out["loss"], 0.5 * loss_g + 3.0 * loss_f)
    torch.testing.assert_close(model.encode_text(*padded(batch)), F.normalize(t, dim=-1))
    for encoded, expected in ((model.encode_image(batch["images"]), v),
                              (model.encode_text(batch["tokens"], batch["mask"]), t),
                              (model.encode_patches(batch["images"]), model.g_v(model.h_v(f_v)))):
        torch.testing.assert_close(encoded, F.normalize(expected, dim=-1))


def test_patches_per_word_is_one_over_the_sum_of_squared_weights():
    a = torch.tensor([[[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4, [0.5, 0.25, 0.25, 0]]])
    for mask, expected in (([1, 0, 0, 0], 1), ([0, 1, 0, 0], 2), ([1, 1, 1, 0], (1 + 2 + 4) / 3),
                           ([0, 0, 0, 1], 1 / 0.375), ([0, 0, 0, 0], 0)):
        used = sparc.patches_per_word(a, torch.tensor([mask]).bool())
        assert used.item() == pytest.approx(expected)
    for align in ("sparse", "softmax"):
        model, batch = tiny_model("sparc", align=align), make_batch()
        patches = model.g_v(model.image_encoder(batch["images"]))
        tokens = model.g_t(model.text_encoder(batch["tokens"], batch["mask"]))
        found, mask = model.diagnose(batch), sparc.words_only(batch["mask"])
        used = sparc.patches_per_word(model.align(tokens, patches), mask)
        torch.testing.assert_close(found["patches_per_word"], used)
        wrong = sparc.fine_grained_loss(tokens, patches.roll(1, 0), mask, 1 / 0.07,
                                        align=model.align)
        torch.testing.assert_close(found["local_wrong_image"], wrong)


def test_residual_h_v_adds_its_input():
    plain, residual = tiny_model("sparc"), tiny_model("sparc", h_v="residual")
    residual.load_state_dict(plain.state_dict())
    x = torch.randn(2, 16)
    torch.testing.assert_close(residual.h_v(x), x + plain.h_v(x))


@pytest.mark.parametrize("objective", ["sparc", "filip", "clip+filip", "pacl", "gloria", "mgca"])
def test_cls_is_no_patch(objective):
    """Sec. 2. All that depends on the patches is that of the patches alone."""
    model = tiny_model("sparc", vit=dict(cls=True, depth=2), objective=objective)
    batch = make_batch()
    images = batch["images"]

    def outputs():
        return [model(batch)["loss"], model.encode_image(images), model.encode_patches(images),
                model.align_words(*batch.values())]

    found, encoder = outputs(), model.image_encoder
    found[0].backward()
    assert [key for key, p in model.named_parameters() if p.grad is None] == []
    tokens = encoder(images)
    encoder.cls, encoder.forward = None, lambda images: tokens[:, 1:]       # only the patches
    assert all(map(torch.equal, found, outputs()))
