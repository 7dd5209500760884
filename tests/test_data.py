"""Data files: tables, tar shards and class folders, from a SPEC to the batches of a Stream.

The tests check which samples are used, which are skipped and counted, and which data raise an
error. Further tests check the order of the samples, and compare decoding and augmentation with PIL
and torchvision.
"""

import csv
import errno
import io
import itertools
import json
import math
import os
import random
import re
import runpy
import shutil
import struct
import tarfile
import warnings
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageDraw, ImageOps
from torch.utils.data import DataLoader
from torchvision.transforms import v2

import common
import eval as evaluation
from common import CaptionTable, Stream, TarShards, UserError, WordPiece, World
from common import WorldStream, open_data
from helpers import (ROOT, SMALL, picture, read_log, train_alone, write_files, write_shards,
                     write_table, write_tar)

WORDS = ["a", "photo", "of", *(f"n{i}" for i in range(200))]
TOKENIZER = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])


def pairs(source):
    """Return {file name: captions} of a CaptionTable."""
    return {Path(source.path(i)).name: source.value(i, None) for i in range(len(source))}


def stream(source, batch_size=4, seed=0, transform=common.train_transform(8), **options):
    """Return a Stream of small images from the source."""
    return Stream(source, TOKENIZER, transform, 8, 16, batch_size, seed, **options)


def captions_in(batch):
    """Return the first word of each caption in a batch."""
    return [TOKENIZER.vocab[row[1]] for row in batch["tokens"].tolist()]


def take(dataset, n, workers=0):
    """Return the first n items of a dataset, read by worker processes if there are workers."""
    if workers:
        dataset = DataLoader(dataset, batch_size=None, num_workers=workers)
    return list(itertools.islice(iter(dataset), n))


def failure(run, *arguments, **settings):
    """Return the message of the UserError that the call raises."""
    try:
        run(*arguments, **settings)
    except UserError as error:
        error.__traceback__ = None  # a traceback would keep a loader's processes alive
        assert "\n" not in str(error)
        return str(error)
    pytest.fail("no UserError")


def skips_of(path):
    """Return (problem, name) of each sample that is left out of a shard."""
    samples = common.read_tars([path], "caption")
    return [(s.problem, s.name) for s in samples if s.problem]


def captions_of_samples(source, n, seed=0, part=0, parts=1, start=0):
    """Return the captions of n samples of one part of a source, from sample `start` on."""
    samples = itertools.islice(source.samples(seed, part, parts, source.start), start, start + n)
    return [sample.value for sample, _ in samples]


@pytest.mark.parametrize("name, text, expected", [
    ("a.csv", 'filepath,title\nx.jpg,"a dog, running"\n', {"x.jpg": ["a dog, running"]}),
    ("a.csv", 'image,caption\nx.jpg,one\nx.jpg,two\ny.jpg,three\n',
     {"x.jpg": ["one", "two"], "y.jpg": ["three"]}),
    ("a.csv", '\ufefffilepath,title\r\nx.jpg,"say ""hi"""\r\ny.jpg,b\r\n',
     {"x.jpg": ['say "hi"'], "y.jpg": ["b"]}),
    ("a.csv", 'n,title,filepath\n1,one,x.jpg\n2,two,y.jpg\n', {"x.jpg": ["one"], "y.jpg": ["two"]}),
    ("a.csv", 'filepath,title\nx.jpg,one\n\ny.jpg,two', {"x.jpg": ["one"], "y.jpg": ["two"]}),
    ("a.csv", 'image,title,url\nx.jpg,one,y\n', {"x.jpg": ["one"]}),
    ("a.tsv", 'filepath\ttitle\nx.jpg\ta, b\n', {"x.jpg": ["a, b"]}),
    ("a.tsv", 'caption\timage\n"Go" said a sign\tx.jpg\na 5" pipe\ty.jpg\n',
     {"x.jpg": ["Go said a sign"], "y.jpg": ['a 5" pipe']}),
    ("captions.txt", 'image,caption\nx.jpg,one\n', {"x.jpg": ["one"]}),
    ("A.CSV", 'image,caption\nx.jpg, héllo 猫 \n', {"x.jpg": ["héllo 猫"]}),
    ("a.csv", 'image,caption\nx.jpg,one\u2028two\n', {"x.jpg": ["one\u2028two"]}),
    ("a.csv:image=url,caption=alt", 'filepath,title,url,alt\nx.jpg,one,y.jpg,two\n', {"y.jpg": ["two"]}),
    ("a.csv:caption=alt", 'filepath,title,url,alt\nx.jpg,one,y.jpg,two\n', {"x.jpg": ["two"]}),
    # a line that is a row by itself ends no quote
    ("a.tsv", 'image\tcaption\nw.jpg\tone\nx.jpg\t6" pipe\ny.jpg\t6" pipe\n',
     {"w.jpg": ["one"], "x.jpg": ['6" pipe'], "y.jpg": ['6" pipe']}),
    # the open quote of the last cell shows only by the end of the line
    ("a.csv", 'image,caption\n5".jpg,"two\nlines"\ny.jpg,one\n', {'5".jpg': ["two\nlines"], "y.jpg": ["one"]}),
    ("a.csv", 'image;caption\nx.jpg;one, two\n', {"x.jpg": ["one, two"]}),  # of Excel
    ("a.json", '[{"image": "x.jpg", "caption": ["a", "b"]}, {"image": "x.jpg", "caption": "c"}]',
     {"x.jpg": ["a", "b", "c"]}),
    ("a.jsonl", '{"title": "a", "filepath": "x.jpg"}\n\n{"filepath": "y.jpg", "title": "b\u2028"}\n',
     {"x.jpg": ["a"], "y.jpg": ["b"]}),
    ("a.jsonl:image=file", '{"file": "x.jpg", "caption": "a", "split": "train"}\n'
     '{"file": "y.jpg", "caption": "b", "split": "val"}', {"x.jpg": ["a"]}),
    ("a.token", '\ufeffx.jpg#0\tA dog .\r\nx.jpg#1\tone\u2028two\r\n\r\ny#1.jpg#0\tB\n',
     {"x.jpg": ["A dog .", "one\u2028two"], "y#1.jpg": ["B"]}),
    ("Flickr8k.token.txt", "x.jpg#0\tA dog .\nx.jpg#1\ttwo\n", {"x.jpg": ["A dog .", "two"]}),
])
def test_a_table_gives_the_captions_of_each_image(tmp_path, name, text, expected):
    (tmp_path / name.partition(":")[0]).write_bytes(text.encode())
    source = open_data(str(tmp_path / name))
    assert pairs(source) == expected and source.skipped == {}
    assert Path(source.path(0)).parent == tmp_path


BROKEN, BICUBIC = common.BROKEN_ROW, v2.InterpolationMode.BICUBIC


