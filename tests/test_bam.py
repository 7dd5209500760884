"""BAM: the loss against dense float64 matrices, the model, and the boxes of ContrastiveCrop.

Last the baseline MoCo-v3: its loss against loops, its networks and its weights.
"""

import contextlib
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import normalize

import bam
import common
import train
from helpers import assert_same_with_gradients, cos, infonce, make_views, run_ranks, tiny_model


def dense_loss(z, k, G, teacher=None, tau=0.1, tau_b=0.05, iters=3, mask="exclude",
               normalization="global", target="balanced"):
    """Eq. 1 to 5 for n images with k views each, with plain exponentials.

    Rows of the matrices are the latents of all k views. Columns and targets are the latents of the
    G large views, as in the authors' code. One-hot targets of two views give the loss of SimCLR
    (arXiv 2002.05709), Eq. 1 and Algorithm 1.
    """
    n = len(z) // k
    teacher, keys = (z.detach(), z) if teacher is None else (teacher, teacher)
    views = [range(j * n, (j + 1) * n) for j in range(k)]
    blocks = [(range(k * n), range(G * n))]
    if normalization == "block":
        blocks = list(itertools.product(views, views[:G]))

    def kernel(x, c, tau):
        """exp(S_hat / tau): 0 for excluded pairs, 1 for pairs whose S_hat is set to 0."""
        K = [[(cos(a, b) / tau).exp() for b in c[: G * n]] for a in x]
        for r, m in itertools.product(range(k * n), range(G * n)):
            if target == "onehot" and r == m:
                K[r][m] = 0 * K[r][m]
            elif target != "onehot" and mask == "self" and r == m:
                K[r][m] = 0 * K[r][m] + 1
            elif target != "onehot" and mask in ("exclude", "zero") and r % n == m % n:
                K[r][m] = 0 * K[r][m] + (mask == "zero")
        return torch.stack([torch.stack(row) for row in K])

    def normalised(K, dim):
        """Divide each block by the sums of its rows (dim 1) or of its columns (dim 0)."""
        result = torch.zeros_like(K)
        for rows, columns in blocks:
            at = torch.tensor(rows)[:, None], torch.tensor(columns)
            result = result.index_put(at, K[at] / K[at].sum(dim, keepdim=True))
        return result

    A, B = normalised(kernel(z, keys, tau), 1), kernel(teacher, teacher, tau_b)
    for _ in range(iters if target == "balanced" else 0):
        B = normalised(normalised(B, 0), 1)
    B = torch.eye(k * n, G * n, dtype=z.dtype) if target == "onehot" else normalised(B, 1)
    losses = []
    for j, other, i in itertools.product(range(G), range(k), range(n)):
        if j != other:
            b, a = B[j * n + i], A[other * n + i]
            losses.append(-(b[b > 0] * a[b > 0].log()).sum())
    return sum(losses) / len(losses) / (G if normalization == "block" else 1)


# Arguments of bam_loss and dense_loss: k views, G of them large.
CASES = [
    dict(), dict(mask="zero"), dict(mask="none"), dict(mask="self"),
    dict(mask="self", k=4, teacher=True), dict(mask="self", k=3, normalization="block"),
    dict(normalization="block"), dict(normalization="block", mask="zero"), dict(target="softmax"),
    dict(target="softmax", mask="none", normalization="block"), dict(target="onehot"),
    dict(target="onehot", mask="zero", k=3, G=3), dict(iters=1, tau=0.5, tau_b=0.3), dict(k=4),
    dict(k=4, mask="zero", teacher=True), dict(k=3, G=3), dict(k=3, G=1), dict(teacher=True),
    dict(teacher=True, mask="zero"), dict(teacher=True, k=4), dict(teacher=True, target="onehot"),
    dict(teacher=True, normalization="block", k=3), dict(k=4, target="onehot"),
    dict(k=4, target="softmax"), dict(k=4, G=3, normalization="block"),
]


