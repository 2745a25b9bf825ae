"""Start ranks, have them meet, and end them."""