def test_rows_without_a_file_name_or_a_caption_are_skipped_and_counted(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text("filepath,title\nx.jpg,one\ny.jpg\nz.jpg,\nw.jpg,  \n,lost\nv.jpg,two\n")
    source = open_data(str(path))
    assert pairs(source) == {"x.jpg": ["one"], "v.jpg": ["two"]}
    assert source.skipped == {BROKEN: [2, f"{path}, line 6"],
                              "empty caption": [2, str(tmp_path / "w.jpg")]}
    write_files(tmp_path, {"x.jpg": picture(), "v.jpg": picture()})
    # the first worker of the first rank alone counts them
    for rank, worker, counted in ((0, 0, source.skipped), (1, 0, {}), (0, 1, {})):
        monkeypatch.setattr(common, "this_worker", lambda positions: (worker, 1 + worker))
        batch, = take(stream(source, 2, rank=rank, world_size=1 + rank), 1)
        assert batch["position"][worker][2] == counted
    assert source.skipped["empty caption"][0] == 2  # a stream does not change the table's counts
    assert set(pairs(open_data(str(path), content=None))) == {"x.jpg", "z.jpg", "w.jpg", "v.jpg"}


@pytest.mark.parametrize("rows, problem", [
    ('x.jpg,"a dog\ny.jpg,a cat\n', "line 4 (unexpected end of data)"),
    ('x.jpg,"a dog\ny.jpg,two\nz.jpg,"six"\nb.jpg,four\n', "line 5 (',' expected after '\"')"),
    ('x.jpg,"a 5" pipe\nb,"' + "x" * 131_073, "line 4 (field larger than field limit (131072))")])
def test_an_open_quote_is_refused_with_its_line(tmp_path, rows, problem):
    path = tmp_path / "a.csv"
    path.write_text("image,caption\na.jpg,b\n" + rows)
    assert failure(open_data, str(path)) == (
        f"{path} has an open quote in a row that ends in {problem}: close the quote, or write it "
        "twice.")


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_caption_in_quotes_may_have_line_breaks(tmp_path, delimiter):
    """Python's csv and pandas write such captions. A broken row is counted by its line."""
    captions = ["a dog", 'Red car,\tsaid "he"\nfor sale, "cheap"\r\n\n3 doors', "x\n" * 90,
                "a\ncat"]
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([["image", "caption"], *((f"{i}.jpg", x) for i, x in enumerate(captions))])
        writer.writerows([["x.jpg"], [], ["x.jpg", "a", "dog"], ["a.jpg", "after"]])
    source = open_data(str(tmp_path / "a.csv"))
    written = {f"{i}.jpg": [x.strip()] for i, x in enumerate(captions)}
    assert pairs(source) == written | {"a.jpg": ["after"]}
    line = 4 + sum(1 + x.count("\n") for x in captions)
    assert source.skipped == {BROKEN: [2, f"{tmp_path}/a.csv, line {line}"]}


def test_captions_for_the_vocabulary_are_spread_over_the_data(tmp_path):
    """Three shards have 4, 6 and 7 captions. Few captions come from shards that are far apart."""
    table = CaptionTable([(f"{i // 5}.jpg", f"n{i}") for i in range(50)], "x")
    assert table.sample_captions(5) == ["n0", "n10", "n20", "n30", "n40"]
    assert table.sample_captions(50) == table.sample_captions(99) == [f"n{i}" for i in range(50)]
    for shard, n in enumerate((4, 6, 7)):
        members = {f"{i}.{end}": text for i in range(n)
                   for end, text in (("jpg", picture()), ("txt", str(10 * shard + i)))}
        write_tar(tmp_path / f"{shard}.tar", members)
    source, most = open_data(f"{tmp_path}/{{0..2}}.tar"), "0 1 2 3 10 11 12 13 14 15 20 21 22 23 24"
    for limit, expected in ((1, "0"), (2, "0 10"), (3, "0 10 20"), (6, "0 1 10 11 20 21"),
                            (15, most), (99, f"{most} 25 26")):
        assert source.sample_captions(limit) == expected.split()
    write_tar(tmp_path / "3.tar", {"0.jpg": picture(), "0.txt": "30"})
    assert open_data(f"{tmp_path}/*.tar").sample_captions(2) == ["0", "20"]


@pytest.mark.parametrize("workers", [0, 3])
def test_a_batch_is_joined_from_small_parts(tmp_path, monkeypatch, workers):
    """10 samples are parts of 3, 3 and 4 samples from workers in turn. Each sends 10 of 30.
    Captions are padded alike. Whatever the batch is, a message has at most 64 images."""
    whole = Stream(World(), None, None, None, None, 2048, 0)
    assert (whole.part, whole.parts) == (64, 32)
    monkeypatch.setattr(Stream, "part", 4)
    rows = [f"{i}.jpg,n{i}{' n7' * (i % 5)}" for i in range(30)]
    write_files(tmp_path, {f"{i}.jpg": picture() for i in range(30)}
                | {"a.csv": "\n".join(["filepath,title", *rows])})
    loader, captions = stream(open_data(f"{tmp_path}/a.csv"), 10, seed=5), []
    parts = take(loader, 9, workers)
    sizes = [len(part["images"]) for part in parts]
    assert sizes == [3, 3, 4, 3, 4, 3, 4, 3, 3] and loader.parts == 3
    for number in range(3):
        some = parts[3 * number : 3 * number + 3]
        batch = loader.join(some, number)
        assert torch.equal(batch["images"], torch.cat([part["images"] for part in some]))
        texts = [text for part in some for text in part["captions"]]
        for found, expected in zip((batch["tokens"], batch["mask"]), TOKENIZER.batch(texts, 16)):
            assert torch.equal(found, expected)
        captions += texts
        assert batch["captions"] == texts
        assert batch["position"] == {k: v for part in some for k, v in part["position"].items()}
    assert sorted(captions) == sorted(row.split(",")[1] for row in rows)


@pytest.mark.parametrize("cell, texts", [
    ("['a cat', 'a dog']", ["a cat", "a dog"]), ('["a", "b"]', ["a", "b"]),
    ("['a cat' 'a dog']", ["['a cat' 'a dog']"]), ("[1, 2]", ["[1, 2]"]), ("('a', 'b')", ["a", "b"]),
    (["a dog", " a cat"], ["a dog", "a cat"]), ("(nan)", ["(nan)"]), (math.nan, [""]), (None, [""]),
    ("nan", ["nan"]), (["a dog", None], ["a dog", ""]), ([], [""]), (7, [""]), ("a\u200b", ["a\u200b"]),
    *((text, [""]) for text in ("", "  ", "\u200b", "\ufeff \x01", "\u00ad\u200e"))])
def test_a_cell_with_a_list_of_texts_has_several_captions(cell, texts):
    """Python would join the two texts of numpy's form to one. What is no text, or has no printed
    character, is no caption."""
    assert common.clean_captions(cell) == texts


# an image, a caption of it, its split
ROWS_OF_SPLITS = [("x.jpg", '["a dog", "it\\u0027s a cat"]', "train"), ("./x.jpg", " c ", "train"),
                  ("d//y.jpg", "\u200b", "restval"), ("d/./y.jpg", "['e', \"e's\"]", "restval"),
                  ("x.jpg", "[sic] d", "train"), ("z.jpg", "of val", "val")]


def write_rows(directory, form):
    """Write ROWS_OF_SPLITS as a file of this format and return its SPEC. Formats without splits
    have no row of val."""
    rows, path = [row for row in ROWS_OF_SPLITS if row[2] != "val"], directory / f"a.{form}"
    if form in ("csv", "tsv"):
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, delimiter="," if form == "csv" else "\t")
            writer.writerows([("image", "caption", "split"), *ROWS_OF_SPLITS])
    elif form == "token":
        path.write_text("".join(f"{name}#0\t{text}\n" for name, text, _ in rows))
    elif form == "karpathy.json":
        path.write_text(json.dumps({"images": [
            {"filename": os.path.basename(name), "filepath": os.path.dirname(name),
             "split": split, "sentences": [{"raw": text}]} for name, text, split in ROWS_OF_SPLITS]}))
    else:
        path.write_text(json.dumps({
            "images": [{"id": i, "file_name": name} for i, (name, *_) in enumerate(rows)],
            "annotations": [{"image_id": i, "caption": row[1]} for i, row in enumerate(rows)]}))
    return str(path)


@pytest.mark.parametrize("form", ["csv", "tsv", "token", "coco.json", "karpathy.json"])
def test_what_holds_for_rows_holds_in_every_format(tmp_path, form):
    """A cell that is a list has several captions, two spellings of a path are one image, a caption
    without a letter is counted, and the training takes its split."""
    spec = write_rows(tmp_path, form)
    source = open_data(spec)
    expected = {"x.jpg": ["a dog", "it's a cat", "c", "[sic] d"], "y.jpg": ["e", "e's"]}
    assert pairs(source) == expected
    assert [source.path(i) for i in (0, 1)] == [f"{tmp_path}/x.jpg", f"{tmp_path}/d/y.jpg"]
    assert source.skipped == {"empty caption": [1, f"{tmp_path}/d/y.jpg"]}
    if form in ("token", "coco.json"):
        assert "has no setting 'split'" in failure(open_data, f"{spec}:split=val")
        return
    assert pairs(open_data(f"{spec}:split=val")) == pairs(open_data(spec, split="val")) == {
        "z.jpg": ["of val"]}
    message = failure(open_data, f"{spec}:split=test")
    splits = "(splits: :split=restval, :split=train, :split=val; left out: "
    assert f"{splits}nothing)." in message or f"{splits}1 x empty caption" in message


def test_an_empty_split_of_a_row_is_train(tmp_path):
    """pandas writes an empty cell as null into JSON. Kaggle's table of Flickr30k has "| "."""
    rows = [dict(image=f"{name}.jpg", caption="a dog", split=split)
            for name, split in zip("vwxyz", ("", "", " train", None, "test"))]
    del rows[0]["split"]  # JSON may leave it out
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_text("image| caption| Split\n" + "".join(
        f"{row['image']}| {row['caption']}| {row.get('split') or ''}\n" for row in rows))
    for name in ("a.json", "a.csv"):
        for split, images in ("train", ["v.jpg", "w.jpg", "x.jpg", "y.jpg"]), ("test", ["z.jpg"]):
            found = pairs(open_data(f"{tmp_path / name}:split={split}"))
            assert found == dict.fromkeys(images, ["a dog"])


def test_coco_captions_find_their_images_by_ids_below_image_root(tmp_path):
    """An id that two rows share is refused unless they are equal."""
    path = tmp_path / "captions.json"
    captions = [(3, "one"), (7, "two\n"), (3, "three"), (9, "of no image"), (7, None)]
    images = [{"id": 7, "file_name": "/abs/b.jpg"}, {"id": 3, "file_name": "a.jpg"}] * 2
    data = {"images": images, "annotations": [{"image_id": i, "caption": x} for i, x in captions]}
    path.write_text(json.dumps(data))
    (tmp_path / "images").mkdir()
    source = open_data(str(path), image_root=str(tmp_path / "images"))
    assert pairs(source) == {"a.jpg": ["one", "three"], "b.jpg": ["two"]}
    assert [source.path(i) for i in (0, 1)] == [str(tmp_path / "images/a.jpg"), "/abs/b.jpg"]
    assert source.skipped == {"caption without image": [1, f"{path}, image_id 9"],
                              "empty caption": [1, "/abs/b.jpg"]}
    images[1] = images[1] | {"file_name": "c.jpg"}
    path.write_text(json.dumps(data))
    assert f"{path} has two images with the id 3" in failure(open_data, str(path))


