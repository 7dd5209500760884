"""STAIR: every equation against a literal reference in float64, the three stages, and the search.

The inverted index is compared with a brute-force search.
"""

import functools
import inspect
import json
import math
import random
import re
import shutil
import textwrap
import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import common
import eval as evaluation
import stair
from helpers import (SMALL, LiveMemory, assert_same_with_gradients, infonce, make_batch, mean,
                     padded, picture, read_log, tiny_model, train_alone, weights,
                     write_files, write_tar)

V, E = 11, 6
tiny_stair = functools.partial(tiny_model, "stair")


def literal_encoding(head, h, mask=None):
    """Eq. 4 and 5, word by word and position by position: h (B, N, d) -> (B, |V|)."""
    fc, _, norm = head.transform
    rows = []
    for i, sample in enumerate(h):
        transformed = []
        for j, x in enumerate(sample):
            if mask is None or mask[i, j]:
                x = F.gelu(fc.weight @ x + fc.bias)
                transformed.append(F.layer_norm(x, (E,), norm.weight, norm.bias, norm.eps))
        row = []
        for k in range(V):
            p = [head.embedding.weight[k] @ x + head.bias[k] for x in transformed]
            p = max(p, key=lambda x: x.item()) if p else torch.tensor(0.0, dtype=h.dtype)
            row.append(torch.log(1 + p) if p > 0 and head.valid[k] else p * 0)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def build(special=(0, 3)):
    """Return a float64 head with random weights. special: ids of tokens that are never active."""
    head = stair.TokenProjectionHead(5, nn.Embedding(V, E), special).double()
    for p in head.parameters():
        nn.init.normal_(p)
    return head


@pytest.mark.parametrize("chunk", [1, 60, 2**23])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shift", [0.0, -8.0])  # many or few words are active
def test_encodings_equal_equations_4_and_5_in_values_and_gradients(
        masked, chunk, shift, monkeypatch):
    """chunk: how many numbers the streamed form computes at a time. encode() is as printed."""
    monkeypatch.setattr(stair.StreamedEncoding, "CHUNK", chunk)
    head, h = build(), torch.randn(4, 7, 5, dtype=torch.double, requires_grad=True)
    nn.init.constant_(head.bias, shift)
    mask = torch.arange(7) < torch.tensor([[7], [3], [1], [0]]) if masked else None
    inputs = [h, *head.parameters()]
    enc = head(h, mask)
    assert 0 < (enc > 0).sum() and ((enc > 0).sum() > enc.numel() / 5) == (shift == 0)
    assert (enc == 0).any() and (enc[:, [0, 3]] == 0).all()
    assert_same_with_gradients(enc, literal_encoding(head, h, mask), inputs)
    b = head.bias.masked_fill(~head.valid, -math.inf)
    plain = stair.encode(head.transform(h), head.embedding.weight, b, mask)
    assert_same_with_gradients(plain, literal_encoding(head, h, mask), inputs)


def test_inactive_words_of_the_caption_get_a_gradient():
    """An entry of 0 has no gradient, so an inactive word would stay inactive. A revived entry has
    the gradient of its maximum, but only if a larger value lowers the loss."""
    head, h = build(special=()), torch.randn(1, 3, 5, dtype=torch.double)
    nn.init.constant_(head.bias, -50.0)
    word = torch.arange(V) == 4
    for sign, moves in ((-1.0, True), (1.0, False)):
        enc = head(h, revived=word[None])
        assert (enc == 0).all()
        gradient = torch.autograd.grad((sign * enc).sum(), head.bias)[0]
        assert gradient.tolist() == (sign * moves * word).tolist()


def test_gradients_of_revived_words_are_bounded():
    """The cosine of an empty encoding would divide by 0. The loss bounds the norm from below.
    Special words and masked positions are not revived."""
    head, h, norms = build(), torch.randn(4, 3, 5, dtype=torch.double), []
    words = torch.rand(4, V, dtype=torch.double)
    for bias in (0.0, -50.0):  # with -50 the encodings are empty
        nn.init.constant_(head.bias, bias)
        loss = stair.contrastive_loss(head(h, revived=words > 0), words, 10.0)
        gradient = torch.autograd.grad(loss, head.bias)[0]
        norms.append(gradient.norm().item())
        assert gradient[[0, 3]].abs().sum() == 0
    assert 0 < norms[1] < 30 * norms[0]
    mask = torch.tensor([True, False, False, False])[:, None].expand(4, 3)
    enc = head(h, mask, revived=words > 0)
    assert torch.autograd.grad(-enc[1:].sum(), head.bias)[0].abs().sum() == 0


