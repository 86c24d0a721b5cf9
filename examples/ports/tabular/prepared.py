"""A classifier of table rows, as tutorials write it: rare positives, pos_weight, early stopping."""
import argparse

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

world = lockstep.init()

parser = argparse.ArgumentParser()
parser.add_argument('--epochs', type=int, default=5)
parser.add_argument('--batch-size', type=int, default=64)
parser.add_argument('--lr', type=float, default=1e-2)
args = parser.parse_args()

device = 'cuda' if torch.cuda.is_available() else 'cpu'
torch.manual_seed(42)

rng = np.random.default_rng(0)
x = rng.normal(size=(740, 12))
y = (x @ rng.normal(size=12) + rng.normal(size=740) > 5).astype(float)
x, y = torch.Tensor(x), torch.Tensor(y)[:, None]
mean, std = x[:500].mean(0), x[:500].std(0)
x = (x - mean) / std
train_ds, valid_ds = TensorDataset(x[:500], y[:500]), TensorDataset(x[500:], y[500:])
train_dl = DataLoader(train_ds, batch_size=args.batch_size, shuffle=True)
valid_dl = DataLoader(valid_ds, batch_size=100)

model = nn.Sequential(
    nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.2),
    nn.Linear(32, 16), nn.ReLU(), nn.Dropout(0.2),
    nn.Linear(16, 1),
).to(device)
positives = y[:500].sum()
criterion = nn.BCEWithLogitsLoss(pos_weight=(500 - positives) / positives)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
model, optimizer, train_dl, scheduler = lockstep.prepare(model, optimizer, train_dl, scheduler, micro_batch=16, run='runs/tabular')

for epoch in train_dl.epochs(args.epochs):
    model.train()
    for xb, yb in train_dl:
        xb, yb = xb.to(device), yb.to(device)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        lockstep.log(train_loss=loss.item())

    model.eval()
    valid_loss = 0.0
    scores = []
    with torch.no_grad():
        for xb, yb in valid_dl:
            logits = model(xb.to(device))
            valid_loss += criterion(logits, yb.to(device)).item() * len(xb)
            scores.append(torch.sigmoid(logits).cpu())
    valid_loss /= len(valid_ds)
    auc = roc_auc_score(y[500:], torch.cat(scores))
    scheduler.step(valid_loss)
    print(f'epoch {epoch}: train {train_dl.logged["train_loss"]:.4f}, valid {valid_loss:.4f}, AUC {auc:.3f}')

if world.rank == 0:
    torch.save(model.state_dict(), 'tabular.pt')