def test_a_table_stores_rows_in_numpy_buffers_and_names_that_are_not_utf8(tmp_path):
    """Worker processes share numpy's buffers. Each worker would copy lists and dicts."""
    texts = ["a", "héllo 猫", "lone \ud83d surrogate", "z" * 1000]
    paths = ["a.jpg", os.fsdecode(b"\xff.jpg"), "\ud83d.jpg", "x" * 5000 + "/猫.jpg"]
    source = CaptionTable(zip(paths, texts), "x", tmp_path)
    assert source.captions.tolist() == [*texts[:2], "lone ? surrogate", texts[3]]
    assert [source.path(i) for i in range(4)] == [str(tmp_path / path) for path in paths]
    (tmp_path / os.fsdecode(b"\xff.jpg")).write_bytes(picture())
    assert take(stream(CaptionTable([(paths[1], "n1")], "x", tmp_path)), 1)[0]["position"][0][2] == {}
    source = CaptionTable([(f"{i}.jpg", f"n{i}") for i in range(999)] + [(paths[3], "a")], "x")
    assert source.paths.nbytes < 20_000
    assert not any(isinstance(v, (list, dict)) and len(v) >= 50 for v in vars(source).values())


def test_a_sample_of_a_shard_has_the_image_and_the_captions_of_its_key(tmp_path):
    jpg, long = picture(), "x" * 200
    path = write_tar(tmp_path / "a.tar", {
        "001.jpg": jpg, "001.txt": "one\n", "001.json": '{"caption": "not this"}',
        "002.json": "{", "002.txt": " two ", "002.PNG": jpg,
        "003.jpg": jpg, "003.json": '{"caption": "not this"}', "004.jpg": jpg, "004.txt": " \u200b",
        "005.txt": "no image",
        "a/008.jpg": jpg, "a/008.txt": "eight", "b.c/008.jpg": jpg, "b.c/008.txt": '["b", "c"]',
        "009.jpg": jpg, "009.txt": b"caf\xe9", f"{long}.jpg": jpg,
        f"{long}.txt": "long\u2028name", "010.jpg": jpg, "010.txt": " ten\r\n\n10\n"})
    samples = [s[:2] for s in common.read_tars([path], "caption") if not s.problem]
    texts = [["one"], ["two"], ["eight"], ["b", "c"], ["long\u2028name"], ["ten", "10"]]
    assert samples == [(jpg, text) for text in texts]
    assert TarShards(path).sample_captions(99) == sum(texts, [])
    assert skips_of(path) == [(common.NO_CAPTION, f"{path}:003"), ("empty caption", f"{path}:004"),
                              (common.NO_IMAGE, f"{path}:005"),
                              ("caption that is not UTF-8", f"{path}:009")]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("odd", [
    dict(), dict(name="n" * 90 + "caf\xe9"), dict(name="long/" * 18 + "1.jpg"),
    dict(name="long/" * 40 + "1.jpg"), dict(type=tarfile.DIRTYPE), dict(type=tarfile.SYMTYPE),
    dict(mtime=1.5, name="\u732b.jpg"), dict(pax_headers={"path": "another"}, mtime=2.5)])
def test_the_files_of_a_tar_are_read_in_order_from_any_of_them_on(tmp_path, format, odd):
    """Tars that are joined are all read, whatever zeros lie between them."""
    if format == tarfile.USTAR_FORMAT and len(odd.get("name", "")) > 200:
        return  # the format has no names of this length
    with tarfile.open(tmp_path / "a.tar", "w", format=format) as tar:
        for i in range(6):
            member = tarfile.TarInfo(f"{i}.txt")
            vars_of = odd if i in (2, 4) else {}
            for name, value in vars_of.items():
                setattr(member, name, value)
            member.size = 600 * i * member.isfile()
            tar.addfile(member, io.BytesIO(b"%d" % i * 600 * i))
    data = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(data + data + bytes(512 * 37) + data)
    with tarfile.open(tmp_path / "a.tar", ignore_zeros=True) as tar:
        expected = [(member.offset, member.name, tar.extractfile(member).read())
                    for member in tar if member.isfile()]
    with open(tmp_path / "a.tar", "rb") as file:
        for k, (start, *_) in enumerate(expected):
            assert [(member.offset, member.name, data)
                    for member, data in common.read_files(file, start)] == expected[k:]


@pytest.mark.parametrize("pattern, names", [
    ("set[12]/{0..1}.tar", "set[12]/0 set[12]/1"), ("set[12]/*.tar", "set[12]/0 set[12]/1"),
    ("set[12]/[1-9].tar", "set[12]/1"), ("set[1]/*.tar", "set1/0 set1/2 set1/10"),
    ("set?/1*.tar", "set1/10"), ("*/0.tar", "set1/0 set[12]/0"), ("[x].tar", "[x]"),
    ("set1/1{0..0}.tar", "set1/10")])  # set.txt is no directory
def test_what_exists_is_no_pattern_and_numbers_are_sorted_as_numbers(tmp_path, pattern, names):
    for name in ("set[12]/0", "set[12]/1", "set1/10", "set1/2", "set1/0", "set1/._0", "[x]"):
        write_files(tmp_path, {f"{name}.tar": "", "set.txt": ""})
    braces = common.expand_braces("{1..0}/{09..10}.tar")
    assert braces == ["0/09.tar", "0/10.tar", "1/09.tar", "1/10.tar"]
    source = TarShards(f"{tmp_path}/{pattern}")
    assert source.paths == [f"{tmp_path}/{name}.tar" for name in names.split()]


@pytest.mark.parametrize("content", [None, "label"])
def test_a_directory_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch, content):
    write_files(tmp_path, {f"{name}/0.jpg": picture() for name in "abc"})
    scandir, bad = os.scandir, f"{tmp_path}/b"

    def failing(path):
        if path == bad:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    message = failure(open_data, str(tmp_path), content=content)
    assert message == f"Cannot read {bad}: Permission denied."


def identity(files, texts=("x", "y"), root="/data"):
    """Return the fingerprint and the annotations of a table of two images."""
    table = CaptionTable([*zip(files, texts)], "a.csv", root)
    return table.fingerprint, table.annotations


def test_data_are_identified_by_paths_and_ranks_also_compare_captions_and_labels(tmp_path):
    """A run continues with data that moved, or whose captions were mended: its positions and boxes
    are those of the last two parts of each path. Ranks compare whole paths below the root."""
    fingerprint, annotations = identity(["a/0.jpg", "b/0.jpg"])
    assert identity(["a/0.jpg", "b/0.jpg"], root="/moved/") == (fingerprint, annotations)
    for first, texts in (("a/0.jpg", ("x", "z")), ("c/a/0.jpg", ("x", "y"))):
        found = identity([first, "b/0.jpg"], texts)
        assert found[0] == fingerprint and found[1] != annotations
    for files in ["c/0.jpg", "b/0.jpg"], ["b/0.jpg", "a/0.jpg"]:
        assert identity(files)[0] != fingerprint
    write_files(tmp_path, {f"{name}/0.jpg": picture() for name in "ab"})
    old = open_data(str(tmp_path), content=None)
    (tmp_path / "0").mkdir()                                 # shifts the labels
    shifted = open_data(str(tmp_path), content=None)
    assert shifted.fingerprint == old.fingerprint and shifted.annotations != old.annotations
    assert shifted.only([1]).annotations != old.only([1]).annotations
    assert World().fingerprint == World().fingerprint != World(objects=2).fingerprint


def test_shards_are_identified_by_their_names_sizes_and_first_headers(tmp_path):
    """A run that resumes on other shards begins them anew, as its positions belong to others."""
    write_files(tmp_path, {f"{name}/0.tar": {f"{name}.jpg": bytes(99)} for name in "ab"})
    a, b = (open_data(f"{tmp_path}/{name}/0.tar") for name in "ab")
    assert os.path.getsize(a.paths[0]) == os.path.getsize(b.paths[0])
    assert a.fingerprint != b.fingerprint
    found = [open_data(write_shards(tmp_path, [3, 2])).fingerprint]
    shutil.copytree(tmp_path, tmp_path / "moved")
    found.append(open_data(f"{tmp_path}/moved/*.tar").fingerprint)
    found.append(open_data(write_shards(tmp_path, [3, 30])).fingerprint)
    (tmp_path / "001.tar").rename(tmp_path / "002.tar")
    found.append(open_data(f"{tmp_path}/*.tar").fingerprint)
    assert found[0] == found[1] and len(set(found)) == 3
    assert found[0].startswith("2 shards, ")


def test_a_rank_knows_the_shards_of_its_own_machine(tmp_path, monkeypatch):
    """Rank 2 is the first one of the second of two machines, which have two ranks and three. It
    looks at the shards, and tells ranks 3 and 4."""
    pattern = write_shards(tmp_path, [1, 2, 3, 4])
    alone = TarShards(pattern)
    looks, seen = common.look_at_shards(alone.paths, False), 4 * ["No such file"]
    for rank in (2, 3, 4):
        own = looks if rank == 2 else []
        monkeypatch.setattr(common, "this_rank", lambda: (rank, 5))
        monkeypatch.setattr(common, "local_rank", lambda: (rank - 2, 3))
        monkeypatch.setattr(common, "gather_objects", lambda mine: (
            [seen, [], looks, [], []] if mine == own else None))
        assert TarShards(pattern, True).fingerprint == alone.fingerprint
    looks = [*looks[:2], "No such file", looks[3]]
    with pytest.raises(UserError, match=r"1 of the 4 .* first .*/002.tar \(No such file\): name"):
        TarShards(pattern, True)


