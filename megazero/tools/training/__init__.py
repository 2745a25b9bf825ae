"""Start a training run from the command line: early checks, local ranks, the plan of each rank."""
