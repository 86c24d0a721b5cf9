"""After kuangliu/pytorch-cifar, main.py: a small ResNet on scikit-learn's digits in color."""
import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

import lockstep

world = lockstep.init()


class Images(Dataset):
    def __init__(self, rows, train):
        images, labels = load_digits(return_X_y=True)
        self.images = torch.Tensor(images[rows]).view(-1, 1, 8, 8).repeat(1, 3, 1, 1) / 16
        self.labels = torch.tensor(labels[rows])
        self.train = train

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.train:  # crop with padding, and flip
            i, j = torch.randint(0, 3, (2,)).tolist()
            image = F.pad(image, (1, 1, 1, 1))[:, i:i + 8, j:j + 8]
            if torch.rand(1) < 0.5:
                image = image.flip(2)
        return image, self.labels[index]


class BasicBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_planes, planes, 1, stride=stride, bias=False),
                nn.BatchNorm2d(planes),
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = BasicBlock(8, 8)
        self.layer2 = BasicBlock(8, 16, stride=2)
        self.linear = nn.Linear(16, 10)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer2(self.layer1(out))
        return self.linear(F.avg_pool2d(out, 4).flatten(1))


parser = argparse.ArgumentParser(description='PyTorch CIFAR10 Training')
parser.add_argument('--lr', default=0.1, type=float, help='learning rate')
parser.add_argument('--epochs', default=4, type=int)
args = parser.parse_args()

device = 'cuda' if torch.cuda.is_available() else 'cpu'
best_acc = 0  # best test accuracy

# Data
print('==> Preparing data..')
trainset = Images(slice(0, 1200), train=True)
trainloader = DataLoader(trainset, batch_size=128, shuffle=True, num_workers=2)

testset = Images(slice(1200, 1797), train=False)
testloader = DataLoader(testset, batch_size=100, shuffle=False, num_workers=2)

# Model
print('==> Building model..')
net = ResNet()
net = net.to(device)

criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=args.lr,
                      momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
net, optimizer, trainloader, scheduler = lockstep.prepare(net, optimizer, trainloader, scheduler, micro_batch=32, run='runs/cifar')
best_acc = torch.load('checkpoint/ckpt.pth')['acc'] if trainloader.step and os.path.exists('checkpoint/ckpt.pth') else 0


# Training
def train(epoch):
    print(f'\nEpoch: {epoch}')
    net.train()
    for batch_idx, (inputs, targets) in enumerate(trainloader):
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()

        _, predicted = outputs.max(1)
        lockstep.log(loss=loss.item(), acc=100. * predicted.eq(targets).float().mean())

    print(f'Train loss: {trainloader.logged["loss"]:.3f} | Acc: {trainloader.logged["acc"]:.3f}%')


def test(epoch):
    global best_acc
    net.eval()
    test_loss = 0
    correct = 0
    total = 0
    with torch.no_grad():
        for inputs, targets in lockstep.evaluating(testloader):
            inputs, targets = inputs.to(device), targets.to(device)
            outputs = net(inputs)
            loss = criterion(outputs, targets)

            test_loss += loss.item()
            _, predicted = outputs.max(1)
            total += targets.size(0)
            correct += predicted.eq(targets).sum().item()

    # Save checkpoint.
    correct, total = lockstep.total(correct=correct, total=total).values()
    acc = 100. * correct / total
    print(f'Test acc: {acc:.3f}%')
    if acc > best_acc:
        print('Saving..')
        state = {
            'net': net.state_dict(),
            'acc': acc,
            'epoch': epoch,
        }
        os.makedirs('checkpoint', exist_ok=True)
        if world.rank == 0:
            torch.save(state, './checkpoint/ckpt.pth')
        best_acc = acc


for epoch in trainloader.epochs(args.epochs):
    train(epoch)
    test(epoch)
    scheduler.step()