def test_every_image_of_a_shard_is_used_or_counted(tmp_path):
    """A key ends at the first dot of a name, so several images may have one key."""
    def read(*names):
        """Write a shard with these members -> the captions of its samples, the reasons of skips."""
        path = write_tar(tmp_path / "a.tar", [(name, f"n{i}") for i, name in enumerate(names)])
        samples = list(common.read_tars([path], "caption"))
        used = [sample.value for sample in samples if not sample.problem]
        return used, [skipped[0] for skipped in skips_of(path)]

    assert read("a.jpg", "a.txt", "a.jpg", "a.txt") == ([["n1"], ["n3"]], [])
    assert read("a.jpg", "a.txt", "a.2.jpg", "a.2.txt") == ([["n1"]], [common.UNUSED])
    assert read("a.jpg", "a.png", "a.txt") == ([["n2"]], [common.UNUSED])
    assert read("v1.0.jpg", "v1.0.txt", "v1.1.jpg", "v1.1.txt") == ([], [common.UNUSED] * 2)
    assert read("./._a.jpg", "./a.jpg", "./._a.txt", "./a.txt") == ([["n3"]], [])
    assert read("a.jpg", "b.jpg", "a.txt", "b.txt") == (
        [], [common.NO_CAPTION] * 2 + [common.NO_IMAGE] * 2)


def test_a_broken_shard_gives_its_complete_samples_and_is_counted_once(tmp_path):
    write_shards(tmp_path, [3])
    data, bad, counts = (tmp_path / "000.tar").read_bytes(), tmp_path / "bad.tar", []
    content = len(data.rstrip(b"\0"))                       # the end of the last caption
    whole = content // 512 * 512 + 512  # without the two blocks of zeros at the end
    for cut in sorted([*range(1, whole, 97), content, whole]):
        bad.write_bytes(data[:cut])
        reasons = [reason for reason, _ in skips_of(bad)]
        assert reasons.count(common.BAD_SHARD) == 1, cut
        counts.append(len(list(common.read_tars([bad], "caption"))) - len(reasons))
        assert counts[-1] <= (cut + 511) * 3 // whole  # a last block need not be padded
        assert cut < content or counts[-1] == 3
    assert counts == sorted(counts) and set(counts) == {0, 1, 2, 3}
    bad.write_bytes(data[: whole // 3] + b"x" * 512 + data[whole // 3 + 512 :])  # a header
    assert common.BAD_SHARD in [reason for reason, _ in skips_of(bad)]
    bad.write_bytes(data + b"garbage" * 99)
    assert [reason for reason, _ in skips_of(bad)] == [common.BAD_SHARD]
    (reason, where), = skips_of(tmp_path / "gone.tar")
    assert reason == common.BAD_SHARD and "No such file" in where
    bad.write_bytes(data)
    assert skips_of(bad) == []
    with open(bad, "rb", buffering=0) as file:
        rows = common.read_files(file, 0)
        next(rows)
        os.truncate(bad, 2000)                               # while the shard is open
        with pytest.raises((EOFError, tarfile.TarError)):
            next(rows)


def test_the_end_of_a_run_names_each_reason_for_skipping_once(tmp_path, monkeypatch, capsys):
    """The log has the counts of one rank. At the end a second one, which skipped as many, is made
    up."""
    shards = write_shards(tmp_path, [4] * 8, broken=[3, 9])
    for i in (2, 5):
        (tmp_path / f"{i:03}.tar").write_bytes(b"")
    monkeypatch.setattr(common, "gather_objects",
                        lambda value: [value] * (1 + (isinstance(value, dict) and
                                                      common.BAD_SHARD in value)))
    train_alone([*SMALL["sparc"], "--image-size", 16, "--data", shards, "--workers", 2,
                 "--steps", 6, "--log-every", 10, "--out", tmp_path / "run"])
    line, = [x for x in capsys.readouterr().out.splitlines() if x.startswith("skipped ")]
    counts = read_log(tmp_path / "run")[-1]["skipped"]
    assert counts.keys() == {"unreadable image", common.BAD_SHARD}
    for reason, count in counts.items():
        assert line.count(f" {2 * count} x {reason}, the last {tmp_path}/00") == 1


def test_labels_of_shards_come_from_cls_or_json(tmp_path, capsys):
    jpg = picture()
    path = write_tar(tmp_path / "0.tar", {
        "a.jpg": jpg, "a.cls": "3", "b.jpg": jpg, "b.json": '{"label": 1}',
        "c.jpg": jpg, "c.json": '{"x": 1}', "d.cls": "2", "e.jpg": jpg, "e.cls": "-1",
        "f.jpg": jpg, "f.json": '{"label": 0}', "g.jpg": jpg, "g.cls": "9" * 5000})
    assert [label for _, label in TarShards(path).each("label")] == [3, 1, 0]
    output = capsys.readouterr().out
    assert "3 x no label" in output and "1 x no image" in output
    Path(path).write_bytes(Path(path).read_bytes()[:4000])
    assert [label for _, label in TarShards(path).each("label")][:1] == [3]
    assert "shard" in capsys.readouterr().out
    shards = TarShards(write_tar(tmp_path / "1.tar", {"a.jpg": jpg, "a.txt": "words"}))
    message = failure(list, shards.each("label"))
    assert re.search("no image that can be used .*1 x no label", message)


def test_a_label_of_no_class_is_left_out_with_its_key_and_a_name_is_a_label(tmp_path, capsys):
    labels = "2 dog bird 3 cat -1 0 cow".split()
    path = write_tar(tmp_path / "0.tar", {f"{i}.{end}": data for i, text in enumerate(labels)
                                          for end, data in (("jpg", picture()), ("cls", text))})
    (tmp_path / "names").write_text("cat\ndog\nbird\n")
    flags = [*SMALL["classifier"], "--data", path, "--classes", tmp_path / "names", "--workers", 0]
    train_alone([*flags, "--batch", 4, "--steps", 3, "--out", tmp_path / "run"])
    assert f"{common.BAD_LABEL}, the last {path}:3" in capsys.readouterr().out
    assert set(read_log(tmp_path / "run")[-1]["skipped"]) == {common.BAD_LABEL, "no label"}
    source = TarShards(path)
    source.content, source.classes = "label", ["cat", "dog", "bird"]
    found = {sample.name: sample.value for sample, _ in itertools.islice(source.samples(0, 0, 1), 8)
             if not sample.problem}
    assert found == {f"{path}:{i}": label for i, label in ((0, 2), (1, 1), (2, 2), (4, 0), (6, 0))}
    # an evaluation ends at once: its figures would be about other classes
    message = failure(evaluation.main, [str(tmp_path / "run"), "--data", path, "--device", "cpu"])
    assert "has wrong labels (left out: 1 x label above" in message


def tones(dtype, scale):
    """Return an image from black on the left to white on the right."""
    return Image.fromarray(np.tile(np.linspace(0, scale, 256), (8, 1)).astype(dtype))


def drawing(mode):
    """Return a black ring on a transparent ground.

    The hidden pixels of the ground are black, too.
    """
    alpha = Image.new("L", (32, 32), 0)
    ImageDraw.Draw(alpha).ellipse((6, 6, 26, 26), outline=255, width=4)
    image = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    image.putalpha(alpha)
    return image.quantize(method=2) if mode == "P" else image.convert(mode)


# {name: (image, format of its file)}
KINDS = {**{f"16 bits {kind}": (tones(np.uint16, 65535), kind) for kind in ("PNG", "TIFF", "PPM")},
         "32 bits": (tones(np.int32, 255), "TIFF"),
         "32 bits, bright": (tones(np.int32, 65535), "TIFF"),
         "floats": (tones(np.float32, 1), "TIFF"), "large floats": (tones(np.float32, 255), "TIFF"),
         **{f"{mode} {format}": (drawing(mode), format) for mode, format in (
             ("RGBA", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("RGBA", "GIF"), ("RGBA", "WEBP"))}}
# {name: (image, format of its file, its colour)}; CMYK's zeros are no ink, half opacity is over white
PLAIN = {f"{mode} {format} plain": (Image.new(mode, (8, 8), value), format, colour)
         for mode, format, value, colour in (
             ("RGB", "BMP", (10, 200, 30), (10, 200, 30)), ("L", "JPEG", 77, (77, 77, 77)),
             ("CMYK", "JPEG", (0, 0, 0, 0), (255, 255, 255)),
             ("RGBA", "PNG", (200, 100, 50, 128), (227, 177, 152)))}


@pytest.mark.parametrize("kind", KINDS | PLAIN)
def test_a_path_its_bytes_and_a_pil_image_give_the_same_pixels(tmp_path, kind):
    """Images with 16 or 32 bits keep all their tones. Transparent pixels become white."""
    image, format, *colour = (KINDS | PLAIN)[kind]
    image.save(tmp_path / "x", format, lossless=True)
    data = (tmp_path / "x").read_bytes()
    with Image.open(tmp_path / "x") as opened:
        pictures = [np.asarray(common.open_image(x)) for x in (str(tmp_path / "x"), data, opened)]
    assert np.array_equal(pictures[0], pictures[1]) and np.array_equal(pictures[0], pictures[2])
    grey = pictures[0].mean(2)
    if colour:
        assert tuple(pictures[1][0, 0]) == colour[0]
    elif grey.shape == (8, 256):
        most = 0 if kind.startswith("16") else 1  # 16 bits become 8 by their high byte
        assert np.abs(grey - np.arange(256)).max() <= most
    else:
        assert grey[16, 16] == grey[0, 0] == 255 and grey[16, 7] == 0


@pytest.mark.parametrize("orientation", range(10))
def test_an_image_is_turned_as_pil_turns_it(orientation):
    """Orientation 6 belongs to a camera that was turned by 90 degrees. A tag of another type is
    damage: PIL could not write it again."""
    image = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3))
    exif = image.getexif()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.ResolutionUnit] = orientation, 2
    turned = np.asarray(ImageOps.exif_transpose(image))
    assert np.array_equal(np.asarray(common.open_image(image)), turned)
    file = io.BytesIO()
    image.resize((80, 40), 0).save(file, "JPEG", exif=exif)
    short = bytes.fromhex("0128 0003")                       # the tag's number, then its type
    damaged = file.getvalue().replace(short, bytes.fromhex("0128 0007"))
    assert damaged != file.getvalue()
    with Image.open(file) as opened:  # the caller's image keeps its tag
        for _ in range(2):
            assert common.open_image(opened).size == common.open_image(file.getvalue()).size
    for size in (None, 10):                                  # drafts are turned, too
        found = common.open_image(damaged, size)
        assert np.array_equal(found, common.open_image(file.getvalue(), size))
        assert (found.height > found.width) == (turned.shape[0] > turned.shape[1])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_is_turned_once(orientation):
    """Pillow turns a TIFF while it decodes the file."""
    image, exif = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3)), Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    found = []
    for form in "TIFF", "PNG":
        image.save(file := io.BytesIO(), form, exif=exif)
        found.append(np.asarray(common.open_image(file.getvalue())))
    assert np.array_equal(*found) and found[0].shape == ((2, 4, 3), (4, 2, 3))[orientation > 4]


