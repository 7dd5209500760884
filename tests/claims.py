"""What of the papers holds on the embedded world, beside the papers' own figures.

    python tests/claims.py sparc           # the table, from tests/claims.json
    python tests/claims.py sparc --again   # commands for what neither it nor runs/claims has
    for i in 1 2 3 4 5; do python tests/claims.py sparc --again | xargs -P 2 -I{} sh -c {}; done

--again first adds the figures that it finds in runs/claims to claims.json: four rounds train with
each learning rate, measure, train with other seeds, measure, the fifth keeps the last. A record is
a figure of one run (delete those of a preset that changes), or what is left of older trainings: of
a claim mean and deviation of A and of B, their difference by seed; in a summary mean and deviation
of several metrics of a run. `flags` of a figure are those of eval.py, without them it is of the
run's own evaluation. `cifar10/` has 20,000 images of CIFAR-10's training set in four shards, with
captions such as `a close-up of a cat.`, the same in the class folders of cifar10/train, and 200 of
each class of the test set in those of cifar10/test.
"""

import argparse
import collections
import json
import re
import sys
from pathlib import Path
from statistics import mean

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import common
import eval as evaluation

RECORDS = Path(__file__).with_suffix(".json")
PLACE = "run", "rate", "seed", "split", "metric", "flags"  # of a figure
METRIC = re.compile(r"(\S+)(?: \[(.+?)\])?")  # of a claim: name, flags of eval.py or ""
TASK_OF = {"i2t": "retrieval", "t2i": "retrieval", "faithfulness": "retrieval", "active": "sparsity",
           "miou": "segmentation", "miou_fg": "segmentation"}  # of metrics not called as their task
RATES = (0.0005, 0.001, 0.002)  # learning rates, tried with seed 0, if a run has no others
SEEDS = {"sparo": (3, 4, 5), "stair": (3, 4, 5), "sparc": (6, 7, 8), "bam": (3, 4, 5)}
# 20,000 photos of CIFAR-10 in shards, a caption each, of five kinds as `a blurry photo of a cat.`,
# which say car, not automobile (names for --classes: tests/claims-classes.txt); in cifar10/train as
# class folders
PHOTOS = ("--eval-data cifar10/test --image-size 32 --data "
          + "::".join(f"cifar10/0000{i}.tar" for i in range(4)))
WORDS = f"{PHOTOS} --vocab bert-base-uncased-vocab.txt --batch 64 --steps 500"
FOLDERS = ("--data cifar10/train --eval-data cifar10/test --image-size 32 --warmup 50 --local-size 16 "
           "--crop-border 0.25 --crop-least 0.1")
# RUNS, of each name: the metric whose best value on the val split chooses the learning rate, or the
# run whose rate it takes; flags of train.py ({seed}: the run's), or the name of a run, which this
# one repeats at a rate of its own; rates to try (a single one is taken as it is). CLAIMS: that A is
# above B; source; the paper's A and B; the runs A and B; their metric or two, each perhaps with
# [flags of eval.py], which neither sh nor xargs may change; perhaps why it does not hold here.
RUNS, CLAIMS = {}, {}