def test_streamed_encoding_never_holds_all_of_p(monkeypatch):
    B, N, size, peaks = 16, 50, 3000, []
    monkeypatch.setattr(stair.StreamedEncoding, "CHUNK", N * size)
    t, e = nn.Parameter(torch.randn(B, N, 32)), nn.Parameter(torch.randn(size, 32))
    for form in (stair.StreamedEncoding.apply, stair.encode):
        with LiveMemory() as memory:
            form(t, e, torch.zeros(size)).sum().backward()
        peaks.append(memory.peak / (4 * B * N * size))                    # 1 is the size of p
    assert peaks[0] < 0.5 and peaks[1] > 1


def test_encodings_under_autocast_round_only_the_products_to_bf16():
    head, h = stair.TokenProjectionHead(5, nn.Embedding(V, E)), torch.randn(3, 4, 5)
    nn.init.constant_(head.bias, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        enc, t = head(h), head.transform(h)
    p = (t.bfloat16() @ head.embedding.weight.bfloat16().T).amax(1).float() + head.bias
    torch.testing.assert_close(enc, torch.log1p(p.relu()), atol=1e-6, rtol=1e-6)
    assert enc.dtype == torch.float32
    enc.sum().backward()
    gradient = head.embedding.weight.grad
    assert gradient.dtype == torch.float32 and gradient.abs().sum() > 0


def test_flops_loss_equals_equation_6():
    enc = torch.rand(5, V, dtype=torch.double, requires_grad=True)
    expected = sum((sum(enc[i, k] for i in range(5)) / 5) ** 2 for k in range(V))
    assert_same_with_gradients(stair.flops_loss(enc), expected, [enc])


@pytest.mark.parametrize("size", [1.0, 0.1, 0.0])
def test_contrastive_loss_is_the_mean_of_equation_3_in_both_directions(size):
    """size: of a short image and a short caption, whose norm counts as 0.5: 0 is allowed."""
    sizes = torch.tensor([[1.0], [1.0], [size], [1.0]], dtype=torch.double)
    v, t = ((torch.rand(4, V).double() * sizes).requires_grad_() for _ in range(2))
    M = [[5 * (a @ b) / (a.norm().clamp(min=0.5) * b.norm().clamp(min=0.5)) for b in t] for a in v]
    losses = [infonce(row, i) for rows in (M, zip(*M)) for i, row in enumerate(rows)]
    assert_same_with_gradients(stair.contrastive_loss(v, t, 5.0), mean(losses), [v, t])


def test_caption_mask_equals_equation_8():
    tokens = torch.tensor([[2, 5, 5, 7], [2, 9, 1, 1]])
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    expected = [[float(k in words) for k in range(V)] for words in ((2, 5, 7), (2, 9))]
    assert stair.caption_mask(tokens, mask, V).tolist() == expected
    words = torch.zeros(30)
    words[[5, 7]] = 0.5**0.5  # a query without the text encoder weights words equally
    torch.testing.assert_close(tiny_stair().encode_words(tokens, mask)[0], words)


def test_lamb_equals_the_algorithm_of_its_paper():
    p = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    zero = torch.zeros(2, dtype=torch.double, requires_grad=True)
    free = torch.full((2,), 3.0, dtype=torch.double, requires_grad=True)
    still = nn.Parameter(torch.ones(2))  # has no gradient
    groups = [{"params": [p], "weight_decay": 0.1}, {"params": [zero]},
              {"params": [free], "weight_decay": 0.5, "decays": False}, {"params": [still]}]
    optimizer = stair.LAMB(groups, lr=0.02, betas=(0.8, 0.9), eps=1e-6)
    x, m, v = p.detach().clone(), 0.0, 0.0
    for step in range(1, 5):
        g = torch.randn(3, 4, dtype=torch.double)
        p.grad, zero.grad, free.grad = g.clone(), torch.ones_like(zero), torch.ones_like(free)
        optimizer.step()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        r = (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-6) + 0.1 * x
        x = x - 0.02 * x.norm() / r.norm() * r
        torch.testing.assert_close(p.detach(), x)
        if step == 1:  # a tensor of zeros has the trust ratio 1; a bias is not scaled
            assert zero.tolist() == pytest.approx([-0.02] * 2)
            assert free.tolist() == pytest.approx([2.98] * 2)
            again = stair.LAMB([{"params": [x]} for x in (p, zero, free, still)])
            again.load_state_dict(optimizer.state_dict())
            optimizer = again
    assert still.tolist() == [1, 1]


def test_model_loss_equals_equation_7():
    model, batch = tiny_stair(lambda_image=3.0, lambda_text=0.5), make_batch()
    model.strength.fill_(0.25)                                              # of the ramp
    v = model.image_encoding(batch["images"])
    t = model.text_encoding(batch["tokens"], batch["mask"])
    flops = 3.0 * stair.flops_loss(v) + 0.5 * stair.flops_loss(t)
    loss = stair.contrastive_loss(v, t, 1 / 0.07) + 0.25 * flops
    out = model(batch)
    torch.testing.assert_close(out["loss"], loss)
    for side, enc in ("image", v), ("text", t):
        assert out[f"active_{side}"] == sum(x > 0 for row in enc.tolist() for x in row) / 4
    torch.testing.assert_close(model.encode_image(batch["images"]).norm(dim=1), torch.ones(4))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_padding_changes_the_encodings_in_no_stage(stage):
    model, batch = tiny_stair(stage), make_batch()
    enc = model.text_encoding(batch["tokens"], batch["mask"])
    torch.testing.assert_close(model.text_encoding(*padded(batch)), enc)


def test_stage_2_freezes_the_image_encoder_and_its_embedding():
    """Also for an optimizer of stage 1, and in a model that loads this state."""
    model, batch = tiny_stair(1).train(), make_batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def update():
        model(batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    update()
    model.begin_stage(2, fresh=True), model.train()
    before = model.image_encoding(batch["images"])
    statistics = [b.clone() for b in model.image_encoder.buffers()]     # BatchNorm's
    words = model.text_encoder.embedding.weight.detach().clone()
    update(), update()
    assert torch.equal(model.image_encoding(batch["images"]), before) and not before.requires_grad
    assert all(map(torch.equal, statistics, model.image_encoder.buffers()))
    assert not torch.equal(model.text_encoder.embedding.weight, words)
    again = tiny_stair(3)
    wrapped = nn.ModuleList([again])  # as another project may wrap it
    wrapped.load_state_dict({f"0.{key}": x for key, x in model.state_dict().items()})
    wrapped.train()
    assert torch.equal(again.image_encoding(batch["images"]), before)
    assert not any(p.requires_grad for p in again.image_encoder.parameters())


def test_the_lines_in_the_comment_train_three_stages():
    """Three stages of 4 steps."""
    model, states = tiny_stair(1), []
    model.strength.zero_()
    assert model.number == model.stage == 1 and model.strength == 0  # until after_update
    comment = inspect.getsource(stair).partition("# A stage of FullModel")[2].partition("\n\n")[0]
    lines = textwrap.dedent("\n".join(re.findall(r"^#( {5}.*)$", comment, re.MULTILINE)))
    assert len(lines.splitlines()) == 7
    for number in (1, 2, 3):
        known = dict(model=model, number=number, ranks=1, steps=4, torch=torch, batch=make_batch(),
                     gather=stair.all_ranks, DDP=nn.parallel.DistributedDataParallel)
        exec(lines, known)
        states.append({name: x.clone() for name, x in model.state_dict().items()})
    first, second, third = states
    assert [state["stage"] for state in states] == [1, 2, 3]
    assert first["strength"] == second["strength"] == third["strength"] == 1
    for name in ("image_encoder.pos", "image_head.transform.0.weight", "text_encoder.pos"):
        kept = torch.equal(first[name], second[name]), torch.equal(second[name], third[name])
        assert kept == (name.startswith("image"), False), name


@pytest.mark.parametrize("stage", [2, 3])  # stage 2 has the frozen embedding
def test_word_maps_have_the_encoding_as_their_maximum(stage):
    model, images, ids = tiny_stair(stage).eval(), torch.randn(2, 3, 16, 16), [5, 9, 20]
    nn.init.normal_(model.text_encoder.embedding.weight), nn.init.normal_(model.image_head.bias)
    maps = model.word_maps(images, torch.tensor(ids))
    assert maps.shape == (2, 16, 3)
    enc = model.image_encoding(images)[:, ids]
    torch.testing.assert_close(torch.log1p(maps.amax(1).relu()), enc)


@pytest.mark.parametrize("flags, stages, rates", [
    ("--lr-3 0.1", [1, 1, 2, 2, 3, 3, 3, 3], 4 * [1e-3] + [
        1e-4 * (1 + math.cos(math.pi * step / 3)) / 2 for step in (0, 0, 1, 2)]),
    ("--share-2 0 --lr-3 1 --schedule linear --amp bf16 --grad-checkpoint",
     [1, 1, 3, 3, 3, 3, 3, 3], [1e-3, 1e-3] + [1e-3 * step / 5 for step in (5, 5, 4, 3, 2, 1)]),
    ("--stages single --optimizer lamb --schedule linear", [3] * 8,
     [1e-3] + [1e-3 * step / 7 for step in (7, 6, 5, 4, 3, 2, 1)])])
def test_stages_have_their_steps_and_learning_rates(tmp_path, flags, stages, rates):
    train_alone([*SMALL["stair"], "--lr", "1e-3", *flags.split(), "--out", tmp_path])
    log, files = read_log(tmp_path), ["stage-1.pt", "stage-2.pt", "last.pt"]
    assert [record["stage"] for record in log] == stages
    assert [record["lr"] for record in log] == pytest.approx(rates)
    assert [(tmp_path / name).exists() for name in files] == [1 in stages, 2 in stages, True]
    if "lamb" in flags:
        state = common.load_checkpoint(tmp_path / "last.pt")["optimizer"]["state"]
        assert all(isinstance(p["step"], int) for p in state.values())  # AdamW keeps tensors
    if 2 in stages:
        assert [common.load_checkpoint(tmp_path / name)["step"] for name in files] == [2, 4, 8]
        first, second, last = (weights(tmp_path, name) for name in files)
        assert [first["stage"], second["stage"], last["stage"]] == [1, 2, 3]
        assert torch.equal(second["image_embedding"], first["text_encoder.embedding.weight"])


def test_label_ranks_use_the_best_sub_word_and_count_ties_against_it():
    scores = torch.tensor([[0.0, 3.0, 2.0, 1.0], [1.0, 1.0, 0.0, 1.0]])
    ranks = stair.label_ranks(scores, [[2, 3], [0]], torch.tensor([0, 0]))
    assert ranks.tolist() == [1, 2]
    ranks = stair.label_ranks(scores, [[1], [0, 2]], torch.tensor([1, 1]))
    assert ranks.tolist() == [1, 2]
    ranks = stair.label_ranks(scores * torch.tensor([[1], [torch.nan]]), [[1]], torch.zeros(2).long())
    assert ranks.tolist() == [0, 3]  # a model that has diverged is wrong


def test_the_better_word_of_an_images_two_labels_counts():
    """The best word of image 0, a red ring, is red. That of image 1, a blue star, is ring."""
    names, ids = ["red", "blue", "ring", "star"], torch.arange(2)
    groups = {"": (ids, ["red ring", "blue star"]), "/colour": (ids, names[:2]),
              "/shape": (ids, names[2:])}
    x = torch.tensor([[0, 0, 0, 0, 3.0, 2, 0, 1], [0, 0, 0, 0, 1.0, 2, 3, 0]])
    embed = SimpleNamespace(tokenizer=common.WordPiece([*common.SPECIAL_TOKENS, *names]),
                            encode_pairs=lambda pairs, encode: (x, [0, 1]),
                            model=SimpleNamespace(encode_words=True))
    data = evaluation.EvalSet(groups=groups, labelled=lambda purpose: [])
    found = evaluation.words(embed, data, None)
    assert {name: found[f"words{name}/top1"].tolist() for name in ("", "/colour", "/shape")} == {
        "": [True, False], "/colour": [True, False], "/shape": [False, False]}


def test_a_run_is_read_and_searched(tmp_path, run_of, capsys):
    run = shutil.copytree(run_of("stair"), tmp_path / "run")
    evaluation.main([str(run), "--task", "words,textfree,sparsity"])
    evaluation.main([str(run), "--task", "sparsity", "--checkpoint", "stage-1.pt"])
    lines = (run / "evals.jsonl").read_text().splitlines()
    found, stage_1 = map(json.loads, lines[-2:])
    assert {"words/top1", "words/shape/top100", "textfree/zeroshot", "textfree/t2i/R@1",
            "active/image", "active/text"} <= set(found)
    assert found["words/top10"] <= found["words/top100"] <= 1
    assert set(stage_1) == {"settings", "active/image", "active/text"}
    capsys.readouterr()
    evaluation.main([str(run), "--query", "a red circle", "Red AND NOT blue", "red AND NOT red"])
    shown = capsys.readouterr().out
    assert "Red AND NOT blue:" in shown
    embed, _ = evaluation.load_run(run)
    images = common.open_data("shapes:size=16,objects=2,words=20").sample(24, "test", 7)["images"]
    scores = embed.images(images) @ embed.texts(["a red circle"])[0]
    best = [f"{i} ({scores[i]:.2f})" for i in scores.topk(8).indices.tolist() if scores[i] > 0]
    assert f"a red circle (text encoder): {', '.join(best) or 'nothing'}\n" in shown
    assert (run / "a-red-circle-Red-AND-NOT-blue-red-AND-NOT-red-search.png").exists()
    names = {evaluation.path_words(query) for query in ("красный", "中文", "中_文", "中文" * 40)}
    assert len(names) == 4  # each has a picture of its own


@pytest.mark.parametrize("name", ["stair", "sparc"])
def test_images_in_files_are_searched(run_of, tmp_path, monkeypatch, capsys, name):
    """A search needs neither captions nor labels."""
    run = shutil.copytree(run_of(name), tmp_path / "run")
    files = {f"{i}.png": picture(20, 16, format="PNG", value=20 * i) for i in range(12)}
    write_files(tmp_path / "photos", files | {"x/9.png": "no image", "9.jpg": "no image"})
    evaluation.main([str(run), "--data", str(tmp_path / "photos"), "--query", "a red ring",
                     "--batch", "5"])
    out = capsys.readouterr().out
    model, _ = evaluation.load_run(run)
    paths = [str(tmp_path / "photos" / file) for file in files]
    scores = model.similarity(model.images(paths), model.texts("a red ring"))[:, 0].tolist()
    best = [f"{path} ({score:.2f})" for score, path in sorted(zip(scores, paths), reverse=True)[:8]
            if name == "sparc" or score > 0]
    assert f"a red ring (text encoder): {', '.join(best) or 'nothing'}\n" in out
    assert len([*run.glob("*photos-a-red-ring-search.png")]) == 1
    shard = write_tar(tmp_path / "0.tar", {f"{i}.jpg": picture() for i in range(8)})
    drawn, sheet = [], evaluation.sheet
    monkeypatch.setattr(evaluation, "sheet", lambda title, note, rows, **more: drawn.extend(
        rows) or sheet(title, note, rows, **more))
    capsys.readouterr()
    evaluation.main([str(run), "--data", shard, "--query", "red", "--batch", "2"])
    found = re.search(r"red \(text encoder\): (.*)", capsys.readouterr().out)[1].split(", ")
    assert len(drawn[0][1]) == len(found)  # each image that was found is in the picture
    assert 1 <= len(found) <= 8 and all(re.match(r".*\.tar:\w+ \(", name) for name in found)


WORDS = ["[PAD]", "red", "blue", "circle", "star", "the"]


def random_encodings(n):
    """Return n random encodings (n, |V|), half of whose entries are 0."""
    return torch.rand(n, len(WORDS)) * (torch.rand(n, len(WORDS)) < 0.5)


def make_index():
    """Return an index of 40 random documents d0, d1, ... and their encodings."""
    index, enc = stair.InvertedIndex(WORDS), random_encodings(40)
    index.add([f"d{i}" for i in range(40)], enc)
    return index, enc


def brute_force(documents, query, k):
    """Score documents {id: encoding (|V|,)} -> the k best [(id, score)] above 0, best first."""
    found = {name: sum(x * y for x, y in zip(enc.tolist(), query.tolist()))
             for name, enc in documents.items()}
    best = sorted(found.items(), key=lambda item: -item[1])[:k]
    return [(name, pytest.approx(score, abs=1e-6)) for name, score in best if score > 0]


def test_the_index_finds_what_a_brute_force_search_finds():
    """Two hundred random operations add documents or search the index."""
    rng, index, documents = random.Random(0), stair.InvertedIndex(WORDS), {}
    for step in range(200):
        operation = rng.choice(["add", "search", "search"])
        if operation == "add":
            names = [f"d{step}.{i}" for i in range(rng.randrange(6))]
            enc = random_encodings(len(names)).requires_grad_()
            index.add(names, enc if rng.random() < 0.5 else enc.to_sparse())
            documents |= dict(zip(names, enc))
        else:
            query, k = torch.rand(len(WORDS)) * (torch.rand(len(WORDS)) < 0.7), rng.randrange(1, 9)
            assert index.search(query, k) == brute_force(documents, query, k)
        assert index.ids == list(documents)
    assert not index.joined().requires_grad  # the graph of a model would stay in memory


@pytest.mark.parametrize("query, words, expected", [
    ("red AND circle NOT blue", "red circle", lambda r, b, c, s: r and c and not b),
    ("Red circle OR star", "Red circle star", lambda r, b, c, s: r and c or s),
    ("red AND (circle OR star)", "red circle star", lambda r, b, c, s: r and (c or s)),
    ("NOT (blue OR NOT red)", "red", lambda r, b, c, s: not (b or not r)),
    ("NOT NOT red (blue)(star)", "red blue star", lambda r, b, c, s: r and b and s),
    ("star NOT (blue (red NOT circle))", "star circle", lambda r, b, c, s: s and not (b and r and not c)),
    ("red OR NOT blue", "red", lambda r, b, c, s: r or not b)])
def test_boolean_queries_find_the_documents_that_match(query, words, expected):
    """words: those that are not negated. They rank the documents."""
    index, enc = make_index()
    where, found = stair.boolean_query(query, index)
    assert stair.is_boolean(query) and found == words.split()
    assert where.tolist() == [bool(expected(*row)) for row in (enc > 0)[:, 1:5].tolist()]


def test_search_applies_where_allow_and_block():
    index, enc = make_index()
    assert not stair.is_boolean("a red star and no circle, ANDROID")
    assert index.has("Red").tolist() == (enc[:, 1] > 0).tolist()
    query, red = {"red": 1.0, "the": 3.0}, index.search({"red": 1.0}, 5)
    assert index.search(query, 5, block=["the"]) == index.search(query, 5, allow=["Red"]) == red
    where = index.has("red") & ~index.has("star")
    documents = {f"d{i}": row for i, row in enumerate(enc) if where[i]}
    weights = torch.tensor([0, 1.0, 0, 0, 0, 3.0])
    assert index.search(query, 9, where=where) == brute_force(documents, weights, 9)
    assert dict(index.search({"red": 0.0}, 40, where=where)) == dict.fromkeys(documents, 0.0)
    # documents that `where` allows are found even if their score is negative
    assert dict(index.search({"red": -9.0}, 40, where=where)).keys() == documents.keys()


def query_of(index, query):
    return stair.boolean_query(query, index)


@pytest.mark.parametrize("function, arguments, message", [
    (stair.InvertedIndex.has, ["green"], "no word 'green'"),
    (stair.InvertedIndex.search, [{"green": 1.0}], "no word 'green'"),
    (stair.InvertedIndex.search, [{}, 1, None, ["green"]], "no word 'green'"),
    (stair.InvertedIndex.add, [["a"], torch.ones(2, 6)], r"encodings \(1, 6\), not \(2, 6\)"),
    *((query_of, [text], "not a boolean query")
      for text in ("", "red AND", "red)", "OR r", "()", "red ()", "red AND OR blue")),
    (query_of, ["(red"], "join words by"), (query_of, ["red NOT green"], "no word 'green'"),
    (query_of, ["NOT (red OR blue)"], "at least one without NOT")])
def test_bad_arguments_and_queries_raise_errors_that_name_them(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(stair.InvertedIndex(WORDS), *arguments)


@torch.no_grad()
@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_of_a_model_is_in_the_stage_of_the_model(use_buffers):
    """Averages, as other projects make them, copy tensors alone, and stay in evaluation mode."""
    model, batch = tiny_model("stair", stage=1, vit=dict(stem=None)).eval(), make_batch(2)
    copy_of = get_ema_multi_avg_fn(0.0)
    average = AveragedModel(model, multi_avg_fn=copy_of, use_buffers=use_buffers).eval()
    for stage in (1, 2, 3):
        model.begin_stage(stage, fresh=True)
        nn.init.normal_(model.text_encoder.embedding.weight, std=0.3)  # as training does
        average.update_parameters(model), average.update_parameters(model)
        found, expected = ((net.encode_text(batch["tokens"], batch["mask"]),
                            net.encode_image(batch["images"])) for net in (average.module, model))
        torch.testing.assert_close(found, expected)


def test_a_head_of_the_meta_device_has_its_special_tokens_when_it_is_loaded():
    with pytest.raises(TypeError, match="NoneType"):  # the id of a tokenizer without padding
        build(special=[None])
    head, h = stair.TokenProjectionHead(8, nn.Embedding(50, 8), (0, 1, 2, 3)), torch.randn(2, 5, 8)
    with torch.device("meta"):
        other = stair.TokenProjectionHead(8, nn.Embedding(50, 8), (0, 1, 2, 3))
    other._apply(lambda x: torch.full_like(x, 1, device="cpu"))  # to_empty leaves any numbers
    other.load_state_dict(head.state_dict())
    torch.testing.assert_close(other(h), head(h))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_index_takes_arrays_of_ids_masks_of_numbers_and_any_default_dtype(dtype):
    """A list += an array adds the numbers of the array to those of the list."""
    enc = torch.tensor([[0.1, 0, 0], [0.9, 0.5, 0], [0, 0, 0.7], [0.5, 0.4, 0], [0, 0, 0.2]])
    torch.set_default_dtype(dtype)
    try:
        index = stair.InvertedIndex(["red", "blue", "star"])
        index.add([1000, 1001], enc[:2])
        index.add(np.array([2000, 2001, 2002]), enc[2:])
        found = index.search(torch.tensor([1, 2, 0]).double())
        some = index.search({"red": 1.0, "star": 2.0}, where=[1, 0, 0, 1, 1])
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == [(1001, pytest.approx(1.9)), (2001, pytest.approx(1.3)),
                     (1000, pytest.approx(0.1))]
    assert [i for i, _ in some] == [2001, 2002, 1000]
    with pytest.raises(RuntimeError, match="must match"):
        index.search({"red": 1.0}, where=[1, 0])


def test_a_word_of_a_query_is_the_word_of_a_caption():
    own = common.WordPiece(common.train_wordpiece(["ein rotes Café"] * 9, 60))
    like_berts = common.WordPiece([*common.SPECIAL_TOKENS, "[MASK]", "ein", "rotes", "cafe"])
    for tokenizer in (own, like_berts):
        index = stair.InvertedIndex(tokenizer.vocab)
        for form in ("NFC", "NFD"):
            word = unicodedata.normalize(form, "Café")
            _, token, _ = tokenizer.encode(word)
            assert index.vector({word: 2.0}).nonzero().tolist() == [[token]]
            assert stair.boolean_query(f"{word} AND rotes", index)[1] == [word, "rotes"]
