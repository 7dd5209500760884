"""What other projects do with a method file, a model, an index or weights gives the right numbers.

They average a model, load it within a module, make it on the meta device, or convert its layers.
They give a loss the last batch of a loader, and an index the arrays that they have. Right is what
the formula gives in float64.
"""

import copy
import io
import json
import math
import os
import shutil
import tarfile
import unicodedata

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bam
import common
import eval as evaluation
import sparc
import sparo
import stair
from helpers import make_batch, tiny_model
from test_encoders import CLIP_PIXELS, tiny_vit
from test_weights import made_up_timm, prefixed

METHOD_FILES = sparo, stair, sparc, bam


def words(h, head, e, mask=None):
    """Eq. 4 and 5 of STAIR: one encoding for outputs h (N, d), normalised, in float64."""
    t = copy.deepcopy(head.transform).double()(h.double()).detach()
    n = len(h) if mask is None else int(mask.sum())
    enc = torch.zeros(len(e), dtype=torch.float64)
    for k in range(len(e)):
        p = max(t[j] @ e[k].double() + head.bias[k].double() for j in range(n))
        enc[k] = math.log1p(max(p.item(), 0.0)) if head.valid[k] else 0.0
    return enc / enc.norm()


@torch.no_grad()
@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_of_a_model_is_in_the_stage_of_the_model(use_buffers):
    """Averages, as other projects make them, copy tensors alone, and stay in evaluation mode."""
    model, batch = tiny_model("stair", stage=1, vit=dict(stem=None)).eval(), make_batch(2)
    copy_of = get_ema_multi_avg_fn(0.0)
    average = AveragedModel(model, multi_avg_fn=copy_of, use_buffers=use_buffers).eval()
    for stage in (1, 2, 3):
        model.begin_stage(stage, fresh=True)
        at_begin = model.text_encoder.embedding.weight.clone()
        nn.init.normal_(model.text_encoder.embedding.weight, std=0.3)  # as training does
        average.update_parameters(model), average.update_parameters(model)
        e = model.text_encoder.embedding.weight
        tokens, mask, images = batch["tokens"], batch["mask"], batch["images"]
        found = average.module.encode_text(tokens, mask), average.module.encode_image(images)
        h_t, h_v = model.text_encoder(tokens, mask), model.image_encoder(images)
        for i in range(2):
            t = words(h_t[i], model.text_head, e, mask[i])
            if stage == 1:  # Eq. 8
                own = torch.tensor([k in tokens[i, : mask[i].sum()] for k in range(len(t))])
                t = t * own / (t * own).norm()
            v = words(h_v[i], model.image_head, at_begin if stage == 2 else e)
            for x, expected in zip(found, (t, v)):
                torch.testing.assert_close(x[i].double(), expected, rtol=1e-4, atol=1e-5)


def every_model():
    yield from (tiny_model(name) for name in ("sparc", "sparo", "stair", "bam", "dino"))
    yield tiny_model("sparo", readout="fdt", codes=20, embed_dim=8)


def test_a_tensor_has_one_name_and_stays_one_tensor_on_another_device():
    """Averages would move a tensor of two names twice. A copy for each name would train apart."""
    for model in every_model():
        state = {name: x for name, x in model.state_dict().items() if x.numel()}
        assert len({x.data_ptr() for x in state.values()}) == len(state)
        assert len([*model.parameters()]) == len([*model.named_parameters(remove_duplicate=False)])


def test_checkpoints_with_the_names_of_earlier_revisions_load():
    """e stood under the names of both heads, `valid` nowhere; FDT's codes under two names."""
    for name, settings, changes in (
            ("stair", {}, {"image_head.embedding.weight": "text_encoder.embedding.weight",
                           "text_head.embedding.weight": "text_encoder.embedding.weight",
                           "image_head.valid": None, "text_head.valid": None}),
            ("sparo", dict(readout="fdt", codes=20, embed_dim=8),
             {"text_readout.codebook": "image_readout.codebook"})):
        old, model = tiny_model(name, **settings).eval(), tiny_model(name, **settings).eval()
        state = old.state_dict()
        for key, other in changes.items():
            state[key] = state.get(other)
        outer = nn.ModuleList([model])
        outer.load_state_dict({f"0.{key}": x for key, x in state.items() if x is not None})
        tokens, mask = make_batch()["tokens"], make_batch()["mask"]
        assert torch.equal(model.encode_text(tokens, mask), old.encode_text(tokens, mask))