@pytest.mark.parametrize("format", ["PNG", "WEBP", "JPEG"])
def test_a_picture_with_a_damaged_exif_block_is_read_without_a_warning(format):
    """Thousands of photos would print thousands of lines."""
    short = b"Exif\0\0II*\0\x08\0\0\0\1\0" + struct.pack("<HHII", 0x9000, 7, 4000, 500)
    for exif in (b"Exif\0\0garbage", short):
        file, density = io.BytesIO(), {"dpi": (72, 72)} if format == "JPEG" else {}
        Image.new("RGB", (8, 8), "red").save(file, format, exif=exif, **density)
        with warnings.catch_warnings(record=True) as printed:
            module = runpy.run_path(str(ROOT / "common.py"))  # pytest removed the module's filter
            assert module["open_image"](file.getvalue()).getpixel((0, 0))[0] > 250
        assert printed == []


@pytest.mark.parametrize("error", [RuntimeError, ZeroDivisionError])
def test_a_damaged_image_is_counted_whatever_error_pil_raises(tmp_path, monkeypatch, capsys, error):
    spec, to_rgb = write_table(tmp_path, 4), common.to_rgb

    def fail(image):
        if image.info.get("comment") == b"damaged":
            raise error("decoding failed")
        return to_rgb(image)

    Image.new("RGB", (8, 8)).save(tmp_path / "2.jpg", "JPEG", comment=b"damaged")
    monkeypatch.setattr(common, "to_rgb", fail)
    batch = take(stream(open_data(spec), 3), 2)[1]
    example = f"{tmp_path}/2.jpg ({error.__name__}: decoding failed)"
    assert batch["position"][0][2]["unreadable image"][1] == example
    files = [(f"{tmp_path}/{i}.jpg", i) for i in range(4)]
    assert [i for _, i in evaluation.read_images(files, common.open_image)] == [0, 1, 3]
    assert (f"skipped 1 of 4 images that cannot be read: 1 x unreadable image, the last {example}"
            in capsys.readouterr().out)


@pytest.mark.parametrize("size", [(1, 20_000), (20_000, 1), (3, 5000), (16, 400)])
def test_a_thin_image_needs_little_memory_and_keeps_its_middle(size):
    """Resized without a crop, a row of 20,000 pixels would need 6 GB."""
    x = np.linspace(0, 255, max(size)).astype(np.uint8)
    x = np.tile(x, (min(size), 1)) if size[0] > size[1] else np.tile(x[:, None], (1, size[0]))
    image, transform = Image.fromarray(x).convert("RGB"), common.eval_transform(16)
    seen, resize = [], transform.transforms[1]
    transform.transforms[1] = lambda x: seen.append(x.size) or resize(x)
    pixels = transform(image) / 255
    assert max(seen[0]) <= 8 * min(size) and (pixels - 0.5).abs().max() < 0.05


@pytest.mark.parametrize("size", [(40, 30), (8, 64), (64, 8), (1, 1)])
def test_evaluation_images_have_the_pixels_of_openclips_transform(size):
    image = Image.open(io.BytesIO(picture(*size))).convert("RGB")
    reference = v2.Compose([v2.Resize(16, BICUBIC), v2.CenterCrop(16), v2.PILToTensor()])
    assert torch.equal(common.eval_transform(16)(image), reference(image))


@pytest.mark.parametrize("parts", [1, 3, 5])
def test_the_order_of_a_table_equals_a_literal_loop(parts):
    """Each image belongs to one part. Epoch e shows the caption number (e + i) of image i."""
    source = CaptionTable([(f"{i}.jpg", f"{i} {k}") for i in range(17) for k in range(3)], "x")
    for part in range(parts):
        expected = []
        for epoch in range(3):
            order = np.random.default_rng((7, epoch)).permutation(17)[part::parts]
            expected += [(f"{i}.jpg", f"{i} {(epoch + i) % 3}") for i in order]
        samples = list(itertools.islice(source.samples(7, part, parts, 0), len(expected)))
        assert [(path, caption) for (path, caption, *_), _ in samples] == expected
        for start in (1, len(order), len(order) + 1):  # a resumed run goes on where it stopped
            rest = itertools.islice(source.samples(7, part, parts, start), 3)
            assert [*rest] == samples[start : start + 3]


def test_ranks_and_workers_draw_different_scenes(tmp_path):
    """Nor are two crops of an image equal. torch's own generator draws nothing for them."""
    batches = []
    for rank in range(2):
        batches += take(WorldStream(World(size=16), TOKENIZER, None, 0, 16, 4, 0, rank, 2), 2, 2)
    for a, b in itertools.combinations(batches, 2):
        assert not torch.equal(a["images"], b["images"])
    before = torch.get_rng_state()
    crops = stream(open_data(write_table(tmp_path, 1)), transform=common.train_transform(8, 0.5))
    assert len({image.numpy().tobytes() for image in take(crops, 1)[0]["images"]}) > 1
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("ranks, workers", [(1, 0), (3, 0), (2, 2)])
def test_ranks_and_workers_read_every_sample_of_the_shards_once(tmp_path, ranks, workers):
    sizes = [6, 2, 4, 4, 3, 5, 1, 7]
    source = open_data(write_shards(tmp_path, sizes, broken=(4, 9)))
    shown = []
    for rank in range(ranks):
        for batch in take(stream(source, 1, rank=rank, world_size=ranks), 60 // ranks, workers):
            (_, (epoch, *_), _), = batch["position"].values()
            if epoch == 0:
                shown += captions_in(batch)
    assert sorted(shown) == sorted({f"n{i}" for i in range(32)} - {"n4", "n9"})


def small_buffer(monkeypatch, span, step=4000):
    """Make the buffer of shards small. A sample of write_shards counts about 1,800 bytes."""
    monkeypatch.setattr(TarShards, "span", span)
    monkeypatch.setattr(TarShards, "step", step)


@pytest.mark.parametrize("parts", [1, 3])
def test_the_order_of_shards_equals_a_literal_loop(tmp_path, monkeypatch, parts):
    """The shards of two sources are joined and dealt to the parts.

    Four shards of a part are open, and give a sample in turn. A sample waits until a random part of
    the next 40,000 bytes has been read. A new generator draws every 4,000 bytes.
    """
    small_buffer(monkeypatch, 40_000)
    write_shards(tmp_path, [5] * 10)
    source, size = open_data(f"{tmp_path}/{{000..006}}.tar::{tmp_path}/{{007..009}}.tar"), 1000
    size += len(picture())
    for part in range(parts):
        expected = []
        for epoch in range(2):
            dealt = np.random.default_rng((7, epoch)).permutation(10)[part::parts].tolist()
            waiting, turn, names = [[5 * s + i for i in range(5)] for s in dealt], [], []
            while turn or waiting:
                while len(turn) < 4 and waiting:
                    turn.append(waiting.pop(0))
                shard = turn.pop(0)
                names.append(f"n{shard.pop(0)}")
                turn += [shard] if shard else []
            left, last = [], -4000
            for n, name in enumerate(names):
                if size * n >= last + 4000:
                    last, draw = size * n, random.Random(common.mix_seed(7, epoch, part, n))
                left.append((size * n + draw.randrange(40_000), n, name))
            expected += [name for *_, name in sorted(left)]
        assert captions_of_samples(source, len(expected), 7, part, parts) == expected


def test_shards_resume_at_every_sample_and_read_little_again(tmp_path, monkeypatch):
    """From each position of two epochs the same samples and positions follow. A shard that is cut
    off and an image that no sample uses are counted once, too."""
    small_buffer(monkeypatch, 12_000)
    source = open_data(write_shards(tmp_path, [9] * 6, uncaptioned=(4, 20)))
    (tmp_path / "003.tar").write_bytes(Path(tmp_path, "003.tar").read_bytes()[:9000])
    members = {"a.jpg": picture(), "a.2.jpg": picture(), "a.txt": "n99", "b.jpg": picture(),
               "b.txt": "n98"}
    write_tar(tmp_path / "005.tar", members)
    whole = list(itertools.islice(source.samples(3, 0, 1), 110))
    read, counts = common.read_sample, []
    monkeypatch.setattr(common, "read_sample", lambda *x: counts.append(x) or read(*x))
    for k, (_, position) in enumerate(whole[:90]):
        counts.clear()
        assert list(itertools.islice(source.samples(3, 0, 1, position), 2)) == whole[k + 1 : k + 3]
        assert len(counts) <= (12_000 + 4000) // 1500 + 12_000 // 1500
    # of a whole shard 9 samples, of the cut one fewer, and what is left out
    epochs = [[s.problem or s.value for s, (epoch, *_) in whole if epoch == e] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1][: len(epochs[0])]) and len(epochs[0]) < 55
    assert all(epochs[0].count(problem) == 1 for problem in (common.BAD_SHARD, common.UNUSED))


