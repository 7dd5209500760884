"""Details at which a small mistake changes results but no error: each test names its source.

Initial weights, stages and ramps, schedules, masks, bounds of the
augmentation, the world's scenes, and what evaluations leave out.
"""

import colorsys
import math
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import bam
import common
import eval as evaluation
import sparc
import sparo
import stair
import train
from helpers import (SMALL, make_batch, picture, read_log, tiny_model, train_alone,
                     train_until, write_table)

# Initial weights --------------------------------------------------------------------------


def vit(**settings):
    return common.ViT(image_size=64, patch_size=8, width=64, depth=3, heads=2, cls=True, **settings)


def initial():
    """Return {name: (weight, expected deviation)} of every encoder and head; 0 is exact."""
    d, depth, image = 64, 3, vit()
    text = common.TextTransformer(vocab_size=500, context=40, width=d, depth=depth, heads=2)
    found = {}
    for encoder in (image, text):
        for i, block in enumerate(encoder.blocks):  # CLIP, initialize_parameters of model.py
            name, attn, mlp = f"{type(encoder).__name__} {i}", block.attn, block.mlp
            found |= {f"{name} qkv": (attn.qkv.weight, d**-0.5),
                      f"{name} proj": (attn.proj.weight, (2 * d * depth) ** -0.5),
                      f"{name} fc1": (mlp.fc1.weight, (2 * d) ** -0.5),
                      f"{name} fc2": (mlp.fc2.weight, (2 * d * depth) ** -0.5)}
            found |= {f"{name} bias": (x.bias, 0) for x in (attn.qkv, attn.proj, mlp.fc1, mlp.fc2)}
    found |= {"[CLS]": (image.cls, 0.02), "ViT's positions": (image.pos, 0.02),
              "words": (text.embedding.weight, 0.02), "text's positions": (text.pos, 0.01)}
    found["queries"] = sparo.Sparo(d, 16, 8, 32).q, 1.0                     # App. A
    for readout, key in (("cls", ""), ("gap", "1."), ("bottleneck", "0."), ("fdt", "")):
        config = sparo.Settings(readout=readout, embed_dim=128, bottleneck=32, codes=100)
        model = sparo.model_class(config)(config, vit(), text, d, d)
        if readout == "fdt":
            found["codes"] = model.image_readout.codebook, 1.0
        else:
            projection = model.get_parameter(f"image_readout.proj.{key}weight")
            found[readout] = projection, d**-0.5                            # CLIP
    pool = sparo.AttentionPool(128, 49, 256)
    found |= {f"CLIP's pool {key}": (p, 128**-0.5) for key, p in pool.named_parameters()
              if p.ndim == 2}
    head = sparo.DinoHead(d, 100, 128, 64).mlp                              # vision_transformer.py
    found |= {f"DINO's head {i}": (layer.weight, 0.02) for i, layer in enumerate(head[::2])}
    found |= {f"DINO's bias {i}": (layer.bias, 0) for i, layer in enumerate(head[::2])}
    for objective in ("sparc", "mgca"):
        model = sparc.Settings(objective=objective, embed_dim=128)
        model = sparc.model_class(model)(model, vit(), text, d, d)
        found |= {"g_v": (model.g_v.weight, d**-0.5), "g_t": (model.g_t.weight, d**-0.5)}
    found["lengths of prototypes"] = model.prototypes.norm(dim=-1) - 1, 0
    found["STAIR's b"] = stair.TokenProjectionHead(d, text.embedding).bias, 0
    projector = bam.Projector(d, bam.Config(projector_width=128, projector_dim=128))
    found |= {f"BAM's projector {i}": (layer.weight, 0.02) for i, layer in enumerate(projector)}
    classifier = bam.Classifier(bam.ClassifierConfig(classes=["a"] * 100), vit(), None, d, None)
    found |= {"classifier": (classifier.head.weight, 0.02), "bias": (classifier.head.bias, 0)}
    return found


def test_initial_weights_have_the_deviations_of_their_sources():
    for name, (weight, expected) in initial().items():
        found = weight.detach().square().mean().sqrt().item()
        room = 4 * (2 * weight.numel()) ** -0.5  # four standard errors of a deviation
        assert found == pytest.approx(expected, rel=room, abs=1e-6), name
        if expected == 1.0 and weight.numel() > 1000:
            assert weight.min() < -2.5, name  # normal, not uniform
    for name in ("sparo", "sparc", "stair"):
        assert tiny_model(name).log_scale.exp().item() == pytest.approx(1 / 0.07)


