"""eval.py: metrics against values computed by hand, tasks and pictures on small made-up data.

Most tasks are tested with the model Oracle, which knows the colour of plain red, green and blue
pictures, so that the right figures are known. Probes are compared with the code that they follow.
"""

import dataclasses
import io
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image, ImageChops

import bam
import common
import eval as evaluation
import sparc
import sparo
import stair
from helpers import picture, run_ranks, write_files, write_table


@pytest.mark.parametrize("n, ids", [(30, 6), (9, 5)])
def test_recall_counts_any_positive_and_ranks_ties_last(n, ids):
    """The rank of a query is the number of negative keys before its best positive key.

    A negative key that ties with the best positive key comes before it. With five ids of keys, the
    queries with id 5 have no positive key.
    """
    queries, keys = torch.randint(3, (40, 5)).float(), torch.randint(3, (n, 5)).float()
    query_ids, key_ids = torch.randint(6, (40,)), torch.arange(n) % ids
    scores, ranks = queries @ keys.T, []
    for row, q in zip(scores, query_ids):
        best = max([s for s, k in zip(row, key_ids) if k == q], default=None)
        ranks.append(math.inf if best is None else
                     sum(s >= best and k != q for s, k in zip(row, key_ids)))
    recall = evaluation.recall_at_k(queries, keys, (query_ids, key_ids), chunk=7)
    assert recall == {k: sum(rank < k for rank in ranks) / 40 for k in (1, 5, 10)}
    nothing = evaluation.recall_at_k(queries * torch.nan, keys, (query_ids, key_ids))
    assert nothing == {k: 0 if n >= k else recall[k] for k in (1, 5, 10)}


def test_knn_equals_a_literal_vote():
    train, test = F.normalize(torch.randn(30, 4), dim=-1), F.normalize(torch.randn(25, 4), dim=-1)
    labels, test_labels = torch.randint(3, (30,)), torch.randint(3, (25,))
    right = 0
    for x, label in zip(test, test_labels):
        cosines = [(x @ y).item() for y in train]
        nearest = sorted(range(30), key=lambda i: -cosines[i])[:7]
        votes = [0.0] * 3
        for i in nearest:
            votes[labels[i]] += math.exp(cosines[i] / 0.07)
        right += votes.index(max(votes)) == label
    found = evaluation.knn_accuracy(3 * train, labels, test, test_labels, k=7, chunk=10)
    assert found == right / 25
    assert evaluation.knn_accuracy(train, labels, train, labels, k=1) == 1


def clip_benchmarks_probe(train, val, both):
    """Return the weight decay that CLIP_benchmark's linear probe chooses, and its model. The code
    follows linear_probe.py of CLIP_benchmark 48de38c (find_peak, train, evaluate), but draws
    samples in the order of adamw_probe. train, val and both are pairs (features, labels)."""

    def fit(x, y, weight_decay):
        torch.manual_seed(common.mix_seed(0))  # first weights and order as in adamw_probe
        model = torch.nn.Linear(x.shape[1], 20)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=weight_decay)
        batches = [rows for _ in range(10) for rows in torch.randperm(len(x)).split(64)]
        for step, rows in enumerate(batches):
            cosine = math.cos(math.pi * step / len(batches))
            optimizer.param_groups[0]["lr"] = 0.5 * (1 + cosine) * 0.1
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        return model

    def find_peak(idxs):
        best_wd_idx, max_acc = 0, 0
        for idx in idxs:
            model = fit(*train, wd_list[idx])
            acc = (model(val[0]).argmax(1) == val[1]).float().mean().item()
            if max_acc < acc:
                best_wd_idx, max_acc = idx, acc
        return best_wd_idx

    wd_list = np.logspace(-6, 2, 97).tolist()
    peak_idx, step_span = find_peak([0, 16, 32, 48, 64, 80, 96]), 8
    while step_span > 0:
        left, right = max(peak_idx - step_span, 0), min(peak_idx + step_span, len(wd_list) - 1)
        peak_idx = find_peak([left, peak_idx, right])
        step_span //= 2
    return wd_list[peak_idx], fit(*both, wd_list[peak_idx])


def noisy_features(n, classes=20, width=64):
    """Return unit features (n, width) of overlapping classes, and their labels (n,)."""
    y = torch.randint(classes, (n,))
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(7))
    return F.normalize(centres[y] + 2.5 * torch.randn(n, width), dim=-1), y


