"""STAIR's equations against literal float64 loops, the streamed form's memory, stages, LAMB, the inverted index, two ranks."""

import json
import math
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import common
import eval as evaluation
import stair
import train
from ranks import on_ranks

ROOT = Path(__file__).parents[1]
V, E = 11, 6
SMALL = ["--method", "stair", "--share-1", "0.25", "--share-2", "0.25", "--data", "shapes:size=16,objects=2,words=20", "--batch", "8", "--steps", "8", "--warmup", "1", "--log-every",
         "1", "--image-encoder", "tiny:width=16,heads=2,depth=1", "--text-encoder", "tiny:width=16,heads=2,depth=1"]


# Literal references --------------------------------------------------------------------------------------------------


def literal_encoding(head, h, seen=None):
    """Eq. 4 and 5, word by word and position by position: h (B, N, d) -> (B, |V|)."""
    fc, _, norm = head.transform
    rows = []
    for i, sample in enumerate(h):
        kept = []
        for j, x in enumerate(sample):
            if seen is None or seen[i, j]:
                x = fc.weight @ x + fc.bias
                x = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
                x = (x - x.mean()) / (x.var(correction=0) + norm.eps).sqrt() * norm.weight + norm.bias
                kept.append([head.embedding.weight[k] @ x + head.bias[k] for k in range(V)])
        row = []
        for k in range(V):
            p = max((logits[k] for logits in kept), key=lambda x: x.item()) if kept else torch.tensor(0.0, dtype=h.dtype)
            row.append(torch.log(1 + p) if p > 0 and head.words[k] else p * 0)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def build(special=(0, 3), bias=0.1):
    embedding = nn.Embedding(V, E)
    head = stair.TokenProjectionHead(5, embedding, special, bias).double()
    for p in head.parameters():
        nn.init.normal_(p)
    return head


# Equations -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [1, 60, 2**23])
@pytest.mark.parametrize("masked", [False, True])
def test_encodings_are_equations_4_and_5_in_values_and_gradients(masked, elements, monkeypatch):
    monkeypatch.setattr(stair, "ELEMENTS", elements)
    torch.manual_seed(0)
    head, h = build(), torch.randn(4, 7, 5, dtype=torch.double, requires_grad=True)
    seen = torch.arange(7) < torch.tensor([[7], [3], [1], [0]]) if masked else None
    enc, expected = head(h, seen), literal_encoding(head, h, seen)
    torch.testing.assert_close(enc, expected)
    assert (enc > 0).any() and (enc == 0).any() and (enc[:, [0, 3]] == 0).all()
    weight = torch.randn_like(enc)
    inputs = [h, *head.parameters()]
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), inputs) for x in (enc, expected))):
        torch.testing.assert_close(a, b)


def test_words_of_the_caption_can_come_back_to_life():
    """An inactive entry marked as revived gets the gradient of its largest logit, if the loss would have it larger."""
    torch.manual_seed(0)
    head, h = build(special=()), torch.randn(1, 3, 5, dtype=torch.double)
    nn.init.constant_(head.bias, -50.0)
    for sign, moves in ((-1.0, True), (1.0, False)):
        enc = head(h, revived=torch.arange(V)[None] == 4)
        assert (enc == 0).all()
        gradient = torch.autograd.grad((sign * enc).sum(), head.bias)[0]
        assert gradient.tolist() == [sign if moves and k == 4 else 0 for k in range(V)]


def test_limits_of_the_encoding():
    head, h = build(special=()), torch.randn(2, 3, 5, dtype=torch.double)
    nn.init.zeros_(head.embedding.weight)
    nn.init.constant_(head.bias, math.e - 1)
    torch.testing.assert_close(head(h), torch.ones(2, V, dtype=torch.double))
    nn.init.constant_(head.bias, -1.0)
    assert (head(h) == 0).all()


def test_the_streamed_form_never_builds_all_logits(monkeypatch):
    B, N, size = 8, 50, 3000
    head, h = stair.TokenProjectionHead(32, nn.Embedding(size, 32)), torch.randn(B, N, 32, requires_grad=True)
    monkeypatch.setattr(stair, "ELEMENTS", N * size)
    peaks = []
    for form in (head, lambda h: torch.log1p((head.transform(h) @ head.embedding.weight.T + head.bias).amax(1).relu())):
        with train.LiveMemory() as memory:
            form(h).sum().backward()
        peaks.append(memory.peak)
    assert peaks[0] < 0.4 * peaks[1]


