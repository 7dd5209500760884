"""DINO's loss against a literal float64 loop, its teacher, centre and head, two ranks against one process, and its runs."""

import io
import json
import math
import tarfile

import pytest
import torch
from PIL import Image
from torch import nn

import common
import eval as evaluation
import sparo
import train
from ranks import on_ranks

K, SIZES = 7, (16, 16, 8, 8, 8)
SMALL = ["--method", "sparo", "--objective", "dino", "--data", "shapes:size=16,objects=2", "--batch", "8", "--steps", "4",
         "--log-every", "1", "--L", "4", "--V", "4", "--D", "4", "--image-encoder", "tiny:width=16,heads=2,depth=2,cls=1",
         "--out-dim", "20", "--head-width", "8", "--head-bottleneck", "6", "--local-size", "8"]


def tiny_model(readout="sparo", stem=((8, 2), (8, 2)), **settings):
    encoder = common.ViT(image_size=16, patch_size=4, width=16, depth=2, heads=2, stem=stem, cls=True)
    config = sparo.Config(**{"objective": "dino", "readout": readout, "L": 4, "V": 3, "D": 5, "out_dim": K, "head_width": 12,
                             "head_bottleneck": 6, **settings})
    return sparo.Dino(config, encoder, None, 16, None)


def make_batch(B=4):
    return {"views": [torch.randn(B, 3, size, size) for size in SIZES]}


# The loss ------------------------------------------------------------------------------------------------------------


def literal_loss(student, teacher, center, tau_s, tau_t):
    """DINO's algorithm, pair by pair and image by image."""
    losses = []
    for i, t in enumerate(teacher):
        for j, s in enumerate(student):
            if i != j:
                for b in range(len(t)):
                    p = [math.exp(x) for x in ((t[b] - center) / tau_t).tolist()]
                    log_z = torch.stack([(x / tau_s).exp() for x in s[b]]).sum().log()
                    losses.append(-sum(p[k] / sum(p) * (s[b, k] / tau_s - log_z) for k in range(len(p))))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("G, V", [(2, 2), (2, 5), (1, 3), (3, 4)])
def test_the_loss_and_its_gradients_are_the_literal_ones(G, V):
    torch.manual_seed(0)
    student, teacher = torch.randn(V, 3, K, dtype=torch.double, requires_grad=True), torch.randn(G, 3, K, dtype=torch.double)
    center = torch.randn(K, dtype=torch.double)
    loss, p_t = sparo.dino_loss(student, teacher, center, 0.3, 0.2)
    expected = literal_loss(student, teacher, center, 0.3, 0.2)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, student)[0] for x in (loss, expected)))
    assert not sparo.dino_loss(student.detach(), teacher.requires_grad_(), center, 0.3, 0.2)[0].requires_grad
    torch.testing.assert_close(p_t.sum(-1), torch.ones(G, 3, dtype=torch.double))


def test_limits_of_the_loss():
    even, sharp = torch.zeros(2, 3, K), torch.zeros(2, 3, K)
    sharp[..., 2] = 5
    assert sparo.dino_loss(even, even, torch.zeros(K), 0.1, 0.04)[0].item() == pytest.approx(math.log(K))
    assert sparo.dino_loss(sharp, sharp, torch.zeros(K), 0.1, 0.04)[0].item() == pytest.approx(0, abs=1e-6)
    assert sparo.dino_loss(even, sharp, sharp[0, 0], 0.1, 0.04)[1].amax() == pytest.approx(1 / K)  # the centre takes away what all share
    with torch.autocast("cpu", torch.bfloat16):
        assert sparo.dino_loss(even.bfloat16(), even.bfloat16(), torch.zeros(K), 0.1, 0.04)[0].dtype == torch.float32


def test_entropy():
    p = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])
    assert sparo.entropy(p).item() == pytest.approx(math.log(2) / 2)


# Head, student and teacher -------------------------------------------------------------------------------------------


