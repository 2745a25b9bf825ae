"""Read, check and explain configs: all options, and the rules between them."""
