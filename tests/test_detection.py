"""Open-vocabulary detection: matching, AP, COCO's and LVIS' files, OWL-ViT's heads and losses."""

import itertools
import json
import math
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import common
import eval as evaluation
import sparc
import train
from common import Boxes, UserError
from helpers import assert_same_weights, read_log, train_alone, train_until, weights
from test_eval import Oracle, embedder, opened


def boxes_of(*rows, crowd=(), **more):
    """Rows (class, left, top, right, bottom) -> Boxes; crowd: numbers of rows."""
    table = np.array(rows, float).reshape(-1, 5)
    crowd = np.isin(np.arange(len(table)), crowd)
    return Boxes(table[:, 1:], table[:, 0].astype(int), crowd, **more)


def found_of(*rows):
    """Rows (score, class, left, top, right, bottom) -> what average_precisions takes."""
    table = np.array(rows, float).reshape(-1, 6)
    return table[:, 2:], table[:, 1].astype(int), table[:, 0]


def ap(found, truths, **more):
    return {c: x.mean() for c, x in evaluation.average_precisions(found, truths, **more).items()}


# Matching ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rounded", [False, True])
def test_the_assignment_has_the_least_sum_of_all(rounded):
    rng = np.random.default_rng(0)
    for n, m in itertools.product(range(1, 5), range(1, 6)):
        cost = rng.normal(size=(n, m)).round(0 if rounded else 9)
        if n <= m:
            columns = evaluation.assign(cost)
            sums = [cost[range(n), list(p)].sum() for p in itertools.permutations(range(m), n)]
            assert len(set(columns)) == n
            assert cost[range(n), columns].sum() == pytest.approx(min(sums))


def test_the_second_box_makes_the_first_change_its_patch():
    """Greedily box 0 takes patch 0 (cost 1) and box 1 must take patch 1 (10)."""
    costs = torch.tensor([[[1.0, 2.0, 9.0], [1.0, 10.0, 9.5], [0.0, 0.0, 0.0]]])
    patches = evaluation.match(costs, torch.tensor([[True, True, False]]))
    assert patches.tolist() == [[1, 0, 0]]


# AP ---------------------------------------------------------------------------------------

A, B = (0, 0, 0, 0.5, 0.5), (0, 0.5, 0.5, 1, 1)  # two boxes of class 0


@pytest.mark.parametrize("found, expected", [
    ([(0.9, *A), (0.8, *B)], 1.0),
    ([(0.9, *A)], 51 / 101),  # recall 1/2 is reached by 51 of the 101 points
    ([(0.95, 0, 0, 0.5, 0.5, 1), (0.9, *A), (0.8, *B)], 2 / 3),  # 1/2, then 2/3: the higher counts
    ([(0.9, *A), (0.8, *A), (0.7, *B)], (51 + 50 * 2 / 3) / 101),  # its second is wrong
    ([(0.9, *A), (0.8, *B), (0.7, 0, 0, 0.5, 0.5, 1)], 1.0),  # false ones behind all cost nothing
    ([], 0.0),
])
def test_average_precision_by_hand(found, expected):
    result = ap([found_of(*found)], [boxes_of(A, B)])
    assert result == {0: pytest.approx(expected)}


def test_the_iou_decides_at_which_thresholds_a_box_is_right():
    """Two boxes of .5 x .5, moved by .1: IoU .4 * .5 / (.5 - .2) = 2 / 3, four of ten."""
    found = [found_of((0.9, 0, 0.1, 0, 0.6, 0.5))]
    result = evaluation.average_precisions(found, [boxes_of(A)])[0]
    assert result.tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]


def test_what_lies_in_a_crowd_does_not_count_and_a_crowd_is_no_box():
    truth = boxes_of((0, 0, 0, 1, 1), (0, 0.6, 0.6, 0.8, 0.8), (1, 0, 0, 1, 1), crowd=[0, 2])
    found = found_of((0.9, 0, 0, 0, 0.2, 0.2), (0.8, 0, 0.2, 0, 0.4, 0.2),
                     (0.7, 0, 0.6, 0.6, 0.8, 0.8), (0.6, 1, 0, 0, 0.5, 0.5))
    assert ap([found], [truth]) == {0: pytest.approx(1)}
    assert ap([found], [truth._replace(crowd=np.zeros(3, bool))])[0] < 0.5


