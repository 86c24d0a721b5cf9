"""After pytorch/examples, vae/main.py, on scikit-learn's digits."""
import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep

world = lockstep.init()

parser = argparse.ArgumentParser(description='VAE MNIST Example')
parser.add_argument('--batch-size', type=int, default=128)
parser.add_argument('--epochs', type=int, default=4)
parser.add_argument('--seed', type=int, default=1)
parser.add_argument('--log-interval', type=int, default=10)
args = parser.parse_args()

torch.manual_seed(args.seed)
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else 'cpu'

images, labels = load_digits(return_X_y=True)
images, labels = torch.Tensor(images) / 16, torch.tensor(labels)
train_loader = DataLoader(
    TensorDataset(images[:1200], labels[:1200]), batch_size=args.batch_size, shuffle=True)
test_loader = DataLoader(
    TensorDataset(images[1200:], labels[1200:]), batch_size=args.batch_size, shuffle=False)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()

        self.fc1 = nn.Linear(64, 40)
        self.fc21 = nn.Linear(40, 8)
        self.fc22 = nn.Linear(40, 8)
        self.fc3 = nn.Linear(8, 40)
        self.fc4 = nn.Linear(40, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)
model, optimizer, train_loader = lockstep.prepare(model, optimizer, train_loader, micro_batch=32, reduction='as is', run='runs/vae')


# Reconstruction + KL divergence losses summed over all elements and batch
def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction='sum')
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


def train(epoch):
    model.train()
    for batch_idx, (data, _) in enumerate(train_loader):
        data = data.to(device)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        lockstep.log(loss=loss.item() / len(data))
        optimizer.step()
        if batch_idx % args.log_interval == 0 and world.rank == 0:
            print(f'Train Epoch: {epoch} ({batch_idx}/{len(train_loader)})\tLoss: {loss.item() / len(data):.6f}')

    print(f'====> Epoch: {epoch} Average loss: {train_loader.logged["loss"]:.4f}')


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for data, _ in lockstep.evaluating(test_loader):
            data = data.to(device)
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar).item()

    test_loss = lockstep.total(loss=test_loss)['loss']
    test_loss /= len(test_loader.dataset)
    print(f'====> Test set loss: {test_loss:.4f}')


if __name__ == "__main__":
    for epoch in train_loader.epochs(args.epochs):
        train(epoch)
        test(epoch)
        with torch.no_grad():
            sample = torch.randn(64, 8).to(device)
            sample = model.decode(sample).cpu()
            if world.rank == 0:
                torch.save(sample.view(64, 1, 8, 8), f'sample_{epoch}.pt')
