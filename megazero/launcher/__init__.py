"""Start ranks, connect them, and end them."""