def held_out(labels, step):
    """Rows in the order of torch.randperm, class by class; every `step`-th is held out, but no row
    that is its class's only one. Return the held-out rows and the others, each sorted."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1)).tolist()
    rows = []
    for c in sorted({*labels.tolist()}):
        of_class = [i for i in order if labels[i] == c]
        rows += of_class if len(of_class) > 1 else []
    held = sorted(rows[::step])
    return held, [i for i in range(len(labels)) if i not in held]


def test_images_are_held_out_within_their_classes():
    """Labels in rounds, where every tenth image is of one class, and classes of few images."""
    rounds = torch.arange(10).repeat(8)
    for labels, step in ((rounds, 10), (rounds, 5), (torch.arange(7).repeat_interleave(2), 5),
                         (torch.tensor([5, 0, 5, 1, 5, 3, 3]), 5), (torch.tensor([2, 2]), 10)):
        held = evaluation.hold_out(labels, step)
        assert held.nonzero()[:, 0].tolist() == held_out(labels, step)[0]
        assert {*labels[~held].tolist()} == {*labels.tolist()} and held.any()
    assert evaluation.hold_out(rounds, 10).sum() == 8
    assert not evaluation.hold_out(torch.tensor([4, 0, 2]), 5).any()


def test_adamw_probe_equals_clip_benchmarks_probe():
    x, y = noisy_features(750)
    val, train = [(x[rows], y[rows]) for rows in held_out(y, 5)]
    decay, model = clip_benchmarks_probe(train, val, (x, y))
    head, chosen = evaluation.adamw_probe(x, y, epochs=10)
    assert chosen == pytest.approx(decay) and 1e-6 < decay < 1e2
    torch.testing.assert_close(head.weight, model.weight)
    plain, _ = evaluation.adamw_probe(x, y, epochs=1)
    assert not torch.allclose(plain.weight, head.weight)


def test_sparse_rows_are_the_dense_rows_and_a_probe_learns_the_same_from_both():
    x, y = noisy_features(150, classes=4, width=40)
    x = x.relu() * (torch.rand_like(x) < 0.2)
    x[[3, 149]] = 0                                                         # no active word
    sparse = stair.SparseRows(iter(x.split(60)))
    assert (len(sparse), sparse.shape) == (150, (150, 40))
    assert len(sparse.values) == (x != 0).sum()
    for rows in (torch.randperm(150), torch.tensor([149, 3, 3, 0]), torch.tensor([3])):
        assert sparse[rows].equal(x[rows])
    dense, kept = (evaluation.adamw_probe(features, y, 3) for features in (x, sparse))
    assert kept[1] == dense[1] and kept[0].weight.equal(dense[0].weight)
    assert evaluation.predict(kept[0], sparse).equal(dense[0](x).argmax(1))


def test_a_probe_uses_the_middle_one_of_equally_good_strengths():
    """Each class has one image, so no image is held out, and all strengths have the score 0."""
    x, y = F.one_hot(torch.arange(20)).float() + 0.1 * torch.randn(20, 20), torch.arange(20)
    head, l2 = evaluation.lbfgs_probe(x, y)
    assert l2 == evaluation.STRENGTHS[22]
    assert evaluation.adamw_probe(x, y, epochs=1)[1] == pytest.approx(1e-2)  # of 1e-6 to 1e2
    assert (head(x).argmax(1) == y).all()
    assert [evaluation.middle_best(scores) for scores in ([1, 3, 3, 2, 3], [5], [2, 2])] == [2, 0, 1]


def test_sgd_probe_trains_each_learning_rate_by_itself_and_chooses_on_held_out_images():
    crops = [noisy_features(80) for _ in range(3)]
    held, queue = noisy_features(400), iter(crops)
    found, rate = evaluation.sgd_probe(lambda: next(queue), *held, 20, epochs=3)
    with common.fixed_seed(0):
        heads = [torch.nn.Linear(64, 20) for _ in evaluation.RATES]
        for head in heads:
            torch.nn.init.normal_(head.weight, 0, 0.01)
            torch.nn.init.zeros_(head.bias)
        batches = [[(x[rows], y[rows]) for rows in torch.randperm(80).chunk(64)] for x, y in crops]
    right = {}
    for lr, head in zip(evaluation.RATES, heads):
        velocity = {p: torch.zeros_like(p) for p in head.parameters()}
        for epoch, x, y in ((i, x, y) for i in range(3) for x, y in batches[i]):
            loss = F.cross_entropy(head(x), y)
            for p, gradient in zip(velocity, torch.autograd.grad(loss, list(velocity))):
                velocity[p] = 0.9 * velocity[p] + gradient
                p.data -= lr * (1 + math.cos(math.pi * epoch / 3)) / 2 * velocity[p]
        right[lr] = (head(held[0]).argmax(1) == held[1]).sum().item()
    assert rate == max(right, key=right.get) and len(set(right.values())) > 1
    best = heads[evaluation.RATES.index(rate)]
    torch.testing.assert_close(found.weight, best.weight, atol=1e-6, rtol=1e-4)


def logistic_objective(head, x, y, l2):
    """Mean cross entropy + l2 / 2 |W|^2 in float64, written out (BAM, D.3)."""
    logits = x.double() @ head.weight.double().T + head.bias.double()
    losses = logits.logsumexp(1) - logits[range(len(y)), y]
    return losses.mean() + l2 / 2 * (head.weight.double() ** 2).sum()


def test_lbfgs_probe_minimises_its_objective_and_chooses_on_held_out_images():
    x, y = noisy_features(150, classes=4, width=8)
    held, rest = held_out(y, 5)
    right = {}
    for l2 in (10.0, 0.02, 1e-5):                                           # a new head for each
        head = torch.nn.Linear(8, 4).double()
        optimizer = torch.optim.LBFGS(head.parameters(), max_iter=1000, tolerance_change=0,
                                      line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = logistic_objective(head, x[rest], y[rest], l2)
            loss.backward()
            return loss

        optimizer.step(closure)
        right[l2] = (head(x[held].double()).argmax(1) == y[held]).sum().item()
    head, chosen = evaluation.lbfgs_probe(x, y, list(right))
    assert chosen == max(right, key=right.get) and len(set(right.values())) > 1
    loss = logistic_objective(head, x, y, chosen)
    for gradient in torch.autograd.grad(loss, list(head.parameters())):
        assert gradient.abs().max() < 1e-4
    prior, _ = evaluation.lbfgs_probe(x, y, [1e5])                          # W is 0, bias is free
    found = prior(x).softmax(1).mean(0)
    torch.testing.assert_close(found, y.bincount() / 150, atol=1e-3, rtol=0)
    assert evaluation.STRENGTHS == pytest.approx([10 ** (5 - i / 4) for i in range(45)])


def test_winoground_scores_count_ties_as_wrong():
    right, text_only, image_only = [[2, 0], [0, 2]], [[5, 6], [1, 7]], [[5, 1], [6, 7]]
    tie = [[1, 1], [1, 1]]
    pairs = torch.tensor([right, text_only, image_only, tie]).float()
    text, image, group = (scores.tolist() for scores in sparo.winoground_scores(pairs))
    assert text == [True, True, False, False] and image == [True, False, True, False]
    assert group == [True, False, False, False]


def test_mean_iou_equals_values_computed_by_hand():
    truth = [[[0, 0, 1, 1], [0, 255, 2, 2]], [[0, 0, 0, 0], [3, 3, 3, 3]], [[0] * 4] * 2]
    predicted = [[[1, 0, 1, 2], [0, 1, 2, 2]], [[3, 1, 1, 1], [3, 3, 1, 1]], [[1] * 4] * 2]
    truth, predicted = torch.tensor(truth), torch.tensor(predicted)
    # class 1: 1 of {(0, 0), (0, 2), (0, 3)}; class 2: 2 of 3; the pixel with 255 does not count
    first = (1 / 3 + 2 / 3) / 2
    ious = [sparc.image_iou(p, t) for p, t in zip(predicted, truth)]
    assert ious == [pytest.approx(first), pytest.approx(2 / 5), None]
    assert evaluation.mean(ious) == pytest.approx((first + 2 / 5) / 2)
    inside = [sparc.image_iou(p, t, foreground_only=True) for p, t in zip(predicted, truth)]
    assert inside == [pytest.approx((1 / 2 + 2 / 3) / 2), pytest.approx(2 / 4), None]
    assert math.isnan(evaluation.mean([None]))


def test_k_precision_equals_values_computed_by_hand():
    retrieved = [["a", "red", "red", "car"], ["two", "dogs"], ["it"]]
    truths = [{"a", "red", "bus"}, {"two", "dogs", "run"}, {"the", "sky"}]
    assert sparc.k_precision(retrieved, truths) == pytest.approx((3 / 4 + 1 + 0) / 3)
    among = {"red", "car", "dogs"}                                          # "it" is not counted
    assert sparc.k_precision(retrieved, truths, among) == pytest.approx((2 / 3 + 1) / 2)
    assert math.isnan(sparc.k_precision(retrieved, truths, {"moon"}))
    with pytest.raises(ValueError, match="zip"):
        sparc.k_precision(retrieved[:1], truths)


def test_segment_gives_each_patch_its_nearest_class():
    patches = torch.eye(3)[[0, 1, 2, 2]]
    found = sparc.segment(patches, torch.eye(3), (4, 4))
    assert found.tolist() == [[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 3, 3], [3, 3, 3, 3]]
    found = sparc.segment(patches, torch.eye(3), (2, 6))
    assert found.tolist() == [[1, 1, 1, 2, 2, 2], [3, 3, 3, 3, 3, 3]]


def test_label_maps_name_the_classes_of_the_segmentation():
    data, _ = opened("shapes:size=48", split="val")
    sample = data.world.sample(20, "val", 0)
    for grouping in ("colour", "shape"):
        maps = evaluation.label_maps(sample, f"/{grouping}")
        classes = data.map_classes[f"/{grouping}"].names
        assert ((maps == 0) == (sample["segmentation"] == 0)).all()
        for objects, ids, segmentation in zip(sample["objects"], maps, sample["segmentation"]):
            for k, o in enumerate(objects, 1):
                assert (ids[segmentation == k] == classes.index(o[grouping]) + 1).all()


COLOURS = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255)}


class Oracle(common.ModelDefaults):
    """A perfect model of plain red, green and blue pictures: both encoders return the colour."""

    words = [*COLOURS]

    def eval(self):
        return self

    def encode_image(self, images):
        return F.normalize(common.to_unit(images).mean((2, 3)), dim=-1)

    def encode_text(self, tokens, mask):
        return F.normalize(F.one_hot(tokens, 7).float().sum(1)[:, 4:], dim=-1)

    def encode_patches(self, images):
        quarters = F.avg_pool2d(common.to_unit(images), images.shape[-1] // 2)  # (B, 3, 2, 2)
        return F.normalize(quarters.flatten(2).transpose(1, 2), dim=-1)


class LateOracle(Oracle):
    """The Oracle with late interaction: a score is the worst word's score with its best patch."""

    late_interaction = True

    def encode_tokens(self, tokens, mask):
        return F.one_hot(tokens, 7).float()[:, 1:, 4:]

    def similarity(self, patches, tokens):
        best = torch.einsum("npe,mle->nmpl", patches, tokens).amax(2)       # (n, m, L)
        return best.masked_fill(~tokens.any(-1), 1).amin(2)


