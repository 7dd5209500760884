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
    """Write shards {member: bytes or text} as a split in CLIP_benchmark's layout."""
    shards = {f"{i}.tar": members for i, members in enumerate(shards)}
    write_files(directory, shards | {"nshards.txt": f"{len(shards)}\n"})


def write_labelled(directory, split="test"):
    """Write six images of three colours, in three formats, as a labelled set of two shards. Return
    its SPEC."""
    shards = [{}, {}]
    for i in range(6):
        format = ("JPEG", "WEBP", "PNG")[i % 3]
        shards[i // 3] |= {f"s{i}.{format.lower()}": plain(NAMES[i % 3], format),
                           f"s{i}.cls": f"{i % 3}"}
    write_split(directory / split, *shards)
    write_files(directory, {"classnames.txt": "".join(f"{name}\n" for name in NAMES),
                            "zeroshot_classification_templates.txt": "a {c}.\nthe {c}\n"})
    return str(directory)


def test_a_sets_own_names_and_prompts_are_used_unless_others_are_given(run_of, tmp_path, capsys):
    spec = write_labelled(tmp_path / "colours")
    data, options = opened(spec)
    assert options.split == "test" and options.data == spec
    assert data.classes.prompts == ["a blue.", "the blue", "a green.", "the green", "a red.",
                                    "the red"]
    right, chance = evaluation.zeroshot(embedder(), data, options)["zeroshot"]
    assert right.tolist() == [True] * 6 and chance == 1 / 3
    with open(tmp_path / "colours/classnames.txt", "a") as file:
        file.write("\n\n")                                                  # no further class
    assert opened(spec)[0].classes.names == NAMES
    run = shutil.copytree(run_of("sparc"), tmp_path / "run")
    evaluation.main([str(run), "--task", "zeroshot", "--data", spec])
    settings = json.loads((run / "evals.jsonl").read_text().splitlines()[-1])["settings"]
    assert settings["class_names"] == f"{spec}/classnames.txt"
    assert (settings["templates"], settings["prompts"]) == (None, ["a {c}.", "the {c}"])
    assert "classnames.txt. Prompts of a class: 2, for example 'a blue.'" in capsys.readouterr().out
    (tmp_path / "names.txt").write_text("sky\n\nblood\n")
    data, _ = opened(spec, classes=str(tmp_path / "names.txt"), templates=["{a}!"])
    assert data.classes.prompts == ["a sky!", "a !", "a blood!"]  # CLEVR has an empty name, too
    (tmp_path / "names.txt").write_text("red\nblue\ngreen\n")  # in another order
    assert opened(spec, classes=str(tmp_path / "names.txt"))[0].classes.names == NAMES
    (tmp_path / "colours" / "zeroshot_classification_templates.txt").unlink()
    assert opened(spec)[0].classes.prompts[0] == "a photo of a blue."


