"""The embedded world: its captions, labels and negatives are true, its splits share nothing."""

import itertools
import random
import re
from collections import Counter

import pytest
import torch

import common
from common import COLOUR_NAMES, COLOURS, RELATIONS, SHAPE_NAMES, World, open_data

NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7}
SHAPE_WORDS = "|".join(SHAPE_NAMES)
NOUN = rf"an? (?:(small|large) )?(?:({'|'.join(COLOURS)}) )?({SHAPE_WORDS})"
PLURAL = rf"({'|'.join(NUMBERS)}) (?:({'|'.join(COLOURS)}) )?({SHAPE_WORDS})e?s"
OPENING, CLOSING = ("|".join(filter(None, words)) for words in (common.OPENINGS, common.CLOSINGS))
FILLER = rf"\b({OPENING}|{CLOSING})\b"
RGB = torch.tensor(list(COLOURS.values()))


def parse(caption):
    """Caption -> described objects (size, colour, shape; or None) and relations (i, r, j)."""
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
    words = zip(description, ("size", "colour", "shape"))
    return all(word in (None, o[key]) for word, key in words)


def stands(a, relation, b):
    return {"left of": a["x"] < b["x"], "right of": a["x"] > b["x"],
            "above": a["y"] < b["y"], "below": a["y"] > b["y"]}[relation]


def true_of(caption, objects, of_all=False):
    """Whether distinct objects of the scene fit the words; of_all: and no object is left over."""
    described, relations = parse(caption)
    if of_all and len(described) != len(objects):
        return False
    for chosen in itertools.permutations(objects, len(described)):
        if all(map(fits, described, chosen)) and all(stands(chosen[i], relation, chosen[j])
                                                     for i, relation, j in relations):
            return True
    return False


def thing(colour, shape, size="large", x=12.0, y=12.0):
    return {"colour": colour, "shape": shape, "size": size, "x": x, "y": y}


def compositions(scene):
    """Scenes -> set of what stands at which pixel, whatever the order."""
    x, y = scene["centre"].long().unbind(-1)
    code = (scene["colour"] * 8 + scene["shape"]) * 2 + scene["large"]
    code = (code * 100 + x) * 100 + y + 1
    return set(map(tuple, (code * scene["present"]).sort(1).values.tolist()))


def scenes(world, n, split, seed=0, objects=None):
    return world.scenes(n, split, torch.Generator().manual_seed(seed), objects)


def lists_of_objects(world, n, split="train", objects=None):
    """n scenes, not drawn."""
    return world.objects_of(scenes(world, n, split, objects=objects))


def test_the_parser_of_these_tests_can_say_no():
    red, blue = thing("red", "circle", x=10.0), thing("blue", "cross", "small", x=30.0)
    assert true_of("a photo of a large red circle left of a cross", [red, blue], of_all=True)
    for false in ("a red circle right of a blue cross", "a small red circle", "two red circles"):
        assert not true_of(false, [red, blue])
    assert not true_of("a red circle", [red, blue], of_all=True)


@pytest.mark.parametrize("objects", [1, 3, 4])
def test_captions_describe_every_object_truly_and_name_shares_of_what_there_is(objects):
    sample, seen, texts = World(objects=objects).sample(1000, "train", 0), Counter(), Counter()
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
    if objects == 1:
        assert texts["relation"] == 0
    else:                                                      # most scenes relate two objects
        assert 100 < texts["relation"] < 300
    assert texts["filler"] > 500


def test_counts_and_captions_without_fillers():
    objects = [thing("red", "circle", "small"), thing("red", "circle"), thing("red", "circle")]
    world = World(fillers=False)
    captions = {world.caption(objects, random.Random(i)) for i in range(99)}
    assert captions == {"three red circles", "three circles"}
    words = Counter(" ".join(World().sample_captions(2000)).split())
    assert words["two"] > 50 and words["large"] > 100
    assert not re.search(FILLER, "\n".join(world.sample_captions(1000)))


def test_captions_are_those_that_the_figures_were_measured_on():
    captions = World(fillers=False, objects=2, together=0.85).sample(300, "train", 0)["captions"]
    assert captions[:2] == ["a blue star above a yellow cross",
                            "a pink diamond right of a white triangle"]


