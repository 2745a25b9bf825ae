"""ZeRO data parallelism: units of flat memory, the events of a step, the update."""
