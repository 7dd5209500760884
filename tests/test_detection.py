"""Open-vocabulary detection: matching, AP, COCO's and LVIS's files, OWL-ViT's heads and losses."""

import itertools
import json
import math
import random

import pytest
import torch
from PIL import Image

import common
import eval as evaluation
import sparc
import train
from common import Boxes, UserError
from helpers import (assert_same_weights, assert_same_with_gradients, read_log, run_ranks,
                     train_alone, train_on_rank, train_until, weights)
from test_eval import Oracle, embedder, opened

A, B = (0, 0, 0, 0.5, 0.5), (0, 0.5, 0.5, 1, 1)  # two boxes of class 0


def boxes_of(*rows, crowd=(), **more):
    """Return the Boxes of rows (class, left, top, right, bottom). crowd: numbers of rows."""
    table = torch.tensor(rows, dtype=torch.float64).view(-1, 5)
    is_crowd = torch.tensor([i in crowd for i in range(len(rows))], dtype=torch.bool)
    return Boxes(table[:, 1:], table[:, 0].long(), is_crowd, **more)


def found_of(*rows):
    """Return what average_precisions needs of rows (score, class, left, top, right, bottom)."""
    table = torch.tensor(rows, dtype=torch.float64).view(-1, 6)
    return table[:, 2:], table[:, 1].long(), table[:, 0]


