"""After karpathy/minGPT: its Trainer, on additions of two numbers of one digit."""
import time
from collections import defaultdict

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader

import lockstep

world = lockstep.init()

# -----------------------------------------------------------------------------


class GPT(nn.Module):
    def __init__(self, vocab_size, block_size, n_embd=16, dropout=0.1):
        super().__init__()
        self.block_size = block_size
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.drop = nn.Dropout(dropout)
        self.ln_1 = nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def configure_optimizers(self, config):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        no_decay = [p for p in self.parameters() if p.dim() < 2]
        optim_groups = [
            {"params": decay, "weight_decay": config.weight_decay},
            {"params": no_decay, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(optim_groups, lr=config.learning_rate, betas=config.betas)

    def forward(self, idx, targets=None):
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device)))
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, dim=2)
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        x = x + self.mlp(self.ln_2(x))
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        for _ in range(max_new_tokens):
            logits, _ = self(idx)
            idx = torch.cat((idx, logits[:, -1:].argmax(2)), dim=1)
        return idx


# -----------------------------------------------------------------------------


class Config:
    device = 'auto'
    num_workers = 0
    max_iters = 40
    batch_size = 64
    learning_rate = 5e-3
    betas = (0.9, 0.95)
    weight_decay = 0.1
    grad_norm_clip = 1.0


class Trainer:

    def __init__(self, config, model, train_dataset):
        self.config = config
        self.model = model
        self.optimizer = None
        self.train_dataset = train_dataset
        self.callbacks = defaultdict(list)

        # determine the device we'll train on
        if config.device == 'auto':
            self.device = 'cuda' if torch.cuda.is_available() else 'cpu'
        else:
            self.device = config.device
        self.model = self.model.to(self.device)

        # variables that will be assigned to trainer class later for logging and etc
        self.iter_num = 0
        self.iter_time = 0.0
        self.iter_dt = 0.0

    def set_callback(self, onevent, callback):
        self.callbacks[onevent] = [callback]

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run(self):
        model, config = self.model, self.config

        # setup the optimizer
        self.optimizer = model.configure_optimizers(config)

        # setup the dataloader
        train_loader = DataLoader(
            self.train_dataset,
            sampler=torch.utils.data.RandomSampler(self.train_dataset, replacement=True, num_samples=config.max_iters * config.batch_size),
            shuffle=False,
            batch_size=config.batch_size,
            num_workers=config.num_workers,
        )

        model, self.optimizer, train_loader = lockstep.prepare(model, self.optimizer, train_loader, micro_batch=16, run='runs/mingpt')

        model.train()
        self.iter_num = train_loader.step
        self.iter_time = time.time()
        data_iter = train_loader.endless()
        while True:

            # fetch the next batch (x, y) and re-init iterator if needed
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            batch = [t.to(self.device) for t in batch]
            x, y = batch

            # forward the model
            logits, self.loss = model(x, y)

            # backprop and update the parameters
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
            self.optimizer.step()
            if not train_loader.stepped:
                continue

            self.trigger_callbacks('on_batch_end')
            self.iter_num += 1
            tnow = time.time()
            self.iter_dt = tnow - self.iter_time
            self.iter_time = tnow

            # termination conditions
            if config.max_iters is not None and self.iter_num >= config.max_iters:
                break


# -----------------------------------------------------------------------------


class AdditionDataset(Dataset):
    """'7' + '8' = '51': the digits of the two numbers, then those of the sum, reversed."""

    def __init__(self, split):
        ixes = torch.randperm(100, generator=torch.Generator().manual_seed(1337))
        self.ixes = ixes[:20] if split == 'test' else ixes[20:]

    def __len__(self):
        return self.ixes.nelement()

    def __getitem__(self, idx):
        a, b = divmod(self.ixes[idx].item(), 10)
        render = f'{a}{b}' + f'{a + b:02d}'[::-1]
        dix = [int(s) for s in render]
        x = torch.tensor(dix[:-1], dtype=torch.long)
        y = torch.tensor(dix[1:], dtype=torch.long)
        y[:1] = -1  # we will only train in the output locations. -1 will mask loss to zero
        return x, y


if __name__ == '__main__':

    torch.manual_seed(3407)

    # construct train and test datasets
    train_dataset = AdditionDataset('train')
    test_dataset = AdditionDataset('test')

    # construct the model
    model = GPT(10, 3)

    # construct the trainer object
    trainer = Trainer(Config, model, train_dataset)

    # helper function for the evaluation of a model
    def eval_split(trainer, split):
        dataset = {'train': train_dataset, 'test': test_dataset}[split]
        results = []
        loader = DataLoader(dataset, batch_size=16, num_workers=0, drop_last=False)
        for x, _ in loader:
            x = x.to(trainer.device)
            # isolate the two numbers alone, and let the model write the sum
            d = model.generate(x[:, :2], 2)
            correct = (d[:, 2] + 10 * d[:, 3] == d[:, 0] + d[:, 1]).cpu()
            results += correct.tolist()
        print(f'{split} final score: {sum(results)}/{len(results)} = {100 * sum(results) / len(results):.2f}% correct')
        return sum(results)

    # iteration callback
    top_score = 0

    def batch_end_callback(trainer):
        global top_score

        if trainer.iter_num % 10 == 0 and world.rank == 0:
            print(f'iter_dt {trainer.iter_dt * 1000:.2f}ms; iter {trainer.iter_num}: train loss {trainer.loss.item():.5f}')

        if trainer.iter_num % 20 == 0:
            # evaluate both the train and test score
            model.eval()
            with torch.no_grad():
                train_score = eval_split(trainer, 'train')
                test_score = eval_split(trainer, 'test')
            score = train_score + test_score
            # save the model if this is the best score we've seen so far
            if score > top_score and world.rank == 0:
                top_score = score
                torch.save(model.state_dict(), 'model.pt')
            # revert model to training mode
            model.train()

    trainer.set_callback('on_batch_end', batch_end_callback)

    # run the optimization
    trainer.run()