def latents(n, k=2, G=2, teacher=False, **settings):
    """Return float64 latents of n images as the arguments of bam_loss, and the other settings."""
    torch.manual_seed(0)
    z, z_m = torch.randn(2, k * n, 5, dtype=torch.double)
    return (z.requires_grad_(), k, z_m.requires_grad_() if teacher else None, G), settings


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradient_equal_those_of_dense_matrices(case, monkeypatch):
    (z, k, teacher, G), settings = latents(4, **case)
    expected = dense_loss(z, k, G, teacher, **settings)
    expected = expected.detach(), torch.autograd.grad(expected, z)[0]
    for chunk in (2**22, 1, 3 * k * 4 * G):  # all images in one part; parts of 1; of 3 and of 1
        monkeypatch.setattr(bam, "CHUNK", chunk)
        loss = loss_of(z, k, teacher, G, **settings)
        gradient = torch.autograd.grad(2 * loss, z, retain_graph=True)[0] / 2
        if teacher is not None:  # Sec. 4.1: it has no gradient
            assert torch.autograd.grad(loss, teacher, allow_unused=True) == (None,)
        torch.testing.assert_close((loss, gradient), expected, rtol=1e-10, atol=1e-12)


def loss_of(z, k, teacher=None, G=None, **settings):
    """bam_loss, or ablated_loss for settings that only the latter has."""
    if not settings.keys() & {"target", "normalization"}:
        return bam.bam_loss(z, k, teacher, G, **settings)
    return bam.ablated_loss(z, k, teacher, G, bam.Settings(**settings))[0]


def test_attention_and_sinkhorn_equal_literal_loops():
    for rows, columns in ((5, 5), (8, 3)):
        S = torch.randn(rows, columns, dtype=torch.double, requires_grad=True)
        K = (S / 0.5).exp()
        torch.testing.assert_close(bam.attention(S, 0.5), K / K.sum(1)[:, None])
        for _ in range(3):
            K = K / K.sum(0)
            K = K / K.sum(1)[:, None]
        torch.testing.assert_close(bam.sinkhorn(S, 0.5, 3), K)
        B = bam.sinkhorn(S, 0.5, 500)                            # converges to equal sums
        assert not B.requires_grad
        torch.testing.assert_close(B.sum(1), torch.ones(rows).double())
        torch.testing.assert_close(B.sum(0), torch.full((columns,), rows / columns).double())


def test_loss_is_finite_where_a_plain_exponential_overflows():
    B = bam.sinkhorn(1e3 * torch.randn(6, 6), 0.05, 3)
    torch.testing.assert_close(B.sum(1), torch.ones(6))
    z = torch.randn(12, 4, requires_grad=True)
    loss = bam.bam_loss(z, 2, tau=1e-3, tau_b=1e-3)
    loss.backward()
    assert loss.isfinite() and z.grad.isfinite().all()


def test_entropies_are_those_of_the_rows_of_attention_and_targets():
    """Equal latents have uniform rows over the 2 n - 2 columns of other images."""
    n = 6
    same = bam.bam_loss(torch.ones(2 * n, 4), 2, entropies=True)
    assert [x.item() for x in same] == pytest.approx([math.log(2 * n - 2)] * 3)
    z, image = torch.randn(2 * n, 4), torch.arange(2 * n) % n
    y = normalize(z, dim=-1)
    S = bam.similarities(y[None], y, (image[:, None] == image)[None], "zero")[0]
    assert (S == 0).nonzero().tolist() == [[r, m] for r in range(12) for m in (r % n, r % n + n)]
    _, *found = bam.bam_loss(z, 2, mask="zero", entropies=True)
    for P, entropy in zip((bam.attention(S, 0.1), bam.sinkhorn(S, 0.05, 3)), found):
        assert entropy.item() == pytest.approx(-(P * P.log()).sum(1).mean().item(), rel=1e-4)


@pytest.mark.parametrize("settings", [
    dict(mask="Zero"), dict(target="Onehot"), dict(normalization="blocks")])
def test_settings_that_are_no_choice_are_named(settings):
    with pytest.raises(KeyError, match=next(iter(settings.values()))):
        loss_of(torch.randn(4, 3), 2, **settings)


@pytest.mark.parametrize("sizes", [(16, 16, 8, 8), (16, 16, 8), (16, 16)])
def test_the_teacher_encodes_all_views(sizes):
    settings = dict(tau=0.2, tau_b=0.1)
    model = tiny_model("bam", batch_norm=True, sinkhorn_iters=2, **settings)
    nn.init.normal_(model.teacher[1][0].weight)  # so that the teacher differs from the student
    batch, k = make_views(5, sizes), len(sizes)
    z, z_m = (model.latents(network, batch["views"], bam.all_ranks)[1].flatten(0, 1)
              for network in (model.student(), model.teacher))
    assert z.shape == z_m.shape == (5 * k, 6)
    loss, out = bam.bam_loss(z, k, z_m, 2, iters=2, **settings), model(batch)
    torch.testing.assert_close(out["loss"], loss)
    h = model.latents(model.student(), batch["views"], bam.all_ranks)[0]
    torch.testing.assert_close(out["effective_rank"], bam.effective_rank(h[0]))
    torch.testing.assert_close(out["similarity"], bam.mean_cosine(z[:5]))