RUNS["sparo"] = {
    "sparo": ("zeroshot", "--method sparo"),
    "clip": ("zeroshot", "--method sparo --readout cls"),
    "gap": ("zeroshot", "--method sparo --readout gap"),
    "dino-sparo": ("knn", "--method sparo --objective dino --data shapes:objects=1,background=0",
                   0.000125, 0.00025, 0.0005, 0.001, 0.002),
    "dino": ("knn", "--method sparo --objective dino --readout cls --data shapes:objects=1,background=0",
             0.000125, 0.00025, 0.0005, 0.001, 0.002),
    "gap-wide": ("zeroshot", "--method sparo --readout gap --embed-dim 512"),  # as wide as SPARO's L V
    "attpool": ("zeroshot", "--method sparo --readout attpool", 0.00025, 0.0005, 0.001, 0.002),
    "multi": ("attpool", "--method sparo --readout attpool --slot-norm --slot-projection"),
    "separate": ("attpool", "--method sparo --readout attpool --heads separate --slot-norm --slot-projection"),
    "mixed": ("attpool", "--method sparo --readout attpool --heads separate"),
    "bottleneck": ("zeroshot", "--method sparo --readout bottleneck", 0.00025, 0.0005, 0.001, 0.002),
    "fdt": ("zeroshot", "--method sparo --readout fdt", 0.00025, 0.0005, 0.001, 0.002),
    "L8": ("sparo", "--method sparo --L 8"),
    "L64": ("sparo", "--method sparo --L 64"),
    "V4": ("sparo", "--method sparo --V 4"),
    "V64": ("sparo", "--method sparo --V 64"),
}
# In place of ImageNet's variants: more noise, other backgrounds; in training .04, .25
SHIFTED = "zeroshot [--data shapes:noise=.06,background=.4]"
CLAIMS["sparo"] = [
    ("SPARO is above CLIP in zero-shot", "Table 1, ImageNet, CC15M", ".437, .384", "sparo clip", "zeroshot"),
    ("... above CLIP+GAP", "Table 1, ImageNet, CC15M", ".437, .399", "sparo gap", "zeroshot"),
    ("SPARO is above CLIP on hard negatives", "Table 1, SugarCrepe, CC15M", ".730, .699", "sparo clip", "negatives"),
    ("... above CLIP+GAP", "Table 1, SugarCrepe, CC15M", ".730, .701", "sparo gap", "negatives"),
    ("SPARO finds captions better than CLIP", "Table 2, COCO R@5, CC15M", ".696, .636", "sparo clip", "i2t/R@5"),
    ("... than CLIP+GAP", "Table 2, COCO R@5, CC15M", ".696, .659", "sparo gap", "i2t/R@5"),
    ("SPARO finds images better than CLIP", "Table 2, COCO R@5, CC15M", ".557, .512", "sparo clip", "t2i/R@5"),
    ("... than CLIP+GAP", "Table 2, COCO R@5, CC15M", ".557, .535", "sparo gap", "t2i/R@5"),
    ("The best half of the slots beats all on hard negatives", "Sec. 5.1, Table 4, CC15M", ".761, .730", "sparo sparo",
     "slots/best_half/negatives slots/all/negatives", "nor where a frame misled the training, see below"),
    ("The best quarter does", "Sec. 5.1, Table 4, L400M", ".793, .770", "sparo sparo",
     "slots/best_quarter/negatives slots/all/negatives"),
    ("DINO with SPARO has better neighbours", "Sec. 4.3, Table 3, 20-NN", ".706, .685", "dino-sparo dino", "knn"),
    ("... and a better linear probe", "Sec. 4.3, Table 3", ".757, .735", "dino-sparo dino", "linear"),
    ("CLIP with SPARO has a better linear probe", "Table 3, CC15M", ".711, .646", "sparo clip", "linear"),
    ("Fitted to hard negatives, a mask of SPARO's slots costs less zero-shot for its gain than CLIP+GAP's parts do",
     "Table 5, 64 parts of 64", "-.190, -2.598", "sparo gap-wide", "masks/slots/zeroshot/relative_change"),
    ("... a mask of single dimensions, too (there with 4096; with 512 the reverse, -2.277, -2.003)",
     "Table 5, 4096 parts of 1", "-.465, -.938", "sparo gap-wide", "masks/dimensions/zeroshot/relative_change"),
    ("... a mask of slots less than one of single dimensions", "Sec. 5.2, Table 5, SPARO", "-.190, -.465",
     "sparo sparo", "masks/slots/zeroshot/relative_change masks/dimensions/zeroshot/relative_change"),
    ("Width alone does not raise CLIP+GAP's zero-shot", "Table 5, ImageNet", ".345, .343", "gap gap-wide", "zeroshot"),
    ("SPARO is above AttPool in zero-shot", "Table 6", ".370, .312", "sparo attpool", "zeroshot"),
    ("Separate heads are above multi-head attention", "Table 6, slot-wise", ".374, .359", "separate multi", "zeroshot"),
    ("LayerNorm and projection by slot are above common ones", "Table 6", ".374, .344", "separate mixed", "zeroshot"),
    ("They are with multi-head attention, too", "Table 6", ".359, .312", "multi attpool", "zeroshot"),
    ("Few slots are poor: L = 32 is above 8", "App. B.1, Fig. B.1", "a curve", "sparo L8", "zeroshot"),
    ("More slots still help: L = 64 is above 32", "App. B.1, Fig. B.1", "a curve", "L64 sparo", "zeroshot"),
    ("Narrow slots are poor: V = 16 is above 4", "App. B.1; Table 5, V 64, 8", ".370, .355", "sparo V4", "zeroshot"),
    ("Slots can be too wide: V = 16 is above 64", "App. B.1, Fig. B.1", "a curve", "sparo V64", "zeroshot"),
    ("SPARO tells swapped attributes better", "Table B.3, CC15M", ".700, .613", "sparo clip", "negatives/swap_att"),
    ("... and swapped objects", "Table B.3, CC15M", ".593, .577", "sparo clip", "negatives/swap_obj",
     "swapped objects stay at chance here for CLIP and CLIP+GAP, too"),
    ("SPARO is above CLIP on a shifted world", "Table 1, ObjectNet", ".279, .238", "sparo clip", SHIFTED),
    ("... above CLIP+GAP", "Table 1, ObjectNet, CC15M", ".279, .252", "sparo gap", SHIFTED),
    ("SPARO is above a linear bottleneck", "Table B.1, 64 to 512", ".437, .357", "sparo bottleneck", "zeroshot"),
    ("... above a discrete one, FDT", "Table B.1, CC15M", ".437, .394", "sparo fdt", "zeroshot"),
    ("A linear bottleneck is below CLIP", "Table B.1, 64 to 512", ".384, .357", "clip bottleneck", "zeroshot"),
    ("FDT is above CLIP", "Table B.1, CC15M", ".394, .384", "fdt clip", "zeroshot",
     "with the authors' temperature for 16,384 codes; a 32nd of it, for 512, changes nothing (val .24, .26)"),
    ("... below CLIP+GAP", "Table B.1, CC15M", ".399, .394", "gap fdt", "zeroshot"),
]