def test_the_head_is_the_literal_one():
    head = sparo.DinoHead(5, K, 8, 6).double()
    nn.init.normal_(head.mlp[2].bias)
    x = torch.randn(3, 5, dtype=torch.double)
    h = x
    for layer in (head.mlp[0], head.mlp[2]):
        h = h @ layer.weight.T + layer.bias
        h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
    h = h @ head.mlp[4].weight.T + head.mlp[4].bias
    expected = [[(row @ w) / (row.norm() * w.norm()) for w in head.last.weight] for row in h]
    torch.testing.assert_close(head(x), torch.stack([torch.stack(row) for row in expected]))


def test_the_last_layer_rests_at_first_and_then_starts_afresh():
    model = tiny_model(freeze_last=2)
    optimizer = torch.optim.AdamW(model.student().parameters(), lr=0.01, weight_decay=0.5)
    for step in range(3):
        before = model.head.last.weight.detach().clone()
        optimizer.zero_grad()
        model(make_batch())["loss"].backward()
        model.before_update(step)
        assert (model.head.last.weight.grad is None) == (step < 2)
        optimizer.step()
        assert torch.equal(model.head.last.weight, before) == (step < 2)
    assert optimizer.state[model.head.last.weight]["step"] == 1           # not 3: Adam's bias correction is not used up


