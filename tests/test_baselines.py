"""SPARC's baselines CLIP, FILIP, PACL, GLoRIA and MGCA against literal references in float64.

Chunks of captions and half precision must not change a loss. Degenerate inputs must
have finite gradients.
"""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

import sparc
from helpers import assert_same_with_gradients, cos, infonce, make_batch, mean, softmax, tiny_model
from test_sparc import ragged

OBJECTIVES = ["clip", "filip", "clip+filip", "pacl", "gloria", "mgca"]
# {objective: the terms of its loss}; MGCA has a test of its own.
TERMS = {"clip": ["global"], "filip": ["filip"], "clip+filip": ["global", "filip"],
         "pacl": ["pacl"], "gloria": ["global", "gloria"]}


def words_of(tokens, mask):
    """Return the list of words of each caption: its tokens where the mask is True."""
    return [[t for t, word in zip(row, m) if word] for row, m in zip(tokens, mask)]


def largest(values):
    """Return the largest of the scalar tensors."""
    return max(values, key=lambda x: x.item())


def table(score, images, captions):
    """Return the scores as rows: row i has the scores of image i with every caption."""
    return [[score(image, caption) for caption in captions] for image in images]


def both_ways(rows, columns, scale):
    """Return the contrastive loss of pairs, the mean of both directions.

    rows[i][j] and columns[i][j] are scores of image i and caption j. The softmax over captions uses
    rows, the softmax over images uses columns. FILIP has a different score for each direction.
    """
    n, losses = len(rows), []
    for i in range(n):
        losses.append(infonce([scale * x for x in rows[i]], i))
        losses.append(infonce([scale * columns[j][i] for j in range(n)], i))
    return mean(losses)


def literal_best(items, others):
    """Return the mean over the items of the largest cosine with any of the others."""
    return mean([largest([cos(x, y) for y in others]) for x in items])


def literal_filip(captions, patches, scale, sent_captions=None, sent_patches=None):
    """FILIP's loss. By default all words and all patches are sent.

    An image compares all its patches with the sent words of a caption. A caption compares all its
    words with the sent patches of an image.
    """
    rows = table(literal_best, patches, sent_captions or captions)
    columns = table(literal_best, captions, sent_patches or patches)
    return both_ways(rows, list(zip(*columns)), scale)


def literal_sent(captions, patches, keep):
    """FILIP's token dropping: return each caption's sent words and each image's sent patches.

    Each list keeps the fraction `keep`, rounded up, of its tokens: those with the largest cosine to
    any token of the other modality.
    """

    def chosen(items, others):
        best = [max(cos(x, y).item() for other in others for y in other) for x in items]
        order = sorted(range(len(items)), key=lambda i: -best[i])
        return [items[i] for i in order[: math.ceil(keep * len(items) - 1e-9)]]

    return ([chosen(words, patches) for words in captions],
            [chosen(image, captions) for image in patches])


def literal_phi(image, t):
    """PACL's score of an image and a caption t (E,)."""
    s = [cos(p, t) for p in image]
    return sum(a * x for a, x in zip(softmax(s), s))


def literal_z(image, words, scale):
    """GLoRIA's score of an image and a caption, divided by tau."""
    total = 0
    for t in words:
        a = softmax([(t * v).sum() / math.sqrt(len(t)) for v in image])
        c = sum(weight * v for weight, v in zip(a, image))
        total = total + (scale * cos(c, t)).exp()
    return total.log()


def literal_gloria(captions, patches, scale):
    """GLoRIA's local loss."""
    z = table(lambda image, words: literal_z(image, words, scale), patches, captions)
    return both_ways(z, z, 1)


def literal_attention(module, x, y):
    """Attention with one head: queries from x (n, E), keys and values from y (m, E) -> (n, E)."""
    q, k, v = module.q(x), module.k(y), module.v(y)
    weights = [softmax([(query * key).sum() / math.sqrt(len(key)) for key in k]) for query in q]
    return module.out(torch.stack([sum(a * value for a, value in zip(row, v)) for row in weights]))