RUNS["stair"] = {
    "stair": ("zeroshot", "--method stair", 0.0005, 0.001, 0.002, 0.004),
    "single": ("zeroshot", "--method stair --stages single --revive-until 0"),
    "clip": ("zeroshot", "--method sparc --objective clip --image-encoder tiny --steps 1000 --data shapes:words=400",
             0.0005, 0.001, 0.002, 0.004),
    "stair-t": ("t2i/R@1", "stair"),  # at the rate that retrieval prefers
    "clip-t": ("t2i/R@1", "clip"),
    "single-t": ("t2i/R@1", "single"),
    "photos": ("zeroshot", f"--method stair {WORDS}", 0.002),
    "photos-clip": ("zeroshot", f"--method sparc --objective clip --image-encoder tiny {WORDS}", 0.002),
    "unrevived": ("stair", "--method stair --revive-until 0"),
    "single-revived": ("single-t", "--method stair --stages single"),
    "dense": ("stair", "--method stair --lambda-image 5e-4 --lambda-text 5e-4"),
    "sparse": ("stair", "--method stair --lambda-image 5e-2 --lambda-text 5e-2"),
}
# The paper's words and zero-shot are on ImageNet, its R@1 on COCO. Its CLIP is sparo.py's preset stair-clip;
# here CLIP is sparc.py's: mean of the tokens, h_v, and a text tower that sees both ways.
CLAIMS["stair"] = [
    ("STAIR is above CLIP in text-to-image R@1", "Table 1, COCO", "41.1, 36.2", "stair-t clip-t", "t2i/R@1"),
    ("... in image-to-text R@1", "Table 1, COCO", "57.7, 53.4", "stair-t clip-t", "i2t/R@1"),
    ("Three stages keep the meaning of words, one does not", "Table 7", "32.9, 0.0", "stair single", "words/top1"),
    ("... without our revival, as in the paper", "Table 7", "32.9, 0.0", "unrevived single", "words/top1"),
    ("... with revival in one stage, too", "Table 7", "32.9, 0.0", "stair single-revived", "words/top1"),
    ("... the shape is in the 10 best of 862 tokens, there 100 of 30,522", "Table 7, top-100", "87.7, 0.6",
     "stair single", "words/shape/top10"),
    ("STAIR's best word is more often the label than CLIP's: CIFAR-10, BERT's words", "Table 4", "32.9, 13.7",
     "photos photos-clip", "words/top1 [--classes tests/claims-classes.txt]"),
    ("... it is in the 10 best words", "Table 4, top-10", "69.0, 34.3", "photos photos-clip",
     "words/top10 [--classes tests/claims-classes.txt]"),
    ("... on the world, whose words are mostly invented", "Table 4", "32.9, 13.7", "stair clip", "words/top1",
     "its own rate would not mend it (val, seed 0: STAIR .925; CLIP .955, but of a rate with zero-shot .16)"),
    ("... the shape is in the 10 best words", "Table 4, top-10", "69.0, 34.3", "stair clip", "words/shape/top10"),
    ("STAIR is above CLIP in zero-shot", "Table 2, ImageNet", "65.6, 65.1", "stair clip", "zeroshot"),
    ("Three stages are level with one or above: text-to-image R@1", "Table 6", "41.1, 40.5", "stair-t single-t",
     "t2i/R@1"),
    ("... image-to-text R@1", "Table 6, COCO", "57.7, 57.7", "stair-t single-t", "i2t/R@1"),
    ("... in zero-shot", "Table 6, ImageNet", "65.6, 64.0", "stair single", "zeroshot"),
    ("One stage is above CLIP in text-to-image R@1", "Table 6, COCO", "40.5, 36.2", "single-t clip-t", "t2i/R@1"),
    ("... with our revival", "Table 6, COCO", "40.5, 36.2", "single-revived clip-t", "t2i/R@1"),
    ("CLIP is a little above one stage in zero-shot", "Table 6, ImageNet", "65.1, 64.0", "clip single", "zeroshot"),
    ("Without the text tower zero-shot falls", "Table 5", "65.6, 50.0", "stair stair", "zeroshot textfree/zeroshot"),
    ("... text-to-image R@1", "Table 5, COCO", "41.1, 21.0", "stair stair", "t2i/R@1 textfree/t2i/R@1"),
    ("... image-to-text R@1", "Table 5, COCO", "57.7, 27.2", "stair stair", "i2t/R@1 textfree/i2t/R@1"),
    ("A larger lambda leaves an image fewer active words", "Figure 8a", "a plot", "dense sparse", "active/image"),
    ("... a caption", "Figure 8a", "a plot", "dense sparse", "active/text"),
    ("An image has more active words than a caption", "Figure 8a", "a plot", "stair stair", "active/image active/text"),
    ("A larger lambda lowers text-to-image R@1", "Figure 8b", "a plot", "dense sparse", "t2i/R@1"),
    ("... zero-shot", "Figure 8b, ImageNet", "a plot", "dense sparse", "zeroshot"),
    ("Stage 3 improves text-to-image R@1", "Figure 7, COCO", "a plot", "stair stair",
     "t2i/R@1 t2i/R@1 [--checkpoint stage-2.pt]"),
    ("... zero-shot", "Figure 7, ImageNet", "a plot", "stair stair", "zeroshot zeroshot [--checkpoint stage-2.pt]"),
    ("Stage 2 improves zero-shot", "Figure 7, ImageNet", "a plot", "stair stair",
     "zeroshot [--checkpoint stage-2.pt] zeroshot [--checkpoint stage-1.pt]"),
    ("STAIR is above CLIP in the linear probe", "Table 3, ImageNet", "78.1, 77.0", "stair clip", "linear"),
]

