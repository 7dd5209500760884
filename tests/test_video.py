"""Video: J and F of masks, propagation, DAVIS's folders, the world's moving shapes."""

import io
import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import common
import eval as evaluation
from common import UserError, World
from helpers import picture, write_files

RED, BLUE, GREY = (255, 0, 0), (0, 0, 255), (90, 90, 90)


def square(top, left, side=4, size=(10, 10)):
    mask = torch.zeros(*size, dtype=torch.bool)
    mask[top : top + side, left : left + side] = True
    return mask


def literal_f(predicted, truth):
    """F of two masks, pixel by pixel, as davis2017-evaluation defines it."""
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

    def near(pixel, others):
        return any((pixel[0] - r) ** 2 + (pixel[1] - c) ** 2 <= radius**2 for r, c in others)

    p, t = contour(predicted.tolist()), contour(truth.tolist())
    if not p or not t:
        return float(not p and not t)
    precision = sum(near(pixel, t) for pixel in p) / len(p)
    recall = sum(near(pixel, p) for pixel in t) / len(t)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def test_j_and_f_of_a_shifted_square_and_of_empty_masks():
    """A contour of 16 pixels, two columns beside it another: ten of each are a pixel apart."""
    truth, shifted, empty, full = square(2, 2), square(2, 4), square(0, 0, 0), square(0, 0, 10)
    pairs = [(truth, truth), (shifted, truth), (empty, truth), (truth, empty), (empty, empty),
             (full, full), (full, empty)]
    predicted, truths = map(torch.stack, zip(*pairs))
    j, f = evaluation.jaccard(predicted, truths), evaluation.contour_accuracy(predicted, truths)
    torch.testing.assert_close(j, torch.tensor([1, 1 / 3, 0, 0, 1, 1, 0]))
    torch.testing.assert_close(f, torch.tensor([1, 10 / 16, 0, 0, 1, 1, 1]))


@pytest.mark.parametrize("size", [(9, 14), (90, 100)])                      # disks of 1 and 2
def test_f_is_the_official_one(size):
    predicted, truth = (torch.rand(3, *size) > 0.98 for _ in range(2))
    predicted[0, 3:6, 4:9], truth[0, 2:5, 6:10] = True, True
    found = evaluation.contour_accuracy(predicted, truth)
    expected = torch.tensor([literal_f(*pair) for pair in zip(predicted, truth)])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("T", [1, 2, 9])
