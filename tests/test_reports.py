"""What eval.py writes and prints, its options, and the Python functions that the README shows."""

import dataclasses
import io
import json
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import common
import eval as evaluation
import train
from helpers import ROOT, SMALL, picture, train_alone, write_files, write_table
from test_eval import make_folders, make_voc_folder, opened, rows_of, sugarcrepe
from test_benchmarks import plain, write_labelled, write_winoground


def read(run):
    """Return eval.json of a run."""
    return json.loads((run / "eval.json").read_text())


def lines(run):
    """Return the lines of evals.jsonl: a dict for each evaluation."""
    return [json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name, step", [("sparc", 6), ("bam", 4)])
def test_evaluation_at_the_end_of_training_equals_eval_py(run_of, tmp_path, name, step):
    run = shutil.copytree(run_of(name), tmp_path / "run")
    at_end = read(run)
    (run / "eval.json").unlink()
    evaluation.main([str(run), "--workers", "1"])
    assert read(run) == at_end and lines(run) == [at_end]
    expected = {"step": step, "task": None, "data": "shapes:size=16,objects=2",
                "checkpoint": "last.pt"}
    assert expected.items() <= at_end.pop("settings").items()
    assert all(isinstance(value, (int, float)) for value in at_end.values())


def test_evaluation_at_the_end_of_training_on_files_equals_eval_py(tmp_path):
    spec, run = write_table(tmp_path, 4), tmp_path / "run"
    train.main([*SMALL["sparc"], "--data", spec, "--image-size", "16", "--eval-data", spec,
                "--batch", "4", "--out", str(run)])
    at_end = read(run)
    assert (at_end["settings"]["limit"], at_end["settings"]["learn_limit"]) == (1000, 20_000)
    evaluation.main([str(run)])
    assert read(run) == at_end and at_end["settings"]["on_training_images"]
    evaluation.main([str(run), "--data", spec])  # all images
    assert lines(run)[-1]["settings"]["limit"] is None and read(run) == at_end


def test_evaluations_with_other_options_overwrite_nothing(run, tmp_path):
    """Each evaluation adds a line to evals.jsonl. eval.json and the run's pictures do not change."""
    folders, pictures = tmp_path / ("long" * 30), "zeroshot,alignment,segmentation"
    make_folders(folders)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    own = read(run)["settings"]
    for flags, changes in (
            (["--split", "val"], {"split": "val"}),
            (["--task", "zeroshot", "--templates", "two {}"],
             {"task": "zeroshot", "templates": ["two {}"], "prompts": ["two {}"]}),
            (["--task", "retrieval", "--caption-prefix", "a photo of"],
             {"task": "retrieval", "caption_prefix": "a photo of"}),
            (["--task", "knn", "--label-fraction", ".5"], {"task": "knn", "label_fraction": ".5"}),
            (["--task", pictures, "--limit", "2"], {"task": pictures, "limit": 2})):
        evaluation.main([str(run), *flags])
        assert lines(run)[-1]["settings"] == own | changes
    assert "i2t/R@1" not in lines(run)[2]
    evaluation.main([str(run), "--data", str(folders), "--templates", "a {}"])
    settings = lines(run)[-1]["settings"]
    assert (settings["class_names"], settings["prompts"]) == ("folders", ["a {}"])
    after = {path.name: path.read_bytes() for path in run.iterdir()}
    new = after.keys() - before.keys()
    assert after | before | {"evals.jsonl": after["evals.jsonl"]} == after and len(lines(run)) == 7
    assert len(new) == 2 + 2 + 1 and max(map(len, new)) < 100  # val, --limit, folders
    (run / "alignment.png").unlink()
    (run / "segmentation.png").unlink()
    evaluation.main([str(run), "--task", "alignment"])
    assert (run / "alignment.png").exists() and not (run / "segmentation.png").exists()
    assert {key.partition("/")[0] for key in lines(run)[-1]} == {"settings", "alignment"}


def test_a_task_that_fails_costs_no_figure_of_the_others(run, monkeypatch, capsys):
    def fail(*given):
        raise common.UserError("no image")

    monkeypatch.setitem(evaluation.TASKS, "negatives", evaluation.TASKS["negatives"]._replace(run=fail))
    with pytest.raises(common.UserError, match="^Task negatives: no image"):
        evaluation.main([str(run), "--task", "zeroshot,negatives,alignment"])
    record = lines(run)[-1]
    assert {"zeroshot", "alignment/own/colour"} <= record.keys() and record["complete"] is False
    monkeypatch.setitem(evaluation.TASKS, "negatives", evaluation.TASKS["negatives"]._replace(
        run=lambda *given: {"negatives": math.nan}))
    evaluation.main([str(run), "--task", "zeroshot,negatives"])
    assert re.search("negatives +nan", capsys.readouterr().out)
    assert "complete" not in lines(run)[-1] and lines(run)[-1]["negatives"] is None


def test_relative_paths_of_a_run_mean_the_directory_of_its_training(tmp_path, monkeypatch):
    write_files(tmp_path / "here", {f"photos/{split}/{name}/{split}{i}.png": plain(name)
                                    for split in ("train", "test") for name in ("red", "blue")
                                    for i in range(2)})
    run = tmp_path / "run"
    monkeypatch.chdir(tmp_path / "here")
    train.main([*SMALL["bam"], "--data", "photos/train", "--eval-data", "photos/test",
                "--image-size", "16", "--batch", "4", "--out", str(run)])
    config = common.read_config(run) | {"data": "a/0.tar::b/0.tar", "image_root": "photos"}
    write_files(tmp_path, {"joined/config.json": json.dumps(config)})
    monkeypatch.chdir(tmp_path)
    assert evaluation.settings_of_run(str(run))[1].data == str(tmp_path / "here/photos/train")
    _, args = evaluation.settings_of_run(str(tmp_path / "joined"))
    assert args.data == f"{tmp_path}/here/a/0.tar::{tmp_path}/here/b/0.tar"
    assert args.image_root == f"{tmp_path}/here/photos"
    evaluation.main([str(run)])
    assert [line["knn"] for line in lines(run)] == [1, 1]
    train_alone(["--resume", "--out", run])                         # reads here/photos, too
    (tmp_path / "here/photos").rename(tmp_path / "here/moved")
    with pytest.raises(common.UserError, match="here/photos/test does not exist"):
        evaluation.main([str(run)])


def test_options_are_the_runs_own_unless_flags_say_otherwise(tmp_path):
    args = evaluation.METHODS["bam"].Settings()
    vars(args).update(data="a.csv", eval_data="b/test", image_root="r", image_size=8, workers=2)
    vars(args).update(probe="sgd", folder_captions=False, data_path="/a.csv")
    own = evaluation.options_of({}, args)
    asked = {"workers": 7, "task": "knn", "batch": 5, "device": "cpu"}  # these change no figure
    assert evaluation.options_of(asked, args) == dataclasses.replace(own, **asked)
    every = dict.fromkeys(evaluation.NOT_OF_METRICS | {"task"}, "x")
    assert evaluation.options_of(every, args).is_own
    assert own.is_own and own.probe == "sgd"
    assert (own.data, own.train_data, own.split, own.image_root) == ("b/test", "a.csv", "all", "r")
    for flags, expected in (
            ({"data": "b/test"}, (None, None, None)), ({"limit": 7}, (7, 20_000, "r")),
            ({"data": "c", "image_root": "s", "limit": 3}, (3, None, "s")),
            ({"probe": "adamw"}, (1000, 20_000, "r")), ({"checkpoint": "x"}, (1000, 20_000, "r"))):
        options = evaluation.options_of(flags, args)
        assert (options.limit, options.learn_limit, options.image_root) == expected
        assert not options.is_own and options.train_data == "a.csv"
        assert all(getattr(options, name) == value for name, value in flags.items())


def test_options_tell_whether_the_split_was_trained_on():
    args = train.parse_args(["--method", "sparc", "--data", "kar.json:split=val"])
    vars(args).update(folder_captions=False, data_path=str(Path("kar.json").resolve()))
    own = evaluation.options_of({}, args)
    assert own.on_training_images and own.train_data is None
    for split, seen in (("test", False), ("val", True)):
        options = evaluation.options_of({"data": "kar.json", "split": split}, args)
        assert options.on_training_images == seen


def test_a_record_names_what_a_probe_chose_and_the_revision(run_of, tmp_path, monkeypatch):
    run = shutil.copytree(run_of("bam"), tmp_path / "run")
    monkeypatch.setattr(common, "revision", lambda: "abc")
    evaluation.main([str(run), "--task", "linear"])
    record = lines(run)[-1]
    assert record["settings"]["git"] == "abc" and "linear/weight_decay" in record


def test_the_revision_is_that_of_the_code_wherever_it_runs(tmp_path, monkeypatch):
    """A stand-in for git prints the directory. Without git there is no revision."""
    (tmp_path / "git").write_text("#!/bin/sh\npwd\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Path(common.revision.__wrapped__()).resolve() == ROOT.resolve()
    (tmp_path / "git").unlink()
    assert common.revision.__wrapped__() is None


def test_limit_means_the_same_for_every_kind_of_data(tmp_path):
    make_folders(tmp_path / "folders")
    make_voc_folder(tmp_path / "voc")
    write_winoground(tmp_path / "winoground")
    write_files(tmp_path, {"crepe/swap_att.json": sugarcrepe(("red", "blue"), ("blue", "red"))})
    table, shards = write_table(tmp_path / "table", 4), write_labelled(tmp_path / "shards")
    world = "shapes:size=16,objects=2"
    for spec, name, *purpose in (
            (world, "captioned", "captioned"), (world, "hard_negatives"), (world, "captioned", "search"),
            (world, "labelled", "test"), (world, "maps", "segmentation"), (table, "captioned", ""),
            (table, "captioned", "search"), (tmp_path / "crepe", "hard_negatives"),
            (shards, "labelled", "test"),
            (tmp_path / "folders", "labelled", "test"), (tmp_path / "voc", "maps", "segmentation")):
        few, all = (getattr(opened(spec, limit=n)[0], name)(*purpose) for n in (1, None))
        assert len(list(few)) == 1 < len(list(all))
    assert len(list(opened(tmp_path / "winoground", limit=1)[0].examples())) == 2  # one pair
    data = opened("shapes:size=16", limit=3, learn_limit=9)[0]
    assert len(list(data.labelled("slots"))) == evaluation.WORLD_N          # not evaluated
    assert len(list(data.captioned("samples"))) == 3


def test_workers_batch_and_device_are_flags_and_tf32_is_off(run_of, monkeypatch):
    run, used = str(run_of("sparc")), []
    monkeypatch.setattr(evaluation, "evaluate_and_show", lambda embed, data, options, *_: used.append(
        (embed.workers, embed.chunk, embed.device, options.workers,
         any(backend.allow_tf32 for backend in backends))) or {})
    backends = torch.backends.cudnn, torch.backends.cuda.matmul
    for backend in backends:
        backend.allow_tf32 = True
    model = evaluation.load_run(run)[0]
    assert model.encode_batches([torch.ones(1)], lambda x: x * backends[0].allow_tf32) == 0
    evaluation.main([run, *"--workers 3 --batch 7 --device cpu".split()])
    assert used == [(3, 7, "cpu", 3, False)]
    monkeypatch.setattr(evaluation, "load_run", lambda run, device, checkpoint: used.append(device)
                        or 1 / 0)
    for device in ("cuda:1", "cpu"):
        monkeypatch.setattr(common, "init_distributed", lambda: device)
        with pytest.raises(ZeroDivisionError):
            evaluation.main(["run"])
    assert used[1:] == ["cuda:1", "cpu"]
    assert all(backend.allow_tf32 for backend in backends)                  # as before


def test_one_caption_is_a_list_of_one_and_a_model_that_has_diverged_is_refused(run_of):
    model, _ = evaluation.load_run(run_of("sparc"))
    x, t = model.images(torch.rand(1, 3, 16, 16)), model.texts("a red ring")
    torch.testing.assert_close(t, model.texts(["a red ring"]))
    assert model.similarity(x, t).shape == (1, 1)
    for parameter in model.model.parameters():
        parameter.data.fill_(torch.nan)  # NaN would rank each image first
    for encode, item in ((model.texts, "a cat"), (model.images, torch.rand(1, 3, 16, 16))):
        with pytest.raises(common.UserError, match="not finite, so the run has diverged"):
            encode(item)


def test_images_in_any_form_have_the_same_encodings(run_of, tmp_path):
    """uint8 and floats, files, buffers and tensors, one image and several. All but tensors are
    cropped. Several threads may read the same open file."""
    model, _ = evaluation.load_run(run_of("sparc"))
    model.chunk, model.workers, path = 2, 4, tmp_path / "0.png"
    pixels = torch.randint(256, (3, 3, 16, 16), dtype=torch.uint8)
    rows = pixels.permute(0, 2, 3, 1).numpy()
    Image.fromarray(rows[0]).save(path)
    expected, data, written = model.images(pixels), path.read_bytes(), io.BytesIO()
    for images in (pixels / 255, list(pixels), [path, Image.fromarray(rows[1]), pixels[2] / 255],
                   pixels.double() / 255):
        torch.testing.assert_close(model.images(images), expected)
    written.write(data)  # its position is at the end
    with open(path, "rb") as file:
        for image in (str(path), Image.open(path), data, bytearray(data), memoryview(data), file,
                      written, pixels[0], next(os.scandir(tmp_path)), np.array([str(path)])):
            torch.testing.assert_close(model.images(image), expected[:1])
    torch.testing.assert_close(model.images([Image.open(path)] * 8), expected[:1].expand(8, -1))
    for empty in (model.images([]), model.images(pixels[:0]), model.texts([])):
        assert empty.shape == (0, expected.shape[1])
    floats = pixels / 255
    normalised = model.model.image_encoder.pixels(floats)
    floats[0, 0, 0, 0] = torch.nan
    for wrong in (pixels.float(), pixels.long(), floats, normalised, list(normalised), pixels[:, :1],
                  rows, rows[0], [pixels[0, :2]], [3], tmp_path):
        with pytest.raises(common.UserError, match="(?i)give paths.*of an array: Image.fromarray"):
            model.images(wrong)
    for wrong, message in ((tmp_path / "gone.jpg", "gone.jpg cannot be read: No such file"),
                           (None, "Image 1, a NoneType, cannot be read"),
                           (torch.zeros(3, 32, 32), "Tensors of a list need one size")):
        with pytest.raises(common.UserError, match=message):
            model.images([pixels[0] if torch.is_tensor(wrong) else path, wrong])
    for wrong, place in ((["a cat", float("nan")], 1), ([b"a cat"], 0), (None, 0), ([["a cat"]], 0)):
        with pytest.raises(common.UserError, match=f"need strings: sequence item {place}: expected str"):
            model.texts(wrong)


@pytest.mark.parametrize("name", ["sparc", "sparo", "stair", "bam"])
def test_one_image_and_one_caption_have_maps(run_of, tmp_path, monkeypatch, name):
    (tmp_path / "a.jpg").write_bytes(picture(40, 30))
    model, _ = evaluation.load_run(run_of(name))
    if name == "bam":
        with pytest.raises(common.UserError, match="This run has no text encoder"):
            model.maps(tmp_path / "a.jpg", "a red ring")
        return
    data, _ = opened("shapes:size=16,objects=2")
    rows_of(monkeypatch, evaluation.draw_pictures, model, data, {"alignment", "queries"})
    ids, mask = model.tokenize(["a red ring"])
    tall = torch.rand(3, 32, 16)  # a tensor is not cropped and has a grid of its own
    for image, x in ((Image.open(tmp_path / "a.jpg"), model.read(tmp_path / "a.jpg")),
                     (tall, tall)):
        found, x = model.maps(image, "a red ring"), x[None]
        with torch.no_grad():
            if name == "sparc":
                expected = model.model.align_words(x, ids, mask)[0]
            elif name == "stair":
                expected = model.model.word_maps(x, ids[0])[0].T
            else:
                expected, over_text = (part[0] for part in model.model.attend(x, ids, mask)[:2])
                expected = expected[:, 1:]                                  # without [CLS]
                torch.testing.assert_close(torch.from_numpy(found["words"]), over_text)
        grid = [side // model.model.image_encoder.patch_size for side in x.shape[2:]]
        torch.testing.assert_close(torch.from_numpy(found["patches"]), expected.unflatten(1, grid))
    assert found["tokens"] == ["[CLS]", "a", "red", "ring", "[SEP]"]
    if name == "stair":
        shown = evaluation.maps_of_words(model, tmp_path / "a.jpg", "a red ring")
        assert [weights.min() for _, weights in shown] == [0, 0, 0]         # black in each map
    # the stem of the encoder rounds 17 / 8 up
    assert model.maps(torch.rand(3, 17, 16), "a red ring")["patches"].shape[1:] == (3, 2)
    with pytest.raises(common.UserError, match="gone.jpg cannot be read"):
        model.maps(tmp_path / "gone.jpg", "a red ring")
    model.model.align_words = model.model.word_maps = model.model.slots = None  # --readout cls
    with pytest.raises(common.UserError, match="has no maps"):
        model.maps(tall, "a red ring")


def test_a_run_that_fails_does_not_stop_the_evaluation_of_others(run_of, tmp_path, capsys):
    runs = [shutil.copytree(run_of(name), tmp_path / name) for name in ("sparc", "stair", "bam")]
    (runs[0] / "last.pt").write_bytes(b"")
    capsys.readouterr()
    with pytest.raises(common.UserError, match="sparc: .*last.pt cannot be read.*bam: On shapes"):
        evaluation.main([*map(str, runs), "--task", "zeroshot"])
    assert capsys.readouterr().out.count("  zeroshot  ") == 1


def test_data_are_evaluated_one_after_the_other(run_of, tmp_path, capsys):
    runs = [shutil.copytree(run_of(name), tmp_path / name) for name in ("sparc", "bam")]
    *specs, train_data = [str(tmp_path / name) for name in ("a", "b", "train")]
    for directory in (*specs, train_data):
        make_folders(Path(directory))
    evaluation.main([*map(str, runs), "--task", "knn", "--data", *specs,
                     "--train-data", train_data])
    shown, found = capsys.readouterr().out, [lines(run)[-2:] for run in runs]
    for i, spec in enumerate(specs):
        assert [line[i]["settings"]["data"] for line in found] == [spec, spec]
    for a, b in found:
        assert f"  {a['knn']:.4f}  chance" in shown and f"  {b['knn']:.4f}  chance" in shown
    evaluation.main([str(runs[1]), "--data", specs[0], "--task", "heads"])  # needs no training data


def test_class_folders_are_evaluated_with_the_caption_of_training(tmp_path):
    make_folders(tmp_path, ["blue", "red"])
    write_files(tmp_path, {"table.csv": "image,caption\nred/0.png,a red car\n"})
    for spec, learned in ((tmp_path, True), (tmp_path / "table.csv", False), ("shapes", False)):
        args = train.parse_args([*SMALL["sparc"], "--data", str(spec), "--image-size", "16"])
        train.open_training_data(args, train.METHODS["sparc"])
        options = evaluation.options_of({"data": str(tmp_path)}, args)
        assert (options.templates is not None) == learned
        assert evaluation.is_trained_on(str(tmp_path), "all", args) == learned
        if learned:
            data = evaluation.open_eval_set(options, args.image_size)
            assert data.classes.prompts == ["a photo of a blue.", "a photo of a red."]
        asked = evaluation.options_of({"data": str(tmp_path), "templates": ["the {}"]}, args)
        assert asked.templates == ["the {}"]


def test_a_run_and_a_run_with_a_slash_are_one_run():
    assert evaluation.parse_args(["./a/", "a"])[0] == ["a", "a"]