def test_encodings_under_autocast_are_those_of_rounded_logits():
    torch.manual_seed(0)
    head, h = stair.TokenProjectionHead(5, nn.Embedding(V, E), (), 0.1), torch.randn(3, 4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        enc, t = head(h), head.transform(h)
    logits = (t.bfloat16() @ head.embedding.weight.bfloat16().T).amax(1).float() + head.bias
    torch.testing.assert_close(enc, torch.log1p(logits.relu()), atol=1e-6, rtol=1e-6)
    assert enc.dtype == torch.float32
    enc.sum().backward()
    assert head.embedding.weight.grad.dtype == torch.float32 and head.embedding.weight.grad.abs().sum() > 0


def test_reviving_an_empty_encoding_takes_no_leap():
    """The cosine's gradient is bounded where an encoding is all zero, and special words and hidden positions are not revived."""
    torch.manual_seed(0)
    head, h, own = build(), torch.randn(4, 3, 5, dtype=torch.double), torch.rand(4, V, dtype=torch.double)
    norms = []
    for bias in (0.0, -50.0):
        nn.init.constant_(head.bias, bias)
        gradient = torch.autograd.grad(stair.contrastive_loss(head(h, revived=own > 0), own, 10.0), head.bias)[0]
        norms.append(gradient.norm().item())
        assert gradient[[0, 3]].abs().sum() == 0
    assert 0 < norms[1] < 30 * norms[0]
    hidden = torch.zeros(4, 3, dtype=torch.bool)
    assert torch.autograd.grad(-head(h, hidden, revived=own > 0).sum(), head.bias)[0].abs().sum() == 0


def test_flops_loss_is_equation_6():
    enc = torch.rand(5, V, dtype=torch.double, requires_grad=True)
    expected = sum((sum(enc[i, k] for i in range(5)) / 5) ** 2 for k in range(V))
    torch.testing.assert_close(stair.flops_loss(enc), expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, enc)[0] for x in (stair.flops_loss(enc), expected)))


def test_contrastive_loss_is_the_literal_one():
    torch.manual_seed(0)
    v, t = (torch.rand(4, V, dtype=torch.double, requires_grad=True) for _ in range(2))
    cos = [[(a @ b) / (a.norm() * b.norm()) for b in t] for a in v]
    expected = -sum((5 * cos[i][i]) - torch.stack([5 * cos[i][j] for j in range(4)]).exp().sum().log() +
                    (5 * cos[i][i]) - torch.stack([5 * cos[j][i] for j in range(4)]).exp().sum().log() for i in range(4)) / 8
    loss = stair.contrastive_loss(v, t, 5.0)
    torch.testing.assert_close(loss, expected)
    for a, b in zip(*(torch.autograd.grad(x, (v, t)) for x in (loss, expected))):
        torch.testing.assert_close(a, b)


def test_caption_mask_is_equation_8():
    tokens = torch.tensor([[2, 5, 5, 7], [2, 9, 1, 1]])
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    expected = [[float(k in (2, 5, 7)) for k in range(V)], [float(k in (2, 9)) for k in range(V)]]
    assert stair.caption_mask(tokens, mask, V).tolist() == expected