@pytest.mark.parametrize("readout", ["cls", "gap"])
def test_the_teacher_encodes_images_in_an_evaluation(readout):
    model = tiny_model("bam", readout=readout, crop_threshold=0.4).eval()
    images = torch.randn(2, 3, 16, 16)
    nn.init.normal_(model.image_encoder.blocks[0].attn.qkv.weight)  # changes only the student
    encoder = model.teacher[0]
    tokens = encoder(images)
    h = features = tokens.mean(1)
    if readout == "cls":
        h, features = tokens[:, 0], torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1)
    boxes = bam.heat_boxes(encoder.cls_attention(images).sum(1), 0.4, 16)
    found = model.encode_image(images), model.probe_features(images), model.boxes(images)
    torch.testing.assert_close(found, (normalize(h, dim=-1), features, boxes))
    assert model.evaluation_encoder() is encoder


def test_batch_norm_equals_torchs_and_is_the_default_without_a_teacher():
    norm, reference = bam.BatchNorm(5), nn.BatchNorm1d(5)
    for name in ("weight", "bias"):
        nn.init.normal_(getattr(norm, name))
        getattr(reference, name).data.copy_(getattr(norm, name))
    x = torch.randn(3, 7, 5)
    expected = torch.stack([reference(view) for view in x])
    torch.testing.assert_close([norm(y, bam.all_ranks) for y in (x, x[0])], [expected, expected[0]])
    for settings, layers in ((dict(teacher=False), ["Linear", "BatchNorm"]),
                             (dict(batch_norm=True), ["Linear", "BatchNorm"]), ({}, ["Linear"])):
        projector = tiny_model("bam", **settings).projector
        assert [type(layer).__name__ for layer in projector] == layers * 3
    h = torch.randn(2, 4, 16)
    for name, f in (("gelu", nn.functional.gelu), ("relu", nn.functional.relu)):
        for norms in (True, False):
            projector = tiny_model("bam", activation=name, batch_norm=norms).projector
            expected = h
            for i, layer in enumerate(projector):
                is_linear = isinstance(layer, nn.Linear)
                expected = f(expected) if is_linear and i else expected  # behind the norm
                expected = layer(expected) if is_linear else layer(expected, bam.all_ranks)
            torch.testing.assert_close(projector(h, bam.all_ranks), expected)


def test_effective_rank_counts_directions_and_mean_cosine_averages_pairs():
    line = torch.tensor([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])
    axes = torch.cat([torch.eye(4), -torch.eye(4)])
    for h, expected in ((line, 1), (axes, 4), (axes[:, :1].repeat(1, 20), 1)):
        assert bam.effective_rank(h).item() == pytest.approx(expected)
        assert bam.effective_rank(h + 5).item() == pytest.approx(expected, rel=1e-3)  # covariance
    z = torch.randn(5, 3)
    expected = [cos(z[i], z[j]) for i in range(5) for j in range(5) if i != j]
    torch.testing.assert_close(bam.mean_cosine(z), sum(expected) / 20)