def test_captions_of_a_shards_image_alternate_between_epochs(tmp_path):
    """The first caption depends on the position of the key's first header in the shard. A change of
    this rule would change the captions of runs that are resumed."""
    captions, members = defaultdict(list), {}
    for i in range(6):
        members |= {f"{i}.jpg": picture(), f"{i}.txt": f"n{i} n0\nn{i} n1\n\nn{i} n2\n"}
    source = open_data(write_tar(tmp_path / "0.tar", members))
    for epoch in range(3):
        for caption in captions_of_samples(source, 6, start=6 * epoch):
            captions[caption[:2]].append(caption[3:])
    assert [sorted(turns) for turns in captions.values()] == [["n0", "n1", "n2"]] * 6
    rows = [rows[0] for rows, _ in common.read_keys(source.paths[0])]
    firsts = {f"n{key.name[-1]}": f"n{key.number // 512 % 3}" for key in rows}
    assert {name: turns[0] for name, turns in captions.items()} == firsts
    assert len(set(firsts.values())) > 1
    assert source.sample_captions(4) == ["n0 n0", "n0 n1", "n0 n2", "n1 n0"]


BAD_SHARDS = {  # {reason for skipping: members of the shard}
    common.BAD_SHARD: b"", "empty caption": {"0.jpg": picture(), "0.txt": ""},
    "unreadable image": {"0.jpg": b"no image", "0.txt": "n0"},
    "caption that is not UTF-8": {"0.jpg": picture(), "0.txt": "né".encode("latin-1")},
    common.NO_IMAGE: {f"{i}.txt": "n0" for i in range(30)}}


@pytest.mark.parametrize("reason", BAD_SHARDS)
def test_a_useless_shard_is_counted_and_only_useless_shards_raise_an_error(
        tmp_path, monkeypatch, reason):
    assert TarShards.max_bad > 10_000                        # a shard may have 10,000 samples
    monkeypatch.setattr(TarShards, "max_bad", 100)
    write_shards(tmp_path, [15])
    write_files(tmp_path, {f"00{i}.tar": BAD_SHARDS[reason] for i in (1, 2)})
    batches = take(stream(open_data(f"{tmp_path}/{{000..001}}.tar"), 5), 12)  # 4 epochs
    captions = {caption for batch in batches for caption in captions_in(batch)}
    assert captions == {f"n{i}" for i in range(15)}
    count, example = batches[-1]["position"][0][2][reason]
    key = ":" if BAD_SHARDS[reason] else ""
    assert count > 0 and example.startswith(f"{tmp_path}/001.tar{key}")
    spec = f"{tmp_path}/{{001..002}}.tar"
    for workers in (0, 2) if reason == "empty caption" else (0,):
        assert failure(take, stream(open_data(spec), 2), 1, workers).startswith(
            f"{spec}: 100 samples in a row could not be used; the last: {reason}, {tmp_path}")


@pytest.mark.parametrize("n", [3, 2000])
def test_a_table_of_missing_images_raises_an_error_after_1000_samples(n):
    source = CaptionTable([(f"gone/{i}.jpg", "n1") for i in range(n)], "a.csv")
    assert re.fullmatch(r"a.csv: 1,000 samples in a row could not be used; the last: image that does "
                        r"not exist, gone/\d+.jpg. Repair .* --image-root.",
                        failure(take, stream(source), 1))


@pytest.mark.parametrize("workers, ranks, parts", [(0, 3, 3), (2, 2, 4)])
def test_fewer_images_or_shards_than_workers_raise_an_error(workers, ranks, parts, tmp_path):
    for spec, count in ((write_table(tmp_path, 2), "2 images"),
                        (write_shards(tmp_path, [3, 3]), "2 shards")):
        source = open_data(spec)
        last = stream(source, 1, rank=ranks - 1, world_size=ranks)
        assert failure(take, last, 1, workers).startswith(
            f"{source.name} has {count}, fewer than ranks x workers = {parts}: use fewer ranks")


def recoloured(x, *strengths):
    """Jitter x randomly. strengths: of brightness, contrast, saturation and hue."""
    return common.jitter(x, common.draw_colours(len(x), *strengths))


def test_jitter_equals_torchvisions_brightness_contrast_and_saturation():
    x = torch.rand(5, 3, 6, 7) * 0.2 + 0.4                   # nothing is cut at 0 or 1
    with common.fixed_seed(1):
        found = recoloured(x, 0.3, 0.3, 0.3, 0)
    with common.fixed_seed(1):
        factors = torch.stack([torch.empty(5).uniform_(0.7, 1.3) for _ in range(3)], 1)
    for image, changed, (brightness, contrast, saturation) in zip(x, found, factors.tolist()):
        image = v2.functional.adjust_brightness(image, brightness)
        image = v2.functional.adjust_contrast(image, contrast)
        image = v2.functional.adjust_saturation(image, saturation)
        torch.testing.assert_close(changed, image, atol=2e-3, rtol=0)


def test_hue_changes_colours_but_not_greys_or_brightness():
    grey, x = torch.rand(4, 1, 5, 5).expand(4, 3, 5, 5), torch.rand(4, 3, 5, 5) * 0.2 + 0.4
    torch.testing.assert_close(recoloured(grey, 0, 0, 0, 0.5), grey, atol=1e-3, rtol=0)
    turned = recoloured(x, 0, 0, 0, 0.5)
    assert (turned - x).abs().max() > 0.05
    torch.testing.assert_close(common.luma(turned), common.luma(x), atol=1e-3, rtol=0)
    red = torch.tensor([0.6, 0.4, 0.4]).view(1, 3, 1, 1).expand(200, 3, 2, 2)
    little, much = (recoloured(red, 0, 0, 0, hue)[:, :, 0, 0] for hue in (0.1, 0.5))
    assert (little.argmax(1) == 0).all()                     # by .1: red stays largest
    assert (much.argmax(1).bincount(minlength=3) > 20).all()
    with common.fixed_seed(1):
        colours = common.draw_colours(5, 0, 0, 0, 0.1)
    with common.fixed_seed(1):
        angle = torch.empty(4, 5).uniform_(-0.2 * math.pi, 0.2 * math.pi)[3]  # a tenth of a circle
    yiq = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213],
                        [0.2115, -0.5227, 0.3112]])
    turn = yiq @ colours[:, 2:].view(5, 3, 3) @ torch.linalg.inv(yiq)
    torch.testing.assert_close(torch.atan2(turn[:, 2, 1], turn[:, 1, 1]), angle)


def test_blur_is_torchvisions_gaussian_with_a_width_for_each_image():
    x, widths = torch.rand(3, 3, 21, 21), (0.1, 0.7, 1.5)
    sigma = torch.tensor(widths).view(3, 1, 1, 1)
    result = common.blur(x, sigma)
    torch.testing.assert_close(result[0], x[0])
    for image, width, blurred in zip(x, widths, result):
        expected = v2.functional.gaussian_blur(image, [17, 17], [width, width])
        torch.testing.assert_close(blurred[:, 8:-8, 8:-8], expected[:, 8:-8, 8:-8])
    flat = torch.full((3, 3, 9, 9), 0.3)
    torch.testing.assert_close(common.blur(flat, sigma), flat)