def test_a_head_of_the_meta_device_has_its_special_tokens_when_it_is_loaded():
    head, h = stair.TokenProjectionHead(8, nn.Embedding(50, 8), (0, 1, 2, 3)), torch.randn(2, 5, 8)
    with torch.device("meta"):
        other = stair.TokenProjectionHead(8, nn.Embedding(50, 8), (0, 1, 2, 3))
    other._apply(lambda x: torch.full_like(x, 1, device="cpu"))  # to_empty leaves any numbers
    other.load_state_dict(head.state_dict())
    for i in range(2):
        enc = other(h)[i].double()
        torch.testing.assert_close(enc / enc.norm(), words(h[i], head, head.embedding.weight),
                                   rtol=1e-4, atol=1e-5)


def test_converted_batch_norms_leave_bams_projector_as_it_is():
    """The activation stays behind the norm."""
    settings = dict(teacher=False, projector_width=6, projector_dim=4, activation="relu")
    projector = bam.Projector(5, bam.Config(**settings))
    projector = nn.SyncBatchNorm.convert_sync_batchnorm(projector)
    h = torch.randn(2, 3, 5)
    for view, z in zip(h.double(), projector(h)):
        for i in (0, 2, 4):
            view = (view if i == 0 else view.relu()) @ projector[i].weight.double().T
            view = (view - view.mean(0)) / (view.var(0, correction=0) + 1e-5).sqrt()
        torch.testing.assert_close(z.double(), view, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [stair.LAMB, bam.LARS])
