"""Small mistakes, one at a time: `python tests/mutants.py [FILE ...]`, for example bam.py.

Each mistake is put into a copy of the repository, and the tests of its group run there until one
fails: the mistake is killed. If all tests pass, it has survived. A text that does not occur exactly
once in its file ends the program.

TABLE has a line `== FILE | AREA | TESTS` for each group: test files and options of pytest. Below it
are mistakes, several in a line joined by ` ;; `: `text «old => new» text # meaning`. A meaning that
begins with "equivalent" says why nothing observable changes; such a mistake must survive.
"""

import argparse
import collections
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torchvision  # noqa: F401, imported once for all forks

ROOT, LIMIT = Path(__file__).resolve().parents[1], 600  # LIMIT: seconds for one mistake

TABLE = r"""
== sparo.py | sparo | test_statistics test_sparo test_details -k "not table_6"
nn.Parameter(«torch.randn => 0.02 * torch.randn»(L, D).view # App. A: initial queries
«nn.init.xavier_uniform_ => nn.init.xavier_normal_»(self.KVproj.weight) # App. A: initial keys
q, K) * self.D**-«0.5 => 1» # sqrt(D) in Eq. 1 ;; >« => =» eos_idx.clamp(min=0) # a slot sees the last token
attn = scores.softmax(«-1 => 1») # softmax over positions ;; "bld,lDd->blD", p, K) + «b => 0 * b» # bias of the values
.flatten(1) / «L => V»**0.5 # sqrt(L) in Sec. 3.3
return «rank => 0» * B + torch.arange(B, device # positives of this rank
F.cross_entropy(text_to_image, own))« / 2 => » # the mean of both directions
text_to_image = scale * «y_t @ gather(y_i => y_i @ gather(y_t»).T # the direction ;; (sums - «1 => 2») / k # sparsemax sums to 1
self.log_scale.clamp_(0, math.log(«100 => 1000»)) # CLIP's largest scale
torch.tensor(math.log(1 / «0.07 => 0.1»))) # CLIP, Sec. 2.5
layer = nn.Linear(d, «M, bias=False => M») # CLIP's projections have no bias
projection(image_width, E)), mean=«True => False») # CLIP+GAP reads the mean
keepdim=True), x], 1) + «self.pos => 0 * self.pos» # CLIP's ResNet adds positions
nn.Parameter(torch.randn(1 + n, d) * d**-«0.5 => 1») # initial positions
codebook = nn.Parameter(«torch.randn => torch.rand» # initial codes
codebook, 1000 * «E**0.5 => E» # FDT's temperature
sparsemax(«scores.amax => scores.mean»(1)) # FDT: the best position of a code
y = «self.mix(y.flatten(1) => y.flatten(1») # multi-head attention mixes the heads
@ y_t[:, «l => 0»].T).argmax(1) # Sec. 5.1: the same slot of the classes ;; lr=«0.02 => 0.05», momentum=0.9 # C.1
lr=0.02, momentum=«0.9 => 0.5» # C.1 ;; s = alpha.exp().clamp(«min => max»=100) # C.1: s is at least 100
(s / «4 => 2» * theta).sigmoid() # C.1 ;; if found >« => =» after: # the first of equally good epochs
== sparo.py | dino | test_dino test_statistics test_details -k "not bam"
((teacher.detach() «- => +» center) # DINO, Eq. 3
((«teacher.detach() => teacher» - center) # targets have no gradient
(G * «(V - 1) => V»), p_t # number of pairs of views ;; self.center.lerp_(mean, «1 - 0.9 => 0.9») # DINO, Eq. 4
mean = «gather(teacher.mean((0, 1))[None]).mean(0 => teacher.mean((0, 1)») # the centre of one rank
if «self.training => True»:  # c = # an evaluation moves the centre
if step <« => =» self.config.freeze_last: # off by one
(1 «+ => -» math.cos(math.pi * step / steps)) / 2 # momentum grows to 1
theta_t, theta_s, «1 - m => m») # m keeps the teacher
nn.init.normal_(layer.weight, std=«0.02 => 0.2») # DINO's initial head
return «self.teacher[0] => self.image_encoder» # DINO evaluates the teacher
entr(p_t.mean(«(0, 1))).sum => 0)).sum(-1).mean»() # entropy of the mean over images and views
encoder.layers(images, «4 => 3» - replaced) # the last four blocks
blur=0.1, solarize=«0.2 => 0.1») # DINO's second view
== sparo.py | presets | test_presets
L: int = «128 => 64»  # Sec. 4
codes: int = «16384 => 8192» # B.2 ;; out_dim: int = «65536 => 65535» # C.2
student_temp=«0.1 => 0.2», teacher # C.2 ;; teacher_temp=«0.04 => 0.07») # C.2
ema: float = «0.996 => 0.99» # C.2 ;; crop_border: float = «0.4 => 0.25» # C.2
lr=5e-4, weight_decay=«0.5 => 0.2» # Table C.3 ;; warmup=«3600 => 2000», batch=4096 # Table C.3
"cc12m-b16": dict(image_encoder="clip-b16", L=«64 => 128» # Sec. 4 ;; steps=«312_214 => 312_124» # 32 epochs of L400M
context=«76 => 77»,causal=1 # STAIR, Sec. 4.2 ;; weight_decay_end=«0.4 => 0.04» # DINO's weight decay
clip_grad=«3.0 => 1.0» # DINO's clipping ;; freeze_last=«2502 => 25_020» # one epoch
== stair.py | stair | test_statistics test_details test_stair -k "not search"
v = F.normalize(v, dim=-«1, eps=0.5 => 1») # short encodings ;; mean = «enc.mean => enc.sum»(0, keepdim=True) # Eq. 6
«gather(mean).mean => mean.mean»(0).square().sum() # Eq. 6 of one rank
gather(mean)«.mean(0).square( => .square().mean(0»).sum() # the square of the mean
p = «p.masked_fill(~mask[:, :, None], -math.inf) => p * mask[:, :, None]» # padding is never the maximum
nn.GELU(), «nn.LayerNorm(D => nn.Identity(»)) # TRANSFORM in Eq. 4
self.bias = nn.Parameter(«torch.zeros => torch.ones»(vocab)) # initial b
self.valid[[int(k) for k in special]] = «False => True» # special tokens are never active
scatter_reduce_(1, tokens, mask, "«amax => sum»") # Eq. 8: 0 or 1
scatter_reduce_(1, tokens, «mask => torch.ones_like(mask)», "amax") # padding is no word
«round => int»(args.share_1 * args.steps) # rounding of shares
self.image_encoder.requires_grad_(«number != 2 => True») # stage 2 freezes
self.image_head.requires_grad_(«number != 2 => True») # stage 2
if «fresh and number => number» == 2: # a resume of stage 2 keeps the copy of e
«self.strength.zero_() => pass» # each stage begins with lambda 0
model.begin_stage(int(model.stage), fresh=«False => True») # a resume
torch.where(self.stage «== 2 => > 1», self.image_embedding # stage 3
self.image_encoder.train(«mode and self.number != 2 => mode») # BatchNorm
torch.where(self.stage «== 1 => <= 2», enc * self # only stage 1 masks
if self.number <«= => » cfg.revive_until: # the last stage revives, too
flops = «cfg.lambda_image => cfg.lambda_text» * flops_image # Eq. 7
loss = contrast + «self.strength * flops => flops» # the ramp
((step + 1) / (steps / 2))« ** 2 => ») # quadratic growth ;; («(step + 1) => step» / (steps / 2)) ** 2) # off by one
((step + 1) / «(steps / 2) => steps») ** 2) # the first half of a stage
torch.tensor(math.log(1 / «0.07 => 0.1»))) # CLIP, Sec. 2.5
self.log_scale.data.clamp_(«0 => 1», math.log(100)) # bounds of the scale
«self.image_head.bias[ids] => None») # Eq. 4 in maps of words
passes |= «revived & (gradient < 0) => revived» # only a larger weight revives
gradient * «torch.exp(-enc) * passes => passes» # d log(1 + p)
(size > 0) & (update_size > 0)« & decays => » # e, biases and norms are not scaled
«torch._foreach_add(torch._foreach_div(m, root), decay => torch._foreach_div(m, root») # weight decay
ids]«.amax => .mean»(1) for ids in pieces # Sec. 5.1: the best sub-word
== stair.py | presets | test_presets
share_2: float = «0.25 => 0.3» # Sec. 4.2 ;; lr_3: float = «0.1 => 1.0» # Sec. 4.2
lambda_text: float = 1e-«3 => 4» # Sec. 4.2 ;; context=«76 => 77»,vocab_size=30522 # Sec. 4.2
batch=16384, steps=«1_200_000 => 600_000» # Sec. 4.2 ;; optimizer="lamb", beta2=«0.999 => 0.98» # LAMB's default
schedule="linear", weight_decay=1e-«2 => 1» # Sec. 4.2 ;; warmup=«10_000 => 1000», clip_grad=0.0 # Sec. 4.2
stages="single", steps=«600_000 => 300_000» # App. A ;; lr=2e-3, lr_3=«1.0 => 0.1» # tiny, as the docstring says
== sparc.py | sparc | test_sparc test_statistics test_details
v_to_t = «scale * v => v» @ gather(t).T # tau in Eq. 1
t_to_v = scale * t @ «gather(v) => v».T # the images of one rank
F.cross_entropy(t_to_v, own))« / 2 => » # the mean of both directions
return «rank => 0» * B + torch.arange(B, device # positives of this rank
sigma = 1 / «patches.shape => tokens.shape»[1] if # Eq. 3: 1 / P
torch.where(s_hat <« => =» sigma, 0.0, s_hat) # Eq. 3 keeps sigma
return s_til / s_til.sum(-1, keepdim=True)« => .detach()» # gradient of Eq. 4
no_word = ~words[:, «None, : => :, None»] # padding is no negative
-0.5 * «log_p.masked_fill(~words, 0.0).sum => log_p.sum»(1) # padding is no anchor
«(losses / count.clamp(min=1)).mean => losses.sum() / count.sum»() # Eq. 6: words, then captions
words = «gather(count.to(losses.dtype)[:, None] => count.to(losses.dtype»).mean() # words of one rank
words[:, «1:-1] = mask[:, 2 => :-1] = mask[:, 1»:] # [CLS] is no word
«mask.sum(1, keepdim=True).clamp(min=1) => x.shape[1]» # the mean over words
kind(nn.Linear(image_width, image_width)«, nn.GELU() => ») # h_v is not linear
nn.init.normal_(self.g_v.weight, std=«image_width**-0.5 => 0.02») # initial g_v
vbar = self.g_v(«self.h_v(f_v.mean(1)))                      # (B, d => f_v.mean(1)») # h_v in Sec. 2
«cfg.lambda_g => cfg.lambda_f» * loss_g + cfg.lambda_f * loss_f # Eq. 7
return «outputs if self.image_encoder.cls is None else outputs[:, 1:] => outputs» # [CLS] is no patch
self.log_scale.data.clamp_(0, math.log(«100 => 50»)) # CLIP's bounds
«patches.roll(1, 0) => patches», words_only(mask) # L_f with a wrong image
== sparc.py | baselines | test_baselines test_statistics test_details
sums = gather(logits.logsumexp(0, «keepdim=True)).logsumexp => True)).amax»(0) # sums over images
masked_fill(~y.any(-1), «-2.0 => 0.0»)  # below # padding is never the maximum
«x.any(-1).sum(1, keepdim=True).clamp(min=1) => x.shape[1]» # the mean over words
sum(1, keepdim=True)« - 1e-4 => ») # 0.6 * 25 in float32
return (s.softmax(«1 => 2») * s).sum(1) # PACL: softmax over patches
a = s.softmax(«1 => 0») # GLoRIA: softmax over patches
«.masked_fill(~words, torch.finfo(s.dtype).min).logsumexp => .logsumexp»(2) # GLoRIA: padding
(of_words.mean() + of_patches.mean())« / 2 => » # MGCA: the mean
q = («s.detach() => s» / 0.05).exp() # targets have no gradient
q = (s.detach() / «0.05 => 0.1»).exp() # D.4: epsilon ;; for _ in range(«3 => 2»): # D.4: iterations
q = q / «gather(q.sum(1)[None]).sum(0 => q.sum(1»)[:, None] # columns of one rank
F.cross_entropy(scale * s[0], q[«1 => 0»]) # an image predicts its caption's
nn.Parameter(«F.normalize(prototypes, dim=-1) => prototypes») # initial prototypes
return self.main(x)« + self.skip(x) => » # PACL's adapter
== sparc.py | log | test_sparc -k "patches_per_word"
self.log_scale.exp(), align=«self.align => alignment_weights», # L_f of wrong images in the log has --align
== sparc.py | boxes | test_detection -k "average or equal_iou"
value = torch.where(fits, rank[i], -1.0)«.flip(1)                    # of equals the last\n        best = m - 1 - value => \n        best = value».argmax(1) # of equals the first
== sparc.py | measures | test_details test_eval -k "details or iou or precision or segment_gives or share_on"
valid = truth != «255 => 254» # ignored pixels ;; valid = valid & («truth => predicted» != 0) # miou_fg
(predicted == c)« & valid => », (truth == c) & valid # ignored pixels
return («(weights * patches).sum() / weights.sum() => weights * (patches > 0)).sum(»).item() # touched
== sparc.py | presets | test_presets
lambda_f: float = «1.0 => 2.0» # D.4: the sweep ;; sigma: float | None = «None => 0.4» # Eq. 3
filip_keep: float = «0.2 => 0.8» # D.4 ;; context=«55 => 77»,vocab_size=32000 # Sec. 4.1
steps=200_000, lr=«9e-4 => 1e-3» # D.4: the sweep ;; weight_decay=0.2, warmup=«2500 => 2000» # D.4
== bam.py | bam | test_statistics test_details test_presets test_dino test_bam test_finetune -k "not crop"
log_A = (S / tau).log_softmax(-«1 => 2») # Eq. 1: rows ;; if mask == "exclude" else «0.0 => -1.0») # Eq. 3
@fp32«\n@torch.no_grad() => »\ndef sinkhorn # B has no gradient
log_K -= «gather(sums[None]).logsumexp(0) => sums» # one rank
if j «!= => <» j2: # Eq. 5: all pairs of views
return loss / (G * «(k - 1) => k») # a mean over pairs
F.normalize(«z_m.detach() => z_m», dim=-1).view # the teacher has no gradient
c = gather(«z_m => z»[:n_global].flatten(0, 1)) # App. C: columns of the teacher
own_image = «rank => 0» * n + torch.arange(n, device # positives of this rank
sinkhorn(S, «cfg.tau_b => cfg.tau», cfg.sinkhorn_iters # tau_B of an ablation
B = B.view(S_hat.shape)[«:G => -G:»] # large views are targets
{"self": same« & (view == own_view) => », "none" # views of an image are no positives with --mask self ;; return tokens[:, «0 => 1»] if self.config.readout == "cls" # App. C
math.cos(math.pi * («(step + 1) => step» / steps)) # the next step's momentum ;; self.config.ema) * (1 + cosine)« / 2 => » # momentum
return «self.teacher[0] => self.image_encoder» if self.teacher else # the teacher
torch.cat([tokens[:, 0], «tokens[:, 1:].mean => tokens.mean»(1)], 1) # D.1: patches
mean = «gather(y.mean(-2)[None]).mean(0 => y.mean(-2») # BatchNorm of one rank
affine=«i < 2 => True») # the last has no scale
nn.init.normal_(self[-1].weight, std=«0.02 => 0.2») # initial projector
«not config.teacher => config.teacher» if config.batch_norm is None # App. C ;; trust=1e-«3 => 2»): # LARS
            if «decays => True»: # biases are not scaled
torch._foreach_mul_(momentum, «group["betas"][0] => 0.5») # momentum
nn.init.normal_(self.head.weight, std=«0.02 => 0.2») # DeiT's initial head ;; label_smoothing=«smoothing => 0.0») # DeiT
== bam.py | presets | test_presets
tau_b: float = «0.05 => 0.1» # Sec. 3.4 ;; sinkhorn_iters: int = «3 => 1» # bam_loss.py:34
ema: float = «0.995 => 0.996» # main_pretrain.py:99 ;; crop_border: float = «0.25 => 0.4» # vit_small.slurm:60
crop_alpha: float = «0.6 => 1.0» # ContrastiveCrop ;; crop_every: int = «6_256 => 12_512» # App. G: 20 epochs
clip_grad=«0.3 => 3.0» # Table 9a ;; warmup=«3_128 => 12_512» # Table 9a: 10 epochs for ResNet-50
lr=«4.8 => 0.3», warmup=3_128 # the linear scaling rule ;; activation="«relu => gelu»" # App. C
smoothing: float = «0.1 => 0.0» # DeiT ;; lr=5e-«5 => 4», **SEMI # Table 9c
steps=25_023, warmup=«1251 => 125» # Table 9c ;; lr=6e-«5 => 4», weight_decay=0.1 # D.3: a tenth
== common.py | encoders | test_encoders test_details test_statistics
x * torch.sigmoid(«1.702 => 1.7» * x) # QuickGELU
block.attn.qkv.weight, std=«width**-0.5 => 0.02» # CLIP's initial weights
block.attn.proj.weight, std=(«2 * width => width» * depth) # CLIP's initial weights
outputs = [*outputs, x][«-n: => :n»] # the last blocks
variance = var« + (own - mean).square() => » # the variance between ranks
«variance * n / (n - 1) => variance» # unbiased running variance
torch.randn(1, 1, width) * «0.02 => 0.2» # initial [CLS] ;; self.grid**2, width) * «0.02 => 0.2» # initial positions
"imagenet": ((«0.485 => 0.5», 0.456 # torchvision ;; return (images - self.mean) «/ => *» self.std # pixels
return self.norm_pre(«x + pos) => x) + pos» # CLIP's ln_pre
k.transpose(2, 3)« * q.shape[-1] ** -0.5 => » # attention of [CLS]
nn.init.normal_(self.embedding.weight, std=«0.02 => 0.2») # CLIP's ;; torch.randn(1, context, width) * «0.01 => 0.02» # CLIP's initial positions
None if «self.causal or mask is None => True» else mask # padding is hidden ;; image["depth"] -= «left_out => 0» # SPARO replaces the last block
== common.py | presets | test_presets
patch_bias=False, eps=1e-«5 => 6» # CLIP ;; CLIP_TOKENS, context=«77 => 76» # CLIP
== common.py | tokenizers | test_tokenizer
MAX_WORD = «100 => 10» # BERT ;; ids = ids[: max_length - «2 => 1»] # [CLS] and [SEP] count
padding_value=«self.pad => self.cls» # padding ;; mark = "«##" if start else " => »" # sub-words
ids.append(«last + 256 => last») # </w> ;; («-pair_counts => pair_counts»[pair], pair) # the most frequent pair
== common.py | data | test_details test_data -k "details or order or draft or tiff or 16 or jitter or distort or fraction or different_scenes or own_machine"
gather_objects(looks)[«this_rank()[0] - number => this_rank()[0]»] # another machine's shards
v2.RandAugment(2, magnitude=«27 => 9» # 9 of 10
image.draft("RGB", («min_side, min_side => min_side // 2, min_side // 2»)) # decoded sides
x = x / «256 => 255» # 16 bits ;; (size / «(0.75 * least) ** 0.5 => least**0.5») # the aspect ratio of crops
uniform(*scale).item(), «3 / 4, 4 / 3 => 1, 1» # BYOL ;; torch.rand(n) < self.flip, torch.rand(n) < «0.8 => 0.5» # BYOL: jitter
draw_colours(n, 0.4, 0.4, «0.2 => 0.4», 0.1) # BYOL: saturation
uniform_(0.1, 2)« * self.image_size / 224 => » # BYOL: sigma for 224 pixels
x[flipped].flip(«3 => 2») # left and right ;; value[«(epoch + i) => epoch» % len(value)] # captions take turns
«order[start % size :].tolist => order.tolist»() # a resumed position
max(1, «round => int»(share * len(of_class))) # shares of classes
(Path(line).parts[«-2 => -1»:]) for line # a path names one of two images ;; «image.load() => image.mode» # a TIFF is turned once
with fixed_seed(self.seed, «part,  => »*numbers): # parts draw differently
mix_seed(self.seed, «self.rank, worker => worker», batches) # ranks draw differently
self.min_side = «max => min»(decoded_side(view.size # views of two sizes ;; decoded_side(view.size, view.scale[«0 => 1»]) # the smallest crop
== common.py | names | test_benchmarks test_data test_tokenizer -k "labels_of_shards or imagenet or captions_of_each or split or wordpiece_gives or limit_draws"
rows = torch.«randperm(len(self), generator=torch.Generator().manual_seed(0)) => arange(len(self))».tolist() # --limit keeps the first classes
names = [names[«places.index(i) => places[i]»] for i in # --classes in another order, the way back
category«.startswith("Z"):\n            out.append(" ") =>  == "Zs":\n            out.append(" ")\n        elif category[0] == "Z":\n            pass» # U+2028 parts words
seen.append(line) or line for line in «file => file.read().splitlines(True)») # U+2028 ends no row
str(row.split)«.strip() => ») or "train" # blanks around a split ;; if plain_name(name) «in => not in» plain] # ImageNet-A has 200 of the names
text = " ".join(unicodedata.normalize("NFC", text).split(«) => " ")»).lower() # BPE: U+2028 parts words
== common.py | schedules | test_details
(start - end) * 0.5 * (1 «+ => -» math.cos( # half a cosine
return peak * «(step + 1) => step» / warmup # step 0 has peak / warmup
cosine(«step - warmup, steps - warmup => step, steps», peak, 0.0) # after the warm-up
(steps - step) / max(1, «steps - warmup => steps») # a line to 0
"weight_decay": «0.0 => weight_decay», "decays": False # norms do not decay
== common.py | world | test_world test_details test_presets
"test": range(«9 => 8», 10) # val and test share no scene
8 * scene["«colour"] + scene["shape => shape"] + scene["colour»"], torch # held-out pairs
"white": (0.95, 0.95, «0.95 => 0.2») # names of colours
if c «not in colours => != a["colour"]»]) # a negative that might be true
if «all => any»(o["size"] == a["size"] for o in alike) # might be true
if «not any(kind in kinds for kind in swapped) => True» # a negative that might be true
"above": (0, «-1), "below": (0, 1 => 1), "below": (0, -1») # v points down
* dy > «6 => 0» # relations that can be seen ;; cover > «0.5 => 0.0», k + 1 # touched pixels
P_COLOUR = «0.9 => 0.8» # share of named colours
== common.py | weights | test_weights test_details
text["vocab_size"] = «max => min»(len(tokenizer) # rows without a token
ours.data.copy_(theirs«.t() => » # CLIP's projections are (d, E)
(".ln_1.", "«.norm1."), (".ln_2.", ".norm2. => .norm2."), (".ln_2.", ".norm1.»") # two norms
Pixels(encoder.pixels.name or «"imagenet" => "clip"») # the pixels of timm's weights
if «name.startswith(replaced) => False» else found)[name] # the block that SPARO replaces
== bam.py | probes | test_eval test_details -k "probe"
max(64, math.ceil(len(x) / «1024 => 512»)) # Table 9b: 1,024 ;; l2 «/ 2  => »* head.weight.square() # BAM, D.3
== bam.py | clusters | test_eval -k "kmeans or lloyd or nmi or clusters"
x = x - «x.mean(0) => 0» # fp32 far from the origin
scores.append([nmi(«truth, clusters), ari(truth, clusters => clusters, clusters), ari(truth, truth»)]) # no labels
entropy(p) / both).item() if both > 0 else «1.0 => 0.0» # one label, one cluster
if largest > expected else «1.0 => 0.0» # one image of each label
drawn = present[«torch.randperm(len(present), generator=generator)[:t] => :t»] # ten times the same classes
nearer = «nearest[:, None].minimum( => (»torch.cdist(x, x[rows]).square()) # the last centre alone
== sparo.py | analyses | test_eval test_details test_sparo -k "wino or interpreted or relative or vtab or mask_learns"
right_by_kind(margin(m) «> => >=» 0, kinds) # a tie is a right pair
text = (s[:, 0, 0] > s[:, «1, 0 => 0, 1»]) # Winoground
F.cosine_similarity(slots_i, slots_t, dim=-1) > «0.75 => 0.5» # Sec. 5.4 ;; is_word = (word >« => =» 0) & # [CLS] is no word
(new «/ old - 1) / (fit / start - 1 => - old) / (fit - start») # Table 5
== eval.py | metrics | test_eval test_details -k "details or recall or class_emb or knn or probe or wino or resized"
(s.masked_fill(positive, -torch.inf) <« => =» best) # ties ;; (ranks <« => =» k).sum() # recall at k
rows.append(«F.normalize(kept * prompts.mean(1), dim=-1 => kept * prompts.mean(1»)) # CLIP's prompts
is_held = hold_out(labels, «5 => 4») # a fifth is held out
order = «order[labels[order].argsort(stable=True)] => order» # held out class by class
labels.bincount()[labels[order]] > «1 => 0»] # a class of one image stays to learn from
for step in (8, 4, 2, 1) if «len(held) => True» # nothing to choose by
return best[«len(best) // 2 => 0»] # the middle of equally good ones
np.logspace(-6, «2 => 3», 97) # CLIP_benchmark's range
common.cosine(step, len(batches), «0.1 => 0.01», 0.0) # SPARO, C.1
«round(self.image_size * 256 / 224) => self.image_size» # DINO's evaluation
== eval.py | chance | test_eval -k "guess or damaged or holds_out"
math.comb(m - «s => 1», k) # the captions of an image
accuracy, 1 / len(group[«learnable(data) => ids»].unique()) # a lost class counts
compress(pairs(), «rest => held») # crops of the images that are not held out
for _, label in pairs()]), «10 => 2») # a tenth chooses the rate
== eval.py | tasks | test_details test_eval -k "details or slots or weights_on or zeroshot or holds_out or vtab or random_crops"
"slots": (WORLD_N, «"val" => self.split», 8, 1) # slots: val
self.unseen = «~torch.isin => torch.isin»(torch.arange(64) # classes that training never shows
accuracies.argsort(«descending=True => ») # the best slots
tokens.cpu(), over_image[:, :, «-patches: => :patches»] # [CLS] is no patch
if own is «None or own.equal(objects) => None»: # words that name all objects
size, («0.08 => 0.8», 1.0), 0.5, generator) # crops of a probe
«scores[:, no_words] = -torch.inf => pass» # special tokens are no labels
== eval.py | data | test_eval test_benchmarks test_finetune -k "labels_of_shards or limit_draws or matched_by_name or by_their_names"
ids = common.match_names(«common.read_lines(file, "--classes"), known => known, common.read_lines(file, "--classes")») # --classes, the way back
return common.match_names(«data.groups[""][1], known => known, data.groups[""][1]») # class folders, the way back
ids = class_ids(train, names, «is_numbered => None») # labels of shards that --classes renames
== eval.py | reports | test_eval test_reports test_stair -k "search_by_words or vocs_layout or slots_are_selected or better_word"
index.search(dict.fromkeys(words, 1.0), 8«, where => ») # the condition of a query
sparc.image_iou(predicted, truth«, foreground_only=True => ») # miou_fg without the background
y = «F.normalize(y, dim=-1) => y».unflatten(0, (len(selection.classes # a long prompt counts no more
torch.stack(list(ranks.values())).«amin => amax»(0) # the better of colour and shape
== eval.py | own | test_benchmarks test_reports -k "winoground_is or relative_paths or have_maps"
"winoground/text": (text, 1 / «4 => 2») # chance ;; ("data", "eval_data"«, "image_root" => »): # a path of the training
maps = maps - maps.amin(«1 => 0», keepdim=True) # the lowest score of each word's map
grid = [«math.ceil => math.floor»(side / model.image_encoder.patch_size # a stem rounds up
== train.py | ranks | test_train test_data -k "train_otherwise or another_step or reason_for_skipping"
common.check_ranks({"data": «self.data => 0», # other data ;; "a vocabulary with the hash": «self.words => 0», # other words
"a last.pt after step": «self.step => 0», # other steps ;; "fp16": «scaler.is_enabled() => False»}) # other precision
    «progress.check_ranks(data.annotations, scaler) => pass»\n    if out: # nothing is compared
every_rank = «common.gather_objects(common.skipped_by(progress.positions)) => [common.skipped_by(progress.positions)]» # rank 0's samples alone
== train.py | training | test_details test_train test_stair -k "details or resume or pixels or keep or stages or replaces_last"
if args.checkpoint «!= => ==» "last.pt": # the checkpoint that a run continues from replaces last.pt
step = «progress.step - start => progress.step» # a step counts within its stage
fresh=«progress.step == start => True» # a resume is not fresh ;; «args.clip_grad or math.inf => math.inf») # clipping
if args.weight_decay_end is not «None and group["decays"] => None»: # norms
betas=(0.9, «args.beta2 => 0.999»), eps # beta2
torch.manual_seed(«args.seed + rank => args.seed») # ranks drop other rows
math.ceil(«1.5 => 0.5» * args.image_size) # sides of decoded JPEGs
every > 0 and self.step % every == «0 => 1» # when an action is due
self.order += «self.step => 0» # a new order of changed data
model.after_update(«step, steps => progress.step, args.steps») # steps of the stage
== tests/claims.py | claims | test_claims
if n < «5 => 4»: # how many seeds decide ;; kind = "holds" if «low => high» > 0 # the interval
figure(base, rate, seed, "«val => test»", *metric) # rates are chosen on val
return «max => min»(scores, key=lambda rate # the best rate ;; if mean(values) <«= zero =>  -zero»] # did not train
"""