def test_lamb_is_the_papers_algorithm():
    torch.manual_seed(0)
    p = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    zero = torch.zeros(2, dtype=torch.double, requires_grad=True)
    free = torch.full((2,), 3.0, dtype=torch.double, requires_grad=True)
    optimizer = stair.LAMB([{"params": [p], "weight_decay": 0.1}, {"params": [zero], "weight_decay": 0.0},
                            {"params": [free], "weight_decay": 0.0, "decays": False}], lr=0.02, betas=(0.8, 0.9), eps=1e-6)
    x, m, v = p.detach().clone(), 0.0, 0.0
    for step in range(1, 5):
        g = torch.randn(3, 4, dtype=torch.double)
        p.grad, zero.grad, free.grad = g.clone(), torch.ones(2, dtype=torch.double), torch.ones(2, dtype=torch.double)
        optimizer.step()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        r = (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-6) + 0.1 * x
        x = x - 0.02 * x.norm() / r.norm() * r
        torch.testing.assert_close(p.detach(), x)
        if step == 1:
            torch.testing.assert_close(zero.detach(), torch.full((2,), -0.02, dtype=torch.double))  # a tensor of zeros: trust 1
            torch.testing.assert_close(free.detach(), torch.full((2,), 2.98, dtype=torch.double))  # a bias: not scaled
            again = stair.LAMB([{"params": [x]} for x in (p, zero, free)])
            again.load_state_dict(optimizer.state_dict())
            optimizer = again


# Model ---------------------------------------------------------------------------------------------------------------


def tiny_model(stage=3, **settings):
    image = common.ViT(image_size=16, patch_size=4, width=16, depth=1, heads=2, stem=((8, 2), (8, 2)))
    text = common.TextTransformer(vocab_size=30, context=12, width=16, depth=1, heads=2)
    nn.init.normal_(text.embedding.weight, std=0.3)
    text.special = [0, 1, 2, 3]
    model = stair.Model(stair.Config(**settings), image, text, 16, 16)
    model.begin_stage(int(stage), fresh=True)
    model.strength.fill_(1.0)
    return model


def make_batch(B=4, L=9):
    lengths = torch.tensor([9, 4, 6, 3, 5, 8, 7, 4])[:B]
    return {"images": torch.randn(B, 3, 16, 16), "tokens": torch.randint(4, 30, (B, L)), "mask": torch.arange(L) < lengths[:, None]}


def test_the_loss_is_equation_7():
    model, batch = tiny_model(lambda_image=0.3, lambda_text=0.7), make_batch()
    out = model(batch)
    v, t = model.image_encoding(batch["images"]), model.text_encoding(batch["tokens"], batch["mask"])
    contrast = stair.contrastive_loss(v, t, 1 / 0.07)
    torch.testing.assert_close(out["loss"], contrast + 0.3 * stair.flops_loss(v) + 0.7 * stair.flops_loss(t))
    torch.testing.assert_close(model.encode_image(batch["images"]).norm(dim=1), torch.ones(4))
    out["loss"].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().max() == 0] == []


def test_the_regulariser_grows_with_the_square_of_the_step():
    model, seen = tiny_model(ramp=0.5), []
    for step in range(8):
        model.after_step(step, 8)
        seen.append(model.strength.item())
    assert seen == pytest.approx([(s / 4) ** 2 for s in (1, 2, 3, 4)] + [1] * 4)


def test_stage_1_keeps_the_captions_own_words():
    model, batch = tiny_model(stage=1), make_batch()
    enc = model.text_encoding(batch["tokens"], batch["mask"])
    assert ((enc > 0) <= (stair.caption_mask(batch["tokens"], batch["mask"], 30) > 0)).all() and (enc > 0).any()
    model.begin_stage(2, fresh=True)
    assert ((model.text_encoding(batch["tokens"], batch["mask"]) > 0).sum(1) > (enc > 0).sum(1)).all()


def test_stage_2_freezes_the_image_tower_and_its_embedding():
    model, batch = tiny_model(stage=2).train(), make_batch()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.5)
    before, buffers = model.image_encoding(batch["images"]), [b.clone() for b in model.image_encoder.buffers()]
    words = model.text_encoder.embedding.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        model(batch)["loss"].backward()
        optimizer.step()
    assert torch.equal(model.image_encoding(batch["images"]), before) and not torch.equal(model.text_encoder.embedding.weight, words)
    assert all(map(torch.equal, buffers, model.image_encoder.buffers()))  # BatchNorm's statistics
    model.begin_stage(3, fresh=True)
    assert all(p.requires_grad for p in model.parameters()) and model.image_encoder.training
    assert not torch.equal(model.image_encoding(batch["images"]), before)