def literal_iou(a, b, crowd=False):
    """Return the IoU of two boxes, or the share of a in b."""
    both = math.prod(max(0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    sizes = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    return both / (sizes[0] if crowd else sum(sizes) - both)


@pytest.mark.parametrize("digits", [0, 9])
def test_an_assignment_has_the_least_sum_of_all(digits):
    for n, m in itertools.product(range(1, 7), range(1, 7)):
        costs = torch.randn(n, m, dtype=torch.float64).round(decimals=digits)
        if n <= m:
            columns, costs = sparc.assign(costs).tolist(), costs.tolist()
            sums = [sum(costs[i][j] for i, j in enumerate(p))
                    for p in itertools.permutations(range(m), n)]
            assert len({*columns}) == n
            assert sum(costs[i][j] for i, j in enumerate(columns)) == pytest.approx(min(sums))


def test_a_second_box_makes_the_first_change_its_patch_and_padding_gets_patch_0():
    costs = torch.tensor([[[1.0, 2.0, math.nan], [1.0, 10.0, 9.5], [9.0, 9.0, 0.0]]])
    costs[0, 0, 2] = 9
    assert sparc.match(costs, torch.tensor([[True, True, False]])).tolist() == [[1, 0, 0]]


def drawn(seed, lvis):
    """Return found boxes and true boxes of twelve images, in units of 1/128. Scores are tied."""
    rng, truths, found = random.Random(seed), [], []
    for image in range(12):
        rows, guesses = [], []
        for _ in range(rng.randrange(6) if image != 5 else 0):
            x, y, w, h = (rng.randrange(5, 60) / 128 for _ in range(4))
            rows.append((rng.randrange(4), x, y, x + w, y + h))
            for _ in range(rng.randrange(4)):
                moved = (corner + rng.randrange(-2, 3) / 128 for corner in rows[-1][1:])
                c = rows[-1][0] if rng.randrange(5) else rng.randrange(4)
                guesses.append((rng.randrange(1, 11) / 10, c, *moved))
        crowd = [] if lvis else [i for i in range(len(rows)) if rng.randrange(5) == 0]
        more = {"absent": [rng.randrange(4)], "partial": [rng.randrange(4)]} if lvis else {}
        truths.append(boxes_of(*rows, crowd=crowd, **more))
        found.append(found_of(*guesses))
    return found, truths


# by pycocotools 2.0.11 and lvis 0.5.3 for drawn(0, lvis): AP, AP50, AP75, AP of class 0
OFFICIAL = {
    False: [0.403479097909791, 0.6804455445544553, 0.32167216721672165, 0.4007920792079207],
    True: [0.2756270627062706, 0.43193069306930687, 0.29698844884488446, 0.3475907590759076]}


@pytest.mark.parametrize("lvis", [False, True])
def test_average_precision_is_that_of_pycocotools_and_lvis(lvis):
    aps = sparc.average_precisions(*drawn(0, lvis))
    ap = torch.stack([*aps.values()])
    found = [ap.mean(), ap[:, 0].mean(), ap[:, 5].mean(), aps[0].mean()]
    assert [x.item() for x in found] == pytest.approx(OFFICIAL[lvis], abs=1e-12)


def test_of_true_boxes_with_equal_iou_the_last_is_taken():
    """As pycocotools takes it. The first found box lies in the middle of two true boxes, the second
    is the first true box, so both are right up to an IoU of 5 / 7. Above it only the second is."""
    left, right, middle = (0, 0, 0, 6, 8), (0, 2, 0, 8, 8), (0, 1, 0, 7, 8)
    found, truth = found_of((0.9, *middle), (0.8, *left)), boxes_of(left, right)
    for most, low, high in ((100, 1, 51 / 202), (1, 51 / 101, 0)):  # 51 of 101 recalls are reached
        ap, = sparc.average_precisions([found], [truth], most).values()
        assert ap.tolist() == pytest.approx(5 * [low] + 5 * [high])
    with pytest.raises(ValueError, match="zip"):
        sparc.average_precisions([found], [truth, truth])


def write_coco(root, lvis=False, **changes):
    """Write two images, 40 x 20 and 20 x 20, with cats, a crowd of cats and a hot dog."""
    images = [dict(id=7, width=40, height=20), dict(id=3, width=20, height=20)]
    annotations = [dict(id=1, image_id=7, category_id=5, bbox=[10, 5, 20, 10], iscrowd=0),
                   dict(id=2, image_id=3, category_id=2, bbox=[0, 0, 10, 20], iscrowd=0),
                   dict(id=3, image_id=7, category_id=5, bbox=[0, 0, 40, 20], iscrowd=1,
                        segmentation={"counts": "04", "size": [20, 40]})]
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
    data = dict(images=images, annotations=annotations, categories=categories)
    for part, change in changes.items():
        change(data[part])
    (root / "boxes.json").write_text(json.dumps(data))
    return str(root / "boxes.json")


@pytest.mark.parametrize("change", [
    lambda row: row.update(iscrowd=1), lambda row: row.update(bbox=[x / 40 for x in row["bbox"]])])
def test_crowds_alone_and_shares_of_the_sides_are_no_boxes(tmp_path, change):
    file = write_coco(tmp_path, annotations=lambda rows: [*map(change, rows)])
    with pytest.raises(UserError, match="has no box that can be used: 3 are crowds, or not in pix"):
        common.BoxTable(file)


def test_cocos_files_are_read(tmp_path, capsys):
    """A box may reach out of its image, and an image may have no box. Boxes that are two corners
    are told."""
    table = common.open_data(write_coco(tmp_path), content="boxes")
    assert table.names == ["hot dog", "cat", "owl"] and table.queries[2] == "an owl"
    assert table.trained == [0, 1] and not table.skipped and table.content == "boxes"
    first, second = table.value(0), table.value(1)
    assert first.boxes.tolist() == [[0.25, 0.125, 0.75, 0.375], [0, 0, 1, 0.5]]
    assert first.labels.tolist() == [1, 1] and first.crowd.tolist() == [False, True]
    assert first.size == (1, 0.5) and first.absent is None
    assert second.boxes.tolist() == [[0, 0, 0.5, 1]] and second.labels.tolist() == [0]
    assert table.path(1) == str(tmp_path / "000000000003.png") and not capsys.readouterr().out
    table = common.BoxTable(write_coco(tmp_path, annotations=lambda rows: (
        rows[0].update(bbox=[30, 5, 35, 10]), rows.pop(1))))
    assert table.value(0).boxes[0].tolist() == [0.75, 0.125, 1.625, 0.375]
    assert len(table) == 2 and len(table.value(1).labels) == 0 and not table.skipped
    assert "of the boxes of" in capsys.readouterr().out


def test_categories_of_one_name_are_one_class_and_one_without_a_box_is_not_asked_for(tmp_path):
    """Roboflow's files begin with a category above all others, which may have the name of one."""
    table = common.BoxTable(write_coco(tmp_path, categories=lambda rows: rows.extend([
        dict(id=0, name="cat"), dict(id=1, name="animal")])))
    assert table.names == ["cat", "animal", "hot dog", "owl"] and table.trained == [0, 2]
    assert table.value(0).labels.tolist() == [0, 0] and table.value(1).labels.tolist() == [2]


def test_lviss_files_are_read_and_rare_classes_are_not_trained_on(tmp_path):
    file = write_coco(tmp_path, lvis=True)
    table = common.BoxTable(file, tmp_path.parent, "val")
    assert table.rare == [0]
    assert (table.value(0).absent, table.value(0).partial) == ([0], [1])
    assert table.value(1).absent == [] and table.value(1).labels.tolist() == [0]
    assert table.path(0) == str(tmp_path / "000000000007.png")
    train = common.BoxTable(file, tmp_path.parent)
    assert train.trained == [1] and train.value(1).labels.tolist() == []


@pytest.mark.parametrize("change", [
    dict(bbox=[50, 0, 5, 5]), dict(bbox=[-9, 0, 9, 5]), dict(bbox=[1, 1, 0, 5]),
    dict(bbox=[1, 1, -3, 5]), dict(bbox=[1, math.nan, 5, 5]), dict(bbox=[1, 1]), dict(bbox=None),
    dict(image_id=99), dict(category_id=99)])
def test_boxes_that_cannot_be_found_are_left_out_and_counted(tmp_path, capsys, change):
    file = write_coco(tmp_path, annotations=lambda rows: rows[0].update(change))
    [(why, (count, where))] = common.BoxTable(file).skipped.items()
    assert count == 1 and where == f"{file}, annotation 1"
    opened(file, "boxes")
    assert f"left out of {file}: 1 x {why}" in capsys.readouterr().out


def test_an_image_of_another_shape_than_in_the_file_is_refused(tmp_path, capsys):
    """Its boxes would lie elsewhere. write_coco's second image has the sides of the first."""
    common.check_sides(Image.new("RGB", (30, 60)), (15, 30))
    with pytest.raises(ValueError, match="40 x 80 do not fit those of its boxes or map, 1 x 0.5"):
        common.check_sides(Image.new("RGB", (40, 80)), (1, 0.5))
    file = write_coco(tmp_path, images=lambda rows: rows[0].update(height=7 * rows[0]["height"]))
    list(opened(file, "boxes")[0].boxes())
    assert "skipped 1 of 2 images" in capsys.readouterr().out


@pytest.mark.parametrize("changes, named", [
    (dict(categories=lambda rows: rows[0].pop("name")), "'name'"),
    (dict(images=lambda rows: rows[0].pop("width")), "'width'"),
    (dict(images=lambda rows: rows[0].pop("id")), "'id'"),
    (dict(images=lambda rows: rows[0].pop("file_name")), "'coco_url'"),
    (dict(annotations=lambda rows: rows[0].pop("category_id")), "'category_id'"),
    (dict(images=lambda rows: rows[1].update(id=rows[0]["id"])), "two images with the id"),
    (dict(categories=lambda rows: rows[1].update(id=rows[0]["id"])), "two categories with the id"),
    (dict(images=lambda rows: rows.append({**rows[0], "id": 8})), "names 1 files twice")])
def test_files_of_another_form_are_refused_by_name(tmp_path, changes, named):
    file = write_coco(tmp_path, **changes)
    with pytest.raises(UserError, match=f"{file} .*{named}"):
        common.BoxTable(file)


def test_ranks_compare_boxes_and_classes(tmp_path):
    tables = [common.BoxTable(write_coco(tmp_path, **changes)) for changes in (
        {}, dict(annotations=lambda rows: rows[0].update(bbox=[9, 5, 20, 10])),
        dict(categories=lambda rows: rows[0].update(name="dog")))]
    assert len({table.annotations for table in tables}) == 3
    assert len({table.fingerprint for table in tables}) == 1


def test_an_image_is_padded_to_a_square_to_the_right_or_below():
    x = common.squared(Image.new("RGB", (40, 20), "red"), 8)
    assert (x[:, :4] == torch.tensor([255, 0, 0]).view(3, 1, 1)).all() and (x[:, 4:] == 128).all()
    assert (common.squared(Image.new("RGB", (1, 900), "red"), 8)[:, :, 1:] == 128).all()


def test_boxes_move_with_crops_and_flips():
    """The box of a red rectangle is that of its red pixels. A crowd is left out, and so is a box of
    which less than 60 % is left."""
    image = Image.new("RGB", (80, 60))
    image.paste((255, 0, 0), (30, 20, 50, 40))
    truth = boxes_of((4, 30 / 80, 20 / 80, 50 / 80, 40 / 80), (5, 0, 0, 1, 0.75), crowd=[1])
    places = set()
    for seed in range(40):
        torch.manual_seed(seed)
        x, found = common.crop_boxes(image, truth, 64, 0.3)
        red = (x[0] > 128) & (x[1] < 64)
        if not len(found.labels):
            continue
        rows, columns = red.any(1).nonzero()[:, 0], red.any(0).nonzero()[:, 0]
        box = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
        assert found.labels.tolist() == [4]
        assert (found.boxes[0] * 64).tolist() == pytest.approx([*map(float, box)], abs=1.5)
        places.add(round(found.boxes[0][0].item(), 3))
    assert len(places) > 5


def test_a_box_of_which_less_than_60_percent_is_left_is_left_out(monkeypatch):
    crop = 0, 0, 100, 62  # top, left, height, width
    monkeypatch.setattr(common, "random_crop", lambda *_: crop)
    truth = boxes_of((0, 0.4, 0, 0.9, 0.5), (1, 0.3, 0, 0.8, 0.5))          # 44 % and 64 % are left
    found = [common.crop_boxes(Image.new("RGB", (100, 100)), truth, 10, 0.5)[1] for _ in range(50)]
    assert [boxes.labels.tolist() for boxes in found] == [[1]] * 50
    lefts = [round(boxes.boxes[0, 0].item(), 2) for boxes in found]
    assert {*lefts} == {0.3, 0} and 15 < lefts.count(0) < 35                # half are flipped


def test_the_worlds_boxes_hold_the_pixels_of_their_objects():
    sample = common.World(objects=4, small=0.13, large=0.18).sample(20, "test", 0)
    for i, truth in enumerate(common.world_boxes(sample)):
        for k, o in enumerate(sample["objects"][i]):
            rows, columns = (sample["segmentation"][i] == k + 1).nonzero().unbind(1)
            box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert (truth.boxes[k] * 48).round().tolist() == box
            assert evaluation.PAIRS[truth.labels[k]] == f"{o['colour']} {o['shape']}"
        assert len(truth.labels) == len(sample["objects"][i])


def tokenizer_of(world):
    return common.WordPiece(common.train_wordpiece(world.queries, 100))


def test_an_image_asks_for_its_classes_and_others_and_overlapping_boxes_are_one():
    world = common.World(palette=6, heldout=4)
    assert world.trained == [c for c in range(48) if c not in (1, 12, 23, 26)]  # held-out pairs
    truths = [boxes_of((3, 0, 0, 0.5, 0.5), (9, 0, 0, 1, 1), (5, 0, 0, 0.5, 0.49)),
              boxes_of(absent=[7, 2])]
    tokenizer = tokenizer_of(world)
    batch = common.box_batch(truths, world, tokenizer, 12, others=4)
    assert batch["asked"].sum(1).tolist() == [7, 4] and batch["asked"].any(0).all()
    queries = tokenizer.batch(world.queries, 12)[0].tolist()
    ids = [queries.index([*row, *[0] * 12][: len(queries[0])]) for row in batch["tokens"].tolist()]
    assert ids == sorted({*ids}) and {2, 7} <= {*ids}
    assert [c for c, asked in zip(ids, batch["asked"][1]) if asked and c in (2, 7)] == [2, 7]
    named = [[ids[q] for q in row.nonzero()[:, 0]] for row in batch["classes"][0]]
    assert named == [[3, 5], [9]] and not batch["classes"][1].any()
    assert batch["boxes"].shape == (2, 2, 4) and batch["boxes"][0, 1].tolist() == [0, 0, 1, 1]
    asked = common.box_batch(truths, world, tokenizer, 12, others=99)["asked"]
    assert asked.shape[1] == len({*world.trained, 3, 5, 9})


def test_losses_and_gradients_equal_literal_loops():
    def focal(x, is_there, alpha=0.3):
        p = 1 / (1 + (-x).exp())
        return -alpha * (1 - p)**2 * p.log() if is_there else -(1 - alpha) * p**2 * (1 - p).log()

    def giou(a, b):
        around = math.prod(max(a[i + 2], b[i + 2]) - min(a[i], b[i]) for i in (0, 1))
        sizes = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
        either = sum(sizes) / (1 + literal_iou(a, b))
        return literal_iou(a, b) - (around - either) / around

    def edges(box):
        return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2, box[2] - box[0], box[3] - box[1]

    corner = 0.6 * torch.rand(3, 9, 2, dtype=torch.float64)
    boxes = torch.cat([corner, corner + 0.05 + 0.3 * torch.rand(3, 9, 2)], -1)
    truth, boxes = boxes[:, :3], boxes[:, 3:].clone().requires_grad_()  # 3 true, 6 patches
    logits = torch.randn(3, 6, 4, dtype=torch.float64, requires_grad=True)
    of_box = [[{0}, {1, 3}, {2}], [{1}], []]
    classes = torch.tensor([[[q in of[m] if m < len(of) else False for q in range(4)]
                             for m in range(3)] for of in of_box])
    asked = torch.tensor([[True] * 4, [False, True, True, False], [True, False, False, False]])
    expected = torch.zeros(3, dtype=torch.float64)
    for i, of in enumerate(of_box):
        def cost(patches):
            total = torch.zeros(())
            for m, p in enumerate(patches):
                total += sum(focal(logits[i, p, q], True) - focal(logits[i, p, q], False)
                             for q in of[m])
                total += sum(abs(x - y) for x, y in zip(edges(boxes[i, p]), edges(truth[i, m])))
                total -= giou(boxes[i, p], truth[i, m])
            return total.item()

        best = min(itertools.permutations(range(6), len(of)), key=cost)
        there = {(p, q) for m, p in enumerate(best) for q in of[m]}
        for p, q in itertools.product(range(6), range(4)):
            part = asked[i, q] * focal(logits[i, p, q], (p, q) in there)
            expected[0] += part / max(1, len(there))
        for m, p in enumerate(best):
            expected[1] += (boxes[i, p] - truth[i, m]).abs().sum() / len(of)
            expected[2] += (1 - giou(boxes[i, p], truth[i, m])) / len(of)
    losses = sparc.detection_losses(logits, boxes, asked, classes, truth)
    assert_same_with_gradients(losses, expected / 3, [logits, boxes])


def test_heads_begin_at_their_patches_and_logits_are_shifted_cosines():
    boxes = sparc.patch_boxes(torch.zeros(1, 4, 4))
    torch.testing.assert_close(boxes[0], torch.tensor([
        [0, 0, 0.5, 0.5], [0.5, 0, 1, 0.5], [0, 0.5, 0.5, 1], [0.5, 0.5, 1, 1]]))
    e, queries = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[1.0, 0.0]])
    for scale, factor in ((0.5, 1.5), (-1.0, math.exp(-1))):
        found = sparc.query_logits(e, queries, torch.tensor([[[0.2]]]), torch.tensor([[[scale]]]))
        assert found.item() == pytest.approx((0.6 + 0.2) * factor)


