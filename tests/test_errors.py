"""Commands that must end with an error. Each row has a command and a part of its message.

A message names the wrong value and the remedy in one line. The command must not change a file.
"""

import io
import pickle
import shlex
import shutil
from pathlib import Path

import pytest
import torch

import eval as evaluation
import train
from common import BAD_SHARD, SPECIAL_TOKENS, UserError, open_directory
from helpers import SMALL, picture, write_files
from test_weights import made_up_clip_file


def saved(state):
    """Return the bytes of a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


MAP = picture(mode="L", format="PNG", value=3)
CREPE = '{"0": {"filename": "red/0.png", "caption": "a", "negative_caption": "b"}}'
# The directory where a command runs has these files, and the runs runs/NAME.
FILES = {
    "table.csv": "filepath,title\na.png,one\nb.png,two\n",
    "names.txt": "one\ntwo\n",
    "000.tar": {"0.jpg": picture(), "0.txt": "n0"}, "001.tar": {}, "bare/notes.md": "",
    "mixed/cat/notes.md": "", "mixed/dog/1.jpg": "",
    "numbers/n00000001/a.png": picture(), "numbers/n00000002/a.png": picture(),
    "one/red/0.png": picture(), "poor.txt": "\n".join([*SPECIAL_TOKENS, "a"]),
    "photos/blue/0.png": picture(), "photos/red/0.png": picture(), "broken/red/0.png": "no image",
    "broken/blue/0.png": "no image", "crepe/swap_att.json": CREPE,
    "others/blue/0.png": picture(), "others/grey/0.png": picture(),
    "colours/classnames.txt": "blue\nred\n", "colours/test/nshards.txt": "1",
    "colours/test/0.tar": {"0.jpg": picture(), "0.cls": "0", "1.jpg": picture(), "1.cls": "2"},
    "pairs/dataset_type.txt": "retrieval", "pairs/test/nshards.txt": "1",
    "pairs/test/0.tar": {"0.jpg": picture(), "0.txt": "\n"},
    "voc/JPEGImages/a.jpg": picture(), "voc/SegmentationClass/a.png": MAP,
    "voc/ImageSets/Segmentation/val.txt": "a\n", "winoground/examples.jsonl": '{"image_0": "x"}'}
COCO = '{"images": [{"id": 1, "file_name": "a"}], "annotations": [{"image_id": 1, "bbox": []}]}'
NO_CAPTIONS = "neither COCO captions, Karpathy's JSON nor a list of rows"
NUMBER = "folder n00000001 has a number of ImageNet"
VOC, SET = "eval runs/sparc --task segmentation --data voc", "eval runs/sparc --data colours"
PROMPT = "'{}' needs one .*, the name with its article; or give a file"
CLIP = "clip-b32:width=16,heads=2,image_size=16,patch_size=8,depth=1,"
IMAGE = "^--init-weights clip.pt: the file holds a model of .*{}.*: give .*--image-encoder the"
TEXT = IMAGE.replace("image", "text")
BLOCK = "transformer.resblocks.0."

# A row has a command, a pattern of its message, and perhaps a third item: more files.
# The first word of a command is eval, train, or a method: train.py with the flags SMALL[method] and
# "--out run". The word clip is SPARC, which starts from a made-up CLIP file.
# The third item is {name: content}, or the content of the file that the last word names. After clip
# it is {tensor of the CLIP file: another shape, or None if the file lacks the tensor}.
ERRORS = [
    # Settings of a training
    ("train --method sparc --preset b32 --out run", "--preset b32 has no data: give --data"),
    ("train --method sparo --preset cc3m-b16 --out run", "--preset cc3m-b16 has no data.*--vocab"),
    ("sparc --lernrate 1", "^unrecognized arguments: --lernrate 1: see --help.$"),
    ("sparc --data 0.tar 1.tar", "arguments: 1.tar: see --help.$"),
    ("eval run --chunk 3", "^unrecognized arguments: --chunk 3: see --help.$"),
    ("train --method clip", "--method: invalid choice: 'clip' .*sparc"),
    ("train", "--method is required, one of sparo"),
    ("sparc --preset b33", "has no preset 'b33'; it has tiny, tiny-stem, b32, b16, l14"),
    *((command, f"{command.partition(' ')[2]} must be {rest}") for command, rest in {
        "sparc --batch 0": "> 1", "sparc --batch 1": "> 1", "bam --batch 1": "> 1",
        **dict.fromkeys(["sparc --seed -1", "sparc --lambda-f -1.0", "sparc --lr inf",
                         "stair --lr-3 nan"], "finite and not negative"),
        "sparc --embed-dim 0": "> 0", "stair --crop-scale 0.0": "> 0",
        "sparc --seed 99999999999999999999": "< 9e18", "sparc --beta2 1.0": "< 1",
        "sparc --sigma 2.0": "<= 1"}.items()),
    ("train --method sparc --epochs 1 --out run", "--epochs does not fit .* of unknown size: give --steps"),
    ("sparc --accum-freq 2", "--accum-freq .* BatchNorm.* tiny-patch"),
    ("sparo --readout cls --image-encoder tiny", "a ViT with :cls=1"),
    ("stair --share-1 0.7 --share-2 0.3", "leave no steps to stage 3"),
    ("dino --vocab nowhere.txt", "--vocab has no effect on this objective: leave"),
    ("bam --crop-scale 0.5", "--crop-scale has no effect on this objective: leave"),
    ("train --resume --bench 2 --out runs/sparc", "--bench times a new run: leave out --resume"),
    ("sparc --image-size 64", "--image-size 64 does not fit shapes:.*size=16.*: drop"),
    ("dino --local-size 12", "--local-size must be a multiple of 8 up to 16"),
    *((f"{name} --local-size 24", "--local-size must be a multiple of 8 up to 16")
      for name in ("dino", "bam")),
    ("dino --readout fdt", "--objective dino needs --readout sparo, cls or gap, not fdt"),
    ("dino --readout cls --image-encoder ResNet-50 --data shapes:size=64", "a ViT with :cls=1"),
    *((f"bam --target {name} --normalization block", f"--target {name} has no blocks: leave out")
      for name in ("onehot", "moco")),
    *((f"bam --target moco --local-crops {n} {teacher}", "moco needs two views and the moving av")
      for n, teacher in ((2, "--teacher"), (0, "--no-teacher"))),
    ("bam --contrastive-crop --crop-start 1", "a folder or a table: give --no-contrastive-crop"),
    ("bam --contrastive-crop --crop-start 9", "--crop-start 9 must be below --steps 4"),

    *((f"train --method detector --out run {flags}", message) for flags, message in (
        ("--data shapes --finetune runs/bam", "runs/bam is a run of bam: give"),
        ("--data table.csv --finetune runs/sparc", "table.csv is no JSON of boxes"),
        *((f"--data shapes:size=16 --finetune runs/sparc {flag}", message) for flag, message in (
            ("--embed-dim 64", "sparc: .*--embed-dim"), ("--text-encoder 12x512", "leave it out"),
            ("--vocab other.txt", "--vocab other.txt .*leave it out"))),
        ("--finetune nowhere", "nowhere"))),

    ("train --finetune runs/bam --image-encoder tiny:width=16,heads=2,depth=1 --data photos --out run",
     "another size or kind .* leave out --image-encoder"),
    *((f"train --finetune runs/bam {more}", "--finetune needs --method classifier or detector, and no --init-weights")
      for more in ("--init-weights vit.pt", "--method bam")),

    # Encoders
    ("sparc --image-encoder ViT-Z/9", "no encoder 'ViT-Z/9'; there are tiny, tiny-patch,"),
    ("sparc --image-encoder tiny:stem=none", "ViT has no setting 'stem'; its settings: "),
    ("sparc --data shapes:size=50", "image_size 50 is no multiple of patch_size 8"),
    ("sparc --image-encoder tiny:depth=4.5", "depth='4.5' is not of type int"),

    # Vocabularies
    *((f"{command} ''", f"^{command.split()[1]} is empty: give a value, or leave it out")
      for command in ("sparc --vocab", "bam --init-weights", "train --finetune")),
    ("sparc --vocab nowhere.txt", "nowhere.txt is no vocabulary .*: No such file"),
    ("sparc --vocab 0", "0 is no vocabulary .*: 'utf-8' codec can't decode", b"\x80"),
    ("sparc --vocab 0", r"0 is no vocabulary .*lacks \[PAD\] \[UNK\] \[CLS\] \[SEP\]. Give BERT's vocab.txt", b""),
    ("sparc --vocab 0", "0 is no vocabulary .*: not enough values .*CLIP's bpe", "#version: 0\na b\nab\n"),
    ("sparc --vocab a.gz", "a.gz is no vocabulary .*: Not a gzipped .*Give BERT's vocab.txt", "broken"),
    ("sparc --vocab poor.txt", "^84% of the captions' tokens are .UNK.: give another --vocab"),

    # Data
    ("sparc --data nowhere.csv", "Cannot read nowhere.csv: No such file"),
    ("sparc --data {000..004}.tar", "3 of the 5 shards .* first 002.tar"),
    ("sparc --image-encoder tiny:pixels=foo", "one of clip, imagenet, half, not 'foo'"),
    ("sparc --data no*.tar", r"first no\*.tar .No such .*: name some that exist. DIR/\*.tar"),
    ("sparc --data 000.tar::gone.tar", "gone.tar"),
    ("sparc --data 000.tar::table.csv", "Cannot read 000.tar::table.csv: No such file"),
    ("sparc --data table.csv:colour=x", "no setting 'colour'; its settings: caption, image"),
    ("sparc --data bare", "bare holds notes.md, no classes: give the directory of two or more"),
    ("bam --data bare", "bare has no image .*left out: 1 x file without an image's ending"),
    (lambda: open_directory("gone", "label", None), "^Cannot read gone: No such file"),
    ("sparc --data one --vocab poor.txt", "one holds red, no classes: give the directory"),
    ("classifier --data one", "one holds red, no classes: give the directory"),
    ("eval runs/bam --data one", "On one this model can run no task: give class folders"),
    ("sparc --data mixed", "^1 class folders of mixed have no images .*, such as cat: add"),
    ("sparc --data numbers --vocab poor.txt", f"{NUMBER} instead of a name: rename the folder. eval.py .* --classes FILE"),
    ("sparc --image-encoder tiny:patch_size=4", "This stem does not fit patch_size 4: choose tiny-patch"),
    ("bam --data photos --eval-every 1", "^No evaluation: .*train.py --eval-data"),
    ("sparc --eval-data broken", "^No evaluation: None of the 2 images could be read: 2 x .*png"),
    ("classifier --data table.csv", "table.csv has no labels: give class folders"),
    ("classifier --data 000.tar", "000.tar needs names of two or more classes: give --classes FILE"),
    ("classifier --data 000.tar --classes names.txt --label-fraction .1", "needs class folders"),
    ("classifier --data photos --classes names.txt", "classes of photos are blue, red, not one, two"),
    ("classifier --data photos --label-fraction 10%", r"\(number or file\) 10% cannot be read"),
    ("bam --data photos --eval-data others", "must have the class folders of others.*: blue, grey"),
    ("bam --eval-data table.csv", "^No .*table.csv this model can run no task: give class folders"),
    ("sparc --data a.tar", rf"{BAD_SHARD}.* a.tar \(its end is missing\)", ""),
    ("sparc --data a.tar", "a.tar has no captions .left out: 1 x no image .*a.tar:0",
     {"a.tar": {"0.txt": "no image"}}),

    # Tables
    ("sparc --data a.csv", r"the columns \['url', 'caption'\]: give a.csv:image=COLUMN",
     "url,caption\nx,y\n"),
    ("sparc --data a.json", r"a.json has the columns \['image'\]: give a.json:image=", '[{"image": "a"}]'),
    ("sparc --data a.csv", r"\['image', 'title', 'caption'\]: give a.csv:image=COLUMN,caption=",
     "image,title,caption\nx.jpg,x.jpg,one\n"),
    ("sparc --data a.csv", "left out: 1 x empty caption, the last ", "filepath,title\nx.jpg,\n"),
    ("sparc --data a.csv", "^Cannot read a.csv: 'utf-8' codec can't decode", b"filepath,title\nx.jpg,caf\xe9\n"),
    ("sparc --data a.json", f"a.json is {NO_CAPTIONS}: Expecting property name", "{"),
    ("sparc --data a.json", f"a.json is {NO_CAPTIONS}", "[1]"),
    ("sparc --data a.json", f"{NO_CAPTIONS}: 'caption'.", COCO),
    ("sparc --data a.json:split=dev", "a.json has no image that can be used",
     {"a.json": '{"images": [{"filename": "a", "split": "val", "sentences": []}]}'}),
    ("sparc --data shapes:objects=1,together=0.5", "together 0.5 needs objects of 2 or more"),
    ("sparc --data a.parquet", "parquet is a file of an unknown format. Give one of: shapes", "x"),

    # The world
    *((f"sparc --data shapes:{name}={value}", f"shapes.*{name}.*{value}")
      for name, value in {"size": "big", "noise": "nan", "large": "0.1"}.items()),
    ("sparc --data shapes:colour=3", "shapes has no setting 'colour'; its settings: background"),

    # A whole CLIP
    ("clip", "^--init-weights clip.pt: OpenAI's weights need QuickGELU: add :quick_gelu=1", {"input_resolution": ()}),
    *(("clip", f"^--init-weights clip.pt: .*Unexpected .*{name}.*: give ", more)
      for name, more in (("blocks.0.ls_1.gamma", {f"visual.{BLOCK}ls_1.gamma": 16}),
                         ("logit_bias", {"logit_bias": 1}))),                             # SigLIP's
    ("clip", IMAGE.format("Missing .*norm_pre.bias"), {"visual.ln_pre.bias": None}),
    ("clip", TEXT.format("size mismatch for norm.weight"), {"ln_final.weight": 5}),
    ("clip", IMAGE.format("size mismatch for pos"), {"visual.positional_embedding": (7, 16)}),
    ("clip", IMAGE.format("Unexpected .*blocks.1.norm1.weight"),                    # one block more
     {"visual.transformer.resblocks.1.ln_1.weight": 16}),
    ("clip", TEXT.format("size mismatch for embedding") + ".* and --vocab its words",
     {"token_embedding.weight": (20, 16)}),
    *(("clip", rf"^--init-weights clip.pt: the file has no finite {part} of shape \(.*\): give a CLIP",
       {part: shape}) for part, shape in (
        ("visual.proj", None), ("visual.proj", (2, 3, 4)), ("text_projection", (9, 8)))),
    ("sparc --init-weights 0", "^--init-weights: 0 cannot be read: .* Remedy: give another file.$", "broken"),
    ("sparc --init-weights gone.pt", "^--init-weights: gone.pt cannot be read: No such file.* give another file.$"),
    ("sparc --init-weights 0", "^--init-weights 0: the file holds no weights, but a Tensor: save",
     saved(torch.ones(2))),
    ("sparc --init-weights 0", "^--init-weights 0: the file holds a model .*Missing",
     saved({"patch_embed": torch.ones(2)})),
    ("bam --init-weights 0", "--init-weights 0: the file holds .*Missing.* such as ViT-S/16:cls=1",
     saved({"patch_embed.proj.weight": torch.ones(2)})),
    ("eval runs/bam runs/sparc --export out.pt", "--export writes the weights of one run: .*not 2"),
    ("eval runs/sparo --export out.pt", "--export needs a ViT of timm, without a stem"),
    *((f"eval runs/sparc --export {file}", "must be a new file: .* ends in .pt")
      for file in ("runs/sparc/last.pt", "runs/sparc/config.json", "/dev/null", "''", "a.safetensors")),

    # Directories of runs
    ("sparc --out table.csv", "table.csv cannot be written: File exists"),
    ("sparc --out table.csv/x", "table.csv/x cannot be written: Not a directory"),
    ("sparc --out /proc/x", "/proc/x cannot be written"),
    ("sparc --out runs/sparc", "runs/sparc already has a last.pt: add --resume"),
    *((f"sparc --out {out}", f"{out} already has a {name}: .* change --out", {f"{out}/{name}": ""})
      for out, name in ((".", "config.json"), ("mine", "vocab.txt"), (".", "log.jsonl"),
                        (".", "eval.json"), ("mine", "step-2.pt"))),
    (f"sparc --out {'n' * 300}", "n cannot be written: File name too long"),
    ("sparc --resume", "^run/config.json cannot be read: No such file or directory. Give a run's dir"),
    ("train --resume", "--resume needs --out"),
    *((f"{command} --checkpoint a.pt --out runs/sparc", "^--checkpoint needs --resume, without auto")
      for command in ("sparc", "train --resume auto")),
    ("train --resume --checkpoint step-9.pt --out runs/sparc",
     "step-9.pt cannot be read: No such .* Remedy: give --checkpoint last.pt"),
    ("train --resume --out other", "other has the method 'resnet': give a run",
     {"other/config.json": '{"method": "resnet"}'}),
    ("stair --resume --out runs/sparc", "has --method sparc: leave out --method stair"),
    ("train --resume --embed-dim 7 --lr 1 --out runs/sparc",
     "model of another size.*128.*7.*: leave out flags that change the model; vocab.txt"),
    ("train --resume --preset b32 --out runs/sparc", "--preset tiny: leave out --preset b32"),
    ("train --resume auto --vocab poor.txt --out runs/sparc", "leave out --vocab poor.txt"),
    *((f"{name} --init-weights 0", "0: it is a run's checkpoint: use --resume, or eval.py RUN --export",
       saved({"model": {}, "ranks": []})) for name in ("sparc", "bam")),
    ("train --resume --init-weights clip.pt --out runs/sparc", "leave out --init-weights clip.pt"),
    ("train --resume --optimizer lamb --out runs/sparc", "--optimizer adamw: leave out"),
    *((f"{command} runs/{name}", message, {f"runs/{name}/{file}": text})
      for command, name in (("train --resume --out", "sparc"), ("eval", "sparc"))
      for file, message, text in (
          ("config.json", "^runs/sparc/config.json cannot be read: Unterm", '{"method": "sp'),
          ("config.json", "^runs/sparc/config.json cannot be read: 'int'", "7"),
          ("vocab.txt", "last.pt holds a model of another size.*vocab.txt", FILES["poor.txt"]),
          *(("last.pt", "last.pt cannot be read: .* Remedy: begin a new run", damaged)
            for damaged in ("", saved({"method": "sparc"})[:99], pickle.dumps([{}]))))),

    # Evaluation
    ("eval bare", "^bare/config.json cannot be read: No such file.* Give .* runs/sparc"),
    ("eval runs/sparc --task dance", "no task dance; there are zeroshot, "),
    ("eval runs/sparc --limit 0", "--limit 0 must be > 0"),
    *(("eval runs/sparc --data crepe", "crepe/swap_att.json: .* must have filename, caption and",
       {"crepe/swap_att.json": text}) for text in (CREPE[:-1], CREPE.replace("filename", "file"))),
    *((f"eval runs/sparc {flag} {'n' * 300}", message) for flag, message in {
        "--data": "n does not exist. Give", "--templates": "n' needs one ",
        "--data photos --task knn --train-data": "n does not exist. Give"}.items()),
    ("eval runs/sparc --task slots", "this model can run .*; slots needs other data or"),
    ("eval runs/sparc --data photos --task segmentation",
     "^On photos this model can run .*; segmentation needs other data or another model, see "),
    ("eval runs/sparc --data table.csv --task zeroshot",
     "^On table.csv this model can run retrieval; zeroshot needs other data or another model"),
    ("eval runs/sparc --data broken --task zeroshot", "None of the 2 images could be read: 2 x .*png"),
    ("eval runs/bam --data photos", "give other class folders .*train.py --eval-data"),
    ("eval runs/bam --data photos --train-data photos/", "give other class .*--train-data"),
    ("eval runs/bam --data photos --train-data others",
     "from others, .* class folders of photos: blue, red; change eval.py --train-data"),
    ("eval runs/sparc --device cuda:9", "^--device cuda:9 cannot be used: "),
    ("eval runs/sparc --checkpoint runs/sparc/last.pt",
     "runs/sparc/runs/sparc/last.pt cannot be read: No such file .*. Remedy: give another file"),
    ("eval runs/bam --data table.csv", "On table.csv this model can run no task: give class folders"),
    ("eval runs/stair --query 'red AND qqq'", "--query.* no word 'qqq': give words of vocab.txt"),
    ("eval runs/sparc --query red --data voc", "--query needs a folder of images.*not voc"),
    ("eval runs/bam --query red", "This run has no text encoder: choose a task"),
    ("eval runs/sparo --data numbers --task slots --select photos", f"{NUMBER} .* --classes"),
    ("eval runs/sparo --data photos --task slots", "slots needs --select"),
    ("eval runs/sparo --data photos --task masks --select others", "SugarCrepe's files"),
    ("eval runs/sparc --data photos --classes 0", "--classes 0 cannot be read", b"\xff"),
    ("eval runs/sparc --templates 0", PROMPT.format("red"), "red\n"),
    *((f"eval runs/sparc --templates '{template}'", PROMPT.format(template).replace("{", r"\{"))
      for template in ("no.txt", "{} {a}", "{")),
    (VOC + " --classes names.txt", "a.png has class 3; 2 have names: give --classes"),
    (VOC, r"a.png is no map of class ids of 8 bits: .*uint8 \[8, 8, 3\]",
     {"voc/SegmentationClass/a.png": picture(format="PNG")}),
    (VOC, "^--data voc/.*val.txt cannot be read: 'utf-8'", {"voc/ImageSets/Segmentation/val.txt": b"\xff"}),
    (VOC, "^--data voc/.*val.txt is empty: write one", {"voc/ImageSets/Segmentation/val.txt": "\n"}),
    (SET, "colours/test/.* has wrong labels .*1 x label above .* from 1.*0.tar:1"),
    (SET, "nshards.txt: invalid literal .*; it is the number of tars", {"colours/test/nshards.txt": "two"}),
    (SET, "2 of the 3 shards .* first .*1.tar", {"colours/test/nshards.txt": "3"}),
    ("eval runs/sparc --data pairs", "pairs.* has no image that can be used .left out: "),
    ("eval runs/sparc --data winoground", "sample 1: .* must have image_0, image_1"),
]


def files_in(directory):
    """Return {path: size and time of the last change} of all files below it but lock files."""
    found = {path: path.stat() for path in directory.rglob("*") if path.name != "lock"}
    return {path: (x.st_size, x.st_mtime_ns) for path, x in found.items() if path.is_file()}


@pytest.fixture(scope="session")
def shared(tmp_path_factory, run_of):
    """A directory with FILES and runs, in which no command changes a file."""
    place = tmp_path_factory.mktemp("errors")
    write_files(place, FILES)
    for name in ("sparc", "sparo", "stair", "bam"):
        shutil.copytree(run_of(name), place / "runs" / name)
    return place


@pytest.mark.parametrize("row", ERRORS, ids=lambda row: str(row[0]))
def test_errors_name_the_mistake_and_change_no_file(tmp_path, monkeypatch, run_of, shared, row):
    command, message, more = (*row, {})[:3]
    place = tmp_path if len(row) == 3 else shared
    monkeypatch.chdir(place)
    if callable(command):
        program, arguments = command, []
    else:
        first, *flags = shlex.split(command)
        if place is tmp_path:
            write_files(place, FILES)
            for word in flags:
                if word.startswith("runs/"):
                    shutil.copytree(run_of(word.removeprefix("runs/")), word)
        if first == "clip":
            flags = made_up_clip_file(run_of("sparc") / "vocab.txt", more) + flags
        elif place is tmp_path:
            write_files(place, more if isinstance(more, dict) else {flags[-1]: more})
        name = {"clip": "sparc"}.get(first, first)
        if name in SMALL:
            flags = [*SMALL[name], "--out", "run", *flags]
        program, arguments = (evaluation if name == "eval" else train).main, [flags]
    before = files_in(place)
    if "ResNet-50" in str(command):  # its weights need no values
        for name in ("kaiming_normal_", "kaiming_uniform_"):
            monkeypatch.setattr(torch.nn.init, name, lambda weights, **settings: weights)
    with pytest.raises(UserError, match=message) as error:
        program(*arguments)
    assert "\n" not in str(error.value)
    assert files_in(place) == before and not Path("run").exists()