def test_only_the_best_of_a_class_count():
    wrong = [(0.9, 0, 0.9, 0.9, 1, 1)] * 3
    found = [found_of(*wrong, (0.5, *A))]
    assert ap(found, [boxes_of(A)], most=4)[0] == pytest.approx(1 / 4)
    assert ap(found, [boxes_of(A)], most=3)[0] == 0


def test_lvis_judges_only_classes_that_were_looked_for():
    found = [found_of((0.9, *A), (0.8, *B)), found_of((0.95, *B))]
    first = boxes_of(A, absent=[1])
    unknown, absent = (boxes_of(absent=ids) for ids in ([], [0]))
    assert ap(found, [first, unknown]) == {0: pytest.approx(1)}  # the false one stands behind
    assert ap(found, [first, absent]) == {0: pytest.approx(1 / 2)}
    assert ap(found, [first, boxes_of()]) == {0: pytest.approx(1 / 2)}  # COCO knows all
    partial = boxes_of(B, absent=[], partial=[0])  # both are right or do not count
    assert ap([found_of((0.9, *A), (0.8, *B))], [partial]) == {0: pytest.approx(1)}
    assert ap([found_of((0.9, *A), (0.8, *B))], [boxes_of(B, absent=[])]) == {0: pytest.approx(.5)}


def drawn(lvis):
    """Twelve images of boxes in units of 1/128 and what was found, made by a rule; image 5 is
    empty, scores are tied."""
    state, truths, found = 1, [], []

    def draw(low, high):
        nonlocal state
        state = (state * 1103515245 + 12345) % 2**31
        return low + (state >> 16) % (high - low)

    for image in range(12):
        rows, guesses = [], []
        for _ in range(draw(0, 6) if image != 5 else 0):
            x, y, w, h, c = draw(0, 60), draw(0, 60), draw(5, 40), draw(5, 40), draw(0, 4)
            rows.append((c, x, y, x + w, y + h))
            for _ in range(draw(0, 3)):
                dx, dy, dw = draw(-4, 5), draw(-4, 5), draw(-3, 4)
                guess = x + dx, y + dy, x + dx + w + dw, y + dy + h
                guesses.append((draw(1, 11) / 10, c if draw(0, 5) else draw(0, 4), *guess))
        for _ in range(3):
            x, y = draw(0, 60), draw(0, 60)
            guesses.append((draw(1, 11) / 10, draw(0, 4), x, y, x + draw(5, 40), y + draw(5, 40)))
        crowd = [] if lvis else [i for i in range(len(rows)) if draw(0, 5) == 0]
        more = dict(absent=[draw(0, 4)], partial=[draw(0, 4)]) if lvis else {}
        truth, guess = boxes_of(*rows, crowd=crowd, **more), found_of(*guesses)
        truths.append(truth._replace(boxes=truth.boxes / 128))
        found.append((guess[0] / 128, *guess[1:]))
    return found, truths


# Of pycocotools 2.0.11's COCOeval and lvis 0.5.3's LVISEval on the boxes of `drawn`: AP, AP50, AP75
# and the AP of class 0. Of COCO's 23 true boxes 4 are crowds; LVIS has 19.
PYCOCOTOOLS = [0.09638855466024945, 0.1934357406328868, 0.11303630363036303, 0.025940594059405936]
LVIS = [0.1252094440213252, 0.26650165016501653, 0.10662604722010662, 0.22970297029702968]


@pytest.mark.parametrize("lvis, expected", [(False, PYCOCOTOOLS), (True, LVIS)])
def test_average_precision_is_that_of_pycocotools_and_lvis(lvis, expected):
    aps = evaluation.average_precisions(*drawn(lvis))
    all_classes = np.stack(list(aps.values()))
    ours = [all_classes.mean(), all_classes[:, 0].mean(), all_classes[:, 5].mean(), aps[0].mean()]
    assert len(aps) == 4 and ours == pytest.approx(expected, abs=1e-12)


# Files ------------------------------------------------------------------------------------

GREY = 128