RUNS["sparc"] = {
    "sparc": ("zeroshot", "--method sparc --lambda-f 0.5"),  # the least that the paper tries
    "grounded": ("zeroshot", "--method sparc", 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016),  # lambda_f .1
    "clip": ("zeroshot", "--method sparc --objective clip", 0.0005, 0.001, 0.002, 0.004, 0.008),
    "grounded-s": ("miou_fg/colour", "grounded"),  # at the rate that segmentation prefers
    "clip-s": ("miou_fg/colour", "clip"),
    "mgca": ("zeroshot", "--method sparc --objective mgca", 0.002, 0.004, 0.008),
    "gloria": ("zeroshot", "--method sparc --objective gloria", 0.001, 0.002, 0.004),
    "pacl": ("zeroshot", "--method sparc --objective pacl", 0.001, 0.002, 0.004),
    "filip": ("zeroshot", "--method sparc --objective filip", 0.00025, 0.0005, 0.001),
    "clip+filip": ("zeroshot", "--method sparc --objective clip+filip", 0.00025, 0.0005, 0.001),
    "softmax": ("sparc", "--method sparc --lambda-f 0.5 --align softmax"),
    "dense": ("sparc", "--method sparc --lambda-f 0.5 --align dense"),  # sigma = 0
    "sparc-36": ("zeroshot", "--method sparc --lambda-f 0.5 --image-encoder tiny --steps 600"),  # of 36 patches
    "clip-36": ("zeroshot", "--method sparc --objective clip --image-encoder tiny --steps 600"),
}
# In training noise .04, background 0
SHIFTED = "zeroshot [--data shapes:objects=4,small=.13,large=.18,noise=.05,background=.1,fillers=0]"
CLAIMS["sparc"] = [  # the paper's figures are of B/16, zero-shot on ImageNet, R@1 on MSCOCO
    ("SPARC is above CLIP in zero-shot, lambda_f .5", "Table 1", "72.6, 71.6", "sparc clip", "zeroshot"),
    ("... lambda_f .1", "Table 1", "72.6, 71.6", "grounded clip", "zeroshot"),
    ("... of 36 patches, not 144, in 600 steps, other prompts, lambda_f .5", "Table 1", "72.6, 71.6",
     "sparc-36 clip-36", "zeroshot"),
    ("It finds captions better, lambda_f .5", "Table 3", "57.6, 56.2", "sparc clip", "i2t/R@1"),
    ("... lambda_f .1", "Table 3", "57.6, 56.2", "grounded clip", "i2t/R@1"),
    ("It finds images better, lambda_f .5", "Table 3", "43.0, 42.4", "sparc clip", "t2i/R@1"),
    ("... lambda_f .1", "Table 3", "43.0, 42.4", "grounded clip", "t2i/R@1"),
    ("... of 36 patches, lambda_f .5", "Table 3", "43.0, 42.4", "sparc-36 clip-36", "t2i/R@1"),
    ("Its captions are more faithful, lambda_f .5", "Table 4", "78.72, 77.56", "sparc clip", "faithfulness/K-Pna"),
    ("... lambda_f .1", "Table 4", "78.72, 77.56", "grounded clip", "faithfulness/K-Pna"),
    ("It segments colours better, lambda_f .5 (perfect patches with a random background have .320)",
     "Table 6, Pascal VOC", "27.36, 23.02", "sparc clip", "miou/colour", "L_f is solved by a codebook, see sparc.py"),
    ("... lambda_f .1", "Table 6, Pascal VOC", "27.36, 23.02", "grounded clip", "miou/colour",
     "words are grounded at higher rates"),
    ("... without the background's pixels, lambda_f .5", "Table 6, Pascal VOC", "27.36, 23.02", "sparc clip",
     "miou_fg/colour"),
    ("... lambda_f .1", "Table 6, Pascal VOC", "27.36, 23.02", "grounded clip", "miou_fg/colour"),
    ("... lambda_f .1, each at the rate that this prefers", "Table 6, Pascal VOC", "27.36, 23.02",
     "grounded-s clip-s", "miou_fg/colour"),
    ("SPARC is above MGCA in zero-shot", "Table 1", "72.6, 69.6", "sparc mgca", "zeroshot"),
    ("... above GLoRIA", "Table 1", "72.6, 67.4", "sparc gloria", "zeroshot"),
    ("... above PACL", "Table 1", "72.6, 61.1", "sparc pacl", "zeroshot"),
    ("... above FILIP", "Table 1", "72.6, 56.6", "sparc filip", "zeroshot"),
    ("MGCA is below CLIP in zero-shot", "Table 1", "71.6, 69.6", "clip mgca", "zeroshot"),
    ("... FILIP is below CLIP", "Table 1", "71.6, 56.6", "clip filip", "zeroshot"),
    ("MGCA's captions are more faithful than CLIP's: all words", "Table 4", "80.03, 78.99", "mgca clip",
     "faithfulness/K-P"),
    ("Softmax weights lose zero-shot", "Table 8", "72.6, 70.6", "sparc softmax", "zeroshot"),
    ("... and retrieval of captions", "Table 8", "57.6, 55.2", "sparc softmax", "i2t/R@1"),
    ("Weights without sparsity lose zero-shot", "Table 8", "72.6, 72.1", "sparc dense", "zeroshot"),
    ("... and retrieval of captions", "Table 8", "57.6, 56.1", "sparc dense", "i2t/R@1"),
    ("CLIP's loss mends FILIP", "Table 9", "71.8, 56.6", "clip+filip filip", "zeroshot"),
    ("... and lifts it a little above CLIP", "Table 9", "71.8, 71.6", "clip+filip clip", "zeroshot"),
    ("SPARC is above CLIP + FILIP", "Table 9", "72.6, 71.8", "sparc clip+filip", "zeroshot"),
    ("CLIP alone finds captions better than with FILIP", "Table 10", "56.2, 54.9", "clip clip+filip", "i2t/R@1"),
    ("SPARC is above CLIP on a shifted world, lambda_f .5", "Table 1, IN-R", "72.0, 71.1", "sparc clip", SHIFTED),
    ("... lambda_f .1", "Table 1, IN-R", "72.0, 71.1", "grounded clip", SHIFTED),
    ("SPARC wins with names alone, lambda_f .5", "Table 1", "72.6, 71.6", "sparc clip", "zeroshot [--templates {}]"),
    ("... lambda_f .1", "Table 1", "72.6, 71.6", "grounded clip", "zeroshot [--templates {}]"),
    ("... with several prompts, lambda_f .5", "Table 2", "74.7, 73.9", "sparc clip",
     "zeroshot [--templates tests/claims-prompts.txt]"),
    ("... lambda_f .1", "Table 2", "74.7, 73.9", "grounded clip", "zeroshot [--templates tests/claims-prompts.txt]"),
    ("Several prompts are above the name alone: CLIP", "Tables 2, 1", "73.9, 71.6", "clip clip",
     "zeroshot [--templates tests/claims-prompts.txt] zeroshot [--templates {}]"),
    # Not tried: SPARC is above CLIP as a detector (LVIS, Table 5), as a backbone for captions (Table 7).
]

