"""Files of every SPEC: what is read, what is skipped and counted, what is refused, and the order of a Stream."""

import csv
import io
import itertools
import json
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import common
from common import CaptionTable, Skipped, Stream, TarShards, UserError, WordPiece, World, WorldStream, open_data

SHARED = Path(__file__).parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data")
TOKENIZER = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "photo", "of", *(f"n{i}" for i in range(200))])


def picture(width=8, height=8, mode="RGB", format="JPEG", value=None):
    """Bytes of an image: noise, or of one value."""
    shape = (height, width) if mode in ("L", "P") else (height, width, len(mode))
    pixels = np.random.default_rng(0).integers(0, 256, shape) if value is None else np.broadcast_to(value, shape)
    file = io.BytesIO()
    Image.frombytes(mode, (width, height), pixels.astype(np.uint8).tobytes()).save(file, format)
    return file.getvalue()


def write_tar(path, members):
    """{name: bytes or str} or pairs -> a tar file."""
    with tarfile.open(path, "w") as tar:
        for name, data in members.items() if isinstance(members, dict) else members:
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def write_table(directory, n, broken=(), caption="n{}"):
    """n images with captions; of the broken ones the file is no image."""
    for i in range(n):
        (directory / f"{i}.jpg").write_bytes(b"no image" if i in broken else picture())
    lines = [f"{i}.jpg,{caption.format(i)}" for i in range(n)]
    path = directory / "table.csv"
    path.write_text("\n".join(["filepath,title", *lines]) + "\n")
    return str(path)


def write_shards(directory, sizes, broken=(), uncaptioned=()):
    """One shard a size, the samples numbered through; returns the SPEC."""
    number = itertools.count()
    for s, size in enumerate(sizes):
        members = {}
        for i in itertools.islice(number, size):
            members[f"{i:05}.jpg"] = b"no image" if i in broken else picture()
            members[f"{i:05}.txt"] = "" if i in uncaptioned else f"n{i}"
        write_tar(directory / f"{s:03}.tar", members)
    return f"{directory}/{{000..{len(sizes) - 1:03}}}.tar"


def pairs(source):
    """CaptionTable -> {file name: captions}."""
    return {Path(source.paths[i]).name: source.captions_of(i) for i in range(len(source))}


def stream(source, batch_size=4, seed=0, **options):
    return Stream(source, TOKENIZER, common.train_transform(8), 8, 16, batch_size, seed, **options)


def captions_in(batch):
    return [TOKENIZER.vocab[row[1]] for row in batch["tokens"].tolist()]


def take(loader, n):
    return list(itertools.islice(iter(loader), n))


def loader_of(dataset, workers=0):
    return DataLoader(dataset, batch_size=None, num_workers=workers)


def failure(loader):
    """The message of the UserError that it ends with. Without its traceback, a loader's processes stop at once."""
    try:
        take(loader, 2)
    except UserError as error:
        error.__traceback__ = None
        return str(error)
    pytest.fail("no UserError")


def skips_of(path):
    return [(s.reason, s.where) for s in common.read_tar(path) if isinstance(s, Skipped)]


# Tables --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name,text,expected", [
    ("a.csv", 'filepath,title\nx.jpg,"a dog, running"\n', {"x.jpg": ["a dog, running"]}),
    ("a.csv", 'image,caption\nx.jpg,one\nx.jpg,two\ny.jpg,three\n', {"x.jpg": ["one", "two"], "y.jpg": ["three"]}),
    ("a.csv", '\ufefffilepath,title\r\nx.jpg,"say ""hi"""\r\ny.jpg,b\r\n', {"x.jpg": ['say "hi"'], "y.jpg": ["b"]}),
    ("a.csv", 'n,title,filepath\n1,one,x.jpg\n2,two,y.jpg\n', {"x.jpg": ["one"], "y.jpg": ["two"]}),
    ("a.csv", 'filepath,title\nx.jpg,"one\nline"\n\ny.jpg,two', {"x.jpg": ["one\nline"], "y.jpg": ["two"]}),
    ("a.tsv", 'filepath\ttitle\nx.jpg\ta, b\n', {"x.jpg": ["a, b"]}),
    ("captions.txt", 'image,caption\nx.jpg,one\n', {"x.jpg": ["one"]}),
    ("A.CSV", 'image,caption\nx.jpg, héllo 猫 \n', {"x.jpg": ["héllo 猫"]}),
    ("a.token", '\ufeffx.jpg#0\tA dog .\r\nx.jpg#1\tone\u2028two\r\n\r\ny#1.jpg#0\tB\n',
     {"x.jpg": ["A dog .", "one\u2028two"], "y#1.jpg": ["B"]}),
])
def test_tables(tmp_path, name, text, expected):
    path = tmp_path / name
    path.write_bytes(text.encode())
    source = open_data(str(path))
    assert pairs(source) == expected
    assert Path(source.paths[0]).parent == tmp_path
    assert source.skipped == {}


