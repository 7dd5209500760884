"""What eval.py leaves behind: figures and their settings, the table, encodings, curves."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import common
import eval as evaluation
import train
from helpers import SMALL
from test_eval import make_folders, make_voc_folder, opened
from test_sets import write_labelled, write_winoground

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def read(run, name="eval.json"):
    return json.loads((run / name).read_text())


def make_table(root):
    make_folders(root)
    rows = [f"{colour}/{n}.png,a {colour} thing\n" for colour in ("red", "blue") for n in (0, 1)]
    (root / "photos.csv").write_text("image,caption\n" + "".join(rows))
    return str(root / "photos.csv")


# eval.json ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sparc", "bam"])
def test_the_end_of_a_training_equals_eval_py(run_of, tmp_path, name):
    run = shutil.copytree(run_of(name), tmp_path / "run")
    at_end = read(run)
    (run / "eval.json").unlink()
    evaluation.main([str(run)])
    assert read(run) == at_end
    settings = at_end.pop("settings")
    assert settings["step"] == {"sparc": 6, "bam": 4}[name]
    assert settings["data"] == "shapes:size=16,objects=2" and settings["checkpoint"] == "last.pt"
    assert all(isinstance(value, (int, float)) for value in at_end.values())


def test_the_end_of_a_training_on_files_equals_eval_py(tmp_path, capsys):
    spec, run = make_table(tmp_path), tmp_path / "run"
    train.main([*SMALL["sparc"], "--data", spec, "--image-size", "16", "--eval-data", spec,
                "--batch", "4", "--out", str(run)])
    at_end = read(run)
    assert at_end["settings"]["limit"] == 1000 and at_end["settings"]["train_limit"] == 20_000
    assert at_end["settings"]["samples"] == {"retrieval": 4}
    capsys.readouterr()
    evaluation.main([str(run)])
    assert read(run) == at_end and len(list(run.glob("eval*"))) == 1
    assert f"{run} on {spec}, split all, 1,000 samples at most:" in capsys.readouterr().out
    evaluation.main([str(run), "--data", spec])  # all of it
    args = evaluation.load_run(run)[1]
    assert evaluation.options_for(args, embed="out.npy").limit is None  # it is no evaluation
    other, = set(run.glob("eval*")) - {run / "eval.json"}
    assert read(run, other.name)["settings"]["limit"] is None and read(run) == at_end


def test_figures_of_other_settings_never_overwrite_or_join(run_of, tmp_path, capsys):
    run = shutil.copytree(run_of("sparc"), tmp_path / "run")
    before = read(run)
    evaluation.main([str(run), "--task", "zeroshot", "--limit", "5"])
    few = read(run, "eval-limit-5.json")
    assert few["settings"] == before["settings"] | {"limit": 5, "samples": {"zeroshot": 5}}
    assert "i2t/R@1" not in few
    evaluation.main([str(run), "--task", "retrieval", "--limit", "5"])  # the same settings join
    both = read(run, "eval-limit-5.json")
    assert few["zeroshot"] == both["zeroshot"]
    assert "i2t/R@1" in both and both["settings"]["samples"] == {"zeroshot": 5, "retrieval": 5}
    assert read(run) == before


@pytest.mark.parametrize("old", ["an earlier step", "a version without settings"])
def test_figures_of_an_earlier_step_or_version_make_room(run_of, tmp_path, capsys, old):
    run = shutil.copytree(run_of("sparc"), tmp_path / "run")
    now = read(run)
    stale = {"data": "shapes", "split": "test", "zeroshot": 2.0, "i2t/R@1": 3.0}
    if old == "an earlier step":
        stale = now | {"settings": now["settings"] | {"step": 2}, "zeroshot": 2.0}
    (run / "eval.json").write_text(json.dumps(stale))
    evaluation.main([str(run), "--task", "zeroshot"])
    assert read(run, "eval-1.json") == stale and read(run)["zeroshot"] == now["zeroshot"]
    assert "i2t/R@1" not in read(run) and "are now in" in capsys.readouterr().out
    (run / "eval.json").write_text(json.dumps(stale))
    evaluation.main([str(run), "--task", "zeroshot"])
    assert read(run, "eval-2.json") == stale


def test_flags_name_the_file(tmp_path):
    args = evaluation.METHODS["bam"].Config()
    vars(args).update(data="a.csv", eval_data="b/test", image_root=None, image_size=8, workers=0)
    for flags, name in (
            ({}, "eval"), ({"data": "b/test"}, "eval-b-test-all"), ({"limit": 7}, "eval-limit-7"),
            ({"data": "c", "select": "d"}, "eval-c-all-select-d"),
            ({"probe": "sgd", "train_data": "e/f"}, "eval-train-data-e-f-probe-sgd"),
            ({"select_root": "g"}, "eval-select-root-g"),
            ({"checkpoint": "stage-1.pt"}, "eval-stage-1")):
        assert evaluation.options_for(args, **flags).file_name == name
    words = tmp_path / "words.txt"
    words.write_text("red\n")
    found = evaluation.options_for(args, nouns_adjectives=str(words))
    assert found.file_name.startswith("eval-nouns-adjectives-") and found.content_words == {"red"}


def test_a_damaged_log_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text('garbage{{\n{"step": 1}\n')
    with pytest.raises(common.UserError, match="log.jsonl has a damaged line: .*; delete it"):
        evaluation.read_log(tmp_path)


# --limit and the machine --------------------------------------------------------------------------


def test_limit_means_the_same_for_every_kind_of_data(tmp_path):
    make_folders(tmp_path / "folders")
    make_voc_folder(tmp_path / "voc")
    write_winoground(tmp_path / "winoground")
    (tmp_path / "crepe").mkdir()
    for kind in ("swap_att", "add_obj"):
        item = {"caption": "red", "negative_caption": "blue"}
        items = {n: item | {"filename": f"red/{n}.png"} for n in range(2)}
        (tmp_path / "crepe" / f"{kind}.json").write_text(json.dumps(items))
    table, shards = make_table(tmp_path / "table"), write_labelled(tmp_path / "shards")
    members = {"shapes:size=16,objects=2": ["captioned", "negatives", "documents"],
               table: ["captioned", "documents"], tmp_path / "crepe": ["negatives"]}
    for spec, names in members.items():
        for name in names:
            assert len(list(getattr(opened(spec, limit=1)[0], name)())) == 1
            assert len(list(getattr(opened(spec)[0], name)())) > 1
    for spec in ("shapes:size=16", "shapes:size=16,objects=2", tmp_path / "folders", shards):
        assert len(list(opened(spec, limit=3)[0].labelled("test"))) == 3
    assert len(list(opened(tmp_path / "voc", limit=1)[0].maps("segmentation"))) == 1
    assert len(list(opened("shapes:size=16,objects=2", limit=2)[0].maps("segmentation"))) == 2
    for spec in ("shapes:size=16,objects=2", tmp_path / "winoground"):
        assert len(list(opened(spec, limit=1)[0].winoground())) == 2  # both images of a sample
    data = opened("shapes:size=16", limit=3, train_limit=9)[0]
    assert len(list(data.labelled("train"))) == len(list(data.labelled("slots"))) == 9


def test_workers_batch_and_device_are_flags(run_of, tmp_path, monkeypatch):
    run, used = shutil.copytree(run_of("sparc"), tmp_path / "run"), []
    report = evaluation.report
    monkeypatch.setattr(evaluation, "report", lambda embed, data, options, run: used.append(
        (embed.workers, embed.chunk, embed.device, options.workers)) or {})
    evaluation.main([str(run), "--workers", "3", "--batch", "7", "--device", "cpu"])
    assert used == [(3, 7, "cpu", 3)]
    monkeypatch.setattr(evaluation, "report", report)
    before = read(run)
    evaluation.main([str(run), "--workers", "2", "--task", "retrieval,zeroshot"])
    assert read(run) == before
    for flags, message in ((["--batch", "0"], "--batch 0 must be at least 1"),
                           (["--device", "gpu"], "--device gpu: ")):
        with pytest.raises(common.UserError, match=message):
            evaluation.main([str(run), *flags])


@GPU
def test_neighbours_and_probes_run_on_the_gpu():
    x, labels = torch.randn(300, 8), torch.randint(5, (300,))
    x[torch.arange(300), labels] += 3
    found = []
    for device in ("cpu", "cuda"):
        a, b = x.to(device), labels.to(device)
        head, _ = evaluation.adamw_probe(a[:200], b[:200], epochs=2)
        crops = lambda: (x[:200], labels[:200])
        other, _ = evaluation.sgd_probe(crops, a[200:], b[200:], 5, epochs=3)
        assert next(head.parameters()).device.type == next(other.parameters()).device.type == device
        right = [(probe(a[200:]).argmax(1) == b[200:]).float().mean() for probe in (head, other)]
        found.append(torch.tensor([evaluation.knn_accuracy(a[:200], b[:200], a[200:], b[200:]),
                                   *right]))
    torch.testing.assert_close(*found, atol=0.03, rtol=0)


# The table ----------------------------------------------------------------------------------------


def test_the_table_has_groups_with_data_samples_and_chance_levels(run_of, tmp_path, capsys):
    run = shutil.copytree(run_of("sparc"), tmp_path / "run")
    evaluation.main([str(run), "--task", "zeroshot,retrieval,negatives,winoground"])
    lines = capsys.readouterr().out.splitlines()
    spec = "shapes:size=16,objects=2"
    heads = [line for line in lines if line.endswith("samples:")]
    assert heads[:2] == [f"zeroshot on {spec}, 24 samples:", f"retrieval on {spec}, 12 samples:"]
    shown = {line.split()[0]: line.split()[-1] for line in lines if " chance " in line}
    assert {
        "zeroshot": "0.0156", "zeroshot/colour": "0.1250", "zeroshot/acc5": "0.0781",
        "i2t/R@1": "0.0833", "t2i/R@10": "0.8333", "negatives/swap_att": "0.5000",
        "winoground/group": "0.1667"}.items() <= shown.items()


def test_a_guess_among_the_classes_that_are_learned_from_is_the_chance_level_of_knn():
    data = evaluation.WorldSet(common.World(palette=2, heldout=3), "test")
    chance = evaluation.chance_levels({}, data)
    assert chance["zeroshot"] == 1 / 64 and chance["zeroshot/colour"] == 1 / 8
    found = [chance[f"knn{way}"] for way in ("", "/colour", "/shape")]
    assert found == [1 / 14, 1 / 2, 1 / 8]  # two of the three pairs are of the two colours


# Inference ----------------------------------------------------------------------------------------


def test_inference_in_three_lines(run_of, tmp_path):
    make_folders(tmp_path)
    files = [tmp_path / "red" / "0.png", str(tmp_path / "blue" / "0.png")]
    model, args = evaluation.load_run(run_of("sparc"))
    x = model.images(files)
    t = model.texts(["a red circle", "a blue ring"])
    assert model.similarity(x, t).shape == (2, 2) and args.method == "sparc"
    opened = [Image.open(file).convert("P") for file in files]
    torch.testing.assert_close(model.images(opened), x)
    torch.testing.assert_close(x.norm(dim=1), torch.ones(2))


def test_embed_writes_encodings_and_names(run_of, tmp_path, capsys):
    table, out = make_table(tmp_path), tmp_path / "out.npy"
    shards = write_labelled(tmp_path / "shards")
    images = [str(tmp_path / colour / f"{n}.png") for colour in ("red", "blue") for n in (0, 1)]
    for part in ("red", "green", "blue"):
        shutil.copytree(tmp_path / part, tmp_path / "classes" / part)
    for name, spec, names in (
            ("sparc", table, images), ("bam", table, images),
            ("sparc", tmp_path / "classes", None),
            ("bam", f"{shards}/test/{{0..1}}.tar", None), ("sparc", shards, None)):
        evaluation.main([str(run_of(name)), "--data", str(spec), "--embed", str(out)])
        x, lines = np.load(out), (tmp_path / "out.txt").read_text().splitlines()
        assert x.dtype == np.float32 and len(x) == len(lines) == (4 if names else 6)
        if names:
            assert lines == names
            model = evaluation.load_run(run_of(name))[0]
            np.testing.assert_allclose(x, model.images(lines, model.model.encode_image), atol=1e-6)
    assert all(line.partition(":")[2] for line in lines)  # shard:key
    evaluation.main([str(run_of("sparc")), "--embed", str(out), "--limit", "5"])
    assert len(np.load(out)) == 5
    for flags, message in ((["--embed", "x.txt"], "must end with .npy"),
                           (["--data", f"{table}::shapes", "--embed", str(out)], "has no files"),
                           (["--data", table, table, "--embed", str(out)], "give one run and one")):
        with pytest.raises(common.UserError, match=message):
            evaluation.main([str(run_of("sparc")), *flags])


def test_queries_of_dense_runs_are_answered_by_the_dot_product(run_of, tmp_path, capsys):
    run = shutil.copytree(run_of("sparo"), tmp_path / "run")
    evaluation.main([str(run), "--query", "a red circle", "--data", make_table(tmp_path / "t")])
    out = capsys.readouterr().out
    embed, _ = evaluation.load_run(run)
    names = [f"{colour}/{n}.png" for colour in ("red", "blue") for n in (0, 1)]
    files = [str(tmp_path / "t" / name) for name in names]
    scores = (embed.images(files) @ embed.texts(["a red circle"]).T)[:, 0]
    best = files[scores.argmax()]
    assert f"{max(scores):.2f}" in out and "a red circle: " in out and best in out
    assert list(run.glob("*search.png")) and not list(run.glob("*index*"))


def test_only_what_learns_needs_labels_to_learn_from(run_of, tmp_path):
    make_folders(tmp_path / "test")
    run = shutil.copytree(run_of("bam"), tmp_path / "run")
    evaluation.main([str(run), "--data", str(tmp_path / "test"), "--task", "heads"])
    for name, task in (("bam", "knn"), ("bam", "linear"), ("sparc", "zeroshot,linear")):
        run = shutil.copytree(run_of(name), tmp_path / name, dirs_exist_ok=True)
        before = sorted(run.iterdir())
        with pytest.raises(common.UserError, match="class folders need --train-data"):
            evaluation.main([str(run), "--data", str(tmp_path / "test"), "--task", task])
        assert sorted(run.iterdir()) == before  # nor did an earlier task run in vain


def test_runs_are_compared_data_by_data(run_of, tmp_path, capsys):
    runs = [shutil.copytree(run_of(name), tmp_path / name) for name in ("sparc", "bam")]
    table, folders = make_table(tmp_path / "t"), str(tmp_path / "folders")
    make_folders(tmp_path / "folders")
    make_folders(tmp_path / "train")
    capsys.readouterr()
    evaluation.main([*map(str, runs), "--task", "retrieval,knn", "--data", table, folders,
                     "--train-data", str(tmp_path / "train")])
    out = capsys.readouterr().out
    assert "different data" not in out
    tables = out.partition(f"\n{table}:\n")[2].split(f"\n{folders}:\n")
    assert "| | sparc (1) |\n" in tables[0] and "| | sparc (1) | bam (1) |\n" in tables[1]
    assert "i2t/R@1" in tables[0] and "knn" in tables[1] and "knn" not in tables[0]


@pytest.mark.parametrize("flags", [["--embed", "out.npy"], ["--task", "retrieval"]])
def test_nothing_is_computed_in_tf32(run_of, tmp_path, monkeypatch, flags):
    run = shutil.copytree(run_of("sparc"), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    evaluation.main([str(run), *flags])
    assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32


# Pictures -----------------------------------------------------------------------------------------


def test_captions_without_a_known_word_leave_a_picture_out(run_of, tmp_path):
    (tmp_path / "photos.csv").write_text(Path(make_table(tmp_path)).read_text().replace(
        "thing", "红").replace("a red", "红").replace("a blue", "色"), encoding="utf-8")
    embed, _ = evaluation.load_run(run_of("stair"))
    data, _ = opened(tmp_path / "photos.csv")
    assert evaluation.draw_queries(embed, data) is None


def test_runs_of_different_methods_share_a_table(run_of, tmp_path, capsys):
    runs = [shutil.copytree(run_of(name), tmp_path / name) for name in ("sparc", "bam")]
    evaluation.main([*map(str, runs), "--task", "zeroshot,knn,sparsity"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert lines[0] == "| | sparc (1) | bam (1) |"
    cells = {name.strip(): values for _, name, *values, _ in (line.split("|") for line in lines)}
    figures = [read(run) for run in runs]
    assert cells["zeroshot"] == [f" {figures[0]['zeroshot']:.3f} ", "  "]
    assert cells["knn"] == [f" {figure['knn']:.3f} " for figure in figures]
    assert cells["active/image"] == cells["active/text"] == [" 128.000 ", "  "]  # all numbers
    assert "images a second in training" in cells
    assert float(cells["parameters with heads and teacher, millions"][0]) > 0
    evaluation.main([*map(str, runs), "--task", "retrieval"])
    assert "shapes:size=16,objects=2 is left out: it serves none of retr" in capsys.readouterr().out


def test_limit_makes_smaller_pictures(run_of, tmp_path):
    run = shutil.copytree(run_of("sparc"), tmp_path / "run")
    evaluation.main([str(run), "--task", "alignment,segmentation", "--limit", "2"])
    for name in ("alignment", "segmentation"):
        with Image.open(run / f"{name}.png") as all, Image.open(run / f"limit-2-{name}.png") as two:
            assert two.height < all.height / 2


def test_a_patch_is_lit_as_its_weight_is():
    image = common.normalize(torch.ones(3, 16, 16))
    page = np.asarray(evaluation.light_up(image, torch.tensor([0.0, 2.0, 1.0, -1.0])))
    corners = page[10, 10], page[10, -10], page[-10, 10], page[-10, -10]
    assert [int(corner.max()) for corner in corners] == [0, 255, 127, 0]


def test_neighbours_are_the_nearest(run_of, tmp_path, monkeypatch):
    run, shown = shutil.copytree(run_of("bam"), tmp_path / "run"), []
    monkeypatch.setattr(evaluation, "sheet", lambda title, rows: shown.extend(rows))
    embed, args = evaluation.load_run(run)
    data = evaluation.open_eval_set(evaluation.options_for(args), embed.image_size)
    evaluation.draw_neighbours(embed, data)
    assert len(shown) == 4
    for _, cells in shown:
        scores = [float(label) for _, label in cells[1:]]
        assert cells[0][1] == "image" and scores == sorted(scores, reverse=True)
        assert len(scores) == 9 and scores[0] > 0.5
