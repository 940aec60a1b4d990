"""The simulated world around the manager's core: virtual time, VMs with their trainers, and a store.

In: events, and what a subclass of `World` says that commands and orders bring about, and when. Out: the
core's state after each of its own decisions. A replay drives it by a trace, in whose world nothing goes
wrong but deaths; the seeded histories of the tests drive it by random faults, message by message.
"""

from .beginning import Beginning, begin
from .clock import Clock
from .machines import Trainer, Vm
from .store import Store
from .world import World

__all__ = ["Beginning", "Clock", "Store", "Trainer", "Vm", "World", "begin"]