def test_cosines_are_in_fp32():
    head, x = sparo.DinoHead(5, K, 8, 6), torch.randn(3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert head(x).dtype == torch.float32
        h = head.mlp(x)
    assert h.dtype == torch.bfloat16
    torch.testing.assert_close(sparo.cosines(h, head.last.weight), torch.cosine_similarity(h.float()[:, None], head.last.weight[None], dim=-1))


@pytest.mark.parametrize("crops", [0, 8])
def test_views_are_dinos(crops):
    config = {"objective": "dino", "crop_border": 0.4, "crop_least": 0.05, "local_size": 96, "local_crops": crops}
    first, second, *local = sparo.views(config, 224)
    assert first == dict(size=224, scale=(0.4, 1.0), blur=1.0) and second == dict(size=224, scale=(0.4, 1.0), blur=0.1, solarize=0.2)
    assert local == crops * [dict(size=96, scale=(0.05, 0.4), blur=0.5)]
    assert sparo.views(config | {"objective": "clip"}, 224) is None
    with pytest.raises(ValueError, match="--crop-least 0.5 must not be above --crop-border 0.4"):
        sparo.views(config | {"crop_least": 0.5}, 224)


@pytest.mark.parametrize("readout", ["sparo", "cls", "gap"])
def test_every_parameter_of_the_student_learns_and_none_of_the_teacher(readout):
    model = tiny_model(readout)
    out = model(make_batch())
    out["loss"].backward()
    trained = dict(model.named_parameters())
    teacher = {name for name in trained if name.startswith("teacher.")}
    assert [name for name in trained.keys() - teacher if trained[name].grad is None or trained[name].grad.abs().max() == 0] == []
    assert not any(trained[name].requires_grad for name in teacher) and len(teacher) == len(trained) / 2


def test_the_loss_is_that_of_the_views_one_by_one():
    model, batch = tiny_model(stem=None), make_batch()                    # no BatchNorm: views do not know each other
    def one(network, x):
        encoder, readout, head = network
        return head(readout(encoder(x)).flatten(1))
    model.center.normal_()
    nn.init.normal_(model.teacher[2].mlp[4].bias)
    expected, p_t = sparo.dino_loss(torch.stack([one(model.student(), x) for x in batch["views"]]),
                                    torch.stack([one(model.teacher, x) for x in batch["views"][:2]]), model.center.clone(), 0.1, 0.04)
    out = model(batch)
    torch.testing.assert_close(out["loss"], expected)
    torch.testing.assert_close(out["entropy_mean"], sparo.entropy(p_t.mean((0, 1))))


def test_the_centre_follows_the_teachers_mean_output_in_training_only():
    model, batch = tiny_model(stem=None, center_momentum=0.7), make_batch()
    with torch.no_grad():
        mean = torch.stack([model.logits(model.teacher, [x]) for x in batch["views"][:2]]).mean((0, 1, 2))
    model(batch)
    torch.testing.assert_close(model.center, 0.3 * mean)
    model(batch)
    torch.testing.assert_close(model.center, (0.7 * 0.3 + 0.3) * mean)
    before = model.center.clone()
    model.eval()(batch)
    assert torch.equal(model.center, before)


def test_the_teacher_is_the_students_moving_average_with_a_momentum_that_grows_to_one():
    model = tiny_model(ema=0.9)
    expected = [p.clone() for p in model.teacher.parameters()]
    assert all(map(torch.equal, expected, model.student().parameters()))
    for step in range(4):
        for p in model.student().parameters():
            nn.init.normal_(p)
        model.after_step(step, 4)
        momentum = 1 - 0.1 * (1 + math.cos(math.pi * step / 4)) / 2
        expected = [momentum * a + (1 - momentum) * b for a, b in zip(expected, model.student().parameters())]
        for a, b in zip(expected, model.teacher.parameters()):
            torch.testing.assert_close(a, b)
    assert momentum > 0.98


def test_the_teacher_drops_nothing_and_normalises_by_the_batch():
    for mode in (None, True, False):
        model = tiny_model()
        if mode is None:
            mode = True                                                   # as it was made
        else:
            model.train(mode)
        norms = [m.training for m in model.teacher.modules() if isinstance(m, common.BatchNorm)]
        assert norms and all(norm == mode for norm in norms)
        assert not any(m.training for m in model.teacher.modules() if isinstance(m, common.Block))
        assert all(m.training == mode for m in model.image_encoder.modules())


def test_what_is_evaluated_is_the_teacher():
    model, images = tiny_model().eval(), torch.randn(3, 3, 16, 16)
    nn.init.normal_(model.image_encoder.pos)                              # the student alone
    encoder, readout, _ = model.teacher
    slots = readout(encoder(images))
    torch.testing.assert_close(model.image_slots(images), slots)
    torch.testing.assert_close(model.encode_image(images), nn.functional.normalize(slots.flatten(1), dim=1))


@pytest.mark.parametrize("readout, replace, depth, layers", [("cls", True, 6, 4), ("cls", True, 2, 2), ("gap", True, 6, 4),
                                                             ("sparo", True, 5, 3), ("sparo", True, 1, 1), ("sparo", False, 6, 4)])
def test_probe_features_are_those_of_the_last_four_blocks(readout, replace, depth, layers):
    encoder = common.ViT(image_size=16, patch_size=8, width=16, depth=depth, heads=2, cls=True)
    config = sparo.Config(objective="dino", readout=readout, L=2, V=3, D=4, out_dim=K, head_width=4, head_bottleneck=4,
                          replace_block=replace)
    model, images = sparo.Dino(config, encoder, None, 16, None).eval(), torch.randn(2, 3, 16, 16)
    kept = []
    encoder = model.teacher[0]
    for block in encoder.blocks:
        block.register_forward_hook(lambda module, inputs, output: kept.append(encoder.norm(output)[:, 0]))
    features = model.probe_features(images)
    expected = kept[:depth][-layers:]
    if readout != "cls":
        expected = [*(expected if readout == "sparo" and replace else expected[:-1]), model.image_slots(images).flatten(1)]
    torch.testing.assert_close(features, torch.cat(expected, 1))


def test_an_encoder_without_layers_has_its_readout_probed():
    config = sparo.Config(objective="dino", readout="sparo", L=2, V=3, D=4, out_dim=K, head_width=4, head_bottleneck=4)
    model, images = sparo.Dino(config, common.ResNet(64, blocks=(1, 1, 1, 1)), None, 2048, None).eval(), torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model.probe_features(images), model.image_slots(images).flatten(1))
    assert torch.isfinite(model.train()({"views": [torch.randn(2, 3, s, s) for s in (64, 64, 32)]})["loss"])


def test_other_readouts_are_refused():
    with pytest.raises(ValueError, match="--objective dino has --readout sparo, cls, gap, not fdt"):
        tiny_model("fdt")