def write_coco(root, lvis=False):
    """Two images, 40 x 20 and 20 x 20, of a cat, a crowd of cats and a hot dog."""
    images = [dict(id=7, width=40, height=20), dict(id=3, width=20, height=20)]
    annotations = [dict(id=1, image_id=7, category_id=5, bbox=[10, 5, 20, 10], iscrowd=0),
                   dict(id=2, image_id=3, category_id=2, bbox=[0, 0, 10, 20], iscrowd=0),
                   dict(id=3, image_id=7, category_id=5, bbox=[0, 0, 40, 20], iscrowd=1)]
    categories = [dict(id=5, name="cat"), dict(id=2, name="hot_dog"), dict(id=9, name="owl")]
    for image in images:
        name = f"{image['id']:012}.png"
        Image.new("RGB", (image["width"], image["height"]), "red").save(root / name)
        image["file_name"] = name
    if lvis:
        for image, absent, partial in zip(images, ([2], []), ([5], [])):
            url = f"http://images.cocodataset.org/{root.name}/{image.pop('file_name')}"
            image |= dict(coco_url=url, neg_category_ids=absent,
                          not_exhaustive_category_ids=partial)
        for category, frequency in zip(categories, "frc"):
            category["frequency"] = frequency
        for annotation in annotations:
            del annotation["iscrowd"]
    file = root / "boxes.json"
    file.write_text(json.dumps(dict(images=images, annotations=annotations,
                                    categories=categories)))
    return str(file)


def test_cocos_files_are_read(tmp_path):
    table = common.BoxTable(write_coco(tmp_path))
    assert table.class_names == ["hot dog", "cat", "owl"] and table.queries[2] == "an owl"
    assert table.trained == [0, 1, 2] and table.rare == []
    assert table.sample_captions(2) == ["a hot dog", "a cat"]  # of which announce() tells [UNK]
    first, second = table.truth(0), table.truth(1)
    assert first.boxes.tolist() == [[0.25, 0.125, 0.75, 0.375], [0, 0, 1, 0.5]]
    assert first.labels.tolist() == [1, 1] and first.crowd.tolist() == [False, True]
    assert first.size == (1, 0.5) and first.absent is None
    assert second.boxes.tolist() == [[0, 0, 0.5, 1]] and second.labels.tolist() == [0]
    assert table.paths[1] == str(tmp_path / "000000000003.png")


def test_lvis_files_are_read_and_rare_classes_are_not_trained_on(tmp_path):
    file = write_coco(tmp_path, lvis=True)
    table = common.BoxTable(file, tmp_path.parent, "val")
    assert table.rare == [0] and table.truth(0).absent == [0] and table.truth(0).partial == [1]
    assert table.truth(1).absent == [] and table.truth(1).labels.tolist() == [0]
    assert table.paths[0] == str(tmp_path / "000000000007.png")
    train = common.BoxTable(file, tmp_path.parent)
    assert train.trained == [1, 2] and train.truth(1).labels.tolist() == []
    assert train.truth(0).labels.tolist() == [1, 1]


@pytest.mark.parametrize("change, message", [
    (lambda data: data.pop("categories"), "no images, categories and boxes"),
    (lambda data: data["annotations"][0].update(image_id=99), "no images, categories and boxes"),
    (lambda data: data["annotations"][0].update(bbox=[1, 2, 3]), "no images, categories and boxes"),
    (lambda data: data["images"][0].pop("width"), "no images, categories and boxes")])
def test_files_without_boxes_are_refused(tmp_path, change, message):
    file = write_coco(tmp_path)
    data = json.loads(open(file).read())
    change(data)
    open(file, "w").write(json.dumps(data))
    with pytest.raises(UserError, match=message):
        common.BoxTable(file)


def test_an_image_is_padded_to_a_square_on_the_right_or_below():
    x = common.squared(Image.new("RGB", (40, 20), "red"), 8)
    assert x.shape == (3, 8, 8) and (x[:, :4] == torch.tensor([255, 0, 0]).view(3, 1, 1)).all()
    assert (x[:, 4:] == GREY).all()
    assert (common.squared(Image.new("RGB", (1, 900), "red"), 8)[:, :, 1:] == GREY).all()


