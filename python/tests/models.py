"""Three small models, and data for them, for `same_bits.py` and `benches/torch_same_bits.py`: an mlp, a residual network with batch norm, and a
GPT with dropout."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def mlp(size=64):
    return nn.Sequential(nn.Linear(16, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 10))


class _Block(nn.Module):
    def __init__(self, width_in, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.short = nn.Identity() if stride == 1 else nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.short(x) + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def resnet20(width=16):
    layers, last = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()], width
    for stage in range(3):
        for block in range(3):
            layers.append(_Block(last, width << stage, 2 if stage and not block else 1))
            last = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 10))


class _Layer(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.norm1, self.norm2, self.heads, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)), self.dropout, self.training)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, tokens=64, length=16, width=32, heads=2, layers=2, dropout=0.1):
        super().__init__()
        self.tokens, self.places, self.drop = nn.Embedding(tokens, width), nn.Embedding(length, width), nn.Dropout(dropout)
        self.layers = nn.Sequential(*(_Layer(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, text):
        x = self.drop(self.tokens(text) + self.places.weight[: text.shape[1]])
        return self.head(self.norm(self.layers(x)))


def vectors(samples):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 16, generator=generator)
    return TensorDataset(inputs, inputs[:, :10].argmax(1))


def images(samples, side=8):
    generator = torch.Generator().manual_seed(6)
    return TensorDataset(torch.randn(samples, 3, side, side, generator=generator), torch.arange(samples) % 10)


def texts(samples, length=16, tokens=64):
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(tokens, (samples, 1), generator=generator) + torch.arange(length + 1)
    return TensorDataset(text[:, :-1] % tokens, text[:, 1:] % tokens)


def loss_of(model):
    """The mean loss over the classes, or tokens, of a batch."""
    return lambda batch: F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