def tiny_detector(name="detector"):
    """Return a detector with 2 x 2 patches, whose heads begin at random."""
    size = dict(width=16, depth=1, heads=2)
    text = common.TextTransformer(vocab_size=100, context=12, **size)
    complete = type("Detector", (sparc.Detector, common.ModelDefaults), {})
    model = complete(sparc.DetectorConfig(8), common.ViT(16, 8, **size), text, 16, 16)
    for p in (*model.class_head.parameters(), *model.box_head.parameters()):
        torch.nn.init.normal_(p, std=0.3)
    return model


def test_a_batch_without_boxes_has_a_loss_of_classes_alone():
    world = common.World(size=16)
    batch = common.box_batch([boxes_of(), boxes_of()], world, tokenizer_of(world), 12)
    model, images = tiny_detector(), torch.randn(2, 3, 16, 16)
    out = model(batch | {"images": images})
    assert out["loss"] == out["class"] > 0 and out["l1"] == out["giou"] == 0
    assert [key for key, value in out.items() if value.requires_grad] == ["loss"]
    mean = model.class_head(model.image_encoder(images)).mean(1)
    expected = torch.stack([row / row.norm() for row in mean])
    torch.testing.assert_close(model.encode_image(images), expected)


def test_the_text_encoder_learns_at_a_25th_of_the_rate():
    model = tiny_detector()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model.before_update(0)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.after_update(0, 1)
    for name, p in model.named_parameters():
        is_text = name.startswith(("text_encoder.", "g_t."))
        change = torch.full_like(p, -0.5 / 25 if is_text else -0.5)
        torch.testing.assert_close(p - before[name], change)