CLS = "--method bam --image-encoder tiny:cls=1 --readout cls"  # whose attention places the crops
RUNS["bam"] = {
    "bam": ("knn", "--method bam", 0.00025, 0.0005, 0.001),
    "simclr": ("knn", "--method bam --target onehot"),
    "bam-probe": ("linear", "bam"),  # at the rate that the probe prefers
    "two-views": ("knn", "--method bam --local-crops 0", 0.0000625, 0.000125, 0.00025, 0.0005, 0.001),
    "two-views-probe": ("linear", "two-views"),
    "simclr-two-views": ("knn", "--method bam --target onehot --local-crops 0",  # as the papers' SimCLR, MoCoV3
                         0.00025, 0.0005, 0.001, 0.002, 0.004),
    "simclr-two-views-probe": ("linear", "simclr-two-views"),
    "bam-600": ("knn", "--method bam --steps 600", 0.00025, 0.0005, 0.001),
    "bam-600-probe": ("linear", "bam-600"),
    "simclr-600": ("knn", "--method bam --target onehot --steps 600", 0.0005, 0.001, 0.002, 0.004),
    "simclr-600-probe": ("linear", "simclr-600"),
    "simclr-600-two-views": ("knn", "--method bam --target onehot --local-crops 0 --steps 600",
                             0.00025, 0.0005, 0.001, 0.002, 0.004),
    "simclr-600-two-views-probe": ("linear", "simclr-600-two-views"),
    "bam-1200": ("knn", "--method bam --steps 1200", 0.00025, 0.0005, 0.001),
    "bam-1200-probe": ("linear", "bam-1200"),
    "simclr-1200-two-views": ("knn", "--method bam --target onehot --local-crops 0 --steps 1200",
                              0.0005, 0.001, 0.002, 0.004),
    "simclr-1200-two-views-probe": ("linear", "simclr-1200-two-views"),
    "dino": ("knn", "--method sparo --objective dino --readout gap --image-encoder tiny --ema 0.97 --steps 300 "
                    "--warmup 25 --data shapes:objects=1,background=0,palette=1,heldout=0", 0.00025, 0.0005, 0.001),
    "dino-32": ("knn", "--method sparo --objective dino --readout gap --image-encoder tiny --ema 0.97 --batch 32 "
                       "--steps 1200 --warmup 100 --data shapes:objects=1,background=0,palette=1,heldout=0",
                0.000125, 0.00025, 0.0005, 0.001),
    "dino-32-probe": ("linear", "dino-32"),
    "finetuned": ("classification", "--finetune runs/claims/bam/bam-0.0005-{seed}", 0.0005, 0.001, 0.002, 0.004),
    "scratch": ("classification", "--method classifier", 0.0005, 0.001, 0.002, 0.004),
    "block": ("bam", "--method bam --normalization block"),
    "eq2": ("bam", "--method bam --target softmax --tau-b 0.1"),
    "unbalanced": ("bam", "--method bam --target softmax"),
    "same-tau": ("bam", "--method bam --tau-b 0.1"),
    "unmasked": ("bam", "--method bam --mask none"),
    "photos": ("knn", f"{CLS} {FOLDERS}", 0.002),
    "photos-crop": ("knn", f"{CLS} {FOLDERS} --contrastive-crop", 0.002),
    "teacher": ("bam-600", "--method bam --steps 600 --teacher --ema 0.97"),
    "teacher-bn": ("bam-600", "--method bam --steps 600 --teacher --ema 0.97 --batch-norm"),
}
# Table 1 drops one ingredient of a model with teacher and ContrastiveCrop; `bam` here has neither.
CLAIMS["bam"] = [
    ("BAM is above SimCLR of two views, there MoCoV3: linear probe", "Table 2, ViT-B/16 (Table 8: 77.5)", "78.1, 76.5",
     "bam-probe simclr-two-views-probe", "linear"),
    ("... with 1 % of the labels (a probe; there fine-tuned)", "Table 4, ViT-B/16", "66.8, 66.3",
     "bam-probe simclr-two-views-probe", "linear [--label-fraction .01 --probe lbfgs]"),
    ("... with 10 %", "Table 4, ViT-B/16", "75.9, 74.5", "bam-probe simclr-two-views-probe",
     "linear [--label-fraction .1 --probe lbfgs]"),
    ("... by logistic regression, there above SimCLR", "Table 5, CIFAR-10, linear", "94.3, 90.6",
     "bam-probe simclr-two-views-probe", "linear [--probe lbfgs]"),
    ("... by k-NN", "Table 5, CIFAR-10, linear", "94.3, 90.6", "bam simclr-two-views", "knn"),
    ("... both in 600 steps, not 300", "Table 2, ViT-B/16", "78.1, 76.5", "bam-600-probe simclr-600-two-views-probe",
     "linear"),
    ("... by k-NN", "Table 5, CIFAR-10, linear", "94.3, 90.6", "bam-600 simclr-600-two-views", "knn"),
    ("... both in 1200 steps: linear probe", "Table 2, ViT-B/16", "78.1, 76.5",
     "bam-1200-probe simclr-1200-two-views-probe", "linear"),
    ("... by k-NN", "Table 5, CIFAR-10, linear", "94.3, 90.6", "bam-1200 simclr-1200-two-views", "knn"),
    ("... BAM of two views, too", "Table 2", "78.1, 76.5", "two-views-probe simclr-two-views-probe", "linear"),
    ("... by k-NN", "Table 5, CIFAR-10, linear", "94.3, 90.6", "two-views simclr-two-views", "knn"),
    ("... SimCLR with BAM's small views, too", "Table 2, ViT-B/16", "78.1, 76.5", "bam simclr", "linear"),
    ("... by k-NN", "Table 5, CIFAR-10, linear", "94.3, 90.6", "bam simclr", "knn"),
    ("... both in 600 steps", "Table 2, ViT-B/16", "78.1, 76.5", "bam-600-probe simclr-600-probe", "linear"),
    ("... by k-NN", "Table 5, CIFAR-10, linear", "94.3, 90.6", "bam-600 simclr-600", "knn"),
    ("DINO is a little above BAM in the linear probe; here k-NN", "Table 2, ViT-S/16, 300 epochs", "75.9, 75.0",
     "dino bam", "knn", "its teacher lags behind in so few steps, on CIFAR-10, too"),
    ("... four times BAM's steps of a quarter of its batch, as there", "Table 2", "75.9, 75.0", "dino-32 bam", "knn"),
    ("... linear probe", "Table 2, ViT-S/16, 300 epochs", "75.9, 75.0", "dino-32-probe bam-probe", "linear"),
    ("... with 10 % of the labels (a probe; there fine-tuned)", "Table 4, ViT-S/16", "73.9, 73.2",
     "dino-32-probe bam-probe", "linear [--label-fraction .1 --probe lbfgs]"),
    ("BAM is above this DINO with 1 %", "Table 4, ViT-S/16", "60.0, 58.7", "bam-probe dino-32-probe",
     "linear [--label-fraction .01 --probe lbfgs]"),
    ("This DINO's patches segment shapes a little better than BAM's, by a linear classifier",
     "Table 7, ADE20K, UPerNet", "46.8, 46.1", "dino-32 bam", "linear_segmentation/shape"),
    ("BAM's do so better than SimCLR's of two views", "Table 7, COCO, AP of instances, MoCoV3", "43.3, 42.9",
     "bam simclr-two-views", "linear_segmentation/shape"),
    # Fine-tuning on 1 % and 10 % of the labels needs files: of CIFAR-10 it stands below the table.
    ("BAM, fine-tuned, is above training from scratch", "Tables 3, 4: without a figure from scratch", "83.2, none",
     "finetuned scratch", "classification"),
    ("Global normalisation instead of blocks helps", "Table 1", "73.7, 60.7", "bam block", "linear",
     "level on CIFAR-10, too (two views, one seed): k-NN .421, blocks .435"),
    ("Balancing and sharpening help: without both, Eq. 2, the probe falls", "Table 1", "73.7, collapse", "bam eq2",
     "linear"),
    ("... balancing alone does, with tau_B = tau / 2", "Table 1 has tau_B = tau", "73.7, collapse", "bam unbalanced",
     "linear", "sharpening alone prevents the collapse"),
    ("... balancing alone does, with tau_B = tau", "Table 1", "73.7, collapse", "same-tau eq2", "linear"),
    ("Sharpening helps: with tau_B = tau the probe falls, though balanced", "App. F, ViT", "learns, collapses",
     "bam same-tau", "linear"),
    ("... k-NN falls", "App. F, ViT", "learns, collapses", "bam same-tau", "knn"),
    ("Masking the positives helps; else a view sees itself, too", "Table 1", "73.7, 72.6", "bam unmasked", "linear"),
    ("Small views help", "Table 1", "73.7, 68.1", "bam two-views", "linear"),
    ("A teacher helps, 600 steps", "Table 1", "73.7, 72.3", "teacher bam-600", "linear",
     "it has no BatchNorm, without which k-NN on CIFAR-10 fell, too"),
    ("... with BatchNorm, which the paper's teacher lacks", "Table 1", "73.7, 72.3", "teacher-bn bam-600", "linear"),
    ("ContrastiveCrop helps: CIFAR-10, k-NN (the world has no image twice)", "Table 1", "73.7, 73.5",
     "photos-crop photos", "knn"),
    # Not tried: that DINO takes longer (Table 10), DAVIS (Table 6), k-means (App. I).
]