class SlotOracle(Oracle):
    """The Oracle with three slots: two return the colour, one of them for single words alone. The
    other is constant or wrong."""

    slots = mask_parts = 3

    def image_slots(self, images):
        colour = Oracle.encode_image(self, images)
        return torch.stack([colour, torch.eye(3)[:1].expand_as(colour) * 3, colour], 1)

    def text_slots(self, tokens, mask):
        colour = Oracle.encode_text(self, tokens, mask)
        wrong = colour.roll(1, 1) * 9
        last = wrong.where(mask.sum(1, keepdim=True) > 3, colour)           # of "a red": wrong
        return torch.stack([colour, wrong, last], 1)

    def encode_image(self, images):
        return F.normalize(F.normalize(self.image_slots(images), dim=-1).flatten(1), dim=-1)

    def encode_text(self, tokens, mask):
        return F.normalize(F.normalize(self.text_slots(tokens, mask), dim=-1).flatten(1), dim=-1)


def embedder(model=None):
    """Return an Embedder of an oracle for images of 8 pixels."""
    tokenizer = common.WordPiece([*common.SPECIAL_TOKENS, *Oracle.words])
    return evaluation.Embedder(model or Oracle(), tokenizer, 16, 8, chunk=2)


def crops_of(embed, pairs):
    """Return features of a random crop of each image, and the labels."""
    return evaluation.probed(embed, pairs, read=evaluation.random_view(embed))


def options_for(spec, **flags):
    """Return the options of eval.py for `spec` with these flags, for a run of the world."""
    args = evaluation.METHODS["sparc"].Settings()
    vars(args).update(data="shapes", eval_data=None, image_root=None, workers=0, probe="adamw",
                      folder_captions=False, data_path="shapes")
    return evaluation.options_of({"data": str(spec)} | flags, args)


def opened(spec, content="caption", **flags):
    """Return the EvalSet of `spec`, and the options of eval.py with these flags."""
    options = options_for(spec, **flags)
    return evaluation.open_eval_set(options, 8, content), options


def make_folders(root, names=COLOURS, n=2, broken=("broken.png",)):
    """Write class folders with n pictures of each colour, and broken files in the first."""
    for name, colour in zip(names, COLOURS.values()):
        image = picture(20, 12, format="PNG", value=colour)
        write_files(root, {f"{name}/{i}.png": image for i in range(n)})
    write_files(root / [*names][0], dict.fromkeys(broken, "no image"))
    return str(root)


def opened_folders(root, **flags):
    """Write class folders to evaluate on and to learn from. Return what opened() returns."""
    for part in ("train", "test"):
        make_folders(root / part)
    return opened(root / "test", train_data=str(root / "train"), **flags)


def opened_table(root, *rows, **flags):
    """Write class folders and a table of images and captions. Return what opened() returns."""
    make_folders(root)
    write_files(root, {"captions.csv": "\n".join(["image,caption", *rows])})
    return opened(root / "captions.csv", **flags)


def test_zeroshot_equals_values_computed_by_hand():
    """Three of seven classes have images: four, two and one."""
    labels, scores = [0, 0, 0, 0, 5, 5, 6], torch.zeros(7, 7)
    scores[range(7), labels] = torch.tensor([9.0, 9, 9, 1, 9, 1, 0.5])
    scores[3, 1:3] = 2                                                      # its label has rank 3
    scores[5, :4] = 2                                                       # rank 5: in the top 5
    scores[6, :5] = 2                                                       # rank 6: not in it
    groups = {"": (torch.arange(7), list("abcdefg"))}
    data = evaluation.EvalSet(groups=groups, labelled=lambda purpose: [])
    model = SimpleNamespace(encode_pairs=lambda pairs, encode: (None, labels),
                            classify=lambda x, classes: scores)
    result = evaluation.zeroshot(model, data, None)
    assert evaluation.to_float(result["zeroshot"]) == pytest.approx(4 / 7)
    assert evaluation.to_float(result["zeroshot/acc5"]) == pytest.approx(6 / 7)
    recall = (3 / 4 + 1 / 2 + 0) / 3                                        # of the three classes
    assert result["zeroshot/mean_per_class_recall"] == (pytest.approx(recall), 1 / 7)


def test_class_embeddings_are_normalised_over_the_slots_of_the_mask():
    """Where the mask is 0, the mean of prompts is 0, too. Weights above 0 act on images alone."""
    embed, x = embedder(), F.normalize(torch.tensor([[1.0, 0, 0], [1.0, 1, 0]]), dim=-1)
    classes = evaluation.Classes(["red", "red green"], ["{}", "{} blue"])
    for mask in (torch.tensor([1.0, 1, 0]), torch.tensor([0.5, 0.1, 0])):
        scores = dataclasses.replace(embed, mask=mask).classify(x, classes)
        torch.testing.assert_close(scores, torch.tensor([[1, 0.5**0.5], [0.5**0.5, 1]]))


# {template: prompt of the class "red"}; {c} is CLIP_benchmark's {}
PROMPTS = {"a photo of many {}.": "a photo of many red.", "{}": "red", "a bad {c}s": "a bad reds",
           "the toy {a}, I like it": "the toy a red, I like it"}


def test_templates_insert_the_name_or_the_name_with_its_article(tmp_path):
    make_folders(tmp_path)
    (tmp_path / "openai.txt").write_text("\n".join(PROMPTS) + "\n\n")
    for given in (list(PROMPTS), [str(tmp_path / "openai.txt")]):
        data, _ = opened(tmp_path, templates=given)
        assert data.classes.names == ["blue", "green", "red"]
        assert data.classes.prompts[-4:] == list(PROMPTS.values())
    data, _ = opened(tmp_path)
    assert data.classes.prompts[:4] == ["a photo of a blue.", "a blue", "a close-up of a blue.",
                                        "a picture of a blue."]


def test_prompts_of_the_world_have_articles():
    """Without fillers no caption says "a photo of". SPARC (Table 2) has prompts of its own."""
    colours = [f"{common.article(colour)} {shape}" for colour in common.COLOUR_NAMES
               for shape in common.SHAPE_NAMES]
    shapes = [*map(common.article, common.SHAPE_NAMES)]
    for spec, every in (("shapes:size=16", 2), ("shapes:size=16,fillers=0", 1)):
        data, _ = opened(spec)
        of_shapes = data.map_classes["/shape"].prompts
        assert data.classes.prompts[::every] == data.map_classes["/colour"].prompts == colours
        assert of_shapes[::every] == shapes and len(of_shapes) == every * len(shapes)
    data, _ = opened("shapes:size=16", templates=["one {}"])
    assert data.classes.prompts[:2] == ["one red circle", "one red square"]


def test_names_of_class_folders_are_needed_only_by_tasks_that_use_them(tmp_path, capsys):
    """Folders may be named by ImageNet's numbers if images are compared with images alone."""
    train, test, names = [str(tmp_path / name) for name in ("train", "test", "names.txt")]
    for part in (train, test):
        make_folders(Path(part), ["n01440764", "n02102480", "n03000684"])
    write_files(tmp_path, {"names.txt": "\n".join(Oracle.words)})
    embed, (data, options) = embedder(), opened(test, task="knn,linear", train_data=train)
    result = evaluation.evaluate(embed, data, options)
    assert result["knn"] == result["linear"] == 1 and "classes" not in vars(data)
    embed.tokenizer = None                                                  # as of BAM
    assert evaluation.take(embed, data, 2)[0].shape == (2, 3, 8, 8)
    data, options = opened(test, templates=["{}"], classes=names)
    capsys.readouterr()
    result = evaluation.zeroshot(embedder(), data, options)
    assert "skipped 1 of 7 images" in capsys.readouterr().out
    assert vars(data)["classes"].source == names
    assert result["zeroshot"][0].tolist() == [True] * 6 and "zeroshot/acc5" not in result