def test_queries_without_a_text_tower_are_the_captions_words():
    model = tiny_model()
    tokens, mask = torch.tensor([[2, 5, 7, 5, 3]]), torch.ones(1, 5, dtype=torch.bool)
    expected = torch.zeros(1, 30)
    expected[0, [5, 7]] = 0.5**0.5
    torch.testing.assert_close(model.encode_words(tokens, mask), expected)


def test_word_maps_have_the_encoding_as_their_maximum():
    model, images, words = tiny_model().eval(), torch.randn(2, 3, 16, 16), torch.tensor([5, 9, 20])
    maps = model.word_maps(images, words)
    assert maps.shape == (2, 16, 3)
    torch.testing.assert_close(torch.log1p(maps.amax(1).relu()), model.image_encoding(images)[:, words])


def test_word_maps_of_stage_2_use_the_frozen_embedding():
    model, images = tiny_model(2).eval(), torch.randn(2, 3, 16, 16)
    nn.init.normal_(model.text_encoder.embedding.weight)
    maps = model.word_maps(images, torch.arange(4, 30))
    torch.testing.assert_close(torch.log1p(maps.amax(1).relu()), model.image_encoding(images)[:, 4:])


def test_collapse_and_explosion_are_said():
    model, record = tiny_model(), {"active_image": 5.0, "active_text": 5.0}
    assert model.warn(record) is None
    assert "text encodings have fewer than one active word: lower --lambda-text" in model.warn(record | {"active_text": 0.5})
    assert "image encodings are not sparse" in model.warn(record | {"active_image": 20.0})
    model.strength.fill_(0.5)
    assert model.warn(record | {"active_image": 20.0}) is None            # the regulariser still grows


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_padding_changes_nothing(stage):
    model, batch = tiny_model(stage).eval(), make_batch()
    longer = {"tokens": torch.cat([batch["tokens"], torch.randint(30, (4, 3))], 1),
              "mask": torch.cat([batch["mask"], torch.zeros(4, 3, dtype=torch.bool)], 1)}
    torch.testing.assert_close(model.encode_text(**longer), model.encode_text(batch["tokens"], batch["mask"]))


def test_two_ranks_equal_one_process(tmp_path):
    torch.manual_seed(0)
    batch, models = make_batch(B=8), {str(stage): tiny_model(stage) for stage in (1, 2, 3)}
    ranks = on_ranks(tmp_path, tiny_model, models, batch)
    for stage, model in models.items():
        out = model(batch)
        out["loss"].backward()
        assert sum(own["loss"] for own, _, _ in ranks[stage]).item() / 2 == pytest.approx(out["loss"].item(), abs=1e-5), stage
        for _, gradients, _ in ranks[stage]:
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-3, atol=1e-5, msg=lambda m: f"{stage} {name}: {m}")


# Runs ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_evaluation(monkeypatch):
    monkeypatch.setattr(evaluation, "WORLD_N", 24)


def log_of(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_three_stages_have_their_steps_and_learning_rates(tmp_path):
    run = tmp_path / "run"
    train.main([*SMALL, "--lr", "1e-3", "--lr-2", "0.5", "--lr-3", "0.1", "--out", str(run)])
    assert [record["lr"] for record in log_of(run)] == pytest.approx(
        [1e-3, 1e-3, 5e-4, 5e-4] + [1e-4 * (1 + math.cos(math.pi * max(0, s - 1) / 3)) / 2 for s in range(4)])
    first, second, last = (common.load_checkpoint(run / name) for name in ("stage-1.pt", "stage-2.pt", "last.pt"))
    assert [int(state["model"]["stage"]) for state in (first, second, last)] == [1, 2, 3] and [s["step"] for s in (first, second, last)] == [2, 4, 8]
    frozen = [name for name in first["model"] if name.startswith("image_encoder.") or name.startswith("image_head.transform")]
    assert all(torch.equal(first["model"][name], second["model"][name]) for name in frozen)
    assert not all(torch.equal(second["model"][name], last["model"][name]) for name in frozen)
    assert torch.equal(second["model"]["image_embedding"], first["model"]["text_encoder.embedding.weight"])


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 6])
def test_a_run_continues_in_any_stage_bit_for_bit(tmp_path, monkeypatch, stop):
    train.main([*SMALL, "--out", str(tmp_path / "whole")])
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(train.Stop, "agreed", lambda self, device: calls.append(1) or len(calls) == stop)
        train.main([*SMALL, "--out", str(tmp_path / "stopped")])
    assert len(log_of(tmp_path / "stopped")) == stop
    assert [(tmp_path / "stopped" / f"stage-{n}.pt").exists() for n in (1, 2)] == [stop >= 2, stop >= 4]
    train.main([*SMALL, "--resume", "--out", str(tmp_path / "stopped")])
    states = [common.load_checkpoint(tmp_path / name / "last.pt") for name in ("whole", "stopped")]
    assert all(torch.equal(states[0]["model"][name], states[1]["model"][name]) for name in states[0]["model"])