def test_lars_equals_its_update_rule_written_out():
    """A bias with `decays` False neither decays nor is scaled. A weight without a gradient stays. A
    weight of zeros, whose trust ratio would be 0, is not scaled: it would stay 0 forever."""
    w, b, zero = (nn.Parameter(x) for x in (torch.randn(3, 2), torch.zeros(2), torch.zeros(3, 2)))
    groups = [{"params": [w], "decays": True, "weight_decay": 0.1},
              {"params": [b], "decays": False, "weight_decay": 0.5}, {"params": [zero]},
              {"params": [still := nn.Parameter(torch.ones(2))], "weight_decay": 0.5}]
    optimizer = train.OPTIMIZERS["lars"](groups, lr=0.5, betas=(0.8, 0.99), trust=0.01)
    expected_w, expected_b = w.detach().clone(), b.detach().clone()
    m_w, m_b = torch.zeros(3, 2), torch.zeros(2)
    for step in range(3):
        w.grad, b.grad, zero.grad = torch.randn(3, 2), torch.randn(2), torch.randn(3, 2)
        update = w.grad + 0.1 * expected_w
        m_w = 0.8 * m_w + update * 0.01 * expected_w.norm() / update.norm()
        m_b = 0.8 * m_b + b.grad
        expected_w, expected_b = expected_w - 0.5 * m_w, expected_b - 0.5 * m_b
        optimizer.step()
        if step == 0:
            torch.testing.assert_close(zero.detach(), -0.5 * zero.grad)
    torch.testing.assert_close([w.detach(), b.detach()], [expected_w, expected_b])
    assert still.tolist() == [1, 1]


def test_views_are_those_of_byol_and_six_small_crops():
    args = train.parse_args(["--method", "bam", "--preset", "vit-s16", "--image-size", "224"])
    large = dict(size=224, scale=(0.25, 1.0), alpha=0.6)
    small = dict(size=96, scale=(0.05, 0.25), blur=0.5, alpha=0.6)
    assert bam.views(args) == [
        large | dict(blur=1.0), large | dict(blur=0.1, solarize=0.2), *(6 * [small])]


def test_boxes_contain_the_heat_above_the_threshold():
    heat = torch.zeros(2, 5, 5)
    heat[0, 1:3, 2] = torch.tensor([5.0, 0.6])                   # .6 is .12 of the maximum
    heat[1, 3, 0], heat[1, 0, 4] = 1.0, 0.09
    heat += torch.tensor([3.0, -1.0]).view(2, 1, 1)             # a map is scaled to [0, 1] first
    a, b = bam.heat_boxes(heat, 0.1, 5).tolist()
    assert a == pytest.approx([2 / 5, 1 / 5, 3 / 5, 3 / 5])
    assert b == pytest.approx([0, 3 / 5, 1 / 5, 4 / 5])
    fine = bam.heat_boxes(heat, 0.5, 50)[0]                      # interpolated to 50 pixels
    assert fine.tolist() == pytest.approx([0.4, 0.2, 0.6, 0.4], abs=0.03)


def centres(scale, alpha, box=None):
    """Return the centres (y, x) of 300 crops of an image with 60 x 80 pixels: (300, 2).

    The image shows the coordinates of its pixels, so that the mean of a crop is its centre.
    """
    place = torch.stack(torch.meshgrid(torch.arange(60.0), torch.arange(80.0), indexing="ij"))
    views = common.Views([common.View(8, scale, alpha=alpha)], 8)
    image = torch.cat([place, place[:1]]) / 100
    return 100 * torch.stack([views(image, box)[0][:2].mean((1, 2)) for _ in range(300)])


@pytest.mark.parametrize("low, high, length, side, first, last", [
    (10, 30, 8, 40, 6, 26), (0, 40, 8, 40, 0, 32), (1, 3, 10, 40, 0, 0), (37, 39, 10, 40, 30, 30)])
def test_a_crop_whose_centre_lies_in_the_box_stays_in_the_image(
        low, high, length, side, first, last):
    starts = [common.crop_start(low, high, length, side, fraction) for fraction in (0, 0.5, 1)]
    assert starts == [first, round((first + last) / 2), last]


def test_crop_centres_lie_in_the_box_and_spread_to_its_edges():
    """The centres follow Beta(alpha, alpha) in the box: .6 favours its edges, 10 its middle."""
    small, box = (0.02, 0.04), (0.25, 0.5, 0.75, 1.0)
    even, middle = centres(small, 0.6, box), centres(small, 10.0, box)
    for found in (even, middle):
        assert found[:, 1].min() >= 19 and found[:, 1].max() <= 61 and found[:, 0].min() >= 29
    assert even.std(0).min() > 1.3 * middle.std(0).max()
    assert even.T.corrcoef()[0, 1].abs() < 0.2  # the two sides are drawn independently
    whole, without = centres((0.25, 1.0), 1.0, (0, 0, 1, 1)), centres((0.25, 1.0), 1.0)
    torch.testing.assert_close(whole.std(0), without.std(0), rtol=0.2, atol=0)