# Gradients and masks ----------------------------------------------------------------------


def test_a_caption_without_words_scores_0_in_filip():
    t, v = torch.randn(3, 5, 4), torch.randn(3, 6, 4)
    mask = torch.arange(5) < torch.tensor([5, 2, 0])[:, None]
    words = F.normalize(t, dim=-1) * mask[..., None]
    scores = sparc.filip_scores(F.normalize(v, dim=-1), words)
    assert (scores[:, 2] == 0).all()
    expected = torch.stack([torch.stack([(i @ c[m].T).amax(1).mean() for c, m in zip(words, mask)
                                         if m.any()]) for i in F.normalize(v, dim=-1)])
    torch.testing.assert_close(scores[:, :2], expected)  # also where all cosines are negative


# Stages, ramps, schedules -----------------------------------------------------------------


@pytest.mark.parametrize("steps, expected", [
    (10, [3, 2, 5]), (11, [3, 3, 5]), (1000, [260, 250, 490])])
def test_shares_of_stages_are_rounded(steps, expected):
    args = SimpleNamespace(steps=steps, lr=2.0, **vars(stair.Settings(share_1=0.26)))
    rows = stair.stages(args)
    assert [row[1] for row in rows] == expected and sum(row[1] for row in rows) == steps
    assert [row[2] for row in rows] == pytest.approx([2.0, 2.0, 0.2])


def test_a_resume_restarts_neither_the_ramp_nor_the_copy_of_e():
    """A checkpoint of stage 2 keeps the lambdas and the image head's e; a new stage does not."""
    model = tiny_model("stair", stage=1)
    model.after_update(3, 16)  # ((3 + 1) / (16 / 2))^2
    assert model.strength.item() == pytest.approx(0.25)
    model.begin_stage(2, fresh=True)
    assert model.strength == 0
    copied = model.image_embedding.clone()
    assert torch.equal(copied, model.text_encoder.embedding.weight)
    model.after_update(1, 8)
    nn.init.normal_(model.text_encoder.embedding.weight)  # as training does
    other = tiny_model("stair", stage=1)
    other.load_state_dict(model.state_dict())
    assert other.number == 2 and other.strength.item() == pytest.approx(0.25)
    assert torch.equal(other.image_embedding, copied)
    assert torch.equal(other.image_e(), copied)
    frozen = [*other.image_encoder.parameters(), *other.image_head.transform.parameters(),
              other.image_head.bias]
    assert not any(p.requires_grad for p in frozen) and other.text_head.bias.requires_grad
    assert other.text_encoder.embedding.weight.requires_grad
    other.begin_stage(3, fresh=True)
    assert torch.equal(other.image_e(), other.text_encoder.embedding.weight)
    assert all(p.requires_grad for p in frozen) and other.strength == 0


@pytest.mark.parametrize("revive_until, revived", [(0, []), (1, [1]), (2, [1, 2]), (3, [1, 2, 3])])
def test_words_are_revived_up_to_a_stage(revive_until, revived, monkeypatch):
    seen = []
    monkeypatch.setattr(stair.Model, "image_encoding", lambda self, images, revived=None: (
        seen.append(revived is not None) or torch.ones(len(images), 30)))
    model = tiny_model("stair", revive_until=revive_until)
    for stage in (1, 2, 3):
        model.begin_stage(stage, fresh=True)
        model(make_batch())
    assert [stage for stage, was in zip((1, 2, 3), seen) if was] == revived


def test_only_stage_1_masks_words_and_special_tokens_are_never_active():
    model, batch = tiny_model("stair", stage=1), make_batch()
    nn.init.constant_(model.text_head.bias, 5.0)
    for stage in (1, 2, 3):
        model.begin_stage(stage, fresh=True)
        active = model.text_encoding(batch["tokens"], batch["mask"]) > 0
        own = stair.caption_mask(batch["tokens"], batch["mask"], 30).bool()
        assert (active & ~own).any() == (stage > 1) and not active[:, :4].any()
    special = torch.tensor([[2, 7, 3]])  # [CLS], a word, [SEP]
    assert model.caption_words(special, special > 0)[0].nonzero().tolist() == [[7]]


