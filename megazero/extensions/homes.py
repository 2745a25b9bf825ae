"""List the homes of offloaded values that a config may ask for, beyond the device and the host.

A home that is taken out of the table, with its folder, is gone: no other module imports it.
"""

from megazero.comm.home import Disks, Homes
from megazero.nvme.opening import best_speed, open_disk

HOMES: Homes = {"nvme": Disks(open_disk, best_speed)}