def test_squares_that_move_a_patch_a_frame_are_exact_in_every_frame(T):
    maps = torch.zeros(6, 3, 7, 9)
    for t in range(6):
        maps[t, 1, 1:3, t : t + 3] = maps[t, 2, 3 + t // 2 : 5 + t // 2, 6:9] = 1
        maps[t, 0] = 1 - maps[t].sum(0)
    maps = maps.flatten(2)                                                  # (f, C, P)
    found = evaluation.propagate(maps.transpose(1, 2), maps[0], (7, 9), T)
    torch.testing.assert_close(found, maps, rtol=0, atol=1e-5)


def test_what_is_out_of_reach_is_not_found():
    """One patch jumps by two: within a radius of 2 it is found, within 1 the nearest k count."""
    x = torch.eye(2)[torch.tensor([[0, 1, 0, 0, 0], [0, 0, 0, 1, 0]])]      # (2, 5, 2)
    for radius, expected in ((2, [0, 0, 0, 1, 0]), (1, [0, 0, 0, 0, 0])):
        found = evaluation.propagate(x, x[0].T, (1, 5), 7, k=1, radius=radius)
        assert found[1, 1].tolist() == expected


def test_propagation_is_that_of_a_literal_loop():
    x, first, (height, width) = torch.randn(5, 12, 3).double(), torch.rand(2, 12).double(), (3, 4)
    expected = [first]
    for t in range(1, 5):
        labels = torch.zeros(2, 12).double()
        for p in range(12):
            scored = []
            for s in {0, t - 2, t - 1} & set(range(t)):
                for q in range(12):
                    apart = abs(p // width - q // width), abs(p % width - q % width)
                    if max(apart) <= 1:
                        cosine = torch.cosine_similarity(x[t, p], x[s, q], 0)
                        scored.append((cosine.item(), expected[s][:, q]))
            best = sorted(scored, key=lambda pair: -pair[0])[:3]
            weights = [math.exp(cosine / 0.2) for cosine, _ in best]
            labels[:, p] = sum(w * label for w, (_, label) in zip(weights, best)) / sum(weights)
        expected.append(labels)
    found = evaluation.propagate(x, first, (height, width), 2, k=3, radius=1, tau=0.2)
    torch.testing.assert_close(found, torch.stack(expected))


def test_maps_are_stretched_before_the_strongest_wins():
    """An object that has become faint, .3 at most, is stretched to 1. One that is everywhere is
    not, and wins."""
    faint = torch.tensor([[1, 0.7, 0.7, 1, 1], [0, 0.3, 0.3, 0, 0]])        # (C, P)
    assert evaluation.to_ids(faint, (1, 5), 2, (4, 10))[0].tolist() == [0, 0, *4 * [1], *4 * [0]]
    alone = torch.tensor([[0.0, 0], [1, 1]])
    assert evaluation.to_ids(alone, (1, 2), 2, (3, 3)).unique().tolist() == [1]


class Colours(nn.Module):
    """An encoder whose tokens say what colour is in a patch, behind a [CLS] token."""

    image_size, grid = 160, 2  # patches of 80 pixels

    def forward(self, images):
        x = nn.functional.avg_pool2d(common.denormalize(images), 80).flatten(2).transpose(1, 2)
        known = torch.tensor([RED, BLUE, GREY]) / 255
        tokens = torch.eye(3)[torch.cdist(x, known[None]).argmin(-1)]       # (B, P, 3)
        return torch.cat([torch.rand(len(x), 1, 3), tokens], 1)


def colours():
    encoder = Colours()
    model = SimpleNamespace(eval=lambda: None, evaluated=lambda: encoder, encode_image=True)
    return evaluation.Embedder(model, None, None, 160)


def write_video(root, name, ids):
    """Maps (f, H, W) -> a video in DAVIS's layout: 1 is drawn in red, 2 in blue."""
    colour = np.array([GREY, RED, BLUE, *253 * [GREY]], np.uint8)
    for t, truth in enumerate(np.asarray(ids, np.uint8)):
        frame, mask, png = Image.fromarray(colour[truth]), Image.fromarray(truth), io.BytesIO()
        mask.putpalette(list(range(256)) * 3)
        mask.save(png, "PNG")
        jpeg = io.BytesIO()
        frame.save(jpeg, "JPEG", quality=95)
        write_files(root, {f"JPEGImages/480p/{name}/{t:05}.jpg": jpeg.getvalue(),
                           f"Annotations/480p/{name}/{t:05}.png": png.getvalue()})
    write_files(root, {"ImageSets/2017/val.txt": f"{name}\n"})


def moving_squares():
    """Five maps (60, 120): 1 moves by 10 pixels, a patch, a frame; 2 stands still and is hidden in
    the third frame; 255 does not count."""
    ids = np.zeros((5, 60, 120), np.uint8)
    for t in range(5):
        ids[t, 10:30, 10 * (t + 1) : 10 * (t + 3)] = 1
    ids[:, 30:50, 90:110], ids[2, 30:50, 90:110], ids[:, 50:, :10] = 2, 0, 255
    return ids


def opened(path, **flags):
    args = SimpleNamespace(data="shapes", image_root=None, workers=0)
    options = evaluation.options_of(dict(data=str(path), **flags), args)
    return evaluation.open_eval_set(options, 160, captions=False), options


def test_an_object_of_a_video_in_davis_folders(tmp_path, capsys):
    """Enlarged maps have round corners, of each 4 + 3 + 2 + 1 of a square's 400 pixels are lost;
    where an object is hidden, and nothing is found, J and F are 1."""
    write_video(tmp_path, "squares", moving_squares())
    data, options = opened(tmp_path, frames="1,7")
    assert options.split == "val" and options.tasks is None                 # it is all there is
    result = evaluation.evaluate(colours(), data, options)
    truth, steps = square(10, 10, 20, (60, 120)), torch.arange(20)
    to_edge = torch.minimum(steps, steps.flip(0))
    cut = truth.clone()
    cut[10:30, 10:30] = to_edge[:, None] + to_edge >= 4
    assert truth.sum() - cut.sum() == 40
    f = literal_f(cut, truth)
    assert 0.9 < f < 1
    for T in (1, 7):
        assert result[f"video/T{T}/J"] == pytest.approx((0.9 + (0.9 + 1 + 0.9) / 3) / 2)
        assert result[f"video/T{T}/F"] == pytest.approx((f + (f + 1 + f) / 3) / 2)
        both = (result[f"video/T{T}/J"] + result[f"video/T{T}/F"]) / 2
        assert result[f"video/T{T}"] == pytest.approx(both)
    assert len(result) == 6
    path = tmp_path / "JPEGImages/480p/squares/00003.jpg"
    path.write_bytes(b"no image")
    write_video(tmp_path, "still", 3 * [truth])
    write_files(tmp_path, {"ImageSets/2017/val.txt": "squares\nstill\nis not there\n"})
    found = evaluation.evaluate(colours(), *opened(tmp_path, frames="7", limit=2))
    assert found["video/T7/J"] == pytest.approx((0.9 + 0.95 + 0.9) / 3)     # of three objects
    assert "skipped 1 of 5" in capsys.readouterr().out


@pytest.mark.parametrize("size, patch, expected", [
    ((854, 480), 16, (480, 832)), ((480, 854), 8, (832, 480)), ((1280, 720), 14, (476, 826)),
    ((480, 480), 32, (480, 480))])
def test_frames_are_as_large_as_in_dinos_code(tmp_path, size, patch, expected):
    write_video(tmp_path, "a", np.zeros((1, *size[::-1])))
    image, ids = opened(tmp_path)[0].read(tmp_path / "JPEGImages/480p/a/00000.jpg", patch)
    assert image.shape == (3, *expected) and ids.shape == size[::-1]


@pytest.mark.parametrize("files, flags, error", [
    ({}, dict(split="test-dev"), "has no split test-dev; --split can be val"),
    ({"ImageSets/2017/val.txt": "b"}, {}, "video b has 0 frames .* 3 or more"),
    ({"ImageSets/2017/test-dev.txt": "c"}, dict(split="test-dev"), "video c has 1 frames .* 3 or"),
    ({"Annotations/480p/a/00001.png": picture(format="PNG")}, {}, "a/00001.png is no map of class"),
])
def test_errors_of_davis_folders(tmp_path, files, flags, error):
    write_video(tmp_path, "c", np.ones((4, 20, 20)))
    for t in (1, 2, 3):
        (tmp_path / f"Annotations/480p/c/{t:05}.png").unlink()
    write_video(tmp_path, "a", np.ones((3, 20, 20)))
    write_files(tmp_path, files)
    with pytest.raises(UserError, match=error):
        evaluation.evaluate(colours(), *opened(tmp_path, tasks=["video"], **flags))


def test_the_worlds_shapes_move_on_straight_lines_and_turn_back_at_the_edges():
    world = World(size=96, objects=1, noise=0)
    scene = world.scenes(20, "test", torch.Generator().manual_seed(0))
    scene["shape"][:] = common.SHAPE_NAMES.index("square")
    images, ids = world.video(scene, 30, torch.Generator().manual_seed(0))
    assert images.shape == (30, 20, 3, 96, 96) and ids.shape == (30, 20, 96, 96)
    areas, side = (ids > 0).float().sum((2, 3)), 1.64 * scene["radius"][:, 0]
    assert ((areas.sqrt() - side).abs() < 1).all()                          # all of it is seen
    pixels = torch.arange(96) + 0.5
    centres = torch.stack([((ids > 0) * pixels).sum((2, 3)) / areas,
                           ((ids > 0) * pixels[:, None]).sum((2, 3)) / areas], -1)
    torch.testing.assert_close(centres[0], scene["centre"][:, 0], atol=0.6, rtol=0)
    steps = centres.diff(dim=0)                                             # (f - 1, B, 2)
    speed = steps.abs().median(0).values
    assert 0 < speed.max() < 0.04 * 96 + 0.6 and speed.max() > 2
    turned = steps.sign().diff(dim=0).abs() > 1
    assert turned[:, speed > 3].any() and not turned[:, speed < 1].any(0).all()
    straight = (steps.abs() - speed).abs() < 1.1
    assert (straight.float().mean(0) > 0.8).all() and (steps.abs() < speed + 1.1).all()
    background = images[0].masked_fill((ids > 0).any(0)[:, None], 0)
    for t in range(30):                                                     # it stands still
        shown = images[t].masked_fill((ids > 0).any(0)[:, None], 0)
        assert (shown - background).abs().median() == 0
    colour = torch.stack([images[t][0][:, ids[t, 0] > 0].median(1).values for t in (0, 29)])
    torch.testing.assert_close(colour[0], colour[1])


@pytest.mark.parametrize("name", ["sparc", "bam"])
def test_videos_of_the_world(run_of, tmp_path, name):
    run = shutil.copytree(run_of(name), tmp_path / "run")
    evaluation.main([str(run), "--task", "video", "--frames", "1,39,50"])
    figures = json.loads((run / "evals.jsonl").read_text().splitlines()[-1])
    assert figures["settings"]["frames"] == "1,39,50"
    assert 0 < figures["video/T1"] < 1 and figures["video/T1"] != figures["video/T39"]
    assert figures["video/T50"] == figures["video/T39"]                     # there are 40 frames


def test_a_teacher_is_what_follows(run_of):
    embed, _ = evaluation.load_run(run_of("dino"))
    data = evaluation.WorldSet(World(size=16), "test")
    options = evaluation.Options("shapes", "test", None, "adamw", None, frames="7")
    before = evaluation.video(embed, data, options)
    for p in embed.model.image_encoder.parameters():
        p.data.normal_()
    assert evaluation.video(embed, data, options) == before
    for p in embed.model.teacher.parameters():
        p.data.normal_()
    assert evaluation.video(embed, data, options) != before


@pytest.mark.parametrize("frames", ["0", "7,x", "", "7,,8", "-1"])
def test_frames_that_are_no_numbers_are_refused(frames):
    with pytest.raises(UserError, match="must be like 7,14"):
        evaluation.main(["run", "--frames", frames])