@pytest.mark.parametrize("name", ["sparo", "sparc", "stair"])
def test_scales_stay_between_1_and_100(name):
    """CLIP, Sec. 2.5."""
    model = tiny_model(name)
    for value, kept in ((10.0, 100.0), (-3.0, 1.0), (0.5, math.exp(0.5))):
        nn.init.constant_(model.log_scale, value)
        model.after_update(0, 1)
        assert model.log_scale.exp().item() == pytest.approx(kept)


def test_schedules_equal_values_computed_by_hand():
    root = 0.5**0.5
    assert [common.cosine(step, 4, 3.0, 1.0) for step in range(5)] == pytest.approx(
        [3.0, 2 + root, 2.0, 2 - root, 1.0])
    assert [common.cosine_lr(step, 6, 2, 4.0) for step in range(7)] == pytest.approx(
        [2.0, 4.0, 4.0, 2 + 2 * root, 2.0, 2 - 2 * root, 0.0])
    assert [common.linear_lr(step, 6, 2, 4.0) for step in range(7)] == pytest.approx(
        [2.0, 4.0, 4.0, 3.0, 2.0, 1.0, 0.0])


def test_only_weights_of_linear_and_convolution_layers_decay():
    model = tiny_model("sparo", vit=dict(stem=None))
    decay, rest = common.param_groups(model, 0.3)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert (decay["decays"], rest["decays"]) == (True, False)
    names = {id(p): key for key, p in model.named_parameters()}
    found = {names[id(p)] for p in decay["params"]}
    assert "image_encoder.patch_embed.weight" in found and "image_readout.KVproj.weight" in found
    for key in ("image_encoder.cls", "image_encoder.pos", "image_readout.q", "log_scale",
                "text_encoder.embedding.weight", "image_encoder.norm.weight"):
        assert key not in found
    assert not any(key.endswith("bias") for key in found)


def test_an_optimizer_gets_its_settings_and_only_weights_follow_the_decay():
    flags = "--beta2 0.9 --adam-eps 0.5 --weight-decay 0.2 --weight-decay-end 0.6 --warmup 0"
    args = train.parse_args([*SMALL["sparc"], *flags.split()])
    optimizer = train.build_optimizer(args, tiny_model("sparc"), None)
    train.set_schedules(optimizer, args, 2, 4, 8.0)
    decay, rest = optimizer.param_groups
    for group in (decay, rest):
        assert (group["betas"], group["eps"], group["lr"]) == ((0.9, 0.9), 0.5, pytest.approx(4.0))
    assert decay["weight_decay"] == pytest.approx(0.4) and rest["weight_decay"] == 0


# Masks of slots (SPARO, C.1) --------------------------------------------------------------


