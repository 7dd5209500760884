"""A fifth method, with only the members that `Method` and `ModelDefaults` in common.py require.

Its loss is one direction of CLIP's: each image must find its caption in the global batch.
test_contract.py trains and evaluates this method.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass
class Config:
    embed_dim: int = 8                   # width of an encoding
    temperature: float = 0.1             # temperature of the softmax over the batch


PRESETS = {"tiny": dict(steps=4, batch=8, lr=1e-3)}


class Model(nn.Module):
    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config = config
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        self.image_projection = nn.Linear(image_width, config.embed_dim)
        self.text_projection = nn.Linear(text_width, config.embed_dim)

    def encode_image(self, images):
        """(B, 3, H, W) -> normalised encodings (B, E)."""
        features = self.image_encoder(images).mean(1)
        return F.normalize(self.image_projection(features), dim=-1)

    def forward(self, batch, gather=lambda x: x):
        """Return {"loss": ...}. `gather` returns the rows of all ranks."""
        words = self.text_encoder(batch["tokens"], batch["mask"])        # (B, L, text_width)
        words = self.text_projection((words * batch["mask"][..., None]).sum(1))
        v, t = self.encode_image(batch["images"]), F.normalize(words, dim=-1)
        scores = v @ gather(t).T / self.config.temperature               # (B, global batch)
        first = getattr(gather, "rank", 0) * len(v)
        return {"loss": F.cross_entropy(scores, first + torch.arange(len(v)))}