class Finder(Oracle):
    """A model that finds the given boxes: image i has the pixels i, class c the embedding e_c."""

    def __init__(self, truths):
        self.truths = truths

    def detect(self, images, queries):
        assert torch.equal(queries, torch.eye(3))
        logits, boxes = torch.full((len(images), 4, 3), -9.0), torch.zeros(len(images), 4, 4)
        for row, i in enumerate(images[:, 0, 0, 0].int().tolist()):
            for k, (box, c) in enumerate(zip(*self.truths[i - 4][:2])):
                logits[row, k, c], boxes[row, k] = 5.0 - i, box
        return logits, boxes


def test_the_task_by_hand(monkeypatch):
    """Class 2 is rare. Another model finds the boxes of the second image in the third."""
    truths = [boxes_of(A, (2, 0, 0, 1, 0.75), size=(1, 0.75)), boxes_of((1, *B[1:])), boxes_of()]
    classes = evaluation.Classes(["red", "green", "blue"], ["{}"])
    data = evaluation.EvalSet(classes=classes, rare_classes=[2])
    filled = lambda value: torch.full((3, 8, 8), value, dtype=torch.uint8)
    data.boxes = lambda: [(filled(4 + i), t) for i, t in enumerate(truths)]
    too_high = boxes_of(A, (2, 0, 0, 1, 1))  # reaches into the padding, which is cut off
    for model in (truths, [too_high, *truths[1:]]):
        result = evaluation.detection(embedder(Finder(model)), data, None)
        assert result.pop("detection/images") == 3
        assert {name: x.item() for name, x in result.items()} == {
            f"detection/{name}": pytest.approx(1) for name in ("AP", "AP50", "AP75", "AP_rare")}
    wrong = Finder([truths[0], truths[2], truths[1]])
    result = evaluation.detection(embedder(wrong), data, None)
    assert result["detection/AP"].item() == pytest.approx(2 / 3)
    data.boxes = lambda: [(filled(4), boxes_of((2, 0, 0, 1, 1)))]
    result = evaluation.detection(embedder(Finder([boxes_of((2, 0, 0, 1, 0.72))])), data, None)
    found = [result[f"detection/{name}"].item() for name in ("AP", "AP50", "AP75")]
    assert found == [pytest.approx(0.5), 1, 0]                              # an IoU of .72
    for absent, k in ((None, 100), ([], 300)):                          # COCO's, LVIS's limit
        data.boxes = lambda: [(filled(4), boxes_of(A, absent=absent))]
        with monkeypatch.context() as patch:
            patch.setattr(sparc, "average_precisions", lambda found, truths, most: {
                0: torch.full((10,), float(most))})
            assert evaluation.detection(embedder(wrong), data, None)["detection/AP"] == k


