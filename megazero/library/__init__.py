"""ZeRO for modules of others: `shard` a module, call it, `backward`, `step`."""