def scale_of(value):
    """Return a float64 scale that requires a gradient."""
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def test_filip_pacl_and_gloria_losses_equal_literal_loops():
    tokens, patches, mask = ragged()
    captions, scale = words_of(tokens, mask), scale_of(7.0)
    phi = table(literal_phi, patches, tokens[:, 0])
    for value, expected in (
            (sparc.filip_loss(tokens, patches, mask, scale, keep=1),
             literal_filip(captions, patches, scale)),
            (sparc.pacl_loss(tokens[:, 0], patches, scale), both_ways(phi, phi, scale)),
            (sparc.gloria_loss(tokens, patches, mask, scale),
             literal_gloria(captions, patches, scale))):
        assert_same_with_gradients(value, expected, (tokens, patches, scale))


def test_filip_keeps_15_of_25_tokens():
    """In float32, 0.6 * 25 is more than 15."""
    x, y = torch.randn(2, 30, 4), torch.randn(3, 5, 4)
    x[:, 25:] = 0  # padding
    assert sparc.most_similar(x, y, 0.6).any(-1).sum(1).tolist() == [15, 15]


@pytest.mark.parametrize("keep, numbers", [(0.2, [[1, 1, 1], [2, 2, 2]]),
                                           (0.6, [[3, 2, 2], [4, 4, 4]])])
def test_filip_sends_only_the_most_similar_tokens(keep, numbers):
    """numbers: how many words each caption sends, and how many patches each image sends."""
    tokens, patches, mask = ragged()
    captions = words_of(tokens, mask)
    sent = literal_sent(captions, patches, keep)
    assert [[len(items) for items in side] for side in sent] == numbers
    value = sparc.filip_loss(tokens, patches, mask, 7.0, keep=keep)
    expected = literal_filip(captions, patches, 7.0, *sent)
    assert_same_with_gradients(value, expected, (tokens, patches))
    assert (value - sparc.filip_loss(tokens, patches, mask, 7.0, keep=1)).abs() > 1e-3


def test_cross_attention_to_no_words_attends_to_all_positions():
    module, x, none = sparc.CrossAttention(6, 4), torch.randn(2, 3, 6), torch.zeros(2, 3) > 0
    torch.testing.assert_close(module(x, x, none), module(x, x, ~none))


def all_losses(tokens, patches, mask, scale=7.0):
    """Return {name: value} of every loss that depends on the words of a caption."""
    t = sparc.masked_mean(tokens, mask)
    return {
        "local": sparc.fine_grained_loss(tokens, patches, mask, scale),
        "filip": sparc.filip_loss(tokens, patches, mask, scale),
        "filip, all tokens": sparc.filip_loss(tokens, patches, mask, scale, keep=1),
        "pacl": sparc.pacl_loss(t, patches, scale),
        "gloria": sparc.gloria_loss(tokens, patches, mask, scale),
        "mgca": sparc.mgca_loss(tokens, patches, mask, tokens.flip(1), patches.flip(1), scale),
        "prototype": sparc.prototype_loss(patches[:, 0], tokens[:, 0], torch.eye(4).to(t), scale)}


CHANGES = {
    "equal patches": lambda tokens, patches, mask: (tokens, patches[:, :1].expand(-1, 6, -1), mask),
    "equal words": lambda tokens, patches, mask: (tokens[:, :1].expand(-1, 5, -1), patches, mask),
    "zeros": lambda tokens, patches, mask: (0 * tokens, patches, mask),
    "no words": lambda tokens, patches, mask: (tokens, patches, mask & (mask.sum(1) != 2)[:, None])}


@pytest.mark.parametrize("case", CHANGES)
def test_degenerate_inputs_have_finite_losses_and_gradients(case):
    tokens, patches, mask = CHANGES[case](*(x.detach() for x in ragged()))
    tokens, patches = tokens.float().requires_grad_(), patches.float().requires_grad_()
    for name, value in all_losses(tokens, patches, mask, 100.0).items():
        assert value.isfinite(), name
        for gradient in torch.autograd.grad(value, (tokens, patches), retain_graph=True):
            assert gradient.isfinite().all(), name


