"""What every method must provide: a file that runs alone, presets, public names, resumable runs.

A toy method has only the members that are required, and must train, resume and be evaluated, too.
"""

import contextlib
import dataclasses
import inspect
import json
import multiprocessing
import operator
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import bam
import common
import eval as evaluation
import sparc
import sparo
import stair
import train
from helpers import (METHOD, MODELS, ROOT, SMALL, assert_one_process, assert_same_weights,
                     batch_of, on_ranks, read_log, run_ranks, tiny_model, train_alone,
                     train_on_rank, train_until, write_files, write_shards, write_table)
from train import METHODS

STABLE_FLAGS = """--preset tiny --data shapes --out DIR --steps 1 --batch 8 --lr 0.1 --amp bf16
    --workers 1 --seed 1 --compile --grad-checkpoint --dry-run --image-root DIR"""
STABLE_NAMES = """
    common.WordPiece common.WordPiece.encode(self,text) common.ViT common.TextTransformer
    sparo.Sparo(d,L,V,D,grp_size) sparo.Sparo.forward(self,x,eos_idx,return_attn)
    sparo.normalize_slots(y) stair.TokenProjectionHead(d,embedding)
    stair.TokenProjectionHead.forward(self,h,mask) stair.flops_loss(enc,gather) stair.InvertedIndex
    sparc.alignment_weights(tokens,patches,threshold)
    sparc.fine_grained_loss(tokens,patches,mask,scale) sparc.global_loss(v,t,scale,gather)
    sparc.filip_loss sparc.pacl_loss sparc.gloria_loss sparc.mgca_loss
    bam.attention(S,tau) bam.sinkhorn(S,tau,iters) bam.bam_loss(z,n_views,teacher)
    sparo.clip_loss(v,t,scale,gather) stair.contrastive_loss(v,t,scale,gather)
    sparo.Model.encode_image(self,images) sparo.Model.encode_text(self,tokens,mask)
    stair.Model.encode_image(self,images) stair.Model.encode_text(self,tokens,mask)
    sparc.Model.encode_image(self,images) sparc.Model.encode_text(self,tokens,mask)
    bam.Model.encode_image(self,images)
"""
ON_FILES = "--image-size 16 --data "


def run_alone(file, output):
    """Run a copied method file in its directory, where it can import torch alone."""
    for name in [*sys.modules]:
        if name in METHODS or name.partition(".")[0] in ("common", "train", "eval", "torchvision",
                                                         "numpy", "PIL", "tqdm", "pytest"):
            sys.modules[name] = None  # cannot be imported
    os.chdir(Path(file).parent)
    sys.path[:] = [path for path in sys.path if not path.startswith(str(ROOT))]
    with open(output, "w") as printed, contextlib.redirect_stdout(printed):
        runpy.run_path(Path(file).name, run_name="__main__")


@pytest.mark.parametrize("name", ["sparo", "stair", "sparc", "bam"])
def test_each_method_file_runs_alone_in_an_empty_directory(tmp_path, name):
    """Each file prints a demonstration. No other file of ours and no package but torch is there."""
    (tmp_path / "empty").mkdir()
    file, output = shutil.copy(ROOT / f"{name}.py", tmp_path / "empty"), tmp_path / "printed"
    process = multiprocessing.get_context("fork").Process(target=run_alone, args=(file, output))
    process.start()
    process.join()
    assert process.exitcode == 0 and len(output.read_text().splitlines()) > 1


