"""After PyG's tutorial of graph classification, without PyG: graph convolutions on made-up graphs."""
import argparse

import numpy as np
import torch
from torch.nn import Linear
from torch.utils.data import DataLoader, Dataset


class Graphs(Dataset):
    """Rings and paths with random node features and extra edges; the label says which."""

    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.graphs = []
        for _ in range(count):
            nodes, label = rng.integers(5, 12), rng.integers(0, 2)
            edges = [(i, (i + 1) % nodes) for i in range(nodes - 1 + label)]
            x = torch.Tensor(rng.normal(size=(nodes, 4)) + 0.5 * label)
            self.graphs.append((x, torch.tensor(edges).t(), torch.tensor(label)))

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, index):
        return self.graphs[index]


def collate(graphs):
    """One graph of several: features of all nodes, edges, the graph of each node, labels."""
    xs, edges, ys = zip(*graphs, strict=True)
    sizes = torch.tensor([len(x) for x in xs])
    starts = sizes.cumsum(0) - sizes
    edge_index = torch.cat([edge + start for edge, start in zip(edges, starts, strict=True)], dim=1)
    return torch.cat(xs), torch.cat([edge_index, edge_index.flip(0)], dim=1), torch.arange(len(xs)).repeat_interleave(sizes), torch.stack(ys)


class GraphConv(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin_rel = Linear(in_channels, out_channels)
        self.lin_root = Linear(in_channels, out_channels, bias=False)

    def forward(self, x, edge_index):
        neighbors = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
        return self.lin_rel(neighbors) + self.lin_root(x)


def global_mean_pool(x, batch):
    size = int(batch.max()) + 1
    sums = x.new_zeros(size, x.size(1)).index_add(0, batch, x)
    return sums / torch.bincount(batch, minlength=size)[:, None]


class GCN(torch.nn.Module):
    def __init__(self, hidden_channels):
        super().__init__()
        self.conv1 = GraphConv(4, hidden_channels)
        self.conv2 = GraphConv(hidden_channels, hidden_channels)
        self.dropout = torch.nn.Dropout(0.5)
        self.lin = Linear(hidden_channels, 2)

    def forward(self, x, edge_index, batch):
        x = self.conv1(x, edge_index).relu()
        x = self.conv2(x, edge_index)
        x = global_mean_pool(x, batch)
        return self.lin(self.dropout(x))


parser = argparse.ArgumentParser()
parser.add_argument('--epochs', type=int, default=10)
args = parser.parse_args()

torch.manual_seed(12345)
device = 'cuda' if torch.cuda.is_available() else 'cpu'
train_dataset, test_dataset = Graphs(120, 0), Graphs(50, 1)
train_loader = DataLoader(train_dataset, batch_size=32, shuffle=True, collate_fn=collate)
test_loader = DataLoader(test_dataset, batch_size=16, shuffle=False, collate_fn=collate)

model = GCN(hidden_channels=16).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
criterion = torch.nn.CrossEntropyLoss()


def train():
    model.train()
    for x, edge_index, batch, y in train_loader:  # Iterate in batches over the training dataset.
        out = model(x.to(device), edge_index.to(device), batch.to(device))
        loss = criterion(out, y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def test(loader):
    model.eval()
    correct = 0
    for x, edge_index, batch, y in loader:
        out = model(x.to(device), edge_index.to(device), batch.to(device))
        pred = out.argmax(dim=1)
        correct += int((pred == y.to(device)).sum())
    return correct / len(loader.dataset)


for epoch in range(args.epochs):
    train()
    print(f'Epoch: {epoch:03d}, Test Acc: {test(test_loader):.4f}')