def test_an_optimizer_calls_its_closure(kind):
    """The first update of one tensor, in float64: weight decay and the ratio of the norms."""
    start = torch.tensor([1.0, -2.0, 2.0])
    p, lr, decay = nn.Parameter(start.clone()), 0.1, 0.01
    optimizer = kind([p], lr=lr, weight_decay=decay)

    def closure():
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(9)
    p0, g = start.double(), 2 * start.double()
    if kind is stair.LAMB:
        update = g / ((g * g).sqrt() + 1e-6) + decay * p0
        ratio = p0.norm() / update.norm()
    else:
        update = g + decay * p0
        ratio = 1e-3 * p0.norm() / update.norm()
    torch.testing.assert_close(p.detach().double(), p0 - lr * ratio * update, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_sparse_rows_hold_features_of_any_dtype(dtype):
    x = (torch.rand(4, 6) * (torch.rand(4, 6) > 0.4)).to(dtype)
    rows = stair.SparseRows([x[:1], x[1:]])[torch.tensor([3, 0, 2])]
    torch.testing.assert_close(rows.double(), x[[3, 0, 2]].double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_index_takes_arrays_of_ids_masks_of_numbers_and_any_default_dtype(dtype):
    """A list += an array adds the numbers of the array to those of the list."""
    enc = torch.rand(5, 3) * (torch.rand(5, 3) > 0.3)
    query, cosine = torch.rand(3).double(), evaluation.CosineIndex(torch.inner)
    torch.set_default_dtype(dtype)
    try:
        index = stair.InvertedIndex(["red", "blue", "star"])
        for one in (index, cosine):
            one.add([1000, 1001], enc[:2])
            one.add(np.array([2000, 2001, 2002]), enc[2:])
        found, where = index.search(query, k=5), [1, 0, 0, 1, 1]
        some = index.search({"red": 1.0, "star": 2.0}, where=where)
    finally:
        torch.set_default_dtype(torch.float32)
    ids = [1000, 1001, 2000, 2001, 2002]
    scores = {i: float(sum(w * x for w, x in zip(query, row))) for i, row in zip(ids, enc.double())}
    best = sorted((i for i in ids if scores[i] > 0), key=lambda i: -scores[i])
    assert [i for i, _ in found] == best
    assert [score for _, score in found] == pytest.approx([scores[i] for i in best], rel=1e-5)
    assert {i for i, _ in some} == {1000, 2001, 2002}
    assert [i for i, _ in cosine.search(query.float(), 5)][: len(best)] == best
    with pytest.raises(ValueError, match=r"needs the shape \(5,\)"):
        index.search(query, where=[1, 0])


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


def zeros(*shape):
    return torch.zeros(0, *shape)


NONE = torch.zeros(0, 3, dtype=torch.bool)
EMPTY = {
    "global_loss": lambda: sparc.global_loss(zeros(4), zeros(4), 10.0),
    "fine_grained_loss": lambda: sparc.fine_grained_loss(zeros(3, 4), zeros(6, 4), NONE, 10.0),
    "filip_loss": lambda: sparc.filip_loss(zeros(3, 4), zeros(6, 4), NONE, 10.0),
    "gloria_loss": lambda: sparc.gloria_loss(zeros(3, 4), zeros(6, 4), NONE, 10.0),
    "pacl_loss": lambda: sparc.pacl_loss(zeros(4), zeros(6, 4), 10.0),
    "mgca_loss": lambda: sparc.mgca_loss(
        zeros(3, 4), zeros(6, 4), NONE, zeros(3, 4), zeros(6, 4), 10.0),
    "prototype_loss": lambda: sparc.prototype_loss(zeros(4), zeros(4), torch.randn(5, 4), 10.0),
    "detection_losses": lambda: sparc.detection_losses(
        zeros(9, 2), zeros(9, 4), zeros(2), zeros(1, 2) > 0, zeros(1, 4)),
    "clip_loss": lambda: sparo.clip_loss(zeros(3, 4), zeros(3, 4), 10.0),
    "dino_loss": lambda: sparo.dino_loss(
        torch.zeros(3, 0, 5), torch.zeros(2, 0, 5), torch.zeros(5), 0.1, 0.04),
    "contrastive_loss": lambda: stair.contrastive_loss(zeros(4), zeros(4), 10.0),
    "flops_loss": lambda: stair.flops_loss(zeros(5)),
    "moco_loss": lambda: bam.moco_loss(torch.zeros(2, 0, 4), torch.zeros(2, 0, 4), 0.2),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_loss_of_no_samples_is_refused_with_its_sizes(name):
    """Their mean would be NaN. What is no loss takes an empty batch."""
    with pytest.raises(ValueError, match=rf"^{name} needs .* one sample or more, not .*\(0, |, 0, "):
        EMPTY[name]()
    assert sparo.normalize_slots(zeros(3, 4)).shape == (0, 12)


def test_bams_loss_of_no_images_is_refused():
    with pytest.raises(ValueError, match="two or more"):
        bam.bam_loss(zeros(4), 2)


@pytest.mark.parametrize("module", METHOD_FILES)
def test_ranks_with_unequal_batches_are_refused_once_with_their_sizes(module, monkeypatch):
    """The last batch of a loader without drop_last. Equal shapes are compared once."""
    calls = []

    def gathered(shapes, mine):
        calls.append(mine)
        shapes[:] = [mine, other or mine]

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gathered)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    join = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    monkeypatch.setattr(dist, join, lambda rows, x: rows.copy_(torch.cat([x, x])))
    module.compare_shapes.cache_clear()
    other = (3, 6)
    with pytest.raises(ValueError, match=r"(?s)(?=.*\(4, 6\))(?=.*\(3, 6\))"):
        module.all_ranks(torch.zeros(4, 6))
    other, calls = None, []
    x = torch.randn(4, 6)
    for _ in range(2):
        assert torch.equal(module.all_ranks(x), torch.cat([x, x]))
    assert len(calls) == 1
    module.compare_shapes.cache_clear()


def test_a_loss_of_one_rank_among_others_has_the_pairs_of_this_rank(monkeypatch):
    """gather=lambda x: x on rank 1: its columns begin at 0."""
    v, t = torch.randn(2, 5, 4, dtype=torch.float64)
    cosines = (v / v.norm(dim=1, keepdim=True)) @ (t / t.norm(dim=1, keepdim=True)).T * 10
    expected = -(cosines.log_softmax(0) + cosines.log_softmax(1)).diagonal().mean() / 2
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    for loss in (sparc.global_loss, sparo.clip_loss):
        assert loss(v, t, 10.0, gather=lambda x: x).item() == pytest.approx(expected.item(), rel=1e-12)


def test_the_teachers_batch_norm_follows_its_own_images():
    """A moving average of parameters alone would leave its statistics at 0 and 1."""
    for name in ("bam", "dino"):
        model = tiny_model(name, **{"bam": dict(teacher=True), "dino": {}}[name]).train()
        views = [torch.rand(6, 3, 16, 16) for _ in range(2)]
        model({"views": views})
        encoder = model.teacher[0]
        conv, norm = encoder.patch_embed[0][0].double(), encoder.patch_embed[0][1]
        x = torch.cat(views).double()
        pixels = [torch.tensor(values, dtype=torch.float64)[:, None, None] for values in CLIP_PIXELS]
        y = conv((x - pixels[0]) / pixels[1]).mean((0, 2, 3))
        torch.testing.assert_close(norm.running_mean.double(), 0.1 * y, rtol=1e-3, atol=1e-5)


# A run in Python --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sparc", "stair", "sparo"])
def test_maps_of_a_picture_of_another_size_have_its_own_grid(run_of, name):
    """The encoders' numbers of a tall picture, row by row."""
    model, _ = evaluation.load_run(run_of(name))
    model.model.requires_grad_(False)
    S, g, net = model.image_size, model.model.image_encoder.grid, model.model
    image = torch.rand(3, 2 * S, S)
    found = model.maps(image, "a red ring")["patches"]
    assert found.shape[1:] == (2 * g, g)
    tokens, mask = model.tokenize(["a red ring"])
    x = net.image_encoder(image[None])[0][-2 * g * g :].double()             # (P, d)
    if name == "sparc":
        patches, word = x @ net.g_v.weight.double().T, net.text_encoder(tokens, mask)[0, 2]
        s = patches @ (word.double() @ net.g_t.weight.double().T)            # (P,)
        s = (s - s.min()) / (s.max() - s.min())
        sigma = net.config.sigma or 1 / len(s)
        s[s < sigma] = 0
        torch.testing.assert_close(torch.from_numpy(found[2]).flatten().double(), s / s.sum(),
                                   rtol=1e-3, atol=1e-5)
    if name == "stair":
        head, k = net.image_head, tokens[0, 2]
        p = copy.deepcopy(head.transform).double()(x) @ net.text_encoder.embedding.weight[k].double()
        torch.testing.assert_close(torch.from_numpy(found[2]).flatten().double(), p + head.bias[k],
                                   rtol=1e-3, atol=1e-5)
    with pytest.raises(RuntimeError, match="don't multiply up|multiply"):
        model.maps(torch.rand(3, S + 1, S + model.model.image_encoder.patch_size - 1), "a red ring")


def test_a_picture_that_several_threads_read_has_one_encoding(run_of, tmp_path):
    model, _ = evaluation.load_run(run_of("stair"))
    model.workers = 4
    pixels = np.random.default_rng(0).integers(0, 255, (400, 400, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    expected = model.images(tmp_path / "a.png")
    for _ in range(3):
        found = model.images([Image.open(tmp_path / "a.png")] * 8)
        torch.testing.assert_close(found, expected.expand_as(found))


def test_images_come_from_files_buffers_and_paths_of_any_kind(run_of, tmp_path):
    model, _ = evaluation.load_run(run_of("stair"))
    S = model.image_size
    (tmp_path / "d").mkdir()
    Image.new("RGB", (S, S), "red").save(tmp_path / "d/a.png")
    data = (tmp_path / "d/a.png").read_bytes()
    expected, written = model.images(data), io.BytesIO()
    written.write(data)  # its position is at the end
    with open(tmp_path / "d/a.png", "rb") as file:
        for image in (io.BytesIO(data), written, memoryview(data), bytearray(data), file,
                      next(os.scandir(tmp_path / "d"))):
            assert torch.equal(model.images(image), expected)
    for empty in ([], torch.zeros(0, 3, S, S)):
        assert model.images(empty).shape == (0, expected.shape[1])
    assert model.texts([]).shape == (0, expected.shape[1])
    with pytest.raises(common.UserError, match="Tensors of a list need one size"):
        model.images([torch.zeros(3, S, S), torch.zeros(3, 2 * S, 2 * S)])
    with pytest.raises(common.UserError, match="Image 1, a NoneType, cannot be read"):
        model.images([data, None])


def test_captions_and_queries_that_are_cut_are_told(run_of, tmp_path, capsys):
    """A name that comes twice is numbered, and both images are shown."""
    run = shutil.copytree(run_of("sparc"), tmp_path / "run")
    model, _ = evaluation.load_run(run)
    told = f"1 of 1 captions and prompts are longer than the context of {model.context} tokens"
    long = "a red ring " * 20
    capsys.readouterr()
    model.texts("a red ring"), model.maps(torch.zeros(3, 16, 16), "a red ring")
    assert "longer" not in capsys.readouterr().out
    for encode in (model.texts, lambda text: model.maps(torch.zeros(3, 16, 16), text)):
        encode(long)
        assert capsys.readouterr().out.startswith(told)
    with tarfile.open(tmp_path / "0.tar", "w") as shard:
        for colour in ("red", "blue"):
            Image.new("RGB", (16, 16), colour).save(tmp_path / "k.png")
            shard.add(tmp_path / "k.png", "k.png")
    evaluation.main([str(run), "--query", long, "--data", str(tmp_path / "0.tar")])
    out = capsys.readouterr().out
    assert out.count(told) == 1 and "k (2) (" in out
    page, = run.glob("*search.png")
    pixels = np.asarray(Image.open(page).convert("RGB")).reshape(-1, 3).astype(int)
    for colour in ((255, 0, 0), (0, 0, 255)):
        assert (abs(pixels - colour).sum(1) < 30).sum() > 1000


# Weights of others ------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["model.", "net.encoder.", "module.model."])
def test_a_prefix_that_all_names_share_is_stripped(prefix):
    vit, expected = tiny_vit(cls=True), tiny_vit(cls=True)
    state = made_up_timm(vit)
    common.load_timm(expected, state)
    common.load_timm(vit, {"state_dict": prefixed(prefix, state)})
    assert all(map(torch.equal, vit.parameters(), expected.parameters()))


def test_weights_that_do_not_fit_are_refused_by_their_cause(tmp_path):
    vit = tiny_vit(cls=True)
    state = made_up_timm(vit)
    part = dict([*state.items()][:5])
    with pytest.raises(common.UserError, match="Missing"):
        common.load_timm(tiny_vit(cls=True), part)
    for name, owner in {"visual.transformer.resblocks.0.ln_1.weight": "CLIP",
                        "vit.embeddings.cls_token": "Hugging Face's transformers",
                        "encoder.layers.encoder_layer_0.ln_1.weight": "torchvision's ViT",
                        "layer4.0.conv1.weight": "torchvision"}.items():
        with pytest.raises(common.UserError, match=f"names of {owner}: give a file with timm's"):
            common.load_timm(vit, {name: torch.ones(2), "x": torch.ones(2)})
    with pytest.raises(common.UserError, match="names of timm: give a file with CLIP's"):
        common.load_clip((vit, None), state, None)
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(common.UserError, match="more than tensors .* or is no file of torch.save"):
        common.load_checkpoint(tmp_path / "index.json")