# Losses of images and captions v, t (B, E), and of their tokens (B, L, E), with nothing passed.
CONTRASTIVE = sparo.clip_loss, stair.contrastive_loss, sparc.global_loss
WITH_DEFAULTS = [
    *(lambda v, t, loss=loss: loss(v.sum(1), t.sum(1), 9.0) for loss in CONTRASTIVE),
    lambda v, t: stair.flops_loss(v.sum(1)) + stair.flops_loss(t.sum(1)),
    lambda v, t: sparc.fine_grained_loss(t, v, v.new_ones(v.shape[:2]).bool(), 9.0,
                                         token_mean="batch"),
    lambda v, t: bam.bam_loss(latents(v), 4), lambda v, t: bam.bam_loss(latents(v), 4, mask="self"),
    lambda v, t: bam.bam_loss(latents(v), 4, latents(t), 2, mask="zero"),
    lambda v, t: bam.bam_loss(latents(v), 4, latents(t), 1),
    lambda v, t: bam.ablated_loss(latents(v), 4, None, 2, bam.Settings(normalization="block"))[0],
    lambda v, t: bam.ablated_loss(latents(v), 4, None, 2, bam.Settings(target="onehot"))[0],
    lambda v, t: bam.moco_loss(v[:, :2].transpose(0, 1), t[:, :2].transpose(0, 1), 0.2)]


def latents(z):
    """z (n, k, E) of n images -> BAM's latents (k * n, E), view after view."""
    return z.transpose(0, 1).flatten(0, 1)


