"""A small training job with a leak that many jobs have had: memory climbs with every step.

It knows nothing of strandline. `strandline demo` runs it; so does `strandline run -- python leaky_training.py`.
"""

import os

import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = os.environ.get("DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
EPOCHS, STEPS, BATCH, SIDE, CLASSES = 5, 30, 16, 32, 10


class Classifier(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, images):
        x = F.relu(self.conv1(images))
        x = F.relu(self.conv2(x))
        return self.head(x.mean((2, 3)))


def batches(n):
    for _ in range(n):
        labels = torch.randint(0, CLASSES, (BATCH,), device=DEVICE)
        images = torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE)
        yield images + labels.view(-1, 1, 1, 1) / CLASSES, labels


class Trainer:
    def __init__(self):
        self.model = Classifier().to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.held_out = next(batches(1))
        self.running_loss = 0.0

    def train_step(self, images, labels):
        loss = F.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def probe(self):
        """Tracks the loss on held-out images after every step."""
        images, labels = self.held_out
        loss = F.cross_entropy(self.model(images), labels)
        self.running_loss += loss

    def fit(self):
        for epoch in range(EPOCHS):
            for images, labels in batches(STEPS):
                loss = self.train_step(images, labels)
                self.probe()
            seen = (epoch + 1) * STEPS
            print(f"epoch {epoch} loss {loss:.3f} held-out {float(self.running_loss) / seen:.3f}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    Trainer().fit()