@pytest.mark.parametrize("flags, numbers", [
    (["--stages", "single"], [3] * 8), (["--share-2", "0"], [1] * 2 + [3] * 6), (["--amp", "bf16"], [1, 1, 2, 2, 3, 3, 3, 3]),
    (["--grad-checkpoint", "--bias-image", "0.5", "--bias-text", "1", "--init-scale", "20"], [1, 1, 2, 2, 3, 3, 3, 3])])
def test_flags_train(tmp_path, flags, numbers):
    train.main([*SMALL, *flags, "--out", str(tmp_path / "run")])
    log = log_of(tmp_path / "run")
    assert [record["stage"] for record in log] == numbers
    assert (tmp_path / "run" / "stage-1.pt").exists() == (1 in numbers)
    if "--init-scale" in flags:
        assert log[0]["scale"] == pytest.approx(20) and log[0]["active_text"] > 1


def test_lamb_and_a_linear_schedule(tmp_path):
    train.main([*SMALL, "--stages", "single", "--optimizer", "lamb", "--schedule", "linear", "--lr", "1e-3", "--out", str(tmp_path / "run")])
    assert [record["lr"] for record in log_of(tmp_path / "run")] == pytest.approx([1e-3] + [1e-3 * (8 - s) / 7 for s in range(1, 8)])
    state = common.load_checkpoint(tmp_path / "run" / "last.pt")["optimizer"]
    assert all(isinstance(own["step"], int) for own in state["state"].values())     # AdamW keeps tensors


@pytest.mark.parametrize("flags, message", [
    (["--share-1", "0.7", "--share-2", "0.3"], "leave no steps to stage 3"), (["--init-scale", "0"], "--init-scale 0.0 must be from 1"),
    (["--revive-until", "4"], "--revive-until 4")])
def test_bad_settings_are_refused(tmp_path, flags, message):
    with pytest.raises(common.UserError, match=message):
        train.main([*SMALL, *flags, "--out", str(tmp_path / "run")])


def test_a_run_cannot_continue_in_another_stage(tmp_path, monkeypatch):
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(train.Stop, "agreed", lambda self, device: calls.append(1) or len(calls) == 3)
        train.main([*SMALL, "--out", str(tmp_path / "run")])
    with pytest.raises(common.UserError, match="leave out the flags that change --steps"):
        train.main([*SMALL, "--resume", "--steps", "40", "--out", str(tmp_path / "run")])


# Evaluation ----------------------------------------------------------------------------------------------------------


def test_label_ranks_count_the_best_sub_word_and_ties_against_it():
    scores = torch.tensor([[0.0, 3.0, 2.0, 1.0], [1.0, 1.0, 0.0, 1.0]])
    assert evaluation.label_ranks(scores, [[2, 3], [0]], torch.tensor([0, 0])).tolist() == [1, 2]
    assert evaluation.label_ranks(scores, [[1], [0, 2]], torch.tensor([1, 1])).tolist() == [1, 2]