def losses_of_rank(rank):
    """Return [loss, its gradients] of each file's loss with a plain gather, and of losses with
    nothing passed, in float64. Without a process group the rank has all rows.

    A loss whose gather joins this rank alone has the pairs of this rank.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    pairs = torch.rand(2, 6, 4, 5, generator=torch.Generator().manual_seed(0)).double() + 0.1
    results = []
    for loss in CONTRASTIVE:
        v, t = (F.normalize(x[:, 0], dim=-1).chunk(world)[rank].requires_grad_() for x in pairs)
        scale = torch.tensor(9.0, dtype=torch.float64, requires_grad=True)
        value = loss(v, t, scale, gather=lambda x: sparc.all_ranks(x))  # a plain function
        results.append([value.detach(), *torch.autograd.grad(value, (v, t, scale))])
        logits = 9 * v @ t.T
        own = (logits.log_softmax(0) + logits.log_softmax(1)).diagonal().mean() / -2
        torch.testing.assert_close(loss(v, t, 9.0, gather=lambda x: x), own)
    for loss in WITH_DEFAULTS:
        v, t = (x.chunk(world)[rank].requires_grad_() for x in pairs)
        value = loss(v, t)
        gradients = torch.autograd.grad(value, (v, t), allow_unused=True)  # a teacher has none
        results.append([value.detach(), *gradients])
    return results


@pytest.mark.ranks
def test_losses_of_two_ranks_equal_those_of_one_process_and_need_nothing_passed(tmp_path):
    alone = losses_of_rank(0)
    for one, *of_ranks in zip(alone, *run_ranks(tmp_path, losses_of_rank)):
        losses, by_v, by_t, *by_scale = zip(*of_ranks)  # DDP averages over the ranks
        joined = [sum(losses) / 2, torch.cat(by_v) / 2]
        joined += [by_t[0] if by_t[0] is None else torch.cat(by_t) / 2]
        joined += [sum(gradients) / 2 for gradients in by_scale]
        torch.testing.assert_close(joined, one, rtol=1e-10, atol=1e-12)
    for one in alone[1 : len(CONTRASTIVE)]:  # the files have one loss
        torch.testing.assert_close(one, alone[0], rtol=1e-12, atol=1e-14)


REPEATED = "fp32 in_fp32 all_ranks Gather own_columns as_bools"


@pytest.mark.parametrize("name", REPEATED.split())
def test_what_every_method_file_repeats_is_the_same_text(name):
    files = [file for file in (sparo, stair, sparc, bam, common) if hasattr(file, name)]
    assert len(files) >= 3 and len({inspect.getsource(getattr(file, name)) for file in files}) == 1


@pytest.mark.ranks
def test_two_ranks_equal_one_process_and_every_parameter_has_a_gradient(tmp_path):
    batch = batch_of("sparc", B=8) | batch_of("bam", B=8) | batch_of("classifier", B=8)
    models = {name: tiny_model(name) for name in SMALL}
    for name, ranks in on_ranks(tmp_path, tiny_model, models, batch).items():
        model = models[name]
        assert_one_process(ranks, model, model(batch)["loss"])
        for _, _, state in ranks:
            expected = model.state_dict()  # includes DINO's center and the statistics of BatchNorm
            torch.testing.assert_close(dict(state), dict(expected), rtol=1e-4, atol=1e-5)
        trained = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
        assert [key for key, g in trained.items() if g is None or g.abs().max() == 0] == [], name


@pytest.mark.parametrize("name, flags, checkpoints, ranks", [
    *(pytest.param(name, "", "step-3", 2, marks=pytest.mark.ranks) for name in ("sparc", "dino")),
    # within stages and at their ends
    ("stair", ON_FILES + "table.csv", "stage-1 step-3 step-4 step-6", 1),
    ("sparc", ON_FILES + "table.csv", "step-3", 1),
    ("sparo", ON_FILES + "table.csv --vocab merges.txt", "step-3", 1),
    ("dino", ON_FILES + "table.csv --workers 1", "step-2", 1),
    ("sparc", ON_FILES + "000.tar::001.tar", "step-3", 1),
    ("sparc", ON_FILES + "{000..001}.tar --workers 2", "step-3", 1),
    ("bam", "--optimizer lars --lr 0.3 --image-encoder tiny:width=16,heads=2,cls=1,drop_path=0.5", "step-3", 1),
    ("bam", ON_FILES + "table.csv --workers 1 --contrastive-crop --crop-start 1 --crop-every 3", "step-3", 1),
    ("classifier", ON_FILES + "{000..001}.tar --workers 2 --classes names.txt", "step-3", 1)])
def test_a_run_on_any_data_continues_from_a_checkpoint_as_if_it_had_not_ended(
        tmp_path, monkeypatch, capsys, name, flags, checkpoints, ranks):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common.Stream, "part", 3)      # a batch of files has several parts
    write_table(tmp_path, 12, broken=[3])
    write_shards(tmp_path, [7, 6], broken=[1], labels=2)
    write_files(tmp_path, {"names.txt": "odd\neven", "merges.txt": "#version: 0.2\nn 1</w>\n"})

    def run(*command):
        if ranks > 1:
            run_ranks(tmp_path, train_on_rank, ranks, command)
        else:
            train_alone(command)

    run(*SMALL[name], *flags.split(), "--keep-every", "1", "--out", tmp_path / "whole")
    for name in checkpoints.split():
        again = shutil.copytree(tmp_path / "whole", tmp_path / f"again-{name}")
        run("--resume", "--checkpoint", f"{name}.pt", "--out", again)
        runs = tmp_path / "whole", again
        states = [common.load_checkpoint(place / "last.pt") for place in runs]
        for key in ("step", "model", "optimizer"):
            torch.testing.assert_close(*[state[key] for state in states], rtol=0, atol=0)
        a, b = ([rank["rng"] for rank in state["ranks"]] for state in states)
        assert all(map(torch.equal, a, b))
        a, b = ([(x["step"], x["loss"]) for x in read_log(place)] for place in runs)
        assert a == b
        assert train.parse_args(["--resume", "--out", str(again)]).checkpoint == "last.pt"
    assert "the data begin again" not in capsys.readouterr().out


@pytest.mark.parametrize("name, settings", [
    *((name, {}) for name in SMALL), ("bam", dict(mask="zero")), ("bam", dict(target="onehot")),
    ("bam", dict(target="moco")), ("bam", dict(normalization="block")),
    ("sparc", dict(token_mean="batch")), *(("sparc", dict(objective=name)) for name in (
        "clip", "filip", "clip+filip", "pacl", "gloria", "mgca"))])
def test_a_model_of_zeros_has_the_chance_loss_which_alone_has_a_gradient(name, settings):
    """All similarities of such a model are equal.

    A figure with a gradient would keep the whole graph in memory until it is logged.
    """
    model, batch = tiny_model(name, **settings), batch_of(name)
    if "target" in settings:
        del batch["views"][2:]  # chance_loss of SimCLR and MoCo-v3 is for two large views
    zeroed = model.g_v if settings.get("objective") == "gloria" else model  # it drops empty words
    for p in zeroed.parameters():
        nn.init.zeros_(p)
    outputs = model(batch)
    expected = model.chance_loss(4, batch.get("mask"), 16)
    assert outputs["loss"].item() == pytest.approx(expected, abs=1e-4)
    with_gradient = [key for key, value in outputs.items() if value.requires_grad]
    assert with_gradient == ["loss"] or "normalization" in settings


def test_every_method_has_flags_and_a_model_for_the_tests():
    # test_detection.py tests the detector, which needs a run
    assert {METHOD.get(name, name) for name in SMALL} == METHODS.keys() - {"detector"}
    assert SMALL.keys() == MODELS.keys()


@pytest.mark.parametrize("method", METHODS)
def test_fields_have_help_and_presets_name_fields(method):
    comments = common.comments_of(train.Config) | common.comments_of(METHODS[method].Settings)
    names = vars(train.parse_args(["--method", method])).keys() - {"method"}
    assert [name for name in names if not comments[name]] == []
    for preset, values in METHODS[method].PRESETS.items():
        args = train.parse_args(["--method", method, "--preset", preset])
        assert vars(args) | values == vars(args)
    train.parse_args(["--method", method, *STABLE_FLAGS.split()])


@pytest.mark.parametrize("name", STABLE_NAMES.split())
def test_public_names_keep_their_parameters(name):
    path, _, parameters = name.rstrip(")").partition("(")
    module, path = path.split(".", 1)
    found = operator.attrgetter(path)(sys.modules[module])
    known = ",".join(inspect.signature(found).parameters)
    assert known.startswith(parameters)


@dataclasses.dataclass
class ToyConfig:
    embed_dim: int = 8                   # width of an encoding


class Toy(nn.Module):
    """Its loss is one direction of CLIP's: each image must find its caption in the batch."""

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        self.image_projection = nn.Linear(image_width, config.embed_dim)
        self.text_projection = nn.Linear(text_width, config.embed_dim)

    def encode_image(self, images):
        return F.normalize(self.image_projection(self.image_encoder(images).mean(1)), dim=-1)

    def forward(self, batch, gather=lambda x: x):
        words = self.text_encoder(batch["tokens"], batch["mask"])        # (B, L, text_width)
        t = F.normalize(self.text_projection(words.mean(1)), dim=-1)
        scores = 10 * self.encode_image(batch["images"]) @ gather(t).T   # (B, B)
        return {"loss": F.cross_entropy(scores, torch.arange(len(t)))}


