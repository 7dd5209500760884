"""The embedded world: its captions, labels and negatives are true, its splits share nothing."""

import itertools
import random
import re
from collections import Counter

import pytest
import torch

import common
from common import COLOURS, RELATIONS, UserError, World, open_data

NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7}
SHAPE_WORDS = f"{'|'.join(common.SHAPES)}|thing"
NOUN = rf"an? (?:(small|large) )?(?:({'|'.join(COLOURS)}) )?({SHAPE_WORDS})"
PLURAL = rf"({'|'.join(NUMBERS)}) (?:({'|'.join(COLOURS)}) )?({SHAPE_WORDS})e?s"
RGB = torch.tensor(list(COLOURS.values()))


def parse(caption):
    """Caption -> described objects (size, colour, shape; or None) and relations (i, r, j)."""
    for opening in sorted(common.OPENINGS, key=len, reverse=True):
        if opening and caption.startswith(opening + " "):
            caption = caption[len(opening) + 1:]
            break
    for closing in sorted(common.CLOSINGS, key=len, reverse=True):
        if closing and caption.endswith(" " + closing):
            caption = caption[: -len(closing) - 1]
            break
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
    return all(word in (None, "thing", o[key]) for word, key in words)


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


def test_the_parser_of_these_tests_can_say_no():
    red, blue = thing("red", "circle", x=10.0), thing("blue", "cross", "small", x=30.0)
    caption = "a photo of a large red circle left of a cross and nothing else"
    assert true_of(caption, [red, blue], of_all=True)
    assert not true_of("a red circle right of a blue cross", [red, blue])
    assert not true_of("a small red circle", [red, blue])
    assert not true_of("two red circles", [red, blue])
    assert true_of("three blue crosses , a circle", [red, blue, blue, blue], of_all=True)
    assert not true_of("a red circle", [red, blue], of_all=True)


@pytest.mark.parametrize("settings", [{}, {"relations": 1.0}, {"objects": 4, "relations": 0.0}])
def test_captions_describe_every_object_and_nothing_else(settings):
    sample = World(**settings).sample(800, "train", 0)
    for caption, objects in zip(sample["captions"], sample["objects"]):
        assert true_of(caption, objects, of_all=True), (caption, objects)


def test_counts():
    objects = [thing("red", "circle", "small"), thing("red", "circle"), thing("red", "circle")]
    world = World(relations=0.0, fillers=False)
    captions = {world.caption(objects, random.Random(i)) for i in range(99)}
    assert captions == {"three red circles", "three circles"}
    words = Counter(" ".join(World().sample(2000, "train", 0)["captions"]).split())
    assert words["two"] > 50 and words["large"] > 100


def test_relations_and_fillers_are_fractions():
    def fraction(pattern, **settings):
        world, rng = World(**settings), random.Random(0)
        lists = world.objects_of(scenes(world, 1000, "train"))
        return sum(bool(re.search(pattern, world.caption(o, rng))) for o in lists) / 1000

    relation = "|".join(RELATIONS)
    assert fraction(relation, relations=0.0) == 0
    assert 0.5 < fraction(relation, relations=1.0) < 0.7   # two scenes in three have two objects
    assert 0.1 < fraction(relation) < 0.3
    filler = "|".join(filter(None, common.OPENINGS + common.CLOSINGS))
    assert fraction(filler) > 0.5 and fraction(filler, fillers=False) == 0


def test_training_captions_hold_every_word():
    known = set(" ".join(World().sample_captions(100_000)).split())
    assert set(" ".join(World().sample(1000, "test", 1)["captions"]).split()) <= known
    assert len(World().sample_captions(10)) == 10


@pytest.mark.parametrize("objects", [1, 2, None])
def test_splits_share_no_scene(objects):
    found = {}
    for split in ("train", "val", "test"):
        found[split] = compositions(scenes(World(), 10_000, split, objects=objects))
    for a, b in itertools.combinations(found, 2):
        assert not found[a] & found[b]
    assert len(found["train"]) > len(found["test"]) > 20


@pytest.mark.parametrize("heldout", [0, 6, 32])
def test_heldout_pairs_are_in_test_only(heldout):
    world = World(heldout=heldout)
    assert len(set(world.heldout_pairs)) == heldout

    def pairs(split):
        s = scenes(world, 2000, split)
        return set(zip(s["colour"][s["present"]].tolist(), s["shape"][s["present"]].tolist()))

    assert pairs("train") == set(itertools.product(range(8), range(8))) - set(world.heldout_pairs)
    assert len(pairs("test")) == 64


