"""The data set `shapes`: its captions, labels, segmentations and negatives fit its scenes.

A parser, written for these tests, reads a caption and compares it with the objects of a scene.
Further tests check that no two splits share a scene, and that a SPEC sets the world's fields.
"""

import itertools
import random
import re
from collections import Counter

import pytest
import torch

import common
from common import (COLOUR_NAMES, COLOURS, RELATIONS, SHAPE_NAMES, UserError, World,
                    open_data)

NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7}
SHAPE_WORDS = "|".join(SHAPE_NAMES)
NOUN = rf"an? (?:(small|large) )?(?:({'|'.join(COLOURS)}) )?({SHAPE_WORDS})"
PLURAL = rf"({'|'.join(NUMBERS)}) (?:({'|'.join(COLOURS)}) )?({SHAPE_WORDS})e?s"
OPENING, CLOSING = ("|".join(filter(None, words)) for words in (common.OPENINGS, common.CLOSINGS))
FILLER = rf"\b({OPENING}|{CLOSING})\b"
RGB = torch.tensor(list(COLOURS.values()))


def parse(caption):
    """Caption -> the objects that it describes, and their relations.

    An object is (size, colour, shape), with None for what the caption does not say. A relation is
    (i, words, j): object i stands "left of" object j.
    """
    caption = re.sub(f"^({OPENING}) | ({CLOSING})$", "", caption)
    described, relations = [], []
    for phrase in re.split(r" and | with | , | next to | as well as ", caption):
        if match := re.fullmatch(PLURAL, phrase):
            described += [(None, match[2], match[3])] * NUMBERS[match[1]]
        else:
            first, *rest = re.split(f" ({'|'.join(RELATIONS)}) ", phrase)
            described.append(re.fullmatch(NOUN, first).groups())
            if rest:
                relations.append((len(described) - 1, rest[0], len(described)))
                described.append(re.fullmatch(NOUN, rest[1]).groups())
    return described, relations


def fits(description, o):
    """Return whether an object has the described size, colour and shape."""
    words = zip(description, ("size", "colour", "shape"))
    return all(word in (None, o[key]) for word, key in words)


def stands(a, relation, b):
    """Return whether object a stands in this relation to object b."""
    return {"left of": a["x"] < b["x"], "right of": a["x"] > b["x"],
            "above": a["y"] < b["y"], "below": a["y"] > b["y"]}[relation]


def true_of(caption, objects, of_all=False):
    """Return whether the caption is true: different objects of the scene fit its descriptions.

    of_all: the caption must describe every object of the scene, too.
    """
    described, relations = parse(caption)
    if of_all and len(described) != len(objects):
        return False
    for chosen in itertools.permutations(objects, len(described)):
        if all(map(fits, described, chosen)) and all(stands(chosen[i], relation, chosen[j])
                                                     for i, relation, j in relations):
            return True
    return False


def thing(colour, shape, size="large", x=12.0, y=12.0):
    """Return an object of a scene, as World.objects_of describes it."""
    return {"colour": colour, "shape": shape, "size": size, "x": x, "y": y}


def compositions(scene):
    """Return the set of scenes. A scene is the sorted numbers of its objects and their pixels."""
    x, y = scene["centre"].long().unbind(-1)
    code = (scene["colour"] * 8 + scene["shape"]) * 2 + scene["large"]
    code = (code * 100 + x) * 100 + y + 1
    return set(map(tuple, (code * scene["present"]).sort(1).values.tolist()))


def scenes(world, n, split):
    """Return n scenes of a split, without their images."""
    return world.scenes(n, split, torch.Generator().manual_seed(0), None)


def test_captions_describe_every_object_and_name_fixed_shares_of_attributes():
    """The caption of a single object names its colour in 90 % of all scenes, its size in 40 %."""
    sample, seen, texts = World().sample(1000, "train", 0), Counter(), Counter()
    for caption, shown in zip(sample["captions"], sample["objects"]):
        assert true_of(caption, shown, of_all=True), (caption, shown)
        described, relations = parse(caption)
        texts.update(relation=bool(relations), filler=bool(re.search(FILLER, caption)))
        if len(described) == 1:
            words = dict(zip(("size", "colour", "shape"), described[0]))
            seen.update(single=1, **{key: word is not None for key, word in words.items()})
    assert seen["shape"] == seen["single"] > 150
    assert seen["colour"] / seen["single"] == pytest.approx(0.9, abs=0.06)
    assert seen["size"] / seen["single"] == pytest.approx(0.4, abs=0.08)
    assert 100 < texts["relation"] < 300 and texts["filler"] > 500
    plain = World(fillers=False)
    assert not re.search(FILLER, "\n".join(plain.sample_captions(1000)))
    red = [thing("red", "circle", "small"), thing("red", "circle"), thing("red", "circle")]
    captions = {plain.caption(red, random.Random(i)) for i in range(99)}
    assert captions == {"three red circles", "three circles"}