def test_a_run_is_read_searched_and_shown(tmp_path, capsys):
    run = tmp_path / "run"
    train.main([*SMALL, "--out", str(run)])
    assert (run / "words.png").exists() and (run / "queries.png").exists()
    evaluation.main([str(run), "--task", "words,textfree,sparsity,pointing"])
    found = json.loads((run / "eval.json").read_text())
    assert {"words/top1", "words/shape/top100", "textfree/zeroshot", "textfree/t2i/R@1", "active/image", "active/text", "pointing/shape",
            "pointing/shape_chance", "zeroshot"} <= set(found)
    assert found["words/top10"] <= found["words/top100"] <= 1
    evaluation.main([str(run), "--task", "sparsity", "--checkpoint", "stage-1.pt"])
    assert set(json.loads((run / "eval-stage-1.json").read_text())) == {"data", "split", "active/image", "active/text"}
    assert json.loads((run / "eval.json").read_text()) == found
    capsys.readouterr()
    evaluation.main([str(run), "--query", "a red circle", "Red AND NOT blue"])
    shown = capsys.readouterr().out
    assert "a red circle (text tower): " in shown and "a red circle (words alone): " in shown and "Red AND NOT blue: " in shown
    index = stair.InvertedIndex.load(run / "index.pt")
    assert len(index) == 24 == len((run / "index.jsonl").read_text().splitlines())
    embed, _ = evaluation.load_run(run)
    images = common.open_data("shapes:size=16,objects=2,words=20").sample(24, "test", 7)["images"]
    query = embed.texts(["a red circle"], "encode_words")[0]
    scores = (embed.images(images) @ query).clamp(min=0)
    best = index.search(query, 24, cosine=True)
    assert [score for _, score in best] == pytest.approx(scores[scores > 0].sort(descending=True).values.tolist(), abs=1e-5)
    for query, message in (("red AND", "missing"), ("red AND qqq", "no word 'qqq'"), ("NOT red", "no word to rank by"), ("", "no word to rank by")):
        with pytest.raises(common.UserError, match=message):
            evaluation.main([str(run), "--query", query])


def test_files_are_searched_and_shown(tmp_path, monkeypatch):
    run, colours = tmp_path / "run", ["red", "green", "blue"]
    for i, colour in enumerate(colours):
        (tmp_path / "data" / colour).mkdir(parents=True)
        Image.new("RGB", (20, 20), colour).save(tmp_path / "data" / colour / "0.png")
    (tmp_path / "captions.csv").write_text("image,caption\n" + "".join(f"data/{colour}/0.png,中文 {colour}\n" for colour in colours))
    train.main([*SMALL, "--data", f"{tmp_path}/captions.csv", "--image-size", "16", "--batch", "3", "--out", str(run)])
    assert (run / "words.png").exists()                                   # an odd number of images
    evaluation.main([str(run), "--data", f"{tmp_path}/data", "--task", "words,textfree,sparsity", "--limit", "2"])
    evaluation.main([str(run), "--data", f"{tmp_path}/data", "--query", "red"])
    index, = run.glob("*data-index.pt")
    assert len(stair.InvertedIndex.load(index)) == 3 and not (run / "index.pt").exists()
    embed, config = evaluation.load_run(run)
    scores = torch.randn(3, len(embed.tokenizer))
    monkeypatch.setattr(evaluation, "vocabulary_scores", lambda embed, images: scores)
    found = evaluation.words(embed, common.open_data(config["data"]), types.SimpleNamespace(limit=None))
    for name, shift in (("words/in_captions", 0), ("words/in_others_captions", 1)):
        captions = [embed.tokenizer.encode("中文 " + colours[(i + shift) % 3]) for i in range(3)]
        best = [sorted(range(len(row)), key=lambda k: -row[k].item())[:10] for row in scores]
        expected = [sum(k in caption for k in own) / 10 for own, caption in zip(best, captions)]
        assert max(expected) > 0 and found[name].tolist() == pytest.approx(expected)
    monkeypatch.undo()
    with pytest.raises(common.UserError, match="is something else"):
        evaluation.search(evaluation.load_run(run)[0], common.TarShards(__file__), types.SimpleNamespace(data="x", query=["red"]), run)


def test_the_worlds_made_up_words():
    plain, more = (common.World(words=words) for words in (0, 300))
    words = {common.made_up_word(i) for i in range(300)}
    assert len(words) == 300 and len({common.made_up_word(i) for i in range(4000)}) == 4000
    captions = more.sample_captions(3000)
    used = [word for caption in captions for word in caption.split() if word in words]
    assert len(set(used)) == 300 and 0.9 < len(used) / 3000 < 1.1
    assert not any(word in words for caption in plain.sample_captions(300) for word in caption.split())