def literal_mask(y_i, y_p, y_n, kinds, parts, epochs, batch, generator):
    """SPARO's mask: plain SGD with momentum, lr .02 and .9; the mask of the first best epoch."""
    n, M = y_i.shape
    theta, alpha = y_i.new_zeros(parts), y_i.new_tensor(math.log(100))
    velocity = [y_i.new_zeros(parts), y_i.new_tensor(0.0)]

    def right(m):
        """SugarCrepe's accuracy: each kind counts alike, however many pairs it has."""
        cosine, found = torch.cosine_similarity, {kind: [] for kind in kinds}
        for kind, i, p, q in zip(kinds, y_i, y_p, y_n):
            found[kind].append(float(cosine(m * i, p, 0) > cosine(m * i, q, 0)))
        return sum(sum(values) / len(values) for values in found.values()) / len(found)

    best, start = y_i.new_ones(M), right(y_i.new_ones(M))
    most = start
    for _ in range(epochs):
        for rows in torch.randperm(n, generator=generator).split(batch):
            theta, alpha = theta.detach().requires_grad_(), alpha.detach().requires_grad_()
            s = alpha.exp() if alpha.exp() > 100 else alpha.new_tensor(100.0)
            m = (s / 4 * theta).sigmoid().repeat_interleave(M // parts)
            losses = []
            for r in rows:
                logits = torch.stack([s * torch.cosine_similarity(m * y_i[r], y[r], 0)
                                      for y in (y_p, y_n)])
                losses.append(-logits.log_softmax(0)[0])
            gradients = torch.autograd.grad(sum(losses) / len(rows), (theta, alpha),
                                            allow_unused=True)
            velocity = [0.9 * v + (0 if g is None else g) for v, g in zip(velocity, gradients)]
            theta, alpha = theta - 0.02 * velocity[0], alpha - 0.02 * velocity[1]
        s = max(100.0, alpha.exp().item())
        m = (s / 4 * theta.detach()).sigmoid().repeat_interleave(M // parts)
        if right(m) > most:
            best, most = m, right(m)
    return best, start, most


@pytest.mark.parametrize("parts, seed", [(3, 0), (6, 0), (6, 1)])  # s falls, falls, rises
def test_train_mask_equals_a_literal_loop(parts, seed):
    """Captions and negatives are so alike that the weights of the mask stay away from 0 and 1."""
    torch.manual_seed(seed)
    y_i, y_p, noise = torch.randn(3, 20, 6, dtype=torch.float64)
    y_n = y_p + 1e-3 * noise
    kinds = ["swap"] * 3 + ["add"] * 17
    seeds = [torch.Generator().manual_seed(5) for _ in range(2)]
    found = sparo.train_mask(y_i, y_p, y_n, kinds, parts, 8, 8, seeds[0])
    mask, start, most = literal_mask(y_i, y_p, y_n, kinds, parts, 8, 8, seeds[1])
    assert found[1:] == pytest.approx((start, most)) and most > start
    torch.testing.assert_close(found[0], mask)
    assert 0.05 < mask.min() and mask.max() < 0.95


# Data: resume, augmentation, decoding -----------------------------------------------------


def test_each_sample_and_batch_of_each_rank_has_a_seed_of_its_own(tmp_path, monkeypatch):
    """Otherwise two ranks would augment their images alike, or a batch as its last image or as
    another batch."""
    seeds, mix_seed = [], common.mix_seed
    monkeypatch.setattr(common, "mix_seed", lambda *numbers: (
        seeds.append(mix_seed(*numbers)) or mix_seed(*numbers)))
    table = common.open_data(write_table(tmp_path, 8))
    for rank in (0, 1):
        stream = common.Stream(table, None, lambda image: torch.zeros(1), None, None, 2, 0, rank, 2)
        parts = iter(stream)
        for number in range(2):
            stream.join([next(parts)], number)
    assert len(set(seeds)) == len(seeds) == 12  # two images and their batch, twice on each rank


@pytest.mark.parametrize("flags, depths", [
    ("", (1, 1)), ("--no-replace-block", (2, 2)), ("--readout cls", (2, 2))])
def test_sparo_replaces_the_last_block_of_both_encoders(flags, depths):
    """SPARO, Sec. 4: other read-outs keep all blocks."""
    args = train.parse_args([*SMALL["sparo"], *flags.split()])
    encoders = common.build_encoders(train.METHODS["sparo"], args, range(30))
    assert tuple(len(encoder.blocks) for encoder in encoders) == depths


def test_training_transforms_have_the_settings_of_their_sources():
    """OpenCLIP crops .9 to 1; RandAugment has two operations with magnitude 9 of 10 (DeiT)."""
    steps = common.Augment(8, 3, 0.08, True, 0.25, 0.8, 1.0).transforms
    assert steps[0].keywords == dict(size=8, scale=(0.08, 1.0), flip=0.5)
    rand, = [step for step in steps if isinstance(step, common.v2.RandAugment)]
    assert (rand.num_ops, rand.magnitude, rand.num_magnitude_bins) == (2, 27, 31)
    erase, = [step for step in steps if isinstance(step, common.v2.RandomErasing)]
    assert erase.p == 0.25


def test_a_jpeg_is_decoded_with_enough_pixels_for_every_crop():
    """A JPEG of 400 x 400 may be decoded at 200, 100 or 50 pixels."""
    file = picture(400, 400)
    for min_side, side in ((None, 400), (201, 400), (200, 200), (101, 200), (100, 100), (50, 50)):
        assert common.open_image(file, min_side).size == (side, side)
    assert common.decoded_side(224, 0.75) == math.ceil(224 / 0.75)  # the narrow side of 3/4
    large, small = (common.View(size=size, scale=(0.05, 0.25)) for size in (224, 96))
    assert common.Views([small], 224).min_side == math.ceil(96 / (0.05 * 0.75) ** 0.5)
    for views in ([large, small], [small, large]):  # the view that needs most pixels decides
        assert common.Views(views, 224).min_side == math.ceil(224 / (0.05 * 0.75) ** 0.5)


# The world --------------------------------------------------------------------------------


def test_colours_have_the_hues_of_their_names():
    hues = {"red": 0, "orange": 32, "yellow": 52, "green": 125, "blue": 230, "purple": 282,
            "pink": 334}
    for name, rgb in common.COLOURS.items():
        hue, lightness, saturation = colorsys.rgb_to_hls(*rgb)
        if name == "white":
            assert min(rgb) > 0.9
        else:
            assert 360 * hue == pytest.approx(hues[name], abs=5) and saturation > 0.4, name


def test_a_swap_of_attributes_that_might_be_true_is_left_out():
    """Where red and blue circles and squares are there, each swap of two of them is, too."""
    objects = [dict(colour=colour, shape=shape, x=9.0, y=9.0, size="small")
               for colour in ("red", "blue") for shape in ("circle", "square")]
    for seed in range(9):
        assert "swap_att" not in common.World().hard_negatives(objects, random.Random(seed))


def test_relations_need_six_pixels_and_y_points_down():
    a, b = dict(x=10.0, y=10.0), dict(x=16.0, y=17.0)
    assert [r for r in common.RELATIONS if common.holds(a, r, b)] == ["above"]
    assert [r for r in common.RELATIONS if common.holds(b, r, a)] == ["below"]
    b["x"] = 16.1
    assert common.holds(a, "left of", b) and common.holds(b, "right of", a)


def test_scenes_have_the_shares_and_the_radii_of_their_settings():
    world = common.World(objects=3)
    scene = world.draw(20_000, torch.Generator().manual_seed(0), None, 0)
    count = scene["present"].sum(1)
    shares = (count.bincount(minlength=4) / 20_000).tolist()
    assert shares == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3], abs=0.02)
    relative = scene["radius"] / torch.where(scene["large"], 0.20 * 48, 0.14 * 48)
    assert 0.9 <= relative.min() + 1e-4 < 0.902 and 1.098 < relative.max() <= 1.1 + 1e-4
    same = (scene["colour"][:, 1] == scene["colour"][:, 0]) & (
        scene["shape"][:, 1] == scene["shape"][:, 0])
    assert same.float().mean().item() == pytest.approx(0.15 + 0.85 / 64, abs=0.01)
    for split, tenths in (("train", 8), ("val", 1), ("test", 1)):
        share = world.in_split(scene, split).float().mean().item()
        assert share == pytest.approx(tenths / 10, abs=0.02)


