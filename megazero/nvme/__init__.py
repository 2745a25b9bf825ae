"""Keep what a rank trains with on disks: asynchronous direct I/O, files that end with the process, bounded memory."""