def test_boxes_move_with_crops_and_flips():
    """The box of a red rectangle in a black image is that of its red pixels, whatever the crop."""
    image = Image.new("RGB", (80, 60))
    image.paste((255, 0, 0), (30, 20, 50, 40))
    truth = boxes_of((4, 30 / 80, 20 / 80, 50 / 80, 40 / 80), (5, 0, 0, 1, 0.75), crowd=[1])
    flipped, whole = set(), 0
    for seed in range(40):
        torch.manual_seed(seed)
        x, found = common.crop_boxes(image, truth, 64, 0.3)
        red = (x[0] > 128) & (x[1] < 64)
        if not len(found.labels):
            continue
        whole += 1
        rows, columns = red.any(1).nonzero()[:, 0], red.any(0).nonzero()[:, 0]
        box = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
        assert found.labels.tolist() == [4]
        assert found.boxes[0] * 64 == pytest.approx([float(edge) for edge in box], abs=1.5)
        flipped.add(round(found.boxes[0][0], 3))
    assert whole > 10 and len(flipped) > 5


def test_boxes_of_which_little_is_left_are_left_out(monkeypatch):
    image = Image.new("RGB", (100, 100))
    truth = boxes_of((0, 0.4, 0, 0.9, 0.5), (1, 0.3, 0, 0.8, 0.5))  # the left half: .2 and .4
    crop = 0, 0, 100, 62  # top, left, height, width
    monkeypatch.setattr(common.v2.RandomResizedCrop, "get_params", lambda *_: crop)
    _, found = common.crop_boxes(image, truth, 10, 0.5)
    assert found.labels.tolist() == [1]


def test_the_worlds_boxes_hold_their_objects_pixels():
    sample = common.World(objects=4, small=0.13, large=0.18).sample(40, "test", 0)
    for i, truth in enumerate(common.world_boxes(sample)):
        assert len(truth.labels) == len(sample["objects"][i])
        for k, (box, c) in enumerate(zip(truth.boxes * 48, truth.labels)):
            rows, columns = (sample["segmentation"][i] == k + 1).nonzero().unbind(1)
            assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            o = sample["objects"][i][k]
            assert f"{o['colour']} {o['shape']}" == evaluation.PAIRS[c]


def test_an_image_asks_for_its_classes_and_some_others():
    world = common.World(palette=6, heldout=4)
    tokenizer = common.WordPiece(common.train_wordpiece(world.queries, 100))
    truths = [boxes_of((3, 0, 0, 0.5, 0.5), (9, 0, 0, 1, 1), (3, 0, 0, 0.2, 0.2)), boxes_of()]
    batch = common.box_batch(truths, world, tokenizer, 12, others=5)
    assert batch["asked"].sum(1).tolist() == [7, 5] and batch["asked"].any(0).all()
    assert batch["boxes"].shape == (2, 3, 4) and (batch["labels"][1] == -1).all()
    for label, c in zip(batch["labels"][0], (3, 9, 3)):
        expected = tokenizer.encode(world.queries[c])
        assert batch["tokens"][label][: len(expected)].tolist() == expected
        assert batch["asked"][0, label]
    everything = common.box_batch(truths, world, tokenizer, 12, others=99)
    assert len(everything["tokens"]) == len(set(world.trained) | {3, 9})


# Heads and losses -------------------------------------------------------------------------


def test_giou_by_hand():
    a = torch.tensor([[0, 0, 2, 2], [0, 0, 1, 1], [0, 0, 1, 1.0]])
    b = torch.tensor([[1, 1, 3, 3], [2, 0, 3, 1], [0, 0, 1, 1.0]])
    expected = [1 / 7 - 2 / 9, 0 - 1 / 3, 1]
    assert sparc.generalized_iou(a, b).tolist() == pytest.approx(expected)


def test_focal_losses_by_hand():
    there, elsewhere = sparc.focal_losses(torch.tensor([math.log(3)]))  # p = 3 / 4
    assert there.item() == pytest.approx(-0.3 / 16 * math.log(3 / 4))
    assert elsewhere.item() == pytest.approx(-0.7 * 9 / 16 * math.log(1 / 4))


def detection_batch(B=4, P=9, Q=5, M=3):
    torch.manual_seed(1)
    corner = 0.6 * torch.rand(B, P + M, 2, dtype=torch.double)
    boxes = torch.cat([corner, corner + 0.05 + 0.3 * torch.rand(B, P + M, 2)], -1)
    labels = torch.tensor([[0, 3, -1], [2, 2, 4], [-1, -1, -1], [1, -1, -1]])[:B]
    asked = torch.rand(B, Q) < 0.7
    asked.scatter_(1, labels.clamp(min=0), True)
    return (torch.randn(B, P, Q, dtype=torch.double), boxes[:, :P], asked, labels, boxes[:, P:])