FLAGS = "--method detector --batch 4 --steps 4 --log-every 1 --warmup 1 --lr 0.01 --finetune"
FILE = " --image-size 16 --crop-scale 0.5 --data boxes.json --workers "


def test_a_detector_begins_with_the_encoders_and_the_vocabulary_of_its_run(tmp_path, run_of):
    base, out = run_of("sparc"), tmp_path / "detector"
    train_alone([*FLAGS.split(), base, "--lr", 0, "--steps", 1, "--out", out, "--image-size", 32,
                 "--data", "shapes:size=32"])
    config, old = (common.read_config(run) for run in (out, base))
    assert [config[name] == old[name] for name in ("image_encoder", "text_encoder")] == [True] * 2
    assert (out / "vocab.txt").read_text() == (base / "vocab.txt").read_text()
    theirs, ours = weights(base), weights(out)
    kept = {name for name in theirs if name.startswith(("image_encoder.", "text_encoder.", "g_t."))}
    changed = {name for name in kept if not torch.equal(ours[name], theirs[name])}
    statistics = {name for name in kept if "running" in name or "batches" in name}
    assert changed == {"image_encoder.pos", *statistics}
    assert ours["image_encoder.pos"].shape[1] == 16                         # interpolated


@pytest.mark.parametrize("flags, ranks", [
    ("--data shapes:size=16", 1), (FILE + "0", 1), (FILE + "2 --batch 2", 1),
    pytest.param(FILE + "0", 2, marks=pytest.mark.ranks)])
