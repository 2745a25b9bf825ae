"""Keep training state on disks: asynchronous direct I/O, files that vanish with the process, bounded host memory."""