def test_late_interaction_is_scored_by_the_models_own_similarity(tmp_path):
    """Each picture has two colours, in separate patches. Captions have one or two words."""
    files, table = {}, "image,caption\n"
    for a, b in (("red", "green"), ("green", "blue"), ("blue", "red")):
        files[f"{a}.png"] = picture(format="PNG", value=4 * [COLOURS[a]] + 4 * [COLOURS[b]])
        table += f"{a}.png,{b} {a}\n"
    write_files(tmp_path, files | {"captions.csv": table})
    late, (data, options) = embedder(LateOracle()), opened(tmp_path / "captions.csv")
    images, _ = late.encode_pairs(data.captioned("captioned"))
    texts = late.texts(["red", "blue green", "green red", "blue"])          # two at a time
    scores = late.similarity(images, texts)
    assert scores.round(decimals=1).tolist() == [[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 0, 1]]
    torch.testing.assert_close(late.pair_scores(images, texts[:3]), scores[:, :3].diagonal())
    scores = late.classify(images, evaluation.Classes(["red", "blue"], ["{}", "{} green"]))
    assert scores.round(decimals=1).tolist() == [[1, 0], [0, 1], [0.5, 0.5]]
    result = evaluation.evaluate(late, data, options)
    assert result["i2t/R@1"] == result["t2i/R@1"] == result["faithfulness/K-P"] == 1


def test_random_crops_keep_the_colours_of_files_tensors_and_bytes(tmp_path, monkeypatch):
    """Crops have at least 8 % of the image (BAM, D.1: torchvision's RandomResizedCrop)."""
    make_folders(tmp_path)
    colours = torch.tensor([[0, 0, 1.0], [0, 128 / 255, 0], [1.0, 0, 0]])   # blue, green, red
    tensors = [(x[:, None, None].expand(3, 16, 16), c) for c, x in enumerate(colours)]
    files = list(opened(tmp_path)[0].labelled("train"))                     # one file is broken
    in_shards = [(Path(file).read_bytes(), label) for file, label in files]
    asked, crop = set(), common.crop_and_flip
    monkeypatch.setattr(common, "crop_and_flip", lambda image, size, scale, flip, generator: (
        asked.add((size, scale, flip)) or crop(image, size, scale, flip, generator)))
    for pairs, each in ((tensors, 1), (files, 2), (in_shards, 2)):
        x, y = crops_of(embedder(), pairs)
        assert y.bincount().tolist() == [each] * 3 and asked == {(8, (0.08, 1.0), 0.5)}
        torch.testing.assert_close(x, torch.eye(3)[2 - y], atol=0.02, rtol=0)


def test_crops_do_not_depend_on_the_threads_that_read(tmp_path):
    paths = [(str(tmp_path / f"{i}.jpg"), i) for i in range(9)]
    write_table(tmp_path, 9, broken=[4])
    seen = []
    for workers in (1, 4):
        with common.fixed_seed(3):
            embed = dataclasses.replace(embedder(), workers=workers)
            embed.model.probe_features = lambda images: seen.append(images) or images.flatten(1)
            seen.append(crops_of(embed, paths)[1])
    assert seen[-1].tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    one, four = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert all(map(torch.equal, one, four)) and not torch.equal(one[0][0], one[0][1])


def test_sgd_probe_holds_out_a_tenth_of_the_images_or_has_one_rate(tmp_path, monkeypatch, capsys):
    """Labels in rounds: the probe learns all classes. One image of each class, or --probe-lr (BAM,
    Table 9b): there is one rate, and the probe learns from all images."""
    asked = []

    def stub(crops, held, held_labels, classes, epochs, device, rates):
        asked.append((crops()[1].tolist(), len(held), [*rates]))
        return torch.nn.Linear(held.shape[1], classes), rates[0]

    data, options = opened("shapes:size=16", probe="sgd")
    pairs = list(data.labelled("train"))
    labels, rounds = [c for _, c in pairs], [(pairs[i][0], i % 10) for i in range(40)]
    crops = [crops_of(embedder(), pairs)[0] for _ in range(2)]
    assert not torch.isclose(*crops).all(1).any()                           # new crops each time
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "sgd_probe", stub)
        for rows, lr in ((pairs, None), (rounds, None), (rounds[:10], None), (pairs, 0.25)):
            options.probe_lr, data.learn = lr, lambda: iter(rows)
            evaluation.linear(embedder(), data, options)
    held, rest = held_out(torch.tensor(labels), 10)
    assert asked[0] == ([labels[i] for i in rest], len(held), [*evaluation.RATES])
    assert {*asked[1][0]} == {*range(10)} and asked[1][1:] == (4, [*evaluation.RATES])
    assert asked[2:] == [([*range(10)], 10, [0.05]), (labels, min(100, len(labels)), [0.25])]
    monkeypatch.setitem(evaluation.PROBES, "sgd", ("lr", 3))                # in place of 100 epochs
    found = evaluation.linear(embedder(), *opened_folders(tmp_path, probe="sgd"))
    assert len(found["linear"][0]) == 6 and found["linear/lr"] in evaluation.RATES
    assert found["linear"][1] == 1 / 3      # chance: all classes count, not only those held out
    assert capsys.readouterr().out.count("skipped 1 of") == 4               # 3 epochs, then the test


def test_lbfgs_probe_resizes_the_shorter_side_to_the_crop(tmp_path, monkeypatch):
    embed, sizes, transform = embedder(), set(), common.eval_transform
    embed.tokenizer = None                                                  # as of BAM
    monkeypatch.setattr(common, "eval_transform", lambda *size: sizes.add(size) or transform(*size))
    for probe, size in (("adamw", (8, 9)), ("lbfgs", (8, 8))):              # BAM, D.1 and D.3
        sizes.clear()
        found = evaluation.linear(embed, *opened_folders(tmp_path, probe=probe))
        assert found["linear"][0].tolist() == [True] * 6 and found["linear/mean_per_class"] == 1
        assert sizes == {size}


@pytest.mark.parametrize("task, learn", [("knn", "knn_accuracy"), ("linear", "adamw_probe")])
def test_knn_and_probes_learn_from_a_fraction_of_the_labels(task, learn, tmp_path, monkeypatch):
    for part, (name, colour) in itertools.product(("train", "test"), COLOURS.items()):
        image = picture(20, 12, format="PNG", value=colour)
        write_files(tmp_path / part / name, {f"{name}{i}.png": image for i in range(10)})
    (tmp_path / "list.txt").write_text("red3.png\nblue7.png\nred5.png\ngreen1.png\n")
    flags, seen, old = dict(train_data=str(tmp_path / "train")), [], getattr(evaluation, learn)
    monkeypatch.setattr(evaluation, learn, lambda x, y, *rest: (
        seen.append(y.bincount().tolist()) or old(x, y, *rest)))
    for fraction in ("0.2", "0.01", str(tmp_path / "list.txt")):
        data, options = opened(tmp_path / "test", task=task, label_fraction=fraction, **flags)
        assert evaluation.evaluate(embedder(), data, options)[task] == 1
    assert seen == [[2, 2, 2], [1, 1, 1], [1, 1, 2]]
    data, options = opened(tmp_path / "test", label_fraction="0.2", learn_limit=5, **flags)
    assert len(list(data.learn())) == 6                                  # .2 of all 30 labels
    world, options = opened("shapes:size=16", label_fraction="0.1")
    pairs, few = ([c for _, c in found] for found in (world.labelled("train"), world.learn()))
    assert {*few} == {*pairs} and len(few) < len(pairs)