def test_made_up_words_stand_around_a_true_caption():
    assert len({common.made_up_word(i) for i in range(4900)}) == 4900
    known = {common.made_up_word(i) for i in range(20)}
    assert all(re.fullmatch("([bdfgklmnprstvz][aeiou]){2}", word) for word in known)
    assert not known & set(" ".join(World().sample_captions(5000)).split())
    sample, counts = World(words=20).sample(300, "train", 0), Counter()
    for caption, objects in zip(sample["captions"], sample["objects"]):
        words = caption.split()
        counts[sum(word in known for word in words)] += 1
        assert true_of(" ".join(word for word in words if word not in known), objects, of_all=True)
    assert min(counts[n] for n in (0, 1, 2)) > 60 and counts.total() == 300
    assert known <= set(" ".join(sample["captions"]).split())


def test_training_captions_hold_every_word():
    world, rng, known = World(), random.Random(0), World().sample_captions(100_000)
    assert len(known) == 5000 and len(world.sample_captions(10)) == 10
    captions = [world.caption(objects, rng) for objects in lists_of_objects(world, 1000, "test")]
    assert set(" ".join(captions).split()) <= set(" ".join(known).split())


@pytest.mark.parametrize("objects", [1, 2, None])
def test_splits_share_no_scene(objects):
    found = {}
    for split in ("train", "val", "test"):
        found[split] = compositions(scenes(World(), 5000, split, objects=objects))
    assert len(found["train"]) > len(found["test"]) > 20
    for a, b in itertools.combinations(found.values(), 2):
        assert not a & b


@pytest.mark.parametrize("heldout", [0, 6, 32])
def test_heldout_pairs_are_in_test_only(heldout):
    world, pairs = World(heldout=heldout), {}
    for split in ("train", "test"):
        scene = scenes(world, 2000, split)
        colour, shape = scene["colour"][scene["present"]], scene["shape"][scene["present"]]
        pairs[split] = set(zip(colour.tolist(), shape.tolist()))
    assert pairs["test"] == set(itertools.product(range(8), range(8)))
    assert pairs["test"] - pairs["train"] == set(world.heldout_pairs)
    assert len(set(world.heldout_pairs)) == heldout


@pytest.mark.parametrize("objects", range(1, 8))
def test_exact_number_of_objects(objects):
    world = World(objects=objects)
    sample = world.sample(50, "test", 0, objects=objects)
    assert {len(o) for o in sample["objects"]} == {objects}
    assert (sample["segmentation"].amax((1, 2)) == objects).all()
    free = Counter(scenes(world, 700, "test")["present"].sum(1).tolist())
    assert set(free) == set(range(1, objects + 1)) and min(free.values()) > 100 / objects


@pytest.mark.parametrize("settings", [{}, {"objects": 7}, {"size": 16},
                                      {"size": 33, "large": 0.32, "objects": 4}])
def test_segmentation_shows_every_object_where_and_as_it_is(settings):
    world = World(**settings)
    sample = world.sample(100, "test", 0)
    scene, segmentation = sample["scene"], sample["segmentation"]
    images = common.denormalize(sample["images"])
    assert images.min() > -1e-5 and images.max() < 1 + 1e-5
    y, x = torch.meshgrid(*[torch.arange(world.size) + 0.5] * 2, indexing="ij")
    for i, k in itertools.product(range(100), range(world.objects)):
        mask = segmentation[i] == k + 1
        assert mask.any() == scene["present"][i, k]
        if mask.any():
            (cx, cy), radius = scene["centre"][i, k], scene["radius"][i, k]
            assert torch.hypot(x[mask] - cx, y[mask] - cy).max() < 1.27 * radius  # a triangle's
            if settings == {}:
                assert torch.hypot(x[mask].mean() - cx, y[mask].mean() - cy) < 0.5 * radius
                colour = RGB[scene["colour"][i, k]]
                assert (images[i, :, mask].mean(1) - colour).abs().max() < 0.25
    assert segmentation.max() <= world.objects


def test_sizes_do_not_overlap():
    scene = scenes(World(), 1000, "train")
    radius = scene["radius"] / 48
    small, large = radius[~scene["large"]], radius[scene["large"]]
    assert 0.125 < small.min() and small.max() < 0.155
    assert 0.179 < large.min() and large.max() < 0.221