def test_the_losses_are_the_literal_ones():
    logits, boxes, asked, labels, truth = detection_batch()
    losses = sparc.detection_losses(logits, boxes, asked, labels, truth, evaluation.match)
    sums = np.zeros(3)
    for i in range(4):
        true = [(c, truth[i, m]) for m, c in enumerate(labels[i].tolist()) if c >= 0]
        best = None
        for patches in itertools.permutations(range(9), len(true)):
            cost = 0
            for p, (c, box) in zip(patches, true):
                there, elsewhere = sparc.focal_losses(logits[i, p, c])
                cost += there - elsewhere + (boxes[i, p] - box).abs().sum()
                cost -= sparc.generalized_iou(boxes[i, p], box)
            if best is None or cost < best[0]:
                best = cost, patches
        class_of = {p: c for p, (c, _) in zip(best[1], true)}
        for p, q in itertools.product(range(9), range(5)):
            x = 1 / (1 + math.exp(-logits[i, p, q]))
            one = -0.3 * (1 - x) ** 2 * math.log(x) if class_of.get(p) == q else (
                -0.7 * x**2 * math.log(1 - x))
            sums[0] += one * asked[i, q].item() / max(1, len(true)) / 4
        for p, (_, box) in zip(best[1], true):
            sums[1] += (boxes[i, p] - box).abs().sum().item() / len(true) / 4
            sums[2] += (1 - sparc.generalized_iou(boxes[i, p], box)).item() / len(true) / 4
    assert [loss.item() for loss in losses] == pytest.approx(sums.tolist())


def test_patches_begin_with_their_own_boxes_and_heads_are_pure():
    boxes = sparc.patch_boxes(torch.zeros(1, 4, 4))
    expected = [[0, 0, .5, .5], [.5, 0, 1, .5], [0, .5, .5, 1], [.5, .5, 1, 1]]
    assert boxes[0].flatten().tolist() == pytest.approx(sum(expected, []), abs=1e-6)
    e, q = torch.tensor([[[3.0, 0], [0, 0.1]]]), torch.tensor([[1.0, 0], [0.6, 0.8]])
    shift, scale = torch.tensor([[[1.0], [0.0]]]), torch.tensor([[[1.0], [-1.0]]])
    logits = sparc.query_logits(e, q, shift, scale)[0]
    small = math.exp(-1)
    assert logits.flatten().tolist() == pytest.approx([4, 3.2, 0, 0.8 * small])


def test_best_boxes_are_pairs_of_patch_and_class():
    scores = torch.tensor([[[0.1, 0.9], [0.8, 0.2]]])
    boxes = torch.tensor([[[0.0, 0, 1, 1], [0, 0, 0.5, 0.5]]])
    best = evaluation.best_boxes(scores, boxes, n=3)[0]
    assert best[:, 4].tolist() == [1, 0, 1]
    assert best[:, 5].tolist() == pytest.approx([0.9, 0.8, 0.2])
    assert best[:, 2].tolist() == [1, 0.5, 0.5]
    assert evaluation.best_boxes(scores, boxes).shape == (1, 4, 6)


# The task ---------------------------------------------------------------------------------


class Finder(common.ModelDefaults):
    """Finds the boxes of `truths[i]` in an image of the value i, for queries that are words."""

    def __init__(self, truths):
        self.truths = truths

    def eval(self):
        return self

    def encode_text(self, tokens, mask):
        return F.one_hot(tokens, 7).float().sum(1)[:, 4:]

    def detect(self, images, queries):
        assert torch.equal(queries, torch.eye(3))
        scores, boxes = torch.zeros(len(images), 4, 3), torch.zeros(len(images), 4, 4)
        for row, i in enumerate(images[:, 0, 0, 0].int().tolist()):
            for k, (box, c) in enumerate(zip(*self.truths[i][:2])):
                scores[row, k, c], boxes[row, k] = 0.9 - 0.1 * i, torch.from_numpy(box)
        return scores, boxes


