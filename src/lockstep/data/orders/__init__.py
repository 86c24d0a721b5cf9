"""Orders: the sequence of samples in an epoch. Some orders also decide which samples share a
micro-batch.
"""

from lockstep.data.orders.by_length import ByLength as ByLength
from lockstep.data.orders.from_sampler import FromBatches as FromBatches
from lockstep.data.orders.from_sampler import FromSampler as FromSampler
from lockstep.data.orders.mixture import Mixture as Mixture
from lockstep.data.orders.order import Batches as Batches
from lockstep.data.orders.order import BlockShuffled as BlockShuffled
from lockstep.data.orders.order import Order as Order
from lockstep.data.orders.order import Sequential as Sequential
from lockstep.data.orders.order import Shuffled as Shuffled
from lockstep.data.orders.weighted import Weighted as Weighted