def test_an_evaluation_decodes_jpegs_at_their_full_size(monkeypatch):
    asked, open_image = [], common.open_image
    monkeypatch.setattr(common, "open_image", lambda file, *side: (
        asked.append(side) or open_image(file, *side)))
    embedder().read(picture(64, 32))
    assert asked == [()]


def test_faithfulness_counts_the_words_of_the_retrieved_caption(tmp_path):
    rows = ('red/0.png,"the, blue car."', "blue/0.png,a red bus.",                # swapped
            "green/1.png,green grass.", "red/broken.png,green")
    write_files(tmp_path, {"words.txt": "Car\n\ngrass\n"})
    words = str(tmp_path / "words.txt")
    data, options = opened_table(tmp_path, *rows, nouns_adjectives=words)
    result = evaluation.retrieval(embedder(), data, options)
    assert result["faithfulness/K-P"] == pytest.approx((0 + 0 + 1) / 3)
    assert result["faithfulness/K-Pna"] == pytest.approx((0 + 1) / 2)  # "a red bus" has neither
    result = evaluation.retrieval(embedder(), *opened(tmp_path / "captions.csv"))
    assert "faithfulness/K-Pna" not in result


def test_the_chance_of_retrieval_is_that_of_k_guesses(tmp_path):
    """The oracle tries all sets of k captions. The images have three, one and two captions."""
    names = ["red"] * 3 + ["green"] + ["blue"] * 2
    rows = [f"{name}/0.png,{name} {i}" for i, name in enumerate(names)]
    result = evaluation.retrieval(embedder(), *opened_table(tmp_path, *rows))
    owners = [0, 0, 0, 1, 2, 2]
    for k in (1, 5, 10):
        sets = [*itertools.combinations(owners, min(k, 6))]
        chance = sum(i in guessed for guessed in sets for i in range(3)) / (3 * len(sets))
        assert result[f"i2t/R@{k}"][1] == pytest.approx(chance)
        assert result[f"t2i/R@{k}"][1] == min(1, k / 3)


def test_a_class_whose_images_are_damaged_counts_for_the_chance(tmp_path, capsys):
    data, options = opened_folders(tmp_path, task="zeroshot,knn,linear")
    for i in (0, 1):
        (tmp_path / f"train/red/{i}.png").write_text("no image")
    found = evaluation.evaluate(embedder(), data, options, evaluation.print_metrics)
    assert {found[f"{task}/chance"] for task in ("zeroshot", "knn", "linear")} == {1 / 3}
    assert "  chance 0.3333\n" in capsys.readouterr().out
    assert [found["knn"], found["linear"]] == pytest.approx([4 / 6, 4 / 6])


def test_captions_beyond_the_context_are_counted_and_a_tenth_of_unknown_words_is_noted(capsys):
    embed, shares = embedder(), []                                          # its context is 16
    embed.texts(["red " * n for n in (13, 14, 15, 30)])
    assert embed.counted == {"cut_captions": 2, "captions": 4,              # [CLS] and [SEP]: 2
                             "tokens": 13 + 3 * 14, "unknown_tokens": 0}
    embed.counted.clear()
    for captions in ("red " * 9, "sky"), ("sky",):                          # 1 of 10, 2 of 11
        embed.texts(captions)
        evaluation.print_notes(embed, evaluation.EvalSet())
        shares.append(capsys.readouterr().out.partition(" of the tokens")[0])
    assert shares == ["", "18%"]


def test_caption_prefix_is_encoded_but_not_counted_as_words(tmp_path):
    rows = "red/0.png,red", "green/1.png,green and", "blue/0.png,blue"
    data, options = opened_table(tmp_path, *rows, caption_prefix="blue")
    embed, encode, seen = embedder(), embedder().texts, []
    embed.texts = lambda captions: seen.append(captions) or encode(captions)
    result = evaluation.retrieval(embed, data, options)
    assert seen == [["blue red", "blue green and", "blue blue"]]
    assert result["t2i/R@1"][0] == 1 / 3    # "blue red" is as similar to blue as to red
    assert result["faithfulness/K-P"] == 1  # counts the words of "red", not of "blue red"


def sugarcrepe(*pairs):
    """Return a file of SugarCrepe for the pictures of make_folders(). pairs: (colour, negative)."""
    return json.dumps({i: {"filename": f"{colour}/0.png", "caption": colour,
                           "negative_caption": negative}
                       for i, (colour, negative) in enumerate(pairs)})


def test_negatives_are_measured_on_sugarcrepes_files(tmp_path):
    make_folders(tmp_path)
    twice = "red", "blue"  # an item that stands in a file twice counts once
    write_files(tmp_path, {"swap_att.json": sugarcrepe(twice, ("blue", "red"), twice),
                           "add_obj.json": sugarcrepe(("red", "red"))})
    expected = {"negatives/swap_att": 1, "negatives/add_obj": 0, "negatives": 0.5}  # ties are wrong
    alone = {"negatives/swap_att": 1, "negatives": 1}  # one file
    for name, expected in (".", expected), ("swap_att.json", alone):
        data, options = opened(tmp_path / name, image_root=str(tmp_path))
        result = evaluation.evaluate(embedder(), data, options)
        assert result == expected | {f"{metric}/chance": 0.5 for metric in expected}
    write_files(tmp_path / "coco", {"a.json": '{"annotations": [{"caption": "a dog"}]}'})
    assert not evaluation.sugarcrepe_files(tmp_path / "coco")
    write_files(tmp_path / "folders", {"red/0.png": "", "index.json": '[{"filename": "0.png"}]'})
    write_files(tmp_path / "folders", {"blue/0.png": ""})
    data, _ = opened(tmp_path / "folders")
    assert data.hard_negatives is None and data.groups[""][1] == ["blue", "red"]


def test_captions_with_boxes_are_captions_unless_a_detector_asks(tmp_path):
    rows = [dict(image="0.png", caption="red", bbox=[0, 0, 2, 2])]
    write_files(tmp_path, {"a.json": json.dumps(rows), "0.png": picture(format="PNG")})
    data, _ = opened(tmp_path / "a.json")
    assert [texts for _, texts in data.captioned("test")] == [["red"]] and not data.boxes
    with pytest.raises(common.UserError, match="a.json is no JSON of boxes as COCO or LVIS"):
        opened(tmp_path / "a.json", "boxes")


def test_active_words_of_images_and_captions_are_counted(tmp_path):
    rows = {"0.png": "red", "1.png": "red blue", "2.png": "red green blue"}
    files = dict.fromkeys(rows, picture(format="PNG", value=(255, 9, 0)))
    table = "image,caption\n" + "".join(f"{name},{caption}\n" for name, caption in rows.items())
    write_files(tmp_path, files | {"captions.csv": table})
    found = evaluation.sparsity(embedder(), *opened(tmp_path / "captions.csv"))
    assert found["active/image"].tolist() == [2, 2, 2]                      # red, some green
    assert sorted(found["active/text"].tolist()) == [1, 2, 3]


class WordOracle(Oracle):
    """The Oracle with an entry for each word of the tokenizer, as STAIR has."""

    def encode_image(self, images):
        return F.pad(super().encode_image(images), (4, 0), value=0.5)

    def encode_text(self, tokens, mask):
        return F.pad(super().encode_text(tokens, mask), (4, 0), value=0.5)

    encode_words = encode_text


def test_a_search_by_words_ranks_the_images_that_match(tmp_path, capsys):
    make_folders(tmp_path)
    data, options = opened(tmp_path, query=["red", "blue OR red AND NOT red"])
    evaluation.search(embedder(WordOracle()), data, options, tmp_path)
    by_text, by_query = [re.findall(r"(\w+)/\d.png \((.*?)\)", line)
                         for line in capsys.readouterr().out.splitlines()
                         if line[:4] in ("red ", "blue")]
    others = {("green", "1.00"), ("blue", "1.00")}  # four special tokens have weights of .5, too
    assert by_text[:2] == [("red", "2.00")] * 2 and {*by_text[2:]} == others
    assert by_query == [("blue", "1.00")] * 2  # the red pictures have a word, but do not match