def test_the_task_by_hand():
    """Class 2 is rare; the second image's boxes are found in the third: they are false."""
    truths = [boxes_of(A, (2, 0, 0, 1, 0.75), size=(1, 0.75)), boxes_of((1, *B[1:])), boxes_of()]
    data = evaluation.EvalSet(rare=[2], box_classes=evaluation.Classes([*Oracle.words], ["{}"]))
    data.boxes = lambda: ((torch.full((3, 8, 8), float(i)), truth)
                          for i, truth in enumerate(truths))
    result = evaluation.detection(embedder(Finder(truths)), data, None)
    assert result == {"detection/AP": pytest.approx(1), "detection/AP50": pytest.approx(1),
                      "detection/AP75": pytest.approx(1), "detection/AP_rare": pytest.approx(1),
                      "detection/images": 3}
    too_high = boxes_of((2, 0, 0, 1, 1))  # it reaches into the padding, which is cut off
    assert evaluation.detection(embedder(Finder([too_high, *truths[1:]])), data, None)[
        "detection/AP_rare"] == pytest.approx(1)
    data_without = evaluation.EvalSet(box_classes=data.box_classes)
    data_without.boxes = lambda: ((torch.zeros(3, 8, 8), boxes_of()) for _ in range(2))
    with pytest.raises(UserError, match="nothing.json has no true box"):
        options = types.SimpleNamespace(data="nothing.json")
        evaluation.detection(embedder(Finder(truths)), data_without, options)
    wrong = [truths[0], truths[2], truths[1]]
    result = evaluation.detection(embedder(Finder(wrong)), data, None)
    assert result["detection/AP"] == pytest.approx(2 / 3)
    assert result["detection/AP_rare"] == pytest.approx(1)


def test_cocos_file_is_an_evaluation_set(tmp_path):
    data, _ = opened(write_coco(tmp_path))
    (image, truth), _ = data.boxes()
    assert image.shape == (3, 8, 8) and truth.labels.tolist() == [1, 1]
    assert data.box_classes.prompts[4] == "a photo of a cat." and not data.captioned
    assert [name for name, task in evaluation.TASKS.items() if task.fits(data)] == ["detection"]


# The model --------------------------------------------------------------------------------


def detector():
    """A detector with a grid of 2 x 2 patches whose heads begin at random."""
    size = dict(width=16, depth=1, heads=2)
    text = common.TextTransformer(vocab_size=80, context=12, **size)
    complete = type("Detector", (sparc.Detector, common.ModelDefaults), {})
    model = complete(sparc.DetectorConfig(8), common.ViT(16, 8, **size), text, 16, 16)
    model.match = evaluation.match
    for p in (*model.class_head.parameters(), *model.box_head.parameters()):
        torch.nn.init.normal_(p, std=0.3)
    return model


def world_batch(rows=slice(None)):
    """Images of up to 7 objects, more than patches, and all that training asks for."""
    world = common.World(size=16, objects=7, small=0.14, large=0.2)
    tokenizer = common.WordPiece(common.train_wordpiece(world.queries, 80))
    sample = world.sample(8, "train", 0)
    batch = common.box_batch(common.world_boxes(sample)[rows], world, tokenizer, 12, others=99)
    return batch | {"images": sample["images"][rows]}


def test_two_halves_of_a_batch_are_the_whole_and_the_heads_and_the_image_tower_learn():
    model = detector()
    whole = model(world_batch())
    parts = [model(world_batch(slice(i, i + 4)))["loss"] for i in (0, 4)]
    expected = torch.autograd.grad(whole["loss"], model.box_head[0].weight, retain_graph=True)
    found = torch.autograd.grad(sum(parts) / 2, model.box_head[0].weight)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert sum(parts).item() / 2 == pytest.approx(whole["loss"].item(), rel=1e-5)
    logged = [whole[name].item() for name in ("class", "l1", "giou")]
    assert sum(logged) == pytest.approx(whole["loss"].item())
    whole["loss"].backward()
    for name, p in model.named_parameters():
        frozen = name.startswith(("text_encoder.", "g_t."))
        assert (p.grad is None) if frozen else (p.grad.abs().max() > 0), name