def test_a_method_with_only_the_required_members_trains_and_is_evaluated(tmp_path, monkeypatch):
    toy = SimpleNamespace(Config=ToyConfig, Model=Toy, PRESETS={"tiny": dict(steps=4, lr=1e-3)})
    methods = {"toy": common.Method(toy)}
    monkeypatch.setattr(evaluation, "METHODS", methods)
    monkeypatch.setattr(train, "METHODS", methods)
    flags = ["--method", "toy", *SMALL["sparc"][2:]]
    train.main([*map(str, flags), "--out", str(tmp_path / "whole")])
    train_until(3, [*flags, "--out", tmp_path / "stopped"])
    train_alone([*flags, "--out", tmp_path / "stopped", "--resume"])
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")
    result = json.loads((tmp_path / "whole" / "eval.json").read_text())
    assert 0 <= result["knn"] <= 1 and "zeroshot" not in result


@pytest.mark.parametrize("name", ["sparo", "stair", "sparc", "bam"])
def test_a_core_ends_by_line_300_and_its_config_holds_what_the_model_reads(name):
    text = (ROOT / f"{name}.py").read_text()
    end = f"# To read {name.upper()}, stop here."  # outside of a class
    assert any(line.startswith(end) for line in text.splitlines()[:300])
    core = text.partition("\n# To read ")[0]
    core += inspect.getsource(bam.Projector) if name == "bam" else ""  # a part of bam's Model
    read = {*re.findall(r"\b(?:cfg|config)\.(\w+)", core)}
    assert read == {field.name for field in dataclasses.fields(METHODS[name].Config)}