def key_of(record):
    return tuple(str(record.get(name, "")) for name in ("method", "claim", "summary", *PLACE))


def read_records():
    """claims.json -> {key: record}."""
    return {key_of(record): record for record in json.loads(RECORDS.read_text("utf-8"))}


def add_records(found):
    """Put records into claims.json, in place of those with the same key."""
    records = read_records() | {key_of(record): record for record in found}
    lines = [json.dumps(records[key], ensure_ascii=False) for key in sorted(records)]
    with common.replacing(RECORDS) as file:
        file.write("[\n{}\n]\n".format(",\n".join(lines)).encode())


def trained(method, run):
    """-> the run that is trained, itself or the one of which it takes another rate; its rates."""
    flags = RUNS[method][run][1]
    base = flags if flags in RUNS[method] else run
    return base, RUNS[method][base][2:] or RATES


def check_run(out, config, flags):
    """Raise UserError if a run has other flags, or values of a preset that changed since."""
    argv = config.get("argv", [])
    preset = evaluation.METHODS[config["method"]].PRESETS[config["preset"]]
    given = {flag[2:].replace("-", "_") for flag in flags if flag.startswith("--")}
    given |= {"image_encoder"} if "finetune" in given else set()  # it is the other run's
    stale = [name for name in preset.keys() - given if config.get(name) != preset[name]]
    if argv[1:-4] != flags or stale:  # the last four are --out OUT --resume auto
        raise common.UserError(f"{out} was not trained with {' '.join(flags)}, or the preset has "
                               f"changed since: remove it.")


