"""Fine-tuning of a run's image encoder and a linear head: labels, augmentation, weights, accuracy."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import normalize, one_hot

import bam
import common
import eval as evaluation
import train
from common import UserError
from helpers import (SMALL, make_batch, tiny_model, train_alone, weights, write_files,
                     write_shards)
from test_eval import make_folders

PLAIN = "--mixup 0 --cutmix 0 --erasing 0 --no-rand-augment --smoothing 0 --drop-path 0"


def changes(**settings):
    """Return an Augment that changes images only as the settings say."""
    nothing = dict(min_scale=1.0, rand_augment=False, erasing=0.0, mixup=0.0, cutmix=0.0)
    return common.Augment(8, **nothing | dict(classes=4) | settings)


def test_rand_augment_changes_a_photo_like_the_same_image_in_floats():
    """Bicubic crops of floats overshoot. Equalization would turn 1.02 into 0.02."""
    image = torch.tensor([-0.02, 0.0, 0.5, 1.0, 1.02]).expand(3, 1, 5)
    assert common.to_bytes(image).unique().tolist() == [0, 127, 255]
    photo = torch.arange(192, dtype=torch.uint8).reshape(3, 8, 8)
    assert torch.equal(common.to_bytes(photo), photo)
    for seed in range(10):
        found = []
        for image in (photo, photo / 255):
            torch.manual_seed(seed)
            found.append(changes(rand_augment=True)(image))
        assert torch.equal(*found) and found[0].std() > 0.1                 # no image is black


def test_mixtures_are_torchvisions_mixup_and_cutmix():
    images, labels = torch.rand(4, 3, 8, 8), torch.tensor([2, 0, 1, 3])
    augment = changes(mixup=0.8, cutmix=1.0)
    found = [(type(mixture).__name__, mixture.alpha) for mixture in augment.mixtures]
    assert found == [("MixUp", 0.8), ("CutMix", 1.0)]
    assert augment.mix(images, labels)[1].shape == (4, 4)
    assert changes().mix(images, labels)[1] is labels


def test_images_are_cropped_and_erased():
    image, whole = torch.full((3, 8, 8), 0.75), torch.rand(3, 8, 8)
    for settings in ({}, {"min_scale": 0.1}, {"rand_augment": True}):
        changed = changes(**settings)(whole)
        is_whole = any(torch.equal(changed, x) for x in (whole, whole.flip(2)))
        assert is_whole == (not settings)
    erased = changes(erasing=1.0)(image)
    grey = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)  # CLIP's mean
    assert 0.02 * 64 < (erased == grey).all(0).sum() < 0.34 * 64              # Zhong et al., Alg. 1


def test_loss_smooths_labels_and_shares_of_labels():
    """The head scores the [CLS] token. Without [CLS] it scores the mean of the tokens."""
    model, batch = tiny_model("classifier", smoothing=0.1), make_batch(4)
    batch["labels"] = torch.tensor([2, 0, 1, 2])
    scores = model.class_scores(batch["images"]).detach()
    target = 0.9 * one_hot(batch["labels"], 3) + 0.1 / 3                    # (4, 3)
    expected = -(target * scores.log_softmax(1)).sum(1).mean()
    for labels in (batch["labels"], one_hot(batch["labels"], 3).float()):
        torch.testing.assert_close(model(batch | {"labels": labels})["loss"], expected)
    tokens = model.image_encoder(batch["images"])
    torch.testing.assert_close(scores, model.head(tokens[:, 0]))            # the [CLS] token
    encoding = normalize(tokens[:, 0], dim=1)
    torch.testing.assert_close(model.encode_image(batch["images"]), encoding)
    without = tiny_model("classifier", vit=dict(cls=False))
    tokens = without.image_encoder(batch["images"])
    torch.testing.assert_close(without.class_scores(batch["images"]), without.head(tokens.mean(1)))


@pytest.mark.parametrize("name", ["dino", "sparo", "stair"])
def test_fine_tuning_starts_from_the_evaluated_encoder(tmp_path, run_of, name):
    """With the learning rate 0 the weights stay those of the run.

    They are the teacher's for DINO, and the encoder's without slots for SPARO.
    """
    run = run_of(name)
    train_alone(["--finetune", run, "--lr", 0, "--steps", 1, "--batch", 4, "--data",
                 "shapes:size=16", *PLAIN.split(), "--out", tmp_path / "run"])
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["method"] == "classifier" and config["image_size"] == 16
    assert config["classes"] == common.SHAPE_NAMES
    found, model = weights(tmp_path / "run"), evaluation.load_run(run)[0].model
    expected = model.evaluation_encoder()
    assert (expected is model.image_encoder) == (name != "dino")
    encoder = {key.removeprefix("image_encoder."): x for key, x in found.items()
               if key.startswith("image_encoder.")}
    assert encoder.keys() == expected.state_dict().keys()
    learned = dict(expected.named_parameters())                             # without statistics
    assert [key for key in learned if not torch.equal(encoder[key], learned[key])] == []


@pytest.mark.parametrize("name, smallest, is_deit", [("pets", 0.05, False), ("imagenet", 0.08, True)])
def test_images_are_changed_as_moco_v3_and_deit_change_them(name, smallest, is_deit):
    """MoCo-v3's datasets.py crops and flips images. DeiT's also has RandAugment and erasing."""
    found = bam.augmentation(train.parse_args(["--method", "classifier", "--preset", name]))
    assert found["min_scale"] == smallest and found["rand_augment"] == is_deit
    assert found["erasing"] == (0.25 if is_deit else 0)


def test_sincos_positions_are_trained_without_weight_decay():
    """They are parameters of the classifier, as in DeiT's code, but not of BAM."""
    model = tiny_model("classifier", vit=dict(positions="sincos"))
    expected = tiny_model("bam").image_encoder.pos
    assert "image_encoder.pos" in dict(model.named_parameters())
    assert torch.equal(model.image_encoder.pos, expected)
    _, rest = common.param_groups(model, 0.1)
    assert any(p is model.image_encoder.pos for p in rest["params"])        # without decay


