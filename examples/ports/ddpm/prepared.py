"""After dome272/Diffusion-Models-pytorch, ddpm.py with EMA: a small network on scikit-learn's digits."""
import argparse
import copy

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch import optim
from torch.utils.data import DataLoader, TensorDataset

import lockstep

world = lockstep.init()


class Diffusion:
    def __init__(self, noise_steps=100, beta_start=1e-4, beta_end=0.02, device='cpu'):
        self.noise_steps = noise_steps
        self.device = device
        self.beta = torch.linspace(beta_start, beta_end, noise_steps).to(device)
        self.alpha = 1. - self.beta
        self.alpha_hat = torch.cumprod(self.alpha, dim=0)

    def noise_images(self, x, t):
        sqrt_alpha_hat = torch.sqrt(self.alpha_hat[t])[:, None]
        sqrt_one_minus_alpha_hat = torch.sqrt(1 - self.alpha_hat[t])[:, None]
        noise = torch.randn_like(x)
        return sqrt_alpha_hat * x + sqrt_one_minus_alpha_hat * noise, noise

    def sample_timesteps(self, n):
        return torch.randint(1, self.noise_steps, (n,))

    def sample(self, model, n):
        model.eval()
        with torch.no_grad():
            x = torch.randn(n, 64).to(self.device)
            for i in reversed(range(1, self.noise_steps)):
                t = torch.full((n,), i, device=self.device)
                predicted_noise = model(x, t)
                noise = torch.randn_like(x) if i > 1 else torch.zeros_like(x)
                x = (x - self.beta[i] / torch.sqrt(1 - self.alpha_hat[i]) * predicted_noise) / torch.sqrt(self.alpha[i])
                x = x + torch.sqrt(self.beta[i]) * noise
        model.train()
        return x.clamp(-1, 1).view(-1, 8, 8)


class EMA:
    def __init__(self, beta):
        self.beta = beta
        self.step = 0

    def step_ema(self, ema_model, model, step_start_ema=10):
        if self.step < step_start_ema:
            ema_model.load_state_dict(model.state_dict())
        else:
            for ma_params, params in zip(ema_model.parameters(), model.parameters(), strict=True):
                ma_params.data = ma_params.data * self.beta + (1 - self.beta) * params.data
        self.step += 1


class Net(nn.Module):
    def __init__(self, noise_steps=100, width=64):
        super().__init__()
        self.time = nn.Embedding(noise_steps, width)
        self.inc = nn.Linear(64, width)
        self.mid = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 64))

    def forward(self, x, t):
        return self.mid(self.inc(x) + self.time(t))


parser = argparse.ArgumentParser()
parser.add_argument('--epochs', type=int, default=4)
parser.add_argument('--batch_size', type=int, default=64)
parser.add_argument('--lr', type=float, default=3e-3)
args = parser.parse_args()

torch.manual_seed(0)
device = 'cuda' if torch.cuda.is_available() else 'cpu'
images = torch.Tensor(load_digits().data[:600]) / 8 - 1
dataloader = DataLoader(TensorDataset(images), batch_size=args.batch_size, shuffle=True)
model = Net().to(device)
optimizer = optim.AdamW(model.parameters(), lr=args.lr)
mse = nn.MSELoss()
diffusion = Diffusion(device=device)
ema = EMA(0.95)
ema_model = copy.deepcopy(model).eval().requires_grad_(False)
model, ema_model, optimizer, dataloader = lockstep.prepare(model, ema_model, optimizer, dataloader, micro_batch=16, run='runs/ddpm')
ema.step = dataloader.step

for epoch in dataloader.epochs(args.epochs):
    for i, (images,) in enumerate(dataloader):
        images = images.to(device)
        t = diffusion.sample_timesteps(images.shape[0]).to(device)
        x_t, noise = diffusion.noise_images(images, t)
        predicted_noise = model(x_t, t)
        loss = mse(noise, predicted_noise)

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dataloader.stepped:
            ema.step_ema(ema_model, model)

        if i % 5 == 0 and world.rank == 0:
            print(f'epoch {epoch} [{i}/{len(dataloader)}] MSE {loss.item():.4f}')

    if world.rank == 0:
        torch.save(diffusion.sample(ema_model, n=4), f'{epoch}_ema.pt')
        torch.save(model.state_dict(), 'ckpt.pt')
        torch.save(ema_model.state_dict(), 'ema_ckpt.pt')
        torch.save(optimizer.state_dict(), 'optim.pt')