def last_figure(out, config, metric, flags):
    """A metric in the last line of evals.jsonl that has it, of flags of eval.py, the other options
    the run's own; whatever its --task. Older lines lack options that came later."""
    given = vars(evaluation.build_parser().parse_args([str(out), *flags.split()]))
    given["data"] = given["data"] and given["data"][0]
    run = argparse.Namespace(**config)
    own = evaluation.settings_of(evaluation.options_of({}, run))
    wanted = evaluation.settings_of(evaluation.options_of(given, run))
    del wanted["tasks"]
    path, value = out / "evals.jsonl", None
    for line in path.read_text().splitlines() if path.exists() else []:
        record = json.loads(line)
        settings = own | record["settings"]
        if settings | wanted == settings:
            value = record.get(metric, value)
    return value


def rate_of(method, run, figure):
    """The learning rate that is best on the val split, None while one was not tried."""
    chosen_by = RUNS[method][run][0]
    if chosen_by in RUNS[method]:
        return rate_of(method, chosen_by, figure)
    base, rates = trained(method, run)
    if len(rates) == 1:
        return rates[0]
    scores = {rate: figure(base, rate, 0, "val", chosen_by) for rate in rates}
    return None if None in scores.values() else max(scores, key=scores.get)


def compare(method, runs, metrics, figure):
    """{"greater": [mean, deviation], "smaller": ..., "differences": by seed}, None while a figure
    is missing. figure(run, rate, seed, split, metric, flags="") -> float or None."""
    sides = []
    for run, metric in zip(runs.split(), METRIC.findall(metrics) * 2):
        rate, (base, _) = rate_of(method, run, figure), trained(method, run)
        found = [figure(base, rate, seed, "test", *metric) for seed in SEEDS[method] if rate]
        sides.append(found or [None])
    if None in sides[0] + sides[1]:
        return None
    greater, smaller = ([mean(side), np.std(side, ddof=1)] for side in sides)
    return {"greater": greater, "smaller": smaller, "differences": [a - b for a, b in zip(*sides)]}