def test_captions_are_true_without_their_made_up_words():
    """Made-up words stand before and behind the sentence. The vocabulary knows all other words."""
    known = {common.made_up_word(i) for i in range(20)}
    assert len(known) == 20
    sample, counts = World(words=20).sample(300, "train", 0), Counter()
    for caption, objects in zip(sample["captions"], sample["objects"]):
        words = caption.split()
        counts[sum(word in known for word in words)] += 1
        assert true_of(" ".join(word for word in words if word not in known), objects, of_all=True)
    assert min(counts[n] for n in (0, 1, 2)) > 60 and counts.total() == 300
    texts = World().sample(1000, "test", 0)["captions"]
    assert set(" ".join(texts).split()) <= set(" ".join(World().sample_captions(9999)).split())
    # the figures in tests/claims.json were measured on these captions
    captions = World(fillers=False, objects=2, together=0.85).sample(300, "train", 0)["captions"]
    assert captions[:2] == ["a blue star above a large yellow cross",
                            "a pink diamond right of a triangle"]


def test_splits_share_no_scene_and_heldout_pairs_are_in_test_only():
    """A split draws no more scenes than it needs: the next random numbers draw the background."""
    found, pairs, world = {}, {}, World(objects=2, heldout=6)
    for split in ("train", "val", "test"):
        scene = scenes(world, 5000, split)
        found[split], here = compositions(scene), scene["present"]
        pairs[split] = set(zip(scene["colour"][here].tolist(), scene["shape"][here].tolist()))
    for a, b in itertools.combinations(found.values(), 2):
        assert min(len(a), len(b)) > 20 and not a & b
    assert pairs["test"] == set(itertools.product(range(8), range(8)))
    assert pairs["test"] - pairs["train"] == set(world.heldout_pairs)
    assert [len({*World(heldout=n).heldout_pairs}) for n in (6, 32)] == [6, 32]
    once, again = (torch.Generator().manual_seed(0) for _ in range(2))
    kept = World().in_split(World().draw(64, once, None, 0), "test").sum()
    World().scenes(kept, "test", again, None)
    after = [torch.rand(1, generator=generator) for generator in (once, again)]
    assert kept > 0 and after[0] == after[1]


# {shape: (points (u, v) inside, points outside)}, in radii; v points down
OUTLINES = {
    "circle": ([(0, 0), (0.66, -0.66)], [(0, 0.97), (0.7, 0.7)]),
    "square": ([(0.8, 0.8), (-0.8, 0.8)], [(0.85, 0), (0, -0.85)]),
    "triangle": ([(0, -0.9), (0.9, 0.7), (-0.9, 0.7)], [(0.4, -0.5), (-0.4, -0.5), (0, 0.8)]),
    "diamond": ([(0.95, 0), (0, -0.95), (0.45, 0.5)], [(0.55, 0.5), (-0.8, 0.3)]),
    "cross": ([(0.25, 0.9), (-0.9, 0.25)], [(0.35, 0.35), (0, 0.97), (-0.97, 0)]),
    "star": ([(0, -0.95), (0.9, -0.3), (0.57, 0.77)], [(0, 0.45), (-0.95, 0.3), (0, -1)]),
    "ring": ([(0.7, 0), (0, -0.9)], [(0, 0), (0.4, 0), (0, 0.97)]),
    "moon": ([(-0.9, 0), (-0.3, 0), (0, 0.9)], [(-0.2, 0), (0.9, 0), (0, -0.97)])}


def test_shapes_have_their_outlines():
    assert [*OUTLINES] == SHAPE_NAMES
    for name, places in OUTLINES.items():
        for points, is_inside in zip(places, (True, False)):
            u, v = torch.tensor(points, dtype=torch.float32).T
            assert ((common.SHAPES[name](u, v) < 0) == is_inside).all(), name


@pytest.mark.parametrize("settings", [{}, {"objects": 7}, {"size": 33, "large": 0.32}])
def test_images_and_segmentations_show_the_objects_of_their_scene(settings):
    world = World(**settings)
    sample = world.sample(100, "test", 0)
    scene, segmentation = sample["scene"], sample["segmentation"]
    images = sample["images"]
    assert images.min() >= 0 and images.max() <= 1
    y, x = torch.meshgrid(*[torch.arange(world.size) + 0.5] * 2, indexing="ij")
    for i, k in itertools.product(range(100), range(world.objects)):
        mask = segmentation[i] == k + 1
        assert mask.any() == scene["present"][i, k] == (k < len(sample["objects"][i]))
        if mask.any():
            (cx, cy), radius = scene["centre"][i, k], scene["radius"][i, k]
            assert torch.hypot(x[mask] - cx, y[mask] - cy).max() < 1.27 * radius  # a triangle
            colour, shape = scene["colour"][i, k], scene["shape"][i, k]
            size = "large" if scene["large"][i, k] else "small"
            assert sample["objects"][i][k] == thing(
                COLOUR_NAMES[colour], SHAPE_NAMES[shape], size, cx.item(), cy.item())
            if settings == {}:
                assert torch.hypot(x[mask].mean() - cx, y[mask].mean() - cy) < 0.5 * radius
                assert (images[i, :, mask].mean(1) - RGB[colour]).abs().max() < 0.25
                assert (0.167 < radius / 48) == scene["large"][i, k]
    assert segmentation.max() <= world.objects
    number = world.sample(50, "test", 0, objects=2)["scene"]["present"].sum(1)
    assert (number == 2).all()