def test_worlds_tasks_use_the_classes_that_they_may_use():
    """Only zero-shot and slots keep pairs that training never shows: held-out, or of undrawn
    colours."""
    world = common.World(palette=2, heldout=6)
    data = evaluation.WorldSet(world, SimpleNamespace(split="test", limit=None, templates=None))
    expected = torch.ones(64, dtype=torch.bool)
    expected[:16] = False  # the first two colours
    for colour, shape in world.heldout_pairs:
        expected[8 * colour + shape] = True
    assert torch.equal(data.unseen, expected)
    seen = {c for _, c in data.labelled("test")}
    assert not any(expected[c] for c in seen)
    objects = data.scenes("zeroshot")["objects"]
    assert [evaluation.PAIRS[c] for _, c in data.labelled("zeroshot")] == [
        f"{o['colour']} {o['shape']}" for o, in objects]
    parts = [[names[i] for i in ids] for ids, names in map(data.groups.get, ("/colour", "/shape"))]
    assert [f"{colour} {shape}" for colour, shape in zip(*parts, strict=True)] == evaluation.PAIRS
    for purpose, n in ("captioned", 2), ("samples", 1):
        assert {len(captions) for _, captions in data.captioned(purpose)} == {n}


# {purpose: (number of scenes / WORLD_N, split, seed, objects in each scene)}
SCENES = {"train": (4, "train", 9, 1), "slots": (1, "val", 8, 1), "zeroshot": (1, "test", 1, 1),
          "captioned": (1 / 2, "test", 2, 4), "negatives": (1, "test", 3, 3),
          "segmentation": (1 / 2, "test", 5, 4), "samples": (1 / 2, "test", 6, 3),
          "search": (1, "test", 7, None), "test": (1, "test", 9, 1), "boxes": (1 / 2, "test", 11, None)}


