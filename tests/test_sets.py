"""The field's evaluation sets: CLIP_benchmark's webdatasets, Winoground."""

import io
import json
import shutil
import tarfile

import pytest
from PIL import Image

import common
import eval as evaluation
from test_eval import SlotOracle, embedder, make_folders, opened

JPEG = {"quality": 100, "subsampling": 0}  # so that colours stay
NAMES = ["blue", "green", "red"]


def encode(colour, suffix="jpg"):
    file = io.BytesIO()
    kind, settings = {"jpg": ("jpeg", JPEG), "webp": ("webp", {"lossless": True}),
                      "png": ("png", {})}[suffix]
    Image.new("RGB", (20, 12), colour).save(file, kind, **settings)
    return file.getvalue()


def write_split(directory, shards):
    """shards: a list of dicts {name of a member: bytes or text}; CLIP_benchmark's SPLIT/*.tar."""
    directory.mkdir(parents=True, exist_ok=True)
    for i, members in enumerate(shards):
        with tarfile.open(directory / f"{i}.tar", "w") as tar:
            for name, data in members.items():
                data = data if isinstance(data, bytes) else data.encode()
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    (directory / "nshards.txt").write_text(f"{len(shards)}\n")


def write_labelled(directory, split="test", extra=()):
    """Six images of three colours in two shards, of three formats."""
    shards = [{}, {}]
    for i in range(6):
        suffix, colour = ("jpg", "webp", "png")[i % 3], NAMES[i % 3]
        shards[i // 3] |= {f"s{i:07}.{suffix}": encode(colour, suffix), f"s{i:07}.cls": f"{i % 3}"}
    shards[1] |= dict(extra)
    write_split(directory / split, shards)
    (directory / "classnames.txt").write_text("".join(f"{name}\n" for name in NAMES))
    (directory / "zeroshot_classification_templates.txt").write_text("a {c}.\nthe {c}\n")
    return str(directory)


def write_captioned(directory, captions):
    """captions: [(colour, text of KEY.txt), ...]."""
    members = {}
    for i, (colour, text) in enumerate(captions):
        members |= {f"s{i}.jpg": encode(colour), f"s{i}.txt": text}
    write_split(directory / "test", [members])
    (directory / "dataset_type.txt").write_text("retrieval\n")
    return str(directory)


def test_the_names_and_prompts_of_a_folder_are_used_unless_others_are_given(run_of, tmp_path):
    spec = write_labelled(tmp_path / "colours")
    data, options = opened(spec)
    assert options.split == "test" and options.data == spec
    assert data.classes.prompts == ["a blue.", "the blue", "a green.", "the green", "a red.",
                                    "the red"]
    result = evaluation.zeroshot(embedder(), data, options)
    assert result["zeroshot"].tolist() == [True] * 6 and result["zeroshot/chance"] == 1 / 3
    run = shutil.copytree(run_of("sparc"), tmp_path / "run")
    evaluation.main([str(run), "--task", "zeroshot", "--data", spec])
    settings = json.loads((run / "evals.jsonl").read_text().splitlines()[-1])["settings"]
    assert settings["class_names"] == f"{spec}/classnames.txt"
    assert settings["templates"] == ["a {c}.", "the {c}"]
    (tmp_path / "names.txt").write_text("sky\n\nblood\n")
    data, _ = opened(spec, classes=str(tmp_path / "names.txt"), templates=["{a}!"])
    assert data.classes.prompts == ["a sky!", "a !", "a blood!"]  # CLEVR has a name like this
    (tmp_path / "colours" / "zeroshot_classification_templates.txt").unlink()
    assert opened(spec)[0].classes.prompts[0] == "a photo of a blue."


def test_folders_and_the_same_images_in_class_folders_have_the_same_results(run_of, tmp_path):
    (embed, _), members = evaluation.load_run(run_of("sparc")), {}
    make_folders(tmp_path / "folders")
    for path in sorted(tmp_path.glob("folders/*/[01].png")):
        key, label = path.parent.name + path.stem, NAMES.index(path.parent.name)
        members |= {f"{key}.png": path.read_bytes(), f"{key}.cls": str(label)}
    for split in ("test", "train"):
        write_split(tmp_path / "shards" / split, [members])
    (tmp_path / "shards" / "classnames.txt").write_text("\n".join(NAMES))
    results = []
    for spec, train in (("shards", None), ("folders", tmp_path / "shards" / "train" / "0.tar")):
        tasks = ["zeroshot", "knn", "linear"]
        data, options = opened(tmp_path / spec, tasks=tasks, train_data=train and str(train),
                               templates=["a {c}"])
        results.append(evaluation.evaluate(embed, data, options))
    assert results[0] == results[1] and {"zeroshot", "knn", "linear"} <= results[0].keys()


def test_knn_and_slots_learn_from_the_split_train_or_else_from_train_data(tmp_path):
    spec = write_labelled(tmp_path / "with")
    write_labelled(tmp_path / "with", "train")
    data, options = opened(spec, learn_limit=4)
    pairs = evaluation.open_training_set(options, data)
    assert options.train_data == spec and len(list(pairs())) == 4
    assert evaluation.knn(embedder(), data, options)["knn"] > 0.3
    assert evaluation.knn(embedder(), *opened(spec))["knn"] == 1
    result = evaluation.slots(embedder(SlotOracle()), *opened(spec, select=spec))
    assert result["slots/accuracy_best"] == 1 and result["slots/best_half/zeroshot"] == 1
    with pytest.raises(common.UserError, match="need --train-data, other class folders"):
        evaluation.knn(embedder(), *opened(spec, split="train"))
    alone = write_labelled(tmp_path / "alone")
    make_folders(tmp_path / "folders")
    for train in (spec, str(tmp_path / "folders"), f"{spec}/train/{{0..1}}.tar"):
        assert evaluation.knn(embedder(), *opened(alone, train_data=train))["knn"] == 1


def test_retrieval_with_several_captions_an_image(tmp_path, capsys):
    spec = write_captioned(tmp_path / "coco", [
        ("red", "red\nred red\r\n"), ("green", "green"), ("blue", " \n\n"), ("blue", "blue")])
    data, options = opened(spec)
    assert [captions for _, captions in data.captioned()] == [["red", "red red"], ["green"],
                                                              ["blue"]]
    assert "1 x empty caption, the last " in capsys.readouterr().out
    result = evaluation.retrieval(embedder(), data, options)
    assert result["i2t/R@1"] == result["t2i/R@1"] == 1 and result["retrieval/images"] == 3
    images, captions = evaluation.take(embedder(), data, 2)
    assert captions == ["red", "green"] and images.shape == (2, 3, 8, 8)


def test_a_limit_takes_random_images_that_are_always_the_same(tmp_path):
    members = {}
    for i in range(60):
        members |= {f"{i:02}.png": encode(NAMES[i // 20], "png"), f"{i:02}.cls": str(i // 20)}
    write_split(tmp_path / "test", [members])
    (tmp_path / "classnames.txt").write_text("\n".join(NAMES))
    labels = [label for _, label in opened(tmp_path, limit=12)[0].labelled("test")]
    assert len(labels) == 12 and len(set(labels)) == 3
    assert labels == [label for _, label in opened(tmp_path, limit=12)[0].labelled("test")]
    to_learn = opened(tmp_path / "test" / "0.tar", limit=12)[0]
    assert labels == [label for _, label in to_learn.labelled("train")]
    images, captions = evaluation.take(embedder(), opened(tmp_path)[0], 9)
    assert images.shape == (9, 3, 8, 8) and len(set(captions)) == 3
    colours = common.denormalize(images).mean((2, 3)).argmax(1).tolist()
    assert [["red", "green", "blue"][c] for c in colours] == [c.split()[-1][:-1] for c in captions]


def test_what_cannot_be_read_is_skipped_and_reported(tmp_path, capsys):
    extra = {"t1.jpg": b"no image", "t1.cls": "1", "t2.jpg": encode("red"), "t3.cls": "0",
             "t4.jpg": encode("red"), "t4.cls": "0 2"}
    data, options = opened(write_labelled(tmp_path, extra=extra))
    assert evaluation.zeroshot(embedder(), data, options)["zeroshot"].tolist() == [True] * 6
    printed = capsys.readouterr().out
    assert "skipped 1 of 7 images that cannot be read" in printed
    assert "2 x no label, the last " in printed and "1 x no image" in printed
    write_split(tmp_path / "test", [{"a.jpg": b"x" * 5000, "a.cls": "1"}])
    with pytest.raises(common.UserError, match="None of the 1 images") as error:
        evaluation.zeroshot(embedder(), *opened(tmp_path))
    assert len(str(error.value)) < 300


def write_winoground(directory):
    """Two pairs, the second one without its second image."""
    (directory / "images").mkdir(parents=True)
    rows = []
    for i, (a, b) in enumerate([("red", "blue"), ("green", "red")]):
        rows.append({"id": i, "image_0": f"ex_{i}_img_0", "image_1": f"ex_{i}_img_1",
                     "caption_0": a, "caption_1": b, "tag": "x"})
        for k, colour in enumerate((a, b)):
            Image.new("RGB", (16, 16), colour).save(directory / f"images/ex_{i}_img_{k}.png")
    (directory / "images/ex_1_img_1.png").unlink()
    (directory / "examples.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_winogrounds_own_files(tmp_path, capsys):
    write_winoground(tmp_path / "w")
    (tmp_path / "w" / "images").rename(tmp_path / "photos")
    data, options = opened(tmp_path / "w", image_root=str(tmp_path / "photos"))
    assert evaluation.check(options, data, has_text=True) == ["winoground"]
    result = evaluation.winoground(embedder(), data, options)
    assert {key: value.tolist() for key, value in result.items()} == {
        "winoground/text": [True], "winoground/image": [True], "winoground/group": [True]}
    assert "skipped 1 of 4 images" in capsys.readouterr().out
    (tmp_path / "photos").rename(tmp_path / "w" / "images")  # where they lie in the release
    data, options = opened(tmp_path / "w", limit=1)
    assert evaluation.winoground(embedder(), data, options)["winoground/text"].tolist() == [True]
    for path in (tmp_path / "w" / "images").glob("*_1.png"):
        path.unlink()
    with pytest.raises(common.UserError, match="has no pair of images of which both can be read"):
        evaluation.winoground(embedder(), *opened(tmp_path / "w"))