def test_same_seed_same_sample():
    a, b, c = (World().sample(8, "train", seed) for seed in (1, 1, 2))
    assert torch.equal(a["images"], b["images"])
    assert torch.equal(a["segmentation"], b["segmentation"])
    assert a["captions"] == b["captions"] and a["objects"] == b["objects"]
    assert not torch.equal(a["images"], c["images"]) and a["captions"] != c["captions"]


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


def test_mean_colour_tells_the_objects_apart():
    sample = World(noise=0.0).sample(200, "test", 0)
    images, scene, right = common.denormalize(sample["images"]), sample["scene"], []
    for i, k in scene["present"].nonzero().tolist():
        mean = images[i][:, sample["segmentation"][i] == k + 1].mean(1)
        nearest = torch.cosine_similarity(RGB, mean, dim=1).argmax()
        right.append(int(nearest == scene["colour"][i, k]))
    assert sum(right) / len(right) > 0.95


def test_sizes_do_not_overlap():
    scene = scenes(World(), 1000, "train")
    radius = scene["radius"] / 48
    small, large = radius[~scene["large"]], radius[scene["large"]]
    assert 0.125 < small.min() and small.max() < 0.155
    assert 0.179 < large.min() and large.max() < 0.221


def test_backgrounds_differ_by_the_setting():
    for background in (0.0, 0.1, 0.5):
        world = World(background=background, noise=0, objects=1)
        corners = common.denormalize(world.sample(200, "train", 0)["images"])[:, :, 0, 0]
        assert (corners - 0.275).abs().max() <= background / 2 + 1e-5
        assert corners.std() == pytest.approx(background / 12**0.5, rel=0.1, abs=1e-5)


def test_noise_is_the_deviation_of_the_background():
    for noise in (0.0, 0.04, 0.1):
        sample = World(noise=noise).sample(50, "test", 0, objects=1)
        empty = (sample["segmentation"][:, :9, :9] == 0).all(2).all(1)
        corner = common.denormalize(sample["images"])[..., :6, :6].flatten(2)[empty]
        assert abs(corner.std(-1).mean() - noise) < 0.15 * noise + 1e-6


def test_objects_are_those_of_the_scene():
    sample = World().sample(50, "val", 3)
    scene = sample["scene"]
    for i, objects in enumerate(sample["objects"]):
        for k, o in enumerate(objects):
            assert o["colour"] == common.COLOUR_NAMES[scene["colour"][i, k]]
            assert o["shape"] == common.SHAPE_NAMES[scene["shape"][i, k]]
            assert o["size"] == ("large" if scene["large"][i, k] else "small")
            assert [o["x"], o["y"]] == scene["centre"][i, k].tolist()


KINDS = {"replace_att", "replace_obj", "replace_rel", "add_att", "add_obj", "swap_att", "swap_obj"}


def same_words(a, b):
    return sorted(a.replace("an ", "a ").split()) == sorted(b.replace("an ", "a ").split())


@pytest.mark.parametrize("objects", [None, 7])
def test_hard_negatives_are_false_and_their_captions_true(objects):
    world, rng, seen = World(objects=objects or 3), random.Random(0), Counter()
    lists = world.objects_of(scenes(world, 700, "test", objects=objects))
    for o in lists:
        for kind, (caption, negative) in world.hard_negatives(o, rng).items():
            seen[kind] += 1
            assert true_of(caption, o), (kind, caption, o)
            assert not true_of(negative, o), (kind, negative, o)
            assert not kind.startswith("swap") or same_words(caption, negative)
    assert set(seen) == KINDS
    assert min(seen.values()) > 0.4 * len(lists)


def test_kinds_of_hard_negatives_that_do_not_fit_are_left_out():
    one = World().hard_negatives([thing("red", "circle")], random.Random(0))
    assert set(one) == {"replace_att", "replace_obj", "add_obj", "add_att"}
    both_sizes = [thing("red", "circle"), thing("red", "circle", "small", 36.0)]
    assert "add_att" not in World().hard_negatives(both_sizes, random.Random(0))
    crossed = [thing("red", "circle"), thing("blue", "square", x=36.0),
               thing("blue", "circle", y=36.0)]
    for seed in range(20):
        negatives = World().hard_negatives(crossed, random.Random(seed))
        for caption, negative in negatives.values():
            assert true_of(caption, crossed) and not true_of(negative, crossed)


class Recorder(World):
    """Keeps the scenes that it renders."""

    def render(self, scene, generator):
        self.__dict__.setdefault("rendered", []).append(scene)
        return super().render(scene, generator)