# The inverted index --------------------------------------------------------------------------------------------------


WORDS = ["[PAD]", "red", "blue", "circle", "star", "the"]


def make_index(n=40, seed=0):
    torch.manual_seed(seed)
    enc = torch.rand(n, len(WORDS)) * (torch.rand(n, len(WORDS)) < 0.5)
    index = stair.InvertedIndex(WORDS)
    for part in torch.arange(n).split(7):
        index.add([f"d{i}" for i in part.tolist()], enc[part])
    return index, enc


def ranked(scores, k):
    order = sorted((i for i in range(len(scores)) if scores[i] > 0), key=lambda i: -scores[i])
    return [f"d{i}" for i in order[:k]]


@pytest.mark.parametrize("cosine", [False, True])
def test_search_is_the_exact_product(cosine):
    index, enc = make_index()
    query = torch.tensor([0, 1.0, 0, 0.5, 0, 2.0])
    scores = enc @ query
    if cosine:
        scores = scores / (enc.norm(dim=1) * query.norm()).clamp(min=1e-12)
    found = index.search(query, 10, cosine=cosine)
    assert [name for name, _ in found] == ranked(scores.tolist(), 10)
    assert [score for _, score in found] == pytest.approx(scores.sort(descending=True).values[:10].tolist())
    assert index.search({"red": 1.0, "circle": 0.5, "the": 2.0}, 10, cosine=cosine) == found


def test_boolean_queries():
    index, enc = make_index()
    red, blue, circle, star = ((enc[:, WORDS.index(word)] > 0).tolist() for word in ("red", "blue", "circle", "star"))
    for expression, expected in (("red AND circle NOT blue", [r and c and not b for r, c, b in zip(red, circle, blue)]),
                                 ("red circle OR star", [r and c or s for r, c, s in zip(red, circle, star)]),
                                 ("red AND (circle OR star)", [r and (c or s) for r, c, s in zip(red, circle, star)]),
                                 ("NOT (red OR NOT blue)", [not (r or not b) for r, b in zip(red, blue)])):
        assert index.where(expression).tolist() == expected, expression
        found = {name for name, _ in index.search({"the": 1.0, "star": 1.0, "red": 1.0, "circle": 1.0}, 40, where=expression)}
        assert found == {f"d{i}" for i in range(40) if expected[i] and (enc[i, [1, 3, 4, 5]] > 0).any()}
    for expression in ("", "red AND", "(red", "red)", "NOT", "OR red", "green"):
        with pytest.raises(ValueError, match="missing|not closed|too many|no word 'green'"):
            index.where(expression)


def test_allow_block_and_boost():
    index, enc = make_index()
    query = {"red": 1.0, "the": 3.0}
    assert index.search(query, 5, block=["the"]) == index.search(query, 5, allow=["red"]) == index.search({"red": 1.0}, 5)
    boosted = index.search(query, 5, boost={"red": 4.0, "star": 2.0})
    assert [name for name, _ in boosted] == ranked((enc @ torch.tensor([0, 5.0, 0, 0, 2.0, 3.0])).tolist(), 5)
    for bad in (dict(block=["green"]), dict(allow=["green"]), dict(boost={"green": 1.0}), dict(k=0)):
        with pytest.raises(ValueError, match="no word 'green'|at least 1"):
            index.search(query, **bad)
    with pytest.raises(ValueError, match=r"shape \(6,\)"):
        index.search(torch.ones(1, 6))


@pytest.mark.parametrize("query, wanted", [("red AND ring NOT blue", "red ring"), ("ring NOT (blue OR Green)", "ring"), ("NOT (red OR blue)", ""),
                                           ("NOT (red AND NOT blue)", "blue"), ("NOT NOT red", "red"), ("a NOT (b (c NOT d)) e", "a d e"),
                                           ("a red circle)", "a red circle")])
def test_queries_are_ranked_by_what_is_not_negated(query, wanted):
    assert evaluation.wanted_words(query) == wanted.split()