def test_knn_and_slots_learn_from_the_split_train_or_from_the_one_that_is_named(tmp_path):
    """SPARO (Sec. 5.1) ranks on validation images. The split train of "wrong" has wrong labels."""
    spec, wrong, alone = (write_labelled(tmp_path / name) for name in ("with", "wrong", "alone"))
    write_labelled(tmp_path / "with", "train")
    write_split(tmp_path / "wrong/train", {
        "0.png": plain("red"), "0.cls": "1", "1.png": plain("blue"), "1.cls": "2",
        "2.png": plain("green"), "2.cls": "0"})
    make_folders(tmp_path / "folders")
    write_split(tmp_path / "one/test", {"0.png": plain("blue"), "0.cls": "0"})
    write_files(tmp_path / "one", {"classnames.txt": "sky\n"})
    assert opened(tmp_path / "one")[0].groups is None  # one class tells nothing
    data, options = opened(spec, learn_limit=4)
    assert options.train_data == spec and len(list(data.learn())) == 4
    assert evaluation.knn(embedder(), *opened(spec))["knn"][0] == 1
    folders = str(tmp_path / "folders")
    for train in (spec, folders, f"{spec}/train/{{0..1}}.tar", f"{wrong}:split=test"):
        assert evaluation.knn(embedder(), *opened(alone, train_data=train))["knn"][0] == 1
    slots = lambda spec, select: evaluation.slots(embedder(SlotOracle()),
                                                  *opened(spec, select=select))
    for split, best in (("", 1 / 3), (":split=train", 1 / 3), (":split=test", 1)):
        assert slots(folders, wrong + split)["slots/accuracy_best"] == pytest.approx(best)
    assert slots(spec, spec)["slots/best_half/zeroshot"][0].all()
    write_files(tmp_path, {"names.txt": "sea\ngrass\nblood\n"})  # --classes names those of --data
    data, options = opened(spec, select=folders, classes=str(tmp_path / "names.txt"))
    assert data.classes.names[0] == "sea" and evaluation.open_selection(
        options, data, "slots", "zeroshot", "").classes.names == NAMES
    for select in (alone, f"{spec}:split=val"):
        with pytest.raises(common.UserError, match="give --split, one of test.*DIR:split=NAME"):
            slots(folders, select)
    with pytest.raises(common.UserError, match="not the data to evaluate"):
        slots(spec, f"{spec}:split=test")


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
    members, folders = {}, {}
    for i in range(60):
        members |= {f"{i:02}.png": plain(NAMES[i // 20]), f"{i:02}.cls": str(i // 20)}
        folders[f"folders/{i // 20}/{i}.png"] = plain(NAMES[i // 20])
    write_split(tmp_path / "test", members)
    write_files(tmp_path, folders | {"classnames.txt": "\n".join(NAMES)})
    draws = {}
    for spec in (tmp_path, tmp_path / "folders", tmp_path / "test/0.tar"):
        few, again = (list(opened(spec, limit=12)[0].labelled("test")) for _ in range(2))
        draws[spec.name] = [label for _, label in few]
        assert few == again and len(few) == 12 and {*draws[spec.name]} == {0, 1, 2}
    assert draws["0.tar"] == draws[tmp_path.name]
    images, captions = evaluation.take(embedder(), opened(tmp_path, limit=9)[0], 9)
    assert images.shape == (9, 3, 8, 8) and len(set(captions)) == 3
    colours = common.to_unit(images).mean((2, 3)).argmax(1).tolist()
    assert [["red", "green", "blue"][c] for c in colours] == [c.split()[-1][:-1] for c in captions]


def write_winoground(directory):
    """Write three pairs of Winoground. The second pair lacks its second image."""
    rows = [{"id": 0, "image_0": "a", "image_1": "b", "caption_0": "red", "caption_1": "blue"},
            {"id": 1, "image_0": "c", "image_1": "d", "caption_0": "green", "caption_1": "red"},
            {"id": 2, "image_0": "c", "image_1": "a", "caption_0": "green", "caption_1": "red"}]
    images = {f"images/{name}.png": plain(c) for name, c in zip("abc", ("red", "blue", "green"))}
    rows.append(rows[0])  # a line that stands in the file twice counts once
    write_files(directory, images | {"examples.jsonl": "\n".join(map(json.dumps, rows))})


def test_winoground_is_evaluated_from_its_own_files(tmp_path, monkeypatch, capsys):
    write_winoground(tmp_path / "w")
    (tmp_path / "w" / "images").rename(tmp_path / "photos")
    data, options = opened(tmp_path / "w", image_root=str(tmp_path / "photos"))
    assert evaluation.tasks_to_run(options, data, embedder().model) == ["winoground"]
    result = evaluation.winoground(embedder(), data, options)
    chances = {"winoground/text": 1 / 4, "winoground/image": 1 / 4, "winoground/group": 1 / 6}
    assert {name: chance for name, (_, chance) in result.items()} == chances
    assert all(right.tolist() == [True] * 2 for right, _ in result.values())
    assert "skipped 1 of 6 images" in capsys.readouterr().out
    scores = torch.tensor([[1.0, 0.0], [2.0, 3.0]])     # both captions score highest with image 1
    with monkeypatch.context() as patch:
        patch.setattr(evaluation.Embedder, "similarity", lambda *pair: scores)
        result = evaluation.winoground(embedder(), data, options)
    assert [right.tolist() for right, _ in result.values()] == [[True] * 2, *2 * [[False] * 2]]
    (tmp_path / "photos").rename(tmp_path / "w" / "images")  # their folder in the release
    data, options = opened(tmp_path / "w", limit=1)
    assert evaluation.winoground(embedder(), data, options)["winoground/text"][0].tolist() == [True]


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


@pytest.mark.parametrize("folders, lines, found", [
    ("green red blue", None, None), ("0 1 2", None, "0 1 2"), ("1 2 3", None, None),
    ("green red blue", "green red blue", "blue green red"),
    ("green red blue", "azure grass blood", "azure grass blood")])
def test_labels_of_shards_match_class_folders_only_if_their_order_is_known(
        tmp_path, folders, lines, found):
    """The colours of the labels 0, 1, 2 are green, red, blue, those of the sorted folders blue,
    green, red: the classes turn in a circle, so that the way there is not the way back. Where the
    lines of --classes are new names, the labels have the order of the sorted folders. k-NN would
    silently compare different classes, so an unknown order raises an error.

    found: the names of the classes; None: their order is unknown.
    """
    order, folders = ["green", "red", "blue"], folders.split()
    write_files(tmp_path, {f"test/{name}/{i}.png": plain(colour)
                           for name, colour in zip(folders, order) for i in range(2)})
    is_renamed, members = bool(lines) and "azure" in lines, {}
    for i, (name, colour) in enumerate(zip(folders, order)):
        label = sorted(folders).index(name) if is_renamed else i
        members |= {f"{i}.png": plain(colour), f"{i}.cls": str(label)}
    write_files(tmp_path, {"names.txt": (lines or "").replace(" ", "\n")})
    data, options = opened(tmp_path / "test", classes=lines and str(tmp_path / "names.txt"),
                           train_data=write_tar(tmp_path / "0.tar", members))
    if found:
        assert evaluation.knn(embedder(), data, options)["knn"][0] == 1
        assert data.classes.names == found.split()
    else:
        with pytest.raises(common.UserError, match="name the classes of shards by eval"):
            evaluation.knn(embedder(), data, options)


def test_classes_of_imagenet_are_known_by_their_numbers(tmp_path):
    """ImageNet-A has 200 of the 1,000 classes that the file names."""
    folders, lines = ["n01440764", "n01443537"], "n01443537 goldfish\nn01440764 tench, Tinca\n"
    for text in lines, f"n02119789 kit fox\n{lines}", lines.replace(" ", "\t", 2):
        (tmp_path / "names.txt").write_text(text)
        names, _ = common.class_names(folders, tmp_path / "names.txt")
        assert names == ["tench, Tinca", "goldfish"]
    (tmp_path / "names.txt").write_text("old Bird\ndog\n")
    pets = ["001.Old_Bird", "n02085620-Dog"]  # as in CUB, and in Stanford's dogs
    assert common.class_names(pets)[0] == ["Old Bird", "Dog"]
    assert common.class_names(pets[::-1], tmp_path / "names.txt")[0] == ["dog", "old Bird"]
    (tmp_path / "names.txt").write_text("\n".join(folders))
    with pytest.raises(common.UserError, match="n01440764 has a number of ImageNet instead of a"):
        common.class_names(folders, tmp_path / "names.txt")
    assert common.match_names(["n01443537 goldfish", "n01440764 tench"], folders) == [1, 0]
    for lines in "Red\nBlue\nSky\n", "red\nred\nblue\n":  # labels would get another's class
        (tmp_path / "names.txt").write_text(lines)
        with pytest.raises(common.UserError, match="the class blue the name of another, red"):
            common.class_names(["blue", "green", "red"], tmp_path / "names.txt")


@pytest.mark.parametrize("names, known, places", [
    (["crane", "crane", "dog"], ["crane", "crane", "dog"], [0, 1, 2]),  # equal lists
    (["A", "a", "B", "b"], ["A", "B", "a", "b"], [0, 2, 1, 3]),         # exact matches come first
    (["A", "a", "Old Dog"], ["a", "old_dog", "A"], [2, 0, 1]),
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
