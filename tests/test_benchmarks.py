"""The field's evaluation sets: CLIP_benchmark's webdatasets and Winoground, and limits of samples.

The model is the Oracle of test_eval.py, which knows the colours of plain pictures. Its metrics are
therefore known, and errors in reading the sets show.
"""

import json
import shutil

import pytest
import torch

import common
import eval as evaluation
from helpers import picture, write_files, write_tar
from test_eval import COLOURS, SlotOracle, embedder, make_folders, opened

NAMES = ["blue", "green", "red"]


def plain(colour, format="PNG"):
    """Return the bytes of a picture of one colour."""
    return picture(20, 12, format=format, value=COLOURS[colour])


def write_split(directory, *shards):
    """Write the shards of a split in CLIP_benchmark's layout.

    A shard is {member: bytes or text}.
    """
    shards = {f"{i}.tar": members for i, members in enumerate(shards)}
    write_files(directory, shards | {"nshards.txt": f"{len(shards)}\n"})


def write_labelled(directory, split="test", extra=()):
    """Write six images of three colours, in three formats, as a labelled set of two shards.

    extra: more members of the second shard. Return the SPEC of the set.
    """
    shards = [{}, {}]
    for i in range(6):
        format = ("JPEG", "WEBP", "PNG")[i % 3]
        shards[i // 3] |= {f"s{i}.{format.lower()}": plain(NAMES[i % 3], format),
                           f"s{i}.cls": f"{i % 3}"}
    shards[1] |= dict(extra)
    write_split(directory / split, *shards)
    write_files(directory, {"classnames.txt": "".join(f"{name}\n" for name in NAMES),
                            "zeroshot_classification_templates.txt": "a {c}.\nthe {c}\n"})
    return str(directory)


def test_a_sets_own_names_and_prompts_are_used_unless_others_are_given(
        run_of, tmp_path, capsys):
    spec = write_labelled(tmp_path / "colours")
    data, options = opened(spec)
    assert options.split == "test" and options.data == spec
    assert data.classes.prompts == ["a blue.", "the blue", "a green.", "the green", "a red.",
                                    "the red"]
    right, chance, most = evaluation.zeroshot(embedder(), data, options)["zeroshot"]
    assert right.tolist() == [True] * 6 and (chance, most) == (1 / 3, 1)
    with open(tmp_path / "colours/classnames.txt", "a") as file:
        file.write("\n\n")                                                  # no further class
    assert opened(spec)[0].classes.names == NAMES
    run = shutil.copytree(run_of("sparc"), tmp_path / "run")
    evaluation.main([str(run), "--task", "zeroshot", "--data", spec])
    settings = json.loads((run / "evals.jsonl").read_text().splitlines()[-1])["settings"]
    assert settings["class_names"] == f"{spec}/classnames.txt"
    assert (settings["templates"], settings["prompts"]) == (None, ["a {c}.", "the {c}"])
    assert "classnames.txt. First of 2 prompts: 'a blue.'" in capsys.readouterr().out
    (tmp_path / "names.txt").write_text("sky\n\nblood\n")
    data, _ = opened(spec, classes=str(tmp_path / "names.txt"), templates=["{a}!"])
    assert data.classes.prompts == ["a sky!", "a !", "a blood!"]  # CLEVR has an empty name, too
    (tmp_path / "colours" / "zeroshot_classification_templates.txt").unlink()
    assert opened(spec)[0].classes.prompts[0] == "a photo of a blue."


def test_knn_and_slots_learn_from_the_split_train_or_from_train_data(tmp_path):
    spec = write_labelled(tmp_path / "with")
    write_labelled(tmp_path / "with", "train")
    data, options = opened(spec, learn_limit=4)
    pairs = data.learn
    assert options.train_data == spec and len(list(pairs())) == 4
    assert evaluation.knn(embedder(), data, options)["knn"][0] > 0.3
    assert evaluation.knn(embedder(), *opened(spec))["knn"][0] == 1
    result = evaluation.slots(embedder(SlotOracle()), *opened(spec, select=spec))
    assert result["slots/accuracy_best"] == 1 and result["slots/best_half/zeroshot"][0].all()
    alone = write_labelled(tmp_path / "alone")
    make_folders(tmp_path / "folders")
    for train in (spec, str(tmp_path / "folders"), f"{spec}/train/{{0..1}}.tar"):
        assert evaluation.knn(embedder(), *opened(alone, train_data=train))["knn"][0] == 1