def test_two_ranks_equal_one_process(tmp_path):
    torch.manual_seed(0)
    batch, models = make_batch(B=8), {readout: tiny_model(readout) for readout in ("sparo", "cls")}
    for model in models.values():
        model.center.normal_()
    ranks = on_ranks(tmp_path, tiny_model, models, batch)
    for readout, model in models.items():
        loss = model(batch)["loss"]
        loss.backward()
        assert sum(out["loss"] for out, _, _ in ranks[readout]).item() / 2 == pytest.approx(loss.item(), abs=1e-5)
        for _, gradients, state in ranks[readout]:
            torch.testing.assert_close(state["center"], model.center, atol=1e-6, rtol=1e-5)
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-3, atol=1e-5,
                                           msg=lambda m: f"{readout} {name}: {m}")
            for name, buffer in model.named_buffers():                    # BatchNorm's of student and teacher too
                torch.testing.assert_close(state[name], buffer, rtol=1e-4, atol=1e-5)


# Runs ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_evaluation(monkeypatch):
    monkeypatch.setattr(evaluation, "WORLD_N", 24)


def log_of(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("flags", [["--readout", "sparo", "--freeze-last", "2"], ["--readout", "cls", "--grad-checkpoint"],
                                   ["--readout", "gap", "--amp", "bf16", "--local-crops", "0"]])
def test_runs_train_and_are_evaluated(tmp_path, flags, capsys):
    run = tmp_path / "run"
    train.main([*SMALL, *flags, "--weight-decay-end", "0.4", "--out", str(run)])
    found, log = json.loads((run / "eval.json").read_text()), log_of(run)
    assert {"knn", "knn/shape", "linear", "linear/shape"} <= set(found) and "zeroshot" not in found
    assert log[0]["chance_loss"] == pytest.approx(math.log(20)) and 0 <= log[-1]["entropy"] <= log[-1]["entropy_mean"] <= math.log(20) + 1e-4
    assert not (run / "vocab.txt").exists()
    evaluation.main([str(run)])
    assert json.loads((run / "eval.json").read_text()) == found
    with pytest.raises(common.UserError, match="Task zeroshot cannot use a model without a text tower; what can be done is knn, linear"):
        evaluation.main([str(run), "--task", "zeroshot"])
    (tmp_path / "captions.csv").write_text("image,caption\na.png,text\n")
    with pytest.raises(common.UserError, match="give class folders or shapes to a model without a text tower"):
        evaluation.main([str(run), "--data", str(tmp_path / "captions.csv")])


@pytest.mark.parametrize("flags, message", [
    (["--vocab", "nowhere.txt"], "--vocab has no effect here"), (["--crop-scale", "0.5"], "--crop-scale has no effect here"),
    (["--crop-least", "0.6", "--crop-border", "0.5"], "must not be above"), (["--local-size", "12"], "not a multiple of the 8 of a patch"),
    (["--readout", "fdt"], "not fdt"), (["--readout", "cls", "--image-encoder", "ResNet-50", "--data", "shapes:size=64"], "choose a ViT"),
    (["--eval-data", "captions.csv"], "give class folders")])
def test_bad_settings_are_refused_at_the_start(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "captions.csv").write_text("image,caption\na.png,text\n")
    with pytest.raises(common.UserError, match=message):
        train.main([*SMALL, *flags, "--out", str(tmp_path / "run")])


def test_compile_changes_nothing(tmp_path, monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile(model, backend="aot_eager"))
    for name, flags in (("plain", []), ("compiled", ["--compile"])):
        train.main([*SMALL, *flags, "--steps", "2", "--workers", "1", "--out", str(tmp_path / name)])
    plain, compiled = (common.load_checkpoint(tmp_path / name / "last.pt")["model"] for name in ("plain", "compiled"))
    for name, value in plain.items():
        torch.testing.assert_close(value, compiled[name], rtol=1e-3, atol=1e-4)


def test_weights_of_a_run_are_the_teachers(tmp_path):
    train.main([*SMALL, "--steps", "2", "--ema", "0.5", "--out", str(tmp_path / "run")])
    state = common.load_checkpoint(tmp_path / "run" / "last.pt")["model"]
    encoder = evaluation.build_encoders(json.loads((tmp_path / "run" / "config.json").read_text()), None)[0]
    assert "nothing" not in " ".join(common.load_encoder_weights(encoder, common.load_checkpoint(tmp_path / "run" / "last.pt")))
    assert torch.equal(encoder.pos, state["teacher.0.pos"]) and not torch.equal(encoder.pos, state["image_encoder.pos"])


def test_a_stopped_run_continues_bit_for_bit(tmp_path, monkeypatch):
    train.main([*SMALL, "--out", str(tmp_path / "whole")])
    with monkeypatch.context() as patch:
        patch.setattr(train.Stop, "agreed", lambda self, device: True)
        train.main([*SMALL, "--out", str(tmp_path / "stopped")])
    assert len(log_of(tmp_path / "stopped")) == 1
    train.main([*SMALL, "--resume", "--out", str(tmp_path / "stopped")])
    states = [common.load_checkpoint(tmp_path / name / "last.pt") for name in ("whole", "stopped")]
    assert all(torch.equal(states[0]["model"][name], states[1]["model"][name]) for name in states[0]["model"])
    assert "teacher.2.last.weight" in states[0]["model"] and "center" in states[0]["model"]


@pytest.mark.parametrize("start", [0.04, 0.0])
def test_weight_decay_follows_half_a_cosine(tmp_path, monkeypatch, start):
    seen = []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *_: seen.append([g["weight_decay"] for g in self.param_groups]))
    train.main([*SMALL, "--weight-decay", str(start), "--weight-decay-end", "0.4", "--out", str(tmp_path / "run")])
    expected = [0.4 - (0.4 - start) * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    assert [decay for decay, _ in seen[:4]] == pytest.approx(expected) and all(rest == 0 for _, rest in seen[:4])


def test_dry_run_of_the_papers_preset(capsys):
    train.main(["--method", "sparo", "--preset", "dino-s16", "--data", "shapes", "--dry-run", "--local-crops", "2"])
    shown = capsys.readouterr().out
    record = json.loads(shown.splitlines()[-1])
    assert record["chance_loss"] == pytest.approx(math.log(65536)) and "text_encoder" not in shown
    assert "image_encoder      19,8" in shown                             # ViT-S/16 without its last block


def test_class_folders_and_labelled_shards_serve_knn(tmp_path, capsys):
    colours = {"blue": (0, 0, 250), "red": (250, 0, 0)}
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for i in range(12):
            name = list(colours)[i % 2]
            (tmp_path / "test" / name).mkdir(parents=True, exist_ok=True)
            picture, file = Image.new("RGB", (20, 20), colours[name]), io.BytesIO()
            picture.save(tmp_path / "test" / name / f"{i}.png")
            picture.save(file, "PNG")
            for suffix, data in ((".png", file.getvalue()), (".cls", str(i % 2).encode())):
                member = tarfile.TarInfo(f"{i}{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    run, shards = tmp_path / "run", f"{tmp_path}/0.tar"
    train.main([*SMALL, "--data", f"{shards}:buffer=4", "--image-size", "16", "--batch", "2", "--eval-data", f"{tmp_path}/test",
                "--out", str(run)])
    assert json.loads((run / "eval.json").read_text())["knn"] == 1
    (tmp_path / "test" / "red").rename(tmp_path / "test" / "bat")         # sorted before blue: the labels mean other folders now
    evaluation.main([str(run), "--data", f"{tmp_path}/test", "--task", "knn"])
    assert json.loads((run / "eval.json").read_text())["knn"] == 0
    with pytest.raises(common.UserError, match="other class folders or tar shards with labels"):
        evaluation.main([str(run), "--data", f"{tmp_path}/test", "--train-data", f"{tmp_path}/test", "--task", "knn"])
    train.main([*SMALL, "--data", f"{tmp_path}/test", "--image-size", "16", "--batch", "2", "--out", str(tmp_path / "folders")])
    assert "No evaluation: k-NN and linear probe need other class folders" in capsys.readouterr().out
    with pytest.raises(common.UserError, match="--train-limit 0 must be at least 1"):
        evaluation.main([str(run), "--train-limit", "0"])