@pytest.mark.parametrize("background", [0.0, 0.1, 0.5])
def test_backgrounds_differ_by_the_setting(background):
    sample = World(background=background, noise=0, objects=1).sample(200, "train", 0)
    corners = common.denormalize(sample["images"])[:, :, 0, 0]
    assert (corners - 0.275).abs().max() <= background / 2 + 1e-5
    assert corners.std() == pytest.approx(background / 12**0.5, rel=0.1, abs=1e-5)


@pytest.mark.parametrize("noise", [0.0, 0.04, 0.1])
def test_noise_is_the_deviation_of_the_background(noise):
    sample = World(noise=noise).sample(50, "test", 0, objects=1)
    empty = (sample["segmentation"][:, :9, :9] == 0).all(2).all(1)
    corner = common.denormalize(sample["images"])[..., :6, :6].flatten(2)[empty]
    assert abs(corner.std(-1).mean() - noise) < 0.15 * noise + 1e-6


def test_objects_are_those_of_the_scene():
    sample = World().sample(50, "val", 3)
    scene = {name: value.tolist() for name, value in sample["scene"].items()}
    for i, objects in enumerate(sample["objects"]):
        for k, o in enumerate(objects):
            colour, shape = COLOUR_NAMES[scene["colour"][i][k]], SHAPE_NAMES[scene["shape"][i][k]]
            size = "large" if scene["large"][i][k] else "small"
            assert o == thing(colour, shape, size, *scene["centre"][i][k])


KINDS = {"replace_att", "replace_obj", "replace_rel", "add_att", "add_obj", "swap_att", "swap_obj"}


def same_words(a, b):
    return sorted(a.replace("an ", "a ").split()) == sorted(b.replace("an ", "a ").split())


@pytest.mark.parametrize("objects", [None, 7])
def test_hard_negatives_are_false_and_their_captions_true(objects):
    world, rng, seen = World(objects=objects or 3), random.Random(0), Counter()
    for o in lists_of_objects(world, 300, "test", objects):
        for kind, (caption, negative) in world.hard_negatives(o, rng).items():
            seen[kind] += 1
            assert true_of(caption, o), (kind, caption, o)
            assert not true_of(negative, o), (kind, negative, o)
            assert not kind.startswith("swap") or same_words(caption, negative)
    assert set(seen) == KINDS and min(seen.values()) > 0.4 * 300


def test_kinds_of_hard_negatives_that_do_not_fit_are_left_out():
    one, two = thing("red", "circle"), thing("red", "circle", "small", 36.0)
    kinds = World().hard_negatives([one], random.Random(0))
    assert set(kinds) == {"replace_att", "replace_obj", "add_obj", "add_att"}
    assert "add_att" not in World().hard_negatives([one, two], random.Random(0))
    crossed = [one, thing("blue", "square", x=36.0), thing("blue", "circle", y=36.0)]
    for seed in range(20):
        for pair in World().hard_negatives(crossed, random.Random(seed)).values():
            assert [true_of(caption, crossed) for caption in pair] == [True, False]


@pytest.mark.parametrize("palette, companions", [(1, {(0, 0)}), (3, {(0, 1), (1, 0), (2, 2)})])
def test_the_palette_is_the_first_colours(palette, companions):
    sample = World(objects=2, palette=palette, together=1.0).sample(300, "train", 0)
    colour = sample["scene"]["colour"]
    assert (colour[:, 0].bincount() / 300 - 1 / palette).abs().max() < 0.1
    assert set(map(tuple, colour[:, :2].tolist())) == companions
    words = set(" ".join(sample["captions"]).split())
    assert not set(COLOUR_NAMES[palette:]) & words


def test_settings_reach_the_world():
    world = open_data("shapes:objects=2,noise=0.1,fillers=0", image_size=64)
    assert world == World(size=64, objects=2, noise=0.1, fillers=False)
    assert open_data("shapes:size=32", image_size=64).size == 32
    assert open_data("shapes") == World()


@pytest.mark.parametrize("split, low, high", [("train", 0.8, 0.9), ("test", 0, 0.1)])
def test_together_puts_companions_side_by_side_in_training_alone(split, low, high):
    scene = scenes(World(together=0.85, heldout=0), 2000, split)
    pair = scene["present"][:, 1]
    for name in ("colour", "shape"):
        pair &= scene[name][:, 1] == scene[name][:, 0] ^ 1
    assert low < pair.float().mean() < high