def test_class_folders_give_classes_labels_and_captions(tmp_path):
    names = ("fire_truck/1.jpg fire_truck/2.PNG airplane/deep/1.jpeg airplane/notes.txt .git/x.jpg "
             "__MACOSX/._1.jpg loose.png")
    folder = tmp_path / "a:b=c"  # an existing path, although it looks like a SPEC with a setting
    write_files(folder, dict.fromkeys(names.split(), picture()))
    source, truck = open_data(str(folder)), "a photo of a fire truck."
    assert source.classes == ["airplane", "fire_truck"]
    assert source.labels.tolist() == [0, 1, 1]
    assert source.skipped == {"file next to the class folders": [1, f"{folder}/loose.png"],
                              "file without an image's ending": [1, f"{folder}/airplane/notes.txt"]}
    assert source.sample_captions(9) == ["a photo of an airplane.", truck, truck]
    assert common.class_names(source.classes) == (["airplane", "fire truck"], "folders")
    file = tmp_path / "names.txt"
    file.write_text("aeroplane\nfire engine\n\n")
    assert common.class_names(source.classes, file) == (["aeroplane", "fire engine"], str(file))
    file.write_text("aeroplane\n\nfire engine\n")  # the number of a line can be a label
    assert "has 3 names for 2 classes" in failure(common.class_names, source.classes, file)


@pytest.mark.parametrize("folders, refused", [
    ("train val", True), ("train2017 val2017", True), ("train val unlabeled2017", True),
    ("Training other", True), ("cat test-a", True), ("train", True), ("bus car train", False),
    ("training_set test_set", True), ("Test_data Train_data", True), ("test_images train", True),
    ("training_shoe cat", False), ("contest valley", False), ("cat testimony", False)])
def test_parts_of_a_data_set_are_no_classes(tmp_path, folders, refused):
    write_files(tmp_path, {f"{name}/1.jpg": picture() for name in folders.split()})
    for content in ("caption", "label", None):
        if refused:
            message = failure(open_data, str(tmp_path), content=content)
            assert "no classes: give " in message
        else:
            assert open_data(str(tmp_path), content=content).classes == sorted(folders.split())


@pytest.mark.parametrize("folders", ["0 2 9 10", "0 10 9 x2"])
def test_folders_that_name_nothing_teach_no_captions(tmp_path, folders):
    """Folders that are all named by numbers are sorted as numbers."""
    write_files(tmp_path, {f"{name}/1.jpg": picture() for name in folders.split()})
    source = open_data(str(tmp_path))
    assert source.classes == folders.split()
    if "x2" not in folders:
        assert f"'a photo of a {folders.split()[0]}.'" in failure(source.sample_captions, 9)


def test_captions_beside_the_images_of_class_folders_are_not_ignored(tmp_path):
    names = [f"{folder}/{i}" for folder in "ab" for i in range(4)]
    files = {f"{name}.{end}": "" for name in names for end in ("jpg", "json")}
    write_files(tmp_path, files | {f"{name}.txt": "a dog" for name in names if name[2] in "01"})
    assert open_data(str(tmp_path)).classes == ["a", "b"]    # half of the images
    write_files(tmp_path, {"a/2.txt": "a dog"})
    message = failure(open_data, str(tmp_path))
    assert "a/0.jpg" in message and "tar shards" in message
    assert len(open_data(str(tmp_path), content=None)) == 8


def test_links_below_class_folders_are_followed_and_hidden_names_are_not_read(tmp_path):
    """A link to itself is a file that cannot be read."""
    files = ("data/cat/1.jpg data/cat/.ipynb_checkpoints/1-checkpoint.jpg data/cat/@eaDir/1.jpg "
             "data/cat/._1.jpg data/dog/deep/er/1.pgm data/dog/1.jfif elsewhere/2.jpg")
    write_files(tmp_path, dict.fromkeys(files.split(), picture()))
    (tmp_path / "data/cat/more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/dog/deep/up").symlink_to(tmp_path / "data/dog")        # circular
    for folder in ("data", "data/cat"):
        (tmp_path / folder / "loop").symlink_to("loop")
    source = open_data(f"{tmp_path}/data", content="label")
    paths = [os.path.relpath(source.path(i), tmp_path / "data") for i in range(len(source))]
    assert paths == ["cat/1.jpg", "cat/more/2.jpg", "dog/1.jfif", "dog/deep/er/1.pgm"]
    assert source.labels.tolist() == [0, 0, 1, 1] and len(source.skipped) == 2


def test_training_without_labels_reads_images_at_every_depth(tmp_path):
    """BAM needs no labels, so it reads the loose images as well as those in folders."""
    files = "1.jpg", "2.jpg", "more/3.jpg", "none/notes.txt"
    write_files(tmp_path, dict.fromkeys(files, picture()))
    source = open_data(str(tmp_path), content=None)
    assert [*pairs(source)] == ["1.jpg", "2.jpg", "3.jpg"] and source.classes is None
    assert "1 class folders of" in failure(open_data, str(tmp_path))


def test_imagenets_1000_folders_have_torchvisions_names():
    names, source = common.class_names([f"n{i:08}" for i in range(1000)])
    some = [names[i] for i in (0, 1, 207, 999)]
    assert some == ["tench", "goldfish", "golden retriever", "toilet tissue"]
    assert (len(names), source) == (1000, "torchvision")


def distorted(x, view, image_size):
    """Return crops (B, 3, s, s) in [0, 1] after the random changes of a view, normalised.

    Each change is computed for all crops, and a mask chooses the crops that are changed. Each
    random number is drawn in the line that uses it.
    """
    def some(p):
        """Return a random mask that is True with probability p."""
        return torch.rand(len(x), 1, 1, 1) < p

    x = torch.where(some(0.5), x.flip(3), x).clamp(0, 1)
    x = torch.where(some(0.8), recoloured(x, 0.4, 0.4, 0.2, 0.1), x)
    grey = (x * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)
    x = torch.where(some(0.2), grey.expand_as(x), x)
    rows = some(view.blur).flatten()
    sigma = torch.empty(int(rows.sum()), 1, 1, 1).uniform_(0.1, 2) * image_size / 224
    x[rows] = common.blur(x[rows], sigma)
    return torch.where(some(view.solarize), v2.functional.solarize(x, 0.5), x)


ALL_VIEWS = [common.View(32, (0.4, 1.0), blur=1.0), common.View(32, (0.4, 1.0), 0.1, 0.2),
             common.View(16, (0.05, 0.4), blur=0.5), common.View(16, (0.05, 0.4), solarize=1.0)]


def crops_of(kind, views, n=24):
    """Return n lists of crops: uint8 from PIL images, or floats from images of the world."""
    images = [Image.open(io.BytesIO(picture(50, 40))).convert("RGB")] * n
    if kind == "world":
        images = torch.rand(n, 3, 40, 40)
    return [views(image) for image in images]