def test_an_index_names_what_it_cannot_use(tmp_path):
    index = stair.InvertedIndex(["red", "blue"])
    index.add(["a", "b"], torch.eye(2))
    index.delete(["a", "a"])
    assert len(index) == 1 and index.search({"red": 1.0}) == []
    index.add(["a"], torch.tensor([[2.0, 0.0]]))
    assert index.search(torch.tensor([1.0, 0.0]).to_sparse()) == [("a", 2.0)] == index.search({"red": 1.0})
    with pytest.raises(KeyError):
        index.delete(["b", "c"])
    assert len(index) == 2
    for query in ("red", torch.ones(3)):
        with pytest.raises(ValueError, match="A query is a dict of weights"):
            index.search(query)
    with pytest.raises(ValueError, match="not the string 'xy'"):
        index.add("xy", torch.eye(2))
    torch.save({"model": 1}, tmp_path / "last.pt")
    with pytest.raises(ValueError, match="holds no index"):
        stair.InvertedIndex.load(tmp_path / "last.pt")


def test_documents_are_replaced_and_deleted():
    index, enc = make_index()
    index.delete(["d3", "d20"])
    index.add(["d5", "new"], torch.tensor([[0, 9.0, 0, 0, 0, 0], [0, 8.0, 0, 0, 0, 0]]))
    assert len(index) == 39
    for _ in range(2):
        found = index.search({"red": 1.0}, 100)
        assert found[:2] == [("d5", 9.0), ("new", 8.0)]
        assert {name for name, _ in found[2:]} == {f"d{i}" for i in range(40) if enc[i, 1] > 0} - {"d3", "d20", "d5"}
        index.merge()
    with pytest.raises(KeyError):
        index.delete(["d4", "d3"])
    assert "d4" in index.rows and not index.where("red")[~index.alive].any()


def test_segments_stay_few_and_hold_everything():
    index = stair.InvertedIndex(WORDS)
    enc = torch.rand(100, len(WORDS)) + 0.1
    for i in range(100):
        index.add([f"d{i}"], enc[i : i + 1])
        if i % 10 == 9:
            index.delete([f"d{i - 5}"])
    assert len(index.segments) <= 8 and len(index) == 90
    scores = (enc @ torch.ones(6)).tolist()
    gone = {f"d{i - 5}" for i in range(9, 100, 10)}
    assert [name for name, _ in index.search(torch.ones(6), 100)] == [name for name in ranked(scores, 100) if name not in gone]


def test_an_index_is_saved_loaded_and_exported(tmp_path):
    index, enc = make_index()
    index.delete(["d0"])
    index.save(tmp_path / "index.pt")
    again = stair.InvertedIndex.load(tmp_path / "index.pt")
    query = {"red": 1.0, "star": 0.3}
    assert again.search(query, 40) == index.search(query, 40) and len(again) == 39
    again.add(["more"], torch.ones(1, len(WORDS)))
    again.export(tmp_path / "index.jsonl", contents={"d1": "a red star"})
    rows = {row["id"]: row for row in map(json.loads, (tmp_path / "index.jsonl").read_text().splitlines())}
    assert set(rows) == {"more"} | {f"d{i}" for i in range(1, 40)} and rows["d1"]["contents"] == "a red star"
    for i in range(1, 40):
        assert rows[f"d{i}"]["vector"] == {word: round(100 * x) for word, x in zip(WORDS, enc[i].tolist()) if round(100 * x)}


def test_bad_documents_are_refused():
    index, _ = make_index(3)
    for ids, enc, message in ((["a"], torch.ones(2, 6), "need encodings of that shape"), (["a", "a"], torch.ones(2, 6), "twice"),
                              (["a"], -torch.ones(1, 6), "negative"), (["a"], torch.full((1, 6), torch.nan), "must be numbers")):
        with pytest.raises(ValueError, match=message):
            index.add(ids, enc)
    assert len(index) == 3


def test_the_file_works_alone_in_an_empty_directory(tmp_path):
    shutil.copy(ROOT / "stair.py", tmp_path)
    shown = subprocess.run([sys.executable, "stair.py"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert int(shown.splitlines()[-2].split()[-1].rstrip("%")) > 50 and "AND" in shown.splitlines()[-1]