def verdict(differences):
    """By the signs of the differences and by their mean, beside twice its standard error."""
    signs = all(x > 0 for x in differences)  # nan is neither
    is_clear = mean(differences) > 2 * np.std(differences, ddof=1) / len(differences) ** 0.5
    if signs or is_clear:
        return "holds" if signs and is_clear else "holds weakly"
    return "reversed" if all(x < 0 for x in differences) else "not shown"


def cells(found, note=""):
    """What was found of a claim: figures, differences seed by seed, verdict."""
    if found is None:
        return "", "", "not run yet"
    sides = [" ± ".join(f"{x:.3f}" for x in found[side] if x is not None) or "?"
             for side in ("greater", "smaller")]
    differences = " ".join(f"{x:+.3f}" for x in found["differences"])
    # of an older record without differences the signs alone are known
    known = found.get("verdict", "").replace("in every seed", "weakly")
    holds = known or verdict(found["differences"])
    holds += f": {note}" if note and not holds.startswith("holds") else ""
    holds += " *" if "from" in found else ""
    return ", ".join(sides), differences, holds


def print_table(method):
    records = read_records()

    def figure(*place):
        return records.get(key_of({"method": method} | dict(zip(PLACE, place))), {}).get("value")

    header = "claim: A above B", "source", "in the paper", "here", "difference by seed", "verdict"
    print("| " + " | ".join(header) + " |\n" + "| --- " * len(header) + "|")
    for claim, source, printed, runs, metrics, *note in CLAIMS[method]:
        older = records.get(key_of({"method": method, "claim": f"{runs}: {metrics}"}))
        row = cells(compare(method, runs, metrics, figure) or older, *note)
        print("| " + " | ".join([claim, source, printed, *row]) + " |")
    chosen = []
    for run in RUNS[method]:
        rate, (_, rates) = rate_of(method, run, figure), trained(method, run)
        is_edge = (RUNS[method][run][0] not in RUNS[method] and len(rates) > 1
                   and rate in (rates[0], rates[-1]))
        edge = " (at the edge of its sweep)" if is_edge else ""
        edge = " (not swept)" if len(rates) == 1 else edge
        chosen += [f"{run} {rate}{edge}"] if rate else []
    print(f"\nTest split, mean ± deviation of seeds {SEEDS[method]}, of * those of its record. A "
          f"claim holds if each difference has its sign and their mean is above twice its standard "
          f"error, weakly if one of both is so; it is reversed if each has the other sign.\n"
          f"Learning rates, the best of {RATES} or of those in RUNS, on the val split with seed 0: "
          f"{', '.join(chosen) or 'none yet'}.\n* An older record in claims.json, of which single "
          f"figures were not kept.")
    for record in records.values():
        if record["method"] == method and "summary" in record:
            figures = record["figures"].items()
            shown = [f"{metric} {' ± '.join(map(str, values))}" for metric, values in figures]
            print(f"- {record['summary']}: {', '.join(shown)} ({record.get('flags', 'no flags')})")


def train_again(method):
    """Put what the runs have into claims.json and print the commands for the rest."""
    records, found = read_records(), []
    missing = collections.defaultdict(dict)  # commands of a run, each once

    def place_of(run, rate, seed):
        given = f"{RUNS[method][run][1]} --lr {rate} --seed {seed}".format(seed=seed)
        return Path("runs/claims", method, f"{run}-{rate}-{seed}"), given

    def train(run, rate, seed):
        out, given = place_of(run, rate, seed)
        start = re.search(r"--finetune (\S+)", given)
        if start and not Path(start[1], "eval.json").exists():
            return train(*Path(start[1]).name.rsplit("-", 2))  # this one in a later round
        missing[out][f"python train.py {given} --out {out} --resume auto"] = None

    def figure(run, rate, seed, split, metric, flags=""):
        place = dict(zip(PLACE, (run, rate, seed, split, metric, flags)))
        out, given = place_of(run, rate, seed)
        record = records.get(key_of({"method": method} | place))
        if not (out / "eval.json").exists():
            return record["value"] if record else train(run, rate, seed)
        config = common.read_config(out)
        check_run(out, config, given.split())
        of = "" if config["eval_data"] else f"--split {split} "  # folders have no splits
        value, task = last_figure(out, config, metric, of + flags), metric.split("/")[0]
        if value is None and record:
            return record["value"]
        if value is None:
            task = TASK_OF.get(task, task)
            missing[out][f"python eval.py {out} {of}--task {task} {flags}".strip()] = None
        else:
            place = {name: x for name, x in place.items() if x != ""}
            found.append({"method": method, **place, "value": value, "commit": config["git"]})
        return value

    for _, _, _, sides, metrics, *_ in CLAIMS[method]:
        compare(method, sides, metrics, figure)
    add_records(found)
    for commands in missing.values():
        print(" && ".join(commands))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=RUNS)
    parser.add_argument("--again", action="store_true", help="train: print commands")
    args = parser.parse_args(argv)
    if args.again:
        train_again(args.method)
    else:
        print_table(args.method)


if __name__ == "__main__":
    try:
        main()
    except common.UserError as error:
        sys.exit(f"error: {error}")