def test_scenes_of_each_purpose_stay_those_of_the_recorded_figures():
    """The figures in tests/claims.json were measured on these scenes."""
    options = SimpleNamespace(split="test", limit=None, templates=None)
    data = evaluation.WorldSet(common.World(objects=4), options)
    data.world = SimpleNamespace(objects=4, sample=lambda n, *rest: (n / evaluation.WORLD_N, *rest))
    assert {purpose: data.scenes(purpose) for purpose in SCENES} == SCENES


# Layers -----------------------------------------------------------------------------------


def test_layers_are_those_of_the_papers():
    """SPARC, Sec. 2: h_v is not linear. PACL's adapter."""
    h, h_v = torch.randn(2, 3, 16), tiny_model("sparc").h_v
    torch.testing.assert_close(h_v(h), F.gelu(h @ h_v[0].weight.T + h_v[0].bias))
    adapter = sparc.Adapter(16, 8)
    a, b, skip = adapter.main[0], adapter.main[2], adapter.skip
    expected = ((h @ a.weight.T + a.bias).relu() @ b.weight.T + b.bias) + h @ skip.weight.T
    torch.testing.assert_close(adapter(h), expected + skip.bias)
    norms = list(tiny_model("bam", teacher=False).projector)[1::2]  # heads.py:36 of BAM's code
    assert [norm.weight is not None for norm in norms] == [True, True, False]


# Evaluations ------------------------------------------------------------------------------


def test_a_sub_word_does_not_compete_with_the_word_that_it_spells():
    """Other methods than STAIR encode each token as a text: "car" and "##car" are equal. Special
    tokens are no words, nor are the rows of an embedding that no token has (STAIR, Table 4)."""
    tokenizer = common.WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "car", "##car", "##s"])
    embed = SimpleNamespace(
        tokenizer=tokenizer, model=SimpleNamespace(encode_words=None),
        texts=lambda words: torch.tensor([[1.0, len(word)] for word in words]),
        similarity=lambda x, y: x @ y.T)
    scores = evaluation.vocabulary_scores(embed, torch.tensor([[0.0, 1.0]]))
    assert scores.tolist() == [[-math.inf] * 4 + [3.0, -math.inf, 1.0]]
    embed.model.encode_words = True                                # STAIR: entries are words
    scores = evaluation.vocabulary_scores(embed, torch.arange(9.0)[None])
    assert scores.tolist() == [[-math.inf] * 4 + [4.0, 5.0, 6.0]]


def test_a_slot_is_interpreted_only_by_a_word_it_looks_at():
    """SPARO, Sec. 5.4: a cosine above .75; sharp attention on a word, not on [CLS] or [SEP]."""
    over_text = torch.tensor([[[0.1, 0.8, 0.1], [0.8, 0.1, 0.1], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3],
                               [0.1, 0.8, 0.1]]])
    y_i = torch.tensor([[1.0, 0.0]]).expand(1, 5, 2)
    y_t = torch.tensor([[[1.0, 0.0]] * 4 + [[0.7, 0.714]]])
    over_image = torch.rand(1, 5, 5)  # [CLS] and 2 x 2 patches
    model = SimpleNamespace(attend=lambda *batch: (over_image, over_text, y_i, y_t),
                            image_encoder=SimpleNamespace(grid=2))
    tokens = torch.tensor([[2, 7, 3]])
    embedder = SimpleNamespace(model=model, device="cpu", tokenize=lambda captions: (
        tokens, torch.ones(1, 3, dtype=torch.bool)))
    _, weights, word, _, agree = evaluation.attention_of_slots(embedder, torch.zeros(1, 3, 4, 4),
                                                               ["red"])
    assert agree.tolist() == [[True, False, False, False, False]]
    assert torch.equal(weights, over_image[:, :, 1:]) and word[0].tolist() == [1, 0, 2, 1, 1]


def test_a_batch_of_the_sgd_probe_has_1024_features(monkeypatch):
    """BAM, Table 9b. Small data have 64 batches in an epoch instead."""
    for n, size in ((70 * 1024, 1024), (640, 10)):
        sizes, cross_entropy = set(), F.cross_entropy
        with monkeypatch.context() as patch:
            patch.setattr(F, "cross_entropy", lambda scores, labels: (
                sizes.add(len(scores)) or cross_entropy(scores, labels)))
            x, labels = torch.zeros(n, 1), torch.zeros(n, dtype=torch.long)
            evaluation.sgd_probe(lambda: (x, labels), x[:2], labels[:2], 2, epochs=1)
        assert sizes == {size}