B, L, P, E = 4, 6, 9, 5
V_AND_T = torch.randn(2, B, E)
TOKENS, PATCHES = torch.randn(B, L, E), torch.randn(B, P, E)
MASK = torch.arange(L) < torch.tensor([6, 4, 3, 5])[:, None]
HEAD = stair.TokenProjectionHead(E, nn.Embedding(11, E))
SPARO = sparo.Sparo(E, 2, 3, 4)
FINE = sparc.fine_grained_loss
NO_CLS = SimpleNamespace(cls=False)
TWICE = {"gather": lambda x: torch.cat([x, x])}  # a gather of more rows than the ranks have
UNEQUAL_VIEWS = {"views": [torch.randn(n, 3, 16, 16) for n in (3, 1)]}


@pytest.mark.parametrize("loss", CONTRASTIVE)
@pytest.mark.parametrize("v, t, message", [
    (V_AND_T[0], torch.randn(B + 1, E), r"captions \(5, 5\)|4 images, 5 captions|4.* 5"),
    (V_AND_T[0, :1], V_AND_T[1, :1], "two or more"),
    (V_AND_T[0, :0], V_AND_T[1, :0], "two or more")])
def test_contrastive_losses_refuse_what_has_no_pairs(loss, v, t, message, monkeypatch):
    with pytest.raises(ValueError, match=message):
        loss(v, t, 10.0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)  # a gather that joins two of four ranks
    with pytest.raises(ValueError, match="as many on each rank"):
        loss(*V_AND_T, 10.0, **TWICE)


@pytest.mark.parametrize("ranks", [1, 4])
def test_bams_losses_refuse_a_gather_of_some_ranks(monkeypatch, ranks):
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    for loss in (lambda: bam.bam_loss(V_AND_T.flatten(0, 1), 2, **TWICE),
                 lambda: bam.moco_loss(V_AND_T, V_AND_T, 0.1, **TWICE)):
        with pytest.raises(ValueError, match="4 images, .* gather all ranks"):
            loss()
    z = V_AND_T[:, :1]
    for loss in (lambda: bam.bam_loss(z.flatten(0, 1), 2), lambda: bam.moco_loss(z, z, 0.1)):
        with pytest.raises(ValueError, match="1 images, .* give two or more"):
            loss()


@pytest.mark.parametrize("loss", CONTRASTIVE)
def test_contrastive_losses_normalise_and_take_options_by_name(loss):
    v, t = V_AND_T.abs() + 1
    unit = F.normalize(v, dim=-1), F.normalize(t, dim=-1)
    torch.testing.assert_close(loss(7 * v, 3 * t, 10.0), loss(*unit, 10.0))
    with pytest.raises(TypeError, match="positional"):
        loss(v, t, 10.0, sparc.all_ranks)


SCALED = [
    *(lambda scale, loss=loss: loss(*V_AND_T, scale) for loss in CONTRASTIVE),
    *(lambda scale, loss=loss: loss(TOKENS, PATCHES, MASK, scale) for loss in (
        FINE, sparc.filip_loss, sparc.gloria_loss)),
    lambda scale: sparc.mgca_loss(TOKENS, PATCHES, MASK, TOKENS, PATCHES, scale),
    lambda scale: sparc.pacl_loss(V_AND_T[1], PATCHES, scale),
    lambda scale: sparc.prototype_loss(*V_AND_T, V_AND_T[0], scale)]


@pytest.mark.parametrize("loss", [
    *(lambda loss=loss: loss(10.0) for loss in SCALED),
    lambda: bam.bam_loss(V_AND_T[0], 2), lambda: bam.sinkhorn(V_AND_T[0], 0.1, 2),
    lambda: bam.attention(V_AND_T[0], 0.1), lambda: bam.moco_loss(V_AND_T, V_AND_T, 0.1),
    lambda: sparo.dino_loss(V_AND_T, V_AND_T, torch.zeros(E), 0.1, 0.04)[0],
    lambda: stair.flops_loss(V_AND_T[0]), lambda: sparc.alignment_weights(TOKENS, PATCHES),
    lambda: tiny_model("sparc", align="softmax").align(TOKENS, PATCHES)])
def test_losses_are_computed_in_fp32_under_autocast(loss):
    expected = loss()
    with torch.autocast("cpu", torch.bfloat16):
        assert loss().dtype == torch.float32 and torch.equal(loss(), expected)


