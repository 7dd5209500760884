"""Video: J and F of masks, propagation of labels, DAVIS's folders."""

import io
import math
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import bam
import common
import eval as evaluation
from common import UserError
from helpers import picture, write_files
from test_eval import opened

RED, BLUE, GREY = (255, 0, 0), (0, 0, 255), (90, 90, 90)


def square(top, left, side=4, size=(10, 10)):
    """Return a mask of a square."""
    mask = torch.zeros(*size, dtype=torch.bool)
    mask[top : top + side, left : left + side] = True
    return mask


def literal_f(predicted, truth):
    """Return F of two masks, pixel by pixel, as davis2017-evaluation defines it."""
    height, width = truth.shape
    radius = math.ceil(0.008 * (height**2 + width**2) ** 0.5)

    def contour(mask):
        found = []
        for r in range(height):
            for c in range(width):
                around = [(r, c + 1), (r + 1, c), (r + 1, c + 1)]
                if r == height - 1:
                    around = [(r, c + 1)]
                elif c == width - 1:
                    around = [(r + 1, c)]
                inside = [(y, x) for y, x in around if y < height and x < width]
                if any(mask[y][x] != mask[r][c] for y, x in inside):
                    found.append((r, c))
        return found

    def is_near(pixel, others):
        return any((pixel[0] - r) ** 2 + (pixel[1] - c) ** 2 <= radius**2 for r, c in others)

    p, t = contour(predicted.tolist()), contour(truth.tolist())
    if not p or not t:
        return float(not p and not t)
    precision = sum(is_near(pixel, t) for pixel in p) / len(p)
    recall = sum(is_near(pixel, p) for pixel in t) / len(t)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def test_j_and_f_of_a_shifted_square_and_of_empty_masks():
    """A contour has 16 pixels. Ten of them are a pixel away from a contour two columns beside."""
    truth, shifted, empty, full = square(2, 2), square(2, 4), square(0, 0, 0), square(0, 0, 10)
    pairs = [(truth, truth), (shifted, truth), (empty, truth), (truth, empty), (empty, empty),
             (full, full), (full, empty)]
    predicted, truths = map(torch.stack, zip(*pairs))
    j, f = bam.jaccard(predicted, truths), bam.contour_accuracy(predicted, truths)
    torch.testing.assert_close(j, torch.tensor([1, 1 / 3, 0, 0, 1, 1, 0]))
    torch.testing.assert_close(f, torch.tensor([1, 10 / 16, 0, 0, 1, 1, 1]))


@pytest.mark.parametrize("size", [(9, 14), (70, 100), (3, 700)])            # disks of 1, 1, 6
def test_f_is_the_official_one(size):
    predicted, truth = (torch.rand(3, *size) > 0.98 for _ in range(2))
    predicted[0, 3:6, 4:9], truth[0, 2:5, 6:10] = True, True
    found = bam.contour_accuracy(predicted, truth)
    expected = torch.tensor([literal_f(*pair) for pair in zip(predicted, truth)])
    torch.testing.assert_close(found, expected)