def test_fine_tuning_of_an_encoder_without_norm_keeps_the_classifiers_norm():
    """CLIP+GAP normalises the mean of the tokens, so its encoder has no norm of its own."""
    source, encoder = (tiny_model(*args).image_encoder for args in (["sparo"], ["classifier"]))
    expected = source.state_dict()
    source.norm = torch.nn.Identity()
    common.copy_encoder(encoder, source, "runs/sparo")
    assert all(torch.equal(x, expected[key]) for key, x in encoder.state_dict().items())


def test_positions_are_interpolated_to_another_image_size(tmp_path, run_of):
    data = make_folders(tmp_path / "data", broken=())
    train_alone(["--finetune", run_of("bam"), "--image-size", 32, "--lr", 0, "--steps", 1,
                 "--batch", 2, "--data", data, "--out", tmp_path / "run"])
    pos = evaluation.load_run(run_of("bam"))[0].model.evaluation_encoder().pos
    expected = common.resize_positions(pos, True, 4, 4)
    assert torch.equal(weights(tmp_path / "run")["image_encoder.pos"], expected)


def test_a_classifier_learns_classes_and_eval_py_measures_them(tmp_path, capsys):
    data = make_folders(tmp_path / "data", n=10, broken=())
    test = make_folders(tmp_path / "test", broken=())
    run = str(tmp_path / "run")
    train.main([*SMALL["classifier"], *PLAIN.split(), "--data", data, "--eval-data", test, "--lr",
                "0.01", "--warmup", "1", "--steps", "8", "--image-size", "16", "--label-fraction",
                "0.5", "--out", run])
    assert "15 images" in capsys.readouterr().out
    assert json.loads((tmp_path / "run/eval.json").read_text())["classification"] == 1
    other = make_folders(tmp_path / "other", ["blue", "green", "yellow"])
    with pytest.raises(UserError, match="Only the classifier has red; only .*/other has yellow:"):
        evaluation.main([run, "--data", other])
    with pytest.raises(UserError, match="the classifier has red; only .*/other has yellow"):
        train_alone([*SMALL["classifier"], "--data", data, "--eval-data", other, "--out",
                     tmp_path / "new"])
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match="classes of .*other are blue, green, yellow, not "):
        train_alone(["--resume", "--out", run, "--data", other])
    spec = write_shards(tmp_path, [6], labels=2)                             # has no names
    for start in ([evaluation.main, [run, "--data", spec]],
                  [train_alone, [*SMALL["classifier"], "--data", data, "--eval-data", spec, "--out",
                                 tmp_path / "new"]]):
        with pytest.raises(UserError, match="the classifier has blue, green, red; only .* has numbers: .*--classes"):
            start[0](start[1])
    (tmp_path / "names.txt").write_text("red\ngreen\nblue\n")
    evaluation.main([run, "--data", spec, "--classes", str(tmp_path / "names.txt")])


def classified(classes, predicted, labels, **settings):
    """The metrics of a classifier, and a function that compares its classes with the data's."""
    options = SimpleNamespace(classes=settings.get("lines"), data="x")
    config = SimpleNamespace(classes=classes, data=settings.get("learned", "folders"))
    scores = one_hot(torch.tensor(predicted), len(classes))
    model = SimpleNamespace(config=config, class_scores=scores)
    embed = SimpleNamespace(model=model, encode_pairs=lambda pairs, encode: (encode, labels))
    data = evaluation.EvalSet(labelled=lambda purpose: [], groups=settings.get("groups"),
                              classes=evaluation.Classes(["C", "a", "b_b"]),
                              options=options, source=SimpleNamespace())
    metrics = evaluation.classification(embed, data, options)
    return evaluation.to_float(metrics["classification"]), metrics["classification/mean_per_class"]


def test_classification_equals_values_computed_by_hand():
    """Two of three classes have images: three and one. The model learned from numbers, too."""
    found = classified([*"abc"], [0, 2, 0, 1], [0, 0, 0, 2], learned="0.tar")
    assert found == (2 / 4, (pytest.approx((2 / 3 + 0) / 2), 1 / 3))


@pytest.mark.parametrize("names, folders", [
    ("C\na\nb_b\n", ""), ("", "c a b_b"), ("C\na\nb_b\n", "1 2 3")])
def test_a_classifier_knows_classes_by_their_names(tmp_path, names, folders):
    """Label i of shards is line i of --classes, or folder i. The lines may name folders."""
    write_files(tmp_path, {"names": names})
    data = {"lines": str(tmp_path / "names")} if names else {}
    data |= {"groups": {"": (None, folders.split())}} if folders else {}
    assert classified(["a", "b b", "c"], [2, 0, 1], [0, 1, 2], **data)[0] == 1
    with pytest.raises(UserError, match="classifier has .*d; only x has .*: make .*--classes"):
        classified(["a", "b", "d"], [2, 0, 1], [0, 1, 2], **data)


def test_a_label_of_the_world_is_the_shape_of_the_first_object():
    world = common.open_data("shapes:size=16", content="label")
    stream = common.WorldStream(world, None, lambda image: torch.zeros(3), min_side=8, context=None,
                                batch_size=4, seed=0)
    batch = next(iter(stream))
    sample = world.sample(4, "train", common.mix_seed(0, 0, 0, 0), 1)         # the stream's seed
    assert torch.equal(batch["labels"], sample["scene"]["shape"][:, 0])