def entropy(labels):
    """Return the entropy of a list of labels, in nats, by counting."""
    shares = [labels.count(label) / len(labels) for label in set(labels)]
    return -sum(p * math.log(p) for p in shares)


@pytest.mark.parametrize("n, labels, clusters", [(40, 3, 3), (40, 2, 7), (40, 9, 2), (6, 5, 4)])
def test_nmi_and_ari_equal_counting(n, labels, clusters):
    """ARI counts pairs of rows: index, expected index and largest index (Hubert and Arabie)."""
    a, b = torch.randint(labels, (n,)).tolist(), torch.randint(clusters, (n,)).tolist()
    information = entropy(a) + entropy(b) - entropy([*zip(a, b)])
    pairs = [(a[i] == a[j], b[i] == b[j]) for i in range(n) for j in range(i)]
    same, of_a, of_b = (sum(map(f, pairs)) for f in (all, lambda p: p[0], lambda p: p[1]))
    expected = of_a * of_b / len(pairs)
    rand = (same - expected) / ((of_a + of_b) / 2 - expected)
    a, b = torch.tensor(a), torch.tensor(b)
    assert bam.nmi(a, b) == pytest.approx(
        information / ((entropy(a.tolist()) + entropy(b.tolist())) / 2))
    assert bam.ari(a, b) == pytest.approx(rand)


def test_nmi_and_ari_of_partitions_of_one_cluster_or_one_row_are_those_of_scikit_learn():
    same, single = torch.zeros(4, dtype=torch.long), torch.arange(4)
    for labels, clusters, value in ((same, same, 1), (single, single.flip(0), 1), (same, single, 0),
                                    (same[:1], same[:1], 1)):
        assert bam.nmi(labels, clusters) == pytest.approx(value)
        assert bam.ari(labels, clusters) == value


def test_lloyd_finds_clouds_and_the_best_of_its_restarts():
    truth = torch.arange(4).repeat_interleave(25)
    x = 10 * torch.eye(4)[truth] + 0.1 * torch.randn(100, 4) + 1e5          # far from the origin
    for seed in range(5):  # each start has a row of each cloud (k-means++)
        once = bam.lloyd(x, 4, torch.Generator().manual_seed(seed), restarts=1)
        assert bam.ari(truth, once) == pytest.approx(1)
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(0)
    total = lambda ids: sum((x[ids == c] - x[ids == c].mean(0)).square().sum() for c in range(5))
    once = [bam.lloyd(x, 5, generator, restarts=1) for _ in range(10)]
    best = min(once, key=total)
    assert total(once[0]) > total(best) < total(once[-1])
    assert bam.lloyd(x, 5, generator.manual_seed(0)).equal(best)
    centres = torch.stack([x[best == c].mean(0) for c in range(5)])
    assert torch.cdist(x, centres).argmin(1).equal(best)     # no row is nearer to another centre
    same = bam.lloyd(torch.ones(8, 2), 3, generator)  # a collapsed network
    assert same.unique().tolist() == [0]


def test_an_empty_cluster_of_lloyd_stays_in_its_place(monkeypatch):
    start = torch.tensor([[2.0], [21.0], [100.0]])  # no row is nearest to 100
    monkeypatch.setattr(bam, "spread_rows", lambda *_: start.clone())
    x = torch.tensor([[0.5], [3.0], [20.0], [22.0]])  # .5 is nearer to 0 than to its centre 1.75
    assert bam.lloyd(x, 3, None, restarts=1).tolist() == [0, 0, 1, 1]


def test_kmeans_draws_classes_and_clusters_their_images(tmp_path):
    """Images of one colour are one cloud, so their clusters are the classes. Where two of three
    classes have equal images, some of the ten draws have two classes that can be told apart."""
    make_folders(tmp_path)
    found = evaluation.kmeans(embedder(), *opened(tmp_path))
    assert found == pytest.approx({"kmeans/2/NMI": 1, "kmeans/2/ARI": 1})
    labels = torch.arange(3).repeat(4)
    found = bam.clustering((labels == 0)[:, None].float(), labels)
    assert found["2/NMI"] == pytest.approx(found["2/ARI"]) and 0.2 < found["2/NMI"] < 0.9
    for flags in {"n": 1}, {"n": 4, "limit": 1}:  # an image a class, and one class
        with pytest.raises(common.UserError, match="^k-means needs two classes"):
            folders = make_folders(tmp_path / str(flags["n"]), n=flags.pop("n"))
            evaluation.kmeans(embedder(), *opened(folders, **flags))


def test_share_on_is_the_share_of_weights_on_an_object():
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:4, 2:6] = True                                                    # halves of two patches
    assert sparc.share_on(mask, torch.tensor([1.0, 3, 0, 4])) == 0.25
    assert sparc.share_on(mask, torch.tensor([1.0, 1, 0, 0])) == 0.5


def weights_in_scene(**words):
    """Return what weights_on_objects() measures for the words of a hand-made scene.

    The image has 4 x 4 pixels, and each pixel is a patch. Object 1 (a red ring) has the pixels 0 to
    3, object 2 (a red star) the pixels 4 and 5, object 3 (a blue ring) the pixels 6 and 7.
    words: {word: {pixel: weight}}.
    """
    ids = torch.tensor([1, 1, 1, 1, 2, 2, 3, 3] + 8 * [0]).view(4, 4)
    red, blue, ring, star = ids % 3 > 0, ids == 3, ids % 2 == 1, ids == 2
    masks = {("colour", "red"): red, ("colour", "blue"): blue, ("shape", "ring"): ring,
             ("shape", "rings"): ring, ("shape", "star"): star, ("shape", "object"): ids > 0}
    pairs = []
    for word, pixels in words.items():
        weights = torch.zeros(16)
        weights[list(pixels)] = torch.tensor([*pixels.values()])
        pairs.append((word, weights))
    data = evaluation.EvalSet(word_masks=lambda: [(None, ("a caption", masks, ids > 0))])
    return evaluation.weights_on_objects("task", None, data, lambda *_: pairs)


@pytest.mark.parametrize("words, expected", [
    # (own, chance of own) for colours, for shapes
    ({"blue": {6: 2.0, 7: 1.0, 0: 1.0, 8: 4.0}}, [(3 / 4, 2 / 8), None]),
    ({"red": {1: 1.0, 4: 1.0, 6: 2.0}}, [(2 / 4, 6 / 8), None]),                # two red objects
    ({"rings": {0: 1.0, 6: 1.0, 5: 2.0}}, [None, (2 / 4, 6 / 8)]),              # a plural
    ({"object": {0: 1.0}, "a": {0: 1.0}}, [None, None]),  # it names all objects; it names none
    # a mean over words; a word without weight on objects has no value of its own
    ({"star": {4: 1.0}, "ring": {4: 1.0, 9: 1.0}, "rings": {15: 1.0}},
     [None, ((1 + 0) / 2, (2 / 8 + 6 / 8) / 2)])])
def test_weights_on_own_objects_are_a_share_of_those_on_all_objects(words, expected):
    found = weights_in_scene(**words)
    for kind, figures in zip(("colour", "shape"), expected):
        pair = found[f"task/own/{kind}"]
        assert pair == pytest.approx(figures or [math.nan] * 2, nan_ok=True)