def test_slots_and_knn_learn_from_the_split_that_the_spec_names(tmp_path):
    """SPARO (Sec. 5.1) ranks on validation images. Here the split train has the wrong labels."""
    spec = write_labelled(tmp_path / "set")
    write_split(tmp_path / "set/train", {
        "0.png": plain("red"), "0.cls": "1", "1.png": plain("blue"), "1.cls": "2",
        "2.png": plain("green"), "2.cls": "0"})
    make_folders(tmp_path / "folders")
    folders, alone = str(tmp_path / "folders"), write_labelled(tmp_path / "alone")
    for select, best in ((spec, 1 / 3), (f"{spec}:split=train", 1 / 3), (f"{spec}:split=test", 1)):
        result = evaluation.slots(embedder(SlotOracle()), *opened(folders, select=select))
        assert result["slots/accuracy_best"] == pytest.approx(best)
    named = dict(train_data=f"{alone}:split=test")
    assert evaluation.knn(embedder(), *opened(folders, **named))["knn"][0] == 1
    for select in (alone, f"{spec}:split=val"):
        with pytest.raises(common.UserError, match="give --split, one of test.*DIR:split=NAME"):
            evaluation.slots(embedder(SlotOracle()), *opened(folders, select=select))
    with pytest.raises(common.UserError, match="not the data to evaluate"):
        evaluation.slots(embedder(SlotOracle()), *opened(spec, select=f"{spec}:split=test"))


def test_retrieval_finds_any_of_an_images_captions(tmp_path, capsys):
    write_split(tmp_path / "test", {
        "0.png": plain("red"), "0.txt": "red\nred red\r\n", "1.png": plain("green"),
        "1.txt": "green", "2.png": plain("blue"), "2.txt": " \n\n", "3.png": plain("blue"),
        "3.txt": "blue"})
    write_files(tmp_path, {"dataset_type.txt": "retrieval\n"})
    data, options = opened(tmp_path)
    assert [captions for _, captions in data.captioned("")] == [["red", "red red"], ["green"],
                                                              ["blue"]]
    assert "1 x empty caption, the last " in capsys.readouterr().out
    result = evaluation.retrieval(embedder(), data, options)
    assert [*result["i2t/R@1"], *result["t2i/R@1"]] == pytest.approx([1, 1 / 3] * 2)
    assert result["retrieval/images"] == 3
    images, captions = evaluation.take(embedder(), data, 2)
    assert captions == ["red", "green"] and images.shape == (2, 3, 8, 8)


