"""Metrics on hand-made matrices, tasks on small made-up data."""

import json
import types

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import common
import eval as evaluation


def test_recall_counts_any_positive_and_loses_ties():
    keys = torch.eye(4)
    key_ids = torch.tensor([0, 1, 1, 2])
    queries = torch.tensor([[1.0, 0, 0, 0],      # its key first
                            [3.0, 1, 2, 0],      # of its two keys one is second
                            [3.0, 2, 1, 0],      # its key last
                            [1.0, 1, 0, 0]])     # a tie with a negative
    recall = evaluation.recall_at_k(queries, keys, (torch.tensor([0, 1, 2, 0]), key_ids), ks=(1, 2, 4), chunk=3)
    assert recall == {1: 1 / 4, 2: 3 / 4, 4: 4 / 4}


def test_recall_equals_sorting():
    queries, keys = torch.randn(40, 5), torch.randn(30, 5)
    query_ids, key_ids = torch.randint(6, (40,)), torch.arange(30) % 6
    recall = evaluation.recall_at_k(queries, keys, (query_ids, key_ids), chunk=7)
    for k in (1, 5, 10):
        hits = [any(key_ids[j] == q for j in (keys @ x).argsort(descending=True)[:k]) for x, q in zip(queries, query_ids)]
        assert recall[k] == sum(hits) / 40


def test_class_embeddings_average_normalised_prompts():
    table = {"a x": [3.0, 4.0], "the x": [0.0, 1.0], "a y": [1.0, 0.0], "the y": [1.0, 0.0]}
    encode = lambda texts: F.normalize(torch.tensor([table[text] for text in texts]), dim=-1)
    mean = torch.tensor([0.3, 0.9]) / (0.09 + 0.81) ** 0.5
    torch.testing.assert_close(evaluation.class_embeddings(encode, ["x", "y"], ["a {}", "the {}"]),
                               torch.stack([mean, torch.tensor([1.0, 0.0])]))


def test_winoground_scores():
    right, text_only, image_only, tie = [[2, 0], [0, 2]], [[5, 6], [1, 7]], [[5, 1], [6, 7]], [[1, 1], [1, 1]]
    text, image, group = evaluation.winoground_scores(torch.tensor([right, text_only, image_only, tie]).float())
    assert (text, image, group) == (0.5, 0.5, 0.25)


def test_mean_iou_by_hand():
    truth = torch.tensor([[[0, 0, 1, 1], [0, 255, 2, 2]], [[0, 0, 0, 0], [3, 3, 3, 3]], [[0] * 4] * 2])
    predicted = torch.tensor([[[1, 0, 1, 2], [0, 1, 2, 2]], [[3, 1, 1, 1], [3, 3, 1, 1]], [[1] * 4] * 2])
    first = (1 / 3 + 2 / 3) / 2     # class 1: 1 of {(0,0), (0,2), (0,3)}; class 2: 2 of 3; the 255 pixel counts for nothing
    assert evaluation.mean_iou(predicted, truth) == pytest.approx((first + 2 / 5) / 2)
    inside = (1 / 2 + 2 / 3) / 2
    assert evaluation.mean_iou(predicted, truth, foreground_only=True) == pytest.approx((inside + 2 / 4) / 2)


def test_segment_takes_the_nearest_class_of_each_patch():
    classes = torch.eye(3)
    patches = torch.eye(3)[[0, 1, 2, 2]][None]
    expected = torch.tensor([[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 3, 3], [3, 3, 3, 3]])
    assert torch.equal(evaluation.segment(patches, classes, 4)[0], expected)


def test_label_maps_name_the_classes_of_the_segmentation():
    world = common.World()
    sample = world.sample(20, "val", 0)
    for by, name in (("colour", "{colour}"), ("shape", "{shape}"), ("pair", "{colour} {shape}")):
        maps, names = evaluation.label_maps(world, sample, by)
        assert ((maps == 0) == (sample["segmentation"] == 0)).all()
        for objects, labels, segmentation in zip(sample["objects"], maps, sample["segmentation"]):
            for k, o in enumerate(objects):
                assert (labels[segmentation == k + 1] == names.index(name.format(**o)) + 1).all()


class Oracle:
    """Stands for a perfect model of plain red, green and blue pictures: both towers give the colour."""

    words = ["red", "green", "blue"]

    def eval(self):
        return self

    def encode_image(self, images):
        mean = images.mean((2, 3)) * torch.tensor(common.STD) + torch.tensor(common.MEAN)
        return F.normalize(mean, dim=-1)

    def encode_text(self, tokens, mask):
        return F.normalize(F.one_hot(tokens, 7).float().sum(1)[:, 4:], dim=-1)


def embedder():
    tokenizer = common.WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *Oracle.words])
    return evaluation.Embedder(Oracle(), tokenizer, 16, 8, chunk=2)


def make_folders(root):
    for i, colour in enumerate(Oracle.words):
        (root / colour).mkdir()
        for n in range(2):
            Image.new("RGB", (20, 12), colour).save(root / colour / f"{n}.png")
    (root / "red" / "broken.png").write_bytes(b"no image")


def options(**settings):
    return types.SimpleNamespace(**{"templates": None, "limit": None, "image_root": None, "split": "test"} | settings)


def test_zeroshot_on_class_folders_skips_and_reports_broken_images(tmp_path, capsys):
    make_folders(tmp_path)
    result = evaluation.zeroshot(embedder(), common.open_data(str(tmp_path)), options())
    assert result["zeroshot"].tolist() == [True] * 6
    assert "skipped 1 of 7" in capsys.readouterr().out


def test_retrieval_with_several_captions_per_image(tmp_path):
    make_folders(tmp_path)
    (tmp_path / "captions.csv").write_text(
        "image,caption\nred/0.png,so red\nred/0.png,\"red, red\"\nblue/0.png,blue\ngreen/1.png,it is green\n")
    result = evaluation.retrieval(embedder(), common.open_data(str(tmp_path / "captions.csv")), options())
    assert result["i2t/R@1"] == result["t2i/R@1"] == 1 and result["retrieval/images"] == 3


def test_negatives_on_sugarcrepe_files(tmp_path):
    make_folders(tmp_path)
    for kind, negative in (("swap_att", "blue"), ("add_obj", "red")):
        item = {"filename": "red/0.png", "caption": "red", "negative_caption": negative}
        (tmp_path / f"{kind}.json").write_text(json.dumps({"7": item}))
    source = evaluation.open_eval_data(str(tmp_path), None, "test", 8)
    result = evaluation.negatives(embedder(), source, options(image_root=tmp_path))
    assert result["negatives/swap_att"].tolist() == [True]
    assert result["negatives/add_obj"].tolist() == [False]     # equal scores are not right
    assert result["negatives"] == 0.5


def test_a_task_that_the_data_cannot_serve_is_an_error(tmp_path):
    make_folders(tmp_path)
    with pytest.raises(common.UserError, match="segmentation cannot use this data"):
        evaluation.evaluate(embedder(), common.open_data(str(tmp_path)), options(tasks=["segmentation"]))


def test_eval_main_names_what_is_missing(tmp_path):
    with pytest.raises(common.UserError, match="holds no run"):
        evaluation.main([str(tmp_path)])
    with pytest.raises(common.UserError, match="no task dance"):
        evaluation.main([str(tmp_path), "--task", "dance"])