def test_slots_are_selected_and_masks_are_trained_on_files(tmp_path, monkeypatch):
    make_folders(tmp_path / "val")
    make_folders(tmp_path / "test")
    pairs = ("red", "green"), ("green", "blue"), ("blue", "red"), ("red", "blue")
    write_files(tmp_path, {"crepe/swap_att.json": sugarcrepe(*pairs)})
    val, test, crepe = [str(tmp_path / name) for name in ("val", "test", "crepe")]
    # two of three prompts are right, the third is wrong and long
    embed, flags = embedder(SlotOracle()), dict(templates=["{}", "{}", "a {}"], select_root=test)
    ranked, accuracies = [], sparo.slot_accuracies
    monkeypatch.setattr(sparo, "slot_accuracies",
                        lambda *given: ranked.append(accuracies(*given)) or ranked[-1])
    found = evaluation.slots(embed, *opened(test, select=val, **flags))
    assert found["slots/accuracy_best"] == 1 and ranked[0][[0, 2]].tolist() == [1, 1]
    assert found["slots/best_half/zeroshot"][0].all() and "slots/best_half/i2t/R@1" not in found
    assert {"slots/all/zeroshot", "slots/best_quarter/zeroshot"} <= found.keys()
    on_crepe = evaluation.slots(embed, *opened(crepe, select=val, image_root=test, **flags))
    assert on_crepe["slots/best_half/negatives"] == (1, 1 / 2)
    found = evaluation.masks(embed, *opened(test, select=crepe, **flags))
    assert found["masks/slots/pairs"] == 1 and found["masks/slots/zeroshot"][0].all()
    wrong_slot = torch.tensor([0.0, 1, 0]).repeat_interleave(3)
    monkeypatch.setattr(sparo, "train_mask", lambda *pairs, generator: (wrong_slot, 0.5, 0.75))
    found = evaluation.masks(embed, *opened(test, select=crepe, **flags))
    assert found["masks/zeroshot_before"][0].all()
    assert evaluation.to_float(found["masks/slots/zeroshot"]) == pytest.approx(1 / 3)
    assert found["masks/slots/zeroshot/relative_change"] == pytest.approx((1 / 3 - 1) / (1.5 - 1))


def make_voc_folder(root):
    """Write two pictures and a broken one in Pascal VOC's layout.

    The classes of the maps are 1 red, 2 green and 3 blue. One picture is red and blue, with ignored
    pixels between them. The other is green, and its upper half is background in its map.
    """
    red, green, blue = COLOURS.values()
    tall = picture(16, 40, "L", "PNG", 20 * [[0]] + 20 * [[2]])
    write_files(root, {
        "ImageSets/Segmentation/val.txt": "a\nb\nbroken\n", "classes.txt": "red\ngreen\nblue\n",
        "JPEGImages/a.jpg": picture(40, 16, value=20 * [red] + 20 * [blue]),
        "JPEGImages/b.jpg": picture(16, 40, value=green),
        "JPEGImages/broken.jpg": "no image", "SegmentationClass/broken.png": tall,
        "SegmentationClass/a.png": picture(40, 16, "L", "PNG", 18 * [1] + 4 * [255] + 18 * [3])})
    with Image.open(io.BytesIO(tall)) as truth:
        truth.putpalette(list(range(256)) * 3)                              # as Pascal's maps have
        truth.save(root / "SegmentationClass/b.png")


def test_segmentation_is_measured_on_pascal_vocs_layout(tmp_path, capsys):
    make_voc_folder(tmp_path)
    flags = dict(classes=str(tmp_path / "classes.txt"), templates=["{}"])
    data, options = opened(tmp_path, **flags)
    assert options.split == "val"
    record = evaluation.metrics_record(embedder(), data, options, {})
    assert record["settings"]["class_names"] == flags.get("classes", "Pascal VOC")
    image, maps = next(iter(data.maps("segmentation")))
    assert image.shape == (3, 8, 8) and maps[""].shape == (16, 40)
    assert sorted(maps[""].unique().tolist()) == [1, 3, 255]
    result = evaluation.evaluate(embedder(), data, options)
    assert result == {"miou": (1 + 1 / 2) / 2, "miou_fg": 1, "segmentation/images": 2}
    assert "skipped 1 of 3" in capsys.readouterr().out
    assert evaluation.draw_segmentation(embedder(), data).width > 600
    assert not evaluation.PICTURES["alignment"].fits(data)
    assert len(opened(tmp_path)[0].map_classes[""].names) == 20             # Pascal's classes
    (tmp_path / "classes.txt").write_text("__background__\nred\ngreen\nblue\n")
    assert opened(tmp_path, **flags)[0].map_classes[""].names == ["red", "green", "blue"]
    (tmp_path / "classes.txt").write_text("red\n\nblue\n\n")                # class 2 has no name
    assert opened(tmp_path, **flags)[0].map_classes[""].names == ["red", "", "blue"]
    # a name that is listed twice is one image, and a turned photo lies across its map
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    shutil.copy(tmp_path / "SegmentationClass/a.png", tmp_path / "SegmentationClass/turned.png")
    with Image.open(tmp_path / "JPEGImages/a.jpg") as image:
        image.save(tmp_path / "JPEGImages/turned.jpg", exif=exif)
    write_files(tmp_path, {"ImageSets/Segmentation/val.txt": "a\nturned\n\na\n"})
    assert len([*opened(tmp_path)[0].maps("segmentation")]) == 1
    assert "turned (ValueError: its sides 16 x 40 do not fit those" in capsys.readouterr().out


def test_each_flag_of_a_task_is_named_where_no_task_reads_it(tmp_path, capsys):
    general = {"data", "image_root", "split", "limit", "task", "query", "checkpoint", "export",
               "workers", "batch", "device", "amp"}
    rows = [*evaluation.TASKS.values(), *evaluation.PICTURES.values()]
    read = {flag for row in rows for flag in row.flags}
    assert {field.name for field in dataclasses.fields(evaluation.Flags)} == general | read
    options = options_for("shapes", probe="sgd", train_data="x")
    for flag in read:
        for tasks in (["zeroshot"], ["zeroshot", "linear"]):  # one that reads the flag is enough
            options.given, chosen = (flag,), [evaluation.TASKS[task] for task in tasks]
            evaluation.note_useless_flags(options, chosen)
            note = f"note: {common.flag_of(flag)} has no effect"
            is_noted = re.match(note, capsys.readouterr().out) is not None
            assert is_noted == all(flag not in row.flags for row in chosen)
    options.probe = "adamw"
    for spec, flag, noted in (
            ("shapes", "split", False), (tmp_path, "split", True), ("a/{0..1}.tar", "split", True),
            ("a.json:split=val", "split", True), ("shapes", "probe_lr", True)):
        options.data, options.given = str(spec), (flag,)
        evaluation.note_useless_flags(options, [evaluation.TASKS["linear"]])
        assert (common.flag_of(flag) in capsys.readouterr().out) == noted


def test_every_data_format_has_a_default_split(tmp_path, monkeypatch):
    write_files(tmp_path, {"coco.json": '{"images": [], "annotations": []}',
                           "a.json": '{"images": [{"split": "test"}]}', "a.csv": "image,caption\n",
                           "b.tsv": "split\timage\tcaption\n"})
    monkeypatch.chdir(tmp_path)
    for split, specs in (("test", ("shapes:objects=2", "a.json", "b.tsv")),
                         ("val", ("a.json:split=val", "b.tsv:split=val")),
                         ("all", ("a.csv", "folders", "a.token", "coco.json"))):
        assert {options_for(spec).split for spec in specs} == {split}


def rows_of(monkeypatch, draw, *arguments):
    """The rows of the sheet that a function draws. Its title is shorter than its note."""
    def rows_alone(title, note, rows, columns=12):
        assert len(title) < min(100, len(note))
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "sheet", rows_alone)
        return draw(*arguments)


