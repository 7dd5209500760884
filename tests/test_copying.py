"""What other projects do with a method file, a model, an index or weights gives the right numbers.

They average a model, load it within a module, make it on the meta device, or convert its layers.
They give a loss the last batch of a loader, and an index the arrays that they have.
"""

import io
import json
import os
import unicodedata

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bam
import common
import eval as evaluation
import stair
from helpers import make_batch, make_views, picture, tiny_model
from test_encoders import tiny_vit
from test_weights import made_up_timm, prefixed



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


def test_a_tensor_has_one_name_and_stays_one_tensor_on_another_device():
    """Averages would move a tensor of two names twice. A copy for each name would train apart."""
    fdt = tiny_model("sparo", readout="fdt", codes=20, embed_dim=8)
    for model in (fdt, *(tiny_model(name) for name in ("sparc", "sparo", "stair", "bam", "dino"))):
        state = {name: x for name, x in model.state_dict().items() if x.numel()}
        assert len({x.data_ptr() for x in state.values()}) == len(state)
        assert len([*model.parameters()]) == len([*model.named_parameters(remove_duplicate=False)])


@pytest.mark.parametrize("name, settings, changes", [
    ("stair", {}, {"image_head.embedding.weight": "text_encoder.embedding.weight",
                   "text_head.embedding.weight": "text_encoder.embedding.weight",
                   "image_head.valid": None, "text_head.valid": None}),
    ("sparo", dict(readout="fdt", codes=20, embed_dim=8),
     {"text_readout.codebook": "image_readout.codebook"})])
def test_checkpoints_with_the_names_of_earlier_revisions_load(name, settings, changes):
    """e stood under the names of both heads, `valid` nowhere; FDT's codes under two names."""
    old, model = tiny_model(name, **settings).eval(), tiny_model(name, **settings).eval()
    state, batch = old.state_dict(), make_batch()
    for key, other in changes.items():
        state[key] = state.get(other)
    state = {f"0.{key}": x for key, x in state.items() if x is not None}
    nn.ModuleList([model]).load_state_dict(state)
    texts = [m.encode_text(batch["tokens"], batch["mask"]) for m in (model, old)]
    assert torch.equal(*texts)


def test_a_head_of_the_meta_device_has_its_special_tokens_when_it_is_loaded():
    head, h = stair.TokenProjectionHead(8, nn.Embedding(50, 8), (0, 1, 2, 3)), torch.randn(2, 5, 8)
    with torch.device("meta"):
        other = stair.TokenProjectionHead(8, nn.Embedding(50, 8), (0, 1, 2, 3))
    other._apply(lambda x: torch.full_like(x, 1, device="cpu"))  # to_empty leaves any numbers
    other.load_state_dict(head.state_dict())
    torch.testing.assert_close(other(h), head(h))


def test_converted_batch_norms_leave_bams_projector_as_it_is():
    settings = dict(teacher=False, projector_width=6, projector_dim=4, activation="relu")
    projector, h = bam.Projector(5, bam.Config(**settings)), torch.randn(2, 3, 5)
    expected = projector(h)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(projector)
    assert torch.equal(converted(h), expected)


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
    with pytest.raises(ValueError, match=r"needs the shape \(5,\)"):
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


@pytest.mark.parametrize("name", ["bam", "dino"])
def test_the_teachers_batch_norm_follows_its_own_images(name):
    """A moving average of parameters alone would leave its statistics at 0 and 1."""
    model = tiny_model(name).train()
    model(make_views(6, (16, 16)))  # the student begins with the teacher's weights
    for network in (model.teacher[0], model.image_encoder):
        assert network.patch_embed[0][1].running_mean.abs().min() > 0
    torch.testing.assert_close(dict(model.teacher[0].named_buffers()),
                               dict(model.image_encoder.named_buffers()))


# A run in Python --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sparc", "stair", "sparo"])
def test_maps_of_a_picture_of_another_size_have_its_own_grid(run_of, name):
    model, _ = evaluation.load_run(run_of(name))
    S, net = model.image_size, model.model
    image, g = torch.rand(3, 2 * S, S), net.image_encoder.grid
    found = model.maps(image, "a red ring")["patches"]
    tokens, mask = model.tokenize(["a red ring"])
    with torch.no_grad():
        if name == "sparc":
            expected = net.align_words(image[None], tokens, mask)[0]
        elif name == "stair":
            expected = net.word_maps(image[None], tokens[0])[0].T
        else:
            expected = net.attend(image[None], tokens, mask)[0][0][:, 1:]  # without [CLS]
    torch.testing.assert_close(torch.from_numpy(found), expected.unflatten(1, (2 * g, g)))
    with pytest.raises(RuntimeError, match="multiply"):
        model.maps(torch.rand(3, S + 1, S + net.image_encoder.patch_size - 1), "a red ring")


def test_images_come_from_files_buffers_and_paths_of_any_kind(run_of, tmp_path):
    """Several threads may read the same open file."""
    model, _ = evaluation.load_run(run_of("stair"))
    S, path, model.workers = model.image_size, tmp_path / "a.png", 4
    path.write_bytes(picture(400, 400, format="PNG"))
    data = path.read_bytes()
    expected, written = model.images(data), io.BytesIO()
    written.write(data)  # its position is at the end
    with open(path, "rb") as file:
        for image in (written, memoryview(data), bytearray(data), file, next(os.scandir(tmp_path))):
            assert torch.equal(model.images(image), expected)
    for _ in range(3):
        found = model.images([Image.open(path)] * 8)
        torch.testing.assert_close(found, expected.expand_as(found))
    for empty in (model.images([]), model.images(torch.zeros(0, 3, S, S)), model.texts([])):
        assert empty.shape == (0, expected.shape[1])
    with pytest.raises(common.UserError, match="Tensors of a list need one size"):
        model.images([torch.zeros(3, S, S), torch.zeros(3, 2 * S, 2 * S)])
    with pytest.raises(common.UserError, match="Image 1, a NoneType, cannot be read"):
        model.images([data, None])


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
    for name in ("visual.transformer.resblocks.0.ln_1.weight", "vit.embeddings.layernorm.weight"):
        with pytest.raises(common.UserError, match=f"{name}.*give a file with timm's names"):
            common.load_timm(vit, state | {name: torch.ones(2)})
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(common.UserError, match="more than tensors .* or is no file of torch.save"):
        common.load_checkpoint(tmp_path / "index.json")