def test_limit_draws_the_same_random_images_each_time(tmp_path):
    members = {}
    for i in range(60):
        members |= {f"{i:02}.png": plain(NAMES[i // 20]), f"{i:02}.cls": str(i // 20)}
    write_split(tmp_path / "test", members)
    write_files(tmp_path, {"classnames.txt": "\n".join(NAMES)})
    labels = [label for _, label in opened(tmp_path, limit=12)[0].labelled("test")]
    assert len(labels) == 12 and len(set(labels)) == 3
    assert labels == [label for _, label in opened(tmp_path, limit=12)[0].labelled("test")]
    write_files(tmp_path, {f"folders/{members[f'{i:02}.cls']}/{i}.png": plain(NAMES[i // 20])
                           for i in range(60)})
    few = [list(opened(tmp_path / "folders", limit=12)[0].labelled("test")) for _ in range(2)]
    assert few[0] == few[1] and len(few[0]) == 12 and {label for _, label in few[0]} == {0, 1, 2}
    to_learn = opened(tmp_path / "test" / "0.tar", limit=12)[0]
    assert labels == [label for _, label in to_learn.labelled("train")]
    images, captions = evaluation.take(embedder(), opened(tmp_path, limit=9)[0], 9)
    assert images.shape == (9, 3, 8, 8) and len(set(captions)) == 3
    colours = common.to_unit(images).mean((2, 3)).argmax(1).tolist()
    assert [["red", "green", "blue"][c] for c in colours] == [c.split()[-1][:-1] for c in captions]


def test_unreadable_samples_are_skipped_and_reported(tmp_path, capsys):
    extra = {"t1.jpg": b"no image", "t1.cls": "1", "t2.jpg": plain("red"), "t3.cls": "0",
             "t4.jpg": plain("red"), "t4.cls": "0 2"}
    data, options = opened(write_labelled(tmp_path, extra=extra))
    assert evaluation.zeroshot(embedder(), data, options)["zeroshot"][0].tolist() == [True] * 6
    printed = capsys.readouterr().out
    assert "skipped 1 of 7 images that cannot be read" in printed
    assert "2 x no label, the last " in printed and "1 x no image" in printed
    (tmp_path / "test/1.tar").unlink()
    write_split(tmp_path / "test", {"a.jpg": b"x" * 5000, "a.cls": "1"})
    with pytest.raises(common.UserError, match="None of the 1 images") as error:
        evaluation.zeroshot(embedder(), *opened(tmp_path))
    assert len(str(error.value)) < 320


def write_winoground(directory):
    """Write three pairs of Winoground. The second pair lacks its second image."""
    rows = [{"id": 0, "image_0": "a", "image_1": "b", "caption_0": "red", "caption_1": "blue"},
            {"id": 1, "image_0": "c", "image_1": "d", "caption_0": "green", "caption_1": "red"},
            {"id": 2, "image_0": "c", "image_1": "a", "caption_0": "green", "caption_1": "red"}]
    images = {f"images/{name}.png": plain(c) for name, c in zip("abc", ("red", "blue", "green"))}
    rows.append(rows[0])  # a line that stands in the file twice counts once
    write_files(directory, images | {"examples.jsonl": "\n".join(map(json.dumps, rows))})


def test_winoground_is_evaluated_from_its_own_files(tmp_path, capsys):
    write_winoground(tmp_path / "w")
    (tmp_path / "w" / "images").rename(tmp_path / "photos")
    data, options = opened(tmp_path / "w", image_root=str(tmp_path / "photos"))
    assert evaluation.tasks_to_run(options, data, embedder().model) == ["winoground"]
    result = evaluation.winoground(embedder(), data, options)
    assert {key: value.tolist() for key, (value, *_) in result.items()} == {
        "winoground/text": [True] * 2, "winoground/image": [True] * 2,
        "winoground/group": [True] * 2}
    assert "skipped 1 of 6 images" in capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patch:  # both captions score highest with image 1
        scores = torch.tensor([[1.0, 0.0], [2.0, 3.0]])                     # (images, captions)
        patch.setattr(evaluation.Embedder, "similarity", lambda *pair: scores)
        result = evaluation.winoground(embedder(), data, options)
    found = [(value.tolist(), chance) for value, chance, _ in result.values()]
    assert found == [([True] * 2, 1 / 4), ([False] * 2, 1 / 4), ([False] * 2, 1 / 6)]
    (tmp_path / "photos").rename(tmp_path / "w" / "images")  # their folder in the release
    data, options = opened(tmp_path / "w", limit=1)
    assert evaluation.winoground(embedder(), data, options)["winoground/text"][0].tolist() == [True]
    (tmp_path / "w/images/a.png").unlink()
    with pytest.raises(common.UserError, match="has no pair of images of which both can be read"):
        evaluation.winoground(embedder(), *opened(tmp_path / "w"))


def test_a_large_limit_draws_more_scenes_and_retrieval_ranks_in_pools():
    """R@1 depends on the number of candidates. Pools keep that number fixed, whatever the limit is.

    R@1 is then the mean over the pools. The fourth pool has too few images and is left out.
    """
    n = evaluation.WORLD_N
    data, options = opened("shapes:size=16,fillers=0", limit=3300)
    assert len(list(data.labelled("zeroshot"))) == n * 33 // 10 and data.pool == n // 2
    assert len(list(data.captioned("captioned"))) == n // 2 * 33 // 10
    embed = embedder()
    found = evaluation.retrieval(embed, data, options)
    pairs = list(data.captioned("captioned"))
    single = [evaluation.retrieval(embed, evaluation.EvalSet(
        captioned=lambda purpose: iter(pairs[i : i + n // 2])), options)
        for i in range(0, 3 * (n // 2), n // 2)]
    for name in ("i2t/R@1", "t2i/R@5"):
        values = [evaluation.to_float(x[name]) for x in single]
        assert evaluation.to_float(found[name]) == pytest.approx(sum(values) / 3)
    assert found["i2t/R@1"][1] == pytest.approx(1 / (n // 2))
    assert found["retrieval/images"] == 3 * (n // 2)


@pytest.mark.parametrize("way", ["named", "numbers", "from 1", "--classes", "own"])
def test_labels_of_shards_match_class_folders_only_if_their_order_is_known(
        tmp_path, capsys, way):
    """The labels 0, 1, 2 of the shards are green, red, blue. Sorted folders are blue, green, red:
    the classes turn in a circle, so that the way there is not the way back.

    k-NN would silently compare different classes, so an unknown order raises an error. Each `way`
    names the folders or gives a --classes FILE: "named": green, red, blue; unknown. "numbers": 0,
    1, 2; known. "from 1": 1, 2, 3; unknown. "own": the FILE has the folders' names in the order of
    the labels; known. "--classes": the FILE has other names, and the labels have the order of the
    sorted folders; known.
    """
    order = ["green", "red", "blue"]
    names = {"numbers": ["0", "1", "2"], "from 1": ["1", "2", "3"]}.get(way, order)
    write_files(tmp_path, {f"test/{name}/{i}.png": plain(colour)
                           for name, colour in zip(names, order) for i in range(2)})
    labels = [sorted(names).index(name) for name in names] if way == "--classes" else range(3)
    members = {}
    for label, colour in zip(labels, order):
        members |= {f"{label}.png": plain(colour), f"{label}.cls": str(label)}
    shards = write_tar(tmp_path / "0.tar", members)
    (tmp_path / "names.txt").write_text("\n".join(order if way == "own" else
                                                  ["azure", "grass", "blood"]))
    classes = str(tmp_path / "names.txt") if way in ("--classes", "own") else None
    data, options = opened(tmp_path / "test", train_data=shards, classes=classes)
    if way in ("named", "from 1"):
        with pytest.raises(common.UserError, match="Shards number .* --classes FILE"):
            evaluation.knn(embedder(), data, options)
        return
    assert evaluation.knn(embedder(), data, options)["knn"][0] == 1
    if way == "own":  # the file has the folders' names in the order of the labels
        assert data.classes.names == ["blue", "green", "red"]
    elif classes:
        assert data.classes.names == ["azure", "grass", "blood"]
        assert "classes: blue = azure, ..., red = blood" in capsys.readouterr().out


def test_a_class_name_that_is_another_folders_name_is_refused(tmp_path):
    (tmp_path / "names.txt").write_text("red\nblue\nsky\n")
    with pytest.raises(common.UserError, match="the folder blue the name of another, red"):
        common.class_names(["blue", "green", "red"], tmp_path / "names.txt")


def test_classes_of_imagenet_are_known_by_their_numbers(tmp_path):
    folders = ["n01440764", "n01443537"]
    (tmp_path / "names.txt").write_text("n01443537 goldfish\nn01440764 tench, Tinca tinca\n")
    names, _ = common.class_names(folders, tmp_path / "names.txt")
    assert names == ["tench, Tinca tinca", "goldfish"]
    assert common.match_names(["n01443537 goldfish", "n01440764 tench"], folders) == [1, 0]
    (tmp_path / "names.txt").write_text("Red\nBlue\nSky\n")
    with pytest.raises(common.UserError, match="the folder blue the name of another, red"):
        common.class_names(["blue", "green", "red"], tmp_path / "names.txt")


@pytest.mark.parametrize("names, known, places", [
    (["crane", "crane", "dog"], ["crane", "crane", "dog"], [0, 1, 2]),  # equal lists
    (["A", "a"], ["a", "A"], None),
    (["Dining Table", "cat"], ["cat", "dining_table"], [1, 0]),
    (["cafe\u0301", "bar"], ["bar", "caf\u00e9"], [1, 0]),               # two ways to write é
    (["red sky", "blue sea"], ["red", "blue"], None),
    (["cat", "cat"], ["cat", "dog"], None),
    (["dog", "crane", "crane"], ["crane", "crane", "dog"], None),        # which crane is which?
    (["old dog", "OLD DOG"], ["old_dog", "Old_Dog"], None)])
def test_names_are_matched_one_to_one(names, known, places):
    assert common.match_names(names, known) == places


def test_class_folders_to_learn_from_are_matched_by_name(tmp_path):
    """The folders "a", "B", "c" sort as B, a, c; the folders "A", "b", "C" sort as A, C, b."""
    for folders, colour in (("test/a train/A", "red"), ("test/B train/b", "blue"),
                            ("test/c train/C", "green")):
        write_files(tmp_path, {f"{folder}/0.png": plain(colour) for folder in folders.split()})
    data, options = opened(tmp_path / "test", train_data=str(tmp_path / "train"))
    assert evaluation.knn(embedder(), data, options)["knn"][0] == 1


@pytest.mark.parametrize("lines, message", [
    ("red green bleu", "the folder blue the name of another, red"), ("a b", "has 2 names for 3"),
    ("red red blue", "the folder blue the name of another, red")])
def test_knn_refuses_a_file_of_classes_that_does_not_fit(tmp_path, lines, message):
    """Such a file would give a label of shards the class of another label."""
    make_folders(tmp_path / "test")
    (tmp_path / "names.txt").write_text(lines.replace(" ", "\n"))
    with pytest.raises(common.UserError, match=message):
        opened(tmp_path / "test", classes=str(tmp_path / "names.txt"))