def test_images_have_their_best_words(tmp_path, monkeypatch):
    """The captions of red and blue are swapped."""
    scores = torch.tensor([0.5, 0, 2, -math.inf])
    assert evaluation.best_words(["a", "b", "c", "d"], scores) == "c=2.00  a=0.50"
    assert evaluation.best_words(["a"], torch.zeros(1)) == "no word"
    make_folders(tmp_path)
    table = "image,caption\nred/0.png,blue\nblue/0.png,red\ngreen/0.png,green\n"
    write_files(tmp_path, {"a.csv": table})
    embed, (data, _) = embedder(), opened(tmp_path / "a.csv")
    embed.model.image_encoding = embed.model.encode_image
    found, best_words = [], evaluation.best_words
    monkeypatch.setattr(evaluation, "best_words", lambda words, scores: (
        found.append(words[scores.argmax()]) or best_words(words, scores)))
    (_, cells), = rows_of(monkeypatch, evaluation.draw_words, embed, data)
    swapped = {"blue": "red", "red": "blue", "green": "green"}
    assert sorted(found) == sorted(swapped)
    assert [swapped[caption] for _, caption in cells] == found


def test_the_patches_of_each_true_class_are_bright(tmp_path, monkeypatch):
    make_voc_folder(tmp_path)
    data, _ = opened(tmp_path, classes=str(tmp_path / "classes.txt"), templates=["{}"])
    rows = rows_of(monkeypatch, evaluation.draw_segmentation, embedder(), data)
    assert [[label for _, label in cells] for _, cells in rows] == [
        ["image", "red", "blue"], ["image", "green"]]
    image, bright, *_ = [picture for picture, _ in rows[1][1]]
    assert ImageChops.difference(image, bright).getbbox() is None


def test_slots_are_shown_that_agree_in_four_images_and_repeat_no_words(monkeypatch):
    """Slot 0 agrees in one image more than slot 3. Slot 1 has its words, slot 2 too few images."""
    tokens = torch.tensor([[2, 4, 5, 3], [2, 5, 6, 3], [2, 6, 4, 3], [2, 4, 4, 3], [2, 5, 4, 3]])
    word, sharpness = torch.tensor([[1, 1, 2, 2]] * 5), torch.tensor([[0.6, 0.5, 0.9, 0.7]] * 5)
    word[4, 0] = 2
    agree = torch.ones(5, 4, dtype=torch.bool)
    agree[3:, 2] = agree[2, 3] = False
    found = tokens, torch.rand(5, 4, 4), word, sharpness, agree
    monkeypatch.setattr(evaluation, "take", lambda *given: (torch.zeros(5, 3, 8, 8), None))
    monkeypatch.setattr(evaluation, "attention_of_slots", lambda *given: found)
    rows = rows_of(monkeypatch, evaluation.draw_slots, embedder(), None)
    assert [(heading, " ".join(name for _, name in cells)) for heading, cells in rows] == [
        ("Slot 0", "red green blue red red"), ("Slot 3", "green blue red red")]
    agree[:, [0, 3]] = False
    assert len(rows_of(monkeypatch, evaluation.draw_slots, embedder(), None)) == 1
    agree.fill_(False)
    assert evaluation.draw_slots(embedder(), None) is None


def test_a_slot_that_agrees_gives_its_word_and_its_brightest_patch(monkeypatch):
    weights = torch.tensor([[[0.2, 0.8], [0.9, 0.1], [0.4, 0.6]]])
    found = (torch.tensor([[2, 4, 5, 3]]), weights, torch.tensor([[1, 2, 1]]), None,
             torch.tensor([[True, True, False]]))
    monkeypatch.setattr(evaluation, "attention_of_slots", lambda *given: found)
    words = evaluation.words_of_slots(embedder(), torch.zeros(3, 8, 8), "red green")
    assert [(word, best.tolist()) for word, best in words] == [("red", [0, 1]), ("green", [1, 0])]
    monkeypatch.setattr(evaluation, "weights_on_objects", lambda *given: given)
    assert evaluation.slot_alignment("embedder", "data", None) == (
        "slot_alignment", "embedder", "data", evaluation.words_of_slots)


def test_vtab_avg_is_the_relative_change_of_the_mean_accuracy():
    """SPARO, Table 5. The pairs rise by 20 %; the mean accuracy falls from .5 to .45."""
    assert sparo.relative_change(0.4, 0.5, 0.8, 0.9) == pytest.approx(0.25 / 0.125)
    assert math.isnan(sparo.relative_change(0.4, 0.5, 0.8, 0.8))
    rows = [{"masks/zeroshot_before": before, "masks/slots/zeroshot": after,
             "masks/slots/pairs_before": 0.7, "masks/slots/pairs": 0.84,
             "masks/slots/zeroshot/relative_change": 9} for before, after in ((0.9, 0.8), (0.1, 0.1))]
    name = "masks/slots/zeroshot/relative_change_of_means"
    assert sparo.change_of_means(rows) == pytest.approx({name: -0.1 / 0.2})


@pytest.mark.parametrize("name, pictures", [
    ("sparc", ["alignment", "segmentation"]), ("stair", ["words", "queries"]), ("bam", ["heads"])])
def test_a_run_draws_its_pictures(run_of, name, pictures):
    drawn = {path.stem for path in run_of(name).glob("*.png")}
    assert drawn >= {*pictures} and ("words" in drawn) == (name == "stair")


def encode_on(rank, run, tables):
    """Return what a rank, or one process (None), encodes of the images and captions of tables."""
    torch.manual_seed(0)
    embed, found = evaluation.load_run(run)[0], []
    share = (0, 1) if rank is None else common.this_rank()
    embed = dataclasses.replace(embed, chunk=2, workers=2, share=share)
    for n, table in tables.items():
        files = [(str(Path(table).parent / f"{i}.jpg"), i) for i in range(n)]
        x, values = embed.encode_pairs(files)
        y = embed.texts([f"n{i} " * (1 + i) for i in range(n)])
        found.append((x, values, crops_of(embed, files)[0], y, dict(embed.counted)))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_encode_what_one_process_encodes(tmp_path, run_of, ranks):
    """Some numbers of images are below the number of ranks or not divisible by it."""
    tables = {n: write_table(tmp_path / str(n), n, broken=[2] if n > 3 else [])
              for n in (1, 2, 3, 5, 8)}
    alone = encode_on(None, run_of("sparc"), tables)
    for found in run_ranks(tmp_path, encode_on, ranks, str(run_of("sparc")), tables):
        for one, several in zip(alone, found, strict=True):
            assert one[1] == several[1] and one[4] == several[4]
            torch.testing.assert_close(several, one, rtol=1e-5, atol=1e-6)


def evaluate_on_rank(rank, *flags):
    """Call eval.py as a rank, on 24 scenes. Return the number of rows that its tasks encode."""
    compute, rows = evaluation.Embedder.compute, []

    def count(self, encode, *inputs):
        rows.append(len(inputs[0]))
        return compute(self, encode, *inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation.Embedder, "compute", count)
        patch.setattr(evaluation, "WORLD_N", 24)
        patch.setitem(evaluation.PROBES, "sgd", ("lr", 2))
        patch.setattr(evaluation, "pictures_to_draw", lambda *_: {})
        evaluation.main([*flags])
    return sum(rows)


@pytest.mark.ranks
@pytest.mark.parametrize("name, flags", [("sparc", "--batch 5"), ("stair", "--batch 7"),
                                         ("bam", "--probe sgd --batch 16")])
def test_two_ranks_write_the_figures_of_one_process(tmp_path, run_of, name, flags):
    run = shutil.copytree(run_of(name), tmp_path / "run")
    alone = evaluate_on_rank(0, str(run), *flags.split())
    one = (run / "evals.jsonl").read_text()
    parts = run_ranks(tmp_path, evaluate_on_rank, 2, str(run), *flags.split())
    assert sum(parts) == pytest.approx(alone, rel=0.1) and max(parts) < 0.6 * alone
    assert (run / "evals.jsonl").read_text() == one  # an equal line is replaced