def test_a_resumed_detector_equals_an_uninterrupted_one_and_is_evaluated(
        tmp_path, run_of, flags, ranks):
    flags = flags.replace("boxes.json", write_coco(tmp_path))
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    begin = [*FLAGS.split(), str(run_of("sparc")), *flags.split(), "--out"]
    if ranks > 1:
        for flags, step in (([*begin, whole], None), ([*begin, stopped], 2),
                            (["--resume", "--out", stopped], None)):
            run_ranks(tmp_path, train_on_rank, 2, flags, step)
        return assert_same_weights(whole, stopped)
    train.main([*begin, str(whole)])
    train_until(2, [*begin, stopped])
    train_alone(["--resume", "--out", stopped])
    assert_same_weights(whole, stopped)
    record = read_log(whole)[-1]
    assert record["loss"] == pytest.approx(sum(record[part] for part in ("class", "l1", "giou")))
    result = json.loads((whole / "eval.json").read_text())
    assert 0 <= result["detection/AP"] <= result["detection/AP50"] <= 1
    assert ("detection/AP_rare" in result) == ("shapes" in flags)
    evaluation.main([str(whole), "--data", write_coco(tmp_path)])
    again = json.loads((whole / "evals.jsonl").read_text().splitlines()[-1])
    assert "detection/AP" in again and again["settings"]["class_names"].endswith("boxes.json")


def test_the_dry_run_and_the_preset_of_the_paper(capsys, run_of):
    train.main(["--method", "detector", "--data", "shapes:size=16", "--finetune",
                str(run_of("sparc")), "--dry-run"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["flops_per_sample"] > 0
    args = train.parse_args("--method detector --preset b16".split())
    assert (args.batch, args.steps, args.lr, args.warmup, args.weight_decay, args.beta2,
            args.clip_grad, args.drop_path, args.crop_scale) == (
                256, 140_000, 5e-5, 1000, 0, 0.999, 1, 0.2, 0.3)