def cut_chunks(monkeypatch, limit):
    """Let a chunk hold at most `limit` similarities."""
    monkeypatch.setattr(sparc, "in_rows", functools.partial(sparc.in_rows, limit=limit))


@pytest.mark.parametrize("limit", [1, 3 * 7 * 6 * 5])  # one and three captions at a time
def test_chunks_do_not_change_losses_or_gradients(monkeypatch, limit):
    tokens, patches, mask = ragged((5, 2, 3, 1, 4, 5, 2))
    scale = scale_of(7.0)
    whole = all_losses(tokens, patches, mask, scale)
    cut_chunks(monkeypatch, limit)
    for name, value in all_losses(tokens, patches, mask, scale).items():
        assert_same_with_gradients(value, whole[name], (tokens, patches, scale))
    drawn = []
    align = lambda t, v: drawn.append(torch.rand(())) or sparc.alignment_weights(t, v)
    sparc.fine_grained_loss(tokens, patches, mask, scale, align=align).backward()
    if limit == 1:  # the backward pass computes each chunk again, with the same random numbers
        assert len(drawn) == 14 and sorted(drawn[:7]) == sorted(drawn[7:])


def test_gloria_loss_is_bounded_if_the_patches_cancel():
    """Weights that are nearly equal make c nearly the mean of the patches, which is 0 here.

    c then holds only rounding errors, and the cosine divides by the norm of c.
    """
    patches = 10 * torch.randn(4, 9, 8)
    patches = (patches - patches.mean(1, keepdim=True)).requires_grad_()
    mask = torch.ones(4, 3, dtype=torch.bool)
    for size in (1e-5, 1e-1):
        tokens = size * torch.randn(4, 3, 8)
        loss = sparc.gloria_loss(tokens, patches, mask, 5.0)
        assert loss < 10 + math.log(4)  # two cosines differ by at most 2; the scale is 5
    exact = literal_gloria(words_of(tokens.double(), mask), list(patches.double()), 5.0)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("objective", TERMS)
def test_model_loss_is_the_sum_of_the_objectives_terms(objective):
    model, batch = tiny_model("sparc", objective=objective), make_batch()
    f_v = model.image_encoder(batch["images"])
    f_t = model.text_encoder(batch["tokens"], batch["mask"])
    words, scale = sparc.words_only(batch["mask"]), 1 / 0.07
    patches, tokens = model.g_v(f_v), model.g_t(f_t)
    v, t = model.g_v(model.h_v(f_v.mean(1))), model.g_t(sparc.masked_mean(f_t, words))
    expected = {"global": sparc.global_loss(v, t, scale),
                "pacl": sparc.pacl_loss(t, patches, scale),
                "gloria": sparc.gloria_loss(tokens, patches, words, scale),
                "filip": sparc.filip_loss(tokens, model.g_v(model.h_v(f_v)), words, scale)}
    out = model(batch)
    assert set(out) == {"loss", "scale", *TERMS[objective]} and model.diagnose(batch) == {}
    for name in TERMS[objective]:
        torch.testing.assert_close(out[name], expected[name].detach(), msg=name)
    torch.testing.assert_close(out["loss"], sum(expected[name] for name in TERMS[objective]))
    out["loss"].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 1e-6, name