def mistakes():
    """Yield (file, area, tests, old, new, meaning) of each mistake in TABLE."""
    for line in TABLE.strip().splitlines():
        if line.startswith("== "):
            file, area, tests = line[3:].split(" | ")
            continue
        for mistake in line.replace(r"\n", "\n").split(" ;; "):
            text, _, meaning = mistake.rpartition(" # ")
            before, old, new, after = re.fullmatch("(.*)«(.*) => (.*)»(.*)", text, re.S).groups()
            yield file, area, tests, before + old + after, before + new + after, meaning


def run_tests(root, tests, output):
    """Run the fast tests of a tree in a fork of this process -> pytest's status, -9 after LIMIT.

    This process has imported torch, so a fork begins at once. Its modules of this project are new.
    """
    if pid := os.fork():
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        os.killpg(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.setsid()  # its children end with it
    os.chdir(root)
    sys.dont_write_bytecode = True  # a cached file could hide the mistake of the same second
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        words = [f"tests/{x}.py" if x.startswith("test_") else x for x in shlex.split(tests)]
        status = pytest.main(["-x", "-q", "-m", "not ranks", "-p", "no:cacheprovider", *words])
        sys.stdout.flush()
    os._exit(int(status))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", help="files to put mistakes into; without one, all")
    parser.add_argument("--every", type=int, default=1, help="take every Nth mistake")
    parser.add_argument("--area", help="take the mistakes of one area")
    args, _ = parser.parse_args(), torch.set_num_threads(1)
    table = list(mistakes())
    for file, _, _, old, _, _ in table:
        if (count := (ROOT / file).read_text().count(old)) != 1:
            sys.exit(f"error: {file} has {old!r} {count} times, not once: mend TABLE.")
    chosen = [row for row in table if (not args.files or row[0] in args.files)
              and args.area in (None, row[1])][:: args.every]
    counts, clean = collections.defaultdict(collections.Counter), set()
    with tempfile.TemporaryDirectory() as directory:
        root, output = Path(directory, "tree"), Path(directory, "output")
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".git", "runs", "__pycache__"))
        for file, area, tests, old, new, meaning in chosen:
            if tests not in clean and run_tests(root, tests, output):
                sys.exit(f"error: without a mistake {tests} fail:\n{output.read_text()[-2000:]}")
            clean.add(tests)
            source, begin = (ROOT / file).read_text(), time.monotonic()
            (root / file).write_text(source.replace(old, new))
            status = run_tests(root, tests, output)
            (root / file).write_text(source)
            result = "survived" if status == 0 else "killed" if status > 0 else "hung"
            if meaning.startswith("equivalent"):
                result = "equivalent" if status == 0 else "killed, but called equivalent"
            counts[area][result] += 1
            failed = re.findall(r"(?:FAILED|ERROR) tests/(\S+)", output.read_text())
            print(f"{result:8} {time.monotonic() - begin:5.1f} s  {area}: {old!r} -> {new!r}, "
                  f"{meaning} {failed[:1]}", flush=True)
    for area, results in counts.items():
        print(f"{area}: {', '.join(f'{n} {result}' for result, n in results.items())}")


if __name__ == "__main__":
    main()