def test_propagation_is_that_of_a_literal_loop():
    """Of three frames, of two and of one; in squares of three patches; two patches count."""
    x, first, (height, width) = torch.randn(5, 12, 3).double(), torch.rand(2, 12).double(), (3, 4)
    found = bam.propagate(x, first, (height, width), [1, 2, 3], k=2, radius=1, tau=0.2)
    for T in (1, 2, 3):
        expected = [first]
        for t in range(1, 5):
            labels = torch.zeros(2, 12).double()
            for p in range(12):
                scored = []
                for s in {0, *range(t - T, t)} & set(range(t)):
                    for q in range(12):
                        apart = abs(p // width - q // width), abs(p % width - q % width)
                        if max(apart) <= 1:
                            cosine = torch.cosine_similarity(x[t, p], x[s, q], 0)
                            scored.append((cosine.item(), expected[s][:, q]))
                best = sorted(scored, key=lambda pair: -pair[0])[:2]
                weights = [math.exp(cosine / 0.2) for cosine, _ in best]
                labels[:, p] = sum(w * y for w, (_, y) in zip(weights, best)) / sum(weights)
            expected.append(labels)
        torch.testing.assert_close(found[T], torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_a_patch_of_the_first_frame_has_the_object_at_its_centre(dtype):
    ids = torch.zeros(6, 9, dtype=dtype)
    ids[0, 0] = ids[2, 2] = ids[5, 8] = 1                                   # corners of patches
    ids[1, 4] = ids[4, 7] = 2
    maps = [[1, 0, 1, 1, 1, 0], [0] * 6, [0, 1, 0, 0, 0, 1]]                # (C, P)
    assert bam.first_map(ids, (2, 3)).tolist() == maps


def test_maps_are_stretched_before_the_strongest_wins():
    """An object that has become faint, .3 at most, is stretched to 1. One that is everywhere is
    not, and wins."""
    faint = torch.tensor([[1, 0.7, 0.7, 1, 1], [0, 0.3, 0.3, 0, 0]])        # (C, P)
    assert bam.map_to_ids(faint, (1, 5), 2, (4, 10))[0].tolist() == [0, 0, *4 * [1], *4 * [0]]
    alone = torch.tensor([[0.0, 0], [1, 1]])
    assert bam.map_to_ids(alone, (1, 2), 2, (3, 3)).unique().tolist() == [1]


class Colours(nn.Module):
    """An encoder whose tokens name the colour of a patch, behind a [CLS] token."""

    patch_size, cls = 80, True
    pixels = common.Pixels("")

    def forward(self, images):
        x = nn.functional.avg_pool2d(common.to_unit(images), 80).flatten(2).transpose(1, 2)
        known = torch.tensor([RED, BLUE, GREY]) / 255
        tokens = torch.eye(3)[torch.cdist(x, known[None]).argmin(-1)]       # (B, P, 3)
        return torch.cat([torch.rand(len(x), 1, 3), tokens], 1)


class Model(common.ModelDefaults, nn.Module):
    """A model whose student sees nothing: its teacher follows the objects."""

    image_encoder, encode_image = None, lambda self, images: None

    def __init__(self):
        super().__init__()
        self.teacher = Colours()

    def evaluation_encoder(self):
        return self.teacher


def write_video(root, name, ids):
    """Write maps (f, H, W) as a video in DAVIS's layout: object 1 is red, 2 blue."""
    colours = np.array([GREY, RED, BLUE, *253 * [GREY]], np.uint8)
    for t, truth in enumerate(np.asarray(ids, np.uint8)):
        for kind, image in (("JPEGImages/480p/{}/{:05}.jpg", Image.fromarray(colours[truth])),
                            ("Annotations/480p/{}/{:05}.png", Image.fromarray(truth))):
            if image.mode == "L":
                image.putpalette(list(range(256)) * 3)
            file = io.BytesIO()
            image.save(file, "PNG" if image.mode == "P" else "JPEG", quality=95)
            write_files(root, {kind.format(name, t): file.getvalue()})
    write_files(root, {"ImageSets/2017/val.txt": f"{name}\n"})


def moving_squares():
    """Return five maps (60, 120). Object 1 moves by 10 pixels, a patch, a frame. Object 2 stands
    still and is hidden in the third frame. 255 is background."""
    ids = np.zeros((5, 60, 120), np.uint8)
    for t in range(5):
        ids[t, 10:30, 10 * (t + 1) : 10 * (t + 3)] = 1
    ids[:, 30:50, 90:110], ids[2, 30:50, 90:110], ids[:, 50:, :10] = 2, 0, 255
    return ids


def test_objects_of_a_video_in_davis_folders(tmp_path):
    """Enlarged maps have round corners: 4 + 3 + 2 + 1 of a square's 400 pixels are lost at each.
    Where an object is hidden, and nothing is found, J and F are 1."""
    write_video(tmp_path, "squares", moving_squares())
    data, options = opened(tmp_path)
    embedder = evaluation.Embedder(Model(), None, None, 160)
    assert options.split == "val"
    result = evaluation.evaluate(embedder, data, options)                   # the only usual task
    truth, steps = square(10, 10, 20, (60, 120)), torch.arange(20)
    to_edge = torch.minimum(steps, steps.flip(0))
    cut = truth.clone()
    cut[10:30, 10:30] = to_edge[:, None] + to_edge >= 4
    f = literal_f(cut, truth)
    assert 0.9 < f < 1 and len(result) == 12
    for T in bam.LAST_FRAMES:
        assert result[f"video/T{T}/J"] == pytest.approx((0.9 + (0.9 + 1 + 0.9) / 3) / 2)
        assert result[f"video/T{T}/F"] == pytest.approx((f + (f + 1 + f) / 3) / 2)
        both = (result[f"video/T{T}/J"] + result[f"video/T{T}/F"]) / 2
        assert result[f"video/T{T}"] == pytest.approx(both)
    # other numbers for the objects, and one that the first map lacks, change nothing
    ids = np.array([0, 3, 9])[moving_squares() % 255]
    ids[3, :5, :5] = 5
    for i, truth in enumerate(ids.astype(np.uint8)):
        Image.fromarray(truth).save(tmp_path / f"Annotations/480p/squares/{i:05}.png")
    assert evaluation.evaluate(embedder, *opened(tmp_path)) == result
    write_files(tmp_path, {"ImageSets/2017/val.txt": "squares\n\nsquares\n"})
    assert len([*opened(tmp_path)[0].videos(80)]) == 1                      # listed twice
    shutil.copytree(tmp_path / "JPEGImages/480p/squares", tmp_path / "JPEGImages/480p/a b")
    shutil.copytree(tmp_path / "Annotations/480p/squares", tmp_path / "Annotations/480p/a b")
    write_files(tmp_path, {"ImageSets/2017/val.txt": "squares\na b\n"})
    assert len([*opened(tmp_path)[0].videos(80)]) == 2
    assert len([*opened(tmp_path, limit=1)[0].videos(80)]) == 1


@pytest.mark.parametrize("size, patch, expected", [
    ((854, 480), 16, (480, 832)), ((480, 854), 8, (832, 480)), ((1280, 720), 14, (476, 826)),
    ((480, 480), 32, (480, 480))])
def test_frames_are_as_large_as_in_dinos_code(tmp_path, size, patch, expected):
    Image.new("RGB", size).save(tmp_path / "0.jpg")
    images = [*evaluation.read_frames(2 * [(tmp_path / "0.jpg", None)], size, patch)]
    assert [image.shape for image in images] == 2 * [(3, *expected)]


SMALL_MAP = picture(20, 10, "L", "PNG", 1)
MAPS = [f"Annotations/480p/a/{t:05}.png" for t in range(3)]


@pytest.mark.parametrize("files, flags, error", [
    ({}, dict(split="test-dev"), "has no split test-dev: give --split, one of train, val"),
    ({MAPS[1]: None}, {}, "The video a needs at least three frames.* 3 frames, .* 2 maps"),
    ({"JPEGImages/480p/a/00002.jpg": None}, {}, "The video a needs .* 2 frames, .* 3 maps"),
    ({MAPS[2]: None, "JPEGImages/480p/a/00002.jpg": None}, {}, "The video a needs at least three"),
    ({MAPS[0]: picture(20, 20, "L", "PNG", 255)}, {}, "a needs .* objects 1, 2, .*not 255"),
    ({name: SMALL_MAP for name in MAPS}, {}, "00000.jpg cannot be read: its sides 20 x 20 do not fit"),
    ({"Annotations/480p/a/00001.png": picture(20, 20, format="PNG")}, {}, "a/00001.png is no map of class"),
    ({"Annotations/480p/a/00001.png": SMALL_MAP}, {},
     "a/00001.png cannot be read: its size is not that of the first map, .*a/00000.png"),
    ({"JPEGImages/480p/a/00002.jpg": "no image"}, {}, "a/00002.jpg .*cannot be read"),
    ({"Annotations/480p/a/00002.png": "no map"}, {}, "map .*a/00002.png cannot be read")])
def test_errors_of_davis_folders_name_the_file(tmp_path, files, flags, error):
    write_video(tmp_path, "a", np.ones((3, 20, 20)))
    write_files(tmp_path, {"ImageSets/2017/train.txt": "a\n"})
    for name, data in files.items():
        (tmp_path / name).unlink()
        if data:
            write_files(tmp_path, {name: data})
    with pytest.raises(UserError, match=error):
        data, _ = opened(tmp_path, **flags)
        for frames, _ in data.videos(16):
            [*frames()]