def test_columns_by_knobs(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("filepath,title,url,alt\nx.jpg,one,y.jpg,two\n")
    assert pairs(open_data(f"{path}:image=url,caption=alt")) == {"y.jpg": ["two"]}
    assert pairs(open_data(f"{path}:caption=alt")) == {"x.jpg": ["two"]}


def test_rows_that_say_too_little_are_counted(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("filepath,title\nx.jpg,one\ny.jpg\nz.jpg,\nw.jpg,  \n,lost\nv.jpg,a dog, and a cat\n")
    source = open_data(str(path))
    assert pairs(source) == {"x.jpg": ["one"]}
    assert source.skipped == {
        "empty caption": [3, str(tmp_path / "w.jpg")], "no image name": [1, f"{path}, line 6"],
        "too many columns (a comma outside quotes?)": [1, f"{path}, line 7"]}
    (tmp_path / "x.jpg").write_bytes(picture())
    batch = take(stream(source, 2), 1)[0]
    assert batch["skipped"] == {0: source.skipped}
    assert stream(source).source.skipped["empty caption"][0] == 3  # the streams' counting leaves the table alone


def test_image_root(tmp_path):
    (tmp_path / "images").mkdir()
    path = tmp_path / "a.csv"
    path.write_text("filepath,title\nx.jpg,one\n/abs/y.jpg,two\n")
    source = open_data(str(path), image_root=str(tmp_path / "images"))
    assert list(source.paths) == [str(tmp_path / "images/x.jpg"), "/abs/y.jpg"]


def test_coco_captions(tmp_path):
    path = tmp_path / "captions.json"
    path.write_text(json.dumps({
        "images": [{"id": 7, "file_name": "b.jpg"}, {"id": 3, "file_name": "a.jpg"}],
        "annotations": [{"image_id": 3, "caption": "one"}, {"image_id": 7, "caption": "two\n"}, {"image_id": 3, "caption": "three"},
                        {"image_id": 9, "caption": "of no image"}, {"image_id": 7, "caption": None}]}))
    source = open_data(str(path))
    assert pairs(source) == {"a.jpg": ["one", "three"], "b.jpg": ["two"]}
    assert source.skipped == {"caption without image": [1, f"{path}, image_id 9"], "empty caption": [1, str(tmp_path / "b.jpg")]}


def test_karpathy_splits(tmp_path):
    def image(name, split, *captions):
        return {"filename": name, "filepath": "val2014", "split": split, "sentences": [{"raw": c} for c in captions]}

    path = tmp_path / "dataset_coco.json"
    path.write_text(json.dumps({"images": [image("a.jpg", "train", "A", "B"), image("b.jpg", "restval", "C"),
                                           image("c.jpg", "test", "D"), image("d.jpg", "val", "E")]}))
    assert pairs(open_data(str(path))) == {"a.jpg": ["A", "B"], "b.jpg": ["C"]}
    assert pairs(open_data(str(path), split="test")) == {"c.jpg": ["D"]}
    assert pairs(open_data(f"{path}:split=val", split="test")) == {"d.jpg": ["E"]}
    assert open_data(str(path)).paths[1] == str(tmp_path / "val2014/b.jpg")
    with pytest.raises(UserError, match="no split 'dev', only restval, test, train, val"):
        open_data(f"{path}:split=dev")


def test_class_folders(tmp_path):
    for name in ("fire_truck/1.jpg", "fire_truck/2.PNG", "airplane/deep/1.jpeg", "airplane/notes.txt", ".git/x.jpg", "empty/x.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(picture())
    source = open_data(str(tmp_path))
    assert source.classes == ["airplane", "empty", "fire_truck"]
    assert source.labels.tolist() == [0, 2, 2]
    assert list(source.captions) == ["a photo of an airplane."] + ["a photo of a fire truck."] * 2


def test_captions_live_in_numpy_buffers(tmp_path):
    strings = ["a", "", "héllo 猫", "lone \ud83d surrogate", "z" * 1000]
    held = common.Strings(strings)
    assert list(held) == strings and len(held) == 5
    assert isinstance(held.buffer, np.ndarray) and held.buffer.nbytes == sum(len(s.encode("utf-8", "surrogatepass")) for s in strings)
    source = CaptionTable([(f"{i}.jpg", f"n{i}") for i in range(50)], "x")
    assert not any(isinstance(v, (list, dict)) and len(v) >= 50 for v in vars(source).values())


# Tar shards ----------------------------------------------------------------------------------------------------------


def test_brace_ranges():
    assert common.expand_braces("a/{008..011}.tar") == ["a/008.tar", "a/009.tar", "a/010.tar", "a/011.tar"]
    assert common.expand_braces("{8..10}.tar") == ["8.tar", "9.tar", "10.tar"]
    assert common.expand_braces("{0..1}/{00..02}.tar") == [f"{i}/{j:02}.tar" for i in range(2) for j in range(3)]
    assert common.expand_braces("a.tar") == ["a.tar"]
    with pytest.raises(UserError, match=r"\{3\.\.1\} of x\{3\.\.1\}\.tar is empty"):
        common.expand_braces("x{3..1}.tar")


def test_what_a_shard_holds(tmp_path):
    jpg = picture()
    path = write_tar(tmp_path / "a.tar", [
        ("001.jpg", jpg), ("001.txt", "one\n"), ("001.json", '{"caption": "not this"}'),
        ("002.json", '{"caption": " two "}'), ("002.PNG", jpg),
        ("003.json", "{"), ("003.jpg", jpg),
        ("004.json", "[1]"), ("004.jpg", jpg),
        ("005.json", '{"caption": null}'), ("005.jpg", jpg), ("005.txt", " "),
        ("006.txt", "no image"),
        ("007.jpg", jpg),
        ("a/008.jpg", jpg), ("a/008.txt", "eight"), ("b.c/008.jpg", jpg), ("b.c/008.txt", "other eight"),
        ("009.jpg", jpg), ("009.txt", b"caf\xe9")])
    samples = list(common.read_tar(path))
    assert [s[:2] for s in samples if not isinstance(s, Skipped)] == [
        (jpg, "one"), (jpg, "two"), (jpg, "eight"), (jpg, "other eight"), (jpg, "caf\ufffd")]
    assert skips_of(path) == [("invalid JSON", f"{path}:003"), ("empty caption", f"{path}:004"), ("empty caption", f"{path}:005"),
                              ("no image", f"{path}:006"), ("empty caption", f"{path}:007")]


def test_a_basename_in_another_shard_is_another_sample(tmp_path):
    for shard in "01":
        write_tar(tmp_path / f"{shard}.tar", {"0.jpg": picture(), "0.txt": f"n{shard}"})
    source = open_data(f"{tmp_path}/{{0..1}}.tar:buffer=1")
    batches = take(stream(source, 2), 3)
    assert all(sorted(captions_in(batch)) == ["n0", "n1"] for batch in batches)


def test_broken_shards(tmp_path):
    good = write_tar(tmp_path / "good.tar", {f"{i}.{s}": picture() if s == "jpg" else "n" for i in range(3) for s in ("jpg", "txt")})
    data, path = Path(good).read_bytes(), str(tmp_path / "bad.tar")
    assert skips_of(good) == []
    whole = len(data.rstrip(b"\0")) // 512 * 512 + 512  # without the two blocks of zeros at the end
    for cut in [*range(1, whole, 97), 512, 1024, whole]:
        Path(path).write_bytes(data[:cut])
        reasons = [reason for reason, _ in skips_of(path)]
        assert sum(reason in ("truncated shard", "unreadable shard") for reason in reasons) == 1, cut
        assert len(list(common.read_tar(path))) - len(reasons) == max(0, cut - 1) // (len(data[:whole]) // 3) + (cut == whole) \
            or cut % (whole // 3), cut
    Path(path).write_bytes(b"")
    assert skips_of(path) == [("unreadable shard", f"{path} (empty file)")]
    Path(path).write_bytes(bytes(10240))
    assert skips_of(path) == [("empty shard", path)]
    Path(path).write_bytes(b"<html>no tar</html>" * 100)
    assert [reason for reason, _ in skips_of(path)] == ["unreadable shard"]
    middle = bytearray(data)
    middle[whole // 3 : whole // 3 + 512] = b"x" * 512  # a header in the middle
    Path(path).write_bytes(middle)
    assert [reason for reason, _ in skips_of(path)][-1] in ("truncated shard", "unreadable shard")
    assert len(list(common.read_tar(path))) == 2
    assert skips_of(str(tmp_path / "gone.tar"))[0][0] == "unreadable shard"


def test_damaged_shards_never_crash(tmp_path):
    members = {f"{i}.{s}": picture() if s == "jpg" else '{"caption": "n"}' for i in range(4) for s in ("jpg", "json")}
    data, rng, path = Path(write_tar(tmp_path / "a.tar", members)).read_bytes(), random.Random(0), tmp_path / "b.tar"
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 40)):
            damaged[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(damaged)
        list(common.read_tar(str(path)))


def test_captions_of_shards_for_the_vocabulary(tmp_path):
    source = open_data(write_shards(tmp_path, [3, 3], uncaptioned=[1]))
    assert source.sample_captions(100) == ["n0", "n2", "n3", "n4", "n5"]
    assert source.sample_captions(2) == ["n0", "n2"]
    write_tar(tmp_path / "none.tar", {"0.txt": "no image"})
    with pytest.raises(UserError, match="none.tar has no image with a caption"):
        open_data(f"{tmp_path}/none.tar").sample_captions(10)


# Images --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode,format", [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "PNG"), ("L", "PNG"), ("LA", "PNG"),
                                         ("RGBA", "PNG"), ("P", "GIF"), ("RGBA", "WEBP"), ("RGB", "BMP"), ("RGB", "TIFF")])
def test_every_mode_decodes_to_rgb(mode, format, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(picture(20, 12, mode, format))
    for file in (str(path), path.read_bytes()):
        image = common.open_image(file, 100)
        assert image.mode == "RGB" and image.size == (20, 12)
        assert common.train_transform(8)(image).shape == (3, 8, 8) == common.eval_transform(8)(image).shape


def test_colours_survive_decoding():
    assert common.open_image(picture(mode="RGBA", format="PNG", value=(200, 100, 50, 128)), 4).getpixel((0, 0)) == (200, 100, 50)
    assert common.open_image(picture(mode="L", format="PNG", value=77), 4).getpixel((0, 0)) == (77, 77, 77)
    palette, file = Image.new("P", (4, 4), 1), io.BytesIO()
    palette.putpalette([0, 0, 0, 10, 200, 30])
    palette.save(file, "PNG")
    assert common.open_image(file.getvalue(), 4).getpixel((0, 0)) == (10, 200, 30)


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_16_bits_keep_their_tones(format):
    file = io.BytesIO()
    Image.fromarray(np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)).save(file, format)
    pixels = np.asarray(common.open_image(file.getvalue(), 4))
    assert pixels.shape == (16, 16, 3)
    assert np.abs(pixels[..., 0].ravel().astype(int) - np.arange(256)).max() <= 1


@pytest.mark.parametrize("width,height", [(1, 1), (1, 300), (300, 1)])
def test_tiny_and_thin_images(width, height):
    image = common.open_image(picture(width, height, format="PNG"), 12)
    for transform in (common.train_transform(8), common.eval_transform(8)):
        assert transform(image).shape == (3, 8, 8)


@pytest.mark.parametrize("size", [(640, 480), (481, 333), (97, 800), (64, 64), (63, 200)])
@pytest.mark.parametrize("least", [8, 60, 72, 333])
def test_drafts_are_large_enough(size, least):
    x, y = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
    file = io.BytesIO()
    Image.fromarray(np.stack([x, y, (x + y) / 2], -1).astype(np.uint8)).save(file, "JPEG")
    data = file.getvalue()
    drafted = common.open_image(data, least)
    assert min(drafted.size) >= min(least, *size)
    assert drafted.size == size or max(drafted.size) < max(size)
    if least == 8:
        assert min(drafted.size) < 128  # else nothing was saved
    reference = np.asarray(Image.open(io.BytesIO(data)).resize(drafted.size, Image.Resampling.BOX), dtype=float)
    assert np.abs(np.asarray(drafted, dtype=float) - reference).mean() < 5


@pytest.mark.filterwarnings("ignore")
def test_damaged_images_never_crash():
    rng = random.Random(0)
    blobs = [picture(30, 20, mode, format) for mode, format in
             [("RGB", "JPEG"), ("RGBA", "PNG"), ("P", "GIF"), ("RGB", "BMP"), ("RGB", "WEBP"), ("L", "TIFF")]]
    blobs += [b"DDS |" + bytes(119), b"DDS |" + b"\1" * 300, b"BLP1" + b"\1" * 300]
    for data in blobs * 50:
        damaged = bytearray(data[: rng.choice([len(data), rng.randrange(1, len(data))])])
        for _ in range(rng.randrange(6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            assert common.open_image(bytes(damaged), 8).mode == "RGB"
        except common.IMAGE_ERRORS:
            pass


# Order ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_an_epoch_shows_every_image_once(parts):
    source = CaptionTable([(f"{i}.jpg", f"n{i}") for i in range(17)], "x")
    orders = []
    for epoch in range(3):
        shown = []
        for part in range(parts):
            size = len(range(part, 17, parts))
            shown.append([path for path, _ in itertools.islice(source.samples(0, part, parts, epoch * size), size)])
        assert sorted(sum(shown, [])) == sorted(source.paths)
        orders.append(shown)
    assert orders[0] != orders[1] != orders[2]


def test_an_epoch_over_ranks_and_workers(tmp_path):
    source = open_data(write_table(tmp_path, 16))
    batches = [batch for rank in range(2) for batch in take(loader_of(stream(source, 2, rank=rank, world_size=2), 2), 4)]
    assert sorted(sum(map(captions_in, batches), [])) == sorted(f"n{i}" for i in range(16))


def test_captions_take_turns():
    source = CaptionTable([(f"{i}.jpg", f"{i} {turn}") for i in range(4) for turn in range(3)], "x")
    samples = list(itertools.islice(source.samples(0, 0, 1), 12))
    assert len(set(samples)) == 12  # every caption of every image in three epochs
    assert len({caption.split()[1] for _, caption in samples[:4]}) > 1


def test_every_shard_goes_to_one_part(tmp_path):
    source = open_data(write_shards(tmp_path, [2] * 8) + ":buffer=1")
    orders = []
    for epoch in range(2):
        dealt = [[s[1] for s in itertools.islice(source.samples(0, part, 4), epoch * 4, epoch * 4 + 4)] for part in range(4)]
        assert sorted(sum(dealt, [])) == sorted(f"n{i}" for i in range(16))
        orders.append(dealt)
    assert orders[0] != orders[1]
    assert [s[1] for s in itertools.islice(source.samples(1, 0, 4), 4)] != orders[0][0]


def test_shards_are_shuffled_through_a_buffer(tmp_path):
    source = open_data(write_shards(tmp_path, [20, 20]) + ":buffer=40")
    captions = [s[1] for s in itertools.islice(source.samples(0, 0, 1), 80)]
    first = [int(c[1:]) for c in captions[:20]]
    assert first != sorted(first) and min(first) < 20 <= max(first)


def test_resampled_shards(tmp_path):
    source = open_data(write_shards(tmp_path, [1, 1, 1]) + ":resample=1,buffer=1")
    parts = [[s[1] for s in itertools.islice(source.samples(0, part, 8), 60)] for part in range(8)]
    assert all(set(part) == {"n0", "n1", "n2"} for part in parts)
    assert len(set(map(tuple, parts))) == 8


def same(a, b):
    tensors = [[batch["tokens"], batch["mask"], *batch.get("views", [batch.get("images")])] for batch in (a, b)]
    return all(map(torch.equal, *tensors)) and (a["position"], a["skipped"]) == (b["position"], b["skipped"])


def make_stream(kind, directory, positions=None, seed=0):
    kind, _, viewed = kind.partition(" ")
    views = common.Views([common.View(8, (0.4, 1.0), blur=0.5), common.View(4, (0.1, 0.4), solarize=0.5)], 8) if viewed else None
    if kind == "world":
        return WorldStream(World(size=16), TOKENIZER, 16, 4, seed, positions=positions, transform=views)
    if views:
        return Stream(open_data(write_table(directory, 23, broken=(3, 4, 11))), TOKENIZER, views, 8, 16, 3, seed, positions=positions)
    if kind == "table":
        source = open_data(write_table(directory, 23, broken=(3, 4, 11)))
    else:
        source = open_data(write_shards(directory, [7, 4, 6, 5], broken=(2, 9, 10), uncaptioned=(0, 8, 15))
                           + f":buffer=5,resample={int(kind == 'resample')}")
    return stream(source, 3, seed, positions=positions)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["table", "tar", "resample", "world", "table views", "world views"])
def test_a_restarted_stream_continues_the_batches(kind, workers, tmp_path):
    whole = take(loader_of(make_stream(kind, tmp_path), workers), 14)
    again = take(loader_of(make_stream(kind, tmp_path), workers), 14)
    assert all(map(same, whole, again))
    other = take(loader_of(make_stream(kind, tmp_path, seed=1), workers), 1)[0]
    assert not same(whole[0], other | {key: whole[0][key] for key in ("tokens", "mask", "position", "skipped")})
    if not kind.startswith("world"):
        assert sum(count for batch in whole[-2:] for reasons in batch["skipped"].values() for count, _ in reasons.values()) > 3
    for stop in (1, 6, 9):
        positions = {}
        for batch in whole[:stop]:
            positions |= batch["position"]
        rest = take(loader_of(make_stream(kind, tmp_path, positions), workers), 14 - stop)
        assert all(map(same, whole[stop:], rest)), stop


def test_ranks_and_workers_differ(tmp_path):
    source = open_data(write_table(tmp_path, 12))
    streams = [WorldStream(World(size=16), TOKENIZER, 16, 4, 0, rank, 2) for rank in range(2)]
    a, b = (take(loader_of(s, 2), 2) for s in streams)
    images = [batch["images"] for batch in a + b]
    assert not any(torch.equal(x, y) for x, y in itertools.combinations(images, 2))
    assert [list(batch["position"]) for batch in take(loader_of(stream(source), 2), 4)] == [[0], [1], [0], [1]]


def test_augmentation_changes_from_epoch_to_epoch(tmp_path):
    source = open_data(write_table(tmp_path, 1))
    batch = take(stream(source, 4), 1)[0]
    assert len({image.numpy().tobytes() for image in batch["images"]}) > 1


def test_augmentation_leaves_the_global_generator_alone(tmp_path):
    source, before = open_data(write_table(tmp_path, 4)), torch.get_rng_state()
    take(stream(source), 2)
    assert torch.equal(before, torch.get_rng_state())


def test_text_is_cut_to_the_longest_caption(tmp_path):
    (tmp_path / "x.jpg").write_bytes(picture())
    (tmp_path / "a.csv").write_text("filepath,title\nx.jpg,a photo of n1\nx.jpg,n1\n")
    for batch in take(stream(open_data(str(tmp_path / "a.csv")), 1), 2):
        length = 6 if captions_in(batch) == ["a"] else 3
        assert batch["tokens"].shape == (1, length) == batch["mask"].shape and batch["mask"].all()
    (tmp_path / "a.csv").write_text("filepath,title\nx.jpg," + "n1 " * 50 + "\n")
    assert take(stream(open_data(str(tmp_path / "a.csv")), 1), 1)[0]["tokens"].shape == (1, 16)


# Bad samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_are_counted(tmp_path, workers):
    source = open_data(write_table(tmp_path, 12, broken=range(0, 12, 2)))
    (tmp_path / "2.jpg").unlink()
    batches = take(loader_of(stream(source), workers), 6)
    assert {int(c[1:]) % 2 for batch in batches for c in captions_in(batch)} == {1}
    counts = batches[-1]["skipped"] | batches[-2]["skipped"]
    assert set(counts) == set(range(workers or 1))
    for reasons in counts.values():
        count, example = reasons["unreadable image"]
        assert count >= 4 and str(tmp_path) in example and "0x" not in example


def test_broken_samples_of_shards_are_counted_with_their_place(tmp_path):
    source = open_data(write_shards(tmp_path, [4, 4], broken=(1,), uncaptioned=(6,)))
    skipped = take(stream(source, 6), 2)[-1]["skipped"][0]
    assert skipped["unreadable image"][0] >= 1 and skipped["unreadable image"][1].startswith(f"{tmp_path}/000.tar:00001 ")
    assert skipped["empty caption"][1] == f"{tmp_path}/001.tar:00006"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("bad", ["0 bytes", "broken images", "no captions", "no members"])
def test_a_useless_shard_is_skipped(tmp_path, bad, workers):
    spec = write_shards(tmp_path, [30, 30], broken=range(30, 60) if bad == "broken images" else (),
                        uncaptioned=range(30, 60) if bad == "no captions" else ())
    if "0 bytes" == bad:
        (tmp_path / "001.tar").write_bytes(b"")
    if "no members" == bad:
        write_tar(tmp_path / "001.tar", {})
    batches = take(loader_of(stream(open_data(spec + ":buffer=10"), 10), workers), 12)
    assert {c for batch in batches for c in captions_in(batch)} == {f"n{i}" for i in range(30)}
    reasons = {"0 bytes": "unreadable shard", "broken images": "unreadable image", "no captions": "empty caption",
               "no members": "empty shard"}
    assert batches[-1]["skipped"][workers and 1 or 0][reasons[bad]][0] > 0


def test_thousands_of_broken_samples_in_a_row_are_no_reason_to_stop(tmp_path):
    write_shards(tmp_path, [10, 3000], uncaptioned=range(10, 3010))
    batches = take(stream(open_data(f"{tmp_path}/{{000..001}}.tar:buffer=1"), 10), 4)
    assert batches[-1]["skipped"][0]["empty caption"][0] >= 3000


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["table", "broken images", "no captions", "0 bytes", "no members", "resample"])
def test_nothing_but_broken_samples_is_an_error(kind, workers, tmp_path):
    if kind == "table":
        source = open_data(write_table(tmp_path, 3, broken=range(3)))
    else:
        spec = write_shards(tmp_path, [3, 3], broken=() if kind == "no captions" else range(6),
                            uncaptioned=range(6) if kind == "no captions" else ())
        for i in range(2):
            if kind == "0 bytes":
                (tmp_path / f"00{i}.tar").write_bytes(b"")
            if kind == "no members":
                write_tar(tmp_path / f"00{i}.tar", {})
        source = open_data(spec + (":resample=1" if kind == "resample" else ""))
    message = failure(loader_of(stream(source, 2), workers))
    assert "in a row could not be used, the last: " in message and message.startswith(source.what) and "\n" not in message


def test_a_wrong_image_root_ends_soon(tmp_path):
    source = CaptionTable([(f"gone/{i}.jpg", "n1") for i in range(100_000)], "big.csv")
    assert failure(stream(source)).startswith(
        "big.csv: 1,000 samples in a row could not be used, the last: unreadable image, gone/")


@pytest.mark.parametrize("workers", [0, 2])
def test_too_few_for_the_workers(workers, tmp_path):
    table = open_data(write_table(tmp_path, 2))
    shards = open_data(write_shards(tmp_path, [3, 3]))
    ranks = 3 if workers == 0 else 2
    for source, what in ((table, "2 images"), (shards, "2 shards")):
        message = failure(loader_of(stream(source, 1, rank=ranks - 1, world_size=ranks), workers))
        assert f"{source.what} has {what}, fewer than ranks x workers = {ranks * max(1, workers)}: use fewer --workers" in message
        assert "\n" not in message


# What is refused -----------------------------------------------------------------------------------------------------


def refusal(spec, **options):
    with pytest.raises(UserError) as error:
        open_data(spec, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name,text,said", [
    ("a.csv", "url,caption\nx,y\n", "no column 'filepath', only url, caption"),
    ("a.csv", "image,text\nx,y\n", "no column 'title', only image, text"),
    ("a.csv", "", "only an empty first line"),
    ("a.csv", "filepath,title\n", "no image with a caption"),
    ("a.csv", "filepath,title\nx.jpg,\n", "1 rows left out: empty caption"),
    ("a.csv", b"filepath,title\nx.jpg,caf\xe9\n", "UTF-8"),
    ("a.tsv", 'filepath\ttitle\nx.jpg\t"never closed' + "x" * 200_000, "field larger"),
    ("a.token", "x.jpg#0 no tab\n", "line 1: no tab"),
    ("a.token", b"x.jpg#0\t\xff\n", "UTF-8"),
    ("a.json", "{", "not valid JSON"),
    ("a.json", b"\xff", "not valid JSON"),
    ("a.json", "[" * 100_000, "not valid JSON"),
    ("a.json", "[1]", "neither COCO"),
    ("a.json", "3", "neither COCO"),
    ("a.json", "null", "neither COCO"),
    ("a.json", '{"images": []}', "neither COCO"),
    ("a.json", '{"images": 3, "annotations": []}', "neither COCO"),
    ("a.json", '{"images": [{"id": 1, "file_name": "a"}], "annotations": [{"image_id": 1, "bbox": []}]}', "no 'caption'"),
    ("a.json", '{"images": [{"id": 1, "url": "a"}], "annotations": []}', "no 'file_name'"),
    ("a.json", '{"images": [{"sentences": [], "filename": "a"}]}', "no 'split'"),
    ("a.parquet", "x", "no reader for '.parquet'"),
    ("a.tar.gz", "x", "no reader for '.gz'"),
])
def test_malformed_files(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    message = refusal(str(path))
    assert said in message and str(path) in message


def test_what_does_not_exist(tmp_path):
    assert "nowhere.csv does not exist" in refusal("nowhere.csv")
    write_shards(tmp_path, [1, 1])
    message = refusal(f"{tmp_path}/{{000..004}}.tar")
    assert "3 of the 5 shards" in message and f"{tmp_path}/002.tar" in message
    assert "gone.tar" in refusal(f"{tmp_path}/gone.tar")
    path = tmp_path / "a.csv"
    path.write_text("filepath,title\nx.jpg,one\n")
    assert "--image-root /gone is not a directory" in refusal(str(path), image_root="/gone")
    (tmp_path / "bare").mkdir()
    assert "no class folders" in refusal(str(tmp_path / "bare"))
    (tmp_path / "bare/cat").mkdir()
    assert "no image" in refusal(str(tmp_path / "bare"))


def test_unknown_knobs(tmp_path):
    path = write_table(tmp_path, 1)
    shards = write_shards(tmp_path, [1])
    assert "no setting 'colour'; it has caption, image" in refusal(f"{path}:colour=x")
    assert "no setting 'shuffle'; it has buffer, resample" in refusal(f"{shards}:shuffle=1")
    assert "buffer='many' is not of type int" in refusal(f"{shards}:buffer=many")
    assert "buffer=0 must be at least 1" in refusal(f"{shards}:buffer=0")


# Real data -----------------------------------------------------------------------------------------------------------


@needs_shared
def test_flickr():
    source = open_data(str(SHARED / "flickr/captions.txt"), image_root=str(SHARED / "flickr/images"))
    with open(SHARED / "flickr/captions.txt", newline="") as file:
        rows = list(csv.reader(file))[1:]
    assert len(source) == len({name for name, _ in rows}) and len(source.captions) + sum(
        n for n, _ in source.skipped.values()) == len(rows)
    assert "too many columns (a comma outside quotes?)" not in source.skipped
    batch = take(Stream(source, TOKENIZER, common.train_transform(32), 32, 16, 8, 0), 1)[0]
    assert batch["images"].shape == (8, 3, 32, 32) and "unreadable image" not in batch["skipped"][0]


@needs_shared
def test_cifar_shards_and_folders():
    source = open_data(str(SHARED / "cifar10/{00000..00003}.tar"))
    assert isinstance(source, TarShards) and len(source.paths) == 4
    batch = take(Stream(source, TOKENIZER, common.train_transform(32), 32, 16, 8, 0, rank=3, world_size=4), 1)[0]
    assert batch["images"].shape == (8, 3, 32, 32) and batch["skipped"] == {0: {}}
    folders = open_data(str(SHARED / "cifar10/test"))
    assert len(folders.classes) == 10 and len(folders) == 2000 and set(folders.labels) == set(range(10))


# Random views --------------------------------------------------------------------------------------------------------


def strength(**changed):
    return {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0, **changed}


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_jitter_is_torchvisions_for_each_of_its_parts(name):
    torch.manual_seed(0)
    x = torch.rand(5, 3, 6, 7) * 0.4 + 0.3                                # nothing is cut at 0 or 1
    found = common.jitter(x, **strength(**{name: 0.3}))
    adjust = getattr(common.v2.functional, f"adjust_{name}")
    for image, changed in zip(x, found):
        one, half = adjust(image, 1.0), adjust(image, 0.5)
        factor = 1 - 0.5 * ((changed - one) * (half - one)).sum() / (half - one).square().sum()
        assert 0.7 <= factor <= 1.3 and abs(factor - 1) > 1e-3
        torch.testing.assert_close(changed, adjust(image, factor.item()), atol=1e-3, rtol=0)


def test_hue_turns_colours_and_keeps_greys_and_brightness():
    torch.manual_seed(0)
    grey, x = torch.rand(4, 1, 5, 5).expand(4, 3, 5, 5), torch.rand(4, 3, 5, 5) * 0.2 + 0.4
    torch.testing.assert_close(common.jitter(grey, **strength(hue=0.5)), grey, atol=1e-3, rtol=0)
    turned = common.jitter(x, **strength(hue=0.5))
    assert (turned - x).abs().max() > 0.05
    torch.testing.assert_close(common.luma(turned), common.luma(x), atol=1e-3, rtol=0)
    red = torch.tensor([0.6, 0.4, 0.4]).view(1, 3, 1, 1).expand(200, 3, 2, 2)
    hues = common.jitter(red, **strength(hue=0.1))[:, :, 0, 0].argmax(1)   # a tenth of a circle from red is red still
    assert (hues == 0).all() and (common.jitter(red, **strength(hue=0.5))[:, :, 0, 0].argmax(1).bincount(minlength=3) > 20).all()


def test_blur_is_a_gaussian_of_its_own_for_each_image():
    x, sigma = torch.rand(3, 3, 21, 21), torch.tensor([0.1, 0.7, 1.5]).view(3, 1, 1, 1)
    found = common.blur(x, sigma)
    torch.testing.assert_close(found[0], x[0])
    for image, width, blurred in zip(x, (0.1, 0.7, 1.5), found):
        expected = common.v2.functional.gaussian_blur(image, [17, 17], [width, width])
        torch.testing.assert_close(blurred[:, 8:-8, 8:-8], expected[:, 8:-8, 8:-8])
    torch.testing.assert_close(common.blur(torch.full((3, 3, 9, 9), 0.3), sigma), torch.full((3, 3, 9, 9), 0.3))


def test_views_have_their_sizes_and_frequencies():
    torch.manual_seed(0)
    views = common.Views([common.View(8, (0.5, 1.0)), common.View(4, (0.05, 0.3), solarize=1.0)], 8)
    assert views.least == 18                                              # 4 pixels are at least a twentieth of 18 x 18
    image = torch.zeros(3, 16, 16)
    image[0] = torch.linspace(0.05, 0.95, 16)                             # red grows from left to right
    large, small = views.collate([views(image) for _ in range(400)])["views"]
    assert large.shape == (400, 3, 8, 8) and small.shape == (400, 3, 4, 4)
    large, small = common.denormalize(large), common.denormalize(small)
    grey = ((large[:, 0] - large[:, 1]).abs().amax((1, 2)) < 1e-4).float().mean()
    flipped = (large[:, 0, :, 0] > large[:, 0, :, -1]).all(1).float().mean()
    assert 0.13 < grey < 0.27 and 0.42 < flipped < 0.58
    assert small.max() <= 0.51 and large.max() > 0.8                      # solarised: what is brighter than a half is turned over
    shown = [(views(image)[0][0, 0, -1] - views(image)[0][0, 0, 0]).abs().item() for _ in range(50)]
    assert max(shown) - min(shown) > 0.05                                 # crops of different sizes


@pytest.mark.parametrize("blurred, solarized", [(0.0, 0.0), (0.0, 0.3), (0.5, 0.0), (1.0, 0.0)])
def test_views_are_jittered_blurred_and_solarised_as_often_as_they_should(blurred, solarized):
    torch.manual_seed(1)
    views = common.Views([common.View(64, (1.0, 1.0), blurred, solarized)], 224)
    image = torch.full((400, 3, 64, 64), 0.25)
    image[:, 0, :, 32:] = 0.4                                             # an edge, and nothing that solarising turns over ...
    image[:, :, 0, 0] = 0.9                                               # ... but one pixel
    x = common.denormalize(views.distort(image, views.views[0]))
    changed = ((x[:, 1, 40, 5] - 0.25).abs() > 1e-4).float().mean()
    assert 0.76 < changed < 0.88                                          # .8 are jittered, a tenth of the others is red there and greyed
    steps = (x[:, 0, 40, 1:] - x[:, 0, 40, :-1]).abs()
    soft = ((steps > 0.02 * steps.amax(1, keepdim=True)).sum(1) > 1).float().mean()
    assert abs(soft - 0.9 * blurred) < 0.1                                # a blur of less than .4 pixels shows nothing
    if not blurred:
        turned = (x.amax((1, 2, 3)) < 0.501).float().mean()
        assert abs(turned - solarized) < 0.1


def test_views_of_files_and_of_the_world_are_those_of_the_image(tmp_path):
    table = take(make_stream("table views", tmp_path), 2)
    world = take(make_stream("world views", tmp_path), 2)
    for batch, n in ((table[0], 3), (world[0], 4)):
        assert "images" not in batch and [tuple(x.shape) for x in batch["views"]] == [(n, 3, 8, 8), (n, 3, 4, 4)]
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(batch["views"][0], 2))
    alone = Stream(open_data(write_table(tmp_path, 5)), None, common.train_transform(8), 8, None, 2, 0)
    assert set(take(alone, 1)[0]) == {"images", "position", "skipped"}    # no tokenizer: images alone


def test_images_alone_need_no_captions(tmp_path):
    write_tar(tmp_path / "0.tar", {f"{i}.jpg": picture() for i in range(6)})
    shards = f"{tmp_path}/0.tar:buffer=2"
    with pytest.raises(UserError, match="empty caption"):
        take(stream(open_data(shards)), 1)
    for i in range(5):
        (tmp_path / f"{i}.jpg").write_bytes(picture())
    with pytest.raises(UserError, match="has no class folders"):
        open_data(str(tmp_path))
    for spec in (shards, str(tmp_path)):
        source = open_data(spec, captions=False)
        batch = take(Stream(source, None, common.train_transform(8), 8, None, 4, 0), 1)[0]
        assert batch["images"].shape == (4, 3, 8, 8) and batch["skipped"] == {0: {}}


def test_labels_of_tar_shards(tmp_path, capsys):
    members = {"a.jpg": picture(), "a.cls": "3", "b.jpg": picture(), "b.json": '{"label": 1}', "c.jpg": picture(), "c.json": '{"x": 1}',
               "d.cls": "2", "e.jpg": picture(), "e.cls": "-1"}
    write_tar(tmp_path / "0.tar", members)
    assert [label for _, label in common.TarShards(str(tmp_path / "0.tar")).labelled()] == [3, 1]
    shown = capsys.readouterr().out
    assert "2 with no label" in shown and "1 with no image" in shown
    (tmp_path / "2.tar").write_bytes((tmp_path / "0.tar").read_bytes()[:4000])
    assert [label for _, label in common.TarShards(str(tmp_path / "2.tar")).labelled()] == [3]
    assert "shard" in capsys.readouterr().out
    write_tar(tmp_path / "1.tar", {"a.jpg": picture(), "a.txt": "words"})
    with pytest.raises(UserError, match="no image with a label: a number in KEY.cls"):
        list(common.TarShards(str(tmp_path / "1.tar")).labelled())
