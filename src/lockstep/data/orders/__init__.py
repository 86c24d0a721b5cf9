"""Orders: which sample stands where in an epoch, and, where an order decides that too, which samples share a micro-batch."""

from lockstep.data.orders.order import Batches as Batches
from lockstep.data.orders.order import Order as Order
from lockstep.data.orders.whole import Sequential as Sequential
from lockstep.data.orders.whole import Shuffled as Shuffled