@pytest.mark.parametrize("kind", ["files", "world"])
def test_distort_equals_a_literal_reference_with_the_same_random_numbers(kind):
    views = common.Views(ALL_VIEWS, 32)
    crops = crops_of(kind, views)
    torch.manual_seed(1)
    batch = {"views": [torch.stack(column) for column in zip(*crops)]}
    batch["draws"] = views.draws(len(crops))
    after, dtype = torch.rand(1), {"files": torch.uint8, "world": torch.float32}[kind]
    kept = [x.clone() for x in batch["views"]]
    assert all(x.dtype == dtype for x in kept)
    result = common.distort(batch)
    torch.manual_seed(1)
    for i, x in enumerate(result["views"]):
        column = torch.stack([sample[i] for sample in crops])
        column = column / 255 if kind == "files" else column
        expected = distorted(column, ALL_VIEWS[i], 32)
        torch.testing.assert_close(x, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(torch.rand(1), after) and "draws" not in result
    assert all(map(torch.equal, batch["views"], kept))       # the input is unchanged


def test_training_crops_equal_those_of_pil_up_to_rounding():
    """Levels differ by 8 of 255 at most, by .1 on average. Crops of squares are torchvision's."""
    image = Image.open(io.BytesIO(picture(200, 200))).convert("RGB")
    reference = v2.Compose([v2.RandomResizedCrop(64, (0.5, 1.0), interpolation=BICUBIC),
                            v2.RandomHorizontalFlip(), v2.PILToTensor()])
    views = common.Views([common.View(48, (0.08, 1.0))], 48)
    view = v2.RandomResizedCrop(48, (0.08, 1.0), interpolation=BICUBIC)
    for seed in range(12):
        torch.manual_seed(seed)
        crops = [common.train_transform(64, 0.5, 0.5)(image), *views(image)]
        torch.manual_seed(seed)
        expected = [reference(image), v2.functional.pil_to_tensor(view(image))]
        for ours, pils in zip(crops, expected):
            assert ours.dtype == torch.uint8 and ours.shape == pils.shape
            levels = (ours.int() - pils.int()).abs().float()
            assert levels.max() <= 8 and levels.mean() < 0.1


SHAPES = {"1:1": (96, 96), "4:3": (96, 128), "3:2": (96, 144), "16:9": (90, 160), "9:16": (160, 90)}


@pytest.mark.parametrize("shape", SHAPES)
def test_crops_vary_for_every_shape_of_photo(shape):
    """torchvision has 1 crop of a 3:2 or a 16:9 photo with 75 % of the area. Crops reach each edge,
    and none is smaller than asked, up to half a pixel of each side."""
    H, W = size = SHAPES[shape]
    image = torch.zeros(3, *size)
    torch.manual_seed(0)
    crops = torch.tensor([common.random_crop(image, (0.9, 1)) for _ in range(300)])
    top, left, h, w = crops.T
    assert len(crops.unique(dim=0)) > 150
    assert ((h + 0.5) * (w + 0.5) >= 0.9 * H * W).all() and (h * w > 0.99 * H * W).any()
    assert (top >= 0).all() and (left >= 0).all() and (top + h <= H).all() and (left + w <= W).all()
    if H != W:
        assert (top == 0).any() and (top + h == H).any()
        assert (left == 0).any() and (left + w == W).any()
        ratio = w / h * H / W  # beside the image's own
        assert ratio.min() < 0.94 and ratio.max() > 1.06
    assert common.random_crop(image, (1.0, 1.0)) == (0, 0, H, W)  # the whole image, without a crop


def test_crops_of_a_thin_image_fit_and_keep_enough_pixels():
    """decoded_side: no crop has less than (3/4 least area) ** .5 of a side. A crop depends on its
    generator alone."""
    for size in ((10, 900), (1, 5), (700, 30)):
        for _ in range(100):
            top, left, h, w = common.random_crop(torch.zeros(3, *size), (0.08, 1))
            assert 0 <= top <= size[0] - h and 0 <= left <= size[1] - w
            assert min(h / size[0], w / size[1]) > (0.75 * 0.08) ** 0.5 * 0.9 or min(size) == 1
    a, b, c = (common.crop_and_flip(torch.arange(1800.0).view(3, 20, 30), 8, (0.5, 1), 0.5,
                                    torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_label_fraction_is_a_share_of_each_class_or_a_list_of_images(tmp_path):
    labels, file = [2] * 40 + [0] * 10 + [1] * 3, str(tmp_path / "1percent.txt")
    names = [f"class/{i}.jpg" for i in range(53)]
    rows = common.label_rows(names, labels, "0.1")
    assert sorted(rows) == rows == common.label_rows(names, torch.tensor(labels), "1e-1")
    assert [sum(labels[i] == c for i in rows) for c in range(3)] == [1, 1, 4]
    assert rows[:4] != [0, 1, 2, 3]                                         # chosen at random
    again = common.label_rows(names[::-1], labels[::-1], "0.1")             # a run mixes the rows
    assert {names[::-1][i] for i in again} == {names[i] for i in rows}
    assert len(common.label_rows(names, labels, "0.37")) == 15 + 4 + 1      # 14.8, 3.7 and 1.1
    assert common.label_rows(names, labels, "1.0") == list(range(53))
    Path(file).write_text("7.jpg\n44.jpg\ndata/class/52.jpg\n\n")
    assert common.label_rows(names, labels, file) == [7, 44, 52]
    other = ["other/52.jpg", "other/44.png"]  # a path names one of two images with a name
    assert common.label_rows(other + names, labels, file) == [9, 46, 54]
    for wrong, text, message in (
            (names[:50] + [None], file, "lists 3 names. The data lack 1 of them"),
            (names[:50] + other, file, "lists 3 names. The data lack 1 of them"),
            ([*names, "other/7.jpg"], file, "have 4 images with these names: each name must"),
            (names, "0", "must be above 0 and at most 1"),
            (names, "1.5", "must be above 0 and at most 1"),
            (names, "no.txt", "--label-fraction (number or file) no.txt cannot be")):
        assert message in failure(common.label_rows, wrong, labels, text)


class Failing:
    """Fails `n` times with an error of the disk for each path of `paths`, then calls `read`."""

    def __init__(self, read, n, paths, kind=errno.EIO):
        self.read, self.left, self.kind = read, {str(path): n for path in paths}, kind

    def __call__(self, path, *arguments):
        if self.left.get(str(path), 0) > 0:
            self.left[str(path)] -= 1
            raise OSError(self.kind, "failed", str(path))
        return self.read(path, *arguments)


@pytest.fixture
def sleeps(monkeypatch):
    """Return the list of the seconds that a test would have slept."""
    slept = []
    monkeypatch.setattr(common.time, "sleep", slept.append)
    return slept


@pytest.mark.parametrize("kind", common.PASSING)
def test_an_image_that_the_disk_fails_once_is_read_and_one_that_fails_is_counted(
        tmp_path, monkeypatch, sleeps, kind):
    source = open_data(write_table(tmp_path, 8))
    monkeypatch.setattr(common, "open_image", Failing(common.open_image, 1, source.paths, kind))
    assert len(take(stream(source, 8), 1)[0]["images"]) == 8 and sleeps == [1] * 8
    sleeps.clear()
    monkeypatch.setattr(common, "open_image", Failing(common.open_image, 99, source.paths[:2], kind))
    *_, batch = take(stream(source, 6), 3)                   # three apart end nothing
    assert sleeps == [1, 5, 25] * 6 and batch["position"][0][2][common.DISK][0] == 6
    monkeypatch.setattr(common, "open_image", Failing(common.open_image, 99, source.paths[:3], 2))
    assert len(take(stream(source, 5), 1)) == 1 and len(sleeps) == 18  # a lost file stays lost
    monkeypatch.setattr(common, "open_image", Failing(common.open_image, 99, source.paths, kind))
    message = failure(take, stream(source, 6), 1)
    assert message.startswith("The disk failed to read three samples in a row, last ") and (
        len(sleeps) == 18 + 9)
    if kind == common.PASSING[0]:  # the end of a failed worker takes half a second
        with pytest.raises(common.DiskError):  # a worker's error keeps its type
            take(stream(source, 6), 1, workers=1)


def test_shards_that_fail_are_read_again_two_are_counted_and_three_end_the_run(
        tmp_path, monkeypatch, sleeps):
    """A read that fails once goes on from the same place. A read gives at most 8 kB."""
    shards, readv, gone = TarShards(write_shards(tmp_path, [30] * 5)), os.readv, {"every second"}
    calls, expected = itertools.count(), captions_of_samples(shards, 300)

    def failing(file, buffers):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{file}"))
        if name in gone or "every second" in gone and next(calls) % 2 == 0:
            raise OSError(errno.ESTALE, "stale")
        return readv(file, [buffers[0][:8192]])

    monkeypatch.setattr(os, "readv", failing)
    assert captions_of_samples(shards, 300) == expected
    assert len(sleeps) > 20 and set(sleeps) == {1}
    gone = {"001.tar", "003.tar"}
    sleeps.clear()
    batches = take(stream(shards, 30), 3)
    assert batches[-1]["position"][0][2][common.DISK][0] == 2 and sleeps == [1, 5, 25] * 2
    assert len({name for batch in batches for name in captions_in(batch)}) == 90
    assert len([*shards.each("caption")]) == 90              # an evaluation leaves them out, too
    gone |= {f"00{i}.tar" for i in range(5)}
    sleeps.clear()
    for run in (lambda: take(stream(shards, 30), 1), lambda: [*shards.each("caption")]):
        assert failure(run).startswith("The disk failed to read three samples in a row")
    assert len(sleeps) == 2 * 9


def test_a_disk_that_cannot_answer_has_no_missing_files(tmp_path, monkeypatch, sleeps):
    """A stale handle of a network's disk must not make a benchmark's directory a class folder."""
    write_files(tmp_path, {"a.csv": "image,caption\nx.jpg,one\n", "set/test/nshards.txt": "1"})
    stat, bad = os.stat, f"{tmp_path}/set/test/nshards.txt"

    def stale(path, **more):
        if str(path) in (bad, f"{tmp_path}/a.csv:caption=alt"):
            raise OSError(errno.ESTALE, "Stale file handle")
        return stat(path, **more)

    monkeypatch.setattr(os, "stat", stale)
    for function, spec, path in ((evaluation.kind_of, f"{tmp_path}/set", bad),
                                 (open_data, f"{tmp_path}/a.csv:caption=alt", None)):
        message = failure(function, spec)
        assert message == f"Cannot look at {path or spec}: Stale file handle."
    assert sleeps == [1, 5, 25] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_whose_disk_is_gone_saves_and_ends_with_the_error(
        tmp_path, monkeypatch, sleeps, workers):
    run, read, calls = tmp_path / "run", common.open_image, itertools.count()

    def dying(*arguments):
        if next(calls) >= 20:
            raise OSError(errno.EIO, "failed")
        return read(*arguments)

    monkeypatch.setattr(common, "open_image", dying)
    flags = [*SMALL["sparc"], "--image-size", 16, "--data", write_table(tmp_path, 60), "--workers",
             workers, "--out", run]
    with pytest.raises(UserError, match="three samples in a row.* Step [123] is saved: .*--resume"):
        train_alone([*flags, "--steps", 6])
    step = common.load_checkpoint(run / "last.pt")["step"]
    monkeypatch.setattr(common, "open_image", read)
    train_alone(["--resume", "--out", run])
    assert step == 3  # two batches, and the last again, for which other ranks would have waited
    assert [record["step"] for record in read_log(run)] == [*range(1, 7)]