@pytest.mark.parametrize("call", [
    lambda mask: stair.caption_mask(MASK.long(), mask, 9), lambda mask: HEAD(TOKENS, mask),
    sparc.words_only, lambda mask: sparo.as_bools(mask, (B, L)),
    *(lambda mask, loss=loss: loss(TOKENS, PATCHES, mask, 9.0) for loss in (
        FINE, sparc.filip_loss, sparc.gloria_loss))])
def test_a_mask_of_zeros_and_ones_is_one_of_bools_and_floats_are_refused(call):
    torch.testing.assert_close(call(MASK.long()), call(MASK))
    with pytest.raises(ValueError, match="A mask needs .*float32"):
        call(MASK.float())


@pytest.mark.parametrize("call, message", [
    (lambda: FINE(TOKENS, PATCHES, MASK[:1], 9.0), r"bools \[4, 6\], not .*\[1, 6\]"),
    (lambda: sparc.gloria_loss(PATCHES, TOKENS, MASK, 9.0), r"\[4, 9\]"),
    (lambda: HEAD(TOKENS, MASK[:1]), r"bools \[4, 6\], not .*\[1, 6\]"),
    (lambda: SPARO(TOKENS, MASK), "eos_idx needs 4 indices .*True"),
    (lambda: sparo.normalize_slots(V_AND_T[0]), "expected 3, got 2"),
    *((lambda loss=loss: loss(*V_AND_T, 9.0, **TWICE), "process group") for loss in CONTRASTIVE),
    (lambda: bam.bam_loss(V_AND_T[0], 2, **TWICE), "process group"),
    (lambda: bam.ablated_loss(V_AND_T[0], 2, None, 2, bam.Settings(target="onehot"), **TWICE),
     "process group")])
def test_wrong_shapes_masks_and_numbers_raise_errors_that_name_them(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name, settings, error", [
    ("sparc", dict(align="softmx"), "'softmx'"), ("sparc", dict(h_v="residuel"), "'residuel'"),
    ("sparo", dict(readout="attpool", heads="both"), "'both'"),
    ("sparc", dict(token_mean="words"), "'words'"),
    ("bam", dict(mask="Zero"), "'Zero'"), ("bam", dict(target="plain"), "'plain'")])
def test_settings_that_are_no_choice_are_refused(name, settings, error):
    with pytest.raises((ValueError, KeyError), match=error):
        tiny_model(name, **settings)(batch_of(name))


@pytest.mark.parametrize("call", [
    lambda x, mask: SPARO(x, mask.sum(1) - 1), lambda x, mask: HEAD(x, mask),
    lambda x, mask: FINE(x, PATCHES, mask, 9.0), lambda x, mask: sparc.masked_mean(x, mask == 1),
    lambda x, mask: sparc.filip_loss(x, PATCHES, mask, 9.0),
    lambda x, mask: sparc.gloria_loss(x, PATCHES, mask, 9.0)])
def test_padding_may_hold_nan_and_a_mask_may_hold_integers(call):
    results = []
    for filler in (1.0, torch.nan):
        x = TOKENS.masked_fill(~MASK[..., None], filler).requires_grad_()
        value = call(x, MASK.long())
        gradient, = torch.autograd.grad(value.square().sum(), x)
        results.append((value, gradient))
    torch.testing.assert_close(*results)
    assert results[0][1].isfinite().all() and not results[0][1][~MASK].any()


def test_a_tensor_has_one_name_and_stays_one_tensor_on_another_device():
    """Averages would move a tensor of two names twice. A copy for each name would train apart."""
    fdt = tiny_model("sparo", readout="fdt", codes=20, embed_dim=8)
    for model in (fdt, *(tiny_model(name) for name in ("sparc", "sparo", "stair", "bam", "dino"))):
        state = {name: x for name, x in model.state_dict().items() if x.numel()}
        assert len({x.data_ptr() for x in state.values()}) == len(state)
        assert len([*model.parameters()]) == len([*model.named_parameters(remove_duplicate=False)])