def make_photos(root):
    """Write two class folders of six images with 40 x 24 pixels and return their directory. A red
    rectangle lies on the left in one class, and on the right of a green ground in the other."""
    for name, place in (("left", (4, 4, 14, 16)), ("right", (24, 8, 36, 20))):
        (root / name).mkdir(parents=True)
        for i in range(6):
            image = Image.new("RGB", (40, 24), (60, 220 if name == "right" else 60, 10 * i))
            image.paste((200, 40 * i, 90), place)
            image.save(root / name / f"{name}{i}.png")
    return root


class RedBoxes(nn.Module):
    """Finds the columns in which the middle row of an image is red."""

    def boxes(self, x):
        assert x.dtype == torch.uint8 and x.shape[1:] == (3, 16, 16)
        is_red = x[:, :, 8].argmax(1) == 0                   # (B, 16)
        return torch.tensor([[min(red), x[i].float().mean(), max(red), 1] for i, red in
                             enumerate(row.nonzero()[:, 0].tolist() for row in is_red)])


def boxes_of_rank(rank, photos):
    """Return the boxes that RedBoxes finds."""
    source = common.open_data(photos, content=None)
    args, stop = SimpleNamespace(image_size=16, workers=0), SimpleNamespace(noted=0)
    boxes, stopping = train.find_boxes(args, source, RedBoxes(), torch.device("cpu"),
                                       contextlib.nullcontext, stop)
    assert stopping == 0
    return boxes


@pytest.mark.ranks
def test_two_ranks_find_the_boxes_of_one_process(tmp_path):
    """Images are squeezed, not cropped: 40 columns become 16."""
    photos = make_photos(tmp_path / "photos")
    (photos / "left/left3.png").write_bytes(b"no image")
    alone = boxes_of_rank(0, str(photos))
    assert alone.isnan().all(1).nonzero().tolist() == [[3]] and len(alone[:, 1].unique()) == 12
    assert alone[0, 0] <= 2 and alone[11, 2] >= 13
    for boxes in run_ranks(tmp_path, boxes_of_rank, 2, str(photos)):
        torch.testing.assert_close(boxes, alone, equal_nan=True)


def test_every_image_is_cropped_in_its_own_box(tmp_path):
    source = common.open_data(str(make_photos(tmp_path)), content=None)
    (tmp_path / "left/left3.png").write_bytes(b"no image")
    boxes = torch.tensor(6 * [[0.1, 0.5, 0.1, 0.5]] + 6 * [[0.9, 0.5, 0.9, 0.5]])
    boxes[7] = math.nan                                      # an image without a box
    calls = []

    class Spy(common.Views):  # notes if an image is red on the left, and the left edge of its box
        def __call__(self, image, box=None):
            calls.append((image.getpixel((6, 10))[0] > 100, box and round(box[0], 1)))
            return super().__call__(image, box)

    spy = Spy([common.View(8, (0.1, 0.2))], 8)
    next(iter(common.Stream(source, None, spy, 8, None, 11, 0, boxes=boxes)))
    assert sorted(calls, key=str) == 5 * [(False, 0.9)] + [(False, None)] + 5 * [(True, 0.1)]


@pytest.mark.parametrize("step, has_boxes, needed", [
    (1, False, False), (2, False, True), (2, True, True), (3, True, False), (3, False, True),
    (5, True, True), (9, True, False)])
def test_boxes_are_found_at_their_steps_and_where_there_are_none(step, has_boxes, needed):
    progress = train.Progress(step=step, boxes=torch.rand(3, 4) if has_boxes else None)
    assert progress.needs_boxes(range(2, 8, 3)) == needed and not progress.needs_boxes(())


# MoCo-v3 --------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.2, 1.0])
def test_mocos_loss_and_gradient_equal_those_of_loops(tau):
    """Algorithm 1 of the paper: the loss of the queries q[0] and the keys k[1], and of the rest."""
    q, k = (x.requires_grad_() for x in torch.randn(2, 2, 6, 5, dtype=torch.double))
    expected = 0
    for queries, keys in ((q[0], k[1]), (q[1], k[0])):
        rows = [infonce([cos(query, key) / tau for key in keys], i)
                for i, query in enumerate(queries)]
        expected = expected + 2 * tau * sum(rows) / len(rows)
    loss = bam.moco_loss(q, k, tau)
    assert_same_with_gradients(loss, expected, [q])
    loss.backward()
    assert k.grad is None  # keys are constants


