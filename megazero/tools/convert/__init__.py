"""Exchange weights with transformers."""