@pytest.mark.parametrize("objects", [1, 3])
def test_winoground_swaps_truth_with_the_same_words(objects):
    world = Recorder(objects=objects)
    images, captions = world.winoground(60, seed=0)
    assert images.shape == (60, 2, 3, 48, 48) and len(captions) == 60
    first, second = map(world.objects_of, world.rendered)
    for pair, a, b in zip(captions, first, second):
        assert sorted(pair[0].split()) == sorted(pair[1].split())
        assert true_of(pair[0], a, of_all=True) and true_of(pair[1], b, of_all=True)
        assert not true_of(pair[0], b) and not true_of(pair[1], a)
    assert images.min() < -1 and images.max() > 1  # normalised as sample's are
    again, words = World(objects=objects).winoground(60, seed=0)
    assert torch.equal(images, again) and words == captions


def test_winoground_scenes_are_not_in_train():
    world = Recorder()
    world.winoground(200, seed=0)
    train = compositions(scenes(world, 30_000, "train", objects=2))
    for scene in world.rendered:
        assert not compositions(scene) & train


def test_winoground_gives_as_many_pairs_as_asked():
    for n, seed in itertools.product((1, 2, 5), range(8)):
        assert len(World().winoground(n, seed)[1]) == n


@pytest.mark.parametrize("setting", """
    size=0 size=-48 size=8 size=100000 objects=0 objects=8 noise=-1 noise=nan noise=7 heldout=-1
    heldout=33 relations=1.5 relations=-0.1 small=0 small=-0.1 small=0.01 small=0.3 large=0.1
    large=0.9 large=inf colour=3 size=big""".split())
def test_absurd_settings_are_refused(setting):
    name, value = setting.split("=")
    with pytest.raises(UserError) as error:
        open_data(f"shapes:{setting}")
    message = str(error.value)
    assert "shapes" in message and name in message and "\n" not in message
    assert value in message or name == "colour"


def test_objects_and_split_are_checked():
    with pytest.raises(UserError, match="5 objects.*objects=3"):
        World().sample(1, "train", 0, objects=5)
    with pytest.raises(UserError, match="0 objects"):
        World().sample(1, "train", 0, objects=0)
    with pytest.raises(UserError, match="'dev'.*train, val, test"):
        World().sample(1, "dev", 0)


@pytest.mark.parametrize("palette, companions", [(1, {(0, 0)}), (3, {(0, 1), (1, 0), (2, 2)})])
def test_the_palette_is_the_first_colours(palette, companions):
    world = World(objects=2, palette=palette, together=1.0)
    sample = world.sample(300, "train", 0)
    colour = sample["scene"]["colour"]
    assert (colour[:, 0].bincount() / 300 - 1 / palette).abs().max() < 0.1
    assert set(map(tuple, colour[:, :2].tolist())) == companions
    words = set(" ".join(sample["captions"]).split())
    assert not set(common.COLOUR_NAMES[palette:]) & words


def test_settings_reach_the_world():
    world = open_data("shapes:objects=2,noise=0.1,fillers=0", image_size=64)
    assert world == World(size=64, objects=2, noise=0.1, fillers=False)
    assert open_data("shapes:size=32", image_size=64).size == 32
    assert open_data("shapes") == World()


def test_together_puts_companions_side_by_side_in_training_alone():
    def fraction(split):
        scene = scenes(World(together=0.85, heldout=0), 2000, split)
        pair = scene["present"][:, 1]
        for name in ("colour", "shape"):
            pair &= scene[name][:, 1] == scene[name][:, 0] ^ 1
        return pair.float().mean().item()

    assert 0.8 < fraction("train") < 0.9 and fraction("test") < 0.1


@pytest.mark.parametrize("settings, named", [
    ({}, {"colour", "shape", "size"}), ({"colours": 0}, {"shape", "size"}),
    ({"sizes": 0}, {"colour", "shape"}), ({"kinds": 0, "sizes": 0}, {"colour"}),
    ({"kinds": 0, "colours": 1, "sizes": 0}, {"colour"})])
def test_settings_choose_what_captions_say(settings, named):
    world, rng, seen = World(**settings), random.Random(0), Counter()
    lists = world.objects_of(scenes(world, 300, "train"))
    for o in lists:
        caption = world.caption(o, rng)
        assert true_of(caption, o, of_all=True), caption
        for description in parse(caption)[0]:
            words = dict(zip(("size", "colour", "shape"), description))
            seen.update(key for key, word in words.items() if word not in (None, "thing"))
    assert set(seen) == named
    if settings.get("colours") == 1:
        assert seen["colour"] == sum(map(len, lists))
