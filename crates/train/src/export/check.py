"""Compares the scores of exported models in PyTorch, Transformers and ONNX Runtime with those that Paceline computed."""

import pathlib
import sys
from collections import OrderedDict

import onnxruntime
import torch
import torchvision
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F


class Mlp(nn.Module):
    """The network for tables."""

    def __init__(self, inputs, hidden, classes):
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.second = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, classes)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return self.output(F.relu(self.second(x)))


class Number(Mlp):
    """The same for a number with the mean 3 and the deviation 2."""

    def forward(self, x):
        return super().forward(x) * 2 + 3


class Conv(nn.Module):
    """The small network for images."""

    def __init__(self, channels, first, second, hidden, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, first, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(first)
        self.conv2 = nn.Conv2d(first, second, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(second)
        self.hidden = nn.Linear(16 * second, hidden)
        self.output = nn.Linear(hidden, classes)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        x = F.adaptive_avg_pool2d(x, 4).flatten(1)
        return self.output(F.relu(self.hidden(x)))


class Block(nn.Module):
    """A block of ResNet-20."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()
        if inputs != outputs:
            self.downsample.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.downsample(x))


class ResNet20(nn.Module):
    """A residual network for images of 32 x 32 pixels."""

    def __init__(self, channels, classes):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        for stage, (inputs, outputs) in enumerate([(16, 16), (16, 32), (32, 64)], 1):
            blocks = [Block(inputs, outputs, 1 if stage == 1 else 2)]
            blocks += [Block(outputs, outputs, 1) for _ in range(2)]
            setattr(self, f"layer{stage}", nn.Sequential(*blocks))
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))


class Attention(nn.Module):
    """Attention of a Vision Transformer."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        parts = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class VitBlock(nn.Module):
    """A block of a Vision Transformer."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(OrderedDict(fc1=nn.Linear(width, 4 * width), act=nn.GELU(), fc2=nn.Linear(4 * width, width)))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    """DeiT-Ti, with the names of timm."""

    def __init__(self, image, patch, classes, width=192, depth=12, heads=3):
        super().__init__()
        patches = (image[0] // patch) * (image[1] // patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + patches, width))
        self.patch_embed = nn.Sequential(OrderedDict(proj=nn.Conv2d(3, width, patch, patch)))
        self.blocks = nn.Sequential(*[VitBlock(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class Gpt2(nn.Module):
    """Hugging Face's GPT-2, from the folder of `--format transformers`."""

    def __init__(self, folder):
        super().__init__()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder)

    def load_state_dict(self, state):
        found = self.model.transformer.state_dict()
        assert found.keys() == state.keys(), found.keys() ^ state.keys()
        assert all(torch.equal(found[name], state[name]) for name in state)

    def forward(self, x):
        return self.model(x).logits


MODELS = {
    "mlp": lambda _: Mlp(6, 16, 5),
    "number": lambda _: Number(6, 16, 1),
    "conv": lambda _: Conv(3, 4, 8, 16, 5),
    "resnet20": lambda _: ResNet20(3, 5),
    "resnet18": lambda _: torchvision.models.resnet18(num_classes=5),
    "resnet50": lambda _: torchvision.models.resnet50(num_classes=5),
    "vit": lambda _: Vit(SIDES["vit"], 4, 5),
    "gpt": lambda folder: Gpt2(folder / "transformers"),
}
SIDES = {"conv": (9, 10), "resnet20": (16, 17), "resnet18": (64, 65), "resnet50": (64, 65), "vit": (8, 12)}


def check(folder):
    name = folder.name
    case = load_file(folder / "case.safetensors")
    x, expected = case["input"], case["logits"]
    if name in SIDES:
        x = x.reshape(-1, 3, *SIDES[name])
    net = MODELS[name](folder)
    states = [load_file(folder / "model.safetensors"), torch.load(folder / "model.pt", weights_only=True)]
    scores = {}
    for form, state in zip(["safetensors", "torch"], states):
        net.load_state_dict(state)
        net.eval()
        with torch.no_grad():
            scores[form] = net(x)
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    scores["onnx"] = torch.from_numpy(found)
    size = expected.abs().max()
    off = {form: float((found - expected).abs().max() / size) for form, found in scores.items()}
    print(name, off, flush=True)
    assert all(error < 1e-5 for error in off.values()), name


for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    check(folder)