def test_backgrounds_and_noise_have_the_deviations_of_their_settings():
    sample = World(background=0.5, noise=0, objects=1).sample(200, "train", 0)
    corners = sample["images"][:, :, 0, 0]
    assert (corners - 0.275).abs().max() <= 0.25 + 1e-5
    assert corners.std() == pytest.approx(0.5 / 12**0.5, rel=0.1)
    sample = World(noise=0.1).sample(50, "test", 0, objects=1)
    empty = (sample["segmentation"][:, :9, :9] == 0).all(2).all(1)
    corner = sample["images"][..., :6, :6].flatten(2)[empty]
    assert abs(corner.std(-1).mean() - 0.1) < 0.015
    # an object covers at most half of a pixel that is not its own
    sample = World(background=0, noise=0, objects=1).sample(100, "test", 0)
    edges = sample["images"].permute(0, 2, 3, 1)[sample["segmentation"] == 0]
    assert 0.6 < edges.max() <= (0.275 + 1) / 2 + 1e-5


KINDS = {"replace_att", "replace_obj", "replace_rel", "add_att", "add_obj", "swap_att", "swap_obj"}


def test_hard_negatives_are_false_and_their_captions_are_true():
    """A swap keeps the words of the caption, where "an" counts as "a"."""
    world, rng, seen = World(objects=7), random.Random(0), Counter()
    for o in world.objects_of(scenes(world, 300, "test")):
        for kind, pair in world.hard_negatives(o, rng).items():
            seen[kind] += 1
            assert [true_of(caption, o) for caption in pair] == [True, False], (kind, pair, o)
            words = [sorted(caption.replace("an ", "a ").split()) for caption in pair]
            assert not kind.startswith("swap") or words[0] == words[1]
    assert set(seen) == KINDS and min(seen.values()) > 0.4 * 300
    one, blue = thing("red", "circle"), thing("blue", "circle", y=36.0)
    kinds = World().hard_negatives([one], random.Random(0))  # unsuitable categories are left out
    assert set(kinds) == {"replace_att", "replace_obj", "add_obj", "add_att"}
    crossed = [one, thing("blue", "square", x=36.0), blue]
    for seed in range(20):
        for pair in World().hard_negatives(crossed, random.Random(seed)).values():
            assert [true_of(caption, crossed) for caption in pair] == [True, False]
    # a second object is one of another colour and another shape, wherever it is listed
    for third in (thing("red", "star", x=36.0), blue):
        objects = [one, third, thing("white", "cross", x=36.0, y=36.0)]
        for seed in range(9):
            assert "swap_att" in World().hard_negatives(objects, random.Random(seed))


def test_palette_limits_colours_and_companions_are_frequent_only_in_training():
    """Companions are neighbours in the lists of colours and of shapes, as red and green."""
    sample = World(objects=2, palette=3, together=1.0).sample(300, "train", 0)
    colour = sample["scene"]["colour"]
    assert (colour[:, 0].bincount() / 300 - 1 / 3).abs().max() < 0.1
    assert set(map(tuple, colour[:, :2].tolist())) == {(0, 1), (1, 0), (2, 2)}
    for split, low, high in (("train", 0.8, 0.9), ("test", 0, 0.1)):
        scene = scenes(World(together=0.85, heldout=0), 2000, split)
        pair = scene["present"][:, 1]
        for name in ("colour", "shape"):
            pair &= scene[name][:, 1] == scene[name][:, 0] ^ 1
        assert low < pair.float().mean() < high


@pytest.mark.parametrize("name, low, high", [
    ("size", 16, 1024), ("objects", 1, 7), ("noise", 0, 1), ("background", 0, 0.5),
    ("palette", 1, 8), ("heldout", 0, 32), ("words", 0, 4000), ("together", 0, 1)])
def test_settings_have_bounds(name, low, high):
    for value in (low, high):
        assert getattr(World(**{name: value}), name) == value
    for value in (low - 1, high + 1):
        with pytest.raises(UserError, match=f"shapes: {name} {value} must be "):
            World(**{name: value})


def test_objects_fit_into_their_cells_and_a_spec_sets_the_world():
    World(size=44, small=0.05, large=0.32)
    for wrong in (dict(large=0.33), dict(small=0.04), dict(small=0.2), dict(objects=5, large=0.22)):
        with pytest.raises(UserError, match="from 0.046 to 0.(32|213)"):
            World(**wrong)
    assert World() == World(48, 3, 0.04, 0.25, 0.14, 0.20, 8, 6, 0.0, True, 0)
    world = open_data("shapes:objects=2,noise=0.1,fillers=0", image_size=64)
    assert world == World(size=64, objects=2, noise=0.1, fillers=False)
    assert open_data("shapes:size=32", image_size=64).size == 32