def test_a_batch_without_any_box_has_a_class_loss_alone():
    world = common.World(size=16)
    tokenizer = common.WordPiece(common.train_wordpiece(world.queries, 80))
    batch = common.box_batch([boxes_of(), boxes_of()], world, tokenizer, 12)
    out = detector()(batch | {"images": torch.randn(2, 3, 16, 16)})
    assert out["class"] > 0 and out["l1"] == 0 and out["giou"] == 0


# Training ---------------------------------------------------------------------------------

FLAGS = "--method detector --batch 4 --steps 4 --log-every 1 --warmup 1 --lr 0.01 --finetune"


def test_a_detector_begins_with_a_runs_towers_and_has_its_settings(tmp_path, run_of):
    base, out = run_of("sparc"), tmp_path / "detector"
    train_until(1, [*FLAGS.split(), base, "--lr", 0, "--out", out, "--image-size", 32,
                    "--data", "shapes:size=32"])
    args, theirs, ours = common.read_config(out), weights(base), weights(out)
    assert args["image_encoder"] == common.read_config(base)["image_encoder"]
    assert args["embed_dim"] == 128 and args["image_size"] == 32
    assert (out / "vocab.txt").read_text() == (base / "vocab.txt").read_text()
    same = [name for name in ours if name in theirs and torch.equal(ours[name], theirs[name])]
    buffers = {name for name in ours if "running" in name or "num_batches" in name}
    places = {"image_encoder.pos"}  # interpolated
    assert {name for name in theirs if "_encoder." in name or "g_t" in name} - buffers - places == {
        *same} - buffers
    assert ours["image_encoder.pos"].shape[1] == 16


@pytest.mark.parametrize("flags", ["", "--workers 2 --batch 2 --data boxes.json --image-size 16"])
def test_a_stopped_detector_continues_bit_for_bit_and_is_evaluated(
        tmp_path, monkeypatch, run_of, flags):
    monkeypatch.chdir(tmp_path)
    write_coco(tmp_path)
    flags = [*FLAGS.split(), run_of("sparc"), "--data", "shapes:size=16", *flags.split()]
    train.main([*map(str, flags), "--out", "whole"])
    train_until(2, [*flags, "--out", "stopped"])
    train_alone(["--resume", "--out", "stopped"])
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")
    record = read_log(tmp_path / "whole")[-1]
    parts = record["class"] + record["l1"] + record["giou"]
    assert record["loss"] == pytest.approx(parts, rel=1e-4)
    result = json.loads((tmp_path / "whole" / "eval.json").read_text())
    assert 0 <= result["detection/AP"] <= result["detection/AP50"] <= 1
    evaluation.main(["whole", "--task", "detection", "--data", "boxes.json"])
    again = json.loads((tmp_path / "whole" / "evals.jsonl").read_text().splitlines()[-1])
    assert "detection/AP" in again and "detection/AP_rare" not in again


@pytest.mark.parametrize("flags, message", [
    ("--method detector", "--finetune None must be a run of --method sparc"),
    ("--method detector --data shapes --finetune BAM", "bam must be a run of --method sparc"),
    ("--method detector --finetune RUN --data table.csv", "table.csv is no JSON of boxes"),
    ("--method detector --finetune RUN --data shapes --embed-dim 64",
     "leave out --text-encoder and --embed-dim"),
    ("--method detector --finetune nowhere", "nowhere holds no run")])
def test_what_a_detector_needs_is_said(tmp_path, monkeypatch, run_of, flags, message):
    monkeypatch.chdir(tmp_path)
    flags = flags.replace("RUN", str(run_of("sparc"))).replace("BAM", str(run_of("bam")))
    with pytest.raises(UserError, match=message):
        train.main([*flags.split(), "--out", "out"])


def test_a_model_that_detects_nothing_is_refused_on_boxes(tmp_path, run_of):
    with pytest.raises(UserError, match="nothing to evaluate in the default tasks"):
        evaluation.main([str(run_of("sparc")), "--data", write_coco(tmp_path)])


def test_the_dry_run_of_a_detector(capsys, run_of):
    train.main(["--method", "detector", "--data", "shapes", "--finetune",
                str(run_of("sparc")), "--dry-run"])
    record = json.loads(capsys.readouterr().out)
    assert record["params"] > 0 and record["update_flops"] is None