def mgca_of_the_public_code(v, t, pairs, prototypes, scale):
    """MGCA's loss with lambda 1 for each of its three terms -> scalar.

    It follows mgca_module.py of HKU-MedAI/MGCA, commit 0fe1c3b. Two things differ, as SPARC's D.3
    says: tokens have equal weights, and all terms have one temperature.
    v, t: (B, E). pairs: normalised (tokens, contexts), two for each caption: words, then patches.
    """
    def sum_of_both(scores):
        labels = torch.arange(len(scores))
        return F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)

    def codes(out):  # (B, K)
        Q = (out.detach() / 0.05).exp().T
        Q = Q / Q.sum()
        K, B = Q.shape
        for _ in range(3):
            Q = Q * (1 / K / Q.sum(1))[:, None]
            Q = Q * (1 / B / Q.sum(0))
        return (Q / Q.sum(0)).T

    loss_ita = sum_of_both(scale * v @ t.T)
    losses = [sum_of_both(scale * x @ context.T) / 2 for x, context in pairs]
    loss_local = sum(losses) / len(v)  # the losses of words and of patches are added
    out_v, out_t = v @ prototypes.T, t @ prototypes.T
    i2t = (codes(out_v) * (scale * out_t).log_softmax(1)).sum(1).mean()
    t2i = (codes(out_t) * (scale * out_v).log_softmax(1)).sum(1).mean()
    return loss_ita + loss_local - (i2t + t2i) / 2


def test_mgca_loss_is_half_the_loss_of_the_public_code():
    """With half of the public code's weights the global term is CLIP's loss."""
    model, batch = tiny_model("sparc", objective="mgca").double(), make_batch()
    batch["images"] = batch["images"].double()
    f_v = model.image_encoder(batch["images"])
    f_t = model.text_encoder(batch["tokens"], batch["mask"])
    words = sparc.words_only(batch["mask"])
    v, t = model.g_v(model.h_v(f_v.mean(1))), model.g_t(sparc.masked_mean(f_t, words))
    v, t, patches, tokens = (F.normalize(x, dim=-1) for x in (v, t, model.g_v(f_v), model.g_t(f_t)))
    pairs = []
    for image, caption, word in zip(patches, tokens, words):
        caption = caption[word]
        for module, x, y in ((model.word_attention, caption, image),
                             (model.patch_attention, image, caption)):
            pairs.append((x, F.normalize(literal_attention(module, x, y), dim=-1)))
    prototypes = F.normalize(model.prototypes, dim=-1)
    expected = mgca_of_the_public_code(v, t, pairs, prototypes, model.log_scale.exp()) / 2
    gradients = torch.autograd.grad(expected, list(model.parameters()), retain_graph=True)
    out = model(batch)
    terms = sum(out[name] for name in ("global", "mgca", "prototype"))
    torch.testing.assert_close([out["loss"], terms], [expected] * 2, rtol=1e-10, atol=0)
    found = torch.autograd.grad(out["loss"], list(model.parameters()))
    torch.testing.assert_close(found, gradients, rtol=1e-8, atol=1e-10)
    assert all(gradient.abs().max() > 1e-6 for gradient in found)


@pytest.mark.parametrize("objective", ["filip", "pacl"])
def test_evaluation_uses_the_scores_of_the_loss(objective, monkeypatch):
    """FILIP and PACL compare images with captions by tokens, not by one encoding each.

    FILIP's loss has one score for each direction. The evaluation uses the mean of both.
    """
    cut_chunks(monkeypatch, 4 * 16)  # one caption in each chunk
    model, batch = tiny_model("sparc", objective=objective, filip_keep=1.0).eval(), make_batch()
    patches = model.encode_patches(batch["images"])
    tokens = model.encode_tokens(batch["tokens"], batch["mask"])
    captions = words_of(tokens, tokens.any(-1))
    if objective == "filip":
        tokens = F.pad(tokens, (0, 0, 0, 2))
        assert [len(words) for words in captions] == [7, 2, 4, 1]
        expected = table(lambda image, words: (literal_best(image, words)
                                               + literal_best(words, image)) / 2, patches, captions)
        loss = literal_filip(captions, patches, 1 / 0.07)
    else:
        expected = table(literal_phi, patches, tokens[:, 0])
        loss = both_ways(expected, expected, 1 / 0.07)
    torch.testing.assert_close(model(batch)["loss"], loss)
    assert model.late_interaction
    scores = model.similarity(patches, tokens).tolist()
    assert scores == [[pytest.approx(x.item(), abs=1e-5) for x in row] for row in expected]
