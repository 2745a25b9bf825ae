"""List the homes (places) of offloaded values that a config may name, in addition to the device and the host.

To remove a home, delete its table entry and its folder: no other module imports it.
"""

from megazero.comm.home import Disks, Homes
from megazero.nvme.opening import best_speed, open_disk

HOMES: Homes = {"nvme": Disks(open_disk, best_speed)}