def moco_of(name):
    """Return a small MoCo-v3 for a ViT or a ResNet."""
    settings = dict(target="moco", tau=0.2, ema=0.9, projector_width=12, projector_dim=6)
    if name == "vit":
        return tiny_model("bam", vit=dict(stem=None), **settings)
    encoder = common.ResNet(image_size=32, blocks=(1, 1, 1, 1))
    config = bam.Settings(readout="gap", **settings)
    complete = type("Model", (bam.MoCo, common.ModelDefaults), {})
    return complete(config, encoder, None, encoder.width, None)


@pytest.mark.parametrize("name, size", [("vit", 16), ("resnet", 32)])
def test_moco_computes_queries_and_keys_as_algorithm_1_does(name, size):
    """Each view passes the networks alone, so that BatchNorm has statistics of one view."""
    model, batch = moco_of(name), make_views(4, (size, size))
    nn.init.normal_(model.teacher[1][0].weight)  # the keys' projector is another one
    q, k = [], []
    for view in batch["views"]:
        for network, found in ((model.student(), q), (model.teacher, k)):
            tokens = network[0](view)
            h = tokens[:, 0] if name == "vit" else tokens.mean(1)
            found.append(network[1](h[None], bam.all_ranks)[0])
        q[-1] = model.predictor(q[-1][None], bam.all_ranks)[0]
    expected = bam.moco_loss(torch.stack(q), torch.stack(k), 0.2)
    out = model(batch)
    torch.testing.assert_close(out["loss"], expected)
    out["loss"].backward()
    trained = {key for key, p in model.named_parameters() if p.grad is not None}
    frozen = {"image_encoder.patch_embed.weight", "image_encoder.patch_embed.bias"}
    every = {key for key, _ in model.named_parameters() if not key.startswith("teacher.")}
    assert trained == (every - frozen if name == "vit" else every)


def layers_of(head):
    """Return the kinds and widths of a head's layers."""
    return [(type(layer).__name__, layer.weight.shape[0] if layer.weight is not None else None)
            for layer in head]


def test_mocos_heads_are_those_of_builder_py():
    linear, norm, last = ("Linear", 12), ("BatchNorm", 12), [("Linear", 6), ("BatchNorm", None)]
    vit, resnet = moco_of("vit"), moco_of("resnet")
    assert layers_of(vit.projector) == [linear, norm, linear, norm, *last]
    assert layers_of(vit.predictor) == [linear, norm, *last]
    assert layers_of(resnet.projector) == [linear, norm, *last]
    assert layers_of(resnet.predictor) == [linear, norm, ("Linear", 6)]
    assert all(layer.bias is None for layer in vit.projector if isinstance(layer, nn.Linear))
    x = torch.randn(1, 5, 6)
    a, b, c = resnet.predictor
    expected = c((b(a(x), bam.all_ranks)).relu())
    torch.testing.assert_close(resnet.predictor(x, bam.all_ranks), expected)


def test_mocos_initial_weights_are_those_of_vits_py():
    """Xavier's bound is sqrt(6 / (inputs + outputs)); q, k and v are three layers."""
    encoder, resnet = (moco_of(name).image_encoder for name in ("vit", "resnet"))
    block, d = encoder.blocks[0], 16
    for weight, inputs, outputs in ((block.attn.qkv.weight, d, d), (block.attn.proj.weight, d, d),
                                    (block.mlp.fc1.weight, d, 4 * d),
                                    (encoder.patch_embed.weight, 3 * 4 * 4, d)):
        bound = math.sqrt(6 / (inputs + outputs))
        assert 0.9 * bound < weight.abs().max() <= bound
    assert not block.attn.qkv.bias.any() and not encoder.patch_embed.bias.any()
    assert encoder.cls.abs().max() < 1e-5
    assert not resnet.layer1[0].bn3.weight.any() and resnet.layer1[0].bn2.weight.all()


def test_an_evaluation_and_a_probe_use_mocos_query_network():
    model, images = moco_of("vit").eval(), torch.randn(2, 3, 16, 16)
    nn.init.normal_(model.teacher[0].norm.weight)
    cls = model.image_encoder(images)[:, 0]
    torch.testing.assert_close(model.encode_image(images), normalize(cls, dim=-1))
    torch.testing.assert_close(model.probe_features(images), cls)
