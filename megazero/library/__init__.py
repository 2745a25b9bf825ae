"""ZeRO for any torch module: `shard` the module, call it, `backward`, `step`."""
