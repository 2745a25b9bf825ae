"""Extensions of ZeRO: each replaces a part of `zero` and is known to the registry alone."""
