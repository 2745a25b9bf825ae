"""List the homes of offloaded values that a config may ask for, beyond the device and the host.

A home that is taken out of the table, with its folder, is gone: nothing that trains imports it.
"""

from megazero.comm.home import Homes
from megazero.nvme.opening import open_disk

HOMES: Homes = {"nvme": open_disk}
