"""Move messages between ranks without NCCL: shared memory on one host, sockets, a host's copy of device tensors."""