def test_an_update_follows_the_step_of_its_stage_and_clips_the_gradient(tmp_path, monkeypatch):
    """STAIR stops in stage 2 and resumes: the stage goes on, stage 3 is fresh."""
    norms, stages, calls = [], [], []
    after, begin = stair.Model.after_update, stair.Model.begin_stage

    def note(optimizer, *_):
        gradients = [p.grad.norm() for group in optimizer.param_groups for p in group["params"]
                     if p.grad is not None]
        norms.append(torch.stack(gradients).norm().item())

    monkeypatch.setattr(stair.Model, "after_update", lambda self, step, steps: (
        calls.append((self.number, step, steps)) or after(self, step, steps)))
    monkeypatch.setattr(stair.Model, "begin_stage", lambda self, number, fresh: (
        stages.append((number, fresh)) or begin(self, number, fresh)))
    hook = register_optimizer_step_pre_hook(note)
    train_until(3, [*SMALL["stair"], "--clip-grad", "1e-3", "--out", tmp_path])
    train_alone(["--resume", "--out", tmp_path])
    hook.remove()
    assert calls == [(1, 0, 2), (1, 1, 2), (2, 0, 2), (2, 1, 2), *[(3, i, 4) for i in range(4)]]
    assert stages == [(1, True), (2, True), (2, False), (2, False), (3, True)]
    assert max(norms) == pytest.approx(1e-3, rel=1e-2) and len(norms) == 8
    assert read_log(tmp_path)[0]["grad_norm"] > 1e-2  # logged before clipping


def test_each_rank_has_random_numbers_of_its_own(monkeypatch, tmp_path):
    """Stochastic depth drops other rows on each rank."""
    monkeypatch.setattr(train, "this_rank", lambda: (3, 4))
    monkeypatch.setattr(train, "mixed_precision", lambda args, device: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        args = train.parse_args([*SMALL["bam"], "--seed", "5", "--out", str(tmp_path)])
        train.train(args, tmp_path, torch.device("cpu"))
    assert torch.initial_seed() == 5 + 3


def test_a_checkpoint_of_other_data_workers_or_ranks_begins_a_new_order(monkeypatch):
    rng, local = torch.get_rng_state(), {"cuda_rng": None, "positions": {0: (2, 9)}}
    state = {"step": 7, "samples": 56, "stage": 1, "order": 2, "workers": 0, "data": "a",
             "words": None, "boxes": torch.rand(3, 4), "part": 64, "seed": 4,
             "ranks": [local | {"rng": rng}]}
    torch.rand(3)
    same = train.Progress("a", seed=4)
    older = {name: value for name, value in state.items() if name != "part"}
    for saved, data, workers, ranks in ((state, "b", 0, 1), (state, "a", 1, 1), (state, "a", 0, 2),
                                        (older, "a", 0, 1), (state | {"seed": 5}, "a", 0, 1)):
        other = train.Progress(data, seed=4)
        other.restore(saved | {"ranks": ranks * state["ranks"]}, workers)
        assert (other.step, other.order, other.positions) == (7, 2 + 7, {})
        assert (other.boxes is None) == (data == "b")  # boxes are those of the images
    monkeypatch.setattr(train, "this_rank", lambda: (1, 2))
    first = {"rng": torch.get_rng_state(), "cuda_rng": None, "positions": {}}
    same.restore(state | {"ranks": [first, *state["ranks"]]}, 0)  # each rank continues its own
    assert (same.step, same.order, same.positions) == (7, 2, {0: (2, 9)})
    assert same.samples == other.samples == 56
    assert torch.equal(torch.get_rng_state(), rng)
    assert [train.Progress("a", step=s).due(3) for s in (2, 3, 4, 6)] == [False, True, False, True]
    assert not train.Progress("a", step=3).due(0)


def test_ranks_compare_settings_and_not_paths(monkeypatch, tmp_path):
    """Machines may keep the same files in other places; their fingerprints are compared."""
    seen = []
    monkeypatch.setattr(common, "check_ranks", seen.append)
    for place in "ac":
        flags = ["--data", f"/{place}/x.tar", "--vocab", place, "--out", str(tmp_path / "r")]
        train.choose_run(train.parse_args(["--method", "sparc", *flags]))
    assert seen[0] == seen[1] and "--lr" in seen[0]
    small, large = (common.open_data(f"shapes:size={side}").fingerprint for side in (16, 32))
    assert small != large
